"""Covers `node/machine.py` where updates are waited for: events in, commands out (protocol A-F, H-J, Q, S)."""

import dataclasses

import pytest
from node_story import (
    FINISHED,
    READY,
    A,
    B,
    Story,
    applied,
    blob,
    delta,
    encode,
    forgotten,
    installed,
    leaves,
    merged,
    offer_of,
)

from farloop.algo import schedule
from farloop.algo.spec import BlobKind, Lease
from farloop.node import events as ev
from farloop.node.send_schedule import RAMP_STEPS
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

# --- joining


def test_a_node_adopts_the_run_takes_snapshots_says_ready_and_starts() -> None:
    story = Story(2)
    assert story.machine.waiting == "the coordinator"
    assert story.hear(story.welcome()) == [ev.Adopt()]
    assert story.machine.waiting == "the first snapshot"
    assert story.snapshot(1) == [installed(0, 1), merged(0.0, 1)]
    assert story.snapshot(0) == [installed(0), merged(), READY]
    assert (story.machine.stage, story.machine.waiting, story.machine.running) == ("ready", "the start", False)
    lease, more = Lease(start=0, count=8), Lease(start=8, count=8)
    assert story.hear(msg.Start(round=story.rounds[0], lease=lease)) == [ev.UseSamples(lease=lease)]
    assert (story.machine.running, story.machine.waiting, story.machine.position) == (True, None, 0.0)
    assert story.hear(msg.Grant(lease=more)) == [ev.UseSamples(lease=more)]


def test_a_node_can_start_within_a_round() -> None:
    """I: its first step is the slot's, its learning rate that of there, grown from little."""
    story = Story(2).begin(round_=1, slot=1)
    plan = story.rounds[1]
    half = plan.length // 2
    assert (story.machine.schedule.step, story.machine.position) == (half, plan.start + half)
    assert story.machine.lr < schedule.learning_rate(story.machine.terms_in(1), plan.start + half)
    assert story.steps(half) == []
    assert (story.machine.schedule.round, story.machine.schedule.step) == (2, 0)
    assert story.steps(half)[0] == encode(1, 1, steps=plan.length), "its first send: a full period from its start"


def test_updates_that_come_while_joining_are_applied_in_order_behind_the_snapshot() -> None:
    """I: nothing of the random first weights survives."""
    story = Story(mix=0.5)
    story.hear(story.welcome())
    first, second = story.commit(merged=[B]), story.commit(merged=[B])
    assert story.receive(second) == story.receive(first) == []
    assert story.snapshot(version=0) == [installed(0), merged(), applied(1), applied(2), merged(), READY]


def test_before_the_start_a_broken_session_is_made_good_and_a_run_that_is_over_is_left() -> None:
    story = Story().join()
    story.cut()
    assert story.hear(story.welcome()) == [READY]
    assert story.hear(msg.Finished()) == [FINISHED]
    assert story.machine.stage == "finished" and story.machine.waiting is None


# --- sending


def test_every_slot_is_sent_at_its_own_step_and_never_before_a_full_period() -> None:
    """A, D: fragment 0 of 2 is due at step 2 of 4, from the second round on; fragment 1 at step 4."""
    story = Story(2).begin()
    for steps, sent in (
        (4, encode(1, 1, 1, steps=4)),
        (2, encode(1, 2, 0, steps=6)),
        (2, encode(2, 3, 1, steps=4)),
        (2, encode(2, 4, 0, steps=4)),
    ):
        assert story.steps(steps - 1) == []
        assert story.steps(1) == [sent]
        story.receive(story.commit(sent.blob.fragment))


def test_a_joiner_sends_nothing_but_the_last_slot_before_its_second_round() -> None:
    """A, I: a full period from a received base."""
    story = Story(2)
    for fragment in (1, 0, 1):  # the others have come to round 2
        story.commit(fragment, merged=[B])
    assert [window.round for window in story.begin(round_=2).windows.values()] == [2, 2]
    assert story.steps(3) == [], "fragment 0 was due at step 2"
    assert story.steps(1)[0] == encode(3, 1, 1, steps=4)


