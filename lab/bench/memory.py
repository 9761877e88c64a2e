"""Peak memory of a coordinator and a node, one process each on CPUs, and the prediction (`config/memory.py`).

And what taking part adds to each rank of a training loop: its peak with farloop, minus that of the same loop without.
Both have loaded the same code, and both peaks count from when the model and its first gradients and moments are there.
"""

import ctypes
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from farloop.config.exit_codes import CommandError
from farloop.config.memory import BESIDE_A_SNAPSHOT, JOINS, memory_of
from farloop.config.run_spec import planned
from farloop.config.settings import load_run
from farloop.config.sources import dump_toml
from farloop.lab.bench.processes import WITHOUT_GPU, run_together, status_bytes, with_store
from farloop.local.processes import free_port
from farloop.monitoring.units import size_text
from farloop.node.library import join
from farloop.node.model.built_in import build
from farloop.node.model.named import causal_lm_loss, shard_blocks_
from farloop.node.settings import PRESETS
from farloop.quant.kernels.dispatch import warm

_RUN: Mapping[str, object] = {
    "name": "memory",
    "nodes": 1,
    "steps": 16,
    "h": 8,
    "tau": 1,
    "batch_sequences": 1,
    "sequence_tokens": 32,
    "evaluation_sequences": 1,
    "evaluate_every_rounds": 1,
    # By default a run this short has none, and long runs have.
    "outer_lr": 0.7,
    "outer_momentum": 0.9,
}
"""Two rounds: a join, commits of every fragment, evaluations, and the end, where all fragments commit at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Peak resident memory of one process; of a rank of a loop, what farloop adds to it."""

    who: str
    parameters: int
    predicted_bytes: int
    measured_bytes: int
    loop_bytes: int = 0  # of a rank: the peak of the loop without farloop

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured_bytes / self.predicted_bytes


def text(peaks: Sequence[Peak]) -> str:
    return "\n".join(
        f"{peak.who:<20} predicted {size_text(peak.predicted_bytes)}, measured {size_text(peak.measured_bytes)} "
        f"({peak.measured_bytes / peak.parameters:.1f} B a parameter): {peak.ratio:.2f}"
        + (f"; the loop alone {size_text(peak.loop_bytes)}" if peak.loop_bytes else "")
        for peak in peaks
    )


def measure(model: str, out: Path, store: str) -> list[Peak]:
    """Peaks of the coordinator and of the node of a short run. Files and logs are in `out`.

    `store`: URL of the object store that deltas and updates go by; empty: they go by the session. Raises CommandError:
    a process failed, or took too long, or this is not Linux.
    """
    if not status_bytes("VmHWM"):
        raise CommandError("only Linux tells the peak memory of a process (/proc/self/status): run this there")
    out.mkdir(parents=True, exist_ok=True)
    port = free_port()
    run: dict[str, dict[str, object]] = {
        "run": {**_RUN, "model": model},
        "data": {"max_bytes": 200_000},
        "coordinator": {"state_dir": str(out / "state"), "bind": f"tcp://127.0.0.1:{port}", "http": ""},
    }
    node = {"name": "a", "coordinator": f"tcp://127.0.0.1:{port}", "state_dir": str(out / "a")}
    (out / "run.toml").write_text(dump_toml(with_store(run, store)))
    (out / "node.toml").write_text(dump_toml({"node": node, "data": {"max_bytes": 200_000}}))
    spec = planned(load_run(out / "run.toml", flags=[], environ={}), weights=False).spec
    memory = memory_of(spec)
    told = {
        # The node draws the same first weights, and fetches no snapshots. None are due in a run of two rounds.
        "coordinator": sum(n for term, n in memory.coordinator_ram.items() if term not in (JOINS, BESIDE_A_SNAPSHOT)),
        "node": sum(memory.node_host.values()) + sum(memory.node_device.values()),
    }
    words = {"coordinator": "run.toml", "node": "node.toml"}
    commands = {who: ["-m", "farloop.cli.main", who, file] for who, file in words.items()}
    peaks = run_together(commands, out, WITHOUT_GPU)
    parameters = spec.identity.layout.num_parameters
    by = " by store" if store else ""
    return [
        Peak(who=f"{who}{by}", parameters=parameters, predicted_bytes=told[who], measured_bytes=peaks[who])
        for who in told
    ]


# --- The ranks of a loop


_STEPS = 16  # two rounds


def measure_ranks(model: str, ranks: int, out: Path) -> list[Peak]:
    """What farloop adds to every rank of a built-in model's loop, which is sharded over `ranks`, whole if it is one;
    files and logs are in `out`. Linux alone tells such peaks.

    Raises CommandError: a process failed, or took too long.
    """
    out.mkdir(parents=True)
    address = f"tcp://127.0.0.1:{free_port()}"
    run: dict[str, dict[str, object]] = {
        "run": {**_RUN, "model": model, "seed": 0, "steps": _STEPS, "batch_sequences": ranks},
        "data": {"max_bytes": 200_000},
        "coordinator": {"state_dir": str(out / "state"), "bind": address, "http": ""},
    }
    (out / "run.toml").write_text(dump_toml(run))
    spec = planned(load_run(out / "run.toml", flags=[], environ={}), weights=False).spec
    memory = memory_of(spec, ranks=ranks, shard=ranks > 1)
    told = memory.node_host["anchors"] + memory.node_device["two encode buffers"] // 2
    told += memory.node_host["moments that are being written"]
    peaks = {}
    for way, where in (("loop", "-"), ("node", address)):
        daemon = {} if where == "-" else {"coordinator": ["-m", "farloop.cli.main", "coordinator", "run.toml"]}
        together = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        together |= {**WITHOUT_GPU, "OMP_NUM_THREADS": "1"}
        names = [f"{way}-{rank}" for rank in range(ranks)]
        words = {name: ["-m", "farloop.lab.bench.memory", model, where, name, str(ranks)] for name in names}
        run_together({**daemon, **words}, out, together, of_ranks=True)
        peaks[way] = [int((out / name).read_text()) for name in names]
    return [
        Peak(
            who=f"rank {rank} of {ranks}",
            parameters=spec.identity.layout.num_parameters,
            loop_bytes=alone,
            measured_bytes=peaks["node"][rank] - alone,
            predicted_bytes=told + (0 if rank else memory.node_host["payloads in flight"]),
        )
        for rank, alone in enumerate(peaks["loop"])
    ]


def _rank(model: str, address: str, path: str, ranks: int) -> None:
    """A loop of a built-in model, as a node at this address or (-) without farloop; its peak goes into a file."""
    cpu = torch.device("cpu")
    warm(["q4", "fp32"])
    module: nn.Module = build(PRESETS[model], 0)
    if ranks > 1:
        dist.init_process_group("gloo")
        shard_blocks_(module, cpu, ranks)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # of no length: it makes the moments
    optimizer.zero_grad(set_to_none=False)
    batch = torch.randint(256, (1, 33), generator=torch.Generator().manual_seed(0), dtype=torch.int64, device="cpu")
    forget_peak()
    if address == "-":
        for _ in range(_STEPS):
            torch.autograd.backward(causal_lm_loss(module, batch))
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    else:
        with join(address, module, optimizer, name="node", state_dir=Path("node")) as node:
            while node.running:
                torch.autograd.backward(causal_lm_loss(node.model, batch))
                node.step()
    Path(path).write_text(str(status_bytes("VmHWM")))


def forget_peak() -> None:
    """Let this process's recorded peak (VmHWM) begin at what it holds now. Linux alone can."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    name, place, file, count = sys.argv[1:]
    _rank(name, place, file, int(count))
