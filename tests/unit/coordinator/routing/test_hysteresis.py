"""When a new plan is worth the switch."""

from farloop.coordinator.routing.sync_plan import worth_switching


def test_ten_percent_is_what_a_switch_is_worth() -> None:
    assert worth_switching(10.0, 8.9) and not worth_switching(10.0, 9.1)
