"""What no setting reconciles: TRL 1.16 and we on one small batch each, with both numbers.

The numbers are those of `DIFFERENCES` in docs/trl_facts.py, which docs/differences.md prints.
"""

from __future__ import annotations

import dataclasses
import math
import runpy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trl_tools import Case, ours, theirs

FACTS = runpy.run_path(str(Path(__file__).resolve().parents[2] / "docs" / "trl_facts.py"))
Pair = tuple[float, float]
NO_KL = {"place": "none", "coef": 0.0, "measure_every": 0}
GRPO: dict[str, Any] = {"loss_type": "grpo"}
DAPO: dict[str, Any] = {"loss_type": "dapo", "epsilon_high": 0.28}
OURS_DAPO: dict[str, Any] = {"shaping": "none", "keep": "all"}


def case(
    rewards: Sequence[float | None],
    *,
    lengths: Sequence[int] | None = None,
    log_ratio: float = 0.0,
    mismatch: float = 0.0,
    truncated: Sequence[int] = (),
    **changes: Any,
) -> Case:
    """One group; every token has old probability 1/4 and the log-ratio said, and entropy 1 or 2.

    The reference gives every token probability 1/2. The mismatch is old minus sampled.
    """
    rows = len(rewards)
    lengths = tuple(lengths or [2] * rows)
    old = torch.full((rows, max(lengths)), math.log(0.25), dtype=torch.float64)
    entropy = torch.where(torch.arange(rows)[:, None] == 0, 1.0, 2.0).double().expand(old.shape)
    made = Case(
        group_size=rows,
        reward_BK=tuple((value,) for value in rewards),
        weight_K=(1.0,),
        lengths=lengths,
        truncated=tuple(row in truncated for row in range(rows)),
        logp_BT=old + log_ratio,
        old_BT=old,
        sampled_BT=old - mismatch,
        ref_BT=torch.full_like(old, math.log(0.5)),
        entropy_BT=entropy,
    )
    return dataclasses.replace(made, **changes)


def losses(given: Case, trl: Mapping[str, Any], name: str, changes: Mapping[str, Any]) -> Pair:
    return theirs(given, "grpo", trl)[0].loss, ours(given, name, changes).loss


def equal_rewards() -> Pair:
    """0.7 eight times: the largest advantage."""
    given = case([0.7] * 8)
    want = theirs(given, "grpo", GRPO)[0].advantage_B
    return float(want.abs().max()), float(ours(given, "grpo", {}).advantage_B.abs().max())


def masked_in_the_mean() -> Pair:
    """1, 0, 0 and a truncated 0: the advantage of the first."""
    given = case([1.0, 0.0, 0.0, 0.0], truncated=[3])
    trl = {**GRPO, "mask_truncated_completions": True, "scale_rewards": "none"}
    want = theirs(given, "grpo", trl)[0].advantage_B
    got = ours(given, "dr_grpo", {"truncated": "mask"}).advantage_B
    return float(want[0]), float(got[0])


def masked_in_the_denominator() -> Pair:
    """1, 1 and a truncated 1 under KL alone: every token pays coef k3, the third none."""
    given = case([1.0, 1.0, 1.0], truncated=[2])
    trl = {**GRPO, "mask_truncated_completions": True, "beta": 1.0, "use_bias_correction_kl": False}
    return losses(given, trl, "grpo", {"kl": {"coef": 1.0}, "truncated": "mask"})


def missing_in_the_denominator() -> Pair:
    """1, 0 and one without a reward: the gradient of the first, 2 tokens of 6 or of 4."""
    given = case([1.0, 0.0, None])
    trl = {**GRPO, "scale_rewards": "none"}
    want = theirs(given, "grpo", trl)[0].grad_BT
    got = ours(given, "grpo", {"kl": NO_KL, "scale": "none", "min_group": 2}).grad_BT
    return float(want[0, 0]), float(got[0, 0])


