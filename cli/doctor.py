"""`farloop doctor`: check this machine and a settings file before a daemon starts.

Checks change nothing. Buffers are judged by the bandwidth-delay product of the path to the coordinator: its round trip
is measured; its rate is the coordinator's measurement of this node, or the rate of the card.
"""

import asyncio
import contextlib
import dataclasses
import os
import platform
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import torch

from farloop.algo.spec import RunSpec, to_plain
from farloop.cli.daemons import refuse_another
from farloop.cli.findings import Finding, congestion_finding, fail, ok, wall_clock, warn
from farloop.cli.status import DEFAULT_URL, end_of, fetch
from farloop.config.exit_codes import CommandError
from farloop.config.memory import memory_of
from farloop.config.run_spec import planned
from farloop.config.settings import NodeFile, RunFile, load
from farloop.coordinator.errors import StorageError
from farloop.coordinator.leadership import Unreachable, term_store
from farloop.coordinator.net.zmq_mirror import leading_peer
from farloop.coordinator.net.zmq_router import most_connections
from farloop.coordinator.settings import CoordinatorConfig
from farloop.coordinator.standby import has_run
from farloop.coordinator.storage.bucket import CopyFailed
from farloop.coordinator.storage.objects import TRIAL_BYTES, signer, skew, try_store
from farloop.coordinator.storage.segment import Entry, Segments
from farloop.coordinator.storage.state_reader import ledger_of
from farloop.monitoring import descriptors
from farloop.monitoring.addresses import Address, bound_socket, parse_each_tcp, parse_host_port, parse_tcp
from farloop.monitoring.status import InventoryStatus
from farloop.monitoring.units import count_text, duration_text, rate_text, size_text
from farloop.node.data.corpus import load_corpus
from farloop.node.data.token_file import BYTES
from farloop.node.errors import CorpusError, NodeError, StateUnusable
from farloop.node.link import LinkConfig
from farloop.node.machine_info import Limits, SysfsReader, limits, read_inventory
from farloop.node.state_dir import NodeState
from farloop.node.zmq_dealer import public_of, try_link
from farloop.quant.errors import UnsupportedHost
from farloop.quant.registry import codec_named
from farloop.quant.self_test import try_codecs
from farloop.runtime.http_objects import Client, Failed
from farloop.runtime.version import version_of
from farloop.wire.keys import AllowList, KeyFileError, load_publics, load_secret
from farloop.wire.link_measurement import LARGE_LOST, MTU_FIX
from farloop.wire.machine_info import RDMA, Inventory, Nic

FEW_FILES: Final = 4096  # a coordinator needs some for every node, its journal and its pages; many systems allow 1024

TRY_S: Final = 3.0
LARGE_BYTES, LARGE_S = 16_000, 10.0  # more than a packet has, and how long it may take there and back


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """The path to the coordinator; None where not measured."""

    rtt_s: float | None = None
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None


def machine(told: Inventory) -> list[Finding]:
    """Network cards, and files that could not be read."""
    found = [_card(nic) for nic in told.nics]
    if not told.nics:
        fix = "name it in [node] nics, as eth0=ethernet/10gbit; a container may also be given FARLOOP_LABELS"
        found.append(warn("card", "no network card is visible here", fix))
    if told.unread:
        fix = "run as a user that may read them, or mount /sys; training does without"
        found.append(warn("sysfs", f"not readable: {'; '.join(told.unread)}", fix))
    where = f"{told.site} ({told.site_from} says so)" if told.site else "none named; [node] site names it"
    return [*found, ok("site", where, data={"labels": dict(told.labels)})]


def _card(nic: Nic) -> Finding:
    rate = f"{rate_text(nic.bits_per_s)} ({nic.source('bits_per_s')})" if nic.bits_per_s else "rate unknown"
    parts = [nic.kind, rate]
    if nic.netdev and nic.netdev != nic.name:
        parts.append(f"on {nic.netdev}")
    if nic.members:
        parts.append(f"bond of {', '.join(nic.members)}")
    parts += [f"{fact.source} says {fact.value}" for fact in nic.others]
    detail, data = f"{nic.name}: {', '.join(parts)}", to_plain(nic)
    if nic.usable or not nic.active:
        return ok("card", f"{detail}; {nic.why}" if nic.why else detail, data=data)
    why, _, fix = nic.why.partition("; ")
    fix = fix or "let this process open it, or leave its collectives to TCP"
    return warn("card", f"{detail}: {why}", fix, data=data)


