"""Log-probabilities of tokens from logits, written as plainly as possible.

Owns the reference that faster scorers are compared with, and that row-by-row scoring uses.
Refuses to own chunking, recomputation and precision: it works in the dtype of the logits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from surefoot.errors import SurefootError
from surefoot.objective.shapes import check_shapes


class TokenLogp(NamedTuple):
    """Log-probability of the given tokens, and entropy of the distribution they came from."""

    logp_N: Tensor
    entropy_N: Tensor


def token_logp(logits_NV: Tensor, tokens_N: Tensor, *, temperature: float) -> TokenLogp:
    """Score tokens under the distribution that was sampled: softmax(logits / temperature).

    logp = log p(token), H = -sum_v p_v log p_v in nats; a token of probability 0 adds nothing to H.
    Shapes: logits_NV, tokens_N (int64) -> TokenLogp(logp_N, entropy_N) in the dtype of the logits.
    Errors: SurefootError if the temperature is not above 0: at 0 there is no distribution.
    """
    check_shapes(NV=(logits_NV,), N=(tokens_N,))
    if temperature <= 0:
        raise SurefootError(f"Log-probabilities need a temperature above 0, not {temperature}.")
    logp_NV = torch.log_softmax(logits_NV / temperature, dim=1)
    finite_NV = torch.where(torch.isneginf(logp_NV), 0.0, logp_NV)
    entropy_N = -(logp_NV.exp() * finite_NV).sum(1)
    return TokenLogp(logp_NV.gather(1, tokens_N[:, None]).squeeze(1), entropy_N)
