"""One self-contained HTML page from plain data: text, tables, bars and histograms.

Owns the escaping of everything it is given, and the look: light and dark, phone and paper, no
scripts, no outside links. Refuses to own what is said: the rooms that find things bring the words.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Tone = Literal["good", "note", "warn", "bad"]

# A cell or a paragraph longer than this says nothing more to a reader.
LONGEST = 2000
# Control characters end a page for some readers, move a terminal's cursor, or hide text; lone
# surrogates are no UTF-8; the last two groups reorder the text that follows them.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff\u202a-\u202e\u2066-\u2069]"
)
_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --faint: #6a7078; --line: #d7dbe0;
  --page: #ffffff; --card: #f5f6f8; --bar: #2b6cb0; --good: #1a7f37; --note: #2b6cb0;
  --warn: #9a6700; --bad: #c5221f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --faint: #9aa2ab; --line: #3a4048;
  --page: #16181b; --card: #1f2226; --bar: #6ea8e6; --good: #57c26f; --note: #6ea8e6;
  --warn: #e0b341; --bad: #ff7b72; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 62rem; background: var(--page);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; margin: .5rem 0; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .4rem; }
p { margin: .4rem 0; white-space: pre-line; }
.verdict { padding: .7rem 1rem; border-left: .4rem solid; background: var(--card);
  font-size: 1.1rem; font-weight: 600; }
.item { margin: .6rem 0; padding: .5rem .8rem; border-left: .25rem solid var(--line);
  background: var(--card); }
.item b { text-transform: uppercase; font-size: .8rem; letter-spacing: .04em; }
.good { border-color: var(--good); } .note { border-color: var(--note); }
.warn { border-color: var(--warn); } .bad { border-color: var(--bad); }
.good > b { color: var(--good); } .note > b { color: var(--note); }
.warn > b { color: var(--warn); } .bad > b { color: var(--bad); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { padding: .3rem .5rem; border-bottom: 1px solid var(--line); text-align: start;
  vertical-align: top; white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; }
th { color: var(--faint); font-weight: 600; overflow-wrap: normal; }
svg { width: 100%; max-width: 40rem; height: auto; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg rect { fill: var(--bar); } svg line { stroke: var(--line); }
footer { margin-top: 2rem; color: var(--faint); font-size: .85rem; }
@media print { :root { --ink: #000; --page: #fff; --card: #fff; --line: #999; }
  body { max-width: none; padding: 0; font-size: 11pt; } .scroll { overflow: visible; }
  .item, tr, svg { break-inside: avoid; } }
"""


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph; line breaks in it stay."""

    text: str


@dataclass(frozen=True, slots=True)
class Item:
    """A thing found: a short label, its tone, and paragraphs."""

    label: str
    tone: Tone
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Grid:
    """A table."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Bars:
    """One horizontal bar for each (label, value); values from 0 up."""

    title: str
    bars: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts between edges, one edge more than counts; `caption` names the axis."""

    title: str
    edges: tuple[float, ...]
    counts: tuple[float, ...]
    caption: str = ""

    def __post_init__(self) -> None:
        if len(self.edges) != len(self.counts) + 1:
            raise ValueError(f"{len(self.counts)} counts need {len(self.counts) + 1} edges")


Part = Text | Item | Grid | Bars | Histogram


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what stands under it."""

    title: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Page:
    """All of a page; the verdict is its first sentence."""

    title: str
    verdict: str
    tone: Tone
    sections: tuple[Section, ...]
    footer: str = ""


def readable(text: str, longest: int | None = None) -> str:
    """`text` with what cannot be shown made U+FFFD, and cut to `longest` characters if given."""
    shown = text if longest is None else text[:longest]
    shown = _UNSEEN.sub("\ufffd", shown.replace("\r\n", "\n"))
    if len(text) > len(shown) and longest is not None and len(text) > longest:
        shown += f" … ({len(text):,} characters)"
    return shown


def escaped(text: str) -> str:
    """`text` as it may stand in a page, in an element or in a quoted attribute."""
    return html.escape(readable(text, LONGEST), quote=True)