def test_an_encoded_delta_is_offered_and_forgotten_at_its_outcome() -> None:
    story = Story().begin()
    (command,) = story.steps(4)
    assert story.encoded(command) == [ev.SendBlob(offer=offer_of(command))]
    assert story.hear(msg.Stored(blob=delta(1, 1))) == []
    assert story.machine.waiting == "fragment 0, window 1"
    assert story.receive(story.commit()) == [applied(1), forgotten(1, 1, merged_in=1), merged()]
    assert story.machine.waiting is None and story.machine.lost_steps == 0


@pytest.mark.parametrize("screen", ["off", "norm", "full"])
def test_a_node_measures_its_deltas_where_the_coordinator_does_not(screen: str) -> None:
    """H: what it said of them would not be believed."""
    (command,) = Story(screen=screen).begin().steps(4)
    assert isinstance(command, ev.Encode) and command.measure == (screen == "off")


@pytest.mark.parametrize(("tau", "mix", "inside"), [(0, 0.0, 4), (3, 0.0, 1), (3, 0.5, 1), (3, 1.0, 4)])
def test_the_steps_inside_a_delta_are_h_without_overlap_and_h_minus_tau_with_it(
    tau: int, mix: float, inside: int
) -> None:
    """H; algorithms C30."""
    story = Story(tau=tau, mix=mix).begin()
    assert story.steps(4) == [encode(1, 1, steps=4)]
    story.receive(story.commit())
    assert story.steps(4)[-1] == encode(2, 2, steps=inside)


def test_with_a_of_one_a_dropped_delta_begins_the_next_at_its_merge() -> None:
    """E, H: the local weights became the anchor, so what was done before is in no other node's hands."""
    story = Story(tau=3, mix=1.0).begin()
    story.steps(4)
    story.receive(story.commit(merged=[B]))
    assert story.steps(4) == [applied(1), forgotten(1, 1), merged(), encode(2, 2, steps=1)]
    assert story.machine.lost_steps == 7


def test_within_one_inner_step_all_that_is_due_is_encoded_before_anything_is_merged() -> None:
    """D: the merge of one fragment and the send of another fall on one step; the delta must not depend on it."""
    story = Story(2, tau=2, mix=0.5).begin()
    story.steps(4)
    assert story.receive(story.commit(1)) == []
    assert story.steps(2) == [
        encode(1, 2, 0, steps=6), applied(1, 1), forgotten(1, 1, 1, merged_in=1), merged(0.5, 1),
    ]  # fmt: skip


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


# --- merging


@pytest.mark.parametrize("tau", [0, 1, 3])
@pytest.mark.parametrize("arrives_after", [0, 1, 2])
def test_an_update_that_is_there_in_time_is_merged_exactly_tau_steps_after_the_send(
    tau: int, arrives_after: int
) -> None:
    """D; algorithms C29: earlier updates stay pending."""
    story = Story(tau=tau, mix=0.25).begin()
    story.steps(4)
    left = tau - min(arrives_after, tau)
    assert story.steps(tau - left) == []
    now, expected = story.receive(story.commit()), [applied(1), forgotten(1, 1, merged_in=1), merged(0.25)]
    if left:
        assert now == [] and story.steps(left - 1) == []
        now = story.steps(1)
    assert now == expected


@pytest.mark.parametrize("tau", [0, 1, 2])
@pytest.mark.parametrize("bytes_first", [False, True])
def test_training_stands_still_at_send_plus_tau_until_announcement_and_bytes_are_there(
    tau: int, bytes_first: bool
) -> None:
    """F: `wait`, whichever of the two comes first; no sooner than it must, also while the coordinator is away."""
    story = Story(tau=tau, mix=0.5).begin()
    story.steps(4)
    story.cut(Reason.SILENT)
    story.steps(tau)
    story.hear(story.welcome())
    committed = story.commit()
    events: list[ev.Event] = [ev.Received(message=committed), ev.BlobArrived(blob=msg.update_id(committed))]
    first, second = reversed(events) if bytes_first else events
    assert story.handle(first) == []
    assert story.machine.waiting == "fragment 0, window 1"
    assert story.handle(second) == [applied(1), forgotten(1, 1, merged_in=1), merged(0.5)]
    assert story.machine.waiting is None and story.machine.inner_steps == 4 + tau


