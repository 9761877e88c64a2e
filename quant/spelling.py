"""How codecs are spelled: their names, and the parameters that may follow. Loads no torch.

A spelling is a name, plus the parameters that differ from the format's defaults: `q4`, `q4r:step=0.7`,
`topk:k=128,beta=0.9`. Configuration, the terms of a window and the command line use spellings.
"""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from farloop.monitoring.units import ascii_number, is_digits, nearest
from farloop.quant.errors import BadParameter, UnknownCodec, UnsupportedHost


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One key that may follow the colon of a spelling."""

    read: Callable[[str], Any]  # raises ValueError with the values that are allowed
    write: Callable[[Any], str]
    meaning: str
    default: Any


def number(low: float, high: float) -> Callable[[str], float]:
    """Reads a number of this range."""

    def read(text: str) -> float:
        try:
            value = float(ascii_number(text))
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise ValueError(f"a number from {low:g} to {high:g}")
        return value

    return read


def numbers(low: float, high: float) -> Callable[[str], tuple[float, ...]]:
    """Reads one or more numbers of this range, separated by slashes."""
    read = number(low, high)
    return lambda text: tuple(read(part) for part in text.split("/"))


def whole(low: int, high: int) -> Callable[[str], int]:
    """Reads a whole number of this range."""

    def read(text: str) -> int:
        if not (is_digits(text) and len(text) < 20 and low <= int(text) <= high):
            raise ValueError(f"a whole number from {low} to {high}")
        return int(text)

    return read


def wholes(low: int, high: int, meaning: str, default: int) -> Parameter:
    """One or more whole numbers of this range, separated by slashes."""
    read = whole(low, high)
    return Parameter(
        read=lambda text: tuple(read(part) for part in text.split("/")),
        write=lambda values: "/".join(map(str, values)),
        meaning=f"{meaning}; one number, or one per tensor of a fragment",
        default=(default,),
    )


def one_of(*choices: str) -> Callable[[str], str]:
    """Reads one of these words."""

    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(" or ".join(choices))
        return text

    return read


def float_text(value: float) -> str:
    """The shorter of the usual texts of a number that read back exactly."""
    return min((text for text in (f"{value:g}", repr(value)) if float(text) == value), key=len)


def _beta(default: float) -> Parameter:
    """Of every codec."""
    meaning = "error feedback: the share of what was lost that is sent next time"
    return Parameter(read=number(0, 1), write=float_text, meaning=meaning, default=default)


_ALPHA = Parameter(
    read=number(1, 4),
    write=float_text,
    meaning="with l-greco: largest squared error, in units of what an equal choice for all tensors loses",
    default=1.0,
)
_SHARED = {
    "policy": Parameter(
        read=one_of("equal", "l-greco"),
        write=str,
        meaning="the same for all tensors, or shared out over them by the coordinator",
        default="equal",
    ),
    "alpha": _ALPHA,
}
_Q4R = {
    "step": Parameter(
        read=numbers(1e-30, 1e30),
        write=lambda steps: "/".join(map(float_text, steps)),
        meaning="distance of codes in units of a block's rms; one, or one per tensor of a fragment: 0.7/1/1.4",
        default=(1.0,),
    ),
    "rounding": Parameter(
        read=one_of("stochastic", "nearest"), write=str, meaning="stochastic or nearest", default="stochastic"
    ),
    "policy": Parameter(
        read=one_of("relative", "absolute", "l-greco"),
        write=str,
        meaning="step in units of a block's rms; as it is; or shared out over tensors by the coordinator",
        default="relative",
    ),
    "alpha": _ALPHA,
}
_TOPK = wholes(1, 4096, "how many of 4096 elements are sent", 64)
_RANDK = Parameter(
    read=number(1 / 256, 1), write=float_text, meaning="share of the elements that are sent", default=1 / 16
)
_SKETCH = {
    "density": Parameter(
        read=number(0.001, 0.5), write=float_text, meaning="share of a tensor's elements that are kept", default=0.05
    ),
    "room": Parameter(
        read=number(1.3, 64),
        write=float_text,
        meaning="counters per kept element; for sums of K, 1.5·K is safe",
        default=1.5,
    ),
    "min_numel": Parameter(
        read=whole(4096, 1 << 30), write=str, meaning="smaller tensors, in elements, travel as fp32", default=65536
    ),
}
_TERNARY = Parameter(
    read=number(0, 1000),
    write=float_text,
    meaning="largest magnitude in units of a tensor's rms; what is larger is clipped to it. 0: none is",
    default=2.5,
)
_LOWRANK = wholes(1, 128, "columns of the two factors of a matrix", 4)

PARAMETERS: Final[Mapping[str, Mapping[str, Parameter]]] = {
    **{name: {"beta": _beta(0.0)} for name in ("fp32", "bf16", "q8", "q4")},
    "q4r": {**_Q4R, "beta": _beta(0.0)},
    "e3m0": {"beta": _beta(0.0)},
    "topk": {"k": _TOPK, **_SHARED, "beta": _beta(0.95)},
    "randk": {"fraction": _RANDK, "beta": _beta(0.0)},
    "sketch": {**_SKETCH, "beta": _beta(1.0)},
    "ternary": {"clip": _TERNARY, "beta": _beta(0.0)},
    "sign": {"beta": _beta(1.0)},
    "lattice": {"beta": _beta(0.0)},
    "lowrank": {"rank": _LOWRANK, **_SHARED, "beta": _beta(1.0)},
    **{name: {"beta": _beta(0.0)} for name in ("e2m1", "nf4")},
}
"""The fields of each codec that its spelling may set."""


def read_spelling(spelling: str) -> tuple[str, dict[str, Any]]:
    """Name and chosen parameters of the codec that configuration calls `spelling`.

    Raises:
        UnknownCodec: there is none; the error names the nearest.
        BadParameter: it has no such parameter, or the value is not allowed.
        UnsupportedHost: this machine is big-endian.
    """
    if sys.byteorder != "little":
        raise UnsupportedHost("payloads are little-endian; this machine is not")
    name, colon, rest = spelling.partition(":")
    if name not in PARAMETERS:
        raise UnknownCodec(name, PARAMETERS)
    known, chosen = PARAMETERS[name], dict[str, Any]()
    for part in rest.split(",") if colon else ():
        key, _, text = part.strip().partition("=")
        if key not in known:
            raise BadParameter(spelling, f"{name} has no parameter {key!r}; there are {', '.join(known)}")
        if key in chosen:
            raise BadParameter(spelling, f"{key} is given twice")
        try:
            chosen[key] = known[key].read(text)
        except ValueError as error:
            raise BadParameter(spelling, f"{key} is {error}, not {text!r}") from None
    return name, chosen


def write_spelling(name: str, chosen: Mapping[str, Any]) -> str:
    """The shortest spelling of a codec with these parameters; the way back from `read_spelling`."""
    changed = [
        f"{key}={parameter.write(chosen[key])}"
        for key, parameter in PARAMETERS[name].items()
        if chosen.get(key, parameter.default) != parameter.default
    ]
    return name + (":" + ",".join(changed) if changed else "")


def downlink_spelling(spelling: str) -> str:
    """The full spelling of a codec that a user names for updates to nodes.

    target − anchor already feeds every error back, so the defaults differ there: nearest rounding, for its smaller
    error, and no residual. Raises as `read_spelling`.
    """
    name, chosen = read_spelling(spelling)
    differs = {"rounding": "nearest", "beta": 0.0}
    return write_spelling(name, {key: value for key, value in differs.items() if key in PARAMETERS[name]} | chosen)


def check_codec(spelling: str) -> None:
    """Raises ValueError, with the nearest name, unless it is a codec with parameters that it has."""
    name = spelling.partition(":")[0]
    if name not in PARAMETERS:
        raise ValueError(f"there is no {name!r}; {nearest(name, PARAMETERS)}")
    read_spelling(spelling)
