"""A coordinator over an old copy: the run is held, a person winds it back or goes on from what nodes hold, and
all end equal (protocol S)."""

import dataclasses

import pytest
import simulated_faults as ft
import simulated_faults as sc
from faulty_world import World, run
from random_scenarios import restored_scenario
from simulated_outcome import Outcome
from slow_cases import slow
from toy_problem import terms_of

from farloop.algo.spec import NodeId
from farloop.coordinator.decide import events as coordinator_ev
from farloop.coordinator.decide import records as rec
from farloop.node import events as node_ev
from farloop.wire.messages import Refused
from farloop.wire.reasons import Reason

RUNS, BATCH = 320, 10

COPY = sc.RestoreCopy(after_commits=6, commits_ago=3, down_s=1.0, decides_s=2.0)


def restored(*faults: sc.Fault, copy: sc.RestoreCopy = COPY, num_samples: int = 0) -> Outcome:
    """Two nodes, three fragments of a window a round each."""
    terms = terms_of("streaming", steps=24, h=4, tau=1, mix=0.5, min_nodes=2)
    outcome = run(sc.Scenario(terms=terms, faults=(copy, *faults), num_samples=num_samples))
    outcome.check()
    return outcome


def times(outcome: Outcome, kind: type) -> list[float]:
    return [when for when, _, what in outcome.tape if isinstance(what, kind)]


def test_the_run_is_held_until_it_is_wound_back_and_ends_equal_everywhere() -> None:
    outcome = restored()
    refused = [what.message for _, _, what in outcome.tape if isinstance(what, node_ev.Received)]
    reasons = {message.reason for message in refused if isinstance(message, Refused)}
    assert reasons == {Reason.HOLDING}, "no node is sent away for good"
    assert len(outcome.lost) == 3
    (rewound,) = [record for record in outcome.records if isinstance(record, rec.Rewound)]
    began = times(outcome, node_ev.Resync)
    assert len(began) == 2 and rewound.epoch == 3
    held = min(times(outcome, coordinator_ev.Refuse))
    assert not [when for when in times(outcome, coordinator_ev.CommitDone) if held < when < min(began)]
    for (start,) in outcome.nodes.values():
        assert start.stage == "finished" and start.anchor_digests == outcome.anchor_digests
    assert {share for commit in outcome.commits for share in commit.contributors} == {NodeId("a"), NodeId("b")}


def test_samples_of_the_lost_stretch_are_granted_anew() -> None:
    outcome = restored(num_samples=200)
    assert len(times(outcome, node_ev.Resync)) == 2
    assert all(start.stage == "finished" for (start,) in outcome.nodes.values())


def test_a_node_that_was_away_when_the_run_was_wound_back_begins_again_without_a_second_hold() -> None:
    """It is ahead by more than a version, and the operator need not decide twice."""
    cut = sc.CutLink(node=NodeId("b"), at=0.0, for_s=0.0)
    first = restored(cut)
    died = next(when for when, _, what in first.tape if isinstance(what, str) and what.startswith("restored"))
    outcome = restored(sc.CutLink(node=NodeId("b"), at=died - 0.01, for_s=9.0, reset=True))
    assert sum(isinstance(record, rec.Rewound) for record in outcome.records) == 1
    began = [(when, who) for when, who, what in outcome.tape if isinstance(what, node_ev.Resync)]
    assert [who for _, who in began] == ["a", "b"]
    (start,) = outcome.nodes[NodeId("b")]
    assert start.anchor_digests == outcome.anchor_digests


def the_adoption(outcome: Outcome) -> rec.Adopted:
    (adopted,) = [record for record in outcome.records if isinstance(record, rec.Adopted)]
    return adopted


ADOPTED = dataclasses.replace(COPY, after_commits=9, commits_ago=6, adopts=True)


def test_the_run_goes_on_from_what_the_nodes_hold_and_ends_equal_everywhere() -> None:
    """What any node holds keeps its version and its digest; the versions go on from there."""
    outcome = restored(copy=ADOPTED)
    adopted = the_adoption(outcome)
    held = {(commit.fragment, commit.version): commit.anchor_digest for commit in outcome.lost}
    assert len(adopted.anchors) == 3 and not adopted.lost and not adopted.missing
    for anchor in adopted.anchors:
        assert held[anchor.fragment, anchor.version] == anchor.digest and anchor.version > anchor.before
        after = [commit.version for commit in outcome.of(anchor.fragment) if commit.version > anchor.before]
        assert after[0] == anchor.version + 1
    assert not any(isinstance(record, rec.Rewound) for record in outcome.records)
    assert len(times(outcome, node_ev.Resync)) == 2
    for (start,) in outcome.nodes.values():
        assert start.stage == "finished" and start.anchor_digests == outcome.anchor_digests


