"""What low-communication training must reduce to, and what must never change its result, on the pure layer alone.

A toy net is trained by nodes and a coordinator that are plain functions here: `algo` does all the arithmetic, and there
is no network, no codec and no clock but the step counter. "bit" below is equality of bytes, "fp" closeness in fp32.
"""

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from farloop.algo.digest import digest
from farloop.algo.fragments import flatten_into, partition, trainable_tensors, view
from farloop.algo.local_update import fragment_delta_into, mix_fragment_into
from farloop.algo.merge_rules import add_, radial_into
from farloop.algo.outer_optimizers import PLAIN_AVERAGE, OuterSettings, outer_step_, state_names, step_
from farloop.algo.schedule import due_step
from farloop.algo.spec import BlobId, BlobKind, Contribution, Fragment, Layout, NodeId, Pattern
from farloop.algo.weights import sum_key, token_weights

NESTEROV = OuterSettings(lr=0.7, momentum=0.9)
INNER_LR = 1e-2

Vote = Literal["votes", "zero", "absent"]


class Toy(nn.Module):
    """Weights between ½ and 1 in size: near enough to each other for exact differences, far enough from zero."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 2)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                sign = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
                parameter.copy_(sign * (0.5 + 0.5 * torch.rand(parameter.shape, generator=generator)))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.embed(x))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class Run:
    num_nodes: int = 2
    pattern: Pattern = "strided"
    h: int = 4
    rounds: int = 3
    tau: int = 0
    mix: float = 0.0
    outer: OuterSettings = PLAIN_AVERAGE
    inner: Literal["adamw", "sgd"] = "adamw"
    same_data: bool = False
    tokens: tuple[int, ...] = (1, 1, 1, 1)
    """Tokens of a contribution, by node."""
    codec: Callable[[Tensor], Tensor] | None = None
    """Decode after encode, both ways; None: the anchor is the target."""
    rule: Literal["mean", "radial"] = "mean"
    """How the deltas of a window become one."""
    votes: Callable[[int, int], Vote] = lambda node, step: "votes"
    """Whether a node's delta of a step is merged, merged with no steps of its own, or missing."""

    def layout(self) -> Layout:
        shapes = [(name, tuple(p.shape)) for name, p in trainable_tensors(Toy())]
        return partition(shapes, pattern=self.pattern, blocks_per_fragment=2)


class Node:
    """A replica: inner optimizer, anchors, and the local weights by name."""

    def __init__(self, run: Run, number: int) -> None:
        self.id = NodeId(f"node-{number}")
        self.data_seed = 0 if run.same_data else number
        self.model = Toy()
        self.local: dict[str, Tensor] = dict(trainable_tensors(self.model))
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(self.model.parameters(), lr=INNER_LR)
            if run.inner == "sgd"
            else torch.optim.AdamW(self.model.parameters(), lr=INNER_LR, betas=(0.9, 0.95))
        )
        self.anchors = {f.index: flat(f, self.local) for f in run.layout().fragments}

    def inner_step(self, step: int) -> None:
        generator = torch.Generator().manual_seed(1000 * self.data_seed + step)
        x = torch.randn(8, 4, generator=generator)
        loss = (self.model(x) - torch.sin(3 * x[:, :2])).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def delta(self, fragment: Fragment) -> Tensor:
        out = torch.full((fragment.numel,), torch.nan)
        fragment_delta_into(fragment, self.anchors[fragment.index], self.local, out)
        return out

    def merge(self, fragment: Fragment, anchor: Tensor, a: float) -> None:
        self.anchors[fragment.index] = anchor
        mix_fragment_into(fragment, self.local, anchor, a)

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.local.items()}


def flat(fragment: Fragment, tensors: Mapping[str, Tensor]) -> Tensor:
    out = torch.empty(fragment.numel)
    flatten_into(fragment, tensors, out)
    return out


def merged(window: Mapping[BlobId, tuple[Contribution, Tensor]]) -> Tensor:
    """The window's one delta. What was delivered twice has one key, and the order of delivery is forgotten."""
    contributors = [(contribution,) for contribution, _ in window.values()]
    deltas = [delta for _, delta in window.values()]
    weights = token_weights(contributors)
    acc = torch.zeros_like(deltas[0])
    for position in sorted(range(len(deltas)), key=lambda position: sum_key(contributors[position])):
        add_(acc, deltas[position], weights[position])
    return acc


