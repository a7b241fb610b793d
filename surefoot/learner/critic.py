"""The critic: a value for the state before each trained token, and the step that trains it.

Owns the value model on a backbone of its own or on the policy's, cutting a backbone to its lower
layers, and the loss of a micro-batch.
Refuses to own advantages and returns (`loops/credit`), the mathematics (`objective/value`) and
where a backbone comes from (`models`, `loops/critics`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surefoot.errors import ModelError
from surefoot.learner.batch import Batch, Packing, scatter
from surefoot.learner.layouts import NAMES, Bundle, Microbatch, Name, microbatches
from surefoot.learner.optim import Optimizer
from surefoot.learner.scorer import Backbone, Scorer, ValueHead
from surefoot.objective import value


class ValueModel(Backbone):
    """A backbone of its own with one number per state, in float32; the head starts at zero."""

    def __init__(self, model: PreTrainedModel, *, compute: torch.dtype) -> None:
        super().__init__(model, compute=compute)
        self.head = ValueHead(model)

    def forward(self, batch: Microbatch) -> Tensor:
        """V of the state before each scored token, shape N, in units of reward."""
        return self.head.of(self.hidden(batch))


class SharedValue(nn.Module):
    """A value head on the policy's own states; its parameters are those of the head alone."""

    def __init__(self, scorer: Scorer) -> None:
        super().__init__()
        self.head = ValueHead(scorer.model)
        scorer.value_head = self.head
        # A tuple: the policy's parameters must not become this module's.
        self._trunk = (scorer,)

    def forward(self, batch: Microbatch) -> Tensor:
        """V of the state before each scored token, shape N, under a policy that stays as it is."""
        return self._trunk[0].values(batch)


@dataclass(frozen=True)
class Targets:
    """What the critic regresses on in one optimizer step; tensors of the whole batch, [B, T]."""

    old_value_BT: Tensor
    return_BT: Tensor
    mask_BT: Tensor
    tokens: int
    """Trained tokens of the whole optimizer step."""


@dataclass
class Critic:
    """The value model and its own optimizer."""

    model: ValueModel | SharedValue
    optimizer: Optimizer
    loss_weight: float
    clip: float | None
    layouts: tuple[Name, ...] = NAMES
    """Those that give the backbone's own row-by-row values."""

    @property
    def shares_trunk(self) -> bool:
        """Whether the policy's forward pass gives the values, and its backward takes their loss."""
        return isinstance(self.model, SharedValue)

    def values(self, batch_mask_BT: Tensor, passes: Sequence[Microbatch]) -> Tensor:
        """V at every token of the passes, without gradient; float64 [B, T], 0 elsewhere."""
        out_BT = torch.zeros(batch_mask_BT.shape, dtype=torch.float64)
        with torch.no_grad():
            for part in passes:
                out_BT[part.rows_N, part.columns_N] = self.model(part).double().cpu()
        return out_BT

    def after(self, batch: Batch, wanted_B: Tensor, packing: Packing) -> Tensor:
        """V of the state after the last sampled token of the wanted completions; float64 [B]."""
        length_B = torch.tensor([len(c.ids) for group in batch.groups for c in group.completions])
        parts = microbatches(
            _prolonged(batch, wanted_B),
            budget=packing.budget,
            allowed=packing.layouts,
            shape=packing.shape,
        )
        out_B = torch.zeros(batch.rows, dtype=torch.float64)
        with torch.no_grad():
            for part in parts:
                last_N = part.columns_N == length_B[part.rows_N]
                out_B[part.rows_N[last_N]] = self.model(part).double().cpu()[last_N]
        return out_B

    def loss(
        self, value_N: Tensor, part: Microbatch, targets: Targets
    ) -> tuple[Tensor, dict[str, float]]:
        """The share of a micro-batch in the loss of the optimizer step, from its values.

        Also returns sums over the micro-batch's trained tokens.
        """
        rows = part.row_list
        value_bT = scatter(value_N, part, rows=rows, width=targets.mask_BT.shape[1])
        place = value_bT.device
        mask_bT = targets.mask_BT[rows].to(place)
        out = value.value_loss(
            value_bT,
            targets.old_value_BT[rows].to(place),
            targets.return_BT[rows].to(place),
            mask_BT=mask_bT,
            clip=self.clip,
        )
        total = out.per_token_BT.sum()
        return self.loss_weight * total / max(1, targets.tokens), {
            "value_loss": float(total.detach()),
            "value_clipped": float(out.is_clipped_BT.sum()),
            "value_tokens": float(mask_bT.sum()),
        }

    def accumulate(self, part: Microbatch, targets: Targets) -> dict[str, float]:
        """Add the gradient of a micro-batch to that of the optimizer step; returns its sums.

        Under a shared trunk that of the head alone: what the trunk gets is the policy's to add.
        """
        loss, sums = self.loss(self.model(part), part, targets)
        loss.backward()
        return sums


def _prolonged(batch: Batch, wanted_B: Tensor) -> list[Bundle]:
    """The wanted completions with one token more, because no layout forwards the last one."""
    wanted = wanted_B.tolist()
    bundles: list[Bundle] = []
    first = 0
    for group in batch.groups:
        own = range(first, first + len(group.completions))
        first = own.stop
        rows = tuple(row for row in own if wanted[row])
        if rows:
            longer = tuple((*group.completions[row - own.start].ids, 0) for row in rows)
            bundles.append(Bundle(group.prompt.ids, longer, rows))
    return bundles


def value_backbone(model: PreTrainedModel, *, layers: int | None) -> PreTrainedModel:
    """A copy of a policy without its LM head, cut to its lower `layers` (None: all).

    Frozen weights, under an adapter, are the policy's own; what is trained is copied.
    """
    frozen: dict[int, Any] = {
        id(p): p for p in model.base_model.parameters() if not p.requires_grad
    }
    own: PreTrainedModel = copy.deepcopy(model.base_model, frozen)
    return cut_layers(own, layers)


def cut_layers(own: PreTrainedModel, layers: int | None) -> PreTrainedModel:
    """Keep the lower `layers` of a model without a head (None: all), in place."""
    config = own.config.get_text_config()
    have = int(config.num_hidden_layers)
    if layers is None or layers == have:
        return own
    if layers > have:
        raise ModelError(f"critic.layers: {layers}, but the model has {have}; give fewer, or none")
    stacks = [
        (name, child)
        for name, child in own.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == have
    ]
    if len(stacks) != 1:
        raise ModelError(
            f"critic.layers: the layers of {type(own).__name__} are not one list, so it cannot be "
            "cut; leave critic.layers out"
        )
    name, stack = stacks[0]
    setattr(own, name, stack[:layers])
    config.num_hidden_layers = layers
    kinds = config.to_dict().get("layer_types")
    if kinds:
        config.layer_types = list(kinds)[:layers]
    return own
