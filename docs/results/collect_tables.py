"""Copy the closing tables of finished runs into docs/results/NAME.txt; of a chain, every stage's.

    python docs/results/collect_tables.py addition_lora runs/addition_lora
    python docs/results/collect_tables.py rlhf_classic runs/rlhf_classic

Before a table stands what the run said of its model when it began. Times are left out: these runs
shared their machine with others. So is the difference from comparisons that are all ties.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from collect import HERE

from surefoot.run.display import summary_table
from surefoot.run.read import read_events, read_metrics, summary

HELD_OUT = ("eval/loss", "eval/perplexity")
TIMES = ("seconds per step", "tokens per second", "where the time went")


def stages(run: Path) -> list[Path]:
    found = sorted((run / "stages").glob("*"))
    return found if found else [run]


def lines(run: Path) -> Iterator[str]:
    opened = next(row for row in read_events(run) if row["kind"] == "opened")
    parts = [part.strip() for part in opened["message"].split(";")]
    yield from (part for part in parts if "LoRA" in part or "trainable" in part)
    for name in HELD_OUT:
        seen = [(row["step"], row[name]) for row in read_metrics(run) if name in row]
        if seen:
            yield f"{name}: " + ", ".join(f"{value:.4g} (step {step})" for step, value in seen)
    found = summary(run)
    comparisons = found.first is not None and found.first.eos_share is None
    leave = (*TIMES, *(("accuracy before", "paired difference") if comparisons else ()))
    for line in summary_table(found).splitlines():
        if not line.startswith(leave) and not line.endswith("  -"):
            yield line


def main(name: str, runs: list[Path]) -> None:
    tables = ["\n".join(lines(part)) for run in runs for part in stages(run)]
    text = "\n\n".join(tables) + "\n"
    (HERE / f"{name}.txt").write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main(sys.argv[1], [Path(argument) for argument in sys.argv[2:]])
