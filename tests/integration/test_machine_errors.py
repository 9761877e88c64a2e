"""An unexpected error in the coordinator's machine: what was decided is carried out, and what is broken is not used."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_run

from farloop.algo.spec import NodeId
from farloop.coordinator.daemon import Coordinator, CoordinatorConfig
from farloop.coordinator.decide import events as ev
from farloop.coordinator.errors import MachineBroken
from farloop.wire.messages import Finished
from farloop.wire.reasons import Reason

pytestmark = pytest.mark.integration

PARTED = ev.NodeDisconnected(session=1, node=NodeId("a"), reason=Reason.CLOSED)
DECIDED = ev.Tell(node=NodeId("a"), message=Finished())


def with_coordinator(tmp_path: Path, story: Callable[[Coordinator], None]) -> None:
    async def tell() -> None:
        store = tiny_run.begin(tmp_path / "state", tiny_run.plan(steps=4, h=2, nodes=1))
        config = CoordinatorConfig(state_dir=tmp_path / "state", bind="inproc://machine", http="")
        coordinator = Coordinator(config, store)
        try:
            story(coordinator)
        finally:
            coordinator.link.close()
            coordinator.observer.close()
            coordinator._compute.shutdown()
            await coordinator._upkeep.close()

    asyncio.run(tell())


def failing(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(*args: object) -> Any:
        coordinator.machine._decisions.do(DECIDED)
        raise KeyError("on purpose")

    monkeypatch.setattr(coordinator.machine, "handle", half)


def test_an_error_that_breaks_no_invariant_goes_on_to_whose_event_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def story(coordinator: Coordinator) -> None:
        failing(coordinator, monkeypatch)
        with pytest.raises(KeyError):
            coordinator._happened(PARTED)
        assert list(coordinator._commands)[-1] == DECIDED, "what was decided is true in the ledger"

    with_coordinator(tmp_path, story)


def test_a_machine_whose_invariants_are_broken_is_used_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(coordinator: Coordinator) -> None:
        failing(coordinator, monkeypatch)
        coordinator.machine.windows.clear()
        with pytest.raises(MachineBroken, match="NodeDisconnected broke the machine"):
            coordinator._happened(PARTED)

    with_coordinator(tmp_path, broken)


def test_what_watches_the_run_stops_nothing_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def story(coordinator: Coordinator) -> None:
        def fail(*args: object) -> None:
            raise RuntimeError("on purpose")

        handled: list[object] = []
        monkeypatch.setattr(coordinator.observer, "saw", fail)
        monkeypatch.setattr(coordinator.machine, "handle", lambda event, now: handled.append(event) or [])
        coordinator._happened(PARTED)
        assert handled == [PARTED]

    with_coordinator(tmp_path, story)
