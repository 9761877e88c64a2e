"""Sweeps of flow scenarios: a row for each variant at each swept value, with means over the seeds."""

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from farloop.sim.flow.outcome import Outcome
from farloop.sim.flow.scenario import Case, FlowScenario, cases
from farloop.sim.flow.simulator import play


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One variant at one value of the swept key."""

    variant: str
    value: float | None
    outcomes: tuple[Outcome, ...]  # one for each seed
    published: float | None  # goodput that others report for it

    def mean(self, figure: Callable[[Outcome], float]) -> float:
        """Of a figure, over the seeds."""
        return statistics.fmean(map(figure, self.outcomes))

    @property
    def goodputs(self) -> list[float]:
        return [outcome.goodput for outcome in self.outcomes]

    @property
    def time_to_steps_s(self) -> float | None:
        """Clock seconds to the wanted steps; None unless every seed got there."""
        if not all(outcome.reached for outcome in self.outcomes):
            return None
        return self.mean(lambda outcome: outcome.seconds)

    def figures(self) -> dict[str, Any]:
        """For programs: means over the seeds; what the daemons count too is below `metrics`, under their names."""
        return {
            "variant": self.variant,
            "value": self.value,
            "goodput": self.mean(lambda o: o.goodput),
            "goodput_least": min(self.goodputs),
            "goodput_most": max(self.goodputs),
            "goodput_published": self.published,
            "idle_share": self.mean(lambda o: o.share(o.idle_s)),
            "down_share": self.mean(lambda o: o.share(o.down_s)),
            "lost_share": self.mean(lambda o: o.share(o.lost_s)),
            "stale_share": self.mean(lambda o: o.stale_share),
            "outer_steps": self.mean(lambda o: o.outer_steps),
            "seconds": self.mean(lambda o: o.seconds),
            "time_to_steps_s": self.time_to_steps_s,
            "lost_steps": self.mean(lambda o: o.lost_steps),
            "bytes_up": self.mean(lambda o: o.bytes_up),
            "bytes_down": self.mean(lambda o: o.bytes_down),
            "bytes_state": self.mean(lambda o: o.bytes_state),
            "machine_seconds": self.mean(lambda o: o.machine_s),
            "crashes": self.mean(lambda o: o.crashes),
            "skipped_sends": self.mean(lambda o: o.skipped),
            "metrics": _mean_of([outcome.metrics() for outcome in self.outcomes]),
        }


def run_all(
    scenario: FlowScenario, *, timeline: bool = False, watch: Callable[[Case], None] = lambda case: None
) -> list[Row]:
    """Play every case; `watch` hears of each before it is played. Raises as `play`."""
    rows = []
    reported = {(one.variant, one.value): one.goodput for one in scenario.published}
    for (variant, value), seeds in itertools.groupby(cases(scenario), key=lambda case: (case.variant, case.value)):
        outcomes = []
        for case in seeds:
            watch(case)
            outcomes.append(play(case.setting, timeline=timeline))
        published = reported.get((variant, value))
        rows.append(Row(variant=variant, value=value, outcomes=tuple(outcomes), published=published))
    return rows


def _mean_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        name: _mean_of([one[name] for one in found])
        if isinstance(value, dict)
        else statistics.fmean(one[name] for one in found)
        for name, value in found[0].items()
    }
