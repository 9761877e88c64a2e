"""Covers `node/machine.py` where updates are not waited for, and where its terms change (protocol A-F, Z)."""

import dataclasses
from typing import Any

import pytest
from node_story import (
    FINISHED,
    A,
    B,
    Story,
    applied,
    delta,
    encode,
    forgotten,
    installed,
    leaves,
    merged,
    offer_of,
)

from farloop.algo import schedule
from farloop.algo.spec import Revision
from farloop.algo.terms import Terms
from farloop.node import events as ev
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

H = 4
HALF = merged(0.5)


def going_on(incarnation: int = 1, **choices: Any) -> Story:
    """Training, with one fragment that is sent every four steps. Every window is of the round after the last one's."""
    own = {"h": H, "tau": 1, "mix": 0.5, "max_staleness": 2, "max_stale_rounds": 2, **choices}
    story = Story(incarnation=incarnation, method="decoupled", on_late_update="continue", quorum=1, **own)
    return story.begin()


# --- going on, and standing still


def test_training_goes_on_for_the_rounds_that_the_terms_allow_and_then_waits() -> None:
    """A, F: two rounds past that of the send; what was sent is decided, and it goes on at once."""
    story = going_on()
    assert story.steps(H) == [encode(1, 1, steps=4)]
    assert story.steps(2 * H) == []
    assert (story.machine.schedule.round, story.machine.waiting) == (3, "fragment 0, window 1")
    assert story.receive(story.commit()) == [forgotten(1, 1, merged_in=1), applied(1), HALF]
    assert story.machine.waiting is None
    story = going_on(max_stale_rounds=0, tau=0)
    story.steps(H)
    assert story.machine.waiting == "fragment 0, window 1", "without patience, at the end of the round"


def test_bytes_that_do_not_come_hold_it_up_as_well() -> None:
    """F: a delta that is decided is no use while its update is on the way."""
    story = going_on()
    story.steps(H)
    assert story.hear(story.commit()) == [forgotten(1, 1, merged_in=1)]
    assert story.steps(2 * H) == []
    assert story.machine.waiting == "fragment 0, window 1"
    assert story.arrive(1) == [applied(1), HALF]
    assert story.machine.waiting is None


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


def test_what_stands_still_too_far_behind_begins_anew_without_a_turn() -> None:
    """D: the window may wait for this node."""
    story = going_on(max_stale_rounds=8)
    story.machine.schedule.plans = {0: story.rounds[0]}
    story.steps(H)
    story.hear(dataclasses.replace(story.commit(), rounds=()))
    assert story.arrive(1) == [applied(1), HALF]
    for _ in range(3):
        story.hear(dataclasses.replace(story.commit(merged=[B]), rounds=()))
    assert story.arrive(4) == story.arrive(3) == []
    assert story.arrive(2)[-1] == merged(0.0)


# --- one merge per send


def test_an_update_that_is_there_is_merged_tau_steps_after_the_send() -> None:
    story = going_on(tau=2)
    story.steps(H)
    assert story.receive(story.commit(merged=[A, B])) == [forgotten(1, 1, merged_in=1)]
    assert story.steps(1) == []
    assert story.steps(1) == [applied(1), HALF]
    assert story.receive(story.commit(merged=[B])) == [], "others would mix the anchor in at their pace"
    assert story.steps(2) == [encode(2, 2, steps=2)]


def test_a_late_one_is_merged_when_the_delta_is_decided() -> None:
    """E: a delta that rides along in a later window is merged there, and not before."""
    story = going_on()
    story.steps(H)
    without = story.commit(merged=[B], drops=(msg.Drop(node=A, reason=Reason.CLOSED),))
    assert story.receive(without) == [], "a drop says that a window went on, not what becomes of the delta"
    assert story.steps(2) == []
    assert story.receive(story.commit(merged=[A, B])) == [forgotten(1, 1, merged_in=2), applied(1), applied(2), HALF]


def test_a_turn_with_an_undecided_delta_is_skipped_and_the_next_delta_covers_both() -> None:
    """D: with mix = 1 nothing is mixed in, so that a delta's steps are those since the last send."""
    story = going_on(mix=1.0)
    story.steps(H)
    assert story.steps(H) == [] and story.machine.skipped_turns == 1
    assert story.receive(story.commit())[-1] == merged(1.0)
    assert story.steps(H) == [encode(2, 2, steps=8)]


