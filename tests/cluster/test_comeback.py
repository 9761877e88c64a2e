"""T6: a node comes back as another number of ranks, or sharded another way, and reads the anchors that it wrote."""

from pathlib import Path

import pytest
from ranks import ranks
from sharded_models import loaded, saved, shared_state
from slow_cases import slow

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]

HARD = [("rows", 4, "columns", 3), ("both", 4, "rows", 1), ("replicas", 4, "tensor_parallel", 2)]


@pytest.mark.parametrize(("way", "count", "next_way", "next_count"), [("rows", 2, "rows", 3), *slow(*HARD)])
def test_any_number_of_ranks_reads_files(tmp_path: Path, way: str, count: int, next_way: str, next_count: int) -> None:
    (wrote, states), *_ = ranks(count, saved, way=way, folder=tmp_path)
    assert ranks(next_count, loaded, way=next_way, folder=tmp_path)[0] == (wrote, states)
    assert all(wrote.values()) and [len(digests) for _, digests in states] == [3, 3]
    last = tmp_path / f"{max(wrote)}-7.anchor"
    last.write_bytes(last.read_bytes()[:-5000])
    damaged, *_ = ranks(next_count, loaded, way=next_way, folder=tmp_path)
    assert damaged == (wrote | {max(wrote): 0}, states[:1]), "that fragment alone"


def test_ranks_that_hold_the_model_whole_get_the_optimizers_state_from_the_lead(tmp_path: Path) -> None:
    assert ranks(2, shared_state, folder=tmp_path) == [True, True]
