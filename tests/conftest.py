"""For every test: one thread of arithmetic in each process, and no deadline of an example. `make test-slow` tries four
times as many examples of every law.

Tests and the processes that they start share the processors, and are small. With a thread per processor each, they wait
for each other at every sum: on a busy machine a test of three seconds took two minutes.
"""

import os

import pytest
from hypothesis import settings
from slow_cases import DEFAULT_EXAMPLES

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is loaded, here and in what is started from here
settings.register_profile("farloop", deadline=None, max_examples=DEFAULT_EXAMPLES)
settings.register_profile("thorough", deadline=None, max_examples=4 * DEFAULT_EXAMPLES)
settings.load_profile("farloop")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite", action="store_true", help="write what follows in stories anew: see tests/cases/stories.py"
    )


@pytest.fixture
def rewrite(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--rewrite"))
