"""The machine in a storm: whatever happens, its records are what it knows, and the run ends (protocol B–H, O–Q, Y)."""

import random

import pytest
from coordinator_run import A, B, C, Commands, Run, known
from plain_runs import plain_progress
from slow_cases import slow

from farloop.algo.spec import NodeId, RunSpec
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide.roster import EXPIRE_S
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason


class Storm(Run):
    """Nodes that come, go and send as they like, a disk that fails, crashes of the coordinator in mid-sentence: a crash
    cuts off the commands that were not carried out yet, and their records."""

    def __init__(self, spec: RunSpec, draw: random.Random) -> None:
        self.draw, self.over = draw, False
        self.there: set[NodeId] = set()
        self.rounds: dict[NodeId, int] = {}
        """First round of the nodes that heard of their start."""
        terms = {"floor": draw.choice([1, 1, 2]), "quorum": draw.choice([None, None, 2]), "min_nodes": 2}
        super().__init__(spec, now=0.0, num_samples=1000, **terms)
        self.incarnations = dict.fromkeys((A, B, C), 1)

    def obey(self, commands: Commands) -> Commands:
        crash = self.draw.random() < 0.03
        done = super().obey(commands[: self.draw.randint(0, len(commands))] if crash else commands)
        for command in done:
            match command:
                case ev.Tell(node=node, message=msg.Start(round=plan)):
                    self.rounds[node] = plan.index
                case ev.Finish():
                    self.over = True
        if crash:
            self.there.clear()
            self.now += 1.0
            return self.begin()
        assert known(self.ledger) == known(self.journal)
        return done

    def come(self, node: NodeId, *, reborn: bool) -> None:
        if reborn:
            self.incarnations[node] += 1
            self.rounds.pop(node, None)
        self.there.add(node)
        self.greet(node, incarnation=self.incarnations[node], round=self.rounds.get(node))

    def heard(self, node: NodeId, message: msg.Message) -> None:
        if node in self.there:
            self.say(node, message)

    def send(self, node: NodeId, fragment: int) -> None:
        """Offer a delta for the open window."""
        if node in self.rounds and fragment in self.machine.windows:
            self.heard(node, self.offer(node, fragment, consumed=self.draw.choice((None, self.draw.randrange(300)))))

    def settle(self, *, well: bool) -> None:
        """A delta or a commit comes to its end."""
        if self.pending and self.draw.random() < 0.5:
            fragment = next(iter(self.pending))
            if well:
                self.durable(fragment)
            else:
                del self.pending[fragment]
                self.handle(ev.CommitFailed(fragment=fragment, detail="full"))
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
                self.come(node, reborn=False)
            case 1:
                self.come(node, reborn=self.draw.random() < 0.5)
            case 2:
                self.heard(node, msg.Ready())
            case 3 if node in self.there:
                self.there.remove(node)
                self.part(node, self.draw.choice((Reason.CLOSED, Reason.SILENT)))
            case 4:
                self.pass_time(self.draw.choice((0.5, 3.0, 3.0, EXPIRE_S)))
            case 5:
                used, left = self.draw.randrange(300), self.draw.choice((None, 0, 0, 5))
                self.heard(node, plain_progress(sample_watermark=used, samples_left=left))
            case 6 if node in self.there and self.draw.random() < 0.2:
                self.leave(node)
                self.there.discard(node)
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
                if node not in self.there:
                    self.come(node, reborn=False)
                if node not in self.rounds:
                    self.heard(node, msg.Ready())
            for fragment in (1, 0):
                for node in (A, B, C):
                    self.send(node, fragment)
            while self.coming or self.pending:
                self.settle(well=True)
            self.pass_time(20.0)
        pytest.fail(f"the run stands still: {self.machine.windows}, {self.machine.members}")


@pytest.mark.parametrize("seed", [*range(40), *slow(*range(40, 150))])
def test_whatever_happens_the_journal_knows_what_the_machine_knows_and_the_run_ends(spec: RunSpec, seed: int) -> None:
    """B18, B21, C–H, O, P, Q, Y: a restart goes on from the records that reached the disk, at any place."""
    storm = Storm(spec, random.Random(seed))
    for _ in range(150):
        storm.step()
    storm.calm()
    assert storm.journal.finished and storm.journal.versions == [4, 4]
