"""The view model of a run."""

from collections.abc import Callable
from typing import Any

import pytest
import statuses
from hypothesis import given
from hypothesis import strategies as st

from farloop.config.logs import pairs_of
from farloop.monitoring.status import Status, WindowStatus
from farloop.monitoring.status_summary import cleaned, named, printable, reduction, sync_text, view_of
from farloop.monitoring.units import NOTHING


def test_a_run_is_summed_up_once_for_all_views() -> None:
    view = view_of(statuses.status())
    assert (view.name, view.state, view.tone, view.why, view.notes) == ("fjord-1b", "training", "good", "", ())
    assert view.facts == ("streaming", "q4 up, q4 down", "H 30")
    assert (view.position, view.steps, view.done, view.lasted) == (612.0, 2000, "30.6%", "1h 05m")
    assert (view.live, view.speed, view.tokens) == (3, "87.4 k", "160 M")
    assert view.training_loss == pytest.approx((2.513 + 2.498 + 2.527) / 3)
    assert (view.up, view.down, view.total, view.fewer) == ("16.2 GB", "16.0 GB", "32.2 GB", "737×")
    assert (view.outer_steps, view.commits, len(view.losses)) == ("21", "81 commits, round 20", 21)
    assert [window.note for window in view.windows] == [
        "waits for paris, quito", "closing", "waits for quito", "waits for oslo, paris, quito"
    ]  # fmt: skip
    assert [(event.node, event.code, event.times) for event in view.events[:2]] == [
        ("attic", "wrong_run", "×12"), ("quito", "late", "")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({}, ("training", "good", "97.4%", "good")),
        ({"state": "waiting", "compute_share": 0.7}, ("waiting", "wait", "70.0%", "wait")),
        ({"quarantine": "far off", "compute_share": 0.2}, ("training", "bad", "20.0%", "bad")),
        ({"connected": False, "compute_share": 0.0}, ("away", "bad", NOTHING, "")),
    ],
)
def test_a_node_has_a_state_and_colours(changes: dict[str, Any], shown: tuple[str, ...]) -> None:
    (node,) = view_of(statuses.status(nodes=[statuses.node("a", **changes)])).nodes
    assert (node.state, node.tone, node.compute, node.compute_tone) == shown


def test_versions_are_shown_where_one_differs() -> None:
    told: Any = statuses.status(run={"farloop": "0.2.0"})
    versions = {"a": "0.1.0", "b": "0.2.0", "c": "0.1.0", "d": "", "e": "0.1.0", "f": "0.1.0"}
    told["inventory"] = {
        "nodes": [{"name": name, "connected": name != "b", "farloop": v} for name, v in versions.items()]
    }
    told["standby"] = {"farloop": {"s": "0.3.0"}, "in_sync": ["s"]}
    line = "0.1.0 at a, c, e and 1 more; 0.3.0 at standby s; an unknown version at d"
    assert view_of(told).notes == (f"versions: the coordinator runs farloop 0.2.0; {line}",)
    assert "s stands by" in view_of(told).facts
    told["standby"]["farloop"]["s"] = "0.2.0"
    for machine in told["inventory"]["nodes"]:
        machine["connected"] = machine["farloop"] in ("0.2.0", "")
    told["inventory"]["nodes"][3]["farloop"] = "0.2.0"
    assert view_of(told).notes == ()
    del told["run"]["farloop"]  # the status of a coordinator that does not say
    told["inventory"]["nodes"][0] |= {"connected": True}
    assert view_of(told).notes == ()


def test_only_a_node_that_left_a_finished_run_has_finished() -> None:
    assert [node.state for node in view_of(statuses.finished()).nodes] == ["finished", "finished"]
    lost = statuses.node("lost", connected=False)
    assert view_of({**statuses.finished(), "nodes": [lost]}).nodes[0].state == "away"
    left = statuses.node("left", state="left", connected=False)
    assert view_of(statuses.status(nodes=[left])).nodes[0].state == "away"


