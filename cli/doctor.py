"""The command doctor."""

import contextlib
import dataclasses
import email.utils
import importlib.metadata
import json
import os
import platform
import secrets
import shutil
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

import torch
import typer

from farloop.algo.spec import to_plain
from farloop.cli.daemons import connect
from farloop.cli.status import DEFAULT_URL, fetch, page_of
from farloop.config.exit_codes import CommandError
from farloop.config.settings import NodeFile, RunFile, load, planned
from farloop.config.sources import Address, parse_host_port, parse_tcp
from farloop.coordinator.net.sessions import most_connections
from farloop.monitoring import descriptors
from farloop.monitoring.status import InventoryStatus
from farloop.monitoring.units import count_text, rate_text, size_text
from farloop.node.data import CorpusError, load_corpus
from farloop.node.machine_info import Limits, OperatorLabels, SysfsReader, limits, look_around
from farloop.wire.keys import AllowList, KeyFileError, load_public, load_secret
from farloop.wire.machine_info import RDMA, Inventory, Nic

# --- What `farloop doctor` finds: one thing a line, with its mend.


Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line."""

    level: Level
    what: str
    detail: str
    mend: str = ""
    """What to do about it; empty where nothing is wrong."""
    data: Mapping[str, Any] | None = None
    """The same for programs, where there is more than the line says."""


# --- What `farloop doctor` finds about a machine's network: cards, limits, buffers, and whether others can dial in.
#
# Looks and tries; changes nothing. Buffers are judged by the bandwidth-delay product of the way to the coordinator: its
# round trip is measured, its rate is what the coordinator has measured of this node, or else what the card could do.


FEW_FILES: Final = 4096
"""A coordinator needs some for every node, a journal and its pages; many systems give 1024."""

LONG_S: Final = 0.02
"""From this round trip on the choice of congestion control matters: a lost packet takes that long to be missed."""

TRY_S: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """The way to the coordinator, as far as it is known. None: not measured."""

    rtt_s: float | None = None
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None


def machine(told: Inventory) -> list[Finding]:
    """Cards, and what could not be read of them."""
    found = [_card(nic) for nic in told.nics]
    if not told.nics:
        mend = "say it in [node] nics, as eth0=ethernet/10gbit; a container may also be given FARLOOP_LABELS"
        found.append(Finding(level="warn", what="card", detail="no network card is visible here", mend=mend))
    if told.unread:
        mend = "run as a user that may read them, or mount /sys; training does without"
        found.append(Finding(level="warn", what="sysfs", detail=f"not readable: {'; '.join(told.unread)}", mend=mend))
    where = f"{told.site} ({told.site_from} says so)" if told.site else "none named; [node] site names it"
    return [*found, Finding(level="ok", what="site", detail=where, data={"labels": dict(told.labels)})]


def _card(nic: Nic) -> Finding:
    rate = f"{rate_text(nic.bits_per_s)} ({nic.source('bits_per_s')})" if nic.bits_per_s else "rate unknown"
    parts = [nic.kind, rate]
    if nic.netdev and nic.netdev != nic.name:
        parts.append(f"on {nic.netdev}")
    if nic.members:
        parts.append(f"bond of {', '.join(nic.members)}")
    believed = {"kind": nic.kind, "bits_per_s": f"{nic.bits_per_s:g}" if nic.bits_per_s else ""}
    parts += [
        f"{fact.source} says {fact.value}"
        for fact in nic.facts
        if fact.about in believed and fact.value != believed[fact.about]
    ]
    detail, data = f"{nic.name}: {', '.join(parts)}", to_plain(nic)
    if nic.usable or not nic.active:
        return Finding(level="ok", what="card", detail=f"{detail}; {nic.why}" if nic.why else detail, data=data)
    why, _, mend = nic.why.partition("; ")
    mend = mend or "let this process open it, or leave its collectives to TCP"
    return Finding(level="warn", what="card", detail=f"{detail}: {why}", mend=mend, data=data)


def limit_findings(found: Limits, told: Inventory) -> list[Finding]:
    """What the machine allows this process."""
    findings = [_files(found.nofile, found.nofile_hard)]
    if any(nic.kind in RDMA for nic in told.nics):
        locked = "without bound" if found.memlock_bytes is None else size_text(found.memlock_bytes)
        findings.append(Finding(level="ok", what="memlock", detail=f"memory that may be locked: {locked}"))
    return findings


def _files(soft: int, hard: int) -> Finding:
    """Both daemons raise the soft limit to the hard one when they start."""
    connections = most_connections(hard - descriptors.SPARE)
    detail = f"{hard:,} files and connections may be open (soft limit {soft:,}, which a daemon raises)"
    detail += f": a coordinator takes {connections:,} connections"
    if hard < FEW_FILES:
        mend = f"raise the hard limit: ulimit -Hn {FEW_FILES}, or LimitNOFILE={FEW_FILES} in the unit"
        return Finding(level="warn", what="files", detail=detail, mend=mend)
    return Finding(level="ok", what="files", detail=detail)


def way_of(name: str, seen: InventoryStatus | None, rtt_s: float | None, told: Inventory) -> Way:
    """What is known of the way to the coordinator: its own measurements, else the cards' rates."""
    best = max((nic.flow_bits_per_s or 0.0 for nic in told.nics if nic.active), default=0.0) / 8
    rates = {(link["from"], link["to"]): link["bytes_per_s"] for link in (seen or {"links": []})["links"]}
    return Way(
        rtt_s=rtt_s,
        up_bytes_per_s=rates.get((name, "coordinator")) or best or None,
        down_bytes_per_s=rates.get(("coordinator", name)) or best or None,
    )


