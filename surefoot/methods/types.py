"""The three row types, and which combinations of their values can work.

Owns `Method`, `Preference` and `Supervised`: frozen dataclasses of plain values.
Refuses to own functions: the mathematics behind a value lives in `objective/`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from surefoot.methods import signal as s
from surefoot.methods import update as u
from surefoot.methods.checks import above, at_least, need, one_of
from surefoot.methods.custom import Custom

Keep = s.KeepAll | s.Informative
Truncated = s.TruncatedScore | s.TruncatedMask | s.TruncatedFloor
Shaping = s.Overlong | s.LengthShaping
Baseline = (
    s.NoBaseline
    | s.BatchMean
    | s.GroupMean
    | s.LeaveOneOut
    | s.LengthWeighted
    | s.Greedy
    | s.History
    | Custom
)
Scale = s.NoScale | s.GroupStd | s.GroupMeanScale | s.BatchStd | Custom
Credit = u.Broadcast | u.RewardToGo | u.Process | u.Gae
Whiten = u.NoWhiten | u.TokenWhiten | u.SequenceWhiten
Gate = u.NoGate | u.Clip | u.Weight | u.Sigmoid | u.Divergence | Custom
Correction = u.NoCorrection | u.Truncate | u.Mask | u.GeometricMask
Reduce = u.TokenMean | u.SequenceMean | u.SequenceSum | u.Constant | u.PromptMean
Term = u.Entropy | u.PositiveNLL | u.StaleMask
CriticChoice = u.NoCritic | u.Critic
Warmup = u.NoWarmup | u.ValueWarmup | u.MethodWarmup

GROUP_BASELINES = frozenset({"group", "leave_one_out", "length_weighted"})


@dataclass(frozen=True)
class Method:
    """One online method, field by field in the order in which a step uses them (DESIGN 2)."""

    name: str
    group_size: int = 8
    min_group: int | None = None
    greedy_sample: bool = False
    keep: Keep = field(default_factory=s.KeepAll)
    truncated: Truncated = field(default_factory=s.TruncatedScore)
    shaping: tuple[Shaping, ...] = ()
    kl: s.KL = field(default_factory=s.KL)
    baseline: Baseline = field(default_factory=s.NoBaseline)
    scale: Scale = field(default_factory=s.NoScale)
    credit: Credit = field(default_factory=u.Broadcast)
    whiten: Whiten = field(default_factory=u.NoWhiten)
    ratio: u.Ratio = field(default_factory=u.Ratio)
    gate: Gate = field(default_factory=u.NoGate)
    correction: Correction = field(default_factory=u.NoCorrection)
    reduce: Reduce = field(default_factory=u.TokenMean)
    terms: tuple[Term, ...] = ()
    epochs: int = 1
    minibatches: int = 1
    critic: CriticChoice = field(default_factory=u.NoCritic)
    warmup: Warmup = field(default_factory=u.NoWarmup)

    def __post_init__(self) -> None:
        at_least("group_size", self.group_size, 1)
        at_least("epochs", self.epochs, 1)
        at_least("minibatches", self.minibatches, 1)
        for name, values in (("shaping", self.shaping), ("terms", self.terms)):
            kinds = [value.kind for value in values]
            need(len(set(kinds)) == len(kinds), name, f"the same kind twice: {', '.join(kinds)}")
        _check_group(self)
        _check_signal(self)
        _check_credit(self)
        _check_loss(self)


def is_group_relative(row: Row) -> bool:
    """Whether the baseline is the group itself, so that equal rewards mean no signal (law 3)."""
    return isinstance(row, Method) and row.baseline.kind in GROUP_BASELINES


def min_group(row: Method) -> int:
    """Fewest valid scores with which a group is kept (law 5).

    Default three quarters of group_size, rounded up; at least 2 where the baseline is the group.
    """
    if row.min_group is not None:
        return row.min_group
    floor = 2 if is_group_relative(row) else 1
    return max(floor, math.ceil(0.75 * row.group_size))


def _check_group(row: Method) -> None:
    relative = is_group_relative(row)
    need(
        row.group_size >= 2 or not relative,
        "group_size",
        f"1 leaves nothing to compare with, because baseline {row.baseline.kind} is the group "
        "itself; set group_size to 2 or more (8 is usual), or baseline to batch or none",
    )
    need(
        row.group_size >= 2 or row.keep.kind == "all",
        "keep",
        "informative looks at the spread inside a group; set group_size to 2 or more",
    )
    if row.min_group is not None:
        low = 2 if relative else 1
        need(
            low <= row.min_group <= row.group_size,
            "min_group",
            f"{row.min_group} must lie between {low} and group_size ({row.group_size})",
        )
    greedy = row.baseline.kind == "greedy"
    need(
        row.greedy_sample or not greedy,
        "greedy_sample",
        "baseline greedy needs the extra greedy completion; set greedy_sample to true",
    )
    need(
        greedy or not row.greedy_sample,
        "greedy_sample",
        "only baseline greedy reads the extra completion; set it to false",
    )


def _check_signal(row: Method) -> None:
    need(
        row.kl.place != "reward_token" or row.credit.kind in ("reward_to_go", "gae"),
        "kl.place",
        f"reward_token pays the KL at each token, which credit {row.credit.kind} does not "
        "read; set credit to reward_to_go or gae, or kl.place to reward_sequence",
    )
    need(
        row.kl.estimator != "k3_ratio" or row.ratio.level != "none",
        "kl.estimator",
        "k3_ratio needs the probability ratio; set ratio.level to token, or take k3",
    )
    lengths = any(shape.kind == "length" for shape in row.shaping)
    need(
        not lengths or (row.group_size >= 2 and row.baseline.kind != "greedy"),
        "shaping",
        "length compares the completions of a group with each other, and the greedy one is not "
        "among them; set group_size to 2 or more and another baseline, or leave length out",
    )
    if _parted(row):
        _check_per_part(row)
    if row.scale.kind == "group_mean":
        floor = row.truncated.value if isinstance(row.truncated, s.TruncatedFloor) else 0.0
        need(
            row.shaping == () and floor >= 0 and row.kl.place != "reward_sequence",
            "scale",
            "group_mean divides by the mean reward of a group, which shaping, a negative floor or "
            "a KL in the reward can bring to 0 and below; leave them out, or set scale to "
            "group_std",
        )
    if row.scale.kind in ("group_std", "group_mean"):
        need(
            is_group_relative(row),
            "scale",
            f"{row.scale.kind} divides by a statistic of the group, which is near 0 for equal "
            f"rewards that baseline {row.baseline.kind} leaves non-zero; set baseline to group",
        )


def _check_per_part(row: Method) -> None:
    """What changes the sum of the parts would be lost: each is centred and scaled alone."""
    whole = row.shaping == () and row.truncated.kind != "floor"
    need(
        whole and row.kl.place != "reward_sequence",
        "scale.per_part",
        "scales each part of the reward by itself, which leaves no place for shaping, a floor for "
        "truncated completions or a KL in the reward of the sequence; make them reward parts (such "
        "as use: length), or set kl.place to loss",
    )
    need(
        row.baseline.kind == "group",
        "scale.per_part",
        f"centres each part by its own group, so baseline {row.baseline.kind} is never read; set "
        "baseline to group",
    )


def _check_credit(row: Method) -> None:
    gae = isinstance(row.credit, u.Gae)
    need(
        not gae or row.critic.kind == "critic",
        "critic",
        "credit gae needs values; set critic to critic",
    )
    need(
        gae or row.critic.kind == "none",
        "critic",
        f"credit {row.credit.kind} reads no values; set credit to gae, or critic to none",
    )
    need(
        row.warmup.kind == "none" or row.critic.kind == "critic",
        "warmup",
        f"{row.warmup.kind} waits for a critic, and this row has none; set warmup to none",
    )
    if isinstance(row.credit, u.Gae):
        mixed = row.credit.group_weight is not None
        need(
            mixed or (row.baseline.kind == "none" and row.scale.kind == "none"),
            "baseline",
            "gae without group_weight reads neither baseline nor scale; set both to none, or give "
            "credit.group_weight a share",
        )
        need(
            not mixed or is_group_relative(row),
            "credit.group_weight",
            "mixes in the group's part, so the baseline must be the group; set baseline to "
            "group or leave_one_out",
        )
        need(
            not row.credit.bootstrap_truncated or row.truncated.kind == "score",
            "credit.bootstrap_truncated",
            f"lets a completion that was cut off go on, but truncated {row.truncated.kind} says "
            "that it is over; set truncated to score, or leave bootstrap_truncated out",
        )
    if row.credit.kind == "process":
        _check_process(row)


def _check_process(row: Method) -> None:
    """The paper's form alone: all steps of a group centred, and scaled, together."""
    need(
        row.baseline.kind == "group",
        "baseline",
        "credit process compares the steps of a group with each other, which baseline "
        f"{row.baseline.kind} does not; set baseline to group",
    )
    plain = row.scale.kind == "none" or (isinstance(row.scale, s.GroupStd) and not _parted(row))
    need(
        plain,
        "scale",
        "credit process scales by the spread of the group's steps or not at all; set scale to "
        "group_std (without per_part) or none",
    )
    need(
        row.kl.place != "reward_sequence",
        "kl.place",
        "reward_sequence charges a completion, and credit process pays steps; set kl.place to loss",
    )


