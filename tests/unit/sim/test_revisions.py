"""Terms that change while the run goes on, through crashes, cuts and late joiners (protocol B, P, Z)."""

import dataclasses
from typing import Any

import pytest
from faulty_world import run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated_faults import (
    ChangeTerms,
    CrashCoordinator,
    CrashNode,
    CutLink,
    Fault,
    NodeSetup,
    RestoreCopy,
    Scenario,
    SpoilAnchor,
)
from simulated_outcome import Outcome
from simulated_runs import simulate
from slow_cases import mostly_slow
from toy_problem import terms_of

from farloop.algo import schedule
from farloop.algo.methods import method_named
from farloop.algo.spec import Layout, NodeId, Revision, RoundPlan, WindowTerms
from farloop.algo.terms import Terms
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.ledger import Ledger
from farloop.node import events as node_ev
from farloop.sim.network import HOSTILE_LINK
from farloop.wire import messages as msg

A, B, C, D = (NodeId(name) for name in "abcd")
NODES = (NodeSetup(name=A, seed=0), NodeSetup(name=B, seed=1, step_s=0.13), NodeSetup(name=C, seed=2, joins_at=2.0))


def change(at: float, **given: object) -> ChangeTerms:
    return ChangeTerms(at=at, given=tuple((key.replace("__", "."), str(value)) for key, value in given.items()))


def play(*faults: Fault, nodes: tuple[NodeSetup, ...] = NODES, method: str = "streaming", **terms: Any) -> Outcome:
    chosen = {"steps": 60, "min_nodes": 2, "codec_up": "q4", "codec_down": "q4", "mix": 0.5, **terms}
    outcome = simulate(method, *faults, **chosen, nodes=nodes, seed=4, num_samples=2000)
    check_terms(outcome)
    return outcome


def answers(outcome: Outcome) -> list[Revision | str]:
    """What the operator was told."""
    return [what for _, who, what in outcome.tape if who == "operator" and isinstance(what, Revision | str)]


def check_terms(outcome: Outcome) -> None:
    """Every machine ran every window and every round under the terms of its own revision, whenever it heard of it."""
    revisions, folded = outcome.revisions, None
    rounds: dict[int, RoundPlan] = {}
    for record in outcome.records:
        if isinstance(record, rec.RunStarted):
            folded = Ledger.begin(record)
            rounds = dict(folded.rounds)
            continue
        assert folded is not None
        folded.apply(record)
        if isinstance(record, rec.RoundFixed):
            rounds[record.round.index] = record.round
        if isinstance(record, rec.WindowCommitted) and not record.flush:
            terms = revisions.of_window(record.fragment, record.version)
            assert (record.outer_lr, record.outer_momentum) == (terms.outer.lr, terms.outer.momentum)
        if isinstance(record, rec.WindowCommitted) and (opened := record.next_window) is not None:
            terms = revisions.of_window(opened.fragment, opened.window)
            told = (opened.tau, opened.mix, opened.codec_up, opened.codec_up_of, opened.codec_down)
            assert told == (
                terms.schedule.tau,
                terms.schedule.mix,
                terms.codecs.up,
                terms.codecs.up_of,
                terms.codecs.down,
            )
    for plan in rounds.values():
        terms = revisions.of_round(plan.index)
        assert plan.length == min(terms.schedule.h, revisions.newest.terms.schedule.steps - plan.start)
        if not method_named(terms.method).per_node_h:
            assert plan == schedule.dealt(plan, outcome.layout.slots, shares=terms.schedule.h_share_of)
    assert folded is not None and folded == Ledger.resume(folded.saved())
    began = {who: when for when, who, what in outcome.tape if isinstance(what, node_ev.Resync)}
    for when, who, what in outcome.tape:
        if when < began.get(who, 0.0):
            continue  # of a history that was given up
        if isinstance(what, node_ev.Encode):
            assert what.codec == revisions.of_window(what.blob.fragment, what.window).codec_of(NodeId(who))
        if isinstance(what, node_ev.Apply):
            assert what.codec == revisions.of_window(what.fragment, what.version).codecs.down


def test_outer_step_codec_and_rounds_change_while_the_run_goes_on() -> None:
    outcome = play(change(1.0, outer_lr=0.4, h=6, codec_up="q8", mix=0.25), change(3.0, codec_down="bf16", tau=0))
    assert [type(answer) for answer in answers(outcome)] == [Revision, Revision]
    sent = {what.codec for _, _, what in outcome.tape if isinstance(what, node_ev.Encode)}
    assert sent == {"q4", "q8"}
    decoded = {what.codec for _, _, what in outcome.tape if isinstance(what, node_ev.Apply)}
    assert decoded == {"q4", "bf16"}
    lengths = {record.round.length for record in outcome.records if isinstance(record, rec.RoundFixed)}
    assert {4, 6} <= lengths
    assert not any(start.diary.mismatches for starts in outcome.nodes.values() for start in starts)


