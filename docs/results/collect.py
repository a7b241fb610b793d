"""Copy the figures of finished demo runs into docs/results/.

    python docs/results/collect.py runs/addition runs/addition_seed1

Writes addition.png (both learning curves), addition.txt (the closing table of each run) and
addition_<run>.jsonl (its metrics rows, without memory and host figures).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from surefoot.report.curve import draw
from surefoot.run.display import summary_table
from surefoot.run.read import read_metrics, summary

HERE = Path(__file__).resolve().parent


def write_rows(run: Path) -> None:
    """The run's metrics rows under its name."""
    rows = [
        {key: value for key, value in row.items() if not key.startswith(("memory/", "host/"))}
        for row in read_metrics(run)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (HERE / f"{run.name}.jsonl").write_text(lines, encoding="utf-8")


def main(runs: list[Path]) -> None:
    tables = [summary_table(summary(run)) for run in runs]
    (HERE / "addition.txt").write_text("\n\n".join(tables) + "\n", encoding="utf-8")
    for run in runs:
        write_rows(run)
    draw(runs, HERE / "addition.png")


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
