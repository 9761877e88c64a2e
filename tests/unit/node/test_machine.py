"""Covers `node/machine.py`: events in, commands out (protocol A, B, D, E, F, H, I, J, Q, S)."""

import dataclasses
from collections.abc import Sequence

import pytest
from plain_runs import plain_terms

from farloop.algo import schedule
from farloop.algo.spec import (
    BlobId,
    BlobKind,
    Fragment,
    Identity,
    Layout,
    Lease,
    NodeId,
    RoundPlan,
    RunSpec,
    TensorSlot,
)
from farloop.algo.terms import LearningRate
from farloop.node import events as ev
from farloop.node.machine import NodeMachine
from farloop.node.send_schedule import RAMP_STEPS
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

A, B = NodeId("a"), NodeId("b")
TOKENS = 100
"""Of each inner step."""

LEFT = ev.Tell(message=msg.Leave(reason=Reason.RUN_FINISHED))


class Story:
    """Node a, and a coordinator that says what the coordinator of such a run says. Fragment i has slot i."""

    def __init__(
        self, *, fragments: int = 1, steps: int = 40, h: int = 4, tau: int = 0, mix: float = 0.0, epoch: int = 0
    ) -> None:
        layout = Layout(
            slots=fragments,
            fragments=tuple(
                Fragment(index=i, slot=i, numel=256, tensors=(TensorSlot(name=f"t{i}", shape=(256,), offset=0),))
                for i in range(fragments)
            ),
        )
        identity = Identity(
            name="story",
            model="own",
            layout=layout,
            anchor_digests=(0,) * fragments,
            data="own",
            num_samples=0,
            evaluation_set="none",
            seed=0,
        )
        terms = plain_terms(
            steps=steps,
            h=h,
            tau=tau,
            mix=mix,
            lr=LearningRate(peak=1.0, minimum=0.0, warmup_steps=0),
            sequence_tokens=TOKENS,
        )
        self.spec = RunSpec(identity=identity, terms=terms)
        self.rounds = {plan.index: plan for plan in schedule.first_rounds(terms, count=steps)}
        self.windows = {window.fragment: window for window in schedule.first_windows(terms, layout)}
        self.versions = [0] * fragments
        self.epoch = 1
        self.machine = NodeMachine(name=A, incarnation=1, epoch=epoch)

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
            versions=tuple(self.versions),
            windows=tuple(self.windows.values()),
            rounds=tuple(self.rounds.values()),
        )

    def snapshot(self, fragment: int) -> list[ev.Command]:
        return self.handle(ev.BlobArrived(blob=blob(BlobKind.SNAPSHOT, fragment, self.versions[fragment])))

    def begin(self, round_: int = 0) -> "Story":
        """Join and start."""
        self.hear(self.welcome())
        for fragment in range(len(self.versions)):
            self.snapshot(fragment)
        self.hear(msg.Start(round=self.rounds[round_], lease=None))
        assert self.machine.running
        return self

    def steps(self, count: int) -> list[ev.Command]:
        """Inner steps, none of which training may be waiting for."""
        commands: list[ev.Command] = []
        for _ in range(count):
            assert self.machine.waiting is None and self.machine.running
            commands += self.handle(ev.StepDone(tokens=TOKENS))
        return commands

    def encoded(self, encode: ev.Command) -> list[ev.Command]:
        return self.handle(ev.DeltaEncoded(offer=offer_of(encode)))

    def commit(
        self, fragment: int, *, merged: Sequence[NodeId] = (A,), evaluator: NodeId | None = None
    ) -> msg.Committed:
        """The coordinator closes the open window."""
        window = self.windows.pop(fragment)
        following = schedule.window_after(self.spec.terms, self.spec.identity.layout, window, self.rounds)
        if following is not None:
            self.windows[fragment] = following
        self.versions[fragment] = window.window
        return msg.Committed(
            fragment=fragment,
            version=window.window,
            size=1,
            digest=0,
            anchor_digest=digest(fragment, window.window),
            merged=tuple(msg.Share(node=node, weight=1 / len(merged)) for node in merged),
            drops=(),
            next_window=following,
            rounds=tuple(self.rounds.values()),
            evaluator=evaluator,
        )

    def receive(self, committed: msg.Committed) -> list[ev.Command]:
        """Its announcement, then its bytes."""
        return self.hear(committed) + self.handle(ev.BlobArrived(blob=msg.update_id(committed)))


