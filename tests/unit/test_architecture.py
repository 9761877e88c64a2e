"""The shape of the tree: import directions, packages with a single home, and what is packaged. One loop per rule."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

FLOORS = {
    "lab": 10,
    "cli": 9,
    "plots": 8,
    "local": 7,
    "config": 6,
    "sim": 5,
    "pipeline": 4,
    "node": 3,
    "coordinator": 3,
    "wire": 2,
    "planner": 2,
    "algo": 1,
    "quant": 1,
    "algo.spec": 0,
    "monitoring": 0,
    "runtime": 0,
}
"""Imports run downwards only, and never between two packages of one floor."""

SANS_IO = (
    *(f"farloop.algo.{name}" for name in ("schedule", "methods", "validation", "bit_allocation")),
    *("farloop.wire.session", "farloop.node.machine", "farloop.pipeline.machine"),
    *("farloop.coordinator.decide.machine", "farloop.coordinator.decide.ledger", "farloop.planner.plan"),
)
"""Modules that load no torch."""

CLOCKLESS = (
    *("coordinator/decide", "planner", "wire", "algo", "sim"),
    *(f"node/{name}.py" for name in ("machine", "fragment_set", "send_schedule")),
    *(f"pipeline/{name}.py" for name in ("machine", "routing", "layout", "messages")),
    *(
        f"coordinator/{name}.py"
        for name in ("observe/straggler_monitor", "net/link_table", "net/router", "net/sessions")
    ),
)
"""Decisions: `now` is an argument."""


def sources(*places: str) -> list[Path]:
    found = [
        path
        for place in places
        for path in ([ROOT / place] if place.endswith(".py") else sorted((ROOT / place).rglob("*.py")))
    ]
    assert found and all(path.exists() for path in found), places
    return found


ALL = sources(*(name for name in FLOORS if "." not in name))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> frozenset[str]:
    """Every module that a file imports, in full."""
    found = set[str]()
    for part in ast.walk(tree_of(path)):
        if isinstance(part, ast.Import):
            found |= {alias.name for alias in part.names}
        elif isinstance(part, ast.ImportFrom) and part.module:
            found |= {part.module, *(f"{part.module}.{alias.name}" for alias in part.names)}
    return frozenset(found)


def tops(path: Path) -> set[str]:
    """Packages that a file imports; farloop's own by their second name, as `farloop.wire`."""
    return {".".join(name.split(".")[: 2 if name.startswith("farloop.") else 1]) for name in imports(path)}


def place_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def package_of(module: str) -> str:
    """The package of a module without the leading farloop."""
    return "algo.spec" if f"{module}.".startswith(("algo.spec.", "algo.terms.")) else module.partition(".")[0]


def users_of(package: str) -> set[str]:
    """Files that import a package or anything in it."""
    return {place_of(path) for path in ALL if any(f"{name}.".startswith(f"{package}.") for name in imports(path))}


def test_imports_run_downwards_only() -> None:
    upwards = [
        f"{place_of(path)} imports {module}"
        for path in ALL
        for own in [package_of(place_of(path).removesuffix(".py").replace("/", "."))]
        for module in imports(path)
        if module.startswith("farloop.")
        for used in [package_of(module.removeprefix("farloop."))]
        if used != own and FLOORS[used] >= FLOORS[own]
    ]
    assert upwards == []


def test_no_modules_import_one_another_in_a_circle() -> None:
    """Imports inside functions and for type checkers count: they would only hide the circle."""
    modules = {f"farloop.{place_of(path)[:-3].replace('/', '.')}": path for path in ALL if path.name != "__init__.py"}
    TopologicalSorter({name: imports(path) & modules.keys() - {name} for name, path in modules.items()}).prepare()


def test_low_packages_need_little() -> None:
    small = [f"algo/{name}.py" for name in ("spec", "terms", "schedule", "validation", "outer_settings", "weights")]
    small += ["algo/bit_allocation.py"]
    allowed = {
        path: {"farloop.algo", "farloop.monitoring", "jinja2", "_typeshed"} for path in sources(*small, "monitoring")
    }
    allowed |= {path: {"farloop.wire", "farloop.algo", "msgpack", "pydantic", "xxhash"} for path in sources("wire")}
    for path, known in allowed.items():
        assert tops(path) <= known | set(sys.stdlib_module_names), place_of(path)
    of_algo = {name for path in sources("wire") for name in imports(path) if name.startswith("farloop.algo.")}
    assert {package_of(name.removeprefix("farloop.")) for name in of_algo} == {"algo.spec"}


