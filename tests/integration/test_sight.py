"""What a coordinator sees of two nodes' machines and links, over real sockets and thin links."""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from machines import Machine
from plain_runs import plain_hello

from farloop.algo.spec import NodeId
from farloop.coordinator.daemon import Coordinator
from farloop.local.relay import Link as ThinLink
from farloop.local.relay import Relay, RelayThread
from farloop.node.link import LinkConfig
from farloop.node.machine_info import read_inventory
from farloop.node.zmq_dealer import LinkThread
from farloop.runtime.version import version_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

LINKS = {"bergen": "32mbit/20ms", "oslo": "12mbit/60ms"}
ROUND_TRIP_S = {"bergen": 0.02, "oslo": 0.06}
BYTES_PER_S = {"bergen": 4e6, "oslo": 1.5e6}


@contextmanager
def nodes(coordinator: Coordinator, folder: Path) -> Iterator[None]:
    """Two that greet, and wait for a run that never begins."""
    port = int(coordinator.link.endpoint.rpartition(":")[2])
    with ExitStack() as stack:
        for name, thin in LINKS.items():
            relay = Relay(target_host="127.0.0.1", target_port=port, link=ThinLink.parse(thin))
            (passes,) = stack.enter_context(RelayThread(relay))
            machine = Machine(folder / name)
            machine.netdev("eth0", speed=25_000, pci="0000:01:00.0")
            machine.port("mlx5_0", layer="InfiniBand")
            declared = f"tcp://127.0.0.1:{passes.port}"  # there is an answer
            told = read_inventory({}, name, declared, "eth0=ethernet/10gbit", root=machine.root)
            kept = machine.root / "link.json"
            link = LinkThread(LinkConfig(coordinator=f"tcp://127.0.0.1:{passes.port}", inventory=told, kept=kept))
            link.start(partial(plain_hello, node=NodeId(name)), lambda event: None)
            stack.callback(link.close)
        yield


def seen(coordinator: Coordinator) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(coordinator.observer.status_json).get("inventory", {"nodes": [], "links": []})
    return found


def test_the_status_shows_both_machines_and_all_links(tmp_path: Path) -> None:
    store = tiny_run.begin(tmp_path / "state", tiny_run.plan(steps=8, h=2, nodes=3))
    try:
        with (
            tiny_run.serving(tmp_path / "state", store, probe_idle_s=0.5, probe_share=1e6) as coordinator,
            nodes(coordinator, tmp_path),
        ):
            tiny_run.until(lambda: sum(link["bytes_per_s"] is not None for link in seen(coordinator)["links"]) == 4)
            tiny_run.until(
                lambda: (
                    sum(link["retransmit_ratio"] is not None for link in seen(coordinator)["links"]) == 4
                    or sys.platform != "linux"
                )
            )
            tiny_run.until(lambda: all(node["disk_free_bytes"] for node in seen(coordinator)["nodes"]))
            found = seen(coordinator)
            metrics = coordinator.metrics.exposition().decode()
    finally:
        store.close()
    assert {node["farloop"] for node in found["nodes"]} == {version_of()}
    assert f'farloop_node_info{{node="oslo",version="{version_of()}"}} 1.0' in metrics
    assert [(node["name"], node["site"], node["site_from"]) for node in found["nodes"]] == [
        ("bergen", "bergen", "operator"),
        ("oslo", "oslo", "operator"),
    ]
    assert [node["reachable"] for node in found["nodes"]] == [True, True]
    assert all(abs(node["clock_off_s"]) < 60 for node in found["nodes"]), "one clock, and a machine that may be busy"
    card, plain = found["nodes"][0]["nics"]
    assert (card["kind"], card["bytes_per_s"], card["provenance"]) == ("infiniband", 12.5e9, "sysfs")
    assert (plain["bytes_per_s"], plain["provenance"]) == (1.25e9, "operator")
    assert plain["others"] == ["bits_per_s 2.5e+10 (sysfs)"]
    links = {(link["from"], link["to"]): link for link in found["links"]}
    assert set(links) == {ends for name in LINKS for ends in ((name, "coordinator"), ("coordinator", name))}
    for (source, target), link in links.items():
        name = source if target == "coordinator" else target
        assert link["measured_by"] == "probe" and link["age_s"] < 60
        # The links are made by a thread of this machine, which others may hold up.
        assert ROUND_TRIP_S[name] < link["rtt_s"] < ROUND_TRIP_S[name] + 0.5
        assert 0.5 * BYTES_PER_S[name] < link["bytes_per_s"] < 1.3 * BYTES_PER_S[name]
        assert f'farloop_link_round_trip_seconds{{source="{source}",target="{target}"}}' in metrics
        assert f'farloop_link_measured_bytes_per_second{{source="{source}",target="{target}"}}' in metrics
