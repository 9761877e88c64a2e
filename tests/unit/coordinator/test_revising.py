"""Other terms while the run goes on: from which window and round on, who is told, what is refused (protocol B, Z).

The run of `conftest.py`: rounds of ten steps, here ten of them. Window 1 of fragment 1 is of round 0, window 1 of
fragment 0 of round 1; rounds 0 to 2 are fixed.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from coordinator_run import A, B, Commands, Run, accepted, recorded
from plain_runs import plain_progress
from stories import StoryText, all_stories, check_story

from farloop.algo.schedule import window_after
from farloop.algo.spec import RunSpec
from farloop.coordinator.change_terms import revision_asked_for
from farloop.coordinator.commits import codecs_of
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.leases import LEASE_ROUNDS
from farloop.coordinator.decide.ledger import HISTORY_VERSIONS
from farloop.coordinator.decide.revising import MOST, last_change
from farloop.coordinator.decide.roster import MOST_MEMBERS


class Changing(Run):
    """Node a trains. Its stories have a word and some questions of their own:

    a closes 1      its delta of one step comes, and is durable; so is the commit
    change?         since when the newest terms hold, and what the last change was
    window 1? | draft 1? | rounds?
    """

    def __init__(self, spec: RunSpec, nodes: str = "a", **terms: Any) -> None:
        super().__init__(spec, nodes, **{"steps": 100, **terms})

    def set(self, **given: str) -> Commands:
        return self.handle(ev.TermsGiven(revision=revision_asked_for(self.machine, given)))

    def close(self, fragment: int = 1) -> Commands:
        self.store(A, fragment, steps=1, tokens=1)
        return self.durable(fragment)

    def told(self, line: str) -> str:
        try:
            return super().told(line)
        except ValueError as refusal:
            return str(refusal)

    def _happens(self, who: str, does: str = "", *words: str) -> Commands:
        if who == "set":
            return self.set(**dict(word.split("=", 1) for word in (does, *words)))
        return self.close(int(words[0])) if does == "closes" else super()._happens(who, does, *words)

    def _answer(self, question: str) -> str:
        match question.split():
            case ["change"]:
                newest = self.ledger.revisions.newest
                since = f"{newest.number} from windows {newest.windows} and round {newest.round}"
                return "\n".join([since, *last_change(self.journal)])
            case "window", fragment:
                terms = self.machine.windows[int(fragment)].terms
                codecs = f"{terms.codec_of(A)} of a, {terms.codec_of(B)} of b" if terms.codec_up_of else terms.codec_up
                return f"{terms.window}: tau {terms.tau}, mix {terms.mix}, {codecs}"
            case "draft", fragment:
                draft = self.draft(int(fragment))
                return f"lr {draft.outer_lr}, restart {codecs_of(self.journal, draft).terms.outer.restart}"
            case ["rounds"]:
                return ", ".join(f"{plan.start}+{plan.length}" for plan in self.journal.rounds.values())
        return super()._answer(question)


@all_stories(__file__, "revising")
def test_stories(spec: RunSpec, path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, Changing(spec, **story.settings).told, rewrite=rewrite)


@pytest.fixture
def run(spec: RunSpec) -> Changing:
    return Changing(spec)


def test_a_change_of_the_keys_that_may_come_in_is_recorded_once(run: Changing) -> None:
    keys = [rec.AllowedKey(node=node, fingerprint=f"sha256:{node}") for node in (A, B)]
    for allowed, at, added, removed in ((keys, 5.0, keys, []), (keys, 6.0, [], []), (keys[:1], 7.0, [], keys[1:])):
        commands = run.handle(ev.KeysAllowed(keys=frozenset(allowed), time_s=at))
        record = rec.KeysChanged(time_s=at, added=tuple(added), removed=tuple(removed))
        assert recorded(commands) == ([record] if added or removed else [])


def test_who_comes_later_is_told_with_its_welcome(run: Changing) -> None:
    assert accepted(run.greet(B)).revisions == () == run.journal.saved().revisions and last_change(run.journal) == []
    run.set(outer_lr="0.5")
    welcome = accepted(run.greet(B))
    assert welcome.revisions == run.ledger.revisions.kept
    assert (welcome.spec.revision, welcome.spec.terms.outer.lr) == (1, 0.5)


def test_leases_of_the_longest_rounds_fit_into_the_journal(spec: RunSpec) -> None:
    """More steps ended the coordinator: "LeaseGranted cannot be written to the journal"."""
    run = Run(spec, "a", steps=100, num_samples=1000, batch_sequences=256)
    for key in ("steps", "h"):
        with pytest.raises(ValueError, match=f"^{key}: expected at most {2**40}, got {2**62}$"):
            revision_asked_for(run.machine, {key: str(2**62)})
        run.handle(ev.TermsGiven(revision=revision_asked_for(run.machine, {key: str(2**40)})))
    run.say(A, plain_progress(sample_watermark=0))
    assert run.journal.leases.frontier == LEASE_ROUNDS * 2**48 < 2**60 // MOST_MEMBERS, "of each node"
    run.restart()


def test_a_change_after_a_restart_holds_from_no_earlier_window_than_the_one_before(run: Changing) -> None:
    """A window that was closing is open again after the crash, and the next change comes before it closes once more."""
    run.store(A)
    run.set(outer_lr="0.5")
    assert run.journal.revisions.newest.windows == (2, 3)
    run.journal.inputs.clear()  # as where deltas are not spooled
    run.begin()
    revision = revision_asked_for(run.machine, {"outer_lr": "0.25"})
    assert revision.windows == (2, 3) and revision.round >= run.journal.revisions.newest.round


def test_revisions_that_no_node_can_need_are_forgotten(spec: RunSpec) -> None:
    run = Changing(spec, steps=2000)
    for number in range(3 * HISTORY_VERSIONS):
        run.set(outer_lr=str(0.3 + 0.001 * number))
        run.play("a closes 1; a closes 0")
    assert run.journal.spec.revision == 3 * HISTORY_VERSIONS
    assert 2 < len(run.journal.revisions.kept) <= HISTORY_VERSIONS + 3
    assert run.journal.revisions == run.ledger.revisions


def test_so_many_changes_between_two_windows_are_too_many(run: Changing) -> None:
    for number in range(MOST - 1):
        run.set(outer_lr=str(0.3 + 0.001 * number))
    assert run.told("set outer_lr=0.9").startswith(f"the terms changed {MOST} times within the last windows")


def test_a_window_that_stays_in_its_round_takes_the_new_terms_too(run: Changing) -> None:
    current = run.machine.windows[1].terms
    new = run.spec.terms.replace(codec_up="q8", tau=1)
    after = window_after(new, run.spec.identity.layout, current, run.ledger.rounds, stay=True)
    assert after == dataclasses.replace(current, window=2, codec_up="q8", tau=1)
