"""The loss of preference methods on a pass: from log-probabilities to pairs and labels.

Owns the dispatch from a row's score, reference, link and mixture to the functions of `objective/`,
the passes of a step, and its metrics as sums.
Refuses to own the mathematics, where pairs come from (`data`), and the optimizer step (`descent`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.learner.answers import Answers, answer_passes, logps, spread
from surefoot.learner.batch import Packing
from surefoot.learner.descent import PassLoss
from surefoot.learner.layouts import Microbatch
from surefoot.learner.scorer import Scorer
from surefoot.methods import Preference
from surefoot.objective import answers as scores
from surefoot.objective import preference


@dataclass(frozen=True)
class Asked:
    """A step's batch, and what is known of it before its gradient."""

    batch: Answers
    reference_B: Tensor | None
    """Score of each answer under the reference; None for rows without one."""
    desirable_P: Tensor | None = None
    """Labels, for a row of labels."""
    zero: Tensor | None = None
    """KTO's zero point, of the whole step."""


def score_of(row: Preference, scorer: Scorer, batch: Answers, packing: Packing) -> Tensor:
    """The row's score of every answer, without gradient, [B]; of a reference, or an evaluation."""
    passes = answer_passes(batch, packing)
    logp_BT = logps(scorer, batch, passes)
    return scores.sequence_score(logp_BT, mask_BT=batch.mask_BT, score=row.score).score_B


def mismatched(batch: Answers) -> Answers:
    """Each answer behind the prompt of the next row of the batch (KTO, arXiv 2402.01306)."""
    count = len(batch.prompts)
    return Answers(
        tuple(batch.prompts[(p + 1) % count] for p in range(count)),
        batch.answers,
    )


def zero_point(score_B: Tensor, reference_B: Tensor, *, present_B: Tensor) -> Tensor:
    """KTO's zero point from the mismatched answers of the whole step, under both policies."""
    against_B = scores.against_reference(score_B, reference_B)
    return preference.kto_zero(against_B, present_B=present_B)


def pass_loss(row: Preference, scorer: Scorer, asked: Asked) -> Callable[[Microbatch], PassLoss]:
    """The loss of a pass, as `descent` takes it; its denominator is the step's."""
    if row.data == "labels":
        return lambda part: _labels(row, scorer, asked, part)
    return lambda part: _pairs(row, scorer, asked, part)


def _relative(row: Preference, scorer: Scorer, asked: Asked, part: Microbatch) -> _Read:
    """Token log-probabilities and scores of a pass's answers, less the reference's."""
    mask_BT = asked.batch.mask_BT
    scored = scorer(part, collision=row.weight == "likelihood")
    logp_bT = spread(scored.logp_N, part, mask_BT.shape[1])
    mask_bT = mask_BT[part.row_list].to(logp_bT.device)
    found = scores.sequence_score(logp_bT, mask_BT=mask_bT, score=row.score)
    score_b = found.score_B
    if row.reference:
        assert asked.reference_B is not None
        reference_b = asked.reference_B[part.row_list].to(score_b.device)
        score_b = scores.against_reference(score_b, reference_b)
    total_b = torch.where(mask_bT, logp_bT, 0.0).detach().double().sum(1)
    log_weight_b = None
    if scored.log_collision_N is not None:
        collision_bT = spread(scored.log_collision_N, part, mask_BT.shape[1])
        log_weight_b = scores.log_likelihood_weight(logp_bT, collision_bT, mask_BT=mask_bT)
    entropy = float(scored.entropy_N.detach().sum())
    return _Read(logp_bT, mask_bT, score_b, total_b, entropy, log_weight_b)


@dataclass(frozen=True)
class _Read:
    logp_bT: Tensor
    mask_bT: Tensor
    score_b: Tensor
    total_b: Tensor
    """Summed log-probability of each answer."""
    entropy: float
    log_weight_b: Tensor | None
    """How typical of the policy each answer is, for a row that weighs its pairs by it."""


def _pairs(row: Preference, scorer: Scorer, asked: Asked, part: Microbatch) -> PassLoss:
    """Rows come in pairs, chosen first; `answer_passes` keeps them in one pass."""
    read = _relative(row, scorer, asked, part)
    present_b = scores.present_pairs(read.mask_bT[0::2], read.mask_bT[1::2])
    out = preference.pair_losses(
        read.score_b[0::2],
        read.score_b[1::2],
        present_B=present_b,
        link=row.link,
        beta=row.beta,
        margin=row.margin,
        smoothing=row.smoothing,
        unbias=row.unbias,
    )
    weight_b = present_b.double()
    if read.log_weight_b is not None:
        weight_b = scores.likelihood_weights(
            read.log_weight_b[0::2], read.log_weight_b[1::2], present_B=present_b
        )
    loss_b = weight_b * out.loss_B
    loss = preference.nll_mixture(
        loss_b,
        read.logp_bT[0::2],
        mask_BT=read.mask_bT[0::2],
        present_B=present_b,
        denominator=torch.tensor(float(len(asked.batch.prompts)), device=read.logp_bT.device),
        nll=row.nll,
    )
    length_b = read.mask_bT[0::2].sum(1).clamp_min(1)
    return PassLoss(
        loss,
        {
            "pairs": float(present_b.sum()),
            "pair_loss": float(loss_b.detach().sum()),
            "pair_weight": float(weight_b.sum()),
            "rewards/chosen": float(out.chosen_reward_B.sum()),
            "rewards/rejected": float(out.rejected_reward_B.sum()),
            "rewards/accuracies": float(out.is_correct_B.sum()),
            "rewards/margins": float(out.margin_B.sum()),
            "logps/chosen": float(read.total_b[0::2].sum()),
            "logps/rejected": float(read.total_b[1::2].sum()),
            "nll_loss": -float((read.total_b[0::2] / length_b).sum()),
            "entropy": read.entropy,
            "tokens": float(read.mask_bT.sum()),
        },
    )


def _labels(row: Preference, scorer: Scorer, asked: Asked, part: Microbatch) -> PassLoss:
    assert asked.desirable_P is not None and asked.zero is not None
    read = _relative(row, scorer, asked, part)
    good_b = asked.desirable_P[part.row_list].to(read.score_b.device)
    present_b = read.mask_bT.any(1)
    out = preference.label_losses(
        read.score_b,
        desirable_B=good_b,
        present_B=present_b,
        link=row.link,
        beta=row.beta,
        zero=asked.zero.to(read.score_b.device),
        desirable=row.desirable,
        undesirable=row.undesirable,
    )
    loss = out.loss_B.double().sum() / len(asked.batch.prompts)
    good, bad = present_b & good_b, present_b & ~good_b
    return PassLoss(
        loss,
        {
            "desirable": float(good.sum()),
            "undesirable": float(bad.sum()),
            "rewards/chosen": float(out.reward_B[good].sum()),
            "rewards/rejected": float(out.reward_B[bad].sum()),
            "rewards/accuracies": float(out.is_correct_B.sum()),
            "logps/chosen": float(read.total_b[good].sum()),
            "logps/rejected": float(read.total_b[bad].sum()),
            "entropy": read.entropy,
            "tokens": float(read.mask_bT.sum()),
        },
    )
