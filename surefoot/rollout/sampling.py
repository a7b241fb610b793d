"""One token for each row: from logits to a keyed draw and its log-probability.

Owns temperature, truncation (top-k, top-p, min-p) and inverse-CDF sampling on float32 logits.
Refuses to own the model and the loop over tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.rollout.engine import Sampling


def token_logps(logits_BV: Tensor, settings: Sampling, *, blocked: Tensor | None) -> Tensor:
    """Log-probabilities that are really sampled from, shape [B, V], float32.

    softmax(logits / temperature), then top-k, top-p and min-p in that order, renormalised.
    `blocked` ids (int64) get probability 0.
    """
    logits_BV = logits_BV.float()
    if settings.temperature != 1.0:
        logits_BV = logits_BV / settings.temperature
    if blocked is not None:
        logits_BV = logits_BV.index_fill(1, blocked, float("-inf"))
    if settings.top_k or settings.top_p < 1.0 or settings.min_p > 0.0:
        logits_BV = _truncate(logits_BV, settings)
    return logits_BV.log_softmax(-1)


def draw(logp_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Inverse-CDF sampling: the first token whose cumulative probability exceeds the uniform.

    Uniforms lie in (0, 1) and are scaled by the last cumulative value, so rounding in the sum can
    neither fall off its end nor pick a token of probability 0. Shapes: [B, V], [B] -> ids [B].
    """
    cumulative_BV = logp_BV.exp().cumsum(-1)
    total_B1 = cumulative_BV[:, -1:]
    target_B1 = uniform_B[:, None].to(total_B1.dtype) * total_B1
    below_B1 = torch.nextafter(total_B1, torch.zeros_like(total_B1))
    return torch.searchsorted(cumulative_BV, torch.minimum(target_B1, below_B1), right=True)[:, 0]


def _truncate(logits_BV: Tensor, settings: Sampling) -> Tensor:
    ordered_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    probability_BV = ordered_BV.softmax(-1)
    keep_BV = torch.ones_like(ordered_BV, dtype=torch.bool)
    if settings.top_k:
        keep_BV[:, settings.top_k :] = False
    if settings.top_p < 1.0:
        kept_BV = torch.where(keep_BV, probability_BV, 0.0)
        kept_BV = kept_BV / kept_BV.sum(-1, keepdim=True)
        # A token stays while the mass before it is short of top_p; the first one always does.
        keep_BV &= (kept_BV.cumsum(-1) - kept_BV) < settings.top_p
    if settings.min_p > 0.0:
        keep_BV &= probability_BV >= settings.min_p * probability_BV[:, :1]
    ordered_BV = torch.where(keep_BV, ordered_BV, float("-inf"))
    return torch.empty_like(logits_BV).scatter_(1, order_BV, ordered_BV)
