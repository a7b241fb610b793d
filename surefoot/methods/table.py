"""The rows: each method of this build, as one value.

Owns the values that the papers fix. `group_size`, `epochs` and `minibatches` are budgets, which
papers set to their clusters; every row takes the type's default so that a comparison is fair.
Refuses to own functions and reading.
"""

from __future__ import annotations

import math
from dataclasses import replace

from surefoot.methods.signal import (
    KL,
    BatchStd,
    Greedy,
    GroupMean,
    GroupMeanScale,
    GroupStd,
    History,
    Informative,
    LeaveOneOut,
    LengthWeighted,
    NoScale,
    Overlong,
)
from surefoot.methods.types import Method, Row
from surefoot.methods.update import (
    Clip,
    Constant,
    Critic,
    Divergence,
    Gae,
    MethodWarmup,
    PositiveNLL,
    Ratio,
    RewardToGo,
    SequenceMean,
    SequenceSum,
    SequenceWhiten,
    Sigmoid,
    TokenMean,
    TokenWhiten,
    ValueWarmup,
    Weight,
)

REINFORCE = Method(
    name="reinforce",
    kl=KL("reward_sequence", estimator="k1", coef=0.03, measure_every=10),
    reduce=SequenceSum(),
)
"""The whole completion as one action, no baseline (Williams 1992; KL as in arXiv 2402.14740)."""

REINFORCE_MA = replace(REINFORCE, name="reinforce_ma", baseline=History())
"""Against an average of earlier steps (Williams 1992; cumulative: arXiv 2402.14740 Eq. 8)."""

REMAX = replace(REINFORCE, name="remax", greedy_sample=True, baseline=Greedy())
"""Against the greedy completion of the same prompt (arXiv 2310.10505)."""

RLOO = Method(
    name="rloo",
    kl=KL("reward_sequence", estimator="k1", coef=0.03, measure_every=10),
    baseline=LeaveOneOut(),
    reduce=SequenceSum(),
)
"""Leave-one-out baseline without ratio or clip (arXiv 2402.14740; the paper: 2 or 4 samples)."""

GRPO = Method(
    name="grpo",
    kl=KL("loss", estimator="k3", coef=0.04, measure_every=10),
    baseline=GroupMean(),
    scale=GroupStd(),
    ratio=Ratio("token"),
    gate=Clip(),
    reduce=SequenceMean(),
)
"""Group z-score, clipped ratio, k3 in the loss (arXiv 2402.03300; the paper: 64 samples).

The paper leaves ddof, eps and the clip open; here ddof 1, eps 1e-4 and 0.2.
"""

GDPO = replace(GRPO, name="gdpo", kl=KL(), scale=GroupStd(per_part=True), whiten=SequenceWhiten())
"""Each part of the reward normalised by its group, then the sum by the step (arXiv 2601.05242)."""

DAPO = Method(
    name="dapo",
    keep=Informative(),
    shaping=(Overlong(),),
    baseline=GroupMean(),
    scale=GroupStd(),
    ratio=Ratio("token"),
    gate=Clip(low=0.2, high=0.28),
    reduce=TokenMean(),
)
"""GRPO with clip-higher, dynamic sampling, overlong shaping, token mean (arXiv 2503.14476)."""

RLOO_MEDIAN = replace(RLOO, name="rloo_median", baseline=LeaveOneOut("median"))
"""RLOO against the median of the others, which a lone outlier does not move."""

OPO = Method(name="opo", baseline=LengthWeighted(), reduce=SequenceSum())
"""The baseline of least variance under equal gradient norms per token (arXiv 2505.23585)."""

REINFORCE_PP = Method(
    name="reinforce_pp",
    kl=KL("reward_token", estimator="k1", coef=0.01),
    credit=RewardToGo(),
    whiten=TokenWhiten(),
    ratio=Ratio("token"),
    gate=Clip(),
    reduce=SequenceMean(),
)
"""KL per token in the return, whitened over the step (arXiv 2501.03262v9 Eq. 4-5).

No history: mean and deviation are of the current step. The paper leaves beta open.
"""

