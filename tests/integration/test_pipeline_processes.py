"""Eight processes with emulated distances: the paths that arithmetic prefers are those that are faster."""

import pytest

from farloop.bench.pipeline import CHAINS, DEALT, FULL, ONE_IN_FOUR, WHOLE, alone, losses, makespan

pytestmark = [pytest.mark.integration, pytest.mark.slow]  # 24 processes, and times are compared


@pytest.mark.timeout(600)
def test_the_planned_chains_beat_the_full_pipeline_and_chance_by_the_clock() -> None:
    """15.75 against 22.25 and 31.75 units; a step is never shorter than the machines on virtual time say."""
    units = {CHAINS: 15.75, FULL: 22.25, DEALT: 31.75}
    made = [makespan(paths, unit_s=0.03, steps=6) for paths in units]
    for one, least in zip(made, units.values(), strict=True):
        assert one.predicted_s == pytest.approx(least * 0.03)
        assert min(one.steps_s) >= 0.97 * one.predicted_s
    chains, full, dealt = (one.measured_s for one in made)
    assert chains < full < dealt, made


@pytest.mark.timeout(300)
def test_four_processes_learn_what_one_does_until_something_is_left_out() -> None:
    whole, skipping = (losses(paths, steps=5) for paths in (WHOLE, ONE_IN_FOUR))
    one = alone(steps=5)
    assert whole.losses == pytest.approx(one.losses, rel=1e-4) and whole.full_loss == pytest.approx(
        one.full_loss, rel=1e-3
    )
    assert skipping.skipped == 0.25 and skipping.losses != pytest.approx(one.losses, rel=1e-4)
