"""Which codecs may serve a run, both ways."""

import dataclasses

import pytest

from farloop.quant.codec import Codec, Traits
from farloop.quant.codec_checks import check_downlink, check_uplink, check_variates
from farloop.quant.errors import CodecError, UnsoundPairing
from farloop.quant.registry import CODECS, codec_named, downlink_spelling, spelling_of

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


def test_a_step_so_large_that_error_feedback_would_grow_is_refused() -> None:
    check_uplink(codec_named("q4r:step=1,beta=1"))
    assert "beta=0" in refusal(check_uplink, "q4r:step=2.5,beta=1")
    assert "beta=0" in refusal(check_uplink, "q4r:step=1,policy=absolute,beta=0.5")


def holds(traits: Traits) -> bool:
    return traits.exact_decode and traits.contraction > 0


@every_codec
def test_the_way_down_wants_exact_decoding_and_a_contraction(codec: Codec) -> None:
    meant = codec_named(downlink_spelling(codec.name))
    if holds(meant.traits):
        check_downlink(meant)
    else:
        told = refusal(check_downlink, spelling_of(meant))
        assert told.startswith(f"codec_down {spelling_of(meant)!r}") and told.endswith("take q4")


@pytest.mark.parametrize("name", ["fp32", "bf16", "q8", "q4", "q4r", "e3m0"])
def test_these_may_serve_the_way_down(name: str) -> None:
    check_downlink(codec_named(downlink_spelling(name)))


@pytest.mark.parametrize("name", ["sketch", "lowrank", "randk", "ternary"])
def test_these_may_not(name: str) -> None:
    refusal(check_downlink, downlink_spelling(name))


def test_a_residual_beside_that_of_the_target_is_refused() -> None:
    assert refusal(check_downlink, "q4:beta=0.5").endswith("leave beta out")
    check_downlink(codec_named("q4:beta=0"))


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
