"""Which groups a step trains on: dynamic sampling, and rows that cannot be scored.

Owns the repeated question (sample, score, look) and its bound; quarantined rows are not asked.
Refuses to own credit: informative means a spread of raw scores, before shaping and KL.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from surefoot.data import Stream
from surefoot.errors import DataError
from surefoot.methods import Method
from surefoot.objective.selection import informative
from surefoot.records import Group, Prompt, ScoreStatus
from surefoot.reward import Grader
from surefoot.rollout import Engine


@dataclass(frozen=True)
class Gathered:
    """The groups of a step, and what it took to get them."""

    groups: tuple[Group, ...]
    """Scored groups that are trained on."""
    seen: tuple[Group, ...]
    """All scored groups, in the order in which they were sampled."""
    rounds: int
    rollout_seconds: float
    reward_seconds: float
    tokens: int
    """Tokens sampled, in kept and rejected groups."""


def draw_prompts(stream: Stream, count: int, quarantined: set[str]) -> list[Prompt]:
    """The next `count` prompts of the stream that are not quarantined."""
    prompts: list[Prompt] = []
    misses = 0
    while len(prompts) < count:
        for prompt in stream.take(count - len(prompts)):
            if prompt.id in quarantined:
                misses += 1
            else:
                prompts.append(prompt)
                misses = 0
        if misses > len(stream):
            raise DataError(
                f"data: all {len(stream)} rows are quarantined, because no reward can score them; "
                "see events.jsonl for the reason of each, and mend the rows or the reward"
            )
    return prompts


def gather(
    row: Method,
    *,
    stream: Stream,
    engine: Engine,
    grader: Grader,
    prompts: int,
    quarantined: set[str],
    interrupt: Callable[[], None],
) -> Gathered:
    """Sample and score until `prompts` groups are kept or the row's bound is reached.

    With keep all this is one round. With keep informative the missing prompts alone are asked
    again; at the bound the step goes on with what was found, and never loops.
    """
    most = row.keep.max_rounds if row.keep.kind == "informative" else 1
    kept: list[Group] = []
    seen: list[Group] = []
    rollout = reward = 0.0
    rounds = 0
    while len(kept) < prompts and rounds < most:
        rounds += 1
        asked = draw_prompts(stream, prompts - len(kept), quarantined)
        began = time.perf_counter()
        groups = engine.sample(asked, row.group_size, purpose="rollout")
        sampled = time.perf_counter()
        interrupt()
        scored = grader.score(groups)
        interrupt()
        rollout += sampled - began
        reward += time.perf_counter() - sampled
        quarantined.update(g.prompt.id for g in scored if unscorable(g))
        seen.extend(scored)
        kept.extend(g for g in scored if row.keep.kind == "all" or is_informative(g))
    tokens = sum(len(c.ids) for group in seen for c in group.completions)
    return Gathered(tuple(kept), tuple(seen), rounds, rollout, reward, tokens)


def unscorable(group: Group) -> bool:
    """Whether the row itself is at fault: some completion of it cannot be scored."""
    assert group.scores is not None
    return any(score.status is ScoreStatus.UNSCORABLE for score in group.scores)


def unscorable_reason(group: Group) -> str:
    """What the reward said of the first completion that it cannot score; empty if it scored all."""
    details = [s.detail for s in group.scores or () if s.status is ScoreStatus.UNSCORABLE]
    return details[0] if details else ""


def is_informative(group: Group) -> bool:
    """Whether the valid raw scores differ (DAPO, arXiv 2503.14476)."""
    if unscorable(group):
        return False
    score_1G, valid_1G = raw_scores([group])
    return bool(informative(score_1G, valid_PG=valid_1G)[0])


def raw_scores(groups: Sequence[Group]) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores before shaping, and where they are valid. Shapes: [P, G] float64 and bool."""
    table = [list(group.scores or ()) for group in groups]
    values = [[0.0 if s.value is None else s.value for s in row] for row in table]
    valid = [[s.valid for s in row] for row in table]
    return torch.tensor(values, dtype=torch.float64), torch.tensor(valid, dtype=torch.bool)
