"""Errors between numbers and bytes. None is retriable: the same input fails again.

CodecError
├── NonFiniteError    a NaN or an infinity was given to an encoder
├── BadPayload        a payload that no encoder of its codec can have written
├── BadBlob           bytes that are not the blob that was asked for
├── UnknownCodec      a name that no codec has (a ValueError too: it comes from a user's configuration)
├── BadParameter      a codec has no such parameter, or not of that value (a ValueError too)
├── UnsoundPairing    codecs that cannot serve a run as configured (a ValueError too)
└── UnsupportedHost   a machine whose byte order is not the wire's, or a device that computes other numbers
"""

from collections.abc import Iterable
from difflib import get_close_matches


class CodecError(Exception):
    """Base of all."""

    retriable = False


class NonFiniteError(CodecError):
    """The fragment cannot be sent; what was written to the output so far is meaningless."""

    def __init__(self, index: int) -> None:
        self.index = index  # the first element that is not finite
        super().__init__(f"element {index} is not finite")


class BadPayload(CodecError):
    """The sender is broken or hostile; nothing was decoded."""


class BadBlob(CodecError):
    """The only error of `parse_blob`; its text names the problem, for the log and for the detail of the drop."""


class UnknownCodec(CodecError, ValueError):
    """Names the nearest known codec."""

    def __init__(self, wanted: str, known: Iterable[str]) -> None:
        names = list(known)
        nearest = get_close_matches(wanted, names, n=1, cutoff=0.0)
        hint = f", did you mean {nearest[0]!r}?" if nearest else ""
        super().__init__(f"no codec {wanted!r}{hint} (there are: {', '.join(names)})")


class BadParameter(CodecError, ValueError):
    """One sentence that says what would be right."""

    def __init__(self, spelling: str, problem: str) -> None:
        super().__init__(f"codec {spelling!r}: {problem}")


class UnsoundPairing(CodecError, ValueError):
    """One sentence that says what goes wrong, and what to take."""


class UnsupportedHost(CodecError):
    """Payloads are little-endian and moved without conversion, and decode to the same numbers everywhere; this host or
    its device cannot take part."""
