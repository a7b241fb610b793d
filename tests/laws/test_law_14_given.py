"""Law 14 on given data: what a row or a recipe says is read, refused, or counted by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.given import CASES, GPT2, Given, given, is_judge, make_task, other_model
from support.offline import FORMS
from support.tiny import make_model, make_tokenizer

import surefoot
from surefoot.data import KINDS, Examples, build_examples
from surefoot.errors import DataError, ModelError, RecipeError
from surefoot.methods import Method, check_built, with_fields
from surefoot.models.template import PromptTemplate
from surefoot.models.turns import ExampleTemplate
from surefoot.recipe import load

OTHERS: Mapping[str, tuple[object, ...]] = {
    "score": ("sum", "mean", "log_odds"),
    "reference": (False, True),
    "link": ("sigmoid", "hinge", "square", "kto", "bco", "apo_zero", "nca"),
    "beta": (0.3,),
    "smoothing": (0.0, 0.2),
    "unbias": (False, True),
    "margin": (0.0, 0.7),
    "weight": ("none", "likelihood"),
    "nll": (0.0, 0.5),
    "desirable": (1.5,),
    "undesirable": (2.5,),
    "loss": ("nll", "bradley_terry"),
    "train_on": ("completion", "assistant", "all"),
    "packing": (False, True),
    "center": (0.0, 0.5),
    "normalize": (False, True),
}
"""Values of every field but the name and the data, which are other examples altogether."""

CONVERSATION: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
            {"role": "assistant", "content": "d"},
        ]
    }
]


def fields(row: Given) -> list[str]:
    return [f.name for f in dataclasses.fields(row) if f.name not in ("name", "data")]


CHANGES = [
    (name, field, value)
    for name, row in CASES.items()
    for field in fields(row)
    for value in OTHERS[field]
    if value != getattr(row, field)
]


def built(row: Given, rows: list[dict[str, Any]], **data: Any) -> Examples[Any]:
    """What a recipe makes of rows that are passed."""
    recipe = load(
        {"data": {"source": "rows", **data}, "method": row.name, "run": {"steps": 1}},
    )
    template = PromptTemplate(make_tokenizer(), template="auto", max_context=512)
    return build_examples(
        recipe,
        ExampleTemplate(template),
        KINDS[row.data],
        train_on=row.train_on if row.data == "demonstrations" else None,  # type: ignore[union-attr]
        rows=rows,
    )


def outcome(row: Given, folder: Path) -> list[torch.Tensor]:
    """What a step and its checkpoint hold, and what a conversation is for demonstrations."""
    examples = given(row.data)
    bench = make_task(row, examples, folder, reference=other_model())
    step = bench.step(examples)
    found = [torch.tensor([step.done.loss, float(step.done.forwarded)]), step.gradient]
    if row.data == "demonstrations":
        found += [torch.tensor(e.trained) for e in built(row, CONVERSATION).stream.rows]
    saved = bench.task.tensors()
    return found + [saved[part][name] for part in sorted(saved) for name in sorted(saved[part])]


@pytest.mark.parametrize(("name", "field", "value"), CHANGES)
def test_every_field_of_a_row_is_read_or_refused(
    name: str, field: str, value: object, tmp_path: Path
) -> None:
    row = CASES[name]
    try:
        changed = with_fields(row, {field: value})
        check_built(changed)
    except RecipeError as error:
        assert str(error).startswith("method.")
        return
    assert not isinstance(changed, Method)
    one, other = outcome(row, tmp_path), outcome(changed, tmp_path)
    same = len(one) == len(other) and all(map(torch.equal, one, other))
    assert not same, f"method.{field}: {value} changes nothing"


def test_the_table_of_values_covers_every_field() -> None:
    assert {field for row in CASES.values() for field in fields(row)} == set(OTHERS)


@pytest.mark.parametrize("name", CASES)
def test_a_key_that_is_misspelt_is_refused_with_the_nearest_one(name: str) -> None:
    row = CASES[name]
    for field in fields(row):
        method = {"name": row.name, field[1:]: 1}
        with pytest.raises(RecipeError, match=f"did you mean '{field}'"):
            load({"data": {"source": "rows"}, "method": method, "run": {"steps": 1}})


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"critic": {"layers": 1}}, "critic.layers"),
        ({"optim": {"learnin_rate": 1e-5}}, "learning_rate"),
        ({"run": {"steps": 1, "eval_every": 1}}, "nothing to evaluate on"),
        ({"data": {"source": "rows", "max_prompt_tokens": 9}}, "max_prompt_tokens"),
        ({"data": {"source": "rows", "keep_solve_rate": [0.1, 0.9]}}, "keep_solve_rate"),
    ],
)
@pytest.mark.parametrize("name", CASES)
def test_keys_of_a_recipe_that_nothing_reads_are_refused(
    name: str, section: dict[str, Any], said: str
) -> None:
    row = CASES[name]
    plain = {"data": {"source": "rows"}, "method": row.name, "run": {"steps": 1}}
    with pytest.raises(RecipeError, match=said):
        recipe = load({**plain, **section})
        template = PromptTemplate(make_tokenizer(), template="auto", max_context=512)
        build_examples(recipe, ExampleTemplate(template), KINDS[row.data], rows=FORMS[row.data])


@pytest.mark.parametrize("name", CASES)
def test_zero_trainable_parameters_are_refused(name: str, tmp_path: Path) -> None:
    model = make_model(GPT2, dtype=torch.float64)
    model.requires_grad_(False)
    if is_judge(CASES[name]):
        # Its head is its own, and trained in any case: frozen layers below it are no no-op.
        bench = make_task(CASES[name], given(CASES[name].data), tmp_path, model=model)
        assert set(bench.optimizer.names) == {"head.weight", "head.bias"}
        return
    with pytest.raises(ModelError, match="no parameter is trainable"):
        make_task(CASES[name], given(CASES[name].data), tmp_path, model=model)


# --- examples that teach nothing ---


@pytest.mark.fault(33)
@pytest.mark.parametrize("name", CASES)
def test_texts_that_do_not_fit_are_counted_and_none_left_is_an_error(name: str) -> None:
    row = CASES[name]
    rows = [*FORMS[row.data], {**FORMS[row.data][0], "prompt": "say a, please", "id": "long"}]
    lengths = sorted(example.length for example in built(row, rows).stream.rows)
    long = sum(length > lengths[0] for length in lengths)
    assert long > 0
    report = built(row, rows, max_tokens=lengths[0]).report
    assert report.sources[0].too_long == long
    assert any(str(long) in line and "long" in line for line in report.lines())
    with pytest.raises(DataError, match=rf"all {len(rows)} rows are longer than {lengths[0] - 1}"):
        built(row, rows, max_tokens=lengths[0] - 1)


TIES: Mapping[str, dict[str, Any]] = {
    "pairs": {"prompt": "a", "chosen": "b", "rejected": "b"},
    "labels": {"prompt": "a", "chosen": "b", "rejected": "b"},
    "rankings": {"prompt": "a", "ranking": ["b", "c", "b"]},
}


@pytest.mark.parametrize("name", [n for n, r in CASES.items() if r.data in TIES])
def test_ties_are_counted_and_nothing_but_ties_is_an_error(name: str) -> None:
    row, tie = CASES[name], TIES[CASES[name].data]
    pair = {"prompt": "c", "chosen": "d", "rejected": "e"}
    other = pair if row.data == "labels" else FORMS[row.data][0]
    report = built(row, [tie, other, tie]).report
    assert report.sources[0].tied == 2 and report.sources[0].train == 1
    assert any("2" in line and "same tokens" in line for line in report.lines())
    with pytest.raises(DataError, match="2 rows have equal answers"):
        built(row, [tie, tie])


@pytest.mark.parametrize("name", [n for n, r in CASES.items() if r.data == "demonstrations"])
def test_a_conversation_in_which_nothing_is_trained_is_an_error(name: str) -> None:
    silent = [{"messages": [{"role": "user", "content": "a"}]}]
    for train_on in ("completion", "assistant"):
        row = with_fields(CASES[name], {"train_on": train_on})
        with pytest.raises(DataError, match="ends with role 'user'"):
            built(row, silent)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [n for n, r in CASES.items() if r.data == "labels"])
def test_labels_of_one_prompt_leave_no_zero_point(
    name: str, tiny_model: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": "a", "completion": c, "label": c == "b"} for c in "bcd"]
    with pytest.raises(DataError, match="same prompt"):
        train(tmp_path / "run", tiny_model, CASES[name], rows)
    with pytest.raises(RecipeError, match=r"optim\.batch_size: 1"):
        train(tmp_path / "run", tiny_model, CASES[name], FORMS["labels"], batch_size=1)


# --- what a run says ---


def train(
    folder: Path, model: Path, row: Given, rows: list[dict[str, Any]], *, batch_size: int = 4
) -> surefoot.Run:
    return surefoot.train(
        {
            "model": {"path": str(model)},
            "method": row,
            "optim": {"learning_rate": 0.02, "batch_size": batch_size},
            "run": {"dir": str(folder), "steps": 2, "trackers": []},
        },
        data=rows,
    )


@pytest.mark.parametrize("name", CASES)
def test_the_batch_arithmetic_is_told_and_a_step_is_counted(
    name: str, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = CASES[name]
    rows = FORMS[row.data]
    run = train(tmp_path / "run", tiny_model, row, rows)
    said = " ".join(capsys.readouterr().err.split())
    assert f"step: 4 of 10 {row.data}; run: 2 steps = 0.80 epochs" in said
    for metrics in run.metrics:
        assert metrics["optimizer_steps"] == 1 and metrics["skipped_steps"] == 0
        assert metrics["loss"] is not None and metrics["grad_norm"] > 0


@pytest.mark.parametrize("name", CASES)
def test_a_reward_that_nothing_asks_is_refused(name: str, tiny_model: Path, tmp_path: Path) -> None:
    row = CASES[name]
    with pytest.raises(RecipeError, match=f"rewards: {row.name} samples nothing"):
        surefoot.train(
            {
                "model": {"path": str(tiny_model)},
                "method": row,
                "optim": {"batch_size": 4},
                "run": {"dir": str(tmp_path / "run"), "steps": 1, "trackers": []},
            },
            data=FORMS[row.data],
            rewards=[lambda completions, **_: [0.0] * len(completions)],
        )


def test_labels_without_a_reference_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"method\.reference: labels need it"):
        with_fields(CASES["kto"], {"reference": False})
