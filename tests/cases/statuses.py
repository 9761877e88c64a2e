"""What a coordinator tells of ordinary and of troubled runs, for whatever shows it."""

import math
from typing import Any, cast

from farloop.coordinator.observe.event_log import Totals
from farloop.monitoring.status import (
    EvaluationStatus,
    EventStatus,
    LinkStatus,
    MachineStatus,
    NicStatus,
    NodeStatus,
    Status,
    TotalsStatus,
    WindowStatus,
)

HOSTILE = "<img src=x onerror=alert(1)>\x1b[2J\u202e\"'&"
"""A name that would be a picture, a script, an order to a terminal, and turned round."""


def node(name: str, **changes: Any) -> NodeStatus:
    known: dict[str, Any] = {
        "name": name, "state": "training", "connected": True, "incarnation": 1, "device": "8 × H100", "position": 612.0,
        "round": 20, "inner_steps": 612, "tokens": 40_107_000, "loss": 2.513, "tokens_per_s": 38_400.0,
        "compute_share": 0.974, "blocked_s": 1.0, "lost_steps": 0, "bytes_up": 4_100_000_000,
        "bytes_down": 4_000_000_000, "bytes_state": 3_250_000_000, "detail": "", "reason": "", "last_heard_s": 0.2,
        "skipped_turns": 0, "skipped_steps": 0, "digests": [], "quarantine": "", "loss_is": "",
        "bytes_by_kind": {"delta": 2_600_000_000, "update": 2_240_000_000, "snapshot": 3_240_000_000,
                          "probe": 10_000_000, "control": 10_000_000},
    }  # fmt: skip
    return cast(NodeStatus, known | changes)


def window(fragment: int, expected: list[str], arrived: list[str], **changes: Any) -> WindowStatus:
    known: dict[str, Any] = {
        "fragment": fragment, "window": 21, "round": 20, "state": "open", "expected": expected, "arrived": arrived,
        "merged": expected,
    }  # fmt: skip
    return cast(WindowStatus, known | changes)


def score(index: int, loss: float | None = None) -> EvaluationStatus:
    """The losses of a run that learns: 5.545 at its start, 2.2 after 20 rounds."""
    learned = 1.9 + 3.645 * math.exp(-index / 7) + 0.04 * math.sin(2.3 * index)
    return {"loss": learned if loss is None else loss, "position": 30.0 * index, "outer_steps": index}


def happening(age_s: float, kind: str, node: str, code: str, sentence: str, **changes: Any) -> EventStatus:
    known: dict[str, Any] = {
        "age_s": age_s, "kind": kind, "node": node, "code": code, "sentence": sentence, "detail": "", "count": 1
    }  # fmt: skip
    return cast(EventStatus, known | changes)


def status(**changes: Any) -> Status:
    """A run of four clusters, of which one has a thin link and one has just gone."""
    run = changes.pop("run", {})
    here = ["oslo", "paris", "quito"]
    known: dict[str, Any] = {
        "run": {
            "name": "fjord-1b", "fingerprint": "5ab0c7e1d29f4463", "method": "streaming", "codec_up": "q4",
            "codec_down": "q4", "steps": 2000, "h": 30, "tau": 5, "mix": 0.5, "fragments": 4,
            "parameters": 1_240_000_000, "state": "training", "epoch": 2, "nodes": 4, "started_s": 3912.0,
            "uptime_s": 3960.0, "revision": 0, "changed": [], "farloop": "0.2.0", **run,
        },
        "position": 612.0, "round": 20, "versions": [21, 20, 20, 20], "digests": ["0" * 16] * 4, "outer_steps": 21,
        "commits": 81,
        "nodes": [
            node("oslo"),
            node("paris", loss=2.498, tokens_per_s=36_900.0, compute_share=0.968),
            node("quito", state="waiting", detail="fragment 2, window 21", loss=2.527, compute_share=0.71,
                 tokens_per_s=12_100.0, bytes_up=3_900_000_000, device="4 × A100", position=598.0, inner_steps=598),
            node("tokyo", state="away", connected=False, reason="no message arrived within the liveness timeout",
                 loss=2.61, position=570.0, inner_steps=570, last_heard_s=133.0, incarnation=3),
        ],
        "windows": [
            window(0, here, ["oslo"]),
            window(1, here, ["oslo", "paris", "quito"], state="closing"),
            window(2, here, ["oslo", "paris"]),
            window(3, here, []),
        ],
        "evaluations": [score(index) for index in range(21)],
        "alarms": [],
        "recent": [
            happening(1510.0, "refused", "attic", "wrong_run",
                      "the node was set up for another run (fingerprints differ)", count=12),
            happening(640.0, "delta", "quito", "late", "the window had closed before the delta arrived",
                      detail="fragment 3, base 17"),
            happening(132.0, "session", "tokyo", "silent", "no message arrived within the liveness timeout"),
            happening(124.0, "dropped", "tokyo", "silent", "no message arrived within the liveness timeout",
                      detail="fragment 0, window 20", count=3),
        ],
        "samples": {"granted": 20_480, "trained": 19_900, "returned": 120, "uncertain": 40},
    }  # fmt: skip
    told = known | changes
    return cast(Status, {"totals": totals_of(told["nodes"], told["run"]["parameters"])} | told)