def digest(fragment: int, version: int) -> int:
    return 1000 * fragment + version


def blob(kind: BlobKind, fragment: int, version: int) -> BlobId:
    return BlobId(kind=kind, fragment=fragment, version=version)


def delta(fragment: int, base: int, seq: int) -> BlobId:
    return BlobId(kind=BlobKind.DELTA, fragment=fragment, version=base, node=A, incarnation=1, seq=seq)


def encode(fragment: int, window: int, seq: int, *, steps: int) -> ev.Encode:
    """Of a delta whose base is the version before its window's."""
    blob_id = delta(fragment, window - 1, seq)
    return ev.Encode(blob=blob_id, window=window, codec="q4", steps=steps, tokens=steps * TOKENS)


def offer_of(command: ev.Command) -> msg.Offer:
    assert isinstance(command, ev.Encode)
    return msg.Offer(blob=command.blob, size=1, digest=0, window=command.window)


def applied(fragment: int, version: int) -> ev.Apply:
    return ev.Apply(fragment=fragment, version=version, anchor_digest=digest(fragment, version), codec="q4")


def settled(fragment: int, base: int, seq: int) -> ev.ForgetBlob:
    """The delta is part of the version after its base."""
    return ev.ForgetBlob(blob=delta(fragment, base, seq), merged_in=base + 1)


def merged(fragment: int, mix: float) -> ev.Merge:
    return ev.Merge(fragment=fragment, mix=mix)


# --- joining


def test_a_node_adopts_the_run_takes_snapshots_says_ready_and_starts() -> None:
    """I."""
    story = Story(fragments=2)
    assert story.machine.waiting == "the coordinator"
    assert story.hear(story.welcome()) == [ev.Adopt()]
    assert story.machine.waiting == "the first snapshot"
    assert story.snapshot(1) == [ev.Install(fragment=1, version=0, codec="q4"), merged(1, 0.0)]
    assert story.snapshot(0) == [
        ev.Install(fragment=0, version=0, codec="q4"),
        merged(0, 0.0),
        ev.Tell(message=msg.Ready()),
    ]
    assert (story.machine.stage, story.machine.waiting, story.machine.running) == ("ready", "the start", False)
    lease = Lease(start=0, count=8)
    assert story.hear(msg.Start(round=story.rounds[0], lease=lease)) == [ev.UseSamples(lease=lease)]
    assert story.machine.running and story.machine.waiting is None
    assert story.machine.position == 0.0
    assert story.hear(msg.Grant(lease=Lease(start=8, count=8))) == [ev.UseSamples(lease=Lease(start=8, count=8))]


def test_a_node_can_start_within_a_round() -> None:
    """I: its first step is the slot's, its learning rate that of there, grown from little."""
    story = Story(fragments=2)
    story.hear(story.welcome())
    for fragment in range(2):
        story.snapshot(fragment)
    plan = story.rounds[1]
    story.hear(msg.Start(round=plan, lease=None, slot=1))
    half = plan.length // 2
    assert (story.machine.schedule.step, story.machine.position) == (half, plan.start + half)
    assert story.machine.lr < schedule.learning_rate(story.machine.terms_in(1), plan.start + half)
    assert [type(command) for command in story.steps(half)] == []
    place = story.machine.schedule
    assert (place.round, place.step) == (2, 0), "its first send comes a full period from its start"
    sent = story.steps(half)[0]
    assert isinstance(sent, ev.Encode) and (sent.blob.fragment, sent.steps) == (0, plan.length)


