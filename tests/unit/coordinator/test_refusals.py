"""Covers `coordinator/observe/event_log.py`: everything is counted, and the log stays readable."""

import logging

import pytest

from farloop.coordinator.observe.event_log import RejectionCounter
from farloop.coordinator.observe.metrics import Metrics
from farloop.wire.reasons import Reason


def test_everything_is_counted_by_its_reason_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    refusals = RejectionCounter(metrics)
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            refusals(Reason.MALFORMED, "10.6.6.6")
        refusals(Reason.TOO_OFTEN, "a")
    text = metrics.exposition().decode()
    assert 'farloop_turned_away_total{reason="malformed"} 100.0' in text
    assert 'farloop_turned_away_total{reason="too_often"} 1.0' in text
    assert [record.getMessage().split(" why=")[0] for record in caplog.records] == [
        "turned away who='10.6.6.6' reason=MALFORMED",
        "turned away who='a' reason=TOO_OFTEN",
    ]


def test_a_crowd_of_strangers_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    refusals = RejectionCounter(Metrics())
    with caplog.at_level(logging.WARNING):
        for i in range(10_000):
            refusals(Reason.WRONG_KEY, f"key-{i}")
        refusals(Reason.TOO_OFTEN, "a")
    assert 0 < len(caplog.records) <= 17
    assert "TOO_OFTEN" in caplog.records[-1].getMessage(), "nor drown what is said of others"
