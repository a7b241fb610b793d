"""From a recipe to the data of a run: the stream to train on, and the prompts to evaluate on.

Owns the registry of sources and the order of the work: load, encode, filter, split, compare.
Refuses to own each of these; they have their own modules.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.data import addition, arrow, hub, jsonl, objects, reasoning_gym, schedule
from surefoot.data.files import resolved
from surefoot.data.filters import (
    Limit,
    count_duplicates,
    drop_long,
    length_limit,
    remove_overlap,
    split_off,
)
from surefoot.data.options import COMMON_OPTIONS, KEYS, nearest, read_options
from surefoot.data.prompts import Encoded, PromptEncoder, check_system, encode_row
from surefoot.data.report import DataReport, SourceReport
from surefoot.data.rows import BadRow, Row, Sieve, canonical
from surefoot.data.schedule import Span
from surefoot.data.source import Request, Source, refuse_unread
from surefoot.data.stream import Lane, Stream
from surefoot.errors import DataError, RecipeError
from surefoot.records import Prompt

if TYPE_CHECKING:
    from surefoot.recipe import DataSource, Recipe

SOURCES: Mapping[str, Source] = {
    module.SOURCE.name: module.SOURCE for module in (addition, reasoning_gym, objects)
}
_CODE_SUFFIXES = (".pkl", ".pickle", ".pt", ".pth", ".bin", ".npy", ".npz")
_OTHER_SUFFIXES = (".csv", ".tsv", ".txt", ".xlsx", ".yaml", ".yml", ".zip")
_READ = (
    "Read are .jsonl, .json (also .gz), .parquet and .arrow files, directories and ids of the "
    "datasets library, and the sources "
)


@dataclass(frozen=True, slots=True)
class Data:
    """The data of one run. `hash` names every row, its tokens and its split."""

    stream: Stream[Prompt]
    eval_prompts: tuple[Prompt, ...]
    report: DataReport
    hash: str


@dataclass(frozen=True, slots=True)
class _Part:
    """One source, read and split: what is trained on before the overlap is known, and the eval."""

    label: str
    spec: DataSource
    train: list[Encoded]
    tested: list[Encoded]
    sieve: Sieve
    limit: Limit
    gold_rejected: int
    too_long: int
    duplicates: int
    revision: str | None


def build(
    recipe: Recipe,
    encoder: PromptEncoder,
    *,
    base_dir: Path | None = None,
    rows: Iterable[Mapping[str, Any]] | None = None,
    eval_rows: Iterable[Mapping[str, Any]] | None = None,
) -> Data:
    """Read, check, encode and split everything that `recipe.data` names.

    `base_dir` is where relative paths start (the recipe file's directory). `rows` are the Python
    rows of a source called `rows`; `eval_rows` are those of a second one, with role eval.
    RecipeError for a key, DataError for a row or file. Deterministic: the same recipe, files and
    encoder give the same data; `run.seed` changes the order of the stream and nothing else.
    """
    check_system(recipe.model.system, encoder)
    specs = tuple(recipe.data)
    keys = [key_of(specs, index) for index in range(len(specs))]
    schedule.check(specs, keys, steps=recipe.run.steps)
    sources = [source_of(spec, base_dir, key=key) for spec, key in zip(specs, keys, strict=True)]
    given = objects.assign(specs, rows, eval_rows)
    parts = [
        _load(
            Request(key, spec, _options(spec, source, key), spec.eval_size or 0, base_dir, passed),
            source,
            label=label,
            recipe=recipe,
            encoder=encoder,
        )
        for spec, source, key, label, passed in zip(
            specs, sources, keys, labels_of(specs), given, strict=True
        )
    ]
    tested = {row.fingerprint for part in parts for row in part.tested}
    trains = [remove_overlap(part.train, tested, source=part.label) for part in parts]
    if not any(trains):
        raise RecipeError(
            "data has no source with rows to train on. Add one with role: train (the default)."
        )
    lanes = [
        Lane([row.prompt for row in train], spec.weight, Span.of(spec), spec.keep_solve_rate)
        for spec, train in zip(specs, trains, strict=True)
        if train
    ]
    eval_prompts = tuple(
        replace(row.prompt, position=position)
        for position, row in enumerate(row for part in parts for row in part.tested)
    )
    digest = _digest([*(lane.rows for lane in lanes), eval_prompts])
    stream = Stream(lanes, seed=recipe.run.seed, hash=digest)
    report = DataReport(
        sources=tuple(
            _counted(part, len(train), recipe.run.steps)
            for part, train in zip(parts, trains, strict=True)
        ),
        quarantine=tuple(row for part in parts for row in part.sieve.listed),
    )
    return Data(stream, eval_prompts, report, digest)


def key_of(specs: Sequence[DataSource], index: int) -> str:
    return "data" if len(specs) == 1 else f"data[{index}]"


def source_of(spec: DataSource, base_dir: Path | None, *, key: str) -> Source:
    """The registered source or reader for `spec.source`."""
    name = spec.source
    if name in SOURCES:
        return SOURCES[name]
    lower = name.lower()
    known = f"{_READ}{', '.join(SOURCES)}."
    if lower.endswith(jsonl.SUFFIXES):
        return jsonl.SOURCE
    if lower.endswith(arrow.SUFFIXES):
        return arrow.SOURCE
    if resolved(name, base_dir).is_dir():
        return hub.SOURCE
    if lower.endswith(_CODE_SUFFIXES):
        raise DataError(
            f"{key}.source: {name}: files of this kind can carry code and are never read. Convert "
            "it to JSON lines."
        )
    if lower.endswith(_OTHER_SUFFIXES):
        raise DataError(f"{key}.source: {name}: this format is not read. Write JSON lines. {known}")
    if hub.HUB_ID.fullmatch(name):
        return hub.SOURCE
    raise RecipeError(f"{key}.source: unknown source {name!r}{nearest(name, SOURCES)} {known}")


def _refuse_max_tokens(spec: DataSource, *, key: str) -> None:
    if spec.max_tokens is not None:
        raise RecipeError(
            f"{key}.max_tokens: nothing reads it for prompts; it limits the rows of supervised and "
            f"preference training. Set {key}.max_prompt_tokens, or remove the key."
        )


def _options(spec: DataSource, source: Source, key: str) -> dict[str, Any]:
    _refuse_max_tokens(spec, key=key)
    refuse_unread(source, spec, key=key)
    schema = {**COMMON_OPTIONS, **source.options}
    return read_options(spec.options, schema, key=key, source=source.name, keys=KEYS)


def labels_of(specs: Sequence[DataSource]) -> list[str]:
    """A short and unique name for each source: its file's name, or its own."""
    names = [Path(spec.source).name for spec in specs]
    return [
        name if names.index(name) == index else f"{name}#{index}"
        for index, name in enumerate(names)
    ]


def _load(
    request: Request, source: Source, *, label: str, recipe: Recipe, encoder: PromptEncoder
) -> _Part:
    """Read one source, encode it, leave out what is too long, and split it."""
    key, spec, options = request.key, request.spec, request.options
    if spec.role == "eval" and request.eval_size and not source.splits:
        raise RecipeError(
            f"{key}.eval_size: a file with role eval gives all its rows to eval. Remove one of the "
            "two keys."
        )
    limit = length_limit(
        key=key,
        max_prompt_tokens=spec.max_prompt_tokens,
        max_context=encoder.max_context,
        max_new_tokens=recipe.rollout.max_new_tokens,
    )
    sieve = Sieve(key, skip=options["skip_invalid"], max_share=options["max_invalid"])
    loaded = source.load(request, sieve)
    # Ids of different sources may be equal, so beside others each source's ids carry its label.
    prefix = f"{label}/" if len(recipe.data) > 1 else ""
    groups: list[list[Encoded]] = []
    for rows in (loaded.rows, loaded.held_out or []):
        named = [replace(row, id=prefix + row.id) for row in rows] if prefix else rows
        groups.append(_encode(named, encoder, sieve, recipe.model.system, options))
    sieve.close()
    fitting = [drop_long(rows, limit, source=label) for rows in groups]
    train, tested = fitting
    if spec.role == "eval":
        train, tested = [], (tested if request.eval_size else train)
        groups = groups[1:] if request.eval_size else groups[:1]
    elif request.eval_size and not source.splits:
        train, tested = split_off(train, request.eval_size, key=key)
    if not train and not tested:
        raise DataError(f"{label}: no valid row is left. The first: {_first(sieve)}.")
    encoded = sum(map(len, groups))
    return _Part(
        label=label,
        spec=spec,
        train=train,
        tested=tested,
        sieve=sieve,
        limit=limit,
        gold_rejected=loaded.gold_rejected,
        too_long=encoded - len(train) - len(tested),
        duplicates=count_duplicates(train + tested),
        revision=loaded.revision,
    )


def _encode(
    rows: Iterable[Row],
    encoder: PromptEncoder,
    sieve: Sieve,
    system: str | None,
    options: Mapping[str, Any],
) -> list[Encoded]:
    allowed = options["allow_control_tokens"]
    found = []
    for row in rows:
        try:
            found.append(encode_row(row, encoder, system=system, allow_control_tokens=allowed))
        except BadRow as problem:
            sieve.reject(row.where, problem)
    return found


def _first(sieve: Sieve) -> str:
    row = sieve.listed[0]
    return f"{row.where}: {row.reason}"


def _counted(part: _Part, trained: int, steps: int | None) -> SourceReport:
    listed = part.sieve.listed
    kept = len(part.train) + len(part.tested)
    return SourceReport(
        source=part.label,
        rows=len(listed) + part.gold_rejected + part.too_long + kept,
        quarantined=len(listed),
        control_tokens=sum(row.kind == "control_tokens" for row in listed),
        surrogates=part.sieve.mended,
        gold_rejected=part.gold_rejected,
        too_long=part.too_long,
        duplicates=part.duplicates,
        overlap=len(part.train) - trained,
        train=trained,
        eval=len(part.tested),
        limit=part.limit.tokens,
        limit_reason=part.limit.reason,
        drawn=Span.of(part.spec).describe(steps),
        revision=part.revision,
    )


def _digest(groups: Iterable[Iterable[Prompt]]) -> str:
    """sha256 of every prompt in order; where one group ends and the next begins counts too."""
    digest = hashlib.sha256()
    for index, prompts in enumerate(groups):
        digest.update(f"group {index}\n".encode())
        for prompt in prompts:
            fields = [prompt.id, prompt.ids, prompt.text, prompt.answer, prompt.task]
            line = canonical([*fields, prompt.messages, prompt.columns])
            digest.update(f"{line}\n".encode())
    return digest.hexdigest()
