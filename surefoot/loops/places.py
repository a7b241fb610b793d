"""Where in a completion the rewards of its steps are paid: from places in the text to tokens.

Owns the search for the token in which a piece of text ends.
Refuses to own the steps themselves (`records.Score`) and what is done with them (`credit`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from surefoot.learner.batch import Batch
from surefoot.records import Completion


@dataclass(frozen=True)
class Steps:
    """The step rewards of B completions, at most S of each; in order of their ends."""

    reward_BS: Tensor
    """Units of reward, weighted; float64, 0 where there is no step."""
    end_BS: Tensor
    """The trained token in which the step ends, counted from 0; int64."""
    step_BS: Tensor
    """True where there is a step."""

    @property
    def total_B(self) -> Tensor:
        return self.reward_BS.sum(1)

    def only(self, wanted_B: Tensor) -> Steps:
        """Without the steps of the other completions."""
        step_BS = self.step_BS & wanted_B[:, None]
        return replace(self, reward_BS=torch.where(step_BS, self.reward_BS, 0.0), step_BS=step_BS)


def place_steps(batch: Batch, tokenizer: PreTrainedTokenizerBase) -> Steps | None:
    """The step rewards of a scored batch at its tokens; None where no score has any."""
    scores = [s for group in batch.groups for s in group.scores or [None] * len(group.completions)]
    if not any(score is not None and score.steps for score in scores):
        return None
    completions = [c for group in batch.groups for c in group.completions]
    width = max(len(score.steps) for score in scores if score is not None)
    reward_BS = torch.zeros(len(completions), width, dtype=torch.float64)
    end_BS = torch.zeros(len(completions), width, dtype=torch.int64)
    step_BS = torch.zeros(len(completions), width, dtype=torch.bool)
    # Of a token that is not trained, its step ends in the trained one before it.
    trained_BT = (batch.mask_BT.cumsum(1) - 1).clamp_min(0)
    for b, (completion, score) in enumerate(zip(completions, scores, strict=True)):
        if score is None or not score.steps:
            continue
        ends = token_ends(completion, [end for end, _ in score.steps], tokenizer)
        count = len(ends)
        reward_BS[b, :count] = torch.tensor(
            [value for _, value in score.steps], dtype=torch.float64
        )
        end_BS[b, :count] = trained_BT[b, torch.tensor(ends)]
        step_BS[b, :count] = True
    return Steps(reward_BS, end_BS, step_BS)


def token_ends(
    completion: Completion, ends: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """The first token with which the text is there up to each end (characters, ascending).

    A token may hold several ends, and the bytes of one character may be several tokens.
    """
    found: list[int] = []
    low = 0
    for end in ends:
        high = len(completion.ids) - 1
        while low < high:
            middle = (low + high) // 2
            if _covered(completion, middle + 1, tokenizer) >= end:
                high = middle
            else:
                low = middle + 1
        found.append(low)
    return found


def _covered(completion: Completion, count: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """How many characters of the text the first `count` tokens spell, half a character not."""
    spelled = tokenizer.decode(
        list(completion.ids[:count]), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    same = zip(spelled, completion.text, strict=False)
    return next(
        (place for place, (one, other) in enumerate(same) if one != other),
        min(len(spelled), len(completion.text)),
    )
