"""Compiled kernels on the CPU give what the reference gives, composed of torch operations: every byte, every number."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from farloop.algo.outer_optimizers import OuterSettings, outer_step_
from farloop.quant.codec import flat
from farloop.quant.formats.blocks import BlockCodec
from farloop.quant.kernels.cpu.kernels import CpuKernels, cpu_kernels
from farloop.quant.registry import codec_named

SPELLINGS = (
    "fp32",
    "bf16",
    "q8",
    "q4",
    "e3m0",
    "q4r",
    "q4r:rounding=nearest,step=0.7",
    "q4r:policy=absolute,step=0.001",
    "q4r:policy=absolute,rounding=nearest,step=0.001",
)
SIZES = (0, 1, 63, 64, 65, 255, 256, 257, 1000, 4096)
SEED = 0xDEADBEEF
ROUNDS = 8


def both(spelling: str) -> tuple[BlockCodec, CpuKernels]:
    codec = codec_named(spelling)
    assert isinstance(codec, BlockCodec)
    kernels = cpu_kernels(
        codec.name,
        stochastic=getattr(codec, "rounding", "stochastic") == "stochastic",
        absolute=getattr(codec, "policy", "relative") == "absolute",
    )
    assert kernels is not None
    return codec, kernels


def normal(numel: int, seed: int = 0, deviation: float = 1e-3) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * deviation


def at_odd_address(payload: Tensor) -> Tensor:
    moved = torch.empty(payload.numel() + 1, dtype=torch.uint8)[1:]
    return moved.copy_(payload)


def reference_payload(codec: BlockCodec, x: Tensor, seed: int = SEED) -> Tensor:
    out = torch.full((codec.payload_bytes(flat(x.numel())),), 0xEE, dtype=torch.uint8)
    codec.encode_by_reference(x, out, flat(x.numel()), seed=seed)
    return out


def reference_decoded(codec: BlockCodec, payload: Tensor, numel: int) -> Tensor:
    num_blocks = -(-numel // codec.block)
    out = torch.empty(num_blocks * codec.block)
    if numel:
        num_code_bytes = num_blocks * codec.block * codec.code_bits // 8
        scales = payload[: num_blocks * codec.scale_bits // 8].clone().view(torch.int16)
        codec.decode_tile_into(scales, payload[payload.numel() - num_code_bytes :].clone(), out)
    return out[:numel]


def encoded(codec: BlockCodec, kernels: CpuKernels, x: Tensor, **options: object) -> Tensor:
    """At an odd address, over bytes that are not zero."""
    fragment = flat(x.numel())
    out = at_odd_address(torch.full((codec.payload_bytes(fragment),), 0xEE, dtype=torch.uint8))
    bad = kernels.encode(x, out, numel=x.numel(), seed=SEED, steps=codec.steps(fragment), **options)  # type: ignore[arg-type]
    assert bad == -1
    return out


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    return torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


def special_inputs() -> dict[str, Tensor]:
    ramp = torch.linspace(-1, 1, 1024)
    signs = torch.where(torch.arange(1024) % 3 == 0, -1.0, 1.0)
    return {
        "zeros of both signs": 0.0 * signs,
        "ties of the largest magnitude": signs,
        "subnormal numbers": normal(1024) * 1e-37,
        "around the smallest scale": ramp * 2.0**-97,
        "around the smallest scale of absolute steps": ramp * 2.0**-100,
        "huge numbers": ramp * 3.4e38,
        "the largest number": torch.full((1024,), torch.finfo(torch.float32).max) * signs,
        "halves of codes": (torch.arange(1024) % 33 - 16) / 16,
        "one element in a block": torch.where(torch.arange(1024) % 256 == 77, ramp, 0.0),
        "every exponent": torch.ldexp(ramp, torch.arange(1024) // 4 - 130),
    }


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_payloads_of_all_sizes_are_the_references(spelling: str) -> None:
    codec, kernels = both(spelling)
    for numel in SIZES:
        x = normal(numel, seed=numel)
        assert torch.equal(encoded(codec, kernels, x), reference_payload(codec, x)), numel


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_payloads_of_special_numbers_are_the_references(spelling: str) -> None:
    codec, kernels = both(spelling)
    for name, x in special_inputs().items():
        payload = encoded(codec, kernels, x)
        assert torch.equal(payload, reference_payload(codec, x)), name
        out = torch.full_like(x, 7.0)
        kernels.decode_into(payload, out, numel=x.numel())
        assert same_bits(out, reference_decoded(codec, payload, x.numel())), name


@pytest.mark.parametrize("spelling", SPELLINGS)
@settings(max_examples=60, deadline=None)
@given(
    words=st.lists(
        st.integers(0, 0xFF7FFFFF).filter(lambda word: word & 0x7F800000 != 0x7F800000), min_size=1, max_size=8
    ),
    numel=st.integers(1, 700),
    seed=st.integers(0, 2**32 - 1),
)
def test_payloads_of_any_bit_patterns_are_the_references(
    spelling: str, words: list[int], numel: int, seed: int
) -> None:
    codec, kernels = both(spelling)
    patterns = torch.tensor(words, dtype=torch.int64).to(torch.int32).view(torch.float32)
    x = patterns[torch.arange(numel) * 7 % len(words)]
    out = torch.empty(codec.payload_bytes(flat(numel)), dtype=torch.uint8)
    assert kernels.encode(x, out, numel=numel, seed=seed, steps=codec.steps(flat(numel))) == -1
    assert torch.equal(out, reference_payload(codec, x, seed))


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_first_number_that_is_not_finite_is_found(spelling: str, bad: float) -> None:
    codec, kernels = both(spelling)
    for numel in (1, 64, 700):
        out = torch.empty(codec.payload_bytes(flat(numel)), dtype=torch.uint8)
        for place in (0, numel // 2, numel - 1):
            x = normal(numel)
            x[place:] = bad
            assert kernels.encode(x, out, numel=numel, steps=codec.steps(flat(numel))) == place


def test_a_nan_is_found_whatever_its_bits() -> None:
    _, kernels = both("q4")
    out = torch.empty(128, dtype=torch.uint8)
    for word in (0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF):
        x = normal(64)
        x.view(torch.int32)[5] = word
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert kernels.encode(x, out[: 64 + 32], numel=64, local=torch.zeros(64, dtype=dtype)) == 5


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [1, 257, 1024])
def test_deltas_and_residuals_are_the_references(spelling: str, dtype: torch.dtype, numel: int) -> None:
    codec, kernels = both(spelling)
    anchor = normal(numel, deviation=0.1)
    anchor[::5] *= 2.0**-17  # fp16's subnormal numbers
    local = (anchor + normal(numel, 1)).to(dtype)
    residual = normal(numel, 2)
    v = anchor.to(dtype).float() - local.float()
    assert torch.equal(encoded(codec, kernels, anchor, local=local), reference_payload(codec, v))
    v += residual * 0.9
    payload = reference_payload(codec, v)
    assert torch.equal(encoded(codec, kernels, anchor, local=local, residual=residual, beta=0.9), payload)
    assert same_bits(residual, v - reference_decoded(codec, payload, numel))


@settings(max_examples=300, deadline=None)
@given(words=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=64, max_size=64))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_anchors_are_cast_as_torch_casts(dtype: torch.dtype, words: list[int]) -> None:
    _, kernels = both("fp32")
    x = torch.tensor(words, dtype=torch.int32).view(torch.float32)
    finite = x.to(dtype).isfinite()
    out = torch.empty(256, dtype=torch.uint8)
    bad = kernels.encode(x, out, numel=64, local=torch.zeros(64, dtype=dtype))
    assert bad == (-1 if bool(finite.all()) else int((~finite).nonzero()[0]))
    x = torch.where(finite, x, 0.0)
    assert kernels.encode(x, out, numel=64, local=torch.full((64,), -0.0).to(dtype)) == -1
    assert torch.equal(out.view(torch.float32), x.to(dtype).float() + 0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_local_weights_are_read_as_torch_reads_them(dtype: torch.dtype) -> None:
    _, kernels = both("fp32")
    local = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    local = local[local.isfinite()]
    numel = local.numel()
    out = torch.empty(4 * numel, dtype=torch.uint8)
    assert kernels.encode(torch.zeros(numel), out, numel=numel, local=local) == -1
    assert same_bits(out.view(torch.float32), 0.0 - local.float())


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_parts_of_a_fragment_make_the_payload_of_the_whole(spelling: str) -> None:
    codec, kernels = both(spelling)
    x = normal(1100)
    out = torch.zeros(codec.payload_bytes(flat(1100)), dtype=torch.uint8)
    for start, end in ((512, 1100), (0, 256), (256, 512)):
        kernels.encode(x[start:end], out, numel=1100, seed=SEED, steps=codec.steps(flat(1100)), start=start)
    assert torch.equal(out, reference_payload(codec, x))
    decoded = torch.empty(1100)
    for start, end in ((512, 1100), (0, 256), (256, 512)):
        kernels.decode_into(at_odd_address(out), decoded[start:end], numel=1100, start=start)
    assert same_bits(decoded, reference_decoded(codec, out, 1100))


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("numel", [0, 1, 257, 30000])
def test_sums_round_twice_and_in_order(spelling: str, numel: int) -> None:
    codec, kernels = both(spelling)
    payloads = [at_odd_address(reference_payload(codec, normal(numel, seed))) for seed in range(5)]
    weights = [1 / 3, 0.1, 0.7, -1.3, 1e-3]
    acc = normal(numel, 9)
    expected = acc.clone()
    total = torch.zeros(numel)
    for payload, weight in zip(payloads, weights, strict=True):
        u = reference_decoded(codec, payload, numel) * torch.tensor(weight)
        expected += u
        total += u
    kernels.add(payloads, weights, acc, overwrite=False)
    assert same_bits(acc, expected)
    kernels.add(payloads, weights, acc, overwrite=True)
    assert same_bits(acc, total)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_byte_decodes_as_the_reference_decodes_it(spelling: str) -> None:
    codec, kernels = both(spelling)
    numel = 2048
    payload = reference_payload(codec, normal(numel))
    num_code_bytes = numel * codec.code_bits // 8
    codes = torch.arange(num_code_bytes) * 37 % 256
    if codec.scale_bits:  # of formats without, not every code is a finite number
        payload[payload.numel() - num_code_bytes :] = codes.to(torch.uint8)
    out = torch.empty(numel)
    kernels.decode_into(payload, out, numel=numel)
    assert same_bits(out, reference_decoded(codec, payload, numel))


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("numel", [1, 257, 1024])
@pytest.mark.parametrize("momentum", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
def test_outer_steps_are_the_references(spelling: str, numel: int, momentum: bool, in_place: bool) -> None:
    codec, kernels = both(spelling)
    steps = codec.steps(flat(numel))
    target, anchor = normal(numel, 1, 0.1), normal(numel, 2, 0.1)
    buffer = torch.zeros(numel) if momentum else None
    expected = [each.clone() if each is not None else None for each in (target, anchor, buffer)]
    for step in range(ROUNDS):
        delta = normal(numel, 10 + step)
        old_target, old_anchor, old_buffer = expected
        assert old_target is not None and old_anchor is not None
        outer_step_(old_target, old_buffer, delta, OuterSettings(lr=0.7, momentum=0.9 if momentum else 0.0))
        payload = reference_payload(codec, old_target - old_anchor)
        old_anchor += reference_decoded(codec, payload, numel)

        out = at_odd_address(torch.full_like(payload, 0xEE))
        new = [each if in_place or each is None else torch.empty_like(each) for each in (target, buffer, anchor)]
        bad = kernels.outer(
            *(delta, target, buffer, anchor),
            lr=0.7,
            mu=0.9,
            out=out,
            new_target=new[0],  # type: ignore[arg-type]
            new_momentum=new[1],
            new_anchor=new[2],  # type: ignore[arg-type]
            seed=SEED,
            steps=steps,
        )
        target, buffer, anchor = new[0], new[1], new[2]  # type: ignore[assignment]
        assert bad == -1
        assert torch.equal(out, payload)
        assert same_bits(target, old_target) and same_bits(anchor, old_anchor)
        assert buffer is None or (old_buffer is not None and same_bits(buffer, old_buffer))


def test_an_outer_step_tells_where_its_update_is_not_finite() -> None:
    _, kernels = both("q4")
    zeros, anchor = torch.zeros(300), torch.zeros(300)
    anchor[270] = math.nan
    out = torch.empty(64 + 320 // 2, dtype=torch.uint8)
    new = [torch.empty(300) for _ in range(3)]
    bad = kernels.outer(
        *(zeros, zeros, zeros, anchor),
        lr=0.7,
        mu=0.9,
        out=out,
        new_target=new[0],
        new_momentum=new[1],
        new_anchor=new[2],
    )
    assert bad == 270


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_any_number_of_threads_writes_the_same_bytes(spelling: str) -> None:
    codec, kernels = both(spelling)
    numel = 3 * 2**17 + 1234
    x = normal(numel)
    payload = reference_payload(codec, x)
    decoded = reference_decoded(codec, payload, numel)
    for threads in (1, 2, 3):
        residual = torch.zeros(numel)
        assert torch.equal(encoded(codec, kernels, x, residual=residual, threads=threads), payload)
        assert same_bits(residual, x - decoded)
        acc = torch.ones(numel)
        kernels.add([payload, payload], [0.1, 0.2], acc, overwrite=True, threads=threads)
        assert same_bits(acc, decoded * 0.1 + decoded * 0.2 + 0.0)
        x[numel - 1] = math.nan
        x[2**18 :: 5] = math.nan
        assert kernels.encode(x, payload.clone(), numel=numel, steps=codec.steps(flat(numel)), threads=threads) == 2**18
        x = normal(numel)


def test_formats_without_kernels_have_none() -> None:
    assert cpu_kernels("topk") is None