def test_updates_that_come_while_joining_are_applied_in_order_behind_the_snapshot() -> None:
    """I: a snapshot, then queued updates; nothing of the random first weights survives."""
    story = Story(mix=0.5)
    story.hear(story.welcome())
    first, second = story.commit(0, merged=[B]), story.commit(0, merged=[B])
    assert story.receive(second) == story.receive(first) == []
    assert story.handle(ev.BlobArrived(blob=blob(BlobKind.SNAPSHOT, 0, 0))) == [
        ev.Install(fragment=0, version=0, codec="q4"),
        merged(0, 0.0),
        applied(0, 1),
        applied(0, 2),
        merged(0, 0.0),
        ev.Tell(message=msg.Ready()),
    ]


def test_a_session_that_breaks_before_the_start_makes_the_node_say_ready_again() -> None:
    """Q: sessions are not durable, the handshake re-derives everything."""
    story = Story()
    story.hear(story.welcome())
    story.snapshot(0)
    story.handle(ev.Disconnected(reason=Reason.CLOSED))
    assert story.hear(story.welcome()) == [ev.Tell(message=msg.Ready())]


def test_a_run_that_is_over_before_the_start_is_left() -> None:
    story = Story()
    story.hear(story.welcome())
    assert story.hear(msg.Finished()) == [LEFT]
    assert story.machine.stage == "finished" and story.machine.waiting is None


# --- sending


def test_every_slot_is_sent_at_its_own_step_and_never_before_a_full_period() -> None:
    """A, D: fragment 0 of 2 is due at step 2 of 4, from the second round on; fragment 1 at step 4."""
    story = Story(fragments=2, h=4)
    story.begin()
    assert story.steps(3) == []
    assert story.steps(1) == [encode(1, 1, 1, steps=4)]
    story.receive(story.commit(1))
    assert story.steps(1) == []
    assert story.steps(1) == [encode(0, 1, 2, steps=6)]
    story.receive(story.commit(0))
    assert story.steps(1) == []
    assert story.steps(1) == [encode(1, 2, 3, steps=4)]
    story.receive(story.commit(1))
    assert story.steps(2)[-1] == encode(0, 2, 4, steps=4)


def test_an_encoded_delta_is_offered_and_forgotten_at_its_outcome() -> None:
    """E, Q."""
    story = Story().begin()
    command = story.steps(4)[0]
    assert story.encoded(command) == [ev.SendBlob(offer=offer_of(command))]
    assert story.hear(msg.Stored(blob=delta(0, 0, 1))) == []
    assert story.machine.waiting == "fragment 0, window 1"
    assert story.receive(story.commit(0)) == [applied(0, 1), settled(0, 0, 1), merged(0, 0.0)]
    assert story.machine.waiting is None and story.machine.lost_steps == 0


def test_the_steps_inside_a_delta_are_h_without_overlap_and_h_minus_tau_with_it() -> None:
    """H; algorithms C30."""
    for tau, mix, inside in ((0, 0.0, 4), (3, 0.0, 1), (3, 0.5, 1), (3, 1.0, 4)):
        story = Story(h=4, tau=tau, mix=mix).begin()
        assert story.steps(4) == [encode(0, 1, 1, steps=4)]
        story.receive(story.commit(0))
        assert story.steps(4)[-1] == encode(0, 2, 2, steps=inside), f"tau {tau}, mix {mix}"


def test_with_a_of_one_a_dropped_delta_begins_the_next_at_its_merge() -> None:
    """E, H: the local weights became the anchor, so what was done before is in nobody's hands."""
    story = Story(h=4, tau=3, mix=1.0).begin()
    story.steps(4)
    story.receive(story.commit(0, merged=[B]))
    commands = story.steps(4)
    assert commands[:-1] == [applied(0, 1), ev.ForgetBlob(blob=delta(0, 0, 1)), merged(0, 0.0)]
    assert commands[-1] == encode(0, 2, 2, steps=1)
    assert story.machine.lost_steps == 7


# --- merging


