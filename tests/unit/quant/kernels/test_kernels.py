"""Every backend's kernels give what the reference gives, composed of torch operations: every byte, every number.

By default the kernels are those of the CPU. With KERNELS=triton they are those of a GPU; with TRITON_INTERPRET=1 as
well, Triton interprets them on CPU tensors. `gpu/test_path.py` runs this file like that in processes of its own,
because Triton reads its setting at import. Buffers are filled with a pattern beforehand, so that a byte that is not
written shows.
"""

import math
import os
from collections.abc import Sequence
from itertools import product
from typing import Any, overload

import pytest
import torch
from codec_cases import TOP, hard_numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import examples, mostly_slow
from torch import Tensor

from farloop.algo.outer_optimizers import OuterSettings, step_
from farloop.algo.spec import Fragment, TensorSlot
from farloop.quant.codec import flat
from farloop.quant.digest import digest_by_reference
from farloop.quant.formats.blocks import BlockCodec
from farloop.quant.kernels.cpu.kernels import cpu_kernels
from farloop.quant.kernels.cpu.primitives import kernel_threads
from farloop.quant.kernels.interface import BlockKernels, Encode, Found, OuterStep
from farloop.quant.norm import sums_by_reference
from farloop.quant.registry import codec_named

TRITON = os.environ.get("KERNELS") == "triton"
DEVICE = "cuda" if TRITON and os.environ.get("TRITON_INTERPRET") != "1" else "cpu"
SPELLINGS = (
    "fp32",
    "bf16",
    "q8",
    "q4",
    "e3m0",
    "e2m1",
    "nf4",
    "q4r",
    "q4r:rounding=nearest,step=0.7",
    "q4r:policy=absolute,step=0.001",
    "q4r:policy=absolute,rounding=nearest,step=0.01",
)
ONLY_ENCODED = () if TRITON else ("sign", "lattice")
LENGTHS = (1, 63, 64, 65, 255, 256, 257, 2048, 4200)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SEED = 0xDEADBEEF

# Triton's interpreter computes with numpy, which remarks on infinite quotients and on NaNs.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]
numba_only = pytest.mark.skipif(TRITON, reason="about the compiled CPU kernels")


def both(spelling: str) -> tuple[BlockCodec, BlockKernels]:
    codec = codec_named(spelling)
    assert isinstance(codec, BlockCodec)
    if TRITON:
        from farloop.quant.kernels.gpu.host import gpu_kernels

        kernels: BlockKernels | None = gpu_kernels(codec.kernel_key())
    else:
        kernels = cpu_kernels(codec.kernel_key(), only_encode=True)
    assert kernels is not None
    return codec, kernels


@pytest.fixture(params=SPELLINGS)
def pair(request: pytest.FixtureRequest) -> tuple[BlockCodec, BlockKernels]:
    return both(request.param)


@pytest.fixture(params=(*SPELLINGS, *ONLY_ENCODED))
def encoder(request: pytest.FixtureRequest) -> tuple[BlockCodec, BlockKernels]:
    return both(request.param)


def each_with(spellings: Sequence[str], values: Sequence[Any]) -> list[Any]:
    """The first of `values` with all spellings, and two spellings with all of them; a kernel is compiled for each."""
    cases = list(product(spellings, values))
    return mostly_slow(cases, *(case for case in cases if case[1] == values[0] or case[0] in ("fp32", "q4")))


def normal(numel: int, seed: int = 0, deviation: float = 1e-3) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * deviation


@overload
def on(tensor: Tensor) -> Tensor: ...
@overload
def on(tensor: Tensor | None) -> Tensor | None: ...
def on(tensor: Tensor | None) -> Tensor | None:
    """A copy on the device."""
    return None if tensor is None else tensor.to(DEVICE, copy=True)


