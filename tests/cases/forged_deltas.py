"""Nodes that cheat: each trains as the others do, and its link sends something else.

The forged blobs are sealed as an honest node's are: they must be found by their numbers, not by a checksum.
"""

import dataclasses
import random
from typing import Final, Literal

import torch
from torch import Tensor

from farloop.algo.spec import BlobId, BlobKind, Fragment, NodeId
from farloop.quant.blob import BlobHeader, Expected, pack_blob, parse_blob
from farloop.quant.registry import codec_named
from farloop.sim.network import Dial
from farloop.sim.node import SimulatedLink
from farloop.sim.scenario import Scenario
from farloop.sim.virtual_time import Process
from farloop.wire.blobs import blob_digest
from farloop.wire.messages import Offer

_FACTORS: Final = {"thousandfold": 1000.0, "flipped": -1.0}
_NEARLY_INFINITE: Final = 3e38
_ANY_EPOCH: Final = 1 << 62

Deceit = Literal["nan", "thousandfold", "overflow", "flipped", "noise", "replayed", "copied", "stale", "claims"]


class SharedForgeries:
    """What every node of one world has sent last: where a thief looks."""

    def __init__(self) -> None:
        self.payloads: dict[tuple[NodeId, int], Tensor] = {}


class ForgingLink(SimulatedLink):
    """A cheating node's link sends forged deltas in place of the node's own; an honest node's shows them to thieves."""

    def __init__(
        self,
        process: Process,
        rng: random.Random,
        scenario: Scenario,
        dial: Dial,
        seed: int,
        deceit: Deceit | None,
        board: SharedForgeries,
    ) -> None:
        super().__init__(process, rng, scenario, dial)
        self._deceit, self._board = deceit, board
        self._expected: dict[BlobId, tuple[str, Fragment]] = {}
        self._sent: dict[BlobId, tuple[Offer, bytearray]] = {}  # deltas that may be offered again
        self._first: dict[int, Tensor] = {}  # payload of the first delta of each fragment
        self._generator = torch.Generator().manual_seed(seed)

    def encodes(self, blob: BlobId, codec: str, fragment: Fragment) -> None:
        """A delta is about to be encoded."""
        self._expected[blob] = codec, fragment

    def forget(self, blob: BlobId) -> None:
        """A delta is not offered any more."""
        self._sent.pop(blob, None)

    def send_blob(self, offer: Offer, data: bytearray) -> None:
        if offer.blob.kind is BlobKind.DELTA:
            if offer.blob not in self._sent:
                self._sent[offer.blob] = self._forged(offer, data)
            offer, data = self._sent[offer.blob]
        super().send_blob(offer, data)

    def _forged(self, offer: Offer, data: bytearray) -> tuple[Offer, bytearray]:
        spelling, fragment = self._expected[offer.blob]
        expect = Expected(
            codecs=(codec_named(spelling),),
            fragment=fragment,
            version=offer.window,
            base=offer.blob.version,
            newest_epoch=_ANY_EPOCH,
        )
        header, payload, _ = parse_blob(data, expect)
        if self._deceit is None:
            self._board.payloads[offer.blob.node, fragment.index] = payload.clone()
            return offer, data
        (share,) = offer.contributors
        if self._deceit == "claims":
            share = dataclasses.replace(share, steps=1000 * share.steps, tokens=1000 * share.tokens)
            return dataclasses.replace(offer, contributors=(share,)), data
        if self._deceit == "stale":
            share = dataclasses.replace(share, base=share.base - 1)
            return dataclasses.replace(offer, contributors=(share,)), data
        forged = self._payload(header, payload)
        if forged.numel() != payload.numel():  # of another codec, which the run had when it was kept
            forged = payload
        data = pack_blob(header, forged)
        if self._deceit != "nan":
            share = dataclasses.replace(share, norm_sq=header.codec.norm_sq(forged, fragment, seed=header.seed))
        return dataclasses.replace(offer, size=len(data), digest=blob_digest(data), contributors=(share,)), data

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
            noise = torch.randn(numbers.shape, generator=self._generator)
            numbers = noise * (numbers.norm() / noise.norm())
        elif self._deceit == "overflow":
            numbers = torch.where(numbers < 0.0, -_NEARLY_INFINITE, _NEARLY_INFINITE)
        else:
            numbers = numbers * _FACTORS[str(self._deceit)]
        return codec.encode(numbers, fragment, seed=header.seed)
