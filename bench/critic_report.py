"""The critic's study in words and as a picture.

Owns the table, the sentences and the curves. Refuses to own figures (critic_study.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

# The colours of Okabe and Ito, told apart with every kind of colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
INK, FAINT = "#333333", "#DDDDDD"


def text(result: Mapping[str, Any]) -> str:
    own, shape = result["settings"], result["shape"]
    chance = (len(own["digits"]) + 2) ** -own["length"]
    samples = own["prompts"] * own["group"] * own["steps"]
    lines = [
        f"Write the {own['length']} digits of the prompt in order ({len(own['digits'])} different "
        f"ones): a Llama of {shape['layers']} layers,",
        f"hidden size {shape['hidden']}, random weights, right by chance in {chance:.2%}. A step "
        f"is {own['prompts']} prompts of {own['group']} completions;",
        f"{own['held_out']} prompts are held out. {own['seeds']} seeds, paired; Student's t, 95 %.",
        "",
        "Mean share of right positions by learning rate, on "
        f"{own['sweep']} other seed{'s' * (own['sweep'] > 1)}; the best of each row is used",
    ]
    for name, row in result["swept"].items():
        lines.append(f"  {name:32}" + "".join(f"  {r}: {v:.3f}" for r, v in row.items()))
    lines += ["", f"(a) {own['steps']} steps, {samples} samples; held-out accuracy"]
    lines += [*_methods(result), "", *_said(result["methods"]["differences"])]
    lines += ["", f"(b) {own['warm']} steps of grpo first, or none; the first {own['after']} steps"]
    lines += [*_warm(result), "", *_said(result["warm"]["differences"])]
    lines += ["", f"{result['minutes']:.0f} minutes, {own['workers']} processes at a time"]
    return "\n".join(lines) + "\n"


def _methods(result: Mapping[str, Any]) -> list[str]:
    part = result["methods"]
    # No times: runs share the machine with each other (critic_cost.py measures them).
    heads = ("rate", "over run", "at end", "expl. var.")
    lines = ["  {:32}{:>10}{:>10}{:>10}{:>12}".format("", *heads)]
    for name in part["arms"]:
        lines.append(
            f"  {name:32}{result['rates'][name]:>10g}{_mean(part['over'][name]):>10.3f}"
            f"{_mean(part['ends'][name]):>10.3f}{_known(part['late'][name]):>12}"
        )
    return lines


def _warm(result: Mapping[str, Any]) -> list[str]:
    part = result["warm"]
    lines = ["  {:32}{:>10}{:>14}{:>12}".format("", "accuracy", "share right", "expl. var.")]
    for name in part["arms"]:
        lines.append(
            f"  {name:32}{_mean(part['over'][name]):>10.3f}{_mean(part['share'][name]):>14.3f}"
            f"{_known(part['early'][name]):>12}"
        )
    return lines


def _said(differences: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for row in differences:
        found = row["interval"]
        if found is None:
            lines.append(f"  {row['name']}: {row['what']}: too few seeds with a value")
            continue
        said = "no difference is shown"
        if found["low"] > 0 or found["high"] < 0:
            said = "higher" if found["low"] > 0 else "lower"
        lines.append(
            f"  {row['name']}: {row['what']} {found['estimate']:+.3f} "
            f"[{found['low']:+.3f}, {found['high']:+.3f}]: {said}"
        )
    return lines


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _known(values: Sequence[float | None]) -> str:
    seen = [value for value in values if value is not None]
    return f"{_mean(seen):.3f}" if seen else "-"


def draw(result: Mapping[str, Any], target: Path) -> None:
    """Accuracy by samples, and for the warm-up accuracy by step and explained variance by step."""
    own = result["settings"]
    style = {"font.size": 10, "axes.edgecolor": INK, "text.color": INK, "axes.labelcolor": INK}
    with rc_context(style):
        figure = Figure(figsize=(8, 10), layout="constrained")
        axes = figure.subplots(3, 1)
        per_step = own["prompts"] * own["group"]
        for colour, (name, runs) in zip(COLOURS, result["methods"]["arms"].items(), strict=True):
            samples = [step * per_step for step in runs[0]["eval_steps"]]
            _lines(axes[0], samples, [run["accuracy"] for run in runs], colour, name)
        for colour, (name, runs) in zip(COLOURS[1:], result["warm"]["arms"].items(), strict=False):
            steps = runs[0]["eval_steps"]
            _lines(axes[1], steps, [run["accuracy"] for run in runs], colour, name)
            places = list(range(1, own["after"] + 1))
            curves = [_after(run, own["after"]) for run in runs]
            _lines(axes[2], places, curves, colour, name)
        axes[1].axvline(own["warm"], color=INK, linewidth=0.8, linestyle=":")
        labels = (
            ("samples", "held-out accuracy", f"(a) equal samples, {own['seeds']} seeds"),
            ("step", "held-out accuracy", f"(b) grpo for {own['warm']} steps, then ppo"),
            ("step of ppo", "explained variance", "(b) the critic's foresight"),
        )
        for axis, (below, beside, above) in zip(axes, labels, strict=True):
            _finish(axis, below, beside, above)
        for axis in axes[:2]:
            axis.set_ylim(-0.02, 1.02)
            axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        figure.savefig(target, dpi=150, metadata={"Software": None})


def _after(run: Mapping[str, Any], count: int) -> list[float | None]:
    """Explained variance by step of ppo itself."""
    own = run["explained_variance"][run["warmup"] : run["warmup"] + count]
    return own + [None] * (count - len(own))


def _lines(
    axis: Any,
    places: Sequence[float],
    curves: Sequence[Sequence[float | None]],
    colour: str,
    name: str,
) -> None:
    """Each seed thin, and their mean; a mean leaves out seeds without a value there."""
    for curve in curves:
        seen = [(x, y) for x, y in zip(places, curve, strict=True) if y is not None]
        axis.plot(*zip(*seen, strict=True), color=colour, linewidth=0.7, alpha=0.4)
    known = [[y for y in column if y is not None] for column in zip(*curves, strict=True)]
    drawn = [(x, _mean(ys)) for x, ys in zip(places, known, strict=True) if ys]
    axis.plot(*zip(*drawn, strict=True), color=colour, linewidth=2, label=name)


def _finish(axis: Any, below: str, beside: str, above: str) -> None:
    axis.set_xlabel(below)
    axis.set_ylabel(beside)
    axis.set_title(above, loc="left", fontsize=11)
    axis.grid(axis="y", color=FAINT, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.legend(frameon=False)
