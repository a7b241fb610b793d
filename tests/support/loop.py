"""The whole online loop on scripted completions and scores, in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from support.hand import Told, score
from surefoot.learner.update import Learner
from surefoot.loops.assemble import Outside, Parts, assemble, make_learner, resolve_budget
from surefoot.loops.desk import Desk
from surefoot.loops.online import OnlineLoop
from surefoot.loops.signals import Stopper
from surefoot.loops.state import Progress
from surefoot.recipe import load, to_yaml
from surefoot.records import Group, Prompt
from surefoot.rollout.scripted import Line, ScriptedEngine
from surefoot.run.directory import RunDirectory
from surefoot.run.display import Display
from surefoot.run.ledger import Ledger
from surefoot.run.read import read_events, read_groups, read_metrics
from surefoot.run.trackers import open_trackers

Judge = Callable[[Prompt, int, int], Told]
"""What to say of (prompt, sample, number of the scoring call)."""


class ScriptedGrader:
    """Scores by calling `judge`; remembers which prompts it was asked about."""

    def __init__(self, judge: Judge, rewards: Sequence[Any] = ()) -> None:
        self.judge = judge
        self.rewards = tuple(rewards)
        self.asked: list[list[str]] = []
        self._last: dict[str, float] = {}
        self.spent: float | None = None

    def score(
        self, groups: Sequence[Group], *, same_step: bool = False, counted: bool = True
    ) -> list[Group]:
        call = len(self.asked)
        self.asked.append([g.prompt.id for g in groups])
        scored = [
            g.scored(tuple(score(self.judge(g.prompt, c.sample, call)) for c in g.completions))
            for g in groups
        ]
        statuses = [s.status.value for g in scored for s in g.scores or ()]
        if counted:
            self._last = {"reward_failures": float(statuses.count("infra_error"))}
        return scored

    def submit(
        self, groups: Sequence[Group], *, same_step: bool = False
    ) -> tuple[Sequence[Group], bool]:
        return groups, same_step

    def collect(self, pending: tuple[Sequence[Group], bool]) -> list[Group]:
        groups, same_step = pending
        return self.score(groups, same_step=same_step)

    def counts(self) -> dict[str, float]:
        return dict(self._last)

    def stop_if_broken(self) -> None:
        """A script is never broken."""

    def close(self) -> None:
        """Nothing to close."""


def plain_script(asked: Prompt, sample: int) -> Line:
    """Completions of 2 to 5 tokens, different for every prompt and sample."""
    base = sum(map(ord, asked.text)) + 13 * sample
    ids = tuple(8 + (base + 5 * t) % 80 for t in range(2 + base % 4))
    return Line(ids, f"text {sample}")


@dataclass
class Bench:
    """A loop ready to run."""

    parts: Parts
    learner: Learner
    loop: OnlineLoop
    desk: Desk
    grader: ScriptedGrader
    engine: ScriptedEngine
    said: StringIO

    @property
    def path(self) -> Path:
        return self.desk.directory.path

    def run(self) -> None:
        """Run to the end, or to the stop that it raises."""
        try:
            self.loop.run()
        finally:
            self.desk.ledger.close()

    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.path)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.path) if event["kind"] == kind]

    def groups(self) -> list[dict[str, Any]]:
        return read_groups(self.path, split="train")


def _rows(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"question {i}", "answer": str(i), "id": f"r{i}"} for i in range(count)]


def make_loop(
    model: Path,
    run: Path,
    *,
    method: Mapping[str, Any],
    judge: Judge,
    script: Callable[[Prompt, int], Line] = plain_script,
    rows: int = 12,
    prompts: int = 2,
    steps: int = 2,
    rate: float = 1e-3,
    settings: Mapping[str, Any] | None = None,
    sources: Sequence[Mapping[str, Any]] | None = None,
) -> Bench:
    """Assemble a run as `train` does, with the engine and the grader replaced by scripts.

    `sources` are data sections of their own; without them `rows` questions are made here.
    """
    recipe = load(
        {
            "model": {"path": str(model)},
            "data": [dict(s) for s in sources] if sources else {"source": "rows"},
            "reward": [{"use": "exact"}],
            "method": dict(method),
            "rollout": {"prompts_per_step": prompts, "max_new_tokens": 10},
            "optim": {"learning_rate": rate, "tokens_per_microbatch": 4096},
            "run": {
                "dir": str(run),
                "steps": steps,
                "checkpoint_every": 0,
                "trackers": [],
                # What a script says is no sample of the model.
                "stop_at_mismatch": "never",
                **(settings or {}),
            },
        },
        outside=() if sources else ("data",),
    )
    parts = assemble(recipe, Outside(rows=None if sources else _rows(rows)), interrupt=lambda: None)
    recipe = parts.recipe = resolve_budget(recipe, parts.loaded)
    parts.grader.close()
    grader = ScriptedGrader(judge, parts.grader.rewards)
    engine = ScriptedEngine(script)
    parts.grader, parts.engine = grader, engine  # type: ignore[assignment]
    learner, _ = make_learner(parts)
    directory = RunDirectory(run).create()
    directory.write_recipe(to_yaml(recipe))
    said = StringIO()
    desk = Desk(
        directory,
        Ledger(directory, resume_step=None, seed=recipe.run.seed),
        open_trackers(recipe.run.trackers, directory, config={}, resume_step=None),
        Display(steps, stream=said),
        {"model": "tiny"},
    )
    loop = OnlineLoop(parts, learner, desk, Progress(), Stopper())
    return Bench(parts, learner, loop, desk, grader, engine, said)
