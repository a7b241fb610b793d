"""Preferences: scores of answers, losses of pairs and of labels; hand numbers and laws."""

from __future__ import annotations

import math
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.errors import SurefootError
from surefoot.methods.preference_rows import PREFERENCE_ROWS, SUPERVISED_ROWS
from surefoot.methods.types import Preference
from surefoot.objective import answers, preference

NAN, INF = float("nan"), float("inf")
LOG = math.log
PAIR_LINKS = [word for word, link in preference.LINKS.items() if link.pair]
LABEL_LINKS = [word for word, link in preference.LINKS.items() if link.label]
MARGIN_LINKS = [word for word, link in preference.LINKS.items() if link.reads_margin]


def double(*values: float, grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def every(values: Tensor) -> Tensor:
    return torch.ones_like(values).bool()


def some(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def pairs(
    chosen_B: Tensor,
    rejected_B: Tensor,
    *,
    link: str = "sigmoid",
    beta: float = 1.0,
    margin: float = 0.0,
    smoothing: float = 0.0,
    unbias: bool = False,
    present_B: Tensor | None = None,
) -> preference.Pairs:
    return preference.pair_losses(
        chosen_B,
        rejected_B,
        present_B=every(chosen_B) if present_B is None else present_B,
        link=link,
        beta=beta,
        margin=margin,
        smoothing=smoothing,
        unbias=unbias,
    )


def labels(
    score_B: Tensor,
    desirable_B: Tensor,
    *,
    link: str = "kto",
    beta: float = 1.0,
    zero: Tensor | None = None,
    desirable: float = 1.0,
    undesirable: float = 1.0,
    present_B: Tensor | None = None,
) -> preference.Labels:
    return preference.label_losses(
        score_B,
        desirable_B=desirable_B,
        present_B=every(score_B) if present_B is None else present_B,
        link=link,
        beta=beta,
        zero=double(0.0)[0] if zero is None else zero,
        desirable=desirable,
        undesirable=undesirable,
    )


def slopes(loss_B: Tensor, *inputs: Tensor) -> list[list[float]]:
    return [grad.tolist() for grad in torch.autograd.grad(loss_B.sum(), inputs)]


# Scores of answers.


def test_scores_of_hand_numbers() -> None:
    logp_BT = torch.tensor([[-1.0, NAN, -2.0, -3.0], [-4.0, INF, NAN, NAN]])
    mask_BT = torch.tensor([[1, 0, 1, 1], [1, 0, 0, 0]]).bool()
    cases: list[tuple[Any, list[float]]] = [("sum", [-6.0, -4.0]), ("mean", [-2.0, -4.0])]
    for score, want in cases:
        got = answers.sequence_score(logp_BT, mask_BT=mask_BT, score=score)
        assert got.score_B.tolist() == want
        assert got.score_B.dtype == torch.float64
        assert not got.is_held_B.any()


def test_log_odds_of_hand_numbers() -> None:
    # P = 1/2, 1/4 and 3/4, the last as a mean over two tokens: odds 1, 1/3 and 3.
    logp_BT = double(LOG(0.5), NAN, LOG(0.25), NAN, LOG(0.75) - 0.25, LOG(0.75) + 0.25)
    logp_BT = logp_BT.reshape(3, 2).requires_grad_()
    mask_BT = torch.tensor([[1, 0], [1, 0], [1, 1]]).bool()
    got = answers.sequence_score(logp_BT, mask_BT=mask_BT, score="log_odds")
    torch.testing.assert_close(got.score_B, double(0.0, -LOG(3), LOG(3)))
    # d log odds / dm = 1/(1 - P) = 2, 4/3 and 4, shared by the tokens.
    (grad_BT,) = torch.autograd.grad(got.score_B.sum(), logp_BT)
    want_BT = double(2.0, 0.0, 4 / 3, 0.0, 2.0, 2.0).reshape(3, 2)
    torch.testing.assert_close(grad_BT, want_BT)


@pytest.mark.fault(15)
def test_log_odds_of_a_certain_answer_are_held_and_say_so() -> None:
    # Surely (also by rounding above 1), within the limit, near it, hopeless, and no token at all.
    logp_BT = double(0.0, 1e-9, -1e-12, -1e-6, -800.0, 0.0)[:, None].requires_grad_()
    mask_BT = torch.tensor([1, 1, 1, 1, 1, 0]).bool()[:, None]
    got = answers.sequence_score(logp_BT, mask_BT=mask_BT, score="log_odds")
    assert got.is_held_B.tolist() == [True, True, True, False, False, False]
    want = double(20.0, 20.0, 20.0, 6 * LOG(10), -800.0, 0.0)
    torch.testing.assert_close(got.score_B, want, rtol=1e-6, atol=0.0)
    (grad_BT,) = torch.autograd.grad(got.score_B.sum(), logp_BT)
    want_BT = double(0.0, 0.0, 0.0, 1e6, 1.0, 0.0)[:, None]
    torch.testing.assert_close(grad_BT, want_BT, rtol=1e-5, atol=0.0)


def test_a_float32_certain_answer_gives_orpo_no_nan() -> None:
    logp_BT = torch.zeros(2, 3, requires_grad=True)
    scored = answers.sequence_score(logp_BT, mask_BT=every(logp_BT), score="log_odds")
    assert scored.is_held_B.all()
    got = pairs(scored.score_B[:1], scored.score_B[1:])
    assert got.loss_B.item() == pytest.approx(LOG(2))
    assert slopes(got.loss_B, logp_BT) == [[[0.0] * 3] * 2]


@pytest.mark.fault(14)
@pytest.mark.parametrize("score", answers.SCORES)
@pytest.mark.parametrize("poison", [NAN, INF, -1e30])
def test_what_lies_under_a_token_mask_stays_there(score: Any, poison: float) -> None:
    mask_BT = torch.tensor([[1, 1, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]]).bool()
    clean_BT = -some(3, 4, seed=0).abs() - 0.1

    def run(given_BT: Tensor) -> tuple[list[float], Tensor]:
        leaf_BT = given_BT.clone().requires_grad_()
        score_B = answers.sequence_score(leaf_BT, mask_BT=mask_BT, score=score).score_B
        (grad_BT,) = torch.autograd.grad(score_B.sum(), leaf_BT)
        return score_B.tolist(), grad_BT

    want, want_grad_BT = run(clean_BT)
    got, got_grad_BT = run(torch.where(mask_BT, clean_BT, poison))
    assert got == want
    assert torch.equal(got_grad_BT, want_grad_BT)
    assert torch.equal(got_grad_BT != 0, mask_BT)


@pytest.mark.fault(12)
@pytest.mark.parametrize("score", answers.SCORES)
def test_nan_at_a_trained_token_is_not_hidden(score: Any) -> None:
    logp_BT = torch.tensor([[-1.0, NAN]])
    got = answers.sequence_score(logp_BT, mask_BT=every(logp_BT), score=score)
    assert got.score_B.isnan().all() and not got.is_held_B.any()


def test_a_pair_is_present_when_both_answers_have_a_token() -> None:
    chosen_BT = torch.tensor([[1, 1], [1, 0], [0, 0], [0, 0]]).bool()
    rejected_BS = torch.tensor([[0, 0, 1], [0, 0, 0], [1, 1, 1], [0, 0, 0]]).bool()
    present_B = answers.present_pairs(chosen_BT, rejected_BS)
    assert present_B.tolist() == [True, False, False, False]


# Losses of pairs.

R_W, R_L = LOG(3), -LOG(2)  # sigmoid: 3/4 and 1/3; their difference is log 6, of sigmoid 6/7.
HAND = {
    "sigmoid": LOG(7 / 6),
    "hinge": 0.0,
    "square": (LOG(6) - 0.5) ** 2 / 0.25,
    "bco": LOG(4 / 3) + LOG(3 / 2),
    "apo_zero": 1 / 4 + 1 / 3,
    "nca": LOG(4 / 3) + LOG(4) / 2 + LOG(3 / 2) / 2,
}


@pytest.mark.parametrize("link", PAIR_LINKS)
def test_every_link_of_hand_numbers(link: str) -> None:
    got = pairs(double(2 * R_W), double(2 * R_L), link=link, beta=0.5)
    assert got.loss_B.item() == pytest.approx(HAND[link], rel=1e-12, abs=1e-15)
    assert got.chosen_reward_B.item() == pytest.approx(R_W)
    assert got.rejected_reward_B.item() == pytest.approx(R_L)
    assert got.margin_B.item() == got.logit_B.item() == pytest.approx(LOG(6))
    assert got.is_correct_B.tolist() == [True]


def test_a_target_margin_of_hand_numbers() -> None:
    chosen_B, rejected_B = double(2 * R_W), double(2 * R_L)
    want = {"sigmoid": LOG(4 / 3), "hinge": 0.0, "square": (LOG(3) - 0.5) ** 2 / 0.25}
    for link in MARGIN_LINKS:
        got = pairs(chosen_B, rejected_B, link=link, beta=0.5, margin=LOG(2))
        assert got.loss_B.item() == pytest.approx(want[link], abs=1e-12), link
        assert got.logit_B.item() == pytest.approx(LOG(3))
        assert got.margin_B.item() == pytest.approx(LOG(6))
    # The margin asked for is missed, and the order is right all the same.
    missed = pairs(chosen_B, rejected_B, link="hinge", beta=0.5, margin=LOG(6))
    assert missed.loss_B.item() == pytest.approx(1.0)
    assert missed.is_correct_B.all()


AT_START = {
    "sigmoid": LOG(2),
    "hinge": 1.0,
    "square": 25.0,  # (1 / (2 beta))^2
    "bco": 2 * LOG(2),
    "apo_zero": 1.0,
    "nca": 2 * LOG(2),
}


@pytest.mark.parametrize("score", answers.SCORES)
def test_at_unchanged_weights_nothing_is_preferred(score: Any) -> None:
    # float32 with more digits than it can hold: only the same sums cancel exactly.
    logp_BT = -(some(4, 50, seed=1).float().abs() * 7.3)
    mask_BT = some(4, 50, seed=2) > -0.5
    mine = answers.sequence_score(logp_BT, mask_BT=mask_BT, score=score).score_B
    then = answers.sequence_score(logp_BT.clone(), mask_BT=mask_BT, score=score).score_B
    relative_B = answers.against_reference(mine, then)
    assert relative_B.tolist() == [0.0] * 4
    for link in PAIR_LINKS:
        got = pairs(relative_B[:2], relative_B[2:], link=link, beta=0.1)
        assert got.margin_B.tolist() == [0.0, 0.0]
        assert got.loss_B.tolist() == pytest.approx([AT_START[link]] * 2)
        assert not got.is_correct_B.any()


def test_the_reference_is_a_constant() -> None:
    score_B, ref_B = double(-3.0, grad=True), double(-5.0, grad=True)
    relative_B = answers.against_reference(score_B, ref_B)
    assert relative_B.item() == 2.0
    relative_B.sum().backward()
    assert score_B.grad is not None and score_B.grad.item() == 1.0
    assert ref_B.grad is None


def test_the_gradient_of_dpo_reaches_each_token_with_its_weight() -> None:
    # beta sigmoid(-z) = 1/2 x 1/7 at z = log 6, the same at each token of the sum.
    logp_BT = double(R_W, NAN, R_W, R_L, R_L, NAN).reshape(2, 3).requires_grad_()
    mask_BT = torch.tensor([[1, 0, 1], [1, 1, 0]]).bool()
    score_B = answers.sequence_score(logp_BT, mask_BT=mask_BT, score="sum").score_B
    got = pairs(score_B[:1], score_B[1:], beta=0.5)
    (grad_BT,) = torch.autograd.grad(got.loss_B.sum(), logp_BT)
    w = 1 / 14
    torch.testing.assert_close(grad_BT, double(-w, 0, -w, w, w, 0).reshape(2, 3))
    # Means are half as large here, and each token has half of them: beta 1 gives the same.
    score_B = answers.sequence_score(logp_BT, mask_BT=mask_BT, score="mean").score_B
    got = pairs(score_B[:1], score_B[1:], beta=1.0)
    (grad_BT,) = torch.autograd.grad(got.loss_B.sum(), logp_BT)
    torch.testing.assert_close(grad_BT, double(-w, 0, -w, w, w, 0).reshape(2, 3))


def test_swapping_the_answers_turns_the_comparison_round() -> None:
    chosen_B, rejected_B = some(6, seed=3), some(6, seed=4)
    here, there = pairs(chosen_B, rejected_B), pairs(rejected_B, chosen_B)
    # -log sigmoid(z) + log sigmoid(-z) = -z.
    torch.testing.assert_close(here.loss_B - there.loss_B, -here.margin_B)
    assert torch.equal(there.margin_B, -here.margin_B)
    assert torch.equal(there.chosen_reward_B, here.rejected_reward_B)
    assert torch.equal(there.is_correct_B, ~here.is_correct_B)


@pytest.mark.parametrize("link", PAIR_LINKS)
def test_smoothing_moves_loss_to_the_swapped_pair(link: str) -> None:
    chosen_B, rejected_B = some(6, seed=5), some(6, seed=6)
    plain = pairs(chosen_B, rejected_B, link=link).loss_B
    swapped = pairs(rejected_B, chosen_B, link=link).loss_B
    a = pairs(chosen_B, rejected_B, link=link, smoothing=0.25).loss_B
    b = pairs(rejected_B, chosen_B, link=link, smoothing=0.25).loss_B
    torch.testing.assert_close(a + b, plain + swapped)
    torch.testing.assert_close(4 * a, 3 * plain + swapped)


def test_cdpo_has_its_optimum_at_the_share_of_flips() -> None:
    # sigmoid(log 3) = 3/4 = 1 - e. Below it is pushed up, above it down; DPO is never done.
    chosen_B = double(LOG(3) - 0.5, LOG(3), LOG(3) + 0.5, grad=True)
    zero_B = torch.zeros_like(chosen_B)
    below, at, above = slopes(pairs(chosen_B, zero_B, smoothing=0.25).loss_B, chosen_B)[0]
    assert below < -1e-3 and abs(at) < 1e-12 and above > 1e-3
    assert max(slopes(pairs(chosen_B, zero_B).loss_B, chosen_B)[0]) < -1e-3


@pytest.mark.parametrize("link", PAIR_LINKS)
def test_the_unbiased_loss_is_the_clean_one_over_flips(link: str) -> None:
    chosen_B, rejected_B = some(8, seed=7).requires_grad_(), some(8, seed=8)
    share, margin = 0.3, 0.7 if link in MARGIN_LINKS else 0.0
    clean_B = pairs(chosen_B, rejected_B, link=link, margin=margin).loss_B
    kept, flipped = (
        pairs(*both, link=link, margin=margin, smoothing=share, unbias=True).loss_B
        for both in ((chosen_B, rejected_B), (rejected_B, chosen_B))
    )
    mean_B = (1 - share) * kept + share * flipped
    torch.testing.assert_close(mean_B, clean_B)
    torch.testing.assert_close(*slopes_of(mean_B, clean_B, chosen_B))
    biased = pairs(chosen_B, rejected_B, link=link, margin=margin, smoothing=share).loss_B
    assert not torch.allclose(biased, clean_B)


def slopes_of(left_B: Tensor, right_B: Tensor, leaf_B: Tensor) -> tuple[Tensor, Tensor]:
    (left,) = torch.autograd.grad(left_B.sum(), leaf_B, retain_graph=True)
    (right,) = torch.autograd.grad(right_B.sum(), leaf_B, retain_graph=True)
    return left, right


def test_the_unbiased_loss_has_no_floor() -> None:
    # e z / (1 - 2e) = z / 2 with e = 1/4.
    got = pairs(double(40.0, 80.0), double(0.0, 0.0), smoothing=0.25, unbias=True)
    assert got.loss_B.tolist() == pytest.approx([-20.0, -40.0])


def test_hinge_leaves_what_is_won_by_enough() -> None:
    chosen_B = double(0.5, 0.999, 1.001, 30.0, grad=True)
    got = pairs(chosen_B, torch.zeros(4).double(), link="hinge")
    assert got.loss_B.tolist() == pytest.approx([0.5, 0.001, 0.0, 0.0])
    assert slopes(got.loss_B, chosen_B) == [[-1.0, -1.0, 0.0, 0.0]]


def test_ipo_wants_a_difference_of_its_own_size() -> None:
    # 1 / (2 beta) = 5 nats, however the two answers share them.
    chosen_B = double(5.0, 2.0, 6.0, 4.0, grad=True)
    rejected_B = double(0.0, -3.0, 0.0, 0.0)
    got = pairs(chosen_B, rejected_B, link="square", beta=0.1)
    assert got.loss_B.tolist() == pytest.approx([0.0, 0.0, 1.0, 1.0], abs=1e-12)
    want = pytest.approx([0.0, 0.0, 2.0, -2.0], abs=1e-9)
    assert slopes(got.loss_B, chosen_B)[0] == want


@pytest.mark.fault(15)
@pytest.mark.parametrize("link", PAIR_LINKS)
@pytest.mark.parametrize("size", [1e3, -1e3])
def test_far_from_the_reference_everything_is_finite(link: str, size: float) -> None:
    chosen_B, rejected_B = double(size, grad=True), double(-size, grad=True)
    got = pairs(chosen_B, rejected_B, link=link)
    assert got.loss_B.isfinite().all()
    assert all(math.isfinite(x[0]) for x in slopes(got.loss_B, chosen_B, rejected_B))
    if link == "sigmoid":
        assert got.loss_B.item() == (0.0 if size > 0 else 2e3)


@pytest.mark.parametrize("link", PAIR_LINKS)
@pytest.mark.parametrize("poison", [NAN, INF, -1e30])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_an_absent_pair_is_not_looked_at(link: str, poison: float, smoothing: float) -> None:
    present_B = torch.tensor([True, False, True])
    chosen_B, rejected_B = some(3, seed=9), some(3, seed=10)
    alone = pairs(chosen_B[present_B], rejected_B[present_B], link=link, smoothing=smoothing)
    leaf_B = torch.where(present_B, chosen_B, poison).requires_grad_()
    other_B = torch.where(present_B, rejected_B, poison).requires_grad_()
    got = pairs(leaf_B, other_B, link=link, smoothing=smoothing, present_B=present_B)
    # The losses of the others do not change, and there is no mean in them.
    want = [alone.loss_B[0].item(), 0.0, alone.loss_B[1].item()]
    assert got.loss_B.tolist() == pytest.approx(want, rel=1e-12, abs=0.0)
    for fact in (got.chosen_reward_B, got.rejected_reward_B, got.margin_B, got.logit_B):
        assert fact[1] == 0 and fact.isfinite().all()
    assert not got.is_correct_B[1]
    for grad in slopes(got.loss_B, leaf_B, other_B):
        assert grad[1] == 0.0 and all(map(math.isfinite, grad))


@pytest.mark.fault(12)
def test_nan_in_a_present_pair_is_not_hidden() -> None:
    for link in PAIR_LINKS:
        assert pairs(double(NAN), double(0.0), link=link).loss_B.isnan().all(), link


def test_facts_carry_no_gradient_and_losses_keep_the_dtype() -> None:
    chosen_B = torch.tensor([0.5], requires_grad=True)
    got = pairs(chosen_B, torch.tensor([0.25]))
    assert got.loss_B.dtype == torch.float32 and got.loss_B.requires_grad
    for fact in (got.chosen_reward_B, got.rejected_reward_B, got.margin_B, got.logit_B):
        assert fact.dtype == torch.float64 and not fact.requires_grad


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"link": "sigmod"}, "no link 'sigmod'"),
        ({"link": "kto"}, "label_losses"),
        ({"link": "bco", "margin": 0.5}, "never read"),
        ({"link": "apo_zero", "margin": 0.5}, "never read"),
        ({"margin": -0.5}, "margin"),
        ({"beta": 0.0}, "beta"),
        ({"beta": INF}, "beta"),
        ({"smoothing": 0.5}, "smoothing"),
        ({"smoothing": -0.1}, "smoothing"),
        ({"unbias": True}, "unbias"),
    ],
)
def test_impossible_pairs_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SurefootError, match=words):
        pairs(double(1.0), double(0.0), **options)


