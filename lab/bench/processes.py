"""Processes of one measurement: each in the folder of the measurement, with a log of its own there."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Final

from safetensors.torch import save
from torch import Tensor

from farloop.config.exit_codes import CommandError, write_output
from farloop.config.sources import dump_toml
from farloop.lab.bench.http_store import ObjectServer
from farloop.local.processes import Children, free_port
from farloop.local.relay import Link, Relay, RelayThread

PATIENCE_S = 1800.0  # for all processes of one measurement
WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # in the environment of a process
FIRST: Final = "first.safetensors"
_POLL_S = 0.05


def write_run(
    out: Path,
    weights: Mapping[str, Tensor],
    run: Mapping[str, object],
    *,
    codec: str = "",
    store: str = "",
    **coordinator: object,
) -> int:
    """Write `out`/run.toml, with these first weights, and state in `out`/state. Returns the coordinator's port.

    `codec`: of both directions, with an outer momentum; empty: the method's. `store`: URL of the object store that
    deltas and updates go by; empty: they go by the session. `coordinator`: more settings of it.
    """
    port = free_port()
    write_output(out / FIRST, save(dict(weights)))
    both = {"codec_up": codec, "codec_down": codec, "outer_lr": 0.7, "outer_momentum": 0.9} if codec else {}
    quiet = {"state_dir": "state", "bind": f"tcp://127.0.0.1:{port}", "http": "", "probe_bytes": 0}
    tables = {"run": {**run, **both, "init": FIRST}, "coordinator": {**quiet, **coordinator}}
    (out / "run.toml").write_text(dump_toml(with_store(tables, store)))
    return port


def with_store(tables: Mapping[str, Mapping[str, object]], store: str) -> dict[str, dict[str, object]]:
    """The settings of a run whose deltas and updates go by this store; unchanged if it is empty."""
    more = {"run": {"bulk": "store"}, "coordinator": {"bulk_url": store}} if store else {}
    return {name: {**table, **more.get(name, {})} for name, table in tables.items()}


@contextmanager
def stores(bulk: str) -> Iterator[Sequence[str]]:
    """What deltas and updates go by in the runs that are compared: the session (empty), and for `bulk` "store" also the
    URL of an object store in this process."""
    if bulk == "session":
        yield [""]
        return
    with ObjectServer().serving() as server:
        yield ["", server.url]


@contextmanager
def emulated(link: str, port: int, count: int) -> Iterator[Sequence[int]]:
    """Ports of this machine from which each of `count` nodes reaches `port` over a link of its own, given as RATE/RTT;
    if that is empty, the port itself."""
    if not link:
        yield [port] * count
        return
    relays = [Relay(target_host="127.0.0.1", target_port=port, link=Link.parse(link)) for _ in range(count)]
    with RelayThread(*relays):
        yield [relay.port for relay in relays]


def run_together(
    commands: Mapping[str, Sequence[str]],
    out: Path,
    environ: Mapping[str, str] = MappingProxyType({}),
    *,
    of_ranks: bool = False,
    after: Mapping[str, Path] = MappingProxyType({}),
) -> dict[str, int]:
    """Run Python with the arguments of each to their ends, in `out`, where NAME.log is its log; the largest resident
    memory of each, in bytes, 0 where the system does not tell. It is what was last seen while they ran: what the kernel
    tells of a process that has ended includes what its parent held when it was started.

    `environ`: beside that of this process. `of_ranks`: a name that ends in -NUMBER is the rank of that number, in its
    environment. `after`: files; a process of that name is started once its file exists.
    Raises CommandError: a process failed, or took too long.
    """
    peaks = dict.fromkeys(commands, 0)
    deadline = time.monotonic() + PATIENCE_S
    with Children(out, stop_s=0.0) as children:
        left = dict(commands)
        while left or any(child.running for child in children):
            for name in [name for name in left if name not in after or after[name].exists()]:
                rank = name.rpartition("-")[2]
                own = {"RANK": rank, "LOCAL_RANK": rank} if of_ranks and rank.isdigit() else {}
                children.start(name, left.pop(name), command=(), cwd=out, environ={**environ, **own})
            for child in children:
                peaks[child.name] = max(peaks[child.name], status_bytes("VmHWM", child.process.pid))
            children.check()
            if time.monotonic() > deadline:
                raise CommandError(f"not finished after {PATIENCE_S:g} s: see the logs in {out}")
            time.sleep(_POLL_S)
        children.check()
    return peaks


def status_bytes(field: str, process: int | str = "self") -> int:
    """A field of its /proc/PROCESS/status; 0 where that does not tell: not on Linux, or the process has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) << 10
    return 0
