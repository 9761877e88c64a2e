"""Frames between stages: what is written is read again, and nothing else is believed."""

import dataclasses
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_layouts import layout_of

from farloop.algo.spec import to_plain
from farloop.algo.stages import Hop
from farloop.node.pipeline import messages
from farloop.node.pipeline.messages import FramedMessage, Kind, MicrobatchRoute, Work
from farloop.node.pipeline.stage import from_bytes, to_bytes
from farloop.wire.frames import Buffer
from farloop.wire.messages import pack, unpack, validate
from farloop.wire.reasons import RemoteProtocolError

RUN, MOST = 7, 1 << 20
CPU = torch.device("cpu")
TRIP = MicrobatchRoute(source="oslo", start=2, step=3, index=1, attempt=0)
WORK = Work(
    kind=Kind.BACKWARD,
    epoch=4,
    trip=TRIP,
    path=0,
    position=1,
    visited=(Hop(stage=0, node="oslo"), Hop(stage=2, node="bonn")),
)
MESSAGES = [
    messages.PipelineMessage(incarnation=1, epoch=2, ready=True, queued=3, job_s=0.5, age_s=0.0),
    messages.Lost(trip=TRIP, epoch=1, reason="late"),
    messages.Forget(trip=TRIP),
    messages.Ended(start=2, step=3, microbatches=4, next_epoch=1),
    messages.Prepare(layout=layout_of(["ab", "cd"], ["ac", "bd"]), addresses={"a": "tcp://h:1"}),
    messages.Prepared(epoch=2, refusal=""),
    messages.Switch(epoch=2),
    messages.Leave(start=2),
]


def parts_of(x: torch.Tensor, codec: str = "") -> list[Buffer]:
    info, data = to_bytes(x, codec)
    return messages.parcel(WORK, info, data, RUN)


def test_every_message_has_a_number_and_is_read_as_it_was_written() -> None:
    assert {type(message) for message in MESSAGES} == set(get_args(messages.Message))
    for message in MESSAGES:
        assert messages.parse(messages.message(message, RUN), RUN, MOST) == message


def test_what_a_later_version_says_besides_is_passed_over() -> None:
    """So that stages of two versions understand each other."""
    word = MESSAGES[0]
    later = pack({**to_plain(word), "mood": "fine"})
    assert validate(messages.PipelineMessage, unpack(later)) == word


def test_an_older_stage_tells_no_times() -> None:
    plain = to_plain(MESSAGES[0])
    older = {key: value for key, value in plain.items() if key not in ("sent_s", "echo_s", "held_s")}
    word = validate(messages.PipelineMessage, older)
    assert (word.sent_s, word.echo_s, word.held_s) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tensor_comes_out_as_it_went_in(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 5).to(dtype)
    parcel = messages.parse(parts_of(x), RUN, MOST)
    assert isinstance(parcel, FramedMessage) and parcel.work == WORK
    assert torch.equal(from_bytes(parcel.info, parcel.data, CPU), x)


def test_a_codec_makes_it_smaller_and_nearly_the_same() -> None:
    x = torch.randn(2, 16, 32)
    parcel = messages.parse(parts_of(x, "q8"), RUN, MOST)
    assert isinstance(parcel, FramedMessage) and parcel.info.size < 0.3 * x.numel() * 4
    assert torch.allclose(from_bytes(parcel.info, parcel.data, CPU, "q8"), x, atol=0.05)


def test_only_the_codec_that_was_agreed_on_is_believed() -> None:
    parcel = messages.parse(parts_of(torch.randn(2, 16, 32), "q8"), RUN, MOST)
    assert isinstance(parcel, FramedMessage)
    with pytest.raises(RemoteProtocolError, match="written by 'q8', here it is 'none'"):
        from_bytes(parcel.info, parcel.data, CPU)


def test_a_frame_of_another_run_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="a frame of run"):
        messages.parse(messages.message(messages.Switch(epoch=1), RUN), RUN + 1, MOST)


def test_a_tensor_beyond_the_bound_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="400 bytes of 'float32'"):
        messages.parse(parts_of(torch.zeros(1, 10, 10)), RUN, 399)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"shape": (2, 3, 6)}, "for float32 of shape"),
        ({"shape": (2, 3, -5)}, "of shape"),
        ({"shape": ()}, "of shape"),
        ({"dtype": "int64"}, "of 'int64'"),
        ({"size": 119}, "119 are announced"),
        ({"checksum": 1}, "wrong checksum of a tensor"),
    ],
)
def test_a_tensor_that_is_not_as_its_header_says_is_refused(change: dict[str, object], said: str) -> None:
    info, data = to_bytes(torch.zeros(2, 3, 5))
    broken = dataclasses.replace(info, **change)  # type: ignore[arg-type]
    with pytest.raises(RemoteProtocolError, match=said):
        messages.parse(messages.parcel(WORK, broken, data, RUN), RUN, MOST)


def test_numbers_that_nobody_can_mean_are_refused() -> None:
    far = dataclasses.replace(WORK, position=65)
    info, data = to_bytes(torch.zeros(1, 1, 1))
    with pytest.raises(RemoteProtocolError, match="at hop 65"):
        messages.parse(messages.parcel(far, info, data, RUN), RUN, MOST)
    wrong: list[dict[str, float]] = [{"job_s": float("nan")}, {"queued": -1}, {"sent_s": float("inf")}]
    for word in (dataclasses.replace(MESSAGES[0], **fields) for fields in wrong):
        with pytest.raises(RemoteProtocolError, match="PipelineMessage holds"):
            messages.parse(messages.message(word, RUN), RUN, MOST)
    nameless = dataclasses.replace(TRIP, source="")
    with pytest.raises(RemoteProtocolError, match="Forget names"):
        messages.parse(messages.message(messages.Forget(trip=nameless), RUN), RUN, MOST)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([*MESSAGES, None]), st.integers(0, 10_000), st.integers(1, 255))
def test_no_damaged_frame_is_believed(message: messages.Message | None, place: int, flip: int) -> None:
    """One byte is another one: header, body or tensor."""
    parts = messages.message(message, RUN) if message is not None else parts_of(torch.ones(1, 2, 3))
    broken = [bytearray(part) for part in parts]
    part = broken[place % len(broken)]
    part[place // len(broken) % len(part)] ^= flip
    with pytest.raises(RemoteProtocolError):
        messages.parse(broken, RUN, MOST)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=3))
def test_noise_is_refused_in_one_way(parts: list[bytes]) -> None:
    with pytest.raises(RemoteProtocolError):
        messages.parse(parts, RUN, MOST)
