"""The native reward contract: one sample in, one number or `Score` out.

Owns `RewardSample`, the decorator, and the one rule by which a returned value becomes a score.
Refuses to own processes and deadlines, and the batch signature (`batch.py`).
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, overload

from surefoot.errors import RewardError
from surefoot.records import Completion, ProcessReward, Prompt, Score, ScoreStatus, StopReason
from surefoot.reward import wire

_SHOWN_CHARACTERS = 60
RULE = "a reward is a finite number, True, False, None (not applicable), a Score or a ProcessReward"


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
    """One reward's verdict on one sample; SCORED with None means not applicable.

    `steps` are what places inside the text earn of `value`: (end, value), by ascending end.
    """

    status: ScoreStatus
    value: float | None = None
    detail: str = ""
    steps: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        assert self.value is None or math.isfinite(self.value), self.value
        assert self.value is None or self.status is ScoreStatus.SCORED, self.status
        assert self.value is not None or not self.steps, self.steps

    def to_json(self) -> dict[str, Any]:
        message = {"status": self.status.value, "value": self.value, "detail": self.detail}
        return message | {"steps": self.steps} if self.steps else message

    @classmethod
    def from_json(cls, message: Mapping[str, Any]) -> PartScore:
        steps = tuple((end, value) for end, value in message.get("steps", ()))
        return cls(ScoreStatus(message["status"]), message["value"], message["detail"], steps)


def scored(value: float, detail: str = "") -> PartScore:
    return PartScore(ScoreStatus.SCORED, value, detail)


def unscorable(detail: str) -> PartScore:
    """The row is at fault, whatever the completion says."""
    return PartScore(ScoreStatus.UNSCORABLE, None, detail)


def failed(detail: str) -> PartScore:
    """The grader is at fault, so the sample is missing."""
    return PartScore(ScoreStatus.INFRA_ERROR, None, detail)


NativeFunction = Callable[[RewardSample], Any]
BatchScorer = Callable[[Sequence[RewardSample]], list[PartScore]]


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
    """Mark `f(sample: RewardSample) -> float | bool | None | Score | ProcessReward`, sync or async.

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
    tensor without dimensions. None is not applicable. A `Score` counts by status, value, detail and
    steps; its parts are not read. A `ProcessReward` is worth the sum of its values. NaN, infinities
    and everything else are the grader's fault.
    """
    if value is None:
        return PartScore(ScoreStatus.SCORED)
    if isinstance(value, PartScore):
        return value
    if isinstance(value, Score):
        wrong = _wrong_ends([end for end, _ in value.steps])
        if wrong is not None:
            return failed(f"returned a Score {wrong}")
        return PartScore(value.status, value.value, value.detail, value.steps)
    if isinstance(value, ProcessReward):
        return _read_process(value)
    number = _number(value)
    return failed(f"returned {shown(value)}; {RULE}") if number is None else scored(number)


def _bare(value: Any) -> Any:
    """The one number in an array or tensor without dimensions; anything else as it is."""
    if hasattr(value, "item") and hasattr(value, "shape") and tuple(value.shape) == ():
        return value.item()
    return value


def _number(value: Any) -> float | None:
    """The finite number that a value stands for, if it is one."""
    value = _bare(value)
    if not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _read_process(given: ProcessReward) -> PartScore:
    if len(given.values) != len(given.ends):
        return failed(
            f"returned a ProcessReward of {len(given.values)} values and {len(given.ends)} ends; "
            "each value has the end of its text"
        )
    numbers = [_number(value) for value in given.values]
    for k, number in enumerate(numbers):
        if number is None:
            return failed(
                f"returned a ProcessReward whose value {k} is {shown(given.values[k])}; a value "
                "is a finite number"
            )
    ends = [_bare(end) for end in given.ends]
    wrong = _wrong_ends(ends)
    if wrong is not None:
        return failed(f"returned a ProcessReward {wrong}")
    values = [number for number in numbers if number is not None]
    try:
        total = math.fsum(values)
    except OverflowError:
        return failed("returned a ProcessReward whose values have no finite sum")
    return PartScore(ScoreStatus.SCORED, total, "", tuple(zip(ends, values, strict=True)))


def _wrong_ends(ends: Sequence[Any]) -> str | None:
    """What is wrong with the ends of steps, as the end of a sentence; None if nothing is."""
    for k, end in enumerate(ends):
        if isinstance(end, bool) or not isinstance(end, Integral) or end < 1:
            return (
                f"whose end {k} is {shown(end)}; an end is a whole number of characters from 1 on"
            )
    for end, later in itertools.pairwise(ends):
        if later <= end:
            return f"whose ends do not ascend ({end} is before {later})"
    return None


def within(verdict: PartScore, text: str) -> PartScore:
    """The verdict, or a failure where one of its steps ends beyond the sample's text."""
    if not verdict.steps or verdict.steps[-1][0] <= len(text):
        return verdict
    return failed(
        f"returned a step that ends at character {verdict.steps[-1][0]} of a text of {len(text)}; "
        "ends count the characters of sample.text"
    )


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
