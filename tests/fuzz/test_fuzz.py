"""Whatever bytes come through a door, they are refused in its own words, or are as good as they look.

Never another error, never much memory, never much time. Every target is fed what was found before
(`cases/TARGET/*`), bytes that hypothesis thinks of, and mutations of good inputs in a process of bounded memory. For
more of them: `python tests/fuzz/fuzz_run.py TARGET|all --inputs 1000000`.
"""

import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from fuzz_mutator import join, split
from fuzz_run import CASES, TARGETS, cases_of
from fuzz_target import Target
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

RUN = Path(__file__).parent / "fuzz_run.py"

any_target = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)


@any_target
def test_good_inputs_are_good_and_what_was_found_stays_mended(target: Target) -> None:
    assert any(target.outcome(data).startswith("accepted") for data in target.seeds())
    for data in cases_of(target):
        target.outcome(data)


def test_every_folder_of_cases_is_of_a_target() -> None:
    folders = {path.name for path in CASES.iterdir()} if CASES.exists() else set()
    assert folders <= TARGETS.keys()


@any_target
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=300), seed=st.integers(0, 1 << 32), sealed=st.booleans())
def test_any_bytes_are_refused_or_good(target: Target, data: bytes, seed: int, sealed: bool) -> None:
    for made in (data, target.mutate(Random(seed), data or target.seeds()[0])):
        target.outcome(target.seal(made) if sealed else made)


@pytest.mark.timeout(400)  # processor time is bounded, and waiting for a processor is not
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="address spaces are bounded on Linux alone")
def test_mutations_of_good_inputs_cost_neither_memory_nor_time_nor_another_error() -> None:
    words = [sys.executable, str(RUN), "all", "--together", "--inputs", "25"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("found 0") == len(TARGETS)


@given(st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=20)), max_size=5))
def test_a_sequence_comes_apart_as_it_was_joined(items: list[tuple[int, bytes]]) -> None:
    assert split(join(items)) == items
