"""Covers `coordinator/decide/rollback.py`: what greetings prove of the state, and when they hold the run."""

import dataclasses
from typing import Any

import pytest
from plain_runs import plain_hello

from farloop.algo.spec import NodeId, RunSpec
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.decisions import Decisions
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.decide.rollback import (
    ALARM,
    MOST_STARTS,
    TRUSTED_AFTER_S,
    Kind,
    RollbackGuard,
    as_newcomer,
    standing_of,
)
from farloop.coordinator.decide.run_state import RunState
from farloop.wire.messages import AnchorRef, Committed, Hello
from farloop.wire.reasons import Reason

A, B = NodeId("a"), NodeId("b")


def ref(fragment: int, version: int, digest: int | None = None) -> AnchorRef:
    return AnchorRef(fragment=fragment, version=version, digest=10 * fragment + version if digest is None else digest)


def hello(**changes: Any) -> Hello:
    """A node that holds what the ledger does: version 5 of fragment 0, version 4 of fragment 1."""
    plain = plain_hello(node=A, epoch_seen=7, anchors=(ref(0, 5), ref(1, 4)), round=3, history=3)
    return dataclasses.replace(plain, **changes)


@pytest.fixture
def ledger(spec: RunSpec) -> Ledger:
    """Start 7 of the coordinator; it was wound back in its third. It remembers two versions of each fragment."""
    ledger = Ledger.begin(rec.RunStarted(spec=spec, epoch=7))
    ledger.history, ledger.versions = 3, [5, 4]
    for fragment, version in ((0, 4), (0, 5), (1, 3), (1, 4)):
        ledger.commits[fragment, version] = Committed(
            fragment=fragment, version=version, size=1, digest=0, anchor_digest=10 * fragment + version, merged=(),
            drops=(), next_window=None, rounds=(),
        )  # fmt: skip
    return ledger


@pytest.fixture
def decisions(ledger: Ledger) -> Decisions:
    return Decisions(ledger)


@pytest.fixture
def alarms() -> dict[str, str]:
    return {}


@pytest.fixture
def run(ledger: Ledger, alarms: dict[str, str]) -> RunState:
    return RunState(ledger, 0.0, alarms=alarms)


@pytest.fixture
def doubts(run: RunState, decisions: Decisions) -> RollbackGuard:
    return RollbackGuard(run, decisions)


@pytest.mark.parametrize(
    ("changes", "kind", "detail"),
    [
        ({}, "same", ""),
        ({"announced": (ref(0, 5),)}, "same", ""),
        ({"anchors": ()}, "behind", ""),
        ({"anchors": (ref(0, 5), ref(1, 3))}, "behind", ""),
        ({"anchors": (ref(0, 1, digest=666), ref(1, 4))}, "behind", ""),  # too long ago to be remembered
        ({"epoch_seen": 8}, "ahead", "has met epoch 8, this start has 7"),
        ({"anchors": (ref(0, 6), ref(1, 4))}, "ahead", "holds version 6 of fragment 0, here it is at 5"),
        ({"announced": (ref(1, 6),)}, "ahead", "was told of version 6 of fragment 1, here it is at 4"),
        ({"history": 4}, "ahead", "follows history 4, this is 3"),
        (
            {"anchors": (ref(0, 5, digest=6), ref(1, 4))},
            "forked",
            "holds version 5 of fragment 0 with digest 0000000000000006, here it has 0000000000000005",
        ),
        ({"anchors": (ref(0, 4, digest=6), ref(1, 4))}, "forked", "version 4 of fragment 0"),
        ({"anchors": (ref(0, 5, digest=6), ref(1, 9))}, "forked", "and holds version 9 of fragment 1"),
        ({"history": 0, "anchors": (ref(0, 9), ref(1, 4, digest=6))}, "lost", ""),
        ({"history": 0, "epoch_seen": 8}, "ahead", "has met epoch 8"),
    ],
)
def test_a_greeting_proves_where_a_node_stands(
    ledger: Ledger, changes: dict[str, Any], kind: Kind, detail: str
) -> None:
    standing = standing_of(hello(**changes), ledger)
    assert standing.kind == kind
    assert detail in standing.detail and bool(detail) == bool(standing.detail) == standing.is_in_doubt


