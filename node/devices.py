"""What a node does on an accelerator and not on a CPU: which one it takes, locked host memory, a stream of its own, and
copies between the two that are queued and not waited for.

On CPUs the same calls do nothing. Tests run it on a pretend CUDA device, `farloop lab bench gpu` on a real one.
"""

import logging
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, TypeVar

import torch
from torch import Tensor, nn

from farloop.node.errors import LoopError

_log = logging.getLogger(__name__)

_SUCCESS: Final = 0
_ALREADY_LOCKED: Final = 712
_MORE_LOCKED: Final = "raise the limit that `ulimit -l` shows (docker: --ulimit memlock=-1), or free host memory"
_FIXES: Final = {2: _MORE_LOCKED, 304: _MORE_LOCKED}  # out of memory; a call of the operating system failed
_ALIGNED: Final = 16  # elements of a cache line
_MOST_KEPT: Final = 2  # buffers that outlast their use

_T = TypeVar("_T")


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


def locked_zeros(numels: Iterable[int]) -> list[Tensor]:
    """fp32 [n] zeros for each n, in host memory that is locked: copies from and to a CUDA device need no copy in
    between, and need not be waited for.

    They lie side by side in one mapping, which is locked for as long as any of them is used. Where that fails, one
    warning, and it is as other memory.
    """
    # Not torch's allocator of pinned memory, which rounds sizes up to a power of two; and with malloc, two tensors may
    # share a page that is locked for one of them.
    sizes = list(numels)
    rounded = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
    mapping = mmap.mmap(-1, 4 * (sum(rounded) + _ALIGNED), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    owner = memoryview(mapping)  # the tensors keep it alive
    parts = torch.split(torch.frombuffer(owner, dtype=torch.float32), [*rounded, _ALIGNED])
    runtime, address = torch.cuda.cudart(), parts[0].data_ptr()  # type: ignore[no-untyped-call]
    error = int(runtime.cudaHostRegister(address, len(mapping), 0))
    if error == _SUCCESS:
        # The finalizer has the mapping as well, so that it is unlocked before it is unmapped.
        weakref.finalize(owner, lambda _: runtime.cudaHostUnregister(address), mapping).atexit = False
    else:
        with suppress(RuntimeError):  # the next launch reports it once more
            torch.zeros(1, device="cuda", dtype=torch.float32)
    if error not in (_SUCCESS, _ALREADY_LOCKED):
        _log.warning(
            "anchors are not locked in memory, so copying them is slower: CUDA error %d (%s) for %.2f GB; %s",
            error,
            runtime.cudaGetErrorString(runtime.cudaError(error)),
            len(mapping) / 1e9,
            _FIXES.get(error, "anchors='device' needs no locked memory"),
        )
    return [part[:size] for part, size in zip(parts, sizes, strict=False)]


def spare_bytes(device: torch.device) -> int:
    """What a CUDA device has left at the peak of the steps so far; a tenth of that peak is kept for longer ones."""
    free, _ = torch.cuda.mem_get_info(device)
    peak = torch.cuda.max_memory_allocated(device)
    return free + torch.cuda.memory_reserved(device) - peak - peak // 10


class SideStream:
    """A stream for the codec's thread, beside the one that training uses."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def beside(self, job: Callable[[], _T]) -> Callable[[], _T]:
        """The job for another thread. On the device it begins after all that was submitted before this call, and is
        over when it returns: training neither waits for it nor is waited for."""
        if (stream := self._stream) is None:
            return job
        submitted = torch.cuda.current_stream(self._device).record_event()

        def run() -> _T:
            with torch.cuda.stream(stream):
                stream.wait_event(submitted)
                done = job()
                stream.synchronize()
            return done

        return run

    @contextmanager
    def follows(self) -> Iterator[None]:
        """What is queued inside begins after all that was submitted before; the current stream goes on meanwhile."""
        if (stream := self._stream) is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield


class Awaited:
    """Numbers that a CUDA device works out, without waiting for them."""

    def __init__(self) -> None:
        self._coming = deque[tuple[Tensor, torch.cuda.Event]]()

    def next(self, value: Tensor) -> float | None:
        """Add one, of one element; what `poll` returns then."""
        self.add(value)
        return self.poll()

    def add(self, value: Tensor) -> None:
        there = value.detach().to("cpu", non_blocking=True)
        self._coming.append((there, torch.cuda.current_stream(value.device).record_event()))

    def poll(self) -> float | None:
        """The oldest of those that were not returned yet, if it is there."""
        is_there = bool(self._coming) and self._coming[0][1].query()  # type: ignore[no-untyped-call]
        return float(self._coming.popleft()[0]) if is_there else None


class Kept:
    """fp32 [n] numbers that a replica keeps of a fragment: on the device of the weights, or in host memory.

    Copies from host memory to the device and back are queued, one after the other, and not waited for. So the memory is
    given out for reading or for writing only, which waits for what is under way.
    """

    def __init__(self, numbers: Tensor) -> None:
        self.changes = 0
        """Counts what is written. It grows before the numbers change."""
        self._numbers = numbers
        self._last: torch.cuda.Event | None = None  # copy that was queued
        self._download: torch.cuda.Event | None = None

    @property
    def device(self) -> torch.device:
        return self._numbers.device

    @property
    def numel(self) -> int:
        return self._numbers.numel()

    def read(self) -> Tensor:
        """The numbers, to be read before the next change."""
        if (download := self._download) is not None:
            download.synchronize()
        return self._numbers

    def write(self) -> Tensor:
        """The numbers, to be changed before the next copy."""
        self.changes += 1
        if self._last is not None:
            self._last.synchronize()
        self._last = self._download = None
        return self._numbers

    def replace(self, numbers: Tensor) -> Tensor:
        """Have these instead; returns the old ones."""
        old, self._numbers = self.write(), numbers
        return old

    def copy_into(self, there: Tensor) -> "torch.cuda.Event | None":
        """Queue a copy to a device's memory on the current stream. Returns its event; None: it is done."""
        return self._copy(there, self._numbers, there.device)

    def copy_from(self, there: Tensor) -> "torch.cuda.Event | None":
        """As `copy_into`, back."""
        self.changes += 1
        self._download = self._copy(self._numbers, there, there.device)
        return self._download

    def _copy(self, into: Tensor, source: Tensor, device: torch.device) -> "torch.cuda.Event | None":
        stream = None if device.type == "cpu" else torch.cuda.current_stream(device)
        if stream is not None and self._last is not None:
            stream.wait_event(self._last)
        into.copy_(source, non_blocking=True)
        self._last = None if stream is None else stream.record_event()
        return self._last


@dataclass(slots=True, eq=False)
class _Buffer:
    memory: Tensor
    view: Tensor  # the part of it that was lent last
    of: "weakref.ref[Kept] | None" = None  # whose numbers it holds, at that count of changes
    changes: int = 0
    filled: "torch.cuda.Event | None" = None  # by the side stream
    read: "torch.cuda.Event | None" = None

    def holds(self, kept: Kept | None) -> bool:
        return kept is not None and self.of is not None and self.of() is kept and kept.changes == self.changes

    @property
    def is_of_use(self) -> bool:
        return self.of is not None and self.holds(self.of())


class Buffers:
    """fp32 buffers on the device of the weights: for deltas, and for copies of what is kept in host memory.

    At most two of the largest part outlast their use. Each remembers whose numbers it holds, so that a copy that is
    wanted again is not made again. The training thread takes them; any thread gives them back.
    """

    def __init__(self, numel: int, device: torch.device, side: SideStream) -> None:
        """`numel`: of the largest part."""
        self.most_bytes = 4 * _MOST_KEPT * numel
        self._numel, self._device, self._side = numel, device, side
        self._free, self._lent, self._lock = list[_Buffer](), list[_Buffer](), threading.Lock()

    def has_room(self, kept: Kept | None = None) -> bool:
        """Whether one more can be taken, and no copy is lost that may be wanted again; False if `kept` has one."""
        with self._lock:
            used = len(self._lent) + sum(buffer.is_of_use for buffer in self._free)
            return used < _MOST_KEPT and not any(buffer.holds(kept) for buffer in self._free)

    def acquire(self, numel: int, kept: Kept | None = None, *, changes: bool = True) -> Tensor:
        """fp32 [numel] of any content; or the numbers of `kept`, which is in host memory, to be read unless it
        `changes`."""
        buffer = self._acquire(numel, kept)
        is_there = buffer.holds(kept)
        if buffer.filled is not None:
            torch.cuda.current_stream(self._device).wait_event(buffer.filled)
        if buffer.read is not None and (changes or not is_there):
            torch.cuda.current_stream(self._device).wait_event(buffer.read)
            buffer.read = None
        if kept is not None and not is_there:
            kept.copy_into(buffer.view)
        return buffer.view

    def give_back(self, view: Tensor, kept: Kept | None = None, *, changed: bool = False) -> None:
        """`kept`: whose numbers these are. `changed`: or are to be, once they are copied back, beside training."""
        with self._lock:
            buffer = next(buffer for buffer in self._lent if buffer.view is view)
        if kept is not None and changed:
            with self._side.follows():
                buffer.read = kept.copy_from(view)
        self._return(buffer, kept)

    def copy_ahead(self, kept: Kept) -> None:
        """Begin to copy what is kept in host memory, beside training: it will be wanted."""
        buffer = self._acquire(kept.numel)
        with self._side.follows():
            buffer.filled = kept.copy_into(buffer.view)
        self._return(buffer, kept)

    def _acquire(self, numel: int, kept: Kept | None = None) -> _Buffer:
        with self._lock:
            buffer = max(self._free, key=lambda each: (each.holds(kept), not each.is_of_use), default=None)
            is_worth_more = buffer is not None and buffer.is_of_use and not buffer.holds(kept)
            if buffer is None or (is_worth_more and len(self._free) + len(self._lent) < _MOST_KEPT):
                memory = torch.empty(self._numel, device=self._device, dtype=torch.float32)
                buffer = _Buffer(memory, memory)
            else:
                self._free.remove(buffer)
            buffer.view = buffer.memory[:numel]
            self._lent.append(buffer)
        return buffer

    def _return(self, buffer: _Buffer, kept: Kept | None) -> None:
        buffer.of, buffer.changes = (None, 0) if kept is None else (weakref.ref(kept), kept.changes)
        with self._lock:
            self._lent.remove(buffer)
            self._free.append(buffer)
            least = min(self._free, key=lambda each: each.is_of_use) if len(self._free) > _MOST_KEPT else None
            if least is not None:
                self._free.remove(least)
        for event in (least.filled, least.read) if least is not None else ():
            if event is not None:
                event.synchronize()
