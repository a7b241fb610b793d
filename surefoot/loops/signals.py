"""Signals: the first one asks the run to stop at the next safe place, the second ends it.

Owns SIGINT, SIGTERM and SIGUSR1 while a run goes on, and the grace time that follows the first.
Refuses to own what is saved; the loop knows which state is whole.
"""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from surefoot.errors import EXIT_INTERRUPTED, Interrupted

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_TICK = 0.05
"""Seconds between two looks at the clock of the grace time."""
_PATIENCE = 0.5
"""Share of the grace time that work which is nearly done may take to be done."""


class Stopper:
    """While entered, `check()` raises Interrupted once a signal has come.

    A run that has found no safe place `grace` seconds after the signal is ended there and then,
    resumable as after a kill. Between `safe` and `computing` it takes its time to save.
    """

    def __init__(self, *, grace: float = 60.0) -> None:
        self.grace = grace
        self.name: str | None = None
        self._asked = 0.0
        self._held = False
        self._safe = False
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
        self.safe()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.name is not None:
            os._exit(EXIT_INTERRUPTED)
        self._asked = time.monotonic()
        self.name = signal.Signals(number).name
        _say(f"\nsurefoot: {self.name}: saving; again to stop at once\n")
        # A thread, because the main one may be inside one long operation. A bare one: those of
        # `threading` take locks that the interrupted code may hold.
        _thread.start_new_thread(self._count_down, ())

    def _count_down(self) -> None:
        while time.monotonic() < self._asked + self.grace:
            if self._safe:
                return
            time.sleep(min(_TICK, self.grace / 10))
        if not self._safe:
            _say(
                f"surefoot: {self.name}: nothing could be saved within run.grace, {self.grace:g} "
                "seconds; the same command resumes from the newest checkpoint\n"
            )
            os._exit(EXIT_INTERRUPTED)

    def computing(self) -> None:
        """What follows may be cut off by the end of the grace time."""
        self._safe = False

    def safe(self) -> None:
        """Nothing more is computed: what follows is saving, however long it takes."""
        self._safe = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Meanwhile `check()` gives what is being done half the grace time to be done whole."""
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before

    def check(self) -> None:
        """Raise Interrupted after a signal, at a place where nothing is lost by it."""
        if self.name is None:
            return
        if self._held and time.monotonic() - self._asked < _PATIENCE * self.grace:
            return
        raise Interrupted(
            f"interrupted by {self.name}; state is saved, and the same command resumes it"
        )


def _say(text: str) -> None:
    """On stderr, which may lie on the very disk that is full."""
    with suppress(OSError):
        os.write(2, text.encode())
