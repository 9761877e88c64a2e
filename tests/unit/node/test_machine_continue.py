"""Covers `node/machine.py` where updates are not waited for: `on_late_update = continue` (protocol A, D, E, F)."""

import dataclasses
from typing import Any

import pytest
from plain_runs import plain_terms

from farloop.algo import schedule
from farloop.algo.spec import (
    BlobId,
    BlobKind,
    Fragment,
    Identity,
    Layout,
    NodeId,
    RunSpec,
    TensorSlot,
    WindowTerms,
)
from farloop.node import events as ev
from farloop.node.machine import NodeMachine
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

A, B = NodeId("a"), NodeId("b")
H = 4
LAYOUT = Layout(
    slots=1,
    fragments=(Fragment(index=0, slot=0, numel=256, tensors=(TensorSlot(name="t", shape=(256,), offset=0),)),),
)


class Story:
    """Node a, with one fragment that is sent every four steps. Every window is of the round after the last one's."""

    def __init__(self, *, incarnation: int = 1, **choices: Any) -> None:
        identity = Identity(
            name="story", model="own", layout=LAYOUT, anchor_digests=(0,), data="own", num_samples=0,
            evaluation_set="none", seed=0,
        )  # fmt: skip
        terms = plain_terms(
            method="decoupled",
            h=H,
            tau=1,
            mix=0.5,
            on_late_update="continue",
            quorum=1,
            max_staleness=2,
            max_stale_rounds=2,
        )
        self.terms = terms.replace(**choices)
        self.spec = RunSpec(identity=identity, terms=self.terms)
        self.rounds = {plan.index: plan for plan in schedule.first_rounds(self.terms, count=10)}
        (self.window,) = schedule.first_windows(self.terms, LAYOUT)
        self.open: WindowTerms | None = self.window
        self.version, self.epoch = 0, 1
        self.machine = NodeMachine(name=A, incarnation=incarnation)
        self.handle(ev.Received(message=self.welcome()))
        self.snapshot()
        self.hear(msg.Start(round=self.rounds[0], lease=None))

    def handle(self, event: ev.Event) -> list[ev.Command]:
        commands = self.machine.handle(event)
        self.machine.check()
        return commands

    def hear(self, message: msg.Message) -> list[ev.Command]:
        return self.handle(ev.Received(message=message))

    def welcome(self) -> msg.Welcome:
        return msg.Welcome(
            protocol=1,
            epoch=self.epoch,
            spec=self.spec,
            lane_token=b"",
            versions=(self.version,),
            windows=() if self.open is None else (self.open,),
            rounds=tuple(self.rounds.values()),
        )

    def snapshot(self) -> list[ev.Command]:
        return self.handle(ev.BlobArrived(blob=BlobId(kind=BlobKind.SNAPSHOT, fragment=0, version=self.version)))

    def steps(self, count: int) -> list[ev.Command]:
        """Inner steps, none of which training may be waiting for."""
        commands: list[ev.Command] = []
        for _ in range(count):
            assert self.machine.waiting is None and self.machine.running
            commands += self.handle(ev.StepDone(tokens=1))
        return commands

    def commit(self, *merged: NodeId, drops: tuple[msg.Drop, ...] = ()) -> msg.Committed:
        """The coordinator closes the open window."""
        assert self.open is not None
        self.window = self.open
        self.open = schedule.window_after(self.terms, LAYOUT, self.window, self.rounds)
        self.version = self.window.window
        return msg.Committed(
            fragment=0,
            version=self.version,
            size=1,
            digest=0,
            anchor_digest=0,
            merged=tuple(msg.Share(node=node, weight=1 / len(merged)) for node in merged),
            drops=drops,
            next_window=self.open,
            rounds=tuple(self.rounds.values()),
        )

    def arrive(self, version: int) -> list[ev.Command]:
        """The bytes of an update."""
        return self.handle(ev.BlobArrived(blob=BlobId(kind=BlobKind.UPDATE, fragment=0, version=version)))

    def receive(self, committed: msg.Committed) -> list[ev.Command]:
        """Its announcement, then its bytes."""
        return self.hear(committed) + self.arrive(committed.version)

    def drop(self, delta: BlobId, reason: Reason = Reason.CORRUPT) -> list[ev.Command]:
        return self.hear(msg.Outcome(blob=delta, reason=reason, detail=""))

    def offered(self, base: int, seq: int) -> msg.Offer:
        """The delta is encoded now."""
        offer = msg.Offer(blob=delta(base, seq), size=1, digest=0, window=base + 1)
        assert self.handle(ev.DeltaEncoded(offer=offer)) == [ev.SendBlob(offer=offer)]
        return offer


