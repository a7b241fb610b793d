"""Every word a recipe can say for a field of a row, and the value it stands for.

Owns the table field -> kind -> prototype; a bare word means the prototype.
Refuses to own reading: `coerce.py` turns plain values into these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from surefoot.methods import signal as s
from surefoot.methods import update as u
from surefoot.methods.custom import Custom


@dataclass(frozen=True)
class Family:
    """The kinds of one field: `key` is its discriminator, `many` says that it is a list.

    `unread` names the options that kind none ignores, so that setting them is refused.
    """

    kinds: Mapping[str, Any]
    key: str = "kind"
    many: bool = False
    unread: frozenset[str] = frozenset()

    def options(self, value: Any) -> tuple[str, ...]:
        """The options that a value of this family reads, in order."""
        skip = self.unread if value.kind == "none" else frozenset()
        names = (field.name for field in dataclasses.fields(value))
        return tuple(name for name in names if name != self.key and name not in skip)


def _family(
    *prototypes: Any, key: str = "kind", many: bool = False, unread: Iterable[str] = ()
) -> Family:
    kinds = {value.kind: value for value in prototypes}
    return Family(kinds, key=key, many=many, unread=frozenset(unread))


_OWN = Custom("file.py:function")
"""The shape of a user's function; as a bare word it means nothing, and reading refuses it."""

FAMILIES: Mapping[str, Family] = {
    "keep": _family(s.KeepAll(), s.Informative()),
    "truncated": _family(s.TruncatedScore(), s.TruncatedMask(), s.TruncatedFloor()),
    "shaping": _family(s.Overlong(), s.LengthShaping(), many=True),
    "kl": _family(
        s.KL(),
        s.KL("reward_token", estimator="k1", coef=0.05, measure_every=10),
        s.KL("reward_sequence", estimator="k1", coef=0.03, measure_every=10),
        s.KL("loss", estimator="k3", coef=0.04, measure_every=10),
        key="place",
        unread=("estimator", "controller"),
    ),
    "controller": _family(s.FixedKL(), s.ProportionalKL(), s.DoublingKL()),
    "baseline": _family(
        s.NoBaseline(),
        s.BatchMean(),
        s.GroupMean(),
        s.LeaveOneOut(),
        s.LengthWeighted(),
        s.Greedy(),
        s.History(),
        _OWN,
    ),
    "scale": _family(s.NoScale(), s.GroupStd(), s.GroupMeanScale(), s.BatchStd(), _OWN),
    "credit": _family(u.Broadcast(), u.RewardToGo(), u.Process(), u.Gae()),
    "whiten": _family(u.NoWhiten(), u.TokenWhiten(), u.SequenceWhiten()),
    "ratio": _family(
        u.Ratio("none"),
        u.Ratio("token"),
        u.Ratio("sequence"),
        u.Ratio("sequence_token"),
        u.Ratio("geometric"),
        key="level",
        unread=("to",),
    ),
    "gate": _family(u.NoGate(), u.Clip(), u.Weight(), u.Sigmoid(), u.Divergence(), _OWN),
    "correction": _family(u.NoCorrection(), u.Truncate(), u.Mask(), u.GeometricMask()),
    "reduce": _family(
        u.TokenMean(), u.SequenceMean(), u.SequenceSum(), u.Constant(), u.PromptMean()
    ),
    "terms": _family(u.Entropy(), u.PositiveNLL(), u.StaleMask(), many=True),
    "critic": _family(u.NoCritic(), u.Critic()),
    "warmup": _family(u.NoWarmup(), u.ValueWarmup(), u.MethodWarmup()),
}
