"""HTML that cannot be injected into: a text is escaped unless it was made here. Nothing of a page's contents."""

import html

from farloop.monitoring.gist import printable


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
