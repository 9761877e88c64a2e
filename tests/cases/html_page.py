"""A page as a browser without scripts has it: elements with their attributes, and the text that is read."""

from html.parser import HTMLParser

VOID = frozenset({"meta", "link", "br", "path", "use", "rect"})


class Page(HTMLParser):
    """Checks that elements nest. `parts` is the text inside the element of an id; "": inside any."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inline: dict[str, str] = {}
        self.parts: dict[str, str] = {"": ""}
        self._open: list[tuple[str, str]] = []
        self.feed(document)
        self.close()
        assert not self._open, f"left open: {self._open}"
        self.text = self.parts[""]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append((tag, dict(attrs).get("id") or ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        tag = self._open[-1][0] if self._open else ""
        if tag in ("style", "script"):
            self.inline[tag] = data
            return
        for name in {"", *(name for _, name in self._open)}:
            self.parts[name] = self.parts.get(name, "") + data + "\n"
