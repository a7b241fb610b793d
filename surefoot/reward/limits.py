"""A limit of CPU time on work that a model's text makes long.

Owns the timer, and the signal that tells its end from every other death of a worker.
Refuses to own what a sample is worth whose text reached the limit.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

LIMIT_SIGNAL = signal.SIGPROF


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """End this process when the block has used `seconds` of CPU time.

    The kernel ends it, because a Python handler would wait for long C calls to return, and its
    exception could be caught by, or break, the code in between. CPU time does not depend on how
    busy the machine is, so the same text meets the limit again.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
