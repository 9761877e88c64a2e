"""What farloop does on a CUDA device, in parts with a time limit each: kernels, copies, codecs, a loop with a node.

Every part is a process of its own, which prints a JSON line for each number as soon as it has it: a part that fails or
is too slow is a row that says so, and the others stand. On a CPU the same script is a dry run of a tiny model, whose
numbers say nothing; so the first run on a GPU does not end at a typo.
"""

import contextlib
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file

from farloop.config.exit_codes import CommandError
from farloop.lab.bench.codec_speed import QUICK, Bench, SpeedRow, Where, codec_rows
from farloop.lab.bench.loop import Loop, coordinator
from farloop.lab.bench.processes import FIRST
from farloop.local.machine import origin
from farloop.monitoring.status import dumps
from farloop.node.devices import locked_zeros
from farloop.node.library import Node, join
from farloop.node.model.built_in import build
from farloop.node.settings import PRESETS, ModelConfig
from farloop.node.settings import Where as Place
from farloop.quant.digest import digest
from farloop.quant.norm import norm_sq
from farloop.quant.registry import codec_named

Row = dict[str, Any]
"""`part` and `what` was measured, then numbers with their units in their names; or `failed`: why."""

MODELS: Final[Mapping[str, ModelConfig]] = {
    "quarter": ModelConfig(layers=12, dim=1280, heads=10, hidden=3456, context=1024),  # 0.24 · 10⁹ parameters
    "billion": ModelConfig(layers=20, dim=2048, heads=16, hidden=5632, context=1024),  # 1.03 · 10⁹ parameters
    "nano": PRESETS["nano"],
}
CODECS = ("q4", "q4r", "q8", "bf16", "fp32", "e3m0", "e2m1", "nf4")
OPS = ("encode", "decode", "add", "fused")

PARTS: Final[Mapping[str, float]] = {
    "laws": 160, "tests": 160, "copies": 20, "codecs": 50, "loop-host": 70, "loop-device": 70, "compiled": 150,
}  # fmt: skip
"""The parts in their order, and the seconds that each may take."""

_TOGETHER = ("laws", "tests")  # they compile on the host most of the time
_LEAST_S = 10.0  # a part is not begun with less
_DRY_LIMIT_S = 300.0  # a CPU may be busy, and its times say nothing
_LAWS = "tests/unit/quant/kernels/test_kernels.py"
_PLUGINS = ("xdist.plugin", "pytest_timeout", "_hypothesis_pytestplugin")
"""Of pytest: others that a machine happens to have may warn, and warnings are errors."""

_MOVED = {"encode": 4, "decode": 4, "add": 8, "fused": 12, "digest": 4, "norm": 4}
"""Bytes of fp32 numbers that an operation reads and writes for an element, beside its payload; a copy moves 8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured."""

    sequences: int  # of a step
    tokens: int  # of a sequence
    h: int  # inner steps of a round
    rounds: int  # that are timed
    elements: int  # of a timed vector


ON_CUDA = Scale(sequences=16, tokens=1024, h=60, rounds=1, elements=256 << 20)
DRY_RUN = Scale(sequences=2, tokens=16, h=8, rounds=1, elements=1 << 16)


def require_cuda() -> None:
    """Raise CommandError unless there is a CUDA device."""
    if not torch.cuda.is_available():
        raise CommandError("no CUDA device: nothing was measured. --dry-run tries the script on a CPU")


def measure(
    parts: Sequence[str],
    model: str,
    out: Path,
    budget_s: float,
    say: Callable[[str], None],
    *,
    dry: bool,
) -> bool:
    """Run these parts one after the other in `out`, and say their rows as they come; none takes more than what is left
    of `budget_s`. Returns whether none failed."""
    rows, deadline = list[Row](), time.monotonic() + budget_s

    def add_row(row: Row) -> None:
        rows.append(row)
        say(dumps(row))
        (out / "gpu.json").write_text(dumps({**rows[0], "rows": rows[1:]}, indent=1))

    def run(part: str) -> None:
        limit_s = min(PARTS[part], deadline - time.monotonic()) if not dry else _DRY_LIMIT_S
        if limit_s < _LEAST_S:
            add_row({"part": part, "failed": f"no time left: {budget_s:g} s are for all parts"})
        else:
            _run(part, _command(part, model, dry=dry), out, limit_s, add_row)

    device = "CPU, dry run: the numbers say nothing" if dry else torch.cuda.get_device_name()
    of = origin()
    add_row({"part": "machine", "what": device, **of, "machine": f"{device}, {of['machine']}"})
    together = [part for part in parts if part in _TOGETHER]
    with ThreadPoolExecutor(max(1, len(together))) as pool:
        list(pool.map(run, together))
    for part in parts:
        if part not in together:
            run(part)
    return not any("failed" in row for row in rows)


