"""Cases of the fuzzer: what a user could hand to the command line, how it ends, what it may not do.

Owns a case as plain values that print and run anywhere, its run in a forked child, and the
judgement of its end. Refuses to own what is drawn (`fuzz_recipes`, `fuzz_data`, `fuzz_runs`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import resource
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from support.runs import REWARD, command
from support.zygote import Child
from surefoot.errors import SurefootError
from surefoot.models import alias
from surefoot.run.checkpoint import load_step
from surefoot.run.directory import RunDirectory

FILLER = b"<two million letters>"
"""Stands for a very long text, so that a case can be read."""
RUN, RECIPE = "run", "recipe.yaml"
_PATIENCE = 8.0
"""Seconds after which a case is asked to stop: its numbers may ask for years."""
_GRACE = 90.0
_MEMORY = 8 << 30
_FILE_SIZE = 1 << 30
_TERMINATED = -signal.SIGTERM
_TRACEBACK = re.compile(r"Traceback \(most recent call last\)|Fatal Python error")
_OF_A_REWARD = re.compile(r"reward \S+: raised .*\nTraceback \(most recent call last\)")
"""The traceback of a user's own function, which a message shows."""
_THIN = 3
"""Hypothesis follows a case with kin of it; of so many one is run, and the runs differ more."""


_VERBS = ("train", "eval", "export", "audit", "methods", "env")
_FORMS = ("data", "reward", "--pairs", "--demonstrations")


class Odd(Enum):
    """What lies where a file should."""

    ABSENT = "absent"
    DIRECTORY = "directory"
    LOOP = "a link to itself"
    DANGLING = "a link to nothing"


@dataclass(frozen=True)
class Edit:
    """One change of a file below the run directory; `at` is a place in it, in thousandths."""

    op: str
    path: str
    at: int = 0
    value: object = None


@dataclass(frozen=True)
class Case:
    """Files in a folder, a copy of a prepared run with changes, and the command that reads them."""

    kind: str
    argv: tuple[str, ...]
    files: Mapping[str, bytes | Odd] = field(default_factory=dict)
    base: str | None = None
    edits: tuple[Edit, ...] = ()

    @property
    def verb(self) -> str:
        """The command without its arguments; the forms of export are told apart."""
        verb = self.argv[0] if self.argv else ""
        if verb not in _VERBS:
            return "no verb"
        found = [word for word in self.argv[1:] if word in _FORMS]
        return " ".join((verb, *found[:1]))


@dataclass(frozen=True)
class Outcome:
    """How a case ended. `stopped`: it was asked to stop after `_PATIENCE` seconds."""

    case: Case
    folder: Path
    code: int
    out: str
    err: str
    stopped: bool
    seconds: float
    wrongs: tuple[str, ...]

    def text(self) -> str:
        """The case and what was wrong with its end, to be run again by hand."""
        files = "\n".join(f"  {name}: {data!r:.1500}" for name, data in self.case.files.items())
        edits = "\n".join(f"  {edit!r:.500}" for edit in self.case.edits)
        return (
            f"{'; '.join(self.wrongs)}\nsurefoot {' '.join(map(repr, self.case.argv))}\n"
            f"in {self.folder}, exit {self.code} after {self.seconds:.1f} s\n"
            f"base {self.case.base}\n{files}\n{edits}\n{self.err[-3000:]}"
        )


def drawn(cases: SearchStrategy[Case], count: int, *, start: int) -> list[Case]:
    """`count` cases, the same ones for the same `start`."""
    found: list[Case] = []

    @seed(start)
    @settings(
        max_examples=_THIN * count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases)
    def keep(case: Case) -> None:
        found.append(case)

    keep()
    return found[::_THIN]


def run(
    case: Case,
    folder: Path,
    *,
    model: Path,
    bases: Mapping[str, Path],
    patience: float = _PATIENCE,
) -> Outcome:
    """Lay the case out in `folder`, run it in a child, and judge its end.

    After so many seconds of `patience` it is asked to stop.
    """
    folder.mkdir(parents=True)
    (folder / "model").symlink_to(model)
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    for name, data in case.files.items():
        put(folder / name, data)
    if case.base is not None:
        # Imported here: it needs this module's names.
        from support.fuzz_runs import apply

        shutil.copytree(bases[case.base], folder, symlinks=True, dirs_exist_ok=True)
        for edit in case.edits:
            apply(edit, folder / RUN)
    given_files = {
        entry.name: shot
        for entry in folder.iterdir()
        if entry.name != RUN and (shot := _shot(entry)) is not None
    }
    whole = whole_checkpoints(folder / RUN)
    before = tree(folder / RUN)
    began = time.monotonic()
    child = command(*case.argv, cwd=folder, SUREFOOT_CACHE=str(_cache(folder.parent, model)))
    code, stopped = _ended(child, patience)
    seconds = time.monotonic() - began
    out, err = (path.read_bytes().decode("utf-8", "replace") for path in (child.out, child.err))
    wrongs = [
        *_wrong_end(case, code, stopped, out, err),
        *(
            f"{name}, which was given, has changed"
            for name, shot in given_files.items()
            if _shot(folder / name) != shot
        ),
        *_lost(case, folder, code, whole, before),
    ]
    return Outcome(case, folder, code, out, err, stopped, seconds, tuple(wrongs))


def run_all(
    cases: Iterable[Case], home: Path, *, model: Path, bases: Mapping[str, Path]
) -> list[Outcome]:
    """Every case in a folder of its own; those of cases that ended well are removed."""
    outcomes = []
    for number, case in enumerate(cases):
        outcome = run(case, home / f"{case.kind}-{number:04d}", model=model, bases=bases)
        if not outcome.wrongs:
            shutil.rmtree(outcome.folder)
        outcomes.append(outcome)
    return outcomes


