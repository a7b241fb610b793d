"""A reward model as a standard sequence-classification directory.

Owns putting trained weights into the classifier class of the policy's architecture, and where a
normalised model keeps its bias, for which such a class has no place.
Refuses to own training (`loops/supervised`), and reading one as a reward (`reward/model`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from surefoot.errors import ModelError
from surefoot.models.export import Finish, check_destination, save_whole
from surefoot.models.load import LoadedModel

BIAS_KEY = "surefoot_reward_bias"
"""In the config: added to the classifier's score by readers who know it; it orders nothing."""


def export_reward_model(
    policy: LoadedModel,
    weights: Mapping[str, Tensor],
    destination: Path,
    *,
    gain: float = 1.0,
    bias: float = 0.0,
    finish: Finish | None = None,
) -> Path:
    """Write a directory that `AutoModelForSequenceClassification` loads, whole or not at all.

    `weights` are `model.*` (the backbone, by its own names) and `head.weight`; `policy` is the
    model that training began from, for its architecture, tokenizer and template. The gain is
    multiplied into the score.
    """
    check_destination(destination)
    model = classifier_of(policy.model)
    backbone = dict(model.base_model.named_parameters())
    given = {name.removeprefix("model."): w for name, w in weights.items() if name[:6] == "model."}
    odd = sorted(set(backbone) ^ set(given))
    if odd:
        raise ModelError(
            f"export: the checkpoint and {type(model).__name__} differ in parameter {odd[0]}"
        )
    with torch.no_grad():
        for name, parameter in backbone.items():
            parameter.copy_(given[name])
        model.score.weight.copy_(gain * weights["head.weight"])
    setattr(model.config, BIAS_KEY, bias)
    return save_whole(model, policy.template.tokenizer, destination, finish=finish)


def classifier_of(policy: PreTrainedModel) -> PreTrainedModel:
    """An untrained classifier with one score, of the policy's architecture and dtype."""
    config = copy.deepcopy(policy.config)
    config.num_labels = 1
    if config.pad_token_id is None:
        ends = config.eos_token_id
        # Plain transformers needs some padding id to find the last token of a batch's rows.
        config.pad_token_id = ends[0] if isinstance(ends, list) else ends
    try:
        model = AutoModelForSequenceClassification.from_config(config, dtype=policy.dtype)
    except ValueError as error:
        raise ModelError(
            f"model.path: transformers has no sequence classifier for {type(policy).__name__}, so "
            "a reward model of it could not be saved; start from another architecture"
        ) from error
    if not isinstance(getattr(model, "score", None), torch.nn.Linear):
        raise ModelError(
            f"model.path: {type(model).__name__} does not score its last token, so a reward model "
            "of it would not be a standard one; start from a decoder such as Llama or Qwen"
        )
    return model