def poisoned(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else torch.full_like(tensor, 9.0)


def at_odd_address(data: Tensor) -> Tensor:
    return torch.empty(data.numel() + 1, dtype=torch.uint8, device=DEVICE)[1:].copy_(data)


def buffer(codec: BlockCodec, numel: int) -> Tensor:
    """At an odd address."""
    return at_odd_address(torch.full((codec.payload_bytes(flat(numel)),), 0xA5, dtype=torch.uint8))


def same_bits(got: Tensor, expected: Tensor) -> bool:
    """−0 is not 0 here."""
    return torch.equal(got.cpu().view(torch.uint8), expected.view(torch.uint8))


def reference(codec: BlockCodec, v: Tensor, fragment: Fragment | None = None, seed: int = SEED) -> Tensor:
    """The payload of v."""
    fragment = fragment or flat(v.numel())
    out = torch.full((codec.payload_bytes(fragment),), 0x5A, dtype=torch.uint8)
    codec.encode_by_reference(v, out, fragment, seed=seed)
    return out


def decoded(codec: BlockCodec, payload: Tensor, numel: int) -> Tensor:
    out = torch.full((numel,), torch.nan)
    codec.decode_by_reference(payload, out, flat(numel))
    return out


def encoded(
    codec: BlockCodec,
    kernels: BlockKernels,
    x: Tensor,
    *,
    local: Tensor | None = None,
    residual: Tensor | None = None,
    beta: float = 0.0,
    seed: int = SEED,
) -> Tensor:
    """The payload that kernels write of all of x; the residual is replaced in place."""
    out, moved = buffer(codec, x.numel()), on(residual)
    steps = codec.steps(flat(x.numel()))
    call = Encode(
        x=on(x), out=out, numel=x.numel(), local=on(local), residual=moved, beta=beta, seed=seed, steps=on(steps)
    )
    assert kernels.encode(call) == -1
    if residual is not None and moved is not None:
        residual.copy_(moved)
    return out


def test_payloads_of_all_lengths(encoder: tuple[BlockCodec, BlockKernels]) -> None:
    codec, kernels = encoder
    for numel in LENGTHS:
        x = normal(numel, seed=numel)
        assert same_bits(encoded(codec, kernels, x), reference(codec, x)), numel


@pytest.mark.parametrize("spelling", ONLY_ENCODED)
def test_payloads_of_hard_numbers(spelling: str) -> None:
    codec, kernels = both(spelling)
    assert same_bits(encoded(codec, kernels, hard_numbers()), reference(codec, hard_numbers()))


def test_payloads_residuals_and_numbers_of_hard_numbers(pair: tuple[BlockCodec, BlockKernels]) -> None:
    codec, kernels = pair
    x = hard_numbers()
    payload = reference(codec, x)
    assert same_bits(encoded(codec, kernels, x), payload)
    out = torch.full((x.numel(),), 7.0, device=DEVICE)
    kernels.decode_into(on(payload), out, numel=x.numel())
    assert same_bits(out, decoded(codec, payload, x.numel()))
    v, residual = x + 0.0, torch.zeros_like(x)  # −0 + 0 is +0
    payload = reference(codec, v)
    assert same_bits(encoded(codec, kernels, x, residual=residual, beta=1.0), payload)
    assert same_bits(residual, v - decoded(codec, payload, x.numel()))


@pytest.mark.parametrize("spelling", (*SPELLINGS, *ONLY_ENCODED))
@settings(max_examples=3 if TRITON else examples(10))
@given(
    words=st.lists(
        st.integers(0, 0xFF7FFFFF).filter(lambda word: word & 0x7F800000 != 0x7F800000), min_size=1, max_size=8
    ),
    numel=st.integers(1, 700),
    seed=st.integers(0, 2**32 - 1),
)
def test_payloads_of_any_bit_patterns(spelling: str, words: list[int], numel: int, seed: int) -> None:
    codec, kernels = both(spelling)
    patterns = torch.tensor(words, dtype=torch.int64).to(torch.int32).view(torch.float32)
    x = patterns[torch.arange(numel) * 7 % len(words)]
    assert same_bits(encoded(codec, kernels, x, seed=seed), reference(codec, x, seed=seed))


@pytest.mark.parametrize(("pair", "dtype"), each_with(SPELLINGS, DTYPES[:1] if TRITON else DTYPES), indirect=["pair"])
def test_deltas_and_what_they_lose(pair: tuple[BlockCodec, BlockKernels], dtype: torch.dtype) -> None:
    codec, kernels = pair
    for numel in (2500,) if TRITON else (1, 257, 2500):
        anchor = normal(numel, 1, deviation=0.1)
        anchor[::5] *= 2.0**-17  # fp16's subnormal numbers
        hard = torch.tensor([2.0**-140, -(2.0**-130), 1e-6, -6e-8, 0.0, -0.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8])
        anchor[:8] = hard[:numel]
        local, residual = None if TRITON else (anchor + normal(numel, 2)).to(dtype), normal(numel, 3)
        v = anchor.clone() if local is None else anchor.to(dtype).float() - local.float()
        assert same_bits(encoded(codec, kernels, anchor, local=local), reference(codec, v))
        v += residual * 0.9
        payload = reference(codec, v)
        assert same_bits(encoded(codec, kernels, anchor, local=local, residual=residual, beta=0.9), payload)
        assert same_bits(residual, v - decoded(codec, payload, numel))


@pytest.mark.parametrize(
    ("encoder", "dtype"),
    each_with((*SPELLINGS, *ONLY_ENCODED), [None] if TRITON else [None, *DTYPES]),
    indirect=["encoder"],
)
def test_the_first_bad_number_is_found(encoder: tuple[BlockCodec, BlockKernels], dtype: torch.dtype | None) -> None:
    """Infinities, and NaNs of few and of many ones."""
    codec, kernels = encoder
    numel = 2500
    worst = torch.tensor([0x7F800000, -0x800000, 0x7FC00000, 0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32)
    local = None if dtype is None else on(torch.ones(numel, dtype=dtype))
    steps = on(codec.steps(flat(numel)))
    for bits, places in zip(worst, ([0], [2499, 2100], [1037, 1036, 63], [2047], [2048], [300, 31, 32]), strict=True):
        x = normal(numel)
        x[places] = bits.view(torch.float32)
        call = Encode(x=on(x), out=buffer(codec, numel), numel=numel, local=local, steps=steps)
        assert kernels.encode(call) == min(places)


@numba_only
def test_a_difference_may_overflow(encoder: tuple[BlockCodec, BlockKernels]) -> None:
    codec, kernels = encoder
    x, local = torch.zeros(300), torch.zeros(300)
    x[200], local[200] = TOP, -TOP
    steps = on(codec.steps(flat(300)))
    call = Encode(x=on(x), out=buffer(codec, 300), numel=300, local=on(local), steps=steps)
    assert kernels.encode(call) == 200


@numba_only
@given(words=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=64, max_size=64))
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_anchors_are_cast_as_torch_casts(dtype: torch.dtype, words: list[int]) -> None:
    _, kernels = both("fp32")
    x = torch.tensor(words, dtype=torch.int32).view(torch.float32)
    finite, out = x.to(dtype).isfinite(), torch.empty(256, dtype=torch.uint8)
    bad = kernels.encode(Encode(x=x, out=out, numel=64, local=torch.zeros(64, dtype=dtype)))
    assert bad == (-1 if bool(finite.all()) else int((~finite).nonzero()[0]))
    x = torch.where(finite, x, 0.0)
    assert kernels.encode(Encode(x=x, out=out, numel=64, local=torch.full((64,), -0.0).to(dtype))) == -1
    assert torch.equal(out.view(torch.float32), x.to(dtype).float() + 0.0)


@numba_only
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_local_weights_are_read_as_torch_reads_them(dtype: torch.dtype) -> None:
    codec, kernels = both("fp32")
    local = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    local = local[local.isfinite()]
    out = encoded(codec, kernels, torch.zeros(local.numel()), local=local)
    assert same_bits(out, (0.0 - local.float()).view(torch.uint8))


def test_tensors_encoded_one_by_one_make_the_payload_of_the_fragment(encoder: tuple[BlockCodec, BlockKernels]) -> None:
    """The second ends 156 elements before the third begins, so that blocks of padding have to be written."""
    codec, kernels = encoder
    places = ((0, 512), (512, 100), (768, 2000), (2816, 77))
    slots = tuple(TensorSlot(name=str(start), shape=(size,), offset=start) for start, size in places)
    fragment = Fragment(index=0, slot=0, numel=3072, tensors=slots)
    x, out, steps = torch.zeros(3072), buffer(codec, 3072), on(codec.steps(fragment))
    for start, size in reversed(places):
        x[start : start + size] = normal(size, start)
        part = on(x[start : start + size])
        assert kernels.encode(Encode(x=part, out=out, numel=3072, seed=SEED, steps=steps, start=start)) == -1
    assert same_bits(out, reference(codec, x, fragment))


def test_a_part_has_the_bytes_that_the_whole_payload_has_of_it(encoder: tuple[BlockCodec, BlockKernels]) -> None:
    codec, kernels = encoder
    runs = ((256, 0, 512), (1024, 512, 256), (2304, 768, 768))
    fragment, part, x = flat(3072), flat(1536), normal(3072)
    whole, out, steps = reference(codec, x), buffer(codec, part.numel), on(codec.steps(fragment))
    for index, start, count in runs:
        call = Encode(
            x=on(x[index : index + count]), out=out, numel=part.numel, seed=SEED, steps=steps, start=start,
            ahead=index - start,
        )  # fmt: skip
        assert kernels.encode(call) == -1
    for there, here in codec.slices(fragment, part, runs):
        assert same_bits(out[here], whole[there])


def test_parts_decode_alone(pair: tuple[BlockCodec, BlockKernels]) -> None:
    codec, kernels = pair
    payload = reference(codec, normal(4200))
    whole = decoded(codec, payload, 4200)
    for start, length in ((0, 4200), (0, 1), (256, 300), (2048, 2048), (4096, 104)):
        out = torch.full((length + 1,), 9.0, device=DEVICE)
        kernels.decode_into(at_odd_address(payload), out[:length], numel=4200, start=start)
        assert same_bits(out[:length], whole[start : start + length])
        assert out[length] == 9.0


def test_sums_round_twice_and_in_order(pair: tuple[BlockCodec, BlockKernels]) -> None:
    codec, kernels = pair
    for numel, count in ((1, 1), (257, 3), (2049, 35), *(() if TRITON else ((0, 5), (30000, 5)))):
        payloads = [reference(codec, normal(numel, k)) for k in range(count)]
        weights = [(0.1 + k / 7) * (-1) ** k for k in range(count)]
        acc = normal(numel, 99)
        acc[:100] = -0.0
        got, total = on(acc), torch.zeros(numel)
        for payload, weight in zip(payloads, weights, strict=True):
            u = decoded(codec, payload, numel) * torch.tensor(weight)
            acc += u
            total += u
        moved = [at_odd_address(payload) for payload in payloads]
        kernels.add(moved, weights, got, overwrite=False)
        assert same_bits(got, acc)
        kernels.add(moved, weights, got, overwrite=True)
        assert same_bits(got, total)


def test_every_byte_of_codes_decodes(pair: tuple[BlockCodec, BlockKernels]) -> None:
    """Those that no encoder writes, too: a peer may send them. Scales are 0, and of both signs."""
    codec, kernels = pair
    numel = 256 * 16
    payload = reference(codec, torch.ones(numel))
    if codec.layout.has_scales:  # without scales, not every code is a finite number
        start = codec.layout.codes_start(numel)
        payload[start:] = torch.arange(payload.numel() - start) % 256
        scales = payload[: codec.layout.scale_bytes(numel)].view(torch.int16)
        scales[0::3], scales[1::3], scales[2::3] = 0, 0x3DCD, -0x4233
    expected, acc = decoded(codec, payload, numel), torch.full((numel,), -0.0, device=DEVICE)
    kernels.add([on(payload)], [1.0], acc, overwrite=False)
    assert same_bits(acc, expected)  # t + −0 is t, bit for bit
    kernels.decode_into(on(payload), acc.fill_(7.0), numel=numel)
    assert same_bits(acc, expected)


@numba_only
@pytest.mark.parametrize(
    ("pair", "how"), each_with(SPELLINGS, [(True, True), (True, False), (False, True)]), indirect=["pair"]
)
def test_the_outer_step_is_that_of_algo(pair: tuple[BlockCodec, BlockKernels], how: tuple[bool, bool]) -> None:
    (codec, kernels), (momentum, in_place) = pair, how
    mu = 0.9 if momentum else 0.0
    for numel in (1, 257, 2500, 4096, 9000):
        target, anchor = normal(numel, 1, 0.1), normal(numel, 2, 0.1)
        buffers = torch.zeros(numel) if momentum else None
        t, m, a = on(target), on(buffers), on(anchor)
        for number in range(8):
            payloads = [reference(codec, normal(numel, k)) for k in (number, 10 + number)] if number % 2 else []
            delta = summed(codec, payloads, numel) if payloads else normal(numel, 10 + number)
            state = {} if buffers is None else {"momentum": buffers}
            step_(target, state, delta * 0.75, OuterSettings(lr=0.7, momentum=mu), version=1)
            payload = reference(codec, target - anchor)
            anchor += decoded(codec, payload, numel)
            out = buffer(codec, numel)
            new_t, new_m, new_a = (t, m, a) if in_place else map(poisoned, (t, m, a))
            assert new_t is not None and new_a is not None
            step = OuterStep(
                **{"target": t, "momentum": m, "anchor": a},  # type: ignore[arg-type]
                **{"new_target": new_t, "new_momentum": new_m, "new_anchor": new_a},  # type: ignore[arg-type]
                delta=None if payloads else on(delta),
                payloads=payloads,
                weights=[0.5, 0.25] if payloads else [],
                scale=0.75,
                lr=0.7,
                mu=mu,
                out=out,
                seed=SEED,
                steps=on(codec.steps(flat(numel))),
                measured=number != 5,
            )
            found = kernels.outer(step)
            t, m, a = new_t, new_m, new_a
            assert same_bits(out, payload)
            assert same_bits(t, target) and same_bits(a, anchor)
            assert buffers is None or (m is not None and same_bits(m, buffers))
            assert not step.measured or found == Found(
                tile_sums=sums_by_reference(delta),
                anchor_digest=digest_by_reference(anchor, 0)[0],
                target_digest=digest_by_reference(target, 0)[0],
                momentum_digest=0 if buffers is None else digest_by_reference(buffers, 0)[0],
                largest=max(float(x.abs().max()) for x in (anchor, target, buffers) if x is not None),
            )


def summed(codec: BlockCodec, payloads: list[Tensor], numel: int) -> Tensor:
    total = torch.zeros(numel)
    for payload, weight in zip(payloads, (0.5, 0.25), strict=True):
        total += decoded(codec, payload, numel) * weight
    return total


@numba_only
@pytest.mark.parametrize("place", [0, 4095, 4096, 8999])
def test_an_outer_step_tells_that_an_anchor_is_not_finite(place: int) -> None:
    """An update that rounds up can lead an anchor beyond fp32, though the target is within."""
    _, kernels = both("bf16")
    largest, step = torch.finfo(torch.float32).max, torch.tensor(1.999 * 2.0**126)
    assert step.bfloat16() > step
    old = {name: torch.zeros(9000) for name in ("target", "anchor")}
    old["target"][place], old["anchor"][place] = largest, largest - step
    new = {f"new_{name}": poisoned(tensor) for name, tensor in old.items()}
    finite = []
    for tensors in (old, {**old, "anchor": torch.zeros(9000)}):
        operands = {**tensors, **new, "momentum": None, "new_momentum": None, "delta": torch.zeros(9000)}
        out = torch.empty(2 * 9000, dtype=torch.uint8)
        found = kernels.outer(OuterStep(**operands, lr=1.0, mu=0.0, out=out))  # type: ignore[arg-type]
        assert isinstance(found, Found)
        finite.append(math.isfinite(found.largest))
    assert finite == [False, True]


@numba_only
def test_an_outer_step_tells_where_its_update_is_not_finite(pair: tuple[BlockCodec, BlockKernels]) -> None:
    codec, kernels = pair
    zeros, delta = torch.zeros(600), torch.zeros(600)
    delta[[555, 444]] = math.inf
    names = ("target", "momentum", "anchor", "new_target", "new_momentum", "new_anchor")
    operands = {"delta": on(delta), **{name: on(zeros) for name in names}}
    out, steps = buffer(codec, 600), on(codec.steps(flat(600)))
    assert kernels.outer(OuterStep(**operands, lr=0.7, mu=0.9, out=out, steps=steps)) == 444  # type: ignore[arg-type]


@pytest.mark.parametrize("spelling", ["q4r:step=0.5/2/1", "q4r:step=1e-30/1/0.01"])
def test_blocks_may_have_steps_of_their_own(spelling: str) -> None:
    codec, kernels = both(spelling)
    slots = tuple(TensorSlot(name=str(start), shape=(512,), offset=start) for start in (0, 512, 1024))
    fragment = Fragment(index=0, slot=0, numel=1536, tensors=slots)
    x, out, steps = normal(1536), buffer(codec, 1536), codec.steps(fragment)
    assert kernels.encode(Encode(x=on(x), out=out, numel=1536, seed=SEED, steps=on(steps))) == -1
    assert same_bits(out, reference(codec, x, fragment))


@numba_only
def test_any_number_of_threads_writes_the_same_bytes(pair: tuple[BlockCodec, BlockKernels]) -> None:
    codec, kernels = pair
    numel = 3 * 2**17 + 1234
    x = normal(numel)
    payload = reference(codec, x)
    numbers, bad = decoded(codec, payload, numel), x.clone()
    bad[2**18 :: 5] = math.nan
    for threads in (1, 2, 3):
        with kernel_threads(threads):
            residual = torch.zeros(numel)
            assert same_bits(encoded(codec, kernels, x, residual=residual), payload)
            assert same_bits(residual, x - numbers)
            acc = torch.ones(numel)
            kernels.add([payload, payload], [0.1, 0.2], acc, overwrite=True)
            assert same_bits(acc, numbers * 0.1 + numbers * 0.2 + 0.0)
            call = Encode(x=bad, out=payload.clone(), numel=numel, steps=codec.steps(flat(numel)))
            assert kernels.encode(call) == 2**18


@numba_only
@pytest.mark.parametrize("spelling", ["q4", "fp32"])
def test_threads_do_not_show_in_an_outer_step(spelling: str) -> None:
    codec, kernels = both(spelling)
    numel = 7 * 2**17 + 5000  # two tiles or more for each of seven threads
    payloads, told = [reference(codec, normal(numel, k)) for k in range(2)], []
    for threads in (1, 2, 3, 7):
        tensors = {name: normal(numel, k) for k, name in enumerate(("target", "momentum", "anchor"))}
        out = buffer(codec, numel)
        with kernel_threads(threads):
            found = kernels.outer(
                OuterStep(
                    **tensors,
                    **{f"new_{name}": tensor for name, tensor in tensors.items()},
                    payloads=payloads,
                    weights=[0.5, 0.5],
                    lr=0.7,
                    mu=0.9,
                    out=out,
                    seed=SEED,
                )
            )
        assert isinstance(found, Found)
        told.append((found, digest_by_reference(out.float(), 0)))
    assert all(each == told[0] for each in told)


@pytest.mark.parametrize("numel", [0, 1, 4095, 4096, 4097, 9000])
def test_norms_and_digests_are_those_of_the_reference(numel: int) -> None:
    if TRITON:
        from farloop.quant.kernels.gpu.host import digest, tile_sums
    else:
        from farloop.quant.kernels.cpu.kernels import digest, tile_sums
    x = normal(numel, 1, 1e3) * 10.0 ** (torch.arange(numel) % 13 - 6)
    assert tile_sums(on(x)) == sums_by_reference(x)
    for first in (0, 7, 2**40 + 3, 2**62):
        assert digest(on(x), first) == digest_by_reference(x, first)
    for wrong in (math.nan, -math.inf) if numel else ():
        x[-1] = wrong
        assert digest(on(x), 5) == (digest_by_reference(x, 5)[0], False)


@pytest.mark.skipif(DEVICE == "cpu", reason="a payload of 1 GiB for three blocks")
def test_rows_count_beyond_31_bits() -> None:
    """Element 2³¹ + 256 and after."""
    codec, kernels = both("q4r:step=1")
    numel, start = 2**31 + 1024, 2**31 + 256
    out = torch.empty(codec.payload_bytes(flat(numel)), dtype=torch.uint8, device=DEVICE)
    x = normal(768)
    assert kernels.encode(Encode(x=on(x), out=out, numel=numel, seed=SEED, start=start)) == -1
    blocks = x.view(3, 256)
    magnitude = blocks.view(torch.int32) & 0x7FFFFFFF
    scales, codes = codec.encode_tile(blocks, magnitude, start=start, fragment=flat(numel), seed=SEED)
    assert same_bits(out[2 * (start // 256) :][: scales.numel() * 2], scales.view(torch.uint8))
    assert same_bits(out[-codes.numel() :], codes)