def test_a_window_names_at_most_three_of_the_nodes_it_waits_for() -> None:
    names = ["a", "b", "c", "d", "e"]
    told = statuses.status(windows=[statuses.window(1, names, ["e"]), statuses.window(0, [], [])])
    assert [window.note for window in view_of(told).windows] == ["waits for a, b, c and 1 more"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (statuses.status, ""),
        (statuses.waiting, "begins when its nodes are connected: 1 of 4 so far"),
        (lambda: statuses.status(nodes=[], run={"state": "waiting"}), "0 of 4 so far; start one: farloop node"),
        (lambda: statuses.status(nodes=[], run={"state": "waiting", "stages": [1, 2]}), "stage 1 has 2 of 4 so far"),
        (lambda: statuses.status(nodes=[]), "no node is connected"),
        (statuses.held, "until the alarm is resolved"),
        (statuses.holding, "until you decide"),
        (statuses.adopting, "until the state of the nodes has arrived"),
        (statuses.finished, "model.safetensors in the coordinator's state folder"),
    ],
)
def test_a_run_that_does_not_progress_says_why(make: Callable[[], Status], words: str) -> None:
    told = view_of(make()).why
    assert words in told and bool(told) == bool(words)


def test_the_reduction_is_data_parallel_bytes_over_sent_bytes() -> None:
    nodes = [statuses.node(name, inner_steps=600, lost_steps=8, bytes_up=41, bytes_down=40) for name in "ab"]
    assert reduction(statuses.status(nodes=nodes)) == pytest.approx(8 * 1_240_000_000 * 2 * 598 / 162)
    nodes[0]["part"] = {"stages": [0], "fragments": [0], "parameters": 240_000_000}
    assert reduction(statuses.status(nodes=nodes)) == pytest.approx(8 * (1_240_000_000 + 240_000_000) * 598 / 162)
    assert view_of(statuses.status(nodes=[])).fewer == "", "nothing is claimed before bytes were sent"
    assert view_of(statuses.status(nodes=nodes, commits=0)).fewer == "", "nor before the first outer step"


@pytest.mark.parametrize(
    ("changes", "windows", "words"),
    [
        ({"detail": "waits for window 4 of fragment 2"}, [], "waits for window 4 of fragment 2"),
        ({"state": "joining", "detail": "the first snapshot"}, [], "waits for the first snapshot"),
        ({"quarantine": "far off"}, [], "in quarantine: far off"),
        ({}, [(0, "ab", "a", "open"), (1, "ab", "ab", "final")], "f0 sent, 1 to come"),
        ({}, [(0, "ab", "ba", "closing")], "f0 closing"),
        ({}, [(0, "ab", "b", "open")], ""),
        ({"connected": False, "last_heard_s": 42.0}, [], "not heard for 42s"),
    ],
)
def test_a_node_says_what_it_exchanges_now(changes: dict[str, Any], windows: list[Any], words: str) -> None:
    told: list[WindowStatus] = [statuses.window(f, list(e), list(a), state=state) for f, e, a, state in windows]
    assert sync_text(statuses.node("a", **changes), told) == words


@given(st.text())
def test_texts_for_a_terminal_have_no_control_characters(told: str) -> None:
    shown = printable(told)
    assert shown.isprintable() and len(shown) == len(told)


@given(st.text(max_size=40))
def test_a_name_in_a_log_line_is_one_field(name: str) -> None:
    assert pairs_of(f"node name={named(name)} state=ready") == {"event": "node", "name": name, "state": "ready"}
    assert named("oslo-2.site_a") == "oslo-2.site_a"


def test_every_text_of_a_status_is_cleaned_and_nothing_else_changed() -> None:
    told = cleaned(statuses.hostile())
    assert "\x1b" not in str(told) and told["nodes"][0]["name"].startswith("<img")
    assert cleaned(statuses.status()) == statuses.status()
