"""From a recipe to the examples of a supervised or preference run: the stream, and the eval rows.

Owns the order of the work: load, read the forms, encode, leave out what is long or tied, split.
Refuses to own each of these; they have their own modules. Prompts are built in `build.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from surefoot import draws
from surefoot.data import objects, schedule
from surefoot.data.build import key_of, labels_of, source_of
from surefoot.data.encode import Coded, Encoding, ExampleEncoder, TrainOn
from surefoot.data.example_report import ExampleReport, ExampleSourceReport
from surefoot.data.examples import KINDS, Demonstration, Example
from surefoot.data.filters import Limit, remove_overlap
from surefoot.data.forms import Form, Reader
from surefoot.data.options import COMMON_OPTIONS, KEYS, read_options
from surefoot.data.prompts import check_system
from surefoot.data.rows import BadRow, Row, Sieve, canonical
from surefoot.data.schedule import Span
from surefoot.data.source import SPLIT_SEED, Request, Source, refuse_two_tasks, refuse_unread
from surefoot.data.stream import Lane, Stream
from surefoot.errors import DataError, RecipeError

if TYPE_CHECKING:
    from surefoot.recipe import DataSource, Recipe

E = TypeVar("E", bound=Example)


@dataclass(frozen=True)
class Examples(Generic[E]):
    """The examples of one run. `hash` names every one of them and its split."""

    stream: Stream[E]
    eval_rows: tuple[E, ...]
    report: ExampleReport
    hash: str


@dataclass(frozen=True, slots=True)
class _Part:
    """One source, read and split; what overlaps with another source's eval rows is still in."""

    label: str
    spec: DataSource
    train: list[Coded]
    tested: list[Coded]
    sieve: Sieve
    limit: Limit
    gold_rejected: int
    tied: int
    too_long: int
    revision: str | None


def build_examples(
    recipe: Recipe,
    encoder: ExampleEncoder,
    kind: type[E],
    *,
    train_on: TrainOn | None = None,
    base_dir: Path | None = None,
    rows: Iterable[Mapping[str, Any]] | None = None,
    eval_rows: Iterable[Mapping[str, Any]] | None = None,
) -> Examples[E]:
    """Read, check, encode and split everything that `recipe.data` names, as examples of `kind`.

    `train_on` is given for demonstrations and for nothing else. `base_dir`, `rows`, `eval_rows`
    and the errors are those of `build`. Deterministic: the same recipe, files and encoder give
    the same examples; `run.seed` changes the order of the stream and nothing else.
    """
    check_system(recipe.model.system, encoder)
    specs = tuple(recipe.data)
    keys = [key_of(specs, index) for index in range(len(specs))]
    schedule.check(specs, keys, steps=recipe.run.steps)
    given = objects.assign(specs, rows, eval_rows)
    parts = []
    for spec, key, label, passed in zip(specs, keys, labels_of(specs), given, strict=True):
        source = source_of(spec, base_dir, key=key)
        options = _options(spec, source, key)
        request = Request(key, spec, options, spec.eval_size or 0, base_dir, passed)
        encoding = Encoding(
            encoder, kind, train_on, recipe.model.system, options["allow_control_tokens"]
        )
        prefix = f"{label}/" if len(specs) > 1 else ""
        parts.append(_load(request, source, encoding, label=label, prefix=prefix))
    tested = {row.fingerprint for part in parts for row in part.tested}
    trains = [remove_overlap(part.train, tested, source=part.label) for part in parts]
    if not any(trains):
        raise RecipeError(
            "data has no source with rows to train on. Add one with role: train (the default)."
        )
    lanes: list[Lane[E]] = [
        Lane(cast("list[E]", _flat(train)), spec.weight, Span.of(spec), None)
        for spec, train in zip(specs, trains, strict=True)
        if train
    ]
    held_out = cast("list[E]", _flat(row for part in parts for row in part.tested))
    placed = tuple(replace(row, position=position) for position, row in enumerate(held_out))
    digest = _digest([*(lane.rows for lane in lanes), placed])
    report = ExampleReport(
        sources=tuple(
            _counted(part, train, kind, recipe.run.steps)
            for part, train in zip(parts, trains, strict=True)
        ),
        quarantine=tuple(row for part in parts for row in part.sieve.listed),
    )
    return Examples(Stream(lanes, seed=recipe.run.seed, hash=digest), placed, report, digest)


