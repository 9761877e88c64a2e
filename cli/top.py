"""`farloop top`: a live view of a run on a whole terminal. What it looks like is in `top_screen.py`."""

import importlib.util
import os
from collections.abc import Mapping

from farloop.cli.exit_codes import CommandError
from farloop.cli.status import fetch
from farloop.monitoring.gist import cleaned
from farloop.monitoring.status import Status

MISSING = "farloop top needs textual: pip install 'farloop[top]'; farloop status --watch does without"


def is_light(environ: Mapping[str, str]) -> bool:
    """Whether the terminal says in COLORFGBG, as "0;15", that its background is light; many say nothing."""
    return environ.get("COLORFGBG", "").rpartition(";")[2] in ("7", "15")


def top(url: str, *, light: bool | None = None) -> None:
    """Show the run until `q`, dark or light; None: as the terminal says that it is, or else dark.

    Raises:
        CommandError: textual is missing, nobody answers at `url`, or it is no coordinator.
    """
    if importlib.util.find_spec("textual") is None:
        raise CommandError(MISSING)

    def look() -> Status:
        return cleaned(fetch(url))

    first = look()  # before the screen is taken: an address that is none is one line
    from farloop.cli.top_screen import Top

    Top(first, look, is_light=is_light(os.environ) if light is None else light).run()
