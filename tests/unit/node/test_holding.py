"""A node that holds some stages of the model: its machine, its tensors and its words know of no others (protocol G).

Fragments 0 and 1 are of stage 0, 2 and 3 of stage 1; fragments 0 and 2 are due in the middle of a round of four steps.
"""

from pathlib import Path

import pytest
from node_story import READY, Story
from torch import nn, no_grad

from farloop.algo.fragments import partition
from farloop.algo.stages import Part
from farloop.node import events as ev
from farloop.node.errors import LayoutMismatch
from farloop.node.link import Traffic
from farloop.node.model.replica import Replica
from farloop.node.reports import Reports, TimeAccount, anchors_of
from farloop.node.send_schedule import LeaseCursor
from farloop.node.state_dir import NodeState
from farloop.wire.reasons import Reason

BLOCKS = [(f"{number}.weight", (4, 4)) for number in range(4)]
LAYOUT = partition(BLOCKS, pattern="sequential", blocks_per_fragment=1, stages=(2,))


def holding(holds: Part, num_samples: int = 0) -> Story:
    return Story(layout=LAYOUT, holds=holds, num_samples=num_samples, batch_sequences=2)


# --- the machine


def test_a_node_needs_the_anchors_of_its_own_stages_alone() -> None:
    story = holding((1,))
    assert story.hear(story.welcome()) == [ev.Adopt()] and story.machine.versions == (-1, -1)
    assert READY not in story.snapshot(3)
    assert story.snapshot(2)[-1] == READY and story.machine.versions == (0, 0)


@pytest.mark.parametrize(
    ("holds", "fragments"), [(None, {4: [1, 3], 6: [0, 2], 8: [1, 3]}), ((0,), {4: [1], 6: [0], 8: [1]}),
                             ((1,), {4: [3], 6: [2], 8: [3]})],
)  # fmt: skip
def test_it_sends_what_it_holds_at_the_steps_of_the_whole_model(holds: Part, fragments: dict[int, list[int]]) -> None:
    """A: slot 0 is due after two of four steps, from the second round on; the last slot ends every round."""
    story, taken = holding(holds).begin(), {}
    for step in range(1, 9):
        if sent := [c.blob.fragment for c in story.steps(1) if isinstance(c, ev.Encode)]:
            taken[step] = sent
        for fragment in sent:
            story.receive(story.commit(fragment))
    assert taken == fragments


@pytest.mark.parametrize(("holds", "words"), [((), "holds no stage"), ((2,), "holds stage 2, and the run's model has")])
def test_a_part_that_the_run_s_model_does_not_have_ends_the_node(holds: Part, words: str) -> None:
    """A coordinator that knows of no parts would take it for a node that holds everything."""
    story = holding(holds)
    (command,) = story.hear(story.welcome())
    assert story.machine.stage == "stopped" and isinstance(command, ev.Stop)
    assert command.reason is Reason.WRONG_PART and words in command.detail


@pytest.mark.parametrize(("holds", "consumed"), [((0,), 8), ((1,), None)])
def test_who_does_not_hold_the_first_stage_has_no_samples_to_tell_of(holds: Part, consumed: int | None) -> None:
    story = holding(holds, num_samples=100).begin()
    assert story.machine.takes_samples is (consumed is not None)
    (sent,) = story.steps(4)
    assert isinstance(sent, ev.Encode) and sent.consumed == consumed


def test_a_run_that_is_wound_back_is_begun_again_with_the_same_part() -> None:
    story = holding((1,)).begin()
    story.hear(story.welcome(epoch=2, history=2))
    assert [state.fragment.index for state in story.machine.fragments] == [2, 3] and story.machine.stage == "joining"


# --- tensors and words


def part(*numbers: int) -> nn.Module:
    return nn.ModuleDict({str(number): nn.Linear(4, 4, bias=False) for number in numbers})


def test_a_replica_keeps_anchors_of_what_it_holds_and_no_more() -> None:
    replica = Replica(part(2, 3), LAYOUT, gradients=False, holds=(1,))
    assert list(replica.anchors) == [2, 3] and list(replica.parameters) == ["2.weight", "3.weight"]
    assert sum(anchor.numel for anchor in replica.anchors.values()) == sum(f.numel for f in LAYOUT.fragments[2:])
    with no_grad():
        replica.anchors[3].write().fill_(1.0)
    replica.merge(3, 0.0)
    assert bool((replica.parameters["3.weight"] == 1.0).all()) and not replica.compute_delta(3).any()
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
    machine = holding((1,), num_samples=100).begin().machine
    reports = Reports(machine, TimeAccount(), LeaseCursor(), NodeState.claim(tmp_path), "", None)
    assert reports.hello().holds == (1,)
    assert reports.progress(Traffic(), None, 0.0).samples_left is None
