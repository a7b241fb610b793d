"""One update by hand: groups of random tokens, a learner on a tiny model, its gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from support.tiny import VOCABULARY
from surefoot.learner.batch import Batch, Packing, make_batch
from surefoot.learner.layouts import NAMES, Name
from surefoot.learner.optim import Optimizer
from surefoot.learner.scorer import Scorer
from surefoot.learner.update import Facts, Learner, Signal, UpdateReport
from surefoot.methods import Method
from surefoot.recipe import Optim
from surefoot.records import Completion, Group, Prompt, Score, ScoreStatus, StopReason


def make_groups(lengths: Sequence[Sequence[int]], *, seed: int = 0) -> list[Group]:
    """A group for each list of completion lengths; ids, log-probabilities and scores random."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(4, VOCABULARY, (count,), generator=generator).tolist())

    groups = []
    for p, row in enumerate(lengths):
        prompt = Prompt(id=f"p{p}", position=p, ids=ids(5 + p), text=f"prompt {p}")
        completions, scores = [], []
        for g, length in enumerate(row):
            logps = tuple((-4 * torch.rand(length, generator=generator)).tolist())
            completions.append(Completion(ids(length), logps, StopReason.STOP, 0, g, "text"))
            value = float(torch.rand(1, generator=generator))
            scores.append(Score(ScoreStatus.SCORED, value, {"r": value}))
        groups.append(Group(prompt, tuple(completions), tuple(scores)))
    return groups


def make_learner(
    model: PreTrainedModel,
    row: Method,
    *,
    budget: int = 10_000,
    layouts: Sequence[Name] = NAMES,
    reference: PreTrainedModel | None = None,
    temperature: float = 0.8,
    **optim: Any,
) -> Learner:
    """A learner in the model's own precision."""
    dtype = model.dtype

    def scorer(module: PreTrainedModel) -> Scorer:
        return Scorer(module, compute=module.dtype, head_dtype=dtype, temperature=temperature)

    policy = scorer(model)
    settings = Optim(**{"learning_rate": 1e-3, "max_grad_norm": None, **optim})
    return Learner(
        policy,
        Optimizer(model, settings, steps=10),
        row,
        reference=None if reference is None else scorer(reference),
        packing=Packing(budget, tuple(layouts), policy.shape),
        constant=7.0,
        seed=0,
    )


@dataclasses.dataclass
class Outcome:
    """What one update did: the gradient of each optimizer step, and the report."""

    gradients: list[Tensor]
    report: UpdateReport


def update(
    learner: Learner,
    batch: Batch,
    advantage_B: Tensor,
    *,
    present_B: Tensor | None = None,
    forwarded_B: Tensor | None = None,
) -> Outcome:
    """Run `Learner.update` and keep a copy of the gradient before each optimizer step."""
    row = learner.row
    everything = torch.ones(batch.rows, dtype=torch.bool)
    present_B = everything if present_B is None else present_B
    plan = learner.plan(batch, present_B if forwarded_B is None else forwarded_B, step=1)
    in_loss = row.kl.place == "loss" and row.kl.coef != 0
    facts = Facts()
    if in_loss or not learner.single_step:
        facts = learner.score(batch, plan, old=not learner.single_step, reference=in_loss)
    gradients: list[Tensor] = []
    apply = learner.optimizer.step

    def record(*, rate: float, norm: float) -> None:
        grads = [p.grad.flatten() for p in learner.optimizer.parameters if p.grad is not None]
        gradients.append(torch.cat(grads).double().clone())
        apply(rate=rate, norm=norm)

    learner.optimizer.step = record  # type: ignore[method-assign]
    advantage_BT = torch.where(batch.mask_BT, advantage_B.double()[:, None], 0.0)
    # What was right is what has an advantage above 0.
    right_B = present_B & (advantage_B > 0)
    signal = Signal(advantage_BT, present_B, correct_B=right_B)
    report = learner.update(batch, plan, signal, facts, step=1)
    return Outcome(gradients, report)


def batch_of(lengths: Sequence[Sequence[int]], *, seed: int = 0) -> Batch:
    return make_batch(make_groups(lengths, seed=seed))


def distance(got: Tensor, want: Tensor) -> float:
    """Relative norm of the difference."""
    return float((got.detach() - want.detach()).norm() / want.detach().norm())
