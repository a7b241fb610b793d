"""An engine that says what a script says: for tests of everything behind the rollout.

Owns nothing but the script. Refuses to own a model; log-probabilities are the script's too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from surefoot.records import Completion, Group, Prompt, StopReason


@dataclass(frozen=True)
class Line:
    """One scripted completion. `logp` is used for every token unless `logps` is given."""

    ids: tuple[int, ...]
    text: str
    stop: StopReason = StopReason.STOP
    logp: float = -1.0
    logps: tuple[float, ...] | None = None


Script = Callable[[Prompt, int], Line]
"""What to answer to sample `int` of a prompt."""


class ScriptedEngine:
    """Answers every prompt by calling `script(prompt, sample)`; remembers what it was asked."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.version = 0
        self.asked: list[tuple[str, int, str]] = []

    def load(self, model: PreTrainedModel, *, version: int) -> None:
        """Only the version is taken over."""
        self.version = version

    def sample(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        *,
        purpose: str,
        greedy: bool = False,
    ) -> list[Group]:
        """See `Engine.sample`."""
        groups = []
        for prompt in prompts:
            lines = [self.script(prompt, sample) for sample in range(group_size)]
            self.asked.extend((prompt.id, sample, purpose) for sample in range(group_size))
            completions = tuple(
                Completion(
                    ids=line.ids,
                    logps=line.logps or (line.logp,) * len(line.ids),
                    stop=line.stop,
                    version=self.version,
                    sample=sample,
                    text=line.text,
                )
                for sample, line in enumerate(lines)
            )
            groups.append(Group(prompt, completions))
        return groups

    def troubles(self) -> list[str]:
        """A script has none."""
        return []
