"""Ends a process with the one that started it."""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping

AGENT = "FARLOOP_AGENT"  # the process of the agent that starts ranks, in their environment

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_torchrun(environ: Mapping[str, str]) -> None:
    """Have the system kill this process when torchrun's agent, its parent, dies: a killed agent leaves its ranks.

    One that has died already is known where it was farloop's own, and ends the process at once.
    """
    if "TORCHELASTIC_RUN_ID" not in environ or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if environ.get(AGENT, str(os.getppid())) != str(os.getppid()):
        os._exit(1)
