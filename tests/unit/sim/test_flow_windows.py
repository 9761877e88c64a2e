"""A window knows whom it waits for, and a grace is as long as others have lately been late."""

from farloop.sim.flow.node import Delta, Grace, Window


def delta(node: int, window: int = 1) -> Delta:
    return Delta(node=node, fragment=0, window=window, round=0, sent_at=0, steps=1, seconds=1.0)


def test_a_window_is_complete_once_all_came_that_were_not_removed() -> None:
    window = Window(0, 1, {1, 2, 3}, 0.0)
    window.add(delta(1))
    window.remove(2)
    window.remove(2)
    assert not window.all_came
    window.add(delta(3))
    assert window.all_came
    window.welcome_back(2)
    assert not window.all_came
    window.add(delta(2))
    assert window.all_came


def test_who_was_not_expected_is_merged_and_not_waited_for() -> None:
    window = Window(0, 1, {1}, 0.0)
    window.add(delta(9))
    assert not window.all_came
    window.expect(5)
    window.add(delta(1))
    assert not window.all_came and set(window.came) == {1, 9}


def test_only_deltas_that_name_the_window_count_for_a_quorum() -> None:
    window = Window(0, 7, {1, 2}, 0.0)
    window.add(delta(1, window=6))
    assert (window.timely, len(window.came)) == (0, 1)
    window.add(delta(2, window=7))
    assert window.timely == 1


def test_the_grace_is_unknown_until_somebody_was_late_and_then_lets_most_of_them_in() -> None:
    grace = Grace()
    assert grace.seconds is None
    for number in range(1, 11):
        window = Window(0, number, {1, 2}, 100.0 * number)
        grace.came(delta(1, number), 100.0 * number + 10)
        grace.has_quorum(window, 100.0 * number + 10, max_staleness=1)
        if number == 1:
            assert grace.seconds is None
        grace.came(delta(2, number), 100.0 * number + 10 + 0.1 * number)
    assert grace.seconds is not None and 0.7 < grace.seconds <= 1.0


def test_who_is_later_than_half_of_the_time_to_a_quorum_is_not_waited_for() -> None:
    grace = Grace()
    window = Window(0, 1, {1, 2}, 0.0)
    grace.has_quorum(window, 10.0, max_staleness=1)
    grace.came(delta(2), 18.0)
    assert grace.seconds == 0.0
