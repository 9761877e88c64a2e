"""T1: whatever the ranks of a node and the placements, its bytes and its weights are those of one process."""

import pytest
from ranks import ranks
from sharded_models import mixed_precision, moved_copies, muon_steps, rounds, torch_muon_steps
from slow_cases import slow

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]

FAST = [("both", 4, "bfloat16")]
SLOW = [
    ("rows", 2, "float32"),
    ("parts", 2, "float32"),
    ("columns", 2, "float32"),
    ("rows", 1, "float32"),
    ("rows", 3, "float32"),
    ("rows", 4, "bfloat16"),
    ("columns", 4, "float32"),
    ("replicas", 4, "float32"),
    ("tensor_parallel", 2, "bfloat16"),
    ("both", 4, "float32"),
    ("plain", 2, "float32"),
    ("parts", 4, "float32"),
]


@pytest.mark.parametrize(("way", "count", "dtype"), [*FAST, *slow(*SLOW)])
def test_blobs_anchors_residuals_and_weights_are_those_of_one_process(way: str, count: int, dtype: str) -> None:
    """Nine codecs, two fragments, a merge that mixes and an eager one; no boundary is that of a block."""
    told = ranks(count, rounds, way=way, dtype=dtype)
    for of_rank in told:
        assert of_rank["differ"] == []
        assert of_rank["compared"] > 100
    kept = [of_rank["kept"] for of_rank in told]
    assert sum(kept) == told[0]["all"], "every element has one keeper"
    if way != "parts":  # whose layers differ in size
        assert max(kept) < 1.4 * told[0]["all"] / count, "as even as shards of three experts are"


@pytest.mark.slow
def test_a_tensor_in_parts_of_rows_is_no_special_case() -> None:
    for told in ranks(3, rounds, way="rows", dtype="float32", codecs=("q4",), largest=30_000):
        assert told["differ"] == [] and told["compared"] > 100


@pytest.mark.parametrize("apart", ["theirs", *slow("ours")])
def test_anchors_in_host_memory_change_no_bit(apart: str) -> None:
    """What they do on an accelerator, where the weights are not: every use of one is of a copy."""
    for told in ranks(2, rounds, way="rows", dtype="bfloat16", codecs=("q4", "q4r:beta=0.9"), apart=apart):
        assert told["differ"] == [] and told["compared"] > 50


@pytest.mark.parametrize("counts", [(1, 2), *slow(((1, 2, 4),))])
def test_any_number_of_ranks_sends_the_same_blobs(counts: tuple[int, ...]) -> None:
    """T3: from equal weights, to the byte; so a cluster may come back with another number of ranks."""
    sent = {ranks(count, rounds, way="rows", dtype="float32", codecs=("q4", "q4r"))[0]["blobs"] for count in counts}
    assert len(sent) == 1


def test_a_sharded_model_that_computes_in_bf16_keeps_fp32_shards() -> None:
    """So steps and merges that are smaller than a bf16 number's last digit count."""
    for told in ranks(2, mixed_precision):
        assert told["seen"] == {"torch.bfloat16"} and told["kept"] == {"torch.float32"}
        assert told["moved"] > 0.2 and 4.0 < told["loss"] < 7.0


MUON_SLOW = [("columns", 2), ("tensor_parallel", 2), ("both", 4)]


@pytest.mark.parametrize(("way", "count"), [("rows", 3), *slow(*MUON_SLOW)])
def test_muon_of_a_sharded_model_steps_to_the_bits_of_one_process(way: str, count: int) -> None:
    """Rows that do not divide by the ranks too. Each direction is computed once, or once in each row of a mesh."""
    told = ranks(count, muon_steps, way=way)
    assert all(same and sharded == 2 for same, sharded, _ in told)
    copies = 2 if way == "both" else 1
    assert sum(computed for *_, computed in told) == 3 * 2 * copies


def test_torch_s_muon_of_a_sharded_model_steps_by_whole_matrices() -> None:
    """Not to the bit: torch orthogonalises in bfloat16. By halves of the rows it would end a third of the way apart."""
    for far, went in ranks(2, torch_muon_steps, way="rows"):
        assert far < 0.05 * went, (far, went)


@pytest.mark.parametrize("way", ["rows", *slow("both")])
def test_copies_of_shards_move_with_them(way: str) -> None:
    assert max(ranks(4 if way == "both" else 2, moved_copies, way=way)) < 1e-6
