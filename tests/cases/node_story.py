"""A node's machine whose coordinator is the test: a run of a few fragments, and what its coordinator says.

The words of stories (`stories.py`), for a node `a`. A fragment is 0 where none is named; `1.2` is version 2 of fragment
1, and the newest version where none is named.

    joins | begins | begins 2 | begins 2.1     takes the first snapshots; also starts, in round 2, at slot 1 of it
    welcome | welcome epoch=7                  the coordinator opens a session
    start 2 | finished | leave REASON | refused REASON | retry REASON | refused REASON newest=7
    start 0 with 0+8 | granted 8+8             samples that it may use
    4 steps
    encoded | offered                          the last delta is encoded; the executor has offered it, too
    stored | outcome REASON                    the coordinator's word on the last delta, or on `outcome REASON 2`: no. 2
    commit 1 | commit 1 of ab | commit scored by a   the coordinator closes a window and does not tell yet; of a alone
    told 1.2 | bytes 1.2 | update 1.2          the announcement comes; the bytes; both
    told 1.2 alone                             ... without the plans of rounds
    no plan                                    the node knows of no round after the first
    position? | rate?                          of the run, and of learning
    snapshot 1 | mismatch 1 | cut REASON | drain
    run at 3 of epoch 5                        first of all: the coordinator has come to version 3, in its fifth start
    rewind to 3 as 8                           its eighth start winds the run back
    recalled | recall 0                        a coordinator over an old copy asks what the node holds; for an anchor

Behind the commands, in square brackets: what the node waits for or its stage, and its counts of lost steps and of
skipped positions and turns, where they changed since the line before.
"""

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from plain_runs import plain_terms

from farloop.algo import schedule
from farloop.algo.spec import BlobId, BlobKind, Fragment, Identity, Layout, Lease, NodeId, RunSpec, TensorSlot
from farloop.algo.stages import Part
from farloop.algo.terms import LearningRate
from farloop.node import events as ev
from farloop.node.machine import NodeMachine
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

A, B = NodeId("a"), NodeId("b")
TOKENS = 100
"""Of each inner step."""

COUNTED = ("lost steps", "skipped positions", "skipped turns")
"""What a story tells of beside the state."""


def slots(count: int) -> Layout:
    """Fragment i has slot i."""
    tensors = [TensorSlot(name=f"t{i}", shape=(256,), offset=0) for i in range(count)]
    return Layout(
        slots=count, fragments=tuple(Fragment(index=i, slot=i, numel=256, tensors=(t,)) for i, t in enumerate(tensors))
    )


def identity(layout: Layout, **changes: Any) -> Identity:
    plain = {"name": "story", "model": "own", "data": "own", "num_samples": 0, "evaluation_set": "none", "seed": 0}
    return Identity(**{**plain, "layout": layout, "anchor_digests": (0,) * len(layout.fragments), **changes})


