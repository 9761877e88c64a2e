"""Every codec by its spelling.

A spelling is a name, plus the parameters that differ from the format's defaults: `q4`, `q4r:step=0.7`,
`topk:k=128,beta=0.9`. Configuration, the terms of a window and the command line use spellings.
"""

import dataclasses
import logging
import sys
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from farloop.algo.terms import Terms
from farloop.quant.codec import BETA, Codec, Parameter
from farloop.quant.errors import BadParameter, UnknownCodec, UnsupportedHost
from farloop.quant.formats.bf16 import BF16
from farloop.quant.formats.fp32 import FP32
from farloop.quant.formats.lattice import LATTICE
from farloop.quant.formats.lowrank import LOWRANK
from farloop.quant.formats.q4 import Q4
from farloop.quant.formats.q4r import Q4R
from farloop.quant.formats.q8 import Q8
from farloop.quant.formats.randk import RANDK
from farloop.quant.formats.sign import SIGN
from farloop.quant.formats.sketch import SKETCH
from farloop.quant.formats.tables import E2M1, E3M0, NF4
from farloop.quant.formats.ternary import TERNARY
from farloop.quant.formats.topk import TOPK
from farloop.quant.kernels.dispatch import warm
from farloop.quant.self_test import try_codecs

_log = logging.getLogger(__name__)

CODECS: Mapping[str, Codec] = MappingProxyType(
    {
        codec.name: codec
        for codec in (FP32, BF16, Q8, Q4, Q4R, E3M0, TOPK, RANDK, SKETCH, TERNARY, SIGN, LATTICE, LOWRANK, E2M1, NF4)
    }
)
"""Every format with its default parameters."""


def codec_named(spelling: str) -> Codec:
    """The codec that configuration calls `spelling`. Equal spellings give equal codecs.

    Raises:
        UnknownCodec: there is none; the error names the nearest.
        BadParameter: it has no such parameter, or the value is not allowed.
        UnsupportedHost: this machine is big-endian.
    """
    _require_little_endian()
    name, colon, rest = spelling.partition(":")
    if name not in CODECS:
        raise UnknownCodec(name, CODECS)
    if not colon:
        return CODECS[name]
    known = parameters_of(name)
    chosen: dict[str, Any] = {}
    for part in rest.split(","):
        key, _, text = part.strip().partition("=")
        if key not in known:
            raise BadParameter(spelling, f"{name} has no parameter {key!r}; there are {', '.join(known)}")
        if key in chosen:
            raise BadParameter(spelling, f"{key} is given twice")
        try:
            chosen[key] = known[key].read(text)
        except ValueError as error:
            raise BadParameter(spelling, f"{key} is {error}, not {text!r}") from None
    return dataclasses.replace(CODECS[name], **chosen)


def spelling_of(codec: Codec) -> str:
    """The shortest spelling that `codec_named` reads back as this codec."""
    default = CODECS[codec.name]
    changed = [
        f"{key}={parameter.write(getattr(codec, key))}"
        for key, parameter in parameters_of(codec.name).items()
        if getattr(codec, key) != getattr(default, key)
    ]
    return codec.name + (":" + ",".join(changed) if changed else "")


def parameters_of(name: str) -> Mapping[str, Parameter]:
    """The parameters that may follow the colon of a codec's spelling."""
    return {**CODECS[name].PARAMETERS, "beta": BETA}


def downlink_spelling(spelling: str) -> str:
    """The full spelling of a codec that a user names for updates to nodes.

    target − anchor already feeds every error back, so the defaults differ there: nearest rounding, for its smaller
    error, and no residual. Raises as `codec_named`.
    """
    codec = codec_named(spelling)
    said = {part.partition("=")[0].strip() for part in spelling.partition(":")[2].split(",")}
    differs: dict[str, Any] = {"rounding": "nearest"} if "rounding" in codec.PARAMETERS else {}
    differs["beta"] = 0.0
    return spelling_of(dataclasses.replace(codec, **{key: value for key, value in differs.items() if key not in said}))


def warm_for(terms: Terms, device: torch.device | None = None) -> None:
    """Prepare the kernels of a run with these terms, including those of its fp32 snapshots, and try them on the device
    (`self_test.py`); None: on the CPU.

    Call it before training begins (see `kernels/dispatch.py`). Raises as `codec_named` and `try_codecs`.
    """
    started = time.monotonic()
    up = dict.fromkeys((terms.codecs.up, *(codec for _, codec in terms.codecs.up_of)))
    codecs = [codec_named(spelling) for spelling in dict.fromkeys((*up, terms.codecs.down, "fp32"))]
    warm(codec.name for codec in codecs)
    try_codecs(codecs, device or torch.device("cpu"))
    seconds = time.monotonic() - started
    _log.info("kernels ready codecs=%s/%s seconds=%.1f", " ".join(up), terms.codecs.down, seconds)


def _require_little_endian() -> None:
    if sys.byteorder != "little":
        raise UnsupportedHost("payloads are little-endian; this machine is not")