@pytest.mark.parametrize("event", mostly_slow(range(30, 75, 3), 45, 60))
def test_a_coordinator_that_dies_at_any_moment_around_a_change_repeats_every_commit_to_the_bit(event: int) -> None:
    """B21, P: the anchors, targets and momenta of the restart are those of their own windows' terms."""
    outcome = play(
        change(0.9, outer_lr=0.4, outer_momentum=0.5, codec_up="q8", codec_down="bf16"),
        change(1.6, h=6, lr__peak=0.03),
        CrashCoordinator(at_event=event, down_s=0.5),
        CrashCoordinator(at=6.0, down_s=0.5),
        nodes=NODES[:2],
    )
    assert outcome.alarms == 0
    assert not any(start.diary.mismatches for starts in outcome.nodes.values() for start in starts)


def test_the_learning_rate_is_that_of_the_round_at_every_step() -> None:
    outcome = play(change(1.0, lr__peak=0.05), change(2.5, steps=80, lr__minimum=0.001), nodes=NODES[:1], min_nodes=1)
    revisions = outcome.revisions
    rounds = [record.round for record in outcome.records if isinstance(record, rec.RoundFixed)]
    started = outcome.records[0]
    assert isinstance(started, rec.RunStarted)
    expected = [
        schedule.learning_rate(revisions.of_round(plan.index), position)
        for plan in sorted({plan.index: plan for plan in (*started.rounds, *rounds)}.values(), key=lambda p: p.index)
        for position in range(plan.start, plan.start + plan.length)
    ]
    (start,) = outcome.nodes[A]
    assert start.diary.learning_rates == expected and len(expected) == 80 and len(set(expected)) > 2


def test_momentum_can_begin_while_the_run_goes_on() -> None:
    faults = (change(1.0, outer_momentum=0.9), CrashCoordinator(at=5.0, down_s=0.5))
    outcome = play(*faults, outer_momentum=0.0)
    assert outcome.alarms == 0
    digests = {record.momentum_digest for record in outcome.records if isinstance(record, rec.WindowCommitted)}
    assert None in digests and len(digests) > 1


# --- any sequence of changes and crashes

GIVEN = st.dictionaries(
    st.sampled_from(
        [
            *("outer_lr", "outer_momentum", "h", "tau", "mix", "codec_up", "codec_down", "lr.peak", "steps"),
            *("codec_up_of.a", "codec_up_of.b", "h_share_of.a", "h_share_of.b"),
        ]
    ),
    st.sampled_from(["0.0", "0.25", "0.5", "0.9", "1", "3", "5", "6", "70", "q4", "q8", "bf16", "none"]),
    min_size=1,
    max_size=3,
)
CHANGES = st.tuples(st.floats(0.3, 6.0), GIVEN).map(
    lambda drawn: ChangeTerms(at=drawn[0], given=tuple(drawn[1].items()))
)
CRASHES = st.floats(0.3, 7.0).map(lambda at: CrashCoordinator(at=at, down_s=0.4))
CUTS = st.floats(0.3, 5.0).map(lambda at: CutLink(node=B, at=at, for_s=1.0, reset=True))


