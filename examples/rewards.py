"""Rewards of examples/jsonl.yaml, and one of each kind to copy from."""

from __future__ import annotations

import surefoot


@surefoot.reward_function
def names_it(sample) -> float:
    """1 if the expected name stands in the answer, as a whole word, else 0."""
    words = "".join(c if c.isalpha() else " " for c in sample.text.lower()).split()
    return float(str(sample.answer).lower() in words)


@surefoot.reward_function
def ends_well(sample, mark: str = ".") -> float | None:
    """1 if the answer ends with `mark`; answers that were cut off are not asked about."""
    if sample.stop == "length":
        return None
    return float(sample.text.rstrip().endswith(mark))


def polite(prompts, completions, answer, **columns) -> list[float | None]:
    """TRL's signature: all completions at once, columns by name, None where it does not apply."""
    scores: list[float | None] = []
    for completion, expected in zip(completions, answer, strict=True):
        text = completion if isinstance(completion, str) else completion[0]["content"]
        scores.append(None if expected is None else float("please" in text.lower()))
    return scores
