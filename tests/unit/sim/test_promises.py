"""What the others lose to a node that is gone, and how soon it is back: the promised seconds, exactly, on virtual time.

A window's boundary is when the last delta of those who are left is durable, or when the coordinator saw the connection
end if that came later: at once with the real socket (tests/integration/test_link.py), with the simulated one at its
next heartbeat. Of a silence nobody is told: there it is when the node was lost. With real processes, and the slack of a
busy machine: tests/integration/test_membership.py.
"""

import pytest

from farloop.algo.spec import NodeId
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.sim.outcome import Outcome
from farloop.sim.problems import terms_of
from farloop.sim.scenario import CrashNode, CutLink, Fault, NodeSetup, PauseNode, Scenario
from farloop.sim.world import run
from farloop.wire.limits import Timing
from farloop.wire.reasons import Reason

B = NodeId("b")
NODES = tuple(NodeSetup(name=NodeId(name), seed=i) for i, name in enumerate("abc"))
MOMENTS = [2.0, 2.13, 2.26, 2.39]
"""Everywhere in a round: it takes 0.4 s."""

PROMISED_S = 2.0


def play(method: str, *faults: Fault) -> Outcome:
    """Three nodes."""
    outcome = run(Scenario(terms=terms_of(method, steps=80), nodes=NODES, faults=faults))
    outcome.check()
    return outcome


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
    found = delays(play(method, CrashNode(node=B, at=at)), at)
    assert len(found) > 10, "they went on without it"
    assert max(found) <= PROMISED_S


@pytest.mark.parametrize("method", ["streaming", "diloco"])
@pytest.mark.parametrize("fault", ["stop", "cut"])
@pytest.mark.parametrize("at", MOMENTS[::2])
def test_survivors_commit_within_the_liveness_time_out_and_two_seconds_of_silence(
    method: str, fault: str, at: float
) -> None:
    """B20, C, V: a node that stands still, and one whose link drops everything and says nothing."""
    for_s = 16.0
    gone: Fault = PauseNode(node=B, at=at, for_s=for_s) if fault == "stop" else CutLink(node=B, at=at, for_s=for_s)
    found = delays(play(method, gone), at, until=at + for_s)
    assert found, "they went on without it"
    assert max(found) <= Timing().liveness_s + PROMISED_S


@pytest.mark.parametrize("method", ["streaming", "diloco"])
@pytest.mark.parametrize("at", MOMENTS)
def test_a_node_that_was_killed_contributes_to_the_round_that_begins_after_it_is_ready(method: str, at: float) -> None:
    """I, Q: under its name; it holds the anchors after their transfer, starts at the next boundary, and is merged."""
    outcome = play(method, CrashNode(node=B, at=at, down_s=0.7))
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
