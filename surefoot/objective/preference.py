"""Learning from preferences: the losses of pairs and of single labels.

Owns the DPO family over pairs, KTO and BCO over single labels, KTO's zero point, and the mixture
with the likelihood of the chosen answers.
Refuses to own the scores of answers (`answers`), which loss a method uses, how mismatched pairs are
made, and every denominator.

s is the score of an answer under the policy, less that under the reference where there is one;
r = beta s is its reward. A pair (or label) is *present* or *absent*: an absent one, such as a pair
with an answer that truncation has emptied, has loss 0 and gradient 0 and is not looked at; NaN in a
present one is not hidden. Losses are one number per pair: their mean is over the present pairs of
the whole optimizer step, and the denominator is the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from surefoot.errors import SurefootError
from surefoot.objective import reduce
from surefoot.objective.shapes import check_mask, check_shapes


@dataclass(frozen=True)
class Pairs:
    """A loss per pair, and its facts: float64 constants, 0 (false) where absent."""

    loss_B: Tensor
    chosen_reward_B: Tensor
    rejected_reward_B: Tensor
    margin_B: Tensor
    """Chosen less rejected reward."""
    logit_B: Tensor
    """The margin less the target margin: what the links of the difference see."""
    is_correct_B: Tensor
    """margin > 0. A tie is not correct, so at unchanged weights no pair is."""


@dataclass(frozen=True)
class Labels:
    """A loss per label, and its facts: float64 constants, 0 (false) where absent."""

    loss_B: Tensor
    reward_B: Tensor
    is_correct_B: Tensor
    """The reward is above the zero point and the label desirable, or below and not."""


PairLink = Callable[[Tensor, Tensor, float, float], Tensor]
LabelLink = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Link:
    """The loss behind one word of a row, for the data it can judge."""

    pair: PairLink | None = None
    """(chosen reward, rejected reward, target margin, beta) -> loss."""
    label: LabelLink | None = None
    """How far the reward is on the side of its label -> loss."""
    reads_margin: bool = False


def _sigmoid(chosen_B: Tensor, rejected_B: Tensor, margin: float, beta: float) -> Tensor:
    return -logsigmoid(chosen_B - rejected_B - margin)


def _hinge(chosen_B: Tensor, rejected_B: Tensor, margin: float, beta: float) -> Tensor:
    return (1 - (chosen_B - rejected_B - margin)).clamp(min=0)


def _square(chosen_B: Tensor, rejected_B: Tensor, margin: float, beta: float) -> Tensor:
    return ((chosen_B - rejected_B - margin - 0.5) / beta).square()


def _bco(chosen_B: Tensor, rejected_B: Tensor, margin: float, beta: float) -> Tensor:
    return -logsigmoid(chosen_B) - logsigmoid(-rejected_B)


def _apo_zero(chosen_B: Tensor, rejected_B: Tensor, margin: float, beta: float) -> Tensor:
    return torch.sigmoid(-chosen_B) + torch.sigmoid(rejected_B)


def _nca(chosen_B: Tensor, rejected_B: Tensor, margin: float, beta: float) -> Tensor:
    return -logsigmoid(chosen_B) - 0.5 * (logsigmoid(-chosen_B) + logsigmoid(-rejected_B))


def _kto_label(side_B: Tensor) -> Tensor:
    return torch.sigmoid(-side_B)


def _bco_label(side_B: Tensor) -> Tensor:
    return -logsigmoid(side_B)


LINKS: Mapping[str, Link] = MappingProxyType(
    {
        "sigmoid": Link(pair=_sigmoid, reads_margin=True),
        "hinge": Link(pair=_hinge, reads_margin=True),
        "square": Link(pair=_square, reads_margin=True),
        "kto": Link(label=_kto_label),
        "bco": Link(pair=_bco, label=_bco_label),
        "apo_zero": Link(pair=_apo_zero),
        "nca": Link(pair=_nca),
    }
)
"""The words of a row's `link`."""


