"""`farloop doctor`: findings about a machine, its network and a file. Dialling is tried in the integration tests."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from machines import Machine

from farloop.cli import doctor
from farloop.cli.doctor import (
    Finding,
    Way,
    as_the_coordinator_sees,
    buffers,
    disk,
    examine,
    fail,
    limit_findings,
    machine,
    ok,
    print_findings,
    way_of,
)
from farloop.cli.keys import write_pair
from farloop.monitoring.status import InventoryStatus, LinkStatus
from farloop.monitoring.units import rate_text
from farloop.node.machine_info import Limits, OperatorLabels, look_around
from farloop.wire.machine_info import Inventory, Nic

pytestmark = pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever would touch a socket says ok."""
    for check in ("port", "wall_clock", "_coordinator"):
        monkeypatch.setattr(doctor, check, lambda *_: ok("network", "not tried"))
    monkeypatch.setattr(doctor, "_seen", lambda *_: None)
    monkeypatch.setattr(doctor, "round_trip_s", lambda *_: None)


def run_toml(folder: Path, run: str = "", coordinator: str = "") -> Path:
    path = folder / "run.toml"
    data, state = "[data]\nmax_bytes = 300000\n", "[coordinator]\nstate_dir = 's'\n"
    path.write_text(f"[run]\nmodel = 'nano'\n{run}\n{data}{state}{coordinator}\n")
    return path


def found(path: Path | None) -> dict[str, Finding]:
    return {finding.what: finding for finding in examine(path, flags=[], environ={}, url="")}


def test_without_a_file_the_machine_is_looked_at() -> None:
    findings = found(None)
    assert {"python", "libraries", "cpu", "gpu", "clock", "disk", "card", "site", "files"} <= findings.keys()
    assert "torch" in findings["libraries"].detail
    assert all(finding.fix for finding in findings.values() if finding.level != "ok")


def test_a_good_run_has_nothing_that_fails(tmp_path: Path) -> None:
    findings = found(run_toml(tmp_path))
    assert [finding for finding in findings.values() if finding.level == "fail"] == []
    assert "fingerprint" in findings["run"].detail
    assert findings["keys"].detail == "none, and none are needed on loopback"


def test_a_wrong_file_is_a_finding_and_the_machine_is_still_looked_at(tmp_path: Path) -> None:
    findings = found(tmp_path / "x.toml")
    assert findings["settings"].level == "fail"
    assert findings["python"].level == "ok"


def test_a_run_that_cannot_be_is_a_finding_beside_the_others(tmp_path: Path) -> None:
    findings = found(run_toml(tmp_path, run="tau = 99"))
    assert findings["run"].level == "fail"
    assert "[run] tau: 99" in findings["run"].detail
    assert findings["disk"].level != "fail"


def keyed(folder: Path) -> Path:
    write_pair(folder, "a")
    write_pair(folder, "c")
    path = folder / "node.toml"
    path.write_text("[node]\nname = 'a'\nkey = 'a.key'\nserver_key = 'c.pub'\n[data]\nmax_bytes = 300000\n")
    return path


def test_good_keys_are_said_to_be_there(tmp_path: Path) -> None:
    findings = found(keyed(tmp_path))
    assert findings["secret key"] == ok("secret key", str(tmp_path / "a.key"))
    assert findings["server key"].level == "ok"


def test_a_secret_that_is_open_to_others_fails_with_the_command_that_mends_it(tmp_path: Path) -> None:
    path = keyed(tmp_path)
    (tmp_path / "a.key").chmod(0o644)
    finding = found(path)["secret key"]
    assert finding.level == "fail"
    assert finding.fix == f"run: chmod 600 {tmp_path / 'a.key'}"


def test_an_allow_list_with_fewer_keys_than_nodes_is_a_warning(tmp_path: Path) -> None:
    write_pair(tmp_path, "c")
    write_pair(tmp_path / "allow", "a")
    finding = found(run_toml(tmp_path, coordinator="key = 'c.key'\nallow = 'allow'"))["allow list"]
    assert (finding.level, finding.detail) == ("warn", f"{tmp_path / 'allow'}: a")
    assert "waits for 2 nodes" in finding.fix


