"""What ends a process at once, with one line and the right exit code, while the others go on."""

import sys

import pytest
import torch
from loopback import NewRun, assert_all_agree, assert_one_line, merged_since, own_run
from safetensors.torch import load_file

from farloop.config.exit_codes import ExitCode
from farloop.coordinator.decide.records import NodeLeft
from farloop.wire.reasons import Reason

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def test_who_wants_another_run_or_brings_other_data_is_refused_and_a_taken_port_is_one_line(new_run: NewRun) -> None:
    run = new_run(steps=120, method="diloco", h=2, nodes=1)
    coordinator, a = run.start_coordinator(), run.start_metronome("a")
    begun = run.until("a trains", lambda status: merged_since(status, [0], "a"))

    elsewhere = run.start_node("elsewhere", fingerprint="0123456789abcdef")
    run.tables["data"] = {"path": sys.modules["typing"].__file__ or ""}
    unread = run.start_node("unread")
    same_port = run.start_second_coordinator(same_state=False, name="same-port")
    same_page = run.start_second_coordinator("coordinator.bind=tcp://127.0.0.1:0", same_state=False, name="same-page")

    assert run.until_ended(elsewhere) == ExitCode.REFUSED
    assert_one_line(elsewhere, "0123456789abcdef", begun["run"]["fingerprint"])
    assert run.until_ended(unread) == ExitCode.REFUSED
    assert_one_line(unread, "this node's corpus is", "give every node the same files")
    assert run.until_ended(same_port) == ExitCode.USAGE
    assert_one_line(same_port, f"tcp://127.0.0.1:{run.port} is in use")
    assert run.until_ended(same_page) == ExitCode.USAGE
    assert_one_line(same_page, f"port {run.http} on 127.0.0.1 is in use")

    run.until("a goes on", lambda status: merged_since(status, begun["versions"], "a"))
    run.hurry()
    status = run.until_done(coordinator, a)
    assert_all_agree(run, status, "a")


def test_a_node_whose_weights_break_ends_and_one_with_another_model_never_begins(new_run: NewRun) -> None:
    """Nothing of the broken weights reaches any node, and the other node goes on."""
    run = own_run(new_run, steps=120, h=10, nodes=2, method="diloco")
    run.on_tape = True
    coordinator = run.start_coordinator()
    wide = run.start_own_node("wide", "--width", "65")
    assert run.until_ended(wide) == ExitCode.REFUSED
    assert "'inward.bias' has shape (65,) here, (64,) in the run" in wide.last_line
    assert "Traceback" not in wide.said
    assert "node=wide" in coordinator.said and "'inward.bias' has shape (65,) here" in coordinator.said

    whole, broken = run.start_own_node("whole"), run.start_own_node("broken", "--poison", "29")
    assert run.until_ended(broken) == ExitCode.BROKEN_NUMBERS
    assert "'outward.bias' holds NaN or Inf after inner step 30" in broken.last_line
    assert "Traceback" not in broken.said

    status = run.until_done(coordinator, whole)
    assert_all_agree(run, status, "whole")
    assert status["versions"] == [12]
    for name, weights in load_file(run.state_dir / "model.safetensors").items():
        assert torch.isfinite(weights).all(), name
    merged = {event["version"]: event["merged"] for event in run.events("commit")}
    assert merged[2] == ["broken", "whole"], "before the NaN it took part"
    assert merged[3] == merged[12] == ["whole"]
    left = [record.reason for record in run.records() if isinstance(record, NodeLeft) and record.node == "broken"]
    assert left == [Reason.NON_FINITE], "the coordinator is told why, and does not wait for it"


@pytest.mark.slow
def test_a_node_with_other_frozen_weights_is_refused_and_the_others_go_on(new_run: NewRun) -> None:
    run = own_run(new_run, steps=100_000, h=10, nodes=1, method="diloco")
    run.start_coordinator()
    run.start_own_node("a", "--base", "1", "--pace-s", "0.05")
    begun = run.until("a trains", lambda status: merged_since(status, [0], "a"))
    other = run.start_own_node("other", "--base", "2")
    assert run.until_ended(other) == ExitCode.REFUSED
    assert "frozen weights" in other.last_line and "those of a had" in other.last_line
    assert "load the same base model on every node" in other.last_line and "Traceback" not in other.said
    run.until("a goes on", lambda status: merged_since(status, begun["versions"], "a"))
