"""What a node costs its training loop on a CPU: the loop without farloop and with it, in turns, while bytes move.

The time of the training thread is split by what it did: it computed, it waited for a core (the kernel's run queue), or
it slept, which here is mostly waiting for Python's interpreter lock.
"""

import contextlib
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from farloop.config.exit_codes import CommandError
from farloop.lab.bench.processes import WITHOUT_GPU, emulated, stores, write_run
from farloop.local.processes import Children
from farloop.node.library import Node, join
from farloop.node.link import Traffic
from farloop.node.model.built_in import GPT, build
from farloop.node.settings import ModelConfig

SEQUENCES: Final = 4
TOKENS: Final = 128  # of a sequence
_PATIENCE_S = 300.0  # for a coordinator's first snapshots


class Loop:
    """An ordinary training loop."""

    def __init__(self, module: GPT, device: torch.device, sequences: int, tokens: int) -> None:
        self.module, self.device = module.to(device), device
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True if device.type == "cuda" else None)
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(256, (sequences, tokens + 1), generator=generator, dtype=torch.int64, device="cpu")
        self.batch = drawn.to(device)
        self.mixed = torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")

    def loss(self, model: Callable[..., Any]) -> Tensor:
        with self.mixed:
            logits = model(self.batch[:, :-1])
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), self.batch[:, 1:].flatten())

    def compute(self, model: Callable[..., Any] | None = None) -> None:
        """Forward and backward."""
        torch.autograd.backward(self.loss(self.module if model is None else model))

    def update(self, node: Node | None = None) -> None:
        """What follows: `node.step`, or what it stands for without farloop."""
        if node is not None:
            node.step()
            return
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, node: Node | None = None, model: Callable[..., Any] | None = None) -> None:
        """One inner step, without a word to the host about the loss."""
        self.compute(model)
        self.update(node)


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of a thread: in all, of these on a core, and of these ready to run while no core was free."""

    wall: float
    core: float
    queue: float

    @property
    def asleep(self) -> float:
        return self.wall - self.core - self.queue

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(self.wall + other.wall, self.core + other.core, self.queue + other.queue)

    def __sub__(self, other: "Spent") -> "Spent":
        return Spent(self.wall - other.wall, self.core - other.core, self.queue - other.queue)

    def __truediv__(self, count: int) -> "Spent":
        return Spent(self.wall / count, self.core / count, self.queue / count)


def spent() -> Spent:
    """By this thread so far; differences count. Raises CommandError: not on Linux."""
    try:
        queue = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()[1]
    except OSError as error:
        raise CommandError(f"the kernel does not tell how long a thread waits for a core: {error}") from error
    return Spent(time.perf_counter(), time.thread_time(), int(queue) / 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A step of the loop, alone or with farloop: means in seconds."""

    loop: str  # "alone", "farloop", or "by store"
    steps: int
    compute: Spent  # forward and backward
    update: Spent  # `node.step`, or what it stands for: clipping, optimizer.step, zero_grad; without `blocked_s`
    blocked_s: float  # by updates that were late
    quiet_s: float  # farloop's own part of a `node.step` with nothing due, median; 0 where there was none
    bytes_per_s: float  # sent and received meanwhile


class _Sums:
    """Of the turns of one kind."""

    def __init__(self, loop: str, node: Node | None) -> None:
        self._loop, self._node, self._executor = loop, node, None if node is None else node.executor
        self._compute, self._update, self._blocked_s = Spent(0, 0, 0), Spent(0, 0, 0), 0.0
        self._steps, self._quiet, self._bytes, self._seconds = 0, list[float](), 0, 0.0

    def turn(self, loop: Loop, steps: int) -> None:
        began, moved = time.monotonic(), self._moved()
        for _ in range(steps):
            start = spent()
            loop.compute()
            quiet = self._executor is not None and self._executor.machine.quiet_steps > 1
            own, blocked = self._account()
            between = spent()
            loop.update(self._node)
            end, (own_after, blocked_after) = spent(), self._account()
            self._compute += between - start
            self._update += end - between
            self._blocked_s += blocked_after - blocked
            if quiet:
                self._quiet.append(own_after - own)
        self._steps += steps
        self._bytes += self._moved() - moved
        self._seconds += time.monotonic() - began

    @property
    def row(self) -> Row:
        return Row(
            loop=self._loop,
            steps=self._steps,
            compute=self._compute / self._steps,
            update=(self._update - Spent(self._blocked_s, 0, 0)) / self._steps,
            blocked_s=self._blocked_s / self._steps,
            quiet_s=statistics.median(self._quiet) if self._quiet else 0.0,
            bytes_per_s=self._bytes / self._seconds,
        )

    def _account(self) -> tuple[float, float]:
        if self._executor is None:
            return 0.0, 0.0
        seconds = self._executor.account.all_seconds(time.monotonic())
        return seconds["farloop"], seconds["blocked"]

    def _moved(self) -> int:
        moved = Traffic() if self._executor is None else self._executor.link.moved
        return moved.up.total + moved.down.total


