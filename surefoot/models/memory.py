"""Telling that memory ran out from every other failure of torch.

Owns that one question. Refuses to own what is done about it: smaller pieces, where they are made.
"""

from __future__ import annotations

import torch


def out_of_memory(error: BaseException) -> bool:
    """Whether torch, on a CPU or a GPU, could not get the memory that it asked for."""
    return isinstance(
        error, MemoryError | torch.OutOfMemoryError
    ) or "can't allocate memory" in str(error)
