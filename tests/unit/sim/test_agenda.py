"""Virtual time and processes."""

from farloop.sim.virtual_time import EventQueue, Process


def play(agenda: EventQueue) -> None:
    while agenda.step():
        pass


def test_actions_happen_in_the_order_of_their_time_and_then_of_their_entry() -> None:
    agenda, seen = EventQueue(), list[tuple[float, str]]()
    for when, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        agenda.at(when, lambda name=name: seen.append((agenda.now, name)))  # type: ignore[misc]
    play(agenda)
    assert seen == [(1.0, "a"), (1.0, "b"), (2.0, "c")]


def test_an_action_for_the_past_happens_now() -> None:
    agenda, seen = EventQueue(), list[float]()
    agenda.at(3.0, lambda: agenda.at(1.0, lambda: seen.append(agenda.now)))
    play(agenda)
    assert seen == [3.0]


def test_nothing_happens_to_a_dead_process() -> None:
    agenda = EventQueue()
    process, seen = Process(agenda), list[str]()
    process.after(1.0, lambda: seen.append("timer"))
    process.kill()
    process.deliver(lambda: seen.append("frame"))
    play(agenda)
    assert seen == []


def test_a_stopped_process_reads_what_waits_before_its_timers_fire() -> None:
    """Protocol C."""
    agenda = EventQueue()
    process, seen = Process(agenda), list[str]()
    process.stop()
    process.after(1.0, lambda: seen.append("timer"))
    agenda.at(2.0, lambda: process.deliver(lambda: seen.append("frame")))
    agenda.at(3.0, process.go_on)
    play(agenda)
    assert seen == ["frame", "timer"]
