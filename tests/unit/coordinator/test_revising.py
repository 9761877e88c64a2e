"""Other terms while the run goes on: from which window and round on, who is told, what is refused (protocol B, Z).

The run of `conftest.py`: rounds of ten steps, here ten of them. Window 1 of fragment 1 is of round 0, window 1 of
fragment 0 of round 1; rounds 0 to 2 are fixed.
"""

import dataclasses
from typing import Any

import pytest
from plain_runs import plain_hello, plain_offer

from farloop.algo.schedule import window_after
from farloop.algo.spec import NodeId, RunSpec
from farloop.coordinator.change_terms import revision_asked_for
from farloop.coordinator.commits import codecs_of
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.ledger import HISTORY_VERSIONS, Ledger
from farloop.coordinator.decide.machine import CoordinatorMachine
from farloop.coordinator.decide.revising import MOST, described, last_change
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

A, B = NodeId("a"), NodeId("b")


class Run:
    """A machine whose records are folded as the journal would; every node holds all that there is."""

    def __init__(self, spec: RunSpec, **terms: Any) -> None:
        spec = dataclasses.replace(spec, terms=spec.terms.replace(**terms))
        self.journal = Ledger.begin(rec.RunStarted(spec=spec, epoch=1))
        self.sent = 0
        self.begin()

    def begin(self) -> None:
        self.machine = CoordinatorMachine(self.journal.copy(), now=0.0)
        self.obey(self.machine.start())

    def obey(self, commands: list[ev.Command]) -> list[ev.Command]:
        for command in commands:
            if isinstance(command, ev.Record):
                self.journal.apply(rec.decode(*rec.encode(command.record)))
        return commands

    def handle(self, event: ev.Event) -> list[ev.Command]:
        commands = self.machine.handle(event, 0.0)
        self.machine.check()
        return self.obey(commands)

    def greet(self, node: NodeId, *, protocol: int = 2, round_index: int | None = None) -> list[ev.Command]:
        hello = plain_hello(protocol_max=protocol, node=node, round=round_index)
        return self.handle(ev.NodeHello(session=ord(node), node=node, hello=hello))

    def join(self, node: NodeId, *, protocol: int = 2) -> None:
        self.greet(node, protocol=protocol)
        self.handle(ev.NodeMessage(session=ord(node), node=node, message=msg.Ready()))

    def send(self, node: NodeId, fragment: int) -> list[ev.Command]:
        window = self.machine.windows[fragment].terms.window
        self.sent += 1
        offer = plain_offer(node, window, fragment=fragment, seq=self.sent, steps=1, tokens=1)
        self.handle(ev.NodeMessage(session=ord(node), node=node, message=offer))
        self.journal.apply(rec.InputStored.of(offer))
        return self.handle(ev.InputStored(offer=offer))

    def close(self, fragment: int) -> ev.Commit:
        """A's delta comes, and the window closes."""
        (commit,) = (command for command in self.send(A, fragment) if isinstance(command, ev.Commit))
        return commit

    def finish(self, commit: ev.Commit) -> rec.WindowCommitted:
        record = dataclasses.replace(commit.draft, anchor_digest=1)
        self.journal.apply(record)
        self.handle(ev.CommitDone(record=record))
        return record

    def set(self, **given: str) -> list[ev.Command]:
        revision = revision_asked_for(self.machine, given)
        return self.handle(ev.TermsGiven(revision=revision))

    def refused(self, **given: str) -> str:
        with pytest.raises(ValueError, match=r".") as refused:
            revision_asked_for(self.machine, given)
        return str(refused.value)


@pytest.fixture
def run(spec: RunSpec) -> Run:
    begun = Run(spec, steps=100)
    begun.join(A)
    return begun


def test_terms_hold_from_the_next_window_and_the_next_round_that_nobody_knows_of(run: Run) -> None:
    revision = revision_asked_for(run.machine, {"outer_lr": "0.5", "h": "5"})
    assert (revision.number, revision.windows, revision.round) == (1, (2, 2), 3)
    assert run.machine.ledger.spec.terms.outer.lr == 0.6, "asking changes nothing"


def test_they_are_in_the_journal_before_anybody_is_told(run: Run) -> None:
    commands = run.set(outer_lr="0.5")
    revision = run.machine.ledger.revisions.newest
    assert commands == [
        ev.Record(record=rec.TermsChanged(revision=revision)),
        ev.Tell(node=A, message=msg.Revised(revision=revision)),
    ]


def test_a_window_commits_under_the_terms_of_its_own_revision(run: Run) -> None:
    run.set(outer_lr="0.5", codec_up="q8", tau="1", mix="0.25")
    first = run.finish(run.close(1))
    assert first.outer_lr == 0.6 and first.next_window is not None
    following = first.next_window
    assert (following.codec_up, following.tau, following.mix) == ("q8", 1, 0.25)
    assert run.finish(run.close(1)).outer_lr == 0.5


