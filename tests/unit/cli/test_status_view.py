"""The terminal view of a run: in every state, on every terminal."""

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import statuses
from rich.console import Console

from farloop.cli.status_view import draw, draw_network, fitting, sparkline
from farloop.monitoring.status import InventoryStatus, LinkStatus, MachineStatus, NicStatus, Status
from farloop.monitoring.status_summary import cleaned, view_of


def picture(status: Status | None, width: int = 120, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    view = None if status is None else view_of(status)
    console.print(draw(view, width=width, **({"max_nodes": 40} | options)))
    return console.export_text()


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_view_says_everything_that_matters(width: int) -> None:
    scores = [statuses.score(i, loss) for i, loss in enumerate((5.545, 3.0, 2.213))]
    status = statuses.status(run={"name": "demo", "started_s": 30.0}, evaluations=scores)
    text = picture(status, width, link="50mbit/50ms", eta_s=82.0)
    for words in ("demo", "streaming", "q4 up, q4 down", "H 30", "3 nodes", "50mbit/50ms", "step 612 of 2,000",
                  "30.6%", "1m 22s left", "5.545 → 2.213", "█▃▁", "16.2 GB up, 16.0 GB down", "f0 ●○○", "f3 ○○○",
                  "paris", "97.4%", "○ away", "81 commits"):  # fmt: skip
        assert words in text
    assert "waiting for the coordinator" in picture(None)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("height", [20, 24, 40, 60, None])
@pytest.mark.parametrize("make", statuses.ALL)
def test_every_state_fits_every_terminal_and_sends_it_no_controls(
    make: Callable[[], Status], width: int, height: int | None
) -> None:
    """What does not fit is left out: events first, then nodes, which are counted."""
    status = cleaned(make())
    text = picture(status, width, **(fitting(view_of(status), width=width, height=height) if height else {}))
    lines = text.splitlines()
    assert all(len(line) <= width for line in lines) and len(lines) < (height or math.inf)
    assert "\x1b" not in text and "\u202e" not in text
    assert not status["nodes"] or status["nodes"][0]["name"][:4] in text


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (statuses.waiting, ["waiting", "begins when its nodes are connected: 1 of 4 so far", "● ready"]),
        (statuses.held, ["held", "nothing is committed until the alarm is resolved", "! storage: the run is held"]),
        (statuses.holding, ["holding", "until you decide", "! history: the run is held", "0 nodes"]),
        (statuses.finished, ["2 nodes took", "finished", "done; the model is model.safetensors", "✓ finished"]),
        (statuses.diverged, ["nan", "no finite number"]),
        (lambda: statuses.status(nodes=[]), ["no node is connected, so nothing progresses"]),
    ],
)
def test_eighty_columns_are_enough_to_say_why_a_run_does_not_progress(
    make: Callable[[], Status], words: list[str]
) -> None:
    text = " ".join(picture(make(), 80).split())
    assert [each for each in words if each not in text] == []


def test_alarms_stand_above_slow_nodes_above_totals_above_nodes_above_events() -> None:
    trains = picture(statuses.status(), 80).splitlines()
    assert not trains[3].strip(), "nothing between progress and totals while the run trains"
    status = statuses.held()
    status["watch"] = {"adapt": "advise", "why_not": "", "coordinator": "", "anomalies": [{
        "kind": "link slow", "node": "oslo", "factor": 7.94, "since_round": 41, "reason": "oslo sends long",
        "place": "send side", "action": "fewer bits or a longer H", "done": False, "why": "",
        "advice": {"bits": 2, "h": 43, "round_s": 50.0, "then_s": 18.6},
    }]}  # fmt: skip
    text = " ".join(picture(status, 160).split())
    slow = "~ oslo: link slow 7.9 times since round 41 (send side); advised: fewer bits or a longer H, 2 bits and H 43"
    assert f"{slow}: rounds 50 s → 18.6 s" in text
    order = ("! storage", "~ oslo", "validation loss", "tokyo", "recent events", "25m 10s ago", "2m 04s ago")
    places = [text.index(words) for words in order]
    assert places == sorted(places)
    assert "windows" not in picture(statuses.waiting(), 80), "windows that expect no node are left out"


