"""Signals within a grace time, and a resume with something changed (fault rows 4 and 8)."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.offline import make_offline_recipe
from support.runs import assert_same_run, kill, make_recipe, rows_of, start, train, wait_for_step
from support.tiny import TEMPLATE, make_tokenizer, save_tiny, write_rows

from surefoot.errors import EXIT_INTERRUPTED, Interrupted
from surefoot.learner.scorer import Scorer
from surefoot.loops import entry
from surefoot.loops.preference import PreferenceTask
from surefoot.loops.signals import Stopper
from surefoot.rollout import LocalEngine
from surefoot.run.checkpoint import load_latest
from surefoot.run.directory import RunDirectory
from surefoot.run.read import read_events

GRPO = {"name": "grpo", "epochs": 2, "minibatches": 2}


def steps_of(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in rows_of(run, "metrics.jsonl")]


def saved_steps(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step_??????"))


class Once:
    """Sends SIGTERM from inside a call of the library, the `nth` time that it is made."""

    def __init__(self, nth: int) -> None:
        self.left = nth

    def __call__(self) -> bool:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            return True
        return False


@contextmanager
def cut_off_in_second_look() -> Iterator[None]:
    """A SIGTERM in the second evaluation on given data, without any patience."""
    look, due = PreferenceTask.look, Once(2)

    def signals(task: PreferenceTask, step: int) -> Any:
        due()
        return look(task, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PreferenceTask, "look", signals)
        patch.setattr("surefoot.loops.signals._PATIENCE", 0.0)
        yield


# -- signals ---------------------------------------------------------------------------------------


@pytest.mark.fault(4)
def test_a_second_signal_ends_the_process_at_once(tiny_model: Path, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, tiny_model, method=GRPO, run__steps=4000)
    child = start(recipe)
    wait_for_step(tmp_path / "run", 2, child)
    os.kill(child.pid, signal.SIGSTOP)
    # Both are pending when it goes on, so no step lies between them.
    os.kill(child.pid, signal.SIGUSR1)
    os.kill(child.pid, signal.SIGTERM)
    os.kill(child.pid, signal.SIGCONT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == EXIT_INTERRUPTED
    assert "saving; again to stop at once" in err and "Traceback" not in err
    assert not [e for e in read_events(tmp_path / "run") if e["kind"] == "stopped"]


SLEEPS = """
import time

import surefoot


@surefoot.reward_function
def letters(sample) -> float:
    time.sleep(600)
    return 1.0
"""

BASELINE = """
import pathlib
import time


def sleeps(reward_PG, *, valid_PG, length_PG):
    if pathlib.Path("asleep").exists():
        pathlib.Path("asleep").write_text("now")
        time.sleep(600)
    return reward_PG - 0.5
"""


def _until(holds: Callable[[], bool], child: Any) -> None:
    deadline = time.monotonic() + 60
    while not holds() and time.monotonic() < deadline:
        assert child.poll() is None, child.err.read_text()
        time.sleep(0.01)


@pytest.mark.fault(4)
def test_scoring_is_abandoned_however_long_it_would_take(tiny_model: Path, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, tiny_model, method={"name": "grpo"}, run__checkpoint_every=0)
    assert train(recipe, "run.steps=2").returncode == 0
    (tmp_path / "reward.py").write_text(SLEEPS, encoding="utf-8")
    child = start(recipe, "run.steps=4", "reward.0.timeout=600")
    events = tmp_path / "run" / "events.jsonl"
    _until(lambda: '"resumed"' in events.read_text(), child)
    time.sleep(0.5)
    kill(child, signal.SIGTERM)
    _, err = child.communicate(timeout=60)
    assert child.returncode == EXIT_INTERRUPTED, err
    assert "state is saved" in err
    assert [e for e in read_events(tmp_path / "run") if e["kind"] == "stopped"]
    assert saved_steps(tmp_path / "run")[-1] == 2 and steps_of(tmp_path / "run") == [0, 1, 2]


@pytest.mark.fault(4)
def test_what_finds_no_safe_place_ends_after_the_grace_time(
    tiny_model: Path, tmp_path: Path
) -> None:
    """A baseline of the user's own that takes ten minutes: nothing can be saved meanwhile."""
    (tmp_path / "maths.py").write_text(BASELINE, encoding="utf-8")
    method = {"name": "rloo", "baseline": {"use": "maths.py:sleeps"}}
    recipe = make_recipe(tmp_path, tiny_model, method=method, run__steps=4000)
    child = start(recipe, "run.grace=0.5")
    wait_for_step(tmp_path / "run", 2, child)
    (tmp_path / "asleep").touch()
    _until(lambda: (tmp_path / "asleep").read_text() == "now", child)
    began = time.monotonic()
    kill(child, signal.SIGTERM)
    _, err = child.communicate(timeout=60)
    assert child.returncode == EXIT_INTERRUPTED, err
    assert 0.5 <= time.monotonic() - began < 30
    assert "nothing could be saved within run.grace, 0.5 seconds" in err
    (tmp_path / "asleep").unlink()
    end = saved_steps(tmp_path / "run")[-1] + 3
    done = train(recipe, f"run.steps={end}")
    assert done.returncode == 0, done.stderr
    assert steps_of(tmp_path / "run") == list(range(end + 1))


