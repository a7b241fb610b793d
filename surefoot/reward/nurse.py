"""The run's handle on the nursery: the one process from which reward workers are forked.

Owns forking it, the commands to it, its news, and ending it.
Refuses to own what runs inside (`nursery.py`), and when workers are started and killed
(`workers.py`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from surefoot.errors import RewardError
from surefoot.reward import wire
from surefoot.reward.nursery import Served, run_nursery

_CLOSE_SECONDS = 5.0

_open: weakref.WeakSet[Nurse] = weakref.WeakSet()


class Nurse:
    """The parent's handle on the nursery process."""

    def __init__(self, functions: Sequence[Served], warm: Sequence[Callable[[], None]]) -> None:
        if not hasattr(os, "fork"):
            raise RewardError(
                "reward functions run in forked worker processes, which this system does not have; "
                "use a built-in reward, or Linux or macOS"
            )
        self.owner = os.getpid()
        self.control, theirs = socket.socketpair()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()  # else a child could write the same buffered text again
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads, Python 3.12
            self.pid = os.fork()
        if self.pid == 0:
            try:
                self.control.close()
                for other in _open:
                    other.control.close()
            finally:
                run_nursery(theirs, functions, warm, parent=self.owner)
        theirs.close()
        self.inbox = wire.Inbox()
        self.alive = True
        _open.add(self)

    def command(self, do: str, worker: int, handle: socket.socket | None = None) -> None:
        body = wire.frame(wire.encode({"do": do, "worker": worker}))
        try:
            socket.send_fds(self.control, [body], [] if handle is None else [handle.fileno()])
        except ConnectionError as error:
            raise self.lost() from error

    def news(self) -> list[dict[str, Any]]:
        try:
            data = self.control.recv(1 << 16)
        except ConnectionError as error:
            raise self.lost() from error
        if not data:
            raise self.lost()
        return self.inbox.feed(data)

    def lost(self) -> RewardError:
        self.close()
        return RewardError(
            f"the process that starts reward workers (pid {self.pid}) was ended from outside, "
            "perhaps for lack of memory; run the same command again"
        )

    def close(self) -> None:
        """End the nursery, which ends its workers; wait until it is reaped."""
        if not self.alive or os.getpid() != self.owner:
            return
        self.alive = False
        _open.discard(self)
        with contextlib.suppress(OSError):
            # Not only close: a process forked later may hold a copy of this end.
            self.control.shutdown(socket.SHUT_RDWR)
        self.control.close()
        until = time.monotonic() + _CLOSE_SECONDS
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(self.pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > until:
                    os.kill(self.pid, signal.SIGKILL)
                    os.waitpid(self.pid, 0)
                    return
                time.sleep(0.002)