def delta(base: int, seq: int, incarnation: int = 1) -> BlobId:
    return BlobId(kind=BlobKind.DELTA, fragment=0, version=base, node=A, incarnation=incarnation, seq=seq)


def encode(base: int, seq: int, *, steps: int) -> ev.Encode:
    return ev.Encode(blob=delta(base, seq), window=base + 1, codec="q4", steps=steps, tokens=steps)


def applied(version: int) -> ev.Apply:
    return ev.Apply(fragment=0, version=version, anchor_digest=0, codec="q4")


def merged(mix: float = 0.5) -> ev.Merge:
    return ev.Merge(fragment=0, mix=mix)


def forgotten(base: int, seq: int, merged_in: int | None = None) -> ev.ForgetBlob:
    return ev.ForgetBlob(blob=delta(base, seq), merged_in=merged_in)


# --- going on, and standing still


def test_training_goes_on_for_the_rounds_that_the_terms_allow_and_then_waits() -> None:
    """A, F: two rounds past that of the send; what was sent is decided, and it goes on at once."""
    story = Story()
    assert story.steps(H) == [encode(0, 1, steps=4)]
    assert story.steps(2 * H) == []
    assert (story.machine.schedule.round, story.machine.waiting) == (3, "fragment 0, window 1")
    assert story.receive(story.commit(A)) == [forgotten(0, 1, merged_in=1), applied(1), merged()]
    assert story.machine.waiting is None


def test_without_patience_it_waits_at_the_end_of_the_round() -> None:
    story = Story(max_stale_rounds=0, tau=0)
    story.steps(H)
    assert story.machine.waiting == "fragment 0, window 1"


def test_bytes_that_do_not_come_hold_it_up_as_well() -> None:
    """F: a delta that is decided is no use while its update is on the way."""
    story = Story()
    story.steps(H)
    assert story.hear(story.commit(A)) == [forgotten(0, 1, merged_in=1)]
    assert story.steps(2 * H) == []
    assert story.machine.waiting == "fragment 0, window 1"
    assert story.arrive(1) == [applied(1), merged()]
    assert story.machine.waiting is None


def test_what_stands_still_does_not_wait_for_steps_of_its_own() -> None:
    """The end of an overlap is counted in steps: it would never come, and others would wait for the next delta."""
    story = Story(tau=3, max_stale_rounds=8)
    story.machine.schedule.plans = {0: story.rounds[0]}
    story.steps(H)
    assert story.machine.waiting == "the plan of round 1"
    late = dataclasses.replace(story.commit(A), rounds=(), next_window=dataclasses.replace(story.window, window=2))
    assert story.hear(late) == [forgotten(0, 1, merged_in=1)]
    assert story.arrive(1) == [applied(1), merged(), encode(1, 2, steps=0)]


def test_what_stands_still_too_far_behind_begins_anew_without_a_turn() -> None:
    """D: the window may wait for this node."""
    story = Story(max_stale_rounds=8)
    story.machine.schedule.plans = {0: story.rounds[0]}
    story.steps(H)
    story.hear(dataclasses.replace(story.commit(A), rounds=()))
    assert story.arrive(1) == [applied(1), merged()]
    for _ in range(3):
        story.hear(dataclasses.replace(story.commit(B), rounds=()))
    assert [story.arrive(version) for version in (4, 3)] == [[], []]
    assert story.arrive(2)[-1] == merged(0.0)


# --- one merge per send


def test_an_update_that_is_there_is_merged_tau_steps_after_the_send() -> None:
    story = Story(tau=2)
    story.steps(H)
    assert story.receive(story.commit(A, B)) == [forgotten(0, 1, merged_in=1)]
    assert story.steps(1) == []
    assert story.steps(1) == [applied(1), merged()]
    assert story.steps(2) == [encode(1, 2, steps=2)]


def test_a_late_one_is_merged_when_the_delta_is_decided() -> None:
    """E: a delta that rides along in a later window is merged there, and not before."""
    story = Story()
    story.steps(H)
    assert story.receive(story.commit(B)) == []
    assert story.steps(2) == []
    assert story.receive(story.commit(A, B)) == [forgotten(0, 1, merged_in=2), applied(1), applied(2), merged()]


def test_others_commits_are_not_merged_before_the_next_send() -> None:
    """Else others would mix the anchor in at their pace."""
    story = Story()
    story.steps(H)
    story.receive(story.commit(A))
    assert story.steps(1) == [applied(1), merged()]
    assert story.receive(story.commit(B)) == []
    assert story.steps(3) == [encode(1, 2, steps=3)]


def test_a_turn_with_an_undecided_delta_is_skipped_and_the_next_delta_covers_both() -> None:
    """D: with mix = 1 nothing is mixed in, so that a delta's steps are those since the last send."""
    story = Story(mix=1.0)
    story.steps(H)
    assert story.steps(H) == [] and story.machine.skipped_turns == 1
    assert story.receive(story.commit(A))[-1] == merged(1.0)
    assert story.steps(H) == [encode(1, 2, steps=8)]


