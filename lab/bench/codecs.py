"""The codec benchmark: plans, runs and reports what codec_speed and codec_quality measure."""

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba
import torch

from farloop.lab.bench.codec_quality import DISTRIBUTIONS, QualityRow, codec_quality, outer_sample, random_sample
from farloop.lab.bench.codec_speed import (
    STEADY,
    Bench,
    MemoryRow,
    Pace,
    SpeedRow,
    Where,
    can_measure_memory,
    codec_rows,
    measure_memory,
    reference_rows,
    with_usual_copies,
)
from farloop.lab.bench.training import Settings, cpu_threads, default_threads, outer_gradients
from farloop.local.machine import machine, source_commit, text_of
from farloop.quant.codec import Codec
from farloop.quant.registry import spelling_of

OPS = ("encode", "decode", "add", "sum8", "fused", "outer")

ELEMENTS = {"cpu": 64 << 20, "cuda": 256 << 20}  # 256 MiB and 1 GiB of fp32: far more than any cache
QUICK_ELEMENTS = 16 << 20
MEMORY_ELEMENTS = 32 << 20  # a fragment of 128 MiB: what an interpreter does besides does not show

BRIEF = 8 << 20
"""Elements for a first impression: as large as a cache, and copies before every call take the rest of it."""

BRIEF_S = 5.0  # codecs are timed for so long, in the order of the list; what is left then, is left out

