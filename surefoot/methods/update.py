"""Values that say how the signal becomes a gradient: credit per token, and the loss.

Owns the variants of `credit`, `whiten`, `ratio`, `gate`, `correction`, `reduce`, `terms`,
`critic` and `warmup`.
Refuses to own what they compute (`objective/`) and how rows combine them (`types.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from surefoot.methods.checks import above, at_least, need, one_of, within

Level = Literal["none", "token", "sequence", "sequence_token", "geometric"]


@dataclass(frozen=True)
class Broadcast:
    """Every token of a completion gets the completion's number."""

    kind: ClassVar[str] = "broadcast"


@dataclass(frozen=True)
class RewardToGo:
    """Token t gets the discounted sum of the token rewards from t on."""

    kind: ClassVar[str] = "reward_to_go"
    gamma: float = 1.0

    def __post_init__(self) -> None:
        within("credit.gamma", self.gamma, 0.0, 1.0)


@dataclass(frozen=True)
class Process:
    """Token t gets the sum of the step rewards from t on, normalised over the group."""

    kind: ClassVar[str] = "process"


@dataclass(frozen=True)
class Gae:
    """Generalised advantage estimation (arXiv 1506.02438) over the trained tokens.

    `critic_lam` is the critic's own lambda (None = `lam`; VC-PPO, arXiv 2503.01491).
    `length_alpha` makes lambda 1 - 1/(alpha l), kept within [0, 1] (VAPO, arXiv 2504.05118).
    `bootstrap_truncated`: a completion that the cap cut off ends with the critic's value, not 0.
    `group_weight` w mixes w times the group part with 1 - w times this one (None: no group part).
    """

    kind: ClassVar[str] = "gae"
    gamma: float = 1.0
    lam: float = 0.95
    critic_lam: float | None = None
    length_alpha: float | None = None
    bootstrap_truncated: bool = False
    group_weight: float | None = None

    def __post_init__(self) -> None:
        within("credit.gamma", self.gamma, 0.0, 1.0)
        within("credit.lam", self.lam, 0.0, 1.0)
        if self.group_weight is not None:
            within("credit.group_weight", self.group_weight, 0.0, 1.0)
        if self.critic_lam is not None:
            within("credit.critic_lam", self.critic_lam, 0.0, 1.0)
        if self.length_alpha is not None:
            above("credit.length_alpha", self.length_alpha, 0.0)


@dataclass(frozen=True)
class NoWhiten:
    """Advantages are used as they are."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True)
class TokenWhiten:
    """Whiten with statistics over tokens, so that long completions weigh more."""

    kind: ClassVar[str] = "token"
    center: bool = True
    ddof: int = 0
    eps: float = 1e-8

    def __post_init__(self) -> None:
        within("whiten.ddof", self.ddof, 0, 1)
        at_least("whiten.eps", self.eps, 0.0)


@dataclass(frozen=True)
class SequenceWhiten:
    """Whiten with statistics over completions, each counted once."""

    kind: ClassVar[str] = "sequence"
    center: bool = True
    ddof: int = 0
    eps: float = 1e-8

    def __post_init__(self) -> None:
        within("whiten.ddof", self.ddof, 0, 1)
        at_least("whiten.eps", self.eps, 0.0)


@dataclass(frozen=True)
class Ratio:
    """Which probability ratio the loss uses, and against which log-probabilities."""

    level: Level = "none"
    to: Literal["old", "sampler"] = "old"

    @property
    def kind(self) -> str:
        return self.level

    def __post_init__(self) -> None:
        levels = ("none", "token", "sequence", "sequence_token", "geometric")
        one_of("ratio.level", self.level, levels)
        one_of("ratio.to", self.to, ("old", "sampler"))
        need(
            self.level != "none" or self.to == "old",
            "ratio.to",
            "nothing reads it because ratio.level is none; set a level",
        )


@dataclass(frozen=True)
class NoGate:
    """The plain term: -A log pi without a ratio, -r A with one."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True)
class Clip:
    """min(r A, clip(r, 1 - low, 1 + high) A) (arXiv 1707.06347, 2503.14476).

    `dual` c bounds the loss of negative advantages at c |A| (arXiv 1912.09729);
    `cap` replaces r by min(r, cap) first (two-sided clipping). Both are absolute ratios.
    """

    kind: ClassVar[str] = "clip"
    low: float = 0.2
    high: float = 0.2
    dual: float | None = None
    cap: float | None = None

    def __post_init__(self) -> None:
        need(0 < self.low <= 1, "gate.low", f"{self.low} must lie in (0, 1]")
        above("gate.high", self.high, 0.0)
        if self.dual is not None:
            above("gate.dual", self.dual, 1.0)
        if self.cap is not None:
            above("gate.cap", self.cap, 1.0 + self.high)


@dataclass(frozen=True)
class Weight:
    """sg(clip(r, low, high)) A log pi (CISPO, arXiv 2506.13585); bounds are absolute ratios."""

    kind: ClassVar[str] = "weight"
    low: float = 0.0
    high: float = 5.0

    def __post_init__(self) -> None:
        within("gate.low", self.low, 0.0, 1.0)
        above("gate.high", self.high, 1.0)


