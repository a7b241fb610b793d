"""One optimizer step of every row that trains on given data, through its own task of the loops."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from support.hand import Recorder
from support.tiny import architectures, make_model
from surefoot.data import Demonstration, Label, Pair, Ranking
from surefoot.learner.batch import Packing
from surefoot.learner.critic import ValueModel, value_backbone
from surefoot.learner.descent import Descended
from surefoot.learner.layouts import NAMES, Name
from surefoot.learner.scorer import Scorer
from surefoot.loops.metrics import Metrics
from surefoot.loops.preference import PreferenceTask
from surefoot.loops.reference import ReferenceScores, reference_scores
from surefoot.loops.supervised import Comparison, Imitation
from surefoot.methods import Method, Preference, Supervised, rows, with_fields
from surefoot.recipe.schema import Optim

GPT2 = architectures()["gpt2"]  # no float32 casts inside: exact in float64
END = 2
"""Both padding and an end token, as in the tokenizer of the tiny models."""
Given = Preference | Supervised
_calls = itertools.count()


def is_judge(row: Given) -> bool:
    """Whether it trains a reward model."""
    return isinstance(row, Supervised) and row.loss == "bradley_terry"


def _cases() -> dict[str, Given]:
    """Every row of the registry that samples nothing, and values that none of them has."""
    found = {name: row for name, row in rows().items() if not isinstance(row, Method)}
    changed: dict[str, tuple[str, dict[str, object]]] = {
        "sft packed": ("sft", {"packing": True}),
        "reward_model of rankings": ("reward_model", {"data": "rankings"}),
        "dpo weighed": ("dpo", {"weight": "likelihood"}),
        "kto by bco": ("kto", {"link": "bco", "desirable": 2.0}),
    }
    for name, (of, changes) in changed.items():
        row = with_fields(found[of], changes)
        assert not isinstance(row, Method)
        found[name] = row
    return found


CASES = _cases()
RELATIVE = [name for name, row in CASES.items() if isinstance(row, Preference) and row.reference]
"""Those that ask a reference."""


def ids(index: int, length: int, *, ends: bool = False) -> tuple[int, ...]:
    """Tokens that are no end tokens, a function of `index` and place; closed by one if `ends`."""
    plain = tuple(8 + (31 * index + 5 * t) % 80 for t in range(length))
    return (*plain, END) if ends else plain


def answer(index: int, length: int) -> tuple[int, ...]:
    return ids(index, length, ends=True)


def given(data: str) -> list[Any]:
    """Three or four examples of a row's `data`, of unequal lengths; one answer is its end alone."""
    if data == "pairs":
        return [
            Pair("p0", ids(0, 4), answer(10, 3), answer(20, 8), margin=0.5),
            Pair("p1", ids(1, 7), answer(11, 0), answer(21, 2)),
            Pair("p2", ids(2, 5), answer(12, 9), answer(22, 1)),
        ]
    if data == "labels":
        lengths = (3, 0, 8, 7)
        return [
            Label(f"l{i}", ids(i, 4 + i), answer(10 + i, n), i % 2 == 0)
            for i, n in enumerate(lengths)
        ]
    if data == "rankings":
        return [
            Ranking("r0", ids(0, 4), (answer(10, 3), answer(20, 5), answer(30, 1))),
            Ranking("r1", ids(1, 6), (answer(11, 4), answer(21, 0))),
            Ranking("r2", ids(2, 3), (answer(12, 2), answer(22, 7), answer(32, 4))),
        ]
    assert data == "demonstrations", data
    # Turns that are trained and turns that are not; the last one of d2 is not.
    shapes = {"d0": (3, -4, 2), "d1": (5, -1), "d2": (2, -6, 3, -2, 4), "d3": (4, -9)}
    return [_demonstration(i, name, shape) for i, (name, shape) in enumerate(shapes.items())]


