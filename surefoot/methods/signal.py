"""Values that say what the signal is: which samples count, and one number per completion.

Owns the variants of `keep`, `truncated`, `shaping`, `kl`, `baseline` and `scale`.
Refuses to own what they compute (`objective/`) and how rows combine them (`types.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from surefoot.methods.checks import above, at_least, need, one_of, within

Unit = Literal["token", "sequence"]
Estimator = Literal["k1", "k2", "k3", "k3_ratio"]
Place = Literal["none", "reward_token", "reward_sequence", "loss"]


@dataclass(frozen=True)
class KeepAll:
    """Train on every group that was sampled."""

    kind: ClassVar[str] = "all"


@dataclass(frozen=True)
class Informative:
    """Sample again for groups whose raw scores are all equal (DAPO, arXiv 2503.14476).

    At most `max_rounds` rounds of sampling per step; then the live groups found are trained on.
    """

    kind: ClassVar[str] = "informative"
    by: Literal["score"] = "score"
    max_rounds: int = 10

    def __post_init__(self) -> None:
        one_of("keep.by", self.by, ("score",))
        at_least("keep.max_rounds", self.max_rounds, 1)


@dataclass(frozen=True)
class TruncatedScore:
    """A length-stopped completion keeps the score that the reward gave it."""

    kind: ClassVar[str] = "score"


@dataclass(frozen=True)
class TruncatedMask:
    """A length-stopped completion is absent: in no baseline, numerator or denominator."""

    kind: ClassVar[str] = "mask"


@dataclass(frozen=True)
class TruncatedFloor:
    """A length-stopped completion scores `value`, whatever the reward said."""

    kind: ClassVar[str] = "floor"
    value: float = -1.0


@dataclass(frozen=True)
class Overlong:
    """Soft overlong penalty (DAPO eq. 13): 0 until `cache` tokens before the cap, -1 at the cap.

    `cache` in tokens; None is a fifth of rollout.max_new_tokens, the paper's 4096 of 20480.
    `weight` multiplies the penalty before it is added to the score.
    """

    kind: ClassVar[str] = "overlong"
    cache: int | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.cache is not None:
            at_least("shaping.cache", self.cache, 1)
        above("shaping.weight", self.weight, 0.0)


@dataclass(frozen=True)
class LengthShaping:
    """Within a group, shorter right completions gain up to `weight`/2, longer ones lose as much.

    Wrong ones (score below 1) only lose (Kimi k1.5, arXiv 2501.12599 section 2.3.3).
    """

    kind: ClassVar[str] = "length"
    weight: float = 1.0

    def __post_init__(self) -> None:
        above("shaping.weight", self.weight, 0.0)


@dataclass(frozen=True)
class FixedKL:
    """The coefficient stays what it is."""

    kind: ClassVar[str] = "fixed"


@dataclass(frozen=True)
class ProportionalKL:
    """Coefficient times 1 + clip(KL/target - 1, -0.2, 0.2) n/horizon (arXiv 1909.08593).

    `target` in nats per `unit`; `horizon` in completions.
    """

    kind: ClassVar[str] = "proportional"
    target: float = 6.0
    horizon: int = 10_000
    unit: Unit = "sequence"

    def __post_init__(self) -> None:
        above("kl.controller.target", self.target, 0.0)
        at_least("kl.controller.horizon", self.horizon, 1)
        one_of("kl.controller.unit", self.unit, ("token", "sequence"))


@dataclass(frozen=True)
class DoublingKL:
    """Coefficient halved below target/1.5 and doubled above 1.5 target (arXiv 1707.06347)."""

    kind: ClassVar[str] = "doubling"
    target: float = 0.01
    unit: Unit = "token"

    def __post_init__(self) -> None:
        above("kl.controller.target", self.target, 0.0)
        one_of("kl.controller.unit", self.unit, ("token", "sequence"))


@dataclass(frozen=True)
class KL:
    """Where the divergence from the reference enters, by which estimator, and how strongly.

    One `place` only, so two places at once cannot be written. With `place` none or `coef` 0
    the reference serves a metric alone: one micro-batch every `measure_every` steps (0 = never).
    """

    place: Place = "none"
    estimator: Estimator = "k1"
    coef: float = 0.0
    controller: FixedKL | ProportionalKL | DoublingKL = field(default_factory=FixedKL)
    measure_every: int = 0

    @property
    def kind(self) -> str:
        return self.place

    def __post_init__(self) -> None:
        one_of("kl.place", self.place, ("none", "reward_token", "reward_sequence", "loss"))
        one_of("kl.estimator", self.estimator, ("k1", "k2", "k3", "k3_ratio"))
        at_least("kl.coef", self.coef, 0.0)
        at_least("kl.measure_every", self.measure_every, 0)
        if self.place == "none":
            need(
                self.coef == 0,
                "kl.coef",
                f"{self.coef} has no effect because kl.place is none; set kl.place to "
                "reward_token, reward_sequence or loss, or leave the coefficient 0",
            )
        need(
            self.controller.kind == "fixed" or self.coef > 0,
            "kl.controller",
            f"{self.controller.kind} multiplies kl.coef, which is 0; start above 0",
        )
        need(
            self.estimator != "k3_ratio" or self.place == "loss",
            "kl.estimator",
            "k3_ratio is a loss term; set kl.place to loss, or take k1",
        )


@dataclass(frozen=True)
class NoBaseline:
    """Nothing is subtracted."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True)
