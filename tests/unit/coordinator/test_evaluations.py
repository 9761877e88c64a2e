"""Whose evaluations are waited for (protocol J)."""

import dataclasses

import pytest

from farloop.algo.spec import NodeId, RunSpec
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.decide.machine import Evaluations

A, B = NodeId("a"), NodeId("b")


@pytest.fixture
def ledger(spec: RunSpec) -> Ledger:
    """Fragment 1, the last one, is at version 20."""
    identity = dataclasses.replace(spec.identity, evaluation_set="0123")
    ledger = Ledger.begin(rec.RunStarted(spec=dataclasses.replace(spec, identity=identity), epoch=1))
    ledger.versions = [19, 20]
    ledger.evaluations.append(rec.EvaluationTaken(loss=1.0, versions=(20, 20), position=1.0))
    return ledger


def test_an_answer_settles_what_the_same_node_was_asked_before(ledger: Ledger) -> None:
    evaluations = Evaluations(ledger)
    for version, node in ((18, B), (19, A), (20, A)):
        evaluations.ask(version, node)
    assert evaluations.evaluator == A
    assert evaluations.asked(A, (19, 20)) == 20
    evaluations.answered(20)
    assert evaluations.asked(A, (19, 20)) is None
    assert evaluations.asked(B, (19, 20)) == 18 and evaluations.evaluator == B


def test_a_question_is_not_answered_by_an_older_version(ledger: Ledger) -> None:
    evaluations = Evaluations(ledger)
    evaluations.ask(20, A)
    assert evaluations.asked(A, (19, 19)) is None
    assert evaluations.asked(A, (19, 20)) == 20


def test_questions_that_nobody_answers_are_forgotten_in_time(ledger: Ledger) -> None:
    evaluations = Evaluations(ledger)
    for version in range(1, 21):
        evaluations.ask(version, B if version <= 4 else A)
    assert evaluations.asked(B, (19, 20)) is None
    assert evaluations.asked(A, (19, 5)) == 5


def test_what_an_earlier_incarnation_may_have_asked_for_is_answered_once_by_anybody(ledger: Ledger) -> None:
    ledger.evaluations[-1] = rec.EvaluationTaken(loss=1.0, versions=(16, 17), position=1.0)
    evaluations = Evaluations(ledger)
    assert evaluations.asked(A, (17, 17)) is None
    assert [evaluations.asked(A, (17, version)) for version in (18, 19, 20)] == [18, 19, 20]
    evaluations.answered(19)
    assert [evaluations.asked(B, (17, version)) for version in (18, 19, 20)] == [None, None, 20]


def test_a_run_that_evaluates_nothing_takes_nothing(spec: RunSpec) -> None:
    ledger = Ledger.begin(rec.RunStarted(spec=spec, epoch=1))
    ledger.versions = [3, 3]
    assert Evaluations(ledger).asked(A, (3, 3)) is None