# Losses of labels.

GOOD_BAD = torch.tensor([True, False])


def test_labels_of_hand_numbers() -> None:
    # beta (s - zero) = 1/2 (2 log 3 + 1 - 1) = log 3, of sigmoid 3/4, on both sides.
    score_B = double(2 * LOG(3) + 1, 2 * LOG(3) + 1, grad=True)
    options: dict[str, Any] = {"beta": 0.5, "zero": double(1.0)[0]}
    got = labels(score_B, GOOD_BAD, desirable=2.0, undesirable=4.0, **options)
    assert got.loss_B.tolist() == pytest.approx([2 / 4, 4 * 3 / 4])
    assert got.reward_B.tolist() == pytest.approx([LOG(3) + 0.5] * 2)
    assert got.is_correct_B.tolist() == [True, False]
    # w beta sigmoid (1 - sigmoid) = w x 1/2 x 3/16.
    assert slopes(got.loss_B, score_B)[0] == pytest.approx([-6 / 32, 12 / 32])
    got = labels(score_B, GOOD_BAD, link="bco", desirable=2.0, undesirable=4.0, **options)
    assert got.loss_B.tolist() == pytest.approx([2 * LOG(4 / 3), 4 * LOG(4)])


def test_a_label_weight_is_not_rounded_to_float32() -> None:
    got = labels(double(0.0, 0.0), GOOD_BAD, desirable=0.1, undesirable=0.3)
    assert got.loss_B.tolist() == pytest.approx([0.05, 0.15], rel=1e-14)


