"""Signals: the first one asks the run to stop at the next safe place, the second ends it.

Owns SIGINT, SIGTERM and SIGUSR1 while a run goes on.
Refuses to own what is saved; the loop knows which state is whole.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from surefoot.errors import EXIT_INTERRUPTED, Interrupted

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Stopper:
    """While entered, `check()` raises Interrupted once a signal has come."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._held = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stopper:
        # Only the main thread may set handlers; elsewhere the caller keeps its own.
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.name is not None:
            os._exit(EXIT_INTERRUPTED)
        self.name = signal.Signals(number).name
        os.write(2, f"\nsurefoot: {self.name}: saving; again to stop at once\n".encode())

    @contextmanager
    def held(self) -> Iterator[None]:
        """Meanwhile `check()` raises nothing: what is done here must be done whole."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def check(self) -> None:
        if self.name is not None and not self._held:
            raise Interrupted(
                f"interrupted by {self.name}; state is saved, and the same command resumes it"
            )
