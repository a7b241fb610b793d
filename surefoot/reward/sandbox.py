"""A box in which programs that a model wrote are run, one by one, and looked at from outside.

Owns the tiers, the limits, starting and ending a box, and what is believed of what it says.
Refuses to own the walls themselves (`sandbox_walls.py`), the choice of a tier
(`sandbox_probe.py`), and what an output is worth (`code.py`).

What comes out of a box is data of a stranger. The worst that a lying box can do is to name values
that are compared with expected ones, which it was never told.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any

from surefoot.reward import sandbox_init, sandbox_walls
from surefoot.reward.sandbox_folders import SandboxError, make_folder, remove_folder

START_SECONDS = 10.0
_CLOSE_SECONDS = 2.0
_SLACK_SECONDS = 3.0  # over the wall limit, for the supervisor to tell of it
_HEADER_BYTES = 8
_MEGABYTE = 1 << 20
_SOURCE = Path(sandbox_init.__file__).read_text(encoding="utf-8")


class Tier(StrEnum):
    """How far a program is kept from the machine; only the last one is a boundary."""

    NONE = "none"
    GUARDED = "guarded"
    NAMESPACES = "namespaces"


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one process: seconds of CPU, and memory; of one program: seconds of wall clock.

    `output_kb` holds for each of its streams. In namespaces CPU and memory count for all processes
    together too, and `disk_mb` is the size of /tmp; elsewhere it is that of one file.
    """

    cpu: float = 3.0
    wall: float = 10.0
    memory_mb: int = 512
    output_kb: int = 256
    disk_mb: int = 16
    processes: int = 16


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a program: its input, or the function in it that is called."""

    code: str
    stdin: str = ""
    call: str | None = None
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


class Ended(StrEnum):
    """How a run ended; all but BY_ITSELF are failures of the program."""

    BY_ITSELF = "by itself"
    CPU = "at the limit of CPU time"
    WALL = "at the limit of wall-clock time"
    MEMORY = "at the limit of memory"
    OUTPUT = "at the limit of output"
    FORK = "without a process left for it"
    TAMPER = "with a forged report"
    GONE = "with its own supervisor ended"


_TOLD = {None: Ended.BY_ITSELF} | {e.name.lower(): e for e in list(Ended)[1:6]}


@dataclass(frozen=True, slots=True)
class Report:
    """What was seen of one run. `answered`: a called function's value arrived, as `value`.

    `status` is the exit code, negative for a signal. `error` is the end of what went to stderr.
    """

    ended: Ended
    status: int | None = None
    stdout: bytes = b""
    value: Any = None
    answered: bool = False
    error: str = ""
    cpu: float = 0.0


class Box:
    """A started sandbox; `run` any number of programs in it, then `close`.

    SandboxError if it cannot be started. Programs of one box share its /tmp, so a box is for one
    completion. After an end of TAMPER or GONE it must not be used again.
    """

    def __init__(self, tier: Tier, limits: Limits) -> None:
        self._limits = limits
        self._folder = make_folder() if tier is not Tier.NAMESPACES else None
        self._pid = 0
        self._channel, theirs = socket.socketpair()
        read, self._life = os.pipe()
        self._open = True
        try:
            self._start(tier, theirs.fileno(), read)
        except OSError as error:
            self.close()
            raise SandboxError(f"the sandbox could not be started: {error}") from error
        finally:
            theirs.close()
            os.close(read)
        try:
            self._greet()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Box:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Of our child: the keeper of the namespaces, or the supervisor itself."""
        return self._pid

    def _start(self, tier: Tier, channel: int, life: int) -> None:
        plan = self._plan(tier)
        worker = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads, Python 3.12
            self._pid = os.fork()
        if self._pid == 0:
            try:
                if tier is Tier.NAMESPACES:
                    sandbox_walls.enter(channel, life, plan, worker=worker)
                sandbox_walls.enter_folder(channel, plan, worker=worker)
            finally:
                os._exit(1)

    def _plan(self, tier: Tier) -> sandbox_walls.Plan:
        most = self._limits
        bounded = tier is not Tier.NONE
        told = {
            "cpu": most.cpu if bounded else None,
            "memory": most.memory_mb * _MEGABYTE if bounded else None,
            "output": most.output_kb * 1024,
            "alone": tier is Tier.NAMESPACES,
        }
        return sandbox_walls.Plan(
            arguments=sandbox_walls.interpreter(["-c", _SOURCE, json.dumps(told)]),
            prefix=sandbox_walls.home(),
            disk_bytes=most.disk_mb * _MEGABYTE,
            processes=most.processes,
            limited=bounded,
            folder=None if self._folder is None else str(self._folder),
        )

    def _greet(self) -> None:
        """Write the user map when it is asked for, and wait until the supervisor is there."""
        until = time.monotonic() + START_SECONDS
        while True:
            try:
                message = self._receive(until)
            except (OSError, ValueError) as error:
                raise SandboxError(f"the sandbox did not start: {error}") from error
            if message is None:
                raise SandboxError("the sandbox did not start: its process ended at once")
            if "failed" in message:
                raise SandboxError(f"the sandbox did not start: {message['failed']}")
            if "ready" in message:
                return
            try:
                sandbox_walls.write_user_map(self._pid)
                self._channel.sendall(b"m")
            except OSError as error:
                raise SandboxError(f"the sandbox's users could not be set up: {error}") from error

    def run(self, job: Job, *, within: float | None = None) -> Report:
        """Run one program to its end or its first limit.

        Its wall-clock limit counts the time for which it waits or sleeps; no run is longer than
        `within` (None: four times the limit).
        """
        wall = self._limits.wall
        longest = 4 * wall if within is None else within
        nonce = secrets.token_hex(16)
        request = {
            "nonce": nonce,
            "wall": wall,
            "within": longest,
            "code": job.code,
            "stdin": job.stdin,
            "call": job.call,
            "args": sandbox_init.encode(list(job.args)),
            "kwargs": sandbox_init.encode(dict(job.kwargs)),
        }
        body = json.dumps(request).encode()
        until = time.monotonic() + longest + _SLACK_SECONDS
        try:
            self._channel.settimeout(max(0.001, until - time.monotonic()))
            self._channel.sendall(len(body).to_bytes(_HEADER_BYTES, "big") + body)
            message = self._receive(until)
        except OSError:  # no answer in time, or nobody there
            return Report(Ended.GONE)
        except (ValueError, RecursionError):
            return Report(Ended.TAMPER)
        if message is None:
            return Report(Ended.GONE)
        try:
            return _read(message, nonce)
        except (KeyError, TypeError, ValueError, RecursionError, AttributeError):
            return Report(Ended.TAMPER)

    def _receive(self, until: float) -> Any:
        """The next frame, or None at the end; OSError when it is late, ValueError if it is none."""
        header = self._exactly(_HEADER_BYTES, until)
        if header is None:
            return None
        length = int.from_bytes(header, "big")
        # A byte can become six of JSON.
        if length > 6 * 3 * self._limits.output_kb * 1024 + _MEGABYTE:
            raise ValueError("a frame longer than any of ours")
        body = self._exactly(length, until)
        return None if body is None else json.loads(body)

    def _exactly(self, count: int, until: float) -> bytes | None:
        found = bytearray()
        while len(found) < count:
            self._channel.settimeout(max(0.001, until - time.monotonic()))
            data = self._channel.recv(min(count - len(found), _MEGABYTE))
            if not data:
                return None
            found += data
        return bytes(found)

    def close(self) -> None:
        """End and reap every process of the box; a second call does nothing."""
        if not self._open:
            return
        self._open = False
        self._channel.close()
        os.close(self._life)
        if self._pid and not _reaped(self._pid, _CLOSE_SECONDS):
            for end in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    if end is os.kill or os.getpgid(self._pid) == self._pid:
                        end(self._pid, signal.SIGKILL)
            _reaped(self._pid, None)
        if self._folder is not None:
            remove_folder(self._folder)


