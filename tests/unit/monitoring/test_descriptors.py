"""Covers `monitoring/descriptors.py`, each case in a process of its own: limits are a process's."""

import subprocess
import sys
import textwrap

import pytest

HEAD = """
import errno, os, resource
from farloop.monitoring import descriptors

def null():
    return os.open("/dev/null", os.O_RDONLY)

def error_of(call):
    try:
        while True:
            call()
    except OSError as error:
        return error.errno
"""

CASES = {
    "the soft limit is raised to the hard one": """
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 600))
        assert (descriptors.limit(), descriptors.hard_limit()) == (100, 600)
        assert descriptors.raise_limit() == 600 == descriptors.limit()
        """,
    "a file is opened by a spare descriptor where connections have filled the table": """
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300))
        assert descriptors.raise_limit(spare=descriptors.SPARE) == 300 - descriptors.SPARE
        assert error_of(null) == errno.EMFILE
        for _ in range(descriptors.SPARE - 10):
            descriptors.with_spare(null)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300 - descriptors.SPARE, 300)
        """,
    "where there is none to spare, or another cause, the error is told": """
        resource.setrlimit(resource.RLIMIT_NOFILE, (50, 50))
        assert error_of(lambda: descriptors.with_spare(lambda: os.open("/not/here", os.O_RDONLY))) == errno.ENOENT
        assert error_of(lambda: descriptors.with_spare(null)) == errno.EMFILE
        """,
}


@pytest.mark.skipif(sys.platform != "linux", reason="limits are tried out on Linux")
@pytest.mark.parametrize("code", CASES.values(), ids=CASES)
def test_descriptors(code: str) -> None:
    words = [sys.executable, "-c", HEAD + textwrap.dedent(code)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