def test_a_good_and_a_bad_label_are_mirror_images() -> None:
    score_B = some(5, seed=11)
    for link in LABEL_LINKS:
        good = labels(score_B, every(score_B), link=link)
        bad = labels(-score_B, ~every(score_B), link=link)
        assert torch.equal(good.loss_B, bad.loss_B)
        assert torch.equal(good.is_correct_B, bad.is_correct_B)


def test_bco_over_a_pair_is_bco_over_its_two_labels() -> None:
    chosen_B, rejected_B = some(4, seed=12), some(4, seed=13)
    good = labels(chosen_B, every(chosen_B), link="bco", beta=0.3).loss_B
    bad = labels(rejected_B, ~every(chosen_B), link="bco", beta=0.3).loss_B
    torch.testing.assert_close(good + bad, pairs(chosen_B, rejected_B, link="bco", beta=0.3).loss_B)


def test_the_zero_point_is_a_constant() -> None:
    score_B, zero = double(0.5, 0.5, grad=True), double(0.2, grad=True)
    labels(score_B, GOOD_BAD, zero=zero[0]).loss_B.sum().backward()
    assert score_B.grad is not None and zero.grad is None


@pytest.mark.parametrize("link", LABEL_LINKS)
@pytest.mark.parametrize("poison", [NAN, INF, -1e30])
def test_an_absent_label_is_not_looked_at(link: str, poison: float) -> None:
    score_B = double(0.3, poison, -0.8, grad=True)
    present_B = torch.tensor([True, False, True])
    desirable_B = torch.tensor([True, True, False])
    zero = double(-0.5)[0]  # what is absent would be right about it
    got = labels(score_B, desirable_B, link=link, present_B=present_B, zero=zero)
    alone = labels(double(0.3, -0.8), GOOD_BAD, link=link, zero=zero)
    want = [alone.loss_B[0].item(), 0.0, alone.loss_B[1].item()]
    assert got.loss_B.tolist() == pytest.approx(want, rel=1e-12, abs=0.0)
    assert got.reward_B[1] == 0 and got.is_correct_B.tolist() == [True, False, True]
    (grad,) = slopes(got.loss_B, score_B)
    assert grad[1] == 0.0 and all(map(math.isfinite, grad))


