"""The rows that a run writes: metrics, groups, samples and events, as append-only JSONL.

Owns the writers, the cut back to a checkpoint on resume, and staying alive when the disk does not:
a row that cannot be written waits in memory, and a checkpoint is not saved without it.
Refuses to own what a row says, and never stops a run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from surefoot import draws
from surefoot.errors import RunDirectoryError
from surefoot.run.directory import RunDirectory
from surefoot.run.files import (
    atomic_write_bytes,
    atomic_write_json,
    fsync_directory,
    json_line,
    parse_line,
    valid_text,
)

_log = logging.getLogger(__name__)
_WAITING_LIMIT = 100_000  # lines per file that wait in memory while the disk refuses
_WAITING = "waiting.json"
"""In a run directory: rows that their own files refused when the newest checkpoint was saved."""


class Ledger:
    """The four JSONL files of one run, open for appending.

    `resume_step` is the step of the checkpoint that the run goes on from: rows of later steps are
    cut, because those steps are done again. None starts from zero and cuts all of them. `written`
    is the last step whose row is not made again, where that is not the checkpoint's. Events are
    never cut. `samples_per_step` completions are kept per step, drawn by (seed, step); None: all.
    """

    def __init__(
        self,
        directory: RunDirectory,
        *,
        resume_step: int | None,
        written: int | None = None,
        seed: int = 0,
        samples_per_step: int | None = 8,
    ) -> None:
        self._seed = seed
        self._samples_per_step = samples_per_step
        self._step: int | None = resume_step
        self._warned = False
        last = -1 if resume_step is None else resume_step if written is None else written
        tables = (directory.metrics, directory.groups, directory.samples)
        cut = {path.name: _mended(path, partial(_cut, last_step=last)) for path in tables}
        _mended(directory.events, _mend_tail)
        self._metrics, self._groups, self._samples = (_Lines(path) for path in tables)
        self._events = _Lines(directory.events)
        self._files = (self._metrics, self._groups, self._samples, self._events)
        self._aside = directory.path / _WAITING
        self._take_back(last)
        if resume_step is not None:
            self.event("resumed", f"resumed after step {resume_step}", {"cut_rows": cut})
        elif any(cut.values()):
            self.event("restarted", "started again from zero: no checkpoint", {"cut_rows": cut})

    def step(
        self,
        step: int,
        metrics: Mapping[str, float | int | str | None],
        groups: Iterable[Mapping[str, Any]] = (),
        samples: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        """Write the rows of one step and hand them to the operating system.

        `groups` become one row each; of `samples` at most `samples_per_step` are kept. Numbers that
        are not finite become null. A disk that refuses is survived (see `waiting`); a value that
        JSON does not have raises TypeError naming it.
        """
        group_lines = [_line(step, row) for row in groups]
        sample_lines = [_line(step, row) for row in self._reservoir(step, list(samples))]
        self._metrics.put([_line(step, metrics)])
        self._groups.put(group_lines)
        self._samples.put(sample_lines)
        self._step = step
        self._flush()

    def event(self, kind: str, message: str, fields: Mapping[str, Any] | None = None) -> None:
        """Write one event: the last step known, the time (UTC), its kind, words and facts."""
        self._put_event(kind, message, fields or {})
        self._flush()

    def sync(self) -> None:
        """Force everything written so far onto the disk; a refusal is logged."""
        self._force()

    def secure(self) -> None:
        """`sync` before a checkpoint is saved: a run that goes on from there has every row so far.

        Rows that wait in memory are put aside, for a process that comes after a kill. Raises
        OSError when the disk refuses that too, or to keep what was written.
        """
        refused = self._force()
        if refused is not None:
            raise refused
        if self.waiting:
            lines = {
                file.path.name: [line.decode() for line in file.waiting] for file in self._files
            }
            atomic_write_json(self._aside, lines)

    def close(self) -> None:
        """Secure and close; the log says where rows are that still wait, or that they are lost."""
        try:
            self.secure()
            if self.waiting:
                _log.warning(
                    "%d ledger rows were refused by the disk; they are in %s, and the next process "
                    "of the run puts them back",
                    self.waiting,
                    self._aside,
                )
        except OSError:
            if self.waiting:
                _log.warning("%d ledger rows were never written: the disk refused", self.waiting)
        for file in self._files:
            file.close()

    @property
    def waiting(self) -> int:
        """Rows that the disk has refused so far and that wait in memory."""
        return sum(len(file.waiting) for file in self._files)

    def _reservoir(self, step: int, rows: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        if self._samples_per_step is None or len(rows) <= self._samples_per_step:
            return rows
        order = draws.permutation(self._seed, "samples", len(rows), step)
        return [rows[place] for place in sorted(order[: self._samples_per_step].tolist())]

    def _force(self) -> OSError | None:
        """Write and sync; what was put aside goes only when its rows are safe in their files."""
        self._flush()
        refused = [error for file in self._files if (error := file.sync()) is not None]
        try:
            fsync_directory(self._metrics.path.parent)
        except OSError as error:
            refused.append(error)
        if refused:
            return refused[0]
        if not self.waiting:
            with contextlib.suppress(OSError):
                self._aside.unlink(missing_ok=True)
        return None

    def _take_back(self, last_step: int) -> None:
        """What an earlier process put aside, unless it was written since or is done again."""
        aside = _put_aside(self._aside, {file.path.name for file in self._files})
        for file in self._files:
            lines = aside.get(file.path.name, [])
            if file is not self._events:
                lines = [line for line in lines if _stays(line, last_step)]
            file.take_back(lines)

    def _put_event(self, kind: str, message: str, fields: Mapping[str, Any]) -> None:
        row = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "kind": kind}
        self._events.put([_line(self._step, {**row, "message": message, **fields})])

    def _flush(self) -> None:
        for file in self._files:
            gap = file.flush(self._step)
            if gap is not None:
                self._put_event("gap", gap.message(), gap.fields())
                self._events.flush(self._step)
            if file.trouble is not None and not self._warned:
                self._warned = True
                _log.warning(
                    "%s cannot be written (%s); training goes on, rows wait in memory",
                    file.path,
                    file.trouble,
                )


@dataclass(frozen=True, slots=True)
class _Gap:
    """A stretch of steps during which a file could not be written."""

    file: str
    first: int | None
    last: int | None
    recovered: int
    lost: int
    reason: str

    def message(self) -> str:
        return (
            f"{self.file} could not be written from step {self.first} to {self.last} "
            f"({self.reason}); {self.recovered} rows waited in memory and are written now, "
            f"{self.lost} are lost"
        )

    def fields(self) -> dict[str, Any]:
        return {
            "file": self.file,
            "first_step": self.first,
            "last_step": self.last,
            "recovered": self.recovered,
            "lost": self.lost,
        }


class _Lines:
    """One append-only file whose lines wait in memory while the disk refuses them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting: deque[bytes] = deque()
        self.trouble: str | None = None
        self._lost = 0
        self._first_bad: int | None = None
        self._handle: int | None = None
        self._end = 0  # where the last whole line ends

    def put(self, lines: list[bytes]) -> None:
        self.waiting.extend(lines)
        while len(self.waiting) > _WAITING_LIMIT:
            self.waiting.popleft()
            self._lost += 1

    def take_back(self, lines: list[bytes]) -> None:
        """Put lines that an earlier process could not write, as far as they are not there."""
        left, found = Counter(lines), 0
        if lines and self.path.exists():
            with open(self.path, "rb") as file:
                for line in file:
                    if left[line] > 0:
                        left[line] -= 1
                        found += 1
        # Lines are written in order, so those that are there are the first ones.
        if found < len(lines):
            self.put(lines[found:])
            self.trouble = "an earlier process was refused"
            first = parse_line(self.waiting[0])
            self._first_bad = None if first is None else first["step"]

    def flush(self, step: int | None) -> _Gap | None:
        """Try to write what waits; returns the gap that ended if earlier tries had failed."""
        if not self.waiting:
            return None
        count = len(self.waiting)
        try:
            self._write(b"".join(self.waiting))
        except OSError as error:
            if self.trouble is None:
                self._first_bad = step
            self.trouble = error.strerror or str(error)
            return None
        self.waiting.clear()
        if self.trouble is None:
            return None
        gap = _Gap(self.path.name, self._first_bad, step, count, self._lost, self.trouble)
        self.trouble, self._lost = None, 0
        return gap

    def sync(self) -> OSError | None:
        """Force what was written onto the disk; returns what it said if it refused."""
        if self._handle is not None:
            try:
                os.fsync(self._handle)
            except OSError as error:
                _log.warning("%s could not be synced (%s)", self.path, error.strerror)
                return error
        return None

    def close(self) -> None:
        if self._handle is not None:
            with contextlib.suppress(OSError):
                os.close(self._handle)
            self._handle = None

    def _write(self, data: bytes) -> None:
        if self._handle is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
            self._handle = os.open(self.path, flags, 0o644)
            self._end = os.fstat(self._handle).st_size
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._handle, data[done:], self._end + done)
        except OSError:
            # Half a line must not stay in front of the lines that come later.
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, self._end)
            raise
        self._end += done


