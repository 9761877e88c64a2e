"""Other terms while the run goes on: from which window and round on, who is told, what is refused (protocol B, Z).

The run of `conftest.py`: rounds of ten steps, here ten of them. Window 1 of fragment 1 is of round 0, window 1 of
fragment 0 of round 1; rounds 0 to 2 are fixed.
"""

import dataclasses
from typing import Any

import pytest
from coordinator_run import A, B, Commands, Run, accepted, merged, recorded, tell
from plain_runs import plain_progress

from farloop.algo.schedule import window_after
from farloop.algo.spec import RunSpec
from farloop.coordinator.change_terms import revision_asked_for
from farloop.coordinator.commits import codecs_of
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.leases import LEASE_ROUNDS
from farloop.coordinator.decide.ledger import HISTORY_VERSIONS
from farloop.coordinator.decide.revising import MOST, described, last_change
from farloop.coordinator.decide.roster import MOST_MEMBERS
from farloop.wire import messages as msg


class Changing(Run):
    """Node a trains."""

    def __init__(self, spec: RunSpec, **terms: Any) -> None:
        super().__init__(spec, **{"steps": 100, **terms})
        self.join(A)

    def set(self, **given: str) -> Commands:
        return self.handle(ev.TermsGiven(revision=revision_asked_for(self.machine, given)))

    def refuses(self, **given: str) -> str:
        with pytest.raises(ValueError, match=r".") as refusal:
            revision_asked_for(self.machine, given)
        return str(refusal.value)

    def close(self, fragment: int = 1) -> rec.WindowCommitted:
        """a's delta comes, the window closes, and its commit is durable."""
        self.store(A, fragment, steps=1, tokens=1)
        draft = self.draft(fragment)
        self.durable(fragment)
        return draft

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.close(1)
            self.close(0)


@pytest.fixture
def run(spec: RunSpec) -> Changing:
    return Changing(spec)


def test_a_change_of_the_keys_that_may_come_in_is_recorded_once(run: Changing) -> None:
    keys = [rec.AllowedKey(node=node, fingerprint=f"sha256:{node}") for node in (A, B)]
    for allowed, at, added, removed in ((keys, 5.0, keys, []), (keys, 6.0, [], []), (keys[:1], 7.0, [], keys[1:])):
        commands = run.handle(ev.KeysAllowed(keys=frozenset(allowed), time_s=at))
        record = rec.KeysChanged(time_s=at, added=tuple(added), removed=tuple(removed))
        assert recorded(commands) == ([record] if added or removed else [])


def test_terms_hold_from_the_next_window_and_the_next_round_that_no_node_knows_of(run: Changing) -> None:
    revision = revision_asked_for(run.machine, {"outer_lr": "0.5", "h": "5"})
    assert (revision.number, revision.windows, revision.round) == (1, (2, 2), 3)
    assert run.ledger.spec.terms.outer.lr == 0.6, "asking changes nothing"


def test_they_are_in_the_journal_before_any_node_is_told(run: Changing) -> None:
    commands = run.set(outer_lr="0.5")
    revision = run.ledger.revisions.newest
    assert commands == [ev.Record(record=rec.TermsChanged(revision=revision)), tell(A, msg.Revised(revision=revision))]
    assert described(run.spec.terms, revision) == [
        {"key": "outer_lr", "before": 0.6, "after": 0.5, "from": "windows f0:2, f1:2"}
    ]
    assert last_change(run.journal)[-1] == "outer_lr 0.6 → 0.5 from windows f0:2, f1:2 on"


def test_a_window_commits_under_the_terms_of_its_own_revision(run: Changing) -> None:
    run.set(outer_lr="0.5", codec_up="q8", tau="1", mix="0.25", outer_restart="3")
    run.store(A)
    assert codecs_of(run.journal, run.draft()).terms.outer.restart == 0, (
        "P: whatever the newest are when it is computed"
    )
    assert run.draft().outer_lr == 0.6
    run.durable()
    following = run.machine.windows[1].terms
    assert (following.codec_up, following.tau, following.mix) == ("q8", 1, 0.25)
    run.store(A)
    assert codecs_of(run.journal, run.draft()).terms.outer.restart == 3 and run.draft().outer_lr == 0.5


def test_a_window_that_is_closing_has_promised_the_next_one_already(run: Changing) -> None:
    run.store(A)
    run.set(outer_lr="0.5", codec_up="q8", h="5")
    assert run.ledger.revisions.newest.windows == (2, 3)
    assert run.ledger.revisions.newest.round == 4, "window 2, of round 1, has the old tau"
    run.durable()
    assert run.machine.windows[1].terms.codec_up == "q4"
    assert run.close().outer_lr == 0.6 and run.machine.windows[1].terms.codec_up == "q8"


