"""What a node costs its training loop on a CUDA device: time, waits, memory, compiled models, and the codecs' speed.

A coordinator in a process of its own, and a loop in this one, first without farloop and then with it. On a CPU the same
script is a dry run of a tiny model, whose numbers say nothing; so the first run on a GPU does not end at a typo.
"""

import contextlib
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file

from farloop.bench.codec_speed import QUICK, Bench, SpeedRow, Where, codec_rows, settled
from farloop.bench.loop import FIRST, Loop, coordinator
from farloop.config.exit_codes import CommandError
from farloop.node.library import Node, join
from farloop.node.model import PRESETS, ModelConfig, build
from farloop.quant.registry import codec_named

BILLION = ModelConfig(layers=20, dim=2048, heads=16, hidden=5632, context=1024)  # 1.03 · 10⁹ parameters
CODECS = ("bf16", "q8", "q4", "e3m0", "q4r")
OPS = ("encode", "decode", "add", "fused")

_TESTS = {"cuda": ("tests/unit",), "cpu": ("--collect-only", "tests/unit/node/test_on_device.py")}
_PATIENCE_S = 300.0  # for the tests, and for a coordinator's first snapshots


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured."""

    model: ModelConfig
    sequences: int  # of a step
    tokens: int  # of a sequence
    h: int  # inner steps of a round
    rounds: int  # that are timed
    elements: int  # of a timed vector of the codecs


ON_CUDA = Scale(model=BILLION, sequences=8, tokens=1024, h=30, rounds=2, elements=256 << 20)
DRY_RUN = Scale(model=PRESETS["nano"], sequences=2, tokens=16, h=8, rounds=1, elements=1 << 16)


@dataclass(slots=True, kw_only=True)
class Found:
    """Seconds and bytes; memory and waits are 0 on a CPU."""

    device: str
    parameters: int
    tests: str  # the last line of pytest
    plain_step_s: float = 0.0  # of the loop without farloop, mean
    node_step_s: float = 0.0  # with it, mean over whole rounds
    plain_waits: Sequence[int] = ()  # of each step: calls that wait for the device
    node_waits: Sequence[int] = ()
    extra_bytes: int = 0  # peak of device memory above that of the loop without farloop
    predicted_bytes: int = 0
    compiled_error: dict[str, float] = field(default_factory=dict)
    """|loss of the compiled model − loss of the module| / loss after merges, by the mode of torch.compile."""
    codecs: Sequence[SpeedRow] = ()


def measure(device: str, out: Path, environ: Mapping[str, str], say: Callable[[str], None]) -> Found:
    """Everything, in `out`, an empty folder; "cpu" is the dry run. Raises CommandError: a process failed."""
    scale = ON_CUDA if device == "cuda" else DRY_RUN
    say("tests")
    module = build(scale.model, 0)
    found = Found(
        device=torch.cuda.get_device_name() if device == "cuda" else "CPU, dry run: the numbers say nothing",
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        tests=_tested(device, environ),
    )
    say("codecs")
    bench = Bench(Where(device=device, threads=1), scale.elements, QUICK)
    found.codecs = settled([row for name in CODECS for row in codec_rows(bench, codec_named(name), OPS)])
    del bench
    say("first weights, and a coordinator")
    loop = Timed(module, torch.device(device), scale.sequences, scale.tokens)
    with coordinator(loop, out, scale.h, scale.h * (scale.rounds + 20), environ) as port:
        _trained(loop, scale, f"tcp://127.0.0.1:{port}", out, found, say)
    return found


class Timed(Loop):
    """The loop, and what is measured of it."""

    def seconds(self, count: int, node: Node | None = None) -> float:
        """Of a step, mean; to the end of what the device does for them."""
        self._wait()
        began = time.perf_counter()
        for _ in range(count):
            self.step(node)
        self._wait()
        return (time.perf_counter() - began) / count

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


def _trained(loop: Timed, scale: Scale, address: str, out: Path, found: Found, say: Callable[[str], None]) -> None:
    h, rounds = scale.h, scale.rounds
    say("the loop without farloop")
    loop.seconds(max(3, h // 3))
    loop.forget_peak()
    found.plain_step_s, before = loop.seconds(h * rounds), loop.peak()
    found.plain_waits = loop.waits(h)
    loop.module.load_state_dict(load_file(out / FIRST))
    say("the loop with farloop")
    with join(address, loop.module, loop.optimizer, name="gpu", state_dir=out / "gpu", timeout_s=60.0) as node:
        largest = max(fragment.numel for fragment in node.spec.identity.layout.fragments)
        code_bytes = max(map(codec_named(node.spec.terms.codecs.up).payload_bytes, node.spec.identity.layout.fragments))
        found.predicted_bytes = 8 * largest + code_bytes
        loop.seconds(h + h // 2, node)  # kernels are compiled, buffers made
        loop.forget_peak()
        found.node_step_s = loop.seconds(h * rounds, node)
        found.extra_bytes = loop.peak() - before
        found.node_waits = loop.waits(h, node)
        modes = ("default", "reduce-overhead") if loop.device.type == "cuda" else ("eager",)
        for mode in modes:
            say(f"torch.compile, {mode}")
            compiled = torch.compile(loop.module, backend="eager") if mode == "eager" else torch.compile(
                loop.module, mode=mode
            )  # fmt: skip
            for _ in range(h + h // 2):
                loop.step(node, compiled)
            with torch.no_grad():
                right, seen = float(loop.loss(loop.module)), float(loop.loss(compiled))
            found.compiled_error[mode] = abs(seen - right) / right


@contextlib.contextmanager
def _counted_waits(device: torch.device) -> Iterator[Callable[[], int]]:
    """Counts the calls inside that wait for the device."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lambda: sum("synchronizing" in str(each.message) for each in told)
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")


