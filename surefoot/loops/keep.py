"""Which groups a step trains on: dynamic sampling, and rows that cannot be scored.

Owns the repeated question (sample, score, look) and its bound; quarantined rows are not asked.
Refuses to own credit: informative means a spread of raw scores, before shaping and KL.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from surefoot.data import LOOK_AGAIN_AFTER, Stream
from surefoot.errors import StoppedOnFinding
from surefoot.methods import Method
from surefoot.objective.selection import informative
from surefoot.records import Group, Prompt, Score, ScoreStatus, StopReason
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
    stale: int
    """Completions that the engine sampled under other weights than those of the step."""


def draw_prompts(stream: Stream, count: int, quarantined: set[str], *, step: int) -> list[Prompt]:
    """The next `count` prompts of the stream at a step that are not quarantined."""
    prompts: list[Prompt] = []
    misses = 0
    while len(prompts) < count:
        for prompt in stream.take(count - len(prompts), step=step):
            if prompt.id in quarantined:
                misses += 1
            else:
                prompts.append(prompt)
                misses = 0
        # A window keeps prompts away for some epochs, so one epoch is not all there is.
        if misses > (LOOK_AGAIN_AFTER + 2) * len(stream):
            raise StoppedOnFinding(
                f"data: all {stream.active_rows} rows for step {step} are quarantined, because no "
                "reward can score them; see events.jsonl for the reason of each, and mend the rows "
                "or the reward"
            )
    return prompts


def gather(
    row: Method,
    *,
    step: int,
    stream: Stream,
    engine: Engine,
    version: int,
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
        asked = draw_prompts(stream, prompts - len(kept), quarantined, step=step)
        began = time.perf_counter()
        groups = engine.sample(asked, row.group_size, purpose="rollout")
        groups = [without_stale(group, version) for group in groups]
        pending = grader.submit(groups, same_step=rounds > 1)
        extra = []
        if row.greedy_sample:  # while the others are scored
            extra = engine.sample(asked, 1, purpose="rollout/greedy", greedy=True)
            extra = [without_stale(group, version) for group in extra]
        sampled = time.perf_counter()
        interrupt()
        scored = [without_failed(group) for group in grader.collect(pending)]
        if extra:
            greedy = [without_failed(group) for group in grader.score(extra, counted=False)]
            scored = _with_greedy(scored, greedy)
        grader.stop_if_broken()
        interrupt()
        rollout += sampled - began
        reward += time.perf_counter() - sampled
        quarantined.update(g.prompt.id for g in scored if unscorable(g))
        seen.extend(scored)
        kept.extend(g for g in scored if row.keep.kind == "all" or is_informative(g))
    every = [completion for group in seen for completion in group.completions]
    tokens = sum(len(completion.ids) for completion in every)
    tokens += sum(len(group.greedy.ids) for group in seen if group.greedy is not None)
    stale = sum(completion.version != version for completion in every)
    return Gathered(tuple(kept), tuple(seen), rounds, rollout, reward, tokens, stale)


def without_stale(group: Group, version: int) -> Group:
    """Completions of other weights than `version` as failed ones: they are never trained on."""
    if all(completion.version == version for completion in group.completions):
        return group
    said = f"sampled under version {{}} of the weights, not {version}"
    completions = tuple(
        c
        if c.version == version
        else replace(c, stop=StopReason.ERROR, detail=said.format(c.version))
        for c in group.completions
    )
    return replace(group, completions=completions)


def without_failed(group: Group) -> Group:
    """What an engine failed to sample has no score, whatever a reward says of its remains."""
    assert group.scores is not None
    if all(completion.stop is not StopReason.ERROR for completion in group.completions):
        return group
    scores = tuple(
        Score(ScoreStatus.INFRA_ERROR, None, dict.fromkeys(score.parts), completion.detail)
        if completion.stop is StopReason.ERROR
        else score
        for completion, score in zip(group.completions, group.scores, strict=True)
    )
    return group.scored(scores)


def _with_greedy(groups: Sequence[Group], greedy: Sequence[Group]) -> list[Group]:
    joined = []
    for group, extra in zip(groups, greedy, strict=True):
        assert extra.scores is not None and extra.prompt.id == group.prompt.id
        joined.append(replace(group, greedy=extra.completions[0], greedy_score=extra.scores[0]))
    return joined


def solved_counts(groups: Sequence[Group], *, part: str) -> dict[str, tuple[int, int]]:
    """Per prompt how many completions were right, of how many with a score.

    Right is what evaluation counts: reward `part` gives at least 1.
    """
    counts: dict[str, tuple[int, int]] = {}
    for group in groups:
        values = [score.parts.get(part) for score in group.scores or () if score.valid]
        known = [value for value in values if value is not None]
        if known:
            right, tried = counts.get(group.prompt.id, (0, 0))
            right += sum(value >= 1.0 for value in known)
            counts[group.prompt.id] = (right, tried + len(known))
    return counts


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
