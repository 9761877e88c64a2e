"""Seconds and bytes of one synchronisation of a model between nodes on this machine, and of gloo's all-reduce.

Nothing is trained: the optimizer subtracts a fixed gradient, and every inner step is followed by a round. A round lasts
from the moment at which the last node has taken its step until the last node has the merged weights.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from farloop.lab.bench.processes import WITHOUT_GPU, emulated, run_together, stores, write_run
from farloop.lab.bench.sync_nodes import weights
from farloop.lab.bench.sync_trace import Marks, Trace, trace_of
from farloop.local.processes import free_port
from farloop.local.relay import Link
from farloop.monitoring.units import size_text

WARM_UP = 2  # rounds that are not counted
_ENVIRON = {**WITHOUT_GPU, "GLOO_SOCKET_IFNAME": "lo", "THP_MEM_ALLOC_ENABLE": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    system: str
    codec: str
    parameters: int
    nodes: int
    rounds: int
    s_per_round_median: float
    s_per_round_min: float
    s_per_round_max: float
    bytes_per_round: int
    """Over all links, both ways. farloop: counted, without the first weights. gloo: reckoned, as of a ring."""
    bit_equal: bool
    """Whether all nodes ended with the same bits."""
    link: str = ""
    """Emulated link of each node; empty: none."""
    s_floor: float | None = None
    """The bytes that a round sends over a node's link, divided by its rate."""
    trace: Trace | None = None
    """Where the time went, if asked for; only farloop has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What is synchronised."""

    parameters: int
    nodes: int
    rounds: int


def measure(
    what: Measured,
    codecs: Sequence[str],
    out: Path,
    *,
    links: Sequence[str] = ("",),
    trace: bool = False,
    bulk: str = "session",
) -> list[Row]:
    """gloo, farloop with each codec over each link, and gloo again: the row of gloo has the rounds of both, because a
    machine's speed changes. Links are emulated for farloop alone. `bulk`: "store" for rows of an object store, too,
    without link and trace.

    Files and logs are in `out`. With `trace` farloop's rows say where the time went. Raises CommandError: a process
    failed, or took too long.
    """
    first = _gloo(what, out / "gloo-before")
    rows = list[Row]()
    for link in links:
        for codec in codecs:
            rows.append(_farloop(what, codec, out / f"farloop-{len(rows)}", link, trace=trace))
    with stores(bulk) as (_, *urls):
        for url in urls:
            rows += [_farloop(what, codec, out / f"store-{codec}", "", trace=False, store=url) for codec in codecs]
    again = _gloo(what, out / "gloo-after")
    both = _Ran(seconds=[*first.seconds, *again.seconds], ends=[*first.ends, *again.ends])
    sent = 2 * (what.nodes - 1) * 4 * what.parameters  # each node sends 2·(n − 1)/n of the model
    return [_row("gloo", "fp32", what, both, sent), *rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ran:
    seconds: list[float]  # of each round that counts
    ends: list[str]  # of each node, what it ended with


def _row(system: str, codec: str, what: Measured, ran: _Ran, sent: int) -> Row:
    return Row(
        system=system,
        codec=codec,
        parameters=what.parameters,
        nodes=what.nodes,
        rounds=len(ran.seconds),
        s_per_round_median=statistics.median(ran.seconds),
        s_per_round_min=min(ran.seconds),
        s_per_round_max=max(ran.seconds),
        bytes_per_round=sent,
        bit_equal=len(set(ran.ends)) == 1,
    )


def _gloo(what: Measured, out: Path) -> _Ran:
    out.mkdir(parents=True)
    address = f"tcp://127.0.0.1:{free_port()}"
    told = [str(number) for number in (what.nodes, what.parameters, what.rounds + WARM_UP)]
    return _run(out, {}, {f"node-{rank}": ["gloo", address, str(rank), *told] for rank in range(what.nodes)})


def _farloop(what: Measured, codec: str, out: Path, link: str, *, trace: bool, store: str = "") -> Row:
    out.mkdir(parents=True)
    first = {f"weights.{k}": w for k, w in enumerate(weights(what.parameters))}
    steps = what.rounds + WARM_UP
    run = {"name": "sync", "nodes": what.nodes, "steps": steps, "method": "diloco", "h": 1, "tau": 0, "mix": 0.0}
    port = write_run(out, first, run, codec=codec, store=store)
    names = [f"node-{k}" for k in range(what.nodes)]
    run_coordinator = ["farloop.lab.bench.sync_trace", "coordinator.marks.json"] if trace else ["farloop.cli.main"]
    with emulated(link, port, what.nodes) as ports:
        ran = _run(
            out,
            {"coordinator": ["-m", *run_coordinator, "coordinator", "run.toml"]},
            {
                name: ["farloop", f"tcp://127.0.0.1:{to}", name, *(["trace"] if trace else [])]
                for name, to in zip(names, ports, strict=True)
            },
        )
    kinds = [node["bytes_by_kind"] for node in json.loads((out / "state" / "status.json").read_text())["nodes"]]
    sent = sum(count for kind in kinds for name, count in kind.items() if name != "snapshot")
    row = _row("by store" if store else "farloop", codec, what, ran, sent // steps)
    if link:
        row = replace(row, link=link, s_floor=row.bytes_per_round / what.nodes / Link.parse(link).bytes_per_s)
    if not trace:
        return row
    marks = {name: Marks.read(out / f"{name}.marks.json") for name in ["coordinator", *names]}
    return replace(row, trace=trace_of(marks, WARM_UP + 1))


def _run(out: Path, daemons: Mapping[str, Sequence[str]], nodes: Mapping[str, Sequence[str]]) -> _Ran:
    """Run all to their ends. Every node tells when each of its rounds began and ended."""
    commands = {
        **daemons,
        **{name: ["-m", "farloop.lab.bench.sync_nodes", f"{name}.json", *words] for name, words in nodes.items()},
    }
    run_together(commands, out, _ENVIRON)
    told = [json.loads((out / f"{name}.json").read_text()) for name in nodes]
    times = zip(*(each["rounds"] for each in told), strict=True)
    seconds = [max(done for _, done in of_round) - max(begun for begun, _ in of_round) for of_round in times]
    return _Ran(seconds=seconds[WARM_UP:], ends=[each["end"] for each in told])


def text(rows: Sequence[Row]) -> str:
    """A line for each row, and below it the stages of its trace. The first row is gloo's."""
    floor, lines = rows[0].s_per_round_median, list[str]()
    for row in rows:
        against = f"{row.s_per_round_median / floor:5.1f} x gloo"
        if row.s_floor is not None:
            against = f"{row.s_per_round_median / row.s_floor:.2f} x its bytes over {row.link}"
        lines.append(
            f"{row.system:<8} {row.codec:<8} {row.s_per_round_median:7.3f} s a round (median; {row.s_per_round_min:.3f}"
            f" to {row.s_per_round_max:.3f}), {against}, "
            f"{size_text(row.bytes_per_round)}{'' if row.bit_equal else '; the nodes ended with different weights'}"
        )
        if row.trace is not None:
            lines.append(f"  {'ms: mean, median, most':>64}")
            for stage in row.trace.stages:
                times = (1000 * seconds for seconds in (stage.s_mean, stage.s_median, stage.s_max))
                lines.append(f"  {stage.name:<40}" + "".join(f"{ms:8.1f}" for ms in times))
            spent = ", ".join(f"{who} {1000 * seconds:.0f}" for who, seconds in row.trace.cpu_s_per_round.items())
            lines.append(f"  processor time of a round, ms: {spent}")
    return "\n".join(lines)
