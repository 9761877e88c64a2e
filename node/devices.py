"""What a node does on an accelerator and not on a CPU: which one it takes, locked host memory, a stream of its own.

On CPUs the same calls do nothing. What is written for CUDA here has been read and never run.
"""

import logging
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, Literal

import torch
from torch import Tensor, nn

from farloop.node.errors import LoopError

_log = logging.getLogger(__name__)

Where = Literal["host", "device"]  # where anchors are kept; on CPUs it is one place

_CUDA_SUCCESS: Final = 0


def device_number(local_rank: str | None, count: int, current: int) -> int:
    """Which of this process's `count` CUDA devices it takes. `local_rank`: torchrun's LOCAL_RANK, if that is set;
    `current`: the device that the loop has chosen, 0 unless it has.

    Raises LoopError: there are fewer devices than processes.
    """
    if local_rank is None:
        if count > 1 and current == 0:
            _log.warning(
                "this process uses cuda:0 alone of %d devices: start one process for each (torchrun, or farloop node "
                "--nproc), or show each node of this machine its own with CUDA_VISIBLE_DEVICES",
                count,
            )
        return current
    if count == 1:  # the launcher shows every process its own
        return 0
    if int(local_rank) >= count:
        raise LoopError(
            f"process {local_rank} of this host has no device of its own: {count} are visible. Start {count} processes "
            "a host, or set CUDA_VISIBLE_DEVICES to none to train on the CPU"
        )
    return int(local_rank)


def device_of(module: nn.Module, otherwise: torch.device) -> torch.device:
    """Where a whole module trains: on the accelerator that it is on, else on `otherwise`.

    Raises LoopError: it is on several devices, as `device_map` puts it.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    found = {tensor.device: name for name, tensor in tensors}
    if all(device.type == "cpu" for device in found):
        return otherwise
    if len(found) > 1:
        told = ", ".join(f"{name!r} on {device}" for device, name in list(found.items())[:3])
        raise LoopError(
            f"the model is on several devices ({told}): put it on one with model.to(device), or shard it with "
            "torch.distributed.fsdp.fully_shard over one process for each device"
        )
    return next(iter(found))


def lock_in_memory(tensors: Iterable[Tensor]) -> None:
    """Lock host tensors, so that copies from and to a CUDA device need no copy in between and need not be waited for.

    Where that fails, one warning, and they stay as they are.
    """
    for tensor in tensors:
        if tensor.numel() and (error := _register(tensor)) != _CUDA_SUCCESS:
            _log.warning(
                "anchors are not locked in memory (CUDA error %d), so copying them is slower: raise the limit that "
                "`ulimit -l` shows (docker: --ulimit memlock=-1)",
                error,
            )
            return


def _register(tensor: Tensor) -> int:
    """CUDA's error, or 0. Not by torch's allocator of pinned memory, which rounds sizes up to a power of two."""
    runtime, address = torch.cuda.cudart(), tensor.data_ptr()  # type: ignore[no-untyped-call]
    error = int(runtime.cudaHostRegister(address, tensor.nbytes, 0))
    if error == _CUDA_SUCCESS:
        weakref.finalize(tensor, runtime.cudaHostUnregister, address).atexit = False
    else:
        with suppress(RuntimeError):  # the next launch reports it once more
            torch.zeros(1, device="cuda")
    return error


class SideStream:
    """A stream for the codec's thread, beside the one that training uses."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def beside(self, job: Callable[[], None]) -> Callable[[], None]:
        """The job for another thread. On the device it begins after all that was submitted before this call, and is
        over when it returns: training neither waits for it nor is waited for."""
        if (stream := self._stream) is None:
            return job
        submitted = torch.cuda.current_stream(self._device).record_event()

        def run() -> None:
            with torch.cuda.stream(stream):
                stream.wait_event(submitted)
                job()
                stream.synchronize()

        return run
