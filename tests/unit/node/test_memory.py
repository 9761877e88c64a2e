"""Covers `node/state_dir.py` (protocol Q, S)."""

import json
from pathlib import Path

import pytest

from farloop.node.errors import StateUnusable
from farloop.node.state_dir import NodeState


def test_every_start_has_a_higher_incarnation_and_knows_the_highest_epoch(tmp_path: Path) -> None:
    """Q, S."""
    first = NodeState.claim(tmp_path / "new" / "node-a")
    assert (first.incarnation, first.epoch) == (1, 0)
    first.see_epoch(4)
    first.see_epoch(3)
    second = NodeState.claim(tmp_path / "new" / "node-a")
    assert (second.incarnation, second.epoch) == (2, 4)


def test_a_start_counts_even_if_nothing_more_happens(tmp_path: Path) -> None:
    """Q: it is durable before the first greeting."""
    NodeState.claim(tmp_path)
    assert json.loads((tmp_path / "node.json").read_text()) == {"incarnation": 1, "epoch": 0}


def test_a_crash_while_saving_leaves_the_old_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = NodeState.claim(tmp_path)

    def crash(*_: object) -> None:
        raise OSError("power cut")

    monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(StateUnusable, match="power cut"):
        memory.see_epoch(9)
    monkeypatch.undo()
    assert NodeState.claim(tmp_path).epoch == 0


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"incarnation": "x", "epoch": 0}', "\0\xff", '{"incarnation": 1}']
)
def test_a_state_that_cannot_be_read_is_one_line_with_its_file_and_the_mend(tmp_path: Path, content: str) -> None:
    (tmp_path / "node.json").write_text(content)
    with pytest.raises(StateUnusable) as caught:
        NodeState.claim(tmp_path)
    assert str(tmp_path / "node.json") in str(caught.value) and "choose another state_dir" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateUnusable, match="choose another state_dir"):
        NodeState.claim(tmp_path / "file" / "state")