def lone_sample_in_the_batch_std() -> Pair:
    """Groups (1, 0) and (4, no reward), scaled over the batch: the first advantage."""
    given = case([1.0, 0.0, 4.0, None], group_size=2)
    want = theirs(given, "grpo", {"scale_rewards": "batch"})[0].advantage_B
    return float(want[0]), float(ours(given, "lite_ppo", {}).advantage_B[0])


def micro_batches() -> Pair:
    """`bnpo` on two micro-batches of lengths 1 and 3: each has its own token mean."""
    given = case([1.0, 0.0], lengths=[1, 3], micro=2)
    trl = {"loss_type": "bnpo", "scale_rewards": "none"}
    return losses(given, trl, "grpo", {"kl": NO_KL, "scale": "none", "reduce": "token_mean"})


def entropy_over_micro_batches() -> Pair:
    """Entropy 1 at one token, 2 at three, equal rewards, coefficient 1."""
    given = case([1.0, 1.0], lengths=[1, 3], micro=2)
    terms = [{"kind": "entropy", "weight": 1.0}]
    return losses(given, {**DAPO, "entropy_coef": 1.0}, "dapo", {**OURS_DAPO, "terms": terms})


def entropy_under_a_sequence_mean() -> Pair:
    """The same in one micro-batch, with the sequence mean of GRPO."""
    given = case([1.0, 1.0], lengths=[1, 3])
    terms = [{"kind": "entropy", "weight": 1.0}]
    return losses(given, {**GRPO, "entropy_coef": 1.0}, "grpo", {"kl": NO_KL, "terms": terms})


def tokens_of_another_step() -> Pair:
    """Two optimizer steps on one generation, lengths 1, 1 and 3, 3: the loss of the first."""
    given = case([1.0, 0.0, 1.0, 0.0], lengths=[1, 1, 3, 3], group_size=2)
    given = dataclasses.replace(given, logp_BT=given.old_BT + _first_row(given, 0.1))
    trl = {**DAPO, "scale_rewards": "none"}
    want = theirs(given, "grpo", trl, windows=2)[0].loss
    got = ours(given, "dapo", {**OURS_DAPO, "scale": "none"}, inside=(0, 1)).loss
    return want, got


def _first_row(given: Case, value: float) -> Tensor:
    shift_BT = torch.zeros_like(given.old_BT)
    shift_BT[0] = value
    return shift_BT


def rloo_off_policy() -> Pair:
    """Rewards 1 and 0, every ratio 1.1, two tokens: the gradient of the first token."""
    given = case([1.0, 0.0], log_ratio=math.log(1.05))
    want = theirs(given, "rloo", {"beta": 0.0})[0].grad_BT
    got = ours(given, "rloo", {"kl": {"coef": 0.0}}).grad_BT
    return float(want[0, 0]), float(got[0, 0])


def stale_by_the_sampler() -> Pair:
    """Ratio 1, but the trainer is 0.2 nats per token below the engine: the loss of the bad one."""
    given = case([1.0, 0.0], mismatch=-0.2)
    trl = {
        **GRPO,
        "scale_rewards": "none",
        "use_vllm": True,
        "vllm_importance_sampling_correction": False,
        "off_policy_mask_threshold": 0.1,
    }
    terms = [{"kind": "stale_mask", "delta": 0.1}]
    return losses(given, trl, "grpo", {"kl": NO_KL, "scale": "none", "epochs": 2, "terms": terms})


def weight_from_below() -> Pair:
    """old / sampled 0.5 at every token: the gradient of the good one."""
    given = case([1.0, 0.0], mismatch=math.log(0.5))
    trl = {
        **DAPO,
        "scale_rewards": "none",
        "use_vllm": True,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_min": 0.8,
        "vllm_importance_sampling_clip_max": 2.0,
    }
    changes = {**OURS_DAPO, "scale": "none", "correction": {"kind": "truncate", "high": 2.0}}
    want = theirs(given, "grpo", trl)[0].grad_BT
    return float(want[0, 0]), float(ours(given, "dapo", changes).grad_BT[0, 0])


