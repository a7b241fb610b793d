"""Which groups are worth a gradient, judged by the raw score.

Owns the rule of dynamic sampling. Refuses to own the loop that asks for more prompts, and the rule
for dead groups after shaping (`group.dead_groups`): a length penalty must not revive a group.
"""

from __future__ import annotations

from torch import Tensor

from surefoot.objective.group import dead_groups


def informative(score_PG: Tensor, *, valid_PG: Tensor) -> Tensor:
    """Keep the groups whose valid raw scores are not all equal (arXiv:2503.14476).

    On accuracies 0 and 1 this is 0 < number correct < number valid.
    Shapes: score_PG (raw, not shaped), valid_PG (bool) -> keep_P (bool).
    """
    return ~dead_groups(score_PG, valid_PG=valid_PG)
