"""Folders of boxes that have no file system of their own.

Owns their names, which tell a stale one, and removing them whatever a program did to them.
Refuses to own the boxes (`sandbox.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Any

from surefoot.errors import RewardError

_numbers = itertools.count()


class SandboxError(RewardError):
    """A box could not be started: the machine's fault, never the program's."""


def home() -> Path:
    """Where boxes without a file system of their own have their folders."""
    return Path(tempfile.gettempdir()) / f"surefoot-code-{os.getuid()}"


def _born(pid: int) -> str | None:
    """When a process started, as the kernel counts; None if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "0"


def make_folder() -> Path:
    """A new empty folder that names its owner, so that a later start can tell it is stale."""
    root = home()
    root.mkdir(mode=0o700, exist_ok=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise SandboxError(f"{root} belongs to somebody else; remove it, or set TMPDIR")
    folder = root / f"{os.getpid()}-{_born(os.getpid())}-{next(_numbers)}"
    folder.mkdir(mode=0o700)
    return folder


def remove_folder(folder: Path) -> None:
    def mend(function: Any, path: str, error: Any) -> None:
        with contextlib.suppress(OSError):
            for place in (os.path.dirname(path), path):
                if stat.S_ISDIR(os.lstat(place).st_mode):  # never through a link that it left
                    os.chmod(place, 0o700)
            if function in (os.unlink, os.rmdir):
                function(path)

    for _ in range(3):  # a program may have taken away the rights to its own folders
        shutil.rmtree(folder, onerror=mend)
        if not folder.exists():
            return


def sweep_folders() -> int:
    """Remove the folders of processes that are gone; how many there were."""
    removed = 0
    for folder in home().glob("*-*-*"):
        pid, born, _ = folder.name.split("-")
        if pid.isdigit() and _born(int(pid)) != born:
            remove_folder(folder)
            removed += 1
    return removed
