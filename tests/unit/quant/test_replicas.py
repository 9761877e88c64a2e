"""Anchors on both sides of the wire stay bit-identical: 1000 rounds with lag, duplicates, replay and snapshots.

The coordinator holds the target and the anchor, publishes Q(target − anchor), and moves the anchor by what that decodes
to; nodes do the same with the blob's bytes. Protocol M, O; invariant B17.
"""

import math
import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from farloop.algo.digest import digest
from farloop.algo.fragments import zero_padding_
from farloop.algo.spec import Fragment, TensorSlot
from farloop.quant.blob import HEADER_BYTES, BlobHeader, Expected, as_tensor, blob_bytes, pack_blob, parse_blob, seal
from farloop.quant.codec import Codec
from farloop.quant.codec_checks import check_downlink
from farloop.quant.errors import BadBlob, UnsoundPairing
from farloop.quant.registry import CODECS, codec_named, downlink_spelling

pytestmark = pytest.mark.usefixtures("one_thread")

ROUNDS = 1000
NODES = 3
KEPT_LOG = 20
"""Versions that a node may be behind and still replay; beyond that it takes a snapshot."""

FRAGMENT = Fragment(
    index=2,
    slot=0,
    numel=768,
    tensors=(TensorSlot(name="w", shape=(9, 40), offset=0), TensorSlot(name="b", shape=(70,), offset=512)),
)

FP32 = CODECS["fp32"]


def fit_for_the_way_down() -> list[str]:
    fit = []
    for name in CODECS:
        spelling = downlink_spelling(name)
        try:
            check_downlink(codec_named(spelling))
        except UnsoundPairing:
            continue
        fit.append(spelling)
    return [*fit, "q4r"]  # stochastic: the seeds must agree


def expected(codec: Codec, version: int, base: int) -> Expected:
    return Expected(codecs=(codec,), fragment=FRAGMENT, version=version, base=base, newest_epoch=1)


def noise(seed: int, scale: float) -> Tensor:
    x = torch.randn(FRAGMENT.numel, generator=torch.Generator().manual_seed(seed)) * scale
    zero_padding_(FRAGMENT, x)
    return x


@dataclass(kw_only=True)
class Server:
    """What the coordinator holds of a fragment."""

    codec: Codec
    anchor: Tensor
    target: Tensor
    version: int = 0
    log: dict[int, bytes] = field(default_factory=dict)
    digests: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def publish(self, change: Tensor) -> None:
        """One commit: the target moves, the update is encoded in place, the anchor follows its bytes."""
        self.target -= change
        self.version += 1
        header = BlobHeader(
            codec=self.codec, fragment=FRAGMENT, version=self.version, base=self.version - 1, epoch=1, salt=0
        )
        buffer = bytearray(blob_bytes(self.codec, FRAGMENT))
        payload = as_tensor(buffer)[HEADER_BYTES:]
        self.codec.encode_into(self.target - self.anchor, payload, FRAGMENT, seed=header.seed)
        self.codec.decode_add_(payload, self.anchor, 1.0, FRAGMENT, seed=header.seed)
        self.log[self.version] = bytes(seal(header, buffer))
        self.log.pop(self.version - KEPT_LOG, None)
        self.digests.append(digest(self.anchor))
        self.gaps.append(float((self.target - self.anchor).norm()))

    def snapshot(self) -> bytes:
        header = BlobHeader(codec=FP32, fragment=FRAGMENT, version=self.version, base=self.version, epoch=1)
        return bytes(pack_blob(header, FP32.encode(self.anchor, FRAGMENT)))


@dataclass(kw_only=True)
class Node:
    """What a node holds of it."""

    codec: Codec
    anchor: Tensor
    version: int = 0
    scratch: bytearray = field(default_factory=lambda: bytearray(1 << 14))
    refused: int = 0
    replayed: int = 0
    snapshots: int = 0

    def take(self, blob: bytes) -> None:
        """An update, if it is the next one: duplicates and updates from the future are none."""
        try:
            expect = expected(self.codec, self.version + 1, self.version)
            header, payload = parse_blob(blob, expect, scratch=self.scratch)
        except BadBlob:
            self.refused += 1
            return
        self.codec.decode_add_(payload, self.anchor, 1.0, FRAGMENT, seed=header.seed)
        self.version += 1

    def catch_up(self, server: Server) -> None:
        """By the log, or, where that does not reach back, by a snapshot."""
        if self.version < server.version and self.version + 1 not in server.log:
            _, payload = parse_blob(server.snapshot(), expected(FP32, server.version, server.version))
            FP32.decode_into(payload, self.anchor, FRAGMENT)
            self.version = server.version
            self.snapshots += 1
        while self.version < server.version:
            self.take(server.log[self.version + 1])
            self.replayed += 1


@pytest.mark.parametrize("spelling", fit_for_the_way_down())
def test_a_thousand_rounds_with_lag_and_replay_keep_all_anchors_bit_identical(spelling: str) -> None:
    codec, start, chance = codec_named(spelling), noise(0, 1.0), random.Random(spelling)
    server = Server(codec=codec, anchor=start.clone(), target=start.clone(), digests=[digest(start)])
    nodes = [Node(codec=codec, anchor=start.clone()) for _ in range(NODES)]
    asleep = [0] * NODES
    for number in range(ROUNDS):
        server.publish(noise(number + 1, 10.0 ** chance.uniform(-4, -1)))
        for place, node in enumerate(nodes):
            if asleep[place]:  # it hears nothing
                asleep[place] -= 1
                continue
            if chance.random() < 0.02:
                asleep[place] = chance.choice([1, 3, KEPT_LOG, 2 * KEPT_LOG])
            if chance.random() < 0.1:  # an old one, once more
                node.take(server.log[chance.choice(list(server.log))])
            if chance.random() < 0.9:
                node.take(server.log[server.version])
            if chance.random() < 0.5:
                node.catch_up(server)
            assert digest(node.anchor) == server.digests[node.version], (place, node.version)
    for node in nodes:
        node.catch_up(server)
        assert torch.equal(node.anchor.view(torch.int32), server.anchor.view(torch.int32))
        assert min(node.refused, node.replayed, node.snapshots) > 0, "each of them happened"
    zeros = server.anchor.clone()
    zero_padding_(FRAGMENT, zeros)
    assert torch.equal(zeros, server.anchor), "padding stays zero"


@pytest.mark.parametrize("spelling", [spelling for spelling in fit_for_the_way_down() if "topk" not in spelling])
def test_the_anchor_follows_its_target(spelling: str) -> None:
    """target − anchor is an error feedback: what is missing after 200 rounds is of the size of one."""
    codec, start = codec_named(spelling), noise(0, 1.0)
    server = Server(codec=codec, anchor=start.clone(), target=start.clone())
    size = float(noise(1, 1e-2).norm())
    for number in range(200):
        server.publish(noise(number + 1, 1e-2))
    kept = codec.traits.contraction
    assert server.gaps[-1] <= 3 * size
    assert server.gaps[-1] <= size * (1 + math.sqrt(1 - kept)) / kept
