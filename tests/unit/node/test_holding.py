"""A node that holds some stages of the model: its machine, its tensors and its words know of no others (protocol G).

Fragments 0 and 1 are of stage 0, 2 and 3 of stage 1; fragments 0 and 2 are due in the middle of a round of four steps.
"""

from pathlib import Path

import pytest
import torch
from plain_runs import plain_terms
from torch import nn

from farloop.algo import schedule
from farloop.algo.fragments import partition
from farloop.algo.spec import BlobId, BlobKind, Identity, Layout, NodeId, RunSpec
from farloop.algo.stages import Part
from farloop.node import events as ev
from farloop.node.errors import LayoutMismatch
from farloop.node.fragment_set import FragmentSet
from farloop.node.link import Traffic
from farloop.node.machine import NodeMachine
from farloop.node.replica import Replica
from farloop.node.reports import Reports, TimeAccount, anchors_of
from farloop.node.sample_cursor import LeaseCursor
from farloop.node.state_dir import NodeState
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

A = NodeId("a")
BLOCKS = [(f"{number}.weight", (4, 4)) for number in range(4)]
LAYOUT = partition(BLOCKS, pattern="sequential", blocks_per_fragment=1, stages=(2,))


def spec_of(layout: Layout = LAYOUT, num_samples: int = 0) -> RunSpec:
    identity = Identity(
        name="cut", model="own", layout=layout, anchor_digests=(0,) * 4, data="own", num_samples=num_samples,
        evaluation_set="none", seed=0,
    )  # fmt: skip
    return RunSpec(identity=identity, terms=plain_terms(steps=40, h=4, batch_sequences=2))


def welcome(spec: RunSpec) -> msg.Welcome:
    return msg.Welcome(
        protocol=1,
        epoch=1,
        spec=spec,
        lane_token=b"",
        versions=(0,) * 4,
        windows=schedule.first_windows(spec.terms, spec.identity.layout),
        rounds=schedule.first_rounds(spec.terms),
    )


def greeted(holds: Part, **changes: int) -> tuple[NodeMachine, list[ev.Command]]:
    machine = NodeMachine(name=A, incarnation=1, holds=holds)
    return machine, machine.handle(ev.Received(message=welcome(spec_of(**changes))))


def begun(holds: Part, **changes: int) -> NodeMachine:
    machine, _ = greeted(holds, **changes)
    for state in machine.fragments:
        snapshot = BlobId(kind=BlobKind.SNAPSHOT, fragment=state.fragment.index, version=0)
        machine.handle(ev.BlobArrived(blob=snapshot))
    machine.handle(ev.Received(message=msg.Start(round=machine.schedule.plans[0], lease=None)))
    machine.check()
    assert machine.running
    return machine


def sent(machine: NodeMachine) -> dict[int, list[int]]:
    """The fragments that are taken at each of the first eight inner steps, every one of them being merged at once."""
    taken: dict[int, list[int]] = {}
    terms = spec_of().terms
    plans = schedule.first_rounds(terms, 4)
    for step in range(1, 9):
        encoded = [c for c in machine.handle(ev.StepDone(tokens=1)) if isinstance(c, ev.Encode)]
        for index, window in [(command.blob.fragment, command.window) for command in encoded]:
            taken.setdefault(step, []).append(index)
            served = machine.fragments[index].sent[0].terms
            committed = msg.Committed(
                fragment=index,
                version=window,
                size=1,
                digest=0,
                anchor_digest=0,
                merged=(msg.Share(node=A, weight=1.0),),
                drops=(),
                next_window=schedule.window_after(terms, LAYOUT, served, {plan.index: plan for plan in plans}),
                rounds=plans,
            )
            machine.handle(ev.Received(message=committed))
            machine.handle(ev.BlobArrived(blob=msg.update_id(committed)))
        machine.check()
    return taken


# --- the machine


def test_a_node_needs_the_anchors_of_its_own_stages_alone() -> None:
    machine, commands = greeted((1,))
    assert commands == [ev.Adopt()] and machine.versions == (-1, -1)
    machine.handle(ev.BlobArrived(blob=BlobId(kind=BlobKind.SNAPSHOT, fragment=3, version=0)))
    assert machine.stage == "joining"
    commands = machine.handle(ev.BlobArrived(blob=BlobId(kind=BlobKind.SNAPSHOT, fragment=2, version=0)))
    assert commands[-1] == ev.Tell(message=msg.Ready()) and machine.versions == (0, 0)