def pair_losses(
    chosen_B: Tensor,
    rejected_B: Tensor,
    *,
    present_B: Tensor,
    link: str,
    beta: float,
    margin: float,
    smoothing: float,
    unbias: bool,
) -> Pairs:
    """Compare the two answers of each pair: a loss of the rewards r = beta s.

    z = r_w - r_l - margin;  L = log sigmoid
    sigmoid   -L(z)                                 arXiv:2305.18290; margin: 2405.14734 (gamma)
    hinge     max(0, 1 - z)                         arXiv:2305.10425, 2309.06657
    square    ((z - 1/2) / beta)^2, that is (h - 1/(2 beta))^2 with h = s_w - s_l
                                                    arXiv:2310.12036 Eq. 17
    bco       -L(r_w) - L(-r_l)                     arXiv:2404.04656, without its running shift
    apo_zero  1 - sigmoid(r_w) + sigmoid(r_l)       arXiv:2408.06266
    nca       -L(r_w) - 1/2 L(-r_w) - 1/2 L(-r_l)   arXiv:2402.05369

    smoothing e is the share of pairs whose label is flipped. With l' the loss of the swapped pair
    (its margin asked of the other answer), the loss is (1 - e) l + e l' (cDPO, Mitchell 2023:
    least where sigmoid(z) = 1 - e at margin 0), and with unbias ((1 - e) l - e l') / (1 - 2e)
    (arXiv:2403.00409), whose mean over flips is l. The unbiased one may be below 0, and with
    sigmoid it has no lower bound: it falls by e z / (1 - 2e) as z grows.
    Shapes: chosen_B, rejected_B (s, nats), present_B (bool), beta (> 0), margin (in rewards)
    -> Pairs, loss_B in the dtype of chosen_B.
    Errors: SurefootError for a link of labels only, and for a margin that the link does not read.
    """
    check_shapes(B=(chosen_B, rejected_B, present_B))
    check_mask(present_B)
    loss = _pair_link(link, margin)
    _check_beta(beta)
    if not 0 <= smoothing < 0.5:
        raise SurefootError(f"smoothing is a share of flipped labels in [0, 0.5), not {smoothing}.")
    if unbias and smoothing == 0:
        raise SurefootError("unbias divides out the smoothing, which is 0; set it above 0.")
    reward_B = beta * torch.where(present_B, chosen_B, 0.0).double()
    other_B = beta * torch.where(present_B, rejected_B, 0.0).double()
    loss_B = loss(reward_B, other_B, margin, beta)
    if smoothing > 0:
        kept_B, flipped_B = (1 - smoothing) * loss_B, loss(other_B, reward_B, margin, beta)
        if unbias:
            loss_B = (kept_B - smoothing * flipped_B) / (1 - 2 * smoothing)
        else:
            loss_B = kept_B + smoothing * flipped_B
    loss_B = torch.where(present_B, loss_B, 0.0).to(chosen_B.dtype)
    reward_B, other_B = reward_B.detach(), other_B.detach()
    margin_B = reward_B - other_B
    logit_B = torch.where(present_B, margin_B - margin, 0.0)
    return Pairs(loss_B, reward_B, other_B, margin_B, logit_B, margin_B > 0)


def label_losses(
    score_B: Tensor,
    *,
    desirable_B: Tensor,
    present_B: Tensor,
    link: str,
    beta: float,
    zero: Tensor,
    desirable: float,
    undesirable: float,
) -> Labels:
    """Judge single answers against a zero point: a loss of x = beta (s - zero), negated for bad.

    kto  w (1 - sigmoid(x))     arXiv:2402.01306 Eq. 8, zero = `kto_zero`
    bco  -w log sigmoid(x)      arXiv:2404.04656, zero = its running shift / beta
    w is `desirable` for good labels and `undesirable` for bad ones. Against an imbalance of n_D
    good and n_U bad labels the paper of KTO sets them so that (desirable n_D) / (undesirable n_U)
    lies between 1 and 3/2: see `label_balance`. kto has nearly no gradient far on either side.
    Shapes: score_B (s, nats), desirable_B (bool), present_B (bool), zero (scalar, nats, constant)
    -> Labels, loss_B in the dtype of score_B.
    """
    check_shapes(B=(score_B, desirable_B, present_B))
    check_mask(desirable_B, present_B)
    _check_beta(beta)
    if link not in LINKS or (loss := LINKS[link].label) is None:
        words = ", ".join(word for word, value in LINKS.items() if value.label is not None)
        raise SurefootError(f"Link {link!r} cannot judge single labels; choose from {words}.")
    if not (desirable > 0 and undesirable > 0):
        raise SurefootError(
            f"desirable and undesirable are weights above 0, not {desirable} and {undesirable}."
        )
    clean_B = torch.where(present_B, score_B, 0.0).double()
    above_B = beta * (clean_B - zero.detach().double())
    side_B = torch.where(desirable_B, above_B, -above_B)
    plain_B = loss(side_B)
    weighted_B = torch.where(desirable_B, desirable * plain_B, undesirable * plain_B)
    loss_B = torch.where(present_B, weighted_B, 0.0).to(score_B.dtype)
    return Labels(loss_B, (beta * clean_B).detach(), present_B & (side_B.detach() > 0))


