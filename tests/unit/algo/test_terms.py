"""What makes two runs the same run (protocol Z); `Terms` in parts and in their flat form, for messages and journal."""

import dataclasses
from typing import Any

import pytest
from plain_runs import plain_spec, plain_terms

from farloop.algo.spec import Fragment, Identity, Layout, NodeId, Revision, TensorSlot
from farloop.algo.terms import LearningRate, Terms, field_of, nest
from farloop.wire import messages as msg
from farloop.wire.bounds import bounded
from farloop.wire.reasons import OutOfBounds, RemoteProtocolError

BODY = TensorSlot(name="body", shape=(2, 200), offset=0)
HEAD = TensorSlot(name="head", shape=(100,), offset=512)
FRAGMENT = Fragment(index=0, slot=0, numel=768, tensors=(BODY, HEAD))
LAYOUT = Layout(slots=1, fragments=(FRAGMENT,))
IDENTITY = Identity(
    name="small", model="own", layout=LAYOUT, anchor_digests=(100,), data="corpus", num_samples=64,
    evaluation_set="set", seed=7,
)  # fmt: skip


def with_tensors(*tensors: TensorSlot) -> Layout:
    return Layout(slots=1, fragments=(dataclasses.replace(FRAGMENT, tensors=tensors),))


OTHER_IDENTITY: dict[str, Any] = {
    "name": "other", "model": "{}", "layout": with_tensors(BODY), "anchor_digests": (101,), "data": "another corpus",
    "num_samples": 65, "evaluation_set": "none", "seed": 8,
}  # fmt: skip
OTHER_LAYOUTS = [
    with_tensors(dataclasses.replace(BODY, name="trunk"), HEAD),
    with_tensors(dataclasses.replace(BODY, shape=(200, 2)), HEAD),
    with_tensors(BODY, dataclasses.replace(HEAD, offset=256)),
    with_tensors(HEAD, BODY),
    Layout(slots=2, fragments=(FRAGMENT,)),
    Layout(slots=1, fragments=(dataclasses.replace(FRAGMENT, slot=1),)),
]


def test_whatever_is_of_the_identity_changes_the_fingerprint() -> None:
    """Terms are not of it."""
    assert OTHER_IDENTITY.keys() == {field.name for field in dataclasses.fields(Identity)}
    others = [dataclasses.replace(IDENTITY, **{name: value}) for name, value in OTHER_IDENTITY.items()]
    assert len({identity.fingerprint() for identity in [IDENTITY, *others]}) == 1 + len(others)
    assert len({layout.digest() for layout in [LAYOUT, *OTHER_LAYOUTS]}) == 1 + len(OTHER_LAYOUTS)
    assert plain_spec().identity.fingerprint() == plain_spec(h=7).identity.fingerprint()


def test_the_fingerprint_of_an_identity_never_changes() -> None:
    """It stands in every frame and on every disk: another one would orphan all runs."""
    assert IDENTITY.fingerprint() == "daf740e17029c492"
    assert LAYOUT.digest() == "dc266aa927149ce8"


def test_padding_is_no_parameter() -> None:
    assert LAYOUT.num_parameters == 500 < FRAGMENT.numel


# --- Terms

OTHER: dict[str, Any] = {"codec_up_of": ((NodeId("a"), "q8"),), "h_share_of": ((NodeId("a"), 0.5),), "own_tau": True}
"""Values of the fields that are left out at their defaults."""


def test_flat_and_nested_are_inverse() -> None:
    terms = plain_terms(outer_clip=3.0, **OTHER)
    assert Terms.from_flat(**terms.flat()) == terms
    assert terms.replace(h=9, lr=LearningRate(peak=1.0)).flat() == terms.flat() | {"h": 9, "lr": LearningRate(peak=1.0)}
    assert field_of("outer_clip").default is None
    with pytest.raises(TypeError):
        Terms.from_flat(**terms.flat(), colour="red")
    with pytest.raises(TypeError):
        Terms.from_flat(method="diloco")


def test_nesting_leaves_alone_what_it_does_not_know() -> None:
    assert nest([1]) == [1]
    assert nest({"h": 1, "colour": 2, "schedule": 3})["colour"] == 2
    assert nest({"schedule": 3})["schedule"] == {}


def revised(**changes: Any) -> msg.Revised:
    return msg.Revised(revision=Revision(number=1, terms=plain_terms(**changes), windows=(0,), round=0))


def test_a_message_with_terms_at_several_places_is_read_back() -> None:
    spec = plain_spec(**OTHER)
    welcome = msg.Welcome(
        protocol=1,
        epoch=1,
        spec=spec,
        lane_token=b"",
        versions=(),
        windows=(),
        rounds=(),
        revisions=(revised(h=5).revision, revised(h=6).revision),
    )
    assert msg.decode(msg.encode(welcome)) == welcome


@pytest.mark.parametrize(
    ("name", "wrong"), [("h", "many"), ("outer_lr", "high"), ("screen", "loose"), ("outer_momentum", None)]
)
def test_a_wrong_or_missing_value_is_refused_by_its_flat_name(name: str, wrong: str | None) -> None:
    number, needed, fields = msg.unpack(msg.encode(revised()))
    fields["revision"]["terms"][name] = wrong
    if wrong is None:
        del fields["revision"]["terms"][name]
    with pytest.raises(RemoteProtocolError, match=rf"Revised\.revision\.terms\.{name}: "):
        msg.decode(msg.pack([number, needed, fields]))


def test_bounds_name_the_flat_field() -> None:
    assert bounded(revised()) == revised()
    with pytest.raises(OutOfBounds, match=r"Revised\.revision\.terms\.codec_up has 1000 characters"):
        bounded(revised(codec_up="q" * 1000))