@settings(max_examples=4, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(st.lists(CHANGES, min_size=1, max_size=5), st.lists(st.one_of(CRASHES, CUTS), max_size=3))
def test_whatever_is_set_and_whenever_the_coordinator_dies_all_run_under_the_same_terms(
    sets: list[ChangeTerms], faults: list[Fault]
) -> None:
    """What is refused changes nothing; the rest holds from the same windows on for all, and replays to the bit."""
    assert play(*sets, *faults, nodes=NODES[:2], steps=40).alarms == 0


# --- an old copy of the state


def wound_back(*faults: Fault) -> tuple[Outcome, list[float]]:
    """Two nodes; the state of half-way is put back, and a person winds the run back. And when the nodes began again."""
    copy = RestoreCopy(after_commits=15, commits_ago=6)
    outcome = play(copy, *faults, nodes=NODES[:2], steps=48)
    began = [when for when, _, what in outcome.tape if isinstance(what, node_ev.Resync)]
    assert len(outcome.lost) == 6 and len(began) == 2
    return outcome, began


def test_after_a_rewind_all_go_on_under_the_revisions_that_the_copy_holds() -> None:
    outcome, (began, _) = wound_back(change(0.5, outer_lr=0.4, codec_up="q8", h=5))
    assert outcome.revisions.newest.number == 1
    told = [revision_of(what) for when, who, what in outcome.tape if who in (A, B) and when >= began]
    assert set(told) <= {None, 1}
    sent = [what.codec for when, _, what in outcome.tape if when > began and isinstance(what, node_ev.Encode)]
    assert sent and set(sent) == {"q8"}


def test_terms_that_only_the_lost_history_had_are_gone_and_others_can_take_their_number() -> None:
    first, began = wound_back()
    died = next(when for when, _, what in first.tape if isinstance(what, str) and what.startswith("restored"))
    lost, new = change(died - 0.4, codec_up="q8", h=6), change(max(began) + 1.0, codec_up="bf16", h=5)
    outcome, began = wound_back(lost, new)
    one, other = answers(outcome)
    assert isinstance(one, Revision) and isinstance(other, Revision)
    assert one.number == other.number == outcome.revisions.newest.number == 1
    assert outcome.revisions.newest == other
    encoded = [(when, what.codec) for when, _, what in outcome.tape if isinstance(what, node_ev.Encode)]
    assert {codec for when, codec in encoded if when > max(began)} == {"q4", "bf16"}
    lengths = {record.round.length for record in outcome.records if isinstance(record, rec.RoundFixed)}
    assert {4, 5} <= lengths and 6 not in lengths  # the last round has what is left


def revision_of(what: object) -> int | None:
    """That a node was told of with a welcome."""
    welcome = what.message if isinstance(what, node_ev.Received) else None
    return welcome.spec.revision if isinstance(welcome, msg.Welcome) else None


FOUR = (
    NodeSetup(name=A, seed=0),
    NodeSetup(name=B, seed=1, step_s=0.13),
    NodeSetup(name=C, seed=2, step_s=0.3),
    NodeSetup(name=D, seed=3, joins_at=2.0),
)
STORM = (
    CutLink(node=B, at=0.9, for_s=0.5, reset=True),
    CrashNode(node=C, at=1.8, down_s=3.0),
    CrashCoordinator(at=4.0, down_s=0.5),
    SpoilAnchor(node=A, at=5.0),
)
Q4 = {"codec_up": "q4", "codec_down": "q4"}
OTHER = {"codec_up": "q8", "codec_down": "bf16", "tau": 0}

ALTERNATING: dict[str, dict[str, Any]] = {
    "waiting": {"method": "streaming", "mix": 0.5},
    "going on": {"method": "decoupled", "mix": 0.5},
    "one by one": {"method": "async"},
    "a round late": {
        "method": "streaming",
        "codec_up": "q4",
        "codec_down": "q4",
        "mix": 0.0,
        "tau": 0,
        "lag": 1,
        "eager": True,
    },
    "compressed": {"method": "async", "codec_up": "q4r"},
    "with variates": {"method": "diloco", "control_variates": True},
}


@pytest.fixture
def alternating(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other window has terms of its own."""
    regular = schedule.window_after

    def window_after(
        terms: Terms, layout: Layout, current: WindowTerms, rounds: dict[int, RoundPlan], *, stay: bool = False
    ) -> WindowTerms | None:
        following = regular(terms, layout, current, rounds, stay=stay)
        if following is None:
            return None
        own = {name: terms.value(name) for name in ("codec_up", "codec_down", "tau", "mix")}
        changed = {**OTHER, "mix": terms.schedule.mix / 2} if following.window % 2 == 0 else own
        return dataclasses.replace(following, **changed)

    monkeypatch.setattr(schedule, "window_after", window_after)


@pytest.mark.parametrize("choices", mostly_slow(ALTERNATING.values(), ALTERNATING["going on"]), ids=ALTERNATING)
@pytest.mark.usefixtures("alternating")
def test_a_run_whose_windows_differ_ends_equal_everywhere_whatever_goes_wrong(choices: dict[str, Any]) -> None:
    """B, P: no node needs a snapshot again but the one whose anchor was spoiled, and a restart repeats every commit."""
    terms = terms_of(**{"steps": 48, "min_nodes": 3, **Q4, **choices})
    outcome = run(Scenario(terms=terms, nodes=FOUR, faults=STORM, weather=HOSTILE_LINK, seed=3, num_samples=1000))
    outcome.check()
    assert outcome.alarms == 0, "targets and optimizers came out of the restart as they were"
    assert {name for name, starts in outcome.nodes.items() for s in starts if s.diary.mismatches} <= {A}
    told = [what for _, _, what in outcome.tape]
    sent = {(what.window % 2, what.codec) for what in told if isinstance(what, node_ev.Encode)}
    assert sent == {(1, terms.codecs.up), (0, OTHER["codec_up"])}
    decoded = {(what.version % 2, what.codec) for what in told if isinstance(what, node_ev.Apply)}
    assert decoded == {(1, terms.codecs.down), (0, OTHER["codec_down"])}
    assert len({what.mix for what in told if isinstance(what, node_ev.Merge)} - {0.0}) == (
        2 if terms.schedule.mix else 0
    )
