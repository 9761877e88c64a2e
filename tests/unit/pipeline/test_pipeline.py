"""Covers `pipeline`: frames, routes, layout files, the estimate of a link, the torch of a stage, late words.

Whole pipelines: `tests/unit/sim/test_stages.py` (virtual time) and `tests/integration/test_pipeline.py` (sockets).
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_layouts import layout_of
from pipeline_nodes import SMALL, microbatches, model
from slow_cases import examples
from stories import StoryText, all_stories, check_story, python

from farloop.algo.fragments import partition
from farloop.algo.stages import Hop, Stage, order_fault
from farloop.node.settings import Normalise, PipelineConfig
from farloop.pipeline import events as ev
from farloop.pipeline import messages
from farloop.pipeline.layout import layout_json, read_layout
from farloop.pipeline.link import LEAST_S, LOOKS_BACK_S, Echo, LinkEstimate
from farloop.pipeline.machine import PipelineMachine
from farloop.pipeline.messages import FramedMessage, Kind, MicrobatchRoute, Work
from farloop.pipeline.routing import Onward, onward
from farloop.pipeline.stage import StageJobs, StagePart, from_bytes, to_bytes
from farloop.wire.frames import Buffer
from farloop.wire.messages import Transfer
from farloop.wire.reasons import RemoteProtocolError

CPU = torch.device("cpu")


def route(attempt: int = 0, index: int = 0, source: str = "a") -> MicrobatchRoute:
    return MicrobatchRoute(source=source, start=0, step=0, index=index, attempt=attempt)


def work(kind: Kind, attempt: int = 0, **changes: Any) -> Work:
    plain = Work(kind=kind, epoch=1, trip=route(attempt), path=0, position=0, visited=(Hop(stage=0, node="a"),))
    return dataclasses.replace(plain, **changes)


# --- frames between stages: what is written is read again, and nothing else is believed

RUN, MOST = 7, 1 << 20
WORK = work(Kind.BACKWARD, position=1, visited=(Hop(stage=0, node="oslo"), Hop(stage=2, node="bonn")))
WORD = messages.PipelineMessage(incarnation=1, epoch=2, ready=True, queued=3, job_s=0.5, age_s=0.0)
MESSAGES = [
    WORD,
    messages.Lost(trip=route(), epoch=1, reason="late"),
    messages.Forget(trip=route()),
    messages.Ended(start=2, step=3, microbatches=4, next_epoch=1),
    messages.Prepare(layout=layout_of(["ab", "cd"], ["ac", "bd"]), addresses={"a": "tcp://h:1"}),
    messages.Prepared(epoch=2, refusal=""),
    messages.Switch(epoch=2),
    messages.Leave(start=2),
]


def parts_of(x: torch.Tensor, codec: str = "", *, of: Work = WORK, **header: Any) -> list[Buffer]:
    info, data = to_bytes(x, codec)
    return messages.parcel(of, dataclasses.replace(info, **header), data, RUN)


def parsed(x: torch.Tensor, codec: str = "") -> FramedMessage:
    parcel = messages.parse(parts_of(x, codec), RUN, MOST)
    assert isinstance(parcel, FramedMessage) and parcel.work == WORK
    return parcel


def test_every_message_has_a_number_and_is_read_as_it_was_written() -> None:
    assert {type(message) for message in MESSAGES} == set(get_args(messages.Message))
    for message in MESSAGES:
        assert messages.parse(messages.message(message, RUN), RUN, MOST) == message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tensor_comes_out_as_it_went_in(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 5).to(dtype)
    parcel = parsed(x)
    assert torch.equal(from_bytes(parcel.info, parcel.data, CPU), x)


def test_a_codec_makes_it_smaller_and_nearly_the_same_and_is_believed_where_it_was_agreed_on() -> None:
    x = torch.randn(2, 16, 32)
    parcel = parsed(x, "q8")
    assert parcel.info.size < 0.3 * x.numel() * 4
    assert torch.allclose(from_bytes(parcel.info, parcel.data, CPU, "q8"), x, atol=0.05)
    with pytest.raises(RemoteProtocolError, match="written by 'q8', here it is 'none'"):
        from_bytes(parcel.info, parcel.data, CPU)


@settings(max_examples=examples(60))
@given(st.sampled_from([*MESSAGES, None]), st.integers(0, 10_000), st.integers(1, 255))
def test_no_damaged_frame_is_believed(message: messages.Message | None, place: int, flip: int) -> None:
    """One byte is another one: header, body or tensor."""
    parts = messages.message(message, RUN) if message is not None else parts_of(torch.ones(1, 2, 3))
    broken = [bytearray(part) for part in parts]
    part = broken[place % len(broken)]
    part[place // len(broken) % len(part)] ^= flip
    with pytest.raises(RemoteProtocolError):
        messages.parse(broken, RUN, MOST)


@settings(max_examples=examples(60))
@given(st.lists(st.binary(max_size=200), max_size=3))
def test_noise_is_refused_in_one_way(parts: list[bytes]) -> None:
    with pytest.raises(RemoteProtocolError):
        messages.parse(parts, RUN, MOST)


# --- where a microbatch goes next

ROUTES = layout_of(["a", "bB", "cC", "d"], ["abcd"])
LATE_S = 10.0


def step(loads: Mapping[str, float], position: int = 1) -> Onward | None:
    """The next visit after as many stages as `position`, where only these nodes can be reached."""
    hops = [Hop(stage=stage, node="abcd"[stage]) for stage in range(position)]
    return onward(ROUTES, ROUTES.paths[0], position, hops, loads.get, late_s=LATE_S)


@given(st.dictionaries(st.sampled_from("bBcCd"), st.floats(0.0, 50.0)), st.integers(1, 4))
def test_whatever_is_chosen_is_live_legal_and_ahead(loads: dict[str, float], position: int) -> None:
    taken = step(loads, position)
    if taken is None or taken.hop is None:
        return
    assert taken.hop.node in loads
    assert taken.position == position + taken.skipped
    assert not order_fault([*range(position), taken.hop.stage])


# --- layout files

LAYOUT = layout_of(["ab", "cd"], ["ac", "bd"])
ADDRESSES = {name: f"tcp://10.0.0.{number}:7800" for number, name in enumerate("abcd")}


def test_what_is_written_is_read_again_and_what_else_a_plan_says_is_passed_over(tmp_path: Path) -> None:
    """As `farloop plan --json` writes it."""
    path = tmp_path / "plan.json"
    path.write_text(layout_json(LAYOUT, ADDRESSES))
    assert read_layout(path) == (LAYOUT, ADDRESSES)
    plain = json.loads(layout_json(LAYOUT, ADDRESSES)) | {"makespan_s": 1.5, "mode": "pipelines"}
    del plain["epoch"]
    plain["stages"] = [{"stage": number, **stage} for number, stage in enumerate(plain["stages"])]
    plain["paths"] = [{"source": path["nodes"][0], "step_s": 1.0, **path} for path in plain["paths"]]
    path.write_text(json.dumps(plain))
    assert read_layout(path) == (LAYOUT, ADDRESSES)


def layout(**change: object) -> None:
    """Read that of `LAYOUT` with other values."""
    path = Path("layout.json")
    path.write_text(json.dumps(json.loads(layout_json(LAYOUT, ADDRESSES)) | change))
    read_layout(path)


def parse(parts: list[Buffer]) -> None:
    messages.parse(parts, RUN, MOST)


def field(parts: list[Buffer]) -> str:
    """What a refusal names; the words of pydantic are not the test's."""
    with pytest.raises(RemoteProtocolError) as error:
        parse(parts)
    return str(error.value).partition(":")[0]


