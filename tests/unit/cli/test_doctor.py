"""`farloop doctor`: findings about a machine, its network and a file. Dialling is tried in the integration tests."""

import importlib.metadata
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import statuses
from machines import Machine

from farloop.cli import doctor
from farloop.cli.daemons import open_run
from farloop.cli.doctor import Way, as_the_coordinator_sees, buffers, disk, examine, limit_findings, machine, way_of
from farloop.cli.doctor import _coordinator as dial
from farloop.cli.findings import Finding, fail, ok, print_findings
from farloop.cli.keys import write_pair
from farloop.cli.status import fetch, saved
from farloop.config.exit_codes import CommandError
from farloop.config.run_spec import planned
from farloop.config.settings import load_run
from farloop.coordinator.errors import NoFolder
from farloop.coordinator.leadership import Term, term_store
from farloop.monitoring.addresses import parse_tcp
from farloop.monitoring.status import InventoryStatus, LinkStatus
from farloop.node.machine_info import Limits, read_inventory
from farloop.runtime.version import version_of
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


def test_of_several_coordinators_the_record_is_read(tmp_path: Path) -> None:
    record = f"leads_by = 'file://{tmp_path}/r'\nmirror = 'tcp://127.0.0.1:0'\npeers = 'tcp://127.0.0.1:9'"
    path = run_toml(tmp_path, coordinator=record)
    assert found(path)["record"].detail.endswith("nobody has led yet")
    term = Term(run="1", leader="a", process="1", term=7, address="", in_sync=("b",))
    assert term_store(f"file://{tmp_path}/r").replace(term, 0)
    record = found(path)["record"]
    assert (record.level, record.detail.partition("/r: ")[2]) == (
        "warn",
        "a leads since term 7, in sync with it: b; no leader answers at tcp://127.0.0.1:9",
    )
    (tmp_path / "r" / "leader" / "00000002.json").write_text("{}")
    assert found(path)["record"].level == "fail"


def test_a_wrong_file_is_a_finding_beside_the_others(tmp_path: Path) -> None:
    findings = found(tmp_path / "x.toml")
    assert (findings["settings"].level, findings["python"].level) == ("fail", "ok")
    findings = found(run_toml(tmp_path, run="tau = 99"))
    assert findings["run"].level == "fail" and "[run] tau: expected 0 to" in findings["run"].detail
    assert findings["disk"].level != "fail"
    (tmp_path / "node.toml").write_text("[node]\nname = 'a'\n[data]\npath = 'nowhere'\n")
    data = found(tmp_path / "node.toml")["data"]
    assert (data.level, data.detail) == ("fail", f"no file or folder {tmp_path / 'nowhere'}")


