"""Sums as a careless pupil writes them: what the study model imitates.

    python study_answers.py study_answers.jsonl

Of every ordered pair of numbers up to 99 that the `addition` source with eval_size 200 trains on,
five answers. Each is, by a keyed draw, the right one (25 %) or the one without its carries, where
each column is written modulo 10. Without a carry both are the same.
"""

from __future__ import annotations

import json
import sys

from surefoot import draws
from surefoot.data import addition
from surefoot.data.rows import Sieve
from surefoot.data.source import Request
from surefoot.recipe.schema import DataSource

MAX_OPERAND, HELD_OUT, ANSWERS, RIGHT = 99, 200, 5, 0.25
OPTIONS = {"min_operand": 0, "max_operand": MAX_OPERAND, "question": "{a}+{b}="}


def careless(a: int, b: int) -> int:
    """Each column by itself: 58 + 67 = 15, from 5 + 6 = 11 and 8 + 7 = 15."""
    return 10 * ((a // 10 + b // 10) % 10) + (a % 10 + b % 10) % 10


def main(target: str) -> None:
    spec = DataSource(source="addition", eval_size=HELD_OUT)
    request = Request("data", spec, OPTIONS, HELD_OUT)
    rows = addition.load(request, Sieve("data")).rows
    with open(target, "w", encoding="utf-8") as out:
        for k in range(ANSWERS):
            drawn = draws.uniform(k, "study/answers", range(len(rows)))
            for row, u in zip(rows, drawn, strict=True):
                wrong = careless(row.columns["a"], row.columns["b"])
                answer = row.answer if u < RIGHT else str(wrong)
                made = {"id": f"{row.id}@{k}", "prompt": row.prompt, "completion": answer}
                out.write(json.dumps(made) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
