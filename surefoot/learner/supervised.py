"""The losses of supervised methods on a pass: the likelihood of documents, and reward models.

Owns the dispatch to the functions of `objective/`, where a reward model reads its score, and the
metrics as sums.
Refuses to own the mathematics, the layouts, and the optimizer step (`descent`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from surefoot.learner.answers import Answers, spread
from surefoot.learner.critic import ValueModel
from surefoot.learner.descent import PassLoss
from surefoot.learner.layouts import Microbatch
from surefoot.learner.scorer import Scorer
from surefoot.methods import Supervised
from surefoot.objective import reward_model


def nll_loss(scorer: Scorer, *, tokens: int) -> Callable[[Microbatch], PassLoss]:
    """Mean -log p over the trained tokens of the whole optimizer step, of which there are `tokens`.

    Every trained token counts once, however its documents share rows and passes.
    """

    def loss_of(part: Microbatch) -> PassLoss:
        scored = scorer(part)
        total = -scored.logp_N.double().sum()
        sums = {
            "nll": float(total.detach()),
            "entropy": float(scored.entropy_N.detach().sum()),
            "tokens": float(len(part.rows_N)),
        }
        return PassLoss(total / max(1, tokens), sums)

    return loss_of


def rewards(model: ValueModel, batch: Answers, part: Microbatch) -> Tensor:
    """The reward of each answer of a pass, read after its last token; in ascending order of rows.

    The pass is one of `answer_passes(..., after=True)`.
    """
    length_B = batch.length_B
    value_bT = spread(model(part), part, int(length_B.max()) + 1)
    column_b = length_B[part.row_list].to(value_bT.device)
    return value_bT.gather(1, column_b[:, None])[:, 0]


def all_rewards(model: ValueModel, batch: Answers, passes: list[Microbatch]) -> Tensor:
    """The reward of every answer, without gradient, float64 [B]."""
    out_B = torch.zeros(batch.rows, dtype=torch.float64)
    with torch.no_grad():
        for part in passes:
            out_B[part.row_list] = rewards(model, batch, part).double().cpu()
    return out_B


def comparison_loss(
    row: Supervised, model: ValueModel, batch: Answers, *, margin_P: Tensor
) -> Callable[[Microbatch], PassLoss]:
    """Bradley-Terry over pairs (chosen first) or rankings (best first); mean over the step's.

    `margin_P` is what each pair asks for, 0 where the data has none; rankings have no margin.
    """
    firsts = batch.first_P
    count = len(firsts)

    def loss_of(part: Microbatch) -> PassLoss:
        reward_b = rewards(model, batch, part)
        rows = part.row_list
        starts = [i for i, row_ in enumerate(rows) if row_ in set(firsts)]
        sizes = [end - start for start, end in zip(starts, [*starts[1:], len(rows)], strict=True)]
        prompts = [firsts.index(rows[start]) for start in starts]
        if row.data == "pairs":
            out = reward_model.bradley_terry(
                reward_b[0::2],
                reward_b[1::2],
                margin_B=margin_P[prompts].to(reward_b.device),
                present_B=torch.ones(len(prompts), dtype=torch.bool, device=reward_b.device),
                center=row.center,
            )
            loss = (out.loss_B + out.penalty_B).double().sum() / count
            compared, right = float(len(prompts)), float(out.is_correct_B.sum())
            gaps = {"margin": float(out.margin_B.sum())}
        else:
            table_PK, valid_PK = _table(reward_b, sizes)
            rank_PK = torch.arange(table_PK.shape[1], device=reward_b.device).expand_as(table_PK)
            ranked = reward_model.ranking(
                table_PK, rank_PK=rank_PK, valid_PK=valid_PK, center=row.center
            )
            loss = (ranked.loss_P + ranked.penalty_P).double().sum() / count
            compared, right = float(ranked.pairs_P.sum()), float(ranked.correct_P.sum())
            gaps = {}
        told = reward_b.detach().double()
        sums = {
            "compared": compared,
            "right": right,
            "reward": float(told.sum()),
            "reward_square": float(told.square().sum()),
            "answers": float(len(rows)),
        }
        return PassLoss(loss, sums | gaps)

    return loss_of


def _table(reward_b: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Rows of unequal length as [P, K] with a mask."""
    widest = max(sizes)
    index = torch.arange(widest)
    valid_PK = (index[None] < torch.tensor(sizes)[:, None]).to(reward_b.device)
    table_PK = reward_b.new_zeros(len(sizes), widest).masked_scatter(valid_PK, reward_b)
    return table_PK, valid_PK
