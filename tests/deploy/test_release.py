"""What `make release` leaves in dist/ installs, runs and says what it is made of; the site builds strictly."""

import importlib
import importlib.util
import json
import os
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
from toolbox import ROOT

sys.path.insert(0, str(ROOT / "docker"))
requirements = importlib.import_module("requirements")

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(1800)]

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]

ROOMS = ("algo", "cli", "config", "coordinator", "lab", "local", "monitoring", "node", "pipeline", "planner", "plots",
         "quant", "runtime", "sim", "wire")  # fmt: skip


def copied(to: Path) -> Path:
    """What git knows of the tree: a file that is there and not committed is no part of it."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)
    return to


def make_release(tree: Path) -> subprocess.CompletedProcess[str]:
    words = ["make", "release", f"PYTHON={sys.executable}"]
    return subprocess.run(words, cwd=tree, capture_output=True, text=True, timeout=1700)


def said_by(*words: str | Path, cwd: Path) -> str:
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a released tree, with nothing installed yet."""
    tree = copied(tmp_path_factory.mktemp("release") / "tree")
    subprocess.run(["git", "init", "--quiet"], cwd=tree, check=True)
    probe = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", tree.parent / "probe", "xxhash"]
    if subprocess.run(probe, capture_output=True).returncode != 0:
        pytest.skip("pip reaches no index to install from")
    ended = make_release(tree)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    yield tree
    shutil.rmtree(tree)


@pytest.mark.slow
def test_wheel_and_sdist_have_what_they_need_and_no_tests(released: Path) -> None:
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
    assert "monitoring/page.py" in here
    assert {f"farloop/{name}" for name in here} == {name for name in names if name.endswith(".py")}
    (sdist,) = (released / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "constraints.txt", "pyproject.toml", "examples/run.toml"} <= names
    assert not [name for name in names if name.startswith("tests")]


@pytest.mark.slow
def test_what_is_installed_runs_and_its_sums_are_those_of_the_files(released: Path, tmp_path: Path) -> None:
    farloop = released / "build/fresh/bin/farloop"
    assert said_by(farloop, "--version", cwd=tmp_path).strip() == f"farloop {VERSION}"
    assert "streaming" in said_by(farloop, "lab", "methods", cwd=tmp_path)
    assert "failures" in said_by(farloop, "simulate", "run", "--list", cwd=tmp_path)
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=released / "dist", check=True)


@pytest.mark.slow
def test_the_bill_of_materials_names_every_package_with_its_version(released: Path) -> None:
    bill = json.loads((released / f"dist/farloop-{VERSION}.cdx.json").read_text(encoding="utf-8"))
    assert bill["bomFormat"] == "CycloneDX"
    found = {one["name"].lower(): one["version"].partition("+")[0] for one in bill["components"]}
    assert {"torch", "pyzmq", "msgpack", "safetensors"} <= set(found) and "pytest" not in found
    text = (released / f"dist/farloop-{VERSION}.constraints.txt").read_text(encoding="utf-8")
    pins = dict(line.lower().split("==") for line in text.splitlines() if "==" in line)
    assert {name: found[name] for name in found.keys() & pins} == {name: pins[name] for name in found.keys() & pins}


@pytest.mark.slow
def test_a_tag_that_says_another_version_is_refused(released: Path) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "-m", "x"], cwd=released, check=True)
    subprocess.run([*git, "tag", "v9.9.9"], cwd=released, check=True)
    ended = make_release(released)
    assert ended.returncode != 0 and "v9.9.9" in ended.stderr


def test_a_signed_release_is_verified_as_the_page_says_and_a_changed_one_is_not(tmp_path: Path) -> None:
    (command,) = re.findall(r"^ssh-keygen -Y verify .*$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    dist = tmp_path / "dist"
    dist.mkdir()
    (dist / "farloop.whl").write_text("wheel")
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    (dist / "signers").write_text(f"farloop {key.with_suffix('.pub').read_text()}")
    (dist / "SHA256SUMS").write_text(said_by("sha256sum", "farloop.whl", cwd=dist))
    subprocess.run(["make", "--file", ROOT / "Makefile", "sign", f"SIGN_KEY={key}"], cwd=tmp_path, check=True)
    assert subprocess.run(command, shell=True, cwd=dist).returncode == 0
    (dist / "farloop.whl").write_text("another")
    assert subprocess.run(command, shell=True, cwd=dist).returncode != 0
    (dist / "SHA256SUMS").write_text(said_by("sha256sum", "farloop.whl", cwd=dist))
    assert subprocess.run(command, shell=True, cwd=dist).returncode != 0


@pytest.mark.parametrize("machine", requirements.MACHINES)
def test_every_pin_has_a_wheel_for_x86_and_arm_and_those_of_the_images_have_their_hashes(machine: str) -> None:
    try:
        found = requirements.hashes(machine, [f"{name}=={version}" for name, version in requirements.pins().items()])
    except subprocess.CalledProcessError as error:
        if "Temporary failure in name resolution" in error.stderr:
            pytest.skip("pip reaches no index")
        raise AssertionError(error.stderr[-3000:]) from error
    assert found.keys() == requirements.pins().keys()
    for line in (ROOT / "docker/requirements.txt").read_text(encoding="utf-8").splitlines()[1:]:
        assert f"--hash=sha256:{found[line.partition('==')[0]]}" in line.split(), line


# --- the site

needs_mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="mkdocs is missing: make docs installs it"
)