class Story:
    """Node a. What is committed is known to the coordinator at once, and to the node when it hears of it."""

    def __init__(
        self,
        fragments: int = 1,
        *,
        layout: Layout | None = None,
        num_samples: int = 0,
        anchor_digests: tuple[int, ...] | None = None,
        incarnation: int = 1,
        epoch: int = 0,
        node_tau: int | None = None,
        holds: Part = None,
        **terms: Any,
    ) -> None:
        """`terms` are those of the run that are not plain; `epoch` is what an earlier start of the node has met."""
        lr = LearningRate(peak=1.0, minimum=0.0, warmup_steps=0)
        own = plain_terms(**{"lr": lr, "sequence_tokens": TOKENS, **terms})
        self.layout = layout or slots(fragments)
        digests = {} if anchor_digests is None else {"anchor_digests": anchor_digests}
        self.spec = RunSpec(identity=identity(self.layout, num_samples=num_samples, **digests), terms=own)
        self.rounds = {plan.index: plan for plan in schedule.first_rounds(own, count=own.schedule.steps)}
        self.epoch, self.history = 1, 0
        self.open_at(0)
        run = self.spec.identity.fingerprint() if epoch else ""
        self._encodes: list[ev.Encode] = []
        """Those of the last step that sent something."""
        self._announced: dict[tuple[int, int], msg.Committed] = {}
        self._seen = ("waits for the coordinator", *(f"{what}: 0" for what in COUNTED))
        self.machine = NodeMachine(name=A, incarnation=incarnation, epoch=epoch, run=run, tau=node_tau, holds=holds)

    # --- the coordinator

    def open_at(self, version: int) -> None:
        """All fragments are at this version, as in a copy of the state."""
        self.windows = {window.fragment: window for window in schedule.first_windows(self.spec.terms, self.layout)}
        self.versions = [0] * len(self.layout.fragments)
        for index in list(self.windows) * version:
            self.commit(index)

    def commit(
        self,
        fragment: int = 0,
        *,
        merged: Sequence[NodeId] = (A,),
        drops: tuple[msg.Drop, ...] = (),
        evaluator: NodeId | None = None,
        anchor_digest: int | None = None,
    ) -> msg.Committed:
        """The open window closes."""
        window = self.windows.pop(fragment)
        following = schedule.window_after(self.spec.terms, self.layout, window, self.rounds)
        if following is not None:
            self.windows[fragment] = following
        self.versions[fragment] = window.window
        shares = tuple(msg.Share(node=node, weight=1 / len(merged)) for node in merged)
        return msg.Committed(
            fragment=fragment,
            version=window.window,
            size=1,
            digest=0,
            anchor_digest=digest(window.window, fragment) if anchor_digest is None else anchor_digest,
            merged=shares,
            drops=drops,
            next_window=following,
            rounds=tuple(self.rounds.values()),
            evaluator=evaluator,
        )

    def welcome(self, **changes: Any) -> msg.Welcome:
        welcome = msg.Welcome(
            protocol=1,
            epoch=self.epoch,
            spec=self.spec,
            lane_token=b"",
            versions=tuple(self.versions),
            windows=tuple(self.windows.values()),
            rounds=tuple(self.rounds.values()),
            history=self.history,
        )
        return dataclasses.replace(welcome, **changes)

    # --- what the node hears and does

    def handle(self, event: ev.Event) -> list[ev.Command]:
        commands = self.machine.handle(event)
        self.machine.check()
        return commands

    def hear(self, message: msg.Message) -> list[ev.Command]:
        return self.handle(ev.Received(message=message))

    def cut(self, reason: Reason = Reason.CLOSED) -> list[ev.Command]:
        return self.handle(ev.Disconnected(reason=reason))

    def arrive(self, version: int, fragment: int = 0) -> list[ev.Command]:
        """The bytes of an update."""
        return self.handle(ev.BlobArrived(blob=blob(BlobKind.UPDATE, version, fragment)))

    def receive(self, committed: msg.Committed) -> list[ev.Command]:
        """Its announcement, then its bytes."""
        return self.hear(committed) + self.arrive(committed.version, committed.fragment)

    def snapshot(self, fragment: int = 0, version: int | None = None) -> list[ev.Command]:
        version = self.versions[fragment] if version is None else version
        return self.handle(ev.BlobArrived(blob=blob(BlobKind.SNAPSHOT, version, fragment)))

    def join(self) -> "Story":
        self.hear(self.welcome())
        for state in self.machine.fragments:
            self.snapshot(state.fragment.index)
        return self

    def begin(self, round_: int = 0, slot: int = 0, lease: Lease | None = None) -> "Story":
        """Join and start."""
        self.join().hear(msg.Start(round=self.rounds[round_], lease=lease, slot=slot))
        assert self.machine.running
        return self

    def steps(self, count: int) -> list[ev.Command]:
        """Inner steps, none of which training may be waiting for."""
        commands: list[ev.Command] = []
        for _ in range(count):
            assert self.machine.waiting is None and self.machine.running
            commands += self.handle(ev.StepDone(tokens=TOKENS))
        return commands

    def encoded(self, encode: ev.Command, *, offered: bool = False) -> list[ev.Command]:
        return self.handle(ev.DeltaEncoded(offer=offer_of(encode), offered=offered))

    # --- stories

    def play(self, line: str) -> str:
        """A line of events: what followed the last of them."""
        commands: list[ev.Command] = []
        for event in line.split("; "):
            if event == "position?":
                at = self.machine.schedule
                return f"{self.machine.position:g}, step {at.step} of round {at.round}"
            if event == "rate?":
                return f"{self.machine.lr:.6g}"
            commands = self._happens(event)
        machine, before = self.machine, self._seen
        counts = (machine.lost_steps, machine.schedule.skipped_positions, machine.skipped_turns)
        state = f"waits for {machine.waiting}" if machine.waiting else "trains" if machine.running else machine.stage
        self._seen = (state, *(f"{what}: {n}" for n, what in zip(counts, COUNTED, strict=True)))
        changes = [now for now, then in zip(self._seen, before, strict=True) if now != then]
        return "; ".join([*map(brief, commands), *([f"[{', '.join(changes)}]"] if changes else [])])

    def _happens(self, event: str) -> list[ev.Command]:
        what, *words = event.split()
        commands: list[ev.Command] = []
        match what, *words:
            case "joins" | "begins" as how, *place:
                return self._joins(how == "begins", *map(int, ".".join(place).split(".") if place else ()))
            case "start", round_, *samples:
                return self.hear(
                    msg.Start(round=self.rounds[int(round_)], lease=_lease(samples[1]) if samples else None)
                )
            case "granted", samples:
                return self.hear(msg.Grant(lease=_lease(samples)))
            case "no", "plan":
                self.machine.schedule.plans = {0: self.rounds[0]}
            case "welcome", *changes:
                return self.hear(self.welcome(**{key: int(value) for key, value in _pairs(changes)}))
            case "run", "at", version, "of", "epoch", epoch:
                self.open_at(int(version))
                self.epoch = int(epoch)
            case "rewind", "to", version, "as", epoch:
                self.open_at(int(version))
                self.epoch = self.history = int(epoch)
                return self.hear(self.welcome())
            case ("recalled",):
                return self.hear(dataclasses.replace(self.welcome(epoch=2, history=0, versions=(0,)), recalls=True))
            case "recall", fragment:
                return self.hear(msg.Recall(fragment=int(fragment)))
            case ("finished",):
                return self.hear(msg.Finished())
            case "leave", reason:
                return self.hear(msg.Leave(reason=Reason[reason]))
            case "refused" | "retry", reason, *newest:
                newer = {key: int(number) for key, number in _pairs(newest)}
                return self.hear(msg.Refused(reason=Reason[reason], detail="", retriable=what == "retry", **newer))
            case _, "step" | "steps":
                commands = self.steps(int(what))
                self._encodes = [c for c in commands if isinstance(c, ev.Encode)] or self._encodes
                return commands
            case ("encoded" | "offered",):
                return [c for e in self._encodes for c in self.encoded(e, offered=what == "offered")]
            case "stored", *number:
                return self.hear(msg.Stored(blob=self._sent(*number)))
            case "outcome", reason, *number:
                return self.refuse(self._sent(*number), Reason[reason])
            case "commit", *of:
                fragment, nodes = (
                    (of[0] if of and of[0].isdigit() else "0"),
                    of[of.index("of") + 1] if "of" in of else A,
                )
                evaluator = NodeId(of[-1]) if "scored" in of else None
                committed = self.commit(int(fragment), merged=[NodeId(node) for node in nodes], evaluator=evaluator)
                self._announced[committed.fragment, committed.version] = committed
            case "told" | "bytes" | "update", *which:
                fragment, _, version = (which[0] if which and which[0] != "alone" else "0").partition(".")
                committed = self._announced[int(fragment), int(version or self.versions[int(fragment)])]
                if which[-1:] == ["alone"]:
                    committed = dataclasses.replace(committed, rounds=())
                return (self.hear(committed) if what != "bytes" else []) + (
                    self.arrive(committed.version, committed.fragment) if what != "told" else []
                )
            case "snapshot", *which:
                fragment, _, version = (which[0] if which else "0").partition(".")
                return self.snapshot(int(fragment), int(version) if version else None)
            case "mismatch", *which:
                return self.handle(ev.AnchorMismatch(fragment=int(which[0]) if which else 0))
            case "cut", *reason:
                return self.cut(Reason[reason[0]] if reason else Reason.CLOSED)
            case ("drain",):
                return self.handle(ev.DrainRequested())
            case _:
                raise ValueError(f"nothing is called {event}")
        return commands

    def _joins(self, begins: bool, round_: int = 0, slot: int = 0) -> list[ev.Command]:
        self.begin(round_, slot=slot) if begins else self.join()
        return []

    def _sent(self, number: str = "") -> BlobId:
        """The last delta, or the one of this number."""
        last = self._encodes[-1].blob
        return dataclasses.replace(last, seq=int(number), version=int(number) - 1) if number else last

    def refuse(self, delta: BlobId, reason: Reason = Reason.CORRUPT) -> list[ev.Command]:
        return self.hear(msg.Outcome(blob=delta, reason=reason, detail=""))


