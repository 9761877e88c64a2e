"""Every kind of hold names its ways out, and each of them works, also in a run of one node.

The kinds, by their alarms: `history` and `adoption` (an old copy of the state), `participation`, `floor` and `storage`
are here; the way out of `stage` is in `test_stages.py`, and what adoption takes from nodes in `test_adoption.py`.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from coordinator_run import A, B, Run

from farloop.algo.spec import NodeId, RunSpec
from farloop.coordinator.change_terms import Requests
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.adoption import AdoptionSettings
from farloop.coordinator.decide.closing import ROUNDS
from farloop.coordinator.decide.run_state import StorageHold
from farloop.coordinator.errors import DiskFull, NotNow
from farloop.wire import messages as msg


def release(run: Run, **request: Any) -> Any:
    """`farloop run release`."""
    return asyncio.run(Requests(run.machine, run.ledger, run.handle, Path()).release(request))


def change(run: Run, **given: str) -> None:
    """`farloop run set`."""
    run.handle(ev.TermsGiven(revision=run.machine.revision_for(given)))


def goes_on(run: Run, *nodes: NodeId) -> bool:
    """Whether nothing holds the run, and these nodes' deltas are merged."""
    for node in nodes:
        for fragment in run.machine.windows:
            while node in run.missing(fragment):
                before = run.ledger.versions[fragment]
                run.store(node, fragment, history=run.ledger.history)
                if run.ledger.versions[fragment] > before:
                    return not run.alarms and not run.machine.guard.holds and run.machine.holding is None
    return False


# --- participation: of one node, whose every delta is refused, as with an `outer_lr` with which the sum overflows


@pytest.fixture
def unmerged(spec: RunSpec) -> Run:
    run = Run(spec, "a", at_once=True, steps=1000)
    refuse_all(run)
    assert not run.missing(0) and not run.missing(1), "it has had its turn: it sends nothing more"
    told = run.alarms["participation"]
    assert told.startswith(
        f"1 of 1 live nodes were merged in none of the last {ROUNDS} rounds (a); nothing is committed"
    )
    assert all(
        way in told for way in ("farloop run set", "start these nodes again or stop them", "farloop run release")
    )
    return run


def refuse_all(run: Run) -> None:
    for _ in range(3 * ROUNDS):
        for fragment in (1, 0):
            if A in run.missing(fragment):
                run.spoil(A, fragment)
    assert run.machine.guard.holds


def test_a_setting_that_is_set_right_ends_the_hold_without_a_node_s_restart(unmerged: Run) -> None:
    change(unmerged, outer_lr="0.5")
    assert goes_on(unmerged, A)


def test_a_released_run_goes_on_as_it_is_and_is_held_again_some_rounds_later(unmerged: Run) -> None:
    with pytest.raises(
        ValueError, match=r"of a was merged in the last 3 rounds\. Without --node: farloop run release$"
    ):
        release(unmerged, nodes=["a"])
    before = unmerged.ledger.current_round
    assert release(unmerged) == {"held": "nothing of a was merged in the last 3 rounds", "still": None}
    assert not unmerged.alarms and unmerged.missing(1) == {A}
    refuse_all(unmerged)
    assert unmerged.ledger.current_round - before >= ROUNDS
    release(unmerged)
    assert goes_on(unmerged, A)


def test_a_node_that_is_started_again_or_stopped_ends_the_hold(unmerged: Run) -> None:
    unmerged.leave(A)
    assert not unmerged.alarms and not unmerged.machine.guard.holds
    unmerged.join(A, incarnation=2)
    assert goes_on(unmerged, A)


# --- history: the state looks like an old copy


@pytest.fixture
def claimed(spec: RunSpec) -> Run:
    """The coordinator has started again, and its only node knows a later start."""
    run = Run(spec, "a", at_once=True)
    run.restart(rec.EpochClaimed(epoch=2))
    run.greet(A, round=0, epoch_seen=900)
    told = run.alarms["history"]
    assert told == run.machine.holding and told.startswith("the run is held: node a has met epoch 900")
    assert all(way in told for way in ("put the newer one back", "--rewind", "farloop run release"))
    with pytest.raises(NotNow, match=r"^the run is held: node a has met epoch 900"):
        change(run, outer_lr="0.5")
    return run