def test_impossible_labels_are_refused() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"link": "sigmoid"}, "kto, bco"),
        ({"link": "kot"}, "kto, bco"),
        ({"beta": -1.0}, "beta"),
        ({"undesirable": 0.0}, "undesirable"),
    ]
    for options, words in wrong:
        with pytest.raises(SurefootError, match=words):
            labels(double(0.0, 0.0), GOOD_BAD, **options)


def test_the_zero_point_of_kto() -> None:
    relative_B = double(1.0, -0.5, NAN, 0.4, grad=True)
    present_B = torch.tensor([True, True, False, True])
    zero = preference.kto_zero(relative_B, present_B=present_B)
    assert zero.item() == pytest.approx(0.3)
    assert not zero.requires_grad and zero.dtype == torch.float64
    assert preference.kto_zero(double(-1.0, 0.5), present_B=GOOD_BAD).item() == 0.0
    with pytest.raises(SurefootError, match="2 prompts or more"):
        preference.kto_zero(relative_B, present_B=torch.zeros(4).bool())


def test_the_balance_of_labels() -> None:
    desirable_B = torch.tensor([True, True, True, False, False, True])
    present_B = torch.tensor([True, True, True, True, True, False])

    def balance(present_B: Tensor, desirable: float = 1.0, undesirable: float = 1.0) -> float:
        return preference.label_balance(
            desirable_B, present_B=present_B, desirable=desirable, undesirable=undesirable
        ).item()

    assert balance(present_B) == 1.5
    assert balance(present_B, desirable=2.0, undesirable=3.0) == 1.0
    assert balance(desirable_B) == INF
    assert math.isnan(balance(~every(present_B)))


