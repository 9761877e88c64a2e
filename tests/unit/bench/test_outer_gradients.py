"""Outer gradients of a run of a few steps: made once, kept, and about what a delta is about."""

from pathlib import Path

import pytest
import torch

from farloop.bench.training import Settings, outer_gradients

TINY = Settings(model="nano", nodes=2, h=2, rounds=2, batch_sequences=1, sequence_tokens=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outer")


def test_they_are_made_once_and_kept(folder: Path) -> None:
    steps: list[int] = []
    found = outer_gradients(TINY, folder=folder, on_step=lambda: steps.append(1))
    assert len(steps) == TINY.inner_steps == 8
    again = outer_gradients(TINY, folder=folder, on_step=lambda: pytest.fail("trained again"))
    for mine, kept in zip((*found.deltas, *found.before), (*again.deltas, *again.before), strict=True):
        assert torch.equal(mine, kept)
    assert found.fragment == again.fragment


def test_every_node_has_a_delta_of_its_own_with_zeros_between_tensors(folder: Path) -> None:
    found = outer_gradients(TINY, folder=folder)
    assert len(found.deltas) == len(found.before) == 2
    one, other = found.deltas
    assert one.shape == (found.fragment.numel,) and not torch.equal(one, other) and bool(one.any())
    assert not torch.equal(one, found.before[0])
    used = torch.zeros(found.fragment.numel, dtype=torch.bool)
    for slot in found.fragment.tensors:
        used[slot.offset : slot.offset + slot.numel] = True
    assert not bool(one[~used].any())


def test_other_settings_are_another_file(folder: Path) -> None:
    outer_gradients(TINY, folder=folder)
    outer_gradients(Settings(model="nano", nodes=1, h=1, rounds=2, sequence_tokens=16), folder=folder)
    assert len(list(folder.glob("outer-gradients-*.safetensors"))) == 2


def test_the_number_of_threads_is_left_as_it_was(folder: Path) -> None:
    before = torch.get_num_threads()
    outer_gradients(TINY, folder=folder)
    assert torch.get_num_threads() == before


def test_a_single_round_has_none_before_it() -> None:
    with pytest.raises(ValueError, match="two rounds or more"):
        Settings(rounds=1)


def test_settings_describe_themselves() -> None:
    assert Settings().describe() == "tiny model, 4 nodes, H 30, round 6"
