"""Layout files."""

import json
from pathlib import Path
from typing import Any

import pytest
from pipeline_layouts import layout_of

from farloop.node.pipeline.events import LayoutError
from farloop.node.pipeline.layout import layout_json, read_layout

LAYOUT = layout_of(["ab", "cd"], ["ac", "bd"])
ADDRESSES = {name: f"tcp://10.0.0.{number}:7800" for number, name in enumerate("abcd")}


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "layout.json").write_text(layout_json(LAYOUT, ADDRESSES))
    assert read_layout(tmp_path / "layout.json") == (LAYOUT, ADDRESSES)


def test_what_else_a_plan_says_is_passed_over(tmp_path: Path) -> None:
    """As `farloop plan --json` writes it."""
    plain = json.loads(layout_json(LAYOUT, ADDRESSES)) | {"makespan_s": 1.5, "mode": "pipelines"}
    del plain["epoch"]
    plain["stages"] = [{"stage": number, **stage} for number, stage in enumerate(plain["stages"])]
    plain["paths"] = [{"source": path["nodes"][0], "step_s": 1.0, **path} for path in plain["paths"]]
    (tmp_path / "plan.json").write_text(json.dumps(plain))
    assert read_layout(tmp_path / "plan.json") == (LAYOUT, ADDRESSES)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"stages": []}, "there is no stage"),
        ({"stages": 3}, "stages:"),
        ({"paths": [{"nodes": ["a", "x"]}]}, "visits stage 2 on x, which does not hold it"),
        ({"paths": [{"nodes": ["c"]}]}, "begins at stage 1"),
        ({"addresses": {"a": "tcp://h:1"}}, "addresses has none of b"),
        ({"addresses": ADDRESSES | {"b": "10.0.0.1"}}, "addresses of b"),
        ({"stages": [{"layers": [0, 2], "nodes": ["a"]}, {"layers": [3, 4], "nodes": ["c"]}]}, "begins at 3"),
    ],
)
def test_a_layout_that_cannot_be_is_told_of_in_one_line(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / "layout.json"
    path.write_text(json.dumps(json.loads(layout_json(LAYOUT, ADDRESSES)) | change))
    with pytest.raises(LayoutError, match=said) as told:
        read_layout(path)
    assert str(path) in str(told.value) and "\n" not in str(told.value)


def test_a_file_that_is_none_is_told_of_too(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="cannot read the layout"):
        read_layout(tmp_path / "none.json")
    (tmp_path / "layout.json").write_text("{")
    with pytest.raises(LayoutError, match="is not JSON"):
        read_layout(tmp_path / "layout.json")
