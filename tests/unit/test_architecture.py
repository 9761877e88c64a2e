"""The shape of the tree: which room may import which, what may stand in one place only, and what is packaged."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FLOORS = {
    "cli": 8,
    "plots": 7,
    "bench": 6,
    "chaos": 6,
    "config": 5,
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


ROOMS = (
    "algo",
    "quant",
    "wire",
    "node",
    "coordinator",
    "sim",
    "config",
    "chaos",
    "bench",
    "plots",
    "cli",
    "monitoring",
)
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


def test_no_modules_import_one_another_in_a_circle() -> None:
    """Imports inside functions and for type checkers count: they would only hide the circle."""
    modules = {f"farloop.{name_of(path)}": path for path in ALL if path.name != "__init__.py"}
    TopologicalSorter({name: {*imports(path)} & modules.keys() - {name} for name, path in modules.items()}).prepare()


@pytest.mark.parametrize("path", sources("wire"), ids=name_of)
def test_the_wire_needs_little(path: Path) -> None:
    for module in imports(path):
        top = module.partition(".")[0]
        allowed = top in WIRE_MAY_USE or top in sys.stdlib_module_names
        assert allowed or module.startswith(("farloop.wire", "farloop.algo.spec")) or module == "farloop.algo"


def test_the_spec_and_the_endpoint_need_the_standard_library_alone() -> None:
    pure = [ROOT / f"algo/{name}.py" for name in ("spec", "schedule", "validation", "outer_settings")]
    pure += [ROOT / f"algo/{name}.py" for name in ("weights", "bit_allocation", "error_feedback")]
    ours = [path for path in sources("monitoring") if path.parent.name != "dashboards"]  # a tool of its own
    for path in [*pure, *ours]:
        for module in imports(path):
            top = module.partition(".")[0]
            known = top in sys.stdlib_module_names or top == "_typeshed"  # the latter exists for type checkers alone
            assert known or module.startswith(("farloop.algo", "farloop.monitoring"))


@pytest.mark.parametrize(
    ("package", "places"),
    [
        # A storm's peers break what a session keeps, and its referee reads what the product wrote: both without it.
        ("zmq", {"node/zmq_dealer.py", "node/pipeline/link.py", "coordinator/net/router.py", "chaos/lying_peers.py"}),
        ("msgpack", {"wire/messages.py", "chaos/journal_referee.py"}),
        ("obstore", {"coordinator/storage/copies.py"}),
        ("prometheus_client", {"node/metrics.py", "coordinator/observe/metrics.py"}),
        ("grafana_foundation_sdk", {"monitoring/dashboards/generate.py", "monitoring/dashboards/panels.py"}),
        ("triton", {path.relative_to(ROOT).as_posix() for path in sources("quant/kernels/gpu")}),
    ],
)
def test_some_packages_are_used_in_one_place_only(package: str, places: set[str]) -> None:
    assert users_of(package) <= places


def test_uvloop_and_signals_belong_to_the_daemons_and_the_command_line() -> None:
    for package in ("uvloop", "signal"):
        assert all(user.startswith(("node/", "coordinator/", "chaos/", "cli/")) for user in users_of(package))


def test_the_environment_is_read_where_settings_come_from() -> None:
    allowed = {"node/cluster.py"}  # torchrun's variables
    for path in ALL:
        place = path.relative_to(ROOT).as_posix()
        if "os.environ" in path.read_text() or "getenv" in path.read_text():
            assert place.startswith(("cli/", "config/", "chaos/")) or place in allowed, place


@pytest.mark.parametrize(
    "module",
    [
        "farloop.wire.session",
        "farloop.algo.schedule",
        "farloop.algo.methods",
        "farloop.algo.validation",
        "farloop.algo.bit_allocation",
        "farloop.algo.error_feedback",
        "farloop.node.machine",
        "farloop.node.pipeline.machine",
        "farloop.coordinator.decide.machine",
        "farloop.coordinator.decide.ledger",
        "farloop.coordinator.routing.plan",
    ],
)
def test_the_pure_rooms_do_not_load_torch(module: str) -> None:
    check = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


RUNS_CODE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle"}
"""Modules whose readers can be made to run code."""

PICKLES = {
    "read_pickle",
    "to_pickle",
    "allow_pickle",
    "broadcast_object_list",
    "scatter_object_list",
    "gather_object",
    "all_gather_object",
    "send_object_list",
    "recv_object_list",
    "unsafe_load",
    "full_load",
}
"""Names that pickle, or load what runs code, in whichever library they are."""


def pickling(source: str) -> list[str]:
    """What in a file pickles, or reads what can run code: `line: what`."""
    tree, found = ast.parse(source), []
    names = {  # what a module is called here: `import numpy as np` → np: numpy
        alias.asname or alias.name.partition(".")[0]: alias.name if alias.asname else alias.name.partition(".")[0]
        for part in ast.walk(tree)
        if isinstance(part, ast.Import)
        for alias in part.names
    }
    names |= {
        alias.asname or alias.name: f"{part.module}.{alias.name}"
        for part in ast.walk(tree)
        if isinstance(part, ast.ImportFrom) and part.module
        for alias in part.names
    }
    for part in ast.walk(tree):
        said: set[str] = set()
        if isinstance(part, ast.Import):
            said = {alias.name.partition(".")[0] for alias in part.names} & RUNS_CODE
        elif isinstance(part, ast.ImportFrom) and part.module:
            said = ({part.module.partition(".")[0]} & RUNS_CODE) | ({alias.name for alias in part.names} & PICKLES)
        elif isinstance(part, ast.Attribute):
            said = {part.attr} & PICKLES
        elif isinstance(part, ast.Call):
            said = _unsafe_call(part, names)
        found += [f"{getattr(part, 'lineno', 0)}: {what}" for what in sorted(said)]
    return found


def _unsafe_call(call: ast.Call, names: dict[str, str]) -> set[str]:
    """The call's function if it pickles with these arguments."""
    first, _, rest = ast.unparse(call.func).partition(".")
    function = f"{names.get(first, first)}.{rest}" if rest else names.get(first, first)
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    words = {name: value.value for name, value in given.items() if isinstance(value, ast.Constant)}
    match function:
        case "torch.save":  # a pickle inside, whatever is saved; safetensors is there
            return {function}
        case "torch.load" if words.get("weights_only") is not True:
            return {f"{function} without weights_only=True"}
        case "yaml.load" | "yaml.load_all" if "SafeLoader" not in ast.unparse(call):
            return {f"{function} without SafeLoader"}
        case "importlib.import_module" | "__import__" if call.args and isinstance(call.args[0], ast.Constant):
            return {str(call.args[0].value).partition(".")[0]} & RUNS_CODE
        case _:
            # numpy's load and save say no by themselves; a literal False says it again.
            return {"allow_pickle"} if "allow_pickle" in given and words.get("allow_pickle") is not False else set()