def buffers(found: Limits, way: Way) -> list[Finding]:
    """Whether one connection can hold what the way holds, each way, and whether a loss would slow it down for long."""
    findings = []
    for key, rate, size in (
        ("tcp_wmem", way.up_bytes_per_s, found.send_bytes),
        ("tcp_rmem", way.down_bytes_per_s, found.receive_bytes),
    ):
        if rate is None or way.rtt_s is None or size is None:
            continue
        product = rate * way.rtt_s
        detail = f"{key}: {size_text(size)}; the way holds {size_text(product)}"
        if size < product:
            most = rate_text(8 * size / way.rtt_s)
            mend = (
                f"one connection gets {most} at most: raise the last number of net.ipv4.{key} to {round(2 * product)}"
            )
            findings.append(Finding(level="warn", what="buffers", detail=detail, mend=mend))
        else:
            findings.append(Finding(level="ok", what="buffers", detail=detail))
    if found.congestion and way.rtt_s is not None:
        findings.append(_congestion(found, way.rtt_s))
    return findings


def _congestion(found: Limits, rtt_s: float) -> Finding:
    if found.congestion == "bbr" or rtt_s < LONG_S:
        return Finding(level="ok", what="congestion", detail=found.congestion)
    detail = f"{found.congestion} over {1000 * rtt_s:.0f} ms: one lost packet in a thousand costs most of the rate"
    mend = (
        'choose bbr: [node] congestion = "bbr"'
        if "bbr" in found.allowed
        else "let an administrator add bbr to net.ipv4.tcp_allowed_congestion_control, then set [node] congestion"
    )
    return Finding(level="warn", what="congestion", detail=detail, mend=mend)


# --- whether others can dial in


def dial_back(address: Address) -> Finding:
    """Listen where the node will, dial the address that it declares, and see whether that leads here."""
    token = secrets.token_bytes(16)
    try:
        server = socket.create_server(("", address.port), family=socket.AF_INET, reuse_port=False)
    except OSError as error:
        return _somebody_listens(address, (error.strerror or str(error)).lower())
    with server:
        threading.Thread(target=_answer, args=(server, token), name="dial-back", daemon=True).start()
        try:
            with socket.create_connection((address.host, address.port), TRY_S) as connection:
                connection.settimeout(TRY_S)
                came = connection.recv(len(token))
        except OSError as error:
            return _not_reached(address, (error.strerror or str(error)).lower())
    if came == token:
        return Finding(level="ok", what="address", detail=f"{address} leads back to this machine")
    mend = "[node] address must name this machine, or a port that is forwarded to it"
    return Finding(level="fail", what="address", detail=f"{address} is somebody else", mend=mend)


def _answer(server: socket.socket, token: bytes) -> None:
    with contextlib.suppress(OSError):
        server.settimeout(TRY_S)
        connection, _ = server.accept()
        with connection:
            connection.sendall(token)


def _somebody_listens(address: Address, why: str) -> Finding:
    try:
        with socket.create_connection((address.host, address.port), TRY_S):
            detail = f"{address} answers; whether it is this node was not tried: port {address.port} here is taken"
            return Finding(level="ok", what="address", detail=detail)
    except OSError:
        mend = f"free port {address.port}, or choose another in [node] address"
        return Finding(level="fail", what="address", detail=f"{address} is not reached, and {why} here", mend=mend)


