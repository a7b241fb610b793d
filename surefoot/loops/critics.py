"""The critic of a run: what it stands on, and what it starts from.

Owns the choice between a copy of the policy, another model and the policy's own layers, and reading
a critic that an earlier run saved.
Refuses to own the value model and its loss (`learner/critic`), and when a critic is made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel

from surefoot import methods
from surefoot.errors import CheckpointError
from surefoot.learner.critic import Critic, SharedValue, ValueModel, cut_layers, value_backbone
from surefoot.learner.foreign import check_backbone
from surefoot.learner.layouts import NAMES, Name
from surefoot.learner.optim import Optimizer
from surefoot.learner.scorer import Scorer
from surefoot.loops.state import BENEATH, load_weights
from surefoot.methods import Method
from surefoot.models import LoadedModel
from surefoot.models.backbone import load_backbone
from surefoot.models.load import DTYPES
from surefoot.models.lora import add_adapter, make_trainable, same_kind
from surefoot.models.recompute import recompute_activations
from surefoot.recipe import Recipe
from surefoot.run import manifest
from surefoot.run.checkpoint import Loaded, load_latest
from surefoot.run.directory import RunDirectory


def make_critic(
    recipe: Recipe, row: Method, policy: LoadedModel, scorer: Scorer, *, resumes: bool = False
) -> Critic:
    """The critic of a row that has one, at any step: a copy is one of the policy as it is now.

    `scorer` is the one that trains the policy. `resumes`: a checkpoint's weights follow, so those
    of critic.init are not asked for.
    """
    assert isinstance(row.critic, methods.Critic)
    model, layouts = _value_model(recipe, policy, scorer)
    rate = recipe.critic.learning_rate or recipe.optim.learning_rate
    settings = recipe.optim.model_copy(update={"learning_rate": rate})
    optimizer = Optimizer(model, settings, steps=int(recipe.run.steps or 0))
    critic = Critic(model, optimizer, row.critic.loss_weight, row.critic.clip, layouts)
    if recipe.critic.init is not None and not resumes:
        _start_from(critic, recipe, policy)
    return critic


def reads_source(recipe: Recipe) -> bool:
    """Whether the critic is more than a copy of the policy, so that making it can be refused."""
    critic = recipe.critic
    return not (critic.path is None and critic.layers is None and critic.init is None)


def critic_maker(
    recipe: Recipe, row: Method, policy: LoadedModel, scorer: Scorer
) -> Callable[[], Critic] | None:
    """What makes the critic at resume for a row that trains without one at first; else None."""
    if not isinstance(row.warmup, methods.MethodWarmup):
        return None
    return partial(make_critic, recipe, row, policy, scorer, resumes=True)


def _value_model(
    recipe: Recipe, policy: LoadedModel, scorer: Scorer
) -> tuple[ValueModel | SharedValue, tuple[Name, ...]]:
    """The model, and the layouts that are right for it (a copy takes what the policy takes)."""
    if recipe.critic.share_trunk:
        return SharedValue(scorer), NAMES
    foreign = recipe.critic.path is not None
    if foreign:
        backbone = cut_layers(load_backbone(recipe, policy), recipe.critic.layers)
        _as_the_policy(backbone, recipe, policy)
    else:
        backbone = value_backbone(policy.model, layers=recipe.critic.layers)
    make_trainable(backbone)
    model = ValueModel(backbone, compute=DTYPES[recipe.model.compute])
    if not foreign:
        return model, NAMES
    vocabulary = policy.model.get_output_embeddings().weight.shape[0]
    return model, check_backbone(model, vocabulary=vocabulary, seed=recipe.run.seed)


def _as_the_policy(backbone: PreTrainedModel, recipe: Recipe, policy: LoadedModel) -> None:
    """Give another model's backbone what the policy has: an adapter, recomputed activations."""
    if recipe.model.gradient_checkpointing:
        recompute_activations(backbone, key="critic.path")
    if recipe.model.lora is not None:
        add_adapter(
            backbone,
            same_kind(policy.model, recipe.model.lora),
            seed=recipe.run.seed,
            base_dir=recipe.base_dir,
            key="critic.path: model.lora",
        )


def _start_from(critic: Critic, recipe: Recipe, policy: LoadedModel) -> None:
    """Put a saved critic's weights in, its head too; the moments start afresh."""
    init = str(recipe.critic.init)
    saved = _saved(init, recipe.base_dir)
    if "critic" not in saved.names:
        raise CheckpointError(
            f"critic.init: {saved.path} holds no critic; name a run of a row with one, such as ppo"
        )
    if not any(name.startswith("model.") for name in saved.tensors("critic")):
        raise CheckpointError(
            f"critic.init: {saved.path} holds a head on its policy's own layers "
            "(critic.share_trunk), which is no critic without them; name another run"
        )
    beneath = saved.identity.get(BENEATH)
    both = recipe.critic.path is None and beneath is not None and policy.beneath is not None
    if both and beneath != policy.beneath:
        raise CheckpointError(
            f"critic.init: {saved.path} holds an adapter for another base or other model.lora than "
            "this run's; set model.path and model.lora as in the run that saved it"
        )
    try:
        load_weights(critic.model, saved, "critic")
    except CheckpointError as error:
        raise CheckpointError(
            f"critic.init: {error}; set model.path or critic.path, and critic.layers, as in the "
            "run that saved it"
        ) from error


def _saved(init: str, base_dir: Path | None) -> Loaded:
    """The newest whole checkpoint of a run directory, or the checkpoint directory itself."""
    wanted = Path(init).expanduser()
    tried = [wanted] if base_dir is None else [base_dir / wanted, wanted]
    place = next((folder for folder in tried if folder.is_dir()), None)
    if place is None:
        raise CheckpointError(
            f"critic.init: there is no directory {init}; name a run directory or one of its "
            "checkpoints (a relative path starts at the recipe's directory, then at the working "
            "directory)"
        )
    if (place / manifest.MANIFEST).is_file():
        return _whole(place)
    found = load_latest(RunDirectory(place), rename_damaged=False)
    if found is None:
        raise CheckpointError(
            f"critic.init: {init} holds no checkpoint; name a run directory or one of its "
            "checkpoints"
        )
    return found


def _whole(place: Path) -> Loaded:
    """One checkpoint directory, wherever it lies; every file of it is verified."""
    # A checkpoint is known by its name, which `.` and a link do not show.
    place = place.resolve()
    try:
        facts = manifest.verify(place)
    except manifest.Damaged as damage:
        raise CheckpointError(
            f"critic.init: {place} is damaged ({damage}); name another checkpoint"
        ) from damage
    suffix = manifest.TENSORS
    names = tuple(name.removesuffix(suffix) for name in facts["files"] if name.endswith(suffix))
    return Loaded(place, facts["step"], {}, facts["identity"], names)
