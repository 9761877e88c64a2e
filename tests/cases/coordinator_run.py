"""The coordinator's machine, where nodes, clock and disk are the test; its journal is folded beside it.

`run.play("a sends 1; b parts; 2s")` makes these things happen in turn and returns the commands that followed the last
of them; `brief` writes commands as text. `run.told` is both, for stories (`stories.py`). The words:

    a greets | a joins | a returns | a is reborn   a hello: a newcomer's; the same and ready; in round 0; a new start's
    a greets process=7                             ... with these fields
    a is ready frozen=7
    a leaves | a parts | a parts SILENT            (parts: its session ends; DRAINED and CLOSED if no reason is named)
    a offers 1 | a sends 1 | a spoils 1            a delta of fragment 1: offered; also stored; also found CORRUPT
    a offers 1.3 | a sends 1.3 | a sends 1 steps=0 for window 3, where that is not the open one; with these fields
    a stores 1                                     the first delta of fragment 1 that a has offered is stored
    a fetches 1 | a steps 5 | a uses 80            asks for an anchor; reports that many inner steps; samples
    5 steps of ab | 5 steps of ab in 20s           they report one step more each second; every 20 seconds
    a scores 0,1                                   the loss of these versions
    1 is durable | 1 fails | 1 overflows           the commit of fragment 1; its sum, for the last of its deltas
    1 commits of ab | 1 commits of a0,b0           deltas of a and b come, and the commit is durable
    12 rounds of ab                                of each fragment as many windows, for which a and b send good deltas
                                                   and the others bad ones, as long as these windows wait for them
    finish of ab                                   all windows that are left, with deltas of a and b
    a reports draining                             that this is its state
    2s | clock jumps 30 | restart | stop | release
    restart as 2 | rewind as 8                     in this epoch; in a history of its own
    set outer_lr=0.5                               other terms are given
    1?                                             which nodes the window of fragment 1 waits for
    versions? | awaited?                           of all fragments; who has not heard of the end
    samples?                                       what became of them, what is free, and how many each node holds

Behind the commands of a story, in square brackets: alarms that are new or another, up to the first semicolon, and
those that ended.
"""

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any

from plain_runs import plain_hello, plain_offer, plain_progress
from stories import literal

from farloop.algo.schedule import opening_rounds
from farloop.algo.spec import Lease, NodeId, RunSpec
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.decide.machine import CoordinatorMachine
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

A, B, C, D = (NodeId(name) for name in "abcd")
Commands = list[ev.Command]


