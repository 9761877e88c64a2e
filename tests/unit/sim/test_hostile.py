"""What stops nodes that send something else than they have, and what never stops an honest one (docs/admission.md).

`PYTHONPATH=tests/cases python tests/unit/sim/test_hostile.py` trains the table there anew: the final loss with
disjoint classes, and alike.
"""

import sys
from collections import Counter
from functools import cache
from typing import Any

import pytest
from faulty_world import run
from forged_deltas import Deceit
from shards import Shards
from simulated_faults import CrashCoordinator, NodeSetup, Scenario
from simulated_outcome import Outcome
from simulated_runs import simulate
from slow_cases import slow
from toy_problem import terms_of

from farloop.algo.spec import NodeId
from farloop.algo.terms import LearningRate
from farloop.coordinator.decide import records as rec
from farloop.wire.reasons import Reason

LIAR = NodeId("d")
COSINE = LearningRate(peak=0.01, minimum=0.001, warmup_steps=24, shape="cosine")


@cache
def train(
    deceit: Deceit | None = None, *, foreign: float = 0.2, seed: int = 0, nodes: int = 4, **choices: Any
) -> Outcome:
    """Four nodes that see other classes than each other, the last of them a liar."""
    settings = {"steps": 144, "h": 12, "min_nodes": nodes, "lr": COSINE, "clip": 1.0, "outer_lr": 1.0, **choices}
    setups = tuple(
        NodeSetup(name=NodeId(name), seed=number, deceit=deceit if name == LIAR else None)
        for number, name in enumerate("abcd"[:nodes])
    )
    problem = Shards(nodes=4, foreign=foreign, seed=seed)
    terms = terms_of(**{"method": "diloco", "outer_momentum": 0.0, **settings})
    outcome = run(Scenario(terms=terms, nodes=setups, problem=problem, frugal=True))
    outcome.check()
    return outcome


def loss(outcome: Outcome) -> float:
    return outcome.evaluations[-1].loss


def refusals(outcome: Outcome) -> Counter[tuple[str, Reason]]:
    return Counter((r.blob.node, r.reason) for commit in outcome.commits for r in commit.refused)


def drops(outcome: Outcome) -> set[Reason]:
    """Why the liar's deltas were dropped, one way or another."""
    return {drop.reason for commit in outcome.commits for drop in commit.drops if drop.node == LIAR}


@pytest.mark.parametrize(
    ("deceit", "reason"),
    [
        ("nan", Reason.CORRUPT),
        ("thousandfold", Reason.OUTLIER),
        ("overflow", Reason.OUTLIER),
        ("stale", Reason.CORRUPT),
        ("claims", Reason.IMPLAUSIBLE),
    ],
)
def test_what_can_ruin_a_model_at_once_is_never_merged(deceit: Deceit, reason: Reason) -> None:
    """By the screen that runs have unless told otherwise: what is left is a run of the honest nodes."""
    outcome = train(deceit, codec_up="fp32")
    assert all(commit.contributors == ("a", "b", "c") for commit in outcome.commits)
    assert reason in drops(outcome)
    assert loss(outcome) == pytest.approx(loss(train(nodes=3, codec_up="fp32")), abs=0.05)


def test_numbers_that_were_sent_before_are_merged_once() -> None:
    outcome = train("replayed", codec_up="fp32")
    assert sum(LIAR in commit.contributors for commit in outcome.commits) == 1
    assert refusals(outcome)[LIAR, Reason.REPLAYED] > 5 and {node for node, _ in refusals(outcome)} == {LIAR}


def test_copies_are_stopped_where_samples_are_granted() -> None:
    nodes = tuple(NodeSetup(name=n, seed=i, deceit="copied" if n == LIAR else None) for i, n in enumerate("abcd"))
    outcome = simulate("diloco", steps=60, min_nodes=4, nodes=nodes, num_samples=10_000, blocks=8)
    merged = sum(LIAR in commit.contributors for commit in outcome.commits)  # its own, while it has seen no other
    assert refusals(outcome)[LIAR, Reason.COPIED] > 10 * merged
    assert {node for node, _ in refusals(outcome)} == {LIAR}


