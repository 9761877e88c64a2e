"""Seconds and bytes of one synchronisation of a model between nodes on this machine, and of gloo's all-reduce.

Nothing is trained: the optimizer subtracts a fixed gradient, and every inner step is followed by a round. A round lasts
from the moment at which the last node has taken its step until the last node has the merged weights.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from farloop.bench.memory import free_port
from farloop.bench.sync_trace import Marks, Trace, trace_of
from farloop.config.exit_codes import CommandError
from farloop.config.sources import dump_toml

WARM_UP = 2  # rounds that are not counted
PATIENCE_S = 1800.0  # for one system
TENSORS = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One system."""

    system: str
    codec: str
    parameters: int
    nodes: int
    rounds: int
    s_per_round_median: float
    s_per_round_min: float
    s_per_round_max: float
    bytes_per_round: int
    """Over all links, both ways. farloop: counted, without the first weights. gloo: reckoned, as a ring sends them."""
    bit_equal: bool
    """Whether all nodes ended with the same bits."""
    trace: Trace | None = None
    """Where the time went, if asked for; gloo has none."""


def measure(
    parameters: int,
    nodes: int,
    codecs: Sequence[str],
    rounds: int,
    out: Path,
    environ: Mapping[str, str],
    *,
    trace: bool = False,
) -> list[Row]:
    """gloo, each codec, and gloo again: the row of gloo has the rounds of both, because a machine's speed changes.

    Files and logs are in `out`; `environ` is the processes'. With `trace` farloop's rows say where the time went.
    Raises CommandError: a process failed, or took too long.
    """
    environ = {**environ, "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo", "THP_MEM_ALLOC_ENABLE": "1"}
    first = _gloo(parameters, nodes, rounds, out / "gloo-before", environ)
    rows = [
        _farloop(parameters, nodes, codec, rounds, out / f"farloop-{place}", environ, trace)
        for place, codec in enumerate(codecs)
    ]
    again = _gloo(parameters, nodes, rounds, out / "gloo-after", environ)
    sent = 2 * (nodes - 1) * 4 * parameters  # every node sends 2·(n − 1)/n of the model
    equal = len(set(first.ends) | set(again.ends)) == 1
    return [_row("gloo", "fp32", parameters, nodes, [*first.seconds, *again.seconds], sent, equal), *rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ran:
    seconds: list[float]  # of each round that counts
    ends: list[str]  # of each node, what it ended with


def _row(system: str, codec: str, parameters: int, nodes: int, seconds: Sequence[float], sent: int, equal: bool) -> Row:
    return Row(
        system=system,
        codec=codec,
        parameters=parameters,
        nodes=nodes,
        rounds=len(seconds),
        s_per_round_median=statistics.median(seconds),
        s_per_round_min=min(seconds),
        s_per_round_max=max(seconds),
        bytes_per_round=sent,
        bit_equal=equal,
    )


def _gloo(parameters: int, nodes: int, rounds: int, out: Path, environ: Mapping[str, str]) -> _Ran:
    out.mkdir(parents=True)
    address = f"tcp://127.0.0.1:{free_port()}"
    told = [str(number) for number in (nodes, parameters, rounds + WARM_UP)]
    return _run(out, environ, {}, {f"node-{rank}": ["gloo", address, str(rank), *told] for rank in range(nodes)})


def _farloop(
    parameters: int, nodes: int, codec: str, rounds: int, out: Path, environ: Mapping[str, str], trace: bool
) -> Row:
    out.mkdir(parents=True)
    save_file({f"weights.{k}": part for k, part in enumerate(_weights(parameters))}, out / "first.safetensors")
    address = f"tcp://127.0.0.1:{free_port()}"
    run = {
        "name": "sync", "nodes": nodes, "steps": rounds + WARM_UP, "method": "diloco", "h": 1, "tau": 0, "mix": 0.0,
        "codec_up": codec, "codec_down": codec, "outer_lr": 0.7, "outer_momentum": 0.9, "init": "first.safetensors",
    }  # fmt: skip
    coordinator = {"state_dir": "state", "bind": address, "http": "", "probe_bytes": 0}
    (out / "run.toml").write_text(dump_toml({"run": run, "coordinator": coordinator}))
    run_coordinator = ["farloop.bench.sync_trace", "coordinator.marks.json"] if trace else ["farloop.cli.main"]
    ran = _run(
        out,
        environ,
        {"coordinator": ["-m", *run_coordinator, "coordinator", "run.toml"]},
        {f"node-{k}": ["farloop", address, f"node-{k}", *(["trace"] if trace else [])] for k in range(nodes)},
    )
    kinds = [node["bytes_by_kind"] for node in json.loads((out / "state" / "status.json").read_text())["nodes"]]
    sent = sum(count for kind in kinds for name, count in kind.items() if name != "snapshot")
    equal = len(set(ran.ends)) == 1
    row = _row("farloop", codec, parameters, nodes, ran.seconds, sent // (rounds + WARM_UP), equal)
    if not trace:
        return row
    names = ["coordinator", *(f"node-{k}" for k in range(nodes))]
    return replace(row, trace=trace_of({name: Marks.read(out / f"{name}.marks.json") for name in names}, WARM_UP + 1))


def _run(
    out: Path, environ: Mapping[str, str], daemons: Mapping[str, Sequence[str]], nodes: Mapping[str, Sequence[str]]
) -> _Ran:
    """Run all to their ends. Every node tells when each of its rounds began and ended."""
    commands = {
        **daemons,
        **{name: ["-m", "farloop.bench.sync", f"{name}.json", *words] for name, words in nodes.items()},
    }
    running: dict[str, subprocess.Popen[bytes]] = {}
    deadline = time.monotonic() + PATIENCE_S
    try:
        for name, words in commands.items():
            with (out / f"{name}.log").open("wb") as log:
                command = [sys.executable, *words]
                running[name] = subprocess.Popen(command, cwd=out, stdout=log, stderr=log, env=environ)
        for name, process in running.items():
            if process.wait(max(0.0, deadline - time.monotonic())):
                raise CommandError(f"{name} ended with exit code {process.returncode}: see {out / f'{name}.log'}")
    except subprocess.TimeoutExpired:
        raise CommandError(f"not finished after {PATIENCE_S:g} s: see the logs in {out}") from None
    finally:
        for process in running.values():
            if process.poll() is None:
                process.kill()
                process.wait()
    told = [json.loads((out / f"{name}.json").read_text()) for name in nodes]
    times = zip(*(each["rounds"] for each in told), strict=True)
    seconds = [max(done for _, done in of_round) - max(begun for begun, _ in of_round) for of_round in times]
    return _Ran(seconds=seconds[WARM_UP:], ends=[each["end"] for each in told])


# --- A node of either system, as a process of its own


Times = list[tuple[float, float]]
"""When each round began and ended."""


def _weights(parameters: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [parameters * (k + 1) // TENSORS - parameters * k // TENSORS for k in range(TENSORS)]
    return [torch.randn(size, generator=generator) * 0.02 for size in sizes]


def _end_of(weights: Sequence[Tensor]) -> str:
    from farloop.quant.digest import combine, digest

    return f"{combine(digest(part, place << 32) for place, part in enumerate(weights)):016x}"


def _as_gloo(address: str, rank: int, nodes: int, parameters: int, rounds: int) -> tuple[Times, str]:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=nodes)
    flat, times = torch.cat(_weights(parameters)).mul_(rank + 1), Times()
    for _ in range(rounds):
        dist.barrier()
        begun = time.monotonic()
        dist.all_reduce(flat)
        flat.div_(nodes)
        times.append((begun, time.monotonic()))
    dist.barrier()
    dist.destroy_process_group()
    return times, _end_of([flat])


def _as_farloop(address: str, name: str, *trace: str) -> tuple[Times, str]:
    from farloop.node import join

    marks = Marks()
    if trace:
        marks.take_in_node()
    tensors = load_file("first.safetensors")
    module = nn.Module()
    module.weights = nn.ParameterList(nn.Parameter(tensors[f"weights.{k}"]) for k in range(TENSORS))
    parameters = list(module.parameters())
    generator = torch.Generator().manual_seed(1 + int(name.rpartition("-")[2]))
    gradients = [torch.randn(parameter.shape, generator=generator) for parameter in parameters]
    optimizer, begun, times = torch.optim.SGD(parameters, lr=1e-4), [0.0], Times()

    def note(*_: object) -> None:
        marks.mark("stepped", len(times) + 1)
        begun[0] = time.monotonic()

    optimizer.register_step_post_hook(note)
    with join(address, module, optimizer, name=name, state_dir=Path(name), rate="own", clip="own") as node:
        while node.running:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            node.step()
            times.append((begun[0], time.monotonic()))
            marks.mark("merged", len(times))
    if trace:
        marks.write(Path(f"{name}.marks.json"))
    return times, _end_of([parameter.detach() for parameter in parameters])


def main(words: Sequence[str]) -> None:
    """Be a node: FILE farloop ADDRESS NAME [trace], or FILE gloo ADDRESS RANK NODES PARAMETERS ROUNDS."""
    torch.set_num_threads(1)
    path, system, address, *rest = words
    times, end = _as_farloop(address, *rest) if system == "farloop" else _as_gloo(address, *map(int, rest))
    Path(path).write_text(json.dumps({"rounds": times, "end": end}))


if __name__ == "__main__":
    main(sys.argv[1:])
