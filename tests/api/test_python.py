"""The Python door: data, model, callbacks and rows as objects, and a run that is opened again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.offline import make_offline_recipe
from support.tiny import make_model, make_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

import surefoot
from surefoot.errors import (
    CheckpointError,
    DataError,
    ModelError,
    RecipeError,
    RunDirectoryError,
    StoppedOnFinding,
)
from surefoot.loops.entry import evaluate
from surefoot.methods import Clip, GroupMean, Ratio
from surefoot.methods.custom import Custom
from surefoot.run.checkpoint import load_latest
from surefoot.run.directory import RunDirectory

ROWS = [{"prompt": f"say {c}", "answer": c, "level": i} for i, c in enumerate("abcdefgh")]
TESTED = [{"prompt": f"shout {c}", "answer": c, "level": 0} for c in "xy"]
MATHS = """
import torch


def centred(reward_PG, *, valid_PG, length_PG, shift=0.0):
    kept_PG = torch.where(valid_PG, reward_PG, 0.0)
    mean_P1 = kept_PG.sum(1, keepdim=True) / valid_PG.sum(1, keepdim=True).clamp_min(1)
    return reward_PG - mean_P1 - shift


def unclipped(log_ratio_BT, *, logp_BT, advantage_BT, mask_BT):
    return -log_ratio_BT.exp() * advantage_BT
"""


def capitals(prompts: list[str], completions: list[str], level: list[int], **_: Any) -> list[float]:
    """The share of capital letters; `level` is the dataset's own column."""
    assert len(level) == len(completions)
    return [sum(c.isupper() for c in text) / max(1, len(text)) for text in completions]


def recipe(run: Path, **changes: Any) -> dict[str, Any]:
    return {
        "method": {"name": "rloo", "group_size": 4, "kl": "none"},
        "rollout": {"prompts_per_step": 2, "max_new_tokens": 6},
        "optim": {"learning_rate": 0.01},
        "run": {"dir": str(run), "steps": 2, "trackers": []},
        **changes,
    }


def train(run: Path, model: Any, *overrides: str, **given: Any) -> surefoot.Run:
    objects = {"rewards": [capitals], "data": ROWS, "model": model, **given}
    return surefoot.train(recipe(run), overrides, **objects)


def weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def saved(run: Path) -> dict[str, torch.Tensor]:
    loaded = load_latest(RunDirectory(run), rename_damaged=False)
    assert loaded is not None
    return loaded.tensors("policy")


# -- data ------------------------------------------------------------------------------------------


def test_rows_need_no_data_section_and_their_options_may_be_set(
    tiny_model: Path, tmp_path: Path
) -> None:
    run = train(tmp_path / "run", str(tiny_model), "data.eval_size=3", "run.eval_every=2")
    assert [row["step"] for row in run.metrics if "reward" in row] == [1, 2]
    assert run.evaluate().evaluation.n == 3


def test_any_iterable_of_mappings_is_data(tiny_model: Path, tmp_path: Path) -> None:
    def lines() -> Iterator[dict[str, Any]]:
        yield from ROWS

    run = train(tmp_path / "run", str(tiny_model), data=lines())
    listed = train(tmp_path / "other", str(tiny_model), data=ROWS)
    assert [r["reward"] for r in run.metrics] == [r["reward"] for r in listed.metrics]