def totals_of(nodes: list[NodeStatus], parameters: int) -> TotalsStatus:
    """Of nodes that started once."""
    totals = Totals(parameters)
    for one in nodes:
        totals.update(one["name"], one)
    return totals.status({one["name"]: one["part"]["parameters"] for one in nodes if "part" in one})


def waiting() -> Status:
    """Nothing has begun: one of four nodes is there."""
    only = node("oslo", state="ready", position=0.0, round=0, inner_steps=0, tokens=0, loss=None, tokens_per_s=0.0,
                compute_share=0.0, bytes_up=1200, bytes_down=900, bytes_state=0)  # fmt: skip
    return status(
        run={"state": "waiting", "started_s": 0.0, "uptime_s": 41.0, "epoch": 1}, nodes=[only], evaluations=[],
        windows=[window(fragment, [], []) for fragment in range(4)], recent=[], position=0.0, round=0, outer_steps=0,
        commits=0, versions=[0] * 4,
    )  # fmt: skip


def held() -> Status:
    """The disk takes nothing more."""
    why = (
        "storage: the run is held: a record must wait: 4.1 kB do not fit on /srv/farloop, which has 0 B left; make "
        "free space on its file system, and it goes on by itself"
    )
    return status(run={"state": "held"}, alarms=[why])


def holding() -> Status:
    """The state folder looks like an old copy."""
    why = (
        "history: the run is held: node oslo has met epoch 5, this state has 2; start the coordinator on the newest "
        "state folder, with --adopt-from-nodes to go on from what nodes hold, or with --rewind to go on from this one"
    )
    return status(run={"state": "holding"}, nodes=[], alarms=[why])


def adopting() -> Status:
    """It is to go on from what nodes hold."""
    why = "adoption: the run is held until it goes on from what the nodes hold; it waits for node oslo"
    return {**holding(), "alarms": [why]}


def finished() -> Status:
    """It came to its end, and its nodes have left."""
    left = [
        node(name, state="finished", connected=False, reason="the run is finished", position=2000.0, inner_steps=2000)
        for name in ("oslo", "paris")
    ]
    return status(
        run={"state": "finished", "started_s": 12_790.0}, nodes=left, position=2000.0, round=66, outer_steps=67,
        windows=[window(fragment, [], [], state="final") for fragment in range(4)], recent=[],
    )  # fmt: skip


def hostile() -> Status:
    """A node that names itself, its device and its work so that a page or a terminal would do something."""
    evil = node(HOSTILE, device=HOSTILE, detail=HOSTILE, quarantine=HOSTILE)
    return status(
        run={"name": HOSTILE},
        nodes=[evil, node("oslo", state=HOSTILE, reason=HOSTILE)],
        windows=[window(0, [HOSTILE, "oslo"], [HOSTILE])],
        alarms=[HOSTILE],
        recent=[happening(1.0, HOSTILE, HOSTILE, HOSTILE, HOSTILE, detail=HOSTILE)],
    )


def diverged() -> Status:
    """The loss is no number any more, at a node and of the model."""
    scores = [*(score(index) for index in range(5)), {**score(5), "loss": None}]
    return status(nodes=[node("oslo", loss=None, loss_is="nan"), node("paris")], evaluations=scores)


ALL = (status, waiting, held, holding, finished, hostile, diverged)


# --- machines and links

NIC: NicStatus = {
    "name": "mlx5_0:1", "kind": "roce-v2", "netdev": "eth2", "bytes_per_s": 12.5e9, "flow_bytes_per_s": 12.5e9,
    "active": True, "usable": True, "why": "", "members": [], "addresses": [], "fabric": "", "provenance": "sysfs",
    "kind_from": "sysfs", "others": [],
}  # fmt: skip
MACHINE: MachineStatus = {
    "name": "oslo", "site": "north", "site_from": "operator", "address": "", "reachable": None, "connected": True,
    "nics": [NIC, {**NIC, "name": "eth9", "active": False}], "devices": 8, "memory_bytes": 640_000_000_000, "cpus": 96,
    "memlock_bytes": None, "nofile": 65536, "congestion": "bbr", "seconds_per_step": 0.4312, "labels": [],
    "unread": [], "farloop": "0.2.0", "clock_off_s": -0.02, "disk_free_bytes": 900_000_000_000, "disk_used_bytes": 0,
}  # fmt: skip
LINK: LinkStatus = {
    "from": "oslo", "to": "coordinator", "rtt_s": 0.0613, "rtt_median_s": 0.07, "bytes_per_s": 5e6,
    "provenance": "probe", "measured_by": "probe", "age_s": 75.0, "why": "", "retransmit_ratio": 0.0012,
    "congestion": "bbr", "suspect": False,
}  # fmt: skip
