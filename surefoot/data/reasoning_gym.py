"""The `reasoning_gym` source: procedural tasks of the optional package of that name.

Owns the making of training and test entries from different seeds, and the check that an entry's
own answer passes its own scorer in the form in which a reward will see it.
Refuses to own the scoring of completions.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, Protocol

from surefoot.data.options import Option, nearest
from surefoot.data.rows import Row, Sieve
from surefoot.data.source import Loaded, Request, Source
from surefoot.errors import DataError, RecipeError

# Entry i of seed s is drawn from s + i, so seeds that lie close share entries.
_EVAL_SEED_DISTANCE = 1_000_000_000
_TRIES_PER_TEST_ROW = 20


class Dataset(Protocol):
    """What we use of a reasoning_gym dataset."""

    def __getitem__(self, index: int) -> Mapping[str, Any]: ...

    def score_answer(self, answer: str | None, entry: Mapping[str, Any]) -> float: ...


def load(request: Request, sieve: Sieve) -> Loaded:
    """`size` training entries, and `eval_size` test entries with different questions.

    Columns: {"reasoning_gym": {"dataset": name, "entry": entry}}, plain JSON. Entries whose own
    answer scores below 1 are left out and counted; without an answer there is nothing to check.
    """
    package = _package()
    options, name = request.options, request.options["name"]
    _check_config(package, name, options["config"], request.key)
    task = request.spec.task or name
    seed, size = options["seed"], options["size"]
    train = _create(package, request, seed=seed, size=size)
    rows = list(_rows(train, name, task, seed=seed, size=size))
    kept = [row for row, sound in rows if sound]
    sieve.seen += len(rows)
    if not kept:
        raise DataError(
            f"{request.key}: all {size} entries of {name!r} have an answer that its own scorer "
            "rejects once the entry is plain JSON. Choose another dataset."
        )
    held_out = _test_rows(package, request, task)
    sieve.seen += len(held_out)
    return Loaded(kept, held_out, gold_rejected=len(rows) - len(kept))


def _test_rows(package: ModuleType, request: Request, task: str) -> list[Row]:
    wanted, name = request.eval_size, request.options["name"]
    if wanted == 0:
        return []
    seed = request.options["seed"] + _EVAL_SEED_DISTANCE
    tries = _TRIES_PER_TEST_ROW * wanted
    dataset = _create(package, request, seed=seed, size=tries)
    different: dict[str, Row] = {}
    sound_rows = (row for row, ok in _rows(dataset, name, task, seed=seed, size=tries) if ok)
    for row in sound_rows:
        assert isinstance(row.prompt, str)
        different.setdefault(row.prompt, row)
        if len(different) == wanted:
            return list(different.values())
    raise DataError(
        f"{request.key}.eval_size is {wanted}, but {tries} entries of {name!r} hold only "
        f"{len(different)} different questions. Set eval_size to at most half of that, or widen "
        f"{request.key}.config."
    )


def _rows(
    dataset: Dataset, name: str, task: str, *, seed: int, size: int
) -> Iterator[tuple[Row, bool]]:
    """(row, whether its own answer passes) in the dataset's order."""
    for index in range(size):
        # A reward may sit behind a pipe, so the entry is checked as JSON will deliver it.
        entry = json.loads(json.dumps(dataset[index]))
        answer = entry["answer"]
        sound = answer is None or dataset.score_answer(answer, entry) >= 1.0
        row = Row(
            where=f"{name} seed {seed} entry {index}",
            id=f"{name}-{seed}-{index}",
            prompt=entry["question"],
            answer=answer,
            task=task,
            columns={"answer": answer, "reasoning_gym": {"dataset": name, "entry": entry}},
        )
        yield row, sound


def _create(package: ModuleType, request: Request, *, seed: int, size: int) -> Dataset:
    name = request.options["name"]
    config = request.options["config"] or {}
    try:
        return package.create_dataset(name, seed=seed, size=size, **config)
    except (AssertionError, TypeError, ValueError) as error:
        raise RecipeError(
            f"{request.key}.config: {name!r} refuses it ({error}). Values given: {dict(config)}."
        ) from error


def _check_config(
    package: ModuleType, name: str, config: Mapping[str, Any] | None, key: str
) -> None:
    known = package.factory.DATASETS
    if name not in known:
        raise RecipeError(
            f"{key}.name: reasoning_gym has no dataset {name!r}{nearest(name, known)} It has "
            f"{len(known)} datasets."
        )
    fields = {item.name for item in dataclasses.fields(known[name][1])} - {"seed", "size"}
    for option in config or {}:
        if option in ("seed", "size"):
            raise RecipeError(f"{key}.config.{option}: set {key}.{option} instead.")
        if option not in fields:
            raise RecipeError(
                f"{key}.config.{option}: {name!r} has no such setting{nearest(option, fields)} "
                f"Its settings: {', '.join(sorted(fields))}."
            )


def _package() -> ModuleType:
    try:
        import reasoning_gym
    except ImportError as error:
        raise DataError(
            "source 'reasoning_gym' needs the package reasoning-gym, which is not installed. "
            "Install it with: pip install 'surefoot[tasks]'"
        ) from error
    return reasoning_gym


SOURCE = Source(
    name="reasoning_gym",
    splits=True,
    options={
        "name": Option(str, required=True),
        "size": Option(int, 1000, at_least=1),
        "seed": Option(int, 0, at_least=0),
        "config": Option(Mapping),  # type: ignore[type-abstract]
    },
    reads=frozenset(),
    load=load,
)
