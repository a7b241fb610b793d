"""What the reference says of every answer: asked once, before training, and kept in a file.

Owns the order in which it is asked, the answers behind other prompts (KTO), and the cache under the
hash of everything that the scores depend on.
Refuses to own the scores themselves (`learner/preference`). The reference is the policy before its
first step, so no second model is held in memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from surefoot.data import Label, Pair
from surefoot.errors import DataError, ModelError
from surefoot.learner.answers import Answers
from surefoot.learner.batch import Packing
from surefoot.learner.preference import score_of
from surefoot.learner.scorer import Scorer
from surefoot.methods import Preference
from surefoot.models.alias import cache_directory
from surefoot.models.memory import halved, out_of_memory, too_small
from surefoot.run.files import atomic_write_bytes

Compared = Pair | Label
_FILE = "scores"
_EVERY = 30.0
"""Seconds after which what is known is kept, and people are told how far it is."""


@dataclass(frozen=True)
class Mismatched:
    """Answers behind the prompts of a step, and their scores under the reference, [B]."""

    batch: Answers
    score_B: Tensor


class ReferenceScores:
    """Scores by the id of an example, in the order of its answers (nats)."""

    def __init__(
        self, scores: Mapping[str, Sequence[float]], others: Mapping[str, Other] | None = None
    ) -> None:
        self._scores = scores
        self._others = {} if others is None else others

    def of(self, examples: Sequence[Compared]) -> Tensor:
        """The score of every answer of these examples, [B], float64."""
        told = [score for example in examples for score in self._scores[example.id]]
        return torch.tensor(told, dtype=torch.float64)

    def mismatched(self, examples: Sequence[Compared]) -> Mismatched:
        """For each label, the answer to another prompt behind its own prompt."""
        found = [self._others[example.id] for example in examples]
        batch = Answers(
            tuple(example.prompt for example in examples),
            tuple((other.completion,) for other in found),
        )
        return Mismatched(
            batch, torch.tensor([other.score for other in found], dtype=torch.float64)
        )


@dataclass(frozen=True)
class Other:
    """The answer to another prompt that stands behind an example's prompt, and its score."""

    completion: tuple[int, ...]
    score: float


def reference_scores(
    row: Preference,
    scorer: Scorer,
    batches: Iterable[Sequence[Compared]],
    packing: Packing,
    *,
    identity: Mapping[str, object],
    interrupt: Callable[[], None],
    folder: Path | None = None,
) -> ReferenceScores:
    """Ask the policy as it is now, or read what an earlier process kept.

    What is known is kept twice a minute, so that a process that dies loses little. `interrupt` is
    called before each batch, and may raise.

    `batches` are those of the first epoch and of the evaluation: asked in the passes that training
    will make, the scores at unchanged weights are the policy's own, bit for bit. `identity` says
    what they depend on (model, data, precision, layout); `folder` defaults to the cache.
    """
    asked = [list(batch) for batch in batches]
    key = _key(row, identity, packing)
    path = (cache_directory() / "reference" if folder is None else folder) / f"{key}.safetensors"
    others = _others([e for batch in asked for e in batch if isinstance(e, Label)])
    scores, other = _read(path, asked, needs_others=bool(others))
    left = [batch for batch in asked if any(example.id not in scores for example in batch)]
    told = time.monotonic()
    for i, batch in enumerate(left):
        try:
            interrupt()
            ask = partial(_ask, row, scorer, batch, others, scores, other)
            packing = _in_pieces(ask, packing)
        except BaseException:
            # It only keeps work, so a full disk must not take the place of the reason to end.
            with contextlib.suppress(OSError):
                _write(path, scores, other, asked)
            raise
        if time.monotonic() - told > _EVERY and i + 1 < len(left):
            told = time.monotonic()
            _write(path, scores, other, asked)
            sys.stderr.write(f"surefoot: the reference has scored {i + 1} of {len(left)} batches\n")
    if left:
        _write(path, scores, other, asked)
    return ReferenceScores(
        scores, {name: Other(others[name], other[name]) for name in others} if others else None
    )


