"""`Terms` in parts and their flat form, which messages, the journal and RUN.toml use."""

import dataclasses
from typing import Any

import pytest
from plain_runs import plain_spec, plain_terms

from farloop.algo.spec import NodeId, Revision, to_plain
from farloop.algo.terms import FLAT, Codecs, LearningRate, Outer, Terms, field_of, flat_path, nest
from farloop.wire import messages as msg
from farloop.wire.reasons import OutOfBounds, RemoteProtocolError

OTHER: dict[str, Any] = {"codec_up_of": ((NodeId("a"), "q8"),), "h_share_of": ((NodeId("a"), 0.5),)}
"""Values of the fields that are left out at their defaults."""


def test_every_field_has_one_flat_name() -> None:
    terms = plain_terms()
    inside = [(part, field.name) for part, field in parts_of(terms)]
    assert sorted([*inside, ("", "method")]) == sorted(FLAT.values())
    assert (terms.outer.lr, terms.value("outer_lr")) == (0.7, 0.7)
    assert terms.codecs == Codecs(up="q4", down="q4") and isinstance(terms.outer, Outer)


def parts_of(terms: Terms) -> list[tuple[str, "dataclasses.Field[Any]"]]:
    names = [field.name for field in dataclasses.fields(terms) if field.name != "method"]
    return [(name, field) for name in names for field in dataclasses.fields(getattr(terms, name))]


def test_the_plain_form_is_flat_in_the_released_order_and_leaves_later_fields_at_their_defaults_out() -> None:
    assert list(to_plain(plain_terms())) == [name for name in FLAT if name not in OTHER]
    whole = to_plain(plain_terms(**OTHER))
    assert list(whole) == list(FLAT) and whole["codec_up_of"] == [["a", "q8"]]


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


def test_paths_name_flat_fields() -> None:
    assert flat_path(["spec", "terms", "schedule", "lr", "peak"]) == ["spec", "terms", "lr", "peak"]
    assert flat_path(["outer", "lr"]) == ["outer", "lr"]


def revised(**changes: Any) -> msg.Revised:
    return msg.Revised(revision=Revision(number=1, terms=plain_terms(**changes), windows=(0,), round=0))


def test_a_message_with_terms_at_several_places_is_read_back() -> None:
    spec = plain_spec(**OTHER)
    welcome = msg.Welcome(
        protocol=4,
        epoch=1,
        spec=spec,
        lane_token=b"",
        versions=(),
        windows=(),
        rounds=(),
        revisions=(revised(h=5).revision, revised(h=6).revision),
    )
    assert msg.decode(msg.encode(welcome)) == welcome


@pytest.mark.parametrize(("name", "wrong"), [("h", "many"), ("outer_lr", "high"), ("screen", "loose")])
def test_a_wrong_value_is_refused_by_its_flat_name(name: str, wrong: str) -> None:
    number, needed, fields = msg.unpack(msg.encode(revised()))
    fields["revision"]["terms"][name] = wrong
    with pytest.raises(RemoteProtocolError, match=rf"Revised\.revision\.terms\.{name}: "):
        msg.decode(msg.pack([number, needed, fields]))


def test_a_missing_value_is_named_by_its_flat_name() -> None:
    number, needed, fields = msg.unpack(msg.encode(revised()))
    del fields["revision"]["terms"]["outer_momentum"]
    with pytest.raises(RemoteProtocolError, match=r"Revised\.revision\.terms\.outer_momentum: Field required"):
        msg.decode(msg.pack([number, needed, fields]))


def test_bounds_name_the_flat_field() -> None:
    from farloop.wire.bounds import bounded

    assert bounded(revised()) == revised()
    with pytest.raises(OutOfBounds, match=r"Revised\.revision\.terms\.codec_up has 1000 characters"):
        bounded(revised(codec_up="q" * 1000))


def test_the_fingerprint_of_a_run_holds_no_terms() -> None:
    one, other = plain_spec(), plain_spec(h=7)
    assert one.identity.fingerprint() == other.identity.fingerprint()
    assert "terms" not in {field.name for field in dataclasses.fields(one.identity)}