def build(tree: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Runs the command of `make docs`: its options decide whether a warning counts (under --quiet, none does)."""
    command = re.search(r"/mkdocs (build .*)$", (tree / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert command is not None
    words = [sys.executable, "-m", "mkdocs", *command[1].split(), "--site-dir", site]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(words, cwd=tree, env=env, capture_output=True, text=True, timeout=110)


@needs_mkdocs
def test_the_site_has_the_pages_that_lie_beside_what_they_are_about_and_fetches_nothing(tmp_path: Path) -> None:
    site, tree = tmp_path / "site", copied(tmp_path / "tree")
    (change,) = re.findall(r"^grep -rl https://farloop.*$", (ROOT / "docs/monitoring.md").read_text(), re.MULTILINE)
    subprocess.run(change, shell=True, cwd=tree, check=True)
    ended = build(tree, site)
    assert ended.returncode == 0, ended.stderr
    for rules in ("monitoring/alerts/farloop.yml", "k8s/components/monitoring/prometheusrule.yaml"):
        pages = re.findall(
            r"runbook_url: https://docs\.my\.org/farloop/(.*/)$", (tree / rules).read_text(), re.MULTILINE
        )
        assert len(pages) > 20 and all((site / page / "index.html").is_file() for page in pages)
    assert "farloop.example" not in (tree / "monitoring/dashboards/coordinator.json").read_text()
    for page in ("index.html", "k8s/index.html", "docker/index.html", "wire/index.html", "readme/index.html"):
        assert (site / page).is_file(), page
    assert "farloop keys new" in (site / "cli/index.html").read_text(encoding="utf-8")
    loop = (site / "examples/own_loop.py/index.html").read_text(encoding="utf-8")
    assert "class Mixer" in re.sub("<[^>]+>", "", loop)
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        text = page.read_text(encoding="utf-8")
        pattern = r'<(?:script|img|iframe)[^>]+src="([^"]+)"|<link[^>]+rel="stylesheet"[^>]+href="([^"]+)"'
        loaded = [one for pair in re.findall(pattern, text) for one in pair]
        assert not [one for one in loaded if one.startswith(("http:", "https:", "//"))], page


@needs_mkdocs
def test_a_link_that_leads_nowhere_stops_the_build(tmp_path: Path) -> None:
    tree = copied(tmp_path / "tree")
    page = tree / "docs/faq.md"
    whole = page.read_text(encoding="utf-8")
    for broken in ("[no page](nowhere.md)", "[no part](methods.md#nowhere)", "[no file](../algo/nowhere.py)"):
        page.write_text(f"{whole}\n{broken}\n", encoding="utf-8")
        ended = build(tree, tmp_path / "site")
        assert ended.returncode != 0 and "nowhere" in ended.stderr, broken


def test_an_uninstalled_wheel_leaves_nothing_and_an_editable_install_after_it_runs(tmp_path: Path) -> None:
    tree, venv = copied(tmp_path / "tree"), tmp_path / "venv"
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": ""}
    env.pop("NUMBA_CACHE_DIR", None)

    def run(*words: str | Path) -> None:
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

    run(sys.executable, "-m", "venv", venv)
    python = venv / "bin" / "python"
    pip = (python, "-m", "pip", "--disable-pip-version-check")
    (site,) = (venv / "lib").glob("python*/site-packages")
    (here,) = {str(Path(importlib.util.find_spec(name).origin).parents[1]) for name in ("numba", "setuptools")}  # type: ignore[union-attr, arg-type]
    (site / "dependencies.pth").write_text(f"{here}\n")  # all but farloop: its own .pth is not read from there
    run(*pip, "uninstall", "--quiet", "--yes", "setuptools")  # an old one comes with the environment
    run(*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path / "dist", tree)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel)
    kernels = (python, "-c", "from farloop.quant.kernels.dispatch import warm; warm(['q4'])")
    run(*kernels)
    assert list((tmp_path / "cache").rglob("*.nbi")), "kernels are kept in the user's cache"
    run(*pip, "uninstall", "--quiet", "--yes", "farloop")
    left = [str(path) for path in site.rglob("*") if "farloop" in path.parts or "farloop" in path.name]
    assert not left
    run(*pip, "install", "--quiet", "--no-deps", "--no-build-isolation", "--editable", tree)
    run(*kernels)
    run(venv / "bin" / "farloop", "lab", "codecs", "--no-measure")
