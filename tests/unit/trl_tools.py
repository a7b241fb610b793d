"""Two learners on one random batch: TRL's own trainers with their model taken out, and ours.

TRL's side runs its own code from the reward functions to the loss: `_calculate_rewards`,
`_generate_and_score_completions` and `_compute_loss`. Only sampling and the forward pass are
replaced, by what the case says; a row of the batch is found again by its prompt's one token.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from surefoot.learner.batch import Batch, make_batch
from surefoot.learner.loss import LossInputs, microbatch_loss
from surefoot.learner.update import Facts
from surefoot.loops.credit import Credit, assign
from surefoot.loops.standing import stand
from surefoot.methods import Method, resolve
from surefoot.objective import reduce
from surefoot.records import Completion, Group, Prompt, ScoreStatus, StopReason
from surefoot.reward.contract import PartScore
from surefoot.reward.grader import combine
from surefoot.reward.resolve import Reward

CAP = 9
"""Length limit of every completion here, in tokens."""
EOS = 1


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One generation batch: P prompts, G completions each, B = P G rows, T columns."""

    group_size: int
    reward_BK: tuple[tuple[float | None, ...], ...]
    weight_K: tuple[float, ...]
    lengths: tuple[int, ...]
    truncated: tuple[bool, ...]
    logp_BT: Tensor
    old_BT: Tensor
    sampled_BT: Tensor
    ref_BT: Tensor
    entropy_BT: Tensor
    micro: int = 1
    """Micro-batches that TRL cuts the step into."""

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def mask_BT(self) -> Tensor:
        places = torch.arange(max(self.lengths))
        return places[None] < torch.tensor(self.lengths)[:, None]


@dataclasses.dataclass(frozen=True)
class Outcome:
    advantage_B: Tensor
    loss: float
    grad_BT: Tensor
    """Of the loss by the log-probabilities."""


@functools.cache
def random_case(seed: int, *, missing: bool = False, micro: bool = True) -> Case:
    """Rewards from a coarse grid, so that ties and dead groups are common.

    `missing`: some completions are left without any reward. `micro` False: one micro-batch.
    """
    draw = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=draw))

    def chance(probability: float) -> bool:
        return float(torch.rand((), generator=draw)) < probability

    prompts, size, parts = integer(1, 4), integer(2, 8), integer(1, 3)
    rewards = []
    for _ in range(prompts):
        same = chance(0.2)
        first = tuple(integer(-4, 8) / 4 for _ in range(parts))
        for _ in range(size):
            values = first if same else tuple(integer(-4, 8) / 4 for _ in range(parts))
            some = [None if parts > 1 and chance(0.15) else v for v in values]
            if all(v is None for v in some):
                some[0] = values[0]
            rewards.append((None,) * parts if missing and chance(0.15) else tuple(some))
    rows = prompts * size
    lengths = tuple(integer(1, CAP) if chance(0.8) else 1 for _ in range(rows))
    shape = (rows, max(lengths))

    def normal(spread: float) -> Tensor:
        return spread * torch.randn(shape, generator=draw, dtype=torch.float64)

    spread = (0.0, 5e-4, 0.1, 0.6)[integer(0, 3)]
    old = -0.3 - 3 * torch.rand(shape, generator=draw, dtype=torch.float64)
    divisors = [n for n in (1, 2, 4) if rows % n == 0]
    return Case(
        size,
        tuple(rewards),
        tuple((0.5, 1.0, 2.0)[integer(0, 2)] for _ in range(parts)),
        lengths,
        tuple(chance(0.25) for _ in range(rows)),
        old + normal(spread),
        old,
        old + normal(0.3),
        old + normal(0.4),
        3 * torch.rand(shape, generator=draw, dtype=torch.float64),
        divisors[integer(0, len(divisors) - 1)] if micro else 1,
    )


# ---- TRL ----

_COPIED = (
    "beta",
    "num_generations",
    "loss_type",
    "multi_objective_aggregation",
    "scale_rewards",
    "normalize_advantages",
    "reward_clip_range",
    "importance_sampling_level",
    "off_policy_mask_threshold",
    "pad_to_multiple_of",
    "mask_truncated_completions",
    "top_entropy_quantile",
    "entropy_coef",
    "use_adaptive_entropy",
    "num_iterations",
    "use_vllm",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_clip_max",
)
TRAINERS: Mapping[str, tuple[type, type]] = {
    "grpo": (GRPOTrainer, GRPOConfig),
    "rloo": (RLOOTrainer, RLOOConfig),
    "gmpo": (GMPOTrainer, GMPOConfig),
}
_ALONE = SimpleNamespace(
    device=torch.device("cpu"),
    process_index=0,
    num_processes=1,
    is_main_process=True,
    sync_gradients=True,
    gather=lambda value: value,
    gather_for_metrics=lambda value: value,
    reduce=lambda value, reduction: value,
)
_POLICY = SimpleNamespace(training=True, is_gradient_checkpointing=False)
_REFERENCE = SimpleNamespace()


