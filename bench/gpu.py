"""What a node costs its training loop on a CUDA device: time, waits, memory, compiled models, and the codecs' speed.

A coordinator in a process of its own, and a loop in this one, first without farloop and then with it. On a CPU the same
script is a dry run of a tiny model, whose numbers say nothing; so the first run on a GPU does not end at a typo.
"""

import contextlib
import socket
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from farloop.bench.codec_speed import QUICK, Bench, SpeedRow, Where, codec_rows, settled
from farloop.bench.processes import free_port, started
from farloop.config.exit_codes import CommandError
from farloop.config.sources import dump_toml
from farloop.node.library import Node, join
from farloop.node.model import GPT, PRESETS, ModelConfig, build
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
    save_file({name: parameter.detach() for name, parameter in module.named_parameters()}, out / "first.safetensors")
    with _coordinator(out, scale, environ) as address:
        _trained(Loop(module, torch.device(device), scale), address, out, found, say)
    return found


class Loop:
    """A training loop as anybody has one."""

    def __init__(self, module: GPT, device: torch.device, scale: Scale) -> None:
        self.module, self.device, self.scale = module.to(device), device, scale
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
        generator = torch.Generator().manual_seed(0)
        shape = (scale.sequences, scale.tokens + 1)
        self.batch = torch.randint(256, shape, generator=generator).to(device)
        self.mixed = torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")

    def loss(self, model: Callable[..., Any]) -> Tensor:
        with self.mixed:
            logits = model(self.batch[:, :-1])
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), self.batch[:, 1:].flatten())

    def step(self, node: Node | None = None, model: Callable[..., Any] | None = None) -> None:
        """One inner step, without a word to the host about the loss."""
        torch.autograd.backward(self.loss(self.module if model is None else model))
        if node is not None:
            node.step()
            return
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

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


def _trained(loop: Loop, address: str, out: Path, found: Found, say: Callable[[str], None]) -> None:
    h, rounds = loop.scale.h, loop.scale.rounds
    say("the loop without farloop")
    loop.seconds(max(3, h // 3))
    loop.forget_peak()
    found.plain_step_s, before = loop.seconds(h * rounds), loop.peak()
    found.plain_waits = loop.waits(h)
    loop.module.load_state_dict(load_file(out / "first.safetensors"))
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


@contextlib.contextmanager
def _coordinator(out: Path, scale: Scale, environ: Mapping[str, str]) -> Iterator[str]:
    """Its address, while it runs."""
    address = f"tcp://127.0.0.1:{free_port()}"
    run = {
        "name": "gpu", "nodes": 1, "steps": scale.h * (scale.rounds + 20), "h": scale.h, "init": "first.safetensors",
        "batch_sequences": scale.sequences, "sequence_tokens": scale.tokens,
    }  # fmt: skip
    coordinator = {"state_dir": "state", "bind": address, "http": "", "probe_bytes": 0}
    (out / "run.toml").write_text(dump_toml({"run": run, "coordinator": coordinator}))
    words, alone = ["-m", "farloop.cli.main", "coordinator", "run.toml"], {"CUDA_VISIBLE_DEVICES": ""}
    with started("coordinator", words, out, {**environ, **alone}) as process:
        _wait_for(address, process, out / "coordinator.log")
        yield address


def _wait_for(address: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Until it listens, for it writes its first snapshots before. Raises CommandError."""
    host, port = address.removeprefix("tcp://").split(":")
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise CommandError(f"the coordinator ended with exit code {process.returncode}: see {log}")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1.0):
            return
        time.sleep(0.2)
    raise CommandError(f"the coordinator does not listen after {_PATIENCE_S:g} s: see {log}")


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
