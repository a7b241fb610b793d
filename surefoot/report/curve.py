"""The learning curve of one run or several, as a picture.

Owns one PNG: held-out accuracy and its uncertainty above, training reward below.
Refuses to own numbers: they come from `run.read`. Needs matplotlib, the extra `plot`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from surefoot.errors import SurefootError
from surefoot.run.directory import RunDirectory
from surefoot.run.read import evaluations, number, read_metrics

# The colours of Okabe and Ito, told apart with every kind of colour vision.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_INK, _FAINT = "#333333", "#DDDDDD"


def draw(runs: Sequence[Path | str], target: Path | str) -> Path:
    """Draw the runs, one colour each, into the PNG `target`; returns its path.

    Above: accuracy on the held-out prompts with Wilson 95 % bands, and dashed the share that ended
    with an end-of-sequence token. Below: mean reward of each training step, thin, and its running
    mean. Raises SurefootError without matplotlib, and when there is nothing to draw.
    """
    if not runs:
        raise SurefootError("a learning curve needs at least one run directory")
    plt = _matplotlib()
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    style = {
        "font.size": 10,
        "axes.edgecolor": _INK,
        "text.color": _INK,
        "axes.labelcolor": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "font.family": "DejaVu Sans",
    }
    with plt.rc_context(style):
        figure, (top, bottom) = plt.subplots(
            2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 2), layout="constrained"
        )
        try:
            anything = [
                _draw_run(top, bottom, Path(run), _COLOURS[place % len(_COLOURS)])
                for place, run in enumerate(runs)
            ]
            if not any(anything):
                names = ", ".join(str(run) for run in runs)
                raise SurefootError(f"{names}: no evaluation and no reward is recorded yet")
            _finish(top, bottom, len(runs))
            figure.savefig(target, dpi=150, metadata={"Software": None})
        finally:
            plt.close(figure)
    return target


def smooth(values: Sequence[float], window: int) -> list[float]:
    """The mean over the `window` values around each place, fewer at the ends."""
    half = window // 2
    parts = [values[max(place - half, 0) : place + half + 1] for place in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise SurefootError(
            "drawing a curve needs matplotlib, which is not installed; "
            "install it with: pip install 'surefoot[plot]'"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _draw_run(top: Any, bottom: Any, run: Path, colour: str) -> bool:
    looks = evaluations(run)
    if looks:
        steps = [look.step for look in looks]
        top.fill_between(
            steps,
            [look.low for look in looks],
            [look.high for look in looks],
            color=colour,
            alpha=0.15,
            linewidth=0,
        )
        top.plot(
            steps,
            [look.accuracy for look in looks],
            color=colour,
            linewidth=2,
            marker="o",
            markersize=4,
            label=RunDirectory(run).name,
        )
        ended = [(look.step, look.eos_share) for look in looks if look.eos_share is not None]
        if ended:
            top.plot(*zip(*ended, strict=True), color=colour, linewidth=1.2, linestyle="--")
    measured = {row["step"]: number(row, "reward") for row in read_metrics(run)}
    rows = {step: reward for step, reward in measured.items() if reward is not None}
    if rows:
        steps = sorted(rows)
        rewards = [rows[step] for step in steps]
        bottom.plot(steps, rewards, color=colour, linewidth=0.7, alpha=0.4)
        window = max(3, len(steps) // 10)
        bottom.plot(
            steps,
            smooth(rewards, window),
            color=colour,
            linewidth=2,
            label=None if looks else RunDirectory(run).name,
        )
    return bool(looks or rows)


def _finish(top: Any, bottom: Any, runs: int) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    for axis in (top, bottom):
        axis.grid(axis="y", color=_FAINT, linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.02)
    top.set_ylim(-0.02, 1.02)
    top.yaxis.set_major_formatter(PercentFormatter(1.0))
    top.set_ylabel("held-out prompts")
    bottom.set_ylabel("training reward")
    bottom.set_xlabel("step")
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True, steps=(1, 2, 5, 10)))
    keys = [
        Line2D(
            [],
            [],
            color=_INK,
            linewidth=2,
            marker="o",
            markersize=4,
            label="correct, with 95 % interval",
        ),
        Line2D([], [], color=_INK, linewidth=1.2, linestyle="--", label="ended with EOS"),
    ]
    runs_found = top.get_legend_handles_labels()[0] + bottom.get_legend_handles_labels()[0]
    figure = top.get_figure()
    handles = keys + (runs_found if runs > 1 else [])
    if runs == 1:
        top.set_title(runs_found[0].get_label(), loc="left", fontsize=11)
    figure.legend(
        handles=handles, loc="outside upper center", ncols=min(len(handles), 4), frameon=False
    )