def test_some_packages_are_used_in_one_place_only() -> None:
    places: dict[str, Iterable[str]] = {
        # The lying peers of a storm break what a session enforces, and its referee parses the journal by itself.
        "zmq": {
            "node/zmq_dealer.py",
            "pipeline/link.py",
            "coordinator/net/zmq_router.py",
            "coordinator/net/zmq_mirror.py",
            "lab/chaos/lying_peers.py",
        },
        "msgpack": {"wire/messages.py", "lab/chaos/journal_referee.py"},
        "obstore": {"coordinator/storage/bucket.py"},
        "jinja2": {"monitoring/page.py"},
        "markupsafe": {"cli/report.py"},
        "prometheus_client": {"node/metrics.py", "coordinator/observe/metrics.py"},
        "datasets": {"node/data/builder.py"},
        "tokenizers": {"node/data/builder.py"},
        "pyarrow": {"node/data/builder.py"},
        "triton": map(place_of, sources("quant/kernels/gpu")),
    }
    for package, allowed in places.items():
        assert users_of(package) <= set(allowed), package
    for package in ("uvloop", "signal"):
        assert all(
            user.startswith(("node/", "pipeline/", "coordinator/", "local/", "lab/", "cli/"))
            for user in users_of(package)
        ), package
    readers = {place_of(path) for path in ALL if "os.environ" in (text := path.read_text()) or "getenv" in text}
    # torchrun's variables; those of a script that calls join; a process of its own, as a command is
    others = {"node/cluster.py", "node/arguments.py"}
    assert all(place.startswith(("cli/", "config/", "local/", "lab/")) or place in others for place in readers)


def test_decisions_load_no_torch() -> None:
    """Each in a process of its own, all at once."""
    checks = {name: f"import sys, {name}; sys.exit('torch' in sys.modules)" for name in SANS_IO}
    running = {name: subprocess.Popen([sys.executable, "-c", check]) for name, check in checks.items()}
    assert [name for name, process in running.items() if process.wait(60) != 0] == []


def test_decisions_read_no_clock() -> None:
    for path in sources(*CLOCKLESS):
        assert not imports(path) & {"time", "asyncio", "threading", "socket"}, place_of(path)


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


def test_nothing_is_pickled() -> None:
    """Reading a file or message must never run code from it."""
    found = {place_of(path): pickling(path.read_text()) for path in [*ALL, *sources("tests", "examples")]}
    assert {place: lines for place, lines in found.items() if lines} == {}


def test_what_pickles_is_found_and_nothing_else() -> None:
    unsafe = [
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
    ]
    safe = [
        "import torch\ntorch.load(path, weights_only=True)",
        "import numpy as np\nnp.load(path)",
        "import numpy as np\nnp.load(path, allow_pickle=False)",
        "import yaml\nyaml.load(text, Loader=yaml.SafeLoader)",
        "import json\njson.load(file)",
        "'pickle.loads(this)'",
    ]
    assert [line for line in unsafe if not pickling(line)] == []
    assert [line for line in safe if pickling(line)] == []


def test_json_holds_no_bare_nan() -> None:
    """Browsers and jq refuse NaN and Infinity: null by `monitoring.status.dumps`, or an error where none can be."""
    for path in ALL:
        for call in (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)):
            if ast.unparse(call.func) in ("json.dump", "json.dumps"):
                words = {word.arg: word.value for word in call.keywords}
                assert ast.unparse(words.get("allow_nan", call)) == "False", f"{place_of(path)}:{call.lineno}"


MAKES_TENSORS = {
    "arange",
    "empty",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "tensor",
    "zeros",
}


def unnamed_defaults(path: Path) -> list[str]:
    """Calls that make a tensor of a type, or on a device, that the user's loop may have made the default."""
    return [
        f"{path.relative_to(ROOT)}:{call.lineno} {ast.unparse(call)}"
        for call in ast.walk(tree_of(path))
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) in {f"torch.{name}" for name in MAKES_TENSORS}
        and not {"dtype", "device"} <= {keyword.arg for keyword in call.keywords}
    ]


def test_new_tensors_name_their_type_and_device() -> None:
    assert [found for path in ALL for found in unnamed_defaults(path)] == []


def test_files_are_described() -> None:
    for path in ALL:
        assert ast.get_docstring(tree_of(path)), f"{place_of(path)} has no docstring"


def test_the_packages_are_those_of_the_tree() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    here = {f"farloop.{place_of(path.parent).replace('/', '.')}" for path in ALL if path.name == "__init__.py"}
    assert set(packages) == here | {"farloop"}  # whose only file is LICENSE
    assert not (ROOT / "__init__.py").exists() and not (ROOT / "farloop").exists()
    untyped = {name for name in here if name.count(".") == 1 and not (ROOT / name[8:] / "py.typed").exists()}
    assert not untyped, "type checkers of users take a package without py.typed for one without types"


def test_rounds_are_planned_by_the_coordinator_alone() -> None:
    """C33: a node is told how long a round is (protocol B); its learning rate it may follow by itself."""
    planners = {"round_after", "first_rounds", "opening_rounds", "first_windows", "h_at", "window_after"}
    for path in sources("node"):
        called = {part.attr for part in ast.walk(tree_of(path)) if isinstance(part, ast.Attribute)}
        called |= {module.rpartition(".")[2] for module in imports(path)}
        assert not called & planners, place_of(path)


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
        for call in ast.walk(tree_of(path))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in INSIDE_A_SESSION
        and isinstance(call.func.value, ast.Attribute)
        and call.func.value.attr == "session"
    }
    assert {place.partition(":")[0] for place in found} <= {"router.py"}, found
