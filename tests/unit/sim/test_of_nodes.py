"""Codecs and steps that nodes have of their own: the rates of a plan, run for real."""

import itertools
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from faulty_world import run
from simulated_faults import ChangeTerms, CrashCoordinator, CrashNode, Fault, NodeSetup, Scenario
from simulated_outcome import Outcome
from simulated_runs import simulate
from toy_problem import terms_of

from farloop.algo.spec import NodeId
from farloop.coordinator.decide import events as coordinator_ev
from farloop.coordinator.decide import records as rec
from farloop.node import events as node_ev
from farloop.planner.sync_plan import Pace, choose
from farloop.sim.network import LinkConditions
from farloop.wire.limits import Limits

OSLO, ROME = NodeId("oslo"), NodeId("rome")
H, STEP_S, BYTES_PER_S = 20, 0.1, 1e4
THIN = LinkConditions(bytes_per_s=BYTES_PER_S)
"""On which 16 kB take most of a round."""


def play(method: str, *faults: Fault, thin: LinkConditions | None = None, blocks: int = 2, **terms: Any) -> Outcome:
    chosen = {"steps": 60, "h": 8, "codec_down": "q8", **terms}
    outcome = simulate(
        method,
        *faults,
        **chosen,
        nodes=(NodeSetup(name=OSLO, seed=1), NodeSetup(name=ROME, seed=2, weather=thin)),
        blocks=blocks,
        limits=Limits(chunk_bytes=4096 if thin else 400),
        num_samples=2000,
    )
    assert outcome.alarms == 0, "a restart repeats every commit to the bit"
    return outcome


def change(at: float, **given: str) -> ChangeTerms:
    return ChangeTerms(at=at, given=tuple((key.replace("__", "."), text) for key, text in given.items()))


def sent_by(outcome: Outcome, node: NodeId) -> set[str]:
    return {what.codec for _, who, what in outcome.tape if who == node and isinstance(what, node_ev.Encode)}


def steps_of(outcome: Outcome, node: NodeId) -> int:
    return sum(start.inner_steps for start in outcome.nodes[node])


def rounds_s(outcome: Outcome) -> list[float]:
    """Seconds between the commits of the only fragment."""
    at = [when for when, _, what in outcome.tape if isinstance(what, coordinator_ev.CommitDone)]
    return [after - before for before, after in itertools.pairwise(at)]


@pytest.mark.slow
def test_behind_a_thin_link_rounds_become_as_much_shorter_as_the_planner_says() -> None:
    """And the run survives a crash of its coordinator between the change and the end."""
    first = {"h": H, "codec_up": "q8", "outer_momentum": 0.0, "thin": THIN, "blocks": 60}
    before = play("diloco", steps=6 * H, **first)
    (fragment,) = before.layout.fragments
    paces = [Pace(step_s=STEP_S, bytes_per_s=rate) for rate in (10e6, BYTES_PER_S)]
    _, rate = choose(paces, h=H, parameters=fragment.numel, bits=(8, 4))
    assert (rate.bits, rate.h) == (4, 12)
    predicted_s = H * STEP_S + fragment.numel / BYTES_PER_S - rate.round_s

    given = change(18.0, codec_up_of__rome="q4", h_share_of__rome=f"{rate.h / H:g}")
    after = play("diloco", given, CrashCoordinator(at=40.0, down_s=0.5), steps=16 * H, **first)
    assert sent_by(after, ROME) == {"q8", "q4"} and sent_by(after, OSLO) == {"q8"}
    assert steps_of(after, OSLO) == 16 * H and steps_of(after, ROME) < 14 * H
    simulated_s = [median(rounds_s(before)[1:]), median(rounds_s(after)[-5:])]
    assert simulated_s[0] - simulated_s[1] == pytest.approx(predicted_s, rel=0.1)

    page = (Path(__file__).resolve().parents[3] / "docs/routing.md").read_text()
    back_s = fragment.numel / BYTES_PER_S  # at 8 bits
    predictions_s = [back_s + rate.round_s + predicted_s, back_s + rate.round_s]
    for name, shown in zip(("`q8`, H = 20", "`q4`, H = 12"), zip(predictions_s, simulated_s, strict=True), strict=True):
        assert f"| {name} | {shown[0]:.2f} s | {shown[1]:.1f} s |" in page