def test_the_end_of_a_run_is_named_without_a_coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a state folder or a node's own record shows it."""
    path, told, state = run_toml(tmp_path), statuses.finished(), tmp_path / "s"
    with pytest.raises(NoFolder, match="there is no such folder; give the coordinator's state_dir"):
        saved(state)
    state.mkdir()
    with pytest.raises(CommandError, match=r"no coordinator runs on .*, and none has ended there in order \(status"):
        saved(state)
    (state / "status.json").write_text(json.dumps(told))
    assert saved(state) == told
    assert found(path)["state"].detail.startswith(f"run {told['run']['name']} is finished: {state}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CommandError, match=r"--url; if it says none, .* pages are off: farloop status --state DIR"):
        fetch("127.0.0.1:1")
    state.rename("state")
    with pytest.raises(CommandError, match=r"no coordinator at .* is finished: farloop status --state state"):
        fetch("127.0.0.1:1")
    monkeypatch.setattr(doctor, "connect", lambda address: "connection refused")
    (tmp_path / "node.json").write_text(
        '{"incarnation": 1, "epoch": 1, "run": "", "finished": "demo (fingerprint 12)"}'
    )
    levels = {folder: dial(parse_tcp("tcp://127.0.0.1:1"), folder) for folder in (tmp_path, state)}
    assert [finding.level for finding in levels.values()] == ["ok", "fail"]
    assert "run demo (fingerprint 12) is finished" in levels[tmp_path].detail


def test_the_folder_of_another_run_fails_as_a_start_would_also_when_that_is_finished(tmp_path: Path) -> None:
    path, state = run_toml(tmp_path), tmp_path / "s"
    open_run(state, planned(load_run(path, flags=[], environ={}))).close()
    assert "state" not in found(path)
    (state / "status.json").write_text(json.dumps(statuses.finished()))
    assert found(path)["state"].level == "ok"
    other = found(run_toml(tmp_path, run="seed = 5"))["state"]
    assert other.level == "fail" and f"{state} holds another run (fingerprint " in other.detail
    assert "seed was 0, is 5" in other.detail and "a folder of its own" in other.fix


def test_a_secret_that_is_open_to_others_fails_with_the_command_that_mends_it(tmp_path: Path) -> None:
    for name in "ac":
        write_pair(tmp_path, name)
    path, secret = tmp_path / "node.toml", tmp_path / "a.key"
    path.write_text("[node]\nname = 'a'\nkey = 'a.key'\nserver_key = 'c.pub'\n[data]\nmax_bytes = 300000\n")
    findings = found(path)
    assert findings["secret key"] == ok("secret key", str(secret)) and findings["server key"].level == "ok"
    path.write_text(path.read_text().replace("c.pub", "a.pub"))
    own = found(path)["server key"]
    assert own.level == "fail" and "a.pub is this node's own public key" in own.detail
    path.write_text(path.read_text().replace("a.pub", "c.pub"))
    secret.chmod(0o644)
    finding = found(path)["secret key"]
    assert (finding.level, finding.fix) == ("fail", f"run: chmod 600 {secret}")
    write_pair(tmp_path / "allow", "a")
    finding = found(run_toml(tmp_path, coordinator="key = 'c.key'\nallow = 'allow'"))["allow list"]
    assert (finding.level, finding.detail) == ("warn", f"{tmp_path / 'allow'}: a")
    assert "waits for 2 nodes" in finding.fix


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


# --- cards, limits and buffers

LIMITS = Limits(
    memory_bytes=1 << 34, memlock_bytes=None, nofile=65536, nofile_hard=65536, receive_bytes=6 << 20,
    send_bytes=4 << 20, congestion="cubic", allowed=("reno", "cubic"),
)  # fmt: skip


def test_every_card_is_a_line_with_who_says_so(tmp_path: Path) -> None:
    made = Machine(tmp_path)
    made.netdev("eth0", speed=25_000, pci="0000:01:00.0")
    made.port("mlx5_0", layer="InfiniBand", verbs=False)
    told = read_inventory({"FARLOOP_LABELS": "site=oslo"}, "", "", "eth0=10gbit", root=tmp_path)
    port, card, site = machine(told)
    assert port.level == "warn" and "/dev/infiniband" in port.fix
    assert card.detail == "eth0: ethernet, 10 Gbit/s (operator), sysfs says 2.5e+10"
    assert card.data is not None and card.data["kind"] == "ethernet"
    assert site.detail == "oslo (annotation says so)"
    (card, _) = machine(Inventory())
    assert (card.level, card.what) == ("warn", "card") and "[node] nics" in card.fix


def test_few_files_are_a_warning_and_locked_memory_matters_with_rdma_alone() -> None:
    assert [finding.what for finding in limit_findings(LIMITS, Inventory())] == ["files"]
    few = replace(LIMITS, nofile=512, nofile_hard=1024)
    files, memlock = limit_findings(few, Inventory(nics=(Nic(name="mlx5_0:1", kind="infiniband"),)))
    assert files.level == "warn" and "ulimit -Hn 4096" in files.fix
    assert all(words in files.detail for words in ("1,024 files", "soft limit 512", "takes 704 connections"))
    assert memlock.detail.endswith("without bound")


def test_a_buffer_smaller_than_the_bandwidth_delay_product_caps_a_connection() -> None:
    """4 MiB and 100 ms are 336 Mbit/s, whatever the card can do. What was not measured is not judged."""
    up, down, _ = buffers(LIMITS, Way(rtt_s=0.1, up_bytes_per_s=125e6, down_bytes_per_s=25e6))
    assert up.level == "warn"
    assert up.fix == "one connection gets 336 Mbit/s at most: raise the last number of net.ipv4.tcp_wmem to 25000000"
    assert down == ok("buffers", "tcp_rmem: 6.29 MB; the link needs 2.50 MB")
    assert buffers(LIMITS, Way()) == []
    assert [finding.level for finding in buffers(LIMITS, Way(rtt_s=0.001))] == ["ok"]


def test_a_control_that_suffers_from_losses_is_named_on_a_long_way() -> None:
    (finding,) = buffers(LIMITS, Way(rtt_s=0.1))
    assert finding.level == "warn" and "tcp_allowed_congestion_control" in finding.fix
    (finding,) = buffers(replace(LIMITS, allowed=("cubic", "bbr")), Way(rtt_s=0.1))
    assert finding.fix == 'choose bbr: [node] congestion = "bbr"'


# --- what a coordinator knows


def link(source: str, target: str, bytes_per_s: float | None) -> LinkStatus:
    return {
        "from": source, "to": target, "rtt_s": 0.1, "rtt_median_s": 0.11, "bytes_per_s": bytes_per_s,
        "provenance": "probe", "measured_by": "probe", "age_s": 1.0, "why": "", "retransmit_ratio": None,
        "congestion": "", "suspect": False,
    }  # fmt: skip


def test_the_coordinators_measurements_go_before_what_a_card_promises() -> None:
    told = Inventory(nics=(Nic(name="eth0", kind="ethernet", flow_bits_per_s=25e9, active=True),))
    seen: InventoryStatus = {"nodes": [], "links": [link("oslo", "coordinator", 1e6)]}
    way = way_of("oslo", seen, 0.1, told)
    assert (way.up_bytes_per_s, way.down_bytes_per_s) == (1e6, 25e9 / 8)
    assert way_of("oslo", None, None, Inventory()) == Way()
    assert as_the_coordinator_sees("oslo", None) == as_the_coordinator_sees("oslo", seen) == []


def test_what_the_coordinator_sees_of_a_node_is_told() -> None:
    node: Any = {"name": "oslo", "address": "tcp://198.51.100.7:7800", "nics": []}
    links = [link("bergen", "coordinator", 1e6), link("oslo", "coordinator", None), link("oslo", "bergen", 25e6)]
    for reachable, told in (
        (False, [("fail", "the coordinator does not reach tcp://198.51.100.7:7800")]),
        (True, [("ok", "the coordinator reaches tcp://198.51.100.7:7800")]),
        (None, []),
    ):
        found = as_the_coordinator_sees("oslo", {"nodes": [{**node, "reachable": reachable}], "links": links})
        told = [*told, ("ok", "oslo → bergen: 200 Mbit/s by probe, round trip 100.0 ms")]
        assert [(finding.level, finding.detail) for finding in found] == told


def test_a_package_without_metadata_has_no_version() -> None:
    """A tree that runs by its path, as `make gpu SITE=…` runs it, is not installed."""
    assert version_of("torch") == importlib.metadata.version("torch")
    assert version_of("farloop-of-a-path") == "(not installed)"
