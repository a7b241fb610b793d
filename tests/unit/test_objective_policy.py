"""Policy losses and KL estimates per token: hand numbers, gates, and what lies under a mask."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from surefoot.errors import SurefootError
from surefoot.objective import kl, policy

NAN = float("nan")


def row(*values: float, grad: bool = False) -> Tensor:
    return torch.tensor([values], dtype=torch.float64, requires_grad=grad)


def every(tensor_BT: Tensor) -> Tensor:
    return torch.ones_like(tensor_BT).bool()


def gate(
    ratios: list[float],
    advantage: float,
    *,
    low: float = 0.2,
    high: float = 0.3,
    dual: float | None = None,
    cap: float | None = None,
) -> tuple[policy.Clipped, list[float], list[float]]:
    """The clipped loss at given ratios: result, per-token values and d loss / d log r."""
    log_BT = row(*[math.log(ratio) for ratio in ratios], grad=True)
    got = policy.clipped(
        log_BT,
        advantage_BT=torch.full_like(log_BT, advantage),
        mask_BT=every(log_BT),
        low=low,
        high=high,
        dual=dual,
        cap=cap,
    )
    (grad_BT,) = torch.autograd.grad(got.per_token_BT.sum(), log_BT)
    return got, got.per_token_BT[0].tolist(), grad_BT[0].tolist()


@pytest.mark.fault(15)
def test_log_ratio_is_limited_and_counted() -> None:
    logp_BT = row(-1.0, -30.0, -1.0, NAN, grad=True)
    old_BT = row(-1.5, -1.0, -50.0, NAN)
    mask_BT = torch.tensor([[True, True, True, False]])
    got, count = policy.log_ratio(logp_BT, old_BT, mask_BT=mask_BT)
    assert got.tolist() == [[0.5, -20.0, 20.0, 0.0]]
    assert count.item() == 2
    got.sum().backward()
    assert logp_BT.grad.tolist() == [[1.0, 0.0, 0.0, 0.0]]
    assert torch.isfinite(got.float().exp().square()).all()


def test_log_ratio_at_unchanged_weights_is_exactly_zero() -> None:
    logp_BT = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    got, count = policy.log_ratio(logp_BT, logp_BT.clone(), mask_BT=every(logp_BT))
    assert torch.equal(got, torch.zeros(3, 4))
    assert count.item() == 0


@pytest.mark.fault(12)
def test_log_ratio_does_not_hide_nan_at_a_valid_token() -> None:
    got, _ = policy.log_ratio(row(NAN), row(-1.0), mask_BT=torch.tensor([[True]]))
    assert got.isnan().all()


def test_clip_stops_only_the_way_the_advantage_pushes() -> None:
    ratios = [0.5, 0.9, 1.2, 2.0]
    # A = 2, bounds 0.8 and 1.3: only the last is stopped, at 1.3.
    got, value, grad = gate(ratios, 2.0)
    torch.testing.assert_close(value, [-1.0, -1.8, -2.4, -2.6])
    torch.testing.assert_close(grad, [-1.0, -1.8, -2.4, 0.0])
    assert got.is_high_BT.tolist() == [[False, False, False, True]]
    assert not got.is_low_BT.any() and not got.is_capped_BT.any()
    # A = -2: only the first is stopped, at 0.8.
    got, value, grad = gate(ratios, -2.0)
    torch.testing.assert_close(value, [1.6, 1.8, 2.4, 4.0])
    torch.testing.assert_close(grad, [0.0, 1.8, 2.4, 4.0])
    assert got.is_low_BT.tolist() == [[True, False, False, False]]
    assert not got.is_high_BT.any() and not got.is_capped_BT.any()


def test_dual_clip_bounds_the_loss_of_a_bad_token() -> None:
    # A = -2, c = 3: max(rA, 3A) means r is held at 3.
    got, value, grad = gate([0.5, 2.0, 4.0], -2.0, dual=3.0)
    torch.testing.assert_close(value, [1.6, 4.0, 6.0])
    torch.testing.assert_close(grad, [0.0, 4.0, 0.0])
    assert got.is_capped_BT.tolist() == [[False, False, True]]
    # A > 0 is not touched by it.
    _, value, _ = gate([0.5, 2.0, 4.0], 2.0, dual=3.0)
    torch.testing.assert_close(value, [-1.0, -2.6, -2.6])


def test_two_sided_cap() -> None:
    # A = -2, cap 4: r is held at 4. With a cap 1.1 below 1 + high = 1.3 the minimum of
    # min(r, 1.1) A and clip(r) A is the larger ratio: up to 1.3.
    _, value, grad = gate([2.0, 5.0], -2.0, cap=4.0)
    torch.testing.assert_close(value, [4.0, 8.0])
    torch.testing.assert_close(grad, [4.0, 0.0])
    _, value, grad = gate([1.2, 5.0], -2.0, cap=1.1)
    torch.testing.assert_close(value, [2.4, 2.6])
    torch.testing.assert_close(grad, [2.4, 0.0])
    # A = 2, cap 1.1: the smaller of 1.1 and 1.3 holds.
    got, value, grad = gate([1.05, 1.2], 2.0, cap=1.1)
    torch.testing.assert_close(value, [-2.1, -2.2])
    torch.testing.assert_close(grad, [-2.1, 0.0])
    assert got.is_high_BT.tolist() == [[False, True]]
    # Both: the smaller of 4 and 3.
    _, value, _ = gate([5.0], -2.0, cap=4.0, dual=3.0)
    torch.testing.assert_close(value, [6.0])


@pytest.mark.parametrize("dual", [None, 3.0])
@pytest.mark.parametrize("cap", [None, 1.1, 4.0])
@pytest.mark.parametrize("advantage", [-2.0, 0.0, 0.5])
def test_clipped_is_the_formula_of_the_papers(
    advantage: float, cap: float | None, dual: float | None
) -> None:
    ratios = [0.01, 0.79, 0.81, 1.0, 1.09, 1.11, 1.29, 1.31, 2.9, 3.1, 3.9, 4.1, 50.0]
    got, value, grad = gate(ratios, advantage, cap=cap, dual=dual)
    for ratio, loss in zip(ratios, value, strict=True):
        inner = ratio if cap is None else min(ratio, cap)
        want = min(inner * advantage, min(max(ratio, 0.8), 1.3) * advantage)
        if advantage < 0 and dual is not None:
            want = max(want, dual * advantage)
        assert loss == pytest.approx(-want, rel=1e-12)
    removed_BT = got.is_low_BT | got.is_high_BT | got.is_capped_BT
    if advantage != 0:
        assert removed_BT[0].tolist() == [slope == 0.0 for slope in grad]
    else:
        assert not removed_BT.any()


def test_at_ratio_one_every_policy_loss_has_the_same_gradient() -> None:
    logp_BT = row(-1.0, -2.0, grad=True)
    advantage_BT = row(0.75, -0.5)
    ratio_BT, _ = policy.log_ratio(logp_BT, logp_BT.detach(), mask_BT=every(logp_BT))
    arguments = {"advantage_BT": advantage_BT, "mask_BT": every(logp_BT)}
    bounds = {"low": 0.0, "high": 0.0, "dual": None, "cap": None}
    for loss_BT in (
        policy.reinforce(logp_BT, **arguments),
        policy.unclipped(ratio_BT, **arguments),
        policy.clipped(ratio_BT, **arguments, **bounds).per_token_BT,
    ):
        (grad_BT,) = torch.autograd.grad(loss_BT.sum(), logp_BT, retain_graph=True)
        assert grad_BT.tolist() == [[-0.75, 0.5]]


def test_reinforce_and_unclipped_hand_numbers() -> None:
    logp_BT = row(-2.0, -3.0)
    got = policy.reinforce(logp_BT, advantage_BT=row(0.5, -1.0), mask_BT=every(logp_BT))
    assert got.tolist() == [[1.0, -3.0]]
    log_BT = row(math.log(2.0), math.log(5.0))
    got = policy.unclipped(log_BT, advantage_BT=row(0.5, -1.0), mask_BT=every(log_BT))
    torch.testing.assert_close(got, row(-1.0, 5.0))


@pytest.mark.parametrize(
    "bad", [{"low": -0.1}, {"high": -0.1}, {"dual": 1.0}, {"cap": 0.5}], ids=str
)
def test_impossible_bounds_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(SurefootError, match=next(iter(bad))):
        gate([1.0], 1.0, **bad)


def test_kl_hand_numbers() -> None:
    # d = log 2 and -log 2.
    log2 = math.log(2.0)
    logp_BT, ref_BT = row(-1.0, -1.0, grad=True), row(-1.0 - log2, -1.0 + log2)
    mask_BT = every(ref_BT)
    for name, value, slope in (
        ("k1", [log2, -log2], [1.0, 1.0]),
        ("k2", [log2**2 / 2, log2**2 / 2], [log2, -log2]),
        ("k3", [0.5 - 1 + log2, 2 - 1 - log2], [0.5, -1.0]),
    ):
        got = kl.estimate(name, logp_BT, ref_BT, mask_BT=mask_BT)
        torch.testing.assert_close(got, row(*value))
        (grad_BT,) = torch.autograd.grad(got.sum(), logp_BT)
        torch.testing.assert_close(grad_BT, row(*slope))
    # With r = 4: value 4 k3, gradient r k3 + r k3' = 4 (value + slope).
    old_BT = row(-1.0 - 2 * log2, -1.0 - 2 * log2)
    got = kl.estimate("k3_ratio", logp_BT, ref_BT, mask_BT=mask_BT, old_logp_BT=old_BT)
    torch.testing.assert_close(got, row(4 * (log2 - 0.5), 4 * (1 - log2)))
    (grad_BT,) = torch.autograd.grad(got.sum(), logp_BT)
    torch.testing.assert_close(grad_BT, row(4 * log2, -4 * log2))


def test_kl_to_itself_is_exactly_zero_and_k3_is_never_negative() -> None:
    logp_BT = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    for name in kl.ESTIMATORS:
        got = kl.estimate(name, logp_BT, logp_BT, mask_BT=every(logp_BT), old_logp_BT=logp_BT)
        assert torch.equal(got, torch.zeros(4, 5))
    # In float32 exp(-d) - 1 + d at d = 1e-4 would be 0 or 6e-8; it is 5e-9.
    small_BT = torch.tensor([[1e-4, -1e-4, 1e-6]])
    got = kl.k3(small_BT, torch.zeros(1, 3), mask_BT=every(small_BT))
    torch.testing.assert_close(got[0].tolist(), [5e-9, 5e-9, 5e-13], rtol=1e-4, atol=0.0)


def test_sequence_kl_sums_the_valid_tokens() -> None:
    mask_BT = torch.tensor([[True, False, True], [False, False, False]])
    logp_BT = torch.tensor([[-1.0, NAN, -2.0], [NAN, NAN, NAN]])
    ref_BT = torch.tensor([[-1.5, NAN, -1.75], [NAN, NAN, NAN]])
    got = kl.sequence_kl(logp_BT, ref_BT, mask_BT=mask_BT)
    assert got.tolist() == [0.25, 0.0]


def test_unknown_estimators_and_missing_old_log_probs_are_refused() -> None:
    one_BT = row(-1.0)
    with pytest.raises(SurefootError, match="k4"):
        kl.estimate("k4", one_BT, one_BT, mask_BT=every(one_BT))  # type: ignore[arg-type]
    with pytest.raises(SurefootError, match="old_logp_BT"):
        kl.estimate("k3_ratio", one_BT, one_BT, mask_BT=every(one_BT))


def reinforce(logp: Tensor, other: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    return policy.reinforce(logp, advantage_BT=advantage, mask_BT=mask)


def clip(logp: Tensor, other: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    log_BT, _ = policy.log_ratio(logp, other, mask_BT=mask)
    bounds = {"low": 0.2, "high": 0.2, "dual": 3.0, "cap": 4.0}
    return policy.clipped(log_BT, advantage_BT=advantage, mask_BT=mask, **bounds).per_token_BT


def clip_raw(logp: Tensor, other: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    bounds = {"low": 0.2, "high": 0.2, "dual": None, "cap": None}
    return policy.clipped(logp - other, advantage_BT=advantage, mask_BT=mask, **bounds).per_token_BT


def free(logp: Tensor, other: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    return policy.unclipped(logp - other, advantage_BT=advantage, mask_BT=mask)


def estimator(name: kl.Estimator) -> Callable[..., Tensor]:
    def per_token(logp: Tensor, other: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
        return kl.estimate(name, logp, other, mask_BT=mask, old_logp_BT=advantage)

    return per_token


@pytest.mark.fault(14)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("junk", [NAN, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize(
    "per_token", [reinforce, clip, clip_raw, free, *map(estimator, kl.ESTIMATORS)]
)
def test_what_lies_under_a_mask_stays_there(
    per_token: Callable[..., Tensor], junk: float, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(3, 4, 6, generator=generator, dtype=dtype)
    mask_BT = torch.rand(4, 6, generator=generator) < 0.6
    mask_BT[2] = False

    def run(given: Tensor) -> tuple[Tensor, Tensor]:
        logp_BT = given[0].clone().requires_grad_()
        loss_BT = per_token(logp_BT, given[1], given[2], mask_BT)
        (grad_BT,) = torch.autograd.grad(loss_BT.sum(), logp_BT)
        return loss_BT.detach(), grad_BT

    want_BT, want_grad_BT = run(inputs)
    got_BT, got_grad_BT = run(torch.where(mask_BT, inputs, junk))
    assert got_BT.dtype == dtype
    assert torch.equal(got_BT, want_BT) and torch.equal(got_grad_BT, want_grad_BT)
    nothing = torch.zeros(int((~mask_BT).sum()), dtype=dtype)
    assert torch.equal(got_BT[~mask_BT], nothing)
    assert torch.equal(got_grad_BT[~mask_BT], nothing)
    assert want_grad_BT[mask_BT].abs().sum() > 0


def test_the_other_inputs_carry_no_gradient() -> None:
    logp_BT, other_BT, advantage_BT = (row(x, grad=True) for x in (-1.0, -1.1, 0.5))
    mask_BT = every(logp_BT)
    for per_token in (reinforce, clip, *map(estimator, kl.ESTIMATORS)):
        loss = per_token(logp_BT, other_BT, advantage_BT, mask_BT).sum()
        grads = torch.autograd.grad(loss, [other_BT, advantage_BT], allow_unused=True)
        assert grads == (None, None)
