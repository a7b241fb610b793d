"""Bad input, by the command line: one message that names key, row or file and the mend."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.runs import (
    assert_same_run,
    command,
    make_recipe,
    rows_of,
    start,
    train,
    wait_for_step,
)
from support.tiny import write_rows

ROOT = Path(__file__).resolve().parents[2]
GRPO = {"name": "grpo", "group_size": 4}
CONSTANT = """
import surefoot


@surefoot.reward_function
def seven(sample) -> float:
    return 0.7
"""


@dataclass
class Place:
    """A recipe that works, and what makes it bad."""

    recipe: Path

    @property
    def folder(self) -> Path:
        return self.recipe.parent

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def change(self, key: str, value: Any) -> None:
        raw = yaml.safe_load(self.recipe.read_text())
        section, _, name = key.partition(".")
        if name:
            raw[section][name] = value
        else:
            raw[section] = value
        self.recipe.write_text(yaml.safe_dump(raw))

    def rows(self, rows: list[dict[str, object]]) -> None:
        write_rows(self.folder / "rows.jsonl", rows)

    def refused(self, *overrides: str, code: int = 2) -> str:
        """Train; the message, after the checks that every answer must pass."""
        done = train(self.recipe, *overrides)
        assert done.returncode == code, done.stderr
        return answered(done.stderr)


def answered(stderr: str) -> str:
    """One message, no traceback, nobody else's warnings."""
    assert "Traceback" not in stderr and "this is a bug" not in stderr, stderr
    messages = [line for line in stderr.splitlines() if line.startswith("surefoot: ")]
    assert messages, stderr
    return stderr


@pytest.fixture
def place(tiny_model: Path, tmp_path: Path) -> Place:
    return Place(make_recipe(tmp_path, tiny_model, method=GRPO, run__steps=3))


def test_the_recipe_itself_is_good(place: Place) -> None:
    done = train(place.recipe)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_a_misspelled_key_and_the_nearest_name(place: Place) -> None:
    place.change("optim.learing_rate", 0.1)
    said = place.refused()
    assert "optim.learing_rate" in said and "learning_rate" in said.replace("learing_rate", "")
    assert not place.run.exists()


@pytest.mark.parametrize(
    ("override", "named", "nearest"),
    [
        ("rollout.temprature=0.5", "rollout.temprature", "temperature"),
        ("metod.group_size=4", "metod", "method"),
        ("method.name=gropo", "gropo", "grpo"),
    ],
)
def test_a_misspelled_override(place: Place, override: str, named: str, nearest: str) -> None:
    said = place.refused(override)
    assert named in said and nearest in said
    assert not place.run.exists()


def test_a_misspelled_verb_and_a_recipe_that_is_not_there(tmp_path: Path) -> None:
    for arguments, named in ((("trian",), "trian"), (("train", "no.yaml"), "no.yaml")):
        child = command(*arguments, cwd=tmp_path)
        _, err = child.communicate(timeout=60)
        assert child.returncode == 2 and named in err and "Traceback" not in err


@pytest.mark.fault(31)
def test_a_missing_column(place: Place) -> None:
    place.rows([{"question": "say a", "answer": "a"}] * 4)
    said = place.refused()
    assert "rows.jsonl:1" in said and "prompt" in said and "question" in said
    assert "columns" in said


def test_a_column_that_a_reward_needs(place: Place) -> None:
    place.change("reward", [{"use": "exact"}])
    place.change("run.steps", 50)
    place.rows([{"prompt": f"say {c}", "id": c} for c in "abcdefg"])
    said = place.refused(code=3)
    assert "all 5 rows for step" in said and "has no answer" in said
    events = [json.loads(line) for line in (place.run / "events.jsonl").read_text().splitlines()]
    reasons = [event["message"] for event in events if event["kind"] == "quarantined"]
    assert len(reasons) == 5 and all("has no answer" in reason for reason in reasons)


def test_an_empty_file(place: Place) -> None:
    place.rows([])
    said = place.refused()
    assert "rows.jsonl is empty" in said and "one JSON object a line" in said


def test_a_file_that_is_not_there(place: Place) -> None:
    (place.folder / "rows.jsonl").rename(place.folder / "other.jsonl")
    said = place.refused()
    assert "data.source" in said and "rows.jsonl" in said and "other.jsonl" in said


@pytest.mark.fault(31, 33)
@pytest.mark.parametrize("prompt", ["", "   ", None, 7])
def test_a_row_without_a_prompt(place: Place, prompt: object) -> None:
    rows: list[dict[str, object]] = [{"prompt": f"say {c}", "answer": c} for c in "abcdefg"]
    rows[2]["prompt"] = prompt
    place.rows(rows)
    said = place.refused()
    assert "rows.jsonl:3" in said and "prompt" in said


@pytest.mark.fault(33)
def test_prompts_longer_than_the_context(place: Place) -> None:
    place.rows([{"prompt": "long " * 200, "answer": "a"}] * 4)
    said = place.refused()
    # 512 less the 8 that a completion may have.
    assert "all 4 prompts are longer than 504 tokens" in said and "rows.jsonl:1" in said
    assert "rollout.max_new_tokens" in said and "shorten the prompts" in said


@pytest.mark.fault(33)
def test_one_prompt_longer_than_the_context_is_counted(place: Place) -> None:
    rows: list[dict[str, object]] = [{"prompt": f"say {c}", "answer": c} for c in "abcdefg"]
    place.rows([*rows, {"prompt": "long " * 200, "answer": "a"}])
    done = train(place.recipe)
    assert done.returncode == 0, done.stderr
    assert "8 rows, 5 to train on, 2 for eval" in done.stderr
    assert "1 left out (12.5%): longer than 504 tokens" in done.stderr


