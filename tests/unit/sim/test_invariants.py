"""What low-communication training must reduce to, through the real machines, codecs and sessions.

"bit" is equality of bytes, "fp" closeness in fp32. The codec is fp32 both ways where the equations are to be seen.
"""

import dataclasses
import itertools

import pytest
import torch
from faulty_world import run
from simulated_faults import NodeSetup, Scenario
from simulated_outcome import Outcome
from simulated_runs import simulate
from torch import Tensor
from toy_problem import Inner, Stack, Task, inner_optimizer, terms_of

from farloop.algo.fragments import view
from farloop.algo.spec import NodeId
from farloop.algo.terms import Terms

NAMES = [NodeId(name) for name in "abc"]


def plain_terms(method: str, **choices: object) -> Terms:
    """A plain average without codecs."""
    exact = {"codec_up": "fp32", "codec_down": "fp32", "outer_lr": 1.0, "outer_momentum": 0.0}
    return terms_of(method, **{**exact, **choices})


def nodes(count: int, *, same_data: bool = False, tokens: tuple[int, ...] = ()) -> tuple[NodeSetup, ...]:
    return tuple(
        NodeSetup(name=name, seed=1 if same_data else number, tokens=tokens[number] if tokens else None)
        for number, name in enumerate(NAMES[:count])
    )


def alone(method: str, *, inner: Inner = "adamw", blocks: int = 2, **choices: object) -> Outcome:
    terms = plain_terms(method, min_nodes=1, **choices)
    outcome = run(Scenario(terms=terms, nodes=nodes(1), inner=inner, blocks=blocks))
    outcome.check()
    return outcome


def plain(steps: int, inner: Inner, terms: Terms, *, seed: int = 0) -> list[Tensor]:
    """The weights of an inner optimizer on its own, before its first step and after each."""
    module, task = Stack(2), Task(seed=seed)
    optimizer, history = inner_optimizer(module, inner, terms), [module.flat()]
    for step in range(steps):
        task.backward(module, [step])
        optimizer.step()
        history.append(module.flat())
    return history


def weights_of(outcome: Outcome, number: int = 0) -> list[Tensor]:
    return outcome.nodes[NAMES[number]][0].diary.weights


def global_weights(outcome: Outcome, blocks: int = 2) -> Tensor:
    """The final anchors in the order of `Stack.flat`."""
    named = {
        tensor.name: view(outcome.anchors[fragment.index], tensor)
        for fragment in outcome.layout.fragments
        for tensor in fragment.tensors
    }
    return torch.cat([named[name].flatten() for name, _ in Stack(blocks).named_parameters()])


def assert_fp(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("inner", ["adamw", "sgd"])
@pytest.mark.parametrize(("method", "h"), [("diloco", 1), ("diloco", 5), ("streaming", 4)])
def test_one_node_plainly_averaged_is_its_inner_optimizer(method: str, h: int, inner: Inner) -> None:
    """A1: M = 1, ν = 1, μ = 0, a = 0, τ = 0, any H and P (fp)."""
    outcome = alone(method, inner=inner, h=h, tau=0, mix=0.0)
    expected = plain(12, inner, plain_terms(method))
    for actual, right in zip(weights_of(outcome), expected, strict=True):
        assert_fp(actual, right)
    assert_fp(global_weights(outcome), expected[-1])


@pytest.mark.parametrize("tau", [0, 1, 2])
@pytest.mark.parametrize("method", ["diloco", "streaming"])
def test_keeping_all_local_weights_is_the_inner_optimizer(method: str, tau: int) -> None:
    """A2: M = 1, ν = 1, μ = 0, a = 1, any H and τ: the same trajectory (bit), and Θ is θ at the last send (fp)."""
    outcome = alone(method, tau=tau, mix=1.0)
    expected = plain(12, "adamw", plain_terms(method))
    assert all(torch.equal(actual, right) for actual, right in zip(weights_of(outcome), expected, strict=True))
    assert_fp(global_weights(outcome), expected[-1])


def test_a_sync_at_every_step_keeps_the_anchor_at_the_local_weights() -> None:
    """A3: M = 1, H = 1, ν = 1, μ = 0: stopped after any number of steps, Θ is θ."""
    for steps in (1, 2, 7):
        outcome = alone("diloco", h=1, tau=0, mix=1.0, steps=steps)
        assert outcome.versions == (steps,)
        assert_fp(global_weights(outcome), weights_of(outcome)[-1])


def test_nodes_with_the_same_data_are_one_node() -> None:
    """A4: identical data and start (fp)."""
    terms = plain_terms("streaming", outer_lr=0.7, outer_momentum=0.9, mix=0.5)
    one = run(Scenario(terms=terms.replace(min_nodes=1), nodes=nodes(1, same_data=True)))
    three = run(Scenario(terms=terms.replace(min_nodes=3), nodes=nodes(3, same_data=True)))
    assert_fp(global_weights(three), global_weights(one))


def test_one_inner_sgd_step_per_round_is_gradient_averaging() -> None:
    """A5: H = 1, inner SGD(η), ν = 1, μ = 0: the anchor moves by −η · mean gradient (fp)."""
    terms = plain_terms("diloco", h=1, tau=0, mix=0.0, steps=5, min_nodes=3)
    outcome = run(Scenario(terms=terms, nodes=nodes(3), inner="sgd"))
    module = Stack(2)
    for step, (before, after) in enumerate(itertools.pairwise(weights_of(outcome))):
        gradients = []
        for number in range(3):
            torch.nn.utils.vector_to_parameters(before, module.parameters())
            Task(seed=number).backward(module, [step])
            gradients.append(torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]))
        assert_fp(after, before - terms.schedule.lr.peak * torch.stack(gradients).mean(dim=0))


