"""What `farloop doctor` finds: levels, fixes, how they are printed, and the checks that need no torch."""

import dataclasses
import email.utils
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from http.client import HTTPException
from typing import Any, Final, Literal

import typer

from farloop.cli.status import DEFAULT_URL, page_of
from farloop.monitoring.healthcheck import open_page
from farloop.monitoring.status import dumps
from farloop.wire.limits import MOST_LANES

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    level: Level
    what: str
    detail: str
    fix: str = ""  # what to do; empty where nothing is wrong
    data: Mapping[str, Any] | None = None  # more facts, for programs


def ok(what: str, detail: str, data: Mapping[str, Any] | None = None) -> Finding:
    """Nothing to do."""
    return Finding(level="ok", what=what, detail=detail, data=data)


def warn(what: str, detail: str, fix: str, data: Mapping[str, Any] | None = None) -> Finding:
    """A daemon starts, but slower or less safe than it could be."""
    return Finding(level="warn", what=what, detail=detail, fix=fix, data=data)


def fail(what: str, detail: str, fix: str) -> Finding:
    """A daemon does not start, or cannot work."""
    return Finding(level="fail", what=what, detail=detail, fix=fix)


_COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}

LONG_S: Final = 0.02  # from this round trip on, the choice of congestion control matters

DRIFT_S = 2.0  # largest difference of wall clocks without a warning


def print_findings(findings: Iterable[Finding], *, as_json: bool) -> None:
    """One line per finding, with the fix after an arrow; or a JSON list."""
    if as_json:
        return typer.echo(dumps([dataclasses.asdict(finding) for finding in findings], ensure_ascii=False))
    for finding in findings:
        level = typer.style(f"{finding.level:<4}", fg=_COLORS[finding.level], bold=finding.level != "ok")
        fix = f" → {finding.fix}" if finding.fix else ""
        typer.echo(f"{level}  {finding.what:<11}  {finding.detail}{fix}")


def congestion_finding(congestion: str, rtt_s: float, *, may_choose: bool) -> Finding:
    """Whether a congestion control fits the round trip. `may_choose`: whether the machine lets a process choose bbr."""
    if congestion == "bbr" or rtt_s < LONG_S:
        return ok("congestion", congestion)
    detail = (
        f"{congestion} over {1000 * rtt_s:.0f} ms: one lost packet in a thousand costs most of the rate, and "
        f"up to {MOST_LANES} lanes give back a part of it"
    )
    fix = (
        'choose bbr: [node] congestion = "bbr"'
        if may_choose
        else "let an administrator add bbr to net.ipv4.tcp_allowed_congestion_control, then set [node] congestion"
    )
    return warn("congestion", detail, fix)


def wall_clock(url: str) -> Finding:
    """Compare wall time with the coordinator's, to read logs side by side. No decision depends on it."""
    page = page_of(url or DEFAULT_URL)
    try:
        with open_page(page, 3.0) as answer:
            theirs = email.utils.parsedate_to_datetime(answer.headers["Date"])
    except (OSError, HTTPException, TypeError, ValueError):
        return ok("wall clock", f"not compared: no page at {page} (no decision needs it)")
    # An HTTP date has whole seconds.
    drift = max(0.0, abs((datetime.now(UTC) - theirs).total_seconds()) - 1.0)
    if drift > DRIFT_S:
        fix = "training does not depend on it; to compare logs, set both clocks by NTP"
        return warn("wall clock", f"{drift:.0f} s or more from {page}", fix)
    return ok("wall clock", f"within {DRIFT_S + 1:.0f} s of {page}")
