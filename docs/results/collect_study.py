"""Copy the figures of the study model's runs into docs/results/study.txt.

    python docs/results/collect_study.py runs/study runs/study_rl runs/rlhf_study_kl_1.0

The first run made the model; what it ended with is compared with the weights that the package
carries. The others start from those.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from collect import HERE
from safetensors.torch import load_file

from surefoot.models.alias import STUDY, alias_directory
from surefoot.run.checkpoint import load_latest
from surefoot.run.directory import RunDirectory
from surefoot.run.display import duration, summary_table
from surefoot.run.read import read_metrics, summary


def making(run: Path) -> str:
    """How long the training took, what it came to, and whether it is the packaged model."""
    rows = read_metrics(run)
    carried = load_file(alias_directory(STUDY) / "model.safetensors")
    found = load_latest(RunDirectory(run), rename_damaged=False)
    assert found is not None, f"{run} has no checkpoint"
    made = found.tensors("policy")
    apart = max(float((made[name] - carried[name]).abs().max()) for name in carried)
    looks = [(row["step"], row["eval/loss"]) for row in rows if "eval/loss" in row]
    seconds = sum(row.get("time/step", 0.0) + row.get("time/eval", 0.0) for row in rows)
    lines = {
        "run": f"{run.name}, {found.step} steps of sft",
        "parameters": f"{sum(tensor.numel() for tensor in carried.values()):,}",
        "held-out loss": ", ".join(f"{loss:.3f} (step {step})" for step, loss in looks),
        "time": f"{duration(seconds)} in steps, on {torch.get_num_threads()} threads",
        "largest difference": f"{apart:g} between its weights and those of the alias {STUDY}",
    }
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())


def main(made: Path, runs: list[Path]) -> None:
    tables = [making(made)]
    for run in runs:
        stages = sorted((run / "stages").glob("*")) if (run / "stages").is_dir() else [run]
        tables.append(f"{run.name}\n" + summary_table(summary(stages[-1])))
    (HERE / "study.txt").write_text("\n\n".join(tables) + "\n", encoding="utf-8")


if __name__ == "__main__":
    first, *others = (Path(argument) for argument in sys.argv[1:])
    main(first, others)
