"""What every engine promises, and the settings of sampling.

Owns the protocol. Refuses to own any engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedModel

from surefoot.records import Group, Prompt


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn and when a completion ends. `temperature` divides the logits."""

    temperature: float
    max_new_tokens: int
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()


class Engine(Protocol):
    """Samples groups of completions under a numbered version of the policy's weights."""

    def load(self, model: PreTrainedModel, *, version: int) -> None:
        """Take over the policy's weights; later samples carry `version`."""

    def sample(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        *,
        purpose: str,
        greedy: bool = False,
    ) -> list[Group]:
        """Sample `group_size` completions for each prompt, in order.

        Draws are keyed by (seed, purpose, prompt position, sample, token). Greedy takes the most
        likely token; its log-probabilities are those of the sampling distribution.
        """

    def troubles(self) -> list[str]:
        """What went wrong and was overcome since the last call, for the ledger's events."""


Interrupt = Callable[[], None]
"""Called between tokens; raises to abandon the rollout."""
