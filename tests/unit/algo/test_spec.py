"""Covers `algo/spec.py`: what makes two runs the same run (protocol Z), and where a tensor lies (protocol N)."""

import dataclasses
from typing import Any

import pytest

from farloop.algo.spec import Fragment, Identity, Layout, NodeId, RoundPlan, TensorSlot

BODY = TensorSlot(name="body", shape=(2, 200), offset=0)
HEAD = TensorSlot(name="head", shape=(100,), offset=512)
FRAGMENT = Fragment(index=0, slot=0, numel=768, tensors=(BODY, HEAD))
LAYOUT = Layout(slots=1, fragments=(FRAGMENT,))
IDENTITY = Identity(
    name="small",
    model="own",
    layout=LAYOUT,
    anchor_digests=(100,),
    data="corpus",
    num_samples=64,
    evaluation_set="set",
    seed=7,
)


def with_tensors(*tensors: TensorSlot) -> Layout:
    return Layout(slots=1, fragments=(dataclasses.replace(FRAGMENT, tensors=tensors),))


@pytest.mark.parametrize(
    "changed",
    [
        {"name": "other"},
        {"model": "{}"},
        {"layout": with_tensors(BODY)},
        {"anchor_digests": (101,)},
        {"data": "another corpus"},
        {"num_samples": 65},
        {"evaluation_set": "none"},
        {"seed": 8},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_whatever_is_of_the_identity_changes_the_fingerprint(changed: dict[str, Any]) -> None:
    assert dataclasses.replace(IDENTITY, **changed).fingerprint() != IDENTITY.fingerprint()


def test_the_changes_above_are_of_every_field_of_the_identity() -> None:
    """A new field is a new parameter of the test above."""
    names = {field.name for field in dataclasses.fields(Identity)}
    assert names == {"name", "model", "layout", "anchor_digests", "data", "num_samples", "evaluation_set", "seed"}


def test_the_fingerprint_of_an_identity_never_changes() -> None:
    """It stands in every frame and on every disk: another one would orphan the runs of the release before."""
    assert IDENTITY.fingerprint() == "22ad1c4c6e0e629f"
    assert LAYOUT.digest() == "6744a2fdcf430c95"


@pytest.mark.parametrize(
    "other",
    [
        with_tensors(dataclasses.replace(BODY, name="trunk"), HEAD),
        with_tensors(dataclasses.replace(BODY, shape=(200, 2)), HEAD),
        with_tensors(BODY, dataclasses.replace(HEAD, offset=256)),
        with_tensors(HEAD, BODY),
        Layout(slots=2, fragments=(FRAGMENT,)),
        Layout(slots=1, fragments=(dataclasses.replace(FRAGMENT, slot=1),)),
    ],
    ids=["name", "shape", "offset", "order", "slots", "slot"],
)
def test_two_cuts_of_a_model_have_two_digests(other: Layout) -> None:
    assert other.digest() != LAYOUT.digest()


def test_padding_is_no_parameter() -> None:
    assert LAYOUT.num_parameters == 500 < FRAGMENT.numel


def test_a_node_runs_the_steps_of_the_round_unless_it_has_its_own() -> None:
    plan = RoundPlan(index=0, start=0, length=10, node_steps=((NodeId("slow"), 4),))
    assert (plan.steps_of(NodeId("slow")), plan.steps_of(NodeId("fast"))) == (4, 10)
