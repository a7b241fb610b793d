"""From a sample to the token ids that a reward model reads.

Owns the text of a conversation in the reward model's own form, and its control tokens: none is
doubled, and an answer that stopped is seen to have stopped.
Refuses to own what the model makes of it (`model.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jinja2.exceptions import TemplateError

from surefoot.errors import RewardError
from surefoot.records import StopReason
from surefoot.reward.contract import PartScore, RewardSample, failed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Reader:
    """Samples as one tokenizer writes them.

    `template` is auto (the tokenizer's own chat template, if it has one) or none (the prompt's
    text and the answer's, one after the other). `own`: a model that was trained here, and so on
    answers that end with the end token, without what a template writes behind it. `name` and `path`
    are for messages.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template: str,
        own: bool,
        name: str,
        path: str,
    ) -> None:
        self.tokenizer = tokenizer
        self.own = own
        self.name = name
        self.path = path
        self.plain = template == "none"
        self.chat = not self.plain and bool(tokenizer.chat_template)

    def read(self, sample: RewardSample) -> list[int] | PartScore:
        """The ids, or why there are none."""
        read = self._conversation(sample) if self.chat else self._text(sample)
        return read if isinstance(read, PartScore) or read else failed("there is no text to score")

    def _conversation(self, sample: RewardSample) -> list[int] | PartScore:
        """A prompt that is one string is what the user says, as for the policy."""
        asked = sample.messages or ({"role": "user", "content": sample.prompt},)
        turns = [dict(message) for message in asked]
        turns.append({"role": "assistant", "content": sample.text})
        try:
            text = self.tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=False
            )
        except (TemplateError, TypeError) as error:
            return failed(f"the reward model's chat template failed: {error}")
        # The rendered text already holds every control token, so none is added on top.
        ids = self._ids(str(text), special=False)
        end = self.tokenizer.eos_token_id
        if self.own and end in ids:
            ids = ids[: len(ids) - ids[::-1].index(end)]
        return ids

    def _text(self, sample: RewardSample) -> list[int]:
        if sample.messages is not None and not self.plain:
            raise RewardError(
                f"reward {self.name!r}: rows hold messages, and the tokenizer of {self.path} has "
                "no chat template to write them with; set template to none in the reward's entry "
                "(the prompt's text and the answer are then read one after the other)"
            )
        ids = self._ids(sample.prompt + sample.text, special=True)
        end = self.tokenizer.eos_token_id
        if sample.stop is StopReason.STOP and end is not None and ids[-1:] != [end]:
            ids.append(end)
        return ids

    def _ids(self, text: str, *, special: bool) -> list[int]:
        # Not verbose: a text beyond the context is a missing sample here, not a warning.
        ids = list(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
        start = self.tokenizer.bos_token_id
        while start is not None and ids[:2] == [start, start]:
            del ids[0]
        return ids
