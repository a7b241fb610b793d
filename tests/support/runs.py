"""Whole runs of the tiny model: recipes, child processes, and what must be equal afterwards."""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file

from support.tiny import write_rows
from support.zygote import Child, Zygote

REWARD = '''
"""A reward with spread: the share of lower-case letters, and a bonus for the row's own letter."""

import surefoot


@surefoot.reward_function
def letters(sample) -> float:
    text = sample.text
    share = sum(c.islower() for c in text) / max(1, len(text))
    return share + float(sample.answer in text)
'''


def make_recipe(folder: Path, model: Path, *, method: dict[str, Any], **changes: Any) -> Path:
    """Write a recipe, its data (5 rows, so that epochs end often) and its reward; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": f"say {c}", "answer": c, "id": c} for c in "abcdefg"]
    write_rows(folder / "rows.jsonl", rows)
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    recipe: dict[str, Any] = {
        "model": {"path": str(model)},
        "data": {"source": "rows.jsonl", "eval_size": 2},
        "reward": [{"use": "reward.py:letters"}],
        "method": {"group_size": 4, **method},
        "rollout": {"prompts_per_step": 2, "max_new_tokens": 8},
        "optim": {"learning_rate": 0.003},
        "run": {
            "dir": str(folder / "run"),
            "steps": 9,
            "eval_every": 4,
            "checkpoint_every": 2,
            "trackers": [],
            "seed": 3,
        },
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        recipe[section][name] = value
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


@functools.cache
def zygote() -> Zygote:
    """The warm process that all runs of a test session are forked from."""
    made = Zygote()
    atexit.register(made.close)
    return made


def start(recipe: Path, *overrides: str, **environment: str) -> Child:
    """`surefoot train` in a forked process and session of its own, on one thread."""
    return command("train", str(recipe), *overrides, cwd=recipe.parent, **environment)


def command(*arguments: str, cwd: Path, **environment: str) -> Child:
    """`surefoot ARGUMENTS`, likewise."""
    return zygote().start(*arguments, cwd=cwd, environment=environment)


def train(recipe: Path, *overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`surefoot train` to its end."""
    child = start(recipe, *overrides, **environment)
    out, err = child.communicate(timeout=200)
    assert child.returncode is not None
    return subprocess.CompletedProcess(child.args, child.returncode, out, err)


def train_after(before: str, recipe: Path) -> subprocess.CompletedProcess[str]:
    """`surefoot train` to its end in a process in which `before`, Python, was run first."""
    child = zygote().start("train", str(recipe), cwd=recipe.parent, environment={}, before=before)
    out, err = child.communicate(timeout=200)
    assert child.returncode is not None
    return subprocess.CompletedProcess(child.args, child.returncode, out, err)


def train_afresh(recipe: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """`python -m surefoot train` to its end, in a process that imports everything itself."""
    return subprocess.run(
        [sys.executable, "-m", "surefoot", "train", str(recipe), *overrides],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=recipe.parent,
        capture_output=True,
        text=True,
        timeout=200,
    )


def wait_for_step(run: Path, step: int, child: Child) -> None:
    """Return once metrics.jsonl shows `step`, or the child has ended."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and child.poll() is None:
        path = run / "metrics.jsonl"
        if path.is_file() and f'"step":{step},' in path.read_text().replace(" ", ""):
            return
        time.sleep(0.005)


def kill(child: Child, number: int = signal.SIGKILL) -> None:
    if child.poll() is None:
        os.kill(child.pid, number)


def alive(pid: int) -> bool:
    """Whether the process runs; one that is dead but not yet reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descendants(pid: int) -> set[int]:
    """Every process below `pid`, by parents alone."""
    children: dict[int, set[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, set()).add(int(stat.parent.name))
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), set()) - found
        found |= below
        waiting.extend(below)
    return found


def rows_of(run: Path, name: str) -> list[str]:
    """The rows of a ledger file as text, without what no identity claim covers.

    A file without rows may not be there: supervised runs have no groups and no samples.
    """
    outside = ("time/", "memory/", "host/")
    kept = []
    if not (run / name).exists():
        return kept
    for line in (run / name).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        kept.append(json.dumps({k: v for k, v in row.items() if not k.startswith(outside)}))
    return kept


def weights_of(run: Path) -> dict[str, bytes]:
    """Every tensor of the newest checkpoint, as bytes."""
    newest = max((run / "checkpoints").glob("step_??????"))
    found = {}
    for file in sorted(newest.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            found[f"{file.name}:{name}"] = tensor.numpy().tobytes()
    return found


def assert_same_run(got: Path, want: Path) -> None:
    """Final weights, moments and ledger rows are equal byte for byte."""
    for name in ("metrics.jsonl", "groups.jsonl", "samples.jsonl"):
        assert rows_of(got, name) == rows_of(want, name), name
    mine, theirs = weights_of(got), weights_of(want)
    assert mine.keys() == theirs.keys()
    for name in theirs:
        assert mine[name] == theirs[name], name