def limit_findings(found: Limits, told: Inventory) -> list[Finding]:
    findings = [_files(found.nofile, found.nofile_hard)]
    if any(nic.kind in RDMA for nic in told.nics):
        locked = "without bound" if found.memlock_bytes is None else size_text(found.memlock_bytes)
        findings.append(ok("memlock", f"memory that may be locked: {locked}"))
    return findings


def _files(soft: int, hard: int) -> Finding:
    """Open files; both daemons raise the soft limit to the hard one."""
    connections = most_connections(hard - descriptors.SPARE)
    detail = f"{hard:,} files and connections may be open (soft limit {soft:,}, which a daemon raises)"
    detail += f": a coordinator takes {connections:,} connections"
    if hard < FEW_FILES:
        fix = f"raise the hard limit: ulimit -Hn {FEW_FILES}, or LimitNOFILE={FEW_FILES} in the unit"
        return warn("files", detail, fix)
    return ok("files", detail)


def way_of(name: str, seen: InventoryStatus | None, rtt_s: float | None, told: Inventory) -> Way:
    """The path to the coordinator: its measurements, else the cards' rates."""
    best = max((nic.flow_bits_per_s or 0.0 for nic in told.nics if nic.active), default=0.0) / 8
    rates = {(link["from"], link["to"]): link["bytes_per_s"] for link in (seen or {"links": []})["links"]}
    return Way(
        rtt_s=rtt_s,
        up_bytes_per_s=rates.get((name, "coordinator")) or best or None,
        down_bytes_per_s=rates.get(("coordinator", name)) or best or None,
    )


def buffers(found: Limits, way: Way) -> list[Finding]:
    """Whether socket buffers hold the bandwidth-delay product, and whether congestion control fits the round trip."""
    findings = []
    for key, rate, size in (
        ("tcp_wmem", way.up_bytes_per_s, found.send_bytes),
        ("tcp_rmem", way.down_bytes_per_s, found.receive_bytes),
    ):
        if rate is None or way.rtt_s is None or size is None:
            continue
        product = rate * way.rtt_s
        detail = f"{key}: {size_text(size)}; the link needs {size_text(product)}"
        if size < product:
            most = rate_text(8 * size / way.rtt_s)
            fix = f"one connection gets {most} at most: raise the last number of net.ipv4.{key} to {round(2 * product)}"
            findings.append(warn("buffers", detail, fix))
        else:
            findings.append(ok("buffers", detail))
    if found.congestion and way.rtt_s is not None:
        findings.append(congestion_finding(found.congestion, way.rtt_s, may_choose="bbr" in found.allowed))
    return findings


def dial_back(address: Address) -> Finding:
    """Listen on the declared port, dial the declared address, and check that the connection arrives here."""
    token = secrets.token_bytes(16)
    try:
        server = bound_socket(Address(host="*", port=address.port))
        server.listen()
    except OSError as error:
        if connect(address) is None:
            detail = f"{address} answers; whether it is this node was not tried: port {address.port} here is taken"
            return ok("address", detail)
        why = (error.strerror or str(error)).lower()
        fix = f"free port {address.port}, or choose another in [node] address"
        return fail("address", f"{address} is not reached, and {why} here", fix)
    with server:
        try:
            connection = socket.create_connection((address.host, address.port), TRY_S)
        except OSError as error:
            fix = (
                "forward the port, or open it in the firewall. Some routers do not connect an inside "
                "machine to their outside address: while the node runs, the coordinator says in farloop "
                "status --json whether it reaches it"
            )
            return warn("address", f"{address} is not reached from here: {(error.strerror or str(error)).lower()}", fix)
        with connection, contextlib.suppress(OSError):
            connection.sendall(token)
            server.settimeout(TRY_S)
            came, _ = server.accept()
            with came:
                came.settimeout(TRY_S)
                if came.recv(len(token)) == token:
                    return ok("address", f"{address} reaches this machine")
    fix = "[node] address must name this machine, or a port that is forwarded to it"
    return fail("address", f"{address} belongs to another machine", fix)


