"""Windows whose terms are not the run's: who needs a codec, an overlap or a mix takes those of the window (protocol B).

Here every other window of a fragment is encoded and merged in another way, as after a change of terms, through crashes
and restarts, snapshots and late deltas.
"""

import dataclasses
from typing import Any

import pytest

from farloop.algo import schedule
from farloop.algo.spec import Layout, NodeId, RoundPlan, WindowTerms
from farloop.algo.terms import Terms
from farloop.node import events as node_ev
from farloop.sim.network import HOSTILE_LINK
from farloop.sim.problems import terms_of
from farloop.sim.scenario import CrashCoordinator, CrashNode, CutLink, NodeSetup, Scenario, SpoilAnchor
from farloop.sim.world import run

A, B, C, D = (NodeId(name) for name in "abcd")
NODES = (
    NodeSetup(name=A, seed=0),
    NodeSetup(name=B, seed=1, step_s=0.13),
    NodeSetup(name=C, seed=2, step_s=0.3),
    NodeSetup(name=D, seed=3, joins_at=2.0),
)
FAULTS = (
    CutLink(node=B, at=0.9, for_s=0.5, reset=True),
    CrashNode(node=C, at=1.8, down_s=3.0),
    CrashCoordinator(at=4.0, down_s=0.5),
    SpoilAnchor(node=A, at=5.0),
)
Q4 = {"codec_up": "q4", "codec_down": "q4"}
OTHER = {"codec_up": "q8", "codec_down": "bf16", "tau": 0}

RUNS: dict[str, dict[str, Any]] = {
    "waiting": {"method": "streaming", "mix": 0.5},
    "going on": {"method": "decoupled", "mix": 0.5},
    "one by one": {"method": "async"},
    "a round late": {
        "method": "streaming",
        "codec_up": "q4",
        "codec_down": "q4",
        "mix": 0.0,
        "tau": 0,
        "lag": 1,
        "eager": True,
    },
    "compressed": {"method": "async", "codec_up": "q4r"},
    "with variates": {"method": "diloco", "control_variates": True},
}


@pytest.fixture
def alternating(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other window has terms of its own."""
    regular = schedule.window_after

    def window_after(
        terms: Terms, layout: Layout, current: WindowTerms, rounds: dict[int, RoundPlan], *, stay: bool = False
    ) -> WindowTerms | None:
        following = regular(terms, layout, current, rounds, stay=stay)
        if following is None:
            return None
        own = {name: terms.value(name) for name in ("codec_up", "codec_down", "tau", "mix")}
        changed = {**OTHER, "mix": terms.schedule.mix / 2} if following.window % 2 == 0 else own
        return dataclasses.replace(following, **changed)

    monkeypatch.setattr(schedule, "window_after", window_after)


@pytest.mark.parametrize("choices", RUNS.values(), ids=RUNS)
@pytest.mark.usefixtures("alternating")
def test_a_run_whose_windows_differ_ends_equal_everywhere_whatever_goes_wrong(choices: dict[str, Any]) -> None:
    """B, P: nobody needs a snapshot again but the one whose anchor was spoiled, and a restart repeats every commit."""
    terms = terms_of(**{"steps": 48, "min_nodes": 3, **Q4, **choices})
    outcome = run(Scenario(terms=terms, nodes=NODES, faults=FAULTS, weather=HOSTILE_LINK, seed=3, num_samples=1000))
    outcome.check()
    assert outcome.alarms == 0, "targets and optimizers came out of the restart as they were"
    assert {name for name, starts in outcome.nodes.items() for s in starts if s.diary.mismatches} <= {A}
    told = [what for _, _, what in outcome.tape]
    sent = {(what.window % 2, what.codec) for what in told if isinstance(what, node_ev.Encode)}
    assert sent == {(1, terms.codecs.up), (0, OTHER["codec_up"])}
    decoded = {(what.version % 2, what.codec) for what in told if isinstance(what, node_ev.Apply)}
    assert decoded == {(1, terms.codecs.down), (0, OTHER["codec_down"])}
    assert len({what.mix for what in told if isinstance(what, node_ev.Merge)} - {0.0}) == (
        2 if terms.schedule.mix else 0
    )


@pytest.mark.usefixtures("alternating")
def test_deltas_of_two_windows_and_codecs_are_merged_by_one() -> None:
    """The case above holds late deltas, too: else nothing was shown of them."""
    terms = terms_of("async", steps=48, min_nodes=3, **Q4)
    outcome = run(Scenario(terms=terms, nodes=NODES, seed=3, num_samples=1000))
    outcome.check()
    assert any(
        len({addend.blob.version % 2 for addend in record.blobs}) == 2
        for record in outcome.records
        if hasattr(record, "blobs")
    )