def test_the_next_delta_waits_for_the_version_that_holds_the_last_one() -> None:
    """It would hold the same work again."""
    story = Story(tau=0)
    story.steps(H)
    story.hear(story.commit(A))
    assert story.steps(H) == []
    assert story.arrive(1) == [applied(1), merged()]
    assert story.steps(H) == [encode(1, 2, steps=4)]


def test_the_overlap_of_a_slow_node_is_as_long_in_time_not_in_steps() -> None:
    """A, D: with half the steps in a round an overlap of two steps is one, and never reaches the next send."""
    story = Story(tau=3)
    story.rounds = {
        index: dataclasses.replace(plan, node_steps=((A, 2),)) if index else plan
        for index, plan in story.rounds.items()
    }
    story.steps(H)
    story.receive(story.commit(A))
    assert story.steps(2) == [], "it was sent in a full round: three steps"
    assert story.steps(1) == [applied(1), merged()]
    assert story.steps(1) == [encode(1, 2, steps=1)]
    story.receive(story.commit(A))
    assert story.steps(1) == [applied(2), merged()], "half of three"


# --- what is dropped


def test_a_refused_delta_is_given_up_with_its_window_and_the_anchor_replaces_the_weights_once() -> None:
    """E: not before the commit, or a node at its end would make it anew for the same window, again and again."""
    story = Story()
    story.steps(H)
    assert story.drop(delta(0, 1)) == []
    assert story.steps(H) == []
    assert story.receive(story.commit(B)) == [forgotten(0, 1), applied(1), merged(0.0)]
    assert story.machine.lost_steps == 8
    assert story.steps(H) == [encode(1, 2, steps=4)]
    assert story.receive(story.commit(A)) == [forgotten(1, 2, merged_in=2)]
    assert story.steps(1) == [applied(2), merged()]


def test_a_refusal_that_comes_after_the_commit_is_the_end_of_it() -> None:
    story = Story(tau=0)
    story.steps(H)
    assert story.receive(story.commit(B)) == []
    assert story.drop(delta(0, 1), Reason.OVERLAP) == [forgotten(0, 1), applied(1), merged(0.0)]


def test_nothing_is_sent_between_a_drop_and_its_merge() -> None:
    story = Story(tau=0)
    story.steps(H)
    story.drop(delta(0, 1))
    story.hear(story.commit(B))
    assert story.steps(H) == []
    assert story.arrive(1) == [applied(1), merged(0.0)]


def test_one_that_no_window_can_take_any_more_is_given_up() -> None:
    """D: two versions late is the most here."""
    story = Story(max_stale_rounds=8)
    story.steps(H)
    assert story.receive(story.commit(B)) == story.receive(story.commit(B)) == []
    assert story.receive(story.commit(B))[0] == forgotten(0, 1)
    assert story.steps(1) == [applied(1), applied(2), applied(3), merged(0.0)]


def test_who_was_removed_from_a_window_may_still_be_in_the_next() -> None:
    """E, F: a drop of `Committed` says that a window went on without a node, not what becomes of its delta."""
    story = Story()
    story.steps(H)
    assert story.receive(story.commit(B, drops=(msg.Drop(node=A, reason=Reason.CLOSED),))) == []
    assert story.receive(story.commit(A, B))[0] == forgotten(0, 1, merged_in=2)


def test_a_node_that_fell_too_far_behind_begins_anew_at_its_turn() -> None:
    """D, E: a delta from so old a base would be refused, and without a send there would never be a merge again."""
    story = Story(max_stale_rounds=8)
    story.steps(H)
    story.receive(story.commit(A))
    story.steps(1)
    for _ in range(3):
        assert story.receive(story.commit(B)) == []
    assert story.steps(3) == [applied(2), applied(3), applied(4), merged(0.0)]
    assert story.machine.lost_steps == 3
    assert story.machine.schedule.round == 4, "the run's, at the boundary"
    assert story.steps(H) == [encode(4, 2, steps=4)]


def test_after_a_restart_a_share_in_its_name_is_its_own_only_if_its_delta_is_known_to_have_come() -> None:
    """E: else it may be that of the incarnation before."""
    story = Story(incarnation=2, tau=0)
    (command,) = story.steps(H)
    assert isinstance(command, ev.Encode)
    assert story.receive(story.commit(A)) == []
    assert story.drop(command.blob, Reason.OVERLAP) == [
        ev.ForgetBlob(blob=command.blob), applied(1), merged(0.0),
    ]  # fmt: skip
    (command,) = story.steps(H)
    assert isinstance(command, ev.Encode)
    story.hear(msg.Stored(blob=command.blob))
    assert story.hear(story.commit(A)) == [ev.ForgetBlob(blob=command.blob, merged_in=2)]