def _options(spec: DataSource, source: Source, key: str) -> dict[str, Any]:
    refuse_unread(source, spec, key=key)
    refuse_two_tasks(spec, key=key)
    only_prompts = {
        "max_prompt_tokens": (
            spec.max_prompt_tokens,
            f"whole rows are limited by {key}.max_tokens",
        ),
        "keep_solve_rate": (spec.keep_solve_rate, "nothing is sampled, so nothing is solved"),
        "answer_format": (spec.options.get("answer_format"), "no reward reads an answer"),
    }
    for name, (value, why) in only_prompts.items():
        if value is not None:
            raise RecipeError(
                f"{key}.{name}: nothing reads it in supervised and preference training: {why}. "
                "Remove it."
            )
    schema = {**COMMON_OPTIONS, **source.options}
    return read_options(spec.options, schema, key=key, source=source.name, keys=KEYS)


def _load(
    request: Request, source: Source, encoding: Encoding, *, label: str, prefix: str
) -> _Part:
    """Read one source, encode it, leave out what is too long, and split it."""
    key, spec = request.key, request.spec
    if spec.role == "eval" and request.eval_size and not source.splits:
        raise RecipeError(
            f"{key}.eval_size: a file with role eval gives all its rows to eval. Remove one of the "
            "two keys."
        )
    options = request.options
    sieve = Sieve(key, skip=options["skip_invalid"], max_share=options["max_invalid"])
    read = _forms(request, source, encoding, sieve)
    coded = [_encoded(forms, encoding, sieve, prefix) for forms in (read.forms, read.held_out)]
    sieve.close()
    limit = _limit(spec, key, encoding.encoder.max_context)
    train, tested = (_fitting(rows, limit, label) for rows, _ in coded)
    too_long = sum(len(rows) for rows, _ in coded) - len(train) - len(tested)
    if spec.role == "eval":
        train, tested = [], (tested if request.eval_size else train)
    elif request.eval_size and not source.splits:
        train, tested = _hold_out(train, request.eval_size, key=key)
    tied = sum(count for _, count in coded)
    if not train and not tested:
        bad = [f"The first bad one, {row.where}: {row.reason}" for row in sieve.listed[:1]]
        why = [*bad, f"{tied} rows have equal answers"][0]
        raise DataError(f"{label}: no valid row is left. {why}.")
    return _Part(
        label, spec, train, tested, sieve, limit, read.gold_rejected, tied, too_long, read.revision
    )


@dataclass(frozen=True, slots=True)
class _Read:
    forms: list[Form]
    held_out: list[Form]
    gold_rejected: int = 0
    revision: str | None = None


def _forms(request: Request, source: Source, encoding: Encoding, sieve: Sieve) -> _Read:
    """The rows of a source of given rows; questions that are made are answered by their gold."""
    spec, key = request.spec, request.key
    reader = Reader(key, encoding.kind, spec.columns, spec.task, encoding.encoder.has_template)
    if source.raw is not None:
        items = source.raw(request)
        forms = reader.read_all(items.rows, sieve)
        if sieve.seen == 0:
            raise DataError(items.empty)
        return _Read(forms, [], revision=items.revision)
    if encoding.kind is not Demonstration:
        raise RecipeError(
            f"{key}.source: {source.name!r} gives questions with one right answer, which are "
            "demonstrations, and nothing to compare. Name a file of pairs."
        )
    loaded = source.load(request, sieve)
    told = [_answered(rows, sieve) for rows in (loaded.rows, loaded.held_out or [])]
    return _Read(told[0], told[1], gold_rejected=loaded.gold_rejected)


def _answered(rows: Iterable[Row], sieve: Sieve) -> list[Form]:
    found = []
    for row in rows:
        if row.answer is None or not row.answer.strip():
            sieve.reject(row.where, BadRow("the question has no answer to imitate"))
        else:
            found.append(Form(row.where, row.id, row.task, row.prompt, (row.answer,)))
    return found


