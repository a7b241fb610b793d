"""What supervised, reward-model and preference training learn from, as token ids.

Owns the frozen records and the checks they make on construction.
Refuses to own tokenizers, where a row comes from, and any loss.

Of each, `length` is the longest row that a model reads (a prompt with one answer), `tokens` are
all tokens with the prompt once, `trained_tokens` those whose prediction is in the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One text to imitate. `trained[t]` says whether the prediction of id t is in the loss.

    The first id is never trained: nothing predicts it. `position` is the place in the stream.
    """

    id: str
    ids: tuple[int, ...]
    trained: tuple[bool, ...]
    task: str = "default"
    position: int = 0

    def __post_init__(self) -> None:
        assert len(self.ids) == len(self.trained), (self.id, len(self.ids), len(self.trained))
        assert any(self.trained), f"demonstration {self.id} trains nothing"
        assert not self.trained[0], f"demonstration {self.id} trains its first id"

    @property
    def length(self) -> int:
        return len(self.ids)

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def trained_tokens(self) -> int:
        return sum(self.trained)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt, the better one first; each ends with an end token.

    `margin` is by how much the better one is better, where the row says so.
    """

    id: str
    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]
    margin: float | None = None
    task: str = "default"
    position: int = 0

    def __post_init__(self) -> None:
        assert self.prompt and self.chosen and self.rejected, f"pair {self.id} has an empty part"
        assert self.chosen != self.rejected, f"pair {self.id} is a tie"
        assert self.margin is None or math.isfinite(self.margin), (self.id, self.margin)

    @property
    def length(self) -> int:
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))

    @property
    def tokens(self) -> int:
        return len(self.prompt) + self.trained_tokens

    @property
    def trained_tokens(self) -> int:
        return len(self.chosen) + len(self.rejected)


@dataclass(frozen=True, slots=True)
class Label:
    """One answer and whether it is wanted; it ends with an end token."""

    id: str
    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    desirable: bool
    task: str = "default"
    position: int = 0

    def __post_init__(self) -> None:
        assert self.prompt and self.completion, f"label {self.id} has an empty part"

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.completion)

    @property
    def tokens(self) -> int:
        return self.length

    @property
    def trained_tokens(self) -> int:
        return len(self.completion)


@dataclass(frozen=True, slots=True)
class Ranking:
    """K different answers to one prompt, the best first; each ends with an end token."""

    id: str
    prompt: tuple[int, ...]
    completions: tuple[tuple[int, ...], ...]
    task: str = "default"
    position: int = 0

    def __post_init__(self) -> None:
        assert self.prompt and all(self.completions), f"ranking {self.id} has an empty part"
        assert len(self.completions) >= 2, f"ranking {self.id} has nothing to compare"
        assert len(set(self.completions)) == len(self.completions), f"ranking {self.id} has a tie"

    @property
    def length(self) -> int:
        return len(self.prompt) + max(map(len, self.completions))

    @property
    def tokens(self) -> int:
        return len(self.prompt) + self.trained_tokens

    @property
    def trained_tokens(self) -> int:
        return sum(map(len, self.completions))


Example = Demonstration | Pair | Label | Ranking

KINDS: Mapping[str, type[Example]] = {
    "demonstrations": Demonstration,
    "pairs": Pair,
    "labels": Label,
    "rankings": Ranking,
}
"""What a method's `data` says -> the record that it reads."""
