"""Nodes that hold some stages of the model: everything about a fragment is between those who hold it (protocol G).

Fragments 0 (slot 0) and 1 (slot 1) are of stage 0, fragment 2 (slot 1) is of stage 1; rounds of ten steps.
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from coordinator_run import Commands, Run, accepted, refused
from stories import StoryText, all_stories, check_story

from farloop.algo.spec import Fragment, Layout, NodeId, RunSpec, TensorSlot
from farloop.wire.reasons import Reason

A0, B0, A1, B1, C1, W = map(NodeId, ("a0", "b0", "a1", "b1", "c1", "w"))
PARTS = {A0: (0,), B0: (0,), A1: (1,), B1: (1,), C1: (1,), W: None}


class Staged(Run):
    """Nodes whose names say what they hold; every commit is durable at once."""

    def __init__(self, spec: RunSpec, nodes: Iterable[str], **changes: Any) -> None:
        fragments = tuple(
            Fragment(
                index=i, slot=slot, numel=256, tensors=(TensorSlot(name=f"t{i}", shape=(200,), offset=0),), stage=s
            )
            for i, (slot, s) in enumerate([(0, 0), (1, 0), (1, 1)])
        )
        layout = Layout(slots=2, fragments=fragments)
        identity = dataclasses.replace(spec.identity, layout=layout, anchor_digests=(100, 101, 102))
        spec = dataclasses.replace(spec, identity=identity)
        super().__init__(spec, nodes, at_once=True, **{"steps": 1000, "min_nodes": 2, **changes})

    def greet(self, node: NodeId, **changes: Any) -> Commands:
        return super().greet(node, **{"holds": PARTS[node], "anchors": (), **changes})


@all_stories(__file__, "stages")
def test_stories(spec: RunSpec, path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, Staged(spec, **story.settings).told, rewrite=rewrite)


@pytest.mark.parametrize(
    ("holds", "words"),
    [
        ((), "the node holds no stage of the model"),
        ((2,), "the node holds stage 2, and the run's model has stages 0 to 1"),
    ],
)
def test_a_part_that_the_model_does_not_have_is_refused(spec: RunSpec, holds: tuple[int, ...], words: str) -> None:
    said = refused(Staged(spec, ()).greet(A1, holds=holds))
    assert said.reason is Reason.WRONG_PART and not said.retriable and said.detail.startswith(words)


def test_a_start_of_a_node_holds_the_same_for_its_life(spec: RunSpec) -> None:
    run = Staged(spec, (A0, B0, A1, B1))
    assert "held stages 1, and now 0" in refused(run.greet(A1, holds=(0,), round=0)).detail
    accepted(run.greet(A1, holds=(0,), incarnation=2))