def _parted(row: Method) -> bool:
    return isinstance(row.scale, s.GroupStd) and row.scale.per_part


def _check_loss(row: Method) -> None:
    level = row.ratio.level
    need(
        row.epochs * row.minibatches > 1 or all(term.kind != "stale_mask" for term in row.terms),
        "terms",
        "stale_mask measures how far the policy has moved since the rollout, which is not at all "
        "with one optimizer step per rollout; set epochs or minibatches above 1, or leave it out",
    )
    need(
        level != "none" or row.gate.kind == "none",
        "gate",
        f"{row.gate.kind} acts on the probability ratio, and ratio.level is none; set "
        "ratio.level to token, or gate to none",
    )
    need(
        level not in ("sequence", "geometric") or row.credit.kind == "broadcast",
        "ratio.level",
        f"{level} has one ratio per completion, but credit {row.credit.kind} gives each token "
        "its own advantage; set ratio.level to sequence_token, or credit to broadcast",
    )
    need(
        level != "geometric" or row.gate.kind == "clip",
        "gate",
        f"ratio.level geometric is one mean of clipped ratios, which gate {row.gate.kind} does not "
        "give; set gate to clip",
    )
    plain = not isinstance(row.gate, u.Clip) or (row.gate.dual is None and row.gate.cap is None)
    need(
        level != "geometric" or plain,
        "gate",
        "dual and cap bound single ratios, which ratio.level geometric does not have; leave them "
        "out",
    )
    need(
        row.gate.kind != "divergence" or level == "token",
        "ratio.level",
        f"gate divergence compares probabilities of single tokens, not level {level}; set "
        "ratio.level to token",
    )
    need(
        row.whiten.kind != "sequence" or row.credit.kind == "broadcast",
        "whiten",
        f"sequence counts a completion once, but credit {row.credit.kind} gives each token its own "
        "advantage; set whiten to token, or credit to broadcast",
    )
    need(
        row.ratio.to == "old" or row.correction.kind == "none",
        "correction",
        "ratio.to sampler already holds old over sampled; set correction to none",
    )


