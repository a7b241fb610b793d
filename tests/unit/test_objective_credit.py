"""Credit per token, shaping, log-probabilities, mismatch: hand numbers and masks."""

from __future__ import annotations

import math

import pytest
import torch

from surefoot.errors import SurefootError
from surefoot.objective import credit, logprob, mismatch, shaping, terms

NAN = float("nan")
# Row 0: a gap inside. Row 1: padding on the left. Row 2: nothing.
MASK_BT = torch.tensor([[1, 0, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0]]).bool()


def test_broadcast() -> None:
    advantage_B = torch.tensor([2.0, -1.0, NAN], dtype=torch.float64)
    got = credit.broadcast(advantage_B, mask_BT=MASK_BT)
    assert got.dtype == torch.float64
    assert got.tolist() == [[2, 0, 2, 2], [0, 0, -1, 0], [0, 0, 0, 0]]


def test_per_token_reward_pays_the_score_at_the_last_valid_token() -> None:
    kl_BT = torch.tensor([[0.5, NAN, -1.0, 2.0], [NAN, NAN, 4.0, NAN], [NAN] * 4])
    score_B = torch.tensor([10.0, 20.0, NAN])
    got = credit.per_token_reward(score_B, kl_BT, mask_BT=MASK_BT, coef=0.5)
    # Row 0: -0.25, 0.5, -1 + 10. Row 1: its only token is the last one, -2 + 20.
    assert got.tolist() == [[-0.25, 0, 0.5, 9.0], [0, 0, 18.0, 0], [0, 0, 0, 0]]
    assert got.dtype == torch.float32
    wide = credit.per_token_reward(score_B.double(), kl_BT, mask_BT=MASK_BT, coef=0.5)
    assert wide.dtype == torch.float64


def test_reward_to_go_walks_over_the_valid_tokens() -> None:
    reward_BT = torch.tensor([[1.0, NAN, 2.0, 4.0], [NAN, NAN, 3.0, NAN], [NAN] * 4])
    # Row 0, gamma 1/2: 4; 2 + 4/2 = 4; 1 + 4/2 = 3, the gap does not discount.
    got = credit.reward_to_go(reward_BT, mask_BT=MASK_BT, gamma=0.5)
    assert got.tolist() == [[3, 0, 4, 4], [0, 0, 3, 0], [0, 0, 0, 0]]
    assert got.dtype == torch.float32
    plain = credit.reward_to_go(reward_BT, mask_BT=MASK_BT, gamma=1.0)
    assert plain[0].tolist() == [7, 0, 6, 4]
    none = credit.reward_to_go(reward_BT, mask_BT=MASK_BT, gamma=0.0)
    assert none[0].tolist() == [1, 0, 2, 4]


def test_reward_to_go_of_no_tokens() -> None:
    empty_BT = torch.zeros(2, 0)
    assert credit.reward_to_go(empty_BT, mask_BT=empty_BT.bool(), gamma=1.0).shape == (2, 0)


def test_reward_to_go_keeps_float64_inside() -> None:
    # 2^24 + 1 + 1 is lost in float32 sums, one at a time.
    reward_BT = torch.tensor([[1.0, 1.0, 2.0**24]])
    got = credit.reward_to_go(reward_BT, mask_BT=torch.ones(1, 3).bool(), gamma=1.0)
    assert got[0, 0].item() == 2.0**24 + 2


def test_soft_overlong() -> None:
    # Limit 100, cache 20: 0 up to 80, -1/20 per token after it, -1 from 100 on.
    length_B = torch.tensor([0, 80, 81, 90, 100, 101, 500])
    got = shaping.soft_overlong(length_B, max_length=100, cache=20)
    torch.testing.assert_close(got.tolist(), [0.0, 0.0, -0.05, -0.5, -1.0, -1.0, -1.0])
    assert got.dtype == torch.float64
    for cache in (0, 101):
        with pytest.raises(SurefootError, match="cache"):
            shaping.soft_overlong(length_B, max_length=100, cache=cache)


def test_subtract_kl() -> None:
    reward_B = torch.tensor([1.0, NAN])
    got = shaping.subtract_kl(reward_B, torch.tensor([4.0, 4.0]), coef=0.25)
    assert got[0].item() == 0.0
    assert got[1].isnan()


