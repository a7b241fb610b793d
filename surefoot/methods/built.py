"""Which values of a row have their function in this version.

Owns the table `BUILT` and the refusal of everything outside it.
Refuses to own the functions; a test compares the table with the dispatch tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from surefoot.errors import NotBuiltError
from surefoot.methods.types import Method, Row

BUILT: Mapping[str, frozenset[str | bool]] = {
    "greedy_sample": frozenset({False, True}),
    "keep": frozenset({"all", "informative"}),
    "truncated": frozenset({"score", "mask", "floor"}),
    "shaping": frozenset({"overlong", "length"}),
    "kl": frozenset({"none", "reward_token", "reward_sequence", "loss"}),
    "kl.estimator": frozenset({"k1", "k2", "k3", "k3_ratio"}),
    "kl.controller": frozenset({"fixed", "proportional", "doubling"}),
    "baseline": frozenset(
        {"none", "batch", "group", "leave_one_out", "length_weighted", "greedy", "history", "use"}
    ),
    "baseline.center": frozenset({"mean", "median"}),
    "scale": frozenset({"none", "group_std", "group_mean", "batch_std", "use"}),
    "scale.per_part": frozenset({False, True}),
    "credit": frozenset({"broadcast", "reward_to_go", "process", "gae"}),
    "credit.bootstrap_truncated": frozenset({False, True}),
    "whiten": frozenset({"none", "token", "sequence"}),
    "ratio": frozenset({"none", "token", "sequence", "sequence_token", "geometric"}),
    "ratio.to": frozenset({"old", "sampler"}),
    "gate": frozenset({"none", "clip", "weight", "sigmoid", "divergence", "use"}),
    "correction": frozenset({"none", "truncate", "mask", "geometric_mask"}),
    "reduce": frozenset({"token_mean", "sequence_mean", "sequence_sum", "constant", "prompt_mean"}),
    "terms": frozenset({"entropy", "positive_nll", "stale_mask"}),
    "critic": frozenset({"none", "critic"}),
    "warmup": frozenset({"none", "value", "method"}),
}
"""Dotted field -> the kinds (or plain values) whose functions exist."""

ROW_TYPES_BUILT: frozenset[str] = frozenset({"method", "preference", "supervised"})


def check_built(row: Row) -> None:
    """Raise NotBuiltError naming the key, the value and what is built, if `row` needs more."""
    kind = type(row).__name__.lower()
    if kind not in ROW_TYPES_BUILT:
        raise NotBuiltError(
            f"method: {row.name} is a {kind} row, and this version does not have the "
            f"{kind} loop yet; built: {', '.join(sorted(ROW_TYPES_BUILT))} rows"
        )
    if not isinstance(row, Method):
        return
    for key, words in BUILT.items():
        for word in _words(row, key):
            if word not in words:
                options = ", ".join(sorted(str(option).lower() for option in words))
                raise NotBuiltError(
                    f"method.{key}: {str(word).lower()} is not built yet in this version; "
                    f"built: {options}"
                )


def _words(row: Method, key: str) -> Iterator[str | bool]:
    name, _, option = key.partition(".")
    value: Any = getattr(row, name)
    for item in value if isinstance(value, tuple) else (value,):
        if option:
            if option not in {field.name for field in dataclasses.fields(item)}:
                continue
            item = getattr(item, option)
        yield item.kind if dataclasses.is_dataclass(item) else item