@pytest.mark.parametrize("tau", [0, 1, 3])
@pytest.mark.parametrize("arrives_after", [0, 1, 2])
def test_an_update_that_is_there_in_time_is_merged_exactly_tau_steps_after_the_send(
    tau: int, arrives_after: int
) -> None:
    """D; algorithms C29: earlier updates stay pending."""
    story = Story(h=4, tau=tau, mix=0.25).begin()
    story.steps(4)
    arrives_after = min(arrives_after, tau)
    assert story.steps(arrives_after) == []
    expected = [applied(0, 1), settled(0, 0, 1), merged(0, 0.25)]
    now = story.receive(story.commit(0))
    if arrives_after == tau:
        assert now == expected
    else:
        assert now == []
        assert story.steps(tau - arrives_after - 1) == []
        assert story.steps(1) == expected


def test_training_stands_still_at_send_plus_tau_until_announcement_and_bytes_are_there() -> None:
    """F: `wait`, whichever of the two comes first."""
    for bytes_first in (False, True):
        story = Story(tau=2, mix=0.5).begin()
        story.steps(4 + 2)
        committed = story.commit(0)
        events: list[ev.Event] = [ev.Received(message=committed), ev.BlobArrived(blob=msg.update_id(committed))]
        first, second = reversed(events) if bytes_first else events
        assert story.handle(first) == []
        assert story.machine.waiting == "fragment 0, window 1"
        assert story.handle(second) == [applied(0, 1), settled(0, 0, 1), merged(0, 0.5)]
        assert story.machine.waiting is None


def test_a_dropped_outcome_alone_does_not_end_the_wait_and_then_the_anchor_replaces_the_weights() -> None:
    """E, F: a = 0, and the steps since the last merge are lost."""
    story = Story(mix=0.5).begin()
    story.steps(4)
    story.hear(msg.Outcome(blob=delta(0, 0, 1), reason=Reason.CORRUPT, detail=""))
    assert story.machine.waiting == "fragment 0, window 1"
    assert story.receive(story.commit(0, merged=[B])) == [
        applied(0, 1),
        ev.ForgetBlob(blob=delta(0, 0, 1)),
        merged(0, 0.0),
    ]
    assert story.machine.lost_steps == 4


def test_several_pending_versions_are_applied_in_order_and_merged_once() -> None:
    """E: the outcome is that of the window the delta was for."""
    story = Story(mix=0.5).begin()
    story.steps(4)
    mine, later = story.commit(0, merged=[A, B]), story.commit(0, merged=[B])
    assert story.receive(later) == []
    assert story.receive(mine) == [applied(0, 1), applied(0, 2), settled(0, 0, 1), merged(0, 0.5)]
    assert story.machine.versions == (2,)


def test_without_an_undecided_delta_a_new_version_is_merged_at_the_next_boundary_with_the_terms_a() -> None:
    """E: as for a node that missed a window."""
    story = Story(mix=0.75).begin()
    story.steps(1)
    assert story.receive(story.commit(0, merged=[B])) == [applied(0, 1), merged(0, 0.75)]
    assert story.machine.lost_steps == 0


def test_an_announcement_and_its_bytes_may_come_again_without_effect() -> None:
    """Q, R; algorithms B18. Bytes that nobody will use are let go."""
    story = Story().begin()
    story.steps(4)
    committed = story.commit(0)
    story.receive(committed)
    assert story.receive(committed) == [ev.ForgetBlob(blob=msg.update_id(committed))]
    assert story.machine.versions == (1,)


def test_the_evaluator_scores_its_anchors_after_the_merge() -> None:
    """J."""
    story = Story().begin()
    story.steps(4)
    assert story.receive(story.commit(0, evaluator=A))[-2:] == [merged(0, 0.0), ev.Evaluate(versions=(1,))]
    story.steps(4)
    assert story.receive(story.commit(0, evaluator=B))[-1] == merged(0, 0.0)


# --- broken links and anchors


def test_an_undecided_delta_is_offered_again_after_a_reconnection() -> None:
    """Q: under the same id, the coordinator knows whether it has it."""
    story = Story().begin()
    command = story.steps(4)[0]
    story.encoded(command)
    story.handle(ev.Disconnected(reason=Reason.SILENT))
    assert story.machine.waiting == "fragment 0, window 1"
    assert story.hear(story.welcome()) == [ev.SendBlob(offer=offer_of(command))]


