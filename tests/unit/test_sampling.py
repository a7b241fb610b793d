"""Drawing one token: inverse-CDF sampling, truncation and temperature, by hand numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from surefoot.rollout.engine import Sampling
from surefoot.rollout.sampling import draw, tempered

STEPS = [0.25, 0.5, 0.75]
EDGES = [
    *(0.0, 5e-324, 2.0**-54, 1 - 2.0**-24, 1 - 2.0**-53, math.nextafter(1.0, 0.0), 1.0),
    *(
        value
        for step in STEPS
        for value in (math.nextafter(step, 0), step, math.nextafter(step, 1))
    ),
]


def logs(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities], dtype=torch.float32).log()


def settings(**changes: float) -> Sampling:
    return Sampling(**{"temperature": 1.0, "max_new_tokens": 4, **changes})  # type: ignore[arg-type]


def probabilities(logits: Tensor, **changes: float) -> list[float]:
    return tempered(logits, settings(**changes), blocked=None)[0].softmax(-1).tolist()


def at(logp_BV: Tensor, *uniforms: float) -> list[int]:
    rows = logp_BV.expand(len(uniforms), -1)
    return draw(rows, torch.tensor(uniforms, dtype=torch.float64))[0].tolist()


@pytest.mark.parametrize("uniform", EDGES)
@pytest.mark.parametrize(
    "support",
    [
        (0.0, 0.0, 1.0, 0.0, 0.0),
        (0.0, 0.25, 0.0, 0.75, 0.0),
        (0.5, 0.0, 0.5, 0.0, 0.0),
        (0.0, 0.0, 0.0, 0.0, 1.0),
        (1.0, 0.0, 0.0, 0.0, 0.0),
        (0.0, 1e-30, 0.0, 1.0, 0.0),
    ],
)
def test_a_token_of_probability_zero_is_never_drawn(
    support: tuple[float, ...], uniform: float
) -> None:
    (picked,) = at(logs(*support), uniform)
    assert support[picked] > 0


@pytest.mark.parametrize("uniform", EDGES)
def test_nor_in_a_large_vocabulary_whose_sum_is_not_one(uniform: float) -> None:
    """50 000 rounded terms: the sum drifts from 1, and the last tokens are impossible."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(1, 50_000, generator=generator)
    forbidden = torch.cat([torch.arange(100), torch.arange(49_000, 50_000)])
    (picked,) = at(tempered(logits, settings(), blocked=forbidden), uniform)
    assert 100 <= picked < 49_000


def test_which_token_a_uniform_picks() -> None:
    logp = logs(0.25, 0.5, 0.0, 0.25)
    assert at(logp, 0.1, 0.249, 0.251, 0.7499, 0.7501, 0.999) == [0, 0, 1, 1, 3, 3]


def test_the_share_of_each_token_is_its_probability() -> None:
    """An even grid of 1000 uniforms gives 1000 times the probability, exactly."""
    grid = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    logp = logs(0.125, 0.0, 0.375, 0.5)
    picked, _ = draw(logp.expand(1000, -1), grid)
    assert torch.bincount(picked, minlength=4).tolist() == [125, 0, 375, 500]


