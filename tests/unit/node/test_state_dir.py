"""Covers `node/state_dir.py`."""

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from farloop.algo.spec import BlobId, BlobKind, Layout, NodeId
from farloop.node.errors import StateUnusable
from farloop.node.state_dir import NodeState, Residuals
from farloop.quant import registry
from farloop.quant.codec import Traits, flat
from farloop.quant.formats.q4 import Q4, Q4Codec


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


CPU = torch.device("cpu")
LAYOUT = Layout(slots=1, fragments=(flat(300),))
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
    return "sparse"


def blob(seq: int, version: int = 3) -> BlobId:
    return BlobId(kind=BlobKind.DELTA, fragment=0, version=version, node=NodeId("a"), incarnation=1, seq=seq)


def at_once(job: Callable[[], None]) -> None:
    job()


def residuals(folder: Path | None = None, run: str = "run") -> Residuals:
    return Residuals(run, LAYOUT, folder, at_once)


def encode(kept: Residuals, codec: str, name: BlobId, value: float) -> None:
    """An encoding that loses `value` everywhere."""
    buffer = kept.for_delta(name, codec, CPU)
    assert buffer is not None
    buffer.fill_(value)
    kept.encoded(name, codec, None)


def test_without_feedback_nothing_is_kept() -> None:
    assert residuals().for_delta(blob(1), "q4", CPU) is None


def test_what_a_merged_delta_lost_is_added_to_the_next() -> None:
    kept = residuals()
    assert not kept.for_delta(blob(1), FEEDBACK, CPU).any()  # type: ignore[union-attr]
    encode(kept, FEEDBACK, blob(1), 2.0)
    kept.settled(blob(1), 4)
    assert (kept.for_delta(blob(2, 4), FEEDBACK, CPU) == 2.0).all()  # type: ignore[union-attr]


@pytest.mark.parametrize("outcome", ["dropped", "unknown"])
def test_what_another_delta_lost_is_not(outcome: str) -> None:
    """Protocol E: dropped, never carried."""
    kept = residuals()
    encode(kept, FEEDBACK, blob(1), 2.0)
    if outcome == "dropped":
        kept.settled(blob(1), None)
    assert not kept.for_delta(blob(2, 4), FEEDBACK, CPU).any()  # type: ignore[union-attr]


def test_a_snapshot_ends_it() -> None:
    kept = residuals()
    encode(kept, FEEDBACK, blob(1), 2.0)
    kept.settled(blob(1), 4)
    kept.installed(0, 9, FEEDBACK, CPU)
    assert not kept.for_delta(blob(2, 9), FEEDBACK, CPU).any()  # type: ignore[union-attr]


def test_an_encoding_that_ends_after_a_snapshot_is_not_read() -> None:
    kept = residuals()
    under_way = kept.for_delta(blob(1), FEEDBACK, CPU)
    assert under_way is not None
    kept.installed(0, 9, FEEDBACK, CPU)
    under_way.fill_(5.0)
    kept.encoded(blob(1), FEEDBACK, None)
    kept.settled(blob(1), None)  # its base is gone: the machine forgets it
    assert not kept.for_delta(blob(2, 9), FEEDBACK, CPU).any()  # type: ignore[union-attr]


def test_another_setting_of_the_codec_keeps_it_and_another_codec_does_not() -> None:
    for codec, there in (("q4:beta=1", True), ("q8:beta=0.5", False)):
        kept = residuals()
        encode(kept, FEEDBACK, blob(1), 2.0)
        kept.settled(blob(1), 4)
        assert bool(kept.for_delta(blob(2, 4), codec, CPU).any()) is there  # type: ignore[union-attr]


def test_the_last_payload_is_there_for_the_codec_that_wrote_it() -> None:
    kept = residuals()
    assert kept.previous(blob(1), "q4") is None
    payload = torch.arange(5, dtype=torch.uint8)
    kept.encoded(blob(1), "q4", payload)
    assert kept.previous(blob(2), "q4") is payload
    assert kept.previous(blob(2), "q8") is None


def test_a_restart_finds_a_sparse_residual_again(tmp_path: Path, sparse: str) -> None:
    kept = residuals(tmp_path)
    encode(kept, sparse, blob(1), 2.0)
    kept.settled(blob(1), 4)
    again = residuals(tmp_path)
    again.installed(0, 6, sparse, CPU)
    assert (again.for_delta(blob(1, 6), sparse, CPU) == 2.0).all()  # type: ignore[union-attr]


def test_a_residual_that_was_sent_is_not_found_again(tmp_path: Path, sparse: str) -> None:
    kept = residuals(tmp_path)
    encode(kept, sparse, blob(1), 2.0)
    kept.settled(blob(1), 4)
    encode(kept, sparse, blob(2, 4), 3.0)  # it is part of this blob now
    again = residuals(tmp_path)
    again.installed(0, 4, sparse, CPU)
    assert not again.for_delta(blob(1, 4), sparse, CPU).any()  # type: ignore[union-attr]


@pytest.mark.parametrize("change", ["another run", "too old", "cut off", "not a number"])
def test_a_residual_that_does_not_fit_is_left(
    tmp_path: Path, sparse: str, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    kept = residuals(tmp_path)
    encode(kept, sparse, blob(1), 2.0)
    kept.settled(blob(1), 4)
    path = tmp_path / "residual-0.safetensors"
    if change == "cut off":
        path.write_bytes(path.read_bytes()[:-100])
    if change == "not a number":
        broken = load_file(path)["residual"].fill_(torch.nan)
        save_file({"residual": broken}, path, {"run": "run", "fragment": "0", "codec": "sparse", "version": "4"})
    again = residuals(tmp_path, run="other" if change == "another run" else "run")
    with caplog.at_level(logging.WARNING):
        again.installed(0, 9 if change == "too old" else 4, sparse, CPU)
    assert not again.for_delta(blob(1, 9), sparse, CPU).any()  # type: ignore[union-attr]
    assert bool(caplog.records) == (change in ("cut off", "not a number"))


def test_a_run_that_was_wound_back_ends_it_in_memory_and_on_disk(tmp_path: Path, sparse: str) -> None:
    """S: it is of deltas that the run knows nothing of any more."""
    kept = residuals(tmp_path)
    encode(kept, sparse, blob(1), 2.0)
    kept.settled(blob(1), 4)
    kept.begin_again("run.8")
    assert not list(tmp_path.iterdir())
    kept.installed(0, 4, sparse, CPU)
    assert not kept.for_delta(blob(2, 4), sparse, CPU).any()  # type: ignore[union-attr]


def test_a_copy_of_another_history_is_not_taken_up_by_a_later_start(tmp_path: Path, sparse: str) -> None:
    kept = residuals(tmp_path, run="run")
    encode(kept, sparse, blob(1), 2.0)
    kept.settled(blob(1), 4)
    again = residuals(tmp_path, run="run.8")
    again.installed(0, 4, sparse, CPU)
    assert not again.for_delta(blob(1, 4), sparse, CPU).any()  # type: ignore[union-attr]


def test_a_full_disk_costs_the_copy_and_nothing_else(
    tmp_path: Path, sparse: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("farloop.node.state_dir.save_file", full)
    kept = residuals(tmp_path)
    with caplog.at_level(logging.WARNING):
        encode(kept, sparse, blob(1), 2.0)
        kept.settled(blob(1), 4)
    assert "residual not saved fragment=0: [Errno 28]" in caplog.text
    assert not list(tmp_path.iterdir())
    assert (kept.for_delta(blob(2, 4), sparse, CPU) == 2.0).all()  # type: ignore[union-attr]
