"""One history, whatever happens to links, nodes and the coordinator: the anchors never fork, and never count twice."""

from collections.abc import Sequence

import pytest
from faulty_world import run
from simulated_faults import (
    TWO_NODES,
    BadLinkPeriod,
    CrashCoordinator,
    CrashNode,
    CutLink,
    Fault,
    FillDisk,
    NodeSetup,
    PauseCoordinator,
    PauseNode,
    Scenario,
    SpoilAnchor,
)
from simulated_outcome import Commit, Outcome
from simulated_runs import simulate
from slow_cases import mostly_slow, slow
from toy_problem import terms_of

from farloop.algo.spec import NodeId
from farloop.coordinator.decide import events as coordinator_ev
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.quant.registry import CODECS
from farloop.quant.spelling import downlink_spelling
from farloop.sim.network import HOSTILE_LINK
from farloop.wire.limits import Timing
from farloop.wire.messages import Offer
from farloop.wire.reasons import Reason

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
METHODS = ("diloco", "streaming", "data-parallel")


def history(outcome: Outcome) -> list[Commit]:
    """All commits, fragment by fragment."""
    return sorted(outcome.commits, key=lambda commit: (commit.fragment, commit.version))


def contributors(commits: Sequence[Commit]) -> list[tuple[NodeId, ...]]:
    return [commit.contributors for commit in commits]


@pytest.mark.parametrize("method", METHODS)
def test_all_hold_the_decoded_anchors(method: str) -> None:
    """A, B, D, E, L, B17: every window is merged from both with equal weights; in the end all bytes are equal,
    and no update was refused."""
    outcome = simulate(method)
    assert all(commit.contributors == (A, B) for commit in outcome.commits)
    assert all(share.weight == 0.5 for commit in outcome.commits for share in commit.merged)
    for (start,) in outcome.nodes.values():
        assert (start.stage, start.inner_steps, start.lost_steps) == ("finished", 12, 0)
        assert start.anchor_digests == outcome.anchor_digests
        assert start.diary.mismatches == 0
        applied = sorted(start.diary.applied)
        assert applied == [(c.fragment, c.version) for c in history(outcome)]


@pytest.mark.parametrize("seed", [0, *slow(1, 2, 3, 5)])
@pytest.mark.parametrize("method", METHODS)
def test_loss_doubling_overtaking_and_damage_change_nothing(method: str, seed: int) -> None:
    """B18, B19, T, Q: with quorum = all, a storm gives the anchors and optimizer state of the clean run (bit)."""
    clean, stormy = simulate(method), simulate(method, weather=HOSTILE_LINK, seed=seed)
    assert history(stormy) == history(clean)
    assert stormy.target_digests == clean.target_digests


def test_a_node_that_is_gone_before_its_first_delta_is_a_node_without_weight() -> None:
    """B20, B23: the anchors are those of a run without it (bit)."""
    terms = terms_of("diloco", steps=16)
    lonely = run(Scenario(terms=terms.replace(min_nodes=1), nodes=TWO_NODES[:1]))
    bereft = run(Scenario(terms=terms, faults=(CrashNode(node=B, at=0.5),)))
    assert set(contributors(bereft.commits)) == {(A,)}
    assert bereft.anchor_digests == lonely.anchor_digests
    assert bereft.target_digests == lonely.target_digests


def test_a_short_cut_of_the_link_changes_nothing() -> None:
    """T, Q: deltas and updates go on where they stopped (bit)."""
    clean = simulate("streaming")
    for reset in (False, True):
        cut = simulate("streaming", CutLink(node=B, at=0.9, for_s=0.5, reset=reset))
        assert history(cut) == history(clean)


def crash_points(clean: Outcome) -> range:
    """Numbers of the coordinator's events from when both nodes train to the end of the run."""
    events = [what for _, who, what in clean.tape if who == "coordinator" and isinstance(what, coordinator_ev.Event)]
    offered = {
        event.node: number
        for number, event in reversed(list(enumerate(events, start=1)))
        if isinstance(event, coordinator_ev.NodeMessage) and isinstance(event.message, Offer)
    }
    finished = [n for n, event in enumerate(events, start=1) if isinstance(event, coordinator_ev.CommitDone)][-1]
    return range(max(offered.values()), finished + 1)


