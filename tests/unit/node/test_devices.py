"""Which device a process takes, and what is said where memory cannot be locked; CUDA itself is tested on one."""

import logging
import threading

import pytest
import torch
from torch import nn

from farloop.node import devices
from farloop.node.devices import SideStream, device_number, device_of, lock_in_memory
from farloop.node.errors import LoopError

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("local_rank", "count", "current", "taken"),
    [("3", 8, 0, 3), ("3", 1, 0, 0), (None, 1, 0, 0), (None, 8, 5, 5), (None, 8, 0, 0)],
)
def test_a_process_takes_the_device_that_its_launcher_or_its_loop_gave_it(
    local_rank: str | None, count: int, current: int, taken: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert device_number(local_rank, count, current) == taken
    alone_of_many = local_rank is None and count > 1 and current == 0
    assert ("CUDA_VISIBLE_DEVICES" in caplog.text) == alone_of_many


def test_more_processes_than_devices_are_refused() -> None:
    with pytest.raises(LoopError, match="process 2 of this host has no device of its own: 2 are visible"):
        device_number("2", 2, 0)


def test_a_model_stays_on_its_accelerator_and_is_refused_on_several() -> None:
    module, other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.device("meta")
    assert device_of(module, other) == other, "of the CPU, it moves"
    assert device_of(nn.Linear(2, 2, device="meta"), CPU) == other
    module[1].to(other)
    with pytest.raises(LoopError, match=r"several devices \('0.bias' on cpu, '1.bias' on meta\).*fully_shard"):
        device_of(module, CPU)


def test_memory_that_cannot_be_locked_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = list[int]()

    def register(tensor: torch.Tensor) -> int:
        asked.append(tensor.numel())
        return 2 if tensor.numel() > 1 else 0

    monkeypatch.setattr(devices, "_register", register)
    with caplog.at_level(logging.WARNING):
        lock_in_memory(map(torch.zeros, (0, 1, 2, 3)))
    assert asked == [1, 2] and caplog.text.count("ulimit -l") == 1


def test_on_a_cpu_a_job_is_what_it_was() -> None:
    job = threading.Event().set
    assert SideStream(CPU).beside(job) is job


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_job_sees_what_was_submitted_before_it_and_is_over_when_it_returns() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    anchor = torch.zeros(1 << 22)
    lock_in_memory([anchor])
    assert anchor.is_pinned()
    x = torch.zeros(1 << 22, device=device)
    for _ in range(100):
        x.add_(1.0)
    job = SideStream(device).beside(lambda: anchor.copy_(x, non_blocking=True))
    x.add_(1.0)  # not seen, or torn: nobody waits for the job
    thread = threading.Thread(target=job)
    thread.start()
    thread.join()
    assert float(anchor.min()) >= 100.0