@functools.cache
def _copied(config: type) -> list[str]:
    known = {field.name for field in dataclasses.fields(config)}
    return [name for name in _COPIED if name in known]


def _start(self: Any, case: Case, args: Any) -> None:
    """What the trainers' own constructors set, without a model and without data."""
    self.case, self.args, self.accelerator = case, args, _ALONE
    for name in _copied(type(args)):
        setattr(self, name, getattr(args, name))
    self.num_generations, self.max_completion_length = case.group_size, CAP
    self.epsilon_low = args.epsilon
    self.epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    self.model, self.ref_model = _POLICY, _REFERENCE
    self.state = SimpleNamespace(global_step=0)
    self._tokenizer, self.eos_token_ids = SimpleNamespace(pad_token_id=0), [EOS]
    self.tools = self.environments = self.environment_factories = None
    self.aux_loss_enabled = self.log_multimodal = self._is_vlm = False
    names = [f"r{k}" for k in range(len(case.weight_K))]
    self.reward_func_names, self.reward_processing_classes = names, [None] * len(names)
    self.reward_funcs = [
        functools.partial(_column, [row[k] for row in case.reward_BK]) for k in range(len(names))
    ]
    self.reward_weights = torch.tensor(case.weight_K, dtype=torch.float32)
    self._metrics = {"train": defaultdict(list)}
    self._logs = defaultdict(deque, {"rewards": defaultdict(deque), "extra": defaultdict(deque)})
    self._pending_extra_logs, self._pending_metrics = defaultdict(list), defaultdict(list)
    self._entropy_bonus_enabled = getattr(args, "entropy_coef", 0.0) != 0.0
    self.current_gradient_accumulation_steps = args.gradient_accumulation_steps


def _column(values: Sequence[float | None], **_: Any) -> list[float | None]:
    return list(values)


def _generate(self: Any, prompts: Sequence[Any]) -> tuple[Any, ...]:
    case: Case = self.case
    prompt_ids = [[row] for row in range(case.rows)]
    ids = [
        [5] * (n - 1) + [6 if cut else EOS]
        for n, cut in zip(case.lengths, case.truncated, strict=True)
    ]
    texts = ["text"] * case.rows
    if isinstance(self, RLOOTrainer):
        return prompt_ids, ids, texts
    sampled = None
    if self.use_vllm:
        # vLLM gives None for a log-probability that it could not compute.
        sampled = [
            [None if math.isnan(x) else x for x in row[:n].tolist()]
            for row, n in zip(case.sampled_BT, case.lengths, strict=True)
        ]
    return prompt_ids, ids, None, texts, sampled, {}, None, None


def _logps(self: Any, model: Any, input_ids: Tensor, *_: Any, **options: Any) -> tuple[Any, ...]:
    rows = input_ids[:, 0]
    if model is _REFERENCE:
        return self.case.ref_BT[rows], None, None
    if torch.is_grad_enabled():
        return self.logp_BT[rows], self.case.entropy_BT[rows], None
    return self.case.old_BT[rows], None, None


@functools.cache
def _trainer_class(name: str) -> type:
    body = {
        "__init__": _start,
        "_generate": _generate,
        "_get_per_token_logps_and_entropies": _logps,
    }
    return type(f"Bare{name}", (TRAINERS[name][0],), body)


@functools.cache
def _args(trainer: str, settings: tuple[tuple[str, Any], ...]) -> Any:
    return TRAINERS[trainer][1](
        output_dir="unused", use_cpu=True, bf16=False, report_to=[], **dict(settings)
    )


