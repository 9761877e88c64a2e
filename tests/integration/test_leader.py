"""Rank 0's machinery with its real threads, and a coordinator that is played by the test: no link ever opens."""

import dataclasses
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from plain_runs import plain_terms
from torch import Tensor, nn

from farloop.algo import schedule
from farloop.algo.digest import digest
from farloop.algo.fragments import flatten_into, partition, trainable_tensors
from farloop.algo.spec import BlobId, BlobKind, Identity, Lease, NodeId, RunSpec, Terms
from farloop.node import events as ev
from farloop.node import executor as leader_module
from farloop.node import link as link_module
from farloop.node.cluster import Cluster
from farloop.node.control_variates import ALPHA
from farloop.node.errors import LinkFailed, NonFiniteDelta, Refused, StateUnusable
from farloop.node.executor import NodeExecutor
from farloop.node.state_dir import NodeState
from farloop.node.zmq_dealer import LinkConfig
from farloop.quant.blob import BlobHeader, pack_blob
from farloop.quant.registry import codec_named
from farloop.wire import events as wire_ev
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

pytestmark = pytest.mark.integration

TERMS = plain_terms(method="diloco", steps=8, h=2, weight_decay=0.1, batch_sequences=4, sequence_tokens=8)


class Play:
    """A leader with a model of 1 fragment, and what its coordinator tells and sends it."""

    def __init__(self, folder: Path, *, num_samples: int = 0, terms: Terms = TERMS) -> None:
        self.module = nn.Linear(3, 2)
        shapes = [(name, tuple(parameter.shape)) for name, parameter in trainable_tensors(self.module)]
        layout = partition(shapes, pattern="whole")
        self.fragment = layout.fragments[0]
        self.anchor = torch.zeros(self.fragment.numel)
        flatten_into(self.fragment, dict(trainable_tensors(self.module)), self.anchor)
        identity = Identity(
            name="play",
            model="own",
            layout=layout,
            anchor_digests=(digest(self.anchor),),
            data="own",
            num_samples=num_samples,
            evaluation_set="none",
            seed=0,
        )
        self.spec = RunSpec(identity=identity, terms=terms)
        self.rounds = schedule.first_rounds(terms, count=4)
        [self.window] = schedule.first_windows(terms, layout)
        self.memory = NodeState.claim(folder)
        link = LinkConfig(coordinator="tcp://127.0.0.1:1")
        self.leader = NodeExecutor(NodeId("a"), link, Cluster(), self.memory, None)
        failed = self.leader._inbox.get(timeout=10)
        assert isinstance(failed, wire_ev.SessionClosed)

    def tell(self, message: msg.Message) -> None:
        self.leader._deliver(wire_ev.MessageReceived(message=message))

    def send(self, blob: BlobId, values: Tensor, *, base: int, codec: str) -> None:
        coder = codec_named(codec)
        header = BlobHeader(codec=coder, fragment=self.fragment, version=blob.version, base=base, epoch=1)
        data = pack_blob(header, coder.encode(values, self.fragment))
        self.leader._deliver(wire_ev.BlobReceived(blob=blob, data=data))

    def welcome(self, epoch: int = 1) -> None:
        self.tell(
            msg.Welcome(
                protocol=1,
                epoch=epoch,
                spec=self.spec,
                lane_token=b"",
                versions=(self.window.window - 1,),
                windows=(self.window,),
                rounds=self.rounds,
            )
        )

    def snapshot(self) -> None:
        version = self.window.window - 1
        blob = BlobId(kind=BlobKind.SNAPSHOT, fragment=0, version=version)
        self.send(blob, self.anchor, base=version, codec="fp32")

    def begin(self) -> "Play":
        self.welcome()
        assert self.leader.wait_for_spec(5.0) == self.spec
        self.leader.attach(self.module)
        self.snapshot()
        self.tell(msg.Start(round=self.rounds[0], lease=None))
        assert self.leader.wait_for_start().running
        return self

    def commit(self, values: Tensor, *, anchor_digest: int | None = None) -> None:
        """The open window becomes a version, whose update is `values` as q4 has them."""
        coder, version = codec_named("q4"), self.window.window
        self.anchor += coder.decode(coder.encode(values, self.fragment), self.fragment)
        following = schedule.window_after(
            TERMS, self.spec.identity.layout, self.window, {plan.index: plan for plan in self.rounds}
        )
        assert following is not None
        self.window = following
        committed = msg.Committed(
            fragment=0,
            version=version,
            size=1,
            digest=0,
            anchor_digest=digest(self.anchor) if anchor_digest is None else anchor_digest,
            merged=(msg.Share(node=NodeId("a"), weight=1.0),),
            drops=(),
            next_window=following,
            rounds=(),
        )
        self.tell(committed)
        self.send(msg.update_id(committed), values, base=version - 1, codec="q4")

    @property
    def ones(self) -> Tensor:
        values = torch.zeros(self.fragment.numel)
        for slot in self.fragment.tensors:
            values[slot.offset : slot.offset + slot.numel] = 1.0
        return values


