"""Every codec by its name and by its number on the wire. A faster path is chosen here, and nowhere else."""

import sys
from collections.abc import Mapping
from types import MappingProxyType

from farloop.quant.codec import Codec
from farloop.quant.errors import UnknownCodec, UnsupportedHost
from farloop.quant.reference.bf16 import BF16
from farloop.quant.reference.e3m0 import E3M0
from farloop.quant.reference.fp32 import FP32
from farloop.quant.reference.q4 import Q4
from farloop.quant.reference.q8 import Q8

CODECS: Mapping[str, Codec] = MappingProxyType({codec.name: codec for codec in (FP32, BF16, Q8, Q4, E3M0)})

_BY_CODE: Mapping[int, Codec] = MappingProxyType({codec.code: codec for codec in CODECS.values()})


def codec_named(name: str) -> Codec:
    """The codec that configuration calls `name`.

    Raises:
        UnknownCodec: there is none; the error names the nearest.
        UnsupportedHost: this machine is big-endian.
    """
    _require_little_endian()
    if name not in CODECS:
        raise UnknownCodec(name, CODECS)
    return CODECS[name]


def codec_numbered(code: int) -> Codec:
    """The codec that the wire calls `code`. Raises as `codec_named`."""
    _require_little_endian()
    if code not in _BY_CODE:
        raise UnknownCodec(code, CODECS)
    return _BY_CODE[code]


def _require_little_endian() -> None:
    if sys.byteorder != "little":
        raise UnsupportedHost("payloads are little-endian; this machine is not")
