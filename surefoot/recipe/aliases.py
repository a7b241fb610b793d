"""Names that TRL's users bring: accepted where the meaning is identical, explained elsewhere.

Owns the two tables. An alias stands at the top level of a recipe (or of an override).
Refuses to own values: after `expand`, only our own keys are left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from surefoot.errors import RecipeError

Changes = dict[str, Any]

_SAME: Mapping[str, str] = {
    "model_name_or_path": "model.path",
    "gradient_checkpointing": "model.gradient_checkpointing",
    "num_generations": "method.group_size",
    "delta": "method.gate.cap",
    "num_iterations": "method.epochs",
    "importance_sampling_level": "method.ratio.level",
    "sapo_temperature_pos": "method.gate.positive",
    "sapo_temperature_neg": "method.gate.negative",
    "max_completion_length": "rollout.max_new_tokens",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "learning_rate": "optim.learning_rate",
    "warmup_steps": "optim.warmup_steps",
    "adam_epsilon": "optim.eps",
    "weight_decay": "optim.weight_decay",
    "max_grad_norm": "optim.max_grad_norm",
    "output_dir": "run.dir",
    "max_steps": "run.steps",
    "num_train_epochs": "run.epochs",
    "seed": "run.seed",
    "eval_steps": "run.eval_every",
    "save_steps": "run.checkpoint_every",
    "save_total_limit": "run.keep",
}

COUNTS_OPTIMIZER_STEPS = ("max_steps", "warmup_steps", "eval_steps", "save_steps")
"""TRL counts optimizer steps; ours are rollout steps. The same only if one makes one."""


def _top_k(value: Any) -> Changes:
    return {"rollout.top_k": 0 if value is None else value}


def _min_p(value: Any) -> Changes:
    return {"rollout.min_p": 0.0 if value is None else value}


def _epsilon(value: Any) -> Changes:
    return {"method.gate.low": value, "method.gate.high": value}


def _reduce(value: Any) -> Changes:
    words = {
        "grpo": "sequence_mean",
        "dapo": "token_mean",
        "bnpo": "token_mean",
        "dr_grpo": "constant",
    }
    return {"method.reduce": _word("loss_type", value, words, "set method.reduce or method.gate")}


def _scale(value: Any) -> Changes:
    words = {
        True: "group_std",
        "group": "group_std",
        False: "none",
        "none": "none",
        "batch": {"kind": "batch_std", "of": "rewards"},
    }
    return {"method.scale": _word("scale_rewards", value, words, "set method.scale")}


def _schedule(value: Any) -> Changes:
    words = {
        "constant": "constant",
        "constant_with_warmup": "constant",
        "linear": "linear",
        "cosine": "cosine",
    }
    return {"optim.schedule": _word("lr_scheduler_type", value, words, "set optim.schedule")}


def _trackers(value: Any) -> Changes:
    if value in (None, "none", []):
        return {"run.trackers": []}
    return {"run.trackers": value}


def _word(alias: str, value: Any, words: Mapping[Any, Any], mend: str) -> Any:
    if not isinstance(value, str | bool) or value not in words:
        known = ", ".join(str(word).lower() for word in words)
        raise RecipeError(f"{alias}: {value!r} has no equal here (known: {known}); {mend}")
    return words[value]


_TURNED: Mapping[str, Callable[[Any], Changes]] = {
    "top_k": _top_k,
    "min_p": _min_p,
    "epsilon": _epsilon,
    "epsilon_high": lambda value: {"method.gate.high": value},
    "loss_type": _reduce,
    "scale_rewards": _scale,
    "lr_scheduler_type": _schedule,
    "report_to": _trackers,
    "beta": lambda value: {"method.kl.coef": value},
    "adam_beta1": lambda value: {"optim.betas": [value, 0.999]},
    "adam_beta2": lambda value: {"optim.betas": [0.9, value]},
}

_NULL_MEANS_OFF = frozenset({"top_k", "min_p", "report_to"})

ALIASES: tuple[str, ...] = (*_SAME, *_TURNED)
"""Every accepted name."""

_EXAMPLES: Mapping[str, str] = {
    "loss_type": "grpo",
    "scale_rewards": "group",
    "lr_scheduler_type": "constant",
    "report_to": "none",
}


def keys_of(name: str) -> tuple[str, ...]:
    """The recipe keys that the accepted name `name` sets."""
    if name in _SAME:
        return (_SAME[name],)
    return tuple(_TURNED[name](_EXAMPLES.get(name, 0.5)))


_COUNTS_COMPLETIONS = (
    "counts completions per device; set rollout.prompts_per_step (prompts per step, each with "
    "method.group_size completions) and, for memory alone, optim.tokens_per_microbatch"
)

EXPLAINED: Mapping[str, str] = {
    "per_device_train_batch_size": _COUNTS_COMPLETIONS,
    "gradient_accumulation_steps": _COUNTS_COMPLETIONS,
    "generation_batch_size": _COUNTS_COMPLETIONS,
    "per_device_eval_batch_size": "evaluation decodes as many rows as rollout.rows allows",
    "steps_per_generation": "set method.minibatches, the optimizer steps per pass over a rollout",
    "max_prompt_length": (
        "cuts long prompts in TRL; prompts are never cut here: set max_prompt_tokens of the "
        "data source, and longer ones are dropped and counted"
    ),
    "mask_truncated_completions": (
        "keeps the masked sample in the group's mean in TRL; set method.truncated to mask, "
        "which removes it there too"
    ),
    "logging_steps": "every step is logged; leave it out",
    "bf16": "set model.compute to bfloat16",
    "fp16": "float16 is not offered; set model.compute to bfloat16",
    "dataset_name": "set data.source",
    "reward_funcs": "set reward, a list of {use, weight}",
    "reward_weights": "set weight in each entry of reward",
    "run_name": "set run.dir; its last part is the name",
    "use_vllm": "set rollout.engine",
    "use_peft": "set model.lora",
    "lora_r": "set model.lora.rank",
    "lora_alpha": "set model.lora.alpha",
    "trust_remote_code": "add remote_code to run.allow",
    "warmup_ratio": "set optim.warmup_steps",
    "num_generations_eval": "evaluation takes one greedy completion per prompt; leave it out",
    "eval_strategy": "set run.eval_every, in steps; 0 is never",
    "save_strategy": "set run.checkpoint_every, in steps; 0 is only at the end",
    "logging_strategy": "every step is logged; leave it out",
    "log_completions": "completions are always kept, in samples.jsonl; leave it out",
    "resume_from_checkpoint": "the same call goes on with the run in run.dir; leave it out",
    "remove_unused_columns": "every column travels to the rewards; leave it out",
    "shuffle_dataset": "the order of the prompts is drawn from run.seed; leave it out",
    "data_seed": "set run.seed",
    "push_to_hub": "write the model with surefoot export, and upload that directory",
    "disable_dropout": "dropout is always off; leave it out",
    "use_bias_correction_kl": "set method.kl.estimator to k3_ratio (true) or k3 (false)",
    "off_policy_mask_threshold": "set method.terms to [{kind: stale_mask, delta: NUMBER}]",
    "entropy_coef": "set method.terms to [{kind: entropy, weight: NUMBER}]",
    "multi_objective_aggregation": (
        "set method.scale to {kind: group_std, per_part: true} for normalize_then_sum"
    ),
    "gradient_checkpointing_kwargs": "set model.gradient_checkpointing",
    "model_init_kwargs": "set the keys of model, such as model.dtype and model.revision",
    "generation_kwargs": "set the keys of rollout",
    "train_dataset": "pass data= to surefoot.train, or set data.source",
    "eval_dataset": "pass eval_data= to surefoot.train, or set data.eval_size",
    "processing_class": "pass tokenizer= to surefoot.train",
}
"""Names that mean something else here; the message says what to set."""


def expand(name: str, value: Any, *, given: Mapping[str, Any]) -> Changes:
    """The keys that alias `name` sets; `given` are all aliases given beside it.

    An empty result means that TRL's `null` stands for its default, which is ours too.
    """
    if value is None and name not in _NULL_MEANS_OFF:
        return {}
    if name in _SAME:
        return {_SAME[name]: value}
    changes = _TURNED[name](value)
    if name == "epsilon" and given.get("epsilon_high") is not None:
        del changes["method.gate.high"]
    if name == "adam_beta1" and "adam_beta2" in given:
        changes["optim.betas"][1] = given["adam_beta2"]
    if name == "adam_beta2" and "adam_beta1" in given:
        changes["optim.betas"][0] = given["adam_beta1"]
    return changes


def note(name: str, changes: Changes) -> str:
    """What is said of an accepted alias."""
    keys = " and ".join(changes)
    text = f"{name} is TRL's name for {keys}"
    if name == "loss_type":
        text += "; the denominator is that of the whole optimizer step, not of a micro-batch"
    return text
