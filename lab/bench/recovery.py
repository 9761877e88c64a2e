"""How long a coordinator takes to start on the folder of one that was killed, what it reads, and its peak memory.

The folder is that of a real run of a coordinator and two nodes without a model (`coordinator_nodes.py`), killed after
some rounds, which a start repeats.
"""

import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from farloop.config.exit_codes import CommandError
from farloop.coordinator.storage.files import DISK
from farloop.coordinator.storage.snapshots import versions_of
from farloop.coordinator.storage.store import Store
from farloop.lab.bench.memory import forget_peak
from farloop.lab.bench.processes import PATIENCE_S, WITHOUT_GPU, run_together, status_bytes, write_run
from farloop.local.processes import Children, free_port, page
from farloop.monitoring.status import dumps
from farloop.monitoring.units import duration_text, size_text
from farloop.quant.kernels.dispatch import warm
from farloop.quant.registry import codec_named
from farloop.runtime.system import keep_freed_blocks

FRAGMENTS = 16
LARGE = 7_000_000_000  # parameters that the time is scaled to
_SCALES = 10_000_000  # parameters below which the time of a start is not that of its bytes
_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    cold: bool  # whether nothing of the folder was in the page cache before
    seconds: float
    read_bytes: int
    journal_bytes: int  # of all segments
    state_bytes: int  # anchors, targets and optimizer state
    peak_bytes: int  # of memory, beyond what the process had before
    commits: int  # that were repeated
    parameters: int

    @property
    def large_s(self) -> float:
        """For `LARGE` parameters and as many commits, at these rates."""
        return self.seconds * LARGE / self.parameters


def measure(parameters: int, rounds: int, codec: str, out: Path) -> list[Start]:
    """A start on a cold folder, then one on a warm one; files and logs are in `out`.
    Raises CommandError: a process failed, or took too long."""
    _write(parameters, rounds, codec, out)
    starts = []
    for cold in (True, False):
        if cold:
            for path in (out / "state").rglob("*"):
                if path.is_file():
                    DISK.forget(path)
        name = "cold" if cold else "warm"
        run_together({name: ["-m", "farloop.lab.bench.recovery", "state", codec, f"{name}.json"]}, out, WITHOUT_GPU)
        starts.append(Start(cold=cold, **json.loads((out / f"{name}.json").read_text())))
    return starts


def text(starts: Sequence[Start]) -> str:
    return "\n".join(
        f"{'cold' if start.cold else 'warm'}  {start.seconds:7.2f} s  {start.commits} commits repeated, "
        f"{size_text(start.read_bytes)} read of a journal of {size_text(start.journal_bytes)} and "
        f"{size_text(start.state_bytes)} of state: {1e-9 * start.read_bytes / start.seconds:.2f} GB/s, peak "
        f"{start.peak_bytes / start.state_bytes:.2f} times the state"
        + (f"; 7 B parameters: {duration_text(start.large_s)}" if start.parameters >= _SCALES else "")
        for start in starts
    )


def _write(parameters: int, rounds: int, codec: str, out: Path) -> None:
    """The folder `out`/state."""
    shape = (max(1, parameters // FRAGMENTS // 64), 64)
    tensors = {f"w{index:02}": torch.zeros(shape, dtype=torch.float32, device="cpu") for index in range(FRAGMENTS)}
    pages = free_port()
    run = {"name": "recovery", "nodes": 2, "steps": 100_000, "h": FRAGMENTS, "tau": 1, "blocks_per_fragment": 1}
    address = f"tcp://127.0.0.1:{write_run(out, tensors, run, codec=codec, http=f'127.0.0.1:{pages}')}"
    nodes = ["-m", "farloop.lab.bench.coordinator_nodes", "nodes.json", address, "0", "2", "0"]
    end = time.monotonic() + PATIENCE_S
    with Children(out, stop_s=0.0) as children:
        process = children.start("coordinator", ["coordinator", "run.toml"], cwd=out, environ=WITHOUT_GPU)
        children.start("nodes", nodes, command=(), cwd=out, environ=WITHOUT_GPU)
        while (status := page(pages)) is None or min(status["versions"]) < rounds:
            children.check()
            if time.monotonic() > end:
                raise CommandError(f"the run did not come to round {rounds}: see the logs in {out}")
            time.sleep(_POLL_S)
        process.kill()


def _start(folder: Path, codec: str) -> dict[str, int | float]:
    """Here, as a coordinator does, with its kernels compiled before."""
    keep_freed_blocks()
    warm([codec_named(codec).name, "fp32"])
    journal_bytes = sum(path.stat().st_size for path in folder.glob("journal-*.log"))
    forget_peak()
    before, read, began = status_bytes("VmRSS"), _read_bytes(), time.monotonic()
    store = Store.recover(folder)
    assert store is not None
    seconds, ledger = time.monotonic() - began, store.ledger
    saved = [versions_of(folder, fragment)[-1] for fragment in range(len(store.buffers))]
    found = {
        "seconds": seconds,
        "read_bytes": _read_bytes() - read,
        "journal_bytes": journal_bytes,
        "state_bytes": sum(tensor.nbytes for buffers in store.buffers for tensor in buffers.tensors),
        "peak_bytes": status_bytes("VmHWM") - before,
        "commits": sum(ledger.versions) - sum(saved),
        "parameters": ledger.spec.identity.layout.num_parameters,
    }
    store.close()
    return found


def _read_bytes() -> int:
    """That this process has read from files so far, in memory or not; 0 where the system does not tell."""
    with suppress(OSError):
        return int(Path("/proc/self/io").read_text().split()[1])
    return 0


if __name__ == "__main__":
    Path(sys.argv[3]).write_text(dumps(_start(Path(sys.argv[1]), sys.argv[2])))