@dataclass(frozen=True)
class Sigmoid:
    """sigmoid(tau (r - 1)) 4 A / tau (SAPO, arXiv 2511.20347); tau by the sign of A."""

    kind: ClassVar[str] = "sigmoid"
    positive: float = 1.0
    negative: float = 1.05

    def __post_init__(self) -> None:
        above("gate.positive", self.positive, 0.0)
        above("gate.negative", self.negative, 0.0)


@dataclass(frozen=True)
class Divergence:
    """Mask tokens that moved further than `delta` in A's direction (DPPO, arXiv 2602.04879)."""

    kind: ClassVar[str] = "divergence"
    measure: Literal["tv", "kl"] = "tv"
    delta: float = 0.15
    cap: float = 20.0

    def __post_init__(self) -> None:
        one_of("gate.measure", self.measure, ("tv", "kl"))
        above("gate.delta", self.delta, 0.0)
        above("gate.cap", self.cap, 1.0)


@dataclass(frozen=True)
class NoCorrection:
    """The mismatch between trainer and engine is logged, not corrected."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True)
class Truncate:
    """Weight by min(old/sampled, high)."""

    kind: ClassVar[str] = "truncate"
    level: Literal["token", "sequence"] = "token"
    high: float = 2.0

    def __post_init__(self) -> None:
        one_of("correction.level", self.level, ("token", "sequence"))
        at_least("correction.high", self.high, 1.0)


@dataclass(frozen=True)
class Mask:
    """Weight by old/sampled inside [low, high], by 0 outside (IcePop, arXiv 2510.18855)."""

    kind: ClassVar[str] = "mask"
    level: Literal["token", "sequence"] = "token"
    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        one_of("correction.level", self.level, ("token", "sequence"))
        within("correction.low", self.low, 0.0, 1.0)
        at_least("correction.high", self.high, 1.0)


@dataclass(frozen=True)
class GeometricMask:
    """Drop completions whose geometric mean of old/sampled lies outside [low, high]."""

    kind: ClassVar[str] = "geometric_mask"
    low: float = 0.99
    high: float = 1.01

    def __post_init__(self) -> None:
        within("correction.low", self.low, 0.0, 1.0)
        at_least("correction.high", self.high, 1.0)


@dataclass(frozen=True)
class TokenMean:
    """Sum over all tokens of the optimizer step / their number."""

    kind: ClassVar[str] = "token_mean"


@dataclass(frozen=True)
class SequenceMean:
    """Mean over completions of the mean over their tokens."""

    kind: ClassVar[str] = "sequence_mean"


@dataclass(frozen=True)
class SequenceSum:
    """Mean over completions of the sum over their tokens."""

    kind: ClassVar[str] = "sequence_sum"


@dataclass(frozen=True)
class Constant:
    """Mean over completions of (sum over tokens / `length`); None = rollout.max_new_tokens."""

    kind: ClassVar[str] = "constant"
    length: int | None = None

    def __post_init__(self) -> None:
        if self.length is not None:
            at_least("reduce.length", self.length, 1)


@dataclass(frozen=True)
class PromptMean:
    """Mean over prompts of the token mean inside each group."""

    kind: ClassVar[str] = "prompt_mean"


@dataclass(frozen=True)
class Entropy:
    """Subtract `weight` times the entropy from the loss."""

    kind: ClassVar[str] = "entropy"
    weight: float = 0.01

    def __post_init__(self) -> None:
        above("terms.weight", self.weight, 0.0)


@dataclass(frozen=True)
class PositiveNLL:
    """Add `weight` times the negative log-likelihood of correct completions (VAPO)."""

    kind: ClassVar[str] = "positive_nll"
    weight: float = 0.1

    def __post_init__(self) -> None:
        above("terms.weight", self.weight, 0.0)


@dataclass(frozen=True)
class StaleMask:
    """Gate completions with A < 0 and mean(old - logp) above `delta` nats (arXiv 2512.02556)."""

    kind: ClassVar[str] = "stale_mask"
    delta: float = 0.5

    def __post_init__(self) -> None:
        above("terms.delta", self.delta, 0.0)


@dataclass(frozen=True)
class NoCritic:
    """No value model."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True)
class Critic:
    """A value model; `clip` bounds its move from the old values (None = unclipped)."""

    kind: ClassVar[str] = "critic"
    loss_weight: float = 0.1
    clip: float | None = 0.2

    def __post_init__(self) -> None:
        above("critic.loss_weight", self.loss_weight, 0.0)
        if self.clip is not None:
            above("critic.clip", self.clip, 0.0)


@dataclass(frozen=True)
class NoWarmup:
    """Train from the first step."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True)
class ValueWarmup:
    """Train the critic alone until its explained variance moves less than `tolerance`."""

    kind: ClassVar[str] = "value"
    window: int = 10
    tolerance: float = 0.01
    max_steps: int = 50

    def __post_init__(self) -> None:
        at_least("warmup.window", self.window, 2)
        above("warmup.tolerance", self.tolerance, 0.0)
        at_least("warmup.max_steps", self.max_steps, 1)


@dataclass(frozen=True)
class MethodWarmup:
    """Train `max_steps` steps with a row without a critic; its policy then initialises both.

    Group size, epochs, minibatches and what the reward is made of stay those of the row itself;
    a row without any KL has none here either.
    """

    kind: ClassVar[str] = "method"
    method: str = "grpo"
    max_steps: int = 10

    def __post_init__(self) -> None:
        at_least("warmup.max_steps", self.max_steps, 1)
