"""One start of a node in virtual time: drives the real executor, with a learner whose inner steps take virtual time."""

import random
from collections import deque
from collections.abc import Callable

import torch
from torch import nn

from farloop.algo.methods import method_named
from farloop.algo.spec import BlobKind
from farloop.node import events as ev
from farloop.node.cluster import Decision
from farloop.node.errors import LayoutMismatch, Refused
from farloop.node.executor import Input, NodeExecutor
from farloop.node.link import NodeLink
from farloop.node.machine import NodeMachine
from farloop.node.replica import Replica
from farloop.node.state_dir import NodeState
from farloop.sim.hostile import SharedForgeries, SimulatedLink
from farloop.sim.network import Dial, VirtualDialer
from farloop.sim.problems import freeze_all_but
from farloop.sim.scenario import NodeSetup, Scenario
from farloop.sim.send_log import Merged, Send, SendLog
from farloop.sim.virtual_time import Process, VirtualClock, VirtualWorker
from farloop.wire.reasons import Reason

DRAIN_S = 30.0  # for a good-bye to get through
BUILD_S = 0.2  # to build the model once the run's spec is known
_LOOKS_S = 0.02  # seconds between two looks at whether the good-bye is through


class _Inbox(deque[Input]):
    """The executor's inbox. Virtual time has one thread, so an event is taken as soon as no inner step is under way."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def put(self, item: Input) -> None:
        self.append(item)
        self._wake()

    def get_nowait(self) -> Input:
        return self.popleft()

    def empty(self) -> bool:
        return not self


class SimulatedNode:
    """What `node/library.py` and a training loop are in a real process."""

    def __init__(
        self,
        process: Process,
        setup: NodeSetup,
        scenario: Scenario,
        dial: Dial,
        rng: random.Random,
        state: NodeState,
        saw: Callable[[ev.Event | ev.Command], None],
        board: SharedForgeries,
    ) -> None:
        self.process, self.setup, self.state = process, setup, state
        self.diary = SendLog()
        self.stopped_by: tuple[Reason, str] | None = None
        self.gone = False  # whether it has said good-bye and closed its link
        self._scenario, self._tell, self._rng = scenario, saw, rng
        self._learner = scenario.trains().learner(setup.name, setup.seed)
        self._optimizer: torch.optim.Optimizer | None = None
        self._busy = True  # inside an inner step, building the model or taking events: further events wait
        self._slowed = 1.0
        self._leaves_at: float | None = None
        link = NodeLink(
            VirtualDialer(dial),
            VirtualClock(process),
            rng.uniform,
            coordinator="virtual",
            limits=scenario.limits,
            timing=scenario.timing,
            check=True,
        )
        self.link = SimulatedLink(link, process, setup, board)
        inbox = _Inbox(self._go_on)
        self.executor = NodeExecutor(
            setup.name,
            inbox=inbox,
            now=lambda: process.now,
            worker=VirtualWorker(process, lambda: rng.uniform(*scenario.job_s), inbox.put),
            link=self.link,
            state=state,
            tau=setup.tau,
            holds=setup.holds,
            check=True,
            saw=self._saw,
        )
        self.executor.evaluate = self._learner.evaluate
        self._busy = False

    @property
    def machine(self) -> NodeMachine:
        return self.executor.machine

    @property
    def replica(self) -> Replica | None:
        return self.executor.replica

    @property
    def waiting(self) -> str | None:
        """What training stands still for, in words."""
        return None if self._busy or self.machine.ended else self.executor.waiting

    def drain(self) -> None:
        """As SIGTERM asks."""
        self.executor.request_drain()

    def slow_down(self, factor: float) -> None:
        """Inner steps take so many times as long from the next one on."""
        self._slowed = factor

    def spoil(self, fragment: int) -> None:
        """Flip a bit of an anchor; of another one, where it does not hold that."""
        if self.replica is not None:
            anchors = self.replica.anchors
            anchors.get(fragment, anchors[min(anchors)])[0] += 1.0

    # --- the driver's loop

    def _go_on(self) -> None:
        """Take what has come, and begin the next inner step if the executor says so."""
        if self._busy or self.gone:
            return
        self._busy = True
        try:
            ready = self.executor.settle()
        except (Refused, LayoutMismatch) as error:
            self.executor.say_failed(error)
            ready = False
        self._busy = False
        if self.machine.ended:
            self._leave()
        elif self.replica is None:
            if self.machine.spec is not None:
                self._build()
        elif ready:
            decision = self.executor.decision()
            if decision.running:
                self._begin_step(decision)

    def _build(self) -> None:
        spec = self.machine.spec
        assert spec is not None
        if self.machine.holds is not None:
            freeze_all_but(self.machine.holds, self._learner.module, spec.identity.layout)
        self.executor.attach(self._learner.module)
        self._optimizer = self._learner.optimizer(spec.terms)
        self._stay_busy(BUILD_S, lambda: None)

    def _begin_step(self, decision: Decision) -> None:
        self.diary.samples += decision.samples
        self._note_weights()
        step_s = self.setup.step_s * self._slowed
        if self.setup.step_wobble:
            step_s *= self._rng.lognormvariate(0.0, self.setup.step_wobble)
        self._stay_busy(step_s, lambda: self._step(decision))

    def _step(self, decision: Decision) -> None:
        assert self.machine.spec is not None and self._optimizer is not None
        terms, module = self.machine.spec.terms, self._learner.module
        samples = list(decision.samples) if self.machine.takes_samples else [self.machine.inner_steps]
        loss = self._learner.backward(samples, decision.position)
        self.diary.losses.append(loss)
        self.diary.learning_rates.append(decision.lr)
        if method_named(terms.method).inner:
            nn.utils.clip_grad_norm_(module.parameters(), terms.inner.clip)
            for group in self._optimizer.param_groups:
                group["lr"] = decision.lr
            self._optimizer.step()
        self.executor.step_done(self.setup.tokens or terms.inner.batch_sequences * terms.inner.sequence_tokens, loss)

    def _stay_busy(self, seconds: float, then: Callable[[], None]) -> None:
        self._busy = True

        def done() -> None:
            then()
            self._busy = False
            self._go_on()

        self.process.after(seconds, done)

    def _leave(self) -> None:
        """Ended: close the link once the farewell is through, or has had its time."""
        now = self.process.now
        self._leaves_at = self._leaves_at if self._leaves_at is not None else now + DRAIN_S
        if self.link.flushed or now >= self._leaves_at:
            self.gone = True
            self._note_weights()
            self.link.close()
        else:
            self.process.after(_LOOKS_S, self._go_on)

    # --- what is noted of it

    def _note_weights(self) -> None:
        if not self._scenario.frugal:
            parameters = self._learner.module.parameters()
            self.diary.weights.append(nn.utils.parameters_to_vector(parameters).detach())

    def _saw(self, what: ev.Event | ev.Command) -> None:
        self._tell(what)
        machine, diary = self.machine, self.diary
        match what:
            case ev.Encode(blob=blob):
                assert machine.spec is not None
                self.link.encodes(blob, what.codec, machine.spec.identity.layout.fragments[blob.fragment])
                diary.sends.append(
                    Send(
                        inner_step=machine.inner_steps,
                        position=machine.position,
                        fragment=blob.fragment,
                        window=what.window,
                        base=blob.version,
                        steps=what.steps,
                        tokens=what.tokens,
                    )
                )
            case ev.ForgetBlob(blob=blob, merged_in=merged_in) if blob.kind is BlobKind.DELTA:
                diary.settled.append((blob, merged_in))
                self.link.forget(blob)
            case ev.Apply(fragment=fragment, version=version):
                diary.applied.append((fragment, version))
            case ev.AnchorMismatch():
                diary.mismatches = self.executor.metrics.mismatches
            case ev.Merge(fragment=fragment, mix=mix):
                diary.merges.append(
                    Merged(
                        inner_step=machine.inner_steps,
                        fragment=fragment,
                        version=machine.fragments[fragment].version,
                        mix=mix,
                        sends=len(diary.sends),
                    )
                )
            case ev.Resync():
                diary.applied.clear()  # versions come again, with another content
            case ev.Stop(reason=reason, detail=detail):
                self.stopped_by = (reason, detail)
            case _:
                pass