@pytest.mark.fault(4)
@pytest.mark.parametrize("nth", [1, 2])
def test_an_update_is_abandoned_until_a_weight_changes_then_finished(
    nth: int, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four optimizer steps a step; the grace time is over as soon as the signal comes."""
    whole = make_recipe(tmp_path / "whole", tiny_model, method=GRPO, run__steps=4)
    entry.train(whole)
    stopped = make_recipe(tmp_path / "stopped", tiny_model, method=GRPO, run__steps=4)
    forward, due, told = Scorer.forward, Once(nth), []

    def signals_in_training(scorer: Scorer, part: Any) -> Any:
        import torch

        if torch.is_grad_enabled() and saved_steps(tmp_path / "stopped" / "run") == [2] and due():
            told.append(nth)
        return forward(scorer, part)

    monkeypatch.setattr(Scorer, "forward", signals_in_training)
    monkeypatch.setattr("surefoot.loops.signals._PATIENCE", 0.0)
    with pytest.raises(Interrupted):
        entry.train(stopped)
    assert told == [nth]
    run = tmp_path / "stopped" / "run"
    # The first forward of step 3 comes before any weight changed, a later one does not.
    assert saved_steps(run)[-1] == (2 if nth == 1 else 3)
    monkeypatch.undo()
    entry.train(stopped)
    assert_same_run(run, tmp_path / "whole" / "run")


@pytest.mark.fault(4)
@pytest.mark.parametrize("patient", [True, False])
def test_an_evaluation_is_finished_within_half_the_grace_time_or_owed(
    patient: bool, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make_recipe(tmp_path / "whole", tiny_model, method={"name": "dapo"}, run__steps=5)
    entry.train(whole)
    stopped = make_recipe(tmp_path / "stopped", tiny_model, method={"name": "dapo"}, run__steps=5)
    sample, due = LocalEngine.sample, Once(2)  # the first is before the first step

    def signals_in_evaluation(engine: LocalEngine, *args: Any, **kwargs: Any) -> Any:
        if kwargs["purpose"] == "eval":
            due()
        return sample(engine, *args, **kwargs)

    monkeypatch.setattr(LocalEngine, "sample", signals_in_evaluation)
    monkeypatch.setattr("surefoot.loops.signals._PATIENCE", 0.5 if patient else 0.0)
    with pytest.raises(Interrupted):
        entry.train(stopped)
    run = tmp_path / "stopped" / "run"
    assert saved_steps(run)[-1] == 4
    assert steps_of(run) == ([0, 1, 2, 3, 4] if patient else [0, 1, 2, 3])
    monkeypatch.undo()
    entry.train(stopped)
    assert_same_run(run, tmp_path / "whole" / "run")


@pytest.mark.fault(4)
def test_an_owed_evaluation_of_the_last_step_is_not_forgotten(
    tiny_model: Path, tmp_path: Path
) -> None:
    """By its step the run is complete; its last row is not there."""
    pairs = {"method": {"name": "dpo"}, "rows": "pairs", "run__steps": 4}
    whole = make_offline_recipe(tmp_path / "whole", tiny_model, **pairs)
    entry.train(whole)
    stopped = make_offline_recipe(tmp_path / "stopped", tiny_model, **pairs)
    with cut_off_in_second_look(), pytest.raises(Interrupted):
        entry.train(stopped)
    run = tmp_path / "stopped" / "run"
    assert (saved_steps(run)[-1], steps_of(run)) == (4, [0, 1, 2, 3])
    entry.train(stopped)
    assert_same_run(run, tmp_path / "whole" / "run")


@pytest.mark.fault(4)
def test_what_an_abandoned_step_cost_is_not_forgotten(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest checkpoint is of the step before, and knows only what that one had cost."""
    recipe = make_recipe(tmp_path, tiny_model, method={"name": "rloo"}, run__eval_every=0)
    price = ["reward.0.price=0.01"]
    entry.train(recipe, ["run.steps=2", *price])
    directory = RunDirectory(tmp_path / "run")

    def cost() -> float:
        found = load_latest(directory)
        assert found is not None and found.step == 2
        return float(found.state["cost"])

    assert cost() == pytest.approx(2 * 8 * 0.01)
    forward, due = Scorer.forward, Once(1)

    def signals(scorer: Scorer, part: Any) -> Any:
        import torch

        if torch.is_grad_enabled() and saved_steps(directory.path) == [2] and scoring:
            due()
        return forward(scorer, part)

    scoring: list[int] = []
    sample = LocalEngine.sample

    def sampled(engine: LocalEngine, *args: Any, **named: Any) -> Any:
        scoring.append(1)
        return sample(engine, *args, **named)

    monkeypatch.setattr(LocalEngine, "sample", sampled)
    monkeypatch.setattr(Scorer, "forward", signals)
    monkeypatch.setattr("surefoot.loops.signals._PATIENCE", 0.0)
    with pytest.raises(Interrupted):
        entry.train(recipe, ["run.steps=3", *price])
    assert cost() == pytest.approx(3 * 8 * 0.01)


@pytest.mark.fault(4)
def test_a_row_that_was_owed_is_never_doubled(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off before step 1, in the evaluation of step 4, and in the step after each."""
    dapo = {"method": {"name": "dapo"}, "run__steps": 6, "run__checkpoint_every": 0}
    whole = make_recipe(tmp_path / "whole", tiny_model, **dapo)
    entry.train(whole)
    recipe = make_recipe(tmp_path / "stopped", tiny_model, **dapo)
    run = tmp_path / "stopped" / "run"
    sample = LocalEngine.sample
    for purpose, version in (("eval", 0), ("rollout", 0), ("eval", 4), ("rollout", 4)):

        def signals(
            engine: LocalEngine, *args: Any, _at: Any = (purpose, version), **named: Any
        ) -> Any:
            if (named["purpose"], engine.version) == _at:
                os.kill(os.getpid(), signal.SIGTERM)
            return sample(engine, *args, **named)

        monkeypatch.setattr(LocalEngine, "sample", signals)
        monkeypatch.setattr("surefoot.loops.signals._PATIENCE", 0.0)
        with pytest.raises(Interrupted):
            entry.train(recipe)
        monkeypatch.undo()
    assert steps_of(run) == [0, 1, 2, 3, 4]
    for _ in range(2):
        entry.train(recipe)
        assert_same_run(run, tmp_path / "whole" / "run")


@pytest.mark.fault(4)
def test_an_owed_last_row_completes_the_run(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_offline_recipe(tmp_path, tiny_model, method={"name": "dpo"}, rows="pairs")
    with cut_off_in_second_look(), pytest.raises(Interrupted):
        entry.train(recipe, ["run.steps=3", "run.eval_every=3"])
    for told in (False, True):
        capsys.readouterr()
        entry.train(recipe, ["run.steps=3", "run.eval_every=3"])
        assert ("is complete at step 3" in capsys.readouterr().err) == told
        assert steps_of(tmp_path / "run") == [0, 1, 2, 3]


@pytest.mark.fault(4)
@pytest.mark.parametrize("saving", [True, False])
def test_the_grace_time_ends_a_computation_and_no_saving(saving: bool) -> None:
    """Saving that began before the signal came counts too."""
    child = os.fork()
    if child == 0:
        with Stopper(grace=0.2) as stopper:
            stopper.safe()
            if not saving:
                stopper.computing()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(2.0)
        os._exit(7)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == (7 if saving else EXIT_INTERRUPTED)


def test_the_stopper_waits_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("surefoot.loops.signals.time.monotonic", lambda: now[0])
    with Stopper(grace=10.0) as stopper:
        stopper.check()
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(Interrupted, match="SIGUSR1"):
            stopper.check()
        with stopper.held():
            stopper.check()
            now[0] += 4.9
            with stopper.held():
                stopper.check()
            stopper.check()
            now[0] += 0.2
            with pytest.raises(Interrupted):
                stopper.check()
        stopper.safe()


# -- a resume with something changed ---------------------------------------------------------------


def _another_row(folder: Path, model: Path) -> list[str]:
    rows = [{"prompt": f"say {c}", "answer": c, "id": c} for c in "abcdefz"]
    write_rows(folder / "rows.jsonl", rows)
    return []


def _more_rows(folder: Path, model: Path) -> list[str]:
    rows = [{"prompt": f"say {c}", "answer": c, "id": c} for c in "abcdefghijk"]
    write_rows(folder / "rows.jsonl", rows)
    return []


def _another_template(folder: Path, model: Path) -> list[str]:
    text = (model / "chat_template.jinja").read_text(encoding="utf-8")
    assert text == TEMPLATE
    (model / "chat_template.jinja").write_text("! " + text, encoding="utf-8")
    return []


CHANGES: dict[str, tuple[Callable[[Path, Path], list[str]], str, str, str]] = {
    # What changes; what the refusal shows; what allows it; what is then told.
    "rows": (_another_row, "data was", "data", "data (sha256): "),
    "more rows": (_more_rows, "data was", "data", "data (sha256): "),
    "template": (_another_template, "template was", "model.template", "template (sha256): "),
    "rate": (
        lambda folder, model: ["optim.learning_rate=0.001"],
        "optim.learning_rate: 0.003 -> 0.001",
        "optim.learning_rate",
        "optim.learning_rate: 0.003 -> 0.001",
    ),
    "seed": (lambda folder, model: ["run.seed=4"], "run.seed: 3 -> 4", "run.seed", "run.seed"),
}


@pytest.mark.fault(8)
@pytest.mark.parametrize("kind", ["grpo", "dpo"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_shown_and_refused_unless_it_is_allowed(
    change: str, kind: str, tmp_path: Path
) -> None:
    tiny_model = save_tiny(tmp_path / "model")
    make, shown, key, told = CHANGES[change]
    if kind == "dpo" and change == "more rows":
        pytest.skip("its rows are pairs")
    if kind == "grpo":
        recipe = make_recipe(tmp_path, tiny_model, method=GRPO, run__steps=3)
    else:
        recipe = make_offline_recipe(
            tmp_path, tiny_model, method={"name": "dpo"}, rows="pairs", run__steps=3
        )
    assert train(recipe).returncode == 0
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    if kind == "dpo" and change == "rows":
        rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
        write_rows(tmp_path / "rows.jsonl", [*rows[:-1], {**rows[-1], "chosen": "other"}])
        overrides = []
    else:
        overrides = make(tmp_path, tiny_model)
    refused = train(recipe, "run.steps=6", *overrides)
    said = " ".join(refused.stderr.split())
    assert (
        refused.returncode == 2
        and shown in said
        and f"run.allow_change: [{key}]"
        in said.replace(f"add {key} to run.allow_change", f"run.allow_change: [{key}]")
    ), said
    after = {p: p.read_bytes() for p in before}
    assert after == before, "a refused resume leaves everything as it is"
    done = train(recipe, "run.steps=6", *overrides, f"run.allow_change=[{key}]")
    assert done.returncode == 0, done.stderr
    assert steps_of(tmp_path / "run") == [0, 1, 2, 3, 4, 5, 6]
    events = [e for e in read_events(tmp_path / "run") if e["kind"] == "changed"]
    assert any(told in event["message"] for event in events), events


def _another_model(folder: Path) -> None:
    save_tiny(folder, seed=1)


def _another_tokenizer(folder: Path) -> None:
    """The prompts keep their ids, and `~`, which no row has, gets another one's."""
    tokenizer = make_tokenizer()
    core = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = core["model"]["vocab"]
    vocabulary["~"], vocabulary["}"] = vocabulary["}"], vocabulary["~"]
    tokenizer.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(core), encoding="utf-8")


@pytest.mark.fault(8)
@pytest.mark.parametrize(
    ("change", "named"), [(_another_model, "model was"), (_another_tokenizer, "tokenizer was")]
)
def test_another_model_or_tokenizer_is_refused_whatever_is_allowed(
    change: Callable[[Path], None], named: str, tmp_path: Path
) -> None:
    model = save_tiny(tmp_path / "model")
    recipe = make_recipe(tmp_path, model, method=GRPO, run__steps=2)
    assert train(recipe).returncode == 0
    change(tmp_path / "model")
    for allowed in ("", "model, data, model.template, model.path"):
        refused = train(recipe, "run.steps=3", f"run.allow_change=[{allowed}]")
        said = " ".join(refused.stderr.split())
        assert refused.returncode == 2, said
        assert named in said and "new run.dir" in said


@pytest.mark.fault(8)
def test_an_allowed_change_is_not_asked_for_again(tmp_path: Path) -> None:
    tiny_model = save_tiny(tmp_path / "model")
    recipe = make_recipe(tmp_path, tiny_model, method=GRPO, run__steps=2)
    assert train(recipe).returncode == 0
    overrides = _another_template(tmp_path, tiny_model)
    done = train(recipe, "run.steps=3", *overrides, "run.allow_change=[model.template]")
    assert done.returncode == 0, done.stderr
    again = train(recipe, "run.steps=4", *overrides)
    assert again.returncode == 0, again.stderr
    assert len([e for e in read_events(tmp_path / "run") if e["kind"] == "changed"]) >= 2
