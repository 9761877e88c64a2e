"""Rounds of different lengths in a whole run: planned once, by the coordinator, whatever happens to it."""

import dataclasses
from collections import Counter
from typing import Any

import pytest
from faulty_world import run
from simulated_faults import CrashCoordinator, CrashNode, Fault, NodeSetup, Scenario
from simulated_outcome import Outcome
from slow_cases import mostly_slow, slow
from toy_problem import BATCH_SEQUENCES, SEQUENCE_TOKENS, terms_of

from farloop.algo.methods import METHODS
from farloop.algo.schedule import first_rounds, initial_h
from farloop.algo.spec import NodeId, RoundPlan
from farloop.algo.terms import LearningRate, Rewarm, Terms
from farloop.coordinator.decide import records as rec
from farloop.sim.network import HOSTILE_LINK, LinkConditions

RULES: dict[str, dict[str, Any]] = {
    "qsr": {"h_alpha": 0.044},
    "cubic": {"h_alpha": 0.032, "h_max": 12},
    "linear": {"h_alpha": 0.1, "h_init": 4},
    "post-local": {"h_switch": 10, "h_init": 4},
}


def varied(method: str = "streaming", rule: str = "qsr", **choices: Any) -> Terms:
    """Forty steps in rounds of five and more, with momentum and a cosine from 0.02 to 0.002."""
    lr = LearningRate(peak=0.02, minimum=0.002, warmup_steps=4)
    terms = terms_of(method, steps=40, h=5, h_rule=rule, **{"lr": lr, **RULES[rule], **choices})
    lengths = [plan.length for plan in first_rounds(terms, 40)]
    assert len(set(lengths[:-1])) > 1, "rounds differ"
    return terms


def play(terms: Terms, *faults: Fault, weather: LinkConditions | None = None) -> Outcome:
    outcome = run(Scenario(terms=terms, faults=faults, weather=weather or LinkConditions(), num_samples=500))
    outcome.check()
    return outcome


def fixed(outcome: Outcome) -> tuple[RoundPlan, ...]:
    """The rounds of a run in the order its journal has them, every one of them once."""
    started = outcome.records[0]
    assert isinstance(started, rec.RunStarted)
    return (*started.rounds, *(record.round for record in outcome.records if isinstance(record, rec.RoundFixed)))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("method", ["diloco", "streaming"])
def test_a_run_with_rounds_of_its_own_ends_with_equal_anchors_everywhere(method: str, rule: str) -> None:
    """B17, C32: every fragment is final, and every slot was sent in every round."""
    terms = varied(method, rule)
    outcome = play(terms)
    rounds = first_rounds(terms, 40)
    assert fixed(outcome) == rounds
    for starts in outcome.nodes.values():
        assert [start.inner_steps for start in starts] == [40]
        assert all(start.anchor_digests == outcome.anchor_digests for start in starts)
    last_slot = max(fragment.slot for fragment in outcome.layout.fragments)
    for fragment in outcome.layout.fragments:
        first = 0 if fragment.slot == last_slot else 1
        assert {commit.round for commit in outcome.of(fragment.index)} == {*range(first, len(rounds))}


@pytest.mark.parametrize("at_event", mostly_slow(range(3, 60, 7), 31))
def test_a_coordinator_that_dies_has_planned_the_same_rounds_when_it_is_back(at_event: int) -> None:
    """B21: and corrected the same steps, to the bit."""
    terms = varied()
    clean, crashed = play(terms), play(terms, CrashCoordinator(at_event=at_event, down_s=0.5))
    assert fixed(crashed) == fixed(clean)
    assert (crashed.anchor_digests, crashed.target_digests) == (clean.anchor_digests, clean.target_digests)
    assert crashed.alarms == 0


@pytest.mark.parametrize("seed", [0, *slow(1, 2)])
def test_a_storm_and_a_node_that_dies_change_no_round(seed: int) -> None:
    terms = varied()
    outcome = play(terms, CrashNode(node=NodeId("b"), at=1.0 + seed, down_s=1.0), weather=HOSTILE_LINK)
    assert fixed(outcome) == first_rounds(terms, 40)


def test_a_correction_reaches_the_target_and_only_where_it_is_wanted() -> None:
    with_it, without = play(varied()), play(varied(outer_correction=False))
    scales = [record.delta_scale for record in with_it.records if isinstance(record, rec.WindowCommitted)]
    assert len(set(scales)) > 3 and with_it.target_digests != without.target_digests
    assert {record.delta_scale for record in without.records if isinstance(record, rec.WindowCommitted)} == {1.0}


def test_a_rewarm_shortens_rounds_again_and_clears_the_momentum() -> None:
    """The node's rate rises, the coordinator's rounds shrink; all fragments forget once."""
    lr = LearningRate(peak=0.02, minimum=0.002, warmup_steps=4, rewarms=(Rewarm(start=24, peak=0.02),))
    terms = varied(lr=lr)
    outcome = play(terms)
    (at,) = [plan.index for plan in fixed(outcome) if plan.start == 24]
    assert fixed(outcome)[at].length == initial_h(terms) < fixed(outcome)[at - 1].length
    forgetful = [
        record.fragment
        for record in outcome.records
        if isinstance(record, rec.WindowCommitted) and record.outer_momentum == 0.0 and record.outer_lr != 1.0
    ]
    assert sorted(forgetful) == [fragment.index for fragment in outcome.layout.fragments]
    (node,) = outcome.nodes[NodeId("a")]
    rates = node.diary.learning_rates
    assert rates[23] < 0.004 and max(rates[24:30]) == pytest.approx(0.02)


BATCH = BATCH_SEQUENCES * SEQUENCE_TOKENS
STEPS = 48


@pytest.mark.parametrize(
    "method",
    mostly_slow([name for name, method in METHODS.items() if method.weights != "equal"], "streaming", "decoupled"),
)
def test_the_size_of_the_batch_decides_the_weight_of_a_delta_and_not_the_steps_of_a_node(method: str) -> None:
    """A, H: three nodes at one pace, one of them with a quarter of the batch."""
    choices = {} if "h" in METHODS[method].fixed else {"h": 12}
    terms = terms_of(method, steps=STEPS, min_nodes=3, **choices)
    nodes = tuple(NodeSetup(name=NodeId(name), seed=seed, step_s=0.1) for seed, name in enumerate("abc"))
    small = dataclasses.replace(nodes[2], tokens=BATCH // 4)
    outcome = run(Scenario(terms=terms, nodes=(*nodes[:2], small)))
    outcome.check()
    assert not [r for r in outcome.records if isinstance(r, rec.RoundFixed) and r.round.node_steps]
    assert {outcome.nodes[node.name][0].inner_steps for node in nodes} == {STEPS}
    # A node that is ready a moment after the others begins at a later slot of the first round.
    merged = Counter(name for commit in outcome.commits if commit.round for name in commit.contributors)
    assert len(set(merged.values())) == 1, merged
    for record in outcome.records:
        if isinstance(record, rec.WindowCommitted) and len(record.blobs) == 3 and not record.flush:
            weights = {addend.blob.node: addend.weight for addend in record.blobs}
            assert weights[NodeId("c")] < 0.3 * weights[NodeId("a")], weights
