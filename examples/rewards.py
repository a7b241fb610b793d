"""Rewards of examples/jsonl.yaml."""

from __future__ import annotations

import surefoot


@surefoot.reward_function
def names_it(sample) -> float:
    """1 if the expected name stands in the answer, as a whole word, else 0."""
    words = "".join(c if c.isalpha() else " " for c in sample.text.lower()).split()
    return float(str(sample.answer).lower() in words)