def test_many_proofs_are_told_in_a_line(ledger: Ledger) -> None:
    far = tuple(ref(fragment, 9) for fragment in (0, 1))
    detail = standing_of(hello(epoch_seen=9, anchors=far, announced=far), ledger).detail
    assert detail.count(" and ") == 3 and detail.endswith("and 2 more like these")


def test_a_node_of_a_lost_history_comes_as_a_newcomer() -> None:
    known = hello(announced=(ref(0, 9),))
    assert as_newcomer(known) == dataclasses.replace(known, anchors=(), announced=(), round=None)


def test_who_proves_that_the_state_is_old_holds_the_run_for_everybody(
    doubts: RollbackGuard, run: RunState, alarms: dict[str, str]
) -> None:
    assert doubts.refusal(B, hello(), 1.0) is None and not alarms
    for node, greeting in ((A, hello(anchors=(ref(0, 9), ref(1, 4)))), (B, hello())):
        refused = doubts.refusal(node, greeting, 2.0)
        assert refused is not None
        assert (refused.reason, refused.retriable) == (Reason.HOLDING, True)
        assert "node a holds version 9 of fragment 0, here it is at 5" in refused.detail
    assert run.held is not None and run.held.startswith("node a holds version 9")
    assert "put the newer one back" in alarms[ALARM] and "--rewind" in alarms[ALARM]


def test_an_epoch_that_was_met_elsewhere_is_remembered_durably(doubts: RollbackGuard, decisions: Decisions) -> None:
    """Whoever winds the run back must claim a higher one, before meeting anybody."""
    for epoch in (9, 12, 10):
        doubts.refusal(A, hello(epoch_seen=epoch), 1.0)
    assert decisions.take() == [ev.Record(record=rec.EpochSeen(epoch=epoch)) for epoch in (9, 12)]


def test_nobody_stops_a_run_that_has_gone_on_for_a_while(
    doubts: RollbackGuard, run: RunState, alarms: dict[str, str]
) -> None:
    """Whoever lives is back by then: one claim keeps out one node, until it comes with another."""
    assert doubts.refusal(B, hello(), 10.0) is None
    doubts.clock_jumped(5.0)
    refused = doubts.refusal(A, hello(anchors=(ref(0, 9),)), 15.0 + TRUSTED_AFTER_S)
    assert refused is not None and (refused.reason, refused.retriable) == (Reason.FENCED, True)
    assert run.held is None and "holds version 9" in alarms[f"{ALARM} of a"]
    assert doubts.refusal(B, hello(), 101.0) is None
    assert doubts.refusal(A, hello(), 102.0) is None and not alarms
    doubts.clock_jumped(1000.0)
    assert doubts.refusal(A, hello(epoch_seen=9), 103.0) is not None and run.held is not None
    assert TRUSTED_AFTER_S > 10 * 5.0, "many times the longest pause between two attempts"


def test_a_coordinator_that_nobody_came_to_for_long_is_no_more_trusted(doubts: RollbackGuard, run: RunState) -> None:
    doubts.refusal(A, hello(epoch_seen=9), 100.0 * TRUSTED_AFTER_S)
    assert run.held is not None


def test_an_epoch_that_no_run_can_have_reached_is_a_lie(
    doubts: RollbackGuard, run: RunState, decisions: Decisions
) -> None:
    """It would use up the epochs."""
    refused = doubts.refusal(A, hello(epoch_seen=7 + MOST_STARTS + 1), 1.0)
    assert refused is not None and (refused.reason, refused.retriable) == (Reason.MALFORMED, False)
    assert run.held is None and decisions.take() == []


def held_by_one(doubts: RollbackGuard, *others: Hello) -> None:
    """a claims an epoch in the minute after a restart; the others come again and again, as who is refused for now."""
    assert doubts.refusal(A, hello(epoch_seen=1000), 100.0) is not None
    for later in (101.0, 99.0 + TRUSTED_AFTER_S):
        for number, other in enumerate(others):
            refused = doubts.refusal(NodeId(f"n{number}"), other, later)
            assert refused is not None and refused.reason is Reason.HOLDING


