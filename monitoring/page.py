"""The status page of a run, as one HTML text."""

import base64
import hashlib
import html
import math
from collections.abc import Iterable, Sequence
from importlib.resources import files

from farloop.monitoring.status import HappeningStatus, NodeStatus, Status, WindowStatus
from farloop.monitoring.status_summary import (
    anomaly_lines,
    ended_well,
    part_text,
    printable,
    reduction,
    standing,
    sync_text,
)
from farloop.monitoring.units import (
    NOTHING,
    count_text,
    duration_text,
    factor_text,
    loss_text,
    percent_text,
    plural,
    size_text,
    speed_text,
)

# --- HTML that cannot be injected into: a text is escaped unless it was made here. Nothing of a page's contents.


class Markup(str):
    """HTML that is right as it stands."""

    __slots__ = ()


NONE = Markup()


def text(value: str) -> Markup:
    """A text as HTML, in elements and in attributes alike; what cannot be printed becomes `?`."""
    return value if isinstance(value, Markup) else Markup(html.escape(printable(value)))


def joined(*parts: str) -> Markup:
    """One after the other; plain texts are escaped."""
    return Markup("".join(text(part) for part in parts))


def tag(name: str, /, *children: str, **attributes: str | bool) -> Markup:
    """An element. `class_` and the like lose the underscore, others become hyphens; False leaves an attribute out."""
    shown = "".join(_attribute(key, value) for key, value in attributes.items() if value is not False)
    inside = joined(*children)
    return Markup(f"<{name}{shown}>" if name in _VOID else f"<{name}{shown}>{inside}</{name}>")


_VOID = frozenset({"meta", "link", "br"})


def _attribute(key: str, value: str | bool) -> str:
    key = key.rstrip("_").replace("_", "-")
    return f" {key}" if value is True else f' {key}="{text(str(value))}"'


# --- The validation-loss curve of the status page, as an SVG that style sheets colour and nothing has to load.


WIDTH, HEIGHT = 720, 180
LEFT, RIGHT, TOP, BOTTOM = 34, 10, 10, 24
"""Margins, for the numbers at the axes."""

MOST_POINTS = 400
"""Of a curve; more are thinned out."""

Point = tuple[float, float | None]
"""A step and a loss; None breaks the line."""


