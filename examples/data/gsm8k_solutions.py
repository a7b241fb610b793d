"""Pairs and demonstrations from graded solutions of grade-school problems.

    python gsm8k_solutions.py pairs gsm8k_model_solutions.jsonl.gz pairs.jsonl
    python gsm8k_solutions.py demonstrations gsm8k_model_solutions.jsonl.gz correct.jsonl

Pairs: each correct solution over each incorrect one of the same problem. Demonstrations: one
correct solution of each problem that has one. A row of the input has a `question`, and per model
`{solution, is_correct}`.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Row = Mapping[str, Any]


def graded(row: Row) -> tuple[list[str], list[str]]:
    """(the correct solutions, the incorrect ones) of one problem."""
    found = [value for value in row.values() if isinstance(value, Mapping)]
    correct = [value["solution"] for value in found if value["is_correct"]]
    return correct, [value["solution"] for value in found if not value["is_correct"]]


def pairs(row: Row) -> Iterator[dict[str, str]]:
    """Every pair of one problem: {prompt, chosen, rejected}."""
    correct, wrong = graded(row)
    for chosen in correct:
        for rejected in wrong:
            yield {"prompt": row["question"], "chosen": chosen, "rejected": rejected}


def demonstrations(row: Row) -> Iterator[dict[str, str]]:
    """The first correct solution of one problem: {prompt, completion}."""
    for solution in graded(row)[0][:1]:
        yield {"prompt": row["question"], "completion": solution}


MADE: Mapping[str, Callable[[Row], Iterator[dict[str, str]]]] = {
    "pairs": pairs,
    "demonstrations": demonstrations,
}


def main(kind: str, source: str, target: str) -> None:
    with (
        gzip.open(source, "rt", encoding="utf-8") as solutions,
        open(target, "w", encoding="utf-8") as out,
    ):
        for line in solutions:
            for made in MADE[kind](json.loads(line)):
                out.write(json.dumps(made) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