# Weights of likely pairs.


def test_likelihood_weights_of_hand_numbers() -> None:
    # Probabilities 1/2, 1/4, 1/4: their squares sum to 3/8, so the tokens have 4/3 and 2/3 of it.
    c = LOG(3 / 8)
    chosen_BT = double(LOG(1 / 2), NAN, LOG(1 / 4)).expand(3, 3)
    chosen_mask_BT = torch.tensor([[1, 0, 1], [1, 0, 0], [1, 0, 1]]).bool()
    rejected_BT = double(LOG(1 / 4), LOG(1 / 2)).expand(3, 2)
    rejected_mask_BT = torch.tensor([[1, 0], [0, 1], [0, 0]]).bool()
    w_B = answers.log_likelihood_weight(
        chosen_BT, torch.full_like(chosen_BT, c), mask_BT=chosen_mask_BT
    )
    l_B = answers.log_likelihood_weight(
        rejected_BT, torch.full_like(rejected_BT, c), mask_BT=rejected_mask_BT
    )
    torch.testing.assert_close(w_B, double(LOG(8 / 9) / 2, LOG(4 / 3), LOG(8 / 9) / 2))
    torch.testing.assert_close(l_B, double(LOG(2 / 3), LOG(4 / 3), 0.0))
    present_B = answers.present_pairs(chosen_mask_BT, rejected_mask_BT)
    weight_B = answers.likelihood_weights(w_B, l_B, present_B=present_B)
    # (8/9)^(1/2) 2/3; (4/3)^2 is held at 1; the last pair is absent.
    torch.testing.assert_close(weight_B, double((8 / 9) ** 0.5 * 2 / 3, 1.0, 0.0))