def digest(version: int, fragment: int = 0) -> int:
    return 1000 * fragment + version


def blob(kind: BlobKind, version: int, fragment: int = 0) -> BlobId:
    return BlobId(kind=kind, fragment=fragment, version=version)


def delta(window: int, seq: int, fragment: int = 0, *, incarnation: int = 1) -> BlobId:
    """Its base is the version before its window's."""
    return BlobId(kind=BlobKind.DELTA, fragment=fragment, version=window - 1, node=A, incarnation=incarnation, seq=seq)


def encode(window: int, seq: int, fragment: int = 0, *, steps: int) -> ev.Encode:
    return ev.Encode(
        blob=delta(window, seq, fragment), window=window, codec="q4", steps=steps, tokens=steps * TOKENS, measure=False
    )


def offer_of(command: ev.Command) -> msg.Offer:
    assert isinstance(command, ev.Encode)
    return msg.Offer(blob=command.blob, size=1, digest=0, window=command.window)


def installed(version: int, fragment: int = 0) -> ev.Install:
    return ev.Install(fragment=fragment, version=version, codec="q4")


def applied(version: int, fragment: int = 0) -> ev.Apply:
    return ev.Apply(fragment=fragment, version=version, anchor_digest=digest(version, fragment), codec="q4")


def forgotten(window: int, seq: int, fragment: int = 0, *, merged_in: int | None = None) -> ev.ForgetBlob:
    """The delta for this window is let go: part of a version, or dropped."""
    return ev.ForgetBlob(blob=delta(window, seq, fragment), merged_in=merged_in)


