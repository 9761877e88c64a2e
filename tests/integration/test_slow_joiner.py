"""A node joins behind a link that carries less than the run commits: the run goes on, and it takes part once it can."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tiny_run

from farloop.coordinator.daemon import Coordinator
from farloop.local.relay import Link, Relay, RelayThread
from farloop.wire.limits import Limits

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

FEW = 16
"""Blobs in transfer at once: as few as that, so that the test is short. 256 unless set."""

THIN, FAT = Link.parse("3kbit/20ms"), Link.parse("100mbit/1ms")


@contextmanager
def training(endpoint: str, folder: Path, name: str) -> Iterator[None]:
    """A node that trains until the block is left, and then goes without a word."""
    over = threading.Event()
    thread = threading.Thread(target=lambda: tiny_run.train(endpoint, folder, name, pace_s=0.005, over=over), name=name)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(tiny_run.PATIENCE_S)
        assert not thread.is_alive()


def merged(coordinator: Coordinator, name: str) -> bool:
    """Whether one of the last commits holds work of this node."""
    return any(share.node == name for c in list(coordinator.store.ledger.commits.values()) for share in c.merged)


@pytest.mark.slow
def test_a_joiner_behind_a_thin_link_stops_no_node_and_takes_part_once_its_link_allows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`LocalProtocolError: 256 blobs are being sent` ended the coordinator, again after every start."""
    store = tiny_run.begin(tmp_path / "state", tiny_run.plan(steps=100_000, h=2, nodes=2))
    caplog.set_level("INFO", "farloop.coordinator.downloads")
    with tiny_run.serving(tmp_path / "state", store, limits=Limits(max_blobs=FEW, max_active=FEW)) as coordinator:
        here = coordinator.link.endpoint
        relay = Relay(target_host="127.0.0.1", target_port=int(here.rpartition(":")[2]), link=THIN)
        thread = RelayThread(relay)
        with thread, training(here, tmp_path / "a", "a"), training(here, tmp_path / "b", "b"):
            tiny_run.until(lambda: sum(coordinator.store.ledger.versions) > 4)
            with training(f"tcp://127.0.0.1:{relay.port}", tmp_path / "c", "c"):
                tiny_run.until(lambda: "c" in coordinator.machine.members)
                before = sum(coordinator.store.ledger.versions)
                tiny_run.until(lambda: sum(coordinator.store.ledger.versions) > before + 10 * FEW)
                assert not merged(coordinator, "c"), "its link is as thin as this test wants it"
                thread.change(relay, FAT)
                tiny_run.until(lambda: merged(coordinator, "c"))
    assert "session ended" not in caplog.text
