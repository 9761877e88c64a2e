"""`farloop doctor --fleet`: what the coordinator's status says is to be done."""

import json
from typing import Any, cast

import pytest
import statuses
from command_line import error_line, farloop
from statuses import LINK, MACHINE, NIC

from farloop.cli import fleet
from farloop.cli.findings import ok
from farloop.cli.fleet import findings
from farloop.config.exit_codes import CommandError, ExitCode
from farloop.monitoring.status import Status


def told(**changes: Any) -> Status:
    """A run that lacks nothing, but for the changes: of a machine, a link, or the status."""
    machine, link = ({**kind, **changes.pop(name, {})} for name, kind in (("machine", MACHINE), ("link", LINK)))
    given = {"run": {"nodes": 1}, "nodes": [statuses.node("oslo")], "windows": [], "recent": [], **changes}
    given["inventory"] = {"nodes": [machine], "links": [link]}
    return cast(Status, statuses.status(**given))


def test_a_fleet_without_fault_is_said_to_be() -> None:
    assert [(finding.level, finding.what) for finding in findings(told())] == [("ok", "fleet")]


@pytest.mark.parametrize(
    ("changes", "level", "what", "detail"),
    [
        ({"alarms": ["storage: the disk is full; make room"]}, "fail", "alarm", "storage: the disk is full"),
        ({"run": {"nodes": 3}}, "warn", "nodes", "1 of 3 are connected"),
        ({"machine": {"farloop": "0.1.0"}}, "warn", "versions", "0.1.0 at oslo"),
        ({"nodes": [statuses.node("oslo"), statuses.node("lima", connected=False, reason="crashed")]}, "fail", "away",
         "lima is away: crashed"),
        ({"nodes": [statuses.node("oslo", quarantine="points against the others")]}, "fail", "quarantine", "points"),
        ({"nodes": [statuses.node("oslo", loss_is="nan")]}, "fail", "loss", "the loss is nan"),
        ({"machine": {"nics": [{**NIC, "usable": False, "why": "memlock; raise it"}]}}, "warn", "card", "memlock"),
        ({"machine": {"address": "tcp://a:1", "reachable": False}}, "fail", "reachable", "does not reach tcp://a:1"),
        ({"machine": {"unread": ["/sys/class"]}}, "warn", "sysfs", "/sys/class"),
        ({"machine": {"clock_off_s": -3.0}}, "warn", "clock", "oslo: 3"),
        ({"machine": {"disk_free_bytes": 10**9}, "run": {"nodes": 1, "node_disk_bytes": 2 * 10**9}}, "fail", "disk",
         "oslo: 1.00 GB free, 2.00 GB to come"),
        ({"link": {"suspect": True}}, "warn", "link", "much slower than a way around it"),
        ({"link": {"retransmit_ratio": 0.05}}, "warn", "link", "5.0 % of the segments"),
        ({"machine": {"congestion": "cubic"}}, "warn", "congestion", "oslo: cubic over 61 ms"),
    ],
)  # fmt: skip
def test_each_fault_has_a_level_and_a_fix(changes: dict[str, Any], level: str, what: str, detail: str) -> None:
    (finding,) = findings(told(**changes))
    assert (finding.level, finding.what) == (level, what) and detail in finding.detail and finding.fix


def test_the_status_of_an_older_coordinator_has_no_clocks_and_no_disks() -> None:
    status = told()
    for name in ("clock_off_s", "disk_free_bytes", "disk_used_bytes"):
        del cast(dict[str, Any], status["inventory"]["nodes"][0])[name]
    assert [finding.what for finding in findings(status)] == ["fleet"]
    fleet.print_fleet(status)


def test_a_node_s_name_is_whole_where_the_table_is_narrow(capsys: pytest.CaptureFixture[str]) -> None:
    fleet.print_fleet(told(nodes=[statuses.node("oslo", device="8 x NVIDIA H200 (16 threads)", state="training")]))
    assert "oslo   training" in capsys.readouterr().out


def test_what_a_node_keeps_already_needs_no_room_and_a_part_of_the_model_less() -> None:
    machine = {"disk_free_bytes": 10**9, "disk_used_bytes": 10**9}
    run = {"nodes": 1, "node_disk_bytes": 2 * 10**9, "parameters": 100}
    assert [finding.what for finding in findings(told(machine=machine, run=run))] == ["fleet"]
    half = statuses.node("oslo", part={"stages": [0], "fragments": [0], "parameters": 50})
    alone = told(machine={"disk_free_bytes": 10**9}, run=run, nodes=[half])
    assert [finding.what for finding in findings(alone)] == ["fleet"]


def test_a_node_on_a_cpu_among_gpus_is_named() -> None:
    status = told(run={"nodes": 2}, nodes=[statuses.node("oslo"), statuses.node("lima")])
    status["inventory"]["nodes"].append(cast(Any, {**MACHINE, "name": "lima", "devices": 0}))
    assert [(finding.what, finding.detail) for finding in findings(status)] == [
        ("gpu", "lima trains without one, others have them")
    ]


def test_the_table_and_the_exit_code_follow_the_worst_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "wall_clock", lambda url: ok("wall clock", "not compared"))
    for status, code in (
        (told(), ExitCode.DONE),
        (told(run={"nodes": 3}), ExitCode.DONE),
        (told(alarms=["storage: full"]), ExitCode.USAGE),
    ):
        monkeypatch.setattr(fleet, "fetch", lambda url, status=status: status)
        shown, as_json = farloop("doctor", "--fleet"), farloop("doctor", "--fleet", "--json")
        assert shown.exit_code == as_json.exit_code == code
        assert (
            "oslo" in shown.stdout
            and "40 Mbit/s" in shown.stdout
            and "61.3 ms" in shown.stdout
            and "900 GB" in shown.stdout
        )
        assert json.loads(as_json.stdout)[0]["what"] == "wall clock"


def test_without_a_coordinator_or_with_a_file_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(url: str) -> Status:
        raise CommandError("no coordinator", ExitCode.UNREACHABLE)

    monkeypatch.setattr(fleet, "fetch", gone)
    assert "no coordinator" in error_line("doctor", "--fleet", code=ExitCode.UNREACHABLE)
    assert "leave out FILE, --set and --store" in error_line("doctor", "--fleet", "node.toml")
