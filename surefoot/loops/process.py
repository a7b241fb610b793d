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
_MADV_HUGEPAGE = 14
_HUGE_PAGE = 2 << 20
_HEAP_SHARE = 0.75
"""Of physical memory: as much as a training process may well use."""


def tune_allocator(*, huge_pages: bool = True) -> bool:
    """Let glibc keep freed blocks, and ask for huge pages for the heap that it grows from.

    A training step on CPU allocates the same large tensors over and over; mapping and zeroing
    their pages anew costs a good part of a step (bench/results/step_vs_trl.txt shows it on TRL's).
    Reading all weights for a token misses the address cache at nearly every small page
    (bench/results/allocator.txt).
    True if the blocks are kept; huge pages are a hint that the kernel may refuse.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        libc = ctypes.CDLL(None)
        mallopt = libc.mallopt
    except (OSError, AttributeError):
        return False
    # A threshold of -1 never gives the top of the heap back.
    kept = mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, -1)
    kept = bool(kept and mallopt(_M_TOP_PAD, 64 << 20))
    if kept and huge_pages:
        _ask_for_huge_pages(libc, int(_HEAP_SHARE * total_memory()))
    return kept


def _ask_for_huge_pages(libc: ctypes.CDLL, size: int) -> None:
    """Grow the heap by `size` bytes of address space, none of it touched, and mark them.

    The block is freed at once, so that later ones are cut from it.
    """
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    block = libc.malloc(size)
    if block is None:
        return  # A limit on address space; the heap grows as it did.
    start = -(-block // _HUGE_PAGE) * _HUGE_PAGE
    libc.madvise(start, (block + size - start) // _HUGE_PAGE * _HUGE_PAGE, _MADV_HUGEPAGE)
    libc.free(block)


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
