"""What a person sees while a run goes, and the table at its end.

Owns lines on a terminal or in a log file. Model text is shown with its control characters spelled
out, so that a completion cannot steer the terminal.
Refuses to own numbers: a metric that is absent is shown as "-", never as 0.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TextIO

from surefoot.errors import SurefootError
from surefoot.run.read import Evaluation, RunSummary

_COLUMNS = (
    ("reward", "reward", "{:.2f}"),
    ("kl", "kl", "{:.4f}"),
    ("entropy", "entropy", "{:.2f}"),
    ("len", "completions/mean_length", "{:.1f}"),
    ("clip", "clip_ratio/region_mean", "{:.2f}"),
    ("dead", "frac_reward_zero_std", "{:.2f}"),
)
_GIVEN = (
    ("loss", "loss", "{:.4f}"),
    ("accuracy", "accuracy", "{:.2f}"),
    ("accuracy", "rewards/accuracies", "{:.2f}"),
    ("margin", "margin", "{:.3f}"),
    ("margin", "rewards/margins", "{:.3f}"),
    ("entropy", "entropy", "{:.2f}"),
    ("grad", "grad_norm", "{:.2f}"),
)
"""Of methods that train on given data, those that the step has."""
_SHOWN_CHARACTERS = 160


class Display:
    """Progress of `total_steps` steps on `stream`.

    `force` "auto" is one live line on a terminal and one plain line per step elsewhere; "plain" and
    "rich" insist. A stream that breaks is given up without a word: the run matters more.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        stream: TextIO | None = None,
        force: Literal["auto", "plain", "rich"] = "auto",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if force not in ("auto", "plain", "rich"):
            raise SurefootError(f"display {force!r} is not known; use auto, plain or rich")
        self._total = total_steps
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._first: tuple[int, float] | None = None
        self._broken = False
        self._live: Any = None
        terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        if force == "rich" or (force == "auto" and terminal):
            self._live = _live_line(self._stream, terminal=terminal or force == "rich")
            self._live.start()

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show one step; `metrics` is its row, by TRL's names."""
        line = " | ".join(
            [f"step {step}/{self._total}"]
            + [f"{label} {_number(metrics.get(key), form)}" for label, key, form in _shown(metrics)]
            + [f"{_number(metrics.get('time/tokens_per_second'), '{:.0f}')} tok/s"]
            + [f"eta {duration(self._time_left(step, metrics))}"]
        )
        if self._live is None:
            self._print(line)
        else:
            self._guard(lambda: self._live.update(_styled(line), refresh=True))

    def note(self, text: str) -> None:
        """Show a line that stays: a finding, a retry, a checkpoint."""
        for line in text.splitlines():
            self._print(printable(line))

    def samples(self, samples: Sequence[tuple[str, str, float | None]]) -> None:
        """Show (prompt, completion, score) triples, one line each, shortened."""
        for prompt, completion, score in samples:
            shown = f"{_shorten(prompt)} -> {_shorten(completion)}"
            self._print(f"  [{_number(score, '{:+.2f}')}] {shown}")

    def evaluation(self, evaluation: Evaluation) -> None:
        """Show an evaluation on the held-out prompts, with the interval of its accuracy."""
        line = f"eval {evaluation.step}/{self._total} | accuracy {_share(evaluation)} of "
        line += f"{evaluation.n}"
        # Comparisons have neither: nothing was sampled.
        if evaluation.eos_share is not None:
            line += f" | reward {_number(evaluation.reward, '{:.2f}')}"
            line += f" | ended with EOS {evaluation.eos_share:.0%}"
        self._print(line)

    def close(self) -> None:
        """Leave the terminal as it was; harmless when called twice."""
        if self._live is not None:
            live, self._live = self._live, None
            self._guard(live.stop)

    def _time_left(self, step: int, metrics: Mapping[str, Any]) -> float | None:
        """Seconds: from the clock once two steps were seen, before that from `time/step`."""
        now = self._clock()
        if self._first is None or step <= self._first[0]:
            self._first = (step, now)
            pace = metrics.get("time/step")
        else:
            pace = (now - self._first[1]) / (step - self._first[0])
        return None if pace is None else pace * max(self._total - step, 0)

    def _print(self, line: str) -> None:
        if self._live is None:
            self._guard(lambda: self._write(line))
        else:
            self._guard(
                lambda: self._live.console.print(
                    line, markup=False, highlight=False, emoji=False, soft_wrap=True
                )
            )

    def _write(self, line: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        self._stream.flush()

    def _guard(self, action: Callable[[], None]) -> None:
        if self._broken:
            return
        try:
            action()
        except (OSError, ValueError):  # a closed pipe or file; ValueError is Python's word for it
            self._broken = True


def _shown(metrics: Mapping[str, Any]) -> Sequence[tuple[str, str, str]]:
    """The columns of a step: of sampled completions all, else those that are there."""
    if "groups/asked" in metrics or "reward" in metrics:
        return _COLUMNS
    given = [column for column in _GIVEN if metrics.get(column[1]) is not None]
    return given or _COLUMNS


def summary_table(summary: RunSummary) -> str:
    """The closing table: accuracy before and after, the paired difference, and the time spent."""
    first, last = summary.first, summary.last
    rows = [("run", f"{summary.name}, {_number(summary.steps, '{:d}')} steps")]
    for label, look in (("before", first), ("after", last)):
        value = "-" if look is None else f"{_share(look)} of {look.n} (step {look.step})"
        rows.append((f"accuracy {label}", value))
    rows.append(("paired difference", _difference(summary)))
    if any(e is not None and e.reward not in (None, e.accuracy) for e in (first, last)):
        # Of a reward that is not just right or wrong the accuracy shows little.
        rows.append(("mean reward", _both(summary, "reward", "{:.2f}")))
    if first is None or any(e is not None and e.eos_share is not None for e in (first, last)):
        rows.append(("ended with EOS", _both(summary, "eos_share", "{:.0%}")))
    rows.append(("seconds per step", _number(summary.seconds_per_step, "{:.2f} (median)")))
    rows.append(("tokens per second", _number(summary.tokens_per_second, "{:.0f} (median)")))
    parts = ", ".join(f"{name} {share:.0%}" for name, share in summary.time_shares.items())
    rows.append(("where the time went", parts or "-"))
    if summary.cost:
        rows.append(("paid for rewards", f"${summary.cost:.4g}"))
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)


