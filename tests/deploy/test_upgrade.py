"""Two revisions of farloop in one run, as while it is upgraded: real processes of both, on loopback.

The older is the newest tag v* before this commit, or `SINCE` while there is none; FARLOOP_UPGRADE_FROM names another
revision. It is installed under a version of its own into an environment over this one's packages.
"""

import importlib.util
import io
import os
import re
import signal
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from loopback import FARLOOP, PACED, Daemon, NewRun, Run, assert_all_agree, further_than, new_run  # noqa: F401 - a fixture
from test_standby import Pair
from toolbox import ROOT, run

from farloop.monitoring.status import Status
from farloop.monitoring.status_summary import version_lines
from farloop.runtime.version import version_of

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(600)]

SINCE = "4c1d5165a566dc24f578221fe48f1118887b3eaa"
OLD = "0.0.1"  # the version that the older one says it has


def older_revision() -> str:
    """Skips the test where the history is not there."""
    if (named := os.environ.get("FARLOOP_UPGRADE_FROM")) is None:
        words = ("--list", "v*", "--merged", "HEAD", "--no-contains", "HEAD", "--sort=-version:refname")
        tags = run("git", "tag", *words, cwd=ROOT, code=None).split()
        named = tags[0] if tags else SINCE
    if subprocess.run(["git", "cat-file", "-e", f"{named}^{{commit}}"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip(f"the history of this checkout has no {named}")
    return named


@pytest.fixture(scope="module")
def old_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("old") / "tree"
    archive = subprocess.run(["git", "archive", older_revision()], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(tree, filter="data")
    project = tree / "pyproject.toml"
    project.write_text(re.sub(r'(?m)^version = ".*"$', f'version = "{OLD}"', project.read_text(), count=1))
    return tree


@pytest.fixture(scope="module")
def old(old_tree: Path) -> Path:
    """The older command `farloop`."""
    venv, dist = old_tree.parent / "venv", old_tree.parent / "dist"
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", dist, old_tree)
    (wheel,), (site,) = dist.glob("*.whl"), (venv / "lib").glob("python*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)
    here = {str(Path(importlib.util.find_spec(name).origin).parents[1]) for name in ("torch", "zmq")}  # type: ignore[union-attr, arg-type]
    (site / "dependencies.pth").write_text("".join(f"{folder}\n" for folder in sorted(here)))
    farloop = venv / "bin" / "farloop"
    farloop.write_text(f"#!{venv / 'bin' / 'python'}\nfrom farloop.cli.main import main\nmain()\n")
    farloop.chmod(0o755)
    assert run(farloop, "--version", cwd=venv).strip() == f"farloop {OLD}"
    return farloop


def test_settings_that_the_older_one_shipped_are_accepted(old_tree: Path) -> None:
    for name in ("run.toml", "node-a.toml"):
        run(sys.executable, "-m", "farloop.cli.main", "config", "check", old_tree / "examples" / name)


def commits(run: Run, before: Status | None = None) -> Status:
    """Wait until every fragment was committed twice more with both nodes' work."""

    def both(status: Status) -> bool:
        further = min(status["versions"]) >= 2 if before is None else further_than(status, before)
        return further and all(window["merged"] == ["m", "n"] for window in status["windows"])

    once = run.until("windows with both nodes commit", both)
    return run.until("they commit again", lambda status: further_than(status, once) and both(status))


def restarted(run: Run, coordinator: Daemon) -> Daemon:
    coordinator.signal(signal.SIGTERM)
    assert run.until_ended(coordinator) == 0
    return run.start_coordinator()


def test_either_coordinator_goes_on_with_the_others_state_and_either_node(new_run: NewRun, old: Path) -> None:  # noqa: F811
    """An older coordinator begins a run with a node of each version; a newer one goes on, and the older again."""
    run = new_run(steps=100_000, **PACED)
    run.programs = {"coordinator": old, "node-m": old}
    coordinator = run.start_coordinator()
    run.start_metronome("n", pace_s=0.05)
    run.start_node("m")
    status = commits(run)
    for program in (None, old):
        run.programs = {"coordinator": program} if program else {}
        coordinator = restarted(run, coordinator)
        status = commits(run, before=status)
        if program is None:
            (line,) = version_lines(status)
            assert f"the coordinator runs farloop {version_of()}" in line and line.endswith(" at m")
    steps = int(status["position"]) + 100
    assert (
        run.until_ended(run.start("set", *FARLOOP, "run", "set", f"steps={steps}", "--state", str(run.state_dir))) == 0
    ), run.logs()
    run.hurry()
    assert_all_agree(run, run.until_done(), "m", "n")


def test_coordinators_of_unequal_versions_take_over_from_each_other(new_run: NewRun, old: Path) -> None:  # noqa: F811
    """The older leads and is killed; the newer goes on, lets the older stand by, and hands over to it in order."""
    pair = Pair(new_run(steps=100_000, **PACED))
    pair.run.programs = {"a": old, "node-m": old}
    pair.begin()
    pair.start_nodes()
    pair.until_in_sync("b")
    before = commits(pair.run)
    pair.daemons["a"].kill()
    before = pair.goes_on_at("b", before)
    pair.start("a")
    status = pair.until_in_sync("a")
    assert status["standby"]["farloop"]["a"] in (OLD, "")
    pair.daemons["b"].signal(signal.SIGTERM)
    assert pair.run.until_ended(pair.daemons["b"]) == 0
    pair.goes_on_at("a", before)