def _line(step: int | None, row: Mapping[str, Any]) -> bytes:
    rest = {key: value for key, value in row.items() if key != "step"}
    return json_line({"step": step, **rest})


def _mended(path: Path, mend: Callable[[Path], int]) -> int:
    """How many lines `mend` took; what cannot be mended must not be written behind."""
    try:
        return mend(path)
    except OSError as error:
        raise RunDirectoryError(
            f"{path} cannot be read and cut back to the checkpoint ({error.strerror}); put the "
            "file back, or move what lies there elsewhere"
        ) from error


def _put_aside(path: Path, names: Collection[str]) -> dict[str, list[bytes]]:
    """The lines that an earlier process put aside, by file; nothing where there is no such file."""
    reason = "is not what a run puts there"
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raw, reason = None, f"cannot be read ({error.strerror})"
    except (ValueError, RecursionError):
        raw = None
    if isinstance(raw, dict) and all(
        name in names and isinstance(lines, list) and all(map(_is_row, lines))
        for name, lines in raw.items()
    ):
        return {name: [line.encode() for line in lines] for name, lines in raw.items()}
    raise RunDirectoryError(
        f"{path} {reason}; it holds rows from before the newest checkpoint that the disk refused. "
        "Restore a copy, or move it elsewhere, and its rows are lost"
    )