def test_a_delta_encoded_without_a_link_is_offered_once_there_is_one() -> None:
    """Q."""
    story = Story().begin()
    command = story.steps(4)[0]
    story.handle(ev.Disconnected(reason=Reason.CLOSED))
    assert story.encoded(command) == []
    assert story.hear(story.welcome()) == [ev.SendBlob(offer=offer_of(command))]


def test_a_delta_that_left_before_the_boundary_is_not_offered_again_in_the_same_session() -> None:
    """X: the next step may be long, so its shell offers it as soon as it is encoded."""
    story = Story().begin()
    command = story.steps(4)[0]
    assert story.handle(ev.DeltaEncoded(offer=offer_of(command), offered=True)) == []
    story.handle(ev.Disconnected(reason=Reason.SILENT))
    assert story.hear(story.welcome()) == [ev.SendBlob(offer=offer_of(command))]


def test_a_delta_that_may_have_left_by_an_ended_session_is_offered_in_the_next() -> None:
    """Q."""
    story = Story().begin()
    command = story.steps(4)[0]
    story.handle(ev.Disconnected(reason=Reason.SILENT))
    story.hear(story.welcome())
    assert story.handle(ev.DeltaEncoded(offer=offer_of(command), offered=True)) == [
        ev.SendBlob(offer=offer_of(command))
    ]


def test_a_delta_that_is_known_to_be_merged_is_not_refused_any_more() -> None:
    """Q: it was offered twice around a reconnection, and the second offer came when its window had closed."""
    story = Story(tau=2, mix=0.5).begin()
    command = story.steps(4)[0]
    story.encoded(command)
    story.receive(story.commit(0, merged=(A, B)))
    story.hear(msg.Outcome(blob=delta(0, 0, 1), reason=Reason.LATE, detail=""))
    assert story.steps(2)[-2:] == [settled(0, 0, 1), ev.Merge(fragment=0, mix=0.5)]
    assert story.machine.lost_steps == 0


def test_a_delta_still_being_encoded_is_offered_once_not_twice() -> None:
    """Q."""
    story = Story().begin()
    command = story.steps(4)[0]
    story.handle(ev.Disconnected(reason=Reason.CLOSED))
    assert story.hear(story.welcome()) == []
    assert story.encoded(command) == [ev.SendBlob(offer=offer_of(command))]


def test_a_dropped_delta_is_never_offered_again() -> None:
    """E."""
    story = Story().begin()
    story.encoded(story.steps(4)[0])
    story.hear(msg.Outcome(blob=delta(0, 0, 1), reason=Reason.LATE, detail=""))
    story.handle(ev.Disconnected(reason=Reason.CLOSED))
    assert story.hear(story.welcome()) == []


def test_a_delta_whose_window_closed_meanwhile_is_not_offered_again() -> None:
    """E: its outcome is in the commit that follows."""
    story = Story().begin()
    story.encoded(story.steps(4)[0])
    story.handle(ev.Disconnected(reason=Reason.CLOSED))
    committed = story.commit(0)
    assert story.hear(story.welcome()) == []
    assert story.receive(committed)[-1] == merged(0, 0.0)


def test_an_anchor_that_does_not_match_is_fetched_and_replaced_before_training_goes_on() -> None:
    """S, and §4 of the architecture: mismatch → snapshot. Nothing is sent from a wrong anchor."""
    story = Story(mix=0.5).begin()
    story.steps(4)
    story.receive(story.commit(0))
    assert story.handle(ev.AnchorMismatch(fragment=0)) == [ev.Tell(message=msg.Fetch(fragment=0))]
    assert story.machine.waiting == "a snapshot of fragment 0"
    following = story.commit(0, merged=[B])
    assert story.receive(following) == [], "no update is applied to it either"
    assert story.handle(ev.BlobArrived(blob=blob(BlobKind.SNAPSHOT, 0, 1))) == [
        ev.Install(fragment=0, version=1, codec="q4"),
        merged(0, 0.0),
        applied(0, 2),
        merged(0, 0.5),
    ]
    assert story.machine.waiting is None