class Run:
    """All invariants are checked after every event, and at a restart that the journal knows what the machine knew."""

    def __init__(
        self,
        spec: RunSpec,
        nodes: Iterable[str] = "",
        *,
        now: float = 100.0,
        at_once: bool = False,
        machine: dict[str, Any] | None = None,
        num_samples: int | None = None,
        evaluation_set: str | None = None,
        **terms: Any,
    ) -> None:
        """A run whose `nodes` ("ab" are two) train, started together. `at_once`: every commit is durable at once.
        `machine`: settings of the coordinator."""
        identity, names = spec.identity, [NodeId(node) for node in nodes]
        if num_samples is not None:
            identity = dataclasses.replace(identity, num_samples=num_samples)
        if evaluation_set is not None:
            identity = dataclasses.replace(identity, evaluation_set=evaluation_set)
        self.spec = RunSpec(identity=identity, terms=spec.terms.replace(**{"min_nodes": max(1, len(names)), **terms}))
        self.now, self.at_once, self.settings = now, at_once, {"liveness_s": 10.0, **(machine or {})}
        started = rec.RunStarted(spec=self.spec, epoch=1, rounds=opening_rounds(self.spec))
        self.records: list[rec.Record] = [started]
        self.journal = Ledger.begin(started)
        """All of these, folded."""
        self.sessions: dict[NodeId, int] = {}
        """The last one of each node."""
        self.incarnations: dict[NodeId, int] = {}
        self.greetings = self.deltas = 0
        self.coming: list[msg.Offer] = []
        """Deltas that were let in."""
        self.pending: dict[int, ev.Commit] = {}
        """Commits that are not durable yet, by fragment."""
        self.steps: dict[NodeId, int] = {}
        """That they have reported."""
        self._known: dict[str, str] = {}
        """Alarms that a story has told of."""
        self.begin()
        self.train(*names)

    # --- the coordinator and its disk

    def begin(self, *records: rec.Record) -> Commands:
        """The coordinator starts with what its journal knows, and with what its store writes first."""
        self.coming, self.pending = [], {}
        for record in records:
            self.write(record)
        self.machine = CoordinatorMachine(self.journal.copy(), now=self.now, **self.settings)
        self.machine.check()
        return self.obey(self.machine.start())

    def restart(self, *records: rec.Record) -> Commands:
        assert known(self.ledger) == known(self.journal)
        return self.begin(*records)

    @property
    def ledger(self) -> Ledger:
        return self.machine.ledger

    def write(self, record: rec.Record) -> None:
        """To the journal."""
        self.records.append(record)
        self.journal.apply(rec.decode(*rec.encode(record)))

    def handle(self, event: ev.Event) -> Commands:
        if isinstance(event, ev.InputStored):
            self.write(rec.InputStored.of(event.offer, event.payload))
        if isinstance(event, ev.CommitDone):
            self.write(event.record)
        commands = self.machine.handle(event, self.now)
        self.machine.check()
        return self.obey(commands)

    def obey(self, commands: Commands) -> Commands:
        """As the shell does. Returns all commands, but for commits that were carried out at once."""
        for command in commands:
            match command:
                case ev.Record(record=record):
                    self.write(record)
                case ev.Receive(offer=offer):
                    self.coming.append(offer)
                case ev.Commit(draft=draft):
                    self.pending[draft.fragment] = command
                case _:
                    pass
        if not self.at_once:
            return commands
        commands = [command for command in commands if not isinstance(command, ev.Commit)]
        while self.pending:
            commands += self.durable(min(self.pending))
        return commands

    def draft(self, fragment: int = 1) -> rec.WindowCommitted:
        return self.pending[fragment].draft

    def durable(self, fragment: int = 1, **changes: Any) -> Commands:
        """The commit that was asked for is done."""
        draft = self.pending.pop(fragment).draft
        digest = 1000 * draft.fragment + draft.version
        done = dataclasses.replace(draft, anchor_digest=digest, update_size=50, update_digest=3)
        return self.handle(ev.CommitDone(record=dataclasses.replace(done, **changes)))

    def pass_time(self, seconds: float) -> Commands:
        """Every timer that is due by then fires, as late as it may."""
        self.now += seconds
        commands: Commands = []
        for _ in range(1000):
            if (due := self.machine.next_timer()) is None or due > self.now:
                if due is None and self.machine.holding is not None:
                    assert self.machine.handle_timer(self.now) == [], "nothing is decided while the run is held"
                return commands
            commands += self.obey(self.machine.handle_timer(self.now))
            self.machine.check()
        raise AssertionError(f"a timer stays due at {due}")

    # --- its nodes

    def greet(self, node: NodeId, **changes: Any) -> Commands:
        """A hello of a node that holds version 0 and was never started, but for these fields; in a new session."""
        digests = self.spec.identity.anchor_digests
        anchors = tuple(msg.AnchorRef(fragment=f, version=0, digest=digest) for f, digest in enumerate(digests))
        return self.greeted(node, plain_hello(**{"node": node, "anchors": anchors, **changes}))

    def greeted(self, node: NodeId, hello: msg.Hello) -> Commands:
        """It says this, in a new session."""
        self.greetings += 1
        self.sessions[node], self.incarnations[node] = self.greetings, hello.incarnation
        return self.handle(ev.NodeHello(session=self.greetings, node=node, hello=hello))

    def say(self, node: NodeId, message: msg.Message) -> Commands:
        return self.handle(ev.NodeMessage(session=self.sessions[node], node=node, message=message))

    def join(self, node: NodeId, **changes: Any) -> Commands:
        return self.greet(node, **changes) + self.say(node, msg.Ready())

    def train(self, *nodes: NodeId) -> None:
        """These nodes join, and are started together."""
        for node in nodes:
            self.greet(node)
        for node in nodes:
            self.say(node, msg.Ready())

    def part(self, node: NodeId, reason: Reason = Reason.CLOSED) -> Commands:
        return self.handle(ev.NodeDisconnected(session=self.sessions[node], node=node, reason=reason))

    def leave(self, node: NodeId, reason: Reason = Reason.DRAINED) -> Commands:
        return self.say(node, msg.Leave(reason=reason))

    def step(self, node: NodeId, steps: int, **changes: Any) -> Commands:
        """It reports so many inner steps of 64 tokens."""
        self.steps[node] = steps
        done = {"inner_steps": steps, "tokens": 64 * steps, "loss": None, "sample_watermark": 0, **changes}
        return self.say(node, plain_progress(**done))

    def offer(self, node: NodeId, fragment: int = 1, window: int | None = None, **changes: Any) -> msg.Offer:
        """A new delta of the node, for the open window unless another one is named. It is not said yet."""
        window = window or self.machine.windows[fragment].terms.window
        self.deltas += 1
        plain = {"incarnation": self.incarnations[node], "seq": self.deltas, "size": 100, "digest": 9}
        return plain_offer(node, window, fragment=fragment, **{**plain, **changes})

    def store(
        self, node: NodeId, fragment: int = 1, window: int | None = None, *, payload: int = 0, **changes: Any
    ) -> Commands:
        """A delta of the node is offered, comes and is durable."""
        offer = self.offer(node, fragment, window, **changes)
        assert self.say(node, offer) == [ev.Receive(offer=offer)]
        return self.handle(ev.InputStored(offer=offer, payload=payload))

    def spoil(self, node: NodeId, fragment: int = 1, reason: Reason = Reason.CORRUPT) -> Commands:
        """A delta of the node is offered, comes and is no good."""
        offer = self.offer(node, fragment)
        self.say(node, offer)
        return self.handle(ev.InputFailed(offer=offer, reason=reason, detail="no good"))

    def commit(self, fragment: int, *nodes: NodeId) -> Commands:
        """Deltas of these nodes come, the window closes, and its commit is durable."""
        commands = [command for node in nodes for command in self.store(node, fragment)]
        return commands if self.at_once else self.durable(fragment)

    def rounds(self, count: int, good: Collection[NodeId]) -> Commands:
        """Windows in the order in which they are due; the nodes that are not good send first."""
        commands: Commands = []
        slots = sorted(self.spec.identity.layout.fragments, key=lambda fragment: (-fragment.slot, fragment.index))
        for fragment in [fragment.index for fragment in slots] * count:
            version = self.ledger.versions[fragment]
            for node in sorted(self.sessions, key=lambda node: (node in good, node)):
                if self.ledger.versions[fragment] == version and node in self.missing(fragment):
                    commands = self.store(node, fragment) if node in good else self.spoil(node, fragment)
        return commands

    def expected(self, fragment: int = 1) -> set[NodeId]:
        return self.machine.windows[fragment].expected

    def missing(self, fragment: int = 1) -> set[NodeId]:
        return self.machine.windows[fragment].missing

    @property
    def alarms(self) -> dict[str, str]:
        return self.machine.alarms

    def finish(self, *nodes: NodeId) -> Commands:
        """All windows are committed in the order of the schedule: what the last one's commit brings about."""
        commands: Commands = []
        while windows := self.machine.windows:
            commands = self.commit(min(windows, key=lambda f: (windows[f].terms.round, -f)), *nodes)
        return commands

    # --- tables

    def play(self, script: str) -> Commands:
        """See the top. The commands of the last thing that happens."""
        commands: Commands = []
        for event in script.split(";"):
            commands = self._happens(*event.split())
        return commands

    def told(self, line: str) -> str:
        """What follows the last event of this line, and what became of alarms; or the answer to its question."""
        if line.endswith("?"):
            events, _, question = line.rpartition("; ")
            self.play(events) if events else None
            return self._answer(question[:-1])
        after, before, self._known = brief(self.play(line)), self._known, dict(self.alarms)
        changes = [f"{name}: {self.gist(why)}" for name, why in self._known.items() if before.get(name) != why]
        changes += [f"ended: {name}" for name in before if name not in self._known]
        return "\n".join([*filter(None, [after]), *(f"[{change}]" for change in changes)])

    def gist(self, alarm: str) -> str:
        """What a story tells of an alarm."""
        return alarm.partition("; ")[0]

    def _answer(self, question: str) -> str:
        if question == "versions":
            return ", ".join(map(str, self.ledger.versions))
        if question == "awaited":
            return ", ".join(self.machine.awaited) or ("no node: all have left" if self.machine.all_left else "no node")
        if question != "samples":
            fragment = int(question)
            version = self.machine.windows[fragment].terms.window
            return f"window {fragment}.{version} waits for {', '.join(sorted(self.missing(fragment))) or 'no node'}"
        leases = self.ledger.leases
        fates = ", ".join(f"{fate} {count}" for fate, count in leases.fates().items())
        held = ", ".join(f"{node} {leases.outstanding(node, start)}" for node, start in sorted(leases.held))
        return f"{fates}; free {_spans(leases.returned)}; held {held}"

    def _happens(self, who: str, does: str = "", *words: str) -> Commands:
        node = NodeId(who)
        given = dict(word.split("=", 1) for word in (does, *words) if "=" in word)
        fields = {key: literal(value) for key, value in given.items()}
        match ["" if "=" in does else does, *(word for word in words if "=" not in word)]:
            case ("",) if who == "restart":
                return self.restart()
            case "as", epoch:
                number = int(epoch)
                return self.restart(rec.EpochClaimed(epoch=number) if who == "restart" else rec.Rewound(epoch=number))
            case ("",) if who == "set":
                return self.handle(ev.TermsGiven(revision=self.machine.revision_for(given)))
            case ("",) if who == "stop":
                self.machine.stop()
                return []
            case ("",) if who == "release":
                return self.handle(ev.HoldReleased())
            case ("",):
                return self.pass_time(float(who.removesuffix("s")))
            case ("greets",):
                return self.greet(node, **fields)
            case ("joins",):
                return self.join(node, **fields)
            case ("returns",):
                return self.greet(node, **{"round": 0, **fields})
            case "is", "reborn":
                return self.greet(node, incarnation=self.incarnations[node] + 1)
            case "is", "ready":
                return self.say(node, msg.Ready(**fields))
            case "is", "durable":
                return self.durable(int(who))
            case "commits", "of", nodes:
                return self.commit(int(who), *_named(nodes))
            case "rounds", "of", nodes:
                return self.rounds(int(who), _named(nodes))
            case "of", nodes:
                return self.finish(*_named(nodes))
            case "steps", "of", nodes, *every:
                seconds = float(every[1].removesuffix("s")) if every else 1.0
                commands: Commands = []
                for _ in range(int(who)):
                    commands += self.pass_time(seconds)
                    for one in _named(nodes):
                        commands += self.step(one, self.steps.get(one, 0) + 1)
                return commands
            case "reports", state:
                return self.say(node, plain_progress(state=state, inner_steps=0, tokens=0, loss=None))  # type: ignore[arg-type]
            case "jumps", seconds:
                self.machine.clock_jumped(float(seconds))
                self.now += float(seconds)
                return []
            case ("fails",):
                draft = self.draft(int(who))
                failed = ev.CommitFailed(fragment=draft.fragment, detail="the disk is full")
                return self.handle(failed)
            case ("overflows",):
                draft = self.draft(int(who))
                return self.handle(
                    ev.SumOverflow(fragment=draft.fragment, longest=draft.blobs[-1].blob, why="too much")
                )
            case "leaves", *reason:
                return self.leave(node, Reason[reason[0]] if reason else Reason.DRAINED)
            case "parts", *reason:
                return self.part(node, Reason[reason[0]] if reason else Reason.CLOSED)
            case "offers", which:
                return self.say(node, self.offer(node, *map(int, which.split(".")), **fields))
            case "sends", which:
                return self.store(node, *map(int, which.split(".")), **fields)
            case "spoils", fragment:
                return self.spoil(node, int(fragment))
            case "stores", fragment:
                mine = [offer for offer in self.coming if offer.blob.node == node]
                offer = next(offer for offer in mine if offer.blob.fragment == int(fragment))
                self.coming.remove(offer)
                return self.handle(ev.InputStored(offer=offer))
            case "fetches", fragment:
                return self.say(node, msg.Fetch(fragment=int(fragment), **fields))
            case "steps", steps:
                return self.step(node, int(steps), **fields)
            case "uses", watermark:
                used = {"sample_watermark": int(watermark), "samples_left": 240 - int(watermark), **fields}
                return self.step(node, 1, **used)
            case "scores", versions:
                score = tuple(map(int, versions.split(",")))
                return self.say(node, msg.Evaluation(loss=2.5, versions=score, position=10.0, seconds=1.0))
        raise ValueError(f"nothing is called {who} {does} {' '.join(words)}")


