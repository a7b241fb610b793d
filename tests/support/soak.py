"""A long run under random faults: what is done to it, what was seen to hit, and its memory."""

from __future__ import annotations

import inspect
import json
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from scipy.stats import theilslopes

from support.runs import descendants, kill, make_recipe, start
from support.tiny import write_rows
from support.zygote import Child
from surefoot.run.read import read_events

PATIENCE_S = 120.0
WARM_UP = 60
"""Steps of a process before its memory counts."""
_LINE = 120
"""Bytes, at most, of what a step shows on stderr."""


# -- faults of the reward --------------------------------------------------------------------------


def fault_of(key: str) -> str | None:
    """What the reward does instead of scoring a completion; it depends on the text alone."""
    import hashlib

    place = int(hashlib.sha256(key.encode()).hexdigest()[:8], 16) % 10_000
    for kind, share in {"raise": 70, "nan": 70, "die": 30, "hang": 5}.items():
        if place < share:
            return kind
        place -= share
    return None


_REWARD = '''
"""A reward with spread that fails where `fault_of` says so, and writes down that it did."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import surefoot

{rule}

@surefoot.reward_function
def letters(sample) -> float:
    key = sample.answer + ":" + sample.text
    kind = None if sample.answer.isupper() else fault_of(key)
    if kind is not None:
        line = json.dumps([kind, key]) + "\\n"
        handle = os.open(Path(__file__).with_name("injected"), os.O_WRONLY | os.O_APPEND)
        os.write(handle, line.encode())
        os.close(handle)
    if kind == "raise":
        raise RuntimeError("the service behind the reward is down")
    if kind == "nan":
        return float("nan")
    if kind == "die":
        os._exit(7)
    if kind == "hang":
        time.sleep(3600)
    share = sum(c.islower() for c in sample.text) / max(1, len(sample.text))
    return share + float(sample.answer in sample.text)
'''


def make_soak_recipe(folder: Path, model: Path, *, seed: int, steps: int) -> Path:
    """A run of the tiny model with a reward that fails; held-out rows have capitals as answers."""
    path = make_recipe(
        folder,
        model,
        method={"name": "grpo", "kl": {"measure_every": 10}},
        run__steps=steps,
        run__seed=seed,
        run__eval_every=100,
        run__checkpoint_every=steps // 15,
        run__samples="all",
        run__stop_at_failure_rate=1.0,
        # Slow enough that texts stay random: a reward fails for a text, and always.
        optim__learning_rate=1e-4,
    )
    held_out = [{"prompt": f"say {c}", "answer": c, "id": c} for c in "XYZ"]
    write_rows(folder / "held_out.jsonl", held_out)
    recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    recipe["data"] = [{"source": "rows.jsonl"}, {"source": "held_out.jsonl", "role": "eval"}]
    recipe["reward"] = [{"use": "reward.py:letters", "timeout": 2.0}]
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    text = _REWARD.format(rule=inspect.getsource(fault_of))
    (folder / "reward.py").write_text(text, encoding="utf-8")
    (folder / "injected").touch()
    return path


def injected(folder: Path) -> list[tuple[str, str]]:
    """Every fault that the reward of a recipe's folder has injected: (kind, key)."""
    lines = (folder / "injected").read_text(encoding="utf-8").splitlines()
    return [(kind, key) for kind, key in map(json.loads, lines)]


# -- kills and full disks --------------------------------------------------------------------------


@dataclass(frozen=True)
class Chapter:
    """One process of a run: perhaps a disk that refuses for a while, then an end."""

    end: str
    """kill, born (killed while it starts), term, refused (by the disk), or done."""
    until: int = 0
    """The step after which a kill or SIGTERM comes."""
    window: str = ""
    """What is refused: log, or checkpoint (and the log until then)."""
    opens: int = 0
    """The step after which the disk refuses."""


@dataclass
class Life:
    """What one process came to, as it was seen from outside."""

    chapter: Chapter
    code: int
    said: str
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def failed_saves(self) -> int:
        return sum(
            line.startswith("checkpoint of step") and "could not be written" in line
            for line in self.said.splitlines()
        )

    @property
    def warned(self) -> int:
        return self.said.count("cannot be written (")

    def count(self, kind: str) -> int:
        return sum(event["kind"] == kind for event in self.events)


