"""Observation of a run: status, metrics, logs, and the detection of stragglers with their mitigation."""
