"""The view model of a run: a status summed up once, for the page, `farloop status`, `top`, the demo and the logs."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal, TypeVar

from farloop.monitoring.status import AnomalyStatus, EventStatus, NodeStatus, Status, StepsStatus, WindowStatus
from farloop.monitoring.units import (
    NOTHING,
    count_text,
    duration_text,
    factor_text,
    few_of,
    loss_text,
    percent_text,
    plural,
    size_text,
    speed_text,
)

_NAME = re.compile(r"[\w.-]+", re.ASCII)
_T = TypeVar("_T")

Tone = Literal["good", "wait", "bad"]  # how a state is coloured

_TONES: dict[str, Tone] = {
    "waiting": "wait", "training": "good", "held": "bad", "holding": "bad", "finished": "good",
}  # fmt: skip

DATA_PARALLEL_BYTES = 8
"""fp32 data parallel: 4 bytes of gradient up and 4 down, per parameter and inner step of every node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    status: NodeStatus
    state: str  # `away` and `finished` for nodes that are not connected, else the node's own state
    tone: Tone
    now: str  # what it exchanges or waits for, or why it left
    part: str
    loss: str
    loss_is_finite: bool
    speed: str
    compute: str
    compute_tone: Tone | Literal[""]
    up: str
    down: str
    heard: str

    @property
    def name(self) -> str:
        return self.status["name"]

    @property
    def connected(self) -> bool:
        return self.status["connected"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowView:
    fragment: int
    window: int
    state: str
    arrived: int
    expected: int
    missing: tuple[str, ...]

    @property
    def note(self) -> str:
        """Which nodes it waits for, or its state."""
        return f"waits for {few_of(self.missing, 3)}" if self.missing else self.state


@dataclass(frozen=True, slots=True, kw_only=True)
class EventView:
    age: str
    node: str
    kind: str
    code: str  # empty where it only repeats the kind
    sentence: str
    detail: str
    times: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run, ready to be shown. Numbers that several views show are text already."""

    status: Status
    tone: Tone
    facts: tuple[str, ...]  # method, codecs, H
    lasted: str  # training time; empty before training begins
    position: float
    steps: int
    done: str
    why: str  # why the run does not progress; empty while it trains
    notes: tuple[str, ...]  # slow nodes and links, and other versions than the coordinator's
    losses: tuple[float | None, ...]  # validation losses, oldest first; None where it is no finite number
    live: int
    tokens: str
    speed: str  # tokens per second of the connected nodes
    training_loss: float | None  # mean over the connected nodes
    outer_steps: str
    commits: str
    up: str
    down: str
    total: str
    reduction: float
    nodes: tuple[NodeView, ...]
    windows: tuple[WindowView, ...]  # those that expect a node, by fragment
    events: tuple[EventView, ...]  # oldest first

    @property
    def name(self) -> str:
        return self.status["run"]["name"]

    @property
    def state(self) -> str:
        return self.status["run"]["state"]

    @property
    def alarms(self) -> list[str]:
        return self.status["alarms"]

    @property
    def fewer(self) -> str:
        """How many times fewer bytes than fp32 data parallel; empty before bytes were sent."""
        return factor_text(self.reduction) if self.reduction > 0 else ""


def view_of(status: Status) -> RunView:
    """Everything that the views of a run show."""
    run, nodes = status["run"], status["nodes"]
    live = [node for node in nodes if node["connected"]]
    losses = [node["loss"] for node in live if node["loss"] is not None]
    up, down = status["totals"]["bytes_up"], status["totals"]["bytes_down"]
    position = min(status["position"], run["steps"])
    return RunView(
        status=status,
        tone=_TONES.get(run["state"], "wait"),
        facts=(
            run["method"],
            f"{run['codec_up']} up, {run['codec_down']} down",
            f"H {run['h']}",
            *(f"{name} stands by" for name in (status["standby"]["in_sync"] if "standby" in status else ())),
        ),
        lasted=duration_text(run["started_s"]) if run["started_s"] > 0 else "",
        position=position,
        steps=run["steps"],
        done=percent_text(position / run["steps"]),
        why=standing(status),
        notes=(*anomaly_lines(status), *version_lines(status)),
        losses=tuple(score["loss"] for score in status["evaluations"]),
        live=len(live),
        tokens=count_text(status["totals"]["tokens"]),
        speed=speed_text(sum(node["tokens_per_s"] for node in live)),
        training_loss=sum(losses) / len(losses) if losses else None,
        outer_steps=f"{status['outer_steps']:,}",
        commits=f"{plural(status['commits'], 'commit')}, round {status['round']:,}",
        up=size_text(up),
        down=size_text(down),
        total=size_text(up + down),
        reduction=reduction(status),
        nodes=tuple(_node_view(node, status) for node in nodes),
        windows=tuple(_window_view(w) for w in sorted(status["windows"], key=itemgetter("fragment")) if w["expected"]),
        events=tuple(map(event_view, status["recent"])),
    )


def validation_text(loss: float | None) -> str:
    """A validation loss; a diverged one has no number."""
    return "no finite number" if loss is None else loss_text(loss)


def _node_view(node: NodeStatus, status: Status) -> NodeView:
    here, done = node["connected"], ended_well(node, status)
    wrong, share = node["loss_is"], node["compute_share"]
    known = 0 < share < math.inf
    tone: Tone = _TONES.get(node["state"], "wait")
    if done or not here or node["quarantine"]:
        tone = "good" if done else "bad"
    return NodeView(
        status=node,
        state=node["state"] if here else "finished" if done else "away",
        tone=tone,
        now=sync_text(node, status["windows"]),
        part=part_text(node),
        loss=wrong or loss_text(node["loss"]),
        loss_is_finite=not wrong,
        speed=speed_text(node["tokens_per_s"]) if here else NOTHING,
        compute=percent_text(share) if known else NOTHING,
        compute_tone="" if not known else "good" if share >= 0.9 else "wait" if share >= 0.6 else "bad",
        up=size_text(node["bytes_up"]),
        down=size_text(node["bytes_down"]),
        heard=duration_text(node["last_heard_s"]),
    )


def _window_view(window: WindowStatus) -> WindowView:
    return WindowView(
        fragment=window["fragment"],
        window=window["window"],
        state=window["state"],
        arrived=len(window["arrived"]),
        expected=len(window["expected"]),
        missing=tuple(name for name in window["expected"] if name not in window["arrived"]),
    )


def event_view(event: EventStatus) -> EventView:
    return EventView(
        age=f"{duration_text(event['age_s'])} ago",
        node=event["node"] or NOTHING,
        kind=event["kind"],
        code=event["code"] if event["code"] != event["kind"] else "",
        sentence=event["sentence"],
        detail=f"({event['detail']})" if event["detail"] else "",
        times=f"×{event['count']:,}" if event["count"] > 1 else "",
    )


def merged_steps(status: Status) -> int:
    """Inner steps of all nodes that data parallel would have needed: without what nodes report as lost, and what a node
    did beyond the run's steps as a part of the run was repeated. A killed node reports no loss: up to a round of its
    steps stays counted.
    """
    return sum(_merged(steps, status) for steps in status["totals"]["nodes"].values())


def _merged(steps: StepsStatus, status: Status) -> int:
    lost = math.ceil(steps["lost_steps"] / status["run"]["fragments"])
    return max(0, min(steps["inner_steps"] - lost, status["run"]["steps"]))


def data_parallel_bytes(status: Status) -> int:
    """What fp32 data parallel would have sent for the merged steps of the parameters that each node holds."""
    nodes = status["totals"]["nodes"].values()
    return DATA_PARALLEL_BYTES * sum(steps["parameters"] * _merged(steps, status) for steps in nodes)


def reduction(status: Status) -> float:
    """Bytes of fp32 data parallel over all bytes on the links.

    0 before the first commit: until then steps count whose delta has not been sent.
    """
    sent = status["totals"]["bytes_up"] + status["totals"]["bytes_down"]
    return data_parallel_bytes(status) / sent if sent and status["commits"] else 0.0


def part_text(node: NodeStatus) -> str:
    """The stages that a node holds; empty for the whole model."""
    stages = node["part"]["stages"] if "part" in node else []
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}" if stages else ""


def left_with_the_last(node: NodeStatus, status: Status) -> bool:
    """Whether a node left with the run's present anchors, of all fragments that it holds."""
    held = node["part"]["fragments"] if "part" in node else range(len(status["digests"]))
    return node["digests"] == [status["digests"][fragment] for fragment in held]


_WAITS = frozenset({"joining", "ready", "waiting", "draining"})
"""States whose detail names what the node waits for; else it is a sentence."""


def doing(node: NodeStatus) -> str:
    return f"waits for {node['detail']}" if node["detail"] and node["state"] in _WAITS else node["detail"]


def sync_text(node: NodeStatus, windows: Sequence[WindowStatus]) -> str:
    """What a node exchanges now: its own words, or else the windows that hold a delta of it."""
    if node["reason"] or not node["connected"]:
        return node["reason"] or f"not heard for {duration_text(node['last_heard_s'])}"
    if why := node["quarantine"]:
        return f"in quarantine: {why}"
    if said := doing(node):
        return said
    held = [window for window in windows if window["state"] != "final" and node["name"] in window["arrived"]]
    if not held:
        return ""
    names = " ".join(f"f{window['fragment']}" for window in held)
    missing = sum(len(window["expected"]) - len(window["arrived"]) for window in held)
    return f"{names} sent, {missing} to come" if missing > 0 else f"{names} closing"


def ended_well(node: NodeStatus, status: Status) -> bool:
    """Whether it left because the run was finished."""
    return status["run"]["state"] == "finished" and not node["connected"] and node["state"] in ("finished", "left")


def idle_steps(status: Status) -> str:
    """How many inner steps of the nodes' last starts changed no weight; empty if none."""
    nodes = status["nodes"]
    count, of = (sum(node[key] for node in nodes) for key in ("skipped_steps", "inner_steps"))
    return f"{count:,} of {of:,} inner steps changed no weight: no gradient, or NaN or Inf in it" if count else ""


def standing(status: Status) -> str:
    """Why the run does not progress, and what resolves it; empty while it trains."""
    run, here = status["run"], sum(node["connected"] for node in status["nodes"])
    match run["state"]:
        case "finished":
            told = "done; the model is model.safetensors in the coordinator's state folder"
            return "; ".join(filter(None, (told, idle_steps(status))))
        case "holding" if any(alarm.startswith("adoption:") for alarm in status["alarms"]):
            return "nothing is committed until the state of the nodes has arrived; the alarm names what is missing"
        case "holding":
            return "nothing is committed and no node is admitted until you decide; the alarm names the choices"
        case "held":
            return "nothing is committed until the alarm is resolved; the run then continues"
        case "waiting":
            wanted = run["nodes"]
            if stages := run.get("stages"):
                counts = ", ".join(f"stage {stage} has {count} of {wanted}" for stage, count in enumerate(stages))
                return f"begins when its nodes are connected: {counts} so far"
            start = "" if here else "; start one: farloop node"
            return f"begins when its nodes are connected: {here} of {wanted} so far{start}"
        case "training" if not here:
            return "no node is connected, so nothing progresses; a node that returns continues where the run is"
        case _:
            return ""


def anomaly_text(anomaly: AnomalyStatus) -> str:
    """A slow node or link, and the mitigation, in a line."""
    factor = anomaly["factor"]
    much = f" {factor:.1f} times" if factor is not None else ""
    text = f"{anomaly['node']}: {anomaly['kind']}{much} since round {anomaly['since_round']}"
    text += f" ({anomaly['place']})" if anomaly["place"] else ""
    if anomaly["action"]:
        text += f"; {'done' if anomaly['done'] else 'advised'}: {anomaly['action']}"
    if (advice := anomaly.get("advice")) is not None:
        text += (
            f", {advice['bits']} bits and H {advice['h']}: rounds {advice['round_s']:.3g} s → {advice['then_s']:.3g} s"
        )
    return text


def anomaly_lines(status: Status) -> list[str]:
    """All anomalies; a slow side of the coordinator comes first."""
    if (watch := status.get("watch")) is None:
        return []
    own = [f"the coordinator's links: {watch['coordinator']}"] if watch["coordinator"] else []
    return own + [anomaly_text(anomaly) for anomaly in watch["anomalies"]]


def version_lines(status: Status) -> list[str]:
    """Which connected nodes and standbys run another version of farloop than the coordinator; nothing if none does."""
    if not (own := status["run"].get("farloop", "")):
        return []  # of a coordinator that does not say
    others = dict[str, list[str]]()
    nodes = status["inventory"]["nodes"] if "inventory" in status else []
    standbys = status["standby"]["farloop"] if "standby" in status else {}
    found = {node["name"]: node["farloop"] for node in nodes if node["connected"]}
    for name, version in {**found, **{f"standby {name}": version for name, version in standbys.items()}}.items():
        if version != own:
            others.setdefault(version or "an unknown version", []).append(name)
    told = [f"{version} at {few_of(names, 3)}" for version, names in sorted(others.items())]
    return [f"versions: the coordinator runs farloop {own}; {'; '.join(told)}"] if told else []


def printable(text: str) -> str:
    """The text without line breaks, control characters and direction marks: nodes choose their own names."""
    return "".join(character if character.isprintable() else "?" for character in text)


def named(node: str) -> str:
    """A node's name for a log line: anything but a plain name is quoted, so that it adds no fields."""
    return node if _NAME.fullmatch(node) else repr(node)


def cleaned(told: _T) -> _T:
    """The same value with every text printable."""
    return _cleaned(told)  # type: ignore[no-any-return]


def _cleaned(told: Any) -> Any:
    match told:
        case str():
            return printable(told)
        case dict():
            return {key: _cleaned(value) for key, value in told.items()}
        case list():
            return [_cleaned(value) for value in told]
        case _:
            return told