def make_script(seed: int, steps: int, *, kills: int, terms: int, windows: int) -> list[Chapter]:
    """The chapters of a run that saves 15 times, drawn by `seed`.

    In the second one the disk refuses until the run gives up.
    """
    rng = random.Random(f"soak {seed}")
    every = steps // 15
    ends = ["kill"] * kills + ["term"] * terms
    rng.shuffle(ends)
    # One mark a stretch, so that every chapter is long enough for its window.
    base, stretch = int(3.2 * every), int(11 * every / len(ends))
    marks = [base + stretch * i + rng.randrange(stretch // 2, stretch) for i in range(len(ends))]
    opened = rng.sample(range(1, len(ends)), windows)
    chapters = [
        Chapter("kill", until=rng.randrange(int(1.1 * every), int(1.5 * every))),
        Chapter("refused", window="checkpoint", opens=rng.randrange(every // 4) + int(1.6 * every)),
    ]
    for i, (end, mark) in enumerate(zip(ends, marks, strict=True)):
        window = ("log", "checkpoint")[opened.index(i) % 2] if i in opened else ""
        opens = mark - stretch // 2 + rng.randrange(stretch // 4) if window else 0
        chapters.append(Chapter(end, until=mark, window=window, opens=opens))
        if rng.random() < 0.25:
            chapters.append(Chapter("born"))
    return [*chapters, Chapter("done")]


class Soak:
    """Lives the chapters of a script, each a process of the same command."""

    def __init__(self, recipe: Path, *, seed: int) -> None:
        self.recipe = recipe
        self.run = recipe.parent / "run"
        self.lives: list[Life] = []
        settings = yaml.safe_load(recipe.read_text(encoding="utf-8"))["run"]
        self._every = int(settings["checkpoint_every"])
        self._rng = random.Random(f"moments {seed}")

    def live(self, chapters: list[Chapter]) -> list[Life]:
        for chapter in chapters:
            before, reached = len(self._events()), last_step(self.run)
            child = start(self.recipe)
            try:
                self._chapter(chapter, child, before=-1 if reached is None else reached)
                _, said = child.communicate(timeout=PATIENCE_S)
            finally:
                kill(child)
            assert child.returncode is not None
            events = self._events()[before:]
            self.lives.append(Life(chapter, child.returncode, said, events))
        return self.lives

    def _events(self) -> list[dict[str, Any]]:
        return read_events(self.run) if (self.run / "events.jsonl").exists() else []

    def _gaps(self) -> int:
        return sum(event["kind"] == "gap" for event in self._events())

    def _chapter(self, chapter: Chapter, child: Child, *, before: int) -> None:
        """A step up to `before` may be one that an earlier life has written."""
        if chapter.end == "born":
            time.sleep(self._rng.uniform(0.02, 0.6))
            kill(child)
        if chapter.window:
            self._reach(max(chapter.opens, before + 1), child)
            self._refuse(chapter, child)
        if chapter.end in ("kill", "term"):
            self._reach(max(chapter.until, before + 1), child)
            time.sleep(self._rng.uniform(0.0, 0.1))
            kill(child, signal.SIGKILL if chapter.end == "kill" else signal.SIGTERM)

    def _refuse(self, chapter: Chapter, child: Child) -> None:
        """No file grows beyond what stderr will have, until the run is seen to have met it."""
        gaps = self._gaps()
        steps = self._every * (2 if chapter.end == "refused" else 1)
        limit_file_size(child, child.err.stat().st_size + 3000 + _LINE * steps)
        if chapter.end == "refused":
            return
        word = "cannot be written (" if chapter.window == "log" else "checkpoint of step"
        wait(child, lambda: word in child.err.read_text(encoding="utf-8"), f"{word!r} on stderr")
        time.sleep(self._rng.uniform(0.0, 0.05))
        limit_file_size(child, None)
        wait(child, lambda: self._gaps() > gaps, "a gap in the events")

    def _reach(self, step: int, child: Child) -> None:
        wait(child, lambda: (last_step(self.run) or 0) >= step, f"step {step}")


def limit_file_size(child: Child, size: int | None) -> None:
    """From now on the child's writes beyond `size` bytes of a file fail; None lifts that."""
    if child.poll() is None:
        _, hard = resource.prlimit(child.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (hard if size is None else size, hard))


def wait(child: Child, seen: Callable[[], bool], what: str) -> None:
    """Until it is seen, or the child has ended."""
    deadline = time.monotonic() + PATIENCE_S
    while child.poll() is None and not seen():
        if time.monotonic() > deadline:
            said = child.err.read_text(encoding="utf-8")[-2000:]
            raise TimeoutError(f"waited {PATIENCE_S:g} s for {what}; stderr ends with: {said}")
        time.sleep(0.01)


def last_step(run: Path) -> int | None:
    """The step of the last whole row of metrics.jsonl."""
    try:
        with open(run / "metrics.jsonl", "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - (1 << 15)))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return None
    whole = [line for line in lines[:-1] if line.startswith(b'{"step"')]
    return int(json.loads(whole[-1])["step"]) if whole else None


# -- memory ----------------------------------------------------------------------------------------


@dataclass
class Memory:
    """Own resident megabytes at each step that was seen: the training process, and its nursery."""

    steps: list[int] = field(default_factory=list)
    training: list[float] = field(default_factory=list)
    nursery: list[float] = field(default_factory=list)
    workers: list[float] = field(default_factory=list)
    """The largest of the reward workers (how many there are says nothing of a leak), or NaN."""

    def slope(self, megabytes: list[float]) -> float:
        """Megabytes per 100 steps after the warm-up: the median slope of all pairs of places.

        A leak raises every pair; a single jump, such as a library's buffer, raises few of them.
        """
        step_N, value_N = np.array(self.steps, float), np.array(megabytes)
        late_N = (step_N > WARM_UP) & np.isfinite(value_N)
        assert late_N.sum() >= 20
        return float(100 * theilslopes(value_N[late_N], step_N[late_N]).slope)


def watch(recipe: Path) -> tuple[Memory, Child]:
    """One life without kills and full disks, watched from outside at every third row or so."""
    memory, run = Memory(), recipe.parent / "run"
    child = start(recipe)
    deadline = time.monotonic() + PATIENCE_S
    while child.poll() is None and time.monotonic() < deadline:
        step = last_step(run)
        if step is not None and (not memory.steps or step >= memory.steps[-1] + 3):
            family = sorted(descendants(child.pid))
            sizes = [_resident(pid) for pid in (child.pid, *family)]
            if sizes[0] is not None:
                memory.steps.append(step)
                memory.training.append(sizes[0])
                memory.nursery.append((sizes[1:2] or [0.0])[0] or 0.0)
                memory.workers.append(max((size or 0.0 for size in sizes[2:]), default=np.nan))
        time.sleep(0.01)
    child.communicate(timeout=PATIENCE_S)
    return memory, child


def _resident(pid: int) -> float | None:
    """Of its own: pages of libraries are mapped when they are first touched, which is no growth."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        return int(status.partition("RssAnon:")[2].split()[0]) / 2**10
    except (OSError, IndexError):
        return None