def test_a_dataset_is_data(tiny_model: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    given = datasets.Dataset.from_list(ROWS)
    run = train(tmp_path / "run", str(tiny_model), data=given)
    listed = train(tmp_path / "other", str(tiny_model), data=ROWS)
    assert [r["reward"] for r in run.metrics] == [r["reward"] for r in listed.metrics]
    both = datasets.DatasetDict({"train": given, "test": given})
    with pytest.raises(DataError, match=r"data: is one mapping.*data\['train'\]"):
        train(tmp_path / "third", str(tiny_model), data=both)


def test_eval_data_is_evaluated_and_never_trained_on(tiny_model: Path, tmp_path: Path) -> None:
    given = {"data": [*ROWS, dict(TESTED[0], answer="z")], "eval_data": TESTED}
    run = train(tmp_path / "run", str(tiny_model), "run.eval_every=1", "run.steps=4", **given)
    assert run.evaluate().evaluation.n == 2
    evaluated = [row["step"] for row in run.metrics if "eval/accuracy" in row]
    assert evaluated == [0, 1, 2, 3, 4]
    asked = {row["prompt"] for row in run.samples if row["split"] == "train"}
    assert not any("shout" in prompt for prompt in asked)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data": "rows.jsonl"}, r"data: is a str; pass an iterable of rows"),
        ({"data": 3}, r"data: is a int; pass an iterable"),
        ({"data": ["a"]}, r"data\[0\]: is a str, not a mapping"),
        ({"data": None, "eval_data": TESTED}, r"eval_data: needs data= beside it"),
    ],
)
def test_what_is_no_data_is_refused(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        train(tmp_path / "run", "nowhere", **given)


def test_an_evaluation_without_rows_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"run\.eval_every.*eval_data="):
        train(tmp_path / "run", str(tiny_model), "run.eval_every=1")


def test_one_function_is_no_list_of_rewards(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="rewards: is one function; pass a list"):
        train(tmp_path / "run", "nowhere", rewards=capitals)


# -- model -----------------------------------------------------------------------------------------


def test_an_object_is_trained_in_place_and_kept(tmp_path: Path) -> None:
    model = make_model()
    before = weights(model)
    run = train(tmp_path / "run", model, tokenizer=make_tokenizer())
    assert run.policy is model
    assert not same(before, weights(model))
    assert same(saved(run.path), weights(model))
    kept = AutoModelForCausalLM.from_pretrained(run.path / "reference")
    assert same(before, weights(kept))


def test_an_object_learns_what_its_directory_learns(tiny_model: Path, tmp_path: Path) -> None:
    by_path = train(tmp_path / "path", str(tiny_model))
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    # The tokenizer is that of the directory which the model remembers.
    by_object = train(tmp_path / "object", model)
    assert same(weights(by_path.policy), weights(by_object.policy))


def test_a_run_with_an_object_is_opened_resumed_and_exported(tmp_path: Path) -> None:
    model = make_model()
    run = train(tmp_path / "run", model, tokenizer=make_tokenizer())
    moved = tmp_path / "moved"
    shutil.move(run.path, moved)
    opened = surefoot.Run.open(moved, rewards=[capitals], data=ROWS)
    assert same(weights(opened.policy), weights(model))
    assert opened.tokenizer.chat_template == make_tokenizer().chat_template
    folder = opened.export(tmp_path / "exported")
    assert same(weights(AutoModelForCausalLM.from_pretrained(folder)), weights(model))
    assert model.generation_config.eos_token_id == [2, 0], "saving changes nothing of the object"
    # The base model again resumes; so does the run's own copy of it.
    fresh = make_model()
    more = train(moved, fresh, "run.steps=3", tokenizer=make_tokenizer())
    assert more.policy is fresh
    straight = train(tmp_path / "straight", make_model(), "run.steps=3", tokenizer=make_tokenizer())
    assert same(weights(fresh), weights(straight.policy))
    own = train(moved, "object", "run.steps=4")
    assert own.metrics[-1]["step"] == 4


def test_another_model_is_refused_on_resume(tmp_path: Path) -> None:
    model = make_model()
    train(tmp_path / "run", model, tokenizer=make_tokenizer())
    for other in (model, make_model(seed=1)):
        with pytest.raises(ModelError, match=r"not the model that the run in .*set model\.path to"):
            train(tmp_path / "run", other, "run.steps=3", tokenizer=make_tokenizer())
    with pytest.raises(RecipeError, match=r"model\.path: object -> smollm2-135m"):
        train(tmp_path / "run", None, "run.steps=3")


def test_a_complete_run_puts_its_weights_into_the_object(tmp_path: Path) -> None:
    first = make_model()
    train(tmp_path / "run", first, tokenizer=make_tokenizer())
    again = make_model()
    run = train(tmp_path / "run", again, tokenizer=make_tokenizer())
    assert run.policy is again
    assert same(weights(again), weights(first))


