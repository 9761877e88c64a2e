"""Runs of real processes that end with their test, however it ends."""

from loopback import new_run  # noqa: F401 - a fixture
