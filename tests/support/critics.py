"""Critics as a run makes them, on tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from support.tiny import llama_config, make_tokenizer
from surefoot.learner.critic import Critic, ValueModel
from surefoot.learner.layouts import Bundle, build
from surefoot.learner.scorer import Scorer
from surefoot.loops.critics import make_critic
from surefoot.methods import Method
from surefoot.models import load_model
from surefoot.recipe import Recipe, load


def recipe(policy: Path, **sections: Any) -> Recipe:
    """A recipe of ppo on a policy; sections replace what is here."""
    return load(
        {
            "model": {"path": str(policy)},
            "data": {"source": "addition", "max_operand": 9},
            "reward": [{"use": "numeric"}],
            "method": "ppo",
            "rollout": {"max_new_tokens": 8},
            "run": {"steps": 2, "eval_every": 0},
            **sections,
        }
    )


def made(asked: Recipe, *, resumes: bool = False) -> Critic:
    """The critic of a recipe, as a run would make it."""
    policy = load_model(asked)
    dtype = policy.model.dtype
    scorer = Scorer(policy.model, compute=dtype, head_dtype=dtype, temperature=1.0)
    assert isinstance(asked.method, Method)
    return make_critic(asked, asked.method, policy, scorer, resumes=resumes)


def kept(model: PreTrainedModel, folder: Path) -> Path:
    """A model directory with the tiny tokenizer."""
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def reward_model(*, seed: int = 5) -> PreTrainedModel:
    model = AutoModelForSequenceClassification.from_config(llama_config(num_labels=1))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
    return model


def body(critic: Critic) -> dict[str, Tensor]:
    assert isinstance(critic.model, ValueModel)
    return dict(critic.model.model.named_parameters())


def values(critic: Critic) -> list[float]:
    part = build("rows", [Bundle((5, 6, 7), ((8, 9), (10, 11, 12)), (0, 1))])
    with torch.no_grad():
        return critic.model(part).tolist()
