"""What a run trains on, whatever goes wrong: all of it, and twice only what is counted (protocol, Data leases)."""

import dataclasses
import itertools
from typing import Any

import pytest
from simulated_faults import CrashCoordinator, CrashNode, CutLink, DrainNode, Fault
from simulated_outcome import Outcome, SampleBook, check_samples
from simulated_runs import simulate
from slow_cases import slow

from farloop.algo.spec import NodeId
from farloop.coordinator.decide import records as rec

A, B = NodeId("a"), NodeId("b")


def checked(method: str, *faults: Fault, **given: Any) -> tuple[Outcome, SampleBook]:
    outcome = simulate(method, *faults, **{"num_samples": 500, **given})
    return outcome, check_samples(outcome.records, outcome.diaries, outcome.terms)


def test_what_a_crashed_node_had_not_brought_is_trained_on_again() -> None:
    """B dies between two sends: the samples since its last stored delta, and only those, come twice."""
    outcome, book = checked("diloco", CrashNode(node=B, at=2.35, down_s=1.0), steps=80, h=10)
    (end,) = (end for end in book.ends if end.owner == (B, 1))
    first, second = (start.diary.samples for start in outcome.nodes[B])
    again = set(first) & {*second, *outcome.nodes[A][0].diary.samples}
    assert again == set(first[end.stored :]) and 0 < len(again) <= 10 * outcome.terms.inner.batch_sequences
    assert 0 < end.counted <= len(again), "what it told of before it died"


def test_a_node_that_drains_leaves_nothing_that_is_not_counted() -> None:
    _, book = checked("diloco", DrainNode(node=B, at=2.35), steps=40, h=10, quorum=1, min_nodes=1)
    (end,) = (end for end in book.ends if end.owner == (B, 1))
    assert end.counted == book.ledger.leases.uncertain_total > 0


@pytest.mark.parametrize("reset", [False, *slow(True)])
def test_a_node_that_was_away_for_too_long_goes_on_with_other_samples(reset: bool) -> None:
    """Its own went to the other one meanwhile. What it had trained on by then is all that comes twice, and counted."""
    cut = CutLink(node=B, at=2.0, for_s=15.0, reset=reset)
    world = {"num_samples": 5000, "expire_s": 0.5, "patience_s": 120.0}
    outcome, book = checked("decoupled", cut, steps=300, h=6, quorum=1, max_stale_rounds=4, **world)
    (anew,) = (r for r in outcome.records if isinstance(r, rec.LeaseGranted) and r.since is not None)
    assert anew.node == B
    (end, *_) = (end for end in book.ends if end.owner == (B, 1))
    assert end.used is not None and end.counted == end.used - end.stored > 0
    taken = [set(outcome.nodes[name][0].diary.samples) for name in (A, B)]
    assert len(taken[0] & taken[1]) <= end.counted


def test_a_coordinator_that_dies_knows_what_is_in_stored_deltas() -> None:
    """Reports are not journaled, deltas are."""
    faults = CrashCoordinator(at=3.0, down_s=0.5), CrashNode(node=A, at=3.1, down_s=2.0)
    _, book = checked("streaming", *faults, steps=60, h=6)
    assert book.ledger.leases.trained_total > 0


def test_gradients_that_are_not_spooled_are_counted_at_their_commit() -> None:
    """K: a restart knows of them by the commit alone."""
    faults = CrashCoordinator(at=2.0, down_s=0.5), CrashNode(node=B, at=2.1, down_s=1.0)
    outcome, book = checked("data-parallel", *faults, steps=30)
    assert not any(isinstance(record, rec.InputStored) for record in outcome.records)
    (end,) = (end for end in book.ends if end.owner == (B, 1))
    assert end.stored > 0
    assert len(outcome.nodes[B][0].diary.samples) - end.stored <= 2 * outcome.terms.inner.batch_sequences


@pytest.fixture(scope="module")
def plain() -> Outcome:
    return simulate("diloco", steps=12, num_samples=500)


def test_a_sample_that_was_skipped_is_noticed(plain: Outcome) -> None:
    changed = [
        dataclasses.replace(record, lease=dataclasses.replace(record.lease, count=record.lease.count - 1))
        if isinstance(record, rec.LeaseGranted) and record.node == A
        else record
        for record in plain.records
    ]
    with pytest.raises(AssertionError):
        check_samples(changed, plain.diaries, plain.terms)


def test_a_sample_that_was_not_granted_is_noticed(plain: Outcome) -> None:
    told = plain.diaries
    first = told[A, 1]
    swapped = dataclasses.replace(first, samples=[first.samples[1], first.samples[0], *first.samples[2:]])
    with pytest.raises(AssertionError, match="trains on what it was granted"):
        check_samples(plain.records, {**told, (A, 1): swapped}, plain.terms)


def test_what_comes_twice_and_is_not_uncertain_is_noticed(plain: Outcome) -> None:
    told = plain.diaries
    longer = dataclasses.replace(told[B, 1], samples=[*told[B, 1].samples, *told[A, 1].samples])
    records = list(itertools.takewhile(lambda record: not isinstance(record, rec.NodeLeft), plain.records))
    check_samples(records, told, plain.terms)
    with pytest.raises(AssertionError):
        check_samples(records, {**told, (B, 1): longer}, plain.terms)
