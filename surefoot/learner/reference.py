"""The reference under an adapter: the policy's own module, switched back to where it started.

Owns a scorer that shares its weights with the policy's. Refuses to own the switch (`models/lora`).
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from surefoot.learner.layouts import Microbatch
from surefoot.learner.scorer import Scored, Scorer
from surefoot.models.lora import StartingAdapter


class SharedReference(Scorer):
    """Scores as the policy does when this is made; only without gradients."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        compute: torch.dtype,
        head_dtype: torch.dtype,
        temperature: float,
    ) -> None:
        super().__init__(model, compute=compute, head_dtype=head_dtype, temperature=temperature)
        self._start = StartingAdapter(model)

    def forward(self, batch: Microbatch) -> Scored:
        assert not torch.is_grad_enabled(), "the backward pass would meet the trained adapter"
        with self._start.in_place():
            return super().forward(batch)
