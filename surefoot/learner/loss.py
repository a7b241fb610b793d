"""The loss of one micro-batch, assembled from the values of a row.

Owns the dispatch from a row's ratio, gate, correction, KL and terms to the functions of
`objective/`.
Refuses to own the mathematics (there), the advantages (`loops/credit`) and the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surefoot.learner import custom
from surefoot.methods import Method
from surefoot.objective import correction, gates, kl, policy, terms, value
from surefoot.objective.mismatch import Mismatch, mismatch
from surefoot.objective.reduce import weighted_sum


@dataclass(frozen=True)
class LossInputs:
    """Rows of one micro-batch; every tensor is [b, T] and aligned.

    `weight_BT` are the token weights of the whole optimizer step, so the sum over micro-batches
    is the loss of the step. `mask_BT` is True where a token is trained.
    """

    logp_BT: Tensor
    entropy_BT: Tensor
    old_logp_BT: Tensor
    sampled_logp_BT: Tensor
    ref_logp_BT: Tensor | None
    advantage_BT: Tensor
    mask_BT: Tensor
    weight_BT: Tensor
    imitated_BT: Tensor | None = None
    """Token weights of the completions that are right, under a denominator of their own."""

    @property
    def advantage_B(self) -> Tensor:
        """One number per row: the mean over its trained tokens, 0 for a row without any."""
        count_B = self.mask_BT.sum(1).clamp_min(1)
        return torch.where(self.mask_BT, self.advantage_BT, 0.0).sum(1) / count_B


@dataclass(frozen=True)
class LossSums:
    """The loss of a micro-batch (differentiable), and sums over its trained tokens for metrics."""

    loss: Tensor
    sums: Mapping[str, float]


Flags = dict[str, Tensor]
"""Which tokens a gate acted on, by the name of their count."""


def _no_gate(inputs: LossInputs, row: Method, log_ratio_BT: Tensor) -> tuple[Tensor, Flags]:
    return policy.unclipped(
        log_ratio_BT, advantage_BT=inputs.advantage_BT, mask_BT=inputs.mask_BT
    ), {}


def _clip(inputs: LossInputs, row: Method, log_ratio_BT: Tensor) -> tuple[Tensor, Flags]:
    gate: Any = row.gate
    if row.ratio.level == "geometric":
        inner = gates.geometric(
            log_ratio_BT,
            advantage_BT=inputs.advantage_BT,
            mask_BT=inputs.mask_BT,
            low=gate.low,
            high=gate.high,
        )
        return inner.per_token_BT, _clip_flags(inner.is_low_BT, inner.is_high_BT)
    out = policy.clipped(
        log_ratio_BT,
        advantage_BT=inputs.advantage_BT,
        mask_BT=inputs.mask_BT,
        low=gate.low,
        high=gate.high,
        dual=gate.dual,
        cap=gate.cap,
    )
    return out.per_token_BT, _clip_flags(out.is_low_BT, out.is_high_BT, out.is_capped_BT)


def _weight(inputs: LossInputs, row: Method, log_ratio_BT: Tensor) -> tuple[Tensor, Flags]:
    gate: Any = row.gate
    per_token_BT = gates.weighted(
        log_ratio_BT,
        inputs.logp_BT,
        advantage_BT=inputs.advantage_BT,
        mask_BT=inputs.mask_BT,
        low=gate.low,
        high=gate.high,
    )
    ratio_BT = torch.where(inputs.mask_BT, log_ratio_BT.detach(), 0.0).exp()
    return per_token_BT, _clip_flags(ratio_BT < gate.low, ratio_BT > gate.high)


def _sigmoid(inputs: LossInputs, row: Method, log_ratio_BT: Tensor) -> tuple[Tensor, Flags]:
    gate: Any = row.gate
    return gates.sigmoid(
        log_ratio_BT,
        advantage_BT=inputs.advantage_BT,
        mask_BT=inputs.mask_BT,
        positive=gate.positive,
        negative=gate.negative,
    ), {}


def _divergence(inputs: LossInputs, row: Method, log_ratio_BT: Tensor) -> tuple[Tensor, Flags]:
    gate: Any = row.gate
    out = gates.diverged(
        inputs.logp_BT,
        _then(inputs, row),
        advantage_BT=inputs.advantage_BT,
        mask_BT=inputs.mask_BT,
        measure=gate.measure,
        delta=gate.delta,
        cap=gate.cap,
    )
    return out.per_token_BT, {"gate_dropped": inputs.mask_BT & ~out.keep_BT}


def _use(inputs: LossInputs, row: Method, log_ratio_BT: Tensor) -> tuple[Tensor, Flags]:
    gate: Any = row.gate
    return custom.gate(
        gate,
        log_ratio_BT,
        logp_BT=inputs.logp_BT,
        advantage_BT=inputs.advantage_BT,
        mask_BT=inputs.mask_BT,
    ), {}


def _clip_flags(low_BT: Tensor, high_BT: Tensor, cap_BT: Tensor | None = None) -> Flags:
    none_BT = torch.zeros_like(low_BT)
    return {
        "clip_low": low_BT,
        "clip_high": high_BT,
        "clip_cap": none_BT if cap_BT is None else cap_BT,
    }


Gate = Callable[[LossInputs, Method, Tensor], tuple[Tensor, Flags]]
GATES: Mapping[str, Gate] = {
    "none": _no_gate,
    "clip": _clip,
    "weight": _weight,
    "sigmoid": _sigmoid,
    "divergence": _divergence,
    "use": _use,
}


def _token_level(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return log_ratio_BT


def _sequence_level(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return gates.sequence_log_ratio(log_ratio_BT, mask_BT=mask_BT)


def _sequence_token_level(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return gates.sequence_token_log_ratio(log_ratio_BT, mask_BT=mask_BT)


LEVELS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": _token_level,
    "sequence": _sequence_level,
    "sequence_token": _sequence_token_level,
    # The clip takes the mean itself, of ratios that it has clipped.
    "geometric": _token_level,
}
RATIOS: frozenset[str] = frozenset({"none", *LEVELS})


def _truncate(choice: Any, found: Mismatch, mask_BT: Tensor) -> Tensor:
    return correction.truncate(_rho(choice.level, found, mask_BT), high=choice.high)


def _mask(choice: Any, found: Mismatch, mask_BT: Tensor) -> Tensor:
    return correction.mask(_rho(choice.level, found, mask_BT), low=choice.low, high=choice.high)


def _geometric_mask(choice: Any, found: Mismatch, mask_BT: Tensor) -> Tensor:
    keep_B = correction.inside(found.geometric_ratio_B, low=choice.low, high=choice.high)
    return (keep_B[:, None] & mask_BT).double()


def _rho(level: str, found: Mismatch, mask_BT: Tensor) -> Tensor:
    if level == "token":
        return found.token_ratio_BT
    return torch.where(mask_BT, found.sequence_ratio_B[:, None], 0.0)


CORRECTIONS: Mapping[str, Callable[[Any, Mismatch, Tensor], Tensor]] = {
    "truncate": _truncate,
    "mask": _mask,
    "geometric_mask": _geometric_mask,
}


def _then(inputs: LossInputs, row: Method) -> Tensor:
    """The log-probabilities that the ratio compares with."""
    return inputs.sampled_logp_BT if row.ratio.to == "sampler" else inputs.old_logp_BT


def _policy_loss(inputs: LossInputs, row: Method, sums: Flags) -> Tensor:
    """Ratio, gate, correction and stale mask; what they did is added to `sums`."""
    mask_BT = inputs.mask_BT
    log_ratio_BT, sums["clamped"] = policy.log_ratio(
        inputs.logp_BT, _then(inputs, row), mask_BT=mask_BT
    )
    ratio_BT = torch.where(mask_BT, log_ratio_BT.detach().exp(), 0.0)
    sums["ratio"], sums["ratio_max"] = ratio_BT.sum(), ratio_BT.max()
    if row.ratio.level == "none":
        per_token_BT = policy.reinforce(
            inputs.logp_BT, advantage_BT=inputs.advantage_BT, mask_BT=mask_BT
        )
    else:
        level_BT = LEVELS[row.ratio.level](log_ratio_BT, mask_BT)
        per_token_BT, flags = GATES[row.gate.kind](inputs, row, level_BT)
        sums.update({name: (flag & mask_BT).sum() for name, flag in flags.items()})
    if row.correction.kind != "none":
        found = mismatch(inputs.old_logp_BT, inputs.sampled_logp_BT, mask_BT=mask_BT)
        weight_BT = CORRECTIONS[row.correction.kind](row.correction, found, mask_BT)
        sums["correction"] = weight_BT.sum()
        sums["correction_dropped"] = (mask_BT & (weight_BT == 0)).sum()
        per_token_BT = correction.apply(per_token_BT, weight_BT, mask_BT=mask_BT)
    for term in row.terms:
        if term.kind == "stale_mask":
            stale_B, _ = terms.stale(
                inputs.logp_BT,
                inputs.old_logp_BT,
                advantage_B=inputs.advantage_B,
                mask_BT=mask_BT,
                delta=term.delta,
            )
            sums["stale"] = (mask_BT & stale_B[:, None]).sum()
            per_token_BT = torch.where(stale_B[:, None], 0.0, per_token_BT)
    return per_token_BT


def microbatch_loss(inputs: LossInputs, row: Method) -> LossSums:
    """Sum weight x (policy loss + KL + terms) over the micro-batch's trained tokens."""
    mask_BT = inputs.mask_BT
    sums: dict[str, Tensor] = {"tokens": mask_BT.sum()}
    per_token_BT = _policy_loss(inputs, row, sums)
    if row.kl.place == "loss" and row.kl.coef != 0:
        assert inputs.ref_logp_BT is not None
        kl_BT = kl.estimate(
            row.kl.estimator,
            inputs.logp_BT,
            inputs.ref_logp_BT,
            mask_BT=mask_BT,
            old_logp_BT=inputs.old_logp_BT,
        )
        per_token_BT = per_token_BT + row.kl.coef * kl_BT
        sums["kl_trained"] = torch.where(mask_BT, kl_BT.detach(), 0.0).sum()
    for term in row.terms:
        if term.kind in TERMS:
            per_token_BT = per_token_BT + TERMS[term.kind](inputs, term)
    extra = _imitation(inputs, row, sums)
    sums["entropy"] = torch.where(mask_BT, inputs.entropy_BT.detach(), 0.0).sum()
    loss = weighted_sum(per_token_BT, inputs.weight_BT)
    if extra is not None:
        loss = loss + extra
    return LossSums(loss, {name: float(value) for name, value in sums.items()})


