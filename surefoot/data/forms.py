"""What a row of supervised or preference data says, found by its columns.

Owns the forms that each kind of example is written in, the choice among them, and the checks of
prompt, answers, label, margin, task and id. Refuses to own tokens, lengths and files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from surefoot.data.examples import Demonstration, Example, Label, Pair, Ranking
from surefoot.data.options import nearest
from surefoot.data.rows import (
    ABSENT,
    PROMPT_NAMES,
    BadRow,
    Message,
    Sieve,
    checked,
    clean,
    kind_of,
    lookup,
    read_label,
    read_message,
    read_prompt,
    read_text,
    row_id,
)
from surefoot.data.transcripts import (
    asked,
    is_transcript,
    shared_messages,
    shared_transcript,
    transcript,
)
from surefoot.errors import RecipeError

Answer = str | tuple[Message, ...]

_PAIR = ("chosen", "rejected")
FORMS: Mapping[type[Example], tuple[tuple[str, ...], ...]] = {
    Demonstration: (("prompt", "completion"), ("messages",), ("text",)),
    Pair: (_PAIR,),
    Label: (("prompt", "completion", "label"), _PAIR),
    Ranking: (("prompt", "ranking"), ("prompt", "responses"), _PAIR),
}
"""The columns of each form of each kind. A pair brings its prompt, or its answers share one."""
_ALSO: Mapping[type[Example], tuple[str, ...]] = {
    Demonstration: ("continues",),
    Pair: ("prompt", "margin"),
    Label: (),
    Ranking: (),
}
_ALWAYS = ("id", "task")
# What other datasets call these; suggested, never assumed.
_OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "prompt": tuple(name for name in PROMPT_NAMES if name != "messages"),
    "completion": ("response", "output", "answer", "solution"),
    "messages": ("conversations", "conversation"),
    "text": ("content",),
    "chosen": ("preferred", "answer_chosen"),
    "rejected": ("dispreferred", "answer_rejected"),
    "label": ("labels", "is_correct"),
    "ranking": ("completions", "answers"),
}


@dataclass(frozen=True, slots=True)
class Form:
    """A checked row before tokens.

    `prompt` and `answers` are text or messages; a document is a prompt without answers. The
    answers of a pair are (chosen, rejected), those of a ranking go from best to worst. `ends` is
    false for a document that goes on in another row.
    """

    where: str
    id: str
    task: str
    prompt: Answer
    answers: tuple[Answer, ...]
    margin: float | None = None
    desirable: bool | None = None
    ends: bool = True


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads the rows of one source: `columns` maps a part to the name of its column.

    `templated` says whether the model can read messages; a transcript stays text without.
    """

    key: str
    kind: type[Example]
    columns: Mapping[str, str]
    task: str | None
    templated: bool
    parts: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        named = (part for form in FORMS[self.kind] for part in form)
        parts = tuple(dict.fromkeys([*named, *_ALSO[self.kind], *_ALWAYS]))
        object.__setattr__(self, "parts", parts)
        for part, name in self.columns.items():
            if not isinstance(name, str) or not name:
                raise RecipeError(f"{self.key}.columns.{part} is {name!r}: give a column's name.")
            if part not in parts:
                raise RecipeError(
                    f"{self.key}.columns.{part}: nothing reads it here{nearest(part, parts)} "
                    f"Read are: {', '.join(parts)}."
                )

    def read_all(self, items: Iterable[tuple[str, object]], sieve: Sieve) -> list[Form]:
        """The forms of raw rows with their places, in order; bad rows go to `sieve`."""
        return checked(items, sieve, self._read)

    def _read(self, where: str, raw: object) -> tuple[Form, bool, int]:
        """(the form, whether the row brought its own id, strings mended)."""
        if not isinstance(raw, Mapping):
            raise BadRow(f"the row is {kind_of(raw)}, not an object with named columns")
        try:
            data, mended = clean(raw, "")
        except RecursionError:
            raise BadRow("the row is nested too deeply") from None
        for part in self.columns:
            self._value(data, part)
        task = self.task
        if task is None and self._has(data, "task"):
            task = read_label(self._value(data, "task"), self._name("task"))
        given = self._has(data, "id")
        id = read_label(self._value(data, "id"), self._name("id")) if given else row_id(data)
        blank = Form(where, id, "default" if task is None else task, "", ())
        return self._filled(blank, data, self._form_of(data)), given, mended

    def _form_of(self, data: Mapping[str, Any]) -> tuple[str, ...]:
        """The one form that the row's columns fit; of several, one that `columns` names."""
        fits = [form for form in FORMS[self.kind] if all(self._has(data, part) for part in form)]
        named = [form for form in fits if any(part in self.columns for part in form)]
        fits = named or fits
        if len(fits) == 1:
            return fits[0]
        if not fits:
            raise self._no_form(data)
        part = fits[0][-1]
        raise BadRow(
            f"the columns fit more than one form: {' and '.join(map(_listed, fits))}; choose with "
            f"{self.key}.columns, as in {{{part}: {self._name(part)}}}"
        )

    def _no_form(self, data: Mapping[str, Any]) -> BadRow:
        for form in FORMS[self.kind]:
            values = {part: lookup(data, self._name(part)) for part in form}
            if ABSENT not in values.values():
                empty = next(part for part, value in values.items() if value is None)
                return BadRow(f"column {self._name(empty)!r} holds null")
        forms = " or ".join(_listed([self._name(part) for part in form]) for form in self._forms())
        present = ", ".join(map(str, data)) or "none"
        reason = f"the row lacks columns; present: {present}; needed: {forms}"
        for form in self._forms():
            guesses = {part: self._guess(data, part) for part in form}
            if None not in guesses.values():
                named = ", ".join(f"{part}: {name}" for part, name in guesses.items())
                return BadRow(f"{reason}. Did you mean {self.key}.columns: {{{named}}}?")
        return BadRow(f"{reason}. Map them with {self.key}.columns")

    def _forms(self) -> list[tuple[str, ...]]:
        """The forms as people are told of them: a pair's with its prompt first."""
        return [form for whole in FORMS[self.kind] for form in _told(whole)]

    def _guess(self, data: Mapping[str, Any], part: str) -> str | None:
        names = (self._name(part), *_OTHER_NAMES.get(part, ()))
        return next((name for name in names if lookup(data, name) is not ABSENT), None)

    def _filled(self, blank: Form, data: Mapping[str, Any], form: tuple[str, ...]) -> Form:
        if form == _PAIR:
            return self._pair(blank, data)
        last = form[-1]
        value, column = self._value(data, last), self._name(last)
        if last == "text":
            goes_on = self._has(data, "continues") and _flag(
                self._value(data, "continues"), self._name("continues")
            )
            return replace(blank, prompt=_words(value, column), ends=not goes_on)
        if last == "messages":
            messages = _conversation(value, column)
            return replace(blank, prompt=messages[:-1], answers=(messages[-1]["content"],))
        prompt = self._prompt(data)
        if last == "label":
            wanted = _flag(value, column)
            answer = self._value(data, "completion"), self._name("completion")
            found = _turn(*answer, may_be_empty=not wanted)
            return replace(blank, prompt=prompt, answers=(found,), desirable=wanted)
        if last == "completion":
            return replace(blank, prompt=prompt, answers=(_answer(value, column),))
        return replace(blank, prompt=prompt, answers=_ranked(value, column))

    def _pair(self, blank: Form, data: Mapping[str, Any]) -> Form:
        """Whole conversations share their prompt; so do transcripts without a prompt column."""
        sides = [(self._value(data, part), self._name(part)) for part in _PAIR]
        explicit = "prompt" in self.parts and self._has(data, "prompt")
        if all(_whole_conversation(value) for value, _ in sides):
            prompt, *answers = shared_messages(*(_messages(*side) for side in sides))
            if explicit and not _agrees(self._prompt(data), prompt):
                raise BadRow(
                    f"column {self._name('prompt')!r} is not what {self._name('chosen')!r} and "
                    f"{self._name('rejected')!r} begin with"
                )
            return self._with_margin(replace(blank, prompt=prompt, answers=tuple(answers)), data)
        if explicit:
            found = [_turn(*side, may_be_empty=index == 1) for index, side in enumerate(sides)]
            form = replace(blank, prompt=self._prompt(data), answers=tuple(found))
            return self._with_margin(form, data)
        if not all(isinstance(value, str) and is_transcript(value) for value, _ in sides):
            raise BadRow(
                f"there is no column {self._name('prompt')!r}, and {sides[0][1]!r} and "
                f"{sides[1][1]!r} are no conversations or Human/Assistant transcripts that share "
                "one"
            )
        before, better, worse = shared_transcript(sides[0][0], sides[1][0])
        if not better.strip():
            raise BadRow(f"column {sides[0][1]!r} has an empty answer")
        form = replace(blank, prompt=before, answers=(better, worse))
        if self.templated:
            form = replace(form, prompt=asked(before), answers=(better.strip(), worse.strip()))
        return self._with_margin(form, data)

    def _with_margin(self, form: Form, data: Mapping[str, Any]) -> Form:
        if "margin" not in self.parts or not self._has(data, "margin"):
            return form
        value, column = self._value(data, "margin"), self._name("margin")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadRow(f"column {column!r} holds {kind_of(value)}, not a number")
        return replace(form, margin=float(value))

    def _prompt(self, data: Mapping[str, Any]) -> Answer:
        return read_prompt(self._value(data, "prompt"), self._name("prompt"))

    def _name(self, part: str) -> str:
        return self.columns.get(part, part)

    def _has(self, data: Mapping[str, Any], part: str) -> bool:
        # Columnar files write null for a column that only other rows have.
        return lookup(data, self._name(part)) not in (ABSENT, None)

    def _value(self, data: Mapping[str, Any], part: str) -> Any:
        name = self._name(part)
        value = lookup(data, name)
        if value is ABSENT:
            present = ", ".join(map(str, data)) or "none"
            raise BadRow(
                f"column {name!r} is missing; columns present: {present}"
                f"{nearest(name, map(str, data))} Set {self.key}.columns.{part}"
            )
        return value


