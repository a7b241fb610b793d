"""Values: advantages with their ends, the critic's loss and its health; hand numbers and laws."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from surefoot.errors import SurefootError
from surefoot.objective import credit, reduce, value

NAN = float("nan")
# Row 0: a gap inside. Row 1: padding on either side. Row 2: nothing.
MASK_BT = torch.tensor([[1, 0, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0]]).bool()
REWARD_BT = torch.tensor([[1.0, NAN, 2.0, 4.0], [NAN, NAN, 3.0, NAN], [NAN] * 4])
VALUE_BT = torch.tensor([[2.0, NAN, 4.0, 8.0], [NAN, NAN, 1.0, NAN], [NAN] * 4])


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def row(*values: float, grad: bool = False) -> Tensor:
    return torch.tensor([values], dtype=torch.float64, requires_grad=grad)


def every(tensor_BT: Tensor) -> Tensor:
    return torch.ones_like(tensor_BT).bool()


def estimate(
    reward_BT: Tensor,
    value_BT: Tensor,
    *,
    lam: Sequence[float],
    critic_lam: Sequence[float] | None = None,
    bootstrap: Sequence[float] | None = None,
    mask_BT: Tensor | None = None,
    gamma: float = 1.0,
) -> value.Estimated:
    return value.gae(
        reward_BT,
        value_BT,
        mask_BT=every(value_BT) if mask_BT is None else mask_BT,
        gamma=gamma,
        lam_B=double(*lam),
        critic_lam_B=double(*(lam if critic_lam is None else critic_lam)),
        bootstrap_B=double(*([0.0] * len(lam) if bootstrap is None else bootstrap)),
    )


def some(rows: int, tokens: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, tokens, generator=generator, dtype=torch.float64)


def test_gae_hand_numbers() -> None:
    # gamma = lam = 1/2. delta: 4 + 16/2 - 8 = 4, 2 + 8/2 - 4 = 2, 1 + 4/2 - 2 = 1.
    # A = delta + A_next/4: 4; 2 + 1 = 3; 1 + 3/4.
    got = estimate(
        REWARD_BT,
        VALUE_BT,
        mask_BT=MASK_BT,
        gamma=0.5,
        lam=[0.5] * 3,
        critic_lam=[1.0] * 3,
        bootstrap=[16.0, 0.0, NAN],
    )
    assert got.advantage_BT.tolist() == [[1.75, 0, 3, 4], [0, 0, 2, 0], [0] * 4]
    # The critic's lambda is 1: 4 + 16/2 = 12, 2 + 12/2 = 8, 1 + 8/2 = 5.
    assert got.return_BT.tolist() == [[5, 0, 8, 12], [0, 0, 3, 0], [0] * 4]
    assert got.advantage_BT.dtype == got.return_BT.dtype == torch.float64


def test_gae_ends_and_a_lambda_of_each_row() -> None:
    rewards_BT = REWARD_BT[:1, [0, 2, 3]].expand(3, 3)
    values_BT = VALUE_BT[:1, [0, 2, 3]].expand(3, 3)
    got = estimate(rewards_BT, values_BT, gamma=0.5, lam=[0.0, 0.5, 1.0], bootstrap=[16.0] * 3)
    # The deltas themselves; as above; 5 - 2, 8 - 4, 12 - 8.
    assert got.advantage_BT.tolist() == [[1, 2, 4], [1.75, 3, 4], [3, 4, 4]]
    # Advantages plus values.
    assert got.return_BT.tolist() == [[3, 6, 12], [3.75, 7, 12], [5, 8, 12]]


def test_a_truncated_completion_is_bootstrapped_or_ends() -> None:
    reward_BT = torch.zeros(2, 2)
    value_BT = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    got = estimate(reward_BT, value_BT, lam=[0.5, 0.5], bootstrap=[0.5, 0.0])
    # Cut off and worth 1/2 still: nothing was lost. Ended without reward: -1/2, and half of it.
    assert got.advantage_BT.tolist() == [[0, 0], [-0.25, -0.5]]
    assert got.return_BT.tolist() == [[0.5, 0.5], [0.25, 0.0]]


def test_gae_is_the_discounted_sum_of_td_errors() -> None:
    reward_BT, value_BT = some(3, 6, seed=0), some(3, 6, seed=1)
    lams, ends, gamma = [0.3, 0.95, 1.0], [0.5, 0.0, -2.0], 0.9
    got = estimate(reward_BT, value_BT, lam=lams, bootstrap=ends, gamma=gamma)
    for i, (lam, end) in enumerate(zip(lams, ends, strict=True)):
        rewards, values = reward_BT[i].tolist(), [*value_BT[i].tolist(), end]
        delta = [r + gamma * values[t + 1] - values[t] for t, r in enumerate(rewards)]
        want = [sum((gamma * lam) ** (s - t) * delta[s] for s in range(t, 6)) for t in range(6)]
        torch.testing.assert_close(got.advantage_BT[i], double(*want))


def test_lambda_1_is_the_reward_to_go_exactly_whatever_the_critic_says() -> None:
    mask_BT = some(5, 7, seed=2) > -0.5
    reward_BT, value_BT = some(5, 7, seed=3), some(5, 7, seed=4)
    for gamma in (1.0, 0.9):
        want_BT = credit.reward_to_go(reward_BT, mask_BT=mask_BT, gamma=gamma)
        blank = estimate(reward_BT, 0 * value_BT, lam=[1.0] * 5, mask_BT=mask_BT, gamma=gamma)
        assert torch.equal(blank.advantage_BT, want_BT)
        got = estimate(reward_BT, value_BT, lam=[1.0] * 5, mask_BT=mask_BT, gamma=gamma)
        assert torch.equal(got.return_BT, want_BT)
        assert torch.equal(got.advantage_BT, torch.where(mask_BT, want_BT - value_BT, 0.0))


def test_lambda_0_is_the_one_step_td_error_exactly() -> None:
    reward_BT, value_BT = some(4, 6, seed=5), some(4, 6, seed=6)
    got = estimate(reward_BT, value_BT, lam=[0.0] * 4, bootstrap=[0.25] * 4, gamma=0.9)
    next_BT = torch.cat([value_BT[:, 1:], torch.full((4, 1), 0.25).double()], 1)
    assert torch.equal(got.return_BT, reward_BT + 0.9 * next_BT)
    assert torch.equal(got.advantage_BT, reward_BT + 0.9 * next_BT - value_BT)


def test_a_constant_added_to_every_value() -> None:
    reward_BT, value_BT = some(2, 5, seed=7), some(2, 5, seed=8)
    plain = estimate(reward_BT, value_BT, lam=[0.5, 1.0])
    moved = estimate(reward_BT, value_BT + 8, lam=[0.5, 1.0], bootstrap=[8.0, 8.0])
    torch.testing.assert_close(moved.advantage_BT, plain.advantage_BT)
    torch.testing.assert_close(moved.return_BT, plain.return_BT + 8)
    # Without a bootstrap only the last TD error moves, by -8, and reaches back as lam^distance.
    ended = estimate(reward_BT, value_BT + 8, lam=[0.5, 1.0])
    shift_BT = torch.tensor([[-0.5, -1, -2, -4, -8], [-8.0] * 5]).double()
    torch.testing.assert_close(ended.advantage_BT, plain.advantage_BT + shift_BT)
    # With gamma 1/2 every TD error moves by 8/2 - 8 = -4; lam 1/2: -4 (1 + 1/4 + 1/16 + ...).
    half = estimate(reward_BT, value_BT, lam=[0.5, 0.5], gamma=0.5)
    low = estimate(reward_BT, value_BT + 8, lam=[0.5, 0.5], bootstrap=[8.0, 8.0], gamma=0.5)
    want = double(-5.328125, -5.3125, -5.25, -5.0, -4.0).expand(2, 5)
    torch.testing.assert_close(low.advantage_BT - half.advantage_BT, want)


def test_rows_stand_alone_however_they_are_padded() -> None:
    # A gap and padding at both ends, a gap and padding, neither, no valid token.
    mask_BT = torch.tensor([[0, 1, 1, 0, 1, 0], [1, 0, 0, 1, 0, 0], [1] * 6, [0] * 6]).bool()
    reward_BT, value_BT = some(4, 6, seed=9), some(4, 6, seed=10)
    lams, critic_lams, ends = [0.2, 0.9, 0.5, 1.0], [1.0, 0.0, 0.7, 0.5], [0.0, 3.0, 0.5, 9.0]
    kinds = {"lam": lams, "critic_lam": critic_lams, "bootstrap": ends}
    whole = estimate(reward_BT, value_BT, mask_BT=mask_BT, gamma=0.9, **kinds)
    for i, valid_T in enumerate(mask_BT):
        one = {name: given[i : i + 1] for name, given in kinds.items()}
        rewards, values = reward_BT[i, valid_T], value_BT[i, valid_T]
        alone = estimate(rewards[None], values[None], gamma=0.9, **one)
        assert torch.equal(whole.advantage_BT[i, valid_T], alone.advantage_BT[0])
        assert torch.equal(whole.return_BT[i, valid_T], alone.return_BT[0])
    assert not whole.advantage_BT[~mask_BT].any() and not whole.return_BT[~mask_BT].any()
    for poison in (NAN, math.inf, -1e30):
        dirty = estimate(
            torch.where(mask_BT, reward_BT, poison),
            torch.where(mask_BT, value_BT, poison),
            mask_BT=mask_BT,
            gamma=0.9,
            **{**kinds, "bootstrap": [*ends[:3], poison]},
        )
        assert torch.equal(dirty.advantage_BT, whole.advantage_BT)
        assert torch.equal(dirty.return_BT, whole.return_BT)


def test_gae_of_no_tokens_in_float32_and_of_nan() -> None:
    none = estimate(torch.zeros(2, 0), torch.zeros(2, 0), lam=[0.5, 0.5])
    assert none.advantage_BT.shape == none.return_BT.shape == (2, 0)
    # 2^24 + 1 + 1 is lost in float32 sums, one at a time.
    got = estimate(torch.tensor([[1.0, 1.0, 2.0**24]]), torch.zeros(1, 3), lam=[1.0])
    assert got.return_BT[0, 0].item() == 2.0**24 + 2
    broken = estimate(row(0.0, 1.0), row(0.5, NAN, grad=True), lam=[0.9])
    assert broken.advantage_BT.isnan().all()
    assert not broken.advantage_BT.requires_grad and not broken.return_BT.requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lam": [0.5, 1.25]}, r"lam_B is 1.25 in row 1"),
        ({"lam": [NAN, 0.5]}, r"lam_B is nan in row 0"),
        ({"critic_lam": [-0.5, 0.5]}, r"critic_lam_B is -0.5 in row 0"),
        ({"gamma": 1.5}, "gamma"),
        ({"gamma": NAN}, "gamma"),
        ({"bootstrap": [0.0]}, "shapes do not fit"),
        ({"mask_BT": torch.ones(2, 3)}, "torch.bool"),
    ],
)
def test_gae_refuses(change: dict, message: str) -> None:
    with pytest.raises(SurefootError, match=message):
        estimate(torch.zeros(2, 3), torch.zeros(2, 3), **({"lam": [0.5, 0.5]} | change))


def test_length_adaptive_lambda() -> None:
    # alpha 1/2: 1 - 2/l.
    length_B = torch.tensor([0, 1, 2, 4, 8])
    raw_B = value.raw_length_lambda(length_B, alpha=0.5)
    assert raw_B.tolist() == [-math.inf, -1.0, 0.0, 0.5, 0.75]
    lam_B = value.length_adaptive_lambda(length_B, alpha=0.5)
    assert lam_B.tolist() == [0.0, 0.0, 0.0, 0.5, 0.75]
    assert lam_B.dtype == torch.float64
    for alpha in (0.0, -1.0, NAN):
        with pytest.raises(SurefootError, match="alpha"):
            value.length_adaptive_lambda(length_B, alpha=alpha)


def test_value_loss_is_clipped_only_on_the_way_to_the_return() -> None:
    # Old value, value, return with a clip of 1/2: past the range towards R; past it away from R;
    # inside; on the bound; through R and out again; as far from R as the bound is.
    old_BT = row(1.0, 1.0, 1.0, 1.0, 1.0, 0.5)
    value_BT = row(2.0, 2.0, 1.25, 1.5, 3.0, 2.0, grad=True)
    return_BT = row(3.0, 0.0, 3.0, 3.0, 2.0, 1.5)
    got = value.value_loss(value_BT, old_BT, return_BT, mask_BT=every(old_BT), clip=0.5)
    # The first: (1.5 - 3)^2 / 2. The others: (V - R)^2 / 2.
    assert got.per_token_BT.tolist() == [[1.125, 2.0, 1.53125, 1.125, 0.5, 0.125]]
    assert got.is_clipped_BT.tolist() == [[True, False, False, False, False, False]]
    (grad_BT,) = torch.autograd.grad(got.per_token_BT.sum(), value_BT)
    assert grad_BT.tolist() == [[0.0, 2.0, -1.75, -1.5, 1.0, 0.5]]
    plain = value.value_loss(value_BT, old_BT, return_BT, mask_BT=every(old_BT), clip=None)
    assert plain.per_token_BT.tolist() == [[0.5, 2.0, 1.53125, 1.125, 0.5, 0.125]]
    assert not plain.is_clipped_BT.any()
    (grad_BT,) = torch.autograd.grad(plain.per_token_BT.sum(), value_BT)
    assert grad_BT.tolist() == [[-1.0, 2.0, -1.75, -1.5, 1.0, 0.5]]


def test_value_loss_at_unchanged_values_is_the_unclipped_one() -> None:
    value_BT, return_BT = some(3, 5, seed=11).float(), some(3, 5, seed=12)
    mask_BT = every(value_BT)
    got, want = (
        value.value_loss(value_BT, value_BT.clone(), return_BT, mask_BT=mask_BT, clip=clip)
        for clip in (1e-6, None)
    )
    assert torch.equal(got.per_token_BT, want.per_token_BT) and not got.is_clipped_BT.any()
    assert got.per_token_BT.dtype == torch.float32


@pytest.mark.parametrize("clip", [0.5, None])
def test_value_loss_under_a_mask(clip: float | None) -> None:
    mask_BT = torch.tensor([[True, False, True]])
    value_BT, old_BT = row(0.5, NAN, 2.0, grad=True), row(0.5, NAN, 2.0, grad=True)
    return_BT = row(0.0, NAN, 1.0, grad=True)
    got = value.value_loss(value_BT, old_BT, return_BT, mask_BT=mask_BT, clip=clip)
    assert got.per_token_BT.tolist() == [[0.125, 0.0, 0.5]]
    assert not got.is_clipped_BT.any()
    got.per_token_BT.sum().backward()
    assert value_BT.grad.tolist() == [[0.5, 0.0, 1.0]]
    # The targets are constants.
    assert old_BT.grad is None and return_BT.grad is None


def test_value_loss_does_not_hide_nan_and_refuses_no_range() -> None:
    one = {"mask_BT": torch.tensor([[True]]), "clip": 0.5}
    for given in ((NAN, 1.0, 1.0), (1.0, NAN, 1.0), (1.0, 1.0, NAN)):
        assert value.value_loss(*(row(x) for x in given), **one).per_token_BT.isnan().all()
    for clip in (0.0, -0.2, NAN):
        with pytest.raises(SurefootError, match="clip"):
            value.value_loss(row(1.0), row(1.0), row(1.0), mask_BT=one["mask_BT"], clip=clip)


def test_positive_nll_is_the_same_in_any_split_of_the_step() -> None:
    logp_BT = torch.tensor(
        [[-1.0, -2.0, NAN], [NAN, -4.0, -8.0], [-3.0, NAN, NAN]], requires_grad=True
    )
    mask_BT = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]]).bool()
    correct_B = torch.tensor([True, False, True])
    per_token_BT = value.positive_nll(logp_BT, correct_B=correct_B, mask_BT=mask_BT)
    assert per_token_BT.tolist() == [[1, 2, 0], [0, 0, 0], [3, 0, 0]]
    length_B = reduce.lengths(mask_BT)
    tokens = reduce.denominator("token_mean", length_B=length_B, present_B=correct_B)
    assert tokens.item() == 3.0
    losses = []
    for rows in ([0, 1, 2], [0, 1], [2], [1]):
        weight_bT = reduce.token_weights(
            "token_mean", mask_BT=mask_BT[rows], present_B=correct_B[rows], denominator=tokens
        )
        losses.append(reduce.weighted_sum(per_token_BT[rows], weight_bT))
    # (1 + 2 + 3) / 3; a mean of each part's own mean would be (1.5 + 3) / 2.
    assert [loss.item() for loss in losses] == [2.0, 1.0, 1.0, 0.0]
    (grad_BT,) = torch.autograd.grad(losses[1] + losses[2], logp_BT)
    torch.testing.assert_close(-3 * grad_BT, torch.tensor([[1.0, 1, 0], [0, 0, 0], [1, 0, 0]]))


def test_explained_variance() -> None:
    return_BT = row(0.0, 2.0, 4.0)
    mask_BT = every(return_BT)

    def explained(*values: float) -> float:
        return value.explained_variance(row(*values), return_BT, mask_BT=mask_BT).item()

    assert explained(0.0, 2.0, 4.0) == 1.0
    assert explained(2.0, 2.0, 2.0) == 0.0
    # Left over: -1, 1, 0 with variance 2/3, of 8/3.
    assert explained(1.0, 1.0, 4.0) == pytest.approx(0.75)
    # Twice the returns are left over: four times the variance.
    assert explained(0.0, -2.0, -4.0) == pytest.approx(-3.0)
    assert explained(100.0, 102.0, 104.0) == 1.0
    assert math.isnan(explained(0.0, NAN, 4.0))


def test_explained_variance_of_equal_returns_is_undefined() -> None:
    # Their float32 std is 6e-8, which is no spread.
    equal_BT, value_BT = torch.full((1, 8), 0.7), some(1, 8, seed=13)
    assert value.explained_variance(value_BT, equal_BT, mask_BT=every(equal_BT)).isnan()
    assert value.explained_variance(value_BT, value_BT, mask_BT=~every(value_BT)).isnan()
    assert value.explained_variance(row(1.0), row(2.0), mask_BT=every(row(1.0))).isnan()
    # Tiny gaps are gaps.
    tiny_BT = row(0.0, 2e-200, 4e-200)
    near_BT = row(1e-200, 1e-200, 4e-200)
    got = value.explained_variance(near_BT, tiny_BT, mask_BT=every(tiny_BT))
    assert got.item() == pytest.approx(0.75)


def test_value_add_hand_numbers() -> None:
    # Without the others of the group: 0 - 4, 4 - 0, 2 - 6, 6 - 2: variance 16.
    # Without the batch's mean 3: -3, 1, -1, 3: variance 5.
    return_PG = torch.tensor([[0.0, 4.0], [2.0, 6.0]])
    good_PG = torch.tensor([[1.0, 3.0], [2.0, 6.0]])  # leaves -1, 1, 0, 0: variance 1/2
    prompt_PG = torch.tensor([[2.0, 2.0], [4.0, 4.0]])  # leaves -2, 2, -2, 2: variance 4
    constant_PG = torch.full((2, 2), 7.0)
    valid_PG = every(return_PG)

    def added(value_PG: Tensor, against: str) -> float:
        return value.value_add(value_PG, return_PG, valid_PG=valid_PG, against=against).item()

    assert added(good_PG, "leave_one_out") == pytest.approx(0.5 / 16)
    assert added(good_PG, "batch_mean") == pytest.approx(0.5 / 5)
    assert added(prompt_PG, "leave_one_out") == pytest.approx(4 / 16)
    assert added(constant_PG, "batch_mean") == pytest.approx(1.0)
    assert added(-return_PG, "batch_mean") == pytest.approx(4.0)
    assert added(return_PG, "leave_one_out") == 0.0
    with pytest.raises(SurefootError, match="'group'"):
        added(good_PG, "group")


def test_value_add_compares_the_same_samples() -> None:
    # The third prompt has one return: no others to compare with, however wrong the critic is.
    return_PG = torch.tensor([[0.0, 4.0], [2.0, 6.0], [9.0, NAN]])
    value_PG = torch.tensor([[1.0, 3.0], [2.0, 6.0], [100.0, NAN]])
    valid_PG = torch.tensor([[1, 1], [1, 1], [1, 0]]).bool()
    got = value.value_add(value_PG, return_PG, valid_PG=valid_PG, against="leave_one_out")
    assert got.item() == pytest.approx(0.5 / 16)
    # Against the batch it counts: left over -1, 1, 0, 0, -91 beside -4.2, -0.2, -2.2, 1.8, 4.8.
    got = value.value_add(value_PG, return_PG, valid_PG=valid_PG, against="batch_mean")
    assert got.item() == pytest.approx((8283 / 5 - 18.2**2) / (48.8 / 5))
    for against in ("leave_one_out", "batch_mean"):
        dead_PG = torch.full((2, 2), 0.7)
        for valid_PG in (every(dead_PG), ~every(dead_PG)):
            got = value.value_add(dead_PG, dead_PG, valid_PG=valid_PG, against=against)
            assert got.isnan()


def test_bias_by_quartile() -> None:
    # Eight tokens, two a quartile; the returns have std 1. A gap and padding do not count.
    mask_BT = torch.tensor([[0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0]]).bool()
    return_BT, value_BT = torch.full((1, 11), NAN), torch.full((1, 11), NAN)
    return_BT[mask_BT] = torch.tensor([0.0, 0.0, 0.0, 0.0, 2.0, 2.0, 2.0, 2.0])
    error_N = torch.tensor([1.0, 3.0, 0.0, 0.0, -1.0, -1.0, 0.25, 0.75])
    value_BT[mask_BT] = return_BT[mask_BT] + error_N
    # In units of the returns' std: four times everything is the same bias.
    for scale in (1, 4):
        got = value.bias_by_quartile(scale * value_BT, scale * return_BT, mask_BT=mask_BT)
        assert got.tolist() == [2.0, 0.0, -1.0, 0.5]
        assert got.dtype == torch.float64


@pytest.mark.parametrize(
    ("tokens", "quartiles"),
    [(2, [0, 2]), (3, [0, 1, 2]), (4, [0, 1, 2, 3]), (5, [0, 0, 1, 2, 3])],
)
def test_the_quartile_in_a_short_completion(tokens: int, quartiles: list[int]) -> None:
    return_BT = torch.arange(tokens).double()[None]
    for place, quartile in enumerate(quartiles):
        value_BT = return_BT.clone()
        value_BT[0, place] += 1
        bias = value.bias_by_quartile(value_BT, return_BT, mask_BT=every(return_BT)).tolist()
        found = [q for q, number in enumerate(bias) if number > 0]
        assert found == [quartile]
        assert [q for q in range(4) if math.isnan(bias[q])] == sorted({*range(4)} - {*quartiles})


def test_bias_sees_what_explained_variance_cannot() -> None:
    return_BT = torch.tensor([[0.0, 0.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    value_BT, mask_BT = return_BT + 3, every(return_BT)
    assert value.explained_variance(value_BT, return_BT, mask_BT=mask_BT).item() == 1.0
    bias_Q = value.bias_by_quartile(value_BT, return_BT, mask_BT=mask_BT)
    assert bias_Q.tolist() == [3.0] * 4
    equal_BT = torch.full((1, 4), 0.7)
    assert value.bias_by_quartile(value_BT[:1], equal_BT, mask_BT=every(equal_BT)).isnan().all()
    assert value.bias_by_quartile(value_BT, return_BT, mask_BT=~mask_BT).isnan().all()


def test_health_does_not_look_under_masks_or_at_the_order_of_rows() -> None:
    mask_BT = some(6, 9, seed=14) > -0.4
    return_BT = some(6, 9, seed=15)
    value_BT = return_BT + 0.5 * some(6, 9, seed=16)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    for function in (value.explained_variance, value.bias_by_quartile):
        plain = function(value_BT, return_BT, mask_BT=mask_BT)
        assert plain.isfinite().all()
        for poison in (NAN, math.inf, -1e30):
            dirty = [torch.where(mask_BT, given, poison) for given in (value_BT, return_BT)]
            assert torch.equal(function(*dirty, mask_BT=mask_BT), plain)
        turned = function(value_BT[order], return_BT[order], mask_BT=mask_BT[order])
        torch.testing.assert_close(turned, plain)
