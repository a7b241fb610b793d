"""The KL coefficient from step to step.

Owns the dispatch from a row's controller to its rule, and what divergence the rule sees.
Refuses to own the rules (`objective/kl`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from surefoot.learner.batch import Batch
from surefoot.learner.update import Facts, UpdateReport
from surefoot.loops.standing import Standing
from surefoot.methods import Method
from surefoot.objective import kl


def with_coef(row: Method, coef: float | None) -> Method:
    """The row with the coefficient that holds now; None is the row's own."""
    if coef is None or coef == row.kl.coef:
        return row
    return dataclasses.replace(row, kl=dataclasses.replace(row.kl, coef=coef))


def next_coef(
    row: Method, batch: Batch, standing: Standing, facts: Facts, report: UpdateReport
) -> float:
    """The coefficient of the next step, from the divergence of this step's completions.

    Unchanged if nothing was scored under both policies.
    """
    controller = row.kl.controller
    found = measured(controller.unit, batch, standing, facts, report) if adapts(row) else None
    if found is None:
        return row.kl.coef
    divergence, count = found
    return CONTROLLERS[controller.kind](controller, row.kl.coef, divergence, count)


def adapts(row: Method) -> bool:
    """Whether the coefficient changes at all."""
    return row.kl.controller.kind != "fixed"


def measured(
    unit: str, batch: Batch, standing: Standing, facts: Facts, report: UpdateReport
) -> tuple[float, int] | None:
    """Mean k1 to the reference, in nats per `unit`, and over how many completions."""
    if facts.ref_logp_BT is None:
        return None
    scored_B = torch.zeros(batch.rows, dtype=torch.bool)
    scored_B[list(facts.ref_rows)] = True
    present_B = standing.present_PG.reshape(-1) & scored_B
    mask_BT = batch.mask_BT & report.known_BT & present_B[:, None]
    rows, tokens = int(mask_BT.any(1).sum()), int(mask_BT.sum())
    if rows == 0:
        return None
    total = float(kl.sequence_kl(report.old_logp_BT, facts.ref_logp_BT, mask_BT=mask_BT).sum())
    mean = total / (rows if unit == "sequence" else tokens)
    return (mean, rows) if math.isfinite(mean) else None


def _proportional(controller: Any, coef: float, divergence: float, count: int) -> float:
    return kl.proportional(
        coef,
        kl=divergence,
        target=controller.target,
        horizon=controller.horizon,
        count=count,
    )


def _doubling(controller: Any, coef: float, divergence: float, count: int) -> float:
    return kl.doubling(coef, kl=divergence, target=controller.target)


CONTROLLERS: Mapping[str, Callable[[Any, float, float, int], float]] = {
    "proportional": _proportional,
    "doubling": _doubling,
}
