"""One optimizer step over laid-out passes, for methods that train on given data.

Owns adding up the gradient, its norm, and the refusal of a non-finite one.
Refuses to own the losses (`supervised`, `preference`), layouts, and steps of several epochs over
sampled completions (`update`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from surefoot.learner.layouts import Microbatch, Name
from surefoot.learner.optim import Optimizer


@dataclass(frozen=True)
class PassLoss:
    """A pass's share of the step's loss (differentiable), and sums for the metrics."""

    loss: Tensor
    sums: Mapping[str, float]


@dataclass(frozen=True)
class Descended:
    """What an optimizer step did."""

    applied: bool
    """False: nothing was changed, because there was no gradient or a part of it was not finite."""
    silent: bool
    """The gradient was exactly zero, so that no moment of the optimizer may move a weight."""
    loss: float
    grad_norm: float
    """Before clipping."""
    sums: Mapping[str, float]
    forwarded: int
    """Positions forwarded with gradient, padding included."""
    layouts: Mapping[Name, int]


def descend(
    optimizer: Optimizer,
    passes: Sequence[Microbatch],
    loss_of: Callable[[Microbatch], PassLoss],
    *,
    rate: float,
    interrupt: Callable[[], None],
) -> Descended:
    """Add the gradients of all passes and step once. The losses share one global denominator.

    `interrupt` is called before each pass, and may raise: no weight has changed by then.
    """
    total = 0.0
    sums: dict[str, float] = {}
    layouts: dict[Name, int] = {}
    for part in passes:
        interrupt()
        out = loss_of(part)
        out.loss.backward()
        total += float(out.loss.detach())
        layouts[part.layout] = layouts.get(part.layout, 0) + 1
        for name, value in out.sums.items():
            sums[name] = sums.get(name, 0.0) + value
    norm = optimizer.gradient_norm()
    finite = bool(passes) and math.isfinite(total) and math.isfinite(norm)
    silent = finite and norm == 0.0
    applied = finite and not silent
    if applied:
        optimizer.step(rate=rate, norm=norm)
    optimizer.clear()
    forwarded = sum(part.tokens for part in passes)
    return Descended(applied, silent, total, norm, sums, forwarded, layouts)
