"""Eight processes with emulated distances: the paths that arithmetic prefers are those that are faster."""

import pytest

from farloop.bench.pipeline import CHAINS, FULL, makespan

pytestmark = [pytest.mark.integration, pytest.mark.slow]  # sixteen processes, and times are compared


@pytest.mark.timeout(400)
def test_the_planned_chains_beat_the_full_pipeline_by_the_clock() -> None:
    """15.75 against 22.25 units; a step is never shorter than the machines on virtual time say."""
    chains, full = (makespan(paths, unit_s=0.03, steps=6) for paths in (CHAINS, FULL))
    assert chains.predicted_s == pytest.approx(15.75 * 0.03) and full.predicted_s == pytest.approx(22.25 * 0.03)
    for one in (chains, full):
        assert min(one.steps_s) >= 0.97 * one.predicted_s
    assert chains.measured_s < full.measured_s, (chains, full)
