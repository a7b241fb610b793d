"""Copy the figures of finished runs on given data into docs/results/, by the names of the runs.

    python docs/results/collect_given.py runs/gsm8k_sft runs/gsm8k_reward_model runs/gsm8k_dpo \
        --pairs examples/data/gsm8k_pairs.jsonl

Writes gsm8k_given.txt (held-out figures before, during and after each run) and for each run
NAME.jsonl (its metrics rows, without memory and host figures). The limits of an accuracy count the
pairs of one problem as a cluster.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from collect import HERE, write_rows

from surefoot.data.rows import row_id
from surefoot.recipe import load
from surefoot.run.read import read_groups, read_metrics
from surefoot.statistics import clustered_share, mean_interval


def problems(pairs: Path) -> dict[str, str]:
    """The problem of each pair, by the pair's id."""
    rows = [json.loads(line) for line in pairs.read_text(encoding="utf-8").splitlines()]
    return {row_id(row): row["prompt"] for row in rows}


def share(outcomes: Sequence[tuple[str, bool]]) -> str:
    """The share that is right, with its limits; outcomes are (cluster, right)."""
    clusters: dict[str, list[bool]] = {}
    for name, right in outcomes:
        clusters.setdefault(name, []).append(right)
    found = clustered_share(
        [sum(c) for c in clusters.values()], [len(c) for c in clusters.values()]
    )
    return f"{found.estimate:.3f} [{found.low:.3f}, {found.high:.3f}]"


def compared(run: Path, problem: Mapping[str, str]) -> list[str]:
    """The accuracy on held-out pairs at each evaluation, beside that of length alone."""
    lines = []
    rows = read_groups(run, split="eval")
    metrics = {row["step"]: row for row in read_metrics(run) if "eval/accuracy" in row}
    for step, own in metrics.items():
        seen = [row for row in rows if row["step"] == step]
        if step == 0:
            lines.append(f"  step 0: every one of {len(seen)} pairs is a tie")
            continue
        words = share([(problem[row["prompt"]], row["correct"]) for row in seen])
        count = len({problem[row["prompt"]] for row in seen})
        lines.append(
            f"  step {step}: accuracy {words} on {len(seen)} pairs of {count} problems; the longer "
            f"answer is the chosen one in {own['eval/accuracy_of_length']:.3f}; rank correlation "
            f"of margin and length {own['eval/length_correlation']:.3f}; calibration error "
            f"{own['eval/calibration_error']:.3f}"
        )
    return lines


def learned(run: Path) -> list[str]:
    """The accuracy on the pairs that were trained on, each before the step that it was in."""
    rows = [row for row in read_metrics(run) if row["step"] > 0]
    key = "accuracy" if "accuracy" in rows[-1] else "rewards/accuracies"
    late = [row[key] for row in rows[len(rows) // 2 :]]
    found = mean_interval(late)
    return [
        f"  pairs trained on, second half of the steps: {found.estimate:.3f} "
        f"[{found.low:.3f}, {found.high:.3f}]"
    ]


def imitated(run: Path) -> list[str]:
    rows = [row for row in read_metrics(run) if "eval/perplexity" in row]
    return [
        f"  step {row['step']}: held-out perplexity {row['eval/perplexity']:.3f} "
        f"({row['eval/loss']:.4f} nats a token)"
        for row in rows
    ]


def length(run: Path) -> str:
    recipe: Any = load(run / "recipe.yaml")
    rows = [row for row in read_metrics(run) if row["step"] > 0]
    examples = rows[-1]["step"] * int(recipe.optim.batch_size)
    steps, tokens = rows[-1]["step"], rows[-1]["num_tokens"]
    return f"{run.name}: {steps} steps, {examples} examples, {tokens} tokens"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--pairs", type=Path, required=True)
    options = parser.parse_args()
    problem = problems(options.pairs)
    lines = []
    for run in options.runs:
        write_rows(run)
        lines.append(length(run))
        if any("eval/perplexity" in row for row in read_metrics(run)):
            lines += imitated(run)
        else:
            lines += [*compared(run, problem), *learned(run)]
    text = "\n".join(lines) + "\n"
    (HERE / "gsm8k_given.txt").write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
