"""What a training process sets up once: the allocator, and the memory it may count on.

Owns process-wide settings. Refuses to own anything a recipe can say.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys

import torch

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


def tune_allocator() -> bool:
    """Let glibc keep freed blocks instead of returning each large one to the kernel.

    A training step on CPU allocates the same large tensors over and over; mapping and zeroing
    their pages anew costs a good part of a step (bench/results/step_vs_trl.txt shows it on TRL's).
    True if done.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    kept = mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    return bool(kept and mallopt(_M_TOP_PAD, 64 << 20))


def deterministic() -> None:
    """Ask torch for kernels that repeat bit for bit; resume depends on it (promise 4)."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    # No kernel here reads what it has not written, and filling costs a twentieth of a step.
    torch.utils.deterministic.fill_uninitialized_memory = False


def total_memory() -> int:
    """Physical memory of the machine in bytes (total, never free: law 11)."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_memory() -> int:
    """Largest resident size of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