def test_samples_that_were_trained_on_since_the_copy_are_not_granted_again() -> None:
    outcome = restored(copy=ADOPTED, num_samples=200)
    adopted = the_adoption(outcome)
    assert adopted.uncertain == 0, "all that had any said what is left"
    taken = [position for (start,) in outcome.nodes.values() for position in start.diary.samples]
    assert len(set(taken)) == len(taken)


def test_who_is_away_for_too_long_is_not_waited_for() -> None:
    first = restored(copy=ADOPTED)
    died = next(when for when, _, what in first.tape if isinstance(what, str) and what.startswith("restored"))
    outcome = restored(sc.CutLink(node=NodeId("b"), at=died - 0.01, for_s=50.0, reset=True), copy=ADOPTED)
    assert the_adoption(outcome).missing == (NodeId("b"),)
    (start,) = outcome.nodes[NodeId("a")]
    assert start.stage == "finished" and start.anchor_digests == outcome.anchor_digests


@pytest.mark.parametrize(("durable", "step"), [(True, 3), *slow((True, 1), (False, 1))])
def test_an_adoption_that_dies_at_any_write_goes_on_or_leaves_the_copy(durable: bool, step: int) -> None:
    """With every start the person says the same; nothing was told before all of it is durable."""
    terms = terms_of("streaming", steps=24, h=4, tau=1, mix=0.5, min_nodes=2)
    calm = World(sc.Scenario(terms=terms, faults=(ADOPTED,)))
    records = calm.run().records
    fetched = [at for at, record in enumerate(records) if isinstance(record, rec.AnchorFetched)]
    last = next(at for at, record in enumerate(records) if isinstance(record, rec.Adopted))
    assert len(fetched) == 3 and last > max(fetched)
    not_in_the_copy = calm.disk.writes - (len(records) - 1)
    for at in range(min(fetched), last + 3, step):
        outcome = restored(ft.CrashAtWrite(write=at + not_in_the_copy, durable=durable), copy=ADOPTED)
        again = [record for record in outcome.records if isinstance(record, rec.AnchorFetched)]
        assert the_adoption(outcome).anchors and len(again) <= 3, "what is here is not fetched twice"
        assert sum(what == "crashed" for _, _, what in outcome.tape) == (4 if at < last + (not durable) else 3)


def test_a_fork_is_left_to_the_person_who_winds_the_run_back() -> None:
    """The copy went on unnoticed while its nodes were away, and they hold the same versions with another content."""
    scenario = restored_scenario(230, faults=2)
    assert any(isinstance(fault, sc.RestoreCopy) and fault.adopts for fault in scenario.faults)
    outcome = run(scenario)
    outcome.check()
    assert any(isinstance(record, rec.Rewound) for record in outcome.records)
    assert not any(isinstance(record, rec.Adopted) for record in outcome.records)


BATCHES = [
    pytest.param(first, marks=() if first == 0 else pytest.mark.slow, id=f"{first}") for first in range(0, RUNS, BATCH)
]


@pytest.mark.parametrize("first", BATCHES)
def test_whatever_else_goes_wrong_no_two_histories_are_mixed(first: int) -> None:
    """Every node that ends the run holds the coordinator's anchors, which are those of one journal, decided once."""
    began = adopted = 0
    for seed in range(first, first + BATCH):
        scenario = restored_scenario(seed, faults=seed % 4)
        try:
            outcome = run(scenario)
            outcome.check()
        except Exception as error:
            error.add_note(f"restored_scenario({seed}, faults={seed % 4})")
            raise
        began += bool(times(outcome, node_ev.Resync))
        adopted += any(isinstance(record, rec.Adopted) for record in outcome.records)
    assert began >= BATCH // 8, "too few of these scenarios are about what they are for"
    assert adopted or first, "of ten that are drawn none may adopt; of the first ten some do"
