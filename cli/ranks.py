"""Nodes of several processes, started by torchrun, whose result becomes the exit code.

`torchrun --standalone --nproc-per-node N -m farloop.cli.main node NODE.toml` does the same, but every failure ends with
exit code 1.
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

LINGER_S = 2.0  # time for rank 0 to end with its own code before the failure of another rank makes torchrun stop all

_LOST = re.compile(r"connection (was )?(closed|reset)|remote (process|worker)|broken pipe", re.IGNORECASE)
"""Messages of gloo and NCCL about a lost peer."""


def launch(arguments: list[str], *, nproc: int, threads: int) -> ExitCode:
    """Run `farloop ARGUMENTS` as `nproc` ranks on this host.

    Without `threads`, the ranks share the processors.
    """
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
        logging.getLogger(name).setLevel(logging.CRITICAL)  # reported below in one line
    try:
        elastic_launch(config, sys.executable)("-m", "farloop.cli.main", *arguments)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        _log.error("ranks failed codes=%r", str(codes))
        return outcome(codes)
    except SignalException:
        _log.info("left note='the same command rejoins the run'")
    finally:
        del store
    return ExitCode.DONE


def store_on_loopback() -> tuple[object, str]:
    """The rendezvous store of the ranks and its address; torch's own would listen on every interface.

    Torch shares the store of a port within a process.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
    )
    return store, f"{LOOPBACK}:{port}"


def stay_on_this_host(environ: MutableMapping[str, str]) -> None:
    """Make gloo and NCCL listen on loopback, unless configured otherwise."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        environ.setdefault("NCCL_SOCKET_IFNAME", loopback)


def outcome(codes: dict[int, int]) -> ExitCode:
    """The exit code of the node: that of the lowest rank with a known cause."""
    known = {code.value for code in ExitCode} - {ExitCode.DONE}
    for rank in sorted(codes):
        if codes[rank] in known - {ExitCode.UNEXPECTED}:
            return ExitCode(codes[rank])
    return ExitCode.UNEXPECTED


def rank_of(environ: Mapping[str, str]) -> int | None:
    """The rank of this process under torchrun, else None."""
    return int(environ.get("RANK", "0")) if "WORLD_SIZE" in environ else None


@contextmanager
def follows_rank_0(rank: int) -> Iterator[None]:
    """Around the work of a rank: if it lost rank 0, let rank 0 report and end first, because its exit code counts."""
    try:
        yield
    except RuntimeError as error:
        if rank == 0 or not _LOST.search(str(error)):
            raise
        with suppress(KeyboardInterrupt):
            time.sleep(LINGER_S)
        raise CommandError(f"rank {rank} lost rank 0, whose own line says why", ExitCode.UNEXPECTED) from error


def end_rank(code: int) -> NoReturn:
    """End the process at once, after its work.

    Interpreter shutdown aborts one time in five after use of gloo (torch 2.13, "terminate called without an active
    exception"), which torchrun takes for a failure.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
