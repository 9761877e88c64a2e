"""Looks for what would stop a daemon before it is started: one finding a line, each with its mend.

Findings are values; nothing here changes anything, and nothing is claimed that was not tried.
"""

import dataclasses
import email.utils
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import torch
import typer

from farloop.cli import doctor_network as network
from farloop.cli.address import Address, parse_host_port, parse_tcp
from farloop.cli.config import NodeFile, RunFile, load, planned
from farloop.cli.exit_codes import CommandError
from farloop.cli.findings import Finding as Finding
from farloop.cli.status import DEFAULT_URL, fetch, page_of
from farloop.cli.waiting import connect
from farloop.monitoring.status import InventoryStatus
from farloop.monitoring.units import count_text, size_text
from farloop.node.corpus import CorpusError, load_corpus
from farloop.node.surroundings import Limits, Operator, limits, look_around
from farloop.node.sysfs import Tree
from farloop.wire.inventory import Inventory
from farloop.wire.keys import AllowList, KeyFileError, load_public, load_secret

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
    tree = Tree(root)
    told, allowed = look_around(environ, Operator(), root=root), limits(tree)
    findings = [*versions(), *devices(), monotonic_clock(), *network.limits(allowed, told)]
    if path is None:
        return [*findings, *network.machine(told), disk(Path.cwd())]
    try:
        file = load(path, flags=flags, environ=environ)
    except CommandError as error:
        return [*findings, Finding(level="fail", what="settings", detail=str(error), mend="mend the file")]
    findings.append(Finding(level="ok", what="settings", detail=str(path)))
    if isinstance(file, RunFile):
        return [*findings, *network.machine(told), *_run_findings(file)]
    config = file.node
    told = look_around(environ, Operator.of(config.site, config.address, config.nics), root=root)
    return [*findings, *network.machine(told), *_node_findings(file, url), *_network_findings(file, url, told, allowed)]


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
    way = network.way_of(config.name, seen, round_trip_s(parse_tcp(config.coordinator)), told)
    findings = network.buffers(dataclasses.replace(allowed, congestion=config.congestion or allowed.congestion), way)
    if config.address:
        findings.append(network.dial_back(parse_tcp(config.address)))
    return [*findings, *network.as_the_coordinator_sees(config.name, seen)]


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
