"""A node of several processes: torchrun starts them, as it does anywhere else; here its outcome becomes our exit code.

`torchrun --standalone --nproc-per-node N -m farloop.cli.main node NODE.toml` does the same, but ends with 1 whatever
went wrong.
"""

import logging
import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from typing import NoReturn

from farloop.config.exit_codes import CommandError, ExitCode

_log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"

LINGER_S = 2.0
"""Rank 0 has this long to end with its own code before another rank's makes torchrun stop them all."""

_LOST = re.compile(r"connection (was )?(closed|reset)|remote (process|worker)|broken pipe", re.IGNORECASE)
"""What gloo and NCCL say of a peer that is gone."""


def launch(arguments: list[str], *, nproc: int, threads: int) -> ExitCode:
    """Run `farloop ARGUMENTS` as `nproc` ranks on this host, to the end of all.

    Without `threads` the ranks share the processors: each would take all of them else.
    """
    # Only who launches ranks pays for the import.
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    stay_on_this_host(os.environ)
    store, endpoint = store_on_loopback()
    if threads == 0:
        arguments = [*arguments, "--set", f"node.threads={max(1, (os.cpu_count() or 1) // nproc)}"]
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=f"farloop-{os.getpid()}",
        rdzv_backend="static",
        rdzv_endpoint=endpoint,
        rdzv_configs={"rank": 0},
        local_addr=LOOPBACK,
        max_restarts=0,
    )
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what they would tell is told below, in one line
    try:
        elastic_launch(config, sys.executable)("-m", "farloop.cli.main", *arguments)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        _log.error("ranks failed codes=%r", str(codes))
        return outcome(codes)
    except SignalException:
        _log.info("left note='the same command takes part again'")
    finally:
        del store  # the one that the ranks met at
    return ExitCode.DONE


def store_on_loopback() -> tuple[object, str]:
    """Where the ranks of one host meet, and its address: torch by itself would listen on every interface.

    Torch shares the store of a port within a process: who asks for one there gets this.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
    )
    return store, f"{LOOPBACK}:{port}"


def stay_on_this_host(environ: MutableMapping[str, str]) -> None:
    """Have gloo and NCCL listen where nobody else can reach them, unless somebody has said where."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        environ.setdefault("NCCL_SOCKET_IFNAME", loopback)


def outcome(codes: dict[int, int]) -> ExitCode:
    """What the node ended with: rank 0 knows best, another rank mostly knows only that rank 0 is gone."""
    known = {code.value for code in ExitCode} - {ExitCode.DONE}
    for rank in sorted(codes):
        if codes[rank] in known - {ExitCode.UNEXPECTED}:
            return ExitCode(codes[rank])
    return ExitCode.UNEXPECTED


def rank_of(environ: Mapping[str, str]) -> int | None:
    """This process's rank where torchrun started it; None otherwise."""
    return int(environ.get("RANK", "0")) if "WORLD_SIZE" in environ else None


@contextmanager
def follows_rank_0(rank: int) -> Iterator[None]:
    """Around a rank's work: one that lost rank 0 lets that one say why, and end first, for its exit code counts."""
    try:
        yield
    except RuntimeError as error:
        if rank == 0 or not _LOST.search(str(error)):
            raise
        with suppress(KeyboardInterrupt):
            time.sleep(LINGER_S)
        raise CommandError(f"rank {rank} lost rank 0, whose own line says why", ExitCode.UNEXPECTED) from error


def end_rank(code: int) -> NoReturn:
    """End the process here and now: its work is done, its state on disk.

    The interpreter's own end aborts one time in five where gloo has been used (torch 2.13, "terminate called without
    an active exception"), and torchrun takes that for a failure of the node.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
