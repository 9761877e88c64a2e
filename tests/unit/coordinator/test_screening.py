"""Which deltas a window refuses to merge, whose are measured alone for a while, and that a restart judges the same."""

import dataclasses
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from coordinator_run import A, B, C, Commands, D, Run, brief, told
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plain_runs import plain_offer
from stories import StoryText, all_stories, check_story, literal

from farloop.algo.spec import NodeId, RoundPlan, RunSpec, WindowTerms
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.screening import ENOUGH, STRIKES, WAY_BACK, Screening, rate_of
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

NODES = (A, B, C, D)
AGAINST_ALL = {D: -0.5}
"""Cosines in which d points against the others."""


def plan(index: int) -> RoundPlan:
    return RoundPlan(index=index, start=10 * index, length=10)


class Story:
    """Windows of fragment 1, closed one after the other, as the ledger would tell of them. The words of its stories:

    abcd d=1000 a#7 d~-0.5     a window with deltas of these nodes, which differ in length (of 1), numbers or cosine;
                               who is refused
    3 abcd                     three of them: what happened in turn, the same once
    apart?                     who is in quarantine
    """

    def __init__(self, spec: RunSpec, *, usual: bool = False, num_samples: int = 0, **terms: Any) -> None:
        """`usual`: the four nodes have a usual length of 1."""
        identity = dataclasses.replace(spec.identity, num_samples=num_samples or spec.identity.num_samples)
        self.spec = dataclasses.replace(spec, identity=identity, terms=spec.terms.replace(**terms))
        self.screening, self.version, self.payload = Screening(self.spec), 0, 100
        for _ in range(ENOUGH if usual else 0):
            assert self.close(b=1.1, c=0.9) == {}

    def close(
        self,
        nodes: str = "abcd",
        *,
        payloads: dict[NodeId, int] | None = None,
        steps: dict[NodeId, int] | None = None,
        cosines: dict[NodeId, float] | None = None,
        **norms: float,
    ) -> dict[NodeId, Reason]:
        """A window with deltas of these nodes, of length 1 where no other is given; who is refused, and why."""
        cosines, offers = cosines or {}, []
        for node in map(NodeId, nodes):
            offer = plain_offer(
                node, self.version + 1, seq=self.version, steps=(steps or {}).get(node, 10),
                norm_sq=norms.get(node, 1.0) ** 2,
            )  # fmt: skip
            offers.append(offer)
            self.payload += 1
            self.screening.on_stored(rec.InputStored.of(offer, (payloads or {}).get(node, self.payload)))
        rounds = {self.version: plan(self.version)}
        terms = WindowTerms(
            fragment=1, window=self.version + 1, round=self.version, tau=2, mix=0.5, codec_up="q4", codec_down="q4"
        )
        found = self.screening.verdicts(terms, offers, rounds, NODES)
        refused = tuple(dataclasses.replace(r, cosine=cosines.get(r.blob.node)) for r in found)
        taken = [offer.blob for offer in offers if offer.blob not in {refusal.blob for refusal in refused}]
        self.version += 1
        record = rec.WindowCommitted(
            fragment=1, version=self.version, round=self.version - 1, merged=(), drops=(),
            blobs=tuple(rec.Addend(blob=blob, weight=1.0, cosine=cosines.get(blob.node)) for blob in taken),
            anchor_digest=0, target_digest=0, momentum_digest=None, next_window=None, update_size=0, update_digest=0,
            outer_lr=1.0, outer_momentum=0.0, why="", refused=refused,
        )  # fmt: skip
        self.screening.on_committed(record, {offer.blob: offer for offer in offers}, rounds)
        self.screening.settle({})
        return {refusal.blob.node: refusal.reason for refusal in refused}

    def told(self, line: str) -> str:
        if line == "apart?":
            return ", ".join(sorted(self.apart)) or "no node"
        found = list[str]()
        for words in (window.split() for window in line.split("; ")):
            count, nodes = (int(words[0]), words[1]) if words[0].isdigit() else (1, words[0])
            given: dict[str, dict[NodeId, Any]] = {"=": {}, "#": {}, "~": {}}
            for change in words[2 if words[0].isdigit() else 1 :]:
                given[change[1]][NodeId(change[0])] = literal(change[2:])
            for _ in range(count):
                refused = self.close(nodes, payloads=given["#"], cosines=given["~"], **given["="])
                found.append(", ".join(f"{node} {reason.name}" for node, reason in refused.items()) or "none")
        told = [text for text, _ in groupby(found)]
        return "" if told == ["none"] else ", then ".join(told)

    @property
    def apart(self) -> set[NodeId]:
        return set(self.screening.in_quarantine(NODES))


@pytest.fixture
def story(spec: RunSpec) -> Story:
    return Story(spec, usual=True)


@all_stories(__file__, "screening")
def test_stories(spec: RunSpec, path: Path, story: StoryText, rewrite: bool) -> None:
    """Those of the machine have nodes."""
    settings = dict(story.settings)
    player = Run(spec, **settings) if "nodes" in settings and settings.pop("usual") else Story(spec, **settings)
    check_story(path, story, player.told, rewrite=rewrite)


# --- lengths