def _entropy(inputs: LossInputs, term: Any) -> Tensor:
    bonus_BT = terms.entropy_bonus(inputs.entropy_BT, mask_BT=inputs.mask_BT)
    return float(term.weight) * bonus_BT


TERMS: Mapping[str, Callable[[LossInputs, Any], Tensor]] = {"entropy": _entropy}
"""Terms that are added; a stale mask acts on the policy loss instead."""


def _imitation(inputs: LossInputs, row: Method, sums: Flags) -> Tensor | None:
    """The likelihood of right completions, weighed by a sum of its own (arXiv:2504.05118 Eq. 9)."""
    for term in row.terms:
        if term.kind == "positive_nll":
            assert inputs.imitated_BT is not None
            right_B = (inputs.imitated_BT != 0).any(1)
            nll_BT = value.positive_nll(inputs.logp_BT, correct_B=right_B, mask_BT=inputs.mask_BT)
            sums["imitated"] = (inputs.mask_BT & right_B[:, None]).sum()
            sums["imitated_nll"] = nll_BT.detach().sum()
            return float(term.weight) * weighted_sum(nll_BT, inputs.imitated_BT)
    return None


def trains_everything(row: Method) -> bool:
    """Whether every trained token has a coefficient even where its advantage is 0."""
    weighted_kl = row.kl.place == "loss" and row.kl.coef != 0
    if weighted_kl or row.critic.kind != "none":
        return True
    weighed = ("entropy", "positive_nll")
    return any(term.weight != 0 for term in row.terms if term.kind in weighed)