def as_the_coordinator_sees(name: str, seen: InventoryStatus | None) -> Sequence[Finding]:
    """What a running coordinator reports about this node's address and links."""
    machine = next((node for node in (seen or {"nodes": []})["nodes"] if node["name"] == name), None)
    if seen is None or machine is None:
        return []
    findings = []
    if machine["reachable"] is not None:
        detail = f"the coordinator {'reaches' if machine['reachable'] else 'does not reach'} {machine['address']}"
        fix = "forward the port, or open it in the firewall"
        findings.append(ok("reachable", detail) if machine["reachable"] else fail("reachable", detail, fix))
    for link in seen["links"]:
        if name not in (link["from"], link["to"]) or (rate := link["bytes_per_s"]) is None:
            continue
        rtt = f", round trip {1000 * link['rtt_s']:.1f} ms" if link["rtt_s"] is not None else ""
        detail = f"{link['from']} → {link['to']}: {rate_text(8 * rate)} by {link['measured_by']}{rtt}"
        findings.append(ok("link", detail, data=dict(link)))
    return findings


LOW_DISK_BYTES = 2_000_000_000


def examine(
    path: Path | None,
    *,
    flags: Iterable[str],
    environ: Mapping[str, str],
    url: str,
    store: str = "",
    root: Path = Path("/"),
) -> list[Finding]:
    """Check this machine and a settings file. `store`: a signed URL. `root`: where /sys and /proc are."""
    tree = SysfsReader(root)
    told, allowed = read_inventory(environ, root=root), limits(tree)
    findings = [*versions(), *devices(), monotonic_clock(), *limit_findings(allowed, told)]
    if store:
        findings.append(store_from_here(store))
    if path is None:
        return [*findings, *machine(told), disk(Path.cwd())]
    try:
        file = load(path, flags=flags, environ=environ)
    except CommandError as error:
        return [*findings, fail("settings", str(error), "correct the file")]
    findings.append(ok("settings", str(path)))
    if isinstance(file, RunFile):
        return [*findings, *machine(told), *_run_findings(file)]
    config, seen = file.node, _seen(url)
    told = read_inventory(environ, config.site, config.address, config.nics, root=root)
    findings += [*machine(told), *_node_findings(file, url)]
    way = way_of(config.name, seen, round_trip_s(_leading(parse_each_tcp(config.coordinator))), told)
    findings += buffers(dataclasses.replace(allowed, congestion=config.congestion or allowed.congestion), way)
    if config.address:
        findings.append(dial_back(parse_tcp(config.address)))
    return [*findings, *as_the_coordinator_sees(config.name, seen)]


def versions() -> list[Finding]:
    """Python and the libraries whose versions matter."""
    names = ("farloop", "torch", "pyzmq", "numpy")
    libraries = ", ".join(f"{name} {version_of(name)}" for name in names)
    python = f"{platform.python_implementation()} {platform.python_version()} on {platform.system()}"
    return [ok("python", f"{python} {platform.machine()}"), ok("libraries", libraries)]


