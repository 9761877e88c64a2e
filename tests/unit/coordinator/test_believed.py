"""What peers claim is bounded before it is known: any sequence of well-typed messages leaves a state that recovers."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from coordinator_run import refused
from fuzz_machine import HONEST, HOSTILE, METHODS, Fuzzed, spec_of
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_runs import plain_hello, plain_offer, plain_progress
from slow_cases import examples

from farloop.algo.spec import Lease, NodeId
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.decide.machine import CoordinatorMachine
from farloop.coordinator.decide.roster import EXPIRE_S
from farloop.coordinator.decide.run_state import Decisions
from farloop.coordinator.storage.journal import Journal
from farloop.coordinator.storage.state_reader import ledger_of, read_journal
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

MOST = (1 << 64) - 1
ANCHORS = tuple(msg.AnchorRef(fragment=f, version=0, digest=100 + f) for f in range(2))


def greeting(**changes: Any) -> msg.Hello:
    return plain_hello(**{"node": HOSTILE, "anchors": ANCHORS, **changes})


def report(**changes: Any) -> msg.Progress:
    return plain_progress(**{"loss": 2.5, "sample_watermark": 1, "samples_left": 0, **changes})


def delta(version: int = 0, **changes: Any) -> msg.Offer:
    return plain_offer(HOSTILE, version + 1, **{"fragment": 0, "steps": 4, "tokens": 4, **changes})


class Told(Fuzzed):
    """Both nodes train; messages of the hostile one go through their bytes."""

    def __init__(self, method: str = "streaming") -> None:
        super().__init__(spec_of(method))
        for node in (HOSTILE, HONEST):
            self.open.add(node)
            self.greeted(node, greeting(node=node))
            self.say(node, msg.Ready())

    def comes_back_after_its_samples_went_to_others(self) -> None:
        self.loses(HOSTILE)
        self.pass_time(60.0)
        self.pass_time(2 * EXPIRE_S)
        self.open.add(HOSTILE)
        self.greeted(HOSTILE, greeting(round=0))

    def recovers(self) -> None:
        """From what its records say, and from the one record of all of it."""
        saved = rec.encode(self.journal.saved())
        again = rec.decode(*saved)
        assert isinstance(again, rec.LedgerSaved)
        assert rec.encode(Ledger.resume(again).saved()) == saved
        rec.encode(self.ledger.saved())
        CoordinatorMachine(Ledger.resume(again), now=self.now).check()


@pytest.fixture
def run() -> Told:
    return Told()


def test_a_node_that_greets_twice_with_a_watermark_of_64_bits_leaves_a_ledger_that_can_be_written(run: Told) -> None:
    for _ in range(2):
        run.comes_back_after_its_samples_went_to_others()
        run.say(HOSTILE, report(sample_watermark=MOST))
        assert "it claims to have used 18446744073709551615 samples" in run.alarms[f"report of {HOSTILE}"]
    assert run.ledger.leases.granted_total < 10_000 > run.ledger.leases.uncertain_total
    run.recovers()


def test_a_journal_with_such_a_number_is_read(run: Told) -> None:
    run.write(rec.NodeLeft(node=HOSTILE, reason=Reason.SILENT, consumed=MOST, stored=MOST))
    lease = Lease(start=run.journal.leases.frontier, count=10)
    run.write(rec.LeaseGranted(node=HOSTILE, incarnation=1, lease=lease, consumed=MOST, stored=MOST, since=MOST))
    run.journal.check()
    run.recovers()


def test_a_record_that_cannot_be_encoded_is_refused_before_it_is_part_of_any_state(run: Told) -> None:
    decisions, before = Decisions(run.ledger), rec.encode(run.ledger.saved())
    with pytest.raises(ValueError, match="EpochSeen cannot be written to the journal"):
        decisions.record(rec.EpochSeen(epoch=MOST + 1))
    assert decisions.pop_commands() == [] and rec.encode(run.ledger.saved()) == before


def test_a_round_that_no_node_was_told_of_is_not_the_one_that_a_node_began_with(run: Told) -> None:
    run.greeted(HOSTILE, greeting(incarnation=2, round=(1 << 63) - 1))
    assert run.ledger.started[HOSTILE].round == max(run.ledger.rounds)


@pytest.mark.parametrize("name", ["", "x" * 64, "a b", "a\nb", "ä", "../x"])
def test_a_name_that_is_none_is_refused_in_one_line(run: Told, name: str) -> None:
    said = refused(run.greeted(NodeId(name), greeting(node=NodeId(name))))
    assert said.reason is Reason.MALFORMED and not said.retriable
    assert "is not a node name: letters, digits" in said.detail and "\n" not in said.detail
    assert NodeId(name) not in run.machine.members


NUMBERS = st.integers(0, 20) | st.sampled_from(
    [-1, 2**20, 2**31, 2**32 - 1, 2**53, 2**60, 2**62, 2**63 - 1, 2**63, MOST]
)
REALS = st.floats(0.0, 50.0) | st.sampled_from([-1.0, 1e300, float("inf"), float("nan")])
REFS = st.lists(st.builds(msg.AnchorRef, fragment=NUMBERS, version=NUMBERS, digest=NUMBERS), max_size=3).map(tuple)
OWN = st.just(ANCHORS) | REFS
MESSAGES: st.SearchStrategy[msg.Message] = st.one_of(
    st.builds(
        greeting, incarnation=st.just(1) | NUMBERS, epoch_seen=st.just(1) | NUMBERS, anchors=OWN,
        announced=st.just(()) | REFS, round=st.none() | st.just(0) | NUMBERS, history=st.just(0) | NUMBERS,
        device=st.text(max_size=5),
    ),
    st.builds(msg.Ready, history=st.just(0) | NUMBERS),
    st.builds(
        report, state=st.sampled_from(["training", "waiting", "draining"]), position=REALS, round=NUMBERS,
        inner_steps=NUMBERS, tokens=NUMBERS, loss=st.none() | REALS, tokens_per_s=REALS, blocked_s=REALS,
        lost_steps=NUMBERS, sample_watermark=NUMBERS, sent=st.builds(msg.BytesByKind, delta=NUMBERS),
        samples_left=st.none() | st.just(0) | NUMBERS,
    ),
    # Of the fields that matter one is bent at a time, or hardly any report would be believed.
    st.builds(report, sample_watermark=NUMBERS),
    st.builds(
        delta, fragment=st.integers(0, 1) | NUMBERS, version=st.integers(0, 2) | NUMBERS, seq=NUMBERS,
        steps=st.just(4) | NUMBERS, tokens=st.just(4) | NUMBERS, norm_sq=st.just(1.0) | REALS, size=NUMBERS,
        digest=NUMBERS, consumed=st.none() | NUMBERS, history=st.just(0) | NUMBERS,
    ),
    st.builds(msg.Fetch, fragment=NUMBERS),
    st.builds(
        msg.Evaluation, loss=REALS, versions=st.lists(NUMBERS, max_size=3).map(tuple), position=REALS, seconds=REALS,
    ),
    st.builds(msg.Leave, reason=st.sampled_from(Reason), detail=st.text(max_size=5), anchors=OWN),
)  # fmt: skip
STEPS = st.lists(MESSAGES | st.sampled_from(["gone", "back", "later", "settled", "failed"]), max_size=25)


@settings(max_examples=examples(25))
@given(method=st.sampled_from(METHODS), steps=STEPS)
def test_any_well_typed_messages_leave_a_state_that_recovers(method: str, steps: list[msg.Message | str]) -> None:
    run = Told(method)
    for step in steps:
        match step:
            case "gone":
                run.loses(HOSTILE)
            case "back":
                run.comes_back_after_its_samples_went_to_others()
            case "later":
                run.pass_time(20.0)
            case "settled" | "failed":
                run.settled(well=step == "settled")
            case str():
                raise AssertionError(step)
            case message:
                try:
                    data = msg.encode(message)
                except OverflowError:
                    continue
                run.hears(HOSTILE, data)
        run.recovers()
    with tempfile.TemporaryDirectory() as folder:
        journal, _ = Journal.open(Path(folder))
        for record in run.records:
            journal.append(record)
        journal.sync()
        journal.close()
        found = [entry.record for entry in read_journal(Path(folder))]
    ledger = ledger_of(Path(folder), found[0])
    for record in found[1:]:
        ledger.apply(record)
    assert rec.encode(ledger.saved()) == rec.encode(run.journal.saved())
    ledger.check()
