"""A trial of codecs on a device before training: kernels that cannot run there, or write other bytes than the
reference, are left out with one warning.

Kernels fail for want of a C compiler or of a card that Triton supports, and a driver may compile them to something
else. A trial also compiles them, which would otherwise stall the first send and the first merge.
"""

import logging
from collections.abc import Iterable

import torch
from torch import Tensor

from farloop.quant.codec import Codec, flat
from farloop.quant.digest import digest
from farloop.quant.errors import UnsupportedHost
from farloop.quant.formats.blocks import BlockCodec
from farloop.quant.kernels.dispatch import by_reference, leave_to_reference

_log = logging.getLogger(__name__)

NUMBERS = 4096


def try_codecs(codecs: Iterable[Codec], device: torch.device) -> dict[str, str]:
    """Encode, decode and add `NUMBERS` numbers with each codec on the device, and compare with the reference on a CPU.

    A codec whose kernels fail runs by the reference on this device from now on. Returns what was wrong with them, by
    the codec's name.

    Raises:
        UnsupportedHost: the reference computes something else on this device too.
    """
    faults = dict[str, str]()
    for codec in codecs:
        if (fault := _fault(codec, device)) is None:
            continue
        leave_to_reference(codec.name, device)
        if other := _fault(codec, device):
            raise UnsupportedHost(f"{codec.name} cannot run on {describe(device)}: {other}; without kernels: {fault}")
        faults[codec.name] = fault
        _log.warning(
            "%s runs in plain torch on %s, several times slower, with the same bytes: its kernels fail: %s",
            *(codec.name, describe(device), fault),
        )
    return faults


def describe(device: torch.device) -> str:
    """A device for messages, such as `cuda:0 (NVIDIA H100)`."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def _fault(codec: Codec, device: torch.device) -> str | None:
    """The first operation that fails on the device, or whose result is not the reference's on a CPU."""
    try:
        return _difference(codec, device)
    except Exception as error:  # noqa: BLE001 - Triton, its compiler and its driver raise what they like
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        needs_compiler = any(word in str(error) for word in ("compiler", "gcc", "Python.h"))
        fix = "; install a C compiler and Python's headers (Debian: gcc python3-dev)" if needs_compiler else ""
        return f"{said}{fix}"


def _difference(codec: Codec, device: torch.device) -> str | None:
    x = _numbers()
    with by_reference(codec.name):
        payload = codec.encode(x, flat(NUMBERS))
        right = _results(codec, x, payload)
    for (what, mine), (_, wanted) in zip(_results(codec, x.to(device), payload.to(device)), right, strict=True):
        if not torch.equal(mine.cpu().view(torch.uint8), wanted.view(torch.uint8)):
            return f"{what} gives other bytes"
    return None


def _results(codec: Codec, x: Tensor, payload: Tensor) -> list[tuple[str, Tensor]]:
    """Each operation that a node needs of a codec, and what it gives."""
    fragment, acc, residual = flat(NUMBERS), x.clone(), x.flip(0)
    found = [("decoding", codec.decode(payload, fragment))]
    codec.decode_add_(payload, acc, 1.0, fragment)
    found += [("adding", acc), ("the digest", torch.tensor([digest(acc) - (1 << 63)], dtype=torch.int64, device="cpu"))]
    if isinstance(codec, BlockCodec) or codec.traits.exact_decode:
        found.append(("encoding", codec.encode(x, fragment)))
    if isinstance(codec, BlockCodec) and codec.beta:
        out = torch.empty_like(payload)
        codec.encode_feedback_(x, residual, out, fragment)
        found += [("encoding with feedback", out), ("the residual", residual)]
    return found


def _numbers() -> Tensor:
    """fp32 [NUMBERS] of many magnitudes, with a block of zeros, and zeros of both signs."""
    x = torch.randn(NUMBERS, generator=torch.Generator().manual_seed(1), dtype=torch.float32, device="cpu")
    x *= torch.exp2(torch.arange(NUMBERS // 256, dtype=torch.float32, device="cpu") * 2.0 - 16).repeat_interleave(256)
    x[256:512] = 0.0
    x[1::97], x[2::97] = 0.0, -0.0
    return x