def _read(message: Any, nonce: str) -> Report:
    """A supervisor's report; ValueError and its kin where it is not one of this run."""
    if message["nonce"] != nonce:
        raise ValueError("a report of another run")
    ended = _TOLD[message["ended"]]
    if ended is Ended.FORK:
        return Report(ended, error=str(message["error"]))
    report = Report(
        ended=ended,
        status=int(message["status"]),
        stdout=message["stdout"].encode("latin-1"),
        error=_last_line(message["error"].encode("latin-1")),
        cpu=float(message["cpu"]),
    )
    told = message["answer"].encode("latin-1")
    if not told or ended is not Ended.BY_ITSELF:
        return report
    answer = json.loads(told)  # two answers are no JSON
    if not isinstance(answer, dict) or answer.keys() != {"nonce", "value"}:
        raise ValueError("not an answer")
    if answer["nonce"] != nonce:
        raise ValueError("an answer to another call")
    try:
        value = sandbox_init.decode(answer["value"])
    except ValueError as error:
        return Report(ended, report.status, report.stdout, error=str(error), cpu=report.cpu)
    return Report(ended, report.status, report.stdout, value, True, report.error, report.cpu)


def _last_line(text: bytes) -> str:
    lines = [line for line in text.decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


def _reaped(pid: int, seconds: float | None) -> bool:
    """Wait for a child of ours and reap it; False if it outlives the time."""
    until = None if seconds is None else time.monotonic() + seconds
    pause = 0.0002
    while True:
        try:
            if until is None:
                os.waitpid(pid, 0)
                return True
            if os.waitpid(pid, os.WNOHANG)[0]:
                return True
        except ChildProcessError:
            return True
        if time.monotonic() > until:
            return False
        _pause_for(pid, pause)
        pause = min(2 * pause, 0.02)


def _pause_for(pid: int, seconds: float) -> None:
    if not hasattr(os, "pidfd_open"):
        time.sleep(seconds)
        return
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        time.sleep(seconds)
        return
    try:
        select.select([handle], [], [], seconds)
    finally:
        os.close(handle)
