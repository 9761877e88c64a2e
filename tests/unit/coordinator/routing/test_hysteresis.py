"""When plans are made anew."""

from farloop.coordinator.routing.hysteresis import due, worth_switching


def asked(*, members: bool = False, flagged: bool = False, factors: tuple[float, ...] = (), since: int = 9) -> str:
    return due(members_changed=members, flagged=flagged, link_factors={("a", "b"): factors}, since_last=since)


def test_ten_percent_is_what_a_switch_is_worth() -> None:
    assert worth_switching(10.0, 8.9) and not worth_switching(10.0, 9.1)


def test_a_reason_is_needed() -> None:
    assert asked() == ""
    assert asked(members=True) == "nodes came or left"
    assert asked(flagged=True) == "a node or link was found slow"


def test_a_link_has_to_stay_changed() -> None:
    assert asked(factors=(1.0, 1.5, 1.5)) == "" and asked(factors=(1.5, 1.5)) == ""
    assert asked(factors=(1.0, 1.5, 1.5, 1.6)) == "the link from a to b changed by 1.6 for 3 rounds"
    assert asked(factors=(0.6, 0.6, 0.6)) == "the link from a to b changed by 0.6 for 3 rounds"


def test_not_twice_in_two_rounds() -> None:
    assert asked(members=True, since=1) == ""
