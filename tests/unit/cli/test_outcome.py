"""The summary of a run, from its final status and its metrics."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
from plain_runs import plain_terms

from farloop.algo.spec import Identity, Layout, RunSpec
from farloop.cli.run_results import Summary, summarise
from farloop.monitoring.status import Status
from farloop.quant.blob import blob_bytes
from farloop.quant.codec import flat
from farloop.quant.registry import codec_named

PARAMETERS = 1 << 20
DIGESTS = ["00000000000000aa"]
IDENTITY = Identity(
    name="small", model="own", layout=Layout(slots=1, fragments=()), anchor_digests=(), data="own", num_samples=0,
    evaluation_set="none", seed=7,
)  # fmt: skip


def spec(h: int) -> RunSpec:
    terms = plain_terms(method="diloco", steps=100, h=h, weight_decay=0.1, batch_sequences=4, sequence_tokens=128)
    return RunSpec(identity=IDENTITY, terms=terms)


def report(node: str, **counters: int) -> dict[str, Any]:
    zeros = {"inner_steps": 0, "tokens": 0, "bytes_up": 0, "bytes_down": 0, "bytes_state": 0}
    return {"event": "progress", "t": 1.0, "node": node, "position": 0.0, "loss": None} | zeros | counters


def summary_of(
    folder: Path, events: list[dict[str, Any]], *, h: int = 10, digests: tuple[list[str], ...] = (DIGESTS, DIGESTS)
) -> Summary:
    metrics = folder / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(event) + "\n" for event in events))
    known = {
        "device": "cpu", "state": "finished", "reason": "", "inner_steps": 0, "tokens": 0, "loss": None,
        "tokens_per_s": 0.0, "blocked_s": 0.0, "lost_steps": 0, "bytes_up": 0, "bytes_down": 0, "bytes_state": 0,
    }  # fmt: skip
    nodes = [
        {**known, "name": name, "compute_share": share, "digests": held}
        for name, share, held in zip("ab", (0.9, 0.7), digests, strict=True)
    ]
    run: dict[str, Any] = {
        "fragments": 3,
        "method": "diloco",
        "codec_up": "q4",
        "codec_down": "q4",
        "parameters": PARAMETERS,
        "started_s": 60.0,
    }
    status = {"run": {**run, "h": h, "steps": 1000}, "nodes": nodes, "outer_steps": 3, "digests": DIGESTS}
    return summarise(cast(Status, status), metrics, spec(h), loss_start=5.0, loss_end=2.0)


def test_bytes_and_steps_are_sums_over_nodes_and_over_their_starts(tmp_path: Path) -> None:
    came = summary_of(
        tmp_path,
        [
            report("a", inner_steps=10, bytes_up=100, bytes_down=200, bytes_state=5),
            report("b", inner_steps=20, bytes_up=300, bytes_down=400, bytes_state=6),
            report("a", inner_steps=4, bytes_up=10, bytes_down=20, bytes_state=7),
        ],
    )
    assert (came["bytes_up"], came["bytes_down"], came["bytes_state"]) == (410, 638, 18)
    assert came["bytes_by_kind"] == {"delta": 410, "update": 620, "snapshot": 18, "probe": 0, "control": 0}
    assert came["bytes_total"] == 410 + 638
    assert (came["inner_steps"], came["tokens"]) == (34, 34 * 4 * 128)


def test_the_reduction_is_fp32_data_parallel_over_all_bytes(tmp_path: Path) -> None:
    """Both ways through the star: 8 bytes a parameter for every inner step of every node."""
    kinds = {"delta": 900, "update": 2800, "snapshot": 100_000, "probe": 20_000, "control": 300}
    moved = {"bytes_up": 20_900, "bytes_down": 103_100, "bytes_state": 120_000, "bytes_by_kind": kinds}
    events = [report(node, inner_steps=30) | moved for node in "ab"]
    came = summary_of(tmp_path, events)
    assert came["bytes_by_kind"] == {kind: 2 * count for kind, count in kinds.items()}
    assert came["bytes_total"] == sum(came["bytes_by_kind"].values()) == came["bytes_up"] + came["bytes_down"]
    assert came["bytes_data_parallel_fp32"] == 8 * PARAMETERS * 60
    assert came["reduction"] == 8 * PARAMETERS * 60 / came["bytes_total"]


def test_steps_that_were_lost_or_done_twice_do_not_count_for_the_reduction(tmp_path: Path) -> None:
    """A step that three fragments lost, and those that a node did after the run was wound back."""
    events = [
        report("a", inner_steps=90, lost_steps=30, bytes_up=1),
        report("b", inner_steps=950, bytes_up=1),
        report("b", inner_steps=400, lost_steps=4, bytes_up=1),
    ]
    came = summary_of(tmp_path, events)
    assert came["inner_steps"] == 1440
    assert came["merged_steps"] == (90 - 10) + 1000
    assert came["bytes_data_parallel_fp32"] == 8 * PARAMETERS * came["merged_steps"]


@pytest.mark.parametrize(("h", "least", "most"), [(30, 225.0, 226.0), (54, 400.0, 407.0), (107, 800.0, 806.0)])
def test_q4_both_ways_divides_the_bytes_by_64_h_over_8_and_a_half(
    h: int, least: float, most: float, tmp_path: Path
) -> None:
    """The arithmetic behind the promise: one blob each way a round, headers included."""
    size = blob_bytes(codec_named("q4"), flat(PARAMETERS))
    came = summary_of(tmp_path, [report("a", inner_steps=5 * h, bytes_up=5 * size, bytes_down=5 * size)], h=h)
    assert least < came["reduction"] < most


def test_digests_are_equal_if_every_node_left_with_the_coordinators(tmp_path: Path) -> None:
    same, other = (summary_of(tmp_path, [report("a", bytes_up=1)], digests=(DIGESTS, d)) for d in (DIGESTS, ["ab"]))
    assert (same["digests_equal"], other["digests_equal"]) == (True, False)
    assert same["compute_share"] == pytest.approx(0.8), "the mean of the nodes"
