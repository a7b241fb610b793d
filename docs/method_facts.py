"""What the rows are made of: every value that is not its type's default, and where it comes from.

Owns plain data. `tests/unit/test_row_sources.py` compares it with the registry;
`docs/generate.py` prints it.
Refuses to own the values themselves: those are `surefoot/methods/table.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Fact(NamedTuple):
    """One value, and the equation that says it; `ours: why` where the paper leaves it open."""

    value: bool | int | float | str
    source: str


class RowFacts(NamedTuple):
    paper: str
    formula: str
    when: str
    failure: str
    """The failure known from practice, and what shows it."""
    fields: Mapping[str, Fact]
    claims: tuple[str, ...] = ()
    """Of docs/claim_facts.py."""
    notes: tuple[str, ...] = ()


def _merged(*parts: Mapping[str, Fact]) -> dict[str, Fact]:
    return {key: fact for part in parts for key, fact in part.items()}


def _kl(place: str, coef: float, source: str, why_coef: str, **more: Fact) -> dict[str, Fact]:
    return {"kl": Fact(place, source), "kl.coef": Fact(coef, why_coef), **more}


_MEASURED = Fact(
    10, "ours: with coefficient 0 the KL is still seen, on one micro-batch in 10 steps"
)
_SEQUENCE_KL = _merged(
    _kl(
        "reward_sequence",
        0.03,
        "arXiv 2402.14740: R = r - beta log(pi / pi_ref) of the whole sequence",
        "arXiv 2402.14740, as TRL's index of papers gives its experiments",
    ),
    {"kl.measure_every": _MEASURED},
)
_ACTION = {"reduce": Fact("sequence_sum", "arXiv 2402.14740: the completion is one action")}


def _reduce(kind: str, source: str) -> dict[str, Fact]:
    return {"reduce": Fact(kind, source)}


def _group(source: str) -> dict[str, Fact]:
    return {"baseline": Fact("group", source)}


_DDOF = Fact(1, "ours where the paper is silent: the sample deviation, as most code has it")
_EPS = Fact(
    1e-4, "ours where the paper is silent: against near-ties; a dead group is found by its range"
)


def _std(source: str) -> dict[str, Fact]:
    return {"scale": Fact("group_std", source), "scale.ddof": _DDOF, "scale.eps": _EPS}


def _ratio(source: str, level: str = "token") -> dict[str, Fact]:
    return {"ratio": Fact(level, source)}


def _clip(low: Fact, high: Fact, source: str) -> dict[str, Fact]:
    return {"gate": Fact("clip", source), "gate.low": low, "gate.high": high}


_PPO_RANGE = Fact(0.2, "arXiv 1707.06347 Table 1: 0.2 scores best; this paper is silent")
_PLAIN_CLIP = _clip(_PPO_RANGE, _PPO_RANGE, "arXiv 1707.06347 Eq. 7")


def _whiten(kind: str, source: str) -> dict[str, Fact]:
    return {
        "whiten": Fact(kind, source),
        "whiten.center": Fact(True, "arXiv 2501.03262v9 Eq. 5: the mean is subtracted"),
        "whiten.ddof": Fact(0, "ours where the paper is silent: the moments of the step itself"),
        "whiten.eps": Fact(1e-8, "ours where the paper is silent: in the root, as in PPO's code"),
    }


_GRPO_MEAN = "arXiv 2402.03300 Eq. 3: 1/G sum 1/|o|"

_PPO_CREDIT = {
    "credit": Fact("gae", "arXiv 1506.02438 Eq. 16"),
    "credit.gamma": Fact(1.0, "arXiv 1909.08593: no discount"),
    "credit.lam": Fact(0.95, "arXiv 1909.08593, code"),
}
_PPO_LOSS = _merged(
    _whiten("token", "arXiv 1909.08593, code: over the tokens of the step"),
    _ratio("arXiv 1707.06347 Eq. 6"),
    _PLAIN_CLIP,
    {
        "critic": Fact("critic", "arXiv 1707.06347 Eq. 9"),
        "critic.loss_weight": Fact(0.1, "arXiv 1909.08593, code: vf_coef"),
        "critic.clip": Fact(0.2, "arXiv 1909.08593, code: cliprange_value"),
    },
)
_PPO_KL = _kl(
    "reward_token",
    0.05,
    "arXiv 1909.08593 Eq. 2: the divergence is charged at each token",
    "ours: fixed; the paper adapts it towards a target",
)
_GRPO_KL = _kl(
    "loss",
    0.04,
    "arXiv 2402.03300 Eq. 3",
    "arXiv 2402.03300: the value of its experiments",
    **{
        "kl.estimator": Fact("k3", "arXiv 2402.03300 Eq. 4"),
        "kl.measure_every": _MEASURED,
    },
)

FACTS: Mapping[str, RowFacts] = {
    "ppo": RowFacts(
        paper="arXiv 1707.06347 (clip), 1506.02438 (GAE), 1909.08593 (language models)",
        formula="L = mean over tokens of -min(r A, clip(r, 1 - low, 1 + high) A),  A_t the "
        "whitened sum over l of (gamma lam)^l (r + gamma V_next - V) at t + l;  the critic "
        "minimises 1/2 max((V - R)^2, (clip(V, V_old -+ clip) - R)^2)",
        when="Rewards inside the completion, or long completions whose tokens deserve different "
        "credit, and memory for a second model.",
        failure="A critic that foresees nothing: `critic/explained_variance` at or below 0, or "
        "`critic/value_add` at 1 and above. The advantages are then noise with a model's price.",
        fields=_merged(_PPO_KL, _PPO_CREDIT, _PPO_LOSS),
        claims=("C1", "C3", "C4", "C19", "C20"),
        notes=(
            "The critic starts as the policy's own layers (`critic.layers` keeps the lower ones) "
            "with a head of zeros, so the first advantages are the whitened returns.",
        ),
    ),
    "ppo_warm": RowFacts(
        paper="PPO as above; the warm-up is practitioners' advice (claim C21), measured here",
        formula="`grpo` for max_steps steps, with the row's own budgets; then a critic is made of "
        "the policy's layers and `ppo` trains, against the same reference",
        when="The untrained policy is so often wrong that a critic has nothing to learn from.",
        failure="The critic still starts with a head of zeros: what is warm is the policy, and the "
        "layers under the head. `docs/results/critic_study.txt` has what that gave.",
        fields=_merged(
            _PPO_KL,
            _PPO_CREDIT,
            _PPO_LOSS,
            {
                "warmup": Fact("method", "ours: claim C21"),
                "warmup.method": Fact("grpo", "ours: claim C21"),
                "warmup.max_steps": Fact(10, "ours: a budget, not a finding"),
            },
        ),
        claims=("C21",),
        notes=(
            "`warmup.method` is any row without a critic and without a history. A row without KL "
            "(`kl.coef: 0`) warms without KL too.",
        ),
    ),
    "grpo_critic": RowFacts(
        paper="arXiv 2402.03300 and 1506.02438; the mixture is practitioners' advice (claim C25)",
        formula="A_t = w (R - group mean) / (group std + eps) + (1 - w) whitened GAE_t",
        when="To see whether a critic adds anything to a group: w = 1 gives the advantages of "
        "`grpo` and w = 0 those of `ppo`, exactly.",
        failure="The price of both: a group of completions and a second model. In a dead group the "
        "critic's part alone is left.",
        fields=_merged(
            _GRPO_KL,
            _group("arXiv 2402.03300 section 4.1.2"),
            _std("arXiv 2402.03300 section 4.1.2"),
            _PPO_CREDIT,
            {"credit.group_weight": Fact(0.5, "ours: claim C25 names no share")},
            _PPO_LOSS,
        ),
        claims=("C25",),
        notes=("The KL is in the loss, so that it is the same at every w.",),
    ),
    "vapo": RowFacts(
        paper="arXiv 2504.05118",
        formula="as `ppo` without KL; lambda 1 - 1 / (alpha n) of a completion of n tokens; the "
        "critic regresses on Monte Carlo returns; plus weight times the mean -log pi over the "
        "tokens of right completions; the critic learns alone until its explained variance is flat",
        when="Long reasoning with a verifier's reward, and memory for a second model.",
        failure="Short answers: below 1 / alpha = 20 tokens lambda is 0 and the reward reaches "
        "earlier tokens through the critic alone. The run says so; take "
        "`credit.length_alpha: 1.0`.",
        fields=_merged(
            {
                "credit": Fact("gae", "arXiv 1506.02438 Eq. 16"),
                "credit.gamma": Fact(1.0, "arXiv 2504.05118: no discount"),
                "credit.lam": Fact(0.95, "ours: the type's default; length_alpha takes its place"),
                "credit.critic_lam": Fact(1.0, "arXiv 2504.05118 section 4.1"),
                "credit.length_alpha": Fact(0.05, "arXiv 2504.05118 Eq. 5"),
            },
            _whiten("token", "ours: as `ppo`; the paper is silent"),
            _ratio("arXiv 1707.06347 Eq. 6"),
            _clip(
                Fact(0.2, "arXiv 2504.05118"),
                Fact(0.28, "arXiv 2504.05118: clip-higher"),
                "arXiv 2504.05118",
            ),
            {
                "terms.0": Fact("positive_nll", "arXiv 2504.05118 Eq. 9"),
                "terms.0.weight": Fact(0.1, "arXiv 2504.05118: mu"),
                "critic": Fact("critic", "arXiv 2504.05118"),
                "critic.loss_weight": Fact(0.1, "ours: as `ppo`"),
                "critic.clip": Fact(0.2, "ours: as `ppo`"),
                "warmup": Fact("value", "arXiv 2504.05118: value pretraining"),
                "warmup.window": Fact(10, "ours: the paper says until flat"),
                "warmup.tolerance": Fact(0.01, "ours: the paper says until flat"),
                "warmup.max_steps": Fact(50, "arXiv 2504.05118: 50 steps"),
            },
        ),
    ),
    "reinforce": RowFacts(
        paper="Williams 1992; the KL as in arXiv 2402.14740",
        formula="L = mean over completions of -A sum_t log pi(o_t),  A = R - coef KL",
        when="As a control, and where one completion per prompt is all that the budget allows.",
        failure="The noise of an uncentred reward: with rewards 0 and 1 every right answer is "
        "pushed up by as much as the whole reward. Subtract something: `reinforce_ma`, "
        "`baseline: batch`, or a row with groups.",
        fields=_merged(_SEQUENCE_KL, _ACTION),
        notes=(
            "One sample per prompt is enough (`group_size: 1`).",
            "Equal rewards are a signal like any other here: with all rewards 1, every completion "
            "is made more likely. A group has to be compared with itself to call it dead.",
        ),
    ),
    "reinforce_ma": RowFacts(
        paper="Williams 1992 (reinforcement comparison); arXiv 2402.14740 Eq. 8",
        formula="as `reinforce` with A = R - b,  b an average of the rewards of earlier steps; "
        "b <- decay b + (1 - decay) mean(R) after the step",
        when="A reward that costs money per call, and one fixed task: one sample per prompt has a "
        "baseline without a group.",
        failure="A change of task or of difficulty: the baseline is of another task for as long as "
        "it remembers, and every advantage has the same sign. With decay 0.9 half of the error is "
        "left after 6.6 steps. `scope: task` keeps one average per task; `on_shift: reset` "
        "forgets.",
        fields=_merged(
            _SEQUENCE_KL,
            _ACTION,
            {
                "baseline": Fact("history", "Williams 1992; arXiv 2402.14740 Eq. 8"),
                "baseline.mode": Fact(
                    "ema", "Williams 1992; Eq. 8 of arXiv 2402.14740 is mode cumulative"
                ),
                "baseline.window": Fact(32, "ours: read by mode window alone"),
                "baseline.decay": Fact(
                    0.9, "ours: half of a jump is learned in 6.6 steps; no paper fixes it"
                ),
                "baseline.init": Fact(0.0, "ours: no reward is known before the first"),
                "baseline.debias": Fact(
                    True, "ours: divides the weight of the start at 0 out again"
                ),
                "baseline.scope": Fact("global", "arXiv 2402.14740 Eq. 8: one average"),
                "baseline.on_shift": Fact(
                    "report", "ours: a shift is told first and acted on only if asked"
                ),
            },
        ),
        claims=("C13", "C14", "C15", "C16"),
        notes=(
            "This is the history baseline that REINFORCE++ is often credited with.",
            "A reward is subtracted before the average learns of it, so none is compared with "
            "itself.",
        ),
    ),
    "remax": RowFacts(
        paper="arXiv 2310.10505",
        formula="as `reinforce` with A = R - R_greedy,  R_greedy of one greedy completion of the "
        "same prompt",
        when="One sample per prompt where prompts differ much in difficulty: the baseline knows "
        "the prompt.",
        failure="The greedy completion is one more to generate and to score, and is no longer "
        "typical at high temperature or late in training. A prompt whose greedy completion has no "
        "score is absent from the step.",
        fields=_merged(
            _SEQUENCE_KL,
            _ACTION,
            {
                "greedy_sample": Fact(True, "arXiv 2310.10505: scored, never trained"),
                "baseline": Fact("greedy", "arXiv 2310.10505"),
            },
        ),
        claims=("C16",),
        notes=("Equal rewards are a signal unless they equal the greedy one's.",),
    ),
    "rloo": RowFacts(
        paper="arXiv 2402.14740",
        formula="as `reinforce` with A_i = R_i - mean of the other R of its group",
        when="The general default with groups: nothing to tune, the reward's own unit, no bias.",
        failure="A reward whose scale grows makes the steps grow, because nothing divides by it; "
        "`max_grad_norm` bounds them. One optimizer step per rollout only: there is no ratio.",
        fields=_merged(
            _SEQUENCE_KL,
            _ACTION,
            {
                "baseline": Fact("leave_one_out", "arXiv 2402.14740"),
                "baseline.center": Fact("mean", "arXiv 2402.14740"),
            },
        ),
        claims=("C9", "C10", "C11"),
        notes=(
            "A_i = G / (G - 1) (R_i - group mean): the same direction as the group mean, "
            "rescaled: 2 times at G = 2, 1.07 times at 16.",
            "**When all rewards of a group are equal, every A_i is exactly 0**, as in GRPO. A "
            "gradient is left only where something else enters: a KL in the reward (the row's "
            "default) or a loss term.",
            "The KL is subtracted from the reward of the whole sequence, before the baseline, as "
            "k1: it may be negative for a sample. `kl` in the metrics is k3 per token, never "
            "negative; the trained term is `kl/reward_sequence_k1_sequence`.",
        ),
    ),
    "rloo_median": RowFacts(
        paper="ours, after arXiv 2402.14740",
        formula="as `rloo` with A_i = R_i - median of the other R of its group",
        when="A reward with a long tail: it moves the mean of a group and with it every advantage; "
        "the median stays.",
        failure="The advantages of a group no longer sum to 0. With rewards 0 and 1 the median is "
        "0 or 1 itself: the majority of a group has advantage 0.",
        fields=_merged(
            _SEQUENCE_KL,
            _ACTION,
            {
                "baseline": Fact("leave_one_out", "arXiv 2402.14740"),
                "baseline.center": Fact("median", "ours: a lone outlier does not move it"),
            },
        ),
        claims=("C12",),
    ),
    "opo": RowFacts(
        paper="arXiv 2505.23585",
        formula="A_i = R_i - sum_j |o_j| R_j / sum_j |o_j|,  plain policy gradient",
        when="On policy with lengths that differ much: the baseline of least variance if every "
        "token's gradient has the same size.",
        failure="With more than one optimizer step there is no ratio to hold it.",
        fields=_merged(
            {"baseline": Fact("length_weighted", "arXiv 2505.23585, the optimal baseline")},
            _reduce("sequence_sum", "arXiv 2505.23585: the gradient of the whole completion"),
        ),
    ),
    "reinforce_pp": RowFacts(
        paper="arXiv 2501.03262v9 Eq. 1, 4, 5",
        formula="A_t = R - coef sum over s >= t of k1_s,  whitened over all tokens of the step, "
        "then -min(r A, clip(r, 1 - low, 1 + high) A)",
        when="One sample per prompt with a learned reward, where a KL per token matters.",
        failure="Prompts of different difficulty are compared with each other: an easy prompt's "
        "failure and a hard prompt's success look like the same news. Rewards of -1 and 1 suit it "
        "better than 0 and 1.",
        fields=_merged(
            _kl(
                "reward_token",
                0.01,
                "arXiv 2501.03262v9 Eq. 4",
                "ours: the paper leaves beta open",
            ),
            {
                "credit": Fact("reward_to_go", "arXiv 2501.03262v9 Eq. 4: the sum from t on"),
                "credit.gamma": Fact(1.0, "arXiv 2501.03262v9 Eq. 4: no discount"),
            },
            _whiten("token", "arXiv 2501.03262v9 Eq. 5, over the batch of advantages"),
            _ratio("arXiv 2501.03262v9 Eq. 1"),
            _PLAIN_CLIP,
            _reduce("sequence_mean", "arXiv 2501.03262v9 Eq. 1"),
        ),
        claims=("C13", "C17"),
        notes=(
            "REINFORCE++ has **no history baseline**, in no version of the paper: mean and "
            "deviation are those of the *current* step. The average of earlier rewards that it is "
            "often credited with is `reinforce_ma` (Williams 1992).",
            "Groups play no part, so a group of equal rewards keeps a signal: it is compared with "
            "the others. One sample per prompt works.",
            "After whitening the mean advantage over the trained tokens is 0.",
        ),
    ),
    "reinforce_pp_baseline": RowFacts(
        paper="arXiv 2501.03262v9 Eq. 6-8",
        formula="A_i = (R_i - group mean), whitened over the completions of the step; clipped "
        "ratio; + coef k2",
        when="Groups with rewards of 0 and 1 where one scale for the whole step is wanted.",
        failure="Counted by tokens (`whiten: token`), as other code does, the step's mean is not 0 "
        "where length goes with correctness, and would leak into groups without signal.",
        fields=_merged(
            _kl(
                "loss",
                0.01,
                "arXiv 2501.03262v9 Eq. 8",
                "ours: the paper leaves lambda open",
                **{"kl.estimator": Fact("k2", "arXiv 2501.03262v9 Eq. 8")},
            ),
            _group("arXiv 2501.03262v9 Eq. 6"),
            _whiten(
                "sequence",
                "arXiv 2501.03262v9 Eq. 7; counted by completions, because by tokens "
                "the mean leaks into dead groups",
            ),
            _ratio("arXiv 2501.03262v9 Eq. 1"),
            _PLAIN_CLIP,
            _reduce("sequence_mean", "arXiv 2501.03262v9 Eq. 1"),
        ),
        notes=("Each completion counts once, and a dead group stays at exactly 0 either way.",),
    ),
    "grpo": RowFacts(
        paper="arXiv 2402.03300 Eq. 3-4, section 4.1.2",
        formula="L = mean over completions of 1/|o| sum_t [ -min(r A, clip(r, 1 - low, 1 + high) A)"
        " + coef k3 ],  A_i = (R_i - group mean) / (group std + eps)",
        when="Verifiable rewards, groups of 8 to 16, and comparison with what others publish.",
        failure="A near-tie is blown up: a gap of 0.001 between two rewards becomes advantages of "
        "0.62 with eps 1e-4, and of 0.707 with eps 0. One lone outlier in G gets "
        "|A| = (G - 1) / sqrt(G): 2.5 at 8, 5.5 at 32. Long wrong answers are punished less per "
        "token than short ones.",
        fields=_merged(
            _GRPO_KL,
            _group("arXiv 2402.03300 section 4.1.2"),
            _std("arXiv 2402.03300 section 4.1.2"),
            _ratio("arXiv 2402.03300 Eq. 3"),
            _PLAIN_CLIP,
            _reduce("sequence_mean", _GRPO_MEAN),
        ),
        claims=("C2", "C5", "C6", "C8", "C18", "C27", "C28"),
        notes=(
            "ddof 1 and eps 1e-4 are our choices where the paper is silent. Without them: "
            "`scale: none`.",
            "A group of *exactly* equal rewards is 0, decided by its range: eight float32 copies "
            "of 0.7 have a standard deviation that is not 0.",
            "k3 in the loss has the gradient of KL(reference || policy), the forward KL. For the "
            "reverse one take `kl: {place: loss, estimator: k2}`, or k1 in the reward.",
            "With one optimizer step per rollout the ratio is exactly 1 and the clip never acts; "
            "`epochs` or `minibatches` above 1 bring it to life.",
        ),
    ),
    "gdpo": RowFacts(
        paper="arXiv 2601.05242",
        formula="z_k = (R_k - group mean of R_k) / (group std of R_k + eps) for each part k,  "
        "S = sum_k w_k z_k,  A = S whitened over the completions of the step",
        when="Several reward parts of different scale: summed first, the widest part decides, and "
        "different mixtures of parts give the same advantage.",
        failure="Two parts that are each other's opposite cancel, but for a remainder of the size "
        "of eps, which the whitening makes large where nothing else is in the step. A part that is "
        "nearly constant is blown up like a near-tie in `grpo`.",
        fields=_merged(
            _group("arXiv 2601.05242: each part against its group's mean"),
            _std("arXiv 2601.05242: each part over its group's deviation"),
            {"scale.per_part": Fact(True, "arXiv 2601.05242: normalised before the sum")},
            _whiten(
                "sequence",
                "arXiv 2601.05242: the sum over the batch; counted by completions, "
                "because by tokens the mean leaks into dead groups",
            ),
            _ratio("arXiv 2402.03300 Eq. 3, on which the paper builds"),
            _PLAIN_CLIP,
            _reduce("sequence_mean", _GRPO_MEAN),
        ),
        notes=(
            "Weights multiply after the normalisation; before it they would be divided out.",
            "A group is dead if every part is equal over it.",
            "Two other papers use the same four letters for something else.",
        ),
    ),
    "dr_grpo": RowFacts(
        paper="arXiv 2503.20783",
        formula="A_i = R_i - group mean;  L = mean over completions of (token sum) / length",
        when="Where GRPO's answers grow longer without growing better.",
        failure="The loss is |o| / limit of the token mean's, so learning rates do not carry over "
        "from `dapo`.",
        fields=_merged(
            _group("arXiv 2503.20783"),
            _ratio("arXiv 2503.20783"),
            _clip(
                Fact(0.2, "arXiv 2503.20783 Table 6"),
                Fact(0.2, "arXiv 2503.20783 Table 6"),
                "arXiv 2503.20783",
            ),
            _reduce(
                "constant", "arXiv 2503.20783 Listing 1: divided by the limit; its Eq. has none"
            ),
        ),
        claims=("C11",),
        notes=(
            "GRPO without the std and with a constant divisor (`reduce.length`, by default the "
            "length limit) instead of each completion's own length.",
            "Up to the factor G / (G - 1) its advantage is that of `rloo`.",
        ),
    ),
    "lite_ppo": RowFacts(
        paper="arXiv 2508.08221",
        formula="A_i = (R_i - group mean) / (std of the step + eps),  token mean",
        when="Groups with near-ties: the neighbours' spread is the measure.",
        failure="One prompt with wild rewards shrinks the advantages of all others.",
        fields=_merged(
            _group("arXiv 2508.08221: group-level mean"),
            {
                "scale": Fact("batch_std", "arXiv 2508.08221: batch-level deviation"),
                "scale.of": Fact("rewards", "arXiv 2508.08221: of the rewards"),
                "scale.ddof": _DDOF,
                "scale.eps": _EPS,
            },
            _ratio("arXiv 2508.08221: PPO's loss"),
            _PLAIN_CLIP,
        ),
        claims=("C5",),
        notes=("`scale.of: centered` measures what is left after the group means.",),
    ),
    "maxrl": RowFacts(
        paper="arXiv 2602.02710",
        formula="A_i = (R_i - group mean) / (group mean + eps)",
        when="Hard prompts with few successes: the rarer success is, the more one weighs.",
        failure="Rewards must not be negative: a group whose mean is not above 0 is skipped.",
        fields=_merged(
            _group("arXiv 2602.02710"),
            {
                "scale": Fact("group_mean", "arXiv 2602.02710"),
                "scale.eps": Fact(1e-6, "ours: the paper divides by the mean alone"),
            },
            _ratio("ours: the paper leaves the loss open"),
            _PLAIN_CLIP,
        ),
        notes=(
            "With rewards 0 and 1 this follows the likelihood of success, cut off at order G - 1.",
        ),
    ),
    "dapo": RowFacts(
        paper="arXiv 2503.14476",
        formula="L = sum of tokens of -min(r A, clip(r, 0.8, 1.28) A) / number of tokens,  A as in "
        "`grpo` on score + overlong penalty; groups of equal raw scores are sampled again",
        when="Long reasoning, where rare good tokens must not be clipped and prompts without "
        "spread are common.",
        failure="A long completion has more weight than a short one: with 10 and 1000 tokens the "
        "long one is 99 % of the gradient. Dynamic sampling multiplies the generations of a step "
        "by up to `max_rounds`.",
        fields=_merged(
            {
                "keep": Fact("informative", "arXiv 2503.14476 Eq. 8: its constraint"),
                "keep.by": Fact("score", "arXiv 2503.14476: on accuracy, not on the shaped reward"),
                "keep.max_rounds": Fact(10, "ours: a step must end"),
                "shaping.0": Fact("overlong", "arXiv 2503.14476 Eq. 13"),
                "shaping.0.weight": Fact(1.0, "arXiv 2503.14476 Eq. 13: added to the score"),
            },
            _group("arXiv 2503.14476"),
            _std("arXiv 2503.14476"),
            _ratio("arXiv 2503.14476 Eq. 8"),
            _clip(
                Fact(0.2, "arXiv 2503.14476: the value of its experiments"),
                Fact(0.28, "arXiv 2503.14476: the value of its experiments"),
                "arXiv 2503.14476 Eq. 8",
            ),
        ),
        claims=("C22", "C24"),
        notes=(
            "GRPO with clip-higher, the token mean over the whole step, a soft penalty on the last "
            "fifth of the length limit, no KL, and dynamic sampling: prompts whose *raw* scores "
            "are all equal are replaced by new ones, at most `max_rounds` times.",
            "At the bound the step trains on what was found; it never loops.",
            "The paper's Eq. 8 divides by the tokens of the *group*; all code, and this row, by "
            "those of the step. The literal one is `reduce: prompt_mean`.",
        ),
    ),
    "gspo": RowFacts(
        paper="arXiv 2507.18071 Eq. 5-7",
        formula="s = exp(mean over tokens of log r),  L = mean over completions of "
        "-min(s A, clip(s, 1 - low, 1 + high) A)",
        when="Mixture-of-experts models, and several optimizer steps per rollout in float32.",
        failure="The range belongs to the *mean* log-ratio: 0.2 here would never act, and below "
        "the noise of bfloat16 it acts on rounding alone.",
        fields=_merged(
            _group("arXiv 2507.18071 Eq. 6"),
            _std("arXiv 2507.18071 Eq. 6"),
            _ratio("arXiv 2507.18071 Eq. 7", "sequence"),
            _clip(
                Fact(3e-4, "arXiv 2507.18071: the value of its experiments"),
                Fact(4e-4, "arXiv 2507.18071: the value of its experiments"),
                "arXiv 2507.18071 Eq. 5",
            ),
            _reduce("sequence_mean", "arXiv 2507.18071 Eq. 5"),
        ),
        claims=("C24", "C28"),
        notes=(
            "With one optimizer step per rollout, the default, every ratio is 1 and this is "
            "`grpo` without KL.",
            "With more, a range below the noise of `model.compute` is refused (two layouts of the "
            "same tokens are compared when the model is loaded; in bfloat16 this range is): take "
            "`compute: float32`, or widen it.",
            "Keep `reduce: sequence_mean`; a token mean multiplies every completion by its length.",
        ),
    ),
    "gspo_token": RowFacts(
        paper="arXiv 2507.18071 Eq. 13-14",
        formula="as `gspo` with s_t = sg(s) r_t / sg(r_t)",
        when="GSPO with an advantage for each token.",
        failure="As `gspo`. For one advantage per completion it has the same value and gradient.",
        fields=_merged(
            _group("arXiv 2507.18071 Eq. 6"),
            _std("arXiv 2507.18071 Eq. 6"),
            _ratio("arXiv 2507.18071 Eq. 14", "sequence_token"),
            _clip(
                Fact(3e-4, "arXiv 2507.18071: the value of its experiments"),
                Fact(4e-4, "arXiv 2507.18071: the value of its experiments"),
                "arXiv 2507.18071 Eq. 13",
            ),
            _reduce("sequence_mean", "arXiv 2507.18071 Eq. 13"),
        ),
    ),
    "cispo": RowFacts(
        paper="arXiv 2506.13585 Eq. 4-5; the bound from arXiv 2510.13786",
        formula="L = token mean of -sg(clip(r, low, high)) A log pi",
        when="Several optimizer steps per rollout, where a clip would silence the tokens that "
        "change most.",
        failure="Nothing stops a token that has moved far: its weight is bounded, its gradient is "
        "not taken out. Watch the KL.",
        fields=_merged(
            _group("arXiv 2506.13585"),
            _std("arXiv 2506.13585"),
            _ratio("arXiv 2506.13585 Eq. 4"),
            {
                "gate": Fact("weight", "arXiv 2506.13585 Eq. 4-5"),
                "gate.low": Fact(0.0, "arXiv 2506.13585: no lower bound in practice"),
                "gate.high": Fact(5.0, "arXiv 2510.13786: a cap about 5; 2506.13585 gives none"),
            },
        ),
        claims=("C24",),
        notes=(
            "A token beyond the bound keeps a gradient, with a bounded weight. `gate.high` is the "
            "ratio itself, not a distance from 1.",
            "The paper adds dynamic sampling: `keep: informative`.",
        ),
    ),
    "sapo": RowFacts(
        paper="arXiv 2511.20347",
        formula="L = mean over completions of 1/|o| sum_t -(4 / tau) sigmoid(tau (r - 1)) A",
        when="Several optimizer steps per rollout, with a gate that fades instead of cutting.",
        failure="A larger tau fades *sooner*. At r = 1 the loss is 2 / tau times PPO's, with the "
        "same gradient: do not compare loss curves.",
        fields=_merged(
            _group("arXiv 2511.20347"),
            _std("arXiv 2511.20347"),
            _ratio("arXiv 2511.20347"),
            {
                "gate": Fact("sigmoid", "arXiv 2511.20347"),
                "gate.positive": Fact(1.0, "arXiv 2511.20347: tau for A > 0"),
                "gate.negative": Fact(1.05, "arXiv 2511.20347: tau else"),
            },
            _reduce("sequence_mean", "arXiv 2511.20347"),
        ),
    ),
    "gmpo": RowFacts(
        paper="arXiv 2507.20673",
        formula="L = mean over completions of -exp(mean over tokens of log r, each clipped on the "
        "side that A pushes to) A",
        when="As GSPO, with a range that one token cannot use up for its whole completion.",
        failure="The paper's bounds are 0.4 in log r, that is `low` 0.33 and `high` 0.49 here; "
        "0.4 written here would be another range.",
        fields=_merged(
            _group("arXiv 2507.20673"),
            _std("arXiv 2507.20673"),
            _ratio("arXiv 2507.20673", "geometric"),
            _clip(
                Fact(0.3296799539643607, "arXiv 2507.20673: 1 - exp(-0.4)"),
                Fact(0.49182469764127035, "arXiv 2507.20673: exp(0.4) - 1"),
                "arXiv 2507.20673",
            ),
            _reduce("sequence_mean", "arXiv 2507.20673"),
        ),
    ),
    "dppo": RowFacts(
        paper="arXiv 2602.04879",
        formula="L = token mean of -sg(min(p/q, cap)) A log pi, and 0 where |p - q| > delta the "
        "way A pushes;  q is the sampler",
        when="A fast engine whose probabilities differ from the trainer's.",
        failure="The ratio already holds trainer over sampler, so `correction` must stay none.",
        fields=_merged(
            _group("ours: the paper takes any advantage"),
            _ratio("arXiv 2602.04879 Eq. 13"),
            {
                "ratio.to": Fact("sampler", "arXiv 2602.04879: against mu"),
                "gate": Fact("divergence", "arXiv 2602.04879 Eq. 13-14"),
                "gate.measure": Fact("tv", "arXiv 2602.04879: total variation of one token"),
                "gate.delta": Fact(
                    0.15, "verl's script for arXiv 2602.04879; other code takes 0.2"
                ),
                "gate.cap": Fact(20.0, "verl's script for arXiv 2602.04879"),
            },
        ),
        notes=("A clip by ratio holds 0.01 to 0.012 and lets 0.9 go to 1; this does not.",),
    ),
}
"""By the name of the row."""


_BETA = Fact(0.1, "arXiv 2305.18290, App. B (0.5 for its summaries)")
_SUMMED = "The mean over pairs is that of the whole optimizer step; TRL's of each micro-batch."

GIVEN: Mapping[str, RowFacts] = {
    "dpo": RowFacts(
        paper="arXiv 2305.18290 Eq. 7",
        formula="L = mean of -log sigmoid(r_w - r_l);  r = beta log(pi / pi_ref), summed over the "
        "answer",
        when="First, with a start that was fine-tuned on the chosen answers or on their like.",
        failure="The chosen answers get rarer while the margin grows; the finding `displacement` "
        "says so. Long answers are favoured where the chosen ones are longer.",
        fields={"beta": _BETA},
        notes=(
            _SUMMED,
            "`weight: likelihood` counts a pair by how typical of the policy its answers are (WPO, "
            "arXiv 2406.11827 Eq. 2). The weight is held at 1, as in the released code; TRL's "
            "`use_weighting` does not hold it.",
        ),
    ),
    "cdpo": RowFacts(
        paper="Mitchell 2023, A note on DPO with noisy preferences",
        formula="L = (1 - e) l + e l';  l' is the loss of the swapped pair, e the smoothing",
        when="Labels are known to be flipped at some rate: the margin then ends where "
        "sigmoid(r_w - r_l) = 1 - e.",
        failure="With clean labels the margin is held back for nothing.",
        fields={
            "beta": _BETA,
            "smoothing": Fact(0.1, "ours: the note leaves the share of flips open"),
        },
        notes=("TRL 1.16 reads `label_smoothing` for `robust`, and not for `sigmoid`.",),
    ),
    "robust_dpo": RowFacts(
        paper="arXiv 2403.00409",
        formula="L = ((1 - e) l - e l') / (1 - 2e);  its mean over flips is l",
        when="The rate of flipped labels is known well.",
        failure="Unbounded below: a pair that is won by far pays e z / (1 - 2e).",
        fields={
            "beta": _BETA,
            "smoothing": Fact(0.1, "arXiv 2403.00409: its experiments"),
            "unbias": Fact(True, "arXiv 2403.00409: the flips are divided out"),
        },
    ),
    "ipo": RowFacts(
        paper="arXiv 2310.12036 Eq. 17",
        formula="L = mean of (h - 1 / (2 beta))^2;  h = log-ratio of chosen less that of rejected",
        when="Pairs that every judge would order alike: the margin has an end there too.",
        failure="h is a sum over tokens, so one beta does not fit answers of every length.",
        fields={
            "link": Fact("square", "arXiv 2310.12036 Eq. 17"),
            "beta": Fact(0.1, "ours: that of DPO; the paper has toy problems alone"),
        },
        notes=("TRL's `ipo` takes h per token: that is `ipo_avg` here.",),
    ),
    "ipo_avg": RowFacts(
        paper="arXiv 2310.12036 Eq. 17, per token",
        formula="as `ipo`, with the log-ratios of mean token log-probabilities",
        when="As `ipo`, where lengths differ.",
        failure="At beta 0.1 the margin to reach is 5 nats per token, which no pair has: choose "
        "beta by the margins seen.",
        fields={
            "link": Fact("square", "arXiv 2310.12036 Eq. 17"),
            "score": Fact(
                "mean", "TRL, whose comment says that the authors of arXiv 2310.12036 do"
            ),
            "beta": Fact(0.1, "ours: that of DPO; the paper has toy problems alone"),
        },
    ),
    "hinge": RowFacts(
        paper="arXiv 2305.10425, with a reference as in arXiv 2309.06657",
        formula="L = mean of max(0, 1 - (r_w - r_l))",
        when="Pairs that are won shall be left alone.",
        failure="Once every pair of a step is won its gradient is 0 and only momentum moves.",
        fields={
            "link": Fact("hinge", "arXiv 2305.10425"),
            "beta": Fact(0.05, "arXiv 2309.06657: gamma"),
        },
    ),
    "dpo_norm": RowFacts(
        paper="arXiv 2411.15124",
        formula="L = mean of -log sigmoid(r_w - r_l);  r = beta / |y| log(pi / pi_ref)",
        when="DPO makes answers longer.",
        failure="A beta taken over from `dpo` is too small by the length of an answer.",
        fields={
            "score": Fact("mean", "arXiv 2411.15124: length-normalised"),
            "beta": Fact(5.0, "arXiv 2411.15124"),
        },
        notes=("TRL's `sigmoid_norm`.",),
    ),
    "bco_pair": RowFacts(
        paper="arXiv 2404.04656",
        formula="L = mean of -log sigmoid(r_w) - log sigmoid(-r_l)",
        when="Each answer shall be judged by itself, although the data are pairs.",
        failure="Both rewards may drift together: nothing holds their level but the 0.",
        fields={
            "link": Fact("bco", "arXiv 2404.04656"),
            "beta": Fact(0.01, "arXiv 2404.04656"),
        },
        notes=("Without the paper's running shift of the rewards, as TRL's `bco_pair`.",),
    ),
    "apo_zero": RowFacts(
        paper="arXiv 2408.06266 Eq. 7",
        formula="L = mean of 1 - sigmoid(r_w) + sigmoid(r_l)",
        when="The chosen answers are better than what the policy says: they shall get likelier.",
        failure="Where the policy is better than the chosen answers it unlearns.",
        fields={
            "link": Fact("apo_zero", "arXiv 2408.06266 Eq. 7"),
            "beta": Fact(0.1, "arXiv 2408.06266"),
        },
    ),
    "nca_pair": RowFacts(
        paper="arXiv 2402.05369",
        formula="L = mean of -log sigmoid(r_w) - 1/2 log sigmoid(-r_w) - 1/2 log sigmoid(-r_l)",
        when="DPO makes the chosen answers rarer.",
        failure="Slower: the rewards themselves are pulled to 0.",
        fields={
            "link": Fact("nca", "arXiv 2402.05369"),
            "beta": Fact(0.01, "arXiv 2402.05369"),
        },
    ),
    "simpo": RowFacts(
        paper="arXiv 2405.14734 Eq. 6",
        formula="L = mean of -log sigmoid(r_w - r_l - margin);  r = beta / |y| log pi",
        when="There is no room or time for a reference.",
        failure="Nothing holds the policy near its start: with a large rate or many epochs texts "
        "break down.",
        fields={
            "score": Fact("mean", "arXiv 2405.14734 Eq. 4"),
            "reference": Fact(False, "arXiv 2405.14734"),
            "beta": Fact(2.0, "arXiv 2405.14734: for its Llama-3 base model"),
            "margin": Fact(1.0, "arXiv 2405.14734: gamma, for its Llama-3 base model"),
        },
        notes=("`margin` is the paper's gamma, and TRL's `simpo_gamma`: not divided by beta.",),
    ),
    "orpo": RowFacts(
        paper="arXiv 2403.07691 Eq. 6-7",
        formula="L = mean of -log sigmoid(o_w - o_l) + nll x -1/|y_w| log pi(y_w);  o = log odds "
        "of the mean token probability",
        when="From a base model in one stage.",
        failure="On a model that is fine-tuned already the likelihood term rules.",
        fields={
            "score": Fact("log_odds", "arXiv 2403.07691 Eq. 4: odds of the mean probability"),
            "reference": Fact(False, "arXiv 2403.07691"),
            "beta": Fact(1.0, "arXiv 2403.07691 Eq. 7: no factor inside the sigmoid"),
            "nll": Fact(10.0, "arXiv 2403.07691: 1 / lambda, with lambda 0.1"),
        },
        notes=("The loss is the paper's over lambda. TRL's `beta` of ORPO is lambda.",),
    ),
    "kto": RowFacts(
        paper="arXiv 2402.01306 Eq. 8",
        formula="L = mean of w (1 - sigmoid(beta (s - z))) for good, w (1 - sigmoid(beta (z - s))) "
        "for bad;  z = max(0, mean log-ratio of answers behind other prompts)",
        when="Labels, not pairs: thumbs up and down.",
        failure="Far more good than bad labels, or the reverse, drown the rarer kind: see the "
        "weights below.",
        fields={
            "data": Fact("labels", "arXiv 2402.01306"),
            "link": Fact("kto", "arXiv 2402.01306 Eq. 8"),
            "beta": Fact(0.1, "arXiv 2402.01306"),
        },
        notes=(
            "Set `desirable` and `undesirable` so that (desirable n_D) / (undesirable n_U) lies "
            "between 1 and 3/2, as the paper says; TRL's range is 1 to 4/3.",
            "z is that of the whole optimizer step; TRL's of each micro-batch.",
        ),
    ),
    "sft": RowFacts(
        paper="arXiv 2203.02155",
        formula="L = -1/N sum over the N trained tokens of the step of log pi",
        when="Before preferences or rewards, and where good answers are at hand.",
        failure="More epochs than the held-out loss allows: it repeats its examples.",
        fields={},
        notes=("N is that of the whole optimizer step, however it is cut into passes.",),
    ),
    "reward_model": RowFacts(
        paper="arXiv 2203.02155 Eq. 1",
        formula="L = mean of -log sigmoid(r_w - r_l - margin) + center (r_w + r_l)^2",
        when="A policy shall be trained on what people prefer, by more answers than were compared.",
        failure="It learns length: compare `eval/accuracy` with `eval/accuracy_of_length`.",
        fields={
            "data": Fact("pairs", "arXiv 2203.02155; `rankings` count once a prompt, as there"),
            "loss": Fact("bradley_terry", "arXiv 2203.02155 Eq. 1"),
            "center": Fact(0.01, "arXiv 2312.09244 Eq. 2; the number: TRL's advice"),
        },
        notes=("`margin` is that of the row, where it has one (arXiv 2307.09288 Eq. 2).",),
    ),
}
"""Rows that sample nothing. Of a preference row `beta` is told too where it is the default."""
