"""The status of a coordinator on this machine: of its page, and of the folder of a finished run."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Final

from farloop.monitoring.healthcheck import open_page
from farloop.monitoring.status import Status

PAGE_TIMEOUT_S: Final = 0.5  # a coordinator that stands still does not answer; the storm goes on


def page(http: int, timeout_s: float = PAGE_TIMEOUT_S) -> Status | None:
    """The status page at a port of this machine, if it answers."""
    url = f"http://127.0.0.1:{http}/status"
    with suppress(OSError, ValueError), open_page(url, timeout_s) as answer:
        status: Status = json.load(answer)
        return status or None  # nothing is on the page before the first look at the run
    return None


def final_status(state: Path) -> Status | None:
    """What a coordinator wrote of a run that is finished; None of one that is not."""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        status: Status = json.loads((state / "status.json").read_text())
        return status if status["run"]["state"] == "finished" else None
    return None
