"""A trial of codecs on a device before training: kernels that cannot run there, or write other bytes than the
reference, are left out with one warning.

Kernels fail for want of a C compiler or of a card that Triton supports, and a driver may compile them to something
else. A trial also compiles them, which would otherwise stall the first send and the first merge.
"""

import logging
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from farloop.quant.codec import Codec, flat
from farloop.quant.digest import digest, digest_by_reference
from farloop.quant.errors import UnsupportedHost
from farloop.quant.formats.blocks import BlockCodec
from farloop.quant.kernels.dispatch import by_reference, leave_to_reference
from farloop.quant.norm import norm_sq, sums_by_reference, total_of

_log = logging.getLogger(__name__)

NUMBERS = 4096


def try_codecs(codecs: Iterable[Codec], device: torch.device) -> dict[str, str]:
    """Take digest and norm of some numbers on the device; encode, decode and add `NUMBERS` numbers with each codec; and
    compare with the reference on a CPU.

    What has kernels that fail runs by the reference on this device from now on. Returns what was wrong with them, by
    the codec's name, `digest` or `norm`.
    Raises UnsupportedHost: the reference computes something else on this device too.
    """
    faults, x = dict[str, str](), torch.cat([_numbers(), _numbers()[:100]])  # a whole tile, and a part of one
    trials: list[tuple[str, Callable[[], str]]] = [
        ("digest", lambda: "" if digest(x.to(device)) == digest_by_reference(x, 0)[0] else "it is another number"),
        ("norm", lambda: "" if norm_sq(x.to(device)) == total_of(sums_by_reference(x)) else "it is another number"),
        *((codec.name, partial(_difference, codec, device)) for codec in codecs),
    ]
    for name, trial in trials:
        if not (fault := _fault(trial)):
            continue
        leave_to_reference(name, device)
        if other := _fault(trial):
            raise UnsupportedHost(f"{name} cannot run on {describe(device)}: {other}; without kernels: {fault}")
        faults[name] = fault
        _log.warning(
            "%s runs in plain torch on %s, several times slower, with the same bytes: its kernels fail: %s",
            *(name, describe(device), fault),
        )
    return faults


def describe(device: torch.device) -> str:
    """A device for messages, such as `cuda:0 (NVIDIA H100)`."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def _fault(trial: Callable[[], str]) -> str:
    """What the trial found wrong, or raised, which may be anything; "" for nothing."""
    try:
        return trial()
    except Exception as error:  # noqa: BLE001 - Triton, its compiler and its driver raise what they like
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        needs_compiler = any(word in str(error) for word in ("compiler", "gcc", "Python.h"))
        fix = "; install a C compiler and Python's headers (Debian: gcc python3-dev)" if needs_compiler else ""
        return f"{said}{fix}"


def _difference(codec: Codec, device: torch.device) -> str:
    """The first operation whose result on the device is not the reference's on a CPU."""
    x = _numbers()
    with by_reference(codec.name):
        payload = codec.encode(x, flat(NUMBERS))
        right = _results(codec, x, payload)
    for (what, mine), (_, wanted) in zip(_results(codec, x.to(device), payload.to(device)), right, strict=True):
        if not torch.equal(mine.cpu().view(torch.uint8), wanted.view(torch.uint8)):
            return f"{what} gives other bytes"
    return ""


def _results(codec: Codec, x: Tensor, payload: Tensor) -> list[tuple[str, Tensor]]:
    """Each operation that a node needs of a codec, and what it gives."""
    fragment, acc, residual = flat(NUMBERS), x.clone(), x.flip(0)
    found = [("decoding", codec.decode(payload, fragment))]
    codec.decode_add_(payload, acc, 1.0, fragment)
    found.append(("adding", acc))
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