def test_data_that_is_not_there_fails(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text("[node]\nname = 'a'\n[data]\npath = 'nowhere'\n")
    finding = found(path)["data"]
    assert (finding.level, finding.detail) == ("fail", f"no file or folder {tmp_path / 'nowhere'}")


def test_room_is_judged_where_the_folder_will_be(tmp_path: Path) -> None:
    assert disk(tmp_path / "not" / "yet", needed_bytes=1).detail.endswith(str(tmp_path))
    assert disk(tmp_path, needed_bytes=1 << 60).level == "warn"
    (tmp_path / "file").touch()
    assert disk(tmp_path / "file" / "state").level == "fail"


def test_a_line_has_the_level_the_thing_and_the_mend(capsys: pytest.CaptureFixture[str]) -> None:
    findings = [ok("cpu", "2"), fail("port", "taken", "free it")]
    print_findings(findings, as_json=False)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [["ok", "cpu", "2"], ["fail", "port", "taken", "→", "free", "it"]]
    print_findings(findings, as_json=True)
    assert [row["level"] for row in json.loads(capsys.readouterr().out)] == ["ok", "fail"]


LIMITS = Limits(
    memory_bytes=1 << 34, memlock_bytes=None, nofile=65536, nofile_hard=65536, receive_bytes=6 << 20,
    send_bytes=4 << 20, congestion="cubic", allowed=("reno", "cubic"),
)  # fmt: skip


def link(source: str, target: str, bytes_per_s: float | None) -> LinkStatus:
    return {
        "from": source, "to": target, "rtt_s": 0.1, "rtt_median_s": 0.11, "bytes_per_s": bytes_per_s,
        "provenance": "probe", "measured_by": "probe", "age_s": 1.0, "why": "", "retransmit_ratio": None,
        "congestion": "", "suspect": False,
    }  # fmt: skip


def test_every_card_is_a_line_with_who_says_so(tmp_path: Path) -> None:
    made = Machine(tmp_path)
    made.netdev("eth0", speed=25_000, pci="0000:01:00.0")
    made.port("mlx5_0", layer="InfiniBand", verbs=False)
    told = look_around({"FARLOOP_LABELS": "site=oslo"}, OperatorLabels.of("", "", "eth0=10gbit"), root=tmp_path)
    port, card, site = machine(told)
    assert port.level == "warn" and "/dev/infiniband" in port.fix
    assert card.detail == "eth0: ethernet, 10 Gbit/s (operator), sysfs says 2.5e+10"
    assert card.data is not None and card.data["kind"] == "ethernet"
    assert site.detail == "oslo (annotation says so)"


def test_a_machine_without_cards_is_told_how_to_name_one() -> None:
    (card, _) = machine(Inventory())
    assert (card.level, card.what) == ("warn", "card") and "[node] nics" in card.fix


def test_few_files_are_a_warning_and_locked_memory_matters_with_rdma_alone() -> None:
    assert [finding.what for finding in limit_findings(LIMITS, Inventory())] == ["files"]
    few = replace(LIMITS, nofile=512, nofile_hard=1024)
    files, memlock = limit_findings(few, Inventory(nics=(Nic(name="mlx5_0:1", kind="infiniband"),)))
    assert files.level == "warn" and "ulimit -Hn 4096" in files.fix
    assert (
        "1,024 files" in files.detail and "soft limit 512" in files.detail and "takes 704 connections" in files.detail
    )
    assert memlock.detail.endswith("without bound")


def test_a_buffer_smaller_than_the_bandwidth_delay_product_caps_a_connection() -> None:
    """4 MiB and 100 ms are 336 Mbit/s, whatever the card can do."""
    up, down, _ = buffers(LIMITS, Way(rtt_s=0.1, up_bytes_per_s=125e6, down_bytes_per_s=25e6))
    assert up.level == "warn"
    assert up.fix == ("one connection gets 336 Mbit/s at most: raise the last number of net.ipv4.tcp_wmem to 25000000")
    assert down == ok("buffers", "tcp_rmem: 6.29 MB; the way holds 2.50 MB")


def test_what_nobody_measured_is_not_judged() -> None:
    assert buffers(LIMITS, Way()) == []
    near = buffers(LIMITS, Way(rtt_s=0.001))
    assert [finding.level for finding in near] == ["ok"]


def test_a_control_that_suffers_from_losses_is_named_on_a_long_way() -> None:
    (finding,) = buffers(LIMITS, Way(rtt_s=0.1))
    assert finding.level == "warn" and "tcp_allowed_congestion_control" in finding.fix
    allowed = replace(LIMITS, allowed=("cubic", "bbr"))
    (finding,) = buffers(allowed, Way(rtt_s=0.1))
    assert finding.fix == 'choose bbr: [node] congestion = "bbr"'


def test_the_coordinators_measurements_go_before_what_a_card_promises() -> None:
    told = Inventory(nics=(Nic(name="eth0", kind="ethernet", flow_bits_per_s=25e9, active=True),))
    seen: InventoryStatus = {"nodes": [], "links": [link("oslo", "coordinator", 1e6)]}
    way = way_of("oslo", seen, 0.1, told)
    assert (way.up_bytes_per_s, way.down_bytes_per_s) == (1e6, 25e9 / 8)
    assert way_of("oslo", None, None, Inventory()) == Way()


def test_what_the_coordinator_sees_of_a_node_is_told() -> None:
    (told,) = as_the_coordinator_sees_reached(False)
    assert told.level == "fail" and told.detail == "the coordinator does not reach tcp://198.51.100.7:7800"
    (told,) = as_the_coordinator_sees_reached(True)
    assert told.level == "ok" and not told.fix
    assert as_the_coordinator_sees_reached(None) == []
    assert as_the_coordinator_sees("oslo", None) == []


def as_the_coordinator_sees_reached(reachable: bool | None) -> list[Finding]:
    node: Any = {"name": "oslo", "address": "tcp://198.51.100.7:7800", "reachable": reachable, "nics": []}
    seen: InventoryStatus = {
        "nodes": [node],
        "links": [link("bergen", "coordinator", 1e6), link("oslo", "coordinator", None)],
    }
    return list(as_the_coordinator_sees("oslo", seen))


def test_a_link_is_a_line_of_its_own() -> None:
    seen: InventoryStatus = {"nodes": [], "links": [link("oslo", "coordinator", 25e6)]}
    assert as_the_coordinator_sees("oslo", seen) == []  # no such node
    assert rate_text(8 * 25e6) == "200 Mbit/s" and rate_text(25e9) == "25 Gbit/s" and rate_text(64e3) == "64 kbit/s"
