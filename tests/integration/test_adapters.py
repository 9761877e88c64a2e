"""A run of an adapter: what is exchanged is the adapter, and the base stays as it was (T11)."""

from pathlib import Path

import pytest
from loopback import TORCHRUN, NewRun, assert_all_agree, own_run

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

LORA_NODE = Path(__file__).with_name("lora_node.py")


def test_bytes_follow_the_adapter_and_the_base_stays_bit_for_bit(new_run: NewRun) -> None:
    """A node with another base is refused: test_refusals.py."""
    pytest.importorskip("peft")
    four, eight = (bytes_of_a_run(new_run, rank) for rank in (4, 8))
    assert eight / four == pytest.approx(2.0, rel=0.1)


def bytes_of_a_run(new_run: NewRun, rank: int) -> int:
    """Of the deltas and updates of an adapter of this rank, with a node of one process and one of two."""
    settings = {"method": "diloco", "h": 10, "steps": 40, "codec_up": "q4", "codec_down": "q4"}
    run = own_run(new_run, str(rank), script=LORA_NODE, **settings)
    run.start_coordinator()
    train = (str(LORA_NODE), "train", run.address)
    run.start("one", *train, "one", str(rank))
    run.start("two", *TORCHRUN, "2", *train, "two", str(rank))
    status = run.until_done(timeout_s=400.0)  # it ends well if its base is as it was
    assert_all_agree(run, status, "one", "two")
    assert len({event["version"] for event in run.events("commit")}) == 4
    kinds = [node["bytes_by_kind"] for node in status["nodes"]]
    assert len(kinds) == 2
    return sum(kind["delta"] + kind["update"] for kind in kinds)
