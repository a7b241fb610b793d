"""Preference pairs from graded solutions: each correct one over each incorrect one of a problem.

    python examples/data/gsm8k_pairs.py gsm8k_model_solutions.jsonl.gz pairs.jsonl

A row of the input has a `question`, and per model `{solution, is_correct}`.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any


def pairs(row: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Every pair of one problem: {prompt, chosen, rejected}."""
    graded = [value for value in row.values() if isinstance(value, Mapping)]
    correct = [value["solution"] for value in graded if value["is_correct"]]
    wrong = [value["solution"] for value in graded if not value["is_correct"]]
    for chosen in correct:
        for rejected in wrong:
            yield {"prompt": row["question"], "chosen": chosen, "rejected": rejected}


def main(source: str, target: str) -> None:
    with (
        gzip.open(source, "rt", encoding="utf-8") as solutions,
        open(target, "w", encoding="utf-8") as out,
    ):
        for line in solutions:
            for pair in pairs(json.loads(line)):
                out.write(json.dumps(pair) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