def theirs(
    case: Case, trainer: str, settings: Mapping[str, Any], *, windows: int = 1
) -> list[Outcome]:
    """TRL's advantages, loss and gradient, one `Outcome` for each optimizer step.

    `windows` optimizer steps share the generation batch, `case.micro` micro-batches each.
    """
    args = copy.copy(_args(trainer, tuple(sorted(settings.items()))))
    args.gradient_accumulation_steps = case.micro
    args.steps_per_generation = case.micro * windows
    args.num_iterations = 2
    made = _trainer_class(trainer)(case, args)
    made.num_iterations = 2  # So that the old log-probabilities are computed, not taken as equal.
    inputs = [{"prompt": "p"} for _ in range(case.rows)]
    scored = made._generate_and_score_completions(inputs)
    advantage_B = scored["advantages"].double()
    out = []
    parts = torch.arange(case.rows).chunk(case.micro * windows)
    assert len({len(part) for part in parts}) == 1, "TRL's micro-batches are of one size"
    for window in range(windows):
        made.logp_BT = case.logp_BT.clone().requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        for part in parts[window * case.micro : (window + 1) * case.micro]:
            mini = {
                key: value[part] if isinstance(value, Tensor) and value.ndim else value
                for key, value in scored.items()
            }
            loss = made._compute_loss(made.model, mini)
            # RLOO divides by the accumulation steps outside its loss, as transformers does.
            total = total + (loss / case.micro if trainer == "rloo" else loss)
        (grad_BT,) = torch.autograd.grad(total, made.logp_BT)
        grad_BT = torch.where(case.mask_BT, grad_BT, 0.0)
        out.append(Outcome(advantage_B, float(total.detach()), grad_BT))
    return out


# ---- ours ----

REWARD_NAMES = ("r0", "r1", "r2")


@functools.lru_cache(maxsize=1024)
def make_groups(case: Case) -> Batch:
    rewards = [
        Reward(name, weight, 1.0, None)
        for name, weight in zip(REWARD_NAMES, case.weight_K, strict=False)
    ]
    groups = []
    for p in range(case.rows // case.group_size):
        completions, scores = [], []
        for g in range(case.group_size):
            b = p * case.group_size + g
            n = case.lengths[b]
            logps = tuple(case.sampled_BT[b, :n].tolist())
            stop = StopReason.LENGTH if case.truncated[b] else StopReason.STOP
            completions.append(Completion((5,) * n, logps, stop, 0, g, "text"))
            verdicts = {
                reward.name: PartScore(ScoreStatus.SCORED, value)
                for reward, value in zip(rewards, case.reward_BK[b], strict=True)
            }
            scores.append(combine(rewards, verdicts))
        prompt = Prompt(f"p{p}", p, (5,), "p")
        groups.append(Group(prompt, tuple(completions), tuple(scores)))
    return make_batch(groups)


@functools.cache
def _method(spec: str) -> Method:
    method = resolve(json.loads(spec))
    assert isinstance(method, Method)
    return method


def our_credit(case: Case, method: Method, batch: Batch) -> Credit:
    weights = dict(zip(REWARD_NAMES, case.weight_K, strict=False))
    standing = stand(method, batch, max_new_tokens=CAP, weights=weights)
    facts = Facts(
        torch.where(batch.mask_BT, case.old_BT, 0.0), torch.where(batch.mask_BT, case.ref_BT, 0.0)
    )
    return assign(method, batch, standing, facts)


def ours(
    case: Case, name: str, changes: Mapping[str, Any], *, inside: Sequence[int] | None = None
) -> Outcome:
    """Our advantages, loss and gradient; `inside` are the rows of one optimizer step of several."""
    spec = {"name": name, "group_size": case.group_size, **changes}
    method = _method(json.dumps(spec))
    batch = make_groups(case)
    credit = our_credit(case, method, batch)
    mask_BT, present_B = batch.mask_BT, credit.signal.present_B
    if inside is not None:
        chosen_B = torch.zeros_like(present_B)
        chosen_B[list(inside)] = True
        present_B = present_B & chosen_B
    length_B = reduce.lengths(mask_BT)
    whole = reduce.denominator(
        method.reduce.kind,
        length_B=length_B,
        present_B=present_B,
        group_B=batch.group_B,
        constant=float(CAP),
    )
    grouped_B = reduce.group_lengths(length_B, present_B=present_B, group_B=batch.group_B)
    weight_BT = reduce.token_weights(
        method.reduce.kind,
        mask_BT=mask_BT,
        present_B=present_B,
        denominator=whole,
        group_length_B=grouped_B,
    )
    logp_BT = case.logp_BT.clone().requires_grad_()
    out = microbatch_loss(
        LossInputs(
            logp_BT,
            case.entropy_BT,
            case.old_BT,
            batch.sampled_logp_BT,
            case.ref_BT,
            credit.signal.advantage_BT,
            mask_BT & present_B[:, None],
            weight_BT,
        ),
        method,
    )
    (grad_BT,) = torch.autograd.grad(out.loss, logp_BT)
    return Outcome(credit.advantage_PG.reshape(-1), float(out.loss.detach()), grad_BT)
