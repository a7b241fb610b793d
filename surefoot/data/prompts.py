"""From a checked row to a `Prompt`: the system prompt, the chat template, the control tokens.

Owns the `PromptEncoder` protocol and the choice of what is encoded: messages where the model has a
template, plain text where it has none.
Refuses to own tokenizers and templates, which live with the models, and never cuts a prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from surefoot.data.rows import BadRow, Message, Row
from surefoot.errors import RecipeError
from surefoot.records import Prompt


class PromptEncoder(Protocol):
    """What this room asks of a tokenizer and its template."""

    @property
    def max_context(self) -> int:
        """Most tokens that the model reads, prompt and completion together."""
        ...

    @property
    def has_template(self) -> bool:
        """True if messages can be encoded."""
        ...

    def encode(self, messages: Sequence[Mapping[str, str]] | str) -> tuple[int, ...]:
        """Ids of messages with the template and the generation prompt, or of finished text."""
        ...

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text that `encode` turns into ids."""
        ...

    def literal(self, text: str) -> bool:
        """True if the text encodes to no control token of the tokenizer."""
        ...


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt with its place in the data and the fingerprint of what it asks."""

    prompt: Prompt
    where: str
    fingerprint: bytes


def check_system(system: str | None, encoder: PromptEncoder) -> None:
    """RecipeError if the recipe's system prompt has no reader, or hides a control token."""
    if system is None:
        return
    if not encoder.has_template:
        raise RecipeError(
            "model.system is set, but the model has no chat template (model.template: none), so "
            "nothing would read it. Remove model.system, or write it into the prompts."
        )
    if not encoder.literal(system):
        raise RecipeError(
            "model.system contains a control token of the tokenizer, which would end the system "
            "message early. Write it without the token."
        )


def encode_row(
    row: Row, encoder: PromptEncoder, *, system: str | None, allow_control_tokens: bool
) -> Encoded:
    """The row as the model will see it; position 0 until a stream places it.

    A string prompt becomes a user message where there is a template; its `Prompt.messages` stays
    None and its text is the string. A list of messages keeps its form, with `system` in front if
    it brings none; its text is the content of its only message, or all of it rendered.
    BadRow for a control token in a prompt, messages without a template, or no ids at all.
    """
    contents = contents_of(row.prompt)
    if not allow_control_tokens and not all(encoder.literal(text) for text in contents):
        raise BadRow(
            "the prompt contains a control token of the tokenizer, which would be read as the "
            "template's own (allow_control_tokens: true lets it)",
            kind="control_tokens",
        )
    messages: tuple[Message, ...] | None = None
    if isinstance(row.prompt, str):
        asked = [{"role": "user", "content": row.prompt}]
        ids = encoder.encode(with_system(asked, system) if encoder.has_template else row.prompt)
        text = row.prompt
    elif encoder.has_template:
        messages = tuple(with_system(row.prompt, system))
        ids = encoder.encode(messages)
        text = contents[0] if len(contents) == 1 else encoder.render(messages)
    else:
        raise BadRow(
            "the prompt is a list of messages, but the model has no chat template "
            "(model.template: none); write the prompt as text"
        )
    if not ids:
        raise BadRow("the prompt encodes to no tokens")
    prompt = Prompt(
        id=row.id,
        position=0,
        ids=tuple(ids),
        text=text,
        answer=row.answer,
        task=row.task,
        messages=messages,
        columns=row.columns,
    )
    return Encoded(prompt, row.where, fingerprint(row.prompt))


def fingerprint(prompt: str | Sequence[Message]) -> bytes:
    """Equal for prompts that differ only in case, white space and system messages."""
    asked = [" ".join(text.casefold().split()) for text in contents_of(prompt, system=False)]
    return hashlib.sha256("\n".join(asked).encode()).digest()


def contents_of(prompt: str | Sequence[Message], *, system: bool = True) -> list[str]:
    if isinstance(prompt, str):
        return [prompt]
    return [item["content"] for item in prompt if system or item["role"] != "system"]


def with_system(messages: Sequence[Message], system: str | None) -> Sequence[Message]:
    if system is None or any(message["role"] == "system" for message in messages):
        return messages
    return [{"role": "system", "content": system}, *messages]
