"""Preference pairs with a hidden quality, for the audits: texts whose better one is known.

An answer is made of words that say nothing and of phrases that make it better or worse. Quality is
the sum of its phrases' weights, plus a part that no text shows: so the best possible reader is
right about 91 % of the time, as with people's choices, and is sure of some pairs only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

PHRASES = 6
SHOWN = 0.35
UNSEEN = 0.5


@dataclass(frozen=True)
class MadePair:
    """A row as it stands in a file, and whether its two answers were exchanged."""

    row: dict[str, str]
    flipped: bool


def made_pairs(
    count: int, *, flipped: float, seed: int, per_prompt: int = 1, unseen: float = UNSEEN
) -> list[MadePair]:
    """`count` pairs, of which each is exchanged with probability `flipped`."""
    random = np.random.default_rng([seed, 71])
    words = _words(random, 900)
    frequency = 1.0 / np.arange(2, len(words) + 2)
    frequency /= frequency.sum()
    better = [" ".join(random.choice(words[300:], 2)) for _ in range(PHRASES)]
    worse = [" ".join(random.choice(words[300:], 2)) for _ in range(PHRASES)]
    weights = random.uniform(0.5, 1.5, 2 * PHRASES) * np.repeat([1.0, -1.0], PHRASES)
    pairs = []
    for number in range(count):
        if number % per_prompt == 0:
            prompt = f"{' '.join(random.choice(words, 9, p=frequency)).capitalize()}?"
        texts, qualities = [], []
        for _ in range(2):
            shown = random.random(2 * PHRASES) < SHOWN
            said = [phrase for phrase, has in zip([*better, *worse], shown, strict=True) if has]
            filler = list(random.choice(words, int(random.integers(20, 70)), p=frequency))
            for phrase in said:
                filler.insert(int(random.integers(len(filler) + 1)), phrase)
            texts.append(" ".join(filler).capitalize() + ".")
            qualities.append(float(shown @ weights) + unseen * float(random.normal()))
        good = int(qualities[1] > qualities[0])
        exchanged = bool(random.random() < flipped)
        chosen, rejected = texts[good ^ exchanged], texts[1 - (good ^ exchanged)]
        row = {"id": f"p{number}", "prompt": prompt, "chosen": chosen, "rejected": rejected}
        pairs.append(MadePair(row, exchanged))
    return pairs


def _words(random: np.random.Generator, count: int) -> list[str]:
    """Different words that can be pronounced."""
    found: dict[str, None] = {}
    while len(found) < count:
        syllables = [
            random.choice(list("bdfgklmnprstv")) + random.choice(list("aeiou"))
            for _ in range(int(random.integers(2, 5)))
        ]
        found["".join(syllables)] = None
    return list(found)