def test_a_flipped_sign_is_seen_where_the_others_agree_and_asked_for() -> None:
    outcome = train("flipped", foreign=1.0, screen="full")
    assert refusals(outcome)[LIAR, Reason.QUARANTINED] > 5
    assert {node for node, _ in refusals(outcome)} == {LIAR}
    assert not refusals(train("flipped", foreign=1.0)), "the usual screen does not look at directions"
    assert loss(outcome) < loss(train("flipped", foreign=1.0))


@pytest.mark.parametrize(("foreign", "seed"), [(0.0, 0), *slow((0.2, 1), (1.0, 2))])
@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"h": 6, "h_rule": "qsr", "h_alpha": 0.02},
        {"method": "streaming", "tau": 2, "mix": 0.25},
        {"outer_lr": 0.7, "outer_momentum": 0.9},
    ],
    ids=["plain", "growing-rounds", "streaming", "momentum"],
)
def test_honest_nodes_that_differ_much_are_never_refused(foreign: float, seed: int, choices: dict[str, Any]) -> None:
    """Disjoint classes to alike, warm-up and decay, rounds that grow, by the strictest screen."""
    outcome = train(foreign=foreign, seed=seed, screen="full", **choices)
    assert not refusals(outcome)
    assert all(len(commit.merged) == 4 for commit in outcome.commits)


@pytest.fixture(scope="module")
def honest() -> float:
    return loss(train(foreign=1.0))


def test_without_a_screen_a_long_delta_ruins_the_model(honest: float) -> None:
    assert loss(train("thousandfold", foreign=1.0, screen="off")) > 100 * honest


@pytest.mark.parametrize("rule", ["clipped", *slow("median", "trimmed")])
def test_without_a_screen_a_robust_merge_saves_the_model(rule: str, honest: float) -> None:
    assert loss(train("thousandfold", foreign=1.0, screen="off", merge=rule)) < 2 * honest


@pytest.mark.parametrize("merge", ["clipped", *slow("median", "trimmed", "krum")])
def test_a_robust_merge_comes_out_the_same_after_a_crash(merge: str) -> None:
    """P: what the rule chose is in the record, or is chosen again."""
    nodes = tuple(NodeSetup(name=NodeId(name), seed=number) for number, name in enumerate("abcde"))
    terms = terms_of("diloco", steps=40, min_nodes=5, merge=merge)
    plain = run(Scenario(terms=terms, nodes=nodes))
    for event in (70, 100):
        crashed = run(Scenario(terms=terms, nodes=nodes, faults=(CrashCoordinator(at_event=event),)))
        crashed.check()
        assert crashed.anchor_digests == plain.anchor_digests and not crashed.alarms


def test_a_run_in_which_nothing_can_be_merged_ends_all_the_same() -> None:
    """E: finite deltas near the end of fp32, no other node, no screen, and no node that would hold the run for it."""
    node = NodeSetup(name=NodeId("a"), deceit="overflow")
    terms = terms_of("diloco", steps=40, min_nodes=1, codec_up="fp32", screen="off")
    faults = (CrashCoordinator(at_event=25), CrashCoordinator(at_event=40))
    for happened in ((), faults):
        outcome = run(Scenario(terms=terms, nodes=(node,), faults=happened, floor_share=0.0))
        outcome.check()
        voids = [r for r in outcome.records if isinstance(r, rec.WindowCommitted) and not r.blobs]
        assert len(voids) > 5 and all(record.refused[0].reason is Reason.TOO_MUCH for record in voids)


if __name__ == "__main__":
    table: dict[Deceit | None, list[dict[str, Any]]] = {
        None: [{"nodes": 3}, {}, *({"merge": merge} for merge in ("clipped", "median"))],
        "thousandfold": [
            {"screen": "off"},
            {},
            *({"screen": "off", "merge": merge} for merge in ("clipped", "median")),
        ],
        "flipped": [{"screen": "off"}, {"screen": "full"}, *({"merge": merge} for merge in ("clipped", "median"))],
        "replayed": [{"screen": "off"}, {}],
    }
    for shown, runs in table.items():
        for choices in runs:
            losses = [loss(train(shown, foreign=share, steps=240, **choices)) for share in (0.0, 1.0)]
            sys.stdout.write(f"{shown or 'all honest'} {choices}: {losses[0]:.3f} {losses[1]:.3f}\n")
            sys.stdout.flush()
