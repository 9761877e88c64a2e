"""What `join` says when it cannot: one line each, and no thread is left behind."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from farloop.monitoring.endpoint import EndpointError
from farloop.node.errors import BadAddress, StateUnusable, Unreachable
from farloop.node.library import join
from farloop.wire.keys import KeyFileError

pytestmark = pytest.mark.integration

NOWHERE = "tcp://127.0.0.1:1"


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def test_what_is_wrong_with_the_arguments_is_one_line(tmp_path: Path) -> None:
    model, state = nn.Linear(1, 1), tmp_path / "state"
    with pytest.raises(ValueError, match="name"):
        join(NOWHERE, model, name="not a name!", state_dir=state)
    with pytest.raises(BadAddress, match="not 'coordinator:7700'"):
        join("coordinator:7700", model, name="a", state_dir=state)
    with pytest.raises(ValueError, match="go together"):
        join(NOWHERE, model, name="a", state_dir=state, key=tmp_path / "a.key")
    with pytest.raises(KeyFileError):
        join(NOWHERE, model, name="a", state_dir=state, key=tmp_path / "a.key", server_key=tmp_path / "c.pub")
    with pytest.raises(EndpointError, match="host:port"):
        join(NOWHERE, model, name="a", state_dir=state, http="9710")
    (tmp_path / "file").write_text("")
    with pytest.raises(StateUnusable):
        join(NOWHERE, model, name="a", state_dir=tmp_path / "file")


def test_a_coordinator_that_does_not_answer_in_time_is_one_line_and_may_be_tried_again(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match=r"no answer from the coordinator within 0\.1 s") as caught:
        join(NOWHERE, nn.Linear(1, 1), name="a", state_dir=tmp_path, timeout_s=0.1)
    assert caught.value.retriable and caught.value.exit_code == 5