def test_the_objects_dtype_is_the_recipes(tmp_path: Path) -> None:
    model = make_model(dtype=torch.bfloat16)
    run = train(tmp_path / "run", model, tokenizer=make_tokenizer())
    assert run.policy.dtype == torch.bfloat16
    assert "dtype: bfloat16" in (run.path / "recipe.yaml").read_text()
    with pytest.raises(ModelError, match=r"model\.dtype: float32, but the model .* bfloat16"):
        train(tmp_path / "b", model, "model.dtype=float32", tokenizer=make_tokenizer())


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.raises(ModelError, match=r"model: is a Linear; pass a transformers"):
        train(path, torch.nn.Linear(2, 2))
    with pytest.raises(ModelError, match=r"tokenizer: a model that is passed as an object needs"):
        train(path, make_model())
    with pytest.raises(ModelError, match=r"tokenizer: is a str"):
        train(path, make_model(), tokenizer="tokenizer")
    with pytest.raises(ModelError, match=r"tokenizer: belongs to a model that is passed as an obj"):
        train(path, "smollm2-135m", tokenizer=make_tokenizer())
    half = make_model(dtype=torch.float16)
    with pytest.raises(ModelError, match=r"its weights are float16; they must all be one of"):
        train(path, half, tokenizer=make_tokenizer())
    frozen = make_model()
    next(iter(frozen.parameters())).requires_grad_(False)
    with pytest.raises(ModelError, match=r"1 of \d+ parameters are frozen"):
        train(path, frozen, tokenizer=make_tokenizer())
    with pytest.raises(RecipeError, match=r"model= and the override model\.path both name"):
        train(path, "smollm2-135m", "model.path=elsewhere")
    assert not path.exists()


# -- callbacks -------------------------------------------------------------------------------------


class Watch(surefoot.Callback):
    """Notes every call; stops after the step `last`, or fails there."""

    def __init__(self, *, last: int = -1, fails: bool = False) -> None:
        self.seen: list[tuple[str, int]] = []
        self.rewards: list[float] = []
        self.last, self.fails = last, fails

    def on_step(self, step: int, metrics: Any) -> Any:
        self.seen.append(("step", step))
        self.rewards.append(metrics["reward"])
        if step == self.last and self.fails:
            raise ZeroDivisionError("by zero")
        return surefoot.STOP if step == self.last else None

    def on_evaluation(self, step: int, evaluation: Any) -> None:
        self.seen.append(("evaluation", step))

    def on_checkpoint(self, step: int, path: Path) -> None:
        assert (path / "MANIFEST.json").is_file()
        self.seen.append(("checkpoint", step))

    def on_end(self, run_path: Path) -> None:
        self.seen.append(("end", len(self.rewards)))


def test_callbacks_see_the_run_as_its_files_tell_it(tiny_model: Path, tmp_path: Path) -> None:
    watch = Watch()
    run = train(
        tmp_path / "run",
        str(tiny_model),
        "data.eval_size=2",
        "run.eval_every=2",
        "run.steps=3",
        "run.checkpoint_every=2",
        callbacks=[watch],
    )
    assert watch.seen == [
        ("evaluation", 0),
        ("step", 1),
        ("step", 2),
        ("evaluation", 2),
        ("checkpoint", 2),
        ("step", 3),
        ("evaluation", 3),
        ("checkpoint", 3),
        ("end", 3),
    ]
    assert watch.rewards == [row["reward"] for row in run.metrics if "reward" in row]


def test_a_callback_ends_the_run_and_the_same_call_goes_on(
    tiny_model: Path, tmp_path: Path
) -> None:
    first, second = Watch(last=2), Watch()
    run = train(tmp_path / "run", str(tiny_model), "run.steps=4", callbacks=[first])
    assert run.metrics[-1]["step"] == 2
    assert first.seen == [("step", 1), ("step", 2), ("checkpoint", 2), ("end", 2)]
    assert same(weights(run.policy), saved(run.path))
    run = train(tmp_path / "run", str(tiny_model), "run.steps=4", callbacks=[second])
    assert second.seen == [("step", 3), ("step", 4), ("checkpoint", 4), ("end", 2)]
    straight = train(tmp_path / "straight", str(tiny_model), "run.steps=4")
    assert same(weights(run.policy), weights(straight.policy))