def curve(points: Sequence[Point], *, last_step: float) -> Markup:
    """Loss over steps, from 0 to `last_step`; nothing before there are two losses."""
    losses = [loss for _, loss in points if loss is not None]
    if len(losses) < 2 or last_step <= 0:
        return NONE
    ticks = _ticks(min(losses), max(losses))
    low, high = min(ticks[0], *losses), max(ticks[-1], *losses)

    def x_of(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * min(step / last_step, 1.0)

    def y_of(loss: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (loss - low) / (high - low))

    grid = [_rule(y_of(tick), f"{tick:g}") for tick in ticks]
    grid += [_below(x_of(step), count_text(step), step / last_step) for step in (0.0, last_step / 2, last_step)]
    path, pen = [], "M"
    for step, loss in thinned(points):
        if loss is None:
            pen = "M"
        else:
            path.append(f"{pen}{x_of(step):.1f} {y_of(loss):.1f}")
            pen = "L"
    step, loss = next((step, loss) for step, loss in reversed(points) if loss is not None)
    words = f"validation loss from {losses[0]:.3f} to {losses[-1]:.3f} at step {step:,.0f} of {last_step:,.0f}"
    return tag(
        "svg",
        *grid,
        tag("path", class_="line", d=" ".join(path)),
        tag("circle", class_="tip", cx=f"{x_of(step):.1f}", cy=f"{y_of(loss):.1f}", r="3"),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=words,
    )


def thinned(points: Sequence[Point]) -> Sequence[Point]:
    """No more than `MOST_POINTS`, first and last kept."""
    if len(points) <= MOST_POINTS:
        return points
    return [points[round(index * (len(points) - 1) / (MOST_POINTS - 1))] for index in range(MOST_POINTS)]


def _ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Round numbers from below `low` to above `high`: 1, 2 or 5 times a power of ten apart."""
    span = max(high - low, 1e-3 * max(abs(low), abs(high), 1e-3))
    power = 10.0 ** math.floor(math.log10(span / wanted))
    step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= wanted)
    first, last = math.floor(low / step), math.ceil(high / step)
    last = max(last, first + 1)  # all losses are one, and that is a round number
    return [index * step for index in range(first, last + 1)]


def _rule(y: float, label: str) -> Markup:
    line = tag("line", class_="grid", x1=str(LEFT), x2=str(WIDTH - RIGHT), y1=f"{y:.1f}", y2=f"{y:.1f}")
    return joined(line, tag("text", text(label), class_="y", x=str(LEFT - 6), y=f"{y:.1f}"))


def _below(x: float, label: str, share: float) -> Markup:
    anchor = "start" if share == 0 else "end" if share == 1 else "middle"
    return tag("text", text(label), class_="x", x=f"{x:.1f}", y=str(HEIGHT - 6), text_anchor=anchor)


# --- The page at `/`: a run's status for a person with a browser. A pure function from a status to HTML.
#
# It is whole without scripts. With them it fetches itself again every two seconds and takes over what has changed, so
# that all of it is written in one place, here. It loads nothing from elsewhere, and its policy lets it run nothing but
# its own script: most of what it shows, nodes say about themselves.


MOST_NODES = 200
MOST_WINDOWS = 128
"""More are counted: `/status` has all."""

RELOAD_S = 5
"""Between two looks of a browser that runs no scripts."""

_OWN = files("farloop.monitoring")
_STYLE = _OWN.joinpath("page.css").read_text()
_SCRIPT = _OWN.joinpath("page.js").read_text()


def _hash_of(inline: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()}'"


POLICY = "; ".join(
    (
        "default-src 'none'",
        f"style-src {_hash_of(_STYLE)}",
        f"script-src {_hash_of(_SCRIPT)}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)

TYPE = "text/html; charset=utf-8"
HEADERS = (("Content-Security-Policy", POLICY), ("Referrer-Policy", "no-referrer"))
"""What the page is to be sent with."""


def page(status: Status | None) -> str:
    """The whole document; None before the coordinator has a status."""
    if status is None:
        return _document("farloop", _live("head", tag("h1", "farloop"), tag("p", "The run is being read.")))
    position, steps = min(status["position"], status["run"]["steps"]), status["run"]["steps"]
    return _document(
        f"{status['run']['name']} {percent_text(position / steps)} · farloop",
        tag("header", _live("head", *_head(status, position))),
        tag("main", *_sections(status)),
        tag("footer", _live("foot", *_foot(status))),
    )


def _document(title: str, *parts: str) -> str:
    head = joined(
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("noscript", tag("meta", http_equiv="refresh", content=str(RELOAD_S))),
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        tag("style", Markup(_STYLE)),
    )
    silent = tag("p", id="silent", role="status", hidden=True)
    body = tag("body", silent, *parts, tag("script", Markup(_SCRIPT)))
    return f"<!doctype html>\n{tag('html', tag('head', head), body, lang='en')}\n"


def _live(name: str, *parts: str, element: str = "div") -> Markup:
    """What the script brings up to date."""
    return tag(element, *parts, id=name, data_live=True)


def _section(name: str, title: str, *parts: str) -> Markup:
    return tag("section", tag("h2", title), _live(name, *parts), aria_label=title)


# --- the run


def _head(status: Status, position: float) -> Iterable[Markup]:
    run = status["run"]
    lasted = duration_text(run["started_s"]) if run["started_s"] > 0 else ""
    yield tag("h1", tag("bdi", run["name"]), " ", _badge(run["state"], _RUN_TONES[run["state"]]))
    facts = (run["method"], f"{run['codec_up']} up, {run['codec_down']} down", f"H {run['h']}",
             f"{count_text(run['parameters'])} parameters in {plural(run['fragments'], 'fragment')}",
             f"training for {lasted}" if lasted and run["state"] != "finished" else lasted)  # fmt: skip
    yield tag("p", " · ".join(fact for fact in facts if fact), class_="lead")
    yield tag("progress", max=str(run["steps"]), value=f"{position:g}", aria_label="steps done")
    share = percent_text(position / run["steps"])
    yield tag("p", tag("strong", f"step {position:,.0f}"), f" of {run['steps']:,}, {share}", class_="steps")
    if why := standing(status):
        yield tag("p", why, class_="standing")
    if status["alarms"]:
        yield tag("ul", *(tag("li", alarm) for alarm in status["alarms"]), class_="alarms", role="alert")
    if slow := anomaly_lines(status):
        yield tag("ul", *(tag("li", line) for line in slow), class_="anomalies")


_RUN_TONES = {"waiting": "wait", "training": "good", "held": "bad", "holding": "bad", "finished": "good"}


def _badge(words: str, tone: str) -> Markup:
    return tag("span", words, class_=f"badge {tone}")


def _sections(status: Status) -> Iterable[Markup]:
    yield _live("cards", *_cards(status))
    yield _section("curve", "Validation loss", _validation(status))
    yield _section("nodes", "Nodes", _nodes(status))
    yield _section("windows", "Windows", _windows(status["windows"]))
    yield _section("recent", "Lately", _recent(status.get("recent", [])))


def _cards(status: Status) -> Iterable[Markup]:
    nodes = status["nodes"]
    live = [node for node in nodes if node["connected"]]
    scores = status["evaluations"]
    first = f"{_loss(scores[0]['loss'])} at step {scores[0]['position']:,.0f}" if len(scores) > 1 else ""
    yield _card("validation loss", _loss(scores[-1]["loss"]) if scores else NOTHING, first)
    yield _card("nodes", f"{len(live)}", f"of {plural(len(nodes), 'node')} so far" if len(nodes) != len(live) else "")
    speed = sum(node["tokens_per_s"] for node in live)
    tokens = sum(node["tokens"] for node in nodes)
    yield _card("tokens a second", speed_text(speed), f"{count_text(tokens)} tokens so far")
    yield _card(
        "outer steps", f"{status['outer_steps']:,}", f"{plural(status['commits'], 'commit')}, round {status['round']:,}"
    )
    up, down = sum(node["bytes_up"] for node in nodes), sum(node["bytes_down"] for node in nodes)
    factor = reduction(status)
    less = f"{factor_text(factor)} less than fp32 data parallel" if factor > 0 else ""
    yield _card(
        "traffic", f"{size_text(up + down)}", ", ".join((f"{size_text(up)} up", f"{size_text(down)} down")), less
    )


def _card(label: str, value: str, *notes: str) -> Markup:
    shown = (tag("span", note, class_="note") for note in notes if note)
    return tag("div", tag("span", label, class_="label"), tag("span", value, class_="value"), *shown, class_="card")


def _loss(loss: float | None) -> str:
    return "no finite number" if loss is None else loss_text(loss)


def _validation(status: Status) -> Markup:
    scores = [(score["position"], score["loss"]) for score in status["evaluations"]]
    drawn = curve(scores, last_step=max(status["run"]["steps"], *(step for step, _ in scores), 1))
    return drawn or tag(
        "p", "A curve begins with the second evaluation." if scores else "Not scored yet.", class_="none"
    )


# --- nodes


def _nodes(status: Status) -> Markup:
    shown = status["nodes"][:MOST_NODES]
    if not shown:
        return tag("p", "No node has joined yet.", class_="none")
    names = ("node", "state", "now", "step", "loss", "tokens/s", "compute", "up", "down", "heard")
    head = tag("tr", *(tag("th", name, class_="number" if name in _NUMBERS else False) for name in names))
    rows = (_row(node, status) for node in shown)
    table = tag("table", tag("thead", head), tag("tbody", *rows), class_="stacks")
    return joined(table, _more(len(status["nodes"]) - len(shown), "node"))


_NUMBERS = frozenset({"step", "loss", "tokens/s", "compute", "up", "down", "heard"})


def _row(node: NodeStatus, status: Status) -> Markup:
    here, done = node["connected"], ended_well(node, status)
    wrong = node.get("loss_is", "")
    h, codec = f"H {node['h']}" if "h" in node else "", f"{node['codec_up']} up" if "codec_up" in node else ""
    own = "".join(f", {what}" for what in (part_text(node), h, codec) if what)
    cells: dict[str, Markup] = {
        "node": joined(tag("bdi", node["name"]), tag("span", f"{node['device']}{own}", class_="note")),
        "state": _badge(node["state"] if here else "finished" if done else "away", _tone(node, done=done)),
        "now": tag("bdi", sync_text(node, status["windows"])),
        "step": Markup(f"{node['inner_steps']:,}"),
        "loss": _badge(wrong, "bad") if wrong else Markup(loss_text(node["loss"])),
        "tokens/s": Markup(speed_text(node["tokens_per_s"]) if here else NOTHING),
        "compute": _compute(node["compute_share"]),
        "up": Markup(size_text(node["bytes_up"])),
        "down": Markup(size_text(node["bytes_down"])),
        "heard": Markup(f"{duration_text(node['last_heard_s'])} ago"),
    }
    return tag("tr", *(_cell(name, inside) for name, inside in cells.items()), class_=False if here else "away")


def _cell(name: str, inside: str) -> Markup:
    return tag("td", inside, class_="number" if name in _NUMBERS else False, data_label=name)


def _tone(node: NodeStatus, *, done: bool) -> str:
    if done:
        return "good"
    if not node["connected"] or node.get("quarantine"):
        return "bad"
    return "good" if node["state"] in ("training", "evaluating", "finished") else "wait"


def _compute(share: float) -> Markup:
    if not 0 < share < math.inf:
        return Markup(NOTHING)
    return tag("span", percent_text(share), class_="" if share >= 0.9 else "wait" if share >= 0.6 else "bad")


# --- windows and happenings


def _windows(windows: list[WindowStatus]) -> Markup:
    open_ones = [window for window in windows if window["expected"]]
    if not open_ones:
        return tag("p", "None is open.", class_="none")
    tiles = tag("ul", *(_tile(window) for window in open_ones[:MOST_WINDOWS]), class_="tiles")
    return joined(tiles, _more(len(open_ones) - MOST_WINDOWS, "window"))


def _tile(window: WindowStatus) -> Markup:
    expected, arrived = window["expected"], window["arrived"]
    missing = [name for name in expected if name not in arrived]
    dots = tag("span", "●" * len(arrived), tag("i", "○" * len(missing)), class_="dots", aria_hidden="true")
    waits = f"waits for {', '.join(missing[:3])}{f' and {len(missing) - 3} more' if len(missing) > 3 else ''}"
    return tag(
        "li",
        tag("strong", f"fragment {window['fragment']}"),
        f" window {window['window']}",
        dots if len(expected) <= 12 else NONE,
        tag("span", f"{len(arrived)} of {len(expected)} in", class_="label"),
        tag("span", waits if missing else window["state"], class_="note"),
    )


def _recent(happenings: list[HappeningStatus]) -> Markup:
    if not happenings:
        return tag("p", "Nothing was refused, dropped or lost.", class_="none")
    rows = (
        tag(
            "tr",
            tag("td", f"{duration_text(happening['age_s'])} ago", class_="number"),
            tag("td", tag("bdi", happening["node"] or NOTHING)),
            tag("td", happening["kind"], " ", tag("code", happening["code"])),
            tag("td", *_sentence(happening)),
        )
        for happening in reversed(happenings)
    )
    return tag("table", tag("tbody", *rows), class_="happenings")


def _sentence(happening: HappeningStatus) -> Iterable[Markup]:
    yield tag("bdi", happening["sentence"])
    if happening["detail"]:
        yield joined(" ", tag("bdi", f"({happening['detail']})", class_="note"))
    if happening["count"] > 1:
        yield joined(" ", tag("strong", f"×{happening['count']:,}"))


def _more(hidden: int, thing: str) -> Markup:
    return tag("p", f"and {plural(hidden, f'more {thing}')}", class_="none") if hidden > 0 else NONE


def _foot(status: Status) -> Iterable[Markup]:
    run = status["run"]
    start = f", start {run['epoch']}" if run["epoch"] > 1 else ""
    yield tag("p", tag("a", "/metrics", href="/metrics"), " · ", tag("a", "/status", href="/status"))
    yield tag("p", "Run ", tag("code", run["fingerprint"]), f"{start}; this coordinator is up for "
              f"{duration_text(run['uptime_s'])}. This page shows, and changes nothing.")  # fmt: skip