def merged(mix: float = 0.0, fragment: int = 0) -> ev.Merge:
    return ev.Merge(fragment=fragment, mix=mix)


def leaves(reason: Reason) -> ev.Tell:
    return ev.Tell(message=msg.Leave(reason=reason))


READY = ev.Tell(message=msg.Ready())
FINISHED = leaves(Reason.RUN_FINISHED)


def at_once(job: Callable[[], bool]) -> "Future[bool]":
    """Writes a file where a thread would."""
    done: Future[bool] = Future()
    done.set_result(job())
    return done


def _lease(samples: str) -> Lease:
    """`8+4` are four samples from the eighth on."""
    start, _, count = samples.partition("+")
    return Lease(start=int(start), count=int(count))


def _pairs(words: Sequence[str]) -> list[tuple[str, str]]:
    return [(key, value) for key, _, value in (word.partition("=") for word in words)]


def brief(command: ev.Command) -> str:
    """A command as text: `encode 1.2 #3 of 4 steps` is the node's third delta, of fragment 1, for window 2."""
    match command:
        case ev.Encode(blob=blob, window=window, steps=steps, tokens=tokens, codec=codec):
            assert tokens == steps * TOKENS and not command.measure
            named = f"encode {blob.fragment}.{window} #{blob.seq} of {steps} step{'s' * (steps != 1)}{_by(codec)}"
            return named + _in(command.history)
        case ev.SendBlob(offer=offer):
            return f"offer #{offer.blob.seq}"
        case ev.ForgetBlob(blob=blob, merged_in=version) if blob.kind is BlobKind.DELTA:
            return f"forget #{blob.seq}" + (f", in version {version}" if version is not None else "")
        case ev.ForgetBlob(blob=blob):
            return f"forget {blob.kind.name.lower()} {blob.fragment}.{blob.version}"
        case ev.Install(fragment=fragment, version=version, codec=codec):
            return f"install {fragment}.{version}{_by(codec)}"
        case ev.Apply(fragment=fragment, version=version, anchor_digest=said, codec=codec):
            assert said == digest(version, fragment)
            return f"apply {fragment}.{version}{_by(codec)}"
        case ev.Merge(fragment=fragment, mix=mix):
            assert not command.own
            return f"merge {fragment}" + (f" with mix {mix}" if mix else "")
        case ev.Resync(history=history):
            return f"begin anew{_in(history)}"
        case ev.UseSamples(lease=lease):
            return f"use {lease.start}+{lease.count}"
        case ev.Evaluate(versions=versions):
            return f"score {','.join(map(str, versions))}"
        case ev.Renumber(incarnation=incarnation):
            return f"go on as start {incarnation}"
        case ev.SendAnchor(fragment=fragment):
            return f"send anchor {fragment}"
        case ev.Tell(message=msg.Ready(history=history)):
            return f"ready{_in(history)}"
        case ev.Tell(message=msg.Leave(reason=reason)):
            return f"leave {reason.name}"
        case ev.Tell(message=msg.Fetch(fragment=fragment)):
            return f"fetch {fragment}"
        case ev.Tell(message=message):
            return type(message).__name__.lower()
        case ev.Stop(reason=reason, detail=detail):
            return f"stop {reason.name}" + (f": {detail}" if detail else "")
        case _:
            return type(command).__name__.lower()


def _in(history: int) -> str:
    return f" in history {history}" if history else ""


def _by(codec: str) -> str:
    return "" if codec == "q4" else f" by {codec}"
