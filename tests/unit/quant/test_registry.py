"""Names, numbers and spellings of codecs, and which may serve a run both ways."""

import dataclasses
import importlib
import logging
import re
import sys
from pathlib import Path
from pkgutil import iter_modules

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_runs import plain_terms
from stories import StoryText, all_stories, check_story, python

from farloop.quant import codec_checks, formats, registry
from farloop.quant.codec import Codec
from farloop.quant.codec_checks import check_downlink, check_uplink, check_variates
from farloop.quant.errors import BadParameter, CodecError, UnknownCodec, UnsoundPairing, UnsupportedHost
from farloop.quant.registry import CODECS, codec_named, spelling_of, warm_for
from farloop.quant.spelling import PARAMETERS, downlink_spelling

every_name = pytest.mark.parametrize("name", CODECS)


def test_numbers_and_blocks_fit_their_fields_of_a_header() -> None:
    """Which number a codec has is in tests/unit/golden/numbers.txt, its block in its golden bytes."""
    assert len({codec.code for codec in CODECS.values()}) == len(CODECS)
    assert all(0 < codec.code < 2**8 and 0 < codec.block < 2**16 for codec in CODECS.values())


def test_every_codec_of_a_format_is_registered() -> None:
    modules = [importlib.import_module(f"{formats.__name__}.{found.name}") for found in iter_modules(formats.__path__)]
    written = {held.name for module in modules for held in vars(module).values() if isinstance(held, Codec)}
    assert written == CODECS.keys()


def refuses(spelling: str) -> bool:
    """A value out of its range, which is told with it."""
    with pytest.raises(
        BadParameter, match=f"^codec {re.escape(repr(spelling))}: .* is a .*number from 1.* to .*, not "
    ):
        codec_named(spelling)
    return True


@all_stories(__file__, "spellings")
def test_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, python(vars(registry), vars(codec_checks), globals()), rewrite=rewrite)
    for kind in (UnknownCodec, BadParameter):
        assert issubclass(kind, ValueError) and issubclass(kind, CodecError)


def test_a_big_endian_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(UnsupportedHost):
        codec_named("q4")


def test_that_kernels_are_compiled_is_told_before_it_takes_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told = list[str]()
    monkeypatch.setattr("farloop.quant.registry.warm", lambda names: told.append(caplog.text))
    caplog.set_level(logging.INFO)
    warm_for(plain_terms(codec_up="fp32", codec_down="fp32"))
    assert len(told) == 1 and "the first start compiles them, up to a minute" in told[0]
    assert "kernels ready" not in told[0] and "kernels ready codecs=fp32/fp32" in caplog.text


# --- spellings


@every_name
def test_every_parameter_is_a_field_with_a_meaning_and_its_default_reads_back(name: str) -> None:
    assert spelling_of(CODECS[name]) == name and list(PARAMETERS) == list(CODECS)
    for key, parameter in PARAMETERS[name].items():
        default = getattr(CODECS[name], key)
        assert parameter.read(parameter.write(default)) == default == parameter.default
        assert codec_named(f"{name}:{key}={parameter.write(default)}") == CODECS[name]
        assert parameter.meaning and "\n" not in parameter.meaning


@st.composite
def spelled(draw: st.DrawFn) -> tuple[str, dict[str, object]]:
    """A spelling of `q4r`, with its parameters in any order and any spaces after the commas, and what it says."""
    said: dict[str, object] = {}
    parts = []
    if draw(st.booleans()):
        steps = draw(st.lists(st.floats(1e-30, 1e30), min_size=1, max_size=4))
        said["step"] = tuple(steps)
        parts.append("step=" + "/".join(map(repr, steps)))
    for key, words in (("rounding", ("stochastic", "nearest")), ("policy", ("relative", "absolute"))):
        if draw(st.booleans()):
            said[key] = draw(st.sampled_from(words))
            parts.append(f"{key}={said[key]}")
    if draw(st.booleans()) or not parts:
        said["beta"] = draw(st.floats(0, 1))
        parts.append(f"beta={said['beta']!r}")
    parts = draw(st.permutations(parts))
    return "q4r:" + draw(st.sampled_from([",", ", "])).join(parts), said


