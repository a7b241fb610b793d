"""The built-in reward `math`: answers that are equal as mathematics, by the math-verify package.

Owns how the row's answer is read, where in a completion the answer stands, and the CPU limit.
Refuses to own parsing and equality, which are math-verify's, and the deadline (`workers.py`).
math-verify's own timeouts are off: they take the process's alarm, and miss long C calls.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from surefoot.errors import RewardError
from surefoot.reward.contract import PartScore, RewardSample, scored, unscorable
from surefoot.reward.figures import check_tag, last_boxed, only_number, tagged
from surefoot.reward.limits import cpu_limit
from surefoot.reward.rules import NO_ANSWER, BuiltIn, Hired, Rule, gold_of

RECYCLE = 500  # sympy's caches grow for as long as its process lives
_LIMITED = "comparing the answer used up its CPU time"

_MARKED = re.compile(r"\$|\\\(|\\\[|\\boxed")
_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mathbf|begin|end)\{[^{}]*\}|\\[A-Za-z]+")
# Three letters, or two that stand alone beside something else; xy alone is a product.
_WORD = re.compile(r"[^\W\d_]{3,}|(?<=\s)[^\W\d_]{2}(?!\S)|(?<!\S)[^\W\d_]{2}(?=\s)")
_DOLLAR = re.compile(r"(?<!\\)\\\$")
# Read as text these would lose everything but a number: 2 sqrt(3) is not 2.
_UNMARKED_NAME = re.compile(r"\b(?:sqrt|frac|pi|sin|cos|tan|log|ln|exp|infty|infinity)\b")


@dataclass(frozen=True, slots=True)
class MathOptions:
    """Where the answer stands, and how it is compared.

    `extract`: `boxed` is the last \\boxed{...}; `latex` is that, else LaTeX between math
    delimiters; `any` is that, else plain numbers and arithmetic, or a whole text that is LaTeX and
    no words. What follows "answer" goes before the rest, the last before the first. Before that,
    `tag` cuts the text to the last <tag>...</tag>, or `after` to what follows its last occurrence;
    a text without it scores 0. `cpu_limit` is seconds for reading and comparing one completion.
    """

    extract: Literal["any", "latex", "boxed"] = "any"
    tag: str | None = None
    after: str | None = None
    cpu_limit: float = 3.0

    def __post_init__(self) -> None:
        if self.tag is not None and self.after is not None:
            raise ValueError("math takes one of tag and after")
        if self.tag is not None:
            check_tag(self.tag)
        if self.after == "":
            raise ValueError("after is empty; it is a text such as </think>")
        if not 0.0 < self.cpu_limit < math.inf:
            raise ValueError(f"cpu_limit is {self.cpu_limit}; it is seconds, more than 0")


def maths(options: MathOptions) -> Rule:
    """1 where the completion's answer equals the row's, 0 where it does not or cannot be read.

    A row without an answer, or with one that is no mathematics, is unscorable.
    """
    require_math_verify("math")

    def rule(sample: RewardSample) -> PartScore:
        gold = gold_of(sample)
        if gold is None:
            return unscorable(NO_ANSWER)
        # Outside the limit, which counts against the completion.
        target = _read_gold(gold)
        if target is None:
            return unscorable(
                f"the row's answer {gold[:60]!r} is not read as mathematics; write it as a number "
                "or as LaTeX between dollar signs"
            )
        text = _part_of(sample.text, options)
        if text is None:
            return scored(0.0)
        with cpu_limit(options.cpu_limit):
            found = _read(text, options.extract)
            # Not symmetric: an interval answers an inequality, but not the other way round.
            same = bool(found) and _library().verify(target, found, timeout_seconds=None)
        return scored(float(same))

    return rule


def require_math_verify(reward: str) -> None:
    if importlib.util.find_spec("math_verify") is None:
        raise RewardError(
            f"reward {reward!r} needs the math-verify package, which is not installed; "
            "install surefoot[math]"
        )


def hire_maths(options: Any) -> Hired:
    return Hired(warm_maths, RECYCLE, at_limit=lambda sample: scored(0.0, _LIMITED))


def warm_maths() -> None:
    """Import, and parse and compare once: sympy imports much of itself at its first use."""
    _library().verify(_read("$x^2+1$", "any"), _read("\\boxed{1+x^2}", "any"), timeout_seconds=None)


@functools.cache
def _library() -> Any:
    # Its only warning says that the timeouts are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return importlib.import_module("math_verify")


def _part_of(text: str, options: MathOptions) -> str | None:
    """What of a completion is searched for the answer; None where the place is missing."""
    if options.tag is not None:
        inner = tagged(text, options.tag)
        if inner is None:
            return None
        text = inner
    elif options.after is not None:
        _, found, text = text.rpartition(options.after)
        if not found:
            return None
    return text


@functools.lru_cache(maxsize=256)
def _read_gold(gold: str) -> list[Any] | None:
    """The row's answer as math-verify's expressions; None where it is no mathematics."""
    number = only_number(gold)
    if number is not None and re.search(r"\d[eE]", gold):
        return [importlib.import_module("sympy").Float(float(number))]
    unmarked = None if _MARKED.search(gold) else _COMMAND.sub(" ", gold)
    if number is None and unmarked is not None and _UNMARKED_NAME.search(unmarked):
        return None
    return _read(gold, "any") or None


def _read(text: str, extract: str) -> list[Any]:
    """At most one expression."""
    text = _DOLLAR.sub("", text.replace("\u2212", "-"))
    box = last_boxed(text)
    if box is not None:
        text = f"\\boxed{{{box}}}"
    elif extract == "boxed":
        return []
    elif extract == "any" and _is_unmarked_latex(text):
        found = _parse(f"${text.strip().rstrip('.')}$", words=False)
        if found:
            return found
    return _parse(text, words=extract == "any")


def _is_unmarked_latex(text: str) -> bool:
    if _MARKED.search(text) or only_number(text) is not None:
        return False
    return not _WORD.search(_COMMAND.sub("", text.strip()))


def _parse(text: str, *, words: bool) -> list[Any]:
    """math-verify's choice among the LaTeX in a text, and with `words` the numbers outside it."""
    library = _library()
    ways = [library.LatexExtractionConfig(boxed_match_priority=0)]
    if words:
        ways.append(library.ExprExtractionConfig())
    found: list[Any] = library.parse(
        text, extraction_config=ways, fallback_mode="no_fallback", parsing_timeout=None
    )
    return found


MATHS: dict[str, BuiltIn] = {"math": BuiltIn(MathOptions, maths, hire_maths)}
