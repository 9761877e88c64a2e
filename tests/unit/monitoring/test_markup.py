"""HTML that cannot be injected into."""

from html import unescape

from hypothesis import given
from hypothesis import strategies as st

from farloop.monitoring.page import Markup, joined, tag, text
from farloop.monitoring.status_summary import printable


@given(st.text())
def test_a_text_comes_back_as_it_was_and_holds_no_markup(told: str) -> None:
    shown = text(told)
    assert not set(shown) & set("<>\"'")
    assert unescape(shown) == printable(told)


def test_texts_are_escaped_once_and_markup_never() -> None:
    assert tag("b", "a < b") == "<b>a &lt; b</b>"
    assert tag("p", tag("b", "a < b"), " & c") == "<p><b>a &lt; b</b> &amp; c</p>"
    assert joined("<", Markup("<br>")) == "&lt;<br>"


def test_attributes_are_escaped_and_named_as_html_names_them() -> None:
    assert tag("td", class_="a", data_label='"><b>') == '<td class="a" data-label="&quot;&gt;&lt;b&gt;"></td>'
    assert tag("p", hidden=True, title=False) == "<p hidden></p>"
    assert tag("meta", charset="utf-8") == '<meta charset="utf-8">'
