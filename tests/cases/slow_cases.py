"""Cases that are left out of the default run: `make chaos` and `make test-cluster` run them."""

from typing import Any

import pytest


def slow(*cases: Any) -> list[Any]:
    """For `parametrize`: a value each, or a tuple where the test has several names."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]
