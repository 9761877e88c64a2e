"""Activations and gradients as bytes, and back: raw, or written by a codec of `quant/`."""

import math

import torch
from torch import Tensor

from farloop.node.pipeline.frames import as_fragment, checksum
from farloop.node.pipeline.words import TensorInfo
from farloop.quant.errors import BadPayload
from farloop.quant.registry import codec_named
from farloop.wire.errors import RemoteProtocolError
from farloop.wire.frames import Buffer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def to_bytes(x: Tensor, codec: str = "") -> tuple[TensorInfo, Buffer]:
    """The tensor as bytes of its own dtype, or in the codec's payload; where it can, without a copy.

    Raises:
        NonFiniteError: a codec met NaN or infinity: the model is broken.
    """
    x = x.detach()
    if codec:
        fragment = as_fragment(x.shape)
        flat = torch.zeros(fragment.numel, device=x.device)
        flat[: x.numel()] = x.flatten()
        raw = codec_named(codec).encode(flat, fragment).cpu()
    else:
        raw = x.cpu().contiguous().flatten().view(torch.uint8)
    data = raw.numpy().data
    dtype = str(x.dtype).removeprefix("torch.")
    info = TensorInfo(shape=tuple(x.shape), dtype=dtype, codec=codec, size=data.nbytes, checksum=checksum(data))
    return info, data


def from_bytes(info: TensorInfo, data: Buffer, device: torch.device, codec: str = "") -> Tensor:
    """The tensor again. `codec`: the one that is used here; bytes of another are not believed.

    Raises:
        RemoteProtocolError: bytes that no such encoder can have written.
    """
    if info.codec != codec:
        raise RemoteProtocolError(f"a tensor written by {info.codec or 'no codec'!r}, here it is {codec or 'none'!r}")
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if not codec:
        return raw.view(DTYPES[info.dtype]).view(info.shape).to(device)
    fragment, how = as_fragment(info.shape), codec_named(codec)
    if len(raw) != how.payload_bytes(fragment):
        raise RemoteProtocolError(f"{len(raw)} bytes of {codec} for shape {info.shape}")
    try:
        how.validate(raw, fragment)
    except BadPayload as error:
        raise RemoteProtocolError(str(error)) from error
    flat = how.decode(raw, fragment)
    return flat[: math.prod(info.shape)].view(info.shape).to(device, DTYPES[info.dtype])
