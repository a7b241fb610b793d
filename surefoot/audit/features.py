"""What a pair looks like to a scorer: numbers that change sign when the two answers change places.

Owns the words, shapes and records that tell one answer from the other, as one sparse row a pair.
Refuses to own what they mean: the scorer learns that from the labels. Needs scikit-learn, the
extra `audit`.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from surefoot.errors import SurefootError

_BITS = 16
# Words beyond these say little more and cost as much as the rest together.
_LONGEST = 8000
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_WORD = re.compile(r"[^\W\d_]{2,}")
_CLOSED = frozenset(".!?\u2026)]}\"'`\u201d\u2019\u00bb\u3002\uff01\uff1f")


@dataclass(frozen=True, slots=True)
class Compared:
    """One pair: its prompt as text, a key that equal prompts share, and its two answers."""

    prompt: str
    key: bytes
    chosen: str
    rejected: str


def sklearn(module: str) -> Any:
    """A module of scikit-learn; SurefootError naming the extra where it is absent."""
    try:
        return importlib.import_module(f"sklearn.{module}")
    except ImportError as error:
        raise SurefootError(
            "finding flipped labels needs scikit-learn, which is not installed. Install it with: "
            "pip install 'surefoot[audit]', or leave the search out with --no-flips"
        ) from error


def words(pairs: Sequence[Compared]) -> sparse.csr_matrix:
    """Hashed words and word pairs of the chosen answers less those of the rejected ones."""
    maker = sklearn("feature_extraction.text").HashingVectorizer(
        n_features=1 << _BITS,
        ngram_range=(1, 2),
        token_pattern=r"[^\W_]+|[^\w\s]",
        alternate_sign=False,
        norm=None,
        binary=True,
        dtype=np.float64,
    )
    texts: dict[str, int] = {}
    sides = [
        [texts.setdefault(text[:_LONGEST], len(texts)) for text in (pair.chosen, pair.rejected)]
        for pair in pairs
    ]
    counted = maker.transform(texts)
    places = np.array(sides, dtype=np.int64).reshape(-1, 2)
    found = counted[places[:, 0]] - counted[places[:, 1]]
    found.eliminate_zeros()
    return found.tocsr()


def shapes(pairs: Sequence[Compared]) -> NDArray[np.float64]:
    """Lengths, lines, numbers, echoes of the prompt and the like, chosen less rejected."""
    found: dict[tuple[str, str], NDArray[np.float64]] = {}

    def of(prompt: str, text: str) -> NDArray[np.float64]:
        key = (prompt, text)
        if key not in found:
            found[key] = _shape(prompt[:_LONGEST], text[:_LONGEST])
        return found[key]

    if not pairs:
        return np.zeros((0, len(_shape("", ""))))
    return np.array([of(p.prompt, p.chosen) - of(p.prompt, p.rejected) for p in pairs])


def records(pairs: Sequence[Compared]) -> NDArray[np.float64]:
    """What the other pairs of a prompt say of the two answers: share won, twice shrunk to none.

    An answer that was chosen w and rejected l times in *other* rows has (w - l) / (w + l + 1). The
    pair's own label is in neither number.
    """
    wins: Counter[tuple[bytes, str]] = Counter()
    losses: Counter[tuple[bytes, str]] = Counter()
    for pair in pairs:
        wins[pair.key, pair.chosen] += 1
        losses[pair.key, pair.rejected] += 1

    def standing(key: bytes, text: str, *, won: int, lost: int) -> float:
        more, less = wins[key, text] - won, losses[key, text] - lost
        return (more - less) / (more + less + 1)

    return np.array(
        [
            standing(pair.key, pair.chosen, won=1, lost=0)
            - standing(pair.key, pair.rejected, won=0, lost=1)
            for pair in pairs
        ]
    ).reshape(-1, 1)


def prompts_of(pairs: Sequence[Compared]) -> NDArray[np.int64]:
    """The number of each pair's prompt, in order of first appearance."""
    numbers: defaultdict[bytes, int] = defaultdict(lambda: len(numbers))
    return np.array([numbers[pair.key] for pair in pairs], dtype=np.int64)


def _shape(prompt: str, text: str) -> NDArray[np.float64]:
    lines = [line for line in text.splitlines() if line.strip()]
    said = [word.casefold() for word in _WORD.findall(text)]
    asked = {word.casefold() for word in _WORD.findall(prompt)}
    numbers = [number.replace(",", "") for number in _NUMBER.findall(text)]
    given = {number.replace(",", "") for number in _NUMBER.findall(prompt)}
    known = sum(number in given for number in numbers)
    last = numbers[-1] if numbers else ""
    return np.array(
        [
            np.log1p(len(text)),
            np.log1p(len(lines)),
            np.log1p(len(said)),
            np.log1p(len(numbers)),
            len(set(said)) / max(len(said), 1),
            len(set(lines)) / max(len(lines), 1),
            sum(word in asked for word in said) / max(len(said), 1),
            known / max(len(numbers), 1),
            len(given.intersection(numbers)) / max(len(given), 1),
            float(last in given),
            np.log1p(len(last)),
            float("." in last),
            float(text.rstrip()[-1:] in _CLOSED),
            sum(letter.isupper() for letter in text) / max(len(text), 1),
            text.count("```") / 2,
        ]
    )
