"""The picture of `farloop status --network`."""

import io

import pytest
import statuses
from rich.console import Console

from farloop.cli.status_view import draw_network
from farloop.monitoring.status import InventoryStatus, LinkStatus, MachineStatus, NicStatus, Status
from farloop.monitoring.status_summary import cleaned

NIC: NicStatus = {
    "name": "mlx5_0:1",
    "kind": "roce-v2",
    "netdev": "eth2",
    "bytes_per_s": 12.5e9,
    "flow_bytes_per_s": 12.5e9,
    "active": True,
    "usable": True,
    "why": "",
    "members": [],
    "addresses": [],
    "fabric": "",
    "provenance": "sysfs",
    "kind_from": "sysfs",
    "others": [],
}
MACHINE: MachineStatus = {
    "name": "oslo",
    "site": "north",
    "site_from": "operator",
    "address": "",
    "reachable": None,
    "connected": True,
    "nics": [NIC, {**NIC, "name": "eth9", "active": False}],
    "devices": 8,
    "memory_bytes": 640_000_000_000,
    "cpus": 96,
    "memlock_bytes": None,
    "nofile": 65536,
    "congestion": "bbr",
    "seconds_per_step": 0.4312,
    "labels": [],
    "unread": [],
}
LINK: LinkStatus = {
    "from": "oslo",
    "to": "coordinator",
    "rtt_s": 0.0613,
    "rtt_median_s": 0.07,
    "bytes_per_s": 5e6,
    "provenance": "probe",
    "measured_by": "probe",
    "age_s": 75.0,
    "why": "",
    "retransmit_ratio": 0.0012,
    "congestion": "bbr",
    "suspect": False,
}


def picture(inventory: InventoryStatus | None, width: int = 120) -> str:
    status: Status = statuses.status()
    if inventory is not None:
        status["inventory"] = inventory
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(draw_network(cleaned(status)))
    return console.export_text()


def test_a_machine_and_a_link_have_what_was_measured_of_them() -> None:
    text = picture({"nodes": [MACHINE], "links": [LINK]})
    for words in ("oslo", "north", "mlx5_0:1 roce-v2 100 Gbit/s", "640 GB", "0.431", "dials out"):
        assert words in text
    for words in ("coordinator", "40 Mbit/s", "61.3 ms", "0.12%", "by probe, 1m 15s ago"):
        assert words in text
    assert "eth9" not in text


def test_what_is_not_known_is_a_dash_or_a_reason() -> None:
    unknown: LinkStatus = {**LINK, "bytes_per_s": None, "age_s": None, "rtt_s": None, "why": "over before slow start"}
    text = picture({"nodes": [{**MACHINE, "memory_bytes": None}], "links": [unknown]})
    assert "over before slow start" in text and "0 bit" not in text


@pytest.mark.parametrize(("reachable", "words"), [(True, "reached"), (False, "not reached"), (None, "not tried")])
def test_whether_others_can_dial_in_is_told(reachable: bool | None, words: str) -> None:
    declared: MachineStatus = {**MACHINE, "address": "tcp://10.0.0.7:7800", "reachable": reachable}
    assert words in picture({"nodes": [declared], "links": []})


@pytest.mark.parametrize("width", [80, 120])
def test_it_fits_a_terminal(width: int) -> None:
    many = [{**MACHINE, "name": f"node-with-a-long-name-{index}"} for index in range(9)]
    text = picture({"nodes": many, "links": [{**LINK, "suspect": True}] * 5}, width)  # type: ignore[list-item, typeddict-item]
    assert all(len(line) <= width for line in text.splitlines())
    assert "doubted" in text


def test_the_coordinator_is_one_word_beside_links_that_are_not_steady() -> None:
    unsteady: LinkStatus = {**LINK, "bytes_per_s": None, "age_s": None, "why": "not steady: 1830 Mbit/s, then 715"}
    links: list[LinkStatus] = [{**unsteady, "from": "coordinator", "to": "oslo-0"}, unsteady]
    text = picture({"nodes": [MACHINE], "links": [*links, {**unsteady, "from": "oslo-0", "to": "coordinator"}]}, 80)
    assert text.count("coordinator") == 3, text


def test_without_anything_it_says_so() -> None:
    assert "nothing is known yet" in picture(None)
