"""What a delta is, by its own bytes: well-formed or not, how long, and which numbers. Pure."""

from dataclasses import dataclass

import xxhash

from farloop.coordinator.commits import spools_inputs
from farloop.coordinator.ledger import Ledger
from farloop.coordinator.screening import measured
from farloop.quant.blob import Bytes, Expected, parse_blob
from farloop.quant.norm import payload_norm_sq
from farloop.wire.messages import Offer


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """A delta that is what it was announced to be."""

    offer: Offer
    """With the squared norm that the delta has, where it was measured; it may have claimed another."""
    payload: int = 0
    """xxh3-64 of its encoded numbers; 0 where it was not taken."""


def is_measured(offer: Offer, ledger: Ledger) -> bool:
    """Whether the delta may be held against others. Gradients never are: they are not spooled, so that a restart could
    not judge as was judged before."""
    return spools_inputs(ledger.spec.terms) and ledger.screening.measures(offer.blob.fragment, offer.window)


def verify(data: Bytes, offer: Offer, expect: Expected, measures: bool) -> Verified:
    """Read every number of a delta once, and measure it where it may be held against others.

    Raises:
        BadBlob: it is not what was asked for; a number in it is not finite.
    """
    header, payload = parse_blob(data, expect)
    if not measures:
        return Verified(offer=offer)
    norm_sq = payload_norm_sq(header.codec, payload, expect.fragment, seed=header.seed)
    return Verified(offer=measured(offer, norm_sq), payload=xxhash.xxh3_64_intdigest(payload.numpy().data))
