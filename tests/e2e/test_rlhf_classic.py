"""RLHF in three stages on the study model: whole, and killed in each stage; and RL on it alone."""

from __future__ import annotations

import json
import re
import shlex
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from support.chains import assert_same_chain, stage
from support.runs import command, kill, wait_for_step
from support.zygote import Child

import surefoot

ROOT = Path(__file__).resolve().parents[2]
CLASSIC = ROOT / "examples" / "rlhf_classic.yaml"
STAGES = ("sft", "reward_model", "ppo")
STEPS = {"sft": 16, "reward_model": 12, "ppo": 10}


def overrides(run: Path) -> list[str]:
    """Those of the command in docs/recipes.md, and fewer steps."""
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    command = re.search(r"^surefoot train (.*rlhf_classic\.yaml(?:.*\\\n)+.*)$", page, re.MULTILINE)
    assert command is not None
    recipe, *documented = shlex.split(command[1].replace("\\\n", " "))
    assert ROOT / recipe == CLASSIC
    short = [f"stages.{name}.run.steps={steps}" for name, steps in STEPS.items()]
    every = ["run.checkpoint_every=4", "run.eval_every=8", "run.trackers=[]"]
    return [*documented, *short, *every, f"run.dir={run}"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a chain that nothing disturbed."""
    run = tmp_path_factory.mktemp("whole") / "run"
    finish(run)
    return run


def begin(run: Path) -> Child:
    """The documented command; the working directory is not the recipe's, which is ours."""
    return command("train", str(CLASSIC), *overrides(run), cwd=run.parent)


def finish(run: Path) -> None:
    child = begin(run)
    _, err = child.communicate(timeout=280)
    assert child.returncode == 0, err


def rows(run: Path, name: str) -> list[dict[str, float]]:
    text = (stage(run, name) / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_the_chain_runs_whole(finished: Path) -> None:
    for name, steps in STEPS.items():
        assert max(row["step"] for row in rows(finished, name)) == steps
        assert (stage(finished, name) / "model" / "model.safetensors").is_file()
    imitation = [row["eval/loss"] for row in rows(finished, "sft") if "eval/loss" in row]
    assert imitation[-1] < imitation[0]
    judged = [row for row in rows(finished, "reward_model") if "eval/n" in row]
    assert [(row["step"], row["eval/n"]) for row in judged] == [(0, 40), (8, 40), (12, 40)]
    # PPO earns the reward model's reward, and the rule beside it is only watched.
    ppo = [row for row in rows(finished, "ppo") if "reward" in row]
    assert len(ppo) == STEPS["ppo"]
    assert all(row["reward"] != row["rewards/numeric/mean"] for row in ppo)


def test_kill_nine_in_each_stage(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for place, name in enumerate(STAGES, 1):
        child = begin(run)
        wait_for_step(run / "stages" / f"{place:02d}_{name}", 5, child)
        kill(child)
        child.communicate(timeout=60)
        assert child.returncode == -signal.SIGKILL
    finish(run)
    assert_same_chain(run, finished)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    seen = Counter((row["kind"], row["stage"], row.get("resumes")) for row in events)
    for name in STAGES:
        assert seen["stage_began", name, False] == 1
        assert seen["stage_began", name, True] == 1, f"{name} was not killed inside"
        assert seen["stage_ended", name, None] == 1


def test_rl_teaches_the_study_model_in_seconds(tmp_path: Path) -> None:
    steps = 40
    began = time.process_time()
    run = surefoot.train(
        ROOT / "examples" / "study_rl.yaml",
        [f"run.dir={tmp_path / 'run'}", f"run.steps={steps}", f"run.eval_every={steps}"],
    )
    # Processor time, which other processes do not lengthen; with loading and both evaluations.
    assert (time.process_time() - began) / steps < 0.3
    before, after = (row["eval/accuracy"] for row in run.metrics if "eval/accuracy" in row)
    # Over 200 sums a share of a third has a standard error of 0.03.
    assert after > before + 0.1