def test_a_callback_that_fails_saves_and_is_named(tiny_model: Path, tmp_path: Path) -> None:
    watch = Watch(last=2, fails=True)
    with pytest.raises(StoppedOnFinding, match=r"Watch\.on_step failed at step 2 with ZeroDivis"):
        train(tmp_path / "run", str(tiny_model), "run.steps=4", callbacks=[watch])
    assert RunDirectory(tmp_path / "run").checkpoint_steps() == [2]
    assert ("end", 2) not in watch.seen
    after = Watch()
    train(tmp_path / "run", str(tiny_model), "run.steps=4", callbacks=[after])
    assert [entry for entry in after.seen if entry[0] == "step"] == [("step", 3), ("step", 4)]


def test_a_callback_that_stops_twice_ends_the_run_once(tiny_model: Path, tmp_path: Path) -> None:
    """In the step, and again in the checkpoint that is saved because of it."""

    class Twice(Watch):
        def on_checkpoint(self, step: int, path: Path) -> Any:
            super().on_checkpoint(step, path)
            return surefoot.STOP

    watch = Twice(last=2)
    run = train(tmp_path / "run", str(tiny_model), "run.steps=4", callbacks=[watch])
    assert [row["step"] for row in run.metrics if "reward" in row][-1] == 2
    assert watch.seen[-3:] == [("step", 2), ("checkpoint", 2), ("end", 2)]


def test_a_callback_does_not_hide_why_a_run_stops(tiny_model: Path, tmp_path: Path) -> None:
    class Content(Watch):
        def on_checkpoint(self, step: int, path: Path) -> Any:
            super().on_checkpoint(step, path)
            return surefoot.STOP

    def constant(completions: list[str], **_: Any) -> list[float]:
        return [0.5] * len(completions)

    watch = Content()
    with pytest.raises(StoppedOnFinding, match="2 steps in a row gave no signal"):
        train(
            tmp_path / "run",
            str(tiny_model),
            "run.steps=4",
            "run.stop_without_signal=2",
            rewards=[constant],
            callbacks=[watch],
        )
    assert watch.seen == [("step", 1), ("step", 2), ("checkpoint", 2)]


class Killed(BaseException):
    """Nothing catches it, as nothing catches a kill."""


@pytest.mark.parametrize(
    ("every", "shown", "saves"),
    [
        # Step 3 was shown, but its checkpoint was never written: it is done again, not shown.
        (2, [4], [4]),
        # Without any checkpoint nothing is resumed; the run starts again.
        (0, [1, 2, 3, 4], [4]),
    ],
)
def test_a_killed_run_shows_no_step_twice(
    tiny_model: Path, tmp_path: Path, every: int, shown: list[int], saves: list[int]
) -> None:
    class Fuse(Watch):
        def on_step(self, step: int, metrics: Any) -> None:
            if step == 3:
                raise Killed

    settings = ("run.steps=4", f"run.checkpoint_every={every}")
    with pytest.raises(Killed):
        train(tmp_path / "run", str(tiny_model), *settings, callbacks=[Fuse()])
    watch = Watch()
    run = train(tmp_path / "run", str(tiny_model), *settings, callbacks=[watch])
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4]
    assert [step for kind, step in watch.seen if kind == "step"] == shown
    assert [step for kind, step in watch.seen if kind == "checkpoint"] == saves


# -- rows and functions ----------------------------------------------------------------------------


def test_a_row_written_in_python_is_a_method(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "maths.py").write_text(MATHS, encoding="utf-8")
    maths = str(tmp_path / "maths.py")
    own = surefoot.Method(
        name="mine",
        group_size=4,
        baseline=Custom(f"{maths}:centred"),
        ratio=Ratio("token"),
        gate=Custom(f"{maths}:unclipped"),
    )
    built_in = surefoot.Method(
        name="theirs", group_size=4, baseline=GroupMean(), ratio=Ratio("token"), gate=Clip()
    )
    runs = [
        surefoot.train(
            recipe(tmp_path / row.name, method=row),
            rewards=[capitals],
            data=ROWS,
            model=str(tiny_model),
        )
        for row in (own, built_in)
    ]
    # One optimizer step per rollout: the ratio is 1, nothing is clipped, and the rows are one.
    for mine, theirs in zip(runs[0].metrics, runs[1].metrics, strict=True):
        assert mine["reward"] == theirs["reward"]
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-7)
    theirs_now = weights(runs[1].policy)
    for name, value in weights(runs[0].policy).items():
        # Two steps of AdamW move a weight by up to 0.02; rounding, by less than a hundredth of it.
        torch.testing.assert_close(value, theirs_now[name], rtol=0, atol=1e-4)


