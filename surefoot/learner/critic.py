"""The critic: a value for the state before each trained token, and the step that trains it.

Owns the value head on a backbone of its own, cutting the backbone to its lower layers, and the loss
of a micro-batch. The layouts are the policy's.
Refuses to own advantages and returns (`loops/credit`) and the mathematics (`objective/value`).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surefoot.errors import ModelError
from surefoot.learner.batch import scatter
from surefoot.learner.layouts import Microbatch
from surefoot.learner.optim import Optimizer
from surefoot.learner.scorer import Backbone
from surefoot.objective import value


class ValueModel(Backbone):
    """A backbone with one number per state, in float32; the head starts at zero."""

    def __init__(self, model: PreTrainedModel, *, compute: torch.dtype) -> None:
        super().__init__(model, compute=compute)
        wide = torch.float64 if model.dtype == torch.float64 else torch.float32
        self.head = nn.Linear(model.config.get_text_config().hidden_size, 1, dtype=wide)
        self.head.to(model.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: Microbatch) -> Tensor:
        """V of the state before each scored token, shape N, in units of reward."""
        out: Tensor = self.head(self.hidden(batch).to(self.head.weight.dtype))
        return out[:, 0]


@dataclass
class Critic:
    """The value model and its own optimizer."""

    model: ValueModel
    optimizer: Optimizer
    loss_weight: float
    clip: float | None

    def values(self, batch_mask_BT: Tensor, passes: list[Microbatch]) -> Tensor:
        """V at every token of the passes, without gradient; float64 [B, T], 0 elsewhere."""
        out_BT = torch.zeros(batch_mask_BT.shape, dtype=torch.float64)
        with torch.no_grad():
            for part in passes:
                out_BT[part.rows_N, part.columns_N] = self.model(part).double().cpu()
        return out_BT

    def accumulate(
        self,
        part: Microbatch,
        *,
        old_value_BT: Tensor,
        return_BT: Tensor,
        mask_BT: Tensor,
        tokens: int,
    ) -> dict[str, float]:
        """Add the gradient of a micro-batch to that of the optimizer step.

        The tensors are those of the whole batch; `tokens` are the trained tokens of the whole
        optimizer step. Returns sums over the micro-batch's trained tokens.
        """
        rows = part.row_list
        value_bT = scatter(self.model(part), part, rows=rows, width=mask_BT.shape[1])
        place = value_bT.device
        mask_bT = mask_BT[rows].to(place)
        out = value.value_loss(
            value_bT,
            old_value_BT[rows].to(place),
            return_BT[rows].to(place),
            mask_BT=mask_bT,
            clip=self.clip,
        )
        total = out.per_token_BT.sum()
        (self.loss_weight * total / max(1, tokens)).backward()
        return {
            "value_loss": float(total.detach()),
            "value_clipped": float(out.is_clipped_BT.sum()),
            "value_tokens": float(mask_bT.sum()),
        }


def value_backbone(model: PreTrainedModel, *, layers: int | None) -> PreTrainedModel:
    """A copy of a policy without its LM head, cut to its lower `layers` (None: all)."""
    own: PreTrainedModel = copy.deepcopy(model.base_model)
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