def _in_pieces(ask: Callable[[Packing], None], packing: Packing) -> Packing:
    """Ask; after running out of memory in smaller pieces, which later batches take too."""
    while True:
        try:
            ask(packing)
            return packing
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            budget = halved(packing.budget)
            if budget is None:
                raise ModelError(too_small(packing.budget)) from error
        packing = dataclasses.replace(packing, budget=budget)
        sys.stderr.write(
            f"surefoot: out of memory; the reference goes on with {packing.budget} tokens per "
            "micro-batch\n"
        )


def _ask(
    row: Preference,
    scorer: Scorer,
    batch: Sequence[Compared],
    others: Mapping[str, tuple[int, ...]],
    scores: dict[str, tuple[float, ...]],
    other: dict[str, float],
    packing: Packing,
) -> None:
    """Add the scores of a batch; an example that has one keeps it."""
    own = [answers(example) for example in batch]
    prompts = tuple(example.prompt for example in batch)
    told = score_of(row, scorer, Answers(prompts, tuple(own)), packing).tolist()
    crossed: list[float] = []
    if others:
        answered = Answers(prompts, tuple((others[example.id],) for example in batch))
        crossed = score_of(row, scorer, answered, packing).tolist()
        for example, score in zip(batch, crossed, strict=True):
            other.setdefault(example.id, score)
    at = 0
    for example, its in zip(batch, own, strict=True):
        scores.setdefault(example.id, tuple(told[at : at + len(its)]))
        at += len(its)


def answers(example: Compared) -> tuple[tuple[int, ...], ...]:
    """The answers of an example: chosen and rejected, or the one that is labelled."""
    return (
        (example.chosen, example.rejected) if isinstance(example, Pair) else (example.completion,)
    )


def _others(labels: Sequence[Label]) -> dict[str, tuple[int, ...]]:
    """For each label the completion of the next one, in their order, that has another prompt."""
    out: dict[str, tuple[int, ...]] = {}
    for i, label in enumerate(labels):
        if label.id in out:
            continue
        following = (labels[(i + k) % len(labels)] for k in range(1, len(labels)))
        found = next((other for other in following if other.prompt != label.prompt), None)
        if found is None:
            raise DataError(
                "data: every label has the same prompt, and KTO's zero point is measured on "
                "answers to other prompts; add rows with other prompts"
            )
        out[label.id] = found.completion
    return out


def _key(row: Preference, identity: Mapping[str, object], packing: Packing) -> str:
    facts = {
        **identity,
        "score": row.score,
        "kind": row.data,
        "layouts": list(packing.layouts),
        "budget": packing.budget,
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _names(batches: Sequence[Sequence[Compared]]) -> list[tuple[str, int]]:
    """Every example once, with the number of its answers, in the order of asking."""
    return list({e.id: (e.id, len(answers(e))) for batch in batches for e in batch}.values())


def _write(
    path: Path,
    scores: Mapping[str, Sequence[float]],
    other: Mapping[str, float],
    batches: Sequence[Sequence[Compared]],
) -> None:
    """The first examples that have scores, in the order of asking."""
    names = [name for name, _ in _names(batches) if name in scores]
    flat = [score for name in names for score in scores[name]]
    tensors = {_FILE: torch.tensor(flat, dtype=torch.float64)}
    if other:
        tensors["others"] = torch.tensor([other[name] for name in names], dtype=torch.float64)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_bytes(path, safetensors.torch.save(tensors))


def _read(
    path: Path, batches: Sequence[Sequence[Compared]], *, needs_others: bool
) -> tuple[dict[str, tuple[float, ...]], dict[str, float]]:
    """What is kept of exactly these examples, from the first on; nothing where nothing whole is."""
    try:
        tensors = safetensors.torch.load_file(path)
    except (OSError, SafetensorError):
        return {}, {}
    names = _names(batches)
    flat = tensors[_FILE].tolist()
    crossed = tensors["others"].tolist() if "others" in tensors else []
    scores: dict[str, tuple[float, ...]] = {}
    at = 0
    for name, count in names:
        if at == len(flat):
            break
        scores[name] = tuple(flat[at : at + count])
        at += count
    if at != len(flat) or len(crossed) != (len(scores) if needs_others else 0):
        return {}, {}
    return scores, dict(zip(scores, crossed, strict=False))