REINFORCE_PP_BASELINE = Method(
    name="reinforce_pp_baseline",
    kl=KL("loss", estimator="k2", coef=0.01),
    baseline=GroupMean(),
    whiten=SequenceWhiten(),
    ratio=Ratio("token"),
    gate=Clip(),
    reduce=SequenceMean(),
)
"""Group mean, then whitened over the step; k2 in the loss (arXiv 2501.03262v9 Eq. 6-8).

Each completion counts once: counted by tokens, the step's mean would leak into dead groups.
"""

PPO = Method(
    name="ppo",
    kl=KL("reward_token", estimator="k1", coef=0.05),
    credit=Gae(),
    whiten=TokenWhiten(),
    ratio=Ratio("token"),
    gate=Clip(),
    reduce=TokenMean(),
    critic=Critic(),
)
"""A critic's values, generalised advantages, clipped ratio (arXiv 1707.06347, 1909.08593)."""

VAPO = replace(
    PPO,
    name="vapo",
    kl=KL(),
    credit=Gae(critic_lam=1.0, length_alpha=0.05),
    gate=Clip(low=0.2, high=0.28),
    terms=(PositiveNLL(),),
    warmup=ValueWarmup(),
)
"""PPO with seven repairs for long answers and a verifier's reward (arXiv 2504.05118)."""

PPO_WARM = replace(PPO, name="ppo_warm", warmup=MethodWarmup())
"""PPO from the policy that a few steps of GRPO leave, which the critic starts from as well."""

GRPO_CRITIC = replace(
    PPO,
    name="grpo_critic",
    kl=GRPO.kl,
    baseline=GroupMean(),
    scale=GroupStd(),
    credit=Gae(group_weight=0.5),
)
"""Half the advantage of GRPO, half that of PPO; at weight 1 the one, at 0 the other."""

_GROUP = Method(name="group", baseline=GroupMean(), ratio=Ratio("token"), gate=Clip())

DR_GRPO = replace(_GROUP, name="dr_grpo", reduce=Constant())
"""GRPO without the std and without a divisor by length (arXiv 2503.20783)."""

LITE_PPO = replace(_GROUP, name="lite_ppo", scale=BatchStd())
"""Group mean, the step's std, token mean (arXiv 2508.08221)."""

MAXRL = replace(_GROUP, name="maxrl", scale=GroupMeanScale())
"""Divided by the group's mean reward: rare successes weigh most (arXiv 2602.02710)."""

_SCORED = replace(_GROUP, scale=GroupStd())

GSPO = replace(
    _SCORED,
    name="gspo",
    ratio=Ratio("sequence"),
    gate=Clip(low=3e-4, high=4e-4),
    reduce=SequenceMean(),
)
"""One ratio per completion, the geometric mean of its tokens' (arXiv 2507.18071)."""

GSPO_TOKEN = replace(GSPO, name="gspo_token", ratio=Ratio("sequence_token"))
"""The same ratio, with an advantage for each token (arXiv 2507.18071 Eq. 14)."""

CISPO = replace(_SCORED, name="cispo", gate=Weight())
"""A bounded, constant weight instead of a clip (arXiv 2506.13585; bound 5: arXiv 2510.13786)."""

SAPO = replace(_SCORED, name="sapo", gate=Sigmoid(), reduce=SequenceMean())
"""A gate that fades instead of cutting (arXiv 2511.20347)."""

GMPO = replace(
    _SCORED,
    name="gmpo",
    ratio=Ratio("geometric"),
    gate=Clip(low=1 - math.exp(-0.4), high=math.exp(0.4) - 1),
    reduce=SequenceMean(),
)
"""The geometric mean of clipped ratios; the paper's +-0.4 is in log r (arXiv 2507.20673)."""

DPPO = replace(
    _SCORED, name="dppo", scale=NoScale(), ratio=Ratio("token", to="sampler"), gate=Divergence()
)
"""Probabilities, not ratios, decide how far is too far (arXiv 2602.04879)."""

ROWS: tuple[Row, ...] = (
    REINFORCE,
    REINFORCE_MA,
    REINFORCE_PP,
    REINFORCE_PP_BASELINE,
    RLOO,
    RLOO_MEDIAN,
    OPO,
    REMAX,
    GRPO,
    GDPO,
    DR_GRPO,
    LITE_PPO,
    MAXRL,
    DAPO,
    GSPO,
    GSPO_TOKEN,
    CISPO,
    SAPO,
    GMPO,
    DPPO,
    PPO,
    PPO_WARM,
    GRPO_CRITIC,
    VAPO,
)