def _demonstration(index: int, name: str, turns: Sequence[int]) -> Demonstration:
    """Turns of these lengths; those below zero are trained and closed by an end token."""
    tokens: list[int] = []
    trained: list[bool] = []
    for place, length in enumerate(turns):
        turn = ids(7 * index + place, abs(length), ends=length < 0)
        tokens += turn
        trained += [length < 0] * len(turn)
    return Demonstration(name, tuple(tokens), tuple(trained))


@dataclass(frozen=True)
class Step:
    """Everything that one optimizer step leaves behind."""

    done: Descended
    metrics: Metrics
    gradient: Tensor


@dataclass(frozen=True)
class Bench:
    """A task, and the optimizer that keeps its gradients."""

    task: PreferenceTask | Imitation | Comparison
    optimizer: Recorder

    def step(self, examples: Sequence[Any], *, moves: bool = False) -> Step:
        """Learn from the examples. The weights stay as they are unless `moves`."""
        self.optimizer.applies = moves
        done, metrics = self.task.learn(examples, rate=0.05)
        assert done.applied
        return Step(done, metrics, self.optimizer.gradients[-1])

    @property
    def model(self) -> PreTrainedModel:
        """The policy, or a reward model's layers."""
        return (
            self.task.model.model if isinstance(self.task, Comparison) else self.task.scorer.model
        )


def make_task(
    row: Given,
    examples: Sequence[Any],
    folder: Path,
    *,
    model: PreTrainedModel | None = None,
    reference: PreTrainedModel | None = None,
    config: PreTrainedConfig | None = GPT2,
    dtype: torch.dtype = torch.float64,
    budget: int = 10_000,
    layouts: tuple[Name, ...] = NAMES,
) -> Bench:
    """A task as a run makes it. Without a `reference` it is the policy as it is now.

    The head of a reward model is not at zero, so that rewards differ.
    """
    model = make_model(config, dtype=dtype) if model is None else model
    scorer = Scorer(model, compute=dtype, head_dtype=dtype, temperature=1.0)
    packing = Packing(budget, layouts, scorer.shape)
    settings = Optim(learning_rate=0.05, weight_decay=0.0, batch_size=len(examples))
    if is_judge(row):
        judge = ValueModel(value_backbone(model, layers=None), compute=dtype)
        generator = torch.Generator().manual_seed(3)
        torch.nn.init.normal_(judge.head.weight, std=0.3, generator=generator)
        optimizer = Recorder(judge, settings, steps=10)
        assert isinstance(row, Supervised)
        return Bench(Comparison(row, judge, optimizer, packing, [], examples), optimizer)
    optimizer = Recorder(model, settings, steps=10)
    if isinstance(row, Supervised):
        return Bench(Imitation(row, scorer, optimizer, packing, []), optimizer)
    known = None
    if row.reference:
        other = model if reference is None else reference
        asked = Scorer(other, compute=dtype, head_dtype=dtype, temperature=1.0)
        known = ask(row, asked, examples, packing, folder)
    return Bench(PreferenceTask(row, scorer, optimizer, packing, [], known), optimizer)


def ask(
    row: Preference, scorer: Scorer, examples: Sequence[Any], packing: Packing, folder: Path
) -> ReferenceScores:
    """The scores of a reference, never those that an earlier call has kept."""
    return reference_scores(
        row,
        scorer,
        [examples],
        packing,
        identity={"call": next(_calls)},
        interrupt=lambda: None,
        folder=folder,
    )


def other_model(
    *, config: PreTrainedConfig | None = GPT2, dtype: torch.dtype = torch.float64
) -> PreTrainedModel:
    """A reference that the policy has left."""
    return make_model(config, seed=1, dtype=dtype)


def renamed(examples: Sequence[Any], suffix: str) -> list[Any]:
    """The same examples under other ids."""
    return [dataclasses.replace(e, id=f"{e.id}{suffix}") for e in examples]
