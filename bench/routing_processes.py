"""The planner's experiments with real processes: steps and losses measured beside what was predicted (`pipeline.py`).

Distances are emulated, by delays at the sender; jobs take a given time. So steps are the pipelines' own, wherever this
runs, as long as the machine has the time for eight processes that mostly wait.
"""

from collections.abc import Callable
from dataclasses import dataclass

from farloop.bench.pipeline import CHAINS, DEALT, FULL, ONE_IN_FOUR, WHOLE, Losses, Makespan, alone, losses, makespan

Told = Callable[[str], None]
"""Takes a line, as soon as it is known."""

LAST = 10
"""Steps over whose losses a mean is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of the worked example by some paths."""

    name: str
    made: Makespan

    @property
    def line(self) -> str:
        """In words."""
        made = self.made
        return (
            f"{self.name}: {1e3 * made.measured_s:.1f} ms measured, {1e3 * made.predicted_s:.1f} predicted "
            f"({100 * made.error:+.0f} %)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """What a small model learns in four processes, beside one process that has all of it."""

    whole: Losses
    """Nothing left out."""
    skipping: Losses
    """A quarter of the visits left out."""
    alone: Losses
    """One process."""

    @property
    def parity(self) -> float:
        """Largest relative difference of a step's loss between the pipeline without skips and one process."""
        pairs = zip(self.whole.losses, self.alone.losses, strict=True)
        return max(abs(ours - theirs) / theirs for ours, theirs in pairs)

    @property
    def lines(self) -> list[str]:
        """In words."""
        kept, left_out = self.whole, self.skipping
        return [
            f"nothing left out: loss {_last(kept):.3f}, whole model {kept.full_loss:.3f}; one process "
            f"{_last(self.alone):.3f} and {self.alone.full_loss:.3f}; no step differs by more than {self.parity:.1e}",
            f"{100 * left_out.skipped:.0f} % left out: loss {_last(left_out):.3f}, whole model "
            f"{left_out.full_loss:.3f}, {100 * (left_out.full_loss / kept.full_loss - 1):+.1f} %",
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """What all of them found."""

    steps: tuple[Step, ...]
    learning: Learning


STEPS = (
    ("full pipelines", FULL),
    ("a quarter skipped, paths dealt at random", DEALT),
    ("a quarter skipped, paths as planned", CHAINS),
)


def processes(told: Told, *, unit_s: float = 0.01, steps: int = 40, learning_steps: int = 100) -> Processes:
    """Run all of them: 36 processes, at most eight at a time, some minutes with these numbers.

    Raises RuntimeError with its log where a process fails.
    """
    made = []
    for name, paths in STEPS:
        made.append(Step(name=name, made=makespan(paths, unit_s=unit_s, steps=steps)))
        told(made[-1].line)
    learning = Learning(
        whole=losses(WHOLE, steps=learning_steps),
        skipping=losses(ONE_IN_FOUR, steps=learning_steps),
        alone=alone(steps=learning_steps),
    )
    for line in learning.lines:
        told(line)
    return Processes(steps=tuple(made), learning=learning)


def _last(found: Losses) -> float:
    few = found.losses[-LAST:]
    return sum(few) / len(few)