def test_a_snapshot_that_was_lost_with_its_session_is_asked_for_in_the_next() -> None:
    """Q, S: the request goes with the session, and the coordinator may think that updates will do."""
    story = Story(mix=0.5).begin()
    story.steps(4)
    story.receive(story.commit(0))
    story.handle(ev.AnchorMismatch(fragment=0))
    story.handle(ev.Disconnected(reason=Reason.CLOSED))
    assert story.hear(story.welcome()) == [ev.Tell(message=msg.Fetch(fragment=0))]
    story.snapshot(0)
    assert story.machine.waiting is None
    story.handle(ev.Disconnected(reason=Reason.CLOSED))
    assert story.hear(story.welcome()) == [], "it is not lost any more"


def test_a_snapshot_ahead_takes_the_place_of_updates_and_of_an_undecided_delta() -> None:
    """R: catch-up by snapshot. The steps since the last merge are lost, and no bytes are kept."""
    story = Story(tau=3, mix=0.5).begin()
    command = story.steps(4)[0]
    story.receive(story.commit(0, merged=[B]))
    story.commit(0, merged=[B])
    assert story.snapshot(0) == [
        ev.ForgetBlob(blob=delta(0, 0, 1)),
        ev.ForgetBlob(blob=blob(BlobKind.UPDATE, 0, 1)),
        ev.Install(fragment=0, version=2, codec="q4"),
        merged(0, 0.0),
    ]
    assert (story.machine.versions, story.machine.lost_steps) == ((2,), 4)
    assert story.encoded(command) == [ev.ForgetBlob(blob=delta(0, 0, 1))], "it was not even encoded yet"


def test_a_snapshot_of_what_is_held_is_let_go() -> None:
    """Q: a repeated catch-up changes nothing."""
    story = Story().begin()
    assert story.snapshot(0) == [ev.ForgetBlob(blob=blob(BlobKind.SNAPSHOT, 0, 0))]
    assert story.machine.lost_steps == 0


def test_a_coordinator_of_a_lower_epoch_is_fenced() -> None:
    """S: also by what an earlier start of the node has met."""
    for story in (Story(epoch=8), Story()):
        if not story.machine.epoch:
            story.epoch = 8
            story.begin()
        story.epoch = 7
        assert story.hear(story.welcome()) == [ev.Stop(reason=Reason.FENCED, detail="epoch 7 after 8")]
        assert story.machine.ended and not story.machine.running


def test_another_run_at_the_same_address_stops_the_node() -> None:
    """S, Z: the identity never changes."""
    story = Story().begin()
    other = dataclasses.replace(story.spec, identity=dataclasses.replace(story.spec.identity, seed=1))
    [command] = story.hear(dataclasses.replace(story.welcome(), epoch=2, spec=other))
    assert isinstance(command, ev.Stop) and command.reason is Reason.WRONG_RUN


@pytest.mark.parametrize("retriable", [False, True])
def test_a_refusal_stops_the_node_unless_trying_again_can_help(retriable: bool) -> None:
    story = Story()
    commands = story.hear(msg.Refused(reason=Reason.WRONG_LAYOUT, detail="x", retriable=retriable))
    assert commands == ([] if retriable else [ev.Stop(reason=Reason.WRONG_LAYOUT, detail="x")])
    assert story.machine.ended is not retriable


# --- rounds


def test_position_and_learning_rate_follow_the_round_of_the_run() -> None:
    """A: never the node's own count. The cosine from 1 to 0 is at its half in the middle of the run."""
    story = Story(h=4, steps=40).begin(round_=5)
    assert story.machine.position == 20.0
    story.machine.inner_steps = RAMP_STEPS
    assert story.machine.lr == pytest.approx(0.5)
    plan = dataclasses.replace(story.rounds[5], node_steps=((A, 8),))
    story.machine.schedule.plans[5] = plan
    story.steps(2)
    assert story.machine.position == 21.0, "eight own steps to four positions"


