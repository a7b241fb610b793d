"""What is left out before a run, and the split: length, overlap, duplicates, held-out rows.

Owns the counts of what it leaves out. Refuses to own silent loss: nothing is cut, and losing
everything is an error that names the limit.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from surefoot import draws
from surefoot.data.prompts import Encoded
from surefoot.data.source import SPLIT_SEED
from surefoot.errors import DataError, RecipeError


class Placed(Protocol):
    """A row with its place for people and the fingerprint of what it asks."""

    @property
    def where(self) -> str: ...

    @property
    def fingerprint(self) -> bytes: ...


P = TypeVar("P", bound=Placed)


@dataclass(frozen=True, slots=True)
class Limit:
    """The longest prompt allowed, in tokens with the template applied, and where it comes from."""

    tokens: int
    reason: str


def length_limit(
    *, key: str, max_prompt_tokens: int | None, max_context: int, max_new_tokens: int
) -> Limit:
    """The smaller of the recipe's limit and what the context leaves beside the completion.

    RecipeError if the completion alone fills the context.
    """
    room = max_context - max_new_tokens
    if room < 1:
        raise RecipeError(
            f"rollout.max_new_tokens is {max_new_tokens}, but the model's context has "
            f"{max_context} tokens: no prompt fits. Lower rollout.max_new_tokens."
        )
    if max_prompt_tokens is not None and max_prompt_tokens <= room:
        return Limit(max_prompt_tokens, f"{key}.max_prompt_tokens")
    return Limit(room, f"context {max_context} minus rollout.max_new_tokens {max_new_tokens}")


def drop_long(rows: Sequence[Encoded], limit: Limit, *, source: str) -> list[Encoded]:
    """Rows whose prompt fits; DataError naming the limit and the shortest prompt if none does."""
    kept = [row for row in rows if len(row.prompt.ids) <= limit.tokens]
    if rows and not kept:
        shortest = min(rows, key=lambda row: len(row.prompt.ids))
        raise DataError(
            f"{source}: all {len(rows)} prompts are longer than {limit.tokens} tokens "
            f"({limit.reason}). The shortest, {shortest.where}, has {len(shortest.prompt.ids)} "
            "with the template applied. Raise the limit, or shorten the prompts."
        )
    return kept


def count_duplicates(rows: Sequence[Encoded]) -> int:
    """How many rows ask what an earlier one asked already; they stay in."""
    return len(rows) - len({row.fingerprint for row in rows})


def split_off(
    rows: Sequence[Encoded], size: int, *, key: str
) -> tuple[list[Encoded], list[Encoded]]:
    """(training rows, `size` different held-out rows), by keyed draws that no run seed changes.

    Rows are drawn without regard to length, so tokenizers with different lengths agree on most of
    the test set. The training rows keep their order. RecipeError if fewer different prompts exist
    or nothing would stay for training.
    """
    chosen: dict[bytes, int] = {}
    for index in draws.permutation(SPLIT_SEED, "split/rows", len(rows)):
        if len(chosen) == size:
            break
        chosen.setdefault(rows[index].fingerprint, int(index))
    different = len({row.fingerprint for row in rows})
    if different <= size:
        raise RecipeError(
            f"{key}.eval_size is {size}, but the source has only {different} different prompts "
            "that fit, and at least one must stay for training. Set eval_size to "
            f"{max(different - 1, 0)}, or give more rows."
        )
    taken = set(chosen.values())
    train = [row for index, row in enumerate(rows) if index not in taken]
    return train, [rows[index] for index in chosen.values()]


def remove_overlap(train: Sequence[P], tested: Collection[bytes], *, source: str) -> list[P]:
    """Training rows whose fingerprint is not among `tested`; DataError if every row's is."""
    kept = [row for row in train if row.fingerprint not in tested]
    if train and not kept:
        raise DataError(
            f"{source}: every training prompt is also an eval prompt (compared without case and "
            f"white space), the first being {train[0].where}. Use different data for the eval "
            "source, or set eval_size instead."
        )
    return kept