def test_one_node_s_word_alone_does_not_hold_a_run_that_others_contradict(
    doubts: RollbackGuard, run: RunState, alarms: dict[str, str]
) -> None:
    """A greeting with epoch_seen = 1000 in the minute after a restart held the run for ever."""
    held_by_one(doubts, hello())
    assert "node a has met epoch 1000" in alarms[ALARM] and "farloop release" in alarms[ALARM]
    assert doubts.refusal(NodeId("n0"), hello(), 100.0 + TRUSTED_AFTER_S) is None, "whoever lives has come by then"
    assert run.held is None and ALARM not in alarms and doubts.held_s == TRUSTED_AFTER_S
    assert alarms[f"{ALARM} of a"] == (
        "it is kept out: it has met epoch 1000, this start has 7; n0 contradicts it, and the run goes on; "
        "if it is right, stop the coordinator and put the newer state folder back, or start once with "
        "--adopt-from-nodes"
    )
    refused = doubts.refusal(A, hello(epoch_seen=1000), 101.0 + TRUSTED_AFTER_S)
    assert refused is not None and refused.reason is Reason.FENCED and run.held is None


@pytest.mark.parametrize(
    "other",
    [
        hello(anchors=()),
        hello(anchors=(ref(0, 5),)),
        hello(anchors=(ref(0, 5), ref(1, 2))),
        hello(anchors=(ref(0, 5), ref(1, 3, digest=9))),
        hello(history=0),
    ],
    ids=["a newcomer", "of a part", "away for long", "another version", "of a lost history"],
)
def test_who_was_not_there_at_the_last_commits_contradicts_nobody(
    doubts: RollbackGuard, run: RunState, ledger: Ledger, other: Hello
) -> None:
    if other.anchors[1:] == (ref(1, 3, digest=9),):
        del ledger.commits[1, 3]  # so long ago that its digest is not remembered
    held_by_one(doubts, other)
    assert doubts.refusal(NodeId("n0"), other, 1000.0) is not None and run.held is not None


def test_two_nodes_that_have_seen_more_hold_the_run_until_a_person_decides(
    doubts: RollbackGuard, run: RunState, alarms: dict[str, str]
) -> None:
    doubts.refusal(B, hello(anchors=(ref(0, 9), ref(1, 4))), 100.0)
    held_by_one(doubts, hello())
    assert doubts.refusal(NodeId("n0"), hello(), 1000.0) is not None and run.held is not None
    doubts.release(1000.0, "the run was released, and goes on without it")
    assert run.held is None and set(alarms) == {f"{ALARM} of a", f"{ALARM} of b"}
    assert doubts.refusal(NodeId("n0"), hello(), 1001.0) is None
    refused = doubts.refusal(B, hello(anchors=(ref(0, 9), ref(1, 4))), 1002.0)
    assert refused is not None and refused.reason is Reason.FENCED


def test_a_released_run_waits_for_a_node_that_is_not_kept_out(
    doubts: RollbackGuard, run: RunState, alarms: dict[str, str]
) -> None:
    """Where all nodes have seen more, a release would otherwise commit stored deltas: a fork."""
    held_by_one(doubts)
    doubts.release(200.0, "the run was released, and goes on without it")
    assert doubts.claims == {} and run.held == "a is kept out, and no other node has come yet"
    refused = doubts.refusal(A, hello(epoch_seen=1000), 201.0)
    assert refused is not None and refused.reason is Reason.FENCED and run.held is not None
    ahead = hello(anchors=(ref(0, 9), ref(1, 4)))
    refused = doubts.refusal(B, ahead, 202.0)
    assert refused is not None and refused.reason is Reason.HOLDING, "another node proves the same"
    assert set(doubts.claims) == {B} and "node b holds version 9" in alarms[ALARM] and "--rewind" in alarms[ALARM]
    doubts.release(203.0, "the run was released, and goes on without it")
    assert run.held == "a, b are kept out, and no other node has come yet"
    assert doubts.refusal(NodeId("n0"), hello(), 204.0) is None and run.held is None
    assert doubts.held_s == 104.0 and set(alarms) == {f"{ALARM} of a", f"{ALARM} of b"}
    refused = doubts.refusal(B, ahead, 205.0)
    assert refused is not None and refused.reason is Reason.FENCED and run.held is None
    assert doubts.refusal(B, hello(), 206.0) is None, "it has taken its word back"


def test_a_node_whose_newer_start_is_as_this_state_takes_its_word_back(doubts: RollbackGuard, run: RunState) -> None:
    held_by_one(doubts)
    assert doubts.refusal(A, hello(incarnation=2), 101.0) is not None
    assert doubts.refusal(A, hello(incarnation=2), 100.0 + TRUSTED_AFTER_S) is None and run.held is None