def test_rounds_have_the_new_length_from_the_first_that_was_not_fixed(run: Changing) -> None:
    run.set(h="5")
    assert described(run.spec.terms, run.ledger.revisions.newest)[0]["from"] == "round 3"
    run.rounds(3)
    assert [(p.start, p.length) for p in run.journal.rounds.values()][:5] == [
        (0, 10), (10, 10), (20, 10), (30, 5), (35, 5)
    ]  # fmt: skip


def test_quorum_and_floor_are_those_of_the_window(spec: RunSpec) -> None:
    run = Run(spec, "ab", quorum=1)
    run.handle(ev.TermsGiven(revision=revision_asked_for(run.machine, {"quorum": "2"})))
    assert merged(run.play("a sends 1")) == ["a"]
    assert merged(run.play("1 is durable; a sends 1")) == [] and merged(run.play("b sends 1")) == ["ab"]


def test_who_comes_later_is_told_with_its_welcome(run: Changing) -> None:
    assert accepted(run.greet(B)).revisions == () == run.journal.saved().revisions and last_change(run.journal) == []
    run.set(outer_lr="0.5")
    welcome = accepted(run.greet(B))
    assert welcome.revisions == run.ledger.revisions.kept
    assert (welcome.spec.revision, welcome.spec.terms.outer.lr) == (1, 0.5)


@pytest.mark.parametrize(
    ("terms", "given", "sentence"),
    [
        ({}, {"steps": "30"}, "steps is 30; the rounds up to position 30 are fixed, so at least 31"),
        ({"steps": 20}, {"steps": "40"}, "the run's last round is fixed: no later one is left to change"),
        ({}, {"codec_up": "q9"}, "no codec 'q9', did you mean 'q8'?"),
        ({}, {"codec_down": "topk:share=0"}, "topk"),
        ({}, {"codec": "x"}, "no"),
        ({}, {"codec_up_of.aa": "q8"}, "codec_up_of.aa: there is no node aa in this run; did you mean a?"),
        ({}, {"h_share_of.z": "0.5"}, "h_share_of.z: there is no node z in this run"),
    ],
)
def test_what_cannot_change_is_refused_with_a_sentence(
    spec: RunSpec, terms: dict[str, Any], given: dict[str, str], sentence: str
) -> None:
    assert sentence in Changing(spec, **terms).refuses(**given)


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


def test_steps_can_be_fewer_and_codec_is_both_directions(run: Changing) -> None:
    run.set(steps="31", codec="q8")
    assert (run.ledger.spec.terms.codecs.up, run.ledger.spec.terms.codecs.down) == ("q8", "q8")
    run.rounds(1)
    assert run.journal.rounds[3].length == 1


def test_a_run_whose_last_windows_are_open_or_closed_changes_no_more(spec: RunSpec) -> None:
    run = Changing(spec, steps=20)
    for fragment in (1, 0):
        while not run.machine.windows[fragment].terms.final:
            run.close(fragment)
    assert run.refuses(outer_lr="0.5") == "the run's last windows are open: outer_lr would change in none"
    run.rounds(1)
    assert run.refuses(outer_lr="0.5") == "the run is over: nothing of it can change any more"


def test_a_restart_knows_all_revisions_and_goes_on_with_them(run: Changing) -> None:
    run.set(outer_lr="0.5")
    run.store(A)
    run.set(h="5", outer_lr="0.25")
    before = run.journal.revisions
    run.restart()
    assert run.ledger.revisions == before
    assert run.machine.windows[1].state == "closing" and run.draft().outer_lr == 0.6, "with the delta that is stored"
    assert [run.ledger.terms_of(1, window).outer.lr for window in (2, 3)] == [0.5, 0.25]


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
        run.rounds(1)
    assert run.journal.spec.revision == 3 * HISTORY_VERSIONS
    assert 2 < len(run.journal.revisions.kept) <= HISTORY_VERSIONS + 3
    assert run.journal.revisions == run.ledger.revisions


def test_so_many_changes_between_two_windows_are_too_many(run: Changing) -> None:
    for number in range(MOST - 1):
        run.set(outer_lr=str(0.3 + 0.001 * number))
    assert run.refuses(outer_lr="0.9").startswith(f"the terms changed {MOST} times within the last windows")


def test_a_window_that_stays_in_its_round_takes_the_new_terms_too(run: Changing) -> None:
    current = run.machine.windows[1].terms
    new = run.spec.terms.replace(codec_up="q8", tau=1)
    after = window_after(new, run.spec.identity.layout, current, run.ledger.rounds, stay=True)
    assert after == dataclasses.replace(current, window=2, codec_up="q8", tau=1)


def test_a_node_has_terms_of_its_own(run: Changing) -> None:
    assert "codec_up_of: a: no codec 'q2'" in run.refuses(**{"codec_up_of.a": "q2"})
    assert "without error feedback" in run.refuses(**{"codec_up_of.a": "topk:beta=0"})
    run.set(**{"codec_up_of.a": "q8", "h_share_of.a": "0.5"})
    run.close(0)
    after = run.machine.windows[0].terms
    assert (after.codec_of(A), after.codec_of(B)) == ("q8", "q4")
