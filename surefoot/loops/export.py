"""A run's checkpoint as a directory for others: written, carded, and asked before it appears.

Owns which form it takes (model, adapter, classifier), the facts of its card, and what the run's own
model answers, for comparison.
Refuses to own the files (`models/export`), and finding the checkpoint (`runs`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from surefoot.errors import ModelError
from surefoot.loops.resuming import check_identity
from surefoot.loops.state import needed_of
from surefoot.models import OBJECT, LoadedModel, export_directory, load_model
from surefoot.models.card import FILE, Card, Kind, render
from surefoot.models.export import check_destination, export_adapter, put_weights
from surefoot.models.load import resolve_directory
from surefoot.models.lora import plain_weights
from surefoot.models.reward_model import export_reward_model
from surefoot.models.verify import Asked, Below, same_rewards, same_tokens, turn
from surefoot.recipe import DataSource, Recipe
from surefoot.records import Prompt
from surefoot.rollout import LocalEngine, Sampling
from surefoot.run.checkpoint import Loaded
from surefoot.run.directory import RunDirectory
from surefoot.run.read import number, read_environment, read_metrics

_QUESTIONS = ("What is 7 + 5?", "Name a colour.", "Write one short sentence.")
_TOKENS = 16
_VERSIONS = ("surefoot", "torch", "transformers", "peft")


def export_checkpoint(
    directory: RunDirectory, found: Loaded, recipe: Recipe, destination: Path, *, merge: bool
) -> Path:
    """Write what a run trained; nothing is left behind if plain transformers disagrees with it.

    A reward model becomes a sequence classifier; a policy a causal language model, or under
    model.lora, unless merged, an adapter.
    """
    has_lora = recipe.model.lora is not None
    if merge and not has_lora:
        raise ModelError(
            f"export: {directory.path} trained every weight of its model, so there is no adapter "
            "to merge; leave --merge out"
        )
    check_destination(destination)
    loaded = load_model(recipe, kept=directory.reference)
    check_identity(found, needed_of(loaded))
    if "reward_model" in found.names:
        return _reward_model(directory, found, recipe, loaded, destination)
    weights = found.tensors("policy")
    remote = "remote_code" in recipe.run.allow
    below = _below(directory, recipe) if has_lora and not merge else None

    def finish(folder: Path) -> None:
        asked = _answers(loaded)
        verified = same_tokens(folder, loaded, asked, below=below, remote_code=remote)
        kind: Kind = "model" if below is None else "adapter"
        _write_card(folder, _card(directory, found, recipe, kind, verified))

    if below is None:
        return export_directory(loaded, weights, destination, finish=finish)
    return export_adapter(
        loaded,
        weights,
        destination,
        base=below.path if recipe.model.path == OBJECT else recipe.model.path,
        revision=recipe.model.revision,
        finish=finish,
    )


def _reward_model(
    directory: RunDirectory,
    found: Loaded,
    recipe: Recipe,
    loaded: LoadedModel,
    destination: Path,
) -> Path:
    saved = found.tensors("reward_model")
    backbone = loaded.model.base_model
    put_weights(backbone, _under(saved, "model."))
    scale = {"gain": 1.0, "bias": 0.0}
    if "normalization" in found.names:
        scale = {name: float(value) for name, value in found.tensors("normalization").items()}
    head = saved["head.weight"]
    plain = {f"model.{name}": weight for name, weight in plain_weights(backbone)}

    def finish(folder: Path) -> None:
        asked = [
            (ids, scale["gain"] * _reward(backbone, head, ids))
            for ids in (tuple(_ids(loaded, text)) for text in _QUESTIONS)
        ]
        remote = "remote_code" in recipe.run.allow
        verified = same_rewards(folder, asked, remote_code=remote)
        _write_card(folder, _card(directory, found, recipe, "classifier", verified))

    return export_reward_model(
        loaded, {**plain, "head.weight": head}, destination, finish=finish, **scale
    )


def _under(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}


@torch.no_grad()
def _reward(backbone: torch.nn.Module, head: Tensor, ids: tuple[int, ...]) -> float:
    state = backbone(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
    return float(head[0] @ state.to(head.dtype))


def _below(directory: RunDirectory, recipe: Recipe) -> Below:
    """The model that the adapter was trained over."""
    section = recipe.model
    if section.path == OBJECT:
        return Below(str(directory.reference.resolve()), None)
    return Below(resolve_directory(section.path, recipe.base_dir), section.revision)


def _ids(loaded: LoadedModel, text: str) -> tuple[int, ...]:
    template = loaded.template
    return template.encode(turn(text) if template.has_template else text)


def _answers(loaded: LoadedModel) -> list[Asked]:
    """What the local engine says greedily, in the precision of the weights."""
    engine = LocalEngine(
        loaded.model,
        loaded.template.tokenizer,
        settings=Sampling(temperature=1.0, max_new_tokens=_TOKENS),
        stop_ids=loaded.stop_ids,
        dtype=loaded.model.dtype,
        rows=len(_QUESTIONS),
        seed=0,
    )
    prompts = [
        Prompt(id=str(place), position=place, ids=_ids(loaded, text), text=text)
        for place, text in enumerate(_QUESTIONS)
    ]
    groups = engine.sample(prompts, 1, purpose="export", greedy=True)
    return [
        Asked(group.prompt.text, group.prompt.ids, group.completions[0].ids) for group in groups
    ]


def _card(
    directory: RunDirectory, found: Loaded, recipe: Recipe, kind: Kind, verified: str
) -> Card:
    evaluated, evaluation = _evaluation(directory, found.step)
    section, lora = recipe.model, recipe.model.lora
    at = "" if section.revision is None else f" at {section.revision}"
    path = section.path
    is_hub = path != OBJECT and not Path(resolve_directory(path, recipe.base_dir)).is_dir()
    adapter = None
    if lora is not None:
        start = f"from {lora.path}" if lora.path else f"rank {lora.rank}, alpha {lora.alpha:g}"
        adapter = f"LoRA, {start}" + ("" if kind == "adapter" else ", merged")
    return Card(
        name=directory.name,
        kind=kind,
        # The word for an earlier stage stays right when the chain is moved.
        base=recipe.stages.get("model.path", f"{path}{at}"),
        hub_id=path if is_hub else None,
        method=recipe.method.name,
        adapter=adapter,
        data=[_source(entry) for entry in recipe.data] or ["rows passed from Python"],
        step=found.step,
        steps=recipe.run.steps,
        seed=recipe.run.seed,
        evaluation=evaluation,
        evaluated=evaluated,
        versions=_versions(directory),
        verified=verified,
    )


def _source(entry: DataSource) -> str:
    words = [f"`{entry.source}`"]
    words += [f"split {entry.split}"] if entry.split else []
    words += ["evaluation alone"] if entry.role == "eval" else []
    return ", ".join(words)


def _evaluation(directory: RunDirectory, step: int) -> tuple[int | None, dict[str, float]]:
    """The last one that the ledger has up to a step."""
    if not directory.metrics.is_file():
        return None, {}
    for row in reversed(read_metrics(directory.path)):
        names = [name for name in row if name.startswith("eval/")]
        seen = {name: value for name in names if (value := number(row, name)) is not None}
        if seen and row["step"] <= step:
            return row["step"], seen
    return None, {}


def _versions(directory: RunDirectory) -> dict[str, str]:
    versions = read_environment(directory.path).get("versions")
    known = versions if isinstance(versions, dict) else {}
    return {name: str(known[name]) for name in _VERSIONS if known.get(name)}


def _write_card(folder: Path, card: Card) -> None:
    (folder / FILE).write_text(render(card), encoding="utf-8")