@dataclass(frozen=True)
class Preference:
    """One preference method: DPO and its family (DESIGN 2; arXiv 2305.18290 and others).

    `beta` multiplies the log-ratio; `smoothing` is the share of flipped labels (`unbias` divides
    it out again); `weight` likelihood weighs a pair by how typical of the policy its answers are;
    `nll` weighs the likelihood of the chosen answer; `desirable` and `undesirable` weigh labels.
    """

    name: str
    data: Literal["pairs", "labels"] = "pairs"
    score: Literal["sum", "mean", "log_odds"] = "sum"
    reference: bool = True
    link: Literal["sigmoid", "hinge", "square", "kto", "bco", "apo_zero", "nca"] = "sigmoid"
    beta: float = 0.1
    smoothing: float = 0.0
    unbias: bool = False
    margin: float = 0.0
    weight: Literal["none", "likelihood"] = "none"
    nll: float = 0.0
    desirable: float = 1.0
    undesirable: float = 1.0

    def __post_init__(self) -> None:
        one_of("data", self.data, ("pairs", "labels"))
        one_of("score", self.score, ("sum", "mean", "log_odds"))
        links = ("sigmoid", "hinge", "square", "kto", "bco", "apo_zero", "nca")
        one_of("link", self.link, links)
        one_of("weight", self.weight, ("none", "likelihood"))
        above("beta", self.beta, 0.0)
        need(0 <= self.smoothing < 0.5, "smoothing", f"{self.smoothing} must lie in [0, 0.5)")
        at_least("margin", self.margin, 0.0)
        at_least("nll", self.nll, 0.0)
        above("desirable", self.desirable, 0.0)
        above("undesirable", self.undesirable, 0.0)
        single = self.link in ("kto", "bco")
        need(
            self.data == "pairs" or single,
            "data",
            f"labels need a link for single answers (kto or bco), not {self.link}",
        )
        need(
            self.margin == 0 or self.link in ("sigmoid", "hinge", "square"),
            "margin",
            f"link {self.link} does not compare the two rewards, so nothing reads it; set margin "
            "to 0",
        )
        pairs = self.data == "pairs"
        need(
            not pairs or self.link != "kto",
            "link",
            "kto judges single answers; set data to labels",
        )
        need(
            pairs or (self.smoothing == 0 and self.nll == 0 and self.weight == "none"),
            "data",
            "labels read no smoothing, nll or weight; leave them out",
        )
        need(pairs or self.reference, "reference", "labels need it for their zero point; set true")
        need(
            not pairs or (self.desirable == 1 and self.undesirable == 1),
            "desirable",
            "desirable and undesirable weigh single labels; set data to labels, or leave them at 1",
        )
        need(
            not self.unbias or self.smoothing > 0,
            "unbias",
            "divides out the smoothing, which is 0; set smoothing above 0",
        )


