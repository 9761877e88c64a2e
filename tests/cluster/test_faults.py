"""T7, T8, T12: faults and refusals are one answer of all ranks; who trains on which samples."""

import pytest
from ranks import ranks
from sharded_models import accumulated, evaluated_before, faults, refusals, samples

from farloop.node.errors import TermsMismatch
from farloop.node.model.shards import check_codecs

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]


def test_a_nan_in_one_shard_and_damaged_updates_are_one_answer_of_all_ranks() -> None:
    lead, other = ranks(2, faults, way="rows")
    assert lead["raised"] == other["raised"], "all ranks raise the same"
    assert "parameter 'experts.down' holds NaN or Inf after inner step 1; nothing was sent" in lead["raised"]
    assert lead["answers"] == [False, False] and lead["untouched"] and other["untouched"]
    assert lead["wrong"] is False and lead["lost"] == -1, "not the announced digest: the lead asks for a snapshot"
    assert lead["mended"] is True


def test_shards_that_are_no_boxes_are_refused_on_all_ranks_alike() -> None:
    lead, other = ranks(2, refusals)
    assert lead["partial"] == other["partial"] and "'weight' is sharded as (Partial(sum),), which" in lead["partial"]
    assert lead["gaps"] == other["gaps"] and "has gaps: shard it by sizes that divide it" in lead["gaps"]
    assert lead["shape"] == other["shape"] and "has the shape (3, 6), not (4, 6)" in lead["shape"]
    assert "parameter 'weight' is torch.bfloat16 on rank 1" in lead["types"]
    assert "parameter 'weight' is torch.float32 on rank 0" in other["types"]


def test_a_model_that_was_evaluated_before_join_has_its_shards_put_back() -> None:
    """Else the whole copy would be taken for a replica, and merges into it would be lost."""
    assert ranks(2, evaluated_before) == [[False, True]] * 2


def test_ranks_of_one_tensor_parallel_group_train_on_the_same_samples() -> None:
    by_data, by_rank = zip(*ranks(4, samples), strict=True)
    assert by_data == ([0, 2, 4, 6], [0, 2, 4, 6], [1, 3, 5, 7], [1, 3, 5, 7])
    assert by_rank == ([0, 4], [1, 5], [2, 6], [3, 7])


def test_gradients_add_up_without_being_averaged_before_the_last_part_of_a_batch() -> None:
    for rank, told in enumerate(ranks(2, accumulated)):
        own = 1.0 + rank
        assert told["ddp"] == [own, 16.5], "11 on one rank and 22 on the other"
        assert told["none"] == [own, 11 * own], "the loop averages"
        assert told["fully_shard"] == [None, 16.5], "what was not averaged is not sharded yet"


@pytest.mark.parametrize("spelling", ["topk:k=128", "lowrank", "sketch", "ternary", "randk"])
def test_codecs_that_need_whole_tensors_are_refused_with_those_that_work(spelling: str) -> None:
    check_codecs(("fp32", "q4:beta=0.9", "sign", "lattice", "nf4"))
    with pytest.raises(TermsMismatch, match=f"codec {spelling} needs whole tensors.*fp32, bf16, q8, q4, q4r, e3m0"):
        check_codecs(("q4", spelling))
