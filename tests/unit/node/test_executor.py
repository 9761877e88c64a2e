"""Covers `node/executor.py` and `node/driver.py`: the test plays the coordinator, without sockets."""

import dataclasses
import logging
import queue
import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from node_story import A, Story, at_once, blob
from torch import Tensor, nn

from farloop.algo.fragments import flatten_into, partition, trainable_tensors
from farloop.algo.spec import BlobId, BlobKind, Lease
from farloop.node import driver as driver_module
from farloop.node import events as ev
from farloop.node import executor as executor_module
from farloop.node.driver import Driver
from farloop.node.errors import LinkFailed, NonFiniteDelta, Refused, RunOver, StateUnusable, Unreachable
from farloop.node.executor import Input, NodeExecutor
from farloop.node.link import Traffic
from farloop.node.model.anchor_files import AnchorFiles
from farloop.node.model.replica import Replica, Sent
from farloop.node.send_schedule import SendSchedule
from farloop.node.settings import NodeConfig
from farloop.node.state_dir import NodeState
from farloop.node.zmq_dealer import LinkThread
from farloop.quant.blob import BlobHeader, pack_blob
from farloop.quant.digest import digest
from farloop.quant.registry import codec_named
from farloop.wire import events as wire_ev
from farloop.wire import messages as msg
from farloop.wire.bounds import MOST_WORDS
from farloop.wire.reasons import Reason


