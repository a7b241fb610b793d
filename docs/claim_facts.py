"""What practitioners' reports claim about the methods, in our words, and what is known here.

Owns plain data for `docs/generate.py`. Nothing here is quoted as a result: where only an experiment
can tell, the answer says so.
Refuses to own anything that computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Claim(NamedTuple):
    text: str
    verdict: str
    """true, false, in part, open, or owed (by a feature that this version does not have)."""
    answer: str


CLAIMS: Mapping[str, Claim] = {
    "C1": Claim(
        "PPO doubles the memory, because policy and critic train together",
        "in part",
        "It doubles weights, gradients and moments, not what else a process holds: 1.4 times "
        "GRPO's peak with a whole critic, 1.2 with a third of its layers "
        "(`bench/results/critic_cost.txt`).",
    ),
    "C2": Claim(
        "GRPO needs about half of PPO's memory",
        "in part",
        "Half of the weights, gradients and moments, 0.7 of the whole process here; a value head "
        "on the policy's own layers costs next to nothing (`bench/results/critic_cost.txt`).",
    ),
    "C3": Claim(
        "A critic cut to a few layers diverges",
        "false",
        "It learns more slowly, and it does not diverge: SmolLM2 learns addition with 6 or 10 of "
        "30 layers much as with all (`docs/results/addition_ppo*.txt`), a character model with 1 "
        "of 2 loses 0.08 of its mean accuracy (`docs/results/critic_study.txt`).",
    ),
    "C4": Claim(
        "PPO's reward decays because the critic over-estimates",
        "open",
        "`critic/bias` measures it by position. In our runs on addition the critic expected too "
        "little in more than half of the steps, and the reward did not decay.",
    ),
    "C5": Claim(
        "Dividing by a group's deviation turns a reward gap of 0.001 into advantages of 0.707",
        "true",
        "For two samples and eps 0; 0.62 with eps 1e-4. `lite_ppo`, `dr_grpo` and `rloo` do not.",
    ),
    "C6": Claim(
        "One right answer of four gets an advantage of about 1.5",
        "true",
        "With ddof 1; 1.73 with ddof 0.",
    ),
    "C7": Claim(
        "Groups of 8 to 16 are best; 4 is noisy; 32 and more become all right or all wrong",
        "in part",
        "The last part is false: p^G + (1 - p)^G falls with G. Large groups cost prompts per "
        "budget, waiting and lone-outlier advantages.",
    ),
    "C8": Claim(
        "The KL coefficient matters, and following the measured KL helps",
        "open",
        "`kl.controller: proportional` and `doubling` follow it; the unit of the target is named.",
    ),
    "C9": Claim(
        "RLOO with 8 samples is steadier than GRPO and ends a little higher",
        "open",
        "One run each says nothing; compare with seeds and intervals.",
    ),
    "C10": Claim(
        "RLOO keeps a gradient where GRPO's is zero because all rewards are equal",
        "false",
        "c - c = 0: every leave-one-out advantage is exactly 0 too. What was meant is a KL in the "
        "reward, or a baseline that is not the group: `reinforce_pp`, `baseline: batch`.",
    ),
    "C11": Claim(
        "Leaving the own reward out removes a bias of the group mean",
        "in part",
        "The mean's advantage is (1 - 1/G) times the leave-one-out one: a scale, not a direction.",
    ),
    "C12": Claim(
        "With a skewed reward the leave-one-out mean follows outliers, and the median does not",
        "true",
        "That is this row.",
    ),
    "C13": Claim(
        "REINFORCE++ subtracts the mean of past batches",
        "false",
        "That is the history baseline of Williams 1992, `reinforce_ma`. `reinforce_pp` uses the "
        "mean and deviation of the current step.",
    ),
    "C14": Claim(
        "A history baseline with one sample per prompt is as good as RLOO with four, and faster",
        "in part",
        "Faster per prompt, because fewer completions are generated; per reward call it is not.",
    ),
    "C15": Claim(
        "A change of task breaks the history baseline until it is reset by hand",
        "true",
        "`scope: task` separates tasks, `on_shift: reset` forgets, and the average is saved with "
        "each checkpoint.",
    ),
    "C16": Claim(
        "Where a reward costs money per call, one sample per prompt is cheapest",
        "open",
        "Cheapest per prompt; the greedy baseline adds a call. Compare at equal reward calls.",
    ),
    "C17": Claim(
        "REINFORCE++ adds a KL per token, several updates per sample and normalised advantages",
        "true",
        "That is the row; the paper normalises over the batch, not over each minibatch.",
    ),
    "C18": Claim(
        "GRPO's group estimate has the lower variance early, where samples are diverse",
        "open",
        "Compare the first fifth of the steps.",
    ),
    "C19": Claim(
        "PPO is better with dense rewards, long runs or a good critic to start from",
        "open",
        "With a reward for each right position `ppo` ends at 0.71 and `rloo` at 0.38 after equal "
        "samples, but five seeds differ so much that no difference is shown "
        "(`docs/results/critic_study.txt`).",
    ),
    "C20": Claim(
        "GAE trades bias for variance: lambda 0 is TD, 1 is Monte Carlo",
        "true",
        "Exactly so at the ends, by hand-computed numbers; in between it is a trade.",
    ),
    "C21": Claim(
        "SFT, then GRPO, then PPO with a critic warmed on the way",
        "open",
        "Stages chain them. Ten steps of GRPO before PPO, whose policy then starts the critic "
        "too, made no difference to accuracy or explained variance over the next 30 steps that "
        "five seeds would show (`docs/results/critic_study.txt`).",
    ),
    "C22": Claim(
        "A group deviation below 0.05 means that the task is too easy or too hard",
        "in part",
        "Not as a fixed number: with rewards 0 and 1 it is 0 or far above. Equal groups are "
        "counted (`frac_reward_zero_std`) and can be sampled again (`keep: informative`).",
    ),
    "C23": Claim(
        "A temperature of 0.8 to 1.0; 0.5 leaves too little spread in a group",
        "open",
        "At any temperature the log-probabilities are those of the distribution that was sampled.",
    ),
    "C24": Claim(
        "Clip-higher keeps rare good tokens; DAPO and GSPO mend collapse and length bias",
        "in part",
        "Clip-higher does so by its formula. GSPO keeps the mean over completions, and with it "
        "GRPO's length bias.",
    ),
    "C25": Claim(
        "Mixing the group's advantage with a critic's is a likely future",
        "open",
        "Row `grpo_critic` does it, `credit.group_weight` is the group's share; at 1 and 0 it is "
        "exactly `grpo` and `ppo`. Nothing here shows that a share between is better.",
    ),
    "C26": Claim(
        "DPO is cheapest and steadiest; its loss can fall while the chosen answer gets rarer",
        "owed",
        "By preference methods.",
    ),
    "C27": Claim(
        "PPO subtracts the KL from the reward; GRPO adds k3 to the loss, which is never negative",
        "true",
        "Both places are built. k3 in the loss has the gradient of the forward KL.",
    ),
    "C28": Claim(
        "GRPO as pseudo-code with summed log-probabilities in the ratio and a plain mean of "
        "log-ratios as the KL",
        "false",
        "As published the ratio is per token, the KL is k3 and the mask that of the completion. "
        "A ratio of completions is `gspo`, with the mean instead of the sum.",
    ),
    "C29": Claim(
        "Try the reward out with a cheap method first; mislabelled rewards cost days",
        "owed",
        "By the audit. A failed grader is missing data here and never reward 0.",
    ),
    "C30": Claim(
        "Rule rewards beat learned ones, and no baseline repairs a biased reward",
        "owed",
        "By the audit.",
    ),
    "C31": Claim(
        "The reward model scores the whole answer: rewards before the end are 0",
        "true",
        "The score sits on the last trained token; a KL per token joins it under `reward_token`.",
    ),
    "C32": Claim(
        "PPO for large compute, GRPO for reasoning, RLOO as default, history for paid rewards, "
        "DPO for pairs",
        "owed",
        "By the planner, beside its own evidence.",
    ),
}