def test_changed_terms_are_said() -> None:
    changed = ["h 30 → 60 from round 9 on", "codec_up q4 → q8 from windows f0:8, f1:7 on"]
    text = picture(statuses.status(run={"revision": 2, "changed": changed}))
    assert "revision         2  h 30 → 60 from round 9 on; codec_up q4 → q8 from windows f0:8, f1:7 on" in text
    assert "revision" not in picture(statuses.status())


def test_nodes_that_do_not_fit_are_counted() -> None:
    text = picture(statuses.status(nodes=[statuses.node(f"n{index}") for index in range(12)]), max_nodes=5)
    assert "n4" in text and "n5" not in text and "and 7 more" in text


def test_a_sparkline_keeps_both_ends_and_skips_what_is_not_a_number() -> None:
    assert sparkline([8.0, math.nan, 4.5, 1.0]) == "█▅▁"
    assert (sparkline([3.0, 3.0]), sparkline([3.0])) == ("▁▁", "")
    long = sparkline([float(value) for value in range(1000)], width=10)
    assert (len(long), long[0], long[-1]) == (10, "▁", "█")


# --- machines and links

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


def network(inventory: InventoryStatus | None, width: int = 120) -> str:
    status: Status = statuses.status()
    if inventory is not None:
        status["inventory"] = inventory
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(draw_network(cleaned(status)))
    return console.export_text()


def test_a_machine_and_a_link_have_what_was_measured_of_them() -> None:
    text = network({"nodes": [MACHINE], "links": [LINK]})
    for words in ("oslo", "north", "mlx5_0:1 roce-v2 100 Gbit/s", "640 GB", "0.431", "dials out"):
        assert words in text
    for words in ("coordinator", "40 Mbit/s", "61.3 ms", "0.12%", "by probe, 1m 15s ago"):
        assert words in text
    assert "eth9" not in text


def test_what_is_not_known_is_a_dash_or_a_reason() -> None:
    unknown: LinkStatus = {**LINK, "bytes_per_s": None, "age_s": None, "rtt_s": None, "why": "over before slow start"}
    text = network({"nodes": [{**MACHINE, "memory_bytes": None}], "links": [unknown]})
    assert "over before slow start" in text and "0 bit" not in text


@pytest.mark.parametrize(("reachable", "words"), [(True, "reached"), (False, "not reached"), (None, "not tried")])
def test_whether_others_can_dial_in_is_told(reachable: bool | None, words: str) -> None:
    declared: MachineStatus = {**MACHINE, "address": "tcp://10.0.0.7:7800", "reachable": reachable}
    assert words in network({"nodes": [declared], "links": []})


@pytest.mark.parametrize("width", [80, 120])
def test_it_fits_a_terminal(width: int) -> None:
    many = [{**MACHINE, "name": f"node-with-a-long-name-{index}"} for index in range(9)]
    text = network({"nodes": many, "links": [{**LINK, "suspect": True}] * 5}, width)  # type: ignore[list-item, typeddict-item]
    assert all(len(line) <= width for line in text.splitlines())
    assert "doubted" in text


def test_the_coordinator_is_one_word_beside_links_that_are_not_steady() -> None:
    unsteady: LinkStatus = {**LINK, "bytes_per_s": None, "age_s": None, "why": "not steady: 1830 Mbit/s, then 715"}
    links: list[LinkStatus] = [{**unsteady, "from": "coordinator", "to": "oslo-0"}, unsteady]
    text = network({"nodes": [MACHINE], "links": [*links, {**unsteady, "from": "oslo-0", "to": "coordinator"}]}, 80)
    assert text.count("coordinator") == 3, text


def test_without_anything_it_says_so() -> None:
    assert "nothing is known yet" in network(None)