def measure(
    model: ModelConfig,
    h: int,
    turns: int,
    out: Path,
    link: str,
    bulk: str,
    say: Callable[[str], None],
) -> list[Row]:
    """Turns of H steps without farloop and with it, after two rounds that do not count; one thread computes.

    `link`: from the node to the coordinator, and to the store, as RATE/RTT; none if empty. `bulk`: "store" for turns in
    which deltas and updates go by an object store, too. Raises CommandError: a process failed.
    """
    spent()
    torch.set_num_threads(1)
    made = [Loop(build(model, 0), torch.device("cpu"), SEQUENCES, TOKENS)]
    sums = [_Sums("alone", None)]
    with contextlib.ExitStack() as stack:
        for store in stack.enter_context(stores(bulk)):
            name, loop = "by store" if store else "farloop", Loop(build(model, 0), made[0].device, SEQUENCES, TOKENS)
            folder = out / name.replace(" ", "-")
            folder.mkdir()
            port = stack.enter_context(coordinator(loop, folder, h, (turns + 3) * h, store))
            if store and link:
                stack.enter_context(_proxied(link, store))
            (at,) = stack.enter_context(emulated(link, port, 1))
            address, kept = f"tcp://127.0.0.1:{at}", folder / "loop"
            joining = join(
                address, loop.module, loop.optimizer, name="loop", state_dir=kept, give_up_s=60.0, signals=False
            )
            node = stack.enter_context(joining)
            made.append(loop)
            sums.append(_Sums(name, node))
            for _ in range(2 * h):
                loop.step(node)
        for turn in range(turns):
            say(f"turn {turn + 1} of {turns}")
            for kind in range(len(sums)):  # each follows each: a transfer may end in the turn after its own
                of = (turn + kind) % len(sums)
                sums[of].turn(made[of], h)
    return [of.row for of in sums]


@contextlib.contextmanager
def _proxied(link: str, store: str) -> Iterator[None]:
    """This process, not its children, reaches the store over an emulated link: its server is its own proxy."""
    before = dict(os.environ)
    with emulated(link, int(store.rpartition(":")[2]), 1) as (port,):
        os.environ.update({"http_proxy": f"http://127.0.0.1:{port}", "no_proxy": ""})
        try:
            yield
        finally:
            os.environ.update({name: before.get(name, "") for name in ("http_proxy", "no_proxy")})


def text(rows: Sequence[Row]) -> str:
    """Tables of what `measure` found: where the time of a step goes, alone and with farloop."""
    return "\n\n".join(_table(rows[0], row) for row in rows[1:])


def _table(alone: Row, with_node: Row) -> str:
    step_s = alone.compute.wall + alone.update.wall
    lines = [f"{'ms of a step, mean':<32}{'alone':>9}{with_node.loop:>12}"]

    def add(what: str, before: float, after: float) -> None:
        change = 100 * (after - before) / step_s
        lines.append(f"{what:<32}{1e3 * before:9.2f}{1e3 * after:12.2f}{change:+7.1f} % of a step")

    for what, before, after in (
        ("forward and backward", alone.compute, with_node.compute),
        ("step(), or clip and optimizer", alone.update, with_node.update),
    ):
        add(what, before.wall, after.wall)
        add("  on a core", before.core, after.core)
        add("  ready, no core free", before.queue, after.queue)
        add("  asleep", before.asleep, after.asleep)
    add("waiting for updates", 0.0, with_node.blocked_s)
    add("in all", step_s, with_node.compute.wall + with_node.update.wall + with_node.blocked_s)
    lines.append(f"{8e-6 * with_node.bytes_per_s:.1f} Mbit/s crossed the link, both directions together.")
    if with_node.quiet_s:
        lines.append(f"farloop's part of a step() with nothing to exchange: {1e6 * with_node.quiet_s:.0f} µs (median).")
    return "\n".join(lines)


@contextlib.contextmanager
def coordinator(loop: Loop, out: Path, h: int, steps: int, store: str = "") -> Iterator[int]:
    """Its port, while it runs in `out` for one node with the weights that the loop has now."""
    sequences, tokens = loop.batch.shape
    first = {name: parameter.detach() for name, parameter in loop.module.named_parameters()}
    run = {"name": "loop", "nodes": 1, "steps": steps, "h": h}
    port = write_run(out, first, {**run, "batch_sequences": sequences, "sequence_tokens": tokens - 1}, store=store)
    with Children(out, stop_s=0.0) as children:
        child = children.start(
            "coordinator", ["coordinator", "run.toml"], cwd=out, environ={**WITHOUT_GPU, "http_proxy": ""}
        )
        _wait_for(port, children, child.log)
        yield port


def _wait_for(port: int, children: Children, log: Path) -> None:
    """Until the coordinator listens, for it writes its first snapshots before. Raises CommandError."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        children.check()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return
        time.sleep(0.2)
    raise CommandError(f"the coordinator does not listen after {_PATIENCE_S:g} s: see {log}")
