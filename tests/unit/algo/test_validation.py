"""The methods, and their terms: an impossible choice is refused in one sentence that names a valid value."""

import math
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from plain_runs import plain_terms
from stories import StoryText, all_stories, check_story, python

from farloop.algo import spec, validation
from farloop.algo.fragments import NamedShape, partition
from farloop.algo.methods import METHODS, default_mix, max_tau, screens_deltas
from farloop.algo.schedule import POWERS, due_step, first_rounds, initial_h
from farloop.algo.spec import Layout, NodeId
from farloop.algo.terms import LearningRate, Rewarm, Terms
from farloop.algo.validation import check, check_own_tau

OF_THE_METHOD = ("h", "tau", "mix", "lag", "codec_up", "codec_down", "on_late_update", "quorum", "control_variates")


def terms_of(name: str, /, *given: dict[str, Any], **changes: Any) -> Terms:
    """The method's own defaults, but for these fields and rounds of 30 steps where it leaves that open."""
    for one in reversed(given):
        changes = one | changes
    method = METHODS[name]
    values = {field: getattr(method, field) for field in OF_THE_METHOD} | ({} if "h" in method.fixed else {"h": 30})
    lr = LearningRate(peak=2e-3, minimum=2e-4, warmup_steps=90)
    common = {
        "steps": 900,
        "min_nodes": 4,
        "lr": lr,
        "outer_momentum": 0.0 if method.outer in ("sgd", "increments") else 0.9,
    }
    return plain_terms(**{"method": name, **values, **common, **changes})


def layout_of(name: str) -> Layout:
    """24 blocks: 9 slots where the model is cut at all."""
    tensors: list[NamedShape] = [(f"blocks.{i}.weight", (16, 16)) for i in range(24)]
    return partition([*tensors, ("embed.weight", (256, 16))], pattern=METHODS[name].pattern)


def rate(**choices: Any) -> dict[str, Any]:
    """A run of 100 steps with this learning rate."""
    lr = LearningRate(**{"peak": 8e-3, "minimum": 1e-3, "warmup_steps": 10, **choices})
    return {"steps": 100, "h": 10, "lr": lr}


ENDLESS = {"shape": "infinite", "constant": 4e-3}
QSR = {"h_rule": "qsr", "h_alpha": 0.011}
LATER = {"h_rule": "post-local", "h_switch": 300, "h_init": 9}
VARIATES = {"control_variates": True, "outer_lr": 1.0, "outer_momentum": 0.0}
LAGS = {"lag": 1, "mix": 0.0, "tau": 0}


def tried(name: str, *given: dict[str, Any], **changes: Any) -> None:
    terms = terms_of(name, *given, **changes)
    check(terms, layout_of(name))
    assert sum(plan.length for plan in first_rounds(terms, 900)) == terms.schedule.steps


def again(*starts: int, peak: float = 8e-3, **choices: Any) -> dict[str, Any]:
    return rate(rewarms=tuple(Rewarm(start=start, peak=peak, **choices) for start in starts))


def own_tau(name: str, slots: int, *taus: int, **changes: Any) -> None:
    for tau in taus:
        check_own_tau(tau, terms_of(name, **changes), slots)


def average(name: str, *given: dict[str, Any]) -> None:
    statistics: list[NamedShape] = [("blocks.0.running_var", (16,))]
    layout = partition([("blocks.0.weight", (16, 16)), *statistics], pattern=METHODS[name].pattern)
    check(terms_of(name, *given), layout)


@all_stories(__file__, "terms")
def test_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, python(vars(spec), vars(validation), globals()), rewrite=rewrite)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_number_of_the_terms_is_other_than_finite(value: float) -> None:
    """Whether a rule reads it or not: a record with NaN in it is not equal to itself."""
    terms = terms_of("streaming", **again(50, replay=0.5), h_share_of=((NodeId("rome"), 0.5),), outer_clip=1.0)
    places: list[tuple[str, Callable[[], Terms]]] = [
        (name, partial(terms.replace, **{name: value})) for name, held in terms.flat().items() if type(held) is float
    ]
    lr = terms.schedule.lr
    for field, held in ((field.name, getattr(lr, field.name)) for field in fields(lr)):
        if type(held) is float:
            places.append((f"lr.{field}", partial(terms.replace, lr=replace(lr, **{field: value}))))
    for field in ("peak", "replay"):
        one = replace(lr.rewarms[0], **{field: value})
        places.append((f"lr.rewarms.{field}", partial(terms.replace, lr=replace(lr, rewarms=(one,)))))
    places.append(("h_share_of", partial(terms.replace, h_share_of=((NodeId("rome"), value),))))
    assert {"mix", "lr.drop_factor", "lr.decay_share", "rewarm_momentum"} <= {name for name, _ in places}
    for name, made in places:
        with pytest.raises(ValueError, match=f"^{name}: expected a finite number; got {value}$"):
            made()


@pytest.mark.parametrize("rule", POWERS)
def test_the_alpha_that_is_named_gives_h_at_the_peak(rule: str) -> None:
    """The nearest good value is one: taken at its word, the first round after the warm-up has h steps."""
    with pytest.raises(ValueError, match=r"h_alpha is missing; .* needs one above 0") as refusal:
        check(terms_of("diloco", h_rule=rule), layout_of("diloco"))
    alpha = float(str(refusal.value).split("; ")[2].split()[0])
    terms = terms_of("diloco", h_rule=rule, h_alpha=alpha)
    check(terms, layout_of("diloco"))
    lengths = [plan.length for plan in first_rounds(terms, 900)]
    assert lengths[:4] == [initial_h(terms)] * 3 + [30] and max(lengths) > 60


# --- The table of methods


def test_gradients_are_not_screened_whatever_the_terms_say() -> None:
    assert screens_deltas(terms_of("diloco")) and not screens_deltas(terms_of("diloco", screen="off"))
    assert not screens_deltas(terms_of("data-parallel"))


def test_a_merge_keeps_no_more_than_a_nodes_share() -> None:
    assert [default_mix(METHODS["decoupled"], nodes) for nodes in (1, 2, 4, 8)] == [0.5, 0.5, 0.25, 0.125]
    assert default_mix(METHODS["streaming"], 2) == 0.0


# --- How long an overlap may be


@pytest.mark.parametrize("in_flight", [1, 2, 3, 9, None])
@pytest.mark.parametrize("h", [9, 30, 100])
def test_the_longest_overlap_is_the_last_that_keeps_the_slots_undecided_at_once(h: int, in_flight: int | None) -> None:
    """Protocol D, by counting: within a step all that is due is encoded before anything is merged."""
    method, slots = replace(METHODS["streaming"], in_flight=in_flight), 9
    sends = [round_ * h + due_step(slot, slots, h) for round_ in range(3) for slot in range(slots)]

    def undecided(tau: int) -> int:
        return max(sum(send <= step <= send + tau for send in sends) for step in sends)

    longest = max_tau(method, h, slots)
    allowed = slots if in_flight is None else in_flight
    assert undecided(longest) <= allowed < undecided(longest + 1)
