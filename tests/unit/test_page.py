"""The page: one file that nothing in its data can break, and charts that keep proportions."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from surefoot.report.page import (
    Bars,
    Grid,
    Histogram,
    Item,
    Page,
    Section,
    Text,
    readable,
    render,
    write_page,
)

NASTY = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "a\x00b",
    "lone \ud800 surrogate \udfff",
    "\u202egnihtyreve\u202c",
    "</td></table></body></html>",
    "\x1b[31mred",
    "x" * (1 << 20),
]


class Tags(HTMLParser):
    """Every tag with its attributes, and every tag that was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[tuple[str, dict[str, str | None]]] = []
        self.closed: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.opened.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        self.closed.append(tag)


def page_of(text: str) -> Page:
    parts = (
        Text(text),
        Item(text, "bad", (text, text)),
        Grid(text, (text, "b"), ((text, text),)),
        Bars(text, ((text, 1.0), ("b", 2.0))),
        Histogram(text, (0.0, 1.0, 2.0), (1.0, 4.0), text),
    )
    return Page(text, text, "bad", (Section(text, parts),), text)


def parsed(html: str) -> Tags:
    tags = Tags()
    tags.feed(html)
    return tags


@pytest.mark.fault(34)
@pytest.mark.parametrize("text", NASTY, ids=range(len(NASTY)))
def test_nothing_in_the_data_changes_the_page(text: str, tmp_path: Path) -> None:
    path = write_page(tmp_path / "page.html", page_of(text))
    html = path.read_bytes().decode("utf-8")
    plain = parsed(render(page_of("plain words")))
    found = parsed(html)
    assert [tag for tag, _ in found.opened] == [tag for tag, _ in plain.opened]
    assert found.closed == plain.closed
    assert not any(name.startswith("on") for _, attrs in found.opened for name in attrs)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", html)
    assert len(html) < 100_000


def test_the_page_needs_nothing_else() -> None:
    tags = parsed(render(page_of("words")))
    assert not {"script", "link", "img", "iframe", "a"} & {tag for tag, _ in tags.opened}
    assert not any({"src", "href"} & attrs.keys() for _, attrs in tags.opened)
    assert "url(" not in render(page_of("words"))


def test_long_text_is_cut_and_says_how_long_it_was() -> None:
    assert readable("abcdef", 3) == "abc … (6 characters)"
    assert readable("abc", 3) == "abc"
    assert readable("a\r\nb") == "a\nb"
    assert readable("a\x00\ud800") == "a\ufffd\ufffd"


def test_bars_keep_their_proportions() -> None:
    html = render(Page("t", "v", "good", (Section("s", (Bars("b", (("x", 3), ("y", 12))),)),)))
    widths = [float(attrs["width"] or 0) for tag, attrs in parsed(html).opened if tag == "rect"]
    assert widths[1] == pytest.approx(4 * widths[0])


def test_a_histogram_has_a_column_for_each_count() -> None:
    counts = (1.0, 0.0, 4.0)
    chart = Histogram("h", (0.0, 1.0, 2.0, 4.0), counts)
    tags = parsed(render(Page("t", "v", "good", (Section("s", (chart,)),))))
    columns = [attrs for tag, attrs in tags.opened if tag == "rect"]
    heights = [float(attrs["height"] or 0) for attrs in columns]
    assert heights[0] == pytest.approx(heights[2] / 4)
    assert heights[1] == 0
    widths = [float(attrs["width"] or 0) + 1 for attrs in columns]
    assert widths[2] == pytest.approx(2 * widths[0], abs=0.2)
    with pytest.raises(ValueError, match="2 counts need 3 edges"):
        Histogram("h", (0.0, 1.0), counts[:2])
