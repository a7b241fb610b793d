"""The batch contract of TRL: lists of prompts and completions in, a list of numbers out.

Owns which arguments such a function is given, and how the list it returns is read.
Refuses to own the native contract (`contract.py`), processes and deadlines.

The call is made by keyword: f(prompts, completions, completion_ids, **columns). A row in chat form
gives its message list as the prompt and [{"role": "assistant", "content": text}] as the completion;
a plain row gives two strings.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from surefoot.errors import RewardError
from surefoot.reward import wire
from surefoot.reward.contract import (
    RULE,
    PartScore,
    RewardSample,
    failed,
    finish,
    read_value,
    shown,
)

LISTS = frozenset({"prompts", "completions", "completion_ids"})
EXTRAS = frozenset({"trainer_state", "log_extra", "log_metric"})
_NOT_COLUMNS = LISTS | EXTRAS | {"prompt", "completion"}


@dataclass(frozen=True, slots=True)
class BatchSignature:
    """The keyword arguments that a function takes; `open` means that it takes any."""

    names: frozenset[str]
    required: frozenset[str]
    open: bool

    @property
    def is_batch(self) -> bool:
        return self.open or bool(self.names & LISTS)


@dataclass(slots=True)
class TrainerState:
    """Stands in for the trainer state that some batch functions ask for.

    `global_step` is the policy version that sampled the batch; nothing else is known here.
    """

    global_step: int = 0
    epoch: float = 0.0
    max_steps: int = 0
    is_world_process_zero: bool = True
    log_history: list[dict[str, float]] = field(default_factory=list)


def signature_of(function: Callable[..., Any]) -> BatchSignature:
    """RewardError for a positional-only parameter; ValueError where Python knows no signature."""
    names, required, is_open = set(), set(), False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            is_open = True
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            raise RewardError(
                f"its parameter {parameter.name!r} is positional-only, and batch rewards are "
                "called by keyword; remove the `/` from its signature"
            )
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            names.add(parameter.name)
            if parameter.default is parameter.empty:
                required.add(parameter.name)
    return BatchSignature(frozenset(names), frozenset(required), is_open)


def encode_batch(samples: Sequence[RewardSample], *, step: int) -> bytes:
    """All samples of one call as JSON; columns are the union over rows, None where a row has none.

    `answer` and `task` are columns too, unless the dataset has its own of that name.
    """
    columns: dict[str, list[Any]] = {}
    for name in ("answer", "task", *(name for sample in samples for name in sample.columns)):
        if name in _NOT_COLUMNS or name in columns:
            continue
        columns[name] = [_cell(sample, name) for sample in samples]
    return wire.encode(
        {
            "prompts": [s.prompt if s.messages is None else s.messages for s in samples],
            "completions": [
                s.text if s.messages is None else [{"role": "assistant", "content": s.text}]
                for s in samples
            ],
            "completion_ids": [s.ids for s in samples],
            "columns": columns,
            "step": step,
        }
    )


def _cell(sample: RewardSample, name: str) -> Any:
    if name in sample.columns:
        return sample.columns[name]
    if name == "answer":
        return sample.answer
    return sample.task if name == "task" else None


def serve_batch(
    function: Callable[..., Any], signature: BatchSignature, options: Mapping[str, Any]
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """What a worker runs for a batch function: a payload of `encode_batch` in, verdicts out.

    The reply is {"parts": [PartScore...], "metrics": {...}} or, for a list of the wrong kind or
    length, {"wrong": reason}.
    """

    def serve(payload: Mapping[str, Any]) -> dict[str, Any]:
        metrics: dict[str, float] = {}
        columns = payload["columns"]
        given = {name: payload[name] for name in LISTS} | columns
        given |= {
            "trainer_state": TrainerState(global_step=payload["step"]),
            "log_extra": lambda column, values: None,
            "log_metric": lambda name, value: metrics.update({str(name): float(value)}),
        }
        missing = sorted(signature.required - given.keys() - options.keys())
        if missing:
            raise RewardError(
                f"asks for {', '.join(map(repr, missing))}, which no row of this batch has; "
                f"the columns are {', '.join(sorted(columns))}"
            )
        if not signature.open:
            given = {name: given[name] for name in given.keys() & signature.names}
        result = finish(function(**(given | options)))
        return read_list(result, len(payload["completions"])) | {"metrics": metrics}

    return serve


def read_list(result: Any, length: int) -> dict[str, Any]:
    """One verdict per completion; else the call is wrong as a whole."""
    if hasattr(result, "tolist") and hasattr(result, "shape"):
        result = result.tolist()
    if not isinstance(result, list | tuple):
        return {"wrong": f"returned {shown(result)}; a batch reward returns a list of {length}"}
    if len(result) != length:
        return {"wrong": f"returned {len(result)} values for {length} completions"}
    return {"parts": [read_value(value).to_json() for value in result]}


def read_reply(reply: Mapping[str, Any], length: int) -> list[PartScore]:
    if "wrong" in reply:
        return [failed(f"{reply['wrong']}; {RULE}, one for each completion")] * length
    return [PartScore.from_json(part) for part in reply["parts"]]