def _is_row(line: object) -> bool:
    if not isinstance(line, str) or valid_text(line) != line or line.count("\n") != 1:
        return False
    row = parse_line(line.encode())
    return row is not None and "step" in row


def _cut(path: Path, last_step: int) -> int:
    """Drop the rows after `last_step`, and torn lines, atomically; returns how many went."""
    if not path.exists():
        return 0
    dropped, end, first_bad, scattered = 0, 0, None, False
    with open(path, "rb") as file:
        for line in file:
            if _stays(line, last_step):
                scattered = scattered or first_bad is not None
            else:
                dropped += 1
                first_bad = end if first_bad is None else first_bad
            end += len(line)
    if first_bad is None:
        return 0
    if scattered:
        with open(path, "rb") as file:
            kept = b"".join(line for line in file if _stays(line, last_step))
        atomic_write_bytes(path, kept)
    else:  # cutting a tail needs no space, so it also works on a full disk
        _truncate(path, first_bad)
    return dropped


def _stays(line: bytes, last_step: int) -> bool:
    row = parse_line(line)
    step = None if row is None else row.get("step")
    return isinstance(step, int) and step <= last_step


def _truncate(path: Path, size: int) -> None:
    with open(path, "rb+") as file:
        file.truncate(size)
        os.fsync(file.fileno())


def _mend_tail(path: Path) -> int:
    """Cut a torn last line off a file whose rows are kept; returns how many went."""
    if not path.exists():
        return 0
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        _truncate(path, whole)
    return int(whole < len(data))
