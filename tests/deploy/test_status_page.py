"""The page at `/` in a real browser: it stands without scripts, keeps up with them, and runs nothing of others.

Needs chromium; skipped where there is none.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import statuses

from farloop.monitoring import page
from farloop.monitoring.endpoint import Endpoint, Response
from farloop.monitoring.status import Status

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]

QUIET = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--enable-logging=stderr", "--v=0",
]  # fmt: skip


class Site:
    """A coordinator's endpoint that tells one status after the other, the last one for good."""

    def __init__(self, *told: Status) -> None:
        self.told = list(told)
        self.asked = 0
        self.endpoint = Endpoint("127.0.0.1", 0, {"/": self.look})
        self.url = f"http://127.0.0.1:{self.endpoint.port}/"

    def look(self) -> Response:
        status = self.told[min(self.asked, len(self.told) - 1)]
        self.asked += 1
        told = json.loads(json.dumps(status, allow_nan=False))
        return Response(content_type=page.TYPE, body=page.page(told).encode(), headers=page.headers())


@pytest.fixture
def sites() -> Iterator[Any]:
    opened: list[Site] = []

    def open_site(*told: Status) -> Site:
        opened.append(Site(*told))
        return opened[-1]

    yield open_site
    for site in opened:
        site.endpoint.close()


def browse(folder: Path, *words: str) -> tuple[str, str]:
    """What a browser prints, and what it complains of."""
    assert CHROMIUM is not None
    done = subprocess.run(
        ["nice", "-n", "15", CHROMIUM, *QUIET, f"--user-data-dir={folder / 'profile'}", *words],
        capture_output=True, text=True, timeout=200, check=True, env={**os.environ, "HOME": str(folder)},
    )  # fmt: skip
    complaints = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return done.stdout, "\n".join(complaints)


def test_a_browser_shows_the_page_and_has_nothing_to_complain_of(sites: Any, tmp_path: Path) -> None:
    site = sites(statuses.status())
    shown, complaints = browse(tmp_path, "--dump-dom", site.url)
    assert "fjord-1b" in shown and "<svg" in shown and "waits for fragment 2, window 21" in shown
    assert complaints == ""


def test_with_its_script_the_page_keeps_up(sites: Any, tmp_path: Path) -> None:
    site = sites(statuses.status(), statuses.finished())
    shown, complaints = browse(tmp_path, "--dump-dom", "--virtual-time-budget=9000", site.url)
    assert site.asked >= 2
    assert "done; the model is model.safetensors" in shown and "waits for paris" not in shown
    assert re.search(r"<title>fjord-1b 100%", shown)
    assert complaints == ""


def test_what_a_node_says_does_nothing_in_a_browser(sites: Any, tmp_path: Path) -> None:
    """Neither when the page is loaded nor when the script takes over what is new: no element, no request, no dialog."""
    site = sites(statuses.status(), statuses.hostile())
    shown, complaints = browse(tmp_path, "--dump-dom", "--virtual-time-budget=9000", site.url)
    assert site.asked >= 2
    assert "&lt;img src=x onerror=alert(1)&gt;" in shown and "<img" not in shown
    assert complaints == ""


def test_the_policy_stops_a_script_that_got_in_all_the_same(sites: Any, tmp_path: Path) -> None:
    site = sites(statuses.status())
    intruder = b"<script>document.title = 'taken'</script><p style='color: red' onclick='x()'>"
    whole = site.look()
    body = whole.body.replace(b"<main>", b"<main>" + intruder)
    assert body != whole.body
    with Endpoint(
        "127.0.0.1", 0, {"/": lambda: Response(content_type=page.TYPE, body=body, headers=page.headers())}
    ) as e:
        shown, complaints = browse(tmp_path, "--dump-dom", f"http://127.0.0.1:{e.port}/")
    assert "<title>taken" not in shown
    assert "Content Security Policy" in complaints


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (500, False)])
def test_nothing_sticks_out_at_the_side(sites: Any, tmp_path: Path, width: int, dark: bool) -> None:
    """At each width the document is as wide as the window; measured by a script in a page that frames it."""
    told = statuses.hostile()
    told["nodes"] += [statuses.node("a" * 63, device="b" * 200, detail="c" * 300)]
    document = page.page(told)
    style, script = (re.search(rf"<{tag}>(.*?)</{tag}>", document, re.S) for tag in ("style", "script"))
    assert style and script
    measured = document.replace(script[0], "<script>document.title = document.documentElement.scrollWidth</script>")
    (tmp_path / "page.html").write_text(measured)
    dark_mode = ["--force-dark-mode"] if dark else []
    shown, _ = browse(tmp_path, "--dump-dom", f"--window-size={width},900", *dark_mode, f"file://{tmp_path}/page.html")
    found = re.search(r"<title>(\d+)</title>", shown)
    assert found and int(found[1]) <= width