def test_a_joiner_ramps_its_learning_rate_and_a_first_node_does_not() -> None:
    """I: its moments are empty."""
    story = Story(h=40, steps=4000)
    story.begin(round_=1)
    full = schedule.learning_rate(story.spec.terms, 40.0)
    assert story.machine.lr == pytest.approx(full / RAMP_STEPS)
    story.steps(RAMP_STEPS - 1)
    assert story.machine.lr == schedule.learning_rate(story.spec.terms, 40.0 + RAMP_STEPS - 1)
    first = Story(h=40, steps=4000).begin()
    assert first.machine.lr == schedule.learning_rate(first.spec.terms, 0.0)


def test_a_joiner_sends_nothing_but_the_last_slot_before_its_second_round() -> None:
    """A, I: a full period from a received base."""
    story = Story(fragments=2, h=4)
    for fragment in (1, 0, 1):  # the others have come to round 2
        story.commit(fragment, merged=[B])
    story.begin(round_=2)
    assert [window.round for window in story.windows.values()] == [2, 2]
    assert story.steps(3) == [], "fragment 0 was due at step 2"
    assert story.steps(1)[0] == encode(1, 3, 1, steps=4)


def test_a_node_that_is_behind_jumps_to_the_current_round_at_its_boundary() -> None:
    """A: the part it skips is counted."""
    story = Story(h=4, steps=40).begin()
    story.steps(4)
    for _ in range(5):
        story.receive(story.commit(0, merged=[B]))
    story.steps(4)
    assert (story.machine.schedule.round, story.machine.position) == (5, 20.0)
    assert story.machine.schedule.skipped_positions == 12, "rounds 2, 3 and 4"


def test_without_the_plan_of_the_next_round_training_waits_where_it_is() -> None:
    """A, B: holding a version means holding the terms of the next; this is for a coordinator that breaks that."""
    story = Story(h=4, steps=40)
    story.rounds = {0: story.rounds[0], 1: story.rounds[1], 2: story.rounds[2]}
    story.begin()
    story.machine.schedule.plans = {0: story.rounds[0]}
    story.steps(4)
    assert (story.machine.waiting, story.machine.position) == ("the plan of round 1", 4.0)
    story.receive(story.commit(0))
    assert story.machine.waiting is None and story.machine.position == 4.0


def test_a_node_whose_round_went_by_before_it_heard_of_its_plan_jumps_to_the_run_s() -> None:
    """A: cut off at the end of a round for so long that the coordinator tells of its next one no more."""
    story = Story(h=4, steps=40).begin()
    story.machine.schedule.plans = {0: story.rounds[0]}
    story.steps(4)
    story.handle(ev.Disconnected(reason=Reason.SILENT))
    missed = [story.commit(0, merged=[B]) for _ in range(6)]
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
    story = Story(fragments=2, h=4, steps=8).begin()
    story.steps(4)
    story.receive(story.commit(1))
    story.steps(2)
    story.receive(story.commit(0))
    assert all(window.final for window in story.windows.values())
    assert story.steps(2) == [encode(0, 2, 3, steps=2), encode(1, 2, 4, steps=4)]
    assert (story.machine.stage, story.machine.position) == ("finishing", 8.0)
    assert story.machine.waiting == "fragment 0, window 2"
    story.receive(story.commit(0))
    assert story.receive(story.commit(1))[-2:] == [merged(1, 0.0), LEFT]
    assert story.machine.ended and story.machine.waiting is None


def test_with_overlap_the_end_first_merges_what_is_undecided_then_flushes() -> None:
    """A."""
    story = Story(h=4, tau=3, mix=0.5, steps=6).begin()
    story.steps(4)
    assert story.steps(2) == []
    assert story.machine.waiting == "fragment 0, window 1"
    commands = story.receive(story.commit(0))
    assert commands == [
        applied(0, 1),
        settled(0, 0, 1),
        merged(0, 0.5),
        encode(0, 2, 2, steps=0),
    ]
    assert story.receive(story.commit(0))[-1] == LEFT