def _not_reached(address: Address, why: str) -> Finding:
    mend = (
        "forward the port, or open it in the firewall. Some routers do not let the inside dial their outside: while "
        "the node runs, the coordinator says in farloop status --json whether it reaches it"
    )
    return Finding(level="warn", what="address", detail=f"{address} is not reached from here: {why}", mend=mend)


def as_the_coordinator_sees(name: str, seen: InventoryStatus | None) -> Sequence[Finding]:
    """What a running coordinator says of this node's address and links."""
    machine = next((node for node in (seen or {"nodes": []})["nodes"] if node["name"] == name), None)
    if seen is None or machine is None:
        return []
    findings = []
    if machine["reachable"] is not None:
        reached, mend = machine["reachable"], "forward the port, or open it in the firewall"
        detail = f"the coordinator {'reaches' if reached else 'does not reach'} {machine['address']}"
        level, mend = ("ok", "") if reached else ("fail", mend)
        findings.append(Finding(level=level, what="reachable", detail=detail, mend=mend))  # type: ignore[arg-type]
    for link in seen["links"]:
        if name not in (link["from"], link["to"]) or (rate := link["bytes_per_s"]) is None:
            continue
        rtt = f", round trip {1000 * link['rtt_s']:.1f} ms" if link["rtt_s"] is not None else ""
        detail = f"{link['from']} → {link['to']}: {rate_text(8 * rate)} by {link['measured_by']}{rtt}"
        findings.append(Finding(level="ok", what="link", detail=detail, data=dict(link)))
    return findings


# --- Looks for what would stop a daemon before it is started: one finding a line, each with its mend.
#
# Findings are values; nothing here changes anything, and nothing is claimed that was not tried.


LOW_DISK_BYTES = 2_000_000_000

STATE_BYTES_PER_PARAMETER = 24
"""Anchor, target and momentum in fp32, twice: the older snapshot goes after the newer is durable."""

_COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}

DRIFT_S = 2.0
"""Clocks further apart make logs of two machines hard to read side by side."""


def examine(
    path: Path | None, *, flags: Iterable[str], environ: Mapping[str, str], url: str, root: Path = Path("/")
) -> list[Finding]:
    """This machine, and what the file asks of it. `root`: where the machine's own files are."""
    tree = SysfsReader(root)
    told, allowed = look_around(environ, OperatorLabels(), root=root), limits(tree)
    findings = [*versions(), *devices(), monotonic_clock(), *limit_findings(allowed, told)]
    if path is None:
        return [*findings, *machine(told), disk(Path.cwd())]
    try:
        file = load(path, flags=flags, environ=environ)
    except CommandError as error:
        return [*findings, Finding(level="fail", what="settings", detail=str(error), mend="mend the file")]
    findings.append(Finding(level="ok", what="settings", detail=str(path)))
    if isinstance(file, RunFile):
        return [*findings, *machine(told), *_run_findings(file)]
    config = file.node
    told = look_around(environ, OperatorLabels.of(config.site, config.address, config.nics), root=root)
    return [*findings, *machine(told), *_node_findings(file, url), *_network_findings(file, url, told, allowed)]


def print_findings(findings: Iterable[Finding], *, as_json: bool) -> None:
    """One line each, the mend behind an arrow; or a JSON list."""
    if as_json:
        return typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], ensure_ascii=False))
    for finding in findings:
        level = typer.style(f"{finding.level:<4}", fg=_COLORS[finding.level], bold=finding.level != "ok")
        mend = f" → {finding.mend}" if finding.mend else ""
        typer.echo(f"{level}  {finding.what:<11}  {finding.detail}{mend}")


# --- this machine


def versions() -> list[Finding]:
    """Python and the libraries whose versions matter."""
    names = ("farloop", "torch", "pyzmq", "numpy")
    libraries = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    python = f"{platform.python_implementation()} {platform.python_version()} on {platform.system()}"
    return [
        Finding(level="ok", what="python", detail=f"{python} {platform.machine()}"),
        Finding(level="ok", what="libraries", detail=libraries),
    ]


