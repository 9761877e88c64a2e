"""One start of a node in virtual time: drives the real executor, with a learner whose inner steps take virtual time."""

import queue
import random
from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import nn

from farloop.algo.methods import method_named
from farloop.algo.stages import fragments_of
from farloop.node import events as ev
from farloop.node.cluster import Decision
from farloop.node.errors import LayoutMismatch, Refused
from farloop.node.executor import Input, NodeExecutor
from farloop.node.link import LinkConfig, NodeLink
from farloop.node.machine import NodeMachine
from farloop.node.model.replica import Replica
from farloop.node.settings import NodeConfig
from farloop.node.state_dir import NodeState
from farloop.sim.network import Dial, VirtualDialer
from farloop.sim.scenario import NodeSetup, Scenario
from farloop.sim.virtual_time import Process, VirtualClock, VirtualWorker
from farloop.wire.messages import Message, Offer
from farloop.wire.session import State
from farloop.wire.uplink import UplinkLimit

DRAIN_S = 30.0  # for a good-bye to get through
BUILD_S = 0.2  # to build the model once the run's spec is known
_LOOKS_S = 0.02  # seconds between two looks at whether the good-bye is through
HOP_S: Final = 0.0005  # from the training thread to the link's


class _Inbox(queue.SimpleQueue[Input]):
    """The executor's inbox. Virtual time has one thread, so an event is taken as soon as no inner step is under way."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def put(self, item: Input, block: bool = True, timeout: float | None = None) -> None:
        super().put(item)
        self._wake()


class SimulatedLink(NodeLink):
    """A node's link. What the training thread asks for is done a moment later, as between real threads."""

    def __init__(self, process: Process, rng: random.Random, scenario: Scenario, dial: Dial) -> None:
        super().__init__(
            LinkConfig(coordinator="virtual", lanes=1, uplink=scenario.uplink or UplinkLimit()),
            VirtualDialer(dial),
            VirtualClock(process),
            rng.uniform,
            limits=scenario.limits,
            timing=scenario.timing,
            objects=scenario.store(process, rng) if scenario.store is not None else None,
            check=True,
        )
        self._process = process

    @property
    def flushed(self) -> bool:
        """Whether a Leave was acknowledged, or there is no session."""
        return self.state in (None, State.CLOSED)

    def send(self, message: Message) -> None:
        self._process.after(HOP_S, partial(super().send, message))

    def send_blob(self, offer: Offer, data: bytearray) -> None:
        self._process.after(HOP_S, partial(super().send_blob, offer, data))


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
    ) -> None:
        self.process, self.setup, self.state = process, setup, state
        self.sent: list[tuple[float, int]] = []  # (schedule position, fragment) of every delta
        self.gone = False  # whether it has said good-bye and closed its link
        self._rng = rng
        self._learner = scenario.problem.learner(setup.name, setup.seed)
        self._optimizer: torch.optim.Optimizer | None = None
        self._busy = True  # inside an inner step, building the model or taking events: further events wait
        self._leaves_at: float | None = None
        self.link = self._new_link(process, rng, scenario, dial)
        inbox = _Inbox(self._advance)
        self.executor = NodeExecutor(
            NodeConfig(name=setup.name, tau=setup.tau, adapt_tau=setup.adapt_tau),
            inbox=inbox,
            now=lambda: process.now,
            worker=VirtualWorker(process, lambda: rng.uniform(*scenario.job_s), inbox.put),
            link=self.link,
            state=state,
            holds=setup.holds,
            check=True,
            observe=self.observe,
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

    def observe(self, what: ev.Event | ev.Command) -> None:
        """Called with every event that the machine has taken, and every command before it is executed."""
        if isinstance(what, ev.Encode):
            self.sent.append((self.machine.position, what.blob.fragment))

    def _new_link(self, process: Process, rng: random.Random, scenario: Scenario, dial: Dial) -> SimulatedLink:
        return SimulatedLink(process, rng, scenario, dial)

    # --- the driver's loop

    def _advance(self) -> None:
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
        if self.machine.holds is not None:  # the tensors of its part are trained, the others stay as they were built
            fragments = fragments_of(self.machine.holds, spec.identity.layout)
            held = {tensor.name for fragment in fragments for tensor in fragment.tensors}
            for name, parameter in self._learner.module.named_parameters():
                parameter.requires_grad_(name in held)
        self.executor.attach(self._learner.module)
        self._optimizer = self._learner.optimizer(spec.terms)
        self._stay_busy(BUILD_S, lambda: None)

    def _begin_step(self, decision: Decision) -> None:
        step_s = self.setup.step_s
        if self.setup.step_wobble:
            step_s *= self._rng.lognormvariate(0.0, self.setup.step_wobble)
        self._stay_busy(step_s, lambda: self._step(decision))

    def _step(self, decision: Decision) -> float:
        """The loss."""
        assert self.machine.spec is not None and self._optimizer is not None
        terms, module = self.machine.spec.terms, self._learner.module
        samples = list(decision.samples) if self.machine.takes_samples else [self.machine.inner_steps]
        loss = self._learner.backward(samples, decision.position)
        if method_named(terms.method).inner:
            nn.utils.clip_grad_norm_(module.parameters(), terms.inner.clip)
            for group in self._optimizer.param_groups:
                group["lr"] = decision.lr
            self._optimizer.step()
        self.executor.step_done(self.setup.tokens or terms.inner.batch_sequences * terms.inner.sequence_tokens, loss)
        return loss

    def _stay_busy(self, seconds: float, then: Callable[[], object]) -> None:
        self._busy = True

        def done() -> None:
            then()
            self._busy = False
            self._advance()

        self.process.after(seconds, done)

    def _leave(self) -> None:
        """Ended: close the link once the farewell is through, or has had its time."""
        now = self.process.now
        self._leaves_at = self._leaves_at if self._leaves_at is not None else now + DRAIN_S
        if self.link.flushed or now >= self._leaves_at:
            self.gone = True
            self.link.close()
        else:
            self.process.after(_LOOKS_S, self._advance)
