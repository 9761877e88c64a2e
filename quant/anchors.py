"""A snapshot: an anchor as it is, fp32, in a blob that says of which fragment and version it is."""

from typing import Final

import torch
from torch import Tensor

from farloop.algo.spec import Fragment
from farloop.quant.blob import BlobHeader, Expected, pack_blob, parse_blob
from farloop.quant.registry import codec_named

_ANY_EPOCH: Final = (1 << 32) - 1
"""The largest that a blob's header can name."""


def pack_anchor(anchor: Tensor, fragment: Fragment, version: int, epoch: int) -> bytearray:
    """The blob of an anchor, fp32 [numel] on any device."""
    codec = codec_named("fp32")
    header = BlobHeader(codec=codec, fragment=fragment, version=version, base=version, epoch=epoch)
    return pack_blob(header, codec.encode(anchor, fragment))


def unpack_anchor(data: bytes | bytearray, fragment: Fragment, version: int) -> Tensor:
    """The anchor in a blob that was made under whichever epoch, fp32 [numel]. Raises BadBlob."""
    codec, anchor = codec_named("fp32"), torch.zeros(fragment.numel)
    expect = Expected(codecs=(codec,), fragment=fragment, version=version, base=version, newest_epoch=_ANY_EPOCH)
    codec.decode_into(parse_blob(data, expect)[1], anchor, fragment)
    return anchor