def _told(form: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [("prompt", *form), form] if form == _PAIR else [form]


def _listed(form: Iterable[str]) -> str:
    return f"({', '.join(form)})"


def _words(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise BadRow(f"column {column!r} holds {kind_of(value)}, not text")
    return read_text(value, f"column {column!r}")


def _flag(value: Any, column: str) -> bool:
    if not isinstance(value, bool) and value not in (0, 1):
        raise BadRow(f"column {column!r} holds {kind_of(value)}, not true or false")
    return bool(value)


def _messages(value: Any, column: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        what = "an empty list" if value == [] else kind_of(value)
        raise BadRow(f"column {column!r} holds {what}, not a list of messages")
    try:
        return tuple(read_message(message, index) for index, message in enumerate(value))
    except BadRow as problem:
        raise BadRow(f"column {column!r}: {problem.reason}") from None


def _conversation(value: Any, column: str) -> tuple[Message, ...]:
    """Messages that end with the assistant's; a transcript is read as such."""
    if isinstance(value, str) and is_transcript(value):
        messages = transcript(value, f"column {column!r}")
    else:
        messages = _messages(value, column)
    if messages[-1]["role"] != "assistant":
        raise BadRow(
            f"column {column!r} ends with role {messages[-1]['role']!r}; leave out what comes "
            "after the assistant's last turn"
        )
    if all(message["role"] == "system" for message in messages[:-1]):
        raise BadRow(f"column {column!r} has an answer, but nothing that it answers")
    return messages


def _answer(value: Any, column: str, *, may_be_empty: bool = False) -> Answer:
    """What the assistant says: the text of one turn, or several messages that begin with one."""
    if isinstance(value, list) and value != []:
        if may_be_empty and len(value) == 1 and _silent(value[0]):
            return ""
        messages = _messages(value, column)
        if messages[0]["role"] != "assistant" or messages[-1]["role"] != "assistant":
            raise BadRow(
                f"column {column!r} begins with role {messages[0]['role']!r} and ends with "
                f"{messages[-1]['role']!r}; an answer begins and ends with the assistant's turn"
            )
        return messages[0]["content"] if len(messages) == 1 else messages
    if may_be_empty and isinstance(value, str) and not value.strip():
        return ""
    return _words(value, column)


def _turn(value: Any, column: str, *, may_be_empty: bool) -> str:
    answer = _answer(value, column, may_be_empty=may_be_empty)
    if not isinstance(answer, str):
        raise BadRow(f"column {column!r} holds {len(answer)} messages; an answer is one turn")
    return answer


def _silent(message: Any) -> bool:
    return message in ({"role": "assistant", "content": text} for text in ("", " ", "\n"))


def _ranked(value: Any, column: str) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) < 2:
        what = f"{len(value)} answers" if isinstance(value, list) else kind_of(value)
        raise BadRow(f"column {column!r} holds {what}, not a list of two or more, the best first")
    return tuple(
        _turn(answer, f"{column}[{index}]", may_be_empty=index > 0)
        for index, answer in enumerate(value)
    )


def _whole_conversation(value: Any) -> bool:
    """Whether a list of messages brings what it answers."""
    return (
        isinstance(value, list)
        and bool(value)
        and isinstance(value[0], dict)
        and value[0].get("role") != "assistant"
    )


def _agrees(prompt: Answer, shared: tuple[Message, ...]) -> bool:
    if isinstance(prompt, str):
        return prompt.strip() == shared[-1]["content"].strip()
    return prompt == shared
