"""Every codec by its spelling (`spelling.py`)."""

import dataclasses
import logging
import time
from collections.abc import Mapping
from types import MappingProxyType

import torch

from farloop.algo.terms import Terms
from farloop.quant.codec import Codec
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
from farloop.quant.spelling import PARAMETERS, read_spelling, write_spelling

_log = logging.getLogger(__name__)

CODECS: Mapping[str, Codec] = MappingProxyType(
    {
        codec.name: codec
        for codec in (FP32, BF16, Q8, Q4, Q4R, E3M0, TOPK, RANDK, SKETCH, TERNARY, SIGN, LATTICE, LOWRANK, E2M1, NF4)
    }
)
"""Every format with its default parameters."""


def codec_named(spelling: str) -> Codec:
    """The codec that configuration calls `spelling`. Equal spellings give equal codecs. Raises as `read_spelling`."""
    name, chosen = read_spelling(spelling)
    return dataclasses.replace(CODECS[name], **chosen) if chosen else CODECS[name]


def spelling_of(codec: Codec) -> str:
    """The shortest spelling that `codec_named` reads back as this codec."""
    return write_spelling(codec.name, {key: getattr(codec, key) for key in PARAMETERS[codec.name]})


def warm_for(terms: Terms, device: torch.device | None = None) -> None:
    """Prepare the kernels of a run with these terms, including those of its fp32 snapshots, and try them on the device
    (`self_test.py`); None: on the CPU.

    Call it before training begins (see `kernels/dispatch.py`). Raises as `codec_named` and `try_codecs`.
    """
    started = time.monotonic()
    up = dict.fromkeys((terms.codecs.up, *(codec for _, codec in terms.codecs.up_of)))
    codecs = [codec_named(spelling) for spelling in dict.fromkeys((*up, terms.codecs.down, "fp32"))]
    _log.info("preparing kernels: the first start compiles them, up to a minute")
    warm(codec.name for codec in codecs)
    try_codecs(codecs, device or torch.device("cpu"))
    seconds = time.monotonic() - started
    _log.info("kernels ready codecs=%s/%s seconds=%.1f", " ".join(up), terms.codecs.down, seconds)