class Link:
    """Keeps what the node sends."""

    def __init__(self) -> None:
        self.sent: list[msg.Message] = []
        self.offers: list[msg.Offer] = []
        self.moved, self.num_lanes, self.uplink = Traffic(), 0, None
        self.on_offer: Callable[[], None] = lambda: None

    def start(
        self, hello: Callable[[], msg.Hello], deliver: Callable[[wire_ev.SessionEvent | Exception], None]
    ) -> None:
        self.hello, self.deliver = hello, deliver

    def send(self, message: msg.Message) -> None:
        self.sent.append(message)

    def send_blob(self, offer: msg.Offer, data: bytearray) -> None:
        self.offers.append(offer)
        self.on_offer()

    def flushed(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        pass

    def of(self, kind: type[msg.Message]) -> list[msg.Message]:
        return [message for message in self.sent if isinstance(message, kind)]


class Worker:
    """Runs a job when it is told to."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._jobs: list[Callable[[], object]] = []

    def submit(self, job: Callable[[], object], done: object, failed: Callable[[Exception], None]) -> None:
        def run() -> None:
            try:
                job()
            except NonFiniteDelta as error:
                failed(error)

        self._jobs.append(run)

    def run(self) -> None:
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job()

    def close(self) -> None:
        pass


class Play:
    """An executor with a model of one fragment; its coordinator says what that of a story says, and sends the bytes."""

    def __init__(
        self,
        folder: Path,
        *,
        num_samples: int = 0,
        driven: bool = False,
        adapt_tau: bool | None = False,
        node_tau: int | None = None,
        check: bool = True,
        **terms: Any,
    ) -> None:
        self.module = nn.Linear(3, 2)
        layout = partition([(name, tuple(p.shape)) for name, p in trainable_tensors(self.module)], pattern="whole")
        self.fragment = layout.fragments[0]
        self.anchor = torch.zeros(self.fragment.numel)
        flatten_into(self.fragment, dict(trainable_tensors(self.module)), self.anchor)
        own = {"method": "diloco", "steps": 8, "h": 2, **terms}
        self.story = Story(layout=layout, num_samples=num_samples, anchor_digests=(digest(self.anchor),), **own)
        self.link, self.worker, self.now = Link(), Worker(), 0.0
        self.saved: msg.SavedAnchors | None = None
        state = NodeState.claim(folder)
        config = NodeConfig(name=A, save_every_rounds=2, tau=node_tau, adapt_tau=adapt_tau)
        if driven:
            self.driver = Driver(cast(LinkThread, self.link), state, partial(NodeExecutor, config))
            self.executor = self.driver.executor
        else:
            inbox: queue.SimpleQueue[Input] = queue.SimpleQueue()
            self.executor = NodeExecutor(
                config,
                inbox=inbox,
                now=lambda: self.now,
                worker=self.worker,
                link=self.link,
                state=state,
                files=AnchorFiles(folder, at_once),
                check=check,
            )

    def tell(self, message: msg.Message) -> None:
        self.link.deliver(wire_ev.MessageReceived(message=message))

    def send(self, blob: BlobId, values: Tensor, *, base: int, codec: str) -> None:
        coder = codec_named(codec)
        header = BlobHeader(codec=coder, fragment=self.fragment, version=blob.version, base=base, epoch=1)
        data = pack_blob(header, coder.encode(values, self.fragment))
        self.link.deliver(wire_ev.BlobReceived(blob=blob, data=data))

    def welcome(self, epoch: int = 1) -> "Play":
        """With the model attached; what comes next is not taken yet."""
        self.tell(self.story.welcome(epoch=epoch))
        assert not self.executor.settle() and self.executor.machine.spec == self.story.spec
        self.executor.attach(self.module)
        return self

    def again(self, folder: Path, **welcome: Any) -> "Play":
        """The next start of this node, with a model of other weights."""
        other = Play(folder)
        other.story, other.anchor = self.story, self.anchor
        other.saved = other.link.hello().saved
        other.tell(dataclasses.replace(self.story.welcome(), **welcome))
        assert not other.executor.settle()
        other.executor.attach(other.module)
        assert not other.executor.settle()
        return other

    def snapshot(self) -> None:
        (version,) = self.story.versions
        self.send(blob(BlobKind.SNAPSHOT, version), self.anchor, base=version, codec="fp32")

    def start(self, round_: int = 0, lease: Lease | None = None) -> None:
        self.tell(msg.Start(round=self.story.rounds[round_], lease=lease))

    def begin(self) -> "Play":
        self.welcome()
        assert not self.executor.settle()
        self.start()
        assert self.executor.settle() and self.executor.decision().running
        return self

    def step(self, **options: bool) -> bool:
        """One inner step; whether training may go on."""
        self.executor.step_done(10, 1.0, **options)
        self.worker.run()
        return self.executor.settle()

    def commit(self, *, anchor_digest: int | None = None, down_s: float = 0.0) -> None:
        """The open window becomes a version, whose update adds 1 to every weight, as q4 has it."""
        values, coder = torch.zeros(self.fragment.numel), codec_named("q4")
        for slot in self.fragment.tensors:
            values[slot.offset : slot.offset + slot.numel] = 1.0
        self.anchor += coder.decode(coder.encode(values, self.fragment), self.fragment)
        told = self.story.commit(anchor_digest=digest(self.anchor) if anchor_digest is None else anchor_digest)
        self.tell(told)
        self.now += down_s
        self.send(msg.update_id(told), values, base=told.version - 1, codec="q4")

    def exchange(self, *, up_s: float, commit_s: float, down_s: float) -> int:
        """Steps of 1 s until a delta is sent and its update is merged, which take so long; the overlap it had."""
        machine = self.executor.machine

        def steps_until(sent: bool) -> None:
            while bool(machine.fragments[0].sent) != sent:
                self.now += 1.0
                assert self.step() and self.executor.decision().running

        steps_until(sent=True)
        (delta,) = machine.fragments[0].sent
        self.now += up_s
        self.tell(msg.Stored(blob=delta.blob))
        self.now += commit_s
        self.commit(down_s=down_s)
        steps_until(sent=False)
        return delta.tau

    @property
    def weights_are_the_anchor(self) -> bool:
        return torch.equal(self.module.weight.flatten(), self.anchor[:6])

    @property
    def anchors(self) -> tuple[msg.AnchorRef, ...]:
        """What the next greeting tells."""
        return self.link.hello().anchors


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return Play(tmp_path)


def test_training_waits_merges_and_keeps_no_bytes(play: Play) -> None:
    """D, F: what was used, came twice or is of no use is let go; the time that training stood still is counted."""
    play.begin()
    play.snapshot()
    assert play.step() and play.executor.decision().merged == ()
    play.now = 3.0
    assert not play.step() and play.executor.waiting == "fragment 0, window 1"
    play.now = 4.5
    assert not play.executor.settle()
    play.commit()
    play.now = 5.0
    assert play.executor.settle()
    decision = play.executor.decision()
    assert decision.running and decision.merged == (0,) and decision.position == 2.0
    assert play.weights_are_the_anchor and play.executor._blobs == {}
    play.now = 7.0
    spent = play.executor.account.all_seconds(play.now)
    assert spent == {"training": 5.0, "farloop": 0.0, "blocked": 2.0, "evaluation": 0.0}
    assert play.executor.progress().blocked_s == 2.0


def test_with_control_variates_steps_are_corrected_by_what_a_merge_has_taught(tmp_path: Path) -> None:
    """The own delta is −2, the mean of all −1/ν."""
    play, rates = Play(tmp_path, outer_momentum=0.0, control_variates=True, variates_rate=0.25).begin(), []
    for _ in range(2):
        with torch.no_grad():
            for parameter in play.module.parameters():
                parameter.add_(1.0)
        rates.append(play.executor.machine.lr)
        play.step()
    play.commit()
    assert play.executor.settle() and play.weights_are_the_anchor
    rate = play.executor.machine.lr
    play.step()
    moved = play.module.weight.detach().flatten() - play.anchor[:6]
    expected = -rate * 0.25 * (-1.0 / play.story.spec.terms.outer.lr + 2.0) / sum(rates)
    torch.testing.assert_close(moved, torch.full((6,), expected), rtol=1e-3, atol=1e-6)


def test_a_node_that_is_asked_to_leave_while_the_coordinator_is_away_does_not_stand_still(play: Play) -> None:
    """SIGTERM must work during an outage; the wait for outcomes has its deadline in the driver."""
    play.begin()
    play.step()
    assert not play.step()
    play.executor.request_drain()
    assert play.executor.settle() and not play.executor.decision().running


def test_a_greeting_knows_of_a_start_that_the_training_thread_has_not_taken_yet(play: Play) -> None:
    """Q: or the coordinator would take a node that trains for one that is still joining."""
    play.welcome()
    assert play.link.hello().round is None
    play.start(round_=1)
    assert play.link.hello().round == 1


def test_only_anchors_that_match_are_told_and_a_mismatch_is_mended_by_a_snapshot(play: Play) -> None:
    play.begin()
    assert play.anchors == (msg.AnchorRef(fragment=0, version=0, digest=digest(play.anchor)),)
    play.step()
    play.commit(anchor_digest=12345)
    assert not play.step()
    assert play.link.of(msg.Fetch) == [msg.Fetch(fragment=0)] and play.anchors == ()
    play.snapshot()
    assert play.executor.settle()
    assert play.anchors == (msg.AnchorRef(fragment=0, version=1, digest=digest(play.anchor)),)
    assert play.weights_are_the_anchor and play.executor.metrics.mismatches == 1


@pytest.mark.parametrize("encoded_in", ["training thread", "worker"])
def test_broken_numbers_end_training_by_the_name_of_their_parameter(
    play: Play, encoded_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M: nothing of them is sent, and the coordinator is told, whichever thread finds them."""
    if encoded_in == "worker":
        monkeypatch.setattr(executor_module, "pack_at_once", lambda *_: None)
    play.begin()
    play.step()
    with torch.no_grad():
        play.module.bias[1] = float("nan")
    with pytest.raises(NonFiniteDelta, match="'bias' holds NaN or Inf after inner step 2") as caught:
        play.step()
    play.executor.say_failed(caught.value)
    assert play.link.of(msg.Leave) == [msg.Leave(reason=Reason.NON_FINITE, detail=str(caught.value))]
    assert not play.link.offers


def test_a_skipped_step_counts_as_a_step_and_is_reported_at_the_end_too(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    play.begin()
    assert play.step(stepped=False) and play.executor.decision().position == 1.0
    told = play.executor.progress()
    assert (told.inner_steps, told.tokens, told.skipped_steps) == (1, 10, 1)
    play.executor.say_goodbye(msg.Leave(reason=Reason.DRAINED))
    assert caplog.messages[-1].startswith("steps changed no weight count=1 of=1 why='no gradient, or NaN")


def test_what_the_link_reports_as_final_is_raised_in_the_training_thread(play: Play) -> None:
    play.link.deliver(LinkFailed(RuntimeError("a bug")))
    with pytest.raises(LinkFailed, match="RuntimeError: a bug"):
        play.executor.settle()
    play.tell(msg.Refused(reason=Reason.WRONG_RUN, detail="x and y", retriable=False))
    with pytest.raises(Refused, match=r"fingerprints differ.*: x and y"):
        play.executor.settle()


def test_an_older_coordinator_is_refused_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S: the highest epoch is remembered by the first merge; a disk that refuses it is one line."""
    first = Play(tmp_path).welcome(epoch=3)
    first.executor.settle()
    second = Play(tmp_path)
    second.story = first.story
    hello = second.link.hello()
    assert (hello.epoch_seen, hello.epoch_run) == (3, first.story.spec.identity.fingerprint())
    with pytest.raises(Refused, match="epoch 2 after 3"):
        second.welcome(epoch=2)
    third = Play(tmp_path).welcome(epoch=4)

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(StateUnusable, match="No space left"):
        third.executor.settle()


@pytest.mark.parametrize("damage", ["", "0-2.anchor", "0-3.update"])
def test_a_restarted_node_goes_on_from_its_disk_and_fetches_what_is_damaged(tmp_path: Path, damage: str) -> None:
    play = Play(tmp_path).begin()
    for _ in range(3):
        play.step()
        play.step()
        play.commit()
        assert play.executor.settle()
    assert sorted(path.name for path in tmp_path.glob("0-*")) == ["0-2.anchor", "0-3.update"]
    if damage:
        data = bytearray((tmp_path / damage).read_bytes())
        data[-30] ^= 1
        (tmp_path / damage).write_bytes(data)
    again, run = play.again(tmp_path, restores=(0,)), play.story.spec.identity.fingerprint()
    anchor = msg.AnchorRef(fragment=0, version=3, digest=digest(play.anchor))
    assert again.saved == msg.SavedAnchors(run=run, history=0, anchors=(anchor,))
    if damage:
        assert again.link.of(msg.Fetch) == [msg.Fetch(fragment=0)] and again.anchors == ()
        again.snapshot()
    again.commit()
    again.start(1)
    assert again.executor.settle() and again.weights_are_the_anchor
    assert again.executor.machine.versions == (4,) and again.executor.metrics.mismatches == 0
    assert again.link.hello().saved is None


def test_a_node_that_is_asked_what_it_holds_says_every_half_minute_that_the_run_is_held(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    play.begin()
    play.tell(dataclasses.replace(play.story.welcome(epoch=2), recalls=True))
    for play.now in (50.0, 51.0, 79.0, 80.5):
        play.executor.settle()
        play.executor.report_if_due()
    told = [record.message for record in caplog.records if "run held" in record.message]
    assert len(told) == 2 and "--adopt-from-nodes" in told[0]


def test_first_weights_that_are_the_runs_do_not_cross_the_link(play: Play) -> None:
    """R: they are proven by their digest; no snapshot comes."""
    play.begin()
    assert play.executor.replica is not None
    assert torch.equal(play.executor.replica.anchors[0].read(), play.anchor)
    assert (play.executor.replica.versions, play.executor.machine.versions) == ({0: 0}, (0,))
    assert not play.link.of(msg.Fetch)


def test_first_weights_that_are_others_are_asked_for_and_replaced_by_the_snapshot(play: Play) -> None:
    with torch.no_grad():
        play.module.weight += 1.0
    play.welcome()
    assert not play.executor.settle()
    play.snapshot()
    play.start()
    assert play.executor.settle()
    assert play.link.of(msg.Fetch) == [msg.Fetch(fragment=0, first=True)]
    assert play.executor.replica is not None and torch.equal(play.executor.replica.anchors[0].read(), play.anchor)


@pytest.mark.parametrize(("dtype", "warned"), [(torch.float32, False), (torch.float64, False), (torch.bfloat16, True)])
def test_weights_below_fp32_without_masters_are_warned_of(
    play: Play, dtype: torch.dtype, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """L: a step smaller than half an ulp of the weight is lost on the node, before any delta can see it."""
    play.module = play.module.to(dtype)
    with caplog.at_level(logging.WARNING):
        play.welcome()
    assert any("without fp32 masters" in record.message for record in caplog.records) == warned


@pytest.mark.parametrize(("most", "granted", "decided"), [(64, 16, 3), (2, 16, 2), (1, 16, 1), (64, 8, 2)])
def test_steps_with_nothing_due_are_decided_at_once(tmp_path: Path, most: int, granted: int, decided: int) -> None:
    """Up to the merge, to the samples that are granted, and to what is asked for; one after the other they are the
    same. The first step of a node is decided alone: what comes before it is merged at once."""
    terms = {"steps": 20, "h": 5, "tau": 3, "batch_sequences": 4, "sequence_tokens": 3}
    plays = [Play(tmp_path / name, num_samples=1000, **terms) for name in ("at-once", "each")]
    for play in plays:
        play.welcome()
        assert not play.executor.settle()
        play.start(lease=Lease(start=0, count=20 + granted))
        assert play.executor.settle() and len(play.executor.decisions(most)) == 1
        play.executor.look_ahead = 1
        assert play.step()
        for ahead in play.executor.decisions(64) and range(4):
            assert play.step(), ahead
        assert play.executor.machine.fragments[0].last is not None, "the delta was sent"
    at_once, each = plays
    told = at_once.executor.decisions(most)
    assert len(told) == decided
    assert told[0] == each.executor.decision()
    for decision in told[1:]:
        at_once.executor.step_done(10, 1.0)
        at_once.executor.resume()
        assert each.step() and decision == each.executor.decision()


def test_a_step_in_which_nothing_is_due_looks_at_no_fragment_and_changes_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One play decides as users' nodes do, the other looks at every fragment after every step."""
    looked: list[int] = []
    is_due = SendSchedule.is_due
    monkeypatch.setattr(SendSchedule, "is_due", lambda self, *told: looked.append(self.step) or is_due(self, *told))

    def saw(check: bool) -> list[object]:
        torch.manual_seed(0)
        play = Play(tmp_path / str(check), check=check, steps=20, h=10, tau=3)
        play.begin()
        seen: list[object] = []
        for step in range(20):
            if step == 11:
                play.commit()
            seen.append((play.step(), play.executor.decision(), play.module.weight.flatten().tolist()))
        return [*seen, play.link.offers, play.executor.machine.versions]

    looked_always, of_all = saw(True), looked.copy()
    looked.clear()
    assert saw(False) == looked_always
    assert len(of_all) >= 20 and len(looked) < 8


def test_an_update_that_comes_early_is_applied_by_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replica, "can_apply_ahead", lambda replica, index: True)
    added_here, add = list[int](), Replica._add

    def seen(replica: Replica, index: int, sent: Sent) -> int:
        added_here.append(index)
        return add(replica, index, sent)

    monkeypatch.setattr(Replica, "_add", seen)
    play = Play(tmp_path, steps=20, h=10, tau=3).begin()
    replica, states = play.executor.replica, play.executor.machine.fragments
    assert replica is not None
    while not states[0].sent:
        assert play.step()
    play.commit()
    before = replica.anchors[0].read().clone()
    assert play.step()
    play.worker.run()
    assert torch.equal(replica.anchors[0].read(), before), "it is not due yet"
    while states[0].sent:
        assert play.step()
    assert torch.equal(replica.anchors[0].read(), play.anchor) and not torch.equal(before, play.anchor)
    assert replica.versions[0] == 1 and not added_here and play.weights_are_the_anchor


@pytest.mark.parametrize(
    ("own", "given", "then"),
    [
        ({"own_tau": True}, {"adapt_tau": None}, 5),  # a quarter of the round, though the link asks for 7
        ({"own_tau": True}, {"adapt_tau": None, "node_tau": 3}, 3),
        ({"own_tau": True}, {"adapt_tau": False}, 2),
        ({"own_tau": False}, {"adapt_tau": None}, 2),
    ],
)
def test_the_overlap_is_chosen_where_neither_the_run_nor_the_node_says_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, own: dict[str, Any], given: dict[str, Any], then: int
) -> None:
    caplog.set_level(logging.INFO, "farloop.node.executor")
    play = Play(tmp_path, steps=200, h=20, tau=2, method="streaming", **own, **given).begin()
    taus = [play.exchange(up_s=3.0, commit_s=1.0, down_s=2.0) for _ in range(2)]
    assert taus[-1] == then
    chosen = then if own["own_tau"] and given == {"adapt_tau": None} else 0
    assert play.executor.progress().tau == chosen
    chose = [record.getMessage() for record in caplog.records if record.getMessage().startswith("overlap chosen")]
    assert chose == [f"overlap chosen tau={chosen} why='updates come in time over this link'"] * bool(chosen)


