"""Reductions as token weights: hand numbers, absent and gated rows, and any split of a step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surefoot.errors import SurefootError
from surefoot.objective import reduce

NAN = float("nan")
# Lengths 2, 1, 0, 3; groups a a b b.
MASK_BT = torch.tensor([[1, 0, 1], [0, 1, 0], [0, 0, 0], [1, 1, 1]]).bool()
GROUP_B = torch.tensor([7, 7, 3, 3])
EVERY_B = torch.ones(4).bool()
CONSTANT = 8.0


def whole(kind: str, mask_BT: Tensor, present_B: Tensor, group_B: Tensor) -> tuple[Tensor, Tensor]:
    """Denominator of a step, and the group lengths of its rows."""
    length_B = reduce.lengths(mask_BT)
    total = reduce.denominator(
        kind, length_B=length_B, present_B=present_B, group_B=group_B, constant=CONSTANT
    )
    return total, reduce.group_lengths(length_B, present_B=present_B, group_B=group_B)


def weigh(
    kind: str, mask_BT: Tensor = MASK_BT, present_B: Tensor = EVERY_B, group_B: Tensor = GROUP_B
) -> Tensor:
    total, group_length_B = whole(kind, mask_BT, present_B, group_B)
    return reduce.token_weights(
        kind,
        mask_BT=mask_BT,
        present_B=present_B,
        denominator=total,
        group_length_B=group_length_B,
    )


def per_row(weight_BT: Tensor) -> list[float]:
    return weight_BT.amax(1).tolist()


# Six tokens, four rows; groups of 3 and 3 tokens.
@pytest.mark.parametrize(
    ("kind", "want"),
    [
        ("token_mean", [1 / 6, 1 / 6, 0, 1 / 6]),
        ("sequence_mean", [1 / 8, 1 / 4, 0, 1 / 12]),
        ("sequence_sum", [1 / 4, 1 / 4, 0, 1 / 4]),
        ("constant", [1 / 32, 1 / 32, 0, 1 / 32]),
        ("prompt_mean", [1 / 6, 1 / 6, 0, 1 / 6]),
    ],
)
def test_weights_by_hand(kind: str, want: list[float]) -> None:
    weight_BT = weigh(kind)
    assert weight_BT.dtype == torch.float64
    assert per_row(weight_BT) == pytest.approx(want, rel=1e-12)
    assert torch.equal(weight_BT > 0, MASK_BT)


# Row 3 absent: three tokens; three rows, of which row 2 is present and empty; group b is empty.
@pytest.mark.parametrize(
    ("kind", "want"),
    [
        ("token_mean", [1 / 3, 1 / 3, 0, 0]),
        ("sequence_mean", [1 / 6, 1 / 3, 0, 0]),
        ("sequence_sum", [1 / 3, 1 / 3, 0, 0]),
        ("constant", [1 / 24, 1 / 24, 0, 0]),
        ("prompt_mean", [1 / 3, 1 / 3, 0, 0]),
    ],
)
def test_an_absent_row_is_nowhere_and_an_empty_one_counts(kind: str, want: list[float]) -> None:
    present_B = torch.tensor([True, True, True, False])
    assert per_row(weigh(kind, present_B=present_B)) == pytest.approx(want, rel=1e-12)
    kept = torch.tensor([0, 1, 2])
    alone_BT = weigh(kind, MASK_BT[kept], EVERY_B[kept], GROUP_B[kept])
    assert torch.equal(weigh(kind, present_B=present_B)[kept], alone_BT)


def test_prompt_mean_is_a_mean_of_group_means() -> None:
    # Group 7: tokens 1 3 5, mean 3. Group 3: tokens 10 10 40, mean 20. Mean of both 11.5.
    loss_BT = torch.tensor([[1.0, NAN, 3.0], [NAN, 5.0, NAN], [NAN] * 3, [10.0, 10.0, 40.0]])
    assert reduce.weighted_sum(loss_BT, weigh("prompt_mean")).item() == pytest.approx(11.5)
    # Without row 1: (1 + 3)/2 = 2 and 20.
    present_B = torch.tensor([True, False, True, True])
    got = reduce.weighted_sum(loss_BT, weigh("prompt_mean", present_B=present_B))
    assert got.item() == pytest.approx(11.0)


@pytest.mark.parametrize("kind", reduce.KINDS)
@pytest.mark.parametrize("split", [[[0], [1], [2], [3]], [[3, 0], [2, 1]], [[1, 2, 3], [], [0]]])
def test_a_micro_batch_has_the_rows_of_the_whole(kind: str, split: list[list[int]]) -> None:
    present_B = torch.tensor([True, True, True, True])
    total, group_length_B = whole(kind, MASK_BT, present_B, GROUP_B)
    weight_BT = weigh(kind)
    for rows in split:
        place = torch.tensor(rows, dtype=torch.int64)
        part_bT = reduce.token_weights(
            kind,
            mask_BT=MASK_BT[place],
            present_B=present_B[place],
            denominator=total,
            group_length_B=group_length_B[place],
        )
        assert torch.equal(part_bT, weight_BT[place])


@pytest.mark.parametrize("kind", reduce.KINDS)
def test_padding_and_order_of_rows_do_not_matter(kind: str) -> None:
    weight_BT = weigh(kind)
    padded_BT = torch.cat([torch.zeros(4, 2).bool(), MASK_BT, torch.zeros(4, 3).bool()], dim=1)
    assert torch.equal(weigh(kind, padded_BT)[:, 2:5], weight_BT)
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(weigh(kind, MASK_BT[order], EVERY_B, GROUP_B[order]), weight_BT[order])


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean", "prompt_mean"])
def test_means_weigh_one_in_all_where_no_row_is_empty(kind: str) -> None:
    kept = torch.tensor([0, 1, 3])
    weight_BT = weigh(kind, MASK_BT[kept], EVERY_B[kept], GROUP_B[kept])
    assert weight_BT.sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize("kind", reduce.KINDS)
def test_nothing_present_weighs_nothing(kind: str) -> None:
    assert torch.equal(weigh(kind, present_B=~EVERY_B), torch.zeros(4, 3).double())
    empty_BT = torch.zeros_like(MASK_BT)
    weight_BT = weigh(kind, empty_BT)
    assert torch.equal(weight_BT, torch.zeros(4, 3).double())
    assert reduce.weighted_sum(torch.full((4, 3), NAN), weight_BT).item() == 0.0


@pytest.mark.parametrize("kind", reduce.KINDS)
def test_nan_at_uncounted_tokens_is_not_looked_at(kind: str) -> None:
    present_B = torch.tensor([True, False, True, True])
    weight_BT = weigh(kind, present_B=present_B)
    counted_BT = MASK_BT & present_B[:, None]
    loss_BT = torch.where(counted_BT, 2.0, NAN).requires_grad_()
    loss = reduce.weighted_sum(loss_BT, weight_BT)
    assert loss.item() == pytest.approx(2.0 * weight_BT.sum().item())
    loss.backward()
    assert torch.equal(loss_BT.grad, weight_BT.float())


def test_weighted_sum_adds_in_float64() -> None:
    loss_BT = torch.tensor([[2.0**24, 1.0, 1.0]])
    assert reduce.weighted_sum(loss_BT, torch.ones(1, 3).double()).item() == 2.0**24 + 2


def test_lengths_and_denominators() -> None:
    length_B = reduce.lengths(MASK_BT)
    assert length_B.tolist() == [2, 1, 0, 3]
    found = [whole(kind, MASK_BT, EVERY_B, GROUP_B)[0].item() for kind in reduce.KINDS]
    assert found == [6.0, 4.0, 4.0, 32.0, 2.0]
    assert whole("prompt_mean", MASK_BT, EVERY_B, GROUP_B)[1].tolist() == [3, 3, 3, 3]


def test_wrong_uses_are_refused() -> None:
    length_B, total = reduce.lengths(MASK_BT), torch.tensor(1.0)
    with pytest.raises(SurefootError, match="group_B"):
        reduce.denominator("prompt_mean", length_B=length_B, present_B=EVERY_B)
    with pytest.raises(SurefootError, match="constant"):
        reduce.denominator("constant", length_B=length_B, present_B=EVERY_B)
    with pytest.raises(SurefootError, match="group_lengths"):
        reduce.token_weights("prompt_mean", mask_BT=MASK_BT, present_B=EVERY_B, denominator=total)
    with pytest.raises(SurefootError, match="mean_of_means"):
        reduce.denominator("mean_of_means", length_B=length_B, present_B=EVERY_B)  # type: ignore[arg-type]
    with pytest.raises(SurefootError, match="Axis B"):
        reduce.token_weights(
            "token_mean", mask_BT=MASK_BT, present_B=EVERY_B[:2], denominator=total
        )