def test_the_arithmetic_of_a_window_takes_its_own_revisions_terms(run: Run) -> None:
    """P: whatever the newest are when it is computed, or repeated."""
    run.set(outer_restart="3")
    commit = run.close(1)
    assert codecs_of(run.journal, commit.draft).terms.outer.restart == 0
    run.finish(commit)
    commit = run.close(1)
    assert codecs_of(run.journal, commit.draft).terms.outer.restart == 3


def test_a_window_that_is_closing_has_promised_the_next_one_already(run: Run) -> None:
    commit = run.close(1)
    run.set(outer_lr="0.5", codec_up="q8", h="5")
    assert run.machine.ledger.revisions.newest.windows == (2, 3)
    assert run.machine.ledger.revisions.newest.round == 4, "window 2, of round 1, has the old tau"
    second = run.finish(commit).next_window
    assert second is not None and second.codec_up == "q4"
    commit = run.close(1)
    third = run.finish(commit).next_window
    assert commit.draft.outer_lr == 0.6 and third is not None and third.codec_up == "q8"


def test_rounds_have_the_new_length_from_the_first_that_was_not_fixed(spec: RunSpec) -> None:
    run = Run(spec, steps=100)
    run.join(A)
    run.set(h="5")
    for _ in range(3):
        run.finish(run.close(1))
        run.finish(run.close(0))
    assert [run.journal.rounds[index].length for index in range(5)] == [10, 10, 10, 5, 5]
    assert [run.journal.rounds[index].start for index in range(5)] == [0, 10, 20, 30, 35]


def test_quorum_and_floor_are_those_of_the_window(spec: RunSpec) -> None:
    run = Run(spec, quorum=1, min_nodes=2)
    for node in (A, B):
        run.greet(node)
    for node in (A, B):
        run.handle(ev.NodeMessage(session=ord(node), node=node, message=msg.Ready()))
    run.set(quorum="2")
    run.finish(run.close(1))
    assert not [command for command in run.send(A, 1) if isinstance(command, ev.Commit)]
    assert [command for command in run.send(B, 1) if isinstance(command, ev.Commit)]


def test_who_comes_later_is_told_with_its_welcome(run: Run) -> None:
    run.set(outer_lr="0.5")
    (accept,) = (command for command in run.greet(B) if isinstance(command, ev.Accept))
    assert accept.welcome.revisions == run.machine.ledger.revisions.kept
    assert (accept.welcome.spec.revision, accept.welcome.spec.terms.outer.lr) == (1, 0.5)


def test_a_run_that_never_changed_says_nothing_of_revisions(run: Run) -> None:
    (accept,) = (command for command in run.greet(B) if isinstance(command, ev.Accept))
    assert accept.welcome.revisions == () and run.journal.saved().revisions == ()
    assert last_change(run.journal) == []


@pytest.mark.parametrize(("spoken", "agreed"), [(1, 1), (2, 2), (7, msg.PROTOCOL_VERSIONS[1])])
def test_the_older_of_the_two_versions_is_spoken(run: Run, spoken: int, agreed: int) -> None:
    (accept,) = (command for command in run.greet(B, protocol=spoken) if isinstance(command, ev.Accept))
    assert accept.welcome.protocol == agreed


def test_an_older_node_is_told_nothing_and_follows_what_windows_carry(run: Run) -> None:
    """Z: N−1."""
    run.greet(B, protocol=1)
    told = [command.node for command in run.set(codec_up="q8", h="5") if isinstance(command, ev.Tell)]
    assert told == [A]


def test_what_an_older_node_could_not_follow_is_refused_and_names_it(run: Run) -> None:
    run.greet(B, protocol=1)
    assert run.refused(lr="0.005").startswith("lr.peak is what nodes follow by themselves, and b cannot be told")
    run.handle(ev.NodeMessage(session=ord(B), node=B, message=msg.Leave(reason=Reason.DRAINED)))
    run.set(lr="0.005")


def test_an_older_node_waits_outside_while_a_change_it_could_not_hear_of_lies_ahead(run: Run) -> None:
    run.set(lr="0.005")
    (refuse,) = run.greet(B, protocol=1)
    assert isinstance(refuse, ev.Refuse) and refuse.refused.retriable
    assert refuse.refused.detail.startswith("lr.peak changes in round 3")
    while run.journal.current_round < 3:
        run.finish(run.close(1))
        run.finish(run.close(0))
    assert any(isinstance(command, ev.Accept) for command in run.greet(B, protocol=1))


def test_steps_can_be_more_or_fewer_but_not_before_what_is_fixed(run: Run) -> None:
    assert run.refused(steps="30") == "steps is 30; the rounds up to position 30 are fixed, so at least 31"
    run.set(steps="31")
    run.finish(run.close(1))
    run.finish(run.close(0))
    assert run.journal.rounds[3].length == 1


def test_nothing_of_rounds_changes_once_the_last_one_is_fixed(spec: RunSpec) -> None:
    run = Run(spec, steps=20)
    run.join(A)
    assert run.refused(steps="40") == "the run's last round is fixed: no later one is left to change"
    run.set(outer_lr="0.5")