LONG, SHORT = Settings(), Settings(model="nano", nodes=2, rounds=3)
"""Runs that outer gradients are taken from: under a minute, and a few seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    codecs: tuple[Codec, ...]
    places: tuple[Where, ...]
    elements: int | None = None  # of a vector that is timed; None: `ELEMENTS`
    ops: tuple[str, ...] = OPS
    pace: Pace = STEADY
    samples: tuple[str, ...] = tuple(DISTRIBUTIONS)
    side: int = 1024  # of the random matrices
    outer: Settings | None = LONG  # the run whose outer gradients codecs are judged on; None: they are not
    folder: Path | None = None  # where outer gradients are kept
    reference: bool = True  # whether codecs with a fast path are timed by their plain torch too
    memory: int | None = None  # elements of a fragment whose memory is measured; None: it is not
    deadline_s: float = math.inf  # no codec's timing begins later than this after the start


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Callbacks for progress."""

    stage: Callable[[str, int], None] = lambda title, parts: None  # a stage of so many parts begins
    part: Callable[[str], None] = lambda name: None  # a part of it begins


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecReport:
    """All that was found."""

    memcpy_gb_per_s: float  # the fastest copy on the CPU, any number of threads; without a CPU in the plan, on the GPU
    elements: dict[str, int]  # by device: of a vector that was timed
    speed: tuple[SpeedRow, ...]
    quality: tuple[QualityRow, ...]
    memory: tuple[MemoryRow, ...]  # peaks, beside what they may be; none where the system does not tell
    outer: str | None  # the run that the outer gradients are from
    cache_bytes: int  # of the CPU's last level; 0 where the system does not say
    gpu: str | None
    numba: str
    load: float | None
    """Processes that wanted the CPU in the minute before: more than a few, and the numbers are others' too."""
    machine: str
    commit: str | None

    def plain(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def fits_cache(self) -> bool:
        """Whether what was timed on the CPU may have come out of the cache: then it says nothing of memory."""
        return 4 * self.elements.get("cpu", 1 << 60) < 2 * self.cache_bytes


def run(plan: Plan, *, watch: Watch | None = None) -> CodecReport:
    """Measure all of it, quality first: it does not mind a busy machine.

    Raises:
        CorpusError: there is no text to take outer gradients from.
    """
    watch, began = watch or Watch(), time.monotonic()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    quality = tuple(_quality(plan, watch))
    speed = tuple(_speed(plan, watch, began))
    memory = tuple(_memory(plan, watch))
    copies = [row for row in speed if row.op == "copy"]
    on_cpu = [row for row in copies if row.device == "cpu"] or copies
    return CodecReport(
        memcpy_gb_per_s=max((row.gb_per_s for row in on_cpu), default=0.0),
        elements={where.device: _elements(plan, where) for where in plan.places},
        speed=speed,
        quality=quality,
        memory=memory,
        outer=plan.outer.describe() if plan.outer else None,
        cache_bytes=_last_cache_bytes(Path("/sys/devices/system/cpu/cpu0/cache")),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        numba=numba.__version__,
        load=load,
        machine=machine(),
        commit=source_commit(),
    )


def brief(codecs: Sequence[Codec]) -> CodecReport:
    """A first impression within seconds: a Gaussian, encode and decode, on one core."""
    plan = Plan(
        codecs=tuple(codecs),
        places=(Where(device="cpu", threads=1),),
        elements=BRIEF,
        ops=("encode", "decode"),
        pace=Pace(budget_s=0.04, least=1),
        samples=("gauss",),
        outer=None,
        reference=False,
        deadline_s=BRIEF_S,
    )
    with cpu_threads(1):
        return run(plan)


def _quality(plan: Plan, watch: Watch) -> Iterator[QualityRow]:
    samples = [random_sample(name, plan.side) for name in plan.samples]
    if plan.outer:
        watch.stage("outer gradients of a short run", plan.outer.inner_steps)
        samples.append(outer_sample(outer_gradients(plan.outer, folder=plan.folder, on_step=lambda: watch.part(""))))
    watch.stage("quality", len(samples) * len(plan.codecs))
    for sample in samples:
        for codec in plan.codecs:
            watch.part(f"{spelling_of(codec)} on {sample.name}")
            yield codec_quality(codec, sample)


def _speed(plan: Plan, watch: Watch, began: float) -> Iterator[SpeedRow]:
    for where in plan.places:
        with cpu_threads(where.threads):
            yield from with_usual_copies(list(_speed_at(where, plan, watch, began)))


def _speed_at(where: Where, plan: Plan, watch: Watch, began: float) -> Iterator[SpeedRow]:
    watch.stage(where.describe(), 1 + len(plan.codecs))
    watch.part("buffers")
    bench = Bench(where, _elements(plan, where), plan.pace)
    yield bench.memcpy()
    for codec in plan.codecs:
        if time.monotonic() - began > plan.deadline_s:
            break
        watch.part(spelling_of(codec))
        yield from codec_rows(bench, codec, plan.ops)
        if plan.reference:
            yield from reference_rows(bench, codec, plan.ops)


def _memory(plan: Plan, watch: Watch) -> Iterator[MemoryRow]:
    if plan.memory is None or not can_measure_memory():
        return
    watch.stage("memory", len(plan.codecs))
    for codec in plan.codecs:
        watch.part(spelling_of(codec))
        yield from measure_memory(codec, plan.memory)


def _elements(plan: Plan, where: Where) -> int:
    return plan.elements or ELEMENTS[where.device]


def places(threads: Sequence[int] | None = None, devices: Sequence[str] | None = None) -> tuple[Where, ...]:
    """The CPU with these numbers of threads, else with 1, 2, 4, … and all; and the GPU, where there is one."""
    cores = os.cpu_count() or 1
    wanted = devices or (("cpu", "cuda") if torch.cuda.is_available() else ("cpu",))
    on_cpu = [Where(device="cpu", threads=count) for count in threads or default_threads(cores)]
    return (*(on_cpu if "cpu" in wanted else ()), *([Where(device="cuda", threads=cores)] if "cuda" in wanted else ()))


def _last_cache_bytes(folder: Path) -> int:
    sizes = [text_of(path / "size").strip() for path in sorted(folder.glob("index*"))]
    units = {"K": 1 << 10, "M": 1 << 20}
    return max(
        (int(size[:-1]) * units[size[-1]] for size in sizes if size[:-1].isdecimal() and size[-1] in units), default=0
    )
