"""The rows: each method of this build, as one value.

Owns the values that the papers fix. `group_size`, `epochs` and `minibatches` are budgets, which
papers set to their clusters; every row takes the type's default so that a comparison is fair.
Refuses to own functions and reading.
"""

from __future__ import annotations

from surefoot.methods.signal import (
    KL,
    GroupMean,
    GroupStd,
    Informative,
    LeaveOneOut,
    Overlong,
)
from surefoot.methods.types import Method, Row
from surefoot.methods.update import Clip, Ratio, SequenceMean, SequenceSum, TokenMean

REINFORCE = Method(
    name="reinforce",
    kl=KL("reward_sequence", estimator="k1", coef=0.03, measure_every=10),
    reduce=SequenceSum(),
)
"""The whole completion as one action, no baseline (Williams 1992; KL as in arXiv 2402.14740)."""

RLOO = Method(
    name="rloo",
    kl=KL("reward_sequence", estimator="k1", coef=0.03, measure_every=10),
    baseline=LeaveOneOut(),
    reduce=SequenceSum(),
)
"""Leave-one-out baseline without ratio or clip (arXiv 2402.14740; the paper: 2 or 4 samples)."""

GRPO = Method(
    name="grpo",
    kl=KL("loss", estimator="k3", coef=0.04, measure_every=10),
    baseline=GroupMean(),
    scale=GroupStd(),
    ratio=Ratio("token"),
    gate=Clip(),
    reduce=SequenceMean(),
)
"""Group z-score, clipped ratio, k3 in the loss (arXiv 2402.03300; the paper: 64 samples).

The paper leaves ddof, eps and the clip open; here ddof 1, eps 1e-4 and 0.2.
"""

DAPO = Method(
    name="dapo",
    keep=Informative(),
    shaping=(Overlong(),),
    baseline=GroupMean(),
    scale=GroupStd(),
    ratio=Ratio("token"),
    gate=Clip(low=0.2, high=0.28),
    reduce=TokenMean(),
)
"""GRPO with clip-higher, dynamic sampling, overlong shaping, token mean (arXiv 2503.14476)."""

ROWS: tuple[Row, ...] = (REINFORCE, RLOO, GRPO, DAPO)
