"""At which steps each source is drawn from, judged before the run.

Owns the interval of a source (steps count from 1; from_step is in it, until_step is not) and the
refusal of steps without data, of equal rows drawn twice, and of keys that nothing reads.
Refuses to own the drawing (`stream.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

from surefoot.errors import RecipeError

if TYPE_CHECKING:
    from surefoot.recipe import DataSource


@dataclass(frozen=True, slots=True)
class Span:
    """Steps from `first` on and before `end` (None: to the end of the run)."""

    first: int
    end: int | None

    @classmethod
    def of(cls, spec: DataSource) -> Span:
        return cls(max(1, spec.from_step), spec.until_step)

    @property
    def bounded(self) -> bool:
        return self.first > 1 or self.end is not None

    def holds(self, step: int) -> bool:
        return self.first <= step and (self.end is None or step < self.end)

    def describe(self, steps: int | None) -> str:
        """What a report says of it; empty for the whole run."""
        if not self.bounded:
            return ""
        if steps is not None and self.first > steps:
            return f"never drawn from: it starts at step {self.first} and the run has {steps}"
        if self.end is None:
            return f"drawn from at steps from {self.first} on"
        return f"drawn from at steps {self.first} to {self.end - 1}"


def check(specs: Sequence[DataSource], keys: Sequence[str], *, steps: int | None) -> None:
    """RecipeError for an empty interval, a step without data, or equal rows drawn twice.

    `steps` is run.steps; None judges as if the run had no end.
    """
    trained = {}
    for spec, key in zip(specs, keys, strict=True):
        if spec.role == "eval":
            _refuse_on_eval(spec, key)
            continue
        span = Span.of(spec)
        if span.end is not None and span.end <= span.first:
            raise RecipeError(
                f"{key}.until_step is {span.end} and {key}.from_step is {spec.from_step}: no step "
                "lies between them. Steps count from 1; from_step is drawn from, until_step is not."
            )
        trained[key] = (spec, span)
    spans = {key: span for key, (_, span) in trained.items()}
    for one, other in combinations(trained, 2):
        _refuse_twice(one, other, trained)
    if spans:
        _refuse_gap(spans, steps)


def _refuse_on_eval(spec: DataSource, key: str) -> None:
    given = {
        "from_step": spec.from_step != 0,
        "until_step": spec.until_step is not None,
        "keep_solve_rate": spec.keep_solve_rate is not None,
    }
    for name, is_set in given.items():
        if is_set:
            raise RecipeError(
                f"{key}.{name}: nothing reads it on a source with role eval, whose rows are asked "
                "at every evaluation. Remove it."
            )


def _refuse_twice(one: str, other: str, trained: dict[str, tuple[DataSource, Span]]) -> None:
    """Equal rows in two sources are a choice of weights, but with intervals a slip of one step."""
    (spec, span), (twin, until) = trained[one], trained[other]
    same = all(
        getattr(spec, name) == getattr(twin, name) for name in ("source", "split", "columns")
    )
    if not same or spec.options != twin.options or not (span.bounded or until.bounded):
        return
    first = max(span.first, until.first)
    if span.holds(first) and until.holds(first):
        raise RecipeError(
            f"{one} and {other} name the same rows, and both are drawn from at step {first}. Move "
            f"{one}.until_step or {other}.from_step so that one ends where the other begins."
        )


def _refuse_gap(spans: dict[str, Span], steps: int | None) -> None:
    starts = sorted({1, *(span.end for span in spans.values() if span.end is not None)})
    for start in starts:
        if steps is not None and start > steps:
            return
        if any(span.holds(start) for span in spans.values()):
            continue
        later = [span.first for span in spans.values() if span.first > start]
        last = min(later) - 1 if later else steps
        where = f"from step {start} on" if last is None else f"at steps {start} to {last}"
        if last == start:
            where = f"at step {start}"
        raise RecipeError(
            f"no source is drawn from {where}: {', '.join(map(_said, spans, spans.values()))}. "
            "Move a from_step or an until_step, or add a source."
        )


def _said(key: str, span: Span) -> str:
    given = {"from_step": span.first if span.first > 1 else None, "until_step": span.end}
    words = [f"{name} {step}" for name, step in given.items() if step is not None]
    return f"{key} has {' and '.join(words)}"