@pytest.fixture(autouse=True)
def dialled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real link fails once, and then stays out of the play."""
    monkeypatch.setattr(link_module, "BACKOFF_S", (100.0, 100.0))


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Play]:
    there = Play(tmp_path)
    yield there
    there.leader.close()
    assert not {"link", "codec_0"} & {thread.name for thread in threading.enumerate()}


def test_training_waits_merges_and_keeps_no_bytes(play: Play) -> None:
    """D, F: what was used, came twice or is of no use is let go."""
    play.begin()
    play.snapshot()
    assert play.leader.after_step(10, 1.0).merged == ()
    timer = threading.Timer(0.3, play.commit, args=(play.ones,))
    timer.start()
    started = time.monotonic()
    decision = play.leader.after_step(10, 1.0)
    assert time.monotonic() - started >= 0.29
    assert decision.running and decision.merged == (0,) and decision.position == 2.0
    assert torch.equal(play.module.weight.flatten(), play.anchor[:6])
    assert play.leader._blobs == {}
    timer.join()


def test_with_control_variates_steps_are_corrected_by_what_a_merge_has_taught(tmp_path: Path) -> None:
    """The own delta is −2, the mean of all −1/ν."""
    terms = dataclasses.replace(TERMS, outer_momentum=0.0, control_variates=True)
    play = Play(tmp_path, terms=terms).begin()
    timer = threading.Timer(0.3, play.commit, args=(play.ones,))
    rates = []
    for last in (False, True):
        with torch.no_grad():
            for parameter in play.module.parameters():
                parameter.add_(1.0)
        rates.append(play.leader.machine.lr)
        if last:
            timer.start()
        play.leader.after_step(10, 1.0)
    assert torch.equal(play.module.weight.flatten(), play.anchor[:6])
    rate = play.leader.machine.lr
    play.leader.after_step(10, 1.0)
    moved = play.module.weight.detach().flatten() - play.anchor[:6]
    expected = -rate * ALPHA * (-1.0 / terms.outer_lr + 2.0) / sum(rates)
    torch.testing.assert_close(moved, torch.full((6,), expected), rtol=1e-3, atol=1e-6)
    play.leader.close()


def test_a_node_that_is_asked_to_leave_while_the_coordinator_is_away_does_not_stand_still(play: Play) -> None:
    """SIGTERM must work during an outage; the wait for outcomes has its deadline in `drain`."""
    play.begin()
    play.leader.after_step(10, 1.0)
    timer = threading.Timer(0.2, play.leader.request_drain)
    timer.start()
    started = time.monotonic()
    assert not play.leader.after_step(10, 1.0).running
    assert not play.leader.drain(0.5)
    assert time.monotonic() - started < 5.0
    timer.join()


def test_a_greeting_knows_of_a_start_that_the_training_thread_has_not_taken_yet(play: Play) -> None:
    """Q: or the coordinator would take a node that trains for one that is still joining."""
    play.welcome()
    play.leader.wait_for_spec(5.0)
    assert play.leader._reports.hello().round is None
    play.tell(msg.Start(round=play.rounds[1], lease=None))
    assert play.leader._reports.hello().round == 1


def test_only_anchors_that_match_are_told_and_a_mismatch_is_mended_by_a_snapshot(play: Play) -> None:
    """S."""
    play.begin()
    assert play.leader._reports.hello().anchors == (msg.AnchorRef(fragment=0, version=0, digest=digest(play.anchor)),)
    play.leader.after_step(10, 1.0)
    play.commit(play.ones, anchor_digest=12345)
    timer = threading.Timer(0.3, play.snapshot)
    timer.start()
    told: list[msg.Hello] = []
    threading.Timer(0.15, lambda: told.append(play.leader._reports.hello())).start()
    assert play.leader.after_step(10, 1.0).running
    assert told[0].anchors == ()
    assert play.leader._reports.hello().anchors == (msg.AnchorRef(fragment=0, version=1, digest=digest(play.anchor)),)
    assert torch.equal(play.module.weight.flatten(), play.anchor[:6])
    assert play.leader.metrics._mismatches == 1
    timer.join()


@pytest.mark.parametrize("encoded_in", ["training thread", "codec thread"])
def test_broken_numbers_end_training_by_the_name_of_their_parameter(
    play: Play, encoded_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M: nothing of them is sent, and the coordinator is told in whichever thread it shows."""
    if encoded_in == "codec thread":
        monkeypatch.setattr(leader_module, "pack_at_once", lambda *_: None)
    sent: list[msg.Message] = []
    monkeypatch.setattr(play.leader.link, "send", sent.append)
    play.begin()
    play.leader.after_step(10, 1.0)
    with torch.no_grad():
        play.module.bias[1] = float("nan")
    with pytest.raises(NonFiniteDelta, match="'bias' holds NaN or Inf after inner step 2") as caught:
        play.leader.after_step(10, 1.0)
    left = [message for message in sent if isinstance(message, msg.Leave)]
    assert left == [msg.Leave(reason=Reason.NON_FINITE, detail=str(caught.value))]


