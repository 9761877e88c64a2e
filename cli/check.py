"""`farloop config check`: the run or node that a file describes, in a few lines."""

import math
from collections.abc import Sequence
from pathlib import Path

from farloop.algo.methods import method_named
from farloop.algo.schedule import first_rounds, is_last
from farloop.algo.terms import Terms
from farloop.config.memory import Memory, memory_of
from farloop.config.run_config import loops_bring_data
from farloop.config.run_spec import Plan, planned
from farloop.config.settings import NodeFile, RunFile
from farloop.monitoring.addresses import parse_each_tcp
from farloop.monitoring.units import count_text, duration_text, percent_text, plural, rate_text, size_text
from farloop.node.settings import HF
from farloop.quant.blob import blob_bytes, typical_bytes
from farloop.quant.registry import codec_named
from farloop.wire.uplink import UplinkLimit

Line = tuple[str, str]  # label and value

_PCIE_BYTES_PER_S = 25e9  # 16 lanes of PCIe 4, from locked memory
_MOST_ROUNDS = 10_000  # whose lengths are looked at
_STEP_S = 0.1


def check(file: RunFile | NodeFile, *, ranks: int = 1, shard: bool = False) -> tuple[list[Line], Memory | None]:
    """Of a run, read its data and model; start nothing. And the memory that a run takes.

    `ranks`, `shard`: of a node, for its memory. Raises ConfigError, one line.
    """
    if isinstance(file, RunFile):
        plan = planned(file, weights=False)
        memory = memory_of(plan.spec, ranks=ranks, shard=shard)
        return [*_run_lines(file, plan), *_memory_lines(memory), _pcie_line(plan, ranks if shard else 1)], memory
    return _node_lines(file), None


def _memory_lines(memory: Memory) -> list[Line]:
    """Sums; `--json` has the terms."""
    tables = (memory.coordinator_ram, memory.coordinator_disk, memory.node_host, memory.node_device, memory.node_disk)
    ram, disk, host, device, node_disk = (size_text(sum(table.values())) for table in tables)
    ranks = f"each of {memory.ranks} devices" if memory.ranks > 1 else "its device"
    return [
        ("coordinator", f"{ram} of memory, {disk} of disk"),
        ("node", f"{host} of host memory, {device} on {ranks} besides activations, {node_disk} of disk"),
    ]


def _pcie_line(plan: Plan, parts: int) -> Line:
    """What crosses a device's bus; on CPUs it is nothing."""
    layout, terms = plan.spec.identity.layout, plan.spec.terms
    codecs = codec_named(terms.codecs.up), codec_named(terms.codecs.down)
    payloads = sum(blob_bytes(codec, fragment) for codec in codecs for fragment in layout.fragments) / parts
    anchors = 8 * sum(fragment.numel for fragment in layout.fragments) / parts  # there and back
    told = [
        f"{size_text(num_bytes)} ({percent_text(num_bytes / _PCIE_BYTES_PER_S / terms.schedule.h / _STEP_S)})"
        for num_bytes in (payloads, payloads + anchors)
    ]
    how = f"{_PCIE_BYTES_PER_S / 1e9:g} GB/s and {duration_text(_STEP_S)} a step"
    return "PCIe a round", f"{told[0]} with anchors on the device, {told[1]} in host memory, at {how}"


def _run_lines(file: RunFile, plan: Plan) -> list[tuple[str, str]]:
    identity, terms = plan.spec.identity, plan.spec.terms
    layout = identity.layout
    model = "the nodes' own" if loops_bring_data(file.run) else file.run.model
    sent = [
        sum(typical_bytes(codec_named(codec), fragment) for fragment in layout.fragments)
        for codec in (terms.codecs.up, terms.codecs.down)
    ]
    fragments = plural(len(layout.fragments), "fragment")
    nodes = plural(terms.admission.min_nodes, "node")
    unread = identity.model.startswith(HF)  # the fingerprint is of the first weights, too
    batch = f"{terms.inner.batch_sequences} × {terms.inner.sequence_tokens} tokens"
    data = "the nodes' own" if identity.data == "own" else f"{identity.num_samples:,} samples, digest {identity.data}"
    h = _h_text(terms)
    every = "every step" if h == "1" else f"every {h} steps"
    trains_here = method_named(terms.method).inner and not loops_bring_data(file.run)
    return [
        ("run", identity.name if unread else f"{identity.name}, fingerprint {identity.fingerprint()}"),
        ("model", f"{model}, {count_text(layout.num_parameters)} parameters in {fragments}"),
        ("data", data),
        ("method", f"{terms.method}, H {h}, τ {terms.schedule.tau}, mix {terms.schedule.mix:g}"),
        ("codecs", f"{terms.codecs.up} up, {terms.codecs.down} down"),
        *((node, f"sends by {codec}") for node, codec in terms.codecs.up_of),
        *((node, f"does {percent_text(share)} of a round's steps") for node, share in terms.schedule.h_share_of),
        *([("merge", terms.outer.merge)] if terms.outer.merge else []),
        *([("inner step", f"{terms.inner.optimizer}, lr {terms.schedule.lr.peak:g}")] if trains_here else []),
        ("outer step", f"lr {terms.outer.lr:g}, momentum {terms.outer.momentum:g}"),
        ("length", f"{plural(terms.schedule.steps, 'step')} of {batch} on each of {nodes}"),
        ("traffic", f"about {size_text(sent[0])} up, {size_text(sent[1])} down per node, {every}"),
        ("listens", f"{file.coordinator.bind}, {_guard(file.coordinator.bind, file.coordinator.key)}"),
        *_bulk_lines(file, sent, terms.admission.min_nodes),
        *_uplink_lines(file.coordinator.uplink, sent[1] * terms.admission.min_nodes),
        *(("note", note) for note in plan.notes),
    ]  # fmt: skip


