"""One writer per run directory.

Owns `run.lock`: an advisory lock that the kernel drops when its owner dies, plus a record of who
the owner is. Refuses to own what the owner does, and any waiting: a second owner is refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import weakref
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from surefoot.errors import RunDirectoryError
from surefoot.run.directory import RunDirectory


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds a run directory. `start` is the process's start in clock ticks since boot."""

    pid: int
    host: str
    boot: str
    start: int | None
    since: str

    def alive(self) -> bool:
        """Whether this very process still runs; a reused pid or another boot is not it."""
        if self.boot != _boot_id():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return self.start == _start_ticks(self.pid)


class RunLock:
    """The right to write one run directory, held from `acquire` to `release` or to death.

    `stale` names the dead owner whose record was found and taken over, if there was one.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self._path = directory.lock
        self._handle: int | None = None
        self.stale: Owner | None = None

    def acquire(self) -> Self:
        """Take the lock; raises RunDirectoryError naming the process that has it."""
        assert self._handle is None, "this lock is already held"
        try:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RunDirectoryError(
                f"{self._path} cannot be opened ({error.strerror}), so it cannot be told whether "
                "another process writes this run; move it elsewhere, or name another run.dir"
            ) from error
        try:
            self._claim(handle)
        except BaseException:
            os.close(handle)
            raise
        self._handle = handle
        # A forked reward worker must not keep the lock alive after its parent was killed.
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _forget(reference()))
        return self

    def release(self) -> None:
        """Give the lock back; harmless when it is not held."""
        if self._handle is None:
            return
        with contextlib.suppress(OSError):
            os.ftruncate(self._handle, 0)
        os.close(self._handle)
        self._handle = None

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def _claim(self, handle: int) -> None:
        held = False
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # A filesystem without locks leaves the owner's record as the only witness.
            held = error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
        found = read_owner(self._path)
        if held or (found is not None and found.alive()):
            raise RunDirectoryError(_refusal(self._path.parent, found))
        self.stale = found
        record = json.dumps(asdict(_ourselves())).encode()
        os.ftruncate(handle, 0)
        os.pwrite(handle, record, 0)
        os.fsync(handle)


def read_owner(path: Path) -> Owner | None:
    """The record in a lock file, or None when it is empty, torn or absent."""
    try:
        row = json.loads(path.read_bytes())
        return Owner(row["pid"], row["host"], row["boot"], row["start"], row["since"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _refusal(directory: Path, owner: Owner | None) -> str:
    who = "another process"
    if owner is not None:
        who = f"process {owner.pid} on {owner.host} (since {owner.since})"
    return (
        f"run directory {directory} is in use by {who}; two writers would mix their rows. "
        "Wait for it, stop it, or name another run.dir"
    )


def _ourselves() -> Owner:
    pid = os.getpid()
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Owner(pid, socket.gethostname(), _boot_id(), _start_ticks(pid), now)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat; the name before it may contain spaces and brackets."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        return int(text.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _forget(lock: RunLock | None) -> None:
    if lock is not None and lock._handle is not None:
        os.close(lock._handle)
        lock._handle = None