def _named(nodes: str) -> list[NodeId]:
    """`ab` are two, and so are `a0,b0`."""
    return [NodeId(name) for name in (nodes.split(",") if "," in nodes else nodes) if name]


def _spans(leases: Iterable[Lease]) -> str:
    """`240+80` are 80 samples from 240 on."""
    return ", ".join(f"{lease.start}+{lease.count}" for lease in leases) or "none"


def known(ledger: Ledger) -> rec.LedgerSaved:
    """All that a restart must know: nodes report how many samples they used between the records, too."""
    saved = ledger.saved()
    return dataclasses.replace(saved, held=tuple(dataclasses.replace(held, consumed=0) for held in saved.held))


def tell(node: NodeId, message: msg.Message) -> ev.Tell:
    return ev.Tell(node=node, message=message)


def outcome(offer: msg.Offer, reason: Reason) -> ev.Tell:
    return tell(offer.blob.node, msg.Outcome(blob=offer.blob, reason=reason, detail=reason.sentence))


def told(commands: Commands, node: NodeId) -> list[msg.Message]:
    return [command.message for command in commands if isinstance(command, ev.Tell) and command.node == node]


def recorded(commands: Commands) -> list[rec.Record]:
    return [command.record for command in commands if isinstance(command, ev.Record)]


