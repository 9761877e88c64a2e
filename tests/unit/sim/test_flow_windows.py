"""A window knows whom it waits for."""

from farloop.sim.flow.node import Delta, Window


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