def devices() -> list[Finding]:
    """CPUs and GPUs."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    detail = f"{usable} usable, torch takes {threads} threads"
    fix = "set [node] threads, or OMP_NUM_THREADS: threads that share a core slow each other down"
    cpu = warn("cpu", detail, fix) if threads > usable else ok("cpu", detail)
    if not torch.cuda.is_available():
        fix = "none is needed for a small model; else look at the driver with nvidia-smi and at torch's build"
        built = "torch is a CPU build" if torch.version.cuda is None else "torch finds no CUDA device"
        return [cpu, warn("gpu", built, fix)]
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return [cpu, ok("gpu", ", ".join(names)), gpu_kernels(torch.device("cuda"))]


def gpu_kernels(device: torch.device) -> Finding:
    """Whether the kernels of the usual codecs run there, as a node tries them before it trains."""
    names = ("q4", "q4r", "q8")
    try:
        faults = try_codecs([codec_named(name) for name in names], device)
    except UnsupportedHost as error:
        return fail("gpu kernels", str(error), "train on another device, or with another driver")
    if faults:
        told = "; ".join(f"{name}: {fault}" for name, fault in faults.items())
        return warn("gpu kernels", told, "codecs run in plain torch until this is mended, several times slower")
    return ok("gpu kernels", f"{', '.join(names)} give the same bytes as on a CPU")


def monotonic_clock() -> Finding:
    """The monotonic clock, which all decisions use."""
    clock = time.get_clock_info("monotonic")
    if not clock.monotonic or clock.resolution > 0.001:
        fix = "time-outs will be coarse; run on another kernel or machine"
        return warn("clock", f"resolution {clock.resolution:g} s", fix)
    return ok("clock", f"{clock.implementation}, {clock.resolution:.0e} s")


def disk(folder: Path, *, needed_bytes: int = LOW_DISK_BYTES) -> Finding:
    """Free space and write access where `folder` is or will be."""
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return fail("disk", f"{there} cannot be written", "choose another state_dir, or make it writable for this user")
    free = shutil.disk_usage(there).free
    detail = f"{size_text(free)} free at {there}"
    if free < needed_bytes:
        fix = f"make room: the node needs {size_text(needed_bytes)}, and a full disk halts the run"
        return warn("disk", detail, fix)
    return ok("disk", detail)


def _run_findings(file: RunFile) -> list[Finding]:
    config, needed = file.coordinator, LOW_DISK_BYTES
    try:
        plan = planned(file)
        identity = plan.spec.identity
        needed = max(needed, sum(memory_of(plan.spec).coordinator_disk.values()))
        size = f"{count_text(identity.layout.num_parameters)} parameters"
        detail = f"{identity.name}, fingerprint {identity.fingerprint()}, {size}, data {identity.data}"
        run = ok("run", detail)
        state = _another_run(config.state_dir, plan.spec)
    except CommandError as error:
        run, state = fail("run", str(error), "correct the file"), None
    findings = [run, disk(config.state_dir, needed_bytes=needed)]
    if state is not None:
        findings.append(state)
    elif over := end_of(config.state_dir):
        findings.append(ok("state", f"{over}: {config.state_dir}; a start tells its nodes of that"))
    findings.append(port("port", parse_tcp(config.bind, listens=True), "[coordinator] bind"))
    if config.http:
        findings.append(port("http port", parse_host_port(config.http, listens=True), "[coordinator] http"))
    if config.mirror:
        findings.append(port("mirror port", parse_tcp(config.mirror, listens=True), "[coordinator] mirror"))
    if config.leads_by:
        findings.append(_record(config))
    if config.bulk_url:
        findings += object_store(config.bulk_url)
    if config.key is None or config.allow is None:
        return [*findings, _no_keys(parse_tcp(config.bind, listens=True))]
    return [*findings, _tried("secret key", config.key, load_secret), _allow_list(config.allow, file.run.nodes)]


def _another_run(folder: Path, wanted: RunSpec) -> Finding | None:
    """Why a coordinator would refuse the folder's run; None if it is this one, or there is none."""
    if not has_run(folder):
        return None
    try:
        segments = Segments(folder)  # all of a journal may be a terabyte
        if isinstance(first := next(iter(segments.items_of(segments.numbers[0], trusting=True)), None), Entry):
            refuse_another(folder, ledger_of(folder, first.record).spec, wanted)
    except CommandError as error:
        detail, _, fix = str(error).rpartition("; ")
        return fail("state", detail, fix)
    except StorageError as error:
        return fail("state", str(error), "farloop journal verify says whether a start goes on")
    return None


def port(what: str, address: Address, key: str) -> Finding:
    """Whether the port is free, by binding it for a moment."""
    if address.port == 0:
        return ok(what, f"{address}: any free one")
    try:
        bound_socket(address).close()
    except OSError as error:
        fix = f"stop what listens there (a coordinator that is running?), or choose another in {key}"
        return fail(what, f"{address}: {(error.strerror or str(error)).lower()}", fix)
    return ok(what, f"{address} is free")