def test_a_run_whose_last_windows_are_open_or_closed_changes_no_more(spec: RunSpec) -> None:
    run = Run(spec, steps=20)
    run.join(A)
    for fragment in (1, 0):
        while fragment in run.machine.windows and not run.machine.windows[fragment].terms.final:
            run.finish(run.close(fragment))
    assert run.refused(outer_lr="0.5") == "the run's last windows are open: outer_lr would change in none"
    for fragment in (1, 0):
        run.finish(run.close(fragment))
    assert run.refused(outer_lr="0.5") == "the run is over: nothing of it can change any more"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"codec_up": "q9"}, "no codec 'q9', did you mean 'q8'?"),
        ({"codec_down": "topk:share=0"}, "topk"),
        ({"codec": "x"}, "no"),
    ],
)
def test_a_codec_that_cannot_be_is_refused(run: Run, given: dict[str, str], sentence: str) -> None:
    assert sentence in run.refused(**given)


def test_codec_is_both_directions(run: Run) -> None:
    run.set(codec="q8")
    terms = run.machine.ledger.spec.terms
    assert (terms.codecs.up, terms.codecs.down) == ("q8", "q8")


def test_a_restart_knows_all_revisions_and_goes_on_with_them(run: Run) -> None:
    run.set(outer_lr="0.5")
    commit = run.close(1)
    run.set(h="5", outer_lr="0.25")
    before = run.journal.saved()
    run.begin()
    assert run.machine.ledger.saved() == before and run.machine.ledger.revisions == run.journal.revisions
    run.join(A)
    again = run.machine.windows[1]
    assert again.state == "closing", "with the delta that is stored"
    assert commit.draft.outer_lr == 0.6 and run.machine.ledger.terms_of(1, 2).outer.lr == 0.5
    assert run.machine.ledger.terms_of(1, 3).outer.lr == 0.25


def test_a_change_after_a_restart_holds_from_no_earlier_window_than_the_one_before(run: Run) -> None:
    """A window that was closing is open again after the crash, and the next change comes before it closes once more."""
    run.close(1)
    run.set(outer_lr="0.5")
    assert run.journal.revisions.newest.windows == (2, 3)
    run.journal.inputs.clear()  # as where deltas are not spooled
    run.begin()
    revision = revision_asked_for(run.machine, {"outer_lr": "0.25"})
    assert revision.windows == (2, 3) and revision.round >= run.journal.revisions.newest.round


def test_revisions_that_nobody_can_need_are_forgotten(spec: RunSpec) -> None:
    run = Run(spec, steps=2000)
    run.join(A)
    for number in range(3 * HISTORY_VERSIONS):
        run.set(outer_lr=str(0.3 + 0.001 * number))
        run.finish(run.close(1))
        run.finish(run.close(0))
    assert run.journal.spec.revision == 3 * HISTORY_VERSIONS
    assert 2 < len(run.journal.revisions.kept) <= HISTORY_VERSIONS + 3
    assert run.journal.revisions == run.machine.ledger.revisions


def test_so_many_changes_between_two_windows_are_too_many(run: Run) -> None:
    for number in range(MOST - 1):
        run.set(outer_lr=str(0.3 + 0.001 * number))
    assert run.refused(outer_lr="0.9").startswith(f"the terms changed {MOST} times within the last windows")


def test_a_revision_says_what_it_changes_and_from_where_on(run: Run) -> None:
    before = run.machine.ledger.spec.terms
    run.set(outer_lr="0.5", h="5")
    assert described(before, run.machine.ledger.revisions.newest) == [
        {"key": "h", "before": 10, "after": 5, "from": "round 3"},
        {"key": "outer_lr", "before": 0.6, "after": 0.5, "from": "windows f0:2, f1:2"},
    ]
    assert last_change(run.journal)[1] == "outer_lr 0.6 → 0.5 from windows f0:2, f1:2 on"


def test_a_window_that_stays_in_its_round_takes_the_new_terms_too(spec: RunSpec) -> None:
    run = Run(spec)
    current = run.machine.windows[1].terms
    new = spec.terms.replace(codec_up="q8", tau=1)
    after = window_after(new, spec.identity.layout, current, run.machine.ledger.rounds, stay=True)
    assert after == dataclasses.replace(current, window=2, codec_up="q8", tau=1)


def test_a_node_of_that_name_must_be_there_and_able_to_follow(run: Run) -> None:
    assert "codec_up_of.aa: there is no node aa in this run; did you mean a?" in run.refused(**{"codec_up_of.aa": "q8"})
    assert "h_share_of.z: there is no node z in this run" in run.refused(**{"h_share_of.z": "0.5"})
    assert "a speaks a version of the protocol" in run.refused(**{"codec_up_of.a": "q8"})
    run.greet(A, protocol=msg.PROTOCOL_VERSIONS[1], round_index=0)
    assert "codec_up_of: a: no codec 'q2'" in run.refused(**{"codec_up_of.a": "q2"})
    assert "without error feedback" in run.refused(**{"codec_up_of.a": "topk:beta=0"})
    run.set(**{"codec_up_of.a": "q8", "h_share_of.a": "0.5"})
    after = run.finish(run.close(0)).next_window
    assert after is not None and (after.codec_of(A), after.codec_of(B)) == ("q8", "q4")