def test_plain_averaging_gives_the_weighted_mean_of_the_local_weights() -> None:
    """A6: FedAvg (fp). With a = 1 the local weights are still there to be averaged."""
    terms = plain_terms("diloco", steps=4, mix=1.0, min_nodes=3)
    outcome = run(Scenario(terms=terms, nodes=nodes(3, tokens=(1, 2, 5))))
    first, second, third = (weights_of(outcome, number)[-1] for number in range(3))
    assert_fp(global_weights(outcome), (first + 2 * second + 5 * third) / 8)


def test_streaming_in_one_fragment_is_diloco() -> None:
    """A7: P = 1, τ = 0, a = 0 (bit)."""
    outcomes = [simulate(method, tau=0, mix=0.0, blocks=0, blocks_per_fragment=2) for method in ("streaming", "diloco")]
    assert len(outcomes[0].layout.fragments) == 1
    assert outcomes[0].anchor_digests == outcomes[1].anchor_digests
    assert outcomes[0].target_digests == outcomes[1].target_digests


def test_fragments_sent_together_are_diloco() -> None:
    """A8: P > 1, τ = 0, a = 0, all offsets equal (bit)."""
    exact = {"tau": 0, "mix": 0.0, "codec_up": "fp32", "codec_down": "fp32"}
    cut = simulate("streaming", **exact, together=True)
    whole = simulate("diloco", **exact)
    assert len(cut.layout.fragments) == 3
    assert torch.equal(global_weights(cut), global_weights(whole))


@pytest.mark.parametrize("mix", [0.0, 0.25, 0.5, 1.0])
def test_a_merge_mixes_local_weights_and_anchor(mix: float) -> None:
    """A9: τ = 0: θ after the merge is a·θ + (1 − a)·Θ (fp); with a = 0 all nodes are equal (bit)."""
    terms = terms_of("diloco", steps=4, mix=mix)
    outcome = run(Scenario(terms=terms, nodes=nodes(2), inner="sgd"))
    theta = global_weights(outcome)
    for number in range(2):
        local = plain(4, "sgd", terms, seed=number)[-1]
        assert_fp(weights_of(outcome, number)[-1], mix * local + (1 - mix) * theta)
    if mix == 0.0:
        assert torch.equal(weights_of(outcome, 0)[-1], weights_of(outcome, 1)[-1])


@pytest.mark.parametrize("tau", [0, 1, 3])
@pytest.mark.parametrize("mix", [0.0, 0.5, 1.0])
def test_sends_are_a_round_apart_and_merged_exactly_tau_steps_later(tau: int, mix: float) -> None:
    """C29, C30: merge at send + τ; H between two sends; steps inside a delta: H, or H − τ where a merge came between.

    With a = 1 nothing is merged in: the next delta's work begins at the last send (protocol H).
    """
    h = 6
    outcome = simulate("streaming", steps=5 * h, h=h, tau=tau, mix=mix)
    for (start,) in outcome.nodes.values():
        for fragment in range(3):
            sends = [send for send in start.diary.sends if send.fragment == fragment]
            merges = [merge for merge in start.diary.merges if merge.fragment == fragment and merge.version > 0]
            assert [send.window for send in sends] == [merge.version for merge in merges]
            regular = [send for send in sends if send.inner_step < 5 * h]
            assert [merge.inner_step for merge in merges[: len(regular)]] == [
                min(send.inner_step + tau, 5 * h)
                for send in regular  # the run's end merges all
            ]
            assert {after.inner_step - before.inner_step for before, after in itertools.pairwise(regular)} <= {h}
            assert {send.steps for send in regular[1:]} == {h if mix == 1.0 else h - tau}


def test_the_order_of_arrival_never_shows() -> None:
    """D39: three nodes of every order of speeds give the same anchors and optimizer state (bit)."""
    terms = terms_of("diloco", min_nodes=3)
    outcomes = [
        run(
            Scenario(
                terms=terms,
                nodes=tuple(
                    dataclasses.replace(node, step_s=step_s) for node, step_s in zip(nodes(3), speeds, strict=True)
                ),
            )
        )
        for speeds in itertools.permutations((0.1, 0.15, 0.2))
    ]
    assert len({outcome.anchor_digests for outcome in outcomes}) == 1
    assert len({outcome.target_digests for outcome in outcomes}) == 1
