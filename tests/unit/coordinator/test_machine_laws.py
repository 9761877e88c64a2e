"""The machine in a storm: whatever happens, its records are what it knows, and the run ends (protocol B–H, O–Q, Y)."""

import dataclasses
import random

import pytest
from plain_runs import plain_hello

from farloop.algo.spec import BlobId, BlobKind, Contribution, NodeId, RunSpec
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.decide.machine import CoordinatorMachine
from farloop.coordinator.decide.roster import EXPIRE_S
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


class Storm:
    """Nodes that come, go and send as they like, a disk that fails, crashes of the coordinator in mid-sentence.

    `journal` is the fold of what reached the disk; a crash cuts off the records of the commands that were not carried
    out yet.
    """

    def __init__(self, spec: RunSpec, draw: random.Random) -> None:
        self.draw = draw
        self.journal = Ledger.begin(rec.RunStarted(spec=spec, epoch=1))
        self.now = 0.0
        self.open: dict[NodeId, int] = {}
        """Sessions."""
        self.incarnations = dict.fromkeys((A, B, C), 1)
        self.rounds: dict[NodeId, int] = {}
        """First round of the nodes that heard of their start."""
        self.sessions = 0
        self.deltas = 0
        self.coming: list[msg.Offer] = []
        self.commits: list[ev.Commit] = []
        self.over = False
        self.begin()

    def begin(self) -> None:
        """The coordinator starts, with what is on the disk."""
        self.machine = CoordinatorMachine(self.journal.copy(), now=self.now)
        self.machine.check()
        self.obey(self.machine.start())

    def obey(self, commands: list[ev.Command]) -> None:
        for command in commands:
            match command:
                case ev.Record(record=record):
                    self.journal.apply(rec.decode(*rec.encode(record)))
                case ev.Tell(node=node, message=msg.Start(round=round_plan)):
                    self.rounds[node] = round_plan.index
                case ev.Receive(offer=offer):
                    self.coming.append(offer)
                case ev.Commit():
                    self.commits.append(command)
                case ev.Finish():
                    self.over = True
                case _:
                    pass

    def handle(self, event: ev.Event) -> None:
        if isinstance(event, ev.InputStored):
            offer = event.offer
            self.journal.apply(rec.InputStored.of(offer))
        if isinstance(event, ev.CommitDone):
            self.journal.apply(event.record)
        commands = self.machine.handle(event, self.now)
        self.machine.check()
        if self.draw.random() < 0.03:
            self.obey(commands[: self.draw.randint(0, len(commands))])
            self.crash()
        else:
            self.obey(commands)
            assert known(self.machine.ledger) == known(self.journal)

    def crash(self) -> None:
        self.coming, self.commits = [], []
        self.open = {}
        self.now += 1.0
        self.begin()
        assert known(self.machine.ledger) == known(self.journal)

    def greet(self, node: NodeId, *, reborn: bool) -> None:
        if reborn:
            self.incarnations[node] += 1
            self.rounds.pop(node, None)
        self.sessions += 1
        hello = plain_hello(node=node, incarnation=self.incarnations[node], round=self.rounds.get(node))
        self.open[node] = self.sessions
        self.handle(ev.NodeHello(session=self.sessions, node=node, hello=hello))

    def heard(self, node: NodeId, message: msg.Message) -> None:
        if node in self.open:
            self.handle(ev.NodeMessage(session=self.open[node], node=node, message=message))

    def send(self, node: NodeId, fragment: int) -> None:
        """Offer a delta for the open window."""
        if node not in self.rounds or fragment not in self.machine.windows:
            return
        window, incarnation = self.machine.windows[fragment].terms.window, self.incarnations[node]
        self.deltas += 1
        blob = BlobId(
            kind=BlobKind.DELTA,
            fragment=fragment,
            version=window - 1,
            node=node,
            incarnation=incarnation,
            seq=self.deltas,
        )
        contribution = Contribution(
            node=node, incarnation=incarnation, base=window - 1, steps=10, tokens=640, norm_sq=1.0
        )
        consumed = self.draw.choice((None, self.draw.randrange(300)))
        self.heard(
            node,
            msg.Offer(blob=blob, size=9, digest=9, window=window, contributors=(contribution,), consumed=consumed),
        )

    def settle(self, *, well: bool) -> None:
        """A delta or a commit comes to its end."""
        if self.commits and self.draw.random() < 0.5:
            commit = self.commits.pop(0)
            draft = commit.draft
            if well:
                self.handle(ev.CommitDone(record=dataclasses.replace(draft, anchor_digest=draft.version)))
            else:
                self.handle(ev.CommitFailed(fragment=draft.fragment, version=draft.version, detail="full"))
        elif self.coming:
            offer = self.coming.pop(self.draw.randrange(len(self.coming)))
            if well:
                self.handle(ev.InputStored(offer=offer))
            else:
                self.handle(ev.InputFailed(offer=offer, reason=Reason.CORRUPT, detail="x"))

    def step(self) -> None:
        """Anything that can happen."""
        node, fragment = self.draw.choice((A, B, C)), self.draw.randrange(2)
        match self.draw.randrange(12):
            case 0:
                self.greet(node, reborn=False)
            case 1:
                self.greet(node, reborn=self.draw.random() < 0.5)
            case 2:
                self.heard(node, msg.Ready())
            case 3 if session := self.open.pop(node, None):
                reason = self.draw.choice((Reason.CLOSED, Reason.SILENT))
                self.handle(ev.NodeDisconnected(session=session, node=node, reason=reason))
            case 4:
                self.now += self.draw.choice((0.5, 3.0, 3.0, EXPIRE_S))
                due = self.machine.next_timer()
                if due is not None and due <= self.now:
                    self.obey(self.machine.handle_timer(self.now))
            case 5:
                self.heard(node, progress(self.draw.randrange(300), self.draw.choice((None, 0, 0, 5))))
            case 6 if node in self.open and self.draw.random() < 0.2:
                self.heard(node, msg.Leave(reason=Reason.DRAINED))
                self.open.pop(node, None)
                self.incarnations[node] += 1
                self.rounds.pop(node, None)
            case 7 | 8:
                self.send(node, fragment)
            case _:
                self.settle(well=self.draw.random() < 0.9)

    def calm(self) -> None:
        """All nodes are there and do what they should: the run must come to its end."""
        for _ in range(60):
            if self.over:
                return
            for node in (A, B, C):
                if node not in self.open:
                    self.greet(node, reborn=False)
                if node not in self.rounds:
                    self.heard(node, msg.Ready())
            for fragment in (1, 0):
                for node in (A, B, C):
                    self.send(node, fragment)
            while self.coming or self.commits:
                self.settle(well=True)
            self.now += 20.0
            self.obey(self.machine.handle_timer(self.now))
        pytest.fail(f"the run stands still: {self.machine.windows}, {self.machine.members}")


