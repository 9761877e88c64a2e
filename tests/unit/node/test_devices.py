"""Which device a process takes, and what is said where memory cannot be locked; CUDA itself is tested on one."""

import logging
import mmap
import threading

import pytest
import torch
from pretend_cuda import Device
from torch import nn

from farloop.node.devices import SideStream, device_number, device_of, locked_zeros
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


@pytest.mark.parametrize(
    ("error", "named", "fix"),
    [
        (0, "", ""),
        (712, "", ""),  # it is locked already
        (2, "CUDA error 2 (out of memory)", "`ulimit -l`"),
        (304, "CUDA error 304 (OS call failed)", "`ulimit -l`"),
        (801, "CUDA error 801 (not supported)", "anchors='device'"),
    ],
)
def test_host_anchors_are_one_mapping_that_is_locked_once_for_as_long_as_one_is_used(
    error: int, named: str, fix: str, caplog: pytest.LogCaptureFixture
) -> None:
    locked, unlocked = list[tuple[int, int]](), list[int]()
    texts = {2: "out of memory", 304: "OS call failed", 801: "not supported"}
    with Device() as cuda, caplog.at_level(logging.WARNING):
        cuda.runtime.cudaHostRegister = lambda address, size, flags: locked.append((address, size)) or error
        cuda.runtime.cudaHostUnregister = unlocked.append
        cuda.runtime.cudaGetErrorString = texts.__getitem__
        tensors = locked_zeros([3, 0, 1 << 20, 5])
    ((start, size),) = locked
    assert start % mmap.PAGESIZE == 0
    assert [tensor.numel() for tensor in tensors] == [3, 0, 1 << 20, 5]
    for number, tensor in enumerate(tensors):
        assert not tensor.any()
        if tensor.numel():
            assert tensor.data_ptr() % 64 == 0
            assert start <= tensor.data_ptr() <= start + size - tensor.nbytes
        tensor.fill_(number)
    assert [tensor.unique().tolist() for tensor in tensors] == [[0.0], [], [2.0], [3.0]], "apart"
    assert len(caplog.records) == bool(named) and named in caplog.text and fix in caplog.text
    last = tensors.pop()
    del tensor
    tensors.clear()
    assert not unlocked and last.sum() == 15.0
    del last
    assert unlocked == ([start] if error == 0 else [])


def test_on_a_cpu_a_job_is_what_it_was() -> None:
    job = threading.Event().set
    assert SideStream(CPU).beside(job) is job


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_job_sees_what_was_submitted_before_it_and_is_over_when_it_returns() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    (anchor,) = locked_zeros([1 << 22])
    assert anchor.is_pinned()
    x = torch.zeros(1 << 22, device=device)
    for _ in range(100):
        x.add_(1.0)
    job = SideStream(device).beside(lambda: anchor.copy_(x, non_blocking=True))
    x.add_(1.0)  # not seen, or torn: the job is not waited for
    thread = threading.Thread(target=job)
    thread.start()
    thread.join()
    assert float(anchor.min()) >= 100.0
