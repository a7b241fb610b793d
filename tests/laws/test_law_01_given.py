"""Law 1 on given data: what is masked or padded is not looked at, and order does not matter."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.given import CASES, Step, given, is_judge, make_task, other_model
from support.hand import apart

from surefoot.data import Demonstration, Label, Pair, Ranking
from surefoot.learner import answers, preference, supervised
from surefoot.learner.answers import Answers
from surefoot.learner.layouts import NAMES, Microbatch, Name
from surefoot.loops import preference as preference_loop
from surefoot.loops import supervised as supervised_loop


def take(name: str, folder: Path, *, examples: Sequence[Any] | None = None, **options: Any) -> Step:
    row = CASES[name]
    chosen = given(row.data) if examples is None else examples
    return make_task(row, chosen, folder, reference=other_model(), **options).step(chosen)


def same(one: Step, other: Step) -> None:
    """The same, bit for bit; metrics too."""
    assert torch.equal(one.gradient, other.gradient)
    assert one.done.loss == other.done.loss and math.isfinite(one.done.loss)
    assert one.metrics == other.metrics
    assert float(one.gradient.norm()) > 0


def near(one: Step, other: Step) -> None:
    assert apart(one.gradient, other.gradient) < 1e-9
    assert one.done.loss == pytest.approx(other.done.loss, rel=1e-9, abs=1e-12)
    for key, value in one.metrics.items():
        assert other.metrics[key] == pytest.approx(value, rel=1e-9, abs=1e-12), key


Passes = Callable[..., list[Microbatch]]


def change_passes(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Microbatch], Microbatch]
) -> list[int]:
    """Let every pass of a step and of a reference go through `change`; returns their tokens."""
    seen: list[int] = []

    def changed(make: Passes) -> Passes:
        def made(*inputs: Any, **options: Any) -> list[Microbatch]:
            parts = [change(part) for part in make(*inputs, **options)]
            seen.extend(part.tokens for part in parts)
            return parts

        return made

    for module in (preference_loop, supervised_loop, preference):
        monkeypatch.setattr(module, "answer_passes", changed(answers.answer_passes))
    documents = supervised_loop.document_passes
    monkeypatch.setattr(supervised_loop, "document_passes", changed(documents))
    return seen


def unread_replaced(part: Microbatch) -> Microbatch:
    """Other ids behind the last position of a row that any scored token is predicted from.

    Those are the padding, and the untrained end of a document.
    """
    if part.ids_RT is None:
        slices = []
        for piece in part.slices:
            behind = torch.arange(piece.ids_BT.shape[1]) >= piece.length_B[:, None]
            slices.append(dataclasses.replace(piece, ids_BT=piece.ids_BT.masked_fill(behind, 77)))
        return dataclasses.replace(part, slices=tuple(slices))
    width = part.ids_RT.shape[1]
    last_R = torch.full((len(part.ids_RT),), -1)
    last_R.scatter_reduce_(0, part.places_N // width, part.places_N % width, "amax")
    behind = torch.arange(width) > last_R[:, None]
    return dataclasses.replace(part, ids_RT=part.ids_RT.masked_fill(behind, 77))


@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("name", CASES)
def test_ids_that_no_scored_token_sees_do_not_matter(
    name: str, layout: Name, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = take(name, tmp_path, layouts=(layout,))
    changed = []

    def change(part: Microbatch) -> Microbatch:
        new = unread_replaced(part)
        if part.ids_RT is not None and new.ids_RT is not None:
            changed.append(not torch.equal(part.ids_RT, new.ids_RT))
        else:
            pairs = zip(part.slices, new.slices, strict=True)
            changed.append(any(not torch.equal(a.ids_BT, b.ids_BT) for a, b in pairs))
        return new

    change_passes(monkeypatch, change)
    same(plain, take(name, tmp_path, layouts=(layout,)))
    # One packed row may be full to its end.
    assert any(changed) or layout == "packed"


@pytest.mark.fault(14)
@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("name", CASES)
def test_nan_where_nothing_is_scored_stays_there(
    name: str, layout: Name, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns of padding beyond the longest answer, and NaN in all of the padding."""
    plain = take(name, tmp_path, layouts=(layout,))
    mask, spread = Answers.mask_BT.fget, answers.spread  # type: ignore[attr-defined]
    wider = property(lambda batch: torch.nn.functional.pad(mask(batch), (0, 5)))
    poisoned = []

    def nan(values_N: torch.Tensor, part: Microbatch, width: int) -> torch.Tensor:
        values_bT = spread(values_N, part, width)
        place = {row: i for i, row in enumerate(part.row_list)}
        scored = torch.zeros(values_bT.shape, dtype=torch.bool)
        scored[[place[row] for row in part.rows_N.tolist()], part.columns_N] = True
        poisoned.append(int((~scored).sum()))
        return torch.where(scored, values_bT, torch.nan)

    monkeypatch.setattr(Answers, "mask_BT", wider)
    for module in (preference, supervised):
        monkeypatch.setattr(module, "spread", nan)
    # Wider rows are summed in another order.
    near(plain, take(name, tmp_path, layouts=(layout,)))
    # Documents are summed over their scored tokens: no table of them exists.
    assert sum(poisoned) > 0 or CASES[name].data == "demonstrations"


