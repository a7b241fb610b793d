"""Adapters of the kinds that learn from comparisons, as in `vector_adapters`.

The vectors give log-probabilities of whole answers: here each is spread evenly over its tokens,
with a token under the mask behind them, so that the scores are part of what is tested.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from vector_tools import NAN, Adapter, Make

from surefoot.objective import answers, calibration, preference, reward_model

ONE = torch.tensor(1.0, dtype=torch.float64)


def spread(total_B: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Tokens of equal log-probability whose sums are `total_B`, and their mask."""
    length_B = torch.tensor(lengths)
    mask_BT = torch.arange(max(lengths) + 1)[None] < length_B[:, None]
    return torch.where(mask_BT, (total_B / length_B)[:, None], NAN), mask_BT


def score(total_B: Tensor, lengths: Sequence[int], kind: answers.Score) -> Tensor:
    logp_BT, mask_BT = spread(total_B, lengths)
    got = answers.sequence_score(logp_BT, mask_BT=mask_BT, score=kind)
    assert not got.is_held_B.any()
    return got.score_B


def every(values_B: Tensor) -> Tensor:
    return torch.ones_like(values_B).bool()


def gradients(loss: Tensor, *inputs: Tensor) -> list[list[float]]:
    return [grad.tolist() for grad in torch.autograd.grad(loss, inputs)]


def reduced(loss_B: Tensor, chosen_B: Tensor, rejected_B: Tensor) -> dict[str, Any]:
    """The losses, their mean, and the elementwise gradients of the losses."""
    grad_chosen, grad_rejected = gradients(loss_B.sum(), chosen_B, rejected_B)
    return {
        "losses": loss_B.tolist(),
        "loss": loss_B.mean().item(),
        "grad_chosen": grad_chosen,
        "grad_rejected": grad_rejected,
    }


def dpo(
    link: str, *, kind: answers.Score = "sum", smooth: bool = False, unbias: bool = False
) -> Adapter:
    def adapter(
        make: Make,
        *,
        policy_chosen_logp: Any,
        policy_rejected_logp: Any,
        ref_chosen_logp: Any,
        ref_rejected_logp: Any,
        len_chosen: Any,
        len_rejected: Any,
        beta: float,
        label_smoothing: float,
    ) -> dict[str, Any]:
        chosen_B = make(policy_chosen_logp, grad=True)
        rejected_B = make(policy_rejected_logp, grad=True)
        relative_chosen_B = answers.against_reference(
            score(chosen_B, len_chosen, kind), score(make(ref_chosen_logp), len_chosen, kind)
        )
        relative_rejected_B = answers.against_reference(
            score(rejected_B, len_rejected, kind),
            score(make(ref_rejected_logp), len_rejected, kind),
        )
        got = preference.pair_losses(
            relative_chosen_B,
            relative_rejected_B,
            present_B=every(chosen_B),
            link=link,
            beta=beta,
            margin=0.0,
            smoothing=label_smoothing if smooth else 0.0,
            unbias=unbias,
        )
        return reduced(got.loss_B, chosen_B, rejected_B) | {
            "h": (relative_chosen_B - relative_rejected_B).tolist(),
            "chosen_rewards": got.chosen_reward_B.tolist(),
            "rejected_rewards": got.rejected_reward_B.tolist(),
            "margins": got.margin_B.tolist(),
            "accuracy": calibration.accuracy(got.margin_B, valid_N=every(chosen_B)).item(),
        }

    return adapter


def simpo(
    make: Make,
    *,
    policy_chosen_logp: Any,
    policy_rejected_logp: Any,
    len_chosen: Any,
    len_rejected: Any,
    beta: float,
    gamma: float,
) -> dict[str, Any]:
    chosen_B = make(policy_chosen_logp, grad=True)
    rejected_B = make(policy_rejected_logp, grad=True)
    got = preference.pair_losses(
        score(chosen_B, len_chosen, "mean"),
        score(rejected_B, len_rejected, "mean"),
        present_B=every(chosen_B),
        link="sigmoid",
        beta=beta,
        margin=gamma,
        smoothing=0.0,
        unbias=False,
    )
    return reduced(got.loss_B, chosen_B, rejected_B) | {"margins": got.logit_B.tolist()}


def orpo(
    make: Make,
    *,
    policy_chosen_logp: Any,
    policy_rejected_logp: Any,
    len_chosen: Any,
    len_rejected: Any,
    lam: float,
) -> dict[str, Any]:
    """The package weighs the likelihood by 1/lam instead, so its loss is taken times lam."""
    chosen_B = make(policy_chosen_logp, grad=True)
    rejected_B = make(policy_rejected_logp, grad=True)
    got = preference.pair_losses(
        score(chosen_B, len_chosen, "log_odds"),
        score(rejected_B, len_rejected, "log_odds"),
        present_B=every(chosen_B),
        link="sigmoid",
        beta=1.0,
        margin=0.0,
        smoothing=0.0,
        unbias=False,
    )
    logp_BT, mask_BT = spread(chosen_B, len_chosen)
    alone = [
        [
            preference.nll_mixture(
                weight * got.loss_B[row : row + 1],
                logp_BT[row : row + 1],
                mask_BT=mask_BT[row : row + 1],
                present_B=torch.tensor([True]),
                denominator=ONE,
                nll=nll,
            )
            for row in range(len(logp_BT))
        ]
        for weight, nll in ((0.0, 1.0), (1.0, 1 / lam))
    ]
    sft_B, mixed_B = (torch.stack(losses) for losses in alone)
    return reduced(lam * mixed_B, chosen_B, rejected_B) | {
        "log_odds_ratio": got.margin_B.tolist(),
        "or_losses": got.loss_B.tolist(),
        "sft_losses": sft_B.tolist(),
    }