@dataclass(frozen=True)
class Supervised:
    """One supervised method: SFT and reward models (DESIGN 2).

    `center` weighs the squared sum of a pair's rewards (arXiv 2312.09244); `normalize` fixes the
    reward model to mean 0 and variance 1 on reference answers (arXiv 1909.08593).
    """

    name: str
    data: Literal["demonstrations", "pairs", "rankings"] = "demonstrations"
    loss: Literal["nll", "bradley_terry"] = "nll"
    train_on: Literal["completion", "assistant", "all"] = "completion"
    packing: bool = False
    center: float = 0.0
    normalize: bool = False

    def __post_init__(self) -> None:
        one_of("data", self.data, ("demonstrations", "pairs", "rankings"))
        one_of("loss", self.loss, ("nll", "bradley_terry"))
        one_of("train_on", self.train_on, ("completion", "assistant", "all"))
        at_least("center", self.center, 0.0)
        demonstrations = self.data == "demonstrations"
        need(
            demonstrations == (self.loss == "nll"),
            "loss",
            f"{self.loss} cannot be computed from {self.data}; nll takes demonstrations, "
            "bradley_terry takes pairs or rankings",
        )
        need(
            not demonstrations or (self.center == 0 and not self.normalize),
            "center",
            "center and normalize belong to reward models; set loss to bradley_terry",
        )
        need(
            demonstrations or (self.train_on == "completion" and not self.packing),
            "train_on",
            "train_on and packing are read of demonstrations alone; leave them out",
        )


Row = Method | Preference | Supervised
