"""Covers `node/machine.py`: events in, commands out (protocol A-F, H-J, Q, S, Z). Most of it stands in `stories/`."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from node_story import A, B, Story, applied, encode, forgotten, merged
from stories import StoryText, all_stories, check_story

from farloop.algo import schedule
from farloop.algo.spec import Revision
from farloop.algo.terms import Terms
from farloop.node import events as ev
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

H = 4
HALF = merged(0.5)


@all_stories(__file__, "going_on", "histories", "rounds", "waiting")
def test_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, Story(**story.settings).play, rewrite=rewrite)


def going_on(incarnation: int = 1, **choices: Any) -> Story:
    """Training, with one fragment that is sent every four steps. Every window is of the round after the last one's."""
    own = {"h": H, "tau": 1, "mix": 0.5, "max_staleness": 2, "max_stale_rounds": 2, **choices}
    story = Story(incarnation=incarnation, method="decoupled", on_late_update="continue", quorum=1, **own)
    return story.begin()


# --- sending


@pytest.mark.parametrize("screen", ["off", "norm", "full"])
def test_a_node_measures_its_deltas_where_the_coordinator_does_not(screen: str) -> None:
    """H: what it said of them would not be believed."""
    (command,) = Story(screen=screen).begin().steps(4)
    assert isinstance(command, ev.Encode) and command.measure == (screen == "off")


def test_a_window_is_served_and_merged_under_its_own_terms() -> None:
    """B: not under those of the run, which may be others by now."""
    story = Story(mix=0.5)
    story.windows[0] = dataclasses.replace(story.windows[0], codec_up="e3m0", codec_down="q8", tau=2, mix=0.25)
    story.hear(story.welcome())
    assert ev.Install(fragment=0, version=0, codec="e3m0") in story.snapshot()
    story.hear(msg.Start(round=story.rounds[0], lease=None))
    (sent,) = story.steps(4)
    assert sent == dataclasses.replace(encode(1, 1, steps=4), codec="e3m0")
    story.steps(1)
    assert story.receive(story.commit()) == []
    own = dataclasses.replace(applied(1), codec="q8")
    assert story.steps(1) == [own, forgotten(1, 1, merged_in=1), merged(0.25)]


# --- broken links and anchors


def test_an_epoch_of_another_run_is_forgotten() -> None:
    story = Story(epoch=8)
    story.machine.run = "another"
    story.hear(story.welcome(epoch=1))
    assert story.machine.connected and story.machine.epoch == 1
    assert story.machine.run == story.spec.identity.fingerprint()


def test_another_run_at_the_same_address_stops_the_node() -> None:
    story = Story().begin()
    other = dataclasses.replace(story.spec, identity=dataclasses.replace(story.spec.identity, seed=1))
    (command,) = story.hear(story.welcome(epoch=2, spec=other))
    assert isinstance(command, ev.Stop) and command.reason is Reason.WRONG_RUN


# --- rounds


def test_a_node_whose_round_went_by_before_it_heard_of_its_plan_jumps_to_the_run_s() -> None:
    """A: cut off at the end of a round for so long that the coordinator tells of its next one no more."""
    story = Story().begin()
    story.machine.schedule.plans = {0: story.rounds[0]}
    story.steps(4)
    story.cut(Reason.SILENT)
    missed = [story.commit(merged=[B]) for _ in range(6)]
    story.rounds = {index: plan for index, plan in story.rounds.items() if index >= 5}
    story.hear(story.welcome())
    for committed in missed:
        story.receive(dataclasses.replace(committed, rounds=()))
    assert (story.machine.schedule.round, story.machine.position) == (6, 24.0)
    assert story.machine.schedule.skipped_positions == 20, "rounds 1 to 5"
    story.steps(4)
    assert story.machine.schedule.round == 7


# --- updates that are not waited for


def test_what_stands_still_does_not_wait_for_steps_of_its_own() -> None:
    """The end of an overlap is counted in steps: it would never come, and others would wait for the next delta."""
    story = going_on(tau=3, max_stale_rounds=8)
    story.machine.schedule.plans = {0: story.rounds[0]}
    story.steps(H)
    assert story.machine.waiting == "the plan of round 1"
    again = dataclasses.replace(story.windows[0], window=2)
    assert story.hear(dataclasses.replace(story.commit(), rounds=(), next_window=again)) == [
        forgotten(1, 1, merged_in=1)
    ]
    assert story.arrive(1) == [applied(1), HALF, encode(2, 2, steps=0)]


