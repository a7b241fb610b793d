"""Telling that memory ran out from every other failure of torch.

Owns that one question, and the words for when nothing smaller is left.
Refuses to own what is done about it: smaller pieces, where they are made.
"""

from __future__ import annotations

import torch


def out_of_memory(error: BaseException) -> bool:
    """Whether torch, on a CPU or a GPU, could not get the memory that it asked for."""
    return isinstance(
        error, MemoryError | torch.OutOfMemoryError
    ) or "can't allocate memory" in str(error)


def too_small(budget: int) -> str:
    """What to tell of a micro-batch of `budget` tokens that cannot be cut and does not fit."""
    return (
        f"out of memory with {budget} tokens per micro-batch, which is as small as one gets; set "
        "model.gradient_checkpointing, train an adapter (model.lora), take shorter texts, a "
        "smaller model or a machine with more memory"
    )
