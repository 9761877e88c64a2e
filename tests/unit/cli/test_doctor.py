"""Findings about a machine and a file. Ports and connections are tried in the integration tests."""

import json
import os
from pathlib import Path

import pytest

from farloop.cli import doctor
from farloop.cli.doctor import Finding, disk, examine, print_findings
from farloop.cli.keys import write_pair

pytestmark = pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever would touch a socket says ok."""
    fine = Finding(level="ok", what="network", detail="not tried")
    monkeypatch.setattr(doctor, "port", lambda *_: fine)
    monkeypatch.setattr(doctor, "wall_clock", lambda *_: fine)
    monkeypatch.setattr(doctor, "_coordinator", lambda *_: fine)
    monkeypatch.setattr(doctor, "_seen", lambda *_: None)
    monkeypatch.setattr(doctor, "round_trip_s", lambda *_: None)


def found(path: Path | None) -> dict[str, Finding]:
    return {finding.what: finding for finding in examine(path, flags=[], environ={}, url="")}


def test_without_a_file_the_machine_is_looked_at() -> None:
    findings = found(None)
    assert {"python", "libraries", "cpu", "gpu", "clock", "disk", "card", "site", "files"} <= findings.keys()
    assert "torch" in findings["libraries"].detail
    assert all(finding.mend for finding in findings.values() if finding.level != "ok")


def test_a_good_run_has_nothing_that_fails(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[run]\nmodel = 'nano'\n[data]\nmax_bytes = 300000\n[coordinator]\nstate_dir = 's'\n")
    findings = found(path)
    assert [finding for finding in findings.values() if finding.level == "fail"] == []
    assert "fingerprint" in findings["run"].detail
    assert findings["keys"].detail == "none, and none are needed on loopback"


def test_a_wrong_file_is_a_finding_and_the_machine_is_still_looked_at(tmp_path: Path) -> None:
    findings = found(tmp_path / "x.toml")
    assert findings["settings"].level == "fail"
    assert findings["python"].level == "ok"


def test_a_run_that_cannot_be_is_a_finding_beside_the_others(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[run]\nmodel = 'nano'\ntau = 99\n[data]\nmax_bytes = 300000\n[coordinator]\nstate_dir = 's'\n")
    findings = found(path)
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
    assert findings["secret key"] == Finding(level="ok", what="secret key", detail=str(tmp_path / "a.key"))
    assert findings["server key"].level == "ok"


def test_a_secret_that_is_open_to_others_fails_with_the_command_that_mends_it(tmp_path: Path) -> None:
    path = keyed(tmp_path)
    (tmp_path / "a.key").chmod(0o644)
    finding = found(path)["secret key"]
    assert finding.level == "fail"
    assert finding.mend == f"run: chmod 600 {tmp_path / 'a.key'}"


def test_an_allow_list_with_fewer_keys_than_nodes_is_a_warning(tmp_path: Path) -> None:
    write_pair(tmp_path, "c")
    write_pair(tmp_path / "allow", "a")
    path = tmp_path / "run.toml"
    path.write_text(
        "[run]\nmodel = 'nano'\nnodes = 2\n[data]\nmax_bytes = 300000\n"
        "[coordinator]\nstate_dir = 's'\nkey = 'c.key'\nallow = 'allow'\n"
    )
    finding = found(path)["allow list"]
    assert (finding.level, finding.detail) == ("warn", f"{tmp_path / 'allow'}: a")
    assert "waits for 2 nodes" in finding.mend


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
    findings = [
        Finding(level="ok", what="cpu", detail="2"),
        Finding(level="fail", what="port", detail="taken", mend="free it"),
    ]
    print_findings(findings, as_json=False)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [["ok", "cpu", "2"], ["fail", "port", "taken", "→", "free", "it"]]
    print_findings(findings, as_json=True)
    assert [row["level"] for row in json.loads(capsys.readouterr().out)] == ["ok", "fail"]
