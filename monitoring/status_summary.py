"""What a status comes to, in words and numbers that the page, the terminal and the reports share. Pure."""

import math
import re
from collections.abc import Sequence
from typing import Any, TypeVar

from farloop.monitoring.status import AnomalyStatus, NodeStatus, Status, WindowStatus
from farloop.monitoring.units import duration_text

_NAME = re.compile(r"[\w.-]+", re.ASCII)
_T = TypeVar("_T")

DATA_PARALLEL_BYTES = 8
"""fp32 data parallel: 4 bytes of gradient up and 4 down, per parameter and inner step of every node."""


def reduction(status: Status) -> float:
    """How many times fewer bytes, of all kinds, crossed the links than fp32 data parallel sends for the inner steps
    that were not lost; 0 before any did."""
    sent = sum(node["bytes_up"] + node["bytes_down"] for node in status["nodes"])
    held = ((node["part"]["parameters"] if "part" in node else status["run"]["parameters"]) for node in status["nodes"])
    fragments = status["run"]["fragments"]
    steps = (max(0.0, node["inner_steps"] - node["lost_steps"] / fragments) for node in status["nodes"])
    work = sum(count * done for count, done in zip(held, steps, strict=True))
    return DATA_PARALLEL_BYTES * work / sent if sent else 0.0


def part_text(node: NodeStatus) -> str:
    """The stages of the model that it holds; empty for a node that holds all of it."""
    stages = node["part"]["stages"] if "part" in node else []
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}" if stages else ""


def left_with_the_last(node: NodeStatus, status: Status) -> bool:
    """Whether a node said good-bye with the anchors that the run has now, of all fragments that it holds."""
    held = node["part"]["fragments"] if "part" in node else range(len(status["digests"]))
    return node.get("digests") == [status["digests"][fragment] for fragment in held]


_WAITS = frozenset({"joining", "ready", "waiting", "draining"})
"""States in which the detail is what a node waits for; else it is a sentence."""


def doing(node: NodeStatus) -> str:
    """What a node says it does or waits for; may be empty."""
    return f"waits for {node['detail']}" if node["detail"] and node["state"] in _WAITS else node["detail"]


def sync_text(node: NodeStatus, windows: Sequence[WindowStatus]) -> str:
    """What a node exchanges right now, in words: its own, or else the windows that hold a delta of it."""
    if node["reason"] or not node["connected"]:
        return node["reason"] or f"not heard for {duration_text(node['last_heard_s'])}"
    if why := node.get("quarantine"):
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
    """Whether it has left as a node should: when the run was over."""
    over = status["run"]["state"] == "finished"
    return over and not node["connected"] and node["state"] in ("finished", "left")


def standing(status: Status) -> str:
    """Why the run does not move, and what it takes until it does; empty while it trains as it should."""
    run, here = status["run"], sum(node["connected"] for node in status["nodes"])
    match run["state"]:
        case "finished":
            return "done; the model is model.safetensors in the coordinator's state folder"
        case "holding" if any(alarm.startswith("adoption:") for alarm in status["alarms"]):
            return "nothing is committed until what the nodes hold is here: the alarm says what that waits for"
        case "holding":
            return "nothing is committed and nobody is let in until you decide: the alarm says between what"
        case "held":
            return "nothing is committed until the alarm is mended; it then goes on by itself"
        case "waiting":
            wanted = run.get("nodes", 0)
            if stages := run.get("stages"):
                counts = ", ".join(f"stage {stage} has {count} of {wanted}" for stage, count in enumerate(stages))
                return f"begins when its nodes are there: {counts} so far"
            have = f"{here} of {wanted}" if wanted else f"{here}"
            return f"begins when its nodes are there: {have} so far" + ("" if here else "; start one: farloop node")
        case "training" if not here:
            return "no node is connected, so nothing moves; a node that comes back goes on where the run stands"
        case _:
            return ""


def anomaly_text(anomaly: AnomalyStatus) -> str:
    """A node or link that has become slow, and what was done, in a line."""
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
    """All of them; that the coordinator's own end is slow comes first."""
    if (watch := status.get("watch")) is None:
        return []
    own = [f"the coordinator's links: {watch['coordinator']}"] if watch["coordinator"] else []
    return own + [anomaly_text(anomaly) for anomaly in watch["anomalies"]]


def finite_or_none(value: float | None) -> float | None:
    """The number as JSON has it: a loss may be NaN or infinite, and JSON knows neither."""
    return value if value is not None and math.isfinite(value) else None


def not_finite(value: float | None) -> str:
    """`nan`, `inf` or `-inf`; empty for a finite number, and for none."""
    return "" if value is None or math.isfinite(value) else f"{value:g}"


def printable(text: str) -> str:
    """In one line and without control characters, also those that turn the direction of text: nodes name themselves."""
    return "".join(character if character.isprintable() else "?" for character in text)


def named(node: str) -> str:
    """A node's name as it may stand in a log line: what is more than a name is quoted, so that it adds no fields."""
    return node if _NAME.fullmatch(node) else repr(node)


def cleaned(told: _T) -> _T:
    """The same with every text in it printable."""
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
