"""One token for each row: from logits to a keyed draw and its log-probability.

Owns temperature, truncation (top-k, top-p, min-p) and inverse-CDF sampling on float32 logits.
Refuses to own the model and the loop over tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.errors import NotSaved
from surefoot.rollout.engine import Sampling

_BLOCK = 256


def tempered(logits_BV: Tensor, settings: Sampling, *, blocked: Tensor | None) -> Tensor:
    """Logits of the distribution that is really sampled from, shape [B, V], float32.

    Divided by the temperature, then cut by top-k, top-p and min-p in that order; -inf is a
    probability of 0. `blocked` ids (int64) get that too.
    """
    logits_BV = logits_BV.float()
    if settings.temperature != 1.0:
        logits_BV = logits_BV / settings.temperature
    if blocked is not None:
        logits_BV = logits_BV.index_fill(1, blocked, float("-inf"))
    if settings.top_k or settings.top_p < 1.0 or settings.min_p > 0.0:
        logits_BV = _truncate(logits_BV, settings)
    return logits_BV


def draw(logits_BV: Tensor, uniform_B: Tensor | None) -> tuple[Tensor, Tensor]:
    """A token of softmax(logits) for each row and its log-probability; greedy without uniforms.

    Inverse-CDF sampling: the first token whose cumulative probability exceeds the uniform, found
    by blocks of tokens first and then inside a block. Uniforms lie in (0, 1) and are scaled by the
    last cumulative value, so rounding in a sum can neither fall off its end nor pick a token of
    probability 0. Shapes: [B, V], [B] -> ids [B] (int64), logp [B] (float32, nats). NotSaved where
    the logits of a row are no distribution.
    """
    top_B1 = logits_BV.amax(-1, keepdim=True)
    weights_BV = (logits_BV - top_B1).exp_()
    cumulative_BK = _block_sums(weights_BV).cumsum(-1)
    total_B1 = cumulative_BK[:, -1:]
    if not bool(total_B1.isfinite().all()):
        raise NotSaved(
            "the logits of the model are not finite, so nothing can be sampled: training has "
            "diverged, or the weights are damaged. These weights are not saved. Lower "
            "optim.learning_rate, and go on from an older checkpoint or start again in a new "
            "run.dir"
        )
    if uniform_B is None:
        ids_B1 = logits_BV.argmax(-1, keepdim=True)
    else:
        target_B1 = uniform_B[:, None].to(total_B1.dtype) * total_B1
        block_B1 = _first_above(cumulative_BK, target_B1)
        before_B1 = F.pad(cumulative_BK, (1, 0)).gather(1, block_B1)
        index_BL = block_B1 * _BLOCK + torch.arange(_BLOCK, device=block_B1.device)
        inside_BL = index_BL < weights_BV.shape[1]
        index_BL = index_BL.clamp_max(weights_BV.shape[1] - 1)
        within_BL = torch.where(inside_BL, weights_BV.gather(1, index_BL), 0.0).cumsum(-1)
        ids_B1 = index_BL.gather(1, _first_above(within_BL, target_B1 - before_B1))
    logp_B1 = logits_BV.gather(1, ids_B1) - top_B1 - total_B1.log()
    return ids_B1[:, 0], logp_B1[:, 0]


def _block_sums(weights_BV: Tensor) -> Tensor:
    rows, width = weights_BV.shape
    whole = width - width % _BLOCK
    sums = [weights_BV[:, :whole].reshape(rows, -1, _BLOCK).sum(-1)]
    if whole < width:
        sums.append(weights_BV[:, whole:].sum(-1, keepdim=True))
    return torch.cat(sums, -1)


def _first_above(cumulative_BK: Tensor, target_B1: Tensor) -> Tensor:
    """Index of the first entry above the target, which is first pulled below the last entry."""
    last_B1 = cumulative_BK[:, -1:]
    below_B1 = torch.nextafter(last_B1, torch.zeros_like(last_B1))
    return torch.searchsorted(cumulative_BK, torch.minimum(target_B1, below_B1), right=True)


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
