"""`farloop node` with several ranks: torchrun's agent in this process, which starts them, and starts them again.

`torchrun … -m farloop.cli.main node NODE.toml` does the same, but it restarts ranks whatever they ended with, and every
failure ends with exit code 1.
"""

import logging
import math
import os
import socket
import sys
import time
from collections.abc import Mapping, MutableMapping

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from farloop.config.exit_codes import CommandError, ExitCode
from farloop.node.parent import AGENT
from farloop.node.settings import NodeConfig

_log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"

NO_USE = frozenset({ExitCode.USAGE, ExitCode.REFUSED, ExitCode.INTERRUPTED})
"""Causes after which a restart would end the same way, or is not wanted."""

FORGIVEN_S = 3600.0  # a node that has run for this long has all of its restarts again


def launch(arguments: list[str], config: NodeConfig) -> ExitCode:
    """Run `farloop ARGUMENTS` as the ranks of this host, and start them again after a failure.

    Without `threads`, the ranks share the processors.

    Raises CommandError: the other hosts of the node do not come, or have ended.
    """
    if config.threads == 0:
        threads = max(1, (os.cpu_count() or 1) // config.nproc)
        own = f"--set=node.threads={threads}"
        arguments = [*(word for word in arguments if not word.startswith("--set=node.threads=")), own]
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # reported here in one line
    store, parameters = _rendezvous_of(config)
    spec = WorkerSpec(
        role="rank",
        local_world_size=config.nproc,
        entrypoint=sys.executable,
        args=("-m", "farloop.cli.main", *arguments),
        rdzv_handler=get_rendezvous_handler(parameters),
        max_restarts=config.restarts,
        monitor_interval=0.1,
        local_addr=parameters.local_addr,
    )
    try:
        return _run(spec, parameters, ExitCode(config.leave_code))
    finally:
        del store


def _run(spec: WorkerSpec, parameters: RendezvousParameters, left: ExitCode) -> ExitCode:
    os.environ[AGENT] = str(os.getpid())
    agent = _Agent(spec, DefaultLogsSpecs(os.devnull))  # else each start leaves a folder in /tmp
    try:
        result = agent.run()
        spec.rdzv_handler.shutdown()  # not after a signal: the other hosts may go on
    except SignalException:
        _log.info("left note='the same command rejoins the run'")
        return left
    except RendezvousClosedError as error:
        raise CommandError("the node has ended on another host, whose log says why", ExitCode.UNEXPECTED) from error
    except (RendezvousError, DistError) as error:
        where = f"the other hosts of the node at {parameters.endpoint}"
        raise CommandError(
            f"cannot meet {where}: {error}; is [node] rendezvous right?", ExitCode.UNREACHABLE
        ) from error
    return outcome(causes(result.failures)) if result.is_failed() else ExitCode.DONE


class _Agent(LocalElasticAgent):
    """Does not restart where that is of no use, and says in one line what happened."""

    _started = -math.inf

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED:
            codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
            most = worker_group.spec.max_restarts
            if time.monotonic() - self._started > FORGIVEN_S:
                self._remaining_restarts = most
            if NO_USE & set(causes(result.failures).values()):
                self._remaining_restarts = 0
            nth = f"{most - self._remaining_restarts + 1} of {most}" if self._remaining_restarts else "none"
            _log.error("ranks failed codes=%r restart=%r", str(codes), nth)
        return result

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        # torch 2.13 tells the place of the ranks' store once only: a host that comes back would wait for it in vain.
        worker_group.spec.rdzv_handler._bootstrap_store_info = None  # type: ignore[attr-defined]
        super()._rendezvous(worker_group)

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        super()._initialize_workers(worker_group)
        self._started = time.monotonic()


def causes(failures: Mapping[int, ProcessFailure]) -> dict[int, int]:
    """The exit codes by rank, without those of ranks that the agent interrupted because another one had failed.

    Torch lists them as they ended, and keeps times in whole seconds.
    """
    first = min(failures, key=lambda rank: failures[rank].timestamp)
    codes = {rank: failure.exitcode for rank, failure in failures.items()}
    return {rank: code for rank, code in codes.items() if rank == first or code != ExitCode.INTERRUPTED}


def _rendezvous_of(config: NodeConfig) -> tuple[object, RendezvousParameters]:
    """Where the ranks meet, and what has to live as long as they do."""
    if not config.rendezvous:
        stay_on_this_host(os.environ)
        store, endpoint = store_on_loopback()
        return store, RendezvousParameters("static", endpoint, "farloop", 1, 1, LOOPBACK, rank=0)
    least, _, most = config.hosts.partition(":")
    run_id = f"farloop-{config.name}"
    return None, RendezvousParameters("c10d", config.rendezvous, run_id, int(least), int(most or least))


def store_on_loopback() -> tuple[object, str]:
    """The rendezvous store of the ranks and its address; torch's own would listen on every interface.

    Torch shares the store of a port within a process.
    """
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