def test_it_sends_what_it_holds_at_the_steps_of_the_whole_model() -> None:
    """A: slot 0 is due after two of four steps, from the second round on; the last slot ends every round."""
    assert sent(begun(None)) == {4: [1, 3], 6: [0, 2], 8: [1, 3]}
    assert sent(begun((0,))) == {4: [1], 6: [0], 8: [1]}
    assert sent(begun((1,))) == {4: [3], 6: [2], 8: [3]}


@pytest.mark.parametrize(("holds", "words"), [((), "holds no stage"), ((2,), "holds stage 2, and the run's model has")])
def test_a_part_that_the_run_s_model_does_not_have_ends_the_node(holds: Part, words: str) -> None:
    """A coordinator that knows of no parts would take it for a node that holds everything."""
    machine, (command,) = greeted(holds)
    assert machine.stage == "stopped" and isinstance(command, ev.Stop)
    assert command.reason is Reason.WRONG_PART and words in command.detail


def test_who_does_not_hold_the_first_stage_has_no_samples_to_tell_of() -> None:
    source, other = begun((0,), num_samples=100), begun((1,), num_samples=100)
    assert source.takes_samples and not other.takes_samples
    (first,) = [command for _ in range(4) for command in source.handle(ev.StepDone(tokens=1))]
    (second,) = [command for _ in range(4) for command in other.handle(ev.StepDone(tokens=1))]
    assert isinstance(first, ev.Encode) and isinstance(second, ev.Encode)
    assert (first.consumed, second.consumed) == (8, None)


def test_a_run_that_is_wound_back_is_begun_again_with_the_same_part() -> None:
    machine = begun((1,))
    again = msg.Welcome(
        **{**{f: getattr(welcome(spec_of()), f) for f in msg.Welcome.__slots__}, "epoch": 2, "history": 2}
    )
    machine.handle(ev.Received(message=again))
    assert [state.fragment.index for state in machine.fragments] == [2, 3] and machine.stage == "joining"


def test_fragments_are_found_by_their_number_and_others_are_not() -> None:
    holding = FragmentSet.begin(spec_of(), (1,))
    assert [holding[index].fragment.index for index in (2, 3)] == [2, 3]
    assert 2 in holding and 0 not in holding
    with pytest.raises(KeyError):
        holding[0]


# --- tensors and words


def part(*numbers: int) -> nn.Module:
    return nn.ModuleDict({str(number): nn.Linear(4, 4, bias=False) for number in numbers})


def test_a_replica_keeps_anchors_of_what_it_holds_and_no_more() -> None:
    replica = Replica(part(2, 3), LAYOUT, gradients=False, holds=(1,))
    assert list(replica.anchors) == [2, 3] and list(replica.parameters) == ["2.weight", "3.weight"]
    assert sum(anchor.numel() for anchor in replica.anchors.values()) == sum(f.numel for f in LAYOUT.fragments[2:])
    with torch.no_grad():
        replica.anchors[3].fill_(1.0)
    replica.merge(3, 0.0)
    assert bool((replica.parameters["3.weight"] == 1.0).all()) and not replica.take(3).any()
    with replica.anchors_in_place():
        assert not replica.parameters["2.weight"].any()
    replica.versions[3] = 5
    assert [ref.fragment for ref in anchors_of(replica)] == [3], "what is held is told by its number in the whole model"


@pytest.mark.parametrize(
    ("module", "holds", "words"),
    [
        (part(2), (1,), r"stage 1 of the run's model has a parameter '3.weight' of shape \(4, 4\), this one has not"),
        (part(1, 2, 3), (1,), r"'1.weight' that stage 1 of the run's model has not"),
        (part(2, 3), None, "this one has not; say what it holds, if it is a part"),
    ],
)
def test_a_module_that_is_not_the_part_it_is_said_to_be_is_refused(module: nn.Module, holds: Part, words: str) -> None:
    with pytest.raises(LayoutMismatch, match=words):
        Replica(module, LAYOUT, gradients=False, holds=holds)


def test_a_greeting_says_what_is_held_and_a_report_of_no_samples(tmp_path: Path) -> None:
    machine = begun((1,), num_samples=100)
    reports = Reports(machine, TimeAccount(), LeaseCursor(), NodeState.claim(tmp_path), "", None)
    assert reports.hello().holds == (1,)
    assert reports.progress(Traffic(), None, 0.0).samples_left is None
