"""The machine of one node of a pipeline, event by event: what only an unlucky order of messages shows."""

import pytest
from pipeline_layouts import layout_of

from farloop.algo.stages import Hop
from farloop.node.pipeline import events as ev
from farloop.node.pipeline.machine import PipelineMachine
from farloop.node.pipeline.messages import Ended, Forget, Kind, Message, MicrobatchRoute, PipelineMessage, Work

TRIP = MicrobatchRoute(source="a", start=0, step=0, index=0, attempt=0)
WORK = Work(kind=Kind.FORWARD, epoch=1, trip=TRIP, path=0, position=1, visited=(Hop(stage=0, node="a"),))


WORD = PipelineMessage(incarnation=0, epoch=1, ready=True, queued=0, job_s=0.0, age_s=0.0, over=0)


@pytest.mark.parametrize(
    "over",
    [Forget(trip=TRIP), Ended(start=0, step=0, microbatches=1, next_epoch=1), WORD],
    ids=["forget", "ended", "word"],
)
def test_work_of_a_trip_that_is_over_is_not_kept_when_it_comes_late(over: Message) -> None:
    """It went another way than the message, past a stage that was slow; its source will not speak of it again."""
    machine = PipelineMachine(name="b", layout=layout_of(["a", "bc"], ["ab"]))
    machine.handle(ev.StepBegan(), 0.0)
    machine.handle(ev.Up(peer="a"), 0.0)
    machine.handle(ev.MessageArrived(sender="a", message=over), 1.0)
    commands = machine.handle(ev.Arrived(sender="a", work=WORK), 2.0)
    machine.check()
    assert ev.Discard(trip=TRIP) in commands
    assert not machine.desk.trips(lambda trip: True)


def test_a_node_that_missed_the_end_of_a_step_hears_of_it_with_the_next_word() -> None:
    """It was away when its source told."""
    machine = PipelineMachine(name="b", layout=layout_of(["a", "bc"], ["ab"]))
    machine.handle(ev.StepBegan(), 0.0)
    machine.handle(ev.Up(peer="a"), 0.0)
    machine.handle(ev.Arrived(sender="a", work=WORK), 1.0)
    assert machine.desk.trips(lambda trip: True) == [TRIP]
    machine.handle(ev.MessageArrived(sender="a", message=WORD), 2.0)
    assert not machine.desk.trips(lambda trip: True)


def test_the_next_attempt_of_a_microbatch_is_another_trip() -> None:
    machine = PipelineMachine(name="b", layout=layout_of(["a", "bc"], ["ab"]))
    machine.handle(ev.StepBegan(), 0.0)
    machine.handle(ev.Up(peer="a"), 0.0)
    machine.handle(ev.MessageArrived(sender="a", message=Forget(trip=TRIP)), 1.0)
    again = Work(
        kind=Kind.FORWARD,
        epoch=1,
        trip=MicrobatchRoute(source="a", start=0, step=0, index=0, attempt=1),
        path=0,
        position=1,
        visited=WORK.visited,
    )
    assert ev.Compute(work=again) in machine.handle(ev.Arrived(sender="a", work=again), 2.0)
