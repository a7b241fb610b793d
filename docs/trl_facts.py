"""TRL 1.16 beside the rows: which settings of both give the same numbers, and where none do.

Owns plain data. `tests/unit/test_against_trl.py` runs every entry against TRL's own code;
`docs/generate.py` prints them.
Refuses to own code: nothing here computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Agreement(NamedTuple):
    """Advantages, loss and gradient agree to 1e-5 on 200 random batches."""

    name: str
    trainer: str
    """grpo, rloo or gmpo (TRL's experimental trainer)."""
    trl: Mapping[str, Any]
    row: str
    ours: Mapping[str, Any]
    """What is changed in the row."""
    one_micro: bool = False
    """Only if TRL does not cut the step into micro-batches."""
    on_policy: bool = False
    """Only the gradient, and only at ratio 1 (one optimizer step per generation)."""
    note: str = ""


class Difference(NamedTuple):
    """What no setting reconciles; tests/unit/test_trl_differences.py computes the numbers."""

    key: str
    subject: str
    trl: str
    ours: str
    example: str
    """The situation, and which quantity is compared."""
    theirs: float
    ours_value: float


_NO_KL = {"place": "none", "coef": 0.0, "measure_every": 0}
_GSPO = {
    "loss_type": "grpo",
    "importance_sampling_level": "sequence",
    "epsilon": 3e-4,
    "epsilon_high": 4e-4,
}
_VLLM = {"use_vllm": True, "loss_type": "dapo", "epsilon_high": 0.28}


def _vllm(mode: str, **bounds: float) -> dict[str, Any]:
    clip = {f"vllm_importance_sampling_{key}": value for key, value in bounds.items()}
    return {**_VLLM, "vllm_importance_sampling_mode": mode, **clip}


_DAPO = {"shaping": "none", "keep": "all"}

AGREEMENTS: tuple[Agreement, ...] = (
    Agreement("GRPO without KL", "grpo", {"loss_type": "grpo"}, "grpo", {"kl": _NO_KL}),
    Agreement(
        "GRPO, k3 in the loss",
        "grpo",
        {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False},
        "grpo",
        {},
    ),
    Agreement(
        "GRPO, k3 times the ratio",
        "grpo",
        {"loss_type": "grpo", "beta": 0.04},
        "grpo",
        {"kl": {"estimator": "k3_ratio"}},
        note="TRL's default with `beta` above 0",
    ),
    Agreement(
        "Dr.GRPO",
        "grpo",
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
        "dr_grpo",
        {},
        note="`max_completion_length` = `rollout.max_new_tokens`",
    ),
    Agreement(
        "DAPO's loss",
        "grpo",
        {"loss_type": "dapo", "epsilon_high": 0.28},
        "dapo",
        _DAPO,
        note="TRL has neither dynamic sampling nor, in its loss, the overlong penalty",
    ),
    Agreement(
        "TRL's default trainer",
        "grpo",
        {},
        "dapo",
        {**_DAPO, "gate": {"high": 0.2}},
        note="GRPOConfig without any setting: token mean, symmetric clip, no KL",
    ),
    Agreement(
        "`bnpo`",
        "grpo",
        {"loss_type": "bnpo"},
        "grpo",
        {"kl": _NO_KL, "reduce": "token_mean"},
        one_micro=True,
    ),
    Agreement(
        "Rewards scaled over the batch",
        "grpo",
        {"scale_rewards": "batch", "loss_type": "dapo"},
        "lite_ppo",
        {},
    ),
    Agreement("GSPO", "grpo", _GSPO, "gspo", {}),
    Agreement(
        "LUSPO",
        "grpo",
        {**_GSPO, "loss_type": "luspo"},
        "gspo",
        {"reduce": "sequence_sum"},
    ),
    Agreement(
        "GSPO, token form",
        "grpo",
        _GSPO,
        "gspo_token",
        {},
        note="TRL 1.16 has no token form; for one advantage per completion it is GSPO",
    ),
    Agreement(
        "CISPO",
        "grpo",
        {"loss_type": "cispo", "epsilon_high": 5.0},
        "cispo",
        {},
        note="both bounds are ratios",
    ),
    Agreement("SAPO", "grpo", {"loss_type": "sapo"}, "sapo", {}),
    Agreement(
        "GMPO",
        "gmpo",
        {"epsilon": 0.4, "epsilon_high": 0.4},
        "gmpo",
        {},
        note="TRL's bounds are in log r: `low` = 1 - exp(-0.4), `high` = exp(0.4) - 1",
    ),
    Agreement(
        "Two-sided clip",
        "grpo",
        {"loss_type": "grpo", "delta": 1.5},
        "grpo",
        {"kl": _NO_KL, "gate": {"cap": 1.5}},
        note="`delta` = `gate.cap`",
    ),
    Agreement(
        "Off-policy sequence mask",
        "grpo",
        {"loss_type": "grpo", "off_policy_mask_threshold": 0.05},
        "grpo",
        {"kl": _NO_KL, "epochs": 2, "terms": [{"kind": "stale_mask", "delta": 0.05}]},
        note="without vLLM",
    ),
    Agreement(
        "Entropy bonus",
        "grpo",
        {"loss_type": "dapo", "entropy_coef": 0.01},
        "dapo",
        {**_DAPO, "gate": {"high": 0.2}, "terms": [{"kind": "entropy", "weight": 0.01}]},
        one_micro=True,
    ),
    Agreement(
        "vLLM correction, `token_truncate`",
        "grpo",
        _vllm("token_truncate", clip_max=1.3),
        "dapo",
        {**_DAPO, "correction": {"kind": "truncate", "level": "token", "high": 1.3}},
    ),
    Agreement(
        "vLLM correction, `token_mask`",
        "grpo",
        _vllm("token_mask", clip_min=0.7, clip_max=1.3),
        "dapo",
        {**_DAPO, "correction": {"kind": "mask", "level": "token", "low": 0.7, "high": 1.3}},
    ),
    Agreement(
        "vLLM correction, `sequence_truncate`",
        "grpo",
        _vllm("sequence_truncate", clip_max=1.5),
        "dapo",
        {**_DAPO, "correction": {"kind": "truncate", "level": "sequence", "high": 1.5}},
    ),
    Agreement(
        "vLLM correction, `sequence_mask`",
        "grpo",
        _vllm("sequence_mask", clip_max=3.0),
        "dapo",
        {
            **_DAPO,
            "correction": {"kind": "mask", "level": "sequence", "low": 0.0, "high": 3.0},
        },
        note="mode and bound are TRL's defaults with vLLM",
    ),
    Agreement(
        "RLOO",
        "rloo",
        {"beta": 0.05},
        "rloo",
        {"kl": {"coef": 0.05}},
        on_policy=True,
    ),
    Agreement(
        "RLOO, normalised",
        "rloo",
        {"beta": 0.05, "normalize_advantages": True},
        "rloo",
        {"kl": {"coef": 0.05}, "scale": {"kind": "batch_std", "of": "centered"}},
        on_policy=True,
        note="leave-one-out advantages have mean 0 already",
    ),
)


DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        "equal_rewards",
        "A group of equal rewards",
        "decided by a float32 standard deviation; a remainder of rounding is divided by it",
        "decided by the range; exactly 0",
        "0.7 eight times: largest advantage",
        0.000596,
        0.0,
    ),
    Difference(
        "masked_in_the_mean",
        "A truncated completion that is masked",
        "stays in its group's mean and deviation",
        "leaves both",
        "rewards 1, 0, 0 and a truncated 0, no scale: first advantage",
        0.75,
        0.667,
    ),
    Difference(
        "masked_in_the_denominator",
        "The same, under a mean over completions",
        "is still counted among the completions",
        "is not",
        "three completions with equal KL, one of them masked: loss",
        0.205,
        0.307,
    ),
    Difference(
        "missing_in_the_denominator",
        "A completion without any reward",
        "advantage 0, but counted in the loss (and charged its KL)",
        "absent: in no numerator and no denominator",
        "rewards 1, 0 and none: gradient of the first completion's first token",
        -0.0833,
        -0.125,
    ),
    Difference(
        "lone_sample_in_the_batch_std",
        "A group that comes down to one reward",
        "its reward stays in the standard deviation of the batch",
        "the group is dropped, and counted as dropped",
        "groups (1, 0) and (4, none), scaled over the batch: first advantage",
        0.24,
        0.707,
    ),
    Difference(
        "micro_batches",
        "`bnpo` over several micro-batches",
        "a token mean for each micro-batch, then their mean",
        "one token mean over the optimizer step, however it is cut",
        "two micro-batches of 1 and 3 tokens: loss",
        0.0,
        0.25,
    ),
    Difference(
        "entropy_over_micro_batches",
        "The entropy bonus over several micro-batches",
        "a token mean for each micro-batch, then their mean",
        "reduced like the policy loss, over the optimizer step",
        "entropy 1 at one token, 2 at three, in two micro-batches: loss",
        -1.5,
        -1.75,
    ),
    Difference(
        "entropy_under_a_sequence_mean",
        "The entropy bonus of a row with `sequence_mean`",
        "a token mean, whatever the loss type",
        "reduced like the policy loss",
        "entropy 1 in a completion of one token, 2 in one of three: loss",
        -1.75,
        -1.5,
    ),
    Difference(
        "tokens_of_another_step",
        "Token mean with several optimizer steps per generation",
        "divides by the average number of tokens per step of the generation batch",
        "divides by the tokens of the step itself",
        "steps of 2 and of 6 tokens: loss of the first",
        -0.0131,
        -0.0263,
    ),
    Difference(
        "rloo_off_policy",
        "RLOO beyond the first optimizer step",
        "a clipped ratio of whole completions (the product over tokens)",
        "no ratio, as in the paper; take `epochs` and `minibatches` 1, or a row with a ratio",
        "token ratios 1.05, two tokens, A = 1: gradient",
        -0.551,
        -0.5,
    ),
    Difference(
        "stale_by_the_sampler",
        "The off-policy sequence mask with vLLM",
        "measures the drift from the engine's log-probabilities",
        "measures it from the trainer's; the engine's part is `correction`",
        "trainer 0.2 nats per token below the engine, threshold 0.1, ratio 1: loss",
        -0.25,
        0.0,
    ),
    Difference(
        "weight_from_below",
        "A truncated weight with a lower bound (`clip_min`)",
        "is raised to the bound",
        "is not: raising it would give weight to what the policy itself rarely draws",
        "old / sampled 0.5, bounds 0.8 and 2: gradient",
        -0.1,
        -0.0625,
    ),
    Difference(
        "unknown_sampled_logp",
        "A token without a sampled log-probability",
        "weight 1, and counted",
        "absent, and counted as such in the metrics",
        "one of four tokens: gradient of its neighbour",
        -0.125,
        -0.167,
    ),
    Difference(
        "ratio_in_the_kl_of_gspo",
        "k3 times the ratio, in a row with a ratio of completions",
        "the ratio of the completion",
        "the ratio of the token, for which the gradient is right",
        "log-ratios 0.2 and -0.2, coefficient 1: loss",
        0.347,
        0.313,
    ),
    Difference(
        "clipped_rewards",
        "`reward_clip_range`",
        "clamps rewards before the baseline",
        "has no such switch: clamp in the reward function",
        "rewards 5 and 0, range -1 to 1: first advantage",
        1.0,
        5.0,
    ),
    Difference(
        "far_ratio",
        "A log-ratio beyond 20 nats",
        "goes through exp",
        "is held at 20, has no gradient and is counted",
        "log-ratio 25, A < 0: logarithm of the loss",
        23.6,
        18.6,
    ),
    Difference(
        "parts_whitened",
        "Parts normalised first (GDPO)",
        "over the batch with ddof 1 and 1e-4 beside the deviation",
        "ddof 0 and 1e-8 in the root; `whiten: {ddof: 1}` leaves a relative 1e-4 / deviation",
        "rewards 1, 0, 0 in one part: first advantage",
        1.15,
        1.41,
    ),
)

ABSENT: tuple[tuple[str, str], ...] = (
    ("`loss_type: vespo`", "a gamma weight of the sequence ratio"),
    ("`top_entropy_quantile`", "policy gradient on the tokens of highest entropy alone"),
    ("`use_adaptive_entropy`", "an entropy coefficient that follows a target"),
)
"""In TRL and not here."""
