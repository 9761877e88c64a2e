"""T6: a node comes back as another number of ranks, or sharded another way, and reads the anchors that it wrote."""

from pathlib import Path

import pytest
from ranks import ranks
from sharded_models import loaded, saved

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]

HARD = [("rows", 4, "columns", 3), ("both", 4, "rows", 1), ("replicas", 4, "tensor_parallel", 2)]


@pytest.mark.parametrize(
    ("way", "count", "next_way", "next_count"),
    [("rows", 2, "rows", 3), *(pytest.param(*case, marks=pytest.mark.slow) for case in HARD)],
)
def test_any_number_of_ranks_reads_what_others_wrote(
    tmp_path: Path, way: str, count: int, next_way: str, next_count: int
) -> None:
    wrote, *_ = ranks(count, saved, way=way, folder=tmp_path)
    read, *_ = ranks(next_count, loaded, way=next_way, folder=tmp_path)
    assert read == wrote and all(wrote.values())
    (tmp_path / "1-7.anchor").write_bytes((tmp_path / "1-7.anchor").read_bytes()[:-5000])
    damaged, *_ = ranks(next_count, loaded, way=next_way, folder=tmp_path)
    assert damaged == {0: wrote[0], 1: 0}, "that fragment alone"