@pytest.mark.parametrize("path", [*ALL, *sources("tests", "examples")], ids=name_of)
def test_nothing_is_pickled(path: Path) -> None:
    """A file or a message of somebody else must be able to say things, never to do them."""
    assert pickling(path.read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "import _pickle as p",
        "from marshal import loads",
        "import shelve",
        "def f():\n    import joblib",
        "import dill as d",
        "import importlib\nimportlib.import_module('pickle')",
        "import torch\ntorch.load(path)",
        "import torch\ntorch.load(path, weights_only=False)",
        "import torch\ntorch.load(path, weights_only=flag)",
        "import torch as t\nt.load(path)",
        "from torch import load as fetch\nfetch(path)",
        "import torch\ntorch.save({}, path)",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "import numpy as np\nnp.load(path, allow_pickle=wanted)",
        "import yaml\nyaml.load(text)",
        "import yaml\nyaml.load(text, Loader=yaml.Loader)",
        "import yaml\nyaml.unsafe_load(text)",
        "import torch.distributed as dist\ndist.broadcast_object_list(things)",
        "from torch.distributed import all_gather_object",
    ],
)
def test_what_pickles_is_found(line: str) -> None:
    assert pickling(line)


@pytest.mark.parametrize(
    "line",
    [
        "import torch\ntorch.load(path, weights_only=True)",
        "import numpy as np\nnp.load(path)",
        "import numpy as np\nnp.load(path, allow_pickle=False)",
        "import yaml\nyaml.load(text, Loader=yaml.SafeLoader)",
        "import json\njson.load(file)",
        "'pickle.loads(this)'",
    ],
)
def test_what_does_not_pickle_is_let_be(line: str) -> None:
    assert not pickling(line)


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_a_file_is_one_sitting_long(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 800, "look twice: does this module have two jobs?"


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
    planners = {"round_after", "first_rounds", "opening_rounds", "first_windows", "h_at", "window_after", "num_rounds"}
    for path in sources("node"):
        called = {part.attr for part in ast.walk(ast.parse(path.read_text())) if isinstance(part, ast.Attribute)}
        called |= {module.rpartition(".")[2] for module in imports(path)}
        assert not called & planners, name_of(path)


PIPELINE_DECISIONS = ("machine", "routing", "layout", "messages")


def test_decisions_read_no_clock() -> None:
    decide = ("machine", "fragment_set", "send_schedule")
    pure = [f"node/{n}.py" for n in decide]
    pure += [path.relative_to(ROOT).as_posix() for path in sources("coordinator/decide")]
    pure += [f"node/pipeline/{n}.py" for n in PIPELINE_DECISIONS]
    pure += ["coordinator/observe/straggler_detector.py", "coordinator/net/link_table.py"]
    pure += [path.relative_to(ROOT).as_posix() for path in sources("wire", "algo", "sim", "coordinator/routing")]
    for place in pure:
        used = set(imports(ROOT / place))
        assert not used & {"time", "asyncio", "threading", "socket"}, place


INSIDE_A_SESSION = {
    "receive",
    "send",
    "send_blob",
    "push_blob",
    "expect",
    "cancel",
    "close",
    "events",
    "outgoing",
    "handle_timer",
    "next_timer",
    "speak",
    "echo",
}
"""What may raise, or changes a session."""


def test_the_coordinator_enters_a_session_by_one_door() -> None:
    """`SessionRouter.working_for` is where whatever goes wrong becomes the end of that session, and of no other."""
    found = {
        f"{path.name}: {ast.unparse(call.func)}"
        for path in sources("coordinator")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in INSIDE_A_SESSION
        and isinstance(call.func.value, ast.Attribute)
        and call.func.value.attr == "session"
    }
    assert {place.partition(":")[0] for place in found} <= {"router.py"}, found