def test_what_a_uniform_policy_says_is_typical_of_it() -> None:
    logp_BT = double(-LOG(7), -LOG(7))[None].requires_grad_()
    got = answers.log_likelihood_weight(
        logp_BT, torch.full_like(logp_BT, LOG(7 / 49)), mask_BT=every(logp_BT)
    )
    assert got.item() == pytest.approx(0.0, abs=1e-15)
    assert not got.requires_grad


# The mixture with the likelihood.


def mixture(
    loss_B: Tensor, logp_BT: Tensor, mask_BT: Tensor, present_B: Tensor, whole: float, nll: float
) -> Tensor:
    return preference.nll_mixture(
        loss_B,
        logp_BT,
        mask_BT=mask_BT,
        present_B=present_B,
        denominator=double(whole)[0],
        nll=nll,
    )


def test_the_mixture_of_hand_numbers() -> None:
    loss_B = double(1.0, 2.0, NAN, grad=True)
    logp_BT = double(-1.0, -3.0, -2.0, NAN, NAN, -9.0).reshape(3, 2).requires_grad_()
    mask_BT = torch.tensor([[1, 1], [1, 0], [0, 1]]).bool()
    present_B = torch.tensor([True, True, False])
    # Pairs (1 + 2)/2, likelihood 1/2 (2 + 2)/2: each answer per token.
    got = mixture(loss_B, logp_BT, mask_BT, present_B, 2, 0.5)
    assert got.item() == 2.5
    grad_B, grad_BT = torch.autograd.grad(got, (loss_B, logp_BT))
    assert grad_B.tolist() == [0.5, 0.5, 0.0]
    assert grad_BT.tolist() == [[-0.125, -0.125], [-0.25, 0.0], [0.0, 0.0]]
    assert mixture(loss_B, logp_BT, mask_BT, present_B, 2, 0.0).item() == 1.5
    assert mixture(loss_B, logp_BT, mask_BT, ~every(present_B), 0, 0.5).item() == 0.0
    with pytest.raises(SurefootError, match="nll"):
        mixture(loss_B, logp_BT, mask_BT, present_B, 2, -1.0)


