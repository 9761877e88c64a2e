"""A run's smallest opening messages, and two sessions that have exchanged them."""

from collections.abc import Callable

import pytest
from plain_runs import plain_hello, plain_spec

from farloop.wire.limits import Limits, Timing
from farloop.wire.messages import Hello, Role, Welcome
from farloop.wire.session import Session, State

OpenPair = Callable[..., tuple[Session, Session]]


@pytest.fixture(scope="session")
def hello() -> Hello:
    return plain_hello()


@pytest.fixture(scope="session")
def welcome() -> Welcome:
    return Welcome(
        protocol=1,
        epoch=3,
        spec=plain_spec(),
        lane_token=b"one-time token",
        versions=(0,),
        windows=(),
        rounds=(),
    )


@pytest.fixture(scope="session")
def open_pair(hello: Hello, welcome: Welcome) -> OpenPair:
    """Makes a node and a coordinator, open at time 0, with bulk lane 1 and nothing left to say."""

    def make(limits: Limits | None = None, timing: Timing | None = None) -> tuple[Session, Session]:
        node = Session(Role.NODE, 0.0, limits=limits, timing=timing)
        coordinator = Session(Role.COORDINATOR, 0.0, limits=limits, timing=timing)
        node.send(hello, 0.0)
        for lane, parts in node.outgoing(0.0):
            coordinator.receive(lane, parts, 0.0)
        coordinator.send(welcome, 0.0)
        for lane, parts in coordinator.outgoing(0.0):
            node.receive(lane, parts, 0.0)
        for session in (node, coordinator):
            session.events()
            session.lane_opened(1)
            assert session.state is State.OPEN
        return node, coordinator

    return make
