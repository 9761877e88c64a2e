"""The curve of the status page."""

import re

from hypothesis import given
from hypothesis import strategies as st

from farloop.monitoring.page import HEIGHT, MOST_POINTS, WIDTH, curve, thinned

losses = st.one_of(st.none(), st.floats(-1e30, 1e30, allow_nan=False))


def places(svg: str) -> list[tuple[float, float]]:
    """Where the line goes through."""
    path = re.search(r' d="([^"]*)"', svg)
    assert path
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", path[1])]


@given(st.lists(st.tuples(st.floats(0, 1e9), losses), max_size=30), st.floats(1, 1e9))
def test_a_curve_stays_inside_its_picture(points: list[tuple[float, float | None]], last_step: float) -> None:
    svg = curve(points, last_step=last_step)
    if sum(loss is not None for _, loss in points) < 2:
        assert svg == ""
        return
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in places(svg))
    assert len(places(svg)) == sum(loss is not None for _, loss in points)


def test_a_lower_loss_is_lower_and_a_later_step_further_right() -> None:
    (x0, y0), (x1, y1) = places(curve([(0, 5.5), (600, 2.1)], last_step=2000))
    assert x0 < x1 and y0 < y1


def test_what_is_no_number_breaks_the_line() -> None:
    svg = curve([(0, 5.0), (1, 4.0), (2, None), (3, 3.0), (4, 2.0)], last_step=4)
    assert len(re.findall(r"M[-\d.]+ ", svg)) == 2


def test_it_says_in_words_what_it_shows() -> None:
    svg = curve([(0, 5.5), (600, 2.1)], last_step=2000)
    assert 'aria-label="validation loss from 5.500 to 2.100 at step 600 of 2,000"' in svg


def test_the_numbers_beside_it_are_round_and_enclose_the_losses() -> None:
    ticks = [float(tick) for tick in re.findall(r'class="y"[^>]*>([^<]+)<', curve([(0, 5.43), (9, 1.27)], last_step=9))]
    assert ticks == [0, 2, 4, 6]
    ticks = [float(tick) for tick in re.findall(r'class="y"[^>]*>([^<]+)<', curve([(0, 2.0), (9, 2.0)], last_step=9))]
    assert min(ticks) <= 2 <= max(ticks)


def test_a_long_run_is_thinned_out_with_both_ends_kept() -> None:
    points = [(float(step), 1.0) for step in range(10_000)]
    kept = thinned(points)
    assert (len(kept), kept[0], kept[-1]) == (MOST_POINTS, points[0], points[-1])