@given(spelled())
def test_a_spelling_says_what_differs_from_the_defaults(spelled: tuple[str, dict[str, object]]) -> None:
    spelling, said = spelled
    codec = codec_named(spelling)
    for key in PARAMETERS["q4r"]:
        assert getattr(codec, key) == said.get(key, getattr(CODECS["q4r"], key))


@given(spelled())
def test_a_codec_is_spelled_so_that_it_reads_back_and_one_way_alone(spelled: tuple[str, dict[str, object]]) -> None:
    codec = codec_named(spelled[0])
    spelling = spelling_of(codec)
    assert codec_named(spelling) == codec
    assert hash(codec_named(spelling)) == hash(codec)
    assert spelling_of(codec_named(spelling)) == spelling
    assert len(spelling) <= len(spelled[0])


def test_spellings_are_short() -> None:
    for spelling in ("q4r:step=0.7", "q4r:step=0.7/1/1.4,rounding=nearest", "topk:k=128,beta=0.9", "q4:beta=1"):
        assert spelling_of(codec_named(spelling)) == spelling
    assert spelling_of(codec_named("q4r:policy=relative,step=1.0,rounding=stochastic,beta=0")) == "q4r"


@given(
    st.text(max_size=40) | st.text(max_size=20).map("q4r:{}".format) | st.text(max_size=20).map("q4r:step={}".format)
)
def test_any_text_is_a_codec_or_one_line(text: str) -> None:
    try:
        codec = codec_named(text)
    except (UnknownCodec, BadParameter) as error:
        assert len(str(error).splitlines()) == 1
        return
    assert codec_named(spelling_of(codec)) == codec


# --- the way down


@every_name
def test_the_way_down_has_no_residual_of_its_own_and_says_so_once(name: str) -> None:
    codec: Codec = codec_named(downlink_spelling(name))
    assert codec.beta == 0.0
    assert downlink_spelling(spelling_of(codec)) == spelling_of(codec)


every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())


def refusal(check: object, spelling: str) -> str:
    assert callable(check)
    with pytest.raises(UnsoundPairing) as error:
        check(codec_named(spelling))
    assert isinstance(error.value, ValueError) and isinstance(error.value, CodecError)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


@every_codec
def test_every_codec_as_it_comes_may_serve_the_way_up(codec: Codec) -> None:
    """Their defaults are meant for it."""
    check_uplink(codec)


@every_codec
def test_error_feedback_needs_a_contraction(codec: Codec) -> None:
    """Else what is lost would be fed back for ever, and grow."""
    fed_back = dataclasses.replace(codec, beta=1.0)
    if codec.traits.contraction > 0:
        check_uplink(fed_back)
    else:
        told = refusal(check_uplink, spelling_of(fed_back))
        assert told.startswith(f"codec_up {spelling_of(fed_back)!r}: error feedback needs")
        assert told.endswith("take beta=0")


@every_codec
def test_what_leaves_most_of_a_delta_behind_needs_error_feedback_or_chance(codec: Codec) -> None:
    alone = dataclasses.replace(codec, beta=0.0)
    if codec.traits.sparse and not codec.traits.unbiased:
        assert refusal(check_uplink, spelling_of(alone)).endswith("take beta=0.95")
    else:
        check_uplink(alone)


@every_codec
def test_the_way_down_wants_exact_decoding_and_a_contraction(codec: Codec) -> None:
    meant = codec_named(downlink_spelling(codec.name))
    holds = meant.traits.exact_decode and meant.traits.contraction > 0
    assert holds == (codec.name not in ("randk", "sketch", "ternary", "lowrank"))
    if holds:
        check_downlink(meant)
    else:
        told = refusal(check_downlink, spelling_of(meant))
        assert told.startswith(f"codec_down {spelling_of(meant)!r}") and told.endswith("take q4")


@every_codec
def test_control_variates_need_whole_deltas_of_which_a_part_comes_for_sure(codec: Codec) -> None:
    """They are an error feedback themselves, and what comes rounds later is a delta many times as large."""
    alone = dataclasses.replace(codec, beta=0.0)
    if codec.traits.sparse:
        assert "must be sent as a whole" in refusal(check_variates, spelling_of(codec))
    elif codec.traits.contraction == 0:
        assert "may lose more than there is; take q4" in refusal(check_variates, spelling_of(alone))
    else:
        check_variates(alone)
        assert "sent twice" in refusal(check_variates, spelling_of(dataclasses.replace(codec, beta=0.5)))
