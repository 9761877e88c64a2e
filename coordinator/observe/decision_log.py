"""`decisions.jsonl`: why every window closed as it did, with ages. Reads the machine and decides nothing.

The observer measures the times, and only these lines hold them. The journal has no times, so a run and its repetition
have identical records.
"""

from collections.abc import Callable
from pathlib import Path
from typing import cast

from farloop.algo.methods import method_named
from farloop.algo.spec import BlobId, NodeId, RoundPlan, WindowTerms
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.decide.machine import CoordinatorMachine
from farloop.coordinator.decide.windows import Window
from farloop.coordinator.observe.event_log import MetricsLog
from farloop.monitoring.status import ArrivedDelta, ClosedWindow, DecisionEvent, OwnOfDelta, RefusedDelta
from farloop.wire import messages as msg

FILE = "decisions.jsonl"  # in the state folder; `event_log.py` names the older parts
KEEP_PARTS = 4  # parts of 64 MiB: about half a million windows of four nodes
_REFUSALS = 64  # most refusals that a window's line lists


class DecisionLog:
    def __init__(self, path: Path, told: Callable[[DecisionEvent], None]) -> None:
        """`told` gets every line, too."""
        self.timeline = MetricsLog(path, keep=KEEP_PARTS)
        self._told = told
        self._came: dict[BlobId, float] = {}
        self._refused: dict[int, list[tuple[float, RefusedDelta]]] = {}
        self._closed: dict[int, float] = {}
        self._computed: dict[int, tuple[float, float, float]] = {}
        """By fragment of the commit in progress: norm, seconds of merging and of the journal."""

    def on_event(self, event: ev.Event, machine: CoordinatorMachine, t: float, now: float) -> None:
        """An event on its way to the machine; `t` is the run's time."""
        match event:
            case ev.InputStored(offer=offer):
                self._came.setdefault(offer.blob, now)
            case ev.CommitDone(record=record):
                window = machine.windows[record.fragment]
                line = self._line(record, window, machine, t, now)
                self.timeline.write(line)
                self._told(line)
                inputs = machine.ledger.inputs
                self._came = {
                    blob: at for blob, at in self._came.items() if blob in inputs and blob not in window.inputs
                }
                self._refused.pop(record.fragment, None)
            case _:
                pass

    def on_command(self, command: ev.Command, now: float) -> None:
        match command:
            case ev.Commit(draft=draft):
                self._closed.setdefault(draft.fragment, now)
            case ev.Tell(node=node, message=msg.Outcome(blob=blob, reason=reason, detail=detail)):
                self._came.pop(blob, None)
                refused = self._refused.setdefault(blob.fragment, [])
                if len(refused) < _REFUSALS:
                    refused.append((now, {"node": node, "after_s": 0.0, "code": reason.code, "detail": detail}))
            case _:
                pass

    def on_computed(self, fragment: int, norm: float, merge_s: float, journal_s: float) -> None:
        """Norm and durations of the fragment's commit in progress."""
        self._computed[fragment] = (norm, merge_s, journal_s)

    def close(self) -> None:
        self.timeline.close()

    def _line(
        self, record: rec.WindowCommitted, window: Window, machine: CoordinatorMachine, t: float, now: float
    ) -> DecisionEvent:
        ledger, opened = machine.ledger, window.opened_at
        closed = self._closed.pop(record.fragment, now)
        waits = method_named(ledger.spec.terms.method).grace and window.quorum_at is not None
        facts = {
            "event": "decision",
            "t": t,
            **facts_of(record, ledger),
            "open_s": closed - opened,
            "quorum_s": None if window.quorum_at is None else window.quorum_at - opened,
            "grace_s": machine.grace.seconds if waits else None,
            "expected": sorted(window.expected),
            "arrived": _arrived(record, window, ledger, {blob: at - opened for blob, at in self._came.items()}),
            "refused": [{**told, "after_s": at - opened} for at, told in self._refused.get(record.fragment, [])],
        }
        line = cast(DecisionEvent, facts)
        if computed := self._computed.pop(record.fragment, None):
            line["norm"], line["merge_s"], line["journal_s"] = computed
        return line


def facts_of(record: rec.WindowCommitted, ledger: Ledger) -> ClosedWindow:
    """What the journal says of a window. Call it while the window is the fragment's open one."""
    opened, plan, layout = ledger.windows[record.fragment], ledger.rounds.get(record.round), ledger.spec.identity.layout
    terms = ledger.terms_of(record.fragment, record.version, record.round)
    facts: ClosedWindow = {
        "epoch": ledger.epoch,
        "fragment": record.fragment,
        "version": record.version,
        "round": record.round,
        "final": record.flush,
        "why": record.why,
        "quorum": None if terms.admission.max_staleness and opened.final else terms.admission.quorum,
        "floor": terms.admission.floor,
        "revision": ledger.revisions.number_of(record.fragment, record.version),
        "missing": [{"node": d.node, "code": d.reason.code, "sentence": d.reason.sentence} for d in record.drops],
        "h": plan.length if plan else terms.schedule.h,
        "outer_lr": record.outer_lr,
        "outer_momentum": record.outer_momentum,
        "delta_scale": record.delta_scale,
        "codec_up": opened.codec_up,
        "codec_down": opened.codec_down,
        "update_bytes": record.update_size,
        "anchor_digest": f"{record.anchor_digest:016x}",
    }
    if layout.num_stages > 1:
        facts["stage"] = layout.fragments[record.fragment].stage
    return facts


def _arrived(
    record: rec.WindowCommitted, window: Window, ledger: Ledger, after_s: dict[BlobId, float]
) -> list[ArrivedDelta]:
    rows: list[ArrivedDelta] = []
    for addend in record.blobs:
        offer = window.inputs[addend.blob]
        codec = ledger.codec_of_deltas(record.fragment, offer.window, addend.blob.node)
        for share in offer.contributors:
            row: ArrivedDelta = {
                "node": share.node,
                "after_s": after_s.get(addend.blob),
                "base": share.base,
                "window": offer.window,
                "weight": addend.weight,
                "steps": share.steps,
                "tokens": share.tokens,
                "norm": max(share.norm_sq, 0.0) ** 0.5,
            }
            rows.append({**row, **own_of(share.node, codec, window.terms, ledger.rounds.get(record.round))})
    return rows


def own_of(node: NodeId, codec: str, terms: WindowTerms, plan: RoundPlan | None) -> OwnOfDelta:
    """Settings of a node that differ from the window's."""
    own: OwnOfDelta = {} if codec == terms.codec_up else {"codec": codec}
    return own if plan is None or plan.steps_of(node) == plan.length else {**own, "h": plan.steps_of(node)}