def test_a_dropped_outcome_alone_does_not_end_the_wait_and_then_the_anchor_replaces_the_weights() -> None:
    """E, F: a = 0, and the steps since the last merge are lost."""
    story = Story(mix=0.5).begin()
    story.steps(4)
    story.refuse(delta(1, 1))
    assert story.machine.waiting == "fragment 0, window 1"
    assert story.receive(story.commit(merged=[B])) == [applied(1), forgotten(1, 1), merged()]
    assert story.machine.lost_steps == 4


def test_a_delta_that_is_known_to_be_merged_is_not_refused_any_more() -> None:
    """Q: it was offered twice around a reconnection, and the second offer came when its window had closed."""
    story = Story(tau=2, mix=0.5).begin()
    story.encoded(story.steps(4)[0])
    story.receive(story.commit(merged=(A, B)))
    story.refuse(delta(1, 1), Reason.LATE)
    assert story.steps(2)[-2:] == [forgotten(1, 1, merged_in=1), merged(0.5)]
    assert story.machine.lost_steps == 0


def test_several_pending_versions_are_applied_in_order_and_merged_once() -> None:
    """E: the outcome is that of the window the delta was for."""
    story = Story(mix=0.5).begin()
    story.steps(4)
    mine, later = story.commit(merged=[A, B]), story.commit(merged=[B])
    assert story.receive(later) == []
    assert story.receive(mine) == [applied(1), applied(2), forgotten(1, 1, merged_in=1), merged(0.5)]
    assert story.machine.versions == (2,)


def test_without_an_undecided_delta_a_new_version_is_merged_at_the_next_boundary_with_the_terms_a() -> None:
    """E: as for a node that missed a window."""
    story = Story(mix=0.75).begin()
    story.steps(1)
    assert story.receive(story.commit(merged=[B])) == [applied(1), merged(0.75)]
    assert story.machine.lost_steps == 0


def test_what_comes_again_has_no_effect_and_its_bytes_are_let_go() -> None:
    """Q, R; algorithms B18."""
    story = Story().begin()
    assert story.snapshot() == [ev.ForgetBlob(blob=blob(BlobKind.SNAPSHOT, 0))]
    story.steps(4)
    committed = story.commit()
    story.receive(committed)
    assert story.receive(committed) == [ev.ForgetBlob(blob=msg.update_id(committed))]
    assert (story.machine.versions, story.machine.lost_steps) == ((1,), 0)


def test_the_evaluator_scores_its_anchors_after_the_merge() -> None:
    story = Story().begin()
    story.steps(4)
    assert story.receive(story.commit(evaluator=A))[-2:] == [merged(), ev.Evaluate(versions=(1,))]
    story.steps(4)
    assert story.receive(story.commit(evaluator=B))[-1] == merged()


# --- broken links and anchors


@pytest.mark.parametrize(
    ("events", "sent_at"),
    [
        ("encoded cut welcome", [0, 2]),  # under the same id: the coordinator knows whether it has it
        ("cut encoded welcome", [2]),
        ("cut welcome encoded", [2]),
        ("offered cut welcome", [2]),  # the shell offered it, as the next step may be long
        ("cut welcome offered", [2]),  # by the session before, perhaps
        ("encoded refused cut welcome", [0]),
        ("encoded cut closed welcome", [0]),  # its outcome is in the commit that follows
    ],
)
def test_a_delta_is_offered_once_in_every_session_until_it_is_decided(events: str, sent_at: list[int]) -> None:
    """E, Q, X."""
    story = Story().begin()
    (command,) = story.steps(4)
    sent = []
    for number, event in enumerate(events.split()):
        match event:
            case "encoded" | "offered":
                commands = story.encoded(command, offered=event == "offered")
            case "cut":
                commands = story.cut(Reason.SILENT)
                assert story.machine.waiting == "fragment 0, window 1"
            case "welcome":
                commands = story.hear(story.welcome())
            case "refused":
                commands = story.refuse(delta(1, 1), Reason.LATE)
            case _:
                story.commit()
                commands = []
        assert commands in ([], [ev.SendBlob(offer=offer_of(command))])
        sent += [number] * len(commands)
    assert sent == sent_at