def unknown_sampled_logp() -> Pair:
    """One of four tokens has no sampled log-probability: the gradient of its neighbour."""
    given = case([1.0, 0.0])
    given.sampled_BT[0, 1] = math.nan
    trl = {
        **DAPO,
        "scale_rewards": "none",
        "use_vllm": True,
        "vllm_importance_sampling_mode": "token_truncate",
    }
    changes = {**OURS_DAPO, "scale": "none", "correction": "truncate"}
    want = theirs(given, "grpo", trl)[0].grad_BT
    return float(want[0, 0]), float(ours(given, "dapo", changes).grad_BT[0, 0])


def ratio_in_the_kl_of_gspo() -> Pair:
    """Log-ratios 0.2 and -0.2 in each completion, equal rewards: the loss is coef k3 ratio."""
    given = case([1.0, 1.0])
    shift_BT = torch.tensor([[0.2, -0.2], [0.2, -0.2]], dtype=torch.float64)
    given = dataclasses.replace(given, logp_BT=given.old_BT + shift_BT)
    trl = {**GRPO, "importance_sampling_level": "sequence", "beta": 1.0}
    kl = {"place": "loss", "estimator": "k3_ratio", "coef": 1.0}
    return losses(given, trl, "gspo", {"kl": kl})


def clipped_rewards() -> Pair:
    """Rewards 5 and 0 with reward_clip_range (-1, 1): the first advantage."""
    given = case([5.0, 0.0])
    want = theirs(given, "rloo", {"beta": 0.0, "reward_clip_range": (-1.0, 1.0)})[0].advantage_B
    return float(want[0]), float(ours(given, "rloo", {"kl": {"coef": 0.0}}).advantage_B[0])


def far_ratio() -> Pair:
    """Log-ratio 25 at A < 0, logarithm of the loss: exp(25) against exp(20)."""
    given = case([0.0, 1.0], lengths=[1, 1])
    given = dataclasses.replace(given, logp_BT=given.old_BT + _first_row(given, 25.0))
    trl = {**GRPO, "scale_rewards": "none"}
    want, got = losses(given, trl, "grpo", {"kl": NO_KL, "scale": "none"})
    return math.log(want), math.log(got)


def parts_whitened() -> Pair:
    """GDPO on rewards 1, 0, 0: the first advantage."""
    given = case([1.0, 0.0, 0.0])
    want = theirs(given, "grpo", {"multi_objective_aggregation": "normalize_then_sum"})[0]
    return float(want.advantage_B[0]), float(ours(given, "gdpo", {}).advantage_B[0])


COMPUTED: Mapping[str, Callable[[], Pair]] = {
    function.__name__: function
    for function in (
        equal_rewards,
        masked_in_the_mean,
        masked_in_the_denominator,
        missing_in_the_denominator,
        lone_sample_in_the_batch_std,
        micro_batches,
        entropy_over_micro_batches,
        entropy_under_a_sequence_mean,
        tokens_of_another_step,
        rloo_off_policy,
        stale_by_the_sampler,
        weight_from_below,
        unknown_sampled_logp,
        ratio_in_the_kl_of_gspo,
        clipped_rewards,
        far_ratio,
        parts_whitened,
    )
}


@pytest.mark.parametrize("difference", FACTS["DIFFERENCES"], ids=lambda d: d.key)
def test_the_numbers_of_the_page_are_computed(difference: Any) -> None:
    want, got = COMPUTED[difference.key]()
    # Three digits are printed; a remainder of float32 rounding depends on the processor.
    digits = 0.5 if difference.key == "equal_rewards" else 2e-3
    assert float(f"{want:.3g}") == pytest.approx(difference.theirs, rel=digits, abs=1e-9)
    assert float(f"{got:.3g}") == pytest.approx(difference.ours_value, rel=2e-3, abs=1e-9)
    assert want != pytest.approx(got, rel=1e-5), "this is not a difference; move it to AGREEMENTS"


def test_every_computed_difference_is_on_the_page() -> None:
    assert {d.key for d in FACTS["DIFFERENCES"]} == set(COMPUTED)