def test_a_skipped_step_counts_as_a_step_and_is_reported(play: Play) -> None:
    play.begin()
    assert play.leader.after_step(10, 1.0, stepped=False).position == 1.0
    told = play.leader.progress()
    assert (told.inner_steps, told.tokens, told.skipped_steps) == (1, 10, 1)


def test_an_error_of_the_training_thread_is_told_before_it_is_raised(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a user's evaluation, for one: the coordinator need not wait until the node is given up."""
    sent: list[msg.Message] = []
    monkeypatch.setattr(play.leader.link, "send", sent.append)
    play.begin()

    def broken() -> float:
        raise RuntimeError("no such file")

    play.leader.evaluate = broken
    monkeypatch.setattr(play.leader.machine, "handle", lambda event: [ev.Evaluate(versions=(1,))])
    with pytest.raises(RuntimeError, match="no such file"):
        play.leader.after_step(10, 1.0)
    assert msg.Leave(reason=Reason.NONE, detail="no such file") in sent


def test_what_the_link_reports_as_final_is_raised_in_the_training_thread(play: Play) -> None:
    play.leader._deliver(LinkFailed(RuntimeError("a bug")))
    with pytest.raises(LinkFailed, match="RuntimeError: a bug"):
        play.leader.wait_for_spec(5.0)
    play.tell(msg.Refused(reason=Reason.WRONG_RUN, detail="x and y", retriable=False))
    with pytest.raises(Refused, match=r"fingerprints differ.*: x and y"):
        play.leader.wait_for_spec(5.0)


def test_a_coordinator_older_than_one_that_was_met_is_refused_after_a_restart(tmp_path: Path) -> None:
    """S: the highest epoch is remembered by the first merge."""
    first = Play(tmp_path)
    first.welcome(epoch=3)
    first.leader.wait_for_spec(5.0)
    first.leader.attach(first.module)
    first.snapshot()
    first.leader._take(first.leader._inbox.get())
    first.leader.close()
    second = Play(tmp_path)
    assert second.leader._reports.hello().epoch_seen == 3
    second.welcome(epoch=2)
    with pytest.raises(Refused, match="epoch 2 after 3"):
        second.leader.wait_for_spec(5.0)
    second.leader.close()


def test_a_disk_that_refuses_the_epoch_is_one_line(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    play.welcome()
    play.leader.wait_for_spec(5.0)
    play.leader.attach(play.module)
    play.snapshot()

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(StateUnusable, match="No space left"):
        play.leader.wait_for_start()


def test_a_node_without_samples_waits_for_a_grant_and_says_so(tmp_path: Path) -> None:
    """Data leases."""
    play = Play(tmp_path, num_samples=1000)
    play.welcome()
    play.leader.wait_for_spec(5.0)
    play.leader.attach(play.module)
    play.snapshot()
    play.tell(msg.Start(round=play.rounds[0], lease=Lease(start=0, count=3)))
    details: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Timer(0.3, lambda: details.put(play.leader.progress().detail)).start()
    threading.Timer(0.5, play.tell, args=(msg.Grant(lease=Lease(start=10, count=3)),)).start()
    assert play.leader.wait_for_start().samples == (0, 1, 2, 10)
    assert details.get(timeout=5) == "samples to be granted"
    play.leader.close()


def test_first_weights_that_are_the_runs_do_not_cross_the_link(play: Play) -> None:
    """R: they are proven by their digest; no snapshot comes."""
    play.welcome()
    play.leader.wait_for_spec(5.0)
    play.leader.attach(play.module)
    play.leader._begin_with_own_weights()
    play.tell(msg.Start(round=play.rounds[0], lease=None))
    assert play.leader.wait_for_start().running
    assert play.leader.replica is not None
    assert torch.equal(play.leader.replica.anchors[0], play.anchor)
    assert (play.leader.replica.versions, play.leader.machine.versions) == ({0: 0}, (0,))


def test_first_weights_that_are_others_are_asked_for(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """R: and the snapshot replaces them."""
    sent: list[msg.Message] = []
    monkeypatch.setattr(play.leader.link, "send", sent.append)
    with torch.no_grad():
        play.module.weight += 1.0
    play.welcome()
    play.leader.wait_for_spec(5.0)
    play.leader.attach(play.module)
    play.leader._begin_with_own_weights()
    play.snapshot()
    play.tell(msg.Start(round=play.rounds[0], lease=None))
    assert play.leader.wait_for_start().running
    assert [message for message in sent if isinstance(message, msg.Fetch)] == [msg.Fetch(fragment=0, first=True)]
    assert play.leader.replica is not None
    assert torch.equal(play.leader.replica.anchors[0], play.anchor)


def test_first_weights_are_not_taken_for_an_anchor_of_a_later_version(play: Play) -> None:
    """R: a run that has moved on sends what it has."""
    play.window = dataclasses.replace(play.window, window=4)
    play.welcome()
    play.leader.wait_for_spec(5.0)
    play.leader.attach(play.module)
    assert play.leader.replica is not None
    play.leader._begin_with_own_weights()
    assert play.leader.replica.versions == {0: -1}
