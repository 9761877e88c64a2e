"""Nodes and links that become slow in a whole run: named in time, withdrawn when they are well, and no other."""

from itertools import pairwise
from typing import Any

import pytest
from simulated_faults import Fault, NodeSetup, SlowLink, SlowNode
from simulated_outcome import Outcome
from simulated_runs import simulate
from slow_cases import slow

from farloop.algo.spec import NodeId
from farloop.coordinator.decide import events as ev
from farloop.coordinator.observe import straggler_monitor
from farloop.coordinator.observe.straggler_monitor import AnomalySeen, MitigationTaken
from farloop.planner.anomalies import Action, Kind
from farloop.sim.network import LinkConditions
from farloop.wire.reasons import Reason

A, B, C, D = map(NodeId, "abcd")
H = 6
STEP_S = 0.4
LINK = LinkConditions(bytes_per_s=20e3, wobble=0.2)
"""Slow enough that a delta of the toy takes longer than its acknowledgements."""


def play(*faults: Fault, rounds: int = 22, adapt: str = "advise", **choices: Any) -> Outcome:
    """Four nodes whose steps vary by so much that rounds of six vary by a fifth; rounds of 2.4 s."""
    wobble, names = choices.pop("wobble", 0.5), choices.pop("names", (A, B, C, D))
    nodes = tuple(
        NodeSetup(name=name, seed=number, step_s=STEP_S * (2.0 if name is B else 1.0), step_wobble=wobble)
        for number, name in enumerate(names)
    )
    terms = {"steps": rounds * H, "h": H, "tau": 0, "codec_up": "fp32", "min_nodes": len(names)}
    world = {"nodes": nodes, "weather": LINK, "adapt": adapt, "patience_s": 400.0, "frugal": not faults}
    return simulate("diloco", *faults, **terms, **world, **choices)


def noticed(outcome: Outcome) -> list[tuple[float, AnomalySeen]]:
    return [(at, what) for at, _, what in outcome.tape if isinstance(what, AnomalySeen)]


def found(outcome: Outcome) -> set[tuple[Kind, str]]:
    return {(what.finding.kind, what.finding.node) for _, what in noticed(outcome)}


def climbed(outcome: Outcome) -> list[tuple[Action, bool]]:
    return [(what.action, what.carry_out) for _, _, what in outcome.tape if isinstance(what, MitigationTaken)]


def rounds_between(outcome: Outcome, begin: float, end: float) -> int:
    """Rounds that ended in this time."""
    ends: dict[int, float] = {}
    for at, _, what in outcome.tape:
        if isinstance(what, ev.CommitDone):
            ends[what.record.round] = at
    return sum(begin < at <= end for at in ends.values())


def test_an_uplink_that_becomes_slow_is_named_within_three_rounds_and_withdrawn_when_it_is_well() -> None:
    began, healed = 60.0, 100.0
    outcome = play(SlowLink(node=C, at=began, for_s=healed - began, factor=8.0), rounds=30)
    assert found(outcome) == {(Kind.LINK_SLOW, C)}
    (named_at, named), (over_at, over) = noticed(outcome)
    assert began < named_at < healed < over_at and (named.over, over.over) == (False, True)
    assert rounds_between(outcome, began, named_at) <= 4, "the round in which it began, and three slow ones"
    assert named.finding.factor > 4.0
    assert rounds_between(outcome, healed, over_at) <= 4
    assert climbed(outcome)[0] == (Action.REPROBE, True), "the mildest first, and it is done"
    assert all(not done for action, done in climbed(outcome) if action is not Action.REPROBE), "it is only advised"


def test_a_node_that_computes_slowly_is_named_and_not_its_link() -> None:
    outcome = play(SlowNode(node=C, at=60.0, for_s=60.0, factor=3.0))
    assert found(outcome) == {(Kind.NODE_SLOW, C)}
    assert climbed(outcome)[0][0] is Action.LIGHTEN, "it has no link to probe"


