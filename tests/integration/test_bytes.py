"""What a run says that it moved, against a count at the sockets."""

import pytest
from keyring import authorize, keys_of, new_keys
from loopback import PACED, NewRun, Run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

WITHIN = 0.01


@pytest.mark.parametrize("encrypted", [False, True])
def test_all_bytes_that_cross_the_sockets_are_counted(new_run: NewRun, encrypted: bool) -> None:
    """Relays between the nodes and the coordinator count the payload of every TCP connection, both ways."""
    run: Run = new_run(steps=24, **PACED)
    keys = new_keys(run, "coordinator", "a", "b") if encrypted else None
    if keys is not None:
        authorize(run, "a", "b")
    run.start_coordinator()
    for name in "ab":
        run.start_node(name, link="1gbit/0ms", **(keys_of(keys, name) if keys is not None else {}))
    status = run.until_done()
    crossed = {name: (relay.bytes_up, relay.bytes_down) for name, relay in run.relays.items()}
    for node in status["nodes"]:
        up, down = crossed[node["name"]]
        by_kind = node["bytes_by_kind"]
        assert node["bytes_up"] == pytest.approx(up, rel=WITHIN), (by_kind, crossed)
        assert node["bytes_down"] == pytest.approx(down, rel=WITHIN), (by_kind, crossed)
        assert sum(value for value in by_kind.values()) == node["bytes_up"] + node["bytes_down"]  # type: ignore[misc]
