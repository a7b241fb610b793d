"""What a critic is good for, on a character model small enough for many runs: claims C3, C19, C21.

    python bench/critic_study.py                          docs/results/critic_study.{json,txt,png}
    python bench/critic_study.py --steps 8 --seeds 2 --sweep 1 --out DIRECTORY      a smoke test

Task: write the digits of the prompt in order (copy_task.py), by a randomly initialised model of two
layers (character_model.py). Arms see equally many samples: the same prompts a step, completions a
prompt and steps, and for each seed the same first weights. First each arm's learning rate is
chosen, among the same rates for all, on seeds that are not used again. Then
(a) rloo, ppo with a reward for each position, ppo with the sum at the end, and ppo with half the
critic's layers; (b) ppo, and ppo_warm, whose critic starts from a policy that grpo has trained.
Each run is `surefoot train` in a process of its own with one thread.

Owns arms, runs and their figures. Refuses to own words and pictures (critic_report.py).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import character_model
import copy_task
from critic_report import draw, text

from surefoot.run.read import evaluations, read_metrics
from surefoot.statistics import mean_interval

HERE = Path(__file__).resolve().parent
NO_KL = {"place": "none", "coef": 0.0, "measure_every": 0}


@dataclass(frozen=True)
class Settings:
    """Of the whole study."""

    digits: str = "0123"
    length: int = 4
    held_out: int = 64
    prompts: int = 16
    group: int = 8
    steps: int = 120
    eval_every: int = 10
    seeds: int = 5
    warm: int = 10
    """Steps of the warm-up in (b)."""
    after: int = 30
    """Steps of ppo that (b) looks at."""
    rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3)
    sweep: int = 1
    """Seeds on which a rate is chosen."""
    workers: int = 2


@dataclass(frozen=True)
class Arm:
    """One way to train."""

    name: str
    reward: str
    """A function of copy_task.py."""
    method: dict[str, Any]
    critic: dict[str, Any] = field(default_factory=dict)


RLOO = Arm("rloo", "at_the_end", {"name": "rloo"})
PPO = Arm("ppo", "by_position", {"name": "ppo"})
END = Arm("ppo, sum at the end", "at_the_end", {"name": "ppo"})
CUT = Arm("ppo, half the critic's layers", "by_position", {"name": "ppo"}, {"layers": 1})
WARM = Arm("ppo_warm", "by_position", {"name": "ppo_warm"})
COMPARED = (RLOO, PPO, END, CUT)
SWEPT = (RLOO, PPO, END)


@dataclass(frozen=True)
class Job:
    """One run."""

    arm: Arm
    seed: int
    rate: float
    steps: int
    eval_every: int

    @property
    def name(self) -> str:
        words = "".join(c if c.isalnum() else "_" for c in self.arm.name)
        return f"{words}-{self.rate:g}-{self.steps}-seed{self.seed}"


class Bench:
    """Makes runs under a folder, some at a time."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings = settings
        self.folder = folder
        self.data = copy_task.write(
            folder, settings.digits, settings.length, held_out=settings.held_out
        )

    def recipe(self, job: Job) -> dict[str, Any]:
        own, arm = self.settings, job.arm
        model = self.folder / f"model{job.seed}"
        if not model.exists():
            character_model.save(
                model,
                characters=own.digits + copy_task.MARK,
                seed=job.seed,
                shape=character_model.Shape(),
            )
        return {
            "model": {"path": str(model), "template": "none"},
            "data": self.data,
            "reward": [{"use": f"{HERE / 'copy_task.py'}:{arm.reward}", "name": "copy"}],
            "method": {"group_size": own.group, "kl": NO_KL, **arm.method},
            "critic": arm.critic,
            "rollout": {"prompts_per_step": own.prompts, "max_new_tokens": own.length},
            "optim": {"learning_rate": job.rate},
            "run": {
                "dir": str(self.folder / job.name),
                "steps": job.steps,
                "eval_every": job.eval_every,
                "checkpoint_every": 0,
                "seed": job.seed,
                "trackers": [],
                "stop_without_signal": "never",
            },
        }

    def run(self, jobs: Iterable[Job]) -> dict[str, dict[str, Any]]:
        """The figures of each by its name; one that fails ends the study."""
        jobs = list(jobs)
        recipes = [self.recipe(job) for job in jobs]
        with ThreadPoolExecutor(self.settings.workers) as pool:
            list(pool.map(self._train, jobs, recipes))
        return {job.name: figures(self.folder / job.name) for job in jobs}

    def _train(self, job: Job, recipe: dict[str, Any]) -> None:
        began = time.perf_counter()
        path = self.folder / f"{job.name}.yaml"
        path.write_text(json.dumps(recipe), encoding="utf-8")  # JSON is YAML
        done = subprocess.run(
            [sys.executable, "-m", "surefoot", "train", str(path)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise SystemExit(f"{job.name}: exit {done.returncode}\n{done.stderr[-4000:]}")
        say(f"{time.perf_counter() - began:5.0f} s  {job.name}")


def figures(run: Path) -> dict[str, Any]:
    """The curves of a run, by step."""
    looks = evaluations(run)
    rows = [row for row in read_metrics(run) if row["step"] > 0]
    names = ("critic/explained_variance", "critic/value_add")
    return {
        "eval_steps": [look.step for look in looks],
        "accuracy": [look.accuracy for look in looks],
        "share_right": [look.reward for look in looks],
        "warmup": sum("warmup_steps" in row for row in rows),
        **{name.removeprefix("critic/"): [row.get(name) for row in rows] for name in names},
        "seconds_per_step": sum(row["time/step"] for row in rows) / len(rows),
    }


def area(found: dict[str, Any], name: str, *, until: int | None = None) -> float:
    """The mean of a curve over the evaluations after the first, up to a step."""
    pairs = zip(found["eval_steps"], found[name], strict=True)
    return mean([value for step, value in pairs if 0 < step <= (until or step)])


def explained(found: dict[str, Any], *, first: int, count: int) -> float | None:
    """Mean explained variance over `count` steps from place `first` (0 is the first step)."""
    seen = [v for v in found["explained_variance"][first : first + count] if v is not None]
    return mean(seen) if seen else None


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def paired(
    name: str, what: str, one: Sequence[float | None], other: Sequence[float | None]
) -> dict[str, Any]:
    """One minus the other, seed by seed, with Student's t interval."""
    gaps = [a - b for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    found = mean_interval(gaps) if len(gaps) > 1 else None
    return {
        "name": name,
        "what": what,
        "gaps": gaps,
        "interval": None if found is None else asdict(found),
    }


def choose_rates(bench: Bench) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """For each arm the rate with the largest mean share of right positions, and what was seen."""
    own = bench.settings
    jobs = {
        (arm.name, rate): [
            Job(arm, 100 + seed, rate, own.steps, own.eval_every) for seed in range(own.sweep)
        ]
        for arm in SWEPT
        for rate in own.rates
    }
    found = bench.run(job for group in jobs.values() for job in group)
    seen: dict[str, dict[str, float]] = {arm.name: {} for arm in SWEPT}
    for (name, rate), group in jobs.items():
        seen[name][f"{rate:g}"] = mean([area(found[job.name], "share_right") for job in group])
    best = {name: float(max(row, key=lambda rate: row[rate])) for name, row in seen.items()}
    return best, seen


def compare_methods(bench: Bench, rates: dict[str, float]) -> dict[str, Any]:
    """(a): the arms at equal samples."""
    own = bench.settings
    seeds = range(own.seeds)
    jobs = {
        arm.name: [Job(arm, s, rates[arm.name], own.steps, own.eval_every) for s in seeds]
        for arm in COMPARED
    }
    found = bench.run(job for group in jobs.values() for job in group)
    arms = {name: [found[job.name] for job in group] for name, group in jobs.items()}
    over = {name: [area(f, "accuracy") for f in group] for name, group in arms.items()}
    ends = {name: [f["accuracy"][-1] for f in group] for name, group in arms.items()}
    late = {
        name: [explained(f, first=own.steps - 20, count=20) for f in group]
        for name, group in arms.items()
    }
    differences = []
    for one, other in ((PPO, RLOO), (END, RLOO), (PPO, END), (CUT, PPO)):
        name = f"{one.name} - {other.name}"
        differences += [
            paired(name, "accuracy, mean over the run", over[one.name], over[other.name]),
            paired(name, "accuracy at the end", ends[one.name], ends[other.name]),
        ]
    cut = f"{CUT.name} - {PPO.name}"
    differences.append(
        paired(cut, "explained variance, last 20 steps", late[CUT.name], late[PPO.name])
    )
    return {"arms": arms, "over": over, "ends": ends, "late": late, "differences": differences}


def compare_warm(bench: Bench, rates: dict[str, float]) -> dict[str, Any]:
    """(b): a critic made of a policy that grpo has trained, beside one that starts with it."""
    own = bench.settings
    warm = replace(
        WARM, method={**WARM.method, "warmup": {"method": "grpo", "max_steps": own.warm}}
    )
    steps = own.warm + own.after
    jobs = {
        arm.name: [Job(arm, seed, rates[PPO.name], steps, 5) for seed in range(own.seeds)]
        for arm in (PPO, warm)
    }
    found = bench.run(job for group in jobs.values() for job in group)
    arms = {name: [found[job.name] for job in group] for name, group in jobs.items()}
    over = {name: [area(f, "accuracy", until=own.after) for f in g] for name, g in arms.items()}
    share = {name: [area(f, "share_right", until=own.after) for f in g] for name, g in arms.items()}
    early = {
        name: [explained(f, first=f["warmup"], count=own.after) for f in g]
        for name, g in arms.items()
    }
    name = f"{warm.name} - {PPO.name}"
    differences = [
        paired(name, f"accuracy, mean over the first {own.after} steps", *_pair(over)),
        paired(name, f"share of right positions, first {own.after} steps", *_pair(share)),
        paired(name, f"explained variance, first {own.after} steps of ppo", *_pair(early)),
    ]
    return {"arms": arms, "over": over, "share": share, "early": early, "differences": differences}


def _pair(figures: dict[str, list[Any]]) -> tuple[list[Any], list[Any]]:
    return figures[WARM.name], figures[PPO.name]


def say(line: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {line}", file=sys.stderr, flush=True)


def study(settings: Settings, folder: Path, out: Path) -> None:
    """Everything, in order."""
    began = time.perf_counter()
    bench = Bench(settings, folder)
    rates, swept = choose_rates(bench)
    say(f"rates: {rates}")
    rates[CUT.name] = rates[PPO.name]
    result = {
        "settings": asdict(settings),
        "shape": asdict(character_model.Shape()),
        "rates": rates,
        "swept": swept,
        "methods": compare_methods(bench, rates),
        "warm": compare_warm(bench, rates),
    }
    result["minutes"] = (time.perf_counter() - began) / 60
    out.mkdir(parents=True, exist_ok=True)
    (out / "critic_study.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
    (out / "critic_study.txt").write_text(text(result), encoding="utf-8")
    draw(result, out / "critic_study.png")
    print(text(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    own = Settings()
    for name in ("steps", "seeds", "sweep", "workers", "warm", "after"):
        parser.add_argument(f"--{name}", type=int, default=asdict(own)[name])
    parser.add_argument("--runs", type=Path, help="keep the runs here; those that are there count")
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "results")
    options = vars(parser.parse_args())
    runs, out = options.pop("runs"), options.pop("out")
    settings = replace(own, **options)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if runs is None else runs.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        study(settings, folder, out)


if __name__ == "__main__":
    main()
