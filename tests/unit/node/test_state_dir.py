"""Covers `node/state_dir.py`: what a start of a node leaves to the next."""

import json
from pathlib import Path

import pytest

from farloop.node.errors import StateUnusable
from farloop.node.state_dir import NodeState, reserve


def test_every_start_has_a_higher_incarnation_and_knows_the_highest_epoch_of_its_run(tmp_path: Path) -> None:
    """A start counts even if nothing more happens: it is durable before the first greeting."""
    folder = tmp_path / "new" / "node-a"
    first = NodeState.claim(folder)
    assert json.loads((folder / "node.json").read_text()) == {
        "incarnation": 1, "epoch": 0, "run": "", "finished": "",
    }  # fmt: skip
    for run, epoch in (("another", 9), ("this", 3), ("this", 4), ("this", 3)):
        first.see_epoch(run, epoch)
    second = NodeState.claim(folder)
    assert (first.incarnation, second.incarnation, second.epoch, second.run) == (1, 2, 4, "this")
    assert first.process != second.process != 0
    second.see_end("run")
    assert NodeState.read(folder).finished == "run"
    other_host = NodeState.claim(tmp_path / "other host", second)
    assert (other_host.incarnation, other_host.epoch, other_host.run) == (3, 4, "this")


def test_a_crash_while_saving_leaves_the_old_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = NodeState.claim(tmp_path)

    def crash(*_: object) -> None:
        raise OSError("power cut")

    monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(StateUnusable, match="power cut"):
        memory.see_epoch("this", 9)
    monkeypatch.undo()
    assert NodeState.claim(tmp_path).epoch == 0
    assert [path.name for path in tmp_path.iterdir()] == ["node.json"]


def test_a_folder_is_kept_from_nodes_of_other_names_as_long_as_its_own_runs(tmp_path: Path) -> None:
    first = reserve(tmp_path / "state", "a")
    assert first is not None and reserve(tmp_path / "state", "a") is None, "the next start takes over"
    with pytest.raises(StateUnusable, match="is the state folder of the node 'a', which is running"):
        reserve(tmp_path / "state", "b")
    first.close()
    renamed = reserve(tmp_path / "state", "b")
    assert renamed is not None
    with pytest.raises(StateUnusable, match="'b'"):
        reserve(tmp_path / "state", "a")
    renamed.close()


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"incarnation": "x", "epoch": 0}', "\0\xff", '{"incarnation": 1}', None]
)
def test_an_unusable_state_is_one_line_with_its_file_and_the_mend(tmp_path: Path, content: str | None) -> None:
    folder = tmp_path / "state"
    if content is None:  # a file stands where the folder should be
        folder.write_text("")
    else:
        folder.mkdir()
        (folder / "node.json").write_text(content)
    with pytest.raises(StateUnusable) as caught:
        NodeState.claim(folder)
    assert str(folder) in str(caught.value) and "choose another state_dir" in str(caught.value)
    assert "\n" not in str(caught.value)
