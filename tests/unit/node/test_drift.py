"""Covers `node/model/control_variates.py`, step by step; two nodes with one parameter each, by hand."""

import dataclasses

import pytest
import torch
from node_story import A, B
from plain_runs import plain_terms
from torch import nn

from farloop.algo.fragments import partition, trainable_tensors
from farloop.algo.spec import BlobId, BlobKind, NodeId, WindowTerms
from farloop.algo.terms import Terms
from farloop.node import events as ev
from farloop.node.model.control_variates import ControlVariates
from farloop.node.model.encoder import encode_delta
from farloop.node.model.replica import Replica
from farloop.quant.blob import BlobHeader, pack_blob
from farloop.quant.registry import codec_named
from farloop.wire.messages import Committed, Share

C = NodeId("c")
OUTER_LR, LR = 0.5, 0.25
TERMS = plain_terms(
    method="diloco", codec_up="bf16", codec_down="fp32", outer_lr=OUTER_LR, outer_momentum=0.0, control_variates=True
)
TAUGHT = TERMS.inner.variates_rate * (0.25 - 1.0) / (2 * LR)
"""By a merge whose mean delta is 0.25, to who sent 1.0 after two steps."""


def commit(version: int, nodes: tuple[NodeId, ...] = (A, B), *, final: bool = False) -> Committed:
    """As it is announced."""
    window = WindowTerms(
        fragment=0, window=version + 1, round=version, tau=0, mix=0.0, codec_up="bf16", codec_down="fp32"
    )
    shares = tuple(Share(node=node, weight=1 / len(nodes)) for node in nodes)
    return Committed(
        fragment=0, version=version, size=1, digest=0, anchor_digest=0, merged=shares, drops=(),
        next_window=None if final else window, rounds=(),
    )  # fmt: skip


def applied(version: int) -> ev.Apply:
    """As the machine commands it."""
    return ev.Apply(fragment=0, version=version, anchor_digest=0, codec="fp32")


class Node:
    """A replica of 300 weights in two tensors, and its drift."""

    def __init__(self, terms: Terms = TERMS, dtype: torch.dtype = torch.float32) -> None:
        self.module = nn.Linear(1, 150).to(dtype)  # two tensors, so that there is padding between them
        layout = partition([(name, tuple(p.shape)) for name, p in trainable_tensors(self.module)], pattern="whole")
        self.replica = Replica(self.module, layout, gradients=False)
        self.replica.merge(0, 0.0)
        self.drift = ControlVariates(self.replica, terms)
        self.version, self.seq = 0, 0

    def send(self, own: float = 1.0, *, steps: int = 2) -> tuple[BlobId, bytearray]:
        """`steps` inner steps, then a delta that is `own` everywhere."""
        for _ in range(steps):
            self.drift.stepped(LR)
        self.seq += 1
        blob = BlobId(kind=BlobKind.DELTA, fragment=0, version=self.version, node=A, incarnation=1, seq=self.seq)
        command = ev.Encode(blob=blob, window=self.version + 1, codec="bf16", steps=steps, tokens=1)
        self.drift.sent(command)
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.fill_(float(self.replica.anchors[0].read()[0]) - own)
        return blob, encode_delta(self.replica, command, self.replica.compute_delta(0), 0, 0).data

    def update(self, mean: float = 0.25) -> bytearray:
        """What an outer step by a mean delta adds to the anchor."""
        fragment, codec = self.replica.layout.fragments[0], codec_named("fp32")
        numbers = torch.zeros(fragment.numel)
        for slot in fragment.tensors:
            numbers[slot.offset : slot.offset + slot.numel] = -OUTER_LR * mean
        header = BlobHeader(codec=codec, fragment=fragment, version=self.version + 1, base=self.version, epoch=0)
        return pack_blob(header, codec.encode(numbers, fragment))

    def merge(
        self,
        sent: tuple[BlobId, bytearray] | None = None,
        *,
        nodes: tuple[NodeId, ...] = (A, B),
        merged: bool = True,
        whole: bool = True,
        final: bool = False,
    ) -> "Node":
        """A delta is sent; the commit of a mean delta of 0.25 is announced, applied, and merged."""
        blob, data = sent or self.send()
        version, update = self.version + 1, self.update()
        self.drift.on_message(commit(version, nodes, final=final))
        self.replica.anchors[0].write().sub_(OUTER_LR * 0.25)
        update[-1] ^= not whole
        self.drift.applied(applied(version), update)
        self.drift.on_outcome(blob, version if merged else None, data, 0)
        self.replica.merge(0, 0.0)
        self.drift.merged(0)
        self.version = version
        return self

    def pull(self) -> float:
        """d_i, as an inner step at the rate 1 shows it: the same in every weight, or the test fails."""
        self.replica.merge(0, 0.0)
        self.drift.stepped(1.0)
        (after,) = {float(x) for p in self.module.parameters() for x in p.detach().flatten()}
        self.replica.merge(0, 0.0)
        self.drift.merged(0)
        return float(self.replica.anchors[0].read()[0]) - after


