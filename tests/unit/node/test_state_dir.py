"""Covers `node/state_dir.py`: what a start of a node leaves to the next, and residuals (protocol E, Q, S)."""

import dataclasses
import json
import logging
from pathlib import Path

import pytest
import torch
from node_story import delta
from safetensors.torch import load_file, save_file

from farloop.node.errors import StateUnusable
from farloop.node.state_dir import NodeState, Residuals, reserve
from farloop.quant import registry, spelling
from farloop.quant.codec import Traits
from farloop.quant.formats.q4 import Q4, Q4Codec


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
def test_a_state_that_cannot_be_used_is_one_line_with_its_file_and_the_mend(
    tmp_path: Path, content: str | None
) -> None:
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


# --- residuals

CPU = torch.device("cpu")
FEEDBACK = "q4:beta=0.5"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sparse(Q4Codec):
    """`q4` that says it is sparse: a residual of it is kept on disk."""

    @property
    def traits(self) -> Traits:
        return dataclasses.replace(self.declared, sparse=True)


@pytest.fixture
def sparse(monkeypatch: pytest.MonkeyPatch) -> str:
    """The spelling of a codec whose residual is durable."""
    fields = {f.name: getattr(Q4, f.name) for f in dataclasses.fields(Q4) if f.init}
    codec = Sparse(**{**fields, "name": "sparse", "beta": 0.95})
    monkeypatch.setattr(registry, "CODECS", {**registry.CODECS, "sparse": codec})
    monkeypatch.setattr(spelling, "PARAMETERS", {**spelling.PARAMETERS, "sparse": spelling.PARAMETERS["q4"]})
    return "sparse"


class Kept:
    """The residuals of one start; every delta is for the window after version 3, 4, …"""

    def __init__(self, folder: Path | None = None, run: str = "run", codec: str = FEEDBACK) -> None:
        self.codec = codec
        self.own = Residuals(run, lambda _: torch.zeros(300), folder, lambda job: job())

    def send(self, seq: int, value: float, window: int = 4) -> "Kept":
        """An encoding that loses `value` everywhere."""
        buffer = self.own.for_delta(delta(window, seq), self.codec)
        assert buffer is not None
        buffer.fill_(value)
        self.own.encoded(delta(window, seq), self.codec, None)
        return self

    def settle(self, seq: int, merged_in: int | None = 4, window: int = 4) -> "Kept":
        self.own.on_outcome(delta(window, seq), merged_in)
        return self

    def install(self, version: int) -> "Kept":
        self.own.installed(0, version, self.codec)
        return self

    def next(self, version: int = 4, codec: str = "") -> float:
        """What is added to the next delta from this version: the same everywhere."""
        buffer = self.own.for_delta(delta(version + 1, 99), codec or self.codec)
        assert buffer is not None
        (value,) = set(buffer.tolist())
        return float(value)


def test_what_a_merged_delta_lost_is_added_to_the_next() -> None:
    assert Kept().next() == 0.0
    assert Kept().send(1, 2.0).settle(1).next() == 2.0
    assert Kept().own.for_delta(delta(4, 1), "q4") is None, "without feedback nothing is kept"


@pytest.mark.parametrize("outcome", ["dropped", "unknown"])
def test_what_another_delta_lost_is_not(outcome: str) -> None:
    """E: dropped, never carried."""
    kept = Kept().send(1, 2.0)
    if outcome == "dropped":
        kept.settle(1, None)
    assert kept.next() == 0.0


def test_a_snapshot_ends_it_and_an_encoding_that_ends_after_it_is_not_read() -> None:
    assert Kept().send(1, 2.0).settle(1).install(9).next(9) == 0.0
    kept = Kept()
    under_way = kept.own.for_delta(delta(4, 1), FEEDBACK)
    assert under_way is not None
    kept.install(9)
    under_way.fill_(5.0)
    kept.own.encoded(delta(4, 1), FEEDBACK, None)
    assert kept.settle(1, None).next(9) == 0.0, "its base is gone: the machine forgets it"


@pytest.mark.parametrize(("codec", "value"), [("q4:beta=1", 2.0), ("q8:beta=0.5", 0.0)])
def test_another_setting_of_the_codec_keeps_it_and_another_codec_does_not(codec: str, value: float) -> None:
    assert Kept().send(1, 2.0).settle(1).next(codec=codec) == value


def test_the_last_payload_is_there_for_the_codec_that_wrote_it() -> None:
    kept, payload = Kept().own, torch.arange(5, dtype=torch.uint8)
    assert kept.previous(delta(4, 1), "q4") is None
    kept.encoded(delta(4, 1), "q4", payload)
    assert kept.previous(delta(4, 2), "q4") is payload
    assert kept.previous(delta(4, 2), "q8") is None


@pytest.mark.parametrize(
    ("case", "version", "found"),
    [
        ("a later version", 6, 2.0),
        ("too old", 9, 0.0),
        ("sent again", 4, 0.0),  # it is part of that blob now
        ("another run", 4, 0.0),
        ("another history", 4, 0.0),
        ("cut off", 4, 0.0),
        ("not a number", 4, 0.0),
    ],
)
def test_a_restart_finds_a_sparse_residual_again_unless_it_does_not_fit(
    tmp_path: Path, sparse: str, case: str, version: int, found: float, caplog: pytest.LogCaptureFixture
) -> None:
    kept, path = Kept(tmp_path, codec=sparse).send(1, 2.0).settle(1), tmp_path / "residual-0.safetensors"
    match case:
        case "sent again":
            kept.send(2, 3.0, window=5)
        case "cut off":
            path.write_bytes(path.read_bytes()[:-100])
        case "not a number":
            broken = load_file(path)["residual"].fill_(torch.nan)
            save_file({"residual": broken}, path, {"run": "run", "fragment": "0", "codec": "sparse", "version": "4"})
    run = {"another run": "other", "another history": "run.8"}.get(case, "run")
    with caplog.at_level(logging.WARNING):
        again = Kept(tmp_path, run, sparse).install(version)
    assert again.next(version) == found
    assert bool(caplog.records) == (case in ("cut off", "not a number"))


def test_a_run_that_was_wound_back_ends_it_in_memory_and_on_disk(tmp_path: Path, sparse: str) -> None:
    """S: it is of deltas that the run knows nothing of any more."""
    kept = Kept(tmp_path, codec=sparse).send(1, 2.0).settle(1)
    kept.own.begin_again("run.8")
    assert not list(tmp_path.iterdir())
    assert kept.install(4).next() == 0.0


def test_a_full_disk_costs_the_copy_and_nothing_else(
    tmp_path: Path, sparse: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("farloop.node.state_dir.save_file", full)
    with caplog.at_level(logging.WARNING):
        kept = Kept(tmp_path, codec=sparse).send(1, 2.0).settle(1)
    assert "residual not saved fragment=0: [Errno 28]" in caplog.text
    assert not list(tmp_path.iterdir()) and kept.next() == 2.0
