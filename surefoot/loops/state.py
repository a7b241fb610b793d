"""What a run remembers between steps, and how it goes into a checkpoint and comes back.

Owns the list of things that must survive: weights, moments, the stream's cursor, counters.
Refuses to own the file protocol (`run/checkpoint`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from surefoot.data import Stream
from surefoot.errors import CheckpointError
from surefoot.learner.critic import Critic
from surefoot.learner.update import Learner
from surefoot.models import LoadedModel
from surefoot.run.checkpoint import Loaded

BENEATH = "what the adapter lies over"
"""In a checkpoint's identity: `LoadedModel.beneath`."""


@dataclass
class Progress:
    """Counters of a run; everything here is JSON."""

    step: int = 0
    """Rollout steps done; also the version of the policy's weights."""
    evaluated: int = -1
    """Last step whose weights were evaluated."""
    tokens: int = 0
    """Prompt and completion tokens seen by training so far, rejected groups included."""
    silent: int = 0
    """Steps in a row without any signal."""
    nonfinite: int = 0
    """Optimizer steps in a row refused because of a non-finite loss or gradient."""
    stale: int = 0
    """Steps in a row in which the engine sampled under other weights than the step's."""
    kl_coef: float | None = None
    """The KL coefficient of the next step, where a controller moves it."""
    warmed: int = 0
    """Steps in which the critic alone was trained."""
    warm_trail: list[float] = field(default_factory=list)
    """Its explained variance in those."""
    warm: bool = False
    """Whether the warm-up is over."""
    history: dict[str, Any] = field(default_factory=dict)
    """The averages of a history baseline."""
    quarantined: list[str] = field(default_factory=list)
    """Ids of rows that no reward can score."""
    cursor: dict[str, Any] = field(default_factory=dict)
    """The stream's place."""
    budget: int = 0
    """Tokens per micro-batch after running out of memory; 0 while they are those asked for."""
    owed: dict[str, Any] | None = None
    """A step whose evaluation was cut off, and whose row is written after it (`stepping.Step`)."""
    cost: float = 0.0
    """US dollars paid for calls of rewards with a price, those of abandoned steps included."""

    @property
    def written(self) -> int:
        """The last step whose row the ledger has, which a checkpoint may be ahead of; -1: none."""
        if self.owed is not None:
            return self.step - 1
        return -1 if self.step == 0 and self.evaluated < 0 else self.step


def tensors(learner: Learner) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of a checkpoint, by file: policy, critic if there is one, and their moments.

    Of each the weights that are trained: an adapter without its base, and of a critic that shares
    the policy's trunk the head.
    """
    out = {"policy": trained_weights(learner.scorer.model)}
    moments = learner.optimizer.state()
    if moments:
        out["optimizer"] = moments
    if learner.critic is not None:
        out["critic"] = trained_weights(learner.critic.model)
        moments = learner.critic.optimizer.state()
        if moments:
            out["critic_optimizer"] = moments
    return out


def needed_of(model: LoadedModel) -> dict[str, str]:
    """As much of `identity_of` as reading weights needs: whole weights replace those of any base,
    and an adapter says nothing without its own."""
    own = identity_of(model)
    return {name: own[name] for name in ("tokenizer", "template", BENEATH) if name in own}


def identity_of(model: LoadedModel) -> dict[str, str]:
    """What a checkpoint says of the model that it belongs to."""
    template = model.template
    own = {
        "model": model.hash,
        "tokenizer": template.tokenizer_identity,
        "template": template.identity,
    }
    return own if model.beneath is None else {**own, BENEATH: model.beneath}


def trained_weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What training moves of a module, by name."""
    return {n: p.detach() for n, p in module.named_parameters() if p.requires_grad}


def restore(
    loaded: Loaded,
    learner: Learner,
    stream: Stream,
    *,
    other_data: bool = False,
    make_critic: Callable[[], Critic] | None = None,
) -> Progress:
    """Put a verified checkpoint back into a freshly assembled learner and stream.

    `make_critic` belongs to a row that trains without a critic at first: the learner then has one
    afterwards iff the checkpoint has. Without it, a checkpoint that lacks the critic is refused.
    """
    load_policy(learner.scorer.model, loaded)
    if make_critic is not None:
        _match_critic(loaded, learner, make_critic)
    if learner.critic is not None:
        load_weights(learner.critic.model, loaded, "critic")
        if "critic_optimizer" in loaded.names:
            learner.critic.optimizer.restore(loaded.tensors("critic_optimizer"))
    if "optimizer" in loaded.names:
        learner.optimizer.restore(loaded.tensors("optimizer"))
    progress = progress_of(loaded)
    stream.restore(progress.cursor, other_data=other_data)
    return progress


def _match_critic(loaded: Loaded, learner: Learner, make_critic: Callable[[], Critic]) -> None:
    if "critic" not in loaded.names:
        learner.critic = learner.scorer.value_head = None
    elif learner.critic is None:
        learner.critic = make_critic()


def load_policy(model: torch.nn.Module, loaded: Loaded) -> None:
    """Copy a checkpoint's policy into a model of the same shape."""
    load_weights(model, loaded, "policy")


def load_weights(model: torch.nn.Module, loaded: Loaded, part: str) -> None:
    """Copy one part of a checkpoint, `policy` or `critic`, into a module of the same shape."""
    if part not in loaded.names:
        raise CheckpointError(
            f"{loaded.path}: holds no {part}; this is another method's checkpoint"
        )
    weights = loaded.tensors(part)
    parameters = trained_weights(model)
    odd = sorted(set(weights) ^ set(parameters))
    if odd:
        raise CheckpointError(
            f"{loaded.path}: the checkpoint and the model differ in parameter {odd[0]}; this is "
            "the checkpoint of another model"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            if parameter.shape != weights[name].shape:
                raise CheckpointError(
                    f"{loaded.path}: parameter {name} has shape {tuple(weights[name].shape)}, the "
                    f"model's has {tuple(parameter.shape)}"
                )
            parameter.copy_(weights[name])


def progress_of(loaded: Loaded) -> Progress:
    """The counters of a checkpoint."""
    return _progress(loaded.state, str(loaded.path))


def _progress(state: Mapping[str, Any], where: str) -> Progress:
    try:
        return Progress(**state)
    except TypeError as error:
        raise CheckpointError(
            f"{where}: state.json does not have the fields of this version ({error}); resume with "
            "the version that wrote it"
        ) from error