def test_the_overlap_of_a_slow_node_is_as_long_in_time_not_in_steps() -> None:
    """A, D: with half the steps in a round an overlap of two steps is one, and never reaches the next send."""
    story = going_on(tau=3)
    slow = [dataclasses.replace(plan, node_steps=((A, 2),)) if plan.index else plan for plan in story.rounds.values()]
    story.rounds = {plan.index: plan for plan in slow}
    story.steps(H)
    story.receive(story.commit())
    assert story.steps(2) == [], "it was sent in a full round: three steps"
    assert story.steps(1) == [applied(1), HALF]
    assert story.steps(1) == [encode(2, 2, steps=1)]
    story.receive(story.commit())
    assert story.steps(1) == [applied(2), HALF], "half of three"


# --- terms that change: at the boundary, whatever the order in which the node hears of things


def changing(node_tau: int | None = None) -> Story:
    return Story(
        node_tau=node_tau, method="decoupled", h=H, tau=3, on_late_update="continue", max_staleness=4,
        max_stale_rounds=8, quorum=1,
    )  # fmt: skip


def revision(story: Story, round_: int = 2, **changes: Any) -> Revision:
    return Revision(number=1, terms=story.spec.terms.replace(**changes), windows=(3,), round=round_)


def lower_rate(story: Story) -> Revision:
    return revision(story, lr=dataclasses.replace(story.spec.terms.schedule.lr, peak=0.5))


def first_terms(story: Story) -> Revision:
    return Revision(number=0, terms=story.spec.terms, windows=(0,), round=0)


def rates(story: Story, steps: int) -> list[float]:
    seen = []
    for _ in range(steps):
        seen.append(story.machine.lr)
        story.handle(ev.StepDone(tokens=1))
    return seen


def expected(*terms: Terms) -> list[float]:
    """Of the steps of four-step rounds under these terms, one after the other."""
    return [schedule.learning_rate(own, 4 * index + step) for index, own in enumerate(terms) for step in range(4)]


def test_a_new_learning_rate_begins_with_its_round_and_is_learnt_once() -> None:
    story = changing().begin()
    old, lower = story.spec.terms, lower_rate(story)
    first = rates(story, 2)
    for _ in range(2):
        story.hear(msg.Revised(revision=lower))
    assert first + rates(story, 10) == expected(old, old, lower.terms)
    assert story.machine.spec is not None and story.machine.revisions is not None
    assert (story.machine.spec.revision, story.machine.spec.terms) == (1, lower.terms)
    assert [revision.number for revision in story.machine.revisions.kept] == [0, 1]
    story.hear(story.welcome(revisions=(first_terms(story), lower)))
    story.hear(msg.Revised(revision=lower))
    assert story.machine.revisions.kept[-1] == lower


def test_who_comes_later_begins_each_round_under_its_own_terms() -> None:
    story = changing()
    old, lower = story.spec.terms, lower_rate(story)
    newest = dataclasses.replace(story.spec, terms=lower.terms, revision=1)
    story.hear(story.welcome(spec=newest, revisions=(first_terms(story), lower)))
    story.snapshot()
    story.hear(msg.Start(round=story.rounds[0], lease=None))
    assert rates(story, 12) == expected(old, old, lower.terms)


@pytest.mark.parametrize(("from_round", "tau"), [(2, 3), (1, 1)])
def test_an_own_overlap_is_no_longer_than_the_new_rounds_have_room_for(from_round: int, tau: int) -> None:
    """From round 2 on: this round and the next are as long as they were."""
    story = changing(node_tau=3).begin()
    story.hear(msg.Revised(revision=revision(story, from_round, h=2, tau=1)))
    story.steps(H)
    assert story.machine.fragments[0].sent[-1].tau == tau


def test_how_old_a_base_may_be_is_as_the_open_window_says() -> None:
    """The fragment is at version 0; the change begins with window 3, which opens with version 2."""
    story = changing().begin()
    story.hear(msg.Revised(revision=revision(story, max_staleness=1)))
    machine, state = story.machine, story.machine.fragments[0]
    assert [machine.terms_at(state, version).admission.max_staleness for version in range(4)] == [4, 4, 1, 1]
    assert [machine.terms_of(0, window).admission.max_staleness for window in (2, 3)] == [4, 1]