def merged_radially(window: Mapping[BlobId, tuple[Contribution, Tensor]], fragment: Fragment) -> Tensor:
    """The window's one delta by directions and lengths."""
    weights = token_weights([(contribution,) for contribution, _ in window.values()])
    ordered = sorted(zip(window.values(), weights, strict=True), key=lambda entry: sum_key([entry[0][0]]))

    def norms(pieces: Iterable[Tensor]) -> list[float]:
        whole = torch.cat(list(pieces))
        return [float(view(whole, tensor).double().norm()) for tensor in fragment.tensors]

    out = torch.empty(fragment.numel)
    deltas = [partial(tuple, (delta,)) for (_, delta), _ in ordered]
    radial_into(deltas, [weight for _, weight in ordered], fragment, out, norms)
    return out


def contribution(node: NodeId, *, tokens: int, steps: int = 4) -> Contribution:
    return Contribution(node=node, incarnation=1, base=0, steps=steps, tokens=tokens, norm_sq=0.0)


def blob(node: NodeId, version: int, seq: int = 0) -> BlobId:
    return BlobId(kind=BlobKind.DELTA, fragment=0, version=version, node=node, incarnation=1, seq=seq)


class World:
    """Steps all nodes together, and the coordinator with them."""

    def __init__(self, run: Run, layout: Layout | None = None) -> None:
        self.run = run
        self.layout = layout or run.layout()
        self.nodes = [Node(run, number) for number in range(run.num_nodes)]
        self.anchors = [flat(f, self.nodes[0].local) for f in self.layout.fragments]
        self.targets = [anchor.clone() for anchor in self.anchors]
        self.momenta = [torch.zeros_like(anchor) for anchor in self.anchors]
        self.versions = [0] * len(self.anchors)
        for node in self.nodes:
            node.anchors = dict(enumerate(self.anchors))
        self.history: list[dict[str, Tensor]] = []
        """Local weights of the first node after each step, merges included."""

    def train(self) -> "World":
        for step in range(1, self.run.rounds * self.run.h + 1):
            self.step(step)
        return self

    def step(self, step: int) -> None:
        for node in self.nodes:
            node.inner_step(step)
        for fragment in self.layout.fragments:
            if self.is_due(fragment, step):
                self.commit(fragment, step)
        for fragment in self.layout.fragments:
            if self.is_due(fragment, step - self.run.tau):
                for node in self.nodes:
                    node.merge(fragment, self.anchors[fragment.index], self.run.mix)
        self.history.append(self.nodes[0].weights())

    def is_due(self, fragment: Fragment, step: int) -> bool:
        due = due_step(fragment.slot, self.layout.slots, self.run.h)
        return step >= self.run.h and (step - due) % self.run.h == 0

    def commit(self, fragment: Fragment, step: int) -> None:
        p, run = fragment.index, self.run
        window: dict[BlobId, tuple[Contribution, Tensor]] = {}
        for number, node in enumerate(self.nodes):
            if (vote := run.votes(number, step)) != "absent":
                delta = node.delta(fragment) if run.codec is None else run.codec(node.delta(fragment))
                steps = run.h if vote == "votes" else 0
                window[blob(node.id, self.versions[p])] = (
                    contribution(node.id, tokens=run.tokens[number], steps=steps),
                    delta,
                )
        delta = merged(window) if run.rule == "mean" else merged_radially(window, fragment)
        outer_step_(self.targets[p], self.momenta[p], delta, run.outer)
        if run.codec is None:
            self.anchors[p] = self.targets[p].clone()
        else:
            self.anchors[p] = self.anchors[p] + run.codec(self.targets[p] - self.anchors[p])
        self.versions[p] += 1

    def global_weights(self) -> dict[str, Tensor]:
        return {t.name: view(self.anchors[f.index], t).clone() for f in self.layout.fragments for t in f.tensors}


def train(layout: Layout | None = None, **choices: Any) -> World:
    return World(Run(**choices), layout).train()


def plain(run: Run, steps: int) -> list[dict[str, Tensor]]:
    """The weights of an inner optimizer on its own, after each step."""
    node = Node(run, 0)
    history = []
    for step in range(1, steps + 1):
        node.inner_step(step)
        history.append(node.weights())
    return history


def assert_bit(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in actual if not torch.equal(actual[name], expected[name])] == []


