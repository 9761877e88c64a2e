"""The kernels against the reference, byte for byte.

`test_path.py` runs this file in processes of its own: Triton decides when it is imported whether it interprets kernels
(then they take CPU tensors) or compiles them.

Buffers are filled with a pattern beforehand, so that a byte that is not written shows.
"""

from typing import overload

import pytest
import torch
from torch import Tensor
from triton import knobs

from farloop.algo.outer_optimizers import OuterSettings, outer_step_
from farloop.algo.spec import Fragment, TensorSlot
from farloop.quant.codec import flat
from farloop.quant.formats.blocks import BlockCodec
from farloop.quant.kernels.gpu.host import GpuKernels, gpu_kernels
from farloop.quant.registry import codec_named

DEVICE = "cpu" if knobs.runtime.interpret else "cuda"
SPELLINGS = (
    "fp32",
    "bf16",
    "q8",
    "q4",
    "e3m0",
    "q4r",
    "q4r:step=1.3,rounding=nearest",
    "q4r:step=0.01,policy=absolute",
)
LENGTHS = (1, 63, 64, 65, 255, 256, 257, 2048, 4200)
TOP = float(torch.finfo(torch.float32).max)
SEED = 0x9ABCDEF0

torch.set_num_threads(1)

# The interpreter computes with numpy, which remarks on infinite quotients and on NaNs.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


@pytest.fixture(params=SPELLINGS)
def codec(request: pytest.FixtureRequest) -> BlockCodec:
    found = codec_named(request.param)
    assert isinstance(found, BlockCodec)
    return found


@pytest.fixture
def kernels(codec: BlockCodec) -> GpuKernels:
    found = gpu_kernels(codec.kernel_key())
    assert found is not None
    return found


def normal(numel: int, seed: int = 0, size: float = 1e-3) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * size


def hard_numbers() -> dict[str, Tensor]:
    """Blocks in which something is special; all finite."""
    powers = torch.tensor([sign * 1.5 * 2.0**power for power in range(-150, 128) for sign in (1, -1)])
    sizes = normal(4096, size=1.0) * 2.0 ** torch.linspace(-149, 126, 4096)
    unsigned = torch.tensor([0.0, -0.0] * 200 + [-0.0] * 300)
    few = torch.tensor([-1.0, -0.9375, -0.5, -0.0, 0.0, 0.0625, 0.1875, 0.5, 1.0])
    ties = few[torch.randint(9, (1500,), generator=torch.Generator().manual_seed(1))]
    lone = torch.zeros(1024)
    lone[::64] = torch.tensor([2.0**-97, -(2.0**-98), 1.0, -3.0] * 4)
    huge = torch.tensor([TOP, -TOP, 1.0, 0.25 * TOP] * 100)
    thresholds = torch.cat([torch.tensor([s * t * 2.0**p for t in (1.0, 1.5)]) for p in range(-8, 1) for s in (1, -1)])
    sub = torch.tensor([2.0**-149, -(2.0**-149), 2.0**-127, 3 * 2.0**-140] * 70)
    beside = torch.tensor([-8.0, 0.5, 1.5, 2.5, 6.5, -0.5, -1.5] + [0.0] * 57).repeat(8)
    return {
        "powers": powers,
        "sizes": sizes,
        "zeros": unsigned,
        "ties": ties,
        "lone": lone,
        "huge": huge,
        "thresholds": thresholds.repeat(9),
        "denormal": sub,
        "halves": beside,
        "shuffled": torch.cat((powers, huge, sub, unsigned))[torch.randperm(1636, generator=torch.Generator())],
    }


@overload
def on(tensor: Tensor) -> Tensor: ...
@overload
def on(tensor: Tensor | None) -> Tensor | None: ...
def on(tensor: Tensor | None) -> Tensor | None:
    """A copy on the device."""
    return None if tensor is None else tensor.to(DEVICE, copy=True)


def buffer(codec: BlockCodec, fragment: Fragment) -> Tensor:
    return torch.full((codec.payload_bytes(fragment),), 0xA5, dtype=torch.uint8, device=DEVICE)


