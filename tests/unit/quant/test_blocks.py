"""Laws of the formats that are blocks with a scale each: their layout, and the walk over tiles. Protocol N."""

import dataclasses
from bisect import bisect
from itertools import pairwise

import pytest
import torch
from codec_cases import gaussian, of_shapes, same_bits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from farloop.algo.shards import Range, part_of
from farloop.algo.spec import TILE
from farloop.quant.codec import Codec, flat
from farloop.quant.errors import BadPayload, NonFiniteError
from farloop.quant.formats import blocks
from farloop.quant.formats.blocks import BlockCodec
from farloop.quant.registry import CODECS, codec_named

LENGTHS = [0, 1, 63, 64, 65, 255, 256, 257, 4096]


BLOCKS = {name: codec for name, codec in CODECS.items() if isinstance(codec, BlockCodec)}
pytestmark = pytest.mark.usefixtures("one_thread")
every_codec = pytest.mark.parametrize("codec", BLOCKS.values(), ids=BLOCKS.keys())
with_scales = pytest.mark.parametrize(
    "codec", [codec for codec in BLOCKS.values() if (16 * codec.layout.has_scales)], ids=lambda codec: codec.name
)


def encode(codec: Codec, x: Tensor) -> Tensor:
    return codec.encode(x, flat(x.numel()))


@every_codec
@pytest.mark.parametrize("numel", [*LENGTHS, TILE, TILE + 1, (1 << 31) + 64])
def test_a_payload_is_scales_then_alignment_then_codes(codec: BlockCodec, numel: int) -> None:
    num_blocks = (numel + codec.block - 1) // codec.block
    scales = num_blocks * (16 * codec.layout.has_scales) // 8
    codes = num_blocks * codec.block * codec.code_bits // 8
    assert codec.payload_bytes(flat(numel)) == (scales + 63) // 64 * 64 + codes