def test_an_anchor_that_does_not_match_is_fetched_and_replaced_before_training_goes_on() -> None:
    """S: nothing is sent from a wrong anchor, and no update applied; the request is made again in the next session."""
    story, fetch = Story(mix=0.5).begin(), ev.Tell(message=msg.Fetch(fragment=0))
    story.steps(4)
    story.receive(story.commit())
    assert story.handle(ev.AnchorMismatch(fragment=0)) == [fetch]
    assert story.machine.waiting == "a snapshot of fragment 0"
    story.cut()
    assert story.hear(story.welcome()) == [fetch]
    assert story.receive(story.commit(merged=[B])) == []
    assert story.snapshot(version=1) == [installed(1), merged(), applied(2), merged(0.5)]
    story.cut()
    assert story.hear(story.welcome()) == [] and story.machine.waiting is None


def test_a_snapshot_ahead_takes_the_place_of_updates_and_of_an_undecided_delta() -> None:
    """R: catch-up by snapshot. The steps since the last merge are lost, and no bytes are kept."""
    story = Story(tau=3, mix=0.5).begin()
    (command,) = story.steps(4)
    story.receive(story.commit(merged=[B]))
    story.commit(merged=[B])
    update = ev.ForgetBlob(blob=blob(BlobKind.UPDATE, 1))
    assert story.snapshot() == [forgotten(1, 1), update, installed(2), merged()]
    assert (story.machine.versions, story.machine.lost_steps) == ((2,), 4)
    assert story.encoded(command) == [forgotten(1, 1)], "it was not even encoded yet"


def test_a_coordinator_of_a_lower_epoch_is_fenced() -> None:
    """S: also by what an earlier start of the node has met."""
    met = Story()
    met.epoch = 8
    for story in (Story(epoch=8), met.begin()):
        assert story.hear(story.welcome(epoch=7)) == [ev.Stop(reason=Reason.FENCED, detail="epoch 7 after 8")]
        assert story.machine.ended and not story.machine.running


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


@pytest.mark.parametrize("retriable", [False, True])
def test_a_refusal_stops_the_node_unless_trying_again_can_help(retriable: bool) -> None:
    story = Story()
    commands = story.hear(msg.Refused(reason=Reason.WRONG_LAYOUT, detail="x", retriable=retriable))
    assert commands == ([] if retriable else [ev.Stop(reason=Reason.WRONG_LAYOUT, detail="x")])
    assert story.machine.ended is not retriable


def test_a_start_that_the_coordinator_knows_a_later_one_of_goes_on_behind_it_unless_it_has_joined() -> None:
    refused = msg.Refused(reason=Reason.OLD_INCARNATION, detail="x", retriable=False, newest=7)
    story = Story()
    assert story.hear(refused) == [ev.Renumber(incarnation=8)]
    assert story.machine.incarnation == 8 and not story.machine.ended
    for retriable in (False, True):
        replaced = Story().begin()
        (command,) = replaced.hear(dataclasses.replace(refused, retriable=retriable))
        assert command == ev.Stop(reason=Reason.OLD_INCARNATION, detail="x")
    for story in (Story(), Story().begin()):
        assert story.hear(msg.Leave(reason=Reason.OLD_INCARNATION, detail="x"))[-1] == command


# --- rounds


def test_position_and_learning_rate_follow_the_round_of_the_run() -> None:
    """A: never the node's own count. The cosine from 1 to 0 is at its half in the middle of the run."""
    story = Story().begin(round_=5)
    assert story.machine.position == 20.0
    story.machine.inner_steps = RAMP_STEPS
    assert story.machine.lr == pytest.approx(0.5)
    story.machine.schedule.plans[5] = dataclasses.replace(story.rounds[5], node_steps=((A, 8),))
    story.steps(2)
    assert story.machine.position == 21.0, "eight own steps to four positions"


def test_a_joiner_ramps_its_learning_rate_and_a_first_node_does_not() -> None:
    """I: its moments are empty."""
    story, first = (Story(h=40, steps=4000).begin(round_=round_) for round_ in (1, 0))
    assert story.machine.lr == pytest.approx(schedule.learning_rate(story.spec.terms, 40.0) / RAMP_STEPS)
    story.steps(RAMP_STEPS - 1)
    assert story.machine.lr == schedule.learning_rate(story.spec.terms, 40.0 + RAMP_STEPS - 1)
    assert first.machine.lr == schedule.learning_rate(first.spec.terms, 0.0)