@pytest.mark.parametrize("method", ["diloco", "streaming", "co2", "decoupled", "async"])
def test_every_method_runs_with_them_from_the_start_and_takes_others(method: str) -> None:
    own = {"codec_up_of": ((ROME, "q4r"),), "h_share_of": ((ROME, 0.5),)}
    mix = {"mix": 0.0} if method == "co2" else {}
    outcome = play(
        method, change(2.0, codec_up_of__oslo="q8", h_share_of__rome="0.75"), CrashCoordinator(at=3.5), **own, **mix
    )
    assert sent_by(outcome, ROME) == {"q4r"} and sent_by(outcome, OSLO) == {"q4", "q8"}
    plans = {r.round.index: r.round.steps_of(ROME) for r in outcome.records if isinstance(r, rec.RoundFixed)}
    assert {4, 6} <= set(plans.values()) and 30 <= steps_of(outcome, ROME) <= 45 < steps_of(outcome, OSLO)
    assert steps_of(outcome, OSLO) + outcome.nodes[OSLO][0].skipped_positions == 60


def test_a_share_is_of_the_steps_that_a_speed_allows_or_fewer() -> None:
    """Both are bounds: rome could do a bit more than half of them in the time of oslo."""
    slow = (NodeSetup(name=OSLO, seed=1, step_s=0.05), NodeSetup(name=ROME, seed=2, step_s=0.09))
    for share, most in ((0.4, 3), (0.75, 4)):
        terms = terms_of("decoupled", steps=96, h=8, h_share_of=((ROME, share),))
        outcome = run(Scenario(terms=terms, nodes=slow))
        outcome.check()
        plans = [record.round for record in outcome.records if isinstance(record, rec.RoundFixed)]
        assert max(plan.steps_of(ROME) for plan in plans[8:-1]) == most


@pytest.mark.parametrize("method", ["streaming", "diloco"])
def test_a_share_that_shrinks_never_lets_a_turn_come_before_the_merge(method: str) -> None:
    """D, with the longest overlap there is: rome goes from all steps to a few, and back."""
    tau = 7 if method == "streaming" else 0
    changes = (change(1.0, h_share_of__rome="0.5"), change(4.0, h_share_of__rome="none"))
    outcome = play(method, *changes, steps=120, tau=tau)
    (start,) = outcome.nodes[ROME]
    assert start.skipped_turns == 0 and start.inner_steps < 120
    windows = [(send.fragment, send.window) for send in start.diary.sends]
    numbers = [[window for of, window in windows if of == fragment.index] for fragment in outcome.layout.fragments]
    assert all(each == list(range(each[0], each[0] + len(each))) for each in numbers), "it served every window"


def test_a_residual_goes_on_with_its_own_format_and_ends_with_another() -> None:
    """E: as where `codec_up` changes. β alone keeps it; other numbers begin without one."""
    outcome = play(
        "diloco",
        change(2.0, codec_up_of__rome="q4:beta=0.5"),
        change(4.0, codec_up_of__rome="topk:k=128"),
        change(6.0, codec_up_of__rome="none"),
        CrashNode(node=ROME, at=7.0, down_s=0.3),
        steps=120,
        codec_up="q4:beta=0.9",
    )
    assert sent_by(outcome, ROME) == {"q4:beta=0.9", "q4:beta=0.5", "topk:k=128"}
    assert not any(start.diary.mismatches for starts in outcome.nodes.values() for start in starts)


def test_bits_that_adapt_are_chosen_for_those_who_ask_for_them() -> None:
    """All but rome have the coordinator's choice; then rome has it alone."""
    adaptive = "q4r:policy=l-greco"
    outcome = play("streaming", codec_up=adaptive, codec_up_of=((ROME, "q8"),))
    assert sent_by(outcome, ROME) == {"q8"} and any("step=" in codec for codec in sent_by(outcome, OSLO))
    outcome = play("streaming", codec_up="q8", codec_up_of=((ROME, adaptive),))
    assert sent_by(outcome, OSLO) == {"q8"} and any("step=" in codec for codec in sent_by(outcome, ROME))
    outcome = play("diloco", codec_up="topk:k=256,policy=l-greco", codec_up_of=((ROME, "lowrank:policy=l-greco"),))
    for node, name in ((OSLO, "topk:k="), (ROME, "lowrank:rank=")):
        assert any(codec.startswith(name) and "/" in codec for codec in sent_by(outcome, node))
