"""A node's way through a run, in its log."""

import logging
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest

from farloop.node.machine import NodeMachine, Stage
from farloop.node.reports import StageLog


def machine(**state: Any) -> NodeMachine:
    known = {"stage": "joining", "connected": False, "epoch": 2, "schedule": SimpleNamespace(round=4, step=7)}
    return cast(NodeMachine, SimpleNamespace(**(known | state)))


def test_every_stage_is_told_once_with_where_it_came_from_and_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    transitions = StageLog()
    stages = [stage for stage in get_args(Stage) if stage != "joining"]
    for stage in stages:
        for _ in range(3):
            transitions.saw(machine(stage=stage))
    assert len(caplog.messages) == len(stages)
    for line, stage, before in zip(caplog.messages, stages, ["joining", *stages], strict=False):
        assert line.startswith(f"stage is={stage} was={before} round=4 step=7 why='")
        assert not line.endswith("why=''")


def test_every_new_session_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    transitions = StageLog()
    for connected in (False, True, True, False, True):
        transitions.saw(machine(connected=connected))
    assert caplog.messages == ["session open epoch=2 stage=joining round=4"] * 2