def kto_zero(mismatched_B: Tensor, *, present_B: Tensor) -> Tensor:
    """Estimate KTO's zero point from answers to other prompts: max(0, mean s) (arXiv:2402.01306).

    Take each answer of the step behind the prompt of another one, and s of all of them: the mean
    is that of the whole optimizer step, so compute it once from all its rows. It estimates
    KL(policy, reference), hence the 0. No gradient flows through it.
    Shapes: mismatched_B (s, nats), present_B (bool) -> float64 scalar tensor.
    Errors: SurefootError without a present row: nothing can be mismatched in a batch of one prompt.
    """
    check_shapes(B=(mismatched_B, present_B))
    check_mask(present_B)
    if not bool(present_B.any()):
        raise SurefootError(
            "KTO's zero point needs at least one answer behind another prompt, and there is none; "
            "give each step 2 prompts or more."
        )
    return mismatched_B.detach().double()[present_B].mean().clamp(min=0)


def label_balance(
    desirable_B: Tensor, *, present_B: Tensor, desirable: float, undesirable: float
) -> Tensor:
    """Weigh the good labels against the bad ones: (desirable n_D) / (undesirable n_U).

    arXiv:2402.01306 asks for 1 to 3/2.
    Shapes: desirable_B, present_B (bool) -> float64 scalar tensor; infinite without a bad label,
    NaN without any.
    """
    check_shapes(B=(desirable_B, present_B))
    check_mask(desirable_B, present_B)
    good = (desirable_B & present_B).sum().double()
    bad = (~desirable_B & present_B).sum().double()
    return desirable * good / (undesirable * bad)


def nll_mixture(
    loss_B: Tensor,
    chosen_logp_BT: Tensor,
    *,
    mask_BT: Tensor,
    present_B: Tensor,
    denominator: Tensor,
    nll: float,
) -> Tensor:
    """Add the likelihood of the chosen answers to the losses of the pairs, and reduce both.

    loss = 1/D sum over present pairs of (loss_b + nll x -1/n_b sum_t logp_t)
    n_b is the length of the chosen answer (arXiv:2404.19733; 2403.07691, whose lambda is 1/nll up
    to the scale of the whole), D the number of present pairs of the whole optimizer step, so the
    results of its micro-batches add up. nll 0: the pairs alone.
    Shapes: loss_B, chosen_logp_BT (nats), mask_BT (bool), present_B (bool), denominator (scalar)
    -> float64 scalar tensor; 0 where nothing is present.
    """
    check_shapes(B=(loss_B, present_B), BT=(chosen_logp_BT, mask_BT))
    check_mask(mask_BT, present_B)
    if not (math.isfinite(nll) and nll >= 0):
        raise SurefootError(f"nll weighs the likelihood and is at least 0, not {nll}.")
    whole = torch.where(denominator > 0, denominator, 1).double()
    pairs = torch.where(present_B, loss_B, 0.0).double().sum() / whole
    if nll == 0:
        return pairs
    weight_BT = reduce.token_weights(
        "sequence_mean", mask_BT=mask_BT, present_B=present_B, denominator=denominator
    )
    return pairs - nll * reduce.weighted_sum(chosen_logp_BT, weight_BT)


def _pair_link(link: str, margin: float) -> PairLink:
    if link not in LINKS:
        raise SurefootError(f"There is no link {link!r}; choose from {', '.join(LINKS)}.")
    loss = LINKS[link].pair
    if loss is None:
        raise SurefootError(
            f"Link {link} judges single answers; make two labels of each pair (chosen: desirable, "
            "rejected: not) and use label_losses."
        )
    if margin != 0 and not LINKS[link].reads_margin:
        words = ", ".join(word for word, value in LINKS.items() if value.reads_margin)
        raise SurefootError(
            f"Link {link} does not compare the two rewards, so a margin of {margin} is never read; "
            f"set margin to 0, or link to one of {words}."
        )
    if not (math.isfinite(margin) and margin >= 0):
        raise SurefootError(f"margin is a difference of rewards and >= 0, not {margin}.")
    return loss


def _check_beta(beta: float) -> None:
    if not (math.isfinite(beta) and beta > 0):
        raise SurefootError(f"beta multiplies the scores and is above 0, not {beta}.")