# --- sessions


def test_an_undecided_delta_is_offered_again_while_a_window_can_take_it() -> None:
    """Q, D: also where its own has closed."""
    story = Story()
    story.steps(H)
    offer = story.offered(0, 1)
    for _ in range(3):
        story.handle(ev.Disconnected(reason=Reason.CLOSED))
        assert story.hear(story.welcome()) == [ev.SendBlob(offer=offer)]
        story.commit(B)
    story.handle(ev.Disconnected(reason=Reason.CLOSED))
    assert story.hear(story.welcome()) == []


@pytest.mark.parametrize(("epoch", "again"), [(1, False), (2, True)])
def test_too_late_for_a_window_that_a_restart_opened_again_is_not_too_late(epoch: int, again: bool) -> None:
    """E, Q: its commit had not become durable; the coordinator waits for this delta now."""
    story = Story()
    story.steps(H)
    offer = story.offered(0, 1)
    story.drop(delta(0, 1), Reason.LATE)
    story.handle(ev.Disconnected(reason=Reason.CLOSED))
    story.epoch = epoch
    assert story.hear(story.welcome()) == ([ev.SendBlob(offer=offer)] if again else [])


def test_a_snapshot_in_the_place_of_the_base_is_no_loss_of_what_follows() -> None:
    """E: the delta was of the weights before; the steps since the snapshot are not in it."""
    story = Story(max_stale_rounds=8)
    story.steps(H)
    story.commit(B)
    story.hear(story.welcome())
    assert story.snapshot() == [ev.Install(fragment=0, version=1, codec="q4"), merged(0.0)]
    lost = story.machine.lost_steps
    assert story.drop(delta(0, 1), Reason.OVERLAP) == [forgotten(0, 1)]
    assert story.steps(H) == [encode(1, 2, steps=4)]
    assert story.machine.lost_steps == lost


# --- the end


def finished(story: Story) -> None:
    """Rounds up to the last step, all decided at once."""
    while story.machine.running:
        for command in story.steps(1):
            if isinstance(command, ev.Encode) and story.machine.running:
                story.receive(story.commit(A))


def test_at_the_end_what_is_undecided_is_decided_before_the_flush_is_sent_and_merged() -> None:
    """A: the final window's own send is the last slot's."""
    story = Story(steps=6, tau=1)
    story.steps(H)
    assert story.steps(2) == []
    assert (story.machine.stage, story.machine.waiting) == ("finishing", "fragment 0, window 1")
    assert story.receive(story.commit(B)) == []
    assert story.receive(story.commit(A, B)) == [forgotten(0, 1, merged_in=2), applied(1), applied(2), merged(),
        ev.Tell(message=msg.Leave(reason=Reason.RUN_FINISHED)),
    ]  # fmt: skip


def test_a_delta_that_no_window_is_left_for_does_not_hold_the_end() -> None:
    story = Story(steps=6)
    story.steps(6)
    story.receive(story.commit(B))
    assert story.receive(story.commit(B))[0] == forgotten(0, 1)
    assert story.machine.stage == "finished"


def test_a_clean_run_ends_with_its_last_window() -> None:
    story = Story()
    finished(story)
    assert story.machine.stage == "finishing" and story.machine.inner_steps == 40
    assert story.receive(story.commit(A))[-1] == ev.Tell(message=msg.Leave(reason=Reason.RUN_FINISHED))
    assert (story.machine.lost_steps, story.machine.schedule.skipped_positions) == (0, 0)


def test_a_node_that_drains_waits_for_the_outcome_of_what_it_has_sent() -> None:
    story = Story()
    story.steps(H)
    assert story.handle(ev.DrainRequested()) == []
    assert story.receive(story.commit(B)) == []
    assert story.hear(story.commit(A, B)) == [
        forgotten(0, 1, merged_in=2), ev.Tell(message=msg.Leave(reason=Reason.DRAINED)),
    ]  # fmt: skip


def test_what_is_merged_late_is_mixed_as_its_own_window_says() -> None:
    """B: also where updates are not waited for."""
    story = Story()
    sent = story.steps(H)
    assert encode(0, 1, steps=H) in sent
    story.offered(0, 1)
    story.machine.fragments[0].terms_of[1] = dataclasses.replace(story.window, mix=0.25, codec_down="q8")
    assert story.receive(story.commit(A)) == [ev.ForgetBlob(blob=delta(0, 1), merged_in=1)]
    assert story.steps(1) == [ev.Apply(fragment=0, version=1, anchor_digest=0, codec="q8"), merged(0.25)]
