"""Keyed random draws: every draw of a run is a pure function of its key (DESIGN law 11).

Owns the hash from (seed, purpose, coordinates) to uniforms and permutations.
Refuses to own a generator: nothing here has state, so resume, batch size, order and worker count
cannot change what is drawn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One round of the splitmix64 finalizer (Steele, Lea and Flood 2014), elementwise."""
    bits = (bits ^ (bits >> np.uint64(30))) * _MIX_1
    bits = (bits ^ (bits >> np.uint64(27))) * _MIX_2
    return bits ^ (bits >> np.uint64(31))


def _root(seed: int, purpose: str) -> np.uint64:
    digest = hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def bits(seed: int, purpose: str, *coordinates: ArrayLike) -> NDArray[np.uint64]:
    """64 keyed random bits per element.

    `coordinates` are non-negative integers or integer arrays that broadcast against each other;
    the result has their common shape. Different purposes and coordinates give independent bits.
    """
    with np.errstate(over="ignore"):
        state = np.asarray(_root(seed, purpose))
        for coordinate in coordinates:
            step = np.asarray(coordinate).astype(np.uint64) + np.uint64(1)
            state = _mix(state * _MIX_2 + step * _GOLDEN)
        return _mix(state + _GOLDEN)


def uniform(seed: int, purpose: str, *coordinates: ArrayLike) -> NDArray[np.float64]:
    """Uniforms strictly inside (0, 1), shape as in `bits`."""
    top = bits(seed, purpose, *coordinates) >> np.uint64(11)
    # The largest of the 2^53 values would round up to 1.
    return np.minimum((top.astype(np.float64) + 0.5) * 2.0**-53, 1.0 - 2.0**-53)


def permutation(seed: int, purpose: str, size: int, *coordinates: int) -> NDArray[np.int64]:
    """A keyed permutation of range(size)."""
    keys = bits(seed, purpose, *coordinates, np.arange(size))
    return np.argsort(keys, kind="stable")


def choice(seed: int, purpose: str, weights: Sequence[float], *coordinates: int) -> int:
    """A keyed index into `weights`, drawn in proportion to them (they need not sum to 1)."""
    cumulative = np.cumsum(np.asarray(weights, dtype=np.float64))
    threshold = float(uniform(seed, purpose, *coordinates)) * cumulative[-1]
    return int(np.searchsorted(cumulative, threshold, side="right"))