@pytest.mark.parametrize("rounds", [50, *slow(200)])
def test_a_node_that_was_slow_from_the_beginning_is_planned_for_and_jitter_is_no_fault(rounds: int) -> None:
    """b takes twice as long for everything, all vary by a fifth: no node is named."""
    outcome = play(rounds=rounds, num_samples=0)
    assert noticed(outcome) == [] and climbed(outcome) == []


def test_a_node_that_hangs_is_named_and_left_out_of_the_window_where_that_is_asked_for() -> None:
    hang = SlowNode(node=C, at=60.0, for_s=5.0, factor=100.0)
    advised = play(hang, wobble=0.1)
    assert (Kind.NODE_HANG, C) in found(advised) and (Action.DROP, False) in climbed(advised)
    acted = play(hang, adapt="act", wobble=0.1)
    assert (Kind.NODE_HANG, C) in found(acted) and (Action.DROP, True) in climbed(acted)
    (left_out,) = [what for _, _, what in acted.tape if isinstance(what, ev.LeftOut)]
    assert left_out.node == C
    drops = [what.record.drops for _, _, what in acted.tape if isinstance(what, ev.CommitDone) and what.record.drops]
    assert [(drop.node, drop.reason) for drop in drops[0]] == [(C, Reason.LATE)], "later ones by the machine's own rule"
    assert acted.commits[-1].contributors == (A, B, C, D), "the next ones expect it again"
    assert acted.seconds < advised.seconds


def test_where_it_acts_a_slow_link_gets_fewer_bits_and_steps_and_rounds_become_shorter() -> None:
    slow = SlowLink(node=B, at=60.0, for_s=900.0, factor=10.0)
    advised, acted = play(slow, rounds=40), play(slow, rounds=40, adapt="act")
    assert climbed(advised) == [(Action.REPROBE, True), (Action.LIGHTEN, False)]
    assert climbed(acted) == [(Action.REPROBE, True), (Action.LIGHTEN, True)]
    (given,) = [what.revision.terms for _, _, what in acted.tape if isinstance(what, ev.TermsGiven)]
    assert given.codecs.up_of in [((B, "q4"),), ((B, "q8"),)] and [node for node, _ in given.schedule.h_share_of] == [B]
    assert noticed(acted)[-1][1].over and acted.seconds < 0.8 * advised.seconds


def test_where_that_cannot_be_the_ladder_goes_on_one_rung_at_a_time_and_rests_between_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(machine: object, advice: object) -> None:
        raise ValueError("it has no such codec")

    monkeypatch.setattr(straggler_monitor, "lightened", refused)
    outcome = play(SlowLink(node=B, at=60.0, for_s=900.0, factor=8.0), rounds=40, adapt="act")
    actions = [action for action, _ in climbed(outcome)]
    assert actions[:3] == [Action.REPROBE, Action.LIGHTEN, Action.DROP] and actions[-1] is Action.EVICT
    assert actions.count(Action.DROP) == 3 and (Action.EVICT, False) in climbed(outcome), "a person does the last one"
    times = [at for at, _, what in outcome.tape if isinstance(what, MitigationTaken)]
    assert all(rounds_between(outcome, one, next_) >= 3 for one, next_ in pairwise(times))
    said = {what.action: what.why for _, _, what in outcome.tape if isinstance(what, MitigationTaken)}
    assert "not done: it has no such codec" in said[Action.LIGHTEN] and "bits and H" in said[Action.LIGHTEN]


def test_what_stays_slow_for_long_is_usual_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(straggler_monitor, "USUAL_AFTER", 5)
    outcome = play(SlowLink(node=C, at=60.0, for_s=900.0, factor=8.0), rounds=38)
    (_, named), (_, over) = noticed(outcome)
    assert not named.over and over.over and found(outcome) == {(Kind.LINK_SLOW, C)}


def test_whoever_looks_changes_nothing() -> None:
    assert play(rounds=12).anchor_digests == play(rounds=12, adapt="off").anchor_digests