@pytest.mark.parametrize("refused", [False, True])
def test_the_next_delta_waits_for_the_version_that_the_last_one_was_decided_in(refused: bool) -> None:
    """It would hold the same work again, or work that is thrown away."""
    story = going_on(tau=0)
    story.steps(H)
    if refused:
        story.refuse(delta(1, 1))
    story.hear(story.commit(merged=[B if refused else A]))
    assert story.steps(H) == []
    assert story.arrive(1) == [applied(1), merged(0.0 if refused else 0.5)]
    assert story.steps(H) == [encode(2, 2, steps=4)]


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


# --- what is dropped


def test_a_refused_delta_is_given_up_with_its_window_and_the_anchor_replaces_the_weights_once() -> None:
    """E: not before the commit, or a node at its end would make it anew for the same window, again and again."""
    story = going_on()
    story.steps(H)
    assert story.refuse(delta(1, 1)) == []
    assert story.steps(H) == []
    assert story.receive(story.commit(merged=[B])) == [forgotten(1, 1), applied(1), merged(0.0)]
    assert story.machine.lost_steps == 8
    assert story.steps(H) == [encode(2, 2, steps=4)]
    assert story.receive(story.commit()) == [forgotten(2, 2, merged_in=2)]
    assert story.steps(1) == [applied(2), HALF]


def test_one_that_no_window_can_take_any_more_is_given_up() -> None:
    """D: two versions late is the most here."""
    story = going_on(max_stale_rounds=8)
    story.steps(H)
    assert story.receive(story.commit(merged=[B])) == story.receive(story.commit(merged=[B])) == []
    assert story.receive(story.commit(merged=[B]))[0] == forgotten(1, 1)
    assert story.steps(1) == [applied(1), applied(2), applied(3), merged(0.0)]


def test_a_node_that_fell_too_far_behind_begins_anew_at_its_turn() -> None:
    """D, E: a delta from so old a base would be refused, and without a send there would never be a merge again."""
    story = going_on(max_stale_rounds=8)
    story.steps(H)
    story.receive(story.commit())
    story.steps(1)
    for _ in range(3):
        assert story.receive(story.commit(merged=[B])) == []
    assert story.steps(3) == [applied(2), applied(3), applied(4), merged(0.0)]
    assert story.machine.lost_steps == 3
    assert story.machine.schedule.round == 4, "the run's, at the boundary"
    assert story.steps(H) == [encode(5, 2, steps=4)]


def test_after_a_restart_a_share_in_its_name_is_its_own_only_if_its_delta_is_known_to_have_come() -> None:
    """E: else it may be that of the incarnation before."""
    story = going_on(incarnation=2, tau=0)
    story.steps(H)
    first, second = delta(1, 1, incarnation=2), delta(2, 2, incarnation=2)
    assert story.receive(story.commit()) == []
    assert story.refuse(first, Reason.OVERLAP) == [ev.ForgetBlob(blob=first), applied(1), merged(0.0)]
    story.steps(H)
    story.hear(msg.Stored(blob=second))
    assert story.hear(story.commit()) == [ev.ForgetBlob(blob=second, merged_in=2)]


def test_after_an_overlap_a_share_in_its_name_may_be_that_of_the_delta_before() -> None:
    """E: the first was merged by a version that is announced after the second was sent."""
    story = going_on(tau=0)
    story.steps(H)
    assert story.receive(story.commit(merged=[B])) == []
    assert story.refuse(delta(1, 1), Reason.OVERLAP) == [forgotten(1, 1), applied(1), merged(0.0)]
    assert story.steps(H) == [encode(2, 2, steps=H)]
    assert story.receive(story.commit()) == [], "its second is not known to have come"
    assert story.refuse(delta(2, 2), Reason.OVERLAP)[0] == forgotten(2, 2)