@pytest.mark.parametrize("cuts", [[5], [1, 4], [2, 3], [1, 1, 1, 1, 1]])
def test_any_split_of_a_step_adds_up(cuts: list[int]) -> None:
    present_B = torch.tensor([True, False, True, True, True])
    mask_BT = torch.tensor(
        [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0]]
    ).bool()
    whole = present_B.sum().item()

    def run(sizes: list[int]) -> tuple[float, Tensor]:
        logp_BT = (-some(5, 4, seed=14).abs()).requires_grad_()
        total = double(0.0)[0]
        for rows in torch.arange(5).split(sizes):
            score_B = answers.sequence_score(logp_BT[rows], mask_BT=mask_BT[rows], score="sum")
            got = pairs(
                score_B.score_B, some(5, seed=15)[rows], beta=0.3, present_B=present_B[rows]
            )
            total = total + mixture(
                got.loss_B, logp_BT[rows], mask_BT[rows], present_B[rows], whole, 0.7
            )
        (grad_BT,) = torch.autograd.grad(total, logp_BT)
        return total.item(), grad_BT

    (loss, grad_BT), (want, want_BT) = run(cuts), run([5])
    assert loss == pytest.approx(want, rel=1e-12)
    torch.testing.assert_close(grad_BT, want_BT, rtol=1e-12, atol=0.0)
    assert not grad_BT[1].any() and grad_BT[0, :2].all()


