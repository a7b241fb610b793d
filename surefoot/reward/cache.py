"""Scores that cost money, kept by their content, so that nobody is asked twice for the same one.

Owns the table on disk, what is done when it cannot be used, and the key of a content.
Refuses to own which scores are worth keeping, and what a value means.

A kept score is a convenience: a table that is full, locked or damaged costs a warning and a call,
never a run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from surefoot.reward import wire

log = logging.getLogger(__name__)

FILE = "scores.sqlite3"
BUSY_SECONDS = 5.0
_TABLE = (
    "CREATE TABLE IF NOT EXISTS scores "
    "(key TEXT PRIMARY KEY, value TEXT NOT NULL, written REAL NOT NULL) WITHOUT ROWID"
)


def content_key(content: Mapping[str, Any]) -> str:
    """SHA-256 over everything that a score depends on; the order of keys does not count.

    TypeError or ValueError where something has no JSON.
    """
    plain = json.loads(wire.encode(content))
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def default_path() -> Path:
    """The one table of this user, beside the other caches."""
    # Not at the top of the file: it brings torch, which the rest of this room does not need.
    from surefoot.models.alias import cache_directory

    return cache_directory() / FILE


class ScoreCache:
    """JSON values by key in one file, shared by threads, processes and runs.

    The file is opened by the first `get` or `put`; `path` None is `default_path()`.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._owner = 0
        self._told = False

    def __enter__(self) -> ScoreCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def get(self, key: str) -> dict[str, Any] | None:
        """The value that was put under `key`; None where there is none, or the file is unusable."""
        try:
            with self._lock:
                found = (
                    self._open()
                    .execute("SELECT value FROM scores WHERE key = ?", (key,))
                    .fetchone()
                )
            if found is None:
                return None
            value = json.loads(found[0])
        except (sqlite3.Error, OSError, ValueError) as error:
            self._warn(error)
            return None
        return value if isinstance(value, dict) else None

    def put(self, key: str, value: Mapping[str, Any]) -> None:
        """Keep `value` (plain JSON, no NaN) under `key`; a later one replaces it."""
        text = json.dumps(dict(value), allow_nan=False, separators=(",", ":"))
        try:
            with self._lock, self._open() as connection:
                connection.execute(
                    "INSERT OR REPLACE INTO scores (key, value, written) VALUES (?, ?, ?)",
                    (key, text, time.time()),
                )
        except (sqlite3.Error, OSError) as error:
            self._warn(error)

    def close(self) -> None:
        """Let go of the file; a later `get` or `put` opens it again."""
        with self._lock:
            connection, self._connection = self._connection, None
            if connection is not None and self._owner == os.getpid():
                with contextlib.suppress(sqlite3.Error):
                    connection.close()

    def _open(self) -> sqlite3.Connection:
        # A connection must not be used, nor closed, by a process that inherited it through fork.
        if self._connection is not None and self._owner == os.getpid():
            return self._connection
        if self._path is None:
            self._path = default_path()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(self._path, timeout=BUSY_SECONDS, check_same_thread=False)
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            with connection:
                connection.execute(_TABLE)
        except sqlite3.Error:
            connection.close()
            raise
        self._connection, self._owner = connection, os.getpid()
        return connection

    def _warn(self, error: Exception) -> None:
        if not self._told:
            self._told = True
            log.warning(
                "the table of paid scores, %s, cannot be used (%s); scores are asked for again, "
                "and paid again. Free its disk, or remove the file",
                self._path,
                error,
            )
