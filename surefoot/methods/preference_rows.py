"""The rows of preference methods and of supervised ones, each as one value.

Owns the values that the papers fix; where a paper leaves one open, its docstring says whose it is.
Refuses to own the online methods (`table.py`), functions and reading.
"""

from __future__ import annotations

from dataclasses import replace

from surefoot.methods.types import Preference, Supervised

DPO = Preference(name="dpo")
"""Log-ratios against the reference, summed over the answer (arXiv 2305.18290; TL;DR: beta 0.5)."""

CDPO = replace(DPO, name="cdpo", smoothing=0.1)
"""A tenth of the labels may be flipped, so the margin has an end (Mitchell 2023; share: ours)."""

ROBUST_DPO = replace(CDPO, name="robust_dpo", unbias=True)
"""The same flips divided out: unbiased, and unbounded below (arXiv 2403.00409)."""

IPO = replace(DPO, name="ipo", link="square")
"""A margin to reach, not to exceed: h = 1/(2 beta) (arXiv 2310.12036, summed as its Eq. 17).

The paper has toy problems only; beta is that of DPO.
"""

IPO_AVG = replace(IPO, name="ipo_avg", score="mean")
"""IPO per token, as the paper's authors trained it; h is then in nats per token."""

HINGE = replace(DPO, name="hinge", link="hinge", beta=0.05)
"""No gradient beyond the margin (arXiv 2305.10425 with a reference; beta: arXiv 2309.06657)."""

DPO_NORM = replace(DPO, name="dpo_norm", score="mean", beta=5.0)
"""DPO per token, against long answers (arXiv 2411.15124)."""

BCO_PAIR = replace(DPO, name="bco_pair", link="bco", beta=0.01)
"""Each answer of a pair against a fixed 0, without the running shift (arXiv 2404.04656)."""

APO_ZERO = replace(DPO, name="apo_zero", link="apo_zero")
"""Chosen answers up, rejected ones down, each by itself (arXiv 2408.06266)."""

NCA_PAIR = replace(DPO, name="nca_pair", link="nca", beta=0.01)
"""As above by noise contrast, which holds the chosen answers up (arXiv 2402.05369)."""

SIMPO = Preference(name="simpo", score="mean", reference=False, beta=2.0, margin=1.0)
"""No reference; per token, with a margin to win by (arXiv 2405.14734; Llama-3 base there)."""

ORPO = Preference(name="orpo", score="log_odds", reference=False, beta=1.0, nll=10.0)
"""Odds ratio beside the likelihood, in one stage from the base model (arXiv 2403.07691).

The paper weighs the odds ratio by 0.1 and the likelihood by 1; here the likelihood by 10. The loss
is ten times the paper's, which AdamW does not see but a clipped gradient norm does.
"""

KTO = Preference(name="kto", data="labels", link="kto")
"""Single answers, good or bad, against a zero point (arXiv 2402.01306).

Of n_D good and n_U bad labels, set desirable and undesirable so that
(desirable n_D) / (undesirable n_U) lies between 1 and 3/2.
"""

SFT = Supervised(name="sft")
"""The likelihood of the completions of demonstrations."""

REWARD_MODEL = Supervised(name="reward_model", data="pairs", loss="bradley_terry", center=0.01)
"""Pairs by Bradley and Terry (arXiv 2203.02155), held around 0 (arXiv 2312.09244)."""

PREFERENCE_ROWS: tuple[Preference, ...] = (
    DPO,
    CDPO,
    ROBUST_DPO,
    IPO,
    IPO_AVG,
    HINGE,
    DPO_NORM,
    BCO_PAIR,
    APO_ZERO,
    NCA_PAIR,
    SIMPO,
    ORPO,
    KTO,
)
SUPERVISED_ROWS: tuple[Supervised, ...] = (SFT, REWARD_MODEL)
