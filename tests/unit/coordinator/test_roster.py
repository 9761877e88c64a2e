"""A member's stages, and what makes windows wait for it (protocol I, V)."""

from pathlib import Path
from typing import Any

import pytest
from coordinator_run import A
from plain_runs import plain_hello, plain_progress
from stories import Scripted, StoryText, all_stories, check_story

from farloop.coordinator.decide.roster import Member


def training(round_index: int = 3) -> Member:
    member = Member(name=A, incarnation=1)
    member.connect(1, plain_hello(round=round_index), 5.0)
    return member


@pytest.mark.parametrize("change", [{"gone_at": 1.0}, {"absent": True}, {"start_round": None}])
def test_what_must_not_be_is_noticed(change: dict[str, Any]) -> None:
    """A connected node on its way out; one that trains without a first round."""
    odd = training()
    for name, value in change.items():
        setattr(odd, name, value)
    with pytest.raises(AssertionError):
        odd.check()


class Reporting(Scripted):
    """A node that reports at 2 s that it has done 3 inner steps and stood still for 7 s: `reports 2.0 3 7.0`."""

    def __init__(self, *, batch: int = 1000) -> None:
        self.node, self.batch = training(), batch

    def reports(self, at: float, steps: int, blocked_s: float = 0.0) -> None:
        told = plain_progress(inner_steps=steps, tokens=self.batch * steps, blocked_s=blocked_s)
        self.node.report(told, at)

    def speed(self) -> str:
        return f"{self.node.steps_per_s:g} steps a second"

    def progress(self) -> str:
        return f"at {self.node.progress_at:g} s"


@pytest.mark.parametrize("batch", [1000, 4000])
@all_stories(__file__, "speeds")
def test_stories(path: Path, story: StoryText, rewrite: bool, batch: int) -> None:
    """A: H of a node is ⌊H · speed ÷ best speed⌋ steps: of steps, whatever the batch."""
    check_story(path, story, Reporting(batch=batch).told, rewrite=rewrite)