@pytest.mark.parametrize(
    ("law", "steps", "norms", "refused"),
    [
        ("far longer than is usual", 10, (1.0, 7.9, 0.1, 1000.0), {D}),
        ("where two agree it is not they who are wrong: a re-warm, other data", 10, (40.0, 50.0, 45.0, 60.0), set()),
        ("more steps may be longer", 100, (79.0, 1.0, 1.0, 81.0), {D}),
        ("and fewer no shorter: a flush of one step", 1, (7.0, 1.0, 1.0, 1.0), set()),
    ],
)
def test_a_delta_far_longer_than_is_usual_is_refused(
    story: Story, law: str, steps: int, norms: tuple[float, ...], refused: set[NodeId]
) -> None:
    lengths = dict(zip("abcd", norms, strict=True))
    assert story.close(steps=dict.fromkeys(NODES, steps), **lengths) == dict.fromkeys(refused, Reason.OUTLIER), law


def test_of_two_without_a_memory_it_is_unknown_which_is_wrong(spec: RunSpec) -> None:
    """It is held against neither."""
    story = Story(spec)
    for _ in range(STRIKES):
        assert story.close("ad", d=1000.0) == {D: Reason.OUTLIER}
        story.screening.seen.clear()
    assert story.apart == set()


def test_a_larger_learning_rate_may_be_longer_and_a_smaller_one_no_shorter(spec: RunSpec) -> None:
    warming = dataclasses.replace(spec.terms.schedule.lr, warmup_steps=1000, minimum=1e-6)
    story = Story(spec, lr=warming, steps=10_000)
    assert rate_of(story.spec.terms, plan(40)) > 30 * rate_of(story.spec.terms, plan(0))
    for _ in range(ENOUGH):
        story.close()
    story.version = 40
    assert story.close(a=30.0) == {}


@given(lengths=st.lists(st.floats(0.2, 1.5), min_size=4, max_size=40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_lengths_that_differ_by_less_than_the_band_are_never_refused(spec: RunSpec, lengths: list[float]) -> None:
    story = Story(spec)
    assert story.spec.terms.admission.norm_band > 1.5 / 0.2
    for start in range(0, len(lengths) - 3, 4):
        assert story.close(**dict(zip("abcd", lengths[start : start + 4], strict=True))) == {}


def test_the_usual_norms_are_sorted_once_for_all_who_did_the_same_work(story: Story) -> None:
    """They are several of each node: sorted once for each delta, a window's close costs the square of the nodes."""

    def sorts(nodes: str) -> int:
        calls: list[object] = []
        sys.setprofile(lambda _, what, called: calls.append(called) if what == "c_call" else None)
        try:
            assert story.close(nodes) == {}
        finally:
            sys.setprofile(None)
        return calls.count(sorted)

    assert sorts("abcd") == sorts("abcdefghijkl") > 0


# --- in the machine


def stored(run: Run, **norms: float) -> Commands:
    """Deltas of these lengths come; what follows the last."""
    commands: Commands = []
    for node, norm in norms.items():
        commands = run.store(NodeId(node), norm_sq=norm**2)
    return commands


@pytest.fixture
def run(spec: RunSpec) -> Run:
    return Run(spec, "abc")


def test_who_is_refused_hears_of_it_with_the_commit_and_it_is_in_the_record(run: Run) -> None:
    """E: one outcome, journaled with the window's own; a restart before the commit judges the same."""
    assert brief(stored(run, a=1.0, b=1.0, c=1000.0)) == "c: stored; commit 1.1 of ab, c OUTLIER"
    commit, (refusal,) = run.pending[1], run.draft().refused
    run.now += 10.0
    assert run.restart() == [commit]
    for node in (A, B, C):
        run.greet(node, round=0)
    after = run.durable()
    (said,) = told(after, C)
    assert isinstance(said, msg.Outcome) and (said.blob, said.reason) == (refusal.blob, Reason.OUTLIER)
    assert "1e+03" in said.detail and ev.Forget(blob=refusal.blob) in after and not run.ledger.inputs


def test_what_is_known_of_nodes_is_known_after_a_restart(run: Run) -> None:
    for _ in range(2):
        for node, norm, payload in ((A, 1.0, 5), (B, 1.0, 6), (C, 1000.0, 7)):
            run.store(node, norm_sq=norm**2, payload=payload)
        run.durable()
    screening = run.ledger.screening
    for _ in range(2):
        assert set(run.machine.in_quarantine) == {C} and "quarantine of c" in run.alarms
        assert run.ledger.screening == screening != Screening(run.spec)
        run.restart()


# --- running statistics


def test_deltas_of_statistics_say_how_samples_differ_and_are_not_judged(spec: RunSpec) -> None:
    """Those of one node may be as long as all others together, opposed to them, and the same in every round."""
    layout = spec.identity.layout
    statistics = dataclasses.replace(
        layout.fragments[1], tensors=(dataclasses.replace(layout.fragments[1].tensors[0], name="0.running_mean"),)
    )
    fragments = (layout.fragments[0], statistics, *layout.fragments[2:])
    layout = dataclasses.replace(layout, fragments=fragments)
    identity = dataclasses.replace(spec.identity, layout=layout, num_samples=1000)  # then no two deltas are the same
    told = Story(dataclasses.replace(spec, identity=identity))
    for _ in range(2 * ENOUGH):
        assert told.close(payloads=dict.fromkeys(NODES, 7), cosines=AGAINST_ALL, d=1000.0) == {}
    assert not told.apart and not told.screening.all_seen
    told.screening.standings[D] = rec.Standing(node=D, why="its weights")
    for _ in range(2 * WAY_BACK):
        assert told.close() == {D: Reason.QUARANTINED}, "nor do they end a quarantine"