def test_a_truncated_last_round_ends_at_the_last_position() -> None:
    """A: 6 = 4 + 2 steps."""
    story = Story(h=4, steps=6).begin()
    story.steps(4)
    story.receive(story.commit(0))
    assert story.steps(2) == [encode(0, 2, 2, steps=2)]
    assert story.machine.position == 6.0
    assert story.receive(story.commit(0))[-1] == LEFT


def test_a_run_that_ended_without_a_node_is_left_once_its_last_versions_are_held() -> None:
    """D: quorum below all. Nothing is sent any more."""
    story = Story(h=4, steps=8).begin()
    story.steps(1)
    last = [story.commit(0, merged=[B]), story.commit(0, merged=[B])]
    assert not story.windows
    story.handle(ev.Disconnected(reason=Reason.CLOSED))
    story.hear(story.welcome())
    assert story.hear(msg.Finished()) == []
    assert not story.machine.running and story.machine.waiting == "the last windows"
    assert [command for committed in last for command in story.receive(committed)][-2:] == [merged(0, 0.0), LEFT]


def test_the_coordinators_farewell_ends_a_node_that_will_get_nothing_more() -> None:
    """V: it would wait for ever for a coordinator that has gone."""
    story = Story().begin()
    story.steps(4)
    story.hear(msg.Leave(reason=Reason.RUN_FINISHED))
    assert story.machine.stage == "finished" and story.machine.waiting is None
    stopping = Story().begin()
    stopping.hear(msg.Leave(reason=Reason.COORDINATOR_STOPPING))
    assert stopping.machine.running, "it can be started again"


# --- draining


def test_a_drained_node_waits_for_what_it_has_sent_and_sends_nothing_more() -> None:
    """V."""
    story = Story(tau=3, mix=0.5).begin()
    story.steps(4)
    assert story.handle(ev.DrainRequested()) == []
    assert (story.machine.running, story.machine.waiting) == (False, "fragment 0, window 1")
    assert story.receive(story.commit(0)) == [
        applied(0, 1),
        settled(0, 0, 1),
        merged(0, 0.5),
        ev.Tell(message=msg.Leave(reason=Reason.DRAINED)),
    ]
    assert story.machine.stage == "left"


def test_a_node_with_nothing_undecided_leaves_at_once_and_stays_away() -> None:
    """V."""
    story = Story().begin()
    story.steps(1)
    left = ev.Tell(message=msg.Leave(reason=Reason.DRAINED))
    assert story.handle(ev.DrainRequested()) == [left]
    assert story.handle(ev.DrainRequested()) == []
    assert story.machine.ended


def test_a_plan_of_a_round_is_learnt_from_any_commit() -> None:
    """B: every later commit and welcome repeats it."""
    story = Story().begin()
    plan = RoundPlan(index=99, start=396, length=4)
    story.hear(dataclasses.replace(story.commit(0), rounds=(plan,)))
    assert story.machine.schedule.plans[99] == plan


# --- terms of windows


def test_a_window_is_served_and_merged_under_its_own_terms() -> None:
    """B: not under those of the run, which may be others by now."""
    story = Story(tau=0, mix=0.5)
    first = story.windows[0] = dataclasses.replace(story.windows[0], codec_up="e3m0", codec_down="q8", tau=2, mix=0.25)
    story.hear(story.welcome())
    assert ev.Install(fragment=0, version=0, codec="e3m0") in story.snapshot(0)
    story.hear(msg.Start(round=story.rounds[0], lease=None))
    (sent,) = story.steps(4)
    assert isinstance(sent, ev.Encode) and sent.codec == "e3m0"
    story.encoded(sent)
    story.steps(1)
    assert story.receive(story.commit(0)) == []
    assert story.steps(1) == [
        ev.Apply(fragment=0, version=1, anchor_digest=digest(0, 1), codec="q8"),
        settled(0, 0, 1),
        merged(0, 0.25),
    ]
    assert first.window == 1