def duration(seconds: float | None) -> str:
    """Seconds as people say them: 45s, 3m10s, 2h05m, 1d04h; "-" when not known."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def printable(text: str) -> str:
    """`text` with control, format and surrogate characters spelled out, for a screen."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


def _shorten(text: str) -> str:
    shown = printable(text[: _SHOWN_CHARACTERS + 1])
    return shown if len(text) <= _SHOWN_CHARACTERS else shown[: _SHOWN_CHARACTERS - 3] + "..."


def _number(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)


def _share(evaluation: Evaluation) -> str:
    return f"{evaluation.accuracy:.3f} [{evaluation.low:.3f}, {evaluation.high:.3f}]"


def _both(summary: RunSummary, name: Literal["reward", "eos_share"], form: str) -> str:
    """One figure of the first and of the last evaluation."""
    values = [None if e is None else getattr(e, name) for e in (summary.first, summary.last)]
    before, after = (_number(value, form) for value in values)
    return f"{before} before, {after} after"


def _difference(summary: RunSummary) -> str:
    found = summary.difference
    if found is None:
        return "-"
    return (
        f"{found.estimate:+.3f} [{found.low:+.3f}, {found.high:+.3f}] on the same "
        f"{summary.pairs} prompts"
    )


def _live_line(stream: TextIO, *, terminal: bool) -> Any:
    from rich.console import Console
    from rich.live import Live

    console = Console(file=stream, force_terminal=terminal)
    shared = stream is sys.stderr  # then warnings printed there must go above the live line
    return Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=shared)


def _styled(line: str) -> Any:
    """The live line with dim labels, wrapped between columns (NO_COLOR is rich's to honour)."""
    from rich.text import Text

    text = Text()
    for place, part in enumerate(line.split(" | ")):
        label, _, value = part.partition(" ")
        text.append(" | " if place else "", style="dim")
        text.append(f"{label}\u00a0", style="dim")
        text.append(value, style="bold")
    return text
