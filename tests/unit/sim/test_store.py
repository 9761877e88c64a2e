"""Deltas and updates by an object store: the same history as by sessions, whatever the store does."""

import dataclasses
from typing import Any

import pytest
from faulty_world import World, run
from simulated_faults import TWO_NODES, CrashCoordinator, CrashNode, CutLink, Fault, NodeSetup
from simulated_outcome import Outcome
from simulated_runs import scenario_of
from virtual_store import VirtualObjects, VirtualStore

from farloop.algo.spec import BlobKind, NodeId
from farloop.coordinator import bulk_plane
from farloop.coordinator.storage import segment
from farloop.wire.session import Session

A, B = NodeId("a"), NodeId("b")
FAULTY: dict[str, Any] = {"fails": 0.15, "spoils": 0.1, "loses": 0.1}


def played(
    monkeypatch: pytest.MonkeyPatch, method: str, store: VirtualStore | None, *faults: Fault, **given: object
) -> tuple[Outcome, World]:
    """The outcome, with the invariants of every run checked."""
    world = World(scenario_of(method, *faults, store=store, **given))
    monkeypatch.setattr(bulk_plane, "PAUSE_S", 0.3)  # the runs are short
    monkeypatch.setattr(
        segment, "read_object", lambda directory, key, digest, files: store.objects[key] if store else b""
    )
    outcome = world.run()
    outcome.check()
    return outcome, world


@pytest.mark.parametrize("method", ["diloco", "streaming", "data-parallel"])
def test_both_planes_come_to_the_same_anchors(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    by_session = run(scenario_of(method))
    by_store, _ = played(monkeypatch, method, store := VirtualStore())
    assert by_store.anchor_digests == by_session.anchor_digests
    assert any(key.partition("update-")[1] for key in store.objects)


def test_no_byte_of_a_delta_or_update_passes_the_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of the store are counted by the node, as those of its sessions are."""
    _, world = played(monkeypatch, "streaming", store := VirtualStore())
    stored = sum(map(len, store.objects.values()))
    moved = [host.actor.link.moved for host in world.hosts.values()]
    up, down = sum(each.up.delta for each in moved), sum(each.down.update for each in moved)
    updates = sum(len(data) for key, data in store.objects.items() if "update-" in key)
    assert (up, down) == (stored - updates, 2 * updates)


def test_all_but_a_nodes_first_deltas_are_written_without_asking_for_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    _, world = played(monkeypatch, "streaming", store := VirtualStore())
    deltas = [key for key in store.objects if "update-" not in key and "snapshot-" not in key]
    asked = [key for key in deltas if "-epoch-" not in key]
    assert len(asked) == len(world.hosts) * len({key.partition("/")[0] for key in deltas}) < len(deltas)


@pytest.mark.parametrize("seed", range(3))
def test_a_delta_may_be_written_before_its_offer_is_let_in(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """A store that answers at once, beside a journal that takes its time."""
    given: dict[str, object] = {"seed": seed, "job_s": (0.2, 0.4), "patience_s": 30.0, "num_samples": 2000}
    _, world = played(monkeypatch, "streaming", VirtualStore(seconds=(0.0, 0.0)), **given)
    assert not world.coordinator.machine.alarms


def test_a_joiner_reads_its_snapshots_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator writes each once and sends none; an object goes when no session uses it any more."""
    late = [NodeSetup(name=NodeId(name), seed=seed, joins_at=4.0) for seed, name in ((3, "c"), (4, "d"))]
    given: dict[str, object] = {"steps": 80, "nodes": (*TWO_NODES, *late)}
    written: list[str] = []
    put = VirtualObjects.put
    monkeypatch.setattr(VirtualObjects, "put", lambda self, url, *rest: (written.append(url), put(self, url, *rest)))
    sent: list[object] = []
    monkeypatch.setattr(
        Session,
        "_bulk_frame",
        lambda self, *chunk, of=Session._bulk_frame: sent.append(chunk[1].kind) or of(self, *chunk),
    )
    store = VirtualStore(seconds=(0.2, 0.3))
    outcome, _ = played(monkeypatch, "streaming", store, **given)
    snapshots = [url for url in written if "snapshot-" in url]
    assert snapshots and len(snapshots) == len(set(snapshots))
    assert BlobKind.SNAPSHOT not in sent
    assert len([key for key in store.objects if "snapshot-" in key]) < len(snapshots)
    for name in "cd":
        (joiner,) = outcome.nodes[NodeId(name)]
        assert joiner.start_round


def test_the_overlap_that_a_node_chooses_covers_the_requests_to_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write and a read of each end, which take 4 steps, and the messages between them."""
    nodes = tuple(dataclasses.replace(setup, adapt_tau=True) for setup in TWO_NODES)
    given: dict[str, object] = {"nodes": nodes, "h": 16, "steps": 64}
    chosen = {}
    for plane, store in (("session", None), ("store", VirtualStore(seconds=(0.1, 0.1)))):
        _, world = played(monkeypatch, "streaming", store, **given)
        chosen[plane] = [host.actor.machine.chosen_tau for host in world.hosts.values()]
    assert max(chosen["session"]) <= 4 < 4 + min(chosen["session"]) <= min(chosen["store"]) <= max(chosen["store"]) < 12


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("method", ["diloco", "streaming", "async"])
def test_no_window_is_lost_whatever_the_store_does(monkeypatch: pytest.MonkeyPatch, method: str, seed: int) -> None:
    """Requests fail, bytes are wrong or missing: such a blob goes by the session, with an alarm."""
    _, world = played(monkeypatch, method, VirtualStore(**FAULTY), seed=seed)
    assert "goes by the session" in world.coordinator.machine.alarms["object store"]


@pytest.mark.parametrize("seed", range(4))
def test_crashes_and_cuts_amid_transfers_by_the_store(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    faults = (
        CutLink(node=A, at=1.0 + 0.1 * seed, for_s=1.0, reset=seed % 2 == 0), CutLink(node=B, at=3.0, for_s=0.5),
        CrashNode(node=B, at=2.0 + 0.2 * seed, down_s=0.5), CrashCoordinator(at_event=20 + 7 * seed, down_s=0.5),
    )  # fmt: skip
    played(monkeypatch, "streaming", VirtualStore(**FAULTY, seconds=(0.1, 1.0)), *faults, seed=seed)
