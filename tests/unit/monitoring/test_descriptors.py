"""Covers `monitoring/descriptors.py`, each in a process of its own: limits are a process's."""

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits are tried out on Linux")


def run(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import os, resource\n" + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    run(
        """
        from farloop.monitoring import descriptors
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 600))
        assert (descriptors.limit(), descriptors.hard_limit()) == (100, 600)
        assert descriptors.raise_limit() == 600 == descriptors.limit()
        """
    )


def test_a_file_is_opened_by_a_spare_descriptor_where_no_other_is_left() -> None:
    """Who fills the table with connections does not keep the coordinator from its disk."""
    run(
        """
        from farloop.monitoring import descriptors
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300))
        assert descriptors.raise_limit(spare=descriptors.SPARE) == 300 - descriptors.SPARE
        taken = []
        try:
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        for _ in range(descriptors.SPARE - 10):
            taken.append(descriptors.with_spare(lambda: os.open("/dev/null", os.O_RDONLY)))
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300 - descriptors.SPARE, 300)
        """
    )


def test_where_there_is_none_to_spare_the_error_is_told() -> None:
    run(
        """
        import errno
        from farloop.monitoring import descriptors
        resource.setrlimit(resource.RLIMIT_NOFILE, (50, 50))
        try:
            while True:
                descriptors.with_spare(lambda: os.open("/dev/null", os.O_RDONLY))
        except OSError as error:
            assert error.errno == errno.EMFILE
        """
    )


def test_what_has_another_cause_is_not_tried_again() -> None:
    run(
        """
        from farloop.monitoring import descriptors
        try:
            descriptors.with_spare(lambda: os.open("/not/here", os.O_RDONLY))
        except FileNotFoundError:
            raise SystemExit(0)
        raise SystemExit(1)
        """
    )