def test_what_is_merged_late_is_mixed_as_its_own_window_says() -> None:
    """B."""
    story = going_on()
    story.steps(H)
    own = dataclasses.replace(story.machine.fragments[0].sent[0].terms, mix=0.25, codec_down="q8")
    story.machine.fragments[0].terms_of[1] = own
    story.receive(story.commit())
    assert story.steps(1) == [dataclasses.replace(applied(1), codec="q8"), merged(0.25)]


# --- sessions


def test_an_undecided_delta_is_offered_again_while_a_window_can_take_it() -> None:
    """Q, D: also where its own has closed."""
    story = going_on()
    (command,) = story.steps(H)
    (sent,) = story.encoded(command)
    for offered in ([sent], [sent], [sent], []):
        story.cut()
        assert story.hear(story.welcome()) == offered
        story.commit(merged=[B])


@pytest.mark.parametrize("reason", [Reason.LATE, Reason.CORRUPT])
@pytest.mark.parametrize(("epoch", "again"), [(1, False), (2, True)])
def test_what_was_refused_is_offered_to_a_coordinator_that_was_restarted(
    epoch: int, again: bool, reason: Reason
) -> None:
    """E, Q: the commit of its window may not have become durable; the coordinator waits for this delta now."""
    story = going_on()
    (command,) = story.steps(H)
    story.encoded(command)
    story.refuse(delta(1, 1), reason)
    story.cut()
    assert story.hear(story.welcome(epoch=epoch)) == ([ev.SendBlob(offer=offer_of(command))] if again else [])


def test_a_snapshot_in_the_place_of_the_base_is_no_loss_of_what_follows() -> None:
    """E: the delta was of the weights before; the steps since the snapshot are not in it."""
    story = going_on(max_stale_rounds=8)
    story.steps(H)
    story.commit(merged=[B])
    story.hear(story.welcome())
    assert story.snapshot() == [installed(1), merged(0.0)]
    lost = story.machine.lost_steps
    assert story.refuse(delta(1, 1), Reason.OVERLAP) == [forgotten(1, 1)]
    assert story.steps(H) == [encode(2, 2, steps=4)]
    assert story.machine.lost_steps == lost


# --- the end


def test_at_the_end_what_is_undecided_is_decided_before_the_flush_is_sent_and_merged() -> None:
    """A: the final window's own send is the last slot's."""
    story = going_on(steps=6)
    story.steps(H)
    assert story.steps(2) == []
    assert (story.machine.stage, story.machine.waiting) == ("finishing", "fragment 0, window 1")
    assert story.receive(story.commit(merged=[B])) == []
    taken = [forgotten(1, 1, merged_in=2), applied(1), applied(2), HALF, FINISHED]
    assert story.receive(story.commit(merged=[A, B])) == taken


def test_a_delta_that_no_window_is_left_for_does_not_hold_the_end() -> None:
    story = going_on(steps=6)
    story.steps(6)
    story.receive(story.commit(merged=[B]))
    assert story.receive(story.commit(merged=[B]))[0] == forgotten(1, 1)
    assert story.machine.stage == "finished"


def test_a_clean_run_ends_with_its_last_window() -> None:
    story = going_on()
    while story.machine.running:
        if any(isinstance(command, ev.Encode) for command in story.steps(1)) and story.machine.running:
            story.receive(story.commit())
    assert story.machine.stage == "finishing" and story.machine.inner_steps == 40
    assert story.receive(story.commit())[-1] == FINISHED
    assert (story.machine.lost_steps, story.machine.schedule.skipped_positions) == (0, 0)


def test_a_node_that_drains_waits_for_the_outcome_of_what_it_has_sent() -> None:
    story = going_on()
    story.steps(H)
    assert story.handle(ev.DrainRequested()) == []
    assert story.receive(story.commit(merged=[B])) == []
    assert story.hear(story.commit(merged=[A, B])) == [forgotten(1, 1, merged_in=2), leaves(Reason.DRAINED)]


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


def test_a_longer_run_does_not_end_where_it_would_have() -> None:
    story = changing().begin()
    story.hear(msg.Revised(revision=revision(story, steps=48)))
    story.machine.schedule.round, story.machine.schedule.step = 9, 3
    story.handle(ev.StepDone(tokens=1))
    assert story.machine.running, "position 40 was the end"


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