def test_an_overlap_does_not_waver_with_the_length_of_a_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One step more is taken, one less is not: it would be one more again a step later."""
    caplog.set_level(logging.INFO, "farloop.node.executor")
    play = Play(tmp_path, adapt_tau=True, steps=400, h=20, tau=2).begin()
    for up_s in (3.0, 3.0, 2.0, 2.0, 2.0, 2.0):
        play.exchange(up_s=up_s, commit_s=1.0, down_s=2.0)
    told = [re.findall(r"overlap chosen tau=(\d+) was=(\d+)", record.getMessage()) for record in caplog.records]
    changes = [int(tau) - int(was) for found in told for tau, was in found]
    assert changes and -1 not in changes
    assert len(changes) <= 4, "it was ten"


# --- the driver, with its worker's thread


def driven(folder: Path) -> Play:
    play = Play(folder, driven=True).begin()
    play.driver.after_step(10, 1.0)
    return play


def test_the_driver_blocks_training_until_the_update_is_merged(tmp_path: Path) -> None:
    """The offer leaves from the worker's thread, while the training thread waits for the commit."""
    play = driven(tmp_path)
    play.link.on_offer = play.commit
    (decision,) = play.driver.after_step(10, 1.0)
    assert decision.running and decision.merged == (0,)
    play.driver.close()


