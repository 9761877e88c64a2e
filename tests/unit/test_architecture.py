"""The shape of the tree: which room may import which, what may stand in one place only, and what is packaged."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FLOORS = {
    "cli": 6,
    "bench": 5,
    "sim": 4,
    "node": 3,
    "coordinator": 3,
    "wire": 2,
    "algo": 1,
    "quant": 1,
    "algo.spec": 0,
    "monitoring": 0,
}
"""Imports run downwards only, and never between two rooms of one floor."""

WIRE_MAY_USE = {"msgpack", "pydantic", "xxhash"}


def sources(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert found, f"no sources in {folders}"
    return found


ROOMS = ("algo", "quant", "wire", "node", "coordinator", "sim", "bench", "cli", "monitoring")
ALL = sources(*ROOMS)


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, in full."""
    for part in ast.walk(ast.parse(path.read_text())):
        if isinstance(part, ast.Import):
            yield from (alias.name for alias in part.names)
        elif isinstance(part, ast.ImportFrom) and part.module:
            yield part.module
            yield from (f"{part.module}.{alias.name}" for alias in part.names)


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def floor_of(module: str) -> tuple[str, int]:
    """The room of a module (without the leading farloop) and its floor."""
    if module == "algo.spec" or module.startswith("algo.spec."):
        return "algo.spec", FLOORS["algo.spec"]
    room = module.partition(".")[0]
    return room, FLOORS[room]


def users_of(package: str) -> set[str]:
    """Files that import a package or anything in it."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in ALL
        if any(module == package or module.startswith(f"{package}.") for module in imports(path))
    }


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_imports_run_downwards_only(path: Path) -> None:
    room, floor = floor_of(name_of(path))
    for module in imports(path):
        if not module.startswith("farloop."):
            continue
        used, used_floor = floor_of(module.removeprefix("farloop."))
        assert used == room or used_floor < floor, f"{name_of(path)} (floor {floor}) imports {module}"


@pytest.mark.parametrize("path", sources("wire"), ids=name_of)
def test_the_wire_needs_little(path: Path) -> None:
    for module in imports(path):
        top = module.partition(".")[0]
        allowed = top in WIRE_MAY_USE or top in sys.stdlib_module_names
        assert allowed or module.startswith(("farloop.wire", "farloop.algo.spec")) or module == "farloop.algo"


def test_the_spec_and_the_endpoint_need_the_standard_library_alone() -> None:
    pure = [ROOT / f"algo/{name}.py" for name in ("spec", "schedule", "learning_rate", "schedule_check", "correction")]
    pure += [ROOT / f"algo/{name}.py" for name in ("weights", "bits", "residual")]
    for path in [*pure, *sources("monitoring")]:
        for module in imports(path):
            top = module.partition(".")[0]
            known = top in sys.stdlib_module_names or top == "_typeshed"  # the latter exists for type checkers alone
            assert known or module.startswith(("farloop.algo", "farloop.monitoring"))


@pytest.mark.parametrize(
    ("package", "places"),
    [
        ("zmq", {"node/link.py", "coordinator/link.py"}),
        ("msgpack", {"wire/messages.py"}),
        ("prometheus_client", {"node/metrics.py", "coordinator/metrics.py"}),
        ("triton", {path.relative_to(ROOT).as_posix() for path in sources("quant/kernels/gpu")}),
    ],
)
def test_some_packages_are_used_in_one_place_only(package: str, places: set[str]) -> None:
    assert users_of(package) <= places


def test_uvloop_and_signals_belong_to_the_daemons_and_the_command_line() -> None:
    for package in ("uvloop", "signal"):
        assert all(user.startswith(("node/", "coordinator/", "cli/")) for user in users_of(package))


def test_the_environment_is_read_where_settings_come_from() -> None:
    allowed = {"node/cluster.py"}  # torchrun's variables
    for path in ALL:
        place = path.relative_to(ROOT).as_posix()
        if "os.environ" in path.read_text() or "getenv" in path.read_text():
            assert place.startswith("cli/") or place in allowed, place


@pytest.mark.parametrize(
    "module",
    [
        "farloop.wire.session",
        "farloop.algo.schedule",
        "farloop.algo.methods",
        "farloop.algo.bits",
        "farloop.algo.residual",
        "farloop.node.machine",
        "farloop.coordinator.machine",
        "farloop.coordinator.ledger",
    ],
)
def test_the_pure_rooms_do_not_load_torch(module: str) -> None:
    check = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_nothing_is_pickled(path: Path) -> None:
    used = set(imports(path))
    assert not used & {"pickle", "dill", "cloudpickle", "marshal", "shelve"}
    text = path.read_text()
    assert "torch.load(" not in text and "broadcast_object" not in text and "all_gather_object" not in text


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_a_file_is_one_sitting_long(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 450, "look twice: does this room have two jobs?"


def test_the_packages_are_those_of_the_tree() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    here = {
        "farloop." + ".".join(path.parent.relative_to(ROOT).parts)
        for room in ROOMS
        for path in (ROOT / room).rglob("__init__.py")
    }
    assert set(settings["packages"]) == here
    assert not (ROOT / "__init__.py").exists() and not (ROOT / "farloop").exists()


def test_every_room_says_what_it_is_for() -> None:
    for path in ALL:
        assert ast.get_docstring(ast.parse(path.read_text())), f"{name_of(path)} has no docstring"


def test_rounds_are_planned_by_the_coordinator_alone() -> None:
    """C33: a node is told how long a round is (protocol B); its learning rate it may follow by itself."""
    planners = {"round_after", "first_rounds", "first_windows", "h_at", "window_after", "num_rounds"}
    for path in sources("node"):
        called = {part.attr for part in ast.walk(ast.parse(path.read_text())) if isinstance(part, ast.Attribute)}
        called |= {module.rpartition(".")[2] for module in imports(path)}
        assert not called & planners, name_of(path)


def test_decisions_read_no_clock() -> None:
    decide = ("machine", "fragment_state", "turns", "merging", "outcomes", "waiting", "finishing")
    pure = [f"node/{n}.py" for n in decide]
    pure += [f"coordinator/{n}.py" for n in ("machine", "membership", "decisions", "ledger", "roster")]
    pure += ["coordinator/windows.py", "coordinator/leases.py", "coordinator/admission.py"]
    pure += [path.relative_to(ROOT).as_posix() for path in sources("wire", "algo", "sim")]
    for place in pure:
        used = set(imports(ROOT / place))
        assert not used & {"time", "asyncio", "threading", "socket"}, place