def kto(
    make: Make,
    *,
    policy_logp: Any,
    ref_logp: Any,
    desirable: Any,
    beta: float,
    z0: float,
    lambda_d: float,
    lambda_u: float,
) -> dict[str, Any]:
    logp_B = make(policy_logp, grad=True)
    relative_B = answers.against_reference(logp_B, make(ref_logp))
    got = preference.label_losses(
        relative_B,
        desirable_B=torch.tensor(desirable),
        present_B=every(logp_B),
        link="kto",
        beta=beta,
        zero=torch.tensor(z0, dtype=torch.float64),
        desirable=lambda_d,
        undesirable=lambda_u,
    )
    return {
        "log_ratios": relative_B.tolist(),
        "losses": got.loss_B.tolist(),
        "loss": got.loss_B.mean().item(),
        "grad_logp": gradients(got.loss_B.sum(), logp_B)[0],
    }


def kto_z0(make: Make, *, mismatched_policy_logp: Any, mismatched_ref_logp: Any) -> dict[str, Any]:
    relative_B = answers.against_reference(make(mismatched_policy_logp), make(mismatched_ref_logp))
    return {"z0": preference.kto_zero(relative_B, present_B=every(relative_B)).item()}


def bradley_terry(
    make: Make, *, chosen: Any, rejected: Any, margin: Any, center_coef: float
) -> dict[str, Any]:
    chosen_B, rejected_B = make(chosen, grad=True), make(rejected, grad=True)
    got = reward_model.bradley_terry(
        chosen_B,
        rejected_B,
        margin_B=make(margin),
        present_B=every(chosen_B),
        center=center_coef,
    )
    loss, penalty = got.loss_B.mean(), got.penalty_B.mean()
    grad_chosen, grad_rejected = gradients(loss + penalty, chosen_B, rejected_B)
    return {
        "losses": got.loss_B.tolist(),
        "loss": loss.item(),
        "center_penalty": penalty.item(),
        "total": (loss + penalty).item(),
        "accuracy": calibration.accuracy(got.margin_B, valid_N=every(chosen_B)).item(),
        "grad_chosen": grad_chosen,
        "grad_rejected": grad_rejected,
    }


def ranking(make: Make, *, ranked_rewards: Any) -> dict[str, Any]:
    filled_PK, valid_PK = make.rewards(ranked_rewards)
    reward_PK = filled_PK.clone().requires_grad_()
    rank_PK = torch.arange(reward_PK.shape[1]).expand_as(reward_PK)
    got = reward_model.ranking(reward_PK, rank_PK=rank_PK, valid_PK=valid_PK, center=0.0)
    rows = gradients(got.loss_P.mean(), reward_PK)[0]
    return {
        "losses": got.loss_P.tolist(),
        "loss": got.loss_P.mean().item(),
        "n_pairs": got.pairs_P.tolist(),
        "grad": [row[: len(given)] for row, given in zip(rows, ranked_rewards, strict=True)],
    }


def normalize(
    make: Make, *, sample_scores: Any, target_mean: float, target_std: float
) -> dict[str, Any]:
    score_N = make(sample_scores)
    got = reward_model.normalization(
        score_N, valid_N=every(score_N), mean=target_mean, std=target_std
    )
    return {
        "gain": got.gain.item(),
        "bias": got.bias.item(),
        "normalized": reward_model.normalized(score_N, got).tolist(),
    }


PREFERENCE: Mapping[str, Adapter] = {
    "dpo_sigmoid": dpo("sigmoid"),
    "dpo_cdpo": dpo("sigmoid", smooth=True),
    "dpo_robust": dpo("sigmoid", smooth=True, unbias=True),
    "dpo_hinge": dpo("hinge"),
    "dpo_ipo": dpo("square"),
    "dpo_ipo_avg": dpo("square", kind="mean"),
    "dpo_length_normalized": dpo("sigmoid", kind="mean"),
    "dpo_bco_pair": dpo("bco"),
    "dpo_apo_zero": dpo("apo_zero"),
    "dpo_nca_pair": dpo("nca"),
    "dpo_metrics": dpo("sigmoid"),
    "simpo": simpo,
    "orpo": orpo,
    "kto": kto,
    "kto_z0": kto_z0,
    "reward_model_bradley_terry": bradley_terry,
    "reward_model_ranking": ranking,
    "reward_model_normalize": normalize,
}