def devices() -> list[Finding]:
    """What there is to train on."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    detail = f"{usable} usable, torch takes {threads} threads"
    mend = "set [node] threads, or OMP_NUM_THREADS: threads that share a core slow each other down"
    cpu = (
        Finding(level="warn", what="cpu", detail=detail, mend=mend)
        if threads > usable
        else Finding(level="ok", what="cpu", detail=detail)
    )
    if not torch.cuda.is_available():
        mend = "none is needed for a small model; else look at the driver with nvidia-smi and at torch's build"
        built = "torch is a CPU build" if torch.version.cuda is None else "torch finds no CUDA device"
        return [cpu, Finding(level="warn", what="gpu", detail=built, mend=mend)]
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return [cpu, Finding(level="ok", what="gpu", detail=", ".join(names))]


def monotonic_clock() -> Finding:
    """The clock that all decisions are made by."""
    clock = time.get_clock_info("monotonic")
    if not clock.monotonic or clock.resolution > 0.001:
        mend = "time-outs will be coarse; run on another kernel or machine"
        return Finding(level="warn", what="clock", detail=f"resolution {clock.resolution:g} s", mend=mend)
    return Finding(level="ok", what="clock", detail=f"{clock.implementation}, {clock.resolution:.0e} s")


def disk(folder: Path, *, needed_bytes: int = LOW_DISK_BYTES) -> Finding:
    """Room, and the right to write, where `folder` is or will be."""
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        mend = "choose another state_dir, or make it writable for this user"
        return Finding(level="fail", what="disk", detail=f"{there} cannot be written", mend=mend)
    free = shutil.disk_usage(there).free
    detail = f"{size_text(free)} free at {there}"
    if free < needed_bytes:
        mend = f"make room: {size_text(needed_bytes)} are wanted, and a full disk halts the run"
        return Finding(level="warn", what="disk", detail=detail, mend=mend)
    return Finding(level="ok", what="disk", detail=detail)


# --- what a coordinator needs


def _run_findings(file: RunFile) -> list[Finding]:
    config, needed = file.coordinator, LOW_DISK_BYTES
    try:
        plan = planned(file)
        identity = plan.spec.identity
        needed = max(needed, STATE_BYTES_PER_PARAMETER * identity.layout.num_parameters)
        size = f"{count_text(identity.layout.num_parameters)} parameters"
        detail = f"{identity.name}, fingerprint {identity.fingerprint()}, {size}, data {identity.data}"
        run = Finding(level="ok", what="run", detail=detail)
    except CommandError as error:
        run = Finding(level="fail", what="run", detail=str(error), mend="mend the file")
    findings = [run, disk(config.state_dir, needed_bytes=needed)]
    findings.append(port("port", parse_tcp(config.bind, listens=True), "[coordinator] bind"))
    if config.http:
        findings.append(port("http port", parse_host_port(config.http, listens=True), "[coordinator] http"))
    if config.key is None or config.allow is None:
        return [*findings, _no_keys(parse_tcp(config.bind, listens=True))]
    return [*findings, _tried("secret key", config.key, load_secret), _allow_list(config.allow, file.run.nodes)]


def port(what: str, address: Address, key: str) -> Finding:
    """Whether it is free, by taking it for a moment."""
    if address.port == 0:
        return Finding(level="ok", what=what, detail=f"{address}: any free one")
    host = "" if address.host in ("*", "0.0.0.0") else address.host
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, address.port))
    except OSError as error:
        mend = f"stop what listens there (a coordinator that is running?), or choose another in {key}"
        detail = f"{address}: {(error.strerror or str(error)).lower()}"
        return Finding(level="fail", what=what, detail=detail, mend=mend)
    return Finding(level="ok", what=what, detail=f"{address} is free")


def _allow_list(folder: Path, nodes: int) -> Finding:
    finding = _tried("allow list", folder, lambda path: AllowList(path).refresh())
    if finding.level != "ok":
        return finding
    names = sorted(path.stem for path in folder.glob("*.pub"))
    detail = f"{folder}: {', '.join(names) or 'nobody'}"
    if len(names) < nodes:
        mend = f"the run waits for {nodes} nodes: put their .pub files there, also while it runs"
        return Finding(level="warn", what="allow list", detail=detail, mend=mend)
    return dataclasses.replace(finding, detail=detail)


# --- what a node needs


def _node_findings(file: NodeFile, url: str) -> list[Finding]:
    config = file.node
    address = parse_tcp(config.coordinator)
    findings = [disk(config.state_dir or Path(".farloop") / config.name), _coordinator(address)]
    if config.key is None or config.server_key is None:
        findings.append(_no_keys(address))
    else:
        findings += [
            _tried("secret key", config.key, load_secret),
            _tried("server key", config.server_key, load_public),
        ]
    if config.nproc > 1 and torch.cuda.is_available() and config.nproc > torch.cuda.device_count():
        detail = f"nproc is {config.nproc}, and there are {torch.cuda.device_count()} devices"
        findings.append(Finding(level="fail", what="ranks", detail=detail, mend="set [node] nproc to that or less"))
    texts = [_data(path, config.data_bytes) for path in (config.data, *config.data_phases)]
    return [*findings, *texts, wall_clock(url)]


def _network_findings(file: NodeFile, url: str, told: Inventory, allowed: Limits) -> list[Finding]:
    """The way to the coordinator, and the way in."""
    config = file.node
    seen = _seen(url)
    way = way_of(config.name, seen, round_trip_s(parse_tcp(config.coordinator)), told)
    findings = buffers(dataclasses.replace(allowed, congestion=config.congestion or allowed.congestion), way)
    if config.address:
        findings.append(dial_back(parse_tcp(config.address)))
    return [*findings, *as_the_coordinator_sees(config.name, seen)]


def _seen(url: str) -> InventoryStatus | None:
    """What a running coordinator tells of machines and links; None where none is asked, or it does not."""
    try:
        return fetch(url or DEFAULT_URL).get("inventory")
    except CommandError:
        return None


def round_trip_s(address: Address, tries: int = 3) -> float | None:
    """The shortest of some connections' set-ups: one round trip each; None where none came about."""
    took = []
    for _ in range(tries):
        started = time.monotonic()
        if connect(address) is not None:
            break
        took.append(time.monotonic() - started)
    return min(took, default=None)


