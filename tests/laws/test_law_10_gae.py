"""Law 10: generalised advantages walk over the trained tokens only; the score is at the last."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.hand import assigned, group, no_kl, stood

from surefoot.learner.batch import make_batch
from surefoot.learner.update import Facts
from surefoot.methods import Gae, Method, online_rows

CRITICS = [
    name
    for name, value in online_rows().items()
    if isinstance(value, Method) and isinstance(value.credit, Gae)
]


def estimated(
    name: str, values: list[float], mask: list[bool], length: int
) -> tuple[list[float], list[float]]:
    """Advantages and targets of one completion with score 1, lambda 0.5, no whitening."""
    credit = {"lam": 0.5, "critic_lam": None, "length_alpha": None, "group_weight": None}
    method = no_kl(name, group_size=1, credit=credit, whiten="none", baseline="none", scale="none")
    batch = make_batch([group([1.0], lengths=[length])])
    batch = dataclasses.replace(batch, mask_BT=torch.tensor([mask]))
    facts = Facts(value_BT=torch.tensor([values], dtype=torch.float64))
    signal = assigned(method, batch, stood(method, batch), facts).signal
    assert signal.return_BT is not None
    return signal.advantage_BT[0].tolist(), signal.return_BT[0].tolist()


@pytest.mark.parametrize("name", CRITICS)
def test_a_masked_token_carries_value_and_advantage_through(name: str) -> None:
    """By hand over the two trained tokens, V 0.25 and 0.5: 1 - 0.5, and 0.25 + 0.5 * 0.5."""
    plain = estimated(name, [0.25, 0.5], [True, True], 2)
    assert plain == ([0.5, 0.5], [0.75, 1.0])
    # A token between them that is not trained, whatever the critic says of it.
    for said in (7.0, float("nan")):
        torn = estimated(name, [0.25, said, 0.5], [True, False, True], 3)
        assert torn == ([0.5, 0.0, 0.5], [0.75, 0.0, 1.0])


@pytest.mark.parametrize("name", CRITICS)
def test_the_score_is_at_the_last_trained_token(name: str) -> None:
    """The last sampled token is not trained: the score moves to the one before."""
    assert estimated(name, [0.25, 0.5, 9.0], [True, True, False], 3) == (
        [0.5, 0.5, 0.0],
        [0.75, 1.0, 0.0],
    )
