"""`farloop top`: a live view of a run on a whole terminal. What it looks like is in `top_screen.py`."""

import importlib.util

from farloop.cli.exit_codes import CommandError
from farloop.cli.status import fetch
from farloop.monitoring.gist import cleaned
from farloop.monitoring.status import Status

MISSING = "farloop top needs textual: pip install 'farloop[top]'; farloop status --watch does without"


def top(url: str) -> None:
    """Show the run until `q`.

    Raises:
        CommandError: textual is missing, nobody answers at `url`, or it is no coordinator.
    """
    if importlib.util.find_spec("textual") is None:
        raise CommandError(MISSING)

    def look() -> Status:
        return cleaned(fetch(url))

    first = look()  # before the screen is taken: an address that is none is one line
    from farloop.cli.top_screen import Top

    Top(first, look).run()