class BatchMean:
    """The mean over all valid completions of the step."""

    kind: ClassVar[str] = "batch"


@dataclass(frozen=True)
class GroupMean:
    """The mean over the completions of the same prompt."""

    kind: ClassVar[str] = "group"


@dataclass(frozen=True)
class LeaveOneOut:
    """The mean (or median) over the other completions of the same prompt (arXiv 2402.14740)."""

    kind: ClassVar[str] = "leave_one_out"
    center: Literal["mean", "median"] = "mean"

    def __post_init__(self) -> None:
        one_of("baseline.center", self.center, ("mean", "median"))


@dataclass(frozen=True)
class LengthWeighted:
    """The length-weighted group mean (OPO, arXiv 2505.23585)."""

    kind: ClassVar[str] = "length_weighted"


@dataclass(frozen=True)
class Greedy:
    """The score of one greedy completion of the same prompt (ReMax, arXiv 2310.10505)."""

    kind: ClassVar[str] = "greedy"


@dataclass(frozen=True)
class History:
    """An average of earlier steps' rewards (Williams 1992; per task: arXiv 2506.24119).

    `window` in steps is read by mode window, `decay` and `debias` by mode ema. Under scope prompt
    no shift is looked for.
    """

    kind: ClassVar[str] = "history"
    mode: Literal["ema", "window", "cumulative"] = "ema"
    window: int = 32
    decay: float = 0.9
    init: float = 0.0
    debias: bool = True
    scope: Literal["global", "task", "prompt"] = "global"
    on_shift: Literal["report", "reset"] = "report"

    def __post_init__(self) -> None:
        one_of("baseline.mode", self.mode, ("ema", "window", "cumulative"))
        at_least("baseline.window", self.window, 1)
        need(0 <= self.decay < 1, "baseline.decay", f"{self.decay} must lie in [0, 1)")
        one_of("baseline.scope", self.scope, ("global", "task", "prompt"))
        one_of("baseline.on_shift", self.on_shift, ("report", "reset"))
        need(
            self.scope != "prompt" or self.on_shift == "report",
            "baseline.on_shift",
            "reset cannot work under scope prompt, where one value a visit cannot tell a shift "
            "from learning; set baseline.scope to task or global",
        )


@dataclass(frozen=True)
class NoScale:
    """Advantages stay in the reward's unit."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True)
class GroupStd:
    """Divide by (standard deviation of the group + eps), per reward part if `per_part` (GDPO)."""

    kind: ClassVar[str] = "group_std"
    ddof: int = 1
    eps: float = 1e-4
    per_part: bool = False

    def __post_init__(self) -> None:
        within("scale.ddof", self.ddof, 0, 1)
        at_least("scale.eps", self.eps, 0.0)


@dataclass(frozen=True)
class GroupMeanScale:
    """Divide by (mean reward of the group + eps); rewards must not be negative (MaxRL)."""

    kind: ClassVar[str] = "group_mean"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        at_least("scale.eps", self.eps, 0.0)


@dataclass(frozen=True)
class BatchStd:
    """Divide by the standard deviation over the step, of raw rewards or of centered ones."""

    kind: ClassVar[str] = "batch_std"
    of: Literal["rewards", "centered"] = "rewards"
    ddof: int = 1
    eps: float = 1e-4

    def __post_init__(self) -> None:
        one_of("scale.of", self.of, ("rewards", "centered"))
        within("scale.ddof", self.ddof, 0, 1)
        at_least("scale.eps", self.eps, 0.0)
