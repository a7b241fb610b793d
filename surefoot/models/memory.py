"""Telling that memory ran out from every other failure of torch.

Owns that one question, and the words for when nothing smaller is left.
Refuses to own what is done about it: smaller pieces, where they are made.
"""

from __future__ import annotations

import torch

_WORDS = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What the CPU's allocator, the driver and cuBLAS say; torch gives these no class of their own."""

LEAST_BUDGET = 64
"""Tokens a micro-batch is never cut below."""


def out_of_memory(error: BaseException) -> bool:
    """Whether torch, on a CPU or a GPU, could not get the memory that it asked for."""
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or any(words in str(error) for words in _WORDS)


def halved(budget: int) -> int | None:
    """A smaller budget of tokens; None where it cannot get smaller."""
    return None if budget <= LEAST_BUDGET else max(LEAST_BUDGET, budget // 2)


def too_small(budget: int) -> str:
    """What to tell of a micro-batch of `budget` tokens that cannot be cut and does not fit."""
    return (
        f"out of memory with {budget} tokens per micro-batch, which is as small as one gets; set "
        "model.gradient_checkpointing, train an adapter (model.lora), take shorter texts, a "
        "smaller model or a machine with more memory"
    )
