"""One window: which nodes it waits for, when and why it closes, and what its commit says (protocol D, E, H)."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from coordinator_run import A, B, C
from hypothesis import given
from hypothesis import strategies as st
from stories import Scripted, StoryText, all_stories, check_story

from farloop.algo import schedule
from farloop.algo.methods import METHODS
from farloop.algo.outer_settings import settings_of
from farloop.algo.spec import BlobId, BlobKind, Contribution, NodeId, RoundPlan, RunSpec, WindowTerms
from farloop.algo.terms import LearningRate
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.windows import Window
from farloop.wire.messages import Offer
from farloop.wire.reasons import Reason

TERMS = WindowTerms(fragment=0, window=4, round=4, tau=2, mix=0.5, codec_up="q4", codec_down="q4")


def offer(nodes: str, window: int = 4, *, tokens: int = 100, steps: int = 10, norm_sq: float = 1.0) -> Offer:
    """A delta that holds the work of these nodes."""
    blob = BlobId(kind=BlobKind.DELTA, fragment=0, version=window - 1, node=NodeId(nodes[0]), incarnation=1, seq=1)
    shares = tuple(
        Contribution(
            node=NodeId(node), incarnation=1, base=window - 1, steps=steps, tokens=tokens if steps else 0,
            norm_sq=norm_sq,
        )
        for node in nodes
    )  # fmt: skip
    return Offer(blob=blob, size=10, digest=1, window=window, contributors=shares)


def window(expected: str, *came: Offer, removed: dict[NodeId, Reason] | None = None, **changes: Any) -> Window:
    """Window 4, with these deltas."""
    return Window(
        **{
            "terms": TERMS,
            "expected": set(map(NodeId, expected)),
            "removed": removed or {},
            "inputs": {arrived.blob: arrived for arrived in came},
            **changes,
        }
    )


def rounds_of(spec: RunSpec, count: int = 4) -> dict[int, RoundPlan]:
    return {plan.index: plan for plan in schedule.first_rounds(spec.terms, count)}


class Opened(Scripted):
    """Window 4 of round 2. `a` is a delta for it, `a3` one for window 3, `a-` one without a step, `ab` a relayed one:

    came a b3 steps=5 norm_sq=4.0 | gone b | refuse b
    why | why quorum=2 floor=2 patient=True       whether it closes, and why
    admitted | too_late                           deltas of a for which windows
    begins b3 a quorum=1                          what it begins with of those that came meanwhile
    shares weights=quality | draft served=b       what its commit says
    """

    def __init__(
        self, spec: RunSpec, *, expected: str = "", late: int = 0, final: bool = False, **changes: Any
    ) -> None:
        """`late`: how many windows late a delta may be."""
        self.spec, terms = spec, dataclasses.replace(TERMS, final=final, round=2)
        self.window = window(expected, terms=terms, max_staleness=late, **changes)

    def of(self, word: str, **claim: Any) -> Offer:
        nodes, number, idle = re.fullmatch("([a-z]+)([0-9]?)(-?)", word).groups()  # type: ignore[union-attr]
        return offer(nodes, int(number or 4), **({"steps": 0} if idle else claim))

    def came(self, *words: str, **claim: Any) -> None:
        for word in words:
            self.window.add(self.of(word, **claim))

    def gone(self, node: str) -> None:
        self.window.removed[NodeId(node)] = Reason.SILENT

    def refuse(self, node: str) -> None:
        self.window.refuse(rec.Refusal(blob=self.of(node).blob, reason=Reason.OUTLIER, detail="too long"))

    def missing(self) -> set[NodeId]:
        return self.window.missing

    def why(self, quorum: int | None = None, floor: int = 1, *, patient: bool = False) -> str:
        return self.window.why_close(quorum, floor, patient=patient) or "open"

    def admitted(self) -> list[int]:
        return [number for number in range(1, 7) if self.window.admits(offer("a", number))]

    def too_late(self) -> list[int]:
        return [number for number in (2, 3, 4) if self.window.is_too_late_for(offer("a", number))]

    def begins(self, *words: str, quorum: int | None = None) -> list[NodeId]:
        elsewhere = dataclasses.replace(offer("a").blob, fragment=1)
        offers = {arrived.blob: arrived for arrived in map(self.of, words)}
        self.window.begin_with({elsewhere: offer("a"), **offers}, quorum)
        return [blob.node for blob in self.window.inputs]

    def shares(self, weights: str = "tokens") -> list[str]:
        return [f"{share.node} {share.weight:.3g}" for share in self.window.shares(weights)]

    def draft(self, served: str = "", **method: Any) -> list[str]:
        """`method`: fields of its own method."""
        row = METHODS[self.spec.terms.method]
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(METHODS, self.spec.terms.method, dataclasses.replace(row, **method))
            made = self.window.draft(self.spec, rounds_of(self.spec), "", list(map(NodeId, served)))
        assert [share.weight for share in made.merged] == [addend.weight for addend in made.blobs]
        after = made.next_window
        return [
            *(f"{share.node} {share.weight:.3g}" for share in made.merged),
            *(f"{drop.node} {drop.reason.name}" for drop in made.drops),
            f"lr {made.outer_lr}, momentum {made.outer_momentum}",
            *([f"reach {made.reach}"] if made.reach else []),
            f"then window {after.window} of round {after.round}" if after else "then none",
        ]


@all_stories(__file__, "closing")
def test_stories(spec: RunSpec, path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, Opened(spec, **story.settings).told, rewrite=rewrite)


@given(order=st.permutations("abc"), tokens=st.tuples(*[st.integers(0, 1 << 40)] * 3))
def test_the_order_of_arrival_never_shows(spec: RunSpec, order: list[str], tokens: tuple[int, int, int]) -> None:
    """B19: the sum runs over the smallest node ids, in their order."""
    offers = {node: offer(node, tokens=count) for node, count in zip("abc", tokens, strict=True)}
    terms = dataclasses.replace(TERMS, round=2)
    drafts = [
        window("abc", *(offers[node] for node in nodes), terms=terms).draft(spec, rounds_of(spec, 6), "why")
        for nodes in ("abc", order)
    ]
    assert drafts[0] == drafts[1] and [addend.blob.node for addend in drafts[0].blobs] == [A, B, C]


names = st.sets(st.sampled_from("abc"))


@given(expected=names, came=names, gone=names, quorum=st.none() | st.integers(1, 3), floor=st.integers(1, 3))
def test_a_window_closes_when_its_terms_say_so_and_every_node_has_one_fate(
    expected: set[str], came: set[str], gone: set[str], quorum: int | None, floor: int
) -> None:
    removed = {NodeId(node): Reason.SILENT for node in gone & expected}
    opened = window("".join(expected), *(offer(node) for node in sorted(came)), removed=removed)
    opened.check()
    complete = expected - gone <= came or (quorum is not None and len(came) >= quorum)
    assert (opened.why_close(quorum, floor) is not None) == (complete and len(came) >= floor and bool(came))
    if came:
        merged = [share.node for share in opened.shares()]
        dropped = [drop.node for drop in opened.drops()]
        assert sorted(merged + dropped) == sorted(expected | came)
        assert sum(share.weight for share in opened.shares()) == pytest.approx(1.0)


# --- what its commit says


def first_window(spec: RunSpec, fragment: int, *came: Offer, final: bool = False, **changes: Any) -> Window:
    """Window 1 of the fragment, which expects a and b."""
    terms = dataclasses.replace(schedule.first_windows(spec.terms, spec.identity.layout)[fragment], final=final)
    return window("ab", *came, **{"terms": terms, **changes})


def test_what_corrects_a_step_for_its_work_is_settled_with_the_window(spec: RunSpec) -> None:
    """P: a replay has the numbers, and does not ask for the learning rate again."""
    lr = LearningRate(peak=1e-2, minimum=1e-4, warmup_steps=0)
    terms = spec.terms.replace(lr=lr, h_rule="qsr", h_alpha=0.03)
    grown = dataclasses.replace(spec, terms=terms)
    rounds = rounds_of(grown, 40)
    assert rounds[2].length > 10 == rounds[0].length
    opened = first_window(grown, 1, offer("a", 1))
    opened.terms = dataclasses.replace(opened.terms, round=2)
    draft = opened.draft(grown, rounds, "")
    outer = settings_of(terms, spec.identity.layout, opened.terms, rounds)
    assert (draft.outer_lr, draft.outer_momentum, draft.delta_scale) == (outer.lr, outer.momentum, outer.delta_scale)
    assert draft.delta_scale not in (0.0, 1.0)


# --- late deltas


@pytest.mark.parametrize(
    "odd",
    [
        window("a", offer("a"), removed={B: Reason.SILENT}),
        window("ab", offer("ab"), offer("b")),
        window("a", offer("a", 5)),
    ],
    ids=["removed and not expected", "two deltas of one node", "a delta of another window"],
)
def test_what_must_not_be_is_noticed(odd: Window) -> None:
    with pytest.raises(AssertionError):
        odd.check()
