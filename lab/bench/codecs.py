"""The codec benchmark: plans, runs and reports what codec_speed and codec_quality measure."""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from farloop.lab.bench.codec_quality import DISTRIBUTIONS, QualityRow, codec_quality, outer_sample, random_sample
from farloop.lab.bench.codec_speed import STEADY, Bench, Pace, SpeedRow, Where, codec_rows
from farloop.lab.bench.training import Settings, cpu_threads, default_threads, outer_gradients
from farloop.quant.codec import Codec
from farloop.quant.registry import spelling_of

OPS = ("encode", "decode", "add", "sum8", "fused", "outer")

ELEMENTS = {"cpu": 64 << 20, "cuda": 256 << 20}  # 256 MiB and 1 GiB of fp32: far more than any cache
QUICK_ELEMENTS = 16 << 20

BRIEF = 8 << 20
"""Elements for a first impression: as large as a cache, and copies before every call take the rest of it."""

BRIEF_S = 5.0  # codecs are timed for so long, in the order of the list; what is left then, is left out

LONG, SHORT = Settings(), Settings(model="nano", nodes=2, rounds=3)
"""Runs that outer gradients are taken from: under a minute, and a few seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    codecs: tuple[Codec, ...]
    places: tuple[Where, ...]
    elements: int | None = None  # of a vector that is timed; None: `ELEMENTS`
    ops: tuple[str, ...] = OPS
    pace: Pace = STEADY
    samples: tuple[str, ...] = tuple(DISTRIBUTIONS)
    side: int = 1024  # of the random matrices
    outer: Settings | None = LONG  # the run whose outer gradients codecs are judged on; None: they are not
    folder: Path | None = None  # where outer gradients are kept
    deadline_s: float = math.inf  # no codec's timing begins later than this after the start


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecReport:
    elements: dict[str, int]  # by device: of a vector that was timed
    speed: tuple[SpeedRow, ...]
    quality: tuple[QualityRow, ...]
    outer: str | None  # the run that the outer gradients are from


def run(plan: Plan, say: Callable[[str], None] = lambda what: None) -> CodecReport:
    """Measure all of it, quality first: it does not mind a busy machine. `say`: what begins now.

    Raises CorpusError: there is no text to take outer gradients from.
    """
    began = time.monotonic()
    quality = tuple(_quality(plan, say))
    return CodecReport(
        elements={where.device: _elements(plan, where) for where in plan.places},
        speed=tuple(_speed(plan, say, began)),
        quality=quality,
        outer=plan.outer.describe() if plan.outer else None,
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
        deadline_s=BRIEF_S,
    )
    with cpu_threads(1):
        return run(plan)


def _quality(plan: Plan, say: Callable[[str], None]) -> Iterator[QualityRow]:
    samples = [random_sample(name, plan.side) for name in plan.samples]
    if plan.outer:
        say("outer gradients of a short run")
        samples.append(outer_sample(outer_gradients(plan.outer, folder=plan.folder)))
    for sample in samples:
        say(f"errors: {sample.name}")
        for codec in plan.codecs:
            yield codec_quality(codec, sample)


def _speed(plan: Plan, say: Callable[[str], None], began: float) -> Iterator[SpeedRow]:
    for where in plan.places:
        with cpu_threads(where.threads):
            bench = Bench(where, _elements(plan, where), plan.pace)
            yield bench.memcpy()
            for codec in plan.codecs:
                if time.monotonic() - began > plan.deadline_s:
                    break
                say(f"{where.describe()}: {spelling_of(codec)}")
                yield from codec_rows(bench, codec, plan.ops)


def _elements(plan: Plan, where: Where) -> int:
    return plan.elements or ELEMENTS[where.device]


def places(threads: Sequence[int] | None = None, devices: Sequence[str] | None = None) -> tuple[Where, ...]:
    """The CPU with these numbers of threads, else with 1, 2, 4, … and all; and the GPU, where there is one."""
    cores = os.cpu_count() or 1
    wanted = devices or (("cpu", "cuda") if torch.cuda.is_available() else ("cpu",))
    on_cpu = [Where(device="cpu", threads=count) for count in threads or default_threads(cores)]
    return (*(on_cpu if "cpu" in wanted else ()), *([Where(device="cuda", threads=cores)] if "cuda" in wanted else ()))
