"""Refuse at the start of a run the codecs that would make it fail slowly."""

from farloop.algo.terms import Terms
from farloop.quant.bit_rates import candidates
from farloop.quant.codec import Codec
from farloop.quant.errors import BadParameter, UnknownCodec, UnsoundPairing
from farloop.quant.registry import codec_named, spelling_of


def check_codecs(terms: Terms) -> None:
    """Raise UnsoundPairing, UnknownCodec or BadParameter unless these codecs can serve a run and its nodes."""
    _check_up(terms.codecs.up, terms)
    check_downlink(codec_named(terms.codecs.down))
    for node, spelling in terms.codecs.up_of:
        try:
            _check_up(spelling, terms)
        except (UnknownCodec, BadParameter, UnsoundPairing) as error:
            raise UnsoundPairing(f"codec_up_of: {node}: {str(error).removeprefix('codec_up ')}") from error


def _check_up(spelling: str, terms: Terms) -> None:
    codec, increments = codec_named(spelling), terms.method == "scafcom"
    check_uplink(codec, may_lose=increments)
    if terms.inner.control_variates:
        check_variates(codec, may_lose=increments)


def check_uplink(codec: Codec, *, may_lose: bool = False) -> None:
    """Raise UnsoundPairing unless this codec can carry deltas for a whole run.

    `may_lose`: deltas are increments, so that what one lacks is in the next.
    """
    _check_one_step("codec_up", codec)
    if codec.beta > 0 and codec.traits.contraction == 0:
        raise UnsoundPairing(
            f"codec_up {spelling_of(codec)!r}: error feedback needs a codec that keeps a part of every delta; this one "
            "may lose more than there is, and what is lost would grow without bound; take beta=0"
        )
    if codec.beta == 0 and not codec.traits.unbiased and codec.traits.sparse and not may_lose:
        raise UnsoundPairing(
            f"codec_up {spelling_of(codec)!r}: without error feedback most of every delta is lost; take beta=0.95"
        )


def check_downlink(codec: Codec) -> None:
    """Raise UnsoundPairing unless this codec can carry updates: target − anchor is already an error feedback."""
    _check_one_step("codec_down", codec)
    if not codec.traits.exact_decode:
        raise UnsoundPairing(
            f"codec_down {spelling_of(codec)!r} does not decode exactly, so anchors could differ; take q4"
        )
    if codec.traits.contraction == 0:
        raise UnsoundPairing(
            f"codec_down {spelling_of(codec)!r} may lose more of an update than there is, and anchors would drift away "
            "from their target; take q4"
        )
    if codec.beta != 0:
        raise UnsoundPairing(
            f"codec_down {spelling_of(codec)!r}: what an update loses is in the next one anyway; leave beta out"
        )


def check_variates(codec: Codec, *, may_lose: bool = False) -> None:
    """Raise UnsoundPairing unless nodes with control variates (`algo/local_update.py`) can use this codec.

    Control variates already add what a delta loses to the next one. `may_lose`: deltas are increments.
    """
    name = spelling_of(codec)
    if codec.traits.sparse and not may_lose:
        raise UnsoundPairing(
            f"codec_up {name!r}: with control_variates a delta must be sent as a whole, or what comes rounds later "
            "would be corrected many times over; take q4"
        )
    if codec.beta > 0:
        raise UnsoundPairing(
            f"codec_up {name!r}: control_variates feed back what a delta loses, and with error feedback it would be "
            "sent twice; take q4"
        )
    if codec.traits.contraction == 0:
        raise UnsoundPairing(
            f"codec_up {name!r}: control_variates need a codec that keeps a part of every delta; this one may lose "
            "more than there is; take q4"
        )


def _check_one_step(what: str, codec: Codec) -> None:
    several = max(len(getattr(codec, name, ())) for name in ("step", "k", "rank")) > 1
    if several:
        raise UnsoundPairing(
            f"{what} {spelling_of(codec)!r}: a number for every tensor is the coordinator's to publish; give one, and "
            "policy=l-greco"
        )
    if getattr(codec, "alpha", 1.0) != 1.0 and not candidates(codec):
        raise UnsoundPairing(f"{what} {spelling_of(codec)!r}: only policy=l-greco has an alpha; leave it out")
