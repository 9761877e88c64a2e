"""A node joins behind a link that carries less than the run commits: the run goes on, and it takes part once it can."""

import pytest
from loopback import PACED, NewRun, merged_since

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

MORE_THAN_A_SESSION_SENDS = 300
"""Updates: with 256 of them under way to one node the coordinator ended, `256 blobs are being sent`."""


def test_a_joiner_behind_a_thin_link_stops_nobody_and_takes_part_once_its_link_allows(new_run: NewRun) -> None:
    run = new_run(steps=20_000, **PACED)
    coordinator = run.start_coordinator()
    run.start_metronome("a", pace_s=0.01)
    run.start_node("b")
    run.until("both train", lambda s: merged_since(s, [0, 0, 0], "b"))
    run.start_node("c", link="64kbit/50ms")
    before = run.until("c has come", lambda s: any(n["name"] == "c" and n["connected"] for n in s["nodes"]))["versions"]
    wanted = sum(before) + MORE_THAN_A_SESSION_SENDS
    after = run.until("the others go on", lambda s: sum(s["versions"]) > wanted)
    assert coordinator.running
    run.change_link("c", "100mbit/1ms")
    versions = after["versions"]
    run.until("c takes part", lambda s: merged_since(s, versions, "c"))
    assert "session ended" not in coordinator.said