@all_stories(__file__, "pipeline")
def test_stories(path: Path, story: StoryText, rewrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_story(path, story, python(globals()), rewrite=rewrite)


# --- the machine, where messages come in an unlucky order

FORWARD = work(Kind.FORWARD, position=1)
OVER = messages.PipelineMessage(incarnation=0, epoch=1, ready=True, queued=0, job_s=0.0, age_s=0.0, over=0)


def begun() -> PipelineMachine:
    machine = PipelineMachine(name="b", layout=layout_of(["a", "bc"], ["ab"]), config=PipelineConfig())
    machine.handle(ev.StepBegan(), 0.0)
    machine.handle(ev.Up(peer="a"), 0.0)
    return machine


@pytest.mark.parametrize(
    "over", [messages.Forget(trip=route()), messages.Ended(start=0, step=0, microbatches=1, next_epoch=1), OVER]
)
def test_work_of_a_trip_that_is_over_is_not_kept_when_it_comes_late(over: messages.Message) -> None:
    """It went another way than the message, past a stage that was slow; its source will not speak of it again."""
    machine = begun()
    machine.handle(ev.MessageArrived(sender="a", message=over), 1.0)
    assert ev.Discard(trip=route()) in machine.handle(ev.Arrived(sender="a", work=FORWARD), 2.0)
    machine.check()
    assert not machine.desk.trips(lambda trip: True)


def test_a_node_that_missed_the_end_of_a_step_hears_of_it_with_the_next_word() -> None:
    machine = begun()
    machine.handle(ev.Arrived(sender="a", work=FORWARD), 1.0)
    assert machine.desk.trips(lambda trip: True) == [route()]
    machine.handle(ev.MessageArrived(sender="a", message=OVER), 2.0)
    assert not machine.desk.trips(lambda trip: True)


def test_the_next_attempt_of_a_microbatch_is_another_trip() -> None:
    machine, again = begun(), work(Kind.FORWARD, attempt=1, position=1)
    machine.handle(ev.MessageArrived(sender="a", message=messages.Forget(trip=route())), 1.0)
    assert ev.Compute(work=again) in machine.handle(ev.Arrived(sender="a", work=again), 2.0)


# --- what two stages see of the link between them, whatever their clocks say

BEAT_S = 0.5


class Pair:
    """Two nodes with clocks of their own, and a link of a given way and rate between them."""

    def __init__(self, *, ahead_s: float = 0.0, there_s: float = 0.02, back_s: float = 0.03, rate: float = 1e6) -> None:
        self.ahead_s, self.there_s, self.back_s, self.rate = ahead_s, there_s, back_s, rate
        self.near, self.far = LinkEstimate(), LinkEstimate()
        self.now = 100.0

    def talk(self, beats: int, *, queue_s: float = 0.0) -> None:
        """Words both ways; every second one stands in a queue on its way here."""
        for beat in range(beats):
            echo = self.near.echo(self.now)
            self.far.word(self.now, echo, self.now + self.there_s + self.ahead_s)
            said = self.now + BEAT_S / 2
            back = self.far.echo(said + self.ahead_s)
            self.near.word(said + self.ahead_s, back, said + self.back_s + queue_s * (beat % 2))
            self.now += BEAT_S

    def tensor(self, num_bytes: int, queue_s: float = 0.0) -> None:
        """One comes here."""
        self.near.tensor(num_bytes, self.now + self.ahead_s, self.now + self.back_s + num_bytes / self.rate + queue_s)


@given(st.floats(-50.0, 1e6), st.floats(1e-3, 1.0), st.floats(1e-3, 1.0), st.floats(1e4, 1e9))
def test_round_trip_and_rate_are_those_of_the_link_whatever_the_clocks_say(
    ahead_s: float, there_s: float, back_s: float, rate: float
) -> None:
    pair = Pair(ahead_s=ahead_s, there_s=there_s, back_s=back_s, rate=rate)
    pair.talk(10, queue_s=0.2)
    pair.tensor(1_000_000, queue_s=0.3)
    pair.tensor(1_000_000)
    seen = pair.near.seen("far", pair.now)
    assert seen is not None and seen.peer == "far" and seen.transfer is not None
    assert seen.rtt_s == pytest.approx(there_s + back_s, abs=1e-6)
    told = seen.transfer.num_bytes / seen.transfer.seconds
    assert told == pytest.approx(min(rate, 1e6 / LEAST_S), rel=1e-3)


def test_a_link_that_becomes_longer_is_told_once_the_old_words_are_forgotten() -> None:
    pair = Pair()
    pair.talk(20)
    pair.there_s = 0.5
    for beats, rtt_s in ((4, 0.05), (int(LOOKS_BACK_S / BEAT_S) + 1, 0.53)):
        pair.talk(beats)
        seen = pair.near.seen("far", pair.now)
        assert seen is not None and seen.rtt_s == pytest.approx(rtt_s)


def test_nothing_is_told_before_it_is_known_and_after_it_is_old() -> None:
    pair = Pair()
    assert pair.near.seen("far", pair.now) is None and pair.near.echo(pair.now) == Echo(sent_s=0.0, held_s=0.0)
    pair.tensor(10)
    assert pair.near.seen("far", pair.now) is None
    pair.talk(4)
    seen = pair.near.seen("far", pair.now)
    assert seen is not None and seen.transfer == Transfer(num_bytes=10, seconds=LEAST_S)
    assert pair.near.seen("far", pair.now + 2 * LOOKS_BACK_S) is None


# --- the torch of a stage


def part(first: int, stop: int) -> StagePart:
    return StagePart(model(), Stage(first=first, stop=stop, replicas=("a",)), source=first == 0)


def test_the_stages_have_the_names_of_the_whole_model_and_share_none() -> None:
    """So that fragments cut over the whole model are held by the stages that they are of."""
    whole = dict(model().named_parameters())
    stages = [dict(part(*cut).named_parameters()) for cut in ((0, 1), (1, 3), (3, 4))]
    assert sorted(name for names in stages for name in names) == sorted(whole)
    for names in stages:
        assert all(torch.equal(parameter, whole[name]) for name, parameter in names.items())
    tensors = [(name, tuple(parameter.shape)) for name, parameter in whole.items()]
    for fragment in partition(tensors, pattern="strided", stages=(1, 3)).fragments:
        assert all(slot.name in stages[fragment.stage] for slot in fragment.tensors)


@pytest.mark.parametrize("normalise", ["visits", "share"])
def test_gradients_are_divided_by_visits_or_by_what_they_would_be(normalise: Normalise) -> None:
    """One of two microbatches came by: its own gradient, or half of it."""
    jobs, x, twin = StageJobs(part(1, 2)), torch.randn(2, 16, SMALL.dim), part(1, 2)
    out = jobs.do(work(Kind.FORWARD), x)
    assert out is not None
    jobs.do(work(Kind.BACKWARD), torch.ones_like(out))
    trained = jobs.finish(2, normalise)
    torch.autograd.backward(twin.run(x), torch.ones_like(out))
    weight, wanted = (p.blocks["1"].mlp.down.weight.grad for p in (jobs.part, twin))
    torch.testing.assert_close(weight, wanted if normalise == "visits" else wanted / 2)
    assert (trained.visits, trained.tokens, trained.loss) == (1, 32, None)


def test_a_step_of_the_optimizer_between_forward_and_backward_does_no_harm() -> None:
    """As with a guest of another source: the forward pass is computed again, with the weights of now."""
    jobs = StageJobs(part(1, 2))
    out = jobs.do(work(Kind.FORWARD), torch.randn(2, 16, SMALL.dim))
    assert out is not None
    with torch.no_grad():
        for parameter in jobs.part.parameters():
            parameter.add_(0.1)
    assert jobs.do(work(Kind.BACKWARD), torch.ones_like(out)) is not None


def test_a_trip_that_was_lost_after_its_loss_does_not_make_the_next_step_longer() -> None:
    """It has left its gradient in the head: two losses, one backward. The mean over both is taken where both are."""
    jobs, (tokens,), whole = StageJobs(part(0, 4)), microbatches(1, 5), model()
    jobs.load([tokens])
    for attempt in range(2):
        out = jobs.do(work(Kind.FORWARD, attempt), None)
        assert out is not None
        gradient = jobs.do(work(Kind.LOSS, attempt), out)
    assert gradient is not None
    jobs.do(work(Kind.BACKWARD, attempt=1), gradient)
    jobs.finish(1)
    torch.autograd.backward(whole.loss(tokens))
    grads = dict(jobs.part.named_parameters())
    for name in ("norm.weight", "blocks.2.mlp.down.weight"):
        torch.testing.assert_close(grads[name].grad, whole.get_parameter(name).grad, rtol=1e-4, atol=1e-7)


def test_nothing_is_kept_of_what_is_forgotten() -> None:
    jobs = StageJobs(part(1, 2))
    jobs.do(work(Kind.FORWARD), torch.randn(1, 4, SMALL.dim))
    jobs.forget(route())
    assert not jobs._inputs
