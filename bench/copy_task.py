"""The task of the critic's study: write the digits of the prompt in order.

Owns the rows, and the rewards: a share of 1 for each right position, paid where it stands or all of
it at the end. Refuses to own the model (character_model.py) and the runs (critic_study.py).
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import surefoot
from surefoot import draws

MARK = "="


def rows(digits: str, length: int, *, held_out: int) -> tuple[list[dict[str, str]], ...]:
    """Every string of `length` of the digits once: those to train on, and those held out."""
    texts = ["".join(text) for text in itertools.product(digits, repeat=length)]
    order = draws.permutation(0, "copy task", len(texts))
    made = [{"prompt": texts[i] + MARK, "answer": texts[i], "id": texts[i]} for i in order]
    assert held_out < len(made), (held_out, len(made))
    return made[held_out:], made[:held_out]


def write(folder: Path, digits: str, length: int, *, held_out: int) -> list[dict[str, Any]]:
    """The rows as JSONL files, and the `data` of a recipe that reads them."""
    files = []
    for name, part in zip(("train", "eval"), rows(digits, length, held_out=held_out), strict=True):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
        files.append({"source": str(path), "role": name})
    return files


def _right(sample: Any) -> list[float]:
    """1 or 0 for every character written where a digit is wanted."""
    return [float(a == b) for a, b in zip(sample.text, sample.answer, strict=False)]


@surefoot.reward_function
def at_the_end(sample: Any) -> float:
    """The share of the positions that are right."""
    return sum(_right(sample)) / len(sample.answer)


@surefoot.reward_function
def by_position(sample: Any) -> Any:
    """The same, each position's share at its character."""
    right = _right(sample)
    if not right:
        return 0.0
    return surefoot.ProcessReward(
        values=[hit / len(sample.answer) for hit in right], ends=list(range(1, len(right) + 1))
    )
