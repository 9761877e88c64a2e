"""Who and what is let in, and the sentence for those who are not (protocol E, H, S, U, Z)."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from coordinator_run import A, B, C
from plain_runs import plain_hello, plain_offer, plain_progress
from stories import Scripted, StoryText, all_stories, check_story

from farloop.algo.schedule import opening_rounds
from farloop.algo.spec import BlobKind, Contribution, RoundPlan, RunSpec
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.admission import delta_refusal, progress_untrue, refusal, steps_at_most
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.decide.roster import Member
from farloop.coordinator.decide.windows import Window
from farloop.wire.messages import AnchorRef, BytesByKind, Committed, Refused

PLAIN = Contribution(node=A, incarnation=2, base=0, steps=10, tokens=10, norm_sq=1.0)


class Gate(Scripted):
    """Epoch 3, nothing committed; node a has joined as start 2. Fields are given as `steps=-1`.

    hello                   fields of a Hello; `anchors` and `announced` are the fragment of one, `process_now` and
                            `session_now` those of the member that has joined
    offer                   of the blob; `of`, `start`, `base` and the claims of its contribution, which is there so
                            many `times`; `stage` of a
    report                  of a Progress; `sent_delta` and `received_probe` bytes
    """

    def __init__(self, spec: RunSpec, *, num_samples: int = 0) -> None:
        spec = dataclasses.replace(spec, identity=dataclasses.replace(spec.identity, num_samples=num_samples))
        self.ledger = Ledger.begin(rec.RunStarted(spec=spec, epoch=3, rounds=opening_rounds(spec)))

    def hello(self, *, process_now: int = 0, session_now: int | None = None, **fields: Any) -> str:
        for name in {"anchors", "announced"} & fields.keys():
            fields[name] = (AnchorRef(fragment=fields[name], version=0, digest=0),)
        member = Member(name=A, incarnation=2, process=process_now, session=session_now)
        told = refusal(plain_hello(**{"incarnation": 2, "epoch_seen": 3, **fields}), A, self.ledger, member)
        return "let in" if told is None else self._refused(told)

    def _refused(self, told: Refused) -> str:
        behind = f", behind start {told.newest}" if told.newest else ""
        return f"{told.reason.name}{' for now' if told.retriable else ''}{behind}: {told.detail}"

    def offer(self, *, window: int = 1, ahead: int = 0, stage: Any = "training", times: int = 1, **fields: Any) -> str:
        names = {"of": "node", "start": "incarnation", "base": "base", "steps": "steps", "tokens": "tokens"}
        names["norm_sq"] = "norm_sq"
        claim = {field: fields.pop(name) for name, field in names.items() if name in fields}
        if "norm_sq" in claim:
            claim["norm_sq"] = float(claim["norm_sq"])
        if "kind" in fields:
            fields["kind"] = BlobKind[fields["kind"]]
        plain = plain_offer(A, incarnation=2, contributors=(dataclasses.replace(PLAIN, **claim),) * times)
        said = dataclasses.replace(plain, window=window, ahead=ahead, blob=dataclasses.replace(plain.blob, **fields))
        member = Member(name=A, incarnation=2, stage=stage, start_round=0)
        opened = Window(terms=self.ledger.windows[1], expected={A, B})
        told = delta_refusal(said, member, self.ledger, opened)
        return "let in" if told is None else f"{told[0].name}: {told[1]}"

    def report(self, **fields: Any) -> str:
        for name in {"sent_delta", "received_probe"} & fields.keys():
            where, kind = name.split("_")
            fields[where] = BytesByKind(**{kind: fields.pop(name)})
        floats = {name: float(value) for name, value in fields.items() if value in ("nan", "inf")}
        said = {"inner_steps": 10, "tokens": 10, "loss": None, **fields, **floats}
        return progress_untrue(plain_progress(**said), self.ledger) or "believed"


@all_stories(__file__, "admission")
def test_stories(spec: RunSpec, path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, Gate(spec, **story.settings).told, rewrite=rewrite)


@pytest.mark.parametrize(
    ("terms", "of_a", "of_c"),
    [
        ({}, [70, 70, 60, 50], 10 + 4 * 6 + 10),
        # F: a node may be rounds ahead of what it knows to be merged
        ({"on_late_update": "continue", "max_stale_rounds": 2}, [70, 70, 70, 60], 54),
        # H: with a = 1, where nothing is ever mixed in, the work counts from the last send
        ({"mix": 1.0}, [70, 70, 70, 70], 54),
    ],
)
def test_a_delta_holds_no_more_steps_than_the_rounds_since_its_base_and_one_that_was_begun(
    spec: RunSpec, terms: dict[str, Any], of_a: list[int], of_c: int
) -> None:
    """A: rounds 0 to 5 of ten steps are fixed; c does six of them from round 2 on. Window n is of round n."""
    spec = dataclasses.replace(spec, terms=spec.terms.replace(steps=1000, **terms))
    ledger = Ledger.begin(rec.RunStarted(spec=spec, epoch=3, rounds=opening_rounds(spec)))
    ledger.rounds = {
        i: RoundPlan(index=i, start=10 * i, length=10, node_steps=((C, 6),) if i >= 2 else ()) for i in range(6)
    }
    for version in range(3):
        window = dataclasses.replace(ledger.windows[1], window=version + 1, round=version + 1)
        ledger.commits[1, version] = Committed(
            fragment=1, version=version, size=0, digest=0, anchor_digest=0, merged=(), drops=(), rounds=(),
            next_window=window,
        )  # fmt: skip
    assert [steps_at_most(ledger, 1, base, A) for base in range(4)] == of_a
    assert steps_at_most(ledger, 1, 2, C) == of_c
