"""Nodes that do not play fair: each trains as the others do, and sends something else.

What they send is sealed as an honest node's is, so that it is stopped by a judgement on numbers, not by a checksum.
"""

import dataclasses
from typing import Final, Literal

import torch
from torch import Tensor

from farloop.algo.spec import Fragment, NodeId
from farloop.node.encoder import Encoded
from farloop.quant.blob import BlobHeader, Expected, pack_blob, parse_blob
from farloop.quant.norm import payload_norm_sq
from farloop.quant.registry import codec_named
from farloop.wire.blobs import blob_digest
from farloop.wire.messages import Offer

Deceit = Literal["nan", "thousandfold", "overflow", "flipped", "noise", "replayed", "copied", "stale", "claims"]

_FACTORS: Final = {"thousandfold": 1000.0, "flipped": -1.0}
_NEARLY_INFINITE: Final = 3e38


class SharedForgeries:
    """What every node of one world has sent last: where a thief looks."""

    def __init__(self) -> None:
        self.payloads: dict[tuple[NodeId, int], Tensor] = {}


class Forger:
    """What leaves one start of one node in the place of its deltas; an honest one's leave as they are."""

    def __init__(self, deceit: Deceit | None, board: SharedForgeries, seed: int) -> None:
        self._deceit, self._board = deceit, board
        self._first: dict[int, Tensor] = {}
        """Payload of the first delta of each fragment."""
        self._generator = torch.Generator().manual_seed(seed)

    def sent(self, encoded: Encoded, fragment: Fragment, epoch: int) -> Encoded:
        """A delta is to be offered."""
        offer = encoded.offer
        expect = Expected(
            codecs=(codec_named(encoded.codec),),
            fragment=fragment,
            version=offer.window,
            base=offer.blob.version,
            newest_epoch=epoch,
        )
        header, payload = parse_blob(encoded.data, expect)
        if self._deceit is None:
            self._board.payloads[offer.blob.node, fragment.index] = payload.clone()
            return encoded
        (share,) = offer.contributors
        if self._deceit == "claims":
            share = dataclasses.replace(share, steps=1000 * share.steps, tokens=1000 * share.tokens)
            return _offered(encoded, dataclasses.replace(offer, contributors=(share,)), encoded.data)
        if self._deceit == "stale":
            share = dataclasses.replace(share, base=share.base - 1)
            return _offered(encoded, dataclasses.replace(offer, contributors=(share,)), encoded.data)
        forged = self._payload(header, payload)
        if forged.numel() != payload.numel():  # of another codec, which the run had when it was kept
            forged = payload
        data = pack_blob(header, forged)
        if self._deceit != "nan":
            share = dataclasses.replace(
                share, norm_sq=payload_norm_sq(header.codec, forged, fragment, seed=header.seed)
            )
        offer = dataclasses.replace(offer, size=len(data), digest=blob_digest(data), contributors=(share,))
        return _offered(encoded, offer, data)

    def _payload(self, header: BlobHeader, payload: Tensor) -> Tensor:
        codec, fragment = header.codec, header.fragment
        match self._deceit:
            case "nan":
                return torch.full_like(payload, 0xFF)
            case "replayed":
                return self._first.setdefault(fragment.index, payload.clone())
            case "copied":
                theirs = [p for (_, index), p in self._board.payloads.items() if index == fragment.index]
                return theirs[0] if theirs else payload
        numbers = codec.decode(payload, fragment, seed=header.seed)
        if self._deceit == "noise":
            random = torch.randn(numbers.shape, generator=self._generator)
            numbers = random * (numbers.norm() / random.norm())
        elif self._deceit == "overflow":
            numbers = torch.where(numbers < 0.0, -_NEARLY_INFINITE, _NEARLY_INFINITE)
        else:
            numbers = numbers * _FACTORS[str(self._deceit)]
        return codec.encode(numbers, fragment, seed=header.seed)


def _offered(encoded: Encoded, offer: Offer, data: bytearray) -> Encoded:
    return dataclasses.replace(encoded, offer=offer, data=data)