@pytest.mark.parametrize(("method", "steps"), [("diloco", 12), *slow(("streaming", 8))])
def test_a_coordinator_that_dies_after_any_event_goes_on_as_if_it_had_not(method: str, steps: int) -> None:
    """B21, O, P, S: a crash right after the n-th event, for every n; all commits are those of the clean run (bit)."""
    clean = simulate(method, steps=steps)
    points = crash_points(clean)
    assert len(points) > 15
    for number in points:
        outcome = simulate(method, CrashCoordinator(at_event=number), steps=steps)
        assert history(outcome) == history(clean), f"after event {number}"
        assert (outcome.target_digests, outcome.alarms) == (clean.target_digests, 0)
        assert any(record == rec.EpochClaimed(epoch=2) for record in outcome.records)


def test_data_parallel_survives_a_crash_of_the_coordinator_without_spooled_gradients() -> None:
    """K: nodes send their gradients again. Moments may come back from the last snapshot, anchors never fork."""
    for number in crash_points(simulate("data-parallel"))[::14]:
        outcome = simulate("data-parallel", CrashCoordinator(at_event=number))
        assert all(start.anchor_digests == outcome.anchor_digests for (start,) in outcome.nodes.values())


@pytest.mark.parametrize("method", ["diloco", "streaming"])
def test_a_joiner_begins_at_a_boundary_from_what_it_received(method: str) -> None:
    """B22, I: it contributes from its start round on, never dilutes a mean, and sends from versions that it holds."""
    outcome = simulate(method, steps=40, nodes=(*TWO_NODES, NodeSetup(name=C, seed=3, joins_at=1.0)))
    (joiner,) = outcome.nodes[C]
    assert joiner.start_round
    assert all(commit.round >= joiner.start_round for commit in outcome.commits if C in commit.contributors)
    assert all(C not in {drop.node for drop in commit.drops} for commit in outcome.commits)
    assert outcome.commits[-1].contributors == (A, B, C)
    held = {(merge.fragment, merge.version) for merge in joiner.diary.merges}
    assert all((send.fragment, send.base) in held for send in joiner.diary.sends)


def test_a_full_disk_holds_the_run_and_loses_nothing() -> None:
    """O: a commit that has no room changes nothing and is tried again (bit)."""
    clean, full = simulate("streaming"), simulate("streaming", FillDisk(at=1.2, for_s=6.0))
    assert history(full) == history(clean)
    assert full.seconds > clean.seconds + 4


def test_nothing_is_told_that_has_no_room_in_the_journal() -> None:
    """O: a small record, too, holds up whatever follows from it."""
    full = simulate("streaming", FillDisk(at=0.0, for_s=6.0))
    welcomed = [at for at, _, what in full.tape if isinstance(what, coordinator_ev.Accept)]
    assert min(welcomed) >= 6.0
    assert history(full) == history(simulate("streaming"))


@pytest.mark.parametrize("for_s", [3.0, 20.0])
def test_a_stopped_coordinator_holds_its_own_absence_against_no_node(for_s: float) -> None:
    """C."""
    clean = simulate("streaming")
    assert history(simulate("streaming", PauseCoordinator(at=1.3, for_s=for_s))) == history(clean)


NODES = tuple(NodeSetup(name=NodeId(name), seed=i) for i, name in enumerate("abc"))
MOMENTS = [2.0, *slow(2.13, 2.26, 2.39)]
"""Everywhere in a round: it takes 0.4 s."""

PROMISED_S = 2.0


def delays(outcome: Outcome, lost_at: float, *, until: float = float("inf")) -> list[float]:
    """Seconds from its boundary to its commit, of every window that was committed without b while b was gone."""
    durable, seen_at = dict[tuple[int, int, NodeId], float](), lost_at
    found = []
    for at, who, what in outcome.tape:
        if who != "coordinator":
            continue
        if isinstance(what, ev.InputStored):
            durable[what.offer.blob.fragment, what.offer.window, what.offer.blob.node] = at
        if isinstance(what, ev.NodeDisconnected) and what.node == B and what.reason is Reason.CLOSED:
            seen_at = at
        if isinstance(what, ev.CommitDone) and lost_at < at < until:
            record = what.record
            names = [share.node for share in record.merged]
            if B not in names:
                boundary = max(durable[record.fragment, record.version, name] for name in names)
                found.append(at - max(boundary, seen_at))
    return found


