"""The coordinator's machine, with a node that was let in and says whatever messages it likes, at any time.

An input is a sequence of things that happen; `check_machine` says which. No message may raise anything: an exception
here ends the coordinator of everybody.
"""

import dataclasses
from functools import cache
from random import Random

from coordinator_run import Commands, Run
from fuzz_mutator import join, packed_edit, shuffled, split
from fuzz_target import Target
from plain_runs import plain_hello, plain_offer, plain_progress, plain_terms

from farloop.algo.spec import Fragment, Identity, Layout, NodeId, RunSpec, TensorSlot
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide.machine import CoordinatorMachine
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason, RemoteProtocolError

HOSTILE, HONEST = NodeId("a"), NodeId("b")
_SAYS = msg.Ready | msg.Offer | msg.Fetch | msg.Progress | msg.Evaluation | msg.Leave
"""What a session hands on from a node, but for its Hello."""

METHODS = ("streaming", "co2", "decoupled", "diloco")


@cache
def spec_of(method: str) -> RunSpec:
    """A run of two fragments, of two rounds."""
    fragments = tuple(
        Fragment(
            index=i,
            slot=i if method == "streaming" else 0,
            numel=256,
            tensors=(TensorSlot(name=f"t{i}", shape=(9,), offset=0),),
        )
        for i in range(2)
    )
    identity = Identity(
        name="small",
        model="own",
        layout=Layout(slots=2 if method == "streaming" else 1, fragments=fragments),
        anchor_digests=(100, 101),
        data="own",
        num_samples=1000 if method in ("streaming", "diloco") else 0,
        evaluation_set="own",
        seed=7,
    )
    more = {"lag": 1} if method == "co2" else {"quorum": 1, "max_staleness": 2} if method == "decoupled" else {}
    return RunSpec(identity=identity, terms=plain_terms(method=method, steps=8, h=4, min_nodes=2, **more))


class Fuzzed(Run):
    """A run of which all is written down, and whose shell does what it is told to when the input says so."""

    def __init__(self, spec: RunSpec) -> None:
        self.saw: set[str] = set()
        self.open: set[NodeId] = set()
        super().__init__(spec, now=0.0)

    def obey(self, commands: Commands) -> Commands:
        for command in commands:
            self.saw.add(type(command).__name__)
            match command:
                case ev.Record(record=record):
                    self.saw.add(type(record).__name__)
                case ev.Accept(welcome=welcome):
                    msg.encode(welcome)
                case ev.Refuse(refused=message) | ev.Tell(message=message):
                    msg.encode(message)
                    self.saw.add(type(message).__name__)
                    if isinstance(message, msg.Refused | msg.Outcome):
                        self.saw.add(message.reason.name)
                case ev.Publish(committed=committed):
                    msg.encode(committed)
                case _:
                    pass
        return super().obey(commands)

    def hears(self, node: NodeId, data: bytes) -> None:
        """What the node's session hands on of these bytes."""
        try:
            message = msg.decode(data)
        except RemoteProtocolError:
            return
        if isinstance(message, msg.Hello):
            self.open.add(node)
            self.greeted(node, message)
        elif isinstance(message, _SAYS) and node in self.open:
            self.say(node, message)

    def loses(self, node: NodeId) -> None:
        """Its session ends."""
        if node in self.open:
            self.open.remove(node)
            self.part(node)

    def settled(self, *, well: bool) -> None:
        """What is under way comes to its end: every delta and every commit."""
        for offer in self.coming[:]:
            self.coming.remove(offer)
            if well:
                self.handle(ev.InputStored(offer=offer))
            else:
                self.handle(ev.InputFailed(offer=offer, reason=Reason.CORRUPT, detail="x"))
        for fragment in list(self.pending):
            if well:
                self.durable(fragment)
            else:
                del self.pending[fragment]
                self.handle(ev.CommitFailed(fragment=fragment, detail="full"))


def check_machine(data: bytes) -> str:
    """(kind, body) of an item: below 8 something happens to the hostile node, from 8 on to the honest one.

    0: a message; 1: a Hello; 2: its session ends; 3: as many tenths of a second pass as the body has bytes; 4: deltas
    and commits under way succeed; 5: they fail. The first body names the method.
    """
    items = split(data)
    if not items:
        return ""
    run = Fuzzed(spec_of(METHODS[items[0][0] % len(METHODS)]))
    for kind, body in items[1:]:
        node = HONEST if kind & 8 else HOSTILE
        match kind & 7:
            case 2:
                run.loses(node)
            case 3:
                run.pass_time(len(body) / 10)
            case 4 | 5 as way:
                run.settled(well=way == 4)
            case 0 | 1:
                run.hears(node, body)
            case _:
                pass
    assert run.machine.ledger.versions == run.journal.versions
    assert run.machine.ledger.inputs.keys() == run.journal.inputs.keys(), "a restart would know other deltas"
    CoordinatorMachine(run.journal.copy(), now=run.now).check()
    return " ".join(sorted(run.saw))


def hello(node: NodeId, *, round_index: int | None) -> bytes:
    return msg.encode(
        plain_hello(node=node, anchors=(msg.AnchorRef(fragment=0, version=0, digest=100),), round=round_index)
    )


def progress(steps: int) -> bytes:
    return msg.encode(plain_progress(inner_steps=steps, tokens=steps, loss=2.5, sample_watermark=steps))


def offer(node: NodeId, fragment: int, window: int, lag: int) -> bytes:
    base = max(0, window - 1 - lag)
    made = plain_offer(node, base + 1, fragment=fragment, seq=window, steps=4, tokens=4, size=9, digest=9)
    return msg.encode(dataclasses.replace(made, window=window))


def stories() -> list[bytes]:
    """Runs from their beginning to their end, in which everybody does what is right, and pieces of them."""
    made = []
    for number, method in enumerate(METHODS):
        lag = 1 if method == "co2" else 0
        items = [(number, b"")]
        both = ((0, HOSTILE), (8, HONEST))
        for at, node in both:
            items += [(at + 1, hello(node, round_index=None)), (at, msg.encode(msg.Ready()))]
        for window in range(1, 4):
            for fragment in range(2):
                items += [(at, offer(node, fragment, window, lag)) for at, node in both]
                items += [(3, bytes(4)), (4, b"")]
            items += [(0, progress(4 * window)), (8, progress(4 * window))]
            said = msg.Evaluation(loss=2.0, versions=(window, window), position=4.0 * window, seconds=0.1)
            items += [(0, msg.encode(said)), (0, msg.encode(msg.Fetch(fragment=1)))]
        items += [(2, b""), (1, hello(HOSTILE, round_index=0)), (3, bytes(150))]
        items += [(0, msg.encode(msg.Leave(reason=Reason.DRAINED)))]
        made += [join(items), join(items[:9]), join(items[:16])]
    return made


def bent_message(chance: Random, body: bytes) -> bytes:
    return packed_edit(chance, body) if body else bytes(chance.choice((0, 1, 11, 150, 700)))


TARGETS = (Target(name="machine", run=check_machine, allowed=(), seeds=stories, mutate=shuffled(bent_message)),)
