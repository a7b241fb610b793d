"""AdamW over a module's trainable parameters: schedule, clipping, and state by parameter name.

Owns the optimizer step and its checkpointed state. Refuses to own losses and gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from surefoot.errors import CheckpointError, ModelError, NotSaved
from surefoot.models.memory import out_of_memory
from surefoot.recipe import Optim

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """AdamW (arXiv 1711.05101) with linear warm-up and a constant, linear or cosine course.

    `steps` is the run's number of rollout steps; the schedule counts those, so that epochs and
    minibatches do not change it.
    """

    def __init__(self, module: nn.Module, settings: Optim, *, steps: int) -> None:
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        if not named:
            raise ModelError("model: no parameter is trainable, so nothing would be learned")
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.settings = settings
        self.steps = steps
        self.adamw = torch.optim.AdamW(
            self.parameters,
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def rate(self, step: int) -> float:
        """Learning rate of rollout step 1, 2, ..."""
        base = self.settings.learning_rate
        warm = self.settings.warmup_steps
        if step <= warm:
            return base * step / warm
        if self.settings.schedule == "constant":
            return base
        share = (step - warm - 1) / max(1, self.steps - warm)
        if self.settings.schedule == "linear":
            return base * (1.0 - share)
        return base * 0.5 * (1.0 + math.cos(math.pi * share))

    def gradient_norm(self) -> float:
        """Global 2-norm of the gradient; non-finite if any part of it is."""
        norms = [p.grad.norm() for p in self.parameters if p.grad is not None]
        return float(torch.stack(norms).norm()) if norms else 0.0

    def step(self, *, rate: float, norm: float) -> None:
        """Scale the gradient down to max_grad_norm (its norm is `norm`) and apply it."""
        limit = self.settings.max_grad_norm
        if limit is not None and norm > limit:
            factor = limit / norm
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        self.adamw.param_groups[0]["lr"] = rate
        try:
            self.adamw.step()
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            raise NotSaved(
                "out of memory while weights were changed: some have changed and others not, so "
                "this step is not saved; the newest checkpoint is resumed from. Train an adapter "
                "(model.lora) or a smaller model, or take a machine with more memory"
            ) from error

    def clear(self) -> None:
        self.adamw.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """The moments and step counts, by parameter name; empty before the first step."""
        out: dict[str, Tensor] = {}
        for name, parameter in zip(self.names, self.parameters, strict=True):
            entry = self.adamw.state.get(parameter)
            if entry:
                for key in (*_MOMENTS, "step"):
                    out[f"{key}.{name}"] = entry[key]
        return out

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Put back what `state` gave; names that do not fit are a CheckpointError."""
        known = {f"{key}.{name}" for name in self.names for key in (*_MOMENTS, "step")}
        odd = sorted(set(state) - known)
        if odd:
            raise CheckpointError(f"the optimizer state holds {odd[0]}, which this model lacks")
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if f"step.{name}" in state:
                self.adamw.state[parameter] = {
                    key: state[f"{key}.{name}"].to(parameter.device, copy=True)
                    for key in (*_MOMENTS, "step")
                }