@pytest.mark.parametrize("method", ["streaming", "diloco"])
@pytest.mark.parametrize("at", MOMENTS)
def test_survivors_commit_within_two_seconds_of_the_boundary_once_a_connection_closed(method: str, at: float) -> None:
    """B20, V."""
    found = delays(simulate(method, CrashNode(node=B, at=at), nodes=NODES, steps=80), at)
    assert len(found) > 10, "they went on without it"
    assert max(found) <= PROMISED_S


@pytest.mark.parametrize("method", ["streaming", *slow("diloco")])
@pytest.mark.parametrize("fault", ["stop", "cut"])
@pytest.mark.parametrize("at", MOMENTS[::2])
def test_survivors_commit_within_liveness_and_two_seconds_of_silence(method: str, fault: str, at: float) -> None:
    """B20, C, V: a node that stands still, and one whose link drops everything and says nothing."""
    for_s = 16.0
    gone: Fault = PauseNode(node=B, at=at, for_s=for_s) if fault == "stop" else CutLink(node=B, at=at, for_s=for_s)
    found = delays(simulate(method, gone, nodes=NODES, steps=80), at, until=at + for_s)
    assert found, "they went on without it"
    assert max(found) <= Timing().liveness_s + PROMISED_S


@pytest.mark.parametrize("method", ["streaming", "diloco"])
@pytest.mark.parametrize("at", MOMENTS)
def test_a_node_that_was_killed_contributes_to_the_round_that_begins_after_it_is_ready(method: str, at: float) -> None:
    """I, Q: under its name; it holds the anchors after their transfer, starts at the next boundary, and is merged."""
    outcome = simulate(method, CrashNode(node=B, at=at, down_s=0.7), nodes=NODES, steps=80)
    ready = [
        (number, time)
        for number, (time, who, what) in enumerate(outcome.tape)
        if who == "coordinator"
        and isinstance(what, ev.NodeMessage)
        and what.node == B
        and type(what.message).__name__ == "Ready"
    ]
    number, ready_at = ready[-1]
    before = [what.record.round for _, _, what in outcome.tape[:number] if isinstance(what, ev.CommitDone)]
    (start,) = (r for r in outcome.records if isinstance(r, rec.NodeStarted) and (r.node, r.incarnation) == (B, 2))
    mine = [c for c in outcome.commits if any((b.node, b.incarnation) == (B, 2) for b in c.blobs)]
    assert start.round <= max(before) + 2, "at the next boundary: the newest commit is of this round, or of the last"
    first = start.round + (start.slot > 0)
    assert min(commit.round for commit in mine) == first, "and it is in the first slot a full period later"
    assert outcome.nodes[B][-1].stage == "finished"
    assert ready_at > at + 0.7


UNFIT = ("randk", "sketch", "ternary", "lowrank")
"""For the way down (tests/unit/quant/test_registry.py)."""
DOWN = [*(downlink_spelling(name) for name in CODECS if name not in UNFIT), "q4r"]


@pytest.mark.parametrize("codec", mostly_slow(DOWN, "q4r", "bf16"))
def test_anchors_stay_bit_identical_by_every_codec_that_may_serve_the_way_down(codec: str) -> None:
    """B17, O: through duplicates, replay, snapshots and restarts on both sides."""
    faults = (
        BadLinkPeriod(node=A, at=0.5, for_s=3.0),
        CutLink(node=B, at=1.0, for_s=2.0, reset=True),
        SpoilAnchor(node=A, at=2.5),
        CrashCoordinator(at=3.0, down_s=0.5),
        CrashNode(node=B, at=4.5, down_s=0.5),
    )
    outcome = simulate("streaming", *faults, codec_down=codec, steps=80, weather=HOSTILE_LINK, seed=7)
    assert (outcome.alarms, len(outcome.nodes[B]), outcome.nodes[A][0].diary.mismatches) == (0, 2, 1)
    assert all(starts[-1].anchor_digests == outcome.anchor_digests for starts in outcome.nodes.values())