# The rows.


def options_of(field: str) -> set[str]:
    return set(typing.get_args(typing.get_type_hints(Preference)[field]))


def test_every_word_of_a_row_has_its_function() -> None:
    assert set(preference.LINKS) == options_of("link")
    assert set(answers.SCORES) == options_of("score")
    assert all(link.pair or link.label for link in preference.LINKS.values())


def test_the_rows_have_their_names_and_their_data_has_its_link() -> None:
    assert [row.name for row in PREFERENCE_ROWS] == [
        *("dpo", "cdpo", "robust_dpo", "ipo", "ipo_avg", "hinge", "dpo_norm", "bco_pair"),
        *("apo_zero", "nca_pair", "simpo", "orpo", "kto"),
    ]
    assert [row.name for row in SUPERVISED_ROWS] == ["sft", "reward_model"]
    for row in PREFERENCE_ROWS:
        link = preference.LINKS[row.link]
        assert (link.pair if row.data == "pairs" else link.label) is not None
        assert row.margin == 0 or link.reads_margin


def loss_of(row: Preference) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of one pair (or of its two labels, zero point 0) of one-token answers."""

    def run(chosen_1: Tensor, rejected_1: Tensor) -> Tensor:
        score_2 = answers.sequence_score(
            torch.cat([chosen_1, rejected_1])[:, None],
            mask_BT=torch.ones(2, 1).bool(),
            score=row.score,
        ).score_B
        if row.reference:
            score_2 = answers.against_reference(score_2, double(-LOG(2), -LOG(2)))
        if row.data == "labels":
            got = labels(
                score_2,
                GOOD_BAD,
                link=row.link,
                beta=row.beta,
                desirable=row.desirable,
                undesirable=row.undesirable,
            )
            return got.loss_B.sum()
        loss_1 = pairs(
            score_2[:1],
            score_2[1:],
            link=row.link,
            beta=row.beta,
            margin=row.margin,
            smoothing=row.smoothing,
            unbias=row.unbias,
        ).loss_B
        return mixture(
            loss_1, chosen_1[:, None], every(chosen_1[:, None]), every(loss_1), 1, row.nll
        )

    return run


@pytest.mark.parametrize("row", PREFERENCE_ROWS, ids=lambda row: row.name)
def test_every_row_pushes_the_two_answers_apart_at_the_start(row: Preference) -> None:
    chosen_1, rejected_1 = double(-LOG(2), grad=True), double(-LOG(2), grad=True)
    loss = loss_of(row)(chosen_1, rejected_1)
    up, down = torch.autograd.grad(loss, (chosen_1, rejected_1))
    assert up < 0
    assert down > 0


def test_orpo_is_the_paper_times_its_weight() -> None:
    # P = 1/2 and 1/4: the odds ratio is 3, of sigmoid 3/4; the likelihood costs log 2.
    (orpo,) = (row for row in PREFERENCE_ROWS if row.name == "orpo")
    loss = loss_of(orpo)(double(LOG(1 / 2)), double(LOG(1 / 4)))
    assert loss.item() == pytest.approx(10 * (LOG(2) + 0.1 * LOG(4 / 3)))


def test_simpo_is_still_wrong_about_a_pair_it_wins_by_too_little() -> None:
    # Equal answers: -log sigmoid(-1); won by 1/2 nat per token: -log sigmoid(2 x 1/2 - 1).
    (simpo,) = (row for row in PREFERENCE_ROWS if row.name == "simpo")
    assert loss_of(simpo)(double(-2.0), double(-2.0)).item() == pytest.approx(LOG(1 + math.e))
    assert loss_of(simpo)(double(-2.0), double(-2.5)).item() == pytest.approx(LOG(2))