def _run(part: str, command: list[str], out: Path, limit_s: float, add_row: Callable[[Row], None]) -> None:
    """One part as a process; what it prints beside JSON lines is in PART.log."""
    log = out / f"{part}.log"
    where = Path(__file__).resolve().parents[2] if command[1:3] == ["-m", "pytest"] else out
    own = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": ",".join(filter(_has, _PLUGINS))}
    if part == "laws":
        own |= {"KERNELS": "triton", "TRITON_INTERPRET": "0"}
    last = ""
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *command[1:]], cwd=where, env={**os.environ, **own, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE, stderr=file, text=True, start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        timer = threading.Timer(limit_s, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        with process.stdout:
            for line in process.stdout:
                if line.startswith("{"):
                    add_row({"part": part, **json.loads(line)})
                else:
                    file.write(line)
                    last = line.strip("= \n") or last
        code = process.wait()
        timed_out = not timer.is_alive()
        timer.cancel()
    if timed_out:
        add_row({"part": part, "failed": f"not done after {limit_s:.0f} s; see {log}"})
    elif code:
        add_row({"part": part, "failed": f"exit code {code}: {last or log.read_text()[-300:].strip()}; see {log}"})
    elif where != out:
        add_row({"part": part, "what": "pytest", "said": last})


def _command(part: str, model: str, *, dry: bool) -> list[str]:
    if part not in _TOGETHER:
        return ["python", "-m", "farloop.lab.bench.gpu", part, model, "dry" if dry else "cuda"]
    root = Path(__file__).resolve().parents[2]
    if part == "laws":
        files, only = [_LAWS], []
    else:  # by name: collecting every test takes longer than running these
        marked = [path for path in sorted((root / "tests/unit").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
        files, only = [str(path.relative_to(root)) for path in marked if path.name != "test_path.py"], ["-m", "gpu"]
    several = ["-n", str(min(10, os.cpu_count() or 1))] if _has("xdist") and not dry else []
    collected = ["--collect-only"] if dry else []
    return ["python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *several, *collected, *only, *files]


def _has(module: str) -> bool:
    return importlib.util.find_spec(module.split(".")[0]) is not None


# --- What a part does, in its own process


def print_row(what: str, **numbers: object) -> None:
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in numbers.items()}
    sys.stdout.write(dumps({"what": what, **rounded}) + "\n")
    sys.stdout.flush()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Where a part runs, and how much it measures."""

    device: torch.device
    scale: Scale
    model: ModelConfig

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def best_s(self, job: Callable[[], object], times: int = 3) -> float:
        """The shortest of some runs of a job, after one that does not count."""
        found = []
        for _ in range(times + 1):
            self.wait()
            began = time.perf_counter()
            job()
            self.wait()
            found.append(time.perf_counter() - began)
        return min(found[1:])


def copies(part: Part) -> None:
    """Copies on the device and over PCIe, from memory that is locked and that is not."""
    n = part.scale.elements
    x, y, host = (torch.zeros(n, device=where, dtype=torch.float32) for where in (part.device, part.device, "cpu"))
    print_row("copy on the device", gb_per_s=8e-9 * n / part.best_s(lambda: y.copy_(x)))
    began, hosts = time.perf_counter(), {"pageable": host, "locked": host}
    if part.device.type == "cuda":
        (hosts["locked"],) = locked_zeros([n])
        took = time.perf_counter() - began
        print_row("lock in memory", gb=4e-9 * n, seconds=took, locked=hosts["locked"].is_pinned())
    for what, there in hosts.items():
        up, down = partial(x.copy_, there, non_blocking=True), partial(there.copy_, x)
        print_row(f"host to device, {what}", gb_per_s=4e-9 * n / part.best_s(up))
        print_row(f"device to host, {what}", gb_per_s=4e-9 * n / part.best_s(down))


def codecs(part: Part) -> None:
    """fp32 numbers a second by every operation, and all bytes that it moves a second as a share of a copy's."""
    bench = Bench(Where(device=part.device.type, threads=1), part.scale.elements, QUICK)
    dry = part.scale is DRY_RUN

    def print_speed(row: SpeedRow, payload_bytes: int = 0) -> None:
        moved = _MOVED[row.op] + payload_bytes / part.scale.elements
        share = {"gb_per_s": row.gb_per_s, "of_a_copy": row.ratio_to_memcpy * moved / 8, "first_s": row.warmup_s}
        print_row(f"{row.codec} {row.op}".strip(), codec=row.codec, op=row.op, by=row.path, **share)

    for name in CODECS[:2] if dry else CODECS:
        codec = codec_named(name)
        for row in codec_rows(bench, codec, OPS[:3] if dry else OPS):
            print_speed(row, codec.payload_bytes(bench.fragment))
    path = "numba" if dry else "triton"
    print_speed(bench.row("", path, "digest", lambda: digest(bench.x)))
    print_speed(bench.row("", path, "norm", lambda: norm_sq(bench.x)))


class Timed(Loop):
    """The loop, and what is measured of it."""

    def seconds(self, count: int, node: Node | None = None) -> float:
        """Of a step, mean, without the time that a late update blocked it; to the end of what the device does."""
        self._wait()
        began, blocked = time.perf_counter(), _blocked_s(node)
        for _ in range(count):
            self.step(node)
        self._wait()
        return (time.perf_counter() - began - (_blocked_s(node) - blocked)) / count

    def waits(self, count: int, node: Node | None = None) -> list[int]:
        """Of each of these steps: how many calls of this process waited for the device."""
        found = list[int]()
        for _ in range(count):
            with _counted_waits(self.device) as count_of_step:
                self.step(node)
            found.append(count_of_step())
        return found

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0

    def forget_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _blocked_s(node: Node | None) -> float:
    if node is None or node.executor is None:
        return 0.0
    return node.executor.account.all_seconds(time.monotonic())["blocked"]


@contextlib.contextmanager
def _joined(part: Part, loop: Timed, anchors: Place) -> Iterator[Node]:
    h, rounds, began = part.scale.h, part.scale.rounds, time.perf_counter()
    out = Path(tempfile.mkdtemp(dir="."))
    with coordinator(loop, out.resolve(), h, h * (rounds + 20)) as port:
        print_row("the coordinator listens", seconds=time.perf_counter() - began)
        with join(
            f"tcp://127.0.0.1:{port}", loop.module, loop.optimizer, name="gpu", state_dir=out / "gpu", give_up_s=60.0,
            anchors=anchors, signals=False,
        ) as node:  # fmt: skip
            loop.module.load_state_dict(load_file(out / FIRST))
            print_row("joined", seconds=time.perf_counter() - began)
            yield node


def loop(part: Part, anchors: Place) -> None:
    """A step without and with a node, mean over whole rounds: time, waits, memory."""
    h, rounds = part.scale.h, part.scale.rounds
    timed = Timed(build(part.model, 0), part.device, part.scale.sequences, part.scale.tokens)
    print_row("model", parameters=sum(parameter.numel() for parameter in timed.module.parameters()))
    timed.seconds(max(3, h // 3))
    timed.forget_peak()
    plain_s, plain_bytes = timed.seconds(h * rounds), timed.peak()
    print_row("a step without farloop", ms=1e3 * plain_s, waits=statistics.median(timed.waits(h)))
    with _joined(part, timed, anchors) as node:
        largest = max(fragment.numel for fragment in node.spec.identity.layout.fragments)
        for what in ("first round", "half a round"):  # buffers are made
            began, blocked_s = time.perf_counter(), _blocked_s(node)
            timed.seconds(h if what == "first round" else h // 2, node)
            print_row(what, seconds=time.perf_counter() - began, blocked_s=_blocked_s(node) - blocked_s)
        timed.forget_peak()
        blocked_s, node_s = _blocked_s(node), timed.seconds(h * rounds, node)
        print_row(
            "a step with farloop",
            ms=1e3 * node_s,
            more_percent=100 * (node_s / plain_s - 1),
            blocked_s=_blocked_s(node) - blocked_s,
            more_mb=1e-6 * (timed.peak() - plain_bytes),
            two_largest_fragments_mb=8e-6 * largest,
        )
        waits = timed.waits(h, node)
        print_row("calls of a step with farloop that wait", waits=statistics.median(waits), most_waits=max(waits))


def compiled(part: Part) -> None:
    """|loss of the compiled model − loss of the module| / loss after merges, by the mode of torch.compile."""
    timed = Timed(build(part.model, 0), part.device, part.scale.sequences, part.scale.tokens)
    with _joined(part, timed, "host") as node:
        for mode in ("default", "reduce-overhead") if part.device.type == "cuda" else ("eager",):
            how: Any = {"backend": "eager"} if mode == "eager" else {"mode": mode}
            model = torch.compile(timed.module, **how)
            began = time.perf_counter()
            timed.step(node, model)
            part.wait()
            print_row(f"first step, {mode}", seconds=time.perf_counter() - began)
            for _ in range(part.scale.h + part.scale.h // 2):
                timed.step(node, model)
            with torch.no_grad():
                right, seen = float(timed.loss(timed.module)), float(timed.loss(model))
            print_row(f"torch.compile over merges, {mode}", error=abs(seen - right) / right)


@contextlib.contextmanager
def _counted_waits(device: torch.device) -> Iterator[Callable[[], int]]:
    """Counts the calls inside that wait for the device."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lambda: sum("synchronizing" in str(each.message) for each in found)
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")


def main(name: str, model: str, where: str) -> None:
    """A part, in the process that `measure` started for it."""
    dry = where == "dry"
    part = Part(device=torch.device("cpu" if dry else "cuda"), scale=DRY_RUN if dry else ON_CUDA, model=MODELS[model])
    torch.manual_seed(0)
    if dry:
        torch.set_num_threads(1)
    jobs: Mapping[str, Callable[[], None]] = {
        "copies": lambda: copies(part),
        "codecs": lambda: codecs(part),
        "loop-host": lambda: loop(part, "host"),
        "loop-device": lambda: loop(part, "device"),
        "compiled": lambda: compiled(part),
    }
    jobs[name]()


if __name__ == "__main__":
    main(*sys.argv[1:])
