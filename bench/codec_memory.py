"""How much memory encoding a fragment, and summing a window, takes beyond what they are given.

Linux alone: the kernel keeps a process's peak, and forgets it on request (`/proc/self/clear_refs`).
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from farloop.algo.outer import PLAIN_AVERAGE
from farloop.algo.spec import RoundPlan
from farloop.coordinator.aggregator import Step, merge
from farloop.quant.blob import HEADER_BYTES, BlobHeader, as_tensor, blob_bytes, seal
from farloop.quant.codec import Codec, flat
from farloop.quant.registry import spelling_of

CONTRIBUTORS = 8

_M_MMAP_THRESHOLD = -3


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """Peak memory of one operation, above what was there before."""

    codec: str
    op: str
    elements: int
    extra_bytes: int
    bound_bytes: int
    """The payload and one fragment in fp32."""


def can_measure_memory() -> bool:
    """Whether this system tells peaks, and lets them be forgotten."""
    return Path("/proc/self/clear_refs").exists()


def measure_memory(codec: Codec, elements: int) -> list[MemoryRow]:
    """Encoding one fragment into a blob, and a window of eight blobs summed as the coordinator does it."""
    fragment = flat(elements)
    name = spelling_of(codec)
    bound = codec.payload_bytes(fragment) + 4 * elements
    x = torch.randn(elements, generator=torch.Generator().manual_seed(0)) * 1e-3
    header = BlobHeader(codec=codec, fragment=fragment, version=1, base=0, epoch=0)

    def encode() -> bytearray:
        blob = bytearray(blob_bytes(codec, fragment))
        codec.encode_into(x, as_tensor(blob)[HEADER_BYTES:], fragment, seed=header.seed)
        return seal(header, blob)

    blob = encode()  # compiled, and one of what a window is made of
    rows = [MemoryRow(codec=name, op="encode", elements=elements, extra_bytes=_peak_of(encode), bound_bytes=bound)]
    inputs = [(bytearray(blob), 1 / CONTRIBUTORS) for _ in range(CONTRIBUTORS)]
    step = Step(fragment=fragment, version=1, round=RoundPlan(index=0, start=0, length=1), outer=PLAIN_AVERAGE, epoch=0)

    def window() -> torch.Tensor:
        return merge(inputs, step, [name] * len(inputs), [(0, 1)] * len(inputs))

    window()
    extra = _peak_of(window)
    rows.append(MemoryRow(codec=name, op=f"sum{CONTRIBUTORS}", elements=elements, extra_bytes=extra, bound_bytes=bound))
    return rows


def _peak_of(work: Callable[[], object]) -> int:
    """Bytes between the resident memory before and its highest point while `work` runs."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 16)  # what is freed goes back, and is counted when it is taken again
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    result = work()
    peak = _status("VmHWM")
    del result
    return max(0, peak - before)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no {field}")
