"""Comparing the answers of one prompt in pairs: who meets whom, and what the results are worth.

Owns the draw of the pairs, the rule for two orders that disagree, and the win rate.
Refuses to own asking (`judge.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from surefoot import draws

Pair = tuple[int, int]
TIE = "tie"


def pairs_of(texts: Sequence[str], *, opponents: int, seed: int, prompt: str) -> list[Pair]:
    """Pairs of indices, each once: everyone meets everyone, or exactly `opponents` (even) others.

    The answers stand in a ring in keyed order, and each meets its nearest `opponents` neighbours;
    the key is the seed and the texts, so that neither other groups nor the order of asking matter.
    """
    size = len(texts)
    if opponents >= size - 1:
        return [(i, j) for i in range(size) for j in range(i + 1, size)]
    assert opponents % 2 == 0, opponents
    digest = hashlib.sha256("\0".join([prompt, *texts]).encode("utf-8", "surrogatepass"))
    key = int.from_bytes(digest.digest()[:7], "big")
    ring = [int(i) for i in draws.permutation(seed, "judge/pairs", size, key)]
    return [
        (ring[place], ring[(place + offset) % size])
        for offset in range(1, opponents // 2 + 1)
        for place in range(size)
    ]


def settled(first: str, swapped: str) -> tuple[float, bool]:
    """What a pair is worth to its first member (1, 0.5 or 0), and whether the orders disagree.

    `first` is the winner where the first member was shown as A, `swapped` where it was B.
    """
    turned = {"A": "B", "B": "A", TIE: TIE}[swapped]
    if first != turned:
        return 0.5, True
    return {"A": 1.0, "B": 0.0, TIE: 0.5}[first], False


def win_rates(size: int, worth: Mapping[Pair, float]) -> list[tuple[float, int] | None]:
    """Of each member its share of wins, ties half, and its number of results; None without any."""
    won = [0.0] * size
    met = [0] * size
    for (i, j), value in worth.items():
        won[i] += value
        won[j] += 1.0 - value
        met[i] += 1
        met[j] += 1
    return [(won[i] / met[i], met[i]) if met[i] else None for i in range(size)]