def _coordinator(address: Address) -> Finding:
    started = time.monotonic()
    failure = connect(address)
    if failure:
        mend = "start it, or check [node] coordinator, firewalls and port forwards"
        return Finding(level="fail", what="coordinator", detail=f"{address}: {failure}", mend=mend)
    took = time.monotonic() - started
    return Finding(level="ok", what="coordinator", detail=f"{address} accepts connections, {1000 * took:.1f} ms")


def _data(path: Path | None, max_bytes: int) -> Finding:
    try:
        corpus = load_corpus(path, max_bytes=max_bytes)
    except CorpusError as error:
        return Finding(level="fail", what="data", detail=str(error), mend="give [data] path a text, JSONL or folder")
    size = size_text(len(corpus.train) + len(corpus.validation))
    where = path or "Python's standard library"
    return Finding(level="ok", what="data", detail=f"{where}: {size}, digest {corpus.digest} (the run's must be equal)")


def wall_clock(url: str) -> Finding:
    """Wall time beside the coordinator's, where its page can be read. Nothing is decided by it; logs are read by it."""
    page = page_of(url or DEFAULT_URL)
    try:
        with urllib.request.urlopen(page, timeout=3.0) as answer:
            theirs = email.utils.parsedate_to_datetime(answer.headers["Date"])
    except (OSError, TypeError, ValueError):
        return Finding(level="ok", what="wall clock", detail=f"not compared: no page at {page} (no decision needs it)")
    # An HTTP date has whole seconds: up to one of the difference is its own.
    drift = max(0.0, abs((datetime.now(UTC) - theirs).total_seconds()) - 1.0)
    if drift > DRIFT_S:
        mend = "training does not mind; to compare logs, set both clocks by NTP"
        return Finding(level="warn", what="wall clock", detail=f"{drift:.0f} s or more from {page}", mend=mend)
    return Finding(level="ok", what="wall clock", detail=f"within {DRIFT_S + 1:.0f} s of {page}")


# --- keys


def _no_keys(address: Address) -> Finding:
    if address.is_loopback:
        return Finding(level="ok", what="keys", detail="none, and none are needed on loopback")
    mend = "make keys with: farloop keys new DIR"
    return Finding(level="warn", what="keys", detail="insecure = true: anybody may listen and take part", mend=mend)


def _tried(what: str, path: Path, read: Callable[[Path], object]) -> Finding:
    try:
        read(path)
    except (KeyFileError, ValueError) as error:
        detail, _, mend = str(error).partition("; ")
        return Finding(level="fail", what=what, detail=detail, mend=mend)
    return Finding(level="ok", what=what, detail=str(path))