def _allow_list(folder: Path, nodes: int) -> Finding:
    finding = _tried("allow list", folder, lambda path: AllowList(path).refresh())
    if finding.level != "ok":
        return finding
    names = sorted(path.stem for path in folder.glob("*.pub"))
    detail = f"{folder}: {', '.join(names) or 'no node'}"
    if len(names) < nodes:
        fix = f"the run waits for {nodes} nodes: put their .pub files there, also while it runs"
        return warn("allow list", detail, fix)
    return dataclasses.replace(finding, detail=detail)


def _node_findings(file: NodeFile, url: str) -> list[Finding]:
    config = file.node
    addresses = parse_each_tcp(config.coordinator)
    folder = config.state_dir or Path(".farloop") / config.name
    reached = _coordinator(_leading(addresses), folder, config.key, config.server_key)
    if len(addresses) > 1 and reached.level == "fail":
        reached = dataclasses.replace(reached, detail=f"{reached.detail} (of {', '.join(map(str, addresses))})")
    findings = [disk(folder), reached]
    if config.key is None or config.server_key is None:
        findings += [_no_keys(address) for address in addresses]
    else:
        findings += [_tried("secret key", config.key, load_secret), _server_key(config.key, config.server_key)]
    if config.nproc > 1 and torch.cuda.is_available() and config.nproc > torch.cuda.device_count():
        detail = f"nproc is {config.nproc}, and there are {torch.cuda.device_count()} devices"
        findings.append(fail("ranks", detail, "set [node] nproc to that or less"))
    data = config.data
    first: list[Path | None] = [share.path for share in data.mixture or ()]
    findings += [_data(path, data.max_bytes) for path in (*(first or [data.path]), *(data.phases or ()))]
    return [*findings, wall_clock(url)]


def _seen(url: str) -> InventoryStatus | None:
    """The coordinator's view of machines and links; None if it does not answer."""
    try:
        return fetch(url or DEFAULT_URL).get("inventory")
    except CommandError:
        return None


def connect(address: Address, timeout_s: float = 3.0) -> str | None:
    """Connect and close; the error, or None."""
    try:
        with socket.create_connection((address.host, address.port), timeout_s):
            return None
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except OSError as error:
        return (error.strerror or str(error)).lower()


def round_trip_s(address: Address, tries: int = 3) -> float | None:
    """The shortest of some connection set-ups, one round trip each; None if none succeeded."""
    took = []
    for _ in range(tries):
        started = time.monotonic()
        if connect(address) is not None:
            break
        took.append(time.monotonic() - started)
    return min(took, default=None)


def _leading(addresses: list[Address]) -> Address:
    """The first address that takes connections: standbys do not. Without one, the first."""
    return next((address for address in addresses if connect(address) is None), addresses[0])


def _coordinator(address: Address, folder: Path, key: Path | None = None, server_key: Path | None = None) -> Finding:
    started = time.monotonic()
    failure = connect(address)
    with contextlib.suppress(StateUnusable):
        if failure and (over := NodeState.read(folder).finished):
            return ok("coordinator", f"{address}: {failure}; run {over} is finished: this node saw its end")
    if failure:
        fix = "start it, or check [node] coordinator, firewalls and port forwards"
        return fail("coordinator", f"{address}: {failure}", fix)
    detail = f"{address} accepts connections, {1000 * (time.monotonic() - started):.1f} ms"
    try:
        link = LinkConfig(coordinator=f"tcp://{address}", key=key, server_key=server_key)
        if why := asyncio.run(try_link(link, 0, TRY_S)):
            return fail("coordinator", f"{detail}; the handshake fails: {why}", "check its log, and both ends' keys")
        if asyncio.run(try_link(link, LARGE_BYTES, LARGE_S)):
            return fail("coordinator", f"{detail}; {size_text(LARGE_BYTES)} do not come back: {LARGE_LOST}", MTU_FIX)
    except (KeyFileError, NodeError):
        return ok("coordinator", detail)  # the key, or the address, has a line of its own
    return ok("coordinator", f"{detail}; the handshake and {size_text(LARGE_BYTES)} each way pass")