WHOLE = of_shapes((40, 90), (7,), (TILE // 512 + 3, 512), (100,), (300,))


@pytest.mark.parametrize("path", ["kernels", "reference"])
@pytest.mark.parametrize("spelling", [*BLOCKS, "q4r:step=0.5/0.7/1/1.4/2", "q4r:policy=absolute,step=0.001"])
def test_what_ranks_encode_makes_the_whole_payload(spelling: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all codecs that a sharded model may have: scales, codes, residuals and decoded numbers, bit for bit."""
    if path == "reference":
        monkeypatch.setattr(blocks, "fast_path", lambda *_, **__: None)
    codec = dataclasses.replace(codec_named(spelling), beta=0.75)
    assert isinstance(codec, BlockCodec)
    x, before = gaussian(WHOLE), gaussian(WHOLE, 1)
    lost = before.clone()
    fed_back = torch.empty(codec.payload_bytes(WHOLE), dtype=torch.uint8)
    codec.encode_feedback_(x, lost, fed_back, WHOLE, seed=5)
    payload = codec.encode(x, WHOLE, seed=5)
    numbers = codec.decode(payload, WHOLE, seed=5)
    cuts = sorted({*range(0, WHOLE.numel, 60 * 256), WHOLE.numel, *(slot.offset for slot in WHOLE.tensors)})
    offsets = [slot.offset for slot in WHOLE.tensors]
    ranges = [
        Range(rank=(start // 256) % 3, tensor=bisect(offsets, start) - 1, start=start, stop=stop)
        for start, stop in pairwise(cuts)
    ]
    together = [torch.full_like(payload, 0xA5) for _ in range(2)]
    for whole in together:
        whole[codec.layout.gap(WHOLE.numel)] = 0
    for rank in range(3):
        own = part_of(WHOLE, ranges, rank)
        residual = torch.cat([before[index : index + count] for index, _, count in own.runs])
        plain, fed = (torch.full((codec.payload_bytes(own.fragment),), 0xA5, dtype=torch.uint8) for _ in range(2))
        for index, start, count in own.runs:
            here, run = x[index : index + count], residual[start : start + count]
            codec.encode_run(here, plain, WHOLE, own.fragment, index=index, start=start, seed=5)
            codec.encode_run(here, fed, WHOLE, own.fragment, index=index, start=start, seed=5, residual=run)
        assert same_bits(residual, torch.cat([lost[index : index + count] for index, _, count in own.runs]))
        decoded = codec.decode(plain, own.fragment, seed=5)
        assert same_bits(decoded, torch.cat([numbers[index : index + count] for index, _, count in own.runs]))
        for there, here in codec.slices(WHOLE, own.fragment, own.runs):
            together[0][there], together[1][there] = plain[here], fed[here]
    assert torch.equal(together[0], payload) and torch.equal(together[1], fed_back)


@every_codec
def test_what_is_not_finite_in_a_part_is_named_by_its_place_in_the_whole(codec: BlockCodec) -> None:
    x, part = torch.ones(512), flat(768)
    out = torch.empty(codec.payload_bytes(part), dtype=torch.uint8)
    x[300] = torch.inf
    with pytest.raises(NonFiniteError) as refusal:
        codec.encode_run(x, out, WHOLE, part, index=1024, start=256)
    assert refusal.value.index == 1324


@every_codec
def test_tiles_are_encoded_as_if_they_were_alone(codec: BlockCodec) -> None:
    """Protocol N: whoever owns a range of tiles writes its bytes without the others."""
    if codec.name == "q4r":
        nearest = codec_named("q4r:rounding=nearest")  # random bits depend on the place in the fragment
        assert isinstance(nearest, BlockCodec)
        codec = nearest
    numel = TILE + 4096 + 65
    x = gaussian(flat(numel))
    whole, first, second = encode(codec, x), encode(codec, x[:TILE]), encode(codec, x[TILE:])
    scales = [codec.layout.scale_bytes(TILE), codec.layout.scale_bytes(numel - TILE)]
    codes = [TILE * codec.code_bits // 8, second.numel() - (scales[1] + 63) // 64 * 64]
    expected = torch.cat((first[: scales[0]], second[: scales[1]]))
    expected = torch.cat(
        (expected, expected.new_zeros(-expected.numel() % 64), first[-codes[0] :], second[-codes[1] :])
    )
    assert torch.equal(whole, expected)
    parts = codec.decode(first, flat(TILE)), codec.decode(second, flat(numel - TILE))
    assert torch.equal(codec.decode(whole, flat(numel)), torch.cat(parts))


@with_scales
def test_bytes_that_must_be_zero_are_checked(codec: BlockCodec) -> None:
    numel = codec.block + 1
    good = encode(codec, gaussian(flat(numel)))
    between, tail = good.clone(), good.clone()
    between[4] = 1  # two scales of two bytes each, then zeros up to byte 64
    with pytest.raises(BadPayload, match="between scales and codes"):
        codec.validate(between, flat(numel))
    tail[-1] ^= 1
    with pytest.raises(BadPayload, match=r"tail of the last block|padding of a tensor"):
        codec.validate(tail, flat(numel))


@every_codec
def test_bad_numbers_in_a_later_tile_are_found(codec: BlockCodec) -> None:
    numel = TILE + 16384
    payload = encode(codec, gaussian(flat(numel)))
    at = codec.layout.scale_bytes(TILE) or TILE * codec.code_bits // 8
    payload[at : at + 4] = 0xFF  # a NaN in every width
    with pytest.raises(BadPayload, match=r"out of range|not finite"):
        codec.validate(payload, flat(numel))


class LargestAllocation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the largest tensor that an operation returned in memory of its own."""

    def __init__(self, *own: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = {tensor.untyped_storage().data_ptr() for tensor in own}
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


@every_codec
@pytest.mark.parametrize("path", ["the reference", "the fastest"])
def test_no_temporary_is_larger_than_a_tile(codec: BlockCodec, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if path == "the reference":
        monkeypatch.setattr(blocks, "fast_path", lambda *_, **__: None)
    fragment = flat(3 * TILE)
    x, acc = torch.zeros(fragment.numel), torch.zeros(fragment.numel)
    payload = torch.zeros(codec.payload_bytes(fragment), dtype=torch.uint8)
    with LargestAllocation(x, acc, payload) as largest:
        codec.encode_into(x, payload, fragment)
        codec.validate(payload, fragment)
        codec.decode_into(payload, acc, fragment)
        codec.decode_add_(payload, acc, 0.5, fragment)
        codec.sum_into([payload, payload], [0.5, 0.5], acc, fragment, seeds=[0, 0])
        for tile in codec.decoded_tiles(payload, fragment):
            tile.zero_()
        codec.encode_feedback_(x, acc, payload, fragment)
    assert largest.bytes <= 4 * TILE
    if path == "the reference":
        assert largest.bytes > 0
