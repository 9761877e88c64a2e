"""T13: what a node's ranks train on is what the coordinator granted and booked, whatever becomes of the node."""

from collections import defaultdict

import loopback
import pytest
from loopback import NewRun, own_run
from test_restarts import DEADLINE_S, kill

from farloop.coordinator.decide.records import InputStored, LeaseGranted

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

SAMPLE_LOOP = loopback.OWN_NODE.with_name("sample_loop.py")


def test_samples_are_booked_once_over_kills_and_another_number_of_ranks(new_run: NewRun) -> None:
    """Two ranks of which one is killed, two ranks that are killed with their agent, four of which two train alike."""
    run = own_run(new_run, steps=120, method="diloco", h=10, nodes=1, batch_sequences=4)
    run.tables["data"] = {"digest": "numbers", "samples": 100_000}
    run.on_tape = True
    coordinator = run.start_coordinator()
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--max-restarts", "1", "--nproc-per-node")
    two = run.start("two", *torchrun, "2", str(SAMPLE_LOOP), run.address)
    kill(run, two, 1)
    two.kill()
    four = run.start("four", *torchrun, "4", str(SAMPLE_LOOP), run.address)
    status = run.until_done(four, coordinator, timeout_s=DEADLINE_S)

    granted, stored = defaultdict[int, list[int]](list), defaultdict[int, int](int)
    for record in run.records():
        if isinstance(record, LeaseGranted):
            granted[record.incarnation] += range(record.lease.start, record.lease.start + record.lease.count)
        elif isinstance(record, InputStored):
            stored[record.blob.incarnation] = max(stored[record.blob.incarnation], record.consumed or 0)
    used = defaultdict[str, dict[int, list[list[int]]]](lambda: defaultdict(list))
    for line in (run.folder / "used.txt").read_text().splitlines():
        start, rank, samples = line.split(" ")
        used[start][int(rank)].append([int(position) for position in samples.split(",")])
    assert [len(ranks) for ranks in used.values()] == [2, 2, 4] and sorted(granted) == [1, 2, 3]
    for incarnation, ranks in enumerate(used.values(), start=1):
        first, other = (ranks[0], ranks[1]) if len(ranks) == 2 else (ranks[0], ranks[2])
        if len(ranks) == 4:
            assert ranks[1] == ranks[0] and ranks[3] == ranks[2], "one data-parallel group has the same samples"
        trained = [p for parts in zip(first, other, strict=False) for pair in zip(*parts, strict=True) for p in pair]
        assert trained == granted[incarnation][: len(trained)], "the grants, in their order"
        assert len(trained) >= stored[incarnation] > 0
    assert len(trained) == stored[3], "the last start left in order"
    booked = [position for incarnation in granted for position in granted[incarnation][: stored[incarnation]]]
    assert sorted(booked) == list(range(len(booked))), "no sample is in two deltas, and none is left out"
    assert status["samples"]["trained"] == len(booked)
