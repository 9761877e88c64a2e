"""Ranks of one node as processes: forked from a server that has imported torch, joined by gloo on this machine."""

import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

WAIT_S = 300  # for the answers of all ranks on a loaded machine
FOLLOW_S = 20  # for those of the others, once one has failed

_SERVER = multiprocessing.get_context("forkserver")
# Their imports take longer than the tests. The server finds modules on its own path alone, so none of this folder.
_SERVER.set_forkserver_preload(
    [
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "farloop.node.model.encoder",
        "farloop.quant.kernels.cpu.kernels",
        "pytest",
    ]
)


def ranks(count: int, work: Callable[..., Any], **given: Any) -> list[Any]:
    """What `work(**given)` returned on each of `count` ranks, which run it together, by rank. `work` is a function of a
    module on the path. Raises AssertionError with the traceback of the first rank that failed."""
    with tempfile.TemporaryDirectory() as folder:
        lines, processes = [], []
        for rank in range(count):
            ours, theirs = _SERVER.Pipe(duplex=False)
            process = _SERVER.Process(target=_run, args=(rank, count, folder, theirs, work, given))
            process.start()
            theirs.close()
            lines.append(ours)
            processes.append(process)
        try:
            told = _heard(lines)
        finally:
            for process in processes:
                process.kill()
                process.join()
    failures = [(at, error) for error, at, _ in told if error]
    assert not failures, min(failures)[1]  # the first one: others follow from it
    return [answer for _, _, answer in told]


def _heard(lines: list[Connection]) -> list[tuple[str, float, Any]]:
    """Error, when, and answer of every rank; once one has failed, others that wait for it are not waited for."""
    told: dict[int, tuple[str, float, Any]] = {}
    deadline = time.monotonic() + WAIT_S
    while len(told) < len(lines):
        waiting = {id(line): rank for rank, line in enumerate(lines) if rank not in told}
        ready = wait([line for rank, line in enumerate(lines) if rank not in told], deadline - time.monotonic())
        for line in ready:
            try:
                told[waiting[id(line)]] = line.recv()
            except EOFError:
                told[waiting[id(line)]] = "the process ended without an answer", 0.0, None
            if told[waiting[id(line)]][0]:
                deadline = min(deadline, time.monotonic() + FOLLOW_S)
        if not ready:
            return [told.get(rank, (f"rank {rank}: no answer in time", math.inf, None)) for rank in range(len(lines))]
    return [told[rank] for rank in range(len(lines))]


def _run(rank: int, count: int, folder: str, line: Connection, work: Callable[..., Any], given: dict[str, Any]) -> None:
    import traceback

    import torch
    import torch.distributed as dist

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "CUDA_VISIBLE_DEVICES": ""}
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count)
        line.send(("", 0.0, work(**given)))
        dist.barrier()  # none ends while another still reads from it
    except BaseException:  # noqa: BLE001 - the edge of the process
        line.send((f"rank {rank}: {traceback.format_exc()}", time.monotonic(), None))
    line.close()
    os._exit(0)  # the interpreter's own end aborts now and then where gloo has been used