@pytest.mark.fault(14)
@pytest.mark.parametrize("name", [n for n, r in CASES.items() if is_judge(r)])
def test_a_reward_model_does_not_look_at_the_states_before_the_end(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = take(name, tmp_path)
    spread = answers.spread

    def nan(values_N: torch.Tensor, part: Microbatch, width: int) -> torch.Tensor:
        values_bT = spread(values_N, part, width)
        # The last scored column of each row is the state behind its end token.
        last_b = torch.zeros(len(values_bT), dtype=torch.long)
        place = torch.tensor([part.row_list.index(row) for row in part.rows_N.tolist()])
        last_b.scatter_reduce_(0, place, part.columns_N, "amax")
        return torch.where(torch.arange(width) == last_b[:, None], values_bT, torch.nan)

    monkeypatch.setattr(supervised, "spread", nan)
    same(plain, take(name, tmp_path))


@pytest.mark.parametrize("name", CASES)
def test_the_order_of_the_examples_does_not_matter(name: str, tmp_path: Path) -> None:
    examples = given(CASES[name].data)
    moved = [*examples[2:], *reversed(examples[:2])]
    # Asked once, so that the same answers stand behind the prompts of labels.
    bench = make_task(CASES[name], examples, tmp_path, reference=other_model())
    plain, other = bench.step(examples), bench.step(moved)
    near(plain, other)
    assert plain.done.applied and moved != examples


@pytest.mark.parametrize("name", CASES)
def test_a_token_that_is_seen_does_matter(name: str, tmp_path: Path) -> None:
    """So that what is equal above could have been different."""
    examples = given(CASES[name].data)
    examples[0] = _changed(examples[0])
    plain, other = take(name, tmp_path), take(name, tmp_path, examples=examples)
    assert apart(plain.gradient, other.gradient) > 1e-3


def _changed(example: Demonstration | Pair | Label | Ranking) -> Any:
    """With another last word of its first answer."""

    def other(ids: tuple[int, ...]) -> tuple[int, ...]:
        return (*ids[:-2], 99 - ids[-2] % 40, ids[-1])

    if isinstance(example, Demonstration):
        last = max(t for t, trained in enumerate(example.trained) if trained) + 1
        return dataclasses.replace(example, ids=other(example.ids[:last]) + example.ids[last:])
    if isinstance(example, Pair):
        return dataclasses.replace(example, chosen=other(example.chosen))
    if isinstance(example, Ranking):
        first, *rest = example.completions
        return dataclasses.replace(example, completions=(other(first), *rest))
    return dataclasses.replace(example, completion=other(example.completion))
