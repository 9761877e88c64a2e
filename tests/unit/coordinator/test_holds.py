"""Every kind of hold names its ways out, and each of them works, also in a run of one node.

The kinds, by their alarms: `history` and `adoption` (an old copy of the state), `participation` and `floor` are
here; the ways out of `stage` and `storage` are in `test_stages.py` and `test_storage_queue.py`, and what adoption takes
from nodes in `test_adoption.py`.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from coordinator_run import A, Run
from stories import StoryText, all_stories, check_story

from farloop.algo.spec import RunSpec
from farloop.coordinator.change_terms import Requests
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.adoption import AdoptionSettings
from farloop.coordinator.decide.closing import ROUNDS
from farloop.coordinator.errors import NotNow
from farloop.wire import messages as msg


def release(run: Run, **request: Any) -> Any:
    """`farloop run release`."""
    return asyncio.run(Requests(run.machine, run.ledger, run.handle, Path()).release(request))


@all_stories(__file__, "holds")
def test_stories(spec: RunSpec, path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, Run(spec, **story.settings).told, rewrite=rewrite)


def test_what_holds_a_run_names_all_ways_out(spec: RunSpec) -> None:
    """A run of one node, whose every delta is refused, as with an `outer_lr` with which the sum overflows; a
    coordinator that has started again, whose only node knows a later start; too few nodes for a window."""
    run = Run(spec, "a", at_once=True, steps=1000)
    run.play(f"{3 * ROUNDS} rounds of no")
    told = run.alarms["participation"]
    assert told.startswith(
        f"1 of 1 live nodes were merged in none of the last {ROUNDS} rounds (a); nothing is committed"
    )
    ways = ("farloop run set", "start these nodes again or stop them", "farloop run release")
    assert all(way in told for way in ways) and run.machine.guard.holds
    with pytest.raises(
        ValueError, match=r"of a was merged in the last 3 rounds\. Without --node: farloop run release$"
    ):
        release(run, nodes=["a"])
    assert release(run) == {"held": "nothing of a was merged in the last 3 rounds", "still": None}
    run = Run(spec, "a", at_once=True)
    run.play("restart as 2; a returns epoch_seen=900")
    told = run.alarms["history"]
    assert told == run.machine.holding and told.startswith("the run is held: node a has met epoch 900")
    assert all(way in told for way in ("put the newer one back", "--rewind", "farloop run release"))
    with pytest.raises(NotNow, match=r"^the run is held: node a has met epoch 900"):
        run.play("set outer_lr=0.5")
    still = release(run)["still"]
    assert still == run.alarms["history"] == run.machine.holding
    assert "another node, or one of these, started again with an empty state folder" in still and "--rewind" in still
    run = Run(spec, "ab", at_once=True, floor=2)
    run.play("a sends 1; b parts SILENT; 0s")
    told = "window 1 is held with 1 of the 2 contributions it needs, without b (silent); start a node that contributes"
    assert run.alarms["floor of fragment 1"] == f"{told}, or farloop run set floor=1"
    with pytest.raises(NotNow, match=rf"^there is nothing to release; {told[:40]}"):
        release(run)


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
    run.play("a sends 1 history=3")
    assert run.ledger.versions == [0, 1] and not run.alarms