def test_a_node_that_is_behind_jumps_to_the_current_round_at_its_boundary() -> None:
    """A: the part it skips is counted."""
    story = Story().begin()
    story.steps(4)
    for _ in range(5):
        story.receive(story.commit(merged=[B]))
    story.steps(4)
    assert (story.machine.schedule.round, story.machine.position) == (5, 20.0)
    assert story.machine.schedule.skipped_positions == 12, "rounds 2, 3 and 4"


def test_without_the_plan_of_the_next_round_training_waits_where_it_is() -> None:
    """A, B: holding a version means holding the terms of the next; this is for a coordinator that breaks that."""
    story = Story()
    story.rounds = {index: story.rounds[index] for index in range(3)}
    story.begin()
    story.machine.schedule.plans = {0: story.rounds[0]}
    story.steps(4)
    assert (story.machine.waiting, story.machine.position) == ("the plan of round 1", 4.0)
    story.receive(story.commit())
    assert story.machine.waiting is None and story.machine.position == 4.0


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


# --- the end


def test_the_last_send_of_the_last_slot_is_its_flush_and_the_others_flush_beside_it() -> None:
    """A: at position `steps` all is merged, then every fragment with steps of its own is sent once more."""
    story = Story(2, steps=8).begin()
    story.steps(4)
    story.receive(story.commit(1))
    story.steps(2)
    story.receive(story.commit(0))
    assert all(window.final for window in story.windows.values())
    assert story.steps(2) == [encode(2, 3, 0, steps=2), encode(2, 4, 1, steps=4)]
    assert (story.machine.stage, story.machine.position) == ("finishing", 8.0)
    assert story.machine.waiting == "fragment 0, window 2"
    story.receive(story.commit(0))
    assert story.receive(story.commit(1))[-2:] == [merged(0.0, 1), FINISHED]
    assert story.machine.ended and story.machine.waiting is None


def test_with_overlap_the_end_first_merges_what_is_undecided_then_flushes() -> None:
    story = Story(tau=3, mix=0.5, steps=6).begin()
    story.steps(4)
    assert story.steps(2) == []
    assert story.machine.waiting == "fragment 0, window 1"
    assert story.receive(story.commit()) == [
        applied(1), forgotten(1, 1, merged_in=1), merged(0.5), encode(2, 2, steps=0),
    ]  # fmt: skip
    assert story.receive(story.commit())[-1] == FINISHED


def test_a_run_that_ended_without_a_node_is_left_once_its_last_versions_are_held() -> None:
    """D: quorum below all. Nothing is sent any more."""
    story = Story(steps=8).begin()
    story.steps(1)
    last = [story.commit(merged=[B]), story.commit(merged=[B])]
    assert not story.windows
    story.cut()
    story.hear(story.welcome())
    assert story.hear(msg.Finished()) == []
    assert not story.machine.running and story.machine.waiting == "the last windows"
    assert [command for committed in last for command in story.receive(committed)][-2:] == [merged(), FINISHED]


def test_the_coordinators_farewell_ends_a_node_that_will_get_nothing_more() -> None:
    """V: it would wait for ever for a coordinator that has gone."""
    story, stopping = Story().begin(), Story().begin()
    story.steps(4)
    story.hear(msg.Leave(reason=Reason.RUN_FINISHED))
    assert story.machine.stage == "finished" and story.machine.waiting is None
    stopping.hear(msg.Leave(reason=Reason.COORDINATOR_STOPPING))
    assert stopping.machine.running, "it can be started again"


def test_a_drained_node_waits_for_what_it_has_sent_and_sends_nothing_more() -> None:
    story = Story(tau=3, mix=0.5).begin()
    story.steps(4)
    assert story.handle(ev.DrainRequested()) == []
    assert (story.machine.running, story.machine.waiting) == (False, "fragment 0, window 1")
    assert story.receive(story.commit()) == [
        applied(1), forgotten(1, 1, merged_in=1), merged(0.5), leaves(Reason.DRAINED),
    ]  # fmt: skip
    assert story.machine.stage == "left"
    idle = Story().begin()
    idle.steps(1)
    assert idle.handle(ev.DrainRequested()) == [leaves(Reason.DRAINED)], "nothing of it is undecided"
    assert idle.handle(ev.DrainRequested()) == []
    idle.cut()
    assert idle.hear(idle.welcome()) == [leaves(Reason.DRAINED)], "the good-bye was lost with its session"