def test_the_driver_says_what_a_node_that_is_ready_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(driver_module, "START_S", 0.0)
    play = Play(tmp_path, driven=True).welcome()
    threading.Timer(0.3, play.start).start()
    assert play.driver.wait_for_start()[0].running
    assert caplog.text.count("waiting for the start: ") == 1
    play.driver.close()


def test_the_driver_of_several_ranks_decides_ahead_by_the_duration_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No longer than a second: what comes in between waits for that long. A node of one process has no need to."""
    play, now = Play(tmp_path, driven=True, steps=200, h=100), [0.0]
    monkeypatch.setattr("farloop.node.driver.time.monotonic", lambda: now[0])
    play.begin()

    def after(seconds: float, steps: int) -> int:
        for step in range(steps):
            now[0] += seconds
            if step + 1 == steps:
                return len(play.driver.after_step(10, 1.0))
            play.driver.between_steps(10, 1.0, stepped=True)
        raise AssertionError

    assert (after(0.3, 1), after(0.3, 1)) == (1, 1), "alone"
    play.driver._alone = False
    assert after(0.3, 1) == 3
    assert after(0.01, 3) == 64
    assert after(0.1, 64) == 10
    assert after(2.0, 10) == 1
    play.driver.close()


def test_the_driver_leaves_at_its_deadline_and_says_that_the_outcome_is_missing(tmp_path: Path) -> None:
    play = driven(tmp_path)
    play.link.on_offer = play.executor.request_drain
    assert not play.driver.after_step(10, 1.0)[0].running
    assert not play.driver.drain(0.05)
    (leave,) = play.link.of(msg.Leave)
    assert leave == msg.Leave(reason=Reason.OUT_OF_TIME, anchors=leave.anchors)
    play.driver.close()


def test_the_driver_tells_of_an_error_before_it_raises_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a user's evaluation, for one: the coordinator need not wait until the node is given up."""
    play = driven(tmp_path)

    def broken() -> float:
        raise RuntimeError(f"no such file:\n  {'x' * 5000}")

    play.executor.evaluate = broken
    monkeypatch.setattr(play.executor.machine, "handle", lambda event: [ev.Evaluate(versions=(1,))])
    with pytest.raises(RuntimeError, match="no such file"):
        play.driver.after_step(10, 1.0)
    (leave,) = play.link.of(msg.Leave)
    assert isinstance(leave, msg.Leave) and leave.reason is Reason.FAILED and play.driver.failed
    assert leave.detail.startswith("RuntimeError: no such file: xxx") and len(leave.detail) == MOST_WORDS
    play.driver.close(RuntimeError("the same, as it leaves the loop"))
    assert play.link.of(msg.Leave) == [leave], "it is told once"


@pytest.mark.parametrize(
    ("error", "told"), [(ValueError("no data"), ["ValueError: no data"]), (KeyboardInterrupt(), [])]
)
def test_a_driver_that_is_closed_by_an_error_of_the_loop_tells_it_and_no_interrupt(
    tmp_path: Path, error: BaseException, told: list[str]
) -> None:
    play = driven(tmp_path)
    play.driver.close(error)
    assert [leave.detail for leave in play.link.of(msg.Leave) if isinstance(leave, msg.Leave)] == told


def test_a_driver_alone_gives_up_or_knows_that_the_run_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play(tmp_path, driven=True)
    play.link.deliver(Unreachable("no session"))
    with pytest.raises(Unreachable, match="no session"):
        play.driver.wait_for_spec()
    play.driver._state.see_end("demo")
    monkeypatch.setattr("farloop.node.driver.LAST_CALL_S", 0.0)
    play.link.deliver(Unreachable("no session"))
    with pytest.raises(RunOver, match=r"^run demo is finished: this node saw its end, and no coordinator answers"):
        play.driver.wait_for_spec()
    play.driver.close()