def _server_key(key: Path, server_key: Path) -> Finding:
    finding = _tried("server key", server_key, load_publics)
    with contextlib.suppress(KeyFileError):
        if public_of(load_secret(key)) in load_publics(server_key):
            fix = "give [node] server_key the .pub of the coordinator"
            return fail("server key", f"{server_key} is this node's own public key", fix)
    return finding


def _data(path: Path | None, max_bytes: int) -> Finding:
    try:
        corpus = load_corpus(path, max_bytes=max_bytes)
    except CorpusError as error:
        return fail("data", str(error), "give [data] path a token file, a text, JSONL or a folder")
    size = size_text(corpus.size) if corpus.tokenizer == BYTES else f"{count_text(corpus.size)} tokens"
    where = path or "Python's standard library"
    return ok("data", f"{where}: {size}, digest {corpus.digest} (the run's must be equal)")


_STORE: Final = "object store"


def object_store(url: str) -> list[Finding]:
    """Write, read and delete a small object as coordinator and nodes do."""
    try:
        sign = signer(url)
        lacks = try_store(sign)
        from_a_node = f"From a node: farloop doctor node.toml --store '{sign('PUT', f'trial/{secrets.token_hex(16)}')}'"
    except CopyFailed as error:
        fix = "see docs/object-store.md: credentials, the endpoint, and a policy that allows PUT, GET and DELETE"
        return [fail(_STORE, f"{url}: {str(error).removeprefix(f'{url}: ')}", fix)]
    found = "; ".join([f"{url}: PUT, GET and DELETE by signed URLs", *lacks])
    if lacks:
        return [warn(_STORE, f"{found}. {from_a_node}", "mend it, or go on: nothing is lost")]
    return [ok(_STORE, f"{found}. {from_a_node}")]


def store_from_here(url: str) -> Finding:
    """Write a small object by the URL that the coordinator's doctor printed."""
    began, host = time.monotonic(), urlsplit(url).netloc
    if not host:
        return fail(_STORE, f"{url} is not a URL", "give the one that farloop doctor RUN.toml printed, in quotes")
    with closing(Client()) as client:
        try:
            client.put(url, memoryview(bytes(TRIAL_BYTES)))
        except Failed as error:
            fix = "a URL lives 10 minutes: make a new one, in quotes; let HTTPS out to that host, or set HTTPS_PROXY"
            return fail(_STORE, "; ".join([f"{host}: {str(error).removeprefix(f'{host}: ')}", *skew(client)]), fix)
        took = duration_text(time.monotonic() - began)
        return ok(_STORE, "; ".join([f"{host}: a PUT by a signed URL took {took}", *skew(client)]))


def _record(config: CoordinatorConfig) -> Finding:
    """Who leads the run, and whether it answers this host."""
    url = config.leads_by
    try:
        found, _ = term_store(url).read()
    except (CopyFailed, Unreachable) as error:
        return fail("record", str(error), "check [coordinator] leads_by, and this host's credentials for it")
    if found is None:
        return ok("record", f"{url}: nobody has led yet")
    in_sync = ", ".join(found.in_sync) or "nobody"
    detail = f"{url}: {found.leader} leads since term {found.term}, in sync with it: {in_sync}"
    if config.peers and found.leader != (config.name or socket.gethostname()):
        with contextlib.suppress(KeyFileError):  # which is a finding of its own
            if leading_peer(parse_each_tcp(config.peers), config.key) is None:
                fix = f"start {found.leader}; if it runs, compare [coordinator] key there and here, peers and mirror"
                return warn("record", f"{detail}; no leader answers at {config.peers}", fix)
    return ok("record", detail)


def _no_keys(address: Address) -> Finding:
    if address.is_loopback:
        return ok("keys", "none, and none are needed on loopback")
    return warn("keys", "insecure = true: anyone can read the traffic and join", "make keys with: farloop keys new DIR")


def _tried(what: str, path: Path, read: Callable[[Path], object]) -> Finding:
    try:
        read(path)
    except (KeyFileError, ValueError) as error:
        detail, _, fix = str(error).partition("; ")
        return fail(what, detail, fix)
    return ok(what, str(path))
