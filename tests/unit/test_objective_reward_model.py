"""Reward models: comparisons, centre and scale, and the health of margins; hand numbers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import scipy.stats
import torch
from torch import Tensor

from surefoot.errors import SurefootError
from surefoot.objective import calibration, reward_model

NAN, INF = float("nan"), float("inf")
LOG = math.log


def double(*values: float, grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def every(values: Tensor) -> Tensor:
    return torch.ones_like(values).bool()


def some(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def judge(
    chosen_B: Tensor,
    rejected_B: Tensor,
    *,
    margin_B: Tensor | None = None,
    present_B: Tensor | None = None,
    center: float = 0.0,
) -> reward_model.Judged:
    return reward_model.bradley_terry(
        chosen_B,
        rejected_B,
        margin_B=torch.zeros_like(chosen_B) if margin_B is None else margin_B,
        present_B=every(chosen_B) if present_B is None else present_B,
        center=center,
    )


def rank(
    reward_PK: Tensor,
    *,
    rank_PK: Tensor | None = None,
    valid_PK: Tensor | None = None,
    center: float = 0.0,
) -> reward_model.Ranked:
    columns = torch.arange(reward_PK.shape[1]).expand_as(reward_PK)
    return reward_model.ranking(
        reward_PK,
        rank_PK=columns if rank_PK is None else rank_PK,
        valid_PK=every(reward_PK) if valid_PK is None else valid_PK,
        center=center,
    )


# Pairs.


def test_a_pair_of_hand_numbers() -> None:
    chosen_B, rejected_B = double(LOG(3), LOG(3), grad=True), double(0.0, 0.0, grad=True)
    got = judge(chosen_B, rejected_B, margin_B=double(0.0, LOG(3)), center=0.5)
    assert got.loss_B.tolist() == pytest.approx([LOG(4 / 3), LOG(2)])
    assert got.penalty_B.tolist() == pytest.approx([LOG(3) ** 2 / 2] * 2)
    assert got.margin_B.tolist() == pytest.approx([LOG(3)] * 2)
    assert got.is_correct_B.all()
    up, down = torch.autograd.grad(got.loss_B.sum(), (chosen_B, rejected_B), retain_graph=True)
    assert up.tolist() == pytest.approx([-1 / 4, -1 / 2])
    assert down.tolist() == pytest.approx([1 / 4, 1 / 2])
    # 2 x 1/2 (r_w + r_l), the same for both.
    for grad in torch.autograd.grad(got.penalty_B.sum(), (chosen_B, rejected_B)):
        assert grad.tolist() == pytest.approx([LOG(3)] * 2)


def test_only_the_penalty_knows_where_the_rewards_are() -> None:
    chosen_B, rejected_B = some(6, seed=0), some(6, seed=1)
    here = judge(chosen_B, rejected_B, center=0.01)
    there = judge(chosen_B + 4, rejected_B + 4, center=0.01)
    torch.testing.assert_close(there.loss_B, here.loss_B)
    # 0.01 ((x + 8)^2 - x^2) = 0.16 x + 0.64
    torch.testing.assert_close(
        there.penalty_B - here.penalty_B, 0.16 * (chosen_B + rejected_B) + 0.64
    )
    assert judge(double(2.0), double(-2.0), center=0.01).penalty_B.item() == 0.0


def test_swapping_the_answers_of_a_pair() -> None:
    chosen_B, rejected_B = some(5, seed=2), some(5, seed=3)
    here, there = judge(chosen_B, rejected_B), judge(rejected_B, chosen_B)
    torch.testing.assert_close(there.loss_B - here.loss_B, here.margin_B)
    assert torch.equal(there.is_correct_B, ~here.is_correct_B)
    assert not judge(double(1.0), double(1.0)).is_correct_B.any()


@pytest.mark.parametrize("poison", [NAN, INF, -1e30])
def test_an_absent_pair_is_not_looked_at(poison: float) -> None:
    chosen_B, rejected_B = double(1.0, poison, grad=True), double(0.5, poison, grad=True)
    present_B = torch.tensor([True, False])
    got = judge(chosen_B, rejected_B, margin_B=double(0.2, poison), present_B=present_B, center=0.1)
    alone = judge(double(1.0), double(0.5), margin_B=double(0.2), center=0.1)
    assert got.loss_B.tolist() == [alone.loss_B.item(), 0.0]
    assert got.penalty_B.tolist() == [alone.penalty_B.item(), 0.0]
    assert got.margin_B.tolist() == [0.5, 0.0] and got.is_correct_B.tolist() == [True, False]
    total = (got.loss_B + got.penalty_B).sum()
    for grad in torch.autograd.grad(total, (chosen_B, rejected_B)):
        assert grad[1] == 0 and grad.isfinite().all() and grad[0] != 0


def test_nan_in_a_present_pair_is_not_hidden_and_a_rout_is_finite() -> None:
    assert judge(double(NAN), double(0.0)).loss_B.isnan().all()
    assert judge(double(-1e4), double(0.0)).loss_B.item() == 1e4


def test_impossible_pairs_are_refused() -> None:
    with pytest.raises(SurefootError, match="row 1"):
        judge(double(1.0, 1.0), double(0.0, 0.0), margin_B=double(0.0, -0.5))
    with pytest.raises(SurefootError, match="center"):
        judge(double(1.0), double(0.0), center=-0.01)
    with pytest.raises(SurefootError, match="dtype"):
        judge(double(1.0), double(0.0), present_B=double(1.0))


# Rankings.


def test_a_ranking_of_hand_numbers() -> None:
    # Differences log 3, log 6, log 2: losses log 4/3, log 7/6, log 3/2, together log 7/3.
    got = rank(double(LOG(6), LOG(2), 0.0)[None])
    assert got.loss_P.item() == pytest.approx(LOG(7 / 3) / 3)
    assert got.pairs_P.tolist() == [3] and got.correct_P.tolist() == [3]
    # Sums 3, 1 and 0.
    got = rank(double(2.0, 1.0, -1.0)[None], center=0.3)
    assert got.penalty_P.item() == pytest.approx(0.3 * 10 / 3)


def test_ties_are_no_pairs() -> None:
    got = rank(double(LOG(6), LOG(2), 0.0)[None], rank_PK=torch.tensor([[0, 0, 1]]))
    assert got.loss_P.item() == pytest.approx((LOG(7 / 6) + LOG(3 / 2)) / 2)
    assert got.pairs_P.tolist() == [2]


def test_a_ranking_of_two_is_a_pair() -> None:
    reward_PK = some(4, 2, seed=4)
    pair, ranked = judge(*reward_PK.unbind(1), center=0.2), rank(reward_PK, center=0.2)
    torch.testing.assert_close(ranked.loss_P, pair.loss_B)
    torch.testing.assert_close(ranked.penalty_P, pair.penalty_B)
    assert torch.equal(ranked.correct_P == 1, pair.is_correct_B)


def test_a_ranking_counts_once_however_long_it_is() -> None:
    for answers in range(2, 10):
        got = rank(torch.full((1, answers), 0.7))
        assert got.loss_P.item() == pytest.approx(LOG(2))
        assert got.pairs_P.item() == math.comb(answers, 2)
        assert got.correct_P.item() == 0


def test_the_order_of_the_columns_says_nothing() -> None:
    reward_PK, places = some(1, 4, seed=5), torch.arange(4)[None]
    want = rank(reward_PK, center=0.1)
    for order in itertools.permutations(range(4)):
        got = rank(reward_PK[:, order], rank_PK=places[:, order], center=0.1)
        torch.testing.assert_close(got.loss_P, want.loss_P)
        torch.testing.assert_close(got.penalty_P, want.penalty_P)
        assert torch.equal(got.correct_P, want.correct_P)


@pytest.mark.parametrize("poison", [NAN, INF, -1e30])
def test_invalid_answers_are_as_if_not_there(poison: float) -> None:
    # A ranking of three with a hole, one of a single answer, and one of none.
    reward_PK = double(
        LOG(6), poison, LOG(2), 0.0, 1.0, poison, poison, poison, *[poison] * 4
    ).reshape(3, 4)
    reward_PK.requires_grad_()
    valid_PK = torch.tensor([[1, 0, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
    got = rank(reward_PK, valid_PK=valid_PK, center=0.1)
    want = rank(double(LOG(6), LOG(2), 0.0)[None], center=0.1)
    assert got.loss_P.tolist() == pytest.approx([want.loss_P.item(), 0.0, 0.0])
    assert got.penalty_P.tolist() == pytest.approx([want.penalty_P.item(), 0.0, 0.0])
    assert got.pairs_P.tolist() == [3, 0, 0] and got.correct_P.tolist() == [3, 0, 0]
    (grad_PK,) = torch.autograd.grad((got.loss_P + got.penalty_P).sum(), reward_PK)
    assert torch.equal(grad_PK != 0, valid_PK & (got.pairs_P > 0)[:, None])


# Scale.


def fit(*scores: float, mean: float = 0.0, std: float = 1.0, valid: Any = None) -> Any:
    score_N = double(*scores)
    valid_N = every(score_N) if valid is None else torch.tensor(valid)
    return reward_model.normalization(score_N, valid_N=valid_N, mean=mean, std=std)


def test_gain_and_bias_of_hand_numbers() -> None:
    # Mean 2 and std 1 (ddof 0); mean 2 and std 2.
    assert [x.item() for x in fit(1.0, 3.0)] == [1.0, -2.0]
    got = fit(0.0, 4.0, NAN, mean=10.0, std=4.0, valid=[True, True, False])
    assert [x.item() for x in got] == [2.0, 6.0]
    assert reward_model.normalized(double(0.0, 4.0), got).tolist() == [6.0, 14.0]
    assert reward_model.normalized(torch.zeros(1), got).dtype == torch.float32


def test_normalizing_fixes_mean_and_spread_and_keeps_the_order() -> None:
    score_N = 3 * some(50, seed=6) + 7
    got = reward_model.normalization(score_N, valid_N=every(score_N), mean=0.0, std=1.0)
    fixed_N = reward_model.normalized(score_N, got)
    assert fixed_N.mean().item() == pytest.approx(0.0, abs=1e-12)
    assert fixed_N.square().mean().item() == pytest.approx(1.0)
    assert torch.equal(fixed_N.argsort(), score_N.argsort())


def test_scores_without_a_scale_are_refused() -> None:
    equal_N = torch.full((8,), 0.7)
    with pytest.raises(SurefootError, match="all equal"):
        reward_model.normalization(equal_N, valid_N=every(equal_N), mean=0.0, std=1.0)
    with pytest.raises(SurefootError, match="all equal"):
        fit(1.0, 2.0, valid=[True, False])
    with pytest.raises(SurefootError, match="1 of 3 reference scores"):
        fit(1.0, NAN, 2.0)
    with pytest.raises(SurefootError, match="std"):
        fit(1.0, 2.0, std=0.0)


# Health.


def ece(*margins: float, bins: int = 10, valid: Any = None) -> float:
    margin_N = double(*margins)
    valid_N = every(margin_N) if valid is None else torch.tensor(valid)
    return calibration.expected_calibration_error(margin_N, valid_N=valid_N, bins=bins).item()


def test_accuracy_counts_the_right_order() -> None:
    margin_N = double(1.0, 0.0, -1.0, 2.0, NAN)
    valid_N = torch.tensor([True, True, True, True, False])
    assert calibration.accuracy(margin_N, valid_N=valid_N).item() == 0.5
    assert calibration.accuracy(margin_N, valid_N=every(margin_N)).isnan()
    assert calibration.accuracy(margin_N, valid_N=~every(margin_N)).isnan()


def test_calibration_of_hand_numbers() -> None:
    # Confidence 3/4 throughout.
    assert ece(*[LOG(3)] * 3, -LOG(3)) == pytest.approx(0.0, abs=1e-12)
    assert ece(*[LOG(3)] * 4) == pytest.approx(0.25)
    assert ece(*[-LOG(3)] * 4) == pytest.approx(0.75)
    # 3/5 and right, 9/10 and wrong: two bins see two errors, one bin lets them cancel.
    assert ece(LOG(3 / 2), -LOG(9), bins=2) == pytest.approx((0.4 + 0.9) / 2)
    assert ece(LOG(3 / 2), -LOG(9), bins=1) == pytest.approx(0.5 / 2)


def test_calibration_at_its_ends() -> None:
    assert ece(0.0, 0.0) == 0.0
    assert ece(1e4, INF) == 0.0
    assert ece(1e4, -1e4) == pytest.approx(0.5)
    assert ece(LOG(3), NAN, valid=[True, False]) == pytest.approx(0.25)
    assert math.isnan(ece(LOG(3), NAN))
    assert math.isnan(ece(1.0, valid=[False]))
    with pytest.raises(SurefootError, match="bins"):
        ece(1.0, bins=0)


def correlate(values: list[float], lengths: list[float], kind: Any, valid: Any = None) -> float:
    value_N, length_N = double(*values), double(*lengths)
    valid_N = every(value_N) if valid is None else torch.tensor(valid)
    return calibration.length_correlation(value_N, length_N, valid_N=valid_N, kind=kind).item()


def test_correlation_of_hand_numbers() -> None:
    for kind in ("pearson", "spearman"):
        assert correlate([1, 2, 3], [1, 3, 2], kind) == pytest.approx(0.5)
        assert correlate([1, 2, 3], [30, 20, 10], kind) == pytest.approx(-1.0)
    # Ranks (1/2, 1/2, 2) against (0, 1, 2): 3/2 over the root of 3/2 x 2.
    assert correlate([1, 1, 9], [1, 2, 3], "spearman") == pytest.approx(math.sqrt(3) / 2)
    # Growing, but not in a line.
    assert correlate([1, 2, 100], [1, 2, 3], "spearman") == pytest.approx(1.0)
    assert correlate([1, 2, 100], [1, 2, 3], "pearson") < 0.9
    assert correlate([1, 2, NAN, 3], [1, 3, 7, 2], "pearson", [True, True, False, True]) == (
        pytest.approx(0.5)
    )


def test_correlation_agrees_with_scipy() -> None:
    value_N = (3 * some(40, seed=7)).round()
    length_N = (value_N + 2 * some(40, seed=8)).round()
    for kind, theirs in (
        ("pearson", scipy.stats.pearsonr),
        ("spearman", scipy.stats.spearmanr),
    ):
        want = theirs(value_N.numpy(), length_N.numpy()).statistic
        assert correlate(value_N.tolist(), length_N.tolist(), kind) == pytest.approx(want)


def test_correlation_is_undefined_without_spread() -> None:
    for kind in ("pearson", "spearman"):
        assert math.isnan(correlate([1, 1, 1], [1, 2, 3], kind))
        assert math.isnan(correlate([1, 2, 3], [5, 5, 5], kind))
        assert math.isnan(correlate([1], [2], kind))
        assert math.isnan(correlate([1, 2], [1, 2], kind, [False, False]))
        assert math.isnan(correlate([1, NAN, 3], [1, 2, 3], kind))
    with pytest.raises(SurefootError, match="kind"):
        correlate([1, 2], [1, 2], "kendall")


def means(chosen: float, rejected: float) -> calibration.PairMeans:
    return calibration.PairMeans(double(chosen)[0], double(rejected)[0])


def test_the_means_of_a_step() -> None:
    chosen_B, rejected_B = double(-1.0, -3.0, NAN, grad=True), double(-4.0, -8.0, NAN)
    present_B = torch.tensor([True, True, False])
    got = calibration.pair_means(chosen_B, rejected_B, present_B=present_B)
    assert got.chosen.item() == -2.0 and got.rejected.item() == -6.0
    assert not got.chosen.requires_grad
    empty = calibration.pair_means(chosen_B, rejected_B, present_B=~every(present_B))
    assert empty.chosen.isnan() and empty.rejected.isnan()


@pytest.mark.parametrize(
    ("after", "tolerance", "displaced"),
    [
        ((-11.0, -15.0), 0.0, True),  # both fall, the rejected one faster
        ((-11.0, -15.0), 0.99, True),
        ((-11.0, -15.0), 1.0, False),  # the fall is within the tolerance
        ((-9.0, -12.0), 0.0, False),  # as it should be
        ((-11.0, -12.5), 0.0, False),  # the margin falls too
        ((-11.0, -13.0), 0.0, False),  # the margin stays
        ((-10.0, -13.0), 0.0, False),  # the chosen one stays
        ((NAN, -15.0), 0.0, False),
    ],
)
def test_displacement(after: tuple[float, float], tolerance: float, displaced: bool) -> None:
    got = calibration.displacement(means(-10.0, -12.0), means(*after), tolerance=tolerance)
    assert bool(got.is_displaced) is displaced


def test_the_changes_that_displacement_reports() -> None:
    got = calibration.displacement(means(-10.0, -12.0), means(-11.0, -15.0), tolerance=0.1)
    assert (got.chosen.item(), got.rejected.item(), got.margin.item()) == (-1.0, -3.0, 2.0)
    with pytest.raises(SurefootError, match="tolerance"):
        calibration.displacement(means(0.0, 0.0), means(0.0, 0.0), tolerance=-0.1)
