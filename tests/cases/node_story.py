"""A node's machine whose coordinator is the test: a run of a few fragments, and what its coordinator says."""

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


def slots(count: int) -> Layout:
    """Fragment i has slot i."""
    tensors = [TensorSlot(name=f"t{i}", shape=(256,), offset=0) for i in range(count)]
    return Layout(
        slots=count,
        fragments=tuple(Fragment(index=i, slot=i, numel=256, tensors=(t,)) for i, t in enumerate(tensors)),
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