def test_token_logp() -> None:
    # Weights 1 : 3 at temperature 1; at 1/2 the logits double: 1 : 9.
    logits_NV = torch.tensor([[0.0, math.log(3.0)]] * 2, dtype=torch.float64)
    got = logprob.token_logp(logits_NV, torch.tensor([0, 1]), temperature=1.0)
    torch.testing.assert_close(got.logp_N.exp().tolist(), [0.25, 0.75])
    want = 0.25 * math.log(4) + 0.75 * math.log(4 / 3)
    torch.testing.assert_close(got.entropy_N.tolist(), [want, want])
    cold = logprob.token_logp(logits_NV, torch.tensor([0, 1]), temperature=0.5)
    torch.testing.assert_close(cold.logp_N.exp().tolist(), [0.1, 0.9])
    with pytest.raises(SurefootError, match="temperature"):
        logprob.token_logp(logits_NV, torch.tensor([0, 1]), temperature=0.0)


def test_token_logp_with_impossible_tokens() -> None:
    logits_NV = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    got = logprob.token_logp(logits_NV, torch.tensor([1]), temperature=1.0)
    torch.testing.assert_close(got.entropy_N.item(), math.log(2))
    (got.logp_N + got.entropy_N).sum().backward()
    torch.testing.assert_close(logits_NV.grad, torch.tensor([[-0.5, 0.5, 0.0]]))


def test_mismatch_hand_numbers() -> None:
    # rho = 2, 1/2 in row 0 and 4 in row 1; masked places hold junk.
    log2 = math.log(2.0)
    old_BT = torch.tensor([[-1.0, NAN, -2.0], [NAN, -1.0, math.inf], [NAN] * 3]).double()
    step_BT = torch.tensor([[log2, 0.0, -log2], [0.0, 2 * log2, 0.0], [0.0] * 3]).double()
    mask_BT = torch.tensor([[1, 0, 1], [0, 1, 0], [0, 0, 0]]).bool()
    got = mismatch.mismatch(old_BT, old_BT - step_BT, mask_BT=mask_BT)
    rho_BT = torch.tensor([[2.0, 0.0, 0.5], [0.0, 4.0, 0.0], [0.0] * 3]).double()
    torch.testing.assert_close(got.token_ratio_BT, rho_BT)
    torch.testing.assert_close(got.sequence_ratio_B.tolist(), [1.0, 4.0, 1.0])
    torch.testing.assert_close(got.geometric_ratio_B.tolist(), [1.0, 4.0, 1.0])
    # log rho: 1, -1, 2 in units of log 2. k3: 2-1-L, 1/2-1+L, 4-1-2L with L = log 2.
    torch.testing.assert_close(got.kl_k1.item(), -2 * log2 / 3)
    torch.testing.assert_close(got.kl_k3.item(), (3.5 - 2 * log2) / 3)
    # Sum of rho 6.5, of its square 20.25.
    torch.testing.assert_close(got.chi2.item(), 20.25 / 3 - 1)
    torch.testing.assert_close(got.effective_tokens.item(), 6.5**2 / 20.25)


def test_mismatch_of_equal_and_of_no_tokens() -> None:
    logp_BT = torch.tensor([[-1.25, -0.5]])
    same = mismatch.mismatch(logp_BT, logp_BT, mask_BT=torch.ones(1, 2).bool())
    assert (same.kl_k1.item(), same.kl_k3.item(), same.chi2.item()) == (0.0, 0.0, 0.0)
    assert same.effective_tokens.item() == 2.0
    none = mismatch.mismatch(logp_BT, logp_BT, mask_BT=torch.zeros(1, 2).bool())
    assert none.kl_k1.isnan() and none.effective_tokens.isnan() and none.chi2.isnan()


def test_entropy_bonus() -> None:
    entropy_BT = torch.tensor([[2.0, NAN]], requires_grad=True)
    got = terms.entropy_bonus(entropy_BT, mask_BT=torch.tensor([[True, False]]))
    assert got.tolist() == [[-2.0, 0.0]]
    got.sum().backward()
    assert entropy_BT.grad.tolist() == [[-1.0, 0.0]]