def _encoded(
    forms: Iterable[Form], encoding: Encoding, sieve: Sieve, prefix: str
) -> tuple[list[Coded], int]:
    """(the rows in ids, how many were ties). Beside others, ids carry their source's label."""
    found, tied = [], 0
    for form in forms:
        try:
            coded = encoding.code(replace(form, id=prefix + form.id))
        except BadRow as problem:
            sieve.reject(form.where, problem)
            continue
        if coded is None:
            tied += 1
        else:
            found.append(coded)
    return found, tied


def _limit(spec: DataSource, key: str, max_context: int) -> Limit:
    if spec.max_tokens is not None and spec.max_tokens <= max_context:
        return Limit(spec.max_tokens, f"{key}.max_tokens")
    return Limit(max_context, f"the model's context of {max_context}")


def _fitting(rows: Sequence[Coded], limit: Limit, label: str) -> list[Coded]:
    """Rows that fit; DataError naming the limit and the shortest row if none does."""
    kept = [row for row in rows if row.length <= limit.tokens]
    if rows and not kept:
        shortest = min(rows, key=lambda row: row.length)
        raise DataError(
            f"{label}: all {len(rows)} rows are longer than {limit.tokens} tokens "
            f"({limit.reason}). The shortest, {shortest.where}, has {shortest.length} with the "
            "template applied. Raise the limit, or shorten the rows."
        )
    return kept


def _hold_out(rows: Sequence[Coded], size: int, *, key: str) -> tuple[list[Coded], list[Coded]]:
    """(training rows, all rows of `size` prompts), by keyed draws that no run seed changes."""
    prompts = list(dict.fromkeys(row.fingerprint for row in rows))
    if len(prompts) <= size:
        raise RecipeError(
            f"{key}.eval_size is {size}, but the source has only {len(prompts)} different prompts "
            f"that fit, and at least one must stay for training. Set eval_size to "
            f"{max(len(prompts) - 1, 0)}, or give more rows."
        )
    order = draws.permutation(SPLIT_SEED, "split/examples", len(prompts))[:size]
    chosen: Collection[bytes] = {prompts[index] for index in order}
    train = [row for row in rows if row.fingerprint not in chosen]
    return train, [row for row in rows if row.fingerprint in chosen]


def _flat(rows: Iterable[Coded]) -> list[Example]:
    return [example for row in rows for example in row.examples]


def _counted(
    part: _Part, train: Sequence[Coded], kind: type[Example], steps: int | None
) -> ExampleSourceReport:
    listed, rows = part.sieve.listed, [*part.train, *part.tested]
    examples = _flat(train)
    return ExampleSourceReport(
        source=part.label,
        kind=next(name for name, known in KINDS.items() if known is kind),
        rows=len(listed) + part.gold_rejected + part.tied + part.too_long + len(rows),
        quarantined=len(listed),
        control_tokens=sum(row.kind == "control_tokens" for row in listed),
        surrogates=part.sieve.mended,
        gold_rejected=part.gold_rejected,
        tied=part.tied,
        too_long=part.too_long,
        duplicates=len(rows) - len({_tokens(row) for row in rows}),
        overlap=len(part.train) - len(train),
        apart=sum(row.apart for row in rows),
        train=len(train),
        eval=len(part.tested),
        examples=len(examples),
        tokens=sum(example.tokens for example in examples),
        trained_tokens=sum(example.trained_tokens for example in examples),
        limit=part.limit.tokens,
        limit_reason=part.limit.reason,
        drawn=Span.of(part.spec).describe(steps),
        revision=part.revision,
    )


def _tokens(row: Coded) -> tuple[Any, ...]:
    """What makes two rows the same: everything but their names."""
    return tuple(_values(example, leave=("id", "position")) for example in row.examples)


def _digest(groups: Iterable[Iterable[Example]]) -> str:
    """sha256 of every example in order; where one group ends and the next begins counts too."""
    digest = hashlib.sha256()
    for index, examples in enumerate(groups):
        digest.update(f"group {index}\n".encode())
        for example in examples:
            line = canonical(_values(example, leave=("position",)))
            digest.update(f"{line}\n".encode())
    return digest.hexdigest()


def _values(example: Example, *, leave: Collection[str]) -> tuple[Any, ...]:
    # astuple would copy every token.
    names = (field.name for field in fields(example) if field.name not in leave)
    return tuple(getattr(example, name) for name in names)
