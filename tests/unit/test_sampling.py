"""One token at a time: inverse-CDF sampling and truncation, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from surefoot.rollout import Sampling
from surefoot.rollout.sampling import draw, token_logps

PROBABILITIES = [0.5, 0.25, 0.0, 0.125, 0.125, 0.0]
LOGP = torch.tensor([PROBABILITIES], dtype=torch.float32).log()


def settings(**changes: float) -> Sampling:
    return Sampling(**{"temperature": 1.0, "max_new_tokens": 1, **changes})


@pytest.mark.parametrize(
    ("uniform", "token"),
    [(1e-9, 0), (0.49, 0), (0.51, 1), (0.74, 1), (0.76, 3), (0.874, 3), (0.876, 4), (0.999, 4)],
)
def test_inverse_cdf_by_hand(uniform: float, token: int) -> None:
    assert draw(LOGP, torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    edges = [0.0, 2.0**-54, 0.5, 0.75, 0.875, 1.0 - 2.0**-53, math.nextafter(1.0, 0.0), 1.0]
    around = [math.nextafter(e, d) for e in edges for d in (0.0, 1.0)]
    uniform = torch.tensor([*edges, *around], dtype=torch.float64)
    picked = draw(LOGP.expand(len(uniform), -1), uniform)
    assert set(picked.tolist()) <= {0, 1, 3, 4}
    # A long tail of zeros behind a sum that rounds below 1.
    tail = torch.cat([torch.full((1, 3000), 1 / 3000), torch.zeros(1, 500)], 1).log()
    assert int(draw(tail, torch.tensor([math.nextafter(1.0, 0.0)], dtype=torch.float64))) < 3000


def test_frequencies_follow_the_probabilities() -> None:
    uniform = (torch.arange(8000, dtype=torch.float64) + 0.5) / 8000
    picked = draw(LOGP.expand(8000, -1), uniform)
    counts = torch.bincount(picked, minlength=6).tolist()
    assert counts == [4000, 2000, 0, 1000, 1000, 0]


def probabilities(logits: list[float], **changes: float) -> list[float]:
    logp = token_logps(torch.tensor([logits]), settings(**changes), blocked=None)
    return logp.exp()[0].tolist()


LOGITS = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]


def test_temperature_divides_the_logits() -> None:
    # Squares of .4 .3 .2 .1, over their sum .30.
    want = [0.16 / 0.30, 0.09 / 0.30, 0.04 / 0.30, 0.01 / 0.30]
    assert probabilities(LOGITS, temperature=0.5) == pytest.approx(want, abs=1e-6)


def test_top_k() -> None:
    assert probabilities(LOGITS, top_k=2) == pytest.approx([4 / 7, 3 / 7, 0, 0], abs=1e-6)


def test_top_p_keeps_the_token_that_crosses() -> None:
    assert probabilities(LOGITS, top_p=0.5) == pytest.approx([4 / 7, 3 / 7, 0, 0], abs=1e-6)
    assert probabilities(LOGITS, top_p=0.39) == pytest.approx([1, 0, 0, 0], abs=1e-6)
    assert probabilities(LOGITS, top_p=1e-9) == pytest.approx([1, 0, 0, 0], abs=1e-6)


def test_min_p_is_relative_to_the_top() -> None:
    want = [4 / 9, 3 / 9, 2 / 9, 0]
    assert probabilities(LOGITS, min_p=0.4) == pytest.approx(want, abs=1e-6)


def test_blocked_ids_have_probability_zero_and_the_rest_is_renormalised() -> None:
    logp = token_logps(torch.tensor([LOGITS]), settings(), blocked=torch.tensor([0]))
    assert logp.exp()[0].tolist() == pytest.approx([0, 3 / 6, 2 / 6, 1 / 6], abs=1e-6)