def _bulk_lines(file: RunFile, sent: Sequence[float], nodes: int) -> list[Line]:
    """What a round costs the coordinator's network and disk by either plane, where it is asked for, or has a price; and
    below which price of the store's own egress that is cheaper. The store sends each delta once, each update to all."""
    price, config = file.coordinator.egress_price_per_gb, file.coordinator
    if not price and not config.bulk_url:
        return []
    out = {"session": sent[1] * nodes, "store": sent[1]}  # one update for all
    disk = {"session": sent[0] * nodes + sent[1], "store": 0.0}
    told = [
        f"by {plane} {size_text(out[plane])} out"
        + (f" ({out[plane] * price / 1e9:.3g} {config.egress_currency})" if price else "")
        + f", {size_text(disk[plane]) if disk[plane] else 'names'} to disk"
        for plane in out
    ]
    sends, saves = (sent[0] + sent[1]) * nodes, (out["session"] - out["store"]) * price / 1e9
    fees = f"; the store sends {size_text(sends)}"
    if saves:
        fees += f": cheaper where it charges less than {saves / sends * 1e9:.3g} {config.egress_currency} a GB"
    return [("bulk", f"{file.run.bulk}; a round: {', '.join(told)}{fees}")]


def _h_text(terms: Terms) -> str:
    """`30`, or `30 to 412` if rounds differ; without the last, which ends with the run, and of the first if there are
    very many."""
    if terms.schedule.h_rule == "constant":
        return str(terms.schedule.h)
    rounds = first_rounds(terms, _MOST_ROUNDS)
    lengths = [plan.length for plan in rounds]
    of = "" if is_last(terms, rounds[-1]) else f" in the first {_MOST_ROUNDS:,} rounds"
    return f"{min(lengths[:-1] or lengths)} to {max(lengths)}{of} ({terms.schedule.h_rule})"


def _node_lines(file: NodeFile) -> list[tuple[str, str]]:
    node, data = file.node, file.node.data
    first = ", ".join(f"{share.weight:g} × {share.path}" for share in data.mixture or ())
    first = first or str(data.path or "Python's standard library")
    if_set = [
        ("lanes", str(node.lanes) if node.lanes else ""),
        ("bulk source", node.bulk_source),
        ("tau", "" if node.tau is None else plural(node.tau, "step")),
        ("adapt tau", "" if node.adapt_tau is None else "yes" if node.adapt_tau else "no"),
    ]
    return [
        ("node", f"{node.name}, {plural(node.nproc, 'rank')}"),
        ("coordinator", f"{node.coordinator}, {_guard(node.coordinator, node.key)}"),
        ("data", ", then ".join([first, *map(str, data.phases or ())])),
        ("state", str(node.state_dir or Path(".farloop") / node.name)),
        *((label, text) for label, text in if_set if text),
        *_uplink_lines(node.uplink),
    ]


def _uplink_lines(limit: UplinkLimit, round_bytes: float = 0.0) -> list[Line]:
    """What is sent at most, and how long the `round_bytes` of a round's updates take then."""
    rates = [("uplink", limit.bytes_per_s, "")]
    if limit.quiet_hours:
        rates.append(("quiet hours", limit.rate(limit.quiet_hours[0]), f"{limit.quiet_text}, "))
    lines = []
    for label, bytes_per_s, when in rates:
        if math.isfinite(bytes_per_s):
            text = f"{when}at most {rate_text(8 * bytes_per_s)}"
            if round_bytes:
                text += f"; a round's updates take {duration_text(round_bytes / bytes_per_s)}: a shorter round waits"
            lines.append((label, text))
    return lines


def _guard(address: str, key: Path | None) -> str:
    if key is not None:
        return "encrypted"
    is_local = all(one.is_loopback for one in parse_each_tcp(address, listens=True))
    return "in the clear, " + ("this machine only" if is_local else "OPEN TO ANY PEER")
