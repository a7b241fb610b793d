"""Odd values, odd names and odd bytes, which all kinds of cases draw from.

Owns what is odd by itself. Refuses to own where it is put.
"""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from support.fuzz import FILLER

NUMBERS: tuple[int | float, ...] = (
    *(0, 1, 2, 3, 5, 8, -1, 64, 1000, 10**6, 10**9, 2**31, 2**63 - 1, 2**63, -(2**63), 2**64),
    *(10**30, 10**400, 0.0, -0.0, 0.5, 1.0, 1.5, -0.5, 1e-3, 1e-300, 5e-324, 1e30, 1e308),
    *(float("nan"), float("inf"), float("-inf")),
)
WORDS = (
    *("", " ", "auto", "none", "null", "all", "never", "default", "train", "stage:", "stage:x"),
    *("a\0b", "\ud800", "é\u2028ü", "\u202etxet", "\x1b[31m", "🦶" * 3, "a" * 300),
    *("x" * 5000, "a.b", "a/b"),
    *("nowhere.jsonl", "rows.jsonl", "model", "reward.py", "reward.py:letters", "reward.py:", ":f"),
    *("no_such.py:f", "json:loads", "json:nothing", "no_such_module:f", "-1", "1e5", "yes"),
    *("{a}", "{", "%s", "$HOME", "~x", "http://", "http://127.0.0.1:9/v1", "float32", "2024-01-01"),
)

words = st.one_of(st.sampled_from(WORDS), st.text(max_size=12))
scalars: SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.sampled_from(NUMBERS), st.sampled_from(NUMBERS), words
)
keys = st.one_of(
    st.sampled_from(("kind", "name", "use", "path", "source", "", "0", "a.b", "__class__", "é\0")),
    st.text(max_size=6),
)
values: SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3)),
    max_leaves=5,
)
"""Whatever YAML and JSON can say."""

sizes = st.sampled_from((1, 2, 3, 4, 5, 6))


def seldom(draw: DrawFn, one_in: int) -> bool:
    """True once in so many cases."""
    # Hypothesis likes the ends of a range: what is rare must not lie there.
    return draw(st.sampled_from(range(one_in))) == one_in // 2


DAMAGE = (
    *(b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\t", b"\r", b"\n\n", b"\n---\n"),
    *(b"{", b"}", b"[", b"]", b'"', b"'", b"\\", b":", b": ", b"- ", b"#", b"&a ", b"*a", b"!x "),
    *(b"!!python/object/apply:os.getcwd []", b"!!binary aGk=", b"!!set {a, b}", b"<<: *a", b"% "),
    *(b"\x1b[2J", b"null", b"NaN", b"1e999", b"\\ud800", b'"\\u0000"', b"," * 5, b"[" * 3000),
    *(FILLER, b"- " * 1500, b'{"a":' * 2000, b"\xc2\x85", b"\xe2\x80\xa8", b"? ", b"|\n", b">-\n"),
)


@st.composite
def damaged(draw: DrawFn, whole: bytes) -> bytes:
    """`whole` after one to three accidents: pieces in, pieces out, the end lost, bytes turned."""
    data = whole
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, 1000)) * len(data) // 1000
        how = draw(st.sampled_from(("in", "in", "out", "cut", "turn", "line", "noise")))
        if how == "in":
            data = data[:place] + draw(st.sampled_from(DAMAGE)) + data[place:]
        elif how == "out":
            data = data[:place] + data[place + draw(st.integers(1, 12)) :]
        elif how == "cut":
            data = data[:place]
        elif how == "turn" and data:
            place = min(place, len(data) - 1)
            turned = bytes([data[place] ^ (1 << draw(st.integers(0, 7)))])
            data = data[:place] + turned + data[place + 1 :]
        elif how == "line":
            lines = data.splitlines(keepends=True) or [b""]
            place = draw(st.integers(0, len(lines) - 1))
            data = b"".join([*lines[: place + 1], lines[place], *lines[place + 1 :]])
        else:
            data = data[:place] + draw(st.binary(max_size=20)) + data[place:]
    return data


def paths_of(tree: Any) -> list[tuple[str | int, ...]]:
    """Every place in nested mappings and lists, parents before children."""
    found: list[tuple[str | int, ...]] = []
    items = (
        list(tree.items())
        if isinstance(tree, dict)
        else list(enumerate(tree))
        if isinstance(tree, list)
        else []
    )
    for key, item in items:
        found.append((key,))
        found += [(key, *rest) for rest in paths_of(item)]
    return found


def parent_of(tree: Any, path: tuple[str | int, ...]) -> Any:
    for key in path[:-1]:
        tree = tree[key]
    return tree


def json_text(value: Any) -> str:
    """JSON as Python reads and writes it: NaN and lone surrogates are let through, escaped."""
    return json.dumps(value)