def _cache(home: Path, model: Path) -> Path:
    """A cache in which the tiny model stands for the aliases of larger ones."""
    cache = home / "cache"
    if not cache.is_dir():
        cache.mkdir()
        for name, version in alias._VERSIONS.items():
            (cache / f"{name}-{version}").symlink_to(model)
    return cache


def put(path: Path, data: bytes | Odd) -> None:
    """Put a file, or what is odd in its place, at `path`."""
    remove(path)
    if isinstance(data, bytes):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.replace(FILLER, b"x" * 2_000_000))
    elif data is Odd.DIRECTORY:
        path.mkdir()
    elif data is Odd.LOOP:
        path.symlink_to(path.name)
    elif data is Odd.DANGLING:
        path.symlink_to("nowhere")


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def counts(outcomes: Iterable[Outcome]) -> dict[tuple[str, str], Counter[str]]:
    """By kind and verb: how many cases ended with which code; `asked` where they were stopped."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for outcome in outcomes:
        how = "asked" if outcome.stopped else str(outcome.code)
        found.setdefault((outcome.case.kind, outcome.case.verb), Counter())[how] += 1
    return found


def _ended(child: Child, patience: float) -> tuple[int, bool]:
    """Wait; after a while ask it to stop, and kill what does not."""
    for limit, size in ((resource.RLIMIT_AS, _MEMORY), (resource.RLIMIT_FSIZE, _FILE_SIZE)):
        try:
            resource.prlimit(child.pid, limit, (size, size))
        except ProcessLookupError:
            break
    try:
        if _waited(child, patience):
            return _code(child), False
        os.kill(child.pid, signal.SIGTERM)
        if _waited(child, _GRACE):
            return _code(child), True
        os.kill(child.pid, signal.SIGKILL)
        assert _waited(child, _GRACE), child.args
        return _code(child), True
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def _waited(child: Child, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while child.poll() is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def _code(child: Child) -> int:
    assert child.returncode is not None
    return child.returncode


def _wrong_end(case: Case, code: int, stopped: bool, out: str, err: str) -> list[str]:
    wrongs = []
    # What trains saves and says 75; what only reads may just end.
    asked = {75} if case.verb == "train" else {75, _TERMINATED}
    if code == -signal.SIGKILL:
        wrongs.append(f"it went on for {_GRACE:g} s after it was asked to stop")
    elif code not in {0, 2, 3} and not (stopped and code in asked):
        wrongs.append(f"exit code {code}")
    if _TRACEBACK.search(_OF_A_REWARD.sub("", err) + out):
        wrongs.append("it printed a traceback")
    if code == 3 and "surefoot: " not in err:
        wrongs.append("exit code 3 without a reason")
    usage = "Usage: " in err or err.startswith("Error: ")
    verdict = case.verb.startswith("audit") and ('"verdict": "stop"' in out or "STOP" in out)
    if code == 2 and "surefoot: " not in err and not usage and not verdict:
        wrongs.append("exit code 2 without a reason")
    return wrongs


def _lost(
    case: Case,
    folder: Path,
    code: int,
    whole: Mapping[str, bytes],
    before: Mapping[str, str],
) -> list[str]:
    """What the command took from a run that it had no business to touch."""
    if case.base is None:
        return []
    if case.verb != "train":
        after = tree(folder / RUN)
        changed = [name for name, shot in before.items() if after.get(name) != shot]
        added = [name for name in after if name not in before]
        return [f"{case.verb} changed {name} of the run" for name in (*changed, *added)]
    after_whole = whole_checkpoints(folder / RUN)
    if code == 2:
        gone = [name for name, digest in whole.items() if after_whole.get(name) != digest]
        return [f"{name}, which was whole, is lost or changed" for name in gone]
    # A run that goes on may retire what it kept, but does no step again that is whole.
    again = [name for name in whole if after_whole.get(name, whole[name]) != whole[name]]
    if again:
        return [f"{name}, which was whole, was made again" for name in again]
    if whole and (not after_whole or max(after_whole) < max(whole)):
        return [f"{max(whole)} was whole, and no checkpoint as new is there"]
    return []


def whole_checkpoints(run_directory: Path) -> dict[str, bytes]:
    """The digest of every checkpoint that verifies, by name, in `run` and in its stages."""
    found = {}
    for home in (run_directory, *sorted(run_directory.glob("stages/*"))):
        directory = RunDirectory(home)
        try:
            steps = directory.checkpoint_steps()
        except OSError:
            continue
        for step in steps:
            try:
                load_step(directory, step)
            except (SurefootError, OSError, ValueError):
                continue
            path = directory.step_path(step)
            digest = hashlib.sha256()
            for file in sorted(path.iterdir()):
                digest.update(file.name.encode() + file.read_bytes())
            found[str(path.relative_to(run_directory))] = digest.digest()
    return found


def tree(home: Path) -> dict[str, str]:
    """Everything below a directory: what it is and what it holds."""
    if not home.is_dir():
        return {".": _shot(home) or "absent"}
    return {
        str(path.relative_to(home)): shot
        for path in sorted(home.rglob("*"))
        if (shot := _shot(path)) is not None
    }


def _shot(path: Path) -> str | None:
    """A file's content in short; a directory is only there, and what is absent is None."""
    if path.is_symlink():
        return f"link to {os.readlink(path)}"
    if path.is_dir():
        return "directory"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