@pytest.mark.parametrize("width", [1, 255, 256, 257, 1000])
def test_the_draw_is_where_the_running_sum_first_exceeds_the_uniform(width: int) -> None:
    """Whole numbers as weights, so that sums are exact; vocabularies around the block size."""
    weights = torch.arange(width) * 37 % 11
    weights[width // 2] = 5
    bounds = weights.cumsum(0).tolist()
    uniforms = torch.arange(bounds[-1], dtype=torch.float64).add(0.5) / bounds[-1]
    logits = weights.float().log().expand(len(uniforms), -1)
    ids, logp = draw(logits - logits.amax(), uniforms)
    want = [next(k for k, bound in enumerate(bounds) if bound > n) for n in range(bounds[-1])]
    assert ids.tolist() == want
    expected = (weights[ids] / bounds[-1]).double().log()
    torch.testing.assert_close(logp.double(), expected, rtol=0, atol=1e-5)


def test_greedy_takes_the_largest_and_its_log_probability() -> None:
    ids, logp = draw(torch.cat([logs(0.25, 0.5, 0.0, 0.25), logs(0.1, 0.2, 0.3, 0.4)]), None)
    assert ids.tolist() == [1, 3]
    assert logp.tolist() == pytest.approx([math.log(0.5), math.log(0.4)])


def test_temperature_divides_the_logits() -> None:
    logits = torch.tensor([[0.0, math.log(2.0)]])
    assert probabilities(logits) == pytest.approx([1 / 3, 2 / 3])
    assert probabilities(logits, temperature=0.5) == pytest.approx([1 / 5, 4 / 5])
    half = probabilities(logits, temperature=2.0)
    assert half[1] / half[0] == pytest.approx(math.sqrt(2.0))


def test_bfloat16_logits_are_normalised_in_float32() -> None:
    logits = torch.zeros(1, 1000, dtype=torch.bfloat16)
    ids, logp = draw(tempered(logits, settings(), blocked=None), torch.tensor([0.0075]))
    assert (logp.dtype, ids.item()) == (torch.float32, 7)
    assert logp.item() == pytest.approx(-math.log(1000), abs=1e-5)


P = (0.1, 0.4, 0.05, 0.3, 0.15)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, P),
        ({"top_k": 1}, (0, 1, 0, 0, 0)),
        ({"top_k": 2}, (0, 4 / 7, 0, 3 / 7, 0)),
        ({"top_k": 99}, P),
        # The mass before the third token is 0.7, before the fourth 0.85.
        ({"top_p": 0.39}, (0, 1, 0, 0, 0)),
        ({"top_p": 1e-9}, (0, 1, 0, 0, 0)),
        ({"top_p": 0.69}, (0, 4 / 7, 0, 3 / 7, 0)),
        ({"top_p": 0.8}, (0, 0.4 / 0.85, 0, 0.3 / 0.85, 0.15 / 0.85)),
        # 0.3 x 0.4 = 0.12: tokens of 0.1 and 0.05 leave.
        ({"min_p": 0.3}, (0, 0.4 / 0.85, 0, 0.3 / 0.85, 0.15 / 0.85)),
        ({"min_p": 1.0}, (0, 1, 0, 0, 0)),
        # Of the three that top-k leaves, the first two hold 0.7 / 0.85 = 0.82 of the mass.
        ({"top_k": 3, "top_p": 0.8}, (0, 4 / 7, 0, 3 / 7, 0)),
        ({"top_k": 4, "min_p": 0.5}, (0, 4 / 7, 0, 3 / 7, 0)),
    ],
)
def test_truncation_by_hand(changes: dict[str, float], expected: tuple[float, ...]) -> None:
    assert probabilities(logs(*P), **changes) == pytest.approx(list(expected), abs=1e-6)


def test_truncation_comes_after_temperature() -> None:
    """At temperature 1/2 the weights are squares: 16, 9, 1 of 26; their first holds 0.615."""
    logits = torch.tensor([[4.0, 3.0, 1.0]]).log()
    assert probabilities(logits, temperature=0.5, top_p=0.6) == pytest.approx([1, 0, 0])
    assert probabilities(logits, top_p=0.6) == pytest.approx([4 / 7, 3 / 7, 0])


def test_top_k_keeps_k_of_equals() -> None:
    kept = probabilities(torch.zeros(1, 6), top_k=3)
    assert sorted(kept) == pytest.approx([0, 0, 0, 1 / 3, 1 / 3, 1 / 3])


def test_rows_are_truncated_each_by_itself() -> None:
    both = torch.cat([logs(*P), logs(*reversed(P))])
    out = tempered(both, settings(top_k=2), blocked=None).softmax(-1)
    assert out[1].tolist() == pytest.approx(list(reversed(out[0].tolist())))


def test_blocked_ids_leave_and_the_rest_is_renormalised() -> None:
    logits = tempered(logs(*P), settings(), blocked=torch.tensor([1, 4]))
    assert logits.softmax(-1)[0].tolist() == pytest.approx(
        [0.1 / 0.45, 0, 0.05 / 0.45, 0.3 / 0.45, 0]
    )
    assert logits[0, 1].item() == -math.inf


def test_the_callers_logits_are_left_alone() -> None:
    logits = logs(*P)
    before = logits.clone()
    tempered(logits, settings(temperature=0.5, top_p=0.5), blocked=torch.tensor([1]))
    assert torch.equal(logits, before)