def test_a_changed_function_is_refused_on_resume_by_name(tiny_model: Path, tmp_path: Path) -> None:
    maths = tmp_path / "maths.py"
    maths.write_text(MATHS, encoding="utf-8")
    given = recipe(tmp_path / "run", method={"name": "rloo", "group_size": 4, "kl": "none"})
    given["method"]["baseline"] = {"use": f"{maths}:centred", "shift": 0.1}
    objects: Any = {"rewards": [capitals], "data": ROWS, "model": str(tiny_model)}
    surefoot.train(given, **objects)
    maths.write_text(MATHS.replace("- shift", "+ shift"), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"method\.baseline: .*maths\.py:centred was \w+ and"):
        surefoot.train(given, ["run.steps=3"], **objects)
    maths.write_text(MATHS, encoding="utf-8")
    assert surefoot.train(given, ["run.steps=3"], **objects).metrics[-1]["step"] == 3
    with pytest.raises(RecipeError, match=r"method\.baseline\.shift: 0\.1 -> 0\.2"):
        surefoot.train(given, ["run.steps=4", "method.baseline.shift=0.2"], **objects)


def test_other_rewards_are_refused_on_resume(tiny_model: Path, tmp_path: Path) -> None:
    def brevity(completions: list[str], **_: Any) -> list[float]:
        return [-float(len(text)) for text in completions]

    train(tmp_path / "run", str(tiny_model))
    with pytest.raises(CheckpointError, match=r"rewards was 'capitals' and is now 'brevity'"):
        train(tmp_path / "run", str(tiny_model), "run.steps=3", rewards=[brevity])


# -- a run again -----------------------------------------------------------------------------------


def test_a_run_is_opened_with_what_was_passed(tiny_model: Path, tmp_path: Path) -> None:
    run = train(tmp_path / "run", str(tiny_model), "data.eval_size=2", "run.eval_every=2")
    opened = surefoot.Run.open(run.path, rewards=[capitals], data=ROWS)
    assert repr(opened) == f"Run({str(run.path)!r})"
    assert opened.metrics == run.metrics
    assert opened.samples == run.samples
    assert opened.policy is not run.policy
    assert same(weights(opened.policy), weights(run.policy))
    assert same(weights(opened.policy), saved(run.path))
    looked = opened.evaluate()
    assert looked.evaluation == run.evaluate().evaluation
    assert looked.evaluation.step == 2
    assert looked.to_json()["eval/accuracy"] == run.metrics[-1]["eval/accuracy"]
    with pytest.raises(RunDirectoryError, match=r"rewards passed from Python \(capitals\)"):
        surefoot.Run.open(run.path).evaluate()
    with pytest.raises(RunDirectoryError, match=r"trained on rows passed from Python.*data=rows"):
        surefoot.Run.open(run.path, rewards=[capitals]).evaluate()
    with pytest.raises(RunDirectoryError, match="no run directory"):
        surefoot.Run.open(tmp_path)


@pytest.mark.parametrize("rows", ["pairs", "demonstrations"])
def test_what_learns_from_given_answers_is_not_asked_for_its_own(
    rows: str, tiny_model: Path, tmp_path: Path
) -> None:
    method = {"pairs": "dpo", "demonstrations": "sft"}[rows]
    recipe = make_offline_recipe(
        tmp_path, tiny_model, method={"name": method}, rows=rows, run__steps=1, run__eval_every=1
    )
    run = surefoot.train(recipe)
    for look in (run.evaluate, partial(evaluate, str(run.path)), partial(evaluate, str(recipe))):
        with pytest.raises(
            RecipeError, match=rf"{method} learns from given answers.*run\.eval_every"
        ):
            look()