def render(page: Page) -> str:
    """The page as HTML."""
    body = "\n".join(line for section in page.sections for line in _section(section))
    footer = f"<footer>{escaped(page.footer)}</footer>\n" if page.footer else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">\n"
        f"<title>{escaped(page.title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escaped(page.title)}</h1>\n"
        f'<p class="verdict {page.tone}">{escaped(page.verdict)}</p>\n'
        f"{body}\n{footer}</body>\n</html>\n"
    )


def write_page(path: Path, page: Page) -> Path:
    """Write the page as UTF-8; what is at `path` is replaced."""
    path.write_text(render(page), encoding="utf-8", newline="\n")
    return path


def _section(section: Section) -> Iterator[str]:
    yield f"<h2>{escaped(section.title)}</h2>"
    for part in section.parts:
        yield from _part(part)


def _part(part: Part) -> Iterator[str]:
    if isinstance(part, Text):
        yield f"<p>{escaped(part.text)}</p>"
    elif isinstance(part, Item):
        texts = "".join(f"<p>{escaped(text)}</p>" for text in part.texts if text)
        yield f'<div class="item {part.tone}"><b>{escaped(part.label)}</b>{texts}</div>'
    elif isinstance(part, Grid):
        yield from _grid(part)
    elif isinstance(part, Bars):
        yield from _bars(part)
    else:
        yield from _histogram(part)


def _grid(grid: Grid) -> Iterator[str]:
    yield f'<h3>{escaped(grid.title)}</h3>\n<div class="scroll"><table>'
    heads = "".join(f'<th scope="col" dir="auto">{escaped(name)}</th>' for name in grid.columns)
    yield f"<thead><tr>{heads}</tr></thead>\n<tbody>"
    for row in grid.rows:
        cells = "".join(f'<td dir="auto">{escaped(cell)}</td>' for cell in row)
        yield f"<tr>{cells}</tr>"
    yield "</tbody></table></div>"


def _bars(part: Bars) -> Iterator[str]:
    height, left, width = 22, 200, 360
    top = max((value for _, value in part.bars), default=0.0) or 1.0
    yield f"<h3>{escaped(part.title)}</h3>"
    yield _svg_head(part.title, 640, height * len(part.bars) + 4)
    for place, (label, value) in enumerate(part.bars):
        y = place * height
        long = max(width * value / top, 0.0)
        yield f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{_short(label, 30)}</text>'
        yield f'<rect x="{left}" y="{y + 3}" width="{long:.1f}" height="{height - 6}"/>'
        yield f'<text x="{left + long + 6:.1f}" y="{y + 15}">{_number(value)}</text>'
    yield "</svg>"


def _histogram(part: Histogram) -> Iterator[str]:
    width, height, left = 600, 140, 20
    top = max(part.counts, default=0.0) or 1.0
    span = part.edges[-1] - part.edges[0] or 1.0
    places = [left + width * (edge - part.edges[0]) / span for edge in part.edges]
    yield f"<h3>{escaped(part.title)}</h3>"
    yield _svg_head(part.title, 640, height + 44)
    for low, high, count in zip(places, places[1:], part.counts, strict=False):
        tall = height * count / top
        yield (
            f'<rect x="{low:.1f}" y="{4 + height - tall:.1f}" '
            f'width="{max(high - low - 1, 0.5):.1f}" height="{tall:.1f}">'
            f"<title>{_number(count)}</title></rect>"
        )
    yield f'<line x1="{left}" y1="{height + 4}" x2="{left + width}" y2="{height + 4}"/>'
    for edge, place in _ends(part.edges, places):
        yield (
            f'<text x="{place:.1f}" y="{height + 20}" text-anchor="middle">{_number(edge)}</text>'
        )
    if part.caption:
        yield f'<text x="{left}" y="{height + 38}">{_short(part.caption, 90)}</text>'
    yield "</svg>"


def _ends(edges: Sequence[float], places: Sequence[float]) -> list[tuple[float, float]]:
    middle = len(edges) // 2
    chosen = sorted({0, middle, len(edges) - 1})
    return [(edges[index], places[index]) for index in chosen]


def _svg_head(title: str, width: int, height: int) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escaped(title)}">'


def _short(text: str, longest: int) -> str:
    return escaped(text if len(text) <= longest else text[: longest - 1] + "…")


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
