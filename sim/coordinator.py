"""The coordinator on virtual time.

The executor, the session router, the storage queue and the store are the daemon's own. Here they are given a virtual
clock, virtual workers, virtual files and the simulated network.
"""

import itertools
import random
from collections.abc import Callable
from pathlib import Path

from farloop.coordinator.decide.adoption import AdoptionSettings
from farloop.coordinator.decide.machine import CoordinatorMachine
from farloop.coordinator.executor import CoordinatorExecutor, Observer
from farloop.coordinator.net.router import SessionRouter
from farloop.coordinator.storage.storage_queue import StorageQueue
from farloop.coordinator.storage.store import Store
from farloop.sim.network import VirtualRouterSocket
from farloop.sim.scenario import Scenario
from farloop.sim.virtual_time import Process, VirtualClock, VirtualWorker

FOLDER = Path("/state")


class SimulatedCoordinator:
    """One start of it. `saw` is told every event that the machine takes, before the commands are carried out."""

    def __init__(
        self,
        process: Process,
        store: Store,
        scenario: Scenario,
        rng: random.Random,
        saw: Callable[[object], None] = lambda what: None,
        adopt: AdoptionSettings | None = None,
    ) -> None:
        self.process, self.store, self.rng = process, store, rng
        self.machine = CoordinatorMachine(
            store.ledger.copy(),
            now=process.now,
            liveness_s=scenario.timing.liveness_s,
            expire_s=scenario.expire_s,
            floor_share=scenario.floor_share,
            drops_silent=scenario.drops_silent,
            adopt=adopt,
        )
        clock, tokens = VirtualClock(process), itertools.count(1)
        self.storage = VirtualWorker(process, lambda: rng.uniform(*scenario.job_s))
        self.socket = VirtualRouterSocket(process, scenario.lane_buffer_s)
        self.router = SessionRouter(
            self.socket,
            clock,
            on_event=lambda peer, event: self.executor.heard(peer, event),
            limits=scenario.limits,
            timing=scenario.timing,
            rates=scenario.rates,
            background_share=scenario.background_share,
            new_token=lambda: next(tokens).to_bytes(16),
            check=True,
        )
        self.executor = CoordinatorExecutor(
            clock=clock,
            compute=VirtualWorker(process, lambda: rng.uniform(*scenario.job_s)),
            storage=StorageQueue(store, self.storage, clock, self.machine.alarms, _fail),
            store=store,
            machine=self.machine,
            router=self.router,
            observer=Observer(),
            fatal=_fail,
            adapt=scenario.adapt,
            model_path=FOLDER / "model.safetensors",
            saw=saw,
            check=True,
        )
        self.machine.check()
        self.executor.start()

    @property
    def finished(self) -> bool:
        return self.executor.finished


def _fail(error: Exception) -> None:
    raise error
