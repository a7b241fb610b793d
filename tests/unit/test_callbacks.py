"""The dispatcher of callbacks: order, copies, stops, failures, and what a resume leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import surefoot
from surefoot.errors import Interrupted, RecipeError, StoppedOnFinding
from surefoot.loops.callbacks import Callbacks
from surefoot.run.read import Evaluation

EVALUATION = Evaluation.of(2, n=4, correct=1)


class Diary(surefoot.Callback):
    """Writes down what it is told; `ends` names the calls that it answers with STOP."""

    def __init__(self, *ends: str) -> None:
        self.lines: list[str] = []
        self.ends = ends

    def _note(self, name: str, what: object) -> Any:
        self.lines.append(f"{name} {what}")
        return surefoot.STOP if name in self.ends else None

    def on_step(self, step: int, metrics: Any) -> Any:
        return self._note("step", f"{step} {metrics['reward']}")

    def on_evaluation(self, step: int, evaluation: Evaluation) -> Any:
        return self._note("evaluation", f"{step} {evaluation.accuracy}")

    def on_checkpoint(self, step: int, path: Path) -> Any:
        return self._note("checkpoint", f"{step} {path.name}")

    def on_end(self, run_path: Path) -> Any:
        return self._note("end", run_path.name)


def test_each_is_told_in_order() -> None:
    first, second = Diary(), Diary()
    calls = Callbacks([first, second])
    calls.started(None)
    calls.evaluation(0, EVALUATION)
    calls.step(1, {"reward": 0.5})
    calls.step(2, {"reward": 0.75}, EVALUATION)
    calls.checkpoint(2, Path("a/step_000002"))
    calls.ended(Path("runs/mine"))
    want = ["evaluation 0 0.25", "step 1 0.5", "step 2 0.75", "evaluation 2 0.25"]
    want += ["checkpoint 2 step_000002", "end mine"]
    assert first.lines == want
    assert second.lines == want


def test_one_callback_that_is_no_list_is_refused() -> None:
    with pytest.raises(RecipeError, match="pass a list"):
        Callbacks(Diary())  # type: ignore[arg-type]


def test_a_callback_that_overrides_nothing_is_told_nothing() -> None:
    calls = Callbacks([surefoot.Callback()])
    calls.step(1, {"reward": 0.5}, EVALUATION)
    calls.ended(Path("run"))
    assert not calls.stopped


def test_metrics_are_copies() -> None:
    class Meddler(surefoot.Callback):
        def on_step(self, step: int, metrics: Any) -> None:
            metrics["reward"] = 99.0
            metrics["nested"].append(1)

    row = {"reward": 0.5, "nested": [0]}
    after = Diary()
    Callbacks([Meddler(), after]).step(1, row)
    assert row == {"reward": 0.5, "nested": [0]}
    assert after.lines == ["step 1 0.5"]


@pytest.mark.parametrize("when", ["step", "evaluation", "checkpoint"])
def test_stop_is_raised_after_everybody_was_told(when: str) -> None:
    first, second = Diary(when), Diary()
    calls = Callbacks([first, second])
    with pytest.raises(Interrupted, match=rf"callback Diary\.on_{when} ended the run after step 2"):
        if when == "checkpoint":
            calls.checkpoint(2, Path("step_000002"))
        else:
            calls.step(2, {"reward": 0.5}, EVALUATION)
    assert calls.stopped
    assert first.lines == second.lines
    assert len(second.lines) == (1 if when == "checkpoint" else 2)


def test_an_exception_names_the_callback_and_the_step() -> None:
    class Broken(surefoot.Callback):
        def on_step(self, step: int, metrics: Any) -> None:
            raise KeyError("no such metric")

    calls = Callbacks([Broken()])
    message = r"callback Broken\.on_step failed at step 3 with KeyError: 'no such metric'"
    with pytest.raises(StoppedOnFinding, match=message) as caught:
        calls.step(3, {"reward": 0.5})
    assert isinstance(caught.value.__cause__, KeyError)
    assert not calls.stopped, "a failure is no wish to stop"


@pytest.mark.parametrize("said", [True, False, 0, "stop"])
def test_any_other_answer_is_refused(said: Any) -> None:
    class Odd(surefoot.Callback):
        def on_step(self, step: int, metrics: Any) -> Any:
            return said

    with pytest.raises(StoppedOnFinding, match=r"Odd\.on_step returned .*surefoot\.STOP or noth"):
        Callbacks([Odd()]).step(1, {})


def test_the_end_cannot_be_stopped() -> None:
    with pytest.raises(StoppedOnFinding, match=r"Diary\.on_end returned surefoot\.STOP"):
        Callbacks([Diary("end")]).ended(Path("run"))


def test_a_resume_shows_no_step_twice_but_every_new_checkpoint() -> None:
    diary = Diary()
    calls = Callbacks([diary])
    # Killed after step 5 with a checkpoint of step 4: step 5 is done again.
    calls.started(5)
    calls.step(5, {"reward": 0.1}, EVALUATION)
    calls.checkpoint(5, Path("step_000005"))
    calls.step(6, {"reward": 0.2})
    assert diary.lines == ["checkpoint 5 step_000005", "step 6 0.2"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Diary, r"callbacks: Diary is a class; pass Diary\(\)"),
        (print, r"is no surefoot\.Callback; derive a class from it"),
    ],
)
def test_only_callbacks_are_taken(given: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Callbacks([given])
