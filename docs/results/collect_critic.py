"""Copy the figures of finished runs with a critic into docs/results/, by the names of the runs.

    python docs/results/collect_critic.py runs/addition_ppo runs/addition_vapo

Writes for each run NAME.jsonl (its metrics rows, without memory and host figures), NAME.txt (its
closing table and the critic's health at the end) and NAME.png: accuracy on the held-out prompts,
explained variance and value-add with their 95 % intervals.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from collect import HERE, write_rows
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from surefoot.report.curve import smooth
from surefoot.run.display import summary_table
from surefoot.run.read import evaluations, read_metrics, summary
from surefoot.statistics import mean_interval

LAST = 10
COLOUR, INK, FAINT = "#0072B2", "#333333", "#DDDDDD"
HEALTH = {
    "critic/explained_variance": ("explained variance", 0.0),
    "critic/value_add": ("value-add (below 1: better\nthan leave-one-out)", 1.0),
}
"""Name in the row, words for it, and the value of a critic that is worth nothing."""


def health(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the critic came to: over the last steps together, and in the last of them."""
    lines = []
    for name in HEALTH:
        seen = [row for row in rows if row.get(name) is not None]
        if not seen:
            lines.append(f"{name}: never known")
            continue
        last = seen[-1]
        said = f"{last[name]:.3f}"
        if f"{name}_low" in last:
            said += f" [{last[f'{name}_low']:.3f}, {last[f'{name}_high']:.3f}]"
        lines.append(f"{name}: {said} in step {last['step']}")
        late = [row[name] for row in seen[-LAST:]]
        if len(late) > 1:
            found = mean_interval(late)
            lines.append(
                f"{'':{len(name)}}  {found.estimate:.3f} [{found.low:.3f}, {found.high:.3f}] as "
                f"the mean of the last {len(late)} steps with a value"
            )
    return "\n".join(lines)


def draw(run: Path, target: Path) -> None:
    rows = [row for row in read_metrics(run) if row["step"] > 0]
    looks = evaluations(run)
    style = {"font.size": 10, "axes.edgecolor": INK, "text.color": INK, "axes.labelcolor": INK}
    with rc_context(style):
        figure = Figure(figsize=(8, 8), layout="constrained")
        axes = figure.subplots(3, 1, sharex=True)
        top = axes[0]
        steps = [look.step for look in looks]
        low, high = [look.low for look in looks], [look.high for look in looks]
        top.fill_between(steps, low, high, color=COLOUR, alpha=0.15, linewidth=0)
        accuracies = [look.accuracy for look in looks]
        top.plot(steps, accuracies, color=COLOUR, linewidth=2, marker="o", markersize=4)
        top.set_ylim(-0.02, 1.02)
        top.yaxis.set_major_formatter(PercentFormatter(1.0))
        top.set_ylabel("held-out prompts correct")
        top.set_title(f"{run.name}, with 95 % intervals", loc="left", fontsize=11)
        for axis, (name, (words, nothing)) in zip(axes[1:], HEALTH.items(), strict=True):
            _course(axis, rows, name)
            axis.axhline(nothing, color=INK, linewidth=0.8, linestyle="--")
            axis.set_ylabel(words)
        warm = [row["step"] for row in rows if "warmup_steps" in row]
        for axis in axes:
            if warm:
                axis.axvspan(0, warm[-1], color=FAINT, alpha=0.5, linewidth=0)
            axis.grid(axis="y", color=FAINT, linewidth=0.8)
            axis.set_axisbelow(True)
            axis.spines[["top", "right"]].set_visible(False)
        axes[-1].set_xlabel("step (shaded: warm-up)" if warm else "step")
        axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.savefig(target, dpi=150, metadata={"Software": None})


def _course(axis: Any, rows: Sequence[Mapping[str, Any]], name: str) -> None:
    """Each step thin, with its interval, and the running mean."""
    seen = [row for row in rows if row.get(name) is not None]
    sure = [row for row in seen if f"{name}_low" in row]
    axis.vlines(
        [row["step"] for row in sure],
        [row[f"{name}_low"] for row in sure],
        [row[f"{name}_high"] for row in sure],
        color=COLOUR,
        alpha=0.3,
        linewidth=1.5,
    )
    steps, values = [row["step"] for row in seen], [row[name] for row in seen]
    axis.plot(steps, values, color=COLOUR, linewidth=0.7, alpha=0.6)
    axis.plot(steps, smooth(values, max(3, len(values) // 10)), color=COLOUR, linewidth=2)
    # A step with hardly any spread in its returns must not squash the others.
    if values:
        inner = sorted(values)[len(values) // 20 : len(values) - len(values) // 20]
        room = max(inner[-1] - inner[0], 0.2)
        # A ratio of variances has a floor.
        low = 0.0 if name == "critic/value_add" else inner[0] - room
        axis.set_ylim(low, inner[-1] + room)


def main(runs: Sequence[Path]) -> None:
    for run in runs:
        write_rows(run)
        table = f"{summary_table(summary(run))}\n{health(read_metrics(run))}\n"
        (HERE / f"{run.name}.txt").write_text(table, encoding="utf-8")
        draw(run, HERE / f"{run.name}.png")
        print(table)


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
