"""How variants, settings and knobs of `farloop bench quality` are spelled."""

import pytest

from farloop.algo.methods import METHODS
from farloop.bench.quality_spec import parse_knobs, parse_variant, run_settings
from farloop.config.exit_codes import CommandError


def test_a_variant_is_a_pair_of_codecs_settings_or_both() -> None:
    assert parse_variant("fp32/q4") == {"codec_up": "fp32", "codec_down": "q4"}
    assert parse_variant("h=15 method=diloco") == {"h": 15, "method": "diloco"}
    assert parse_variant("mix=0.25 topk:k=128,beta=0.9/q4") == {
        "codec_up": "topk:k=128,beta=0.9",
        "codec_down": "q4",
        "mix": 0.25,
    }


def test_a_variant_is_a_method_with_its_settings() -> None:
    assert parse_variant("streaming nodes=4 h=30 codec=q4r:step=0.7 outer_lr=0.4 peak_lr=2e-3") == {
        "method": "streaming",
        "nodes": 4,
        "h": 30,
        "codec_up": "q4r:step=0.7",
        "codec_down": "q4r:step=0.7",
        "outer_lr": 0.4,
        "lr": 2e-3,
    }


@pytest.mark.parametrize("method", METHODS)
def test_every_method_can_be_named(method: str) -> None:
    assert parse_variant(f"{method} nodes=3") == {"method": method, "nodes": 3}


def test_single_is_one_node_that_averages_with_itself() -> None:
    fields = parse_variant("single lr=1e-3")
    assert (fields["nodes"], fields["outer_lr"], fields["outer_momentum"], fields["lr"]) == (1, 1.0, 0.0, 1e-3)


@pytest.mark.parametrize(
    ("spelled", "what"),
    [
        ("", "empty variant"),
        ("q4", "codecs are spelled UP/DOWN, as q4/q4, or codec=q4 for both ways"),
        ("streamin nodes=2", "did you mean streaming?"),
        ("xyz", "neither a method nor UP/DOWN, as q4/q4, nor KEY=VALUE"),
        ("streaming diloco", "one method is wanted, not streaming and diloco"),
        ("q4/", "one pair of codecs"),
        ("q4/q4/q4", "one pair of codecs"),
        ("q4/q4 q8/q8", "one pair of codecs"),
        ("step=15", "no setting 'step'; did you mean steps?"),
        ("peek_lr=1e-3", "no setting 'peek_lr'; did you mean peak_lr?"),
        ("=15", "is not KEY=VALUE"),
        ("h=often", "a whole number is wanted"),
        ("seed=3", "seed is the same for all variants"),
        ("q4/q4 sequence_tokens=64", "sequence_tokens is the same for all variants"),
    ],
)
def test_a_bad_spelling_is_said_in_a_line(spelled: str, what: str) -> None:
    with pytest.raises(CommandError) as caught:
        parse_variant(spelled)
    assert what in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_path_is_no_pair_of_codecs() -> None:
    with pytest.raises(CommandError, match="init is the same for all variants"):
        parse_variant("init=/some/where")


def test_what_is_fixed_says_how_it_is_set() -> None:
    for word, how in (("steps=3", "--steps"), ("batch_sequences=2", "--global-batch"), ("seed=2", "--set")):
        with pytest.raises(CommandError, match=how):
            parse_variant(word, fixed={"steps", "batch_sequences", "seed"})


def test_settings_are_typed() -> None:
    assert run_settings(["min_lr=1e-5", "outer_correction=false"], origin="--set") == {
        "min_lr": 1e-5,
        "outer_correction": False,
    }


def test_knobs_are_numbers_in_rising_order() -> None:
    nu, rate = parse_knobs(["outer_lr=0.8,0.4", "peak_lr=1e-3"])
    assert (nu.name, nu.values) == ("outer_lr", (0.4, 0.8))
    assert (rate.name, rate.values) == ("lr", (1e-3,))


@pytest.mark.parametrize(
    ("word", "what"),
    [
        ("outer_lr", "KEY=VALUE,VALUE"),
        ("outer_lr=", "KEY=VALUE,VALUE"),
        ("outer_rl=1", "outer_rl cannot be tuned; did you mean outer_lr?"),
        ("h=15,30", "h cannot be tuned"),
        ("outer_lr=0.4,high", "'high' is not a number"),
        ("outer_lr=0.4,,1", "'' is not a number"),
        ("outer_lr=0.4,0", "a number above 0"),
        ("outer_lr=nan", "a number above 0"),
        ("outer_lr=0.4,0.40", "given twice"),
    ],
)
def test_a_bad_knob_is_said_in_a_line(word: str, what: str) -> None:
    with pytest.raises(CommandError) as caught:
        parse_knobs([word])
    assert what in str(caught.value)


def test_a_knob_is_given_once() -> None:
    with pytest.raises(CommandError, match="lr is given twice"):
        parse_knobs(["lr=1e-3", "peak_lr=2e-3"])
