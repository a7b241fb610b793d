"""Numbers, boxed answers and tags in text, read in time linear in the text.

Owns what counts as a number, and when two short answers are the same.
Refuses to own algebra: `1/2` and `0.5` are the same number here, `x+1` and `1+x` are not the same.
"""

from __future__ import annotations

import re
from fractions import Fraction

_DIGITS_READ = 1000  # more are a number that equals nothing: exact arithmetic on them is slow
_EXPONENT_READ = 400

# A sign is no sign after something that can be subtracted from; digits glued to a name (x2) or to
# a version (1.2.3) are no number.
_NUMBER = re.compile(
    r"""
    (?P<sign>(?<![A-Za-z0-9_)\]}])[-+\u2212])?
    [$€£]?
    (?<![A-Za-z0-9_])
    (?:
        (?<![0-9]\.)(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?P<decimals>\.[0-9]+)?
      | (?<!\.)(?P<bare>\.[0-9]+)
    )
    (?:[eE](?P<exponent>[-+]?[0-9]+)(?![A-Za-z0-9_]))?
    (?:/(?P<below>[0-9]+))?
    """,
    re.VERBOSE,
)
_FRACTION = re.compile(r"(?P<before>[0-9]?)\\[dt]?frac\{(?P<over>-?[0-9]+)\}\{(?P<below>[0-9]+)\}")
_WRAPPED = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}")
_SPACING = re.compile(r"\\(?:left|right)(?![A-Za-z])|\\[,;:! ]|\s+")
_BRACES = re.compile(r"\\boxed\s?\{|\\.|[{}]", re.DOTALL)


def numbers(text: str) -> list[re.Match[str]]:
    """Every number of `text` in order; `value` reads one of them."""
    return list(_NUMBER.finditer(_plain_fractions(text)))


def value(found: re.Match[str]) -> Fraction | None:
    """The exact value; None for a division by zero and for absurd sizes, which equal nothing."""
    part = found.groupdict(default="")
    whole = part["whole"].replace(",", "")
    decimals = part["decimals"] or part["bare"]
    exponent = part["exponent"]
    if len(whole) + len(decimals) + len(part["below"]) > _DIGITS_READ or len(exponent) > 5:
        return None
    if exponent and abs(int(exponent)) > _EXPONENT_READ:
        return None
    number = Fraction(f"{whole or 0}{decimals}")
    if exponent:
        number *= Fraction(10) ** int(exponent)
    if part["below"]:
        if int(part["below"]) == 0:
            return None
        number /= int(part["below"])
    return -number if part["sign"] in ("-", "\u2212") else number


def only_number(text: str) -> Fraction | None:
    """The value of a text that is one number and nothing else, or None.

    Dollar signs around it, a percent sign and a full stop after it are not read.
    """
    bare = _plain_fractions(text).strip().rstrip(".").rstrip("%$\\").strip("$\\ ")
    found = _NUMBER.fullmatch(bare)
    return None if found is None else value(found)


def _plain_fractions(text: str) -> str:
    """`\\frac{a}{b}` of two integers as a/b."""
    return _FRACTION.sub(_plain_fraction, text)


def _plain_fraction(found: re.Match[str]) -> str:
    before = found["before"]
    return f"{before}{' ' if before else ''}{found['over']}/{found['below']}"


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}` whose braces balance; None where there is none.

    Of boxes inside each other it is the inner one. Escaped braces do not count.
    """
    opened: list[tuple[int, int] | None] = []  # of each open brace: start and content of a box
    best: tuple[int, str] | None = None
    for token in _BRACES.finditer(text):
        if token[0].startswith("\\boxed"):
            opened.append((token.start(), token.end()))
        elif token[0] == "{":
            opened.append(None)
        elif token[0] == "}" and opened:
            box = opened.pop()
            if box is not None and (best is None or box[0] > best[0]):
                best = (box[0], text[box[1] : token.start()])
    return None if best is None else best[1]


def plain_answer(text: str) -> str:
    """A short mathematical answer without spacing, text wrappers, dollar signs and a full stop."""
    plain = _WRAPPED.sub(r"\1", _plain_fractions(text))
    return _SPACING.sub("", plain).strip("$").rstrip(".")


def same_answer(left: str, right: str) -> bool:
    """Equal as numbers where both are numbers, else equal as plain answers."""
    left_value, right_value = only_number(left), only_number(right)
    if left_value is not None and right_value is not None:
        return left_value == right_value
    return plain_answer(left) == plain_answer(right)


def check_tag(tag: str) -> None:
    if not re.fullmatch(r"[A-Za-z][\w-]*", tag):
        raise ValueError(f"tag is {tag!r}; it is a name such as answer, without brackets")


def tagged(text: str, tag: str) -> str | None:
    """Between the last closing tag and the opening tag nearest before it; None where none is."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return None if start < 0 else text[start + len(tag) + 2 : end].strip()