def progress(watermark: int, left: int | None) -> msg.Progress:
    return msg.Progress(
        state="training",
        position=1.0,
        round=0,
        inner_steps=1,
        tokens=64,
        loss=None,
        tokens_per_s=1.0,
        compute_share=1.0,
        blocked_s=0.0,
        lost_steps=0,
        sample_watermark=watermark,
        bytes_up=0,
        bytes_down=0,
        bytes_state=0,
        samples_left=left,
    )


def known(ledger: Ledger) -> rec.LedgerSaved:
    """All but the watermarks, which nodes report between the records."""
    saved = ledger.saved()
    return dataclasses.replace(saved, held=tuple(dataclasses.replace(held, consumed=0) for held in saved.held))


@pytest.mark.parametrize("seed", range(150))
def test_whatever_happens_the_journal_knows_what_the_machine_knows_and_the_run_ends(spec: RunSpec, seed: int) -> None:
    """B18, B21, C–H, O, P, Q, Y: a restart goes on from the records that reached the disk, at any place."""
    draw = random.Random(seed)
    stormy = dataclasses.replace(
        spec,
        identity=dataclasses.replace(spec.identity, num_samples=1000),
        terms=spec.terms.replace(floor=draw.choice([1, 1, 2]), quorum=draw.choice([None, None, 2]), min_nodes=2),
    )
    storm = Storm(stormy, draw)
    for _ in range(150):
        storm.step()
    storm.calm()
    assert storm.journal.finished and storm.journal.versions == [4, 4]