def published(commands: Commands) -> list[ev.Publish]:
    return [command for command in commands if isinstance(command, ev.Publish)]


def snapshots(commands: Commands) -> list[int]:
    return [command.fragment for command in commands if isinstance(command, ev.SendSnapshot)]


def accepted(commands: Commands) -> msg.Welcome:
    (welcome,) = (command.welcome for command in commands if isinstance(command, ev.Accept))
    return welcome


def refused(commands: Commands) -> msg.Refused:
    """The one refusal, of a session, among these commands."""
    (said,) = (command.refused for command in commands if isinstance(command, ev.Refuse))
    return said


def merged(commands: Commands) -> list[str]:
    """Whose deltas each of these commits takes."""
    drafts = [command.draft for command in commands if isinstance(command, ev.Commit)]
    return ["".join(share.node for share in draft.merged) for draft in drafts]


def brief(commands: Commands) -> str:
    """Commands as text."""
    return "; ".join(_brief(command) for command in commands)


def _brief(command: ev.Command) -> str:
    match command:
        case ev.Accept(node=node, welcome=welcome):
            keeps = f", which has {_spans(welcome.leases)}" if welcome.leases is not None else ""
            return f"accept {node}{keeps}" + (" for its anchors" if welcome.recalls else "")
        case ev.Refuse(refused=said):
            return f"refuse {said.reason.name}" + (" for now" if said.retriable else "")
        case ev.CloseSession(session=session, reason=reason):
            return f"close {session} {reason.name}"
        case ev.Tell(node=node, message=msg.Start(round=plan, slot=slot, lease=lease)):
            samples = f" with {_spans([lease])}" if lease else ""
            return f"{node}: start {plan.index}" + (f" slot {slot}" if slot else "") + samples
        case ev.Tell(node=node, message=msg.Grant(lease=lease)):
            return f"{node}: grant {_spans([lease])}"
        case ev.Tell(node=node, message=msg.Leave(reason=reason)):
            return f"{node}: leave {reason.name}"
        case ev.Tell(node=node, message=msg.Recall(fragment=fragment)):
            return f"{node}: recall {fragment}"
        case ev.Tell(node=node, message=msg.Outcome(reason=reason)):
            return f"{node}: {reason.name}"
        case ev.Tell(node=node, message=message):
            return f"{node}: {type(message).__name__.lower()}"
        case ev.Receive(offer=offer):
            return f"receive {offer.blob.fragment} of {offer.blob.node}"
        case ev.Publish(nodes=nodes, committed=committed):
            by = f", evaluated by {committed.evaluator}" if committed.evaluator else ""
            return f"publish {committed.fragment}.{committed.version} to {''.join(nodes) or 'no node'}{by}"
        case ev.SendSnapshot(node=node, fragment=fragment):
            return f"snapshot {fragment} to {node}"
        case ev.Commit(draft=draft):
            merged = "".join(share.node for share in draft.merged)
            lost = "".join(f", {drop.node} {drop.reason.name}" for drop in draft.drops)
            return f"commit {draft.fragment}.{draft.version} of {merged}{lost}"
        case ev.Record(record=rec.NodeStarted(node=node, round=round_index, slot=slot)):
            return f"started {node} {round_index}" + (f" slot {slot}" if slot else "")
        case ev.Record(record=rec.NodeLeft(node=node, reason=reason, consumed=consumed, stored=stored)):
            return f"left {node} {reason.name}" + (f" ({consumed} used, {stored} stored)" if consumed or stored else "")
        case ev.Record(record=rec.LeaseGranted(node=node, lease=lease, consumed=consumed, stored=stored, since=since)):
            return f"granted {node} {_spans([lease])} ({consumed} used, {stored} stored" + (
                f", since {since})" if since else ")"
            )
        case ev.Record(record=rec.EvaluationTaken(versions=versions)):
            return f"score of {','.join(map(str, versions))}"
        case ev.Record(record=rec.RoundFixed(round=plan)):
            return f"fixed {plan.index}"
        case ev.Record(record=rec.InputDropped(blob=blob, reason=reason)):
            return f"dropped {blob.fragment} of {blob.node} {reason.name}"
        case ev.Forget(blob=blob):
            return f"forget {blob.fragment} of {blob.node}"
        case ev.Record(record=rec.TermsChanged(revision=revision)):
            return f"terms {revision.number}"
        case ev.Record(record=rec.EpochSeen(epoch=epoch)):
            return f"seen epoch {epoch}"
        case ev.Record(record=rec.Adopted() as found):
            taken = [f"{anchor.fragment}.{anchor.version} of {anchor.node}" for anchor in found.anchors]
            lost = [f"{anchor.fragment}.{anchor.version}" for anchor in found.lost]
            without = [f"without {', '.join(found.missing)}"] if found.missing else []
            return f"epoch {found.epoch} adopts {', '.join([*(taken or ['nothing']), *without])}" + (
                f", lost {', '.join(lost)}" if lost else ""
            )
        case ev.Record(record=command):
            pass
        case _:
            pass
    return type(command).__name__