def assert_fp(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    torch.testing.assert_close(dict(actual), dict(expected), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("inner", ["adamw", "sgd"])
@pytest.mark.parametrize(("pattern", "h"), [("whole", 1), ("whole", 5), ("strided", 4), ("balanced", 3)])
def test_one_node_plainly_averaged_is_its_inner_optimizer(
    pattern: Pattern, h: int, inner: Literal["adamw", "sgd"]
) -> None:
    """A1: M = 1, ν = 1, μ = 0, a = 0, τ = 0, any H and P (fp)."""
    world = train(num_nodes=1, pattern=pattern, h=h, rounds=12 // h, inner=inner)
    for actual, expected in zip(world.history, plain(world.run, 12), strict=False):
        assert_fp(actual, expected)
    assert min(world.versions) >= 1


@pytest.mark.parametrize("tau", [0, 1, 3])
@pytest.mark.parametrize("pattern", ["whole", "strided"])
def test_keeping_all_local_weights_is_the_inner_optimizer_and_the_anchor_what_was_sent(
    pattern: Pattern, tau: int
) -> None:
    """A2: M = 1, ν = 1, μ = 0, a = 1, any τ: local weights are never altered (bit), Θ is θ at the send (fp)."""
    world = World(Run(num_nodes=1, pattern=pattern, tau=tau, mix=1.0))
    for step, expected in enumerate(plain(world.run, 12), start=1):
        world.step(step)
        assert_bit(world.history[-1], expected)
        for fragment in world.layout.fragments:
            if world.is_due(fragment, step):
                torch.testing.assert_close(
                    world.anchors[fragment.index], flat(fragment, expected), rtol=1e-6, atol=1e-7
                )


def test_a_sync_at_every_step_keeps_the_anchor_at_the_local_weights() -> None:
    """A3: M = 1, H = 1, ν = 1, μ = 0. The local weights are kept (a = 1), so nothing but the deltas can move Θ."""
    world = World(Run(num_nodes=1, pattern="whole", h=1, mix=1.0))
    for step in range(1, 13):
        world.step(step)
        assert_fp(world.global_weights(), world.nodes[0].weights())


@pytest.mark.parametrize("num_nodes", [2, 3, 4])
@pytest.mark.parametrize("rule", ["mean", "radial"])
def test_nodes_with_the_same_data_are_one_node(num_nodes: int, rule: str) -> None:
    """A4, for every merge rule (fp)."""
    alone = train(num_nodes=1, outer=NESTEROV, tau=1, mix=0.5)
    together = train(num_nodes=num_nodes, same_data=True, outer=NESTEROV, tau=1, mix=0.5, rule=rule)
    assert_fp(together.global_weights(), alone.global_weights())


def test_one_inner_sgd_step_per_round_is_gradient_averaging() -> None:
    """A5: H = 1, inner SGD, ν = 1, μ = 0 (fp)."""
    world = World(Run(num_nodes=3, pattern="whole", h=1, inner="sgd"))
    for step in range(1, 7):
        before = world.global_weights()
        world.step(step)
        for name, theta in world.global_weights().items():
            gradients = [dict(node.model.named_parameters())[name].grad for node in world.nodes]
            mean = torch.stack([gradient for gradient in gradients if gradient is not None]).mean(dim=0)
            torch.testing.assert_close(theta, before[name] - INNER_LR * mean, rtol=1e-6, atol=1e-6)


def test_plain_averaging_gives_the_weighted_mean_of_the_local_weights() -> None:
    """A6: FedAvg (fp). With a = 1 the local weights are still there to be averaged."""
    world = train(num_nodes=3, pattern="whole", rounds=1, mix=1.0, tokens=(1, 2, 5))
    first, second, third = (node.weights() for node in world.nodes)
    assert_fp(world.global_weights(), {name: (first[name] + 2 * second[name] + 5 * third[name]) / 8 for name in first})


def test_the_radial_average_steps_further_than_the_mean_where_nodes_differ() -> None:
    """The control of A4: the rule is really taken. Nodes that disagree shorten their mean, not their radial average."""
    start = World(Run()).global_weights()

    def moved(rule: str) -> float:
        world = train(num_nodes=4, pattern="whole", rounds=1, rule=rule)
        names = [name for name in start if name.startswith("blocks") and name.endswith("weight")]
        return sum(float((world.global_weights()[name] - start[name]).square().sum()) for name in names)

    assert moved("radial") > 1.02 * moved("mean")


class Late:
    """Blocking rounds whose merges come a round late: what CO2 does, with all nodes on the anchor at every start."""

    def __init__(self, run: Run, outer: OuterSettings) -> None:
        self.run, self.outer = run, outer
        self.nodes = [Node(run, number) for number in range(run.num_nodes)]
        (self.fragment,) = run.layout().fragments
        self.target = flat(self.fragment, self.nodes[0].local)
        self.state = {name: torch.zeros_like(self.target) for name in state_names(outer.kind, outer.momentum)}
        self.stale = torch.zeros_like(self.target)
        self.rounds = 0

    def round(self) -> Tensor:
        """One round; the mean delta of it, which the next round will apply."""
        for node in self.nodes:
            for step in range(1, self.run.h + 1):
                node.inner_step(self.rounds * self.run.h + step)
        fresh = torch.stack([node.delta(self.fragment) for node in self.nodes]).mean(dim=0)
        self.rounds += 1
        step_(self.target, self.state, self.stale, self.outer, version=self.rounds)
        for node in self.nodes:
            node.merge(self.fragment, self.target.clone(), 0.0)
        self.stale = fresh
        return fresh


@pytest.mark.parametrize("num_nodes", [1, 3])
def test_co2_goes_where_the_round_before_went(num_nodes: int) -> None:
    """A13: β = 0, α = 1, Λ = 1: x_{t+1} = x_t + mean progress of round t − 1, for M = 1 too; all start alike (bit)."""
    world = Late(Run(num_nodes=num_nodes, pattern="whole"), OuterSettings(kind="co2", lr=1.0, momentum=0.0))
    before, earlier = world.target.clone(), torch.zeros_like(world.target)
    for _ in range(4):
        fresh = world.round()
        assert torch.equal(world.target, before - earlier)
        starts = [flat(world.fragment, node.local) for node in world.nodes]
        assert all(torch.equal(start, world.target) for start in starts)
        before, earlier = world.target.clone(), fresh
    alone = plain(world.run, 16)[11]
    assert any(not torch.allclose(view(before, t), alone[t.name], atol=1e-3) for t in world.fragment.tensors), (
        "it is not the plain optimizer"
    )


def diloco(run: Run) -> dict[str, Tensor]:
    """Algorithm 1 of arXiv 2311.08105, written again, tensor by tensor, with nothing of ours in it."""
    nodes = [Node(run, number) for number in range(run.num_nodes)]
    theta = nodes[0].weights()
    b = {name: torch.zeros_like(tensor) for name, tensor in theta.items()}
    for round_ in range(run.rounds):
        for node in nodes:
            with torch.no_grad():
                for name, parameter in node.local.items():
                    parameter.copy_(theta[name])
            for step in range(1, run.h + 1):
                node.inner_step(round_ * run.h + step)
        for name in theta:
            delta = torch.zeros_like(theta[name])
            for number, node in enumerate(nodes):
                share = run.tokens[number] / sum(run.tokens[: run.num_nodes])
                delta = delta + (theta[name] - node.weights()[name]) * share
            b[name] = b[name] * run.outer.momentum + delta
            theta[name] = theta[name] - (b[name] * run.outer.momentum + delta) * run.outer.lr
    return theta


def test_one_fragment_without_overlap_is_diloco() -> None:
    """A7: P = 1, τ = 0, a = 0 (bit)."""
    world = train(num_nodes=3, pattern="whole", outer=NESTEROV, tokens=(3, 1, 2))
    assert_bit(world.global_weights(), diloco(world.run))


def test_many_fragments_sent_at_once_are_diloco() -> None:
    """A8: P > 1, τ = 0, a = 0, equal offsets (bit): the outer optimizer is elementwise."""
    cut = Run(pattern="strided").layout()
    at_once = dataclasses.replace(
        cut, slots=1, fragments=tuple(dataclasses.replace(fragment, slot=0) for fragment in cut.fragments)
    )
    world = train(at_once, num_nodes=3, outer=NESTEROV, tokens=(3, 1, 2))
    assert len(world.anchors) == 3
    assert_bit(world.global_weights(), diloco(world.run))


@pytest.mark.parametrize("a", [0.0, 0.3, 0.5, 1.0])
def test_a_merge_without_overlap_is_the_mix_of_local_weights_and_anchor(a: float) -> None:
    """A9: θ ← a·θ + (1 − a)·Θ; with a = 0 all nodes are the same on that fragment (bit)."""
    run = Run(mix=a)
    world, other = World(run), World(dataclasses.replace(run, mix=1.0))
    for step in range(1, run.h + 1):
        world.step(step)
        other.step(step)  # its local weights are those before the merge
    (fragment,) = [fragment for fragment in world.layout.fragments if world.is_due(fragment, run.h)]
    anchor = world.anchors[fragment.index]
    for node, unmerged in zip(world.nodes, other.nodes, strict=True):
        before = flat(fragment, unmerged.local)
        assert torch.equal(flat(fragment, node.local), before * a + anchor * (1.0 - a))
    first, second = (flat(fragment, node.local) for node in world.nodes)
    assert torch.equal(first, second) == (a == 0.0)


def through_bytes(x: Tensor) -> Tensor:
    return torch.frombuffer(bytearray(x.numpy().tobytes()), dtype=torch.float32)


def test_an_identity_codec_in_the_path_of_codecs_changes_nothing() -> None:
    """A10 (bit): deltas and updates travel as bytes, and anchors follow decoded updates instead of the target.

    The weights stay within a factor of 2 of where they were, so that anchor + (target − anchor) is exactly the target.
    """
    without = World(Run(num_nodes=3, tau=2, mix=0.5, outer=OuterSettings(lr=0.4, momentum=0.9))).train()
    with_codec = World(dataclasses.replace(without.run, codec=through_bytes)).train()
    assert_bit(with_codec.global_weights(), without.global_weights())
    assert_bit(with_codec.history[-1], without.history[-1])


def test_a_lossy_codec_in_the_path_of_codecs_does_change_something() -> None:
    """The control of A10: its path is really taken. What the downlink lost stays in target − anchor."""
    world, without = train(tau=2, mix=0.5, codec=lambda x: x.bfloat16().float()), train(tau=2, mix=0.5)
    assert [digest(anchor) for anchor in world.anchors] != [digest(anchor) for anchor in without.anchors]
    for target, anchor in zip(world.targets, world.anchors, strict=True):
        assert 0.0 < float((target - anchor).abs().max()) < 1e-3


def test_a_fragment_has_one_version_per_send_and_a_new_digest_with_each() -> None:
    """B18: versions grow by one per commit; the first send comes after a full period."""
    world = World(Run(h=6, rounds=4))
    seen = [[digest(anchor)] for anchor in world.anchors]
    for step in range(1, 25):
        before = list(world.versions)
        world.step(step)
        for fragment in world.layout.fragments:
            p = fragment.index
            assert world.versions[p] - before[p] == int(world.is_due(fragment, step))
            if world.versions[p] > before[p]:
                seen[p].append(digest(world.anchors[p]))
    assert world.versions == [3, 3, 4]
    assert all(len(set(digests)) == len(digests) for digests in seen)


@given(order=st.permutations(range(5)), again=st.lists(st.integers(0, 4), max_size=4))
def test_order_and_repetition_of_deliveries_do_not_show(order: list[int], again: list[int]) -> None:
    """B18, B19 (bit): a blob id is a delta's key, and the sum has an order of its own."""
    generator = torch.Generator().manual_seed(7)
    deltas = [torch.randn(1000, generator=generator) * 10.0 ** (number - 2) for number in range(5)]

    def deliver(numbers: list[int]) -> Tensor:
        window: dict[BlobId, tuple[Contribution, Tensor]] = {}
        for number in numbers:
            node = NodeId(f"node-{number}")
            # An equal id, not the same object: as it comes out of another frame.
            window[blob(node, version=3)] = (contribution(node, tokens=100 + number), deltas[number])
        return merged(window)

    assert torch.equal(deliver(order + again), deliver([0, 1, 2, 3, 4]))


def test_a_sum_in_order_of_arrival_would_show() -> None:
    """The control of B19: fp32 sums do depend on their order."""
    generator = torch.Generator().manual_seed(7)
    deltas = [torch.randn(1000, generator=generator) for _ in range(5)]
    sums = {digest(summed([deltas[number] for number in order])) for order in itertools.permutations(range(5))}
    assert len(sums) > 1


def test_an_absent_node_is_one_whose_weight_is_zero() -> None:
    """B20 (bit): its delta is missing, or is there with no step in it."""

    def node_1(vote: Vote) -> World:
        return train(
            num_nodes=3, outer=NESTEROV, votes=lambda node, step: vote if node == 1 and 4 < step <= 8 else "votes"
        )

    absent = node_1("absent")
    assert_bit(absent.global_weights(), node_1("zero").global_weights())
    assert digest(absent.anchors[0]) != digest(node_1("votes").anchors[0])


counts = st.tuples(st.integers(0, 3), st.integers(0, 1 << 40))


@given(reports=st.lists(counts, min_size=1, max_size=9))
def test_weights_are_shares_of_the_tokens_of_those_who_did_a_step(reports: list[tuple[int, int]]) -> None:
    """B23: they sum to 1, nobody without a step has one, and equal counts weigh the same."""
    sets = [[contribution(NodeId(f"n{i}"), tokens=tokens, steps=steps)] for i, (steps, tokens) in enumerate(reports)]
    weights = token_weights(sets)
    assert sum(weights) == pytest.approx(1.0)
    if any(steps and tokens for steps, tokens in reports):
        assert all(weight == 0.0 for weight, (steps, _) in zip(weights, reports, strict=True) if steps == 0)
    for (one, first), (other, second) in itertools.combinations(zip(reports, weights, strict=True), 2):
        assert first == second or one != other


def test_a_joiner_without_steps_does_not_dilute_the_mean() -> None:
    """B23: its zero delta is no vote."""
    delta = torch.full((256,), 0.1)
    old, new = NodeId("a"), NodeId("b")
    alone = {blob(old, 0): (contribution(old, tokens=10), delta)}
    joined = {**alone, blob(new, 0): (contribution(new, tokens=10, steps=0), torch.zeros(256))}
    assert torch.equal(merged(joined), merged(alone)) and torch.equal(merged(alone), delta)


@pytest.mark.parametrize("pattern", ["whole", "sequential", "strided", "balanced"])
def test_fragments_hold_every_weight_of_the_model_once(pattern: Pattern) -> None:
    """B24: cut and put together again, the model is itself, and two builds of it agree on the layout."""
    layout = Run(pattern=pattern).layout()
    tensors = dict(trainable_tensors(Toy()))
    again = {t.name: view(flat(f, tensors), t) for f in layout.fragments for t in f.tensors}
    assert_bit(again, {name: tensor.detach() for name, tensor in tensors.items()})
    assert layout.num_parameters == sum(p.numel() for p in Toy().parameters())
    assert layout.digest() == Run(pattern=pattern).layout().digest()


def test_nesterov_gains() -> None:
    """D35: at (0.7, 0.9) a delta moves the target by 1.33 at first, an equal one by 1.897 then, by 7 in the limit."""
    target, momentum, delta = torch.zeros(1), torch.zeros(1), torch.ones(1)
    moves = []
    for _ in range(200):
        before = target.item()
        outer_step_(target, momentum, delta, NESTEROV)
        moves.append(before - target.item())
    assert moves[:2] == pytest.approx([1.33, 1.897], rel=1e-6)
    assert moves[-1] == pytest.approx(7.0, rel=1e-4)


def test_the_members_of_a_window_are_averaged_and_not_applied_one_by_one() -> None:
    """D36 (arXiv 2401.09135, eq. 5): four equal deltas in turn gain 12.1441 at μ = 0.9, their mean 1.9."""
    settings = OuterSettings(lr=1.0, momentum=0.9)
    one_by_one, momentum, delta = torch.zeros(256), torch.zeros(256), torch.ones(256)
    for _ in range(4):
        outer_step_(one_by_one, momentum, delta, settings)
    torch.testing.assert_close(one_by_one, torch.full((256,), -12.1441))

    nodes = [NodeId(name) for name in "abcd"]
    averaged = torch.zeros(256)
    window = {blob(node, 0): (contribution(node, tokens=7), delta) for node in nodes}
    outer_step_(averaged, torch.zeros(256), merged(window), settings)
    torch.testing.assert_close(averaged, torch.full((256,), -1.9))


def summed(deltas: list[Tensor]) -> Tensor:
    acc = torch.zeros_like(deltas[0])
    for delta in deltas:
        add_(acc, delta, 1 / len(deltas))
    return acc


def test_fp32_sums_in_any_order_agree_to_the_last_bits_and_bf16_sums_do_not() -> None:
    """D39: within M ulp."""
    generator = torch.Generator().manual_seed(3)
    deltas = [torch.rand(4096, generator=generator) for _ in range(8)]
    ordered = summed(deltas)
    bound = 8 * torch.finfo(torch.float32).eps * ordered
    shuffler = random.Random(5)
    for _ in range(20):
        shuffled = shuffler.sample(deltas, k=8)
        assert bool(((summed(shuffled) - ordered).abs() <= bound).all())

    in_bf16 = torch.zeros(4096, dtype=torch.bfloat16)
    for delta in deltas:
        in_bf16 += (delta / 8).bfloat16()
    assert bool(((in_bf16.float() - ordered).abs() > bound).any())
