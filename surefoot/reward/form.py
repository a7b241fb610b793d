"""The built-in rewards for the form of a text: tags and repetition.

Owns their options and what each of them scores; both take time linear in the text.
Refuses to own what the text says.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from surefoot.reward.contract import PartScore, RewardSample, scored
from surefoot.reward.figures import check_tag
from surefoot.reward.rules import BuiltIn, Rule


@dataclass(frozen=True, slots=True)
class TagsOptions:
    """`tags` are the sections in their order, without brackets.

    `outside` says where text other than white space may stand outside the sections: nowhere, only
    after the last one, or anywhere. `empty` allows sections that hold only white space. `opened`:
    the prompt ends with the first opening tag, as many chat templates do, so the completion begins
    inside that section.
    """

    tags: tuple[str, ...] = ("think", "answer")
    outside: Literal["none", "after", "any"] = "none"
    empty: bool = False
    opened: bool = False

    def __post_init__(self) -> None:
        if not self.tags:
            raise ValueError("tags is empty; name the sections, such as [think, answer]")
        for tag in self.tags:
            check_tag(tag)
        if len(set(self.tags)) < len(self.tags):
            raise ValueError(f"tags names a section twice: {', '.join(self.tags)}")


def tags(options: TagsOptions) -> Rule:
    """1 where the text has exactly the named sections, each once, in order, side by side, else 0.

    A tag of one of the names that is missing, repeated, nested, crossed or left open gives 0. Tags
    are spelled exactly, `<think>` and `</think>`; everything else is text.
    """
    token = re.compile(rf"</?(?:{'|'.join(map(re.escape, options.tags))})>")
    expected = [tag for name in options.tags for tag in (f"<{name}>", f"</{name}>")]

    def rule(sample: RewardSample) -> PartScore:
        text = f"<{options.tags[0]}>{sample.text}" if options.opened else sample.text
        found = list(token.finditer(text))
        if [tag[0] for tag in found] != expected:
            return scored(0.0)
        starts = [0, *(tag.end() for tag in found)]
        ends = [*(tag.start() for tag in found), len(text)]
        filled = [bool(text[a:b].strip()) for a, b in zip(starts, ends, strict=True)]
        inside, outside = filled[1::2], filled[0::2]
        if options.outside == "after":
            outside = outside[:-1]
        bad = any(outside) and options.outside != "any"
        return scored(float(not bad and (options.empty or all(inside))))

    return rule


@dataclass(frozen=True, slots=True)
class RepetitionOptions:
    """`ngram_size` consecutive units make an n-gram; `max_penalty` is the value's lower bound.

    Units are the sampled token ids, or the words of the text (separated by white space, case
    aside).
    """

    ngram_size: int = 3
    max_penalty: float = -1.0
    unit: Literal["tokens", "words"] = "tokens"

    def __post_init__(self) -> None:
        if self.ngram_size < 1:
            raise ValueError(f"ngram_size is {self.ngram_size}; it is 1 or more")
        if not -math.inf < self.max_penalty < 0.0:
            raise ValueError(f"max_penalty is {self.max_penalty}; it is a number below 0")


def repetition(options: RepetitionOptions) -> Rule:
    """max_penalty times the share of repeated n-grams: 1 - distinct / all (arXiv 2502.03373, C.2).

    0 where no n-gram occurs twice, and where the text is too short to have one.
    """
    n = options.ngram_size

    def rule(sample: RewardSample) -> PartScore:
        tokens = options.unit == "tokens"
        units = sample.ids if tokens else tuple(sample.text.casefold().split())
        total = len(units) - n + 1
        if total < 1:
            return scored(0.0)
        repeated = total - len({units[i : i + n] for i in range(total)})
        return scored(options.max_penalty * (repeated / total) if repeated else 0.0)

    return rule


FORM: dict[str, BuiltIn] = {
    "tags": BuiltIn(TagsOptions, tags),
    "repetition": BuiltIn(RepetitionOptions, repetition),
}
