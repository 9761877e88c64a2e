"""Cases that are left out of the default run: `make test-slow` runs them."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

DEFAULT_EXAMPLES = 50


def examples(count: int) -> int:
    """For `settings` of a law with costly examples: this many, and in `make test-slow` four times as many."""
    return max(1, count * settings.default.max_examples // DEFAULT_EXAMPLES)


def slow(*cases: Any) -> list[Any]:
    """For `parametrize`: a value each, or a tuple where the test has several names."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]


def mostly_slow(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """For `parametrize`: all cases in their order, slow unless they are among `kept`."""
    return [case if case in kept else slow(case)[0] for case in cases]