def test_an_unknown_model(place: Place) -> None:
    place.change("model.path", "./no-such-model")
    said = place.refused()
    assert "model.path" in said and "no-such-model" in said


def test_an_alias_misspelled(place: Place) -> None:
    place.change("model.path", "smollm-135m")
    said = place.refused()
    assert "smollm-135m" in said and "smollm2-135m" in said


def test_group_size_one_for_grpo(place: Place) -> None:
    said = place.refused("method.group_size=1")
    assert "group_size" in said and "2 or more" in said
    assert not place.run.exists()


def test_an_unknown_reward(place: Place) -> None:
    place.change("reward", [{"use": "reward.py:leters"}])
    said = place.refused()
    assert "leters" in said and "letters" in said


@pytest.mark.fault(17)
def test_a_constant_reward_stops_with_the_reason(place: Place) -> None:
    (place.folder / "reward.py").write_text(CONSTANT)
    place.change("reward", [{"use": "reward.py:seven"}])
    place.change("run.stop_without_signal", 2)
    place.change("run.steps", 50)
    said = place.refused(code=3)
    assert "2 steps in a row gave no signal" in said and "mean reward is 0.7" in said
    assert "run.stop_without_signal" in said
    assert [path.name for path in (place.run / "checkpoints").iterdir()] == ["step_000002"]
    steps = [json.loads(line)["step"] for line in rows_of(place.run, "metrics.jsonl")]
    assert steps == [0, 1, 2]
    # What the message names does help: the same run goes on.
    done = train(place.recipe, "run.stop_without_signal=never", "run.steps=4")
    assert done.returncode == 0, done.stderr


@pytest.mark.fault(22)
def test_a_reward_that_always_raises_stops_with_its_error(place: Place) -> None:
    (place.folder / "reward.py").write_text(CONSTANT.replace("return 0.7", "raise KeyError('kq')"))
    place.change("reward", [{"use": "reward.py:seven"}])
    done = train(place.recipe)
    assert done.returncode == 3, done.stderr
    assert "8 of 8 completions" in done.stderr and "stop_at_failure_rate" in done.stderr
    # The reward is the user's, so where it broke is shown, once; but it is not our bug.
    assert "raised KeyError: 'kq'" in done.stderr and "reward.py" in done.stderr
    assert done.stderr.count("Traceback") == 1 and "this is a bug" not in done.stderr


def test_the_directory_of_something_else(place: Place) -> None:
    place.run.mkdir()
    (place.run / "thesis.tex").write_text("all of it")
    done = train(place.recipe)
    assert done.returncode == 2
    assert "holds other files (thesis.tex)" in " ".join(done.stderr.split())
    assert [entry.name for entry in place.run.iterdir()] == ["thesis.tex"]
    assert (place.run / "thesis.tex").read_text() == "all of it"


@pytest.mark.fault(4)
def test_ctrl_c_in_a_step_loses_nothing(place: Place, tiny_model: Path, tmp_path: Path) -> None:
    """As a terminal sends it: to the run and to everything in its process group."""
    place.change("run.steps", 12)
    place.change("run.checkpoint_every", 0)
    whole = Place(make_recipe(tmp_path / "whole", tiny_model, method=GRPO, run__steps=12))
    whole.change("run.checkpoint_every", 0)
    assert train(whole.recipe).returncode == 0
    child = start(place.recipe)
    wait_for_step(place.run, 2, child)
    os.killpg(child.pid, signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 75, err
    said = answered(err)
    assert "interrupted by SIGINT" in said and "same command resumes" in said
    # Every step that the ledger shows is in the checkpoint.
    (saved,) = (place.run / "checkpoints").iterdir()
    shown = [json.loads(line)["step"] for line in rows_of(place.run, "metrics.jsonl")]
    assert shown == list(range(int(saved.name.removeprefix("step_")) + 1)) and shown[-1] >= 2
    done = train(place.recipe)
    assert done.returncode == 0, done.stderr
    assert_same_run(place.run, whole.run)


@pytest.mark.fault(4)
def test_ctrl_c_before_the_run_has_begun(place: Place) -> None:
    """Where Python raises KeyboardInterrupt by itself: while rooms and recipe are being read."""
    code = (
        "import sys, surefoot.recipe\n"
        "def interrupted(*_, **__): raise KeyboardInterrupt\n"
        "surefoot.recipe.load = interrupted\n"
        f"sys.argv = ['surefoot', 'train', {str(place.recipe)!r}]\n"
        "from surefoot.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 75, done.stderr
    assert "interrupted" in answered(done.stderr) and not place.run.exists()


@pytest.mark.fault(4)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_it_at_once_and_resumably(
    place: Place, tiny_model: Path, tmp_path: Path, number: int
) -> None:
    whole = make_recipe(tmp_path / "whole", tiny_model, method=GRPO, run__steps=12)
    place.change("run.steps", 12)
    assert train(whole).returncode == 0
    child = start(place.recipe)
    wait_for_step(place.run, 2, child)
    os.kill(child.pid, number)
    os.kill(child.pid, number)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 75 and "Traceback" not in err, err
    done = train(place.recipe)
    assert done.returncode == 0, done.stderr
    assert_same_run(place.run, whole.parent / "run")


def test_eval_and_export_of_what_is_no_run(tmp_path: Path) -> None:
    for arguments in (("eval", str(tmp_path)), ("export", str(tmp_path), str(tmp_path / "out"))):
        child = command(*arguments, cwd=tmp_path)
        _, err = child.communicate(timeout=60)
        assert child.returncode == 2
        assert "is no run directory" in answered(err)
