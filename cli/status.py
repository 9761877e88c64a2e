"""The command status: fetch the status of a running coordinator and show it, once or until the run ends."""

import contextlib
import json
import socket
import time
from http.client import BadStatusLine, HTTPException
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

from rich.console import Console

from farloop.cli.options import STATE
from farloop.config.exit_codes import CommandError, ExitCode
from farloop.coordinator.admin import MAX_ANSWER_BYTES, ask
from farloop.coordinator.errors import NoFolder
from farloop.coordinator.storage.files import state_folder, state_inside
from farloop.monitoring.healthcheck import open_page
from farloop.monitoring.status import STATUS_FILE, Status, saved_status
from farloop.monitoring.status_summary import cleaned, view_of

DEFAULT_URL = "http://127.0.0.1:9700"
_WANTED = f"{{}} takes the coordinator's [coordinator] http, as {DEFAULT_URL}"

TIMEOUT_S = 5.0
POLL_S = 1.0


def fetch(url: str, option: str = "--url") -> Status:
    """The status of the coordinator at `url`, which the option gave. Raises CommandError: no coordinator answers."""
    page = page_of(url, option)
    try:
        with open_page(page, TIMEOUT_S) as answer:
            if answer.status != 200 and answer.headers.get_content_type() != "application/json":
                if answer.status == 503:  # a standby says for whom it stands by
                    raise CommandError(f"{page}: {cleaned(answer.read(300).decode(errors='replace').strip())}")
                raise CommandError(
                    f"{page} answers {answer.status}; is this a farloop coordinator's [coordinator] http?"
                )
            status = json.loads(answer.read(MAX_ANSWER_BYTES))  # with 503 it stands still: an alarm says so
    except (OSError, HTTPException) as error:
        if (isinstance(error, BadStatusLine) and not isinstance(error, OSError)) or _speaks_first(page):
            what = "what answers there, as on the port of nodes, is not the status page"
            raise CommandError(f"{page}: {what}; {_WANTED.format(option)}") from None
        reason = getattr(error, "reason", error)
        what = getattr(reason, "strerror", None) or str(reason)
        over = end_of(STATE)
        here = (
            f"give the address that it says at its start: {option}; if it says none, [coordinator] http is empty and "
            "its pages are off: farloop status --state DIR"
        )
        fix = f"{over}: farloop status --state {STATE}" if over else here
        raise CommandError(f"no coordinator at {page}: {what.lower()}; {fix}", ExitCode.UNREACHABLE) from None
    except ValueError:
        raise CommandError(f"{page} is not a farloop coordinator's status") from None
    if not isinstance(status, dict) or "run" not in status or "nodes" not in status:
        raise CommandError(f"{page} is not a farloop coordinator's status, or it has only just started")
    return cast(Status, status)


def saved(folder: Path) -> Status:
    """What the coordinator that runs on a state folder tells, with or without pages; else what the last one told as it
    ended. Raises CommandError: it does not answer, or there is neither; NoFolder."""
    if (told := asked(folder)) is not None:
        return told
    try:
        return cast(Status, json.loads((folder / STATUS_FILE).read_bytes()))
    except (OSError, ValueError) as error:
        state_folder(folder)
        what = (getattr(error, "strerror", None) or str(error)).lower()
        raise CommandError(
            f"no coordinator runs on {folder}, and none has ended there in order ({STATUS_FILE}: {what})"
            + state_inside(folder)
        ) from None


def asked(folder: Path) -> Status | None:
    """What the coordinator that runs on a state folder tells; None: none runs. Raises CommandError: no answer."""
    try:
        return cast(Status, ask(folder, {"do": "status"}, TIMEOUT_S))
    except (TimeoutError, ValueError) as error:
        said = f"the coordinator on {folder} does not answer: {error}; see its log"
        raise CommandError(said, ExitCode.UNREACHABLE) from None
    except OSError:
        return None


def end_of(folder: Path) -> str | None:
    """The finished run that a state folder holds, as a sentence; None otherwise."""
    try:
        run = saved(folder)["run"]
    except (CommandError, NoFolder, KeyError, TypeError):
        return None
    return f"run {run['name']} is finished" if run["state"] == "finished" else None


def page_of(url: str, option: str = "--url") -> str:
    """`host:port`, `http://host:port` or the page itself → the page. Raises CommandError."""
    page = (url if "://" in url else f"http://{url}").rstrip("/")
    with contextlib.suppress(ValueError):  # a port that is none
        parts = urlsplit(page)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and " " not in page:
            return page if page.endswith("/status") else f"{page}/status"
    raise CommandError(f"{option}: {url!r} is not the address of a page; {_WANTED.format(option)}")


def _speaks_first(page: str) -> bool:
    """Whether the port greets whoever connects, as ZeroMQ does and no HTTP server."""
    parts = urlsplit(page)
    with contextlib.suppress(OSError), socket.create_connection((parts.hostname or "", parts.port or 80), 1.0) as trial:
        return trial.recv(1) == b"\xff"
    return False


def show(status: Status, console: Console) -> None:
    from farloop.cli.status_view import draw

    status, (width, height) = cleaned(status), console.size
    console.print(draw(view_of(status), width=width, max_nodes=max(height, 40)))


def show_network(status: Status, console: Console) -> None:
    from farloop.cli.status_view import draw_network

    console.print(draw_network(cleaned(status)))


def watch(url: str, state: Path | None, console: Console) -> None:
    """Show the status of the coordinator at `url`, or on the folder `state`, until its run ends, or Ctrl-C."""
    status = cleaned(fetch(url) if state is None else saved(state))
    from farloop.cli.progress import Display

    with Display(console) as display:
        display.update(status)
        while True:
            time.sleep(POLL_S)
            found, why = None, f"no coordinator runs on {state}"
            try:
                found = fetch(url) if state is None else asked(state)
            except CommandError as error:
                why = str(error).partition(";")[0]
            if found is not None:
                display.update(status := cleaned(found))
                continue
            if (kept := (state and saved_status(state)) or status)["run"]["state"] == "finished":
                return display.update(cleaned(kept), last=True)
            display.wait(f"{why}; waiting for it to start again (Ctrl-C ends this)")
