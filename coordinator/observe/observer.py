"""Everything shown about a run: status JSON, metrics.jsonl, Prometheus metrics, and one log line per transition.

Reads the machine and decides nothing.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from farloop.algo.schedule import learning_rate
from farloop.algo.spec import Layout, NodeId, RoundPlan, to_plain
from farloop.algo.stages import fragments_of
from farloop.coordinator.aggregator import Result
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.machine import CoordinatorMachine
from farloop.coordinator.decide.revising import last_change
from farloop.coordinator.decide.roster import Member, stages_held
from farloop.coordinator.decide.run_state import StorageHold
from farloop.coordinator.errors import StorageError
from farloop.coordinator.observe.decision_log import FILE as DIARY_FILE
from farloop.coordinator.observe.decision_log import DecisionLog
from farloop.coordinator.observe.event_log import EventLog, MetricsLog, Totals, last_time, shown
from farloop.coordinator.observe.metrics import Metrics
from farloop.coordinator.storage.files import DISK
from farloop.coordinator.storage.store import Store
from farloop.monitoring.status import (
    CopyStatus,
    InventoryStatus,
    NodeStatus,
    PartStatus,
    ProgressEvent,
    StandbyStatus,
    Status,
    WatchStatus,
    WindowStatus,
    dumps,
    finished_status,
    finite_or_none,
    not_finite,
)
from farloop.monitoring.status_summary import doing, named, standing
from farloop.runtime.version import version_of
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason
from farloop.wire.uplink import Uplink

_log = logging.getLogger(__name__)

_TRAINS = "nodes are training and nothing holds the run"
_TOTALS_EVERY = 500  # lines of progress between two of totals: 0.2 MB, of the end of the file that a start reads


class Observer:
    def __init__(self, store: Store, metrics_file: Path, metrics: Metrics, hold: StorageHold) -> None:
        """`metrics_file` is appended to; a resumed run's clock continues where it ends."""
        self.status_json, self._refreshed = b"{}", time.monotonic()
        metrics.status_age.set_function(lambda: self.age_s)
        self.copies: Callable[[], CopyStatus] | None = None  # status of copies, if any
        self.standbys: Callable[[], StandbyStatus] | None = None  # status of standbys, where the run may have some
        self.standby_alarms: Callable[[], Mapping[str, str]] = lambda: {}
        self.inventory: Callable[[Iterable[Member], float], InventoryStatus] | None = None
        """Status of machines and links."""
        self.link_alarms: Callable[[float], Mapping[str, str]] = lambda now: {}
        self.uplink: Uplink | None = None  # the limit on what is sent, if there is one
        self.watch: Callable[[], WatchStatus] | None = None  # status of slow nodes and links
        self.node_disk_bytes: int | None = None  # most that a node keeps on disk, by the run's plan
        self.joined = False  # whether the run can make progress: at least one node is connected
        self._store, self._metrics, self._hold = store, metrics, hold
        self._happenings = EventLog(metrics)
        self._diary = DecisionLog(metrics_file.with_name(DIARY_FILE), metrics.window_closed)
        self._offset_s = last_time(metrics_file)
        self._started = time.monotonic()
        self._finished_at: float | None = None
        self._began_finished = store.ledger.finished
        self._timeline = MetricsLog(metrics_file)
        self._merged: dict[int, list[str]] = {}
        self._states: dict[str, str] = {}
        self._state = ""  # the run's state in the last status
        terms = store.ledger.spec.terms
        metrics.steps.set(terms.schedule.steps)
        metrics.h.set(store.ledger.h)
        metrics.h_max.set(terms.schedule.h_max or 0)
        metrics.epoch.set(store.ledger.epoch)
        # Of what never changes: a digest over every tensor's name is too much to take with every status.
        identity = store.ledger.spec.identity
        self._fingerprint, self._num_parameters = identity.fingerprint(), identity.layout.num_parameters
        self._version = version_of()
        self._totals, self._totals_due = Totals.resumed(metrics_file, self._num_parameters), 0
        if store.ledger.evaluations:
            metrics.scored(store.ledger.evaluations[-1].loss)
        metrics.describe(identity.name, terms, self._version, metrics_file.parent)

    def close(self) -> None:
        self._timeline.close()
        self._diary.close()
        self._metrics.close()

    def save_status(self, path: Path) -> None:
        """Write the status to a file; a failure is only logged. A start after the run's end knows less than the one
        that ended it, whose status stays."""
        if self._began_finished and finished_status(path.parent):
            return
        try:
            with DISK.replacing(path) as temporary:
                temporary.write_bytes(self.status_json)
        except (OSError, StorageError) as error:
            _log.warning("status not written path=%s why=%r", path, str(error))

    @property
    def t(self) -> float:
        """Seconds since the run's start, over all incarnations."""
        return self._offset_s + time.monotonic() - self._started

    def on_event(self, event: ev.Event, machine: CoordinatorMachine) -> None:
        self._happenings.on_event(event, machine, time.monotonic())
        self._diary.on_event(event, machine, self.t, time.monotonic())
        match event:
            case ev.NodeMessage(node=node, message=msg.Progress() as progress):
                if machine.believes(node, progress):
                    self._progress(node, progress)
            case ev.NodeMessage(node=node, message=msg.Evaluation() as evaluation):
                if machine.believes(node, evaluation):
                    loss, position = evaluation.loss, evaluation.position
                    self._timeline.write({"event": "evaluation", "t": self.t, "loss": loss, "position": position})
                    self._metrics.scored(loss)
                    _log.info("evaluation node=%s loss=%.4f position=%g", named(node), loss, position)
            case ev.InputStored(offer=offer):
                codec = machine.ledger.codec_of_deltas(offer.blob.fragment, offer.window, offer.blob.node)
                self._metrics.payload_bytes.labels("delta", codec).inc(offer.size)
            case _:
                pass

    def on_command(self, command: ev.Command) -> None:
        if isinstance(command, ev.Refuse):
            self._metrics.refusals.labels(command.refused.reason.code).inc()
        elif isinstance(command, ev.Accept):
            self._metrics.node_sessions.labels(command.node).inc()
        self._happenings.on_command(command, time.monotonic())
        self._diary.on_command(command, time.monotonic())

    def on_disconnect(self, node: NodeId | None, reason: Reason, detail: str, machine: CoordinatorMachine) -> None:
        self._happenings.on_disconnect(node, reason, detail, machine, time.monotonic())

    def turned_away(self, reason: Reason, who: str) -> None:
        self._happenings.turned_away(reason, who, time.monotonic())

    def says_good_bye(self, reason: Reason) -> None:
        self._happenings.add("farewell", "", reason, "", time.monotonic())

    def on_committed(self, record: rec.WindowCommitted, result: Result, merge_s: float, journal_s: float) -> None:
        names: list[str] = [share.node for share in record.merged]
        self._happenings.on_committed(record, time.monotonic())
        self._diary.on_computed(record.fragment, result.delta_norm, merge_s, journal_s)
        self._merged[record.fragment] = names
        self._timeline.write(
            {
                "event": "commit",
                "t": self.t,
                "fragment": record.fragment,
                "version": record.version,
                "round": record.round,
                "merged": list(names),
                "drops": [[str(drop.node), drop.reason.sentence] for drop in record.drops],
                "update_bytes": record.update_size,
                "norm": result.delta_norm,
            }
        )
        _log.info(
            "commit fragment=%d version=%d round=%d merged=%s dropped=%s why=%r",
            record.fragment,
            record.version,
            record.round,
            ",".join(map(named, names)),
            ",".join(f"{named(d.node)}:{d.reason.name}" for d in record.drops) or "-",
            record.why,
        )
        metrics = self._metrics
        metrics.commits.inc()
        metrics.update_bytes.inc(record.update_size)
        metrics.merge_seconds.observe(merge_s)
        metrics.journal_seconds.observe(journal_s)
        metrics.version.labels(str(record.fragment)).set(record.version)
        metrics.delta_norm.labels(str(record.fragment)).set(result.delta_norm)
        for share in record.merged:
            metrics.merged.labels(share.node).inc()
        for addend in record.blobs:
            if addend.cosine is not None:
                metrics.cosine.labels(addend.blob.node).set(addend.cosine)
        for drop in record.drops:
            metrics.drops.labels(drop.node, drop.reason.code).inc()

    def refresh(self, machine: CoordinatorMachine) -> None:
        self._happenings.alarms(self._alarms(machine), time.monotonic())
        status = self.status(machine)
        if (state := status["run"]["state"]) != self._state:
            before, self._state = self._state, state
            _log.info(
                "run is=%s was=%s round=%d why=%r", state, before or "-", status["round"], standing(status) or _TRAINS
            )
        for node in status["nodes"]:
            stalled = machine.members[NodeId(node["name"])].stalled
            seen = ("stalled" if stalled else node["state"]) if node["connected"] else "away"
            if self._states.get(node["name"]) != seen:
                self._states[node["name"]] = seen
                self._timeline.write(
                    {"event": "node", "t": self.t, "name": node["name"], "state": seen, "reason": node["reason"]}
                )
                why = node["reason"] or doing(node)
                late = {name for window in machine.windows.values() for name in window.missing}
                if seen == "ready" and late:
                    why += f" with a commit, for which {', '.join(map(named, sorted(late)))} must train or stall"
                _log.info("node name=%s state=%s reason=%r", named(node["name"]), seen, why)
                if stalled:
                    self._happenings.add("stalled", node["name"], Reason.STALLED, "", time.monotonic())
        self.joined = any(node["connected"] for node in status["nodes"])
        self._metrics.steps.set(status["run"]["steps"])
        self._metrics.position.set(status["position"])
        self._metrics.round.set(status["round"])
        self._metrics.h.set(status["run"]["h"])
        # After a restart no node has reported yet; the round's first position is known all the same.
        ledger = machine.ledger
        position = max(status["position"], ledger.rounds[ledger.current_round].start if ledger.rounds else 0)
        self._metrics.set_nodes(status["nodes"])
        self._metrics.learning_rate.set(learning_rate(machine.ledger.spec.terms, int(position)))
        self._metrics.nodes.labels("connected").set(sum(node["connected"] for node in status["nodes"]))
        self._metrics.nodes.labels("quarantined").set(len(machine.in_quarantine))
        self._metrics.nodes.labels("training").set(sum(m.counts for m in machine.members.values()))
        self._metrics.storage_held.set(bool(self._hold))
        self._metrics.participation.set(machine.guard.share())
        self._metrics.participation_held.set(machine.guard.holds)
        if self.copies is not None:
            status["copy"] = self.copies()
            self._metrics.copy_lag.set(status["copy"]["lag_s"])
        if self.standbys is not None:
            status["standby"] = self.standbys()
            self._metrics.set_standbys(status["standby"])
        if self.inventory is not None:
            members = sorted(machine.members.values(), key=lambda member: member.name)
            status["inventory"] = self.inventory(members, time.monotonic())
            self._metrics.set_links(status["inventory"])
            self._metrics.set_versions(status["inventory"]["nodes"])
        if (uplink := self.uplink) is not None:
            rate = uplink.bytes_per_s if math.isfinite(uplink.bytes_per_s) else None
            status["uplink"] = {"bytes_per_s": rate, "quiet": uplink.is_quiet, "held_s": uplink.held_s}
            self._metrics.set_uplink(status["uplink"])
        if self.watch is not None:
            status["watch"] = self.watch()
        self._metrics.set_keys(machine.ledger.allowed.items(), datetime.now(UTC).timestamp())
        self._metrics.count_samples(machine.ledger.leases.fates())
        self._metrics.rollback_held.set(machine.holding is not None)
        self._metrics.alarms.set(len(status["alarms"]))
        self._metrics.set_logs(self._timeline.dropped)
        self.status_json, self._refreshed = dumps(status).encode(), time.monotonic()

    @property
    def age_s(self) -> float:
        """Seconds since the status was made, or tried first: it is made every second while the loop turns."""
        return time.monotonic() - self._refreshed

    def _alarms(self, machine: CoordinatorMachine) -> dict[str, str]:
        return {**self._store.alarms, **machine.alarms, **self.link_alarms(time.monotonic()), **self.standby_alarms()}

    def status(self, machine: CoordinatorMachine) -> Status:
        ledger, now, t = machine.ledger, time.monotonic(), self.t
        identity, terms = ledger.spec.identity, ledger.spec.terms
        if machine.begun and self._totals.began_at is None:
            self._totals.began_at, self._totals_due = t, 0
        if ledger.finished and self._finished_at is None:
            self._finished_at = t
        until = t if self._finished_at is None else self._finished_at
        state: Literal["waiting", "training", "held", "holding"] = "training" if machine.begun else "waiting"
        if self._hold or machine.guard.holds:
            state = "held"
        if machine.holding is not None:
            state = "holding"
        members = sorted(machine.members.values(), key=lambda m: m.name)
        quarantine, plan = machine.in_quarantine, self._store.ledger.rounds[self._store.ledger.current_round]
        nodes = [self._node(member, now, quarantine, plan) for member in members]
        told: Status = {
            "run": {
                "name": identity.name,
                "fingerprint": self._fingerprint,
                "method": terms.method,
                "codec_up": terms.codecs.up,
                "codec_down": terms.codecs.down,
                "steps": terms.schedule.steps,
                "h": ledger.h,
                "tau": terms.schedule.tau,
                "mix": terms.schedule.mix,
                "fragments": len(identity.layout.fragments),
                "parameters": self._num_parameters,
                "state": "finished" if ledger.finished else state,
                "epoch": ledger.epoch,
                "revision": ledger.spec.revision,
                "changed": last_change(ledger),
                "nodes": terms.admission.min_nodes,
                "started_s": until - self._totals.began_at if self._totals.began_at is not None else 0.0,
                "uptime_s": now - self._started,
                "farloop": self._version,
            },
            "position": float(terms.schedule.steps) if ledger.finished else _position(members),
            "round": ledger.current_round,
            "versions": list(ledger.versions),
            "digests": [f"{ledger.anchor_digest(f, v):016x}" for f, v in enumerate(ledger.versions)],
            "outer_steps": max(ledger.versions),
            "commits": sum(ledger.versions),
            "totals": self._totals.status({n["name"]: n["part"]["parameters"] for n in nodes if "part" in n}),
            "nodes": nodes,
            "windows": self._windows(machine),
            "evaluations": [
                {
                    "loss": finite_or_none(evaluation.loss),
                    "position": evaluation.position,
                    "outer_steps": max(evaluation.versions),
                }
                for evaluation in ledger.evaluations
            ],
            "alarms": [f"{what}: {why}" for what, why in self._alarms(machine).items()],
            "recent": self._happenings.recent(now),
            "samples": ledger.leases.fates(),
        }
        if self.node_disk_bytes is not None:
            told["run"]["node_disk_bytes"] = self.node_disk_bytes
        if terms.codecs.up_of:
            told["run"]["codec_up_of"] = {str(node): codec for node, codec in terms.codecs.up_of}
        if terms.schedule.h_share_of:
            told["run"]["h_share_of"] = {str(node): share for node, share in terms.schedule.h_share_of}
        counts = stages_held((member for member in members if member.session is not None), ledger)
        if len(counts) > 1:
            told["run"]["stages"] = list(counts.values())
        return told

    def _node(self, member: Member, now: float, quarantine: Mapping[NodeId, str], plan: RoundPlan) -> NodeStatus:
        progress = member.progress
        away = (member.session is None or member.stalled) and member.reason is not Reason.NONE
        sent, received = (progress.sent, progress.received) if progress else (msg.BytesByKind(), msg.BytesByKind())
        told: NodeStatus = {
            "name": member.name,
            "state": member.stage if progress is None or member.stage == "left" else progress.state,
            "connected": member.session is not None,
            "incarnation": member.incarnation,
            "device": member.device,
            "position": progress.position if progress else 0.0,
            "round": progress.round if progress else 0,
            "inner_steps": progress.inner_steps if progress else 0,
            "tokens": progress.tokens if progress else 0,
            "loss": finite_or_none(progress.loss) if progress else None,
            "tokens_per_s": progress.tokens_per_s if progress else 0.0,
            "compute_share": progress.compute_share if progress else 0.0,
            "blocked_s": progress.blocked_s if progress else 0.0,
            "lost_steps": progress.lost_steps if progress else 0,
            "skipped_turns": progress.skipped_turns if progress else 0,
            "skipped_steps": progress.skipped_steps if progress else 0,
            "bytes_up": sent.total,
            "bytes_down": received.total,
            "bytes_state": (sent + received).state,
            "bytes_by_kind": to_plain(sent + received),
            "detail": progress.detail if progress else "",
            "reason": ": ".join(filter(None, (member.reason.sentence, shown(member.detail)))) if away else "",
            "last_heard_s": now - member.heard_at,
            "digests": [f"{ref.digest:016x}" for ref in sorted(member.anchors, key=lambda ref: ref.fragment)],
            "quarantine": quarantine.get(member.name, ""),
            "loss_is": "" if progress is None else not_finite(progress.loss),
        }
        ledger = self._store.ledger
        if member.holds is not None:
            told["part"] = _part(member.holds, ledger.spec.identity.layout)
        codec = ledger.spec.terms.codec_of(member.name)
        if (own := plan.steps_of(member.name)) != plan.length:
            told["h"] = own
        if codec != ledger.spec.terms.codecs.up:
            told["codec_up"] = codec
        if progress is not None and progress.tau:
            told["tau"] = progress.tau
        return told

    def _windows(self, machine: CoordinatorMachine) -> list[WindowStatus]:
        return [
            {
                "fragment": fragment,
                "window": window.terms.window if window else version,
                "round": window.terms.round if window else machine.ledger.current_round,
                "state": window.state if window else "final",
                "expected": sorted(window.expected) if window else [],
                "arrived": sorted(window.contributors) if window else [],
                "merged": self._merged.get(fragment, []),
            }
            for fragment, version in enumerate(machine.ledger.versions)
            for window in [machine.windows.get(fragment)]
        ]

    def _progress(self, node: str, progress: msg.Progress) -> None:
        sent, received = progress.sent, progress.received
        event: ProgressEvent = {
            "event": "progress",
            "t": self.t,
            "node": node,
            "position": progress.position,
            "inner_steps": progress.inner_steps,
            "tokens": progress.tokens,
            "loss": finite_or_none(progress.loss),
            "bytes_up": sent.total,
            "bytes_down": received.total,
            "bytes_state": (sent + received).state,
            "bytes_by_kind": to_plain(sent + received),
            "lost_steps": progress.lost_steps,
        }
        if self._totals_due == 0:
            self._timeline.write(self._totals.event(self.t))
        self._totals_due = (self._totals_due + 1) % _TOTALS_EVERY
        self._timeline.write(event)
        self._totals.update(node, event)
        metrics = self._metrics
        if progress.loss is not None:
            metrics.node_loss.labels(node).set(progress.loss)
        metrics.node_tokens.labels(node).set(progress.tokens)
        metrics.node_steps.labels(node).set(progress.inner_steps)
        metrics.node_share.labels(node).set(progress.compute_share)
        metrics.node_blocked.labels(node).set(progress.blocked_s)
        for direction, moved in (("up", sent), ("down", received)):
            for kind, count in to_plain(moved).items():
                metrics.node_bytes_of(node, direction, kind).set(count)


def _part(stages: tuple[int, ...], layout: Layout) -> PartStatus:
    fragments = fragments_of(stages, layout)
    numel = sum(tensor.numel for fragment in fragments for tensor in fragment.tensors)
    return {"stages": list(stages), "fragments": [fragment.index for fragment in fragments], "parameters": numel}


def _position(members: Iterable[Member]) -> float:
    """Highest schedule position of the connected nodes, or of those that left."""
    told = [(member.session is not None, member.progress.position) for member in members if member.progress]
    return max(told, default=(False, 0.0))[1]