def test_a_run_of_one_node_that_was_released_says_what_it_waits_for_and_goes_on_with_it(claimed: Run) -> None:
    still = release(claimed)["still"]
    assert still == claimed.alarms["history"] == claimed.machine.holding
    assert "another node, or one of these, started again with an empty state folder" in still and "--rewind" in still
    claimed.greet(A, round=0, epoch_seen=900)
    assert claimed.machine.holding is not None, "as long as it says the same"
    claimed.greet(A, incarnation=2, epoch_seen=0, anchors=())
    claimed.say(A, msg.Ready())
    assert goes_on(claimed, A)


def test_a_released_run_goes_on_with_another_node(claimed: Run) -> None:
    release(claimed)
    claimed.join(B)
    assert claimed.machine.holding is None and "history" not in claimed.alarms
    assert "it is kept out: it has met epoch 900" in claimed.alarms["history of a"]


@pytest.mark.parametrize("released", [False, True])
def test_a_rewind_ends_the_hold(claimed: Run, released: bool) -> None:
    if released:
        release(claimed)
    claimed.restart(rec.Rewound(epoch=901))
    claimed.greet(A, incarnation=2, epoch_seen=900, anchors=())
    claimed.say(A, msg.Ready(history=901))
    assert goes_on(claimed, A)


def test_the_newer_state_ends_the_hold(claimed: Run) -> None:
    claimed.restart(rec.EpochClaimed(epoch=901))
    claimed.join(A, incarnation=2, epoch_seen=900)
    assert goes_on(claimed, A)


# --- adoption


def test_an_adoption_that_a_person_must_decide_names_the_rewind_and_nothing_else_is_released(spec: RunSpec) -> None:
    run = Run(spec, "a", at_once=True)
    run.settings["adopt"] = AdoptionSettings(untrue=lambda held, ledger: None)
    run.restart(rec.EpochClaimed(epoch=2))
    other = (msg.AnchorRef(fragment=0, version=0, digest=7),)
    run.greet(A, round=0, anchors=other)
    run.say(A, msg.Held(anchors=other, windows=(), final=(), rounds=(), revisions=()))
    told = run.machine.holding or ""
    assert (
        "it waits for you to decide: version 0 of fragment 0 has digest" in told and "start once with --rewind" in told
    )
    with pytest.raises(NotNow, match=r"^there is nothing to release; the run is held until it goes on from what"):
        release(run)
    del run.settings["adopt"]
    run.restart(rec.Rewound(epoch=3))
    run.greet(A, incarnation=2, anchors=())
    run.say(A, msg.Ready(history=3))
    assert goes_on(run, A)


# --- floor: too few nodes are left for a window


@pytest.fixture
def short(spec: RunSpec) -> Run:
    run = Run(spec, "ab", at_once=True, floor=2)
    run.play("a sends 1; b parts SILENT; 0s")
    told = "window 1 is held with 1 of the 2 contributions it needs, without b (silent); start a node that contributes"
    assert run.alarms["floor of fragment 1"] == f"{told}, or farloop run set floor=1"
    with pytest.raises(NotNow, match=rf"^there is nothing to release; {told[:40]}"):
        release(run)
    return run


@pytest.mark.parametrize("way", ["b returns; b sends 1", "c joins; c sends 1"])
def test_a_node_that_contributes_ends_the_wait(short: Run, way: str) -> None:
    short.play(way)
    assert short.ledger.versions[1] == 1 and not short.alarms


def test_a_lower_floor_holds_at_once(short: Run) -> None:
    change(short, floor="1")
    assert short.ledger.versions[1] == 1 and not short.alarms and goes_on(short, A)


# --- storage


def test_a_storage_hold_names_its_fix_and_ends_by_itself() -> None:
    alarms = dict[str, str]()
    hold = StorageHold(alarms)
    hold.begin("journal", DiskFull(Path("/state"), 10, 5))
    assert alarms["storage"].startswith("the run is held: journal must wait")
    assert alarms["storage"].endswith(f"{DiskFull.fix}, and it goes on by itself")
    hold.end("journal")
    assert not alarms and not hold
