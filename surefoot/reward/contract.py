"""The native reward contract: one sample in, one number or `Score` out.

Owns `RewardSample`, the decorator, and the one rule by which a returned value becomes a score.
Refuses to own processes and deadlines, and the batch signature (`batch.py`).
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, overload

from surefoot.errors import RewardError
from surefoot.records import Completion, Prompt, Score, ScoreStatus, StopReason
from surefoot.reward import wire

_SHOWN_CHARACTERS = 60
RULE = "a reward is a finite number, True, False, None (not applicable) or a Score"


@dataclass(frozen=True, slots=True)
class RewardSample:
    """What a native reward function sees of one completion.

    `prompt` is the prompt's text and `messages` its chat form, if the row has one; `ids` are the
    sampled token ids, a stopping end-of-sequence id included, and `text` their text without it.
    `columns` holds every further column of the row.
    """

    prompt: str
    text: str
    ids: tuple[int, ...]
    answer: str | None
    task: str
    columns: Mapping[str, Any]
    stop: StopReason
    messages: tuple[Mapping[str, Any], ...] | None = None


@dataclass(frozen=True, slots=True)
class PartScore:
    """One reward's verdict on one sample; SCORED with None means not applicable."""

    status: ScoreStatus
    value: float | None = None
    detail: str = ""

    def __post_init__(self) -> None:
        assert self.value is None or math.isfinite(self.value), self.value
        assert self.value is None or self.status is ScoreStatus.SCORED, self.status

    def to_json(self) -> dict[str, Any]:
        return {"status": self.status.value, "value": self.value, "detail": self.detail}

    @classmethod
    def from_json(cls, message: Mapping[str, Any]) -> PartScore:
        return cls(ScoreStatus(message["status"]), message["value"], message["detail"])


def scored(value: float, detail: str = "") -> PartScore:
    return PartScore(ScoreStatus.SCORED, value, detail)


def unscorable(detail: str) -> PartScore:
    """The row is at fault, whatever the completion says."""
    return PartScore(ScoreStatus.UNSCORABLE, None, detail)


def failed(detail: str) -> PartScore:
    """The grader is at fault, so the sample is missing."""
    return PartScore(ScoreStatus.INFRA_ERROR, None, detail)


NativeFunction = Callable[[RewardSample], Any]


@dataclass(frozen=True, slots=True)
class NativeMark:
    """What the decorator writes on a function, as its attribute `surefoot_reward`."""

    name: str | None = None
    price: float | None = field(default=None)


@overload
def reward_function(function: NativeFunction, /) -> NativeFunction: ...
@overload
def reward_function(
    *, name: str | None = None, price: float | None = None
) -> Callable[[NativeFunction], NativeFunction]: ...
def reward_function(
    function: NativeFunction | None = None,
    /,
    *,
    name: str | None = None,
    price: float | None = None,
) -> NativeFunction | Callable[[NativeFunction], NativeFunction]:
    """Mark `f(sample: RewardSample) -> float | bool | None | Score`, sync or async, as a reward.

    Used bare or with arguments: `name` is the metric's name where the recipe gives none, `price`
    the cost of one call in US dollars. The function itself is returned, and stays callable.
    """

    def mark(marked: NativeFunction) -> NativeFunction:
        if not callable(marked):
            raise RewardError(
                f"reward_function marks a function, and got a {type(marked).__name__}; "
                "write @reward_function above `def f(sample)`"
            )
        marked.surefoot_reward = NativeMark(name, price)  # type: ignore[attr-defined]
        return marked

    return mark if function is None else mark(function)


def mark_of(function: Callable[..., Any]) -> NativeMark | None:
    if not hasattr(function, "surefoot_reward"):
        return None
    mark = function.surefoot_reward
    assert isinstance(mark, NativeMark), mark
    return mark


def shown(value: object) -> str:
    """A short way to name a value in a message."""
    text = repr(value)
    if len(text) > _SHOWN_CHARACTERS:
        text = text[: _SHOWN_CHARACTERS - 3] + "..."
    return f"{text} ({type(value).__name__})"


def read_value(value: Any) -> PartScore:
    """The explicit rule from a returned value to a verdict (DESIGN law 13).

    Booleans are 1.0 and 0.0. Finite real numbers count, and so does the one number in an array or
    tensor without dimensions. None is not applicable. A `Score` counts by status, value and detail;
    its parts are not read. NaN, infinities and everything else are the grader's fault.
    """
    if value is None:
        return PartScore(ScoreStatus.SCORED)
    if isinstance(value, PartScore):
        return value
    if isinstance(value, Score):
        return PartScore(value.status, value.value, value.detail)
    if hasattr(value, "item") and hasattr(value, "shape") and tuple(value.shape) == ():
        value = value.item()
    if not isinstance(value, Real):
        return failed(f"returned {shown(value)}; {RULE}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        return failed(f"returned {shown(value)}; {RULE}")
    return scored(number)


def finish(result: Any) -> Any:
    """The value itself, or what an async function's awaitable gives."""
    if not inspect.isawaitable(result):
        return result

    async def wait(awaitable: Awaitable[Any]) -> Any:
        return await awaitable

    return asyncio.run(wait(result))


def sample_of(prompt: Prompt, completion: Completion) -> RewardSample:
    return RewardSample(
        prompt=prompt.text,
        text=completion.text,
        ids=completion.ids,
        answer=prompt.answer,
        task=prompt.task,
        columns=prompt.columns,
        stop=completion.stop,
        messages=prompt.messages,
    )


def encode_sample(sample: RewardSample, prompt_id: str) -> bytes:
    """JSON for a worker; RewardError names the column that has none."""
    check_columns(sample.columns, prompt_id)
    return wire.encode(
        {
            "prompt": sample.prompt,
            "text": sample.text,
            "ids": sample.ids,
            "answer": sample.answer,
            "task": sample.task,
            "columns": sample.columns,
            "stop": sample.stop.value,
            "messages": sample.messages,
        }
    )


def decode_sample(payload: Mapping[str, Any]) -> RewardSample:
    messages = payload["messages"]
    return RewardSample(
        prompt=payload["prompt"],
        text=payload["text"],
        ids=tuple(payload["ids"]),
        answer=payload["answer"],
        task=payload["task"],
        columns=payload["columns"],
        stop=StopReason(payload["stop"]),
        messages=None if messages is None else tuple(messages),
    )


def check_columns(columns: Mapping[str, Any], prompt_id: str) -> None:
    """RewardError where a column cannot travel to a worker as JSON."""
    for name, value in columns.items():
        try:
            wire.encode(value)
        except (TypeError, ValueError) as error:
            raise RewardError(
                f"column {name!r} of row {prompt_id} holds {shown(value)}, which cannot be sent to "
                f"a reward ({error}); keep numbers, strings, lists and mappings in the dataset"
            ) from error


def serve_native(
    function: NativeFunction, options: Mapping[str, Any]
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """What a worker runs for a native function: one encoded sample in, one PartScore out."""

    def serve(payload: Mapping[str, Any]) -> dict[str, Any]:
        return read_value(finish(function(decode_sample(payload), **options))).to_json()

    return serve
