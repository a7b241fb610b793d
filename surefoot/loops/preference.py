"""What preference methods do with a batch: pairs or labels, beside a reference that stays.

Owns the scores of the reference (asked once, and kept), the metrics by TRL's names, the evaluation,
and the finding that chosen answers get rarer while the margin grows.
Refuses to own the losses (`learner/preference`), and when a step is taken (`offline`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from surefoot.data import Label, Pair
from surefoot.learner.answers import Answers, answer_passes
from surefoot.learner.batch import Packing
from surefoot.learner.descent import Descended, descend
from surefoot.learner.optim import Optimizer
from surefoot.learner.preference import Asked, pass_loss, score_of, zero_point
from surefoot.learner.scorer import Scorer
from surefoot.loops.metrics import Metrics
from surefoot.loops.offline import Budgeted, Look
from surefoot.loops.reference import ReferenceScores
from surefoot.loops.supervised import compared_look, policy_tensors
from surefoot.methods import Preference
from surefoot.objective import calibration

DISPLACED = 1.0
"""Nats by which the score of the chosen answers must have fallen to be called displaced."""
_EVAL_BATCH = 32
_AVERAGED = (
    "rewards/accuracies",
    "rewards/margins",
    "rewards/chosen",
    "rewards/rejected",
    "logps/chosen",
    "logps/rejected",
)


class PreferenceTask(Budgeted):
    """Pairs by any row of the family; labels by KTO."""

    def __init__(
        self,
        row: Preference,
        scorer: Scorer,
        optimizer: Optimizer,
        packing: Packing,
        held_out: Sequence[Pair | Label],
        reference: ReferenceScores | None,
    ) -> None:
        super().__init__(optimizer, packing)
        self.row = row
        self.scorer = scorer
        self.held_out = held_out
        self.reference = reference
        """The reference's scores of every answer; None for rows without a reference."""

    def tokens(self, examples: Sequence[Pair | Label]) -> int:
        return sum(len(e.prompt) + e.trained_tokens for e in examples)

    def learn(self, examples: Sequence[Pair | Label], *, rate: float) -> tuple[Descended, Metrics]:
        asked = self._asked(examples)
        passes = answer_passes(asked.batch, self.packing)
        loss_of = pass_loss(self.row, self.scorer, asked)
        done = descend(self.optimizer, passes, loss_of, rate=rate, interrupt=self.interrupt)
        return done, self._metrics(done.sums, asked)

    def _asked(self, examples: Sequence[Pair | Label]) -> Asked:
        batch = answers_of(examples)
        reference_B = None if self.reference is None else self.reference.of(examples)
        if self.row.data == "pairs":
            return Asked(batch, reference_B)
        desirable_P = torch.tensor([isinstance(e, Label) and e.desirable for e in examples])
        return Asked(batch, reference_B, desirable_P, self._zero(examples))

    def _zero(self, examples: Sequence[Pair | Label]) -> Tensor:
        """KTO's zero point, once for the step: other answers behind these prompts."""
        assert self.reference is not None
        other = self.reference.mismatched(examples)
        score_B = score_of(self.row, self.scorer, other.batch, self.packing)
        present_B = torch.ones_like(score_B).bool()
        return zero_point(score_B, other.score_B, present_B=present_B)

    def _metrics(self, sums: Mapping[str, float], asked: Asked) -> Metrics:
        out: Metrics = {"entropy": sums["entropy"] / sums["tokens"]}
        if self.row.data == "pairs":
            count = sums["pairs"]
            out |= {name: sums[name] / count for name in _AVERAGED}
            if self.row.nll:
                out["nll_loss"] = sums["nll_loss"] / count
                out["pair_loss"] = sums["pair_loss"] / count
            if self.row.weight == "likelihood":
                out["pair_weight"] = sums["pair_weight"] / count
            return out
        good, bad = sums["desirable"], sums["undesirable"]
        for side, count in (("chosen", good), ("rejected", bad)):
            if count:
                out[f"rewards/{side}"] = sums[f"rewards/{side}"] / count
                out[f"logps/{side}"] = sums[f"logps/{side}"] / count
        if good and bad:
            out["rewards/margins"] = float(out["rewards/chosen"] or 0) - float(
                out["rewards/rejected"] or 0
            )
        out["rewards/accuracies"] = sums["rewards/accuracies"] / (good + bad)
        out["labels/desirable"] = good / (good + bad)
        assert asked.zero is not None
        out["kl"] = float(asked.zero)
        return out

    def look(self, step: int) -> Look | None:
        """The held-out pairs: how many the policy's rewards put in order."""
        if not self.held_out:
            return None
        chosen: list[float] = []
        rejected: list[float] = []
        lengths: list[float] = []
        names: list[str] = []
        prompts: list[tuple[int, ...]] = []
        for start in range(0, len(self.held_out), _EVAL_BATCH):
            self.interrupt()
            some = self.held_out[start : start + _EVAL_BATCH]
            batch = answers_of(some)
            score_B = score_of(self.row, self.scorer, batch, self.packing)
            if self.reference is not None:
                score_B = score_B - self.reference.of(some)
            reward_B = (self.row.beta * score_B).tolist()
            for example, first in zip(some, batch.first_P, strict=True):
                names.append(example.id)
                prompts.append(example.prompt)
                if isinstance(example, Pair):
                    chosen.append(reward_B[first])
                    rejected.append(reward_B[first + 1])
                    lengths.append(float(len(example.chosen) - len(example.rejected)))
                else:
                    (chosen if example.desirable else rejected).append(reward_B[first])
        if self.row.data == "labels":
            return _labels_look(chosen, rejected)
        margins = [win - lose for win, lose in zip(chosen, rejected, strict=True)]
        look = compared_look(step, margins, lengths, names, prompts)
        count = len(margins)
        look.metrics["eval/rewards/chosen"] = sum(chosen) / count
        look.metrics["eval/rewards/rejected"] = sum(rejected) / count
        if self.reference is None:
            return look
        return dataclasses.replace(look, finding=self._displacement(chosen, rejected))

    def _displacement(
        self, chosen: Sequence[float], rejected: Sequence[float]
    ) -> tuple[str, str] | None:
        """Whether the chosen answers got rarer while the margin grew (arXiv 2410.08847).

        Rewards are relative to the reference, so both were 0 before the first step.
        """
        present_B = torch.ones(len(chosen), dtype=torch.bool)
        start = calibration.pair_means(
            torch.zeros(len(chosen)), torch.zeros(len(chosen)), present_B=present_B
        )
        now = calibration.pair_means(
            torch.tensor(chosen), torch.tensor(rejected), present_B=present_B
        )
        found = calibration.displacement(start, now, tolerance=DISPLACED * self.row.beta)
        if not bool(found.is_displaced):
            return None
        return (
            "displacement",
            f"the held-out chosen answers have become rarer (mean log-ratio "
            f"{float(found.chosen) / self.row.beta:.2f} nats) while the margin grew: only the "
            "difference of two answers is trained. Add method.nll, or take a row that holds the "
            "chosen answers up, such as nca_pair or apo_zero",
        )

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        return policy_tensors(self.scorer.model, self.optimizer)


def answers_of(examples: Sequence[Pair | Label]) -> Answers:
    """Pairs with the chosen answer first; a label's one answer."""
    return Answers(
        tuple(e.prompt for e in examples),
        tuple((e.chosen, e.rejected) if isinstance(e, Pair) else (e.completion,) for e in examples),
    )


def _labels_look(good: Sequence[float], bad: Sequence[float]) -> Look:
    """Mean rewards, and the chance that a good answer's is above a bad one's (a tie is half)."""
    metrics: Metrics = {}
    if good:
        metrics["eval/rewards/chosen"] = sum(good) / len(good)
    if bad:
        metrics["eval/rewards/rejected"] = sum(bad) / len(bad)
    if good and bad:
        above = sum((g > b) + 0.5 * (g == b) for g in good for b in bad)
        metrics["eval/auc"] = above / (len(good) * len(bad))
    return Look(metrics)
