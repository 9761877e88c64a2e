"""A member's stages, and what makes windows wait for it (protocol I, V)."""

import dataclasses

import pytest
from plain_runs import plain_hello, plain_progress

from farloop.algo.spec import NodeId
from farloop.coordinator.decide.roster import Member
from farloop.wire.messages import NodeState, Progress
from farloop.wire.reasons import Reason

HELLO = plain_hello(device="cpu")


def member() -> Member:
    return Member(name=NodeId("a"), incarnation=1)


def training(round_index: int = 3) -> Member:
    joined = member()
    joined.connect(1, dataclasses.replace(HELLO, round=round_index), 5.0)
    return joined


def test_a_node_that_was_never_started_joins() -> None:
    joined = member()
    joined.connect(7, HELLO, 5.0)
    joined.check()
    assert (joined.stage, joined.session, joined.start_round) == ("joining", 7, None)
    assert (joined.device, joined.heard_at, joined.counts) == ("cpu", 5.0, False)


def test_a_node_that_trains_counts_at_once() -> None:
    back = training(3)
    back.check()
    assert (back.stage, back.start_round, back.counts) == ("training", 3, True)


def test_the_round_it_started_with_is_not_the_round_it_has_come_to() -> None:
    back = training(3)
    back.connect(2, dataclasses.replace(HELLO, round=8), 6.0)
    assert back.start_round == 3


@pytest.mark.parametrize(("reason", "grace_s"), [(Reason.CLOSED, 1.0), (Reason.SILENT, 0.0)])
def test_a_lost_session_leaves_it_expected_for_the_grace(reason: Reason, grace_s: float) -> None:
    lost = training()
    lost.disconnect(reason, 10.0, grace_s)
    lost.check()
    assert (lost.session, lost.gone_at, lost.reason, lost.counts) == (None, 10.0 + grace_s, reason, True)


def test_an_absent_node_does_not_count_until_it_is_back() -> None:
    lost = training()
    lost.disconnect(Reason.CLOSED, 10.0, 2.0)
    lost.gone_at, lost.absent = None, True
    lost.check()
    assert not lost.counts
    lost.connect(2, dataclasses.replace(HELLO, round=4), 20.0)
    lost.check()
    assert lost.counts and lost.reason is Reason.NONE


def test_a_connected_node_cannot_be_on_its_way_out() -> None:
    for change in ({"gone_at": 1.0}, {"absent": True}):
        odd = training()
        for name, value in change.items():
            setattr(odd, name, value)
        with pytest.raises(AssertionError):
            odd.check()


def test_a_node_cannot_train_without_a_first_round() -> None:
    with pytest.raises(AssertionError):
        Member(name=NodeId("a"), incarnation=1, stage="training").check()


def report(steps: int, *, blocked_s: float = 0.0, tokens: int = 0, state: NodeState = "training") -> Progress:
    return plain_progress(
        state=state, inner_steps=steps, tokens=tokens, loss=None, tokens_per_s=0.0, blocked_s=blocked_s
    )


def told(*reports: tuple[float, int, float]) -> Member:
    """A node that reports at these times: inner steps, seconds blocked."""
    node = training()
    for at, steps, blocked_s in reports:
        node.report(report(steps, blocked_s=blocked_s), at)
    return node


def test_a_node_s_speed_is_known_from_its_second_step_on() -> None:
    assert told((1.0, 0, 0.0), (2.0, 1, 0.0)).steps_per_s == 0.0
    assert told((1.0, 0, 0.0), (2.0, 1, 0.0), (4.0, 3, 0.0)).steps_per_s == 1.0


def test_time_in_which_it_stood_still_is_not_held_against_it() -> None:
    """A: else who waits for slow nodes would look as slow as they are, and all would do the same steps."""
    assert told((1.0, 1, 0.0), (9.0, 2, 7.0)).steps_per_s == 1.0


def test_reports_between_two_steps_tell_nothing() -> None:
    """A step may take longer than the time between reports."""
    assert told((1.0, 1, 0.0), (2.0, 1, 0.0), (3.0, 1, 0.0), (5.0, 3, 0.0)).steps_per_s == 0.5


def test_a_speed_follows_what_was_measured_last() -> None:
    node = told((1.0, 1, 0.0), (2.0, 2, 0.0))
    node.report(report(5), 3.0)
    assert node.steps_per_s == 2.0


def test_a_speed_is_of_steps_whatever_the_batch() -> None:
    """A: H of a node is ⌊H · speed ÷ best speed⌋ steps. Here batches differ, and steps take as long."""
    large, small = training(), training()
    for at, steps in ((1.0, 1), (2.0, 2), (3.0, 3)):
        large.report(report(steps, tokens=4000 * steps), at)
        small.report(report(steps, tokens=1000 * steps), at)
    assert large.steps_per_s == small.steps_per_s == 1.0


def test_steps_that_go_back_or_come_again_are_no_progress() -> None:
    """V: a node that reports 5, 6, 5, 6, … would never have stalled."""
    node = told((10.0, 5, 0.0), (11.0, 6, 0.0), (12.0, 5, 0.0), (13.0, 6, 0.0), (14.0, 6, 0.0))
    assert node.progress_at == 11.0
    assert node.seconds_per_step == 1.0, "measured once"
    node.report(report(7), 15.0)
    assert node.progress_at == 15.0


def test_a_node_that_pauses_does_not_count_until_it_goes_on() -> None:
    """D: its operator wants it so, and no window waits for it."""
    node = training()
    node.report(report(1, state="paused"), 6.0)
    assert node.paused and not node.counts and node.stalls_at is None
    node.report(report(1), 7.0)
    assert node.counts