def same_bits(got: Tensor, expected: Tensor) -> bool:
    """−0 is not 0 here."""
    return torch.equal(got.cpu().view(torch.uint8), expected.view(torch.uint8))


def by_reference(codec: BlockCodec, v: Tensor, fragment: Fragment) -> tuple[Tensor, Tensor]:
    """The payload of v, and what it decodes to."""
    out = torch.full((codec.payload_bytes(fragment),), 0x5A, dtype=torch.uint8)
    codec.encode_by_reference(v, out, fragment, seed=SEED)
    decoded = torch.empty(fragment.numel)
    codec.decode_by_reference(out, decoded)
    return out, decoded


@pytest.mark.parametrize("numel", LENGTHS)
def test_payloads_of_all_lengths(codec: BlockCodec, kernels: GpuKernels, numel: int) -> None:
    x, out = normal(numel), buffer(codec, flat(numel))
    assert kernels.encode(on(x), out, numel=numel, seed=SEED) == -1
    assert same_bits(out, by_reference(codec, x, flat(numel))[0])


@pytest.mark.parametrize("name", hard_numbers())
def test_payloads_and_residuals_of_hard_numbers(codec: BlockCodec, kernels: GpuKernels, name: str) -> None:
    x = hard_numbers()[name]
    fragment, residual = flat(x.numel()), torch.zeros(x.numel(), device=DEVICE)
    out = buffer(codec, fragment)
    assert kernels.encode(on(x), out, numel=x.numel(), seed=SEED, residual=residual, beta=1.0) == -1
    v = x + torch.zeros(x.numel())  # −0 + 0 is +0
    expected, decoded = by_reference(codec, v, fragment)
    assert same_bits(out, expected)
    assert same_bits(residual, v - decoded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("feedback", [False, True])
def test_the_delta_is_taken_and_what_it_loses_remembered(
    codec: BlockCodec, kernels: GpuKernels, dtype: torch.dtype, feedback: bool
) -> None:
    numel = 2500
    anchor = normal(numel, 1, size=1.0)
    anchor[:8] = torch.tensor([2.0**-140, -(2.0**-130), 1e-6, -6e-8, 0.0, -0.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8])
    local = (anchor + normal(numel, 2)).to(dtype)
    residual = normal(numel, 3, size=1e-4) if feedback else None
    v = anchor.to(dtype).float() - local.float()
    if residual is not None:
        v = v + residual * 0.95
    expected, decoded = by_reference(codec, v, flat(numel))
    out, moved = buffer(codec, flat(numel)), on(residual)
    bad = kernels.encode(on(anchor), out, numel=numel, local=on(local), residual=moved, beta=0.95, seed=SEED)
    assert bad == -1
    assert same_bits(out, expected)
    if moved is not None:
        assert same_bits(moved, v - decoded)


def test_tensors_encoded_one_by_one_are_the_fragment_encoded_at_once(codec: BlockCodec, kernels: GpuKernels) -> None:
    """The second ends 156 elements before the third begins, so that blocks of padding have to be written."""
    places = ((0, 512), (512, 100), (768, 2000), (2816, 77))
    slots = tuple(TensorSlot(name=str(start), shape=(size,), offset=start) for start, size in places)
    fragment = Fragment(index=0, slot=0, numel=3072, tensors=slots)
    x, out = torch.zeros(3072), buffer(codec, fragment)
    for start, size in reversed(places):
        x[start : start + size] = normal(size, start)
        part = on(x[start : start + size])
        assert kernels.encode(part, out, numel=3072, seed=SEED, start=start) == -1
    assert same_bits(out, by_reference(codec, x, fragment)[0])


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float16])
def test_the_first_number_that_is_not_finite_is_found(
    codec: BlockCodec, kernels: GpuKernels, dtype: torch.dtype | None
) -> None:
    """Infinities, and NaNs of few and of many ones."""
    numel = 2500
    worst = torch.tensor([0x7F800000, -0x800000, 0x7FC00000, 0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32)
    local = None if dtype is None else on(torch.ones(numel, dtype=dtype))
    for bits, places in zip(worst, ([0], [2499, 2100], [1037, 1036, 63], [2047], [2048], [300, 31, 32]), strict=True):
        x = normal(numel)
        x[places] = bits.view(torch.float32)
        assert kernels.encode(on(x), buffer(codec, flat(numel)), numel=numel, local=local) == min(places)


def test_a_difference_may_overflow(codec: BlockCodec, kernels: GpuKernels) -> None:
    x, local = torch.zeros(300), torch.zeros(300)
    x[200], local[200] = TOP, -TOP
    assert kernels.encode(on(x), buffer(codec, flat(300)), numel=300, local=on(local)) == 200


def test_payloads_at_odd_addresses_are_copied(codec: BlockCodec, kernels: GpuKernels) -> None:
    x, fragment = normal(300), flat(300)
    size = codec.payload_bytes(fragment)
    out = torch.full((size + 1,), 0xA5, dtype=torch.uint8, device=DEVICE)[1:]
    assert kernels.encode(on(x), out, numel=300, seed=SEED) == -1
    expected, decoded = by_reference(codec, x, fragment)
    assert same_bits(out, expected)
    acc = torch.empty(300, device=DEVICE)
    kernels.add([out], [1.0], acc, overwrite=True)
    assert same_bits(acc, decoded + 0.0)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("count", [1, 3, 35])
def test_sums_add_payload_after_payload(codec: BlockCodec, kernels: GpuKernels, count: int, overwrite: bool) -> None:
    numel = 2049
    payloads = [by_reference(codec, normal(numel, k), flat(numel))[0] for k in range(count)]
    weights = [0.1 + k / 7 for k in range(count)]
    acc = normal(numel, 99)
    acc[:100] = -0.0
    got = on(acc)
    kernels.add([on(payload) for payload in payloads], weights, got, overwrite=overwrite)
    if overwrite:
        acc.zero_()
    for payload, weight in zip(payloads, weights, strict=True):
        decoded = torch.empty(numel)
        codec.decode_by_reference(payload, decoded)
        acc += decoded * weight
    assert same_bits(got, acc)


def test_every_byte_of_codes_decodes(codec: BlockCodec, kernels: GpuKernels) -> None:
    """Those that no encoder writes, too: a peer may send them. Scales are 0, and of both signs."""
    numel = 256 * 16
    payload = by_reference(codec, torch.ones(numel), flat(numel))[0]
    if codec.scale_bits:
        codes_start = payload.numel() - numel * codec.code_bits // 8
        payload[codes_start:] = torch.arange(payload.numel() - codes_start) % 256
        scales = payload[: 2 * (numel // codec.block)].view(torch.int16)
        scales[0::3], scales[1::3], scales[2::3] = 0, 0x3DCD, -0x4233
    expected, acc = torch.empty(numel), torch.full((numel,), -0.0, device=DEVICE)
    codec.decode_by_reference(payload, expected)
    kernels.add([on(payload)], [1.0], acc, overwrite=False)
    assert same_bits(acc, expected)  # t + −0 is t, bit for bit
    kernels.decode_into(on(payload), acc, numel=numel)
    assert same_bits(acc, expected)


@pytest.mark.parametrize(("start", "length"), [(0, 4200), (0, 1), (256, 300), (2048, 2048), (4096, 104)])
def test_parts_decode_alone(codec: BlockCodec, kernels: GpuKernels, start: int, length: int) -> None:
    payload, decoded = by_reference(codec, normal(4200), flat(4200))
    out = torch.full((length + 1,), 9.0, device=DEVICE)
    kernels.decode_into(on(payload), out[:length], numel=4200, start=start)
    assert same_bits(out[:length], decoded[start : start + length])
    assert out[length] == 9.0


@pytest.mark.parametrize(("numel", "mu"), [(1, 0.9), (2048, 0.9), (2500, 0.9), (2500, 0.0)])
@pytest.mark.parametrize("in_place", [False, True])
def test_the_outer_step_is_that_of_algo(
    codec: BlockCodec, kernels: GpuKernels, numel: int, mu: float, in_place: bool
) -> None:
    delta, anchor = normal(numel, 1), normal(numel, 2, size=1.0)
    target = anchor + normal(numel, 3, size=1e-4)
    momentum = normal(numel, 4) if mu else None
    d, t, m, a = on(delta), on(target), on(momentum), on(anchor)
    new_t, new_a = (t, a) if in_place else (torch.full_like(t, 9.0), torch.full_like(a, 9.0))
    new_m = m if in_place or m is None else torch.full_like(m, 9.0)
    out = buffer(codec, flat(numel))
    bad = kernels.outer(
        d, t, m, a, lr=0.7, mu=mu, out=out, new_target=new_t, new_momentum=new_m, new_anchor=new_a, seed=SEED
    )
    outer_step_(target, momentum, delta, OuterSettings(lr=0.7, momentum=mu))
    expected, decoded = by_reference(codec, target - anchor, flat(numel))
    assert bad == -1
    assert same_bits(out, expected)
    assert same_bits(new_t, target)
    assert same_bits(new_a, anchor + decoded)
    assert momentum is None or (new_m is not None and same_bits(new_m, momentum))


def test_an_outer_step_that_is_not_finite_says_where(kernels: GpuKernels, codec: BlockCodec) -> None:
    x = torch.zeros(600, device=DEVICE)
    delta = on(x)
    delta[[555, 444]] = float("inf")
    bad = kernels.outer(
        delta,
        on(x),
        on(x),
        on(x),
        lr=0.7,
        mu=0.9,
        out=buffer(codec, flat(600)),
        new_target=on(x),
        new_momentum=on(x),
        new_anchor=on(x),
    )
    assert bad == 444


@pytest.mark.parametrize("spelling", ["q4r:step=0.5/2/1", "q4r:step=1e-30/1/0.01"])
def test_blocks_may_have_steps_of_their_own(spelling: str) -> None:
    codec = codec_named(spelling)
    assert isinstance(codec, BlockCodec)
    kernels = gpu_kernels(codec.kernel_key())
    assert kernels is not None
    slots = tuple(TensorSlot(name=str(start), shape=(512,), offset=start) for start in (0, 512, 1024))
    fragment = Fragment(index=0, slot=0, numel=1536, tensors=slots)
    x, out = normal(1536), buffer(codec, fragment)
    assert kernels.encode(on(x), out, numel=1536, seed=SEED, steps=codec.steps(fragment)) == -1
    assert same_bits(out, by_reference(codec, x, fragment)[0])
    with pytest.raises(ValueError, match="steps"):
        kernels.encode(on(x), out, numel=1536)


def test_seeds_change_what_is_random_alone(codec: BlockCodec, kernels: GpuKernels) -> None:
    x, payloads = normal(2048), []
    for seed in (1, 2):
        payloads.append(buffer(codec, flat(2048)))
        kernels.encode(on(x), payloads[-1], numel=2048, seed=seed)
    assert torch.equal(*payloads) is codec.traits.deterministic


def test_rows_count_beyond_31_bits() -> None:
    """Element 2³¹ + 256 and after."""
    if DEVICE == "cpu":
        pytest.skip("a payload of 1 GiB for three blocks: not where memory is everyone's")
    codec = codec_named("q4r:step=1")
    assert isinstance(codec, BlockCodec)
    kernels = gpu_kernels(codec.kernel_key())
    assert kernels is not None
    numel, start = 2**31 + 1024, 2**31 + 256
    out = torch.empty(kernels.layout.payload_bytes(numel), dtype=torch.uint8, device=DEVICE)
    x = normal(768)
    assert kernels.encode(on(x), out, numel=numel, seed=SEED, start=start) == -1
    slots = (TensorSlot(name="x", shape=(768,), offset=0),)
    scales, codes = codec.encode_tile(
        x,
        x.view(torch.int32) & 0x7FFFFFFF,
        start=start,
        fragment=Fragment(index=0, slot=0, numel=768, tensors=slots),
        seed=SEED,
    )
    assert same_bits(out[2 * (start // 256) :][: scales.numel() * 2], scales.view(torch.uint8))
    assert same_bits(out[-codes.numel() :], codes)
