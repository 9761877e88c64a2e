"""What stops nodes that send something else than they have, and what never stops an honest one (docs/admission.md).

`python tests/unit/sim/test_hostile.py` trains the table there anew: the final loss with disjoint classes, and alike.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from farloop.algo.digest import digest
from farloop.algo.spec import Identity, NodeId, RunSpec
from farloop.algo.terms import LearningRate, Terms
from farloop.coordinator.aggregator import first_anchor
from farloop.coordinator.decide import records as rec
from farloop.sim.outcome import Outcome
from farloop.sim.problems import inner_optimizer, layout_of, terms_of
from farloop.sim.scenario import CrashCoordinator, Deceit, NodeSetup, Scenario
from farloop.sim.world import run
from farloop.wire.reasons import Reason

# --- What is trained: ten clouds of points in sixteen dimensions, by a network of one hidden layer, on nodes that see
# other classes than each other. The lengths and directions of deltas are those of training.

CLASSES = 10
_DIMENSIONS, _HIDDEN, _BATCH = 16, 32, 32
_SPREAD = 1.2  # of the points of a cloud, where their centres are about √(2 · 16) apart


def _network() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(_DIMENSIONS, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, CLASSES))


def _points(classes: Tensor, generator: torch.Generator) -> Tensor:
    centres = torch.randn(CLASSES, _DIMENSIONS, generator=torch.Generator().manual_seed(5))
    return centres[classes] + _SPREAD * torch.randn(len(classes), _DIMENSIONS, generator=generator)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """Node k of `nodes` sees the classes k, k + nodes, … and of the others a point in a while."""

    nodes: int
    foreign: float = 0.0  # share of a node's points that are of any class
    seed: int = 0

    def begin(self, terms: Terms) -> tuple[RunSpec, list[Tensor]]:
        module = _network()
        layout = layout_of(module, terms, blocks_per_fragment=1, together=False)
        tensors = dict(module.named_parameters())
        anchors = [first_anchor(fragment, tensors) for fragment in layout.fragments]
        identity = Identity(
            name="shards",
            model="own",
            layout=layout,
            anchor_digests=tuple(digest(anchor) for anchor in anchors),
            data="own",
            num_samples=0,
            evaluation_set="shards",
            seed=self.seed,
        )
        return RunSpec(identity=identity, terms=terms), anchors

    def learner(self, node: NodeId, seed: int) -> "Classifier":
        return Classifier(self, seed)


class Classifier:
    """What one node trains."""

    def __init__(self, shards: Shards, number: int) -> None:
        self.module = _network()
        self._shards, self._number = shards, number

    def optimizer(self, terms: Terms) -> torch.optim.Optimizer:
        return inner_optimizer(self.module, "adamw", terms)

    def backward(self, samples: Sequence[int], at: float = 0.0) -> float:
        shards = self._shards
        generator = torch.Generator().manual_seed(hash((shards.seed, self._number, samples[0])) % (1 << 62))
        own = torch.arange(self._number % shards.nodes, CLASSES, shards.nodes)
        classes = own[torch.randint(len(own), (_BATCH,), generator=generator)]
        foreign = torch.rand(_BATCH, generator=generator) < shards.foreign
        classes = torch.where(foreign, torch.randint(CLASSES, (_BATCH,), generator=generator), classes)
        self.module.zero_grad()
        loss = functional.cross_entropy(self.module(_points(classes, generator)), classes)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    @torch.no_grad()
    def evaluate(self) -> float:
        """Over all classes alike."""
        classes = torch.arange(CLASSES).repeat_interleave(100)
        points = _points(classes, torch.Generator().manual_seed(11))
        return float(functional.cross_entropy(self.module(points), classes))


# --- Runs

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
    outcome = run(Scenario(terms=terms_of("diloco", steps=60, min_nodes=4), nodes=nodes, num_samples=10_000, blocks=8))
    outcome.check()
    merged = sum(LIAR in commit.contributors for commit in outcome.commits)  # its own, while it has seen no other
    assert refusals(outcome)[LIAR, Reason.COPIED] > 10 * merged
    assert {node for node, _ in refusals(outcome)} == {LIAR}


def test_a_flipped_sign_is_seen_where_the_others_agree_and_asked_for() -> None:
    outcome = train("flipped", foreign=1.0, screen="full")
    assert refusals(outcome)[LIAR, Reason.QUARANTINED] > 5
    assert {node for node, _ in refusals(outcome)} == {LIAR}
    assert not refusals(train("flipped", foreign=1.0)), "the usual screen does not look at directions"
    assert loss(outcome) < loss(train("flipped", foreign=1.0))


@pytest.mark.parametrize(("foreign", "seed"), [(0.0, 0), (0.2, 1), (1.0, 2)])
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
def test_honest_nodes_are_never_refused_however_much_they_differ(
    foreign: float, seed: int, choices: dict[str, Any]
) -> None:
    """Disjoint classes to alike, warm-up and decay, rounds that grow, by the strictest screen."""
    outcome = train(foreign=foreign, seed=seed, screen="full", **choices)
    assert not refusals(outcome)
    assert all(len(commit.merged) == 4 for commit in outcome.commits)


def test_without_a_screen_a_long_delta_ruins_the_model_and_a_robust_merge_saves_it() -> None:
    honest = loss(train(foreign=1.0))
    assert loss(train("thousandfold", foreign=1.0, screen="off")) > 100 * honest
    for rule in ("clipped", "median", "trimmed"):
        assert loss(train("thousandfold", foreign=1.0, screen="off", merge=rule)) < 2 * honest, rule


@pytest.mark.parametrize("merge", ["clipped", "median", "trimmed", "krum"])
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
    """E: finite deltas near the end of fp32, nobody else, no screen, and nobody who would hold the run for it."""
    node = NodeSetup(name=NodeId("a"), deceit="overflow")
    terms = terms_of("diloco", steps=40, min_nodes=1, codec_up="fp32", screen="off")
    faults = (CrashCoordinator(at_event=25), CrashCoordinator(at_event=40))
    for happened in ((), faults):
        outcome = run(Scenario(terms=terms, nodes=(node,), faults=happened, floor_share=0.0))
        outcome.check()
        voids = [r for r in outcome.records if isinstance(r, rec.WindowCommitted) and not r.blobs]
        assert len(voids) > 5 and all(record.refused[0].reason is Reason.TOO_MUCH for record in voids)


def test_every_deceit_is_tried_here() -> None:
    tried = {"nan", "thousandfold", "overflow", "stale", "claims", "replayed", "copied", "flipped"}
    assert set(get_args(Deceit)) - tried == {"noise"}, "which nothing can tell from honest noise"


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
