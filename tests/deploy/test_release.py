"""What `make release` leaves in dist/: it installs, runs, has what it needs, and says what it is made of."""

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.deploy, pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]

ROOMS = (
    "algo",
    "bench",
    "chaos",
    "cli",
    "config",
    "coordinator",
    "monitoring",
    "node",
    "plots",
    "quant",
    "runtime",
    "sim",
    "wire",
)


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a released tree: what git knows, with nothing installed yet."""
    tree = tmp_path_factory.mktemp("release") / "tree"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    subprocess.run(["git", "init", "--quiet"], cwd=tree, check=True)
    probe = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", tree.parent / "probe", "xxhash"]
    if subprocess.run(probe, capture_output=True).returncode != 0:
        pytest.skip("pip reaches no index to install from")
    ended = subprocess.run(
        ["make", "release", f"PYTHON={sys.executable}"], cwd=tree, capture_output=True, text=True, timeout=1700
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    yield tree
    shutil.rmtree(tree)


def test_the_wheel_has_what_it_needs_and_no_tests(released: Path) -> None:
    (wheel,) = (released / "dist").glob("*.whl")
    assert wheel.name == f"farloop-{VERSION}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"farloop/{room}/py.typed" for room in ROOMS} <= names
    assert {f"farloop/monitoring/page.{kind}" for kind in ("css", "html", "js")} <= names
    assert "farloop/cli/report.html" in names
    assert {"farloop/sim/scenarios/failures.toml", f"farloop-{VERSION}.dist-info/licenses/LICENSE"} <= names
    assert not [name for name in names if re.search(r"(^|/)(tests?|docs|docker|k8s|examples)/", name)]
    packages = [path.parent for room in ROOMS for path in (ROOT / room).rglob("__init__.py")]
    here = {path.relative_to(ROOT).as_posix() for package in packages for path in package.glob("*.py")}
    assert "monitoring/page.py" in here and "monitoring/dashboards/pages.py" not in here, (
        "dashboards are made in the tree"
    )
    assert {f"farloop/{name}" for name in here} == {name for name in names if name.endswith(".py")}


def test_the_sdist_has_the_sources_and_no_tests(released: Path) -> None:
    (sdist,) = (released / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "constraints.txt", "pyproject.toml", "examples/run.toml"} <= names
    assert not [name for name in names if name.startswith("tests")]


def test_what_is_installed_runs_and_types_are_seen(released: Path, tmp_path: Path) -> None:
    fresh = released / "build/fresh/bin"
    said = subprocess.run([fresh / "farloop", "--version"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == f"farloop {VERSION}"
    methods = subprocess.run([fresh / "farloop", "methods"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "streaming" in methods.stdout
    scenarios = [fresh / "farloop", "simulate", "run", "--list"]
    assert "failures" in subprocess.run(scenarios, cwd=tmp_path, capture_output=True, text=True, check=True).stdout


def test_the_bill_of_materials_names_every_package_with_its_version(released: Path) -> None:
    bill = json.loads((released / f"dist/farloop-{VERSION}.cdx.json").read_text(encoding="utf-8"))
    assert bill["bomFormat"] == "CycloneDX"
    found = {one["name"].lower(): one["version"] for one in bill["components"]}
    assert {"torch", "pyzmq", "msgpack", "safetensors"} <= set(found)
    assert "pytest" not in found
    pins = dict(
        line.lower().split("==")
        for line in (released / f"dist/farloop-{VERSION}.constraints.txt").read_text(encoding="utf-8").splitlines()
        if "==" in line
    )
    for name, version in found.items():
        if name in pins:
            assert version.partition("+")[0] == pins[name], name


def test_the_sums_are_those_of_the_files(released: Path) -> None:
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=released / "dist", check=True)


def test_a_tag_that_says_another_version_is_refused(released: Path) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "-m", "x"], cwd=released, check=True)
    subprocess.run([*git, "tag", "v9.9.9"], cwd=released, check=True)
    ended = subprocess.run(
        ["make", "release", f"PYTHON={sys.executable}"], cwd=released, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode != 0 and "v9.9.9" in ended.stderr