def test_a_merge_teaches_what_the_own_delta_differed_by_per_unit_of_learning_rate_and_it_adds_up() -> None:
    node = Node()
    for times in range(3):
        assert node.pull() == pytest.approx(times * TAUGHT)
        node.merge()


def test_only_the_steps_inside_the_delta_count() -> None:
    """Those that a node does while its delta is on the way are in none; steps without any rate teach nothing."""
    node = Node()
    sent = node.send()
    node.drift.stepped(LR)
    node.merge(sent).merge(node.send(steps=4))
    assert node.pull() == pytest.approx(1.5 * TAUGHT)
    assert Node().merge(node.send(steps=0)).pull() == 0.0


def test_the_delta_is_taken_as_it_was_sent() -> None:
    """bf16 sends 1.0 of 1.001: what was lost stays in the drift, which brings it with the next delta."""
    node = Node()
    assert node.merge(node.send(own=1.001)).pull() == pytest.approx(TAUGHT, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_stays_zero_and_weights_may_be_of_any_type(dtype: torch.dtype) -> None:
    node = Node(dtype=dtype).merge()
    assert node.pull() == pytest.approx(TAUGHT, rel=1e-2)
    fragment = node.replica.layout.fragments[0]
    held = {slot.offset + i for slot in fragment.tensors for i in range(slot.numel)}
    assert len(held) == 300 < fragment.numel
    (drift,) = node.replica.drifts.values()
    assert not drift.read()[[i for i in range(fragment.numel) if i not in held]].any()


@pytest.mark.parametrize(
    "change", [{"merged": False}, {"whole": False}, {"final": True}], ids=["dropped", "spoiled", "flush"]
)
def test_without_a_lesson_the_drift_stays(change: dict[str, bool]) -> None:
    node = Node().merge()
    before = node.pull()
    node.merge(**change)  # type: ignore[arg-type]
    assert node.pull() == before != 0.0


@pytest.mark.parametrize("others", [(A,), (A, C), (A, B, C), (B,)])
def test_where_others_made_a_version_all_begin_anew(others: tuple[NodeId, ...]) -> None:
    """The drifts of those who are left would not sum to zero. The version after it is the first to learn from."""
    node = Node().merge().merge(nodes=others, merged=A in others)
    assert node.pull() == 0.0
    assert (node.merge(nodes=others, merged=A in others).pull() != 0.0) == (A in others)


@pytest.mark.parametrize("late", [True, False])
def test_who_comes_late_or_missed_versions_learns_with_the_others(late: bool) -> None:
    """Whoever made the versions that a snapshot replaced, they were made without this node."""
    node = Node() if late else Node().merge()
    node.version += 2
    assert node.merge().pull() == 0.0
    assert node.merge().pull() != 0.0


def test_another_delta_than_the_last_one_is_none_of_its_business() -> None:
    node = Node()
    blob, data = node.send()
    assert node.merge((dataclasses.replace(blob, seq=99), data)).pull() == 0.0


def test_versions_that_were_announced_early_are_remembered() -> None:
    node = Node()
    blob, data = node.send()
    for version in (1, 2):
        node.drift.on_message(commit(version))
    node.drift.applied(applied(1), node.update())
    node.drift.on_outcome(blob, 1, data, 0)
    assert node.pull() != 0.0
    node.version = 1
    node.drift.applied(applied(2), node.update())
    assert node.pull() != 0.0


def test_an_update_is_read_as_its_window_says_whatever_the_run_does_by_now() -> None:
    """B: the terms of a run may change, and an update that was made before comes after."""
    assert Node(TERMS.replace(codec_up="q4", codec_down="q8")).merge().pull() == pytest.approx(TAUGHT)


def test_without_control_variates_nothing_is_done_or_kept() -> None:
    node = Node(TERMS.replace(control_variates=False)).merge().merge()
    assert node.pull() == 0.0
    assert not (node.replica.drifts or node.drift._announced or node.drift._sent or node.drift._updates)
