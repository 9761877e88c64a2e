"""A member's stages, and what makes windows wait for it (protocol I, V)."""

import dataclasses

import pytest

from farloop.algo.spec import NodeId
from farloop.coordinator.roster import Member
from farloop.wire.messages import Hello
from farloop.wire.reasons import Reason

HELLO = Hello(
    protocol_min=1,
    protocol_max=1,
    node=NodeId("a"),
    incarnation=1,
    fingerprint=None,
    layout=None,
    epoch_seen=0,
    anchors=(),
    round=None,
    device="cpu",
)


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


@pytest.mark.parametrize(("reason", "grace_s"), [(Reason.CLOSED, 2.0), (Reason.SILENT, 0.0)])
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