def _tested(device: str, environ: Mapping[str, str]) -> str:
    """The last line of the tests that are marked `gpu`; a dry run collects them alone."""
    root = Path(__file__).resolve().parent.parent
    if not (root / "tests").exists():
        return "no tests: not a source tree"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *_TESTS[device]]
    done = subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True, timeout=_PATIENCE_S)
    if done.returncode:
        raise CommandError(f"the tests marked gpu failed:\n{done.stdout[-4000:]}{done.stderr[-1000:]}")
    return done.stdout.strip().splitlines()[-1].strip("= ")


def markdown(found: Found) -> str:
    """Two tables for the documentation."""
    overhead = 100 * (found.node_step_s / found.plain_step_s - 1)
    steps = f"{1e3 * found.plain_step_s:.1f} ms and {1e3 * found.node_step_s:.1f} ms: {overhead:+.1f} %"
    waits = ", ".join(
        f"{what} {statistics.median(counts):g} (most {max(counts)})"
        for what, counts in (("without", found.plain_waits), ("with", found.node_waits))
    )
    memory = f"{found.extra_bytes / 1e6:.0f} MB; {found.predicted_bytes / 1e6:.0f} MB for two deltas and their codes"
    compiled = ", ".join(f"{mode} {error:.1e}" for mode, error in found.compiled_error.items())
    lines = [
        f"Device: {found.device}. Model: {found.parameters / 1e6:.1f} M parameters.",
        "",
        "| | what | found | wanted |",
        "| --- | --- | --- | --- |",
        f"| G1 | tests marked gpu: kernels, blobs, anchors and weights against a CPU | {found.tests} | all pass |",
        f"| G2 | a step without and with farloop, mean over whole rounds | {steps} | at most 1 % |",
        f"| G3 | calls in a step that wait for the device, median | {waits} | 0, and 1 for the gradient's norm |",
        f"| G4 | device memory above the loop without farloop | {memory} | at most that |",
        f"| G5 | error of a compiled model's loss after merges | {compiled} | below 1e-2 |",
        "",
        "| codec | operation | by | GB/s | of a copy |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in found.codecs:
        share = f"{row.ratio_to_memcpy:.2f}"
        lines.append(f"| {row.codec} | {row.op} | {row.path} | {row.gb_per_s:.1f} | {share} |")
    return "\n".join(lines)
