"""Our rows and TRL 1.16 on the same batches: TRL's own code, from reward functions to gradients.

What agrees is the table `AGREEMENTS` of docs/trl_facts.py.
"""

from __future__ import annotations

import dataclasses
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from trl_tools import Case, ours, random_case, theirs

from surefoot.objective import batch, group

FACTS = runpy.run_path(str(Path(__file__).resolve().parents[2] / "docs" / "trl_facts.py"))
CASES = range(200)
NEAR: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}


def test_this_is_the_version_that_the_pages_name() -> None:
    assert trl.__version__.startswith("1.16.")


def at_ratio_one(case: Case) -> Case:
    return dataclasses.replace(case, logp_BT=case.old_BT)


def lone(case: Case) -> bool:
    """Whether some group has exactly one sample with a reward."""
    known = torch.tensor([any(x is not None for x in row) for row in case.reward_BK])
    return bool((known.reshape(-1, case.group_size).sum(1) == 1).any())


@pytest.mark.parametrize("agreement", FACTS["AGREEMENTS"], ids=lambda a: a.name)
def test_advantages_loss_and_gradient_agree(agreement: Any) -> None:
    moved = 0
    for seed in CASES:
        case = random_case(seed, micro=not agreement.one_micro)
        if agreement.on_policy:
            case = at_ratio_one(case)
        (want,) = theirs(case, agreement.trainer, agreement.trl)
        got = ours(case, agreement.row, agreement.ours)
        note = f"seed {seed}"
        torch.testing.assert_close(
            got.advantage_B, want.advantage_B, **NEAR, msg=lambda m, n=note: f"{n}: {m}"
        )
        torch.testing.assert_close(got.grad_BT, want.grad_BT, **NEAR)
        if not agreement.on_policy:
            assert got.loss == pytest.approx(want.loss, rel=1e-5, abs=1e-5), note
        moved += bool((want.grad_BT != 0).any())
    assert moved > 150, "most batches must have a gradient, or nothing was compared"


@pytest.mark.parametrize(
    ("trainer", "trl_settings", "name", "changes"),
    [
        ("grpo", {"scale_rewards": "group"}, "grpo", {}),
        ("grpo", {"scale_rewards": "batch"}, "lite_ppo", {}),
        ("grpo", {"scale_rewards": "none"}, "dr_grpo", {}),
        ("rloo", {"beta": 0.05}, "rloo", {"kl": {"coef": 0.05}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_sample_without_any_reward_leaves_the_baseline(
    trainer: str, trl_settings: dict[str, Any], name: str, changes: dict[str, Any]
) -> None:
    """Groups that come down to a single reward have advantage 0 in both, but TRL leaves it in the
    standard deviation of the batch: such batches are one of the differences."""
    missing = 0
    for seed in CASES:
        case = random_case(seed, missing=True)
        if trl_settings.get("scale_rewards") == "batch" and lone(case):
            continue
        missing += sum(row.count(None) == len(row) for row in case.reward_BK)
        (want,) = theirs(case, trainer, trl_settings)
        got = ours(case, name, {"min_group": 2, **changes})
        torch.testing.assert_close(got.advantage_B, want.advantage_B, **NEAR)
    assert missing > 100


def part_scores(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Our sum of parts, each scored within its group, [P, G]; and who has any reward."""
    nan = float("nan")
    table = [[nan if x is None else x for x in row] for row in case.reward_BK]
    part_PGK = torch.tensor(table, dtype=torch.float64)
    part_PGK = part_PGK.reshape(-1, case.group_size, len(case.weight_K))
    valid_PG = ~part_PGK.isnan().all(2)
    score_PG = batch.part_scores(part_PGK, case.weight_K, valid_PG=valid_PG, ddof=1, eps=1e-4)
    return score_PG, valid_PG


def test_parts_normalised_first() -> None:
    """GDPO: our functions with TRL's ddof, and eps beside the deviation instead of in the root."""
    for seed in CASES:
        case = random_case(seed, missing=True)
        (want,) = theirs(case, "grpo", {"multi_objective_aggregation": "normalize_then_sum"})
        score_PG, valid_PG = part_scores(case)
        centered_PG = group.batch_mean(score_PG, valid_PG=valid_PG)
        got_PG = batch.scale_by_batch_std(
            centered_PG, score_PG, valid_PG=valid_PG, ddof=1, eps=1e-4
        )
        torch.testing.assert_close(got_PG.reshape(-1), want.advantage_B, **NEAR)


def test_the_row_gdpo_with_the_sample_deviation() -> None:
    """What is left is TRL's 1e-4 beside the deviation, relative to it. Opposite parts cancel but
    for a remainder of that size, which neither of both says anything about."""
    compared = 0
    for seed in CASES:
        case = random_case(seed)
        (want,) = theirs(case, "grpo", {"multi_objective_aggregation": "normalize_then_sum"})
        got = ours(case, "gdpo", {"whiten": {"ddof": 1}})
        spread = float(part_scores(case)[0].std())
        if spread > 0.1:
            torch.testing.assert_close(got.advantage_B, want.advantage_B, rtol=1e-3, atol=1e-3)
            compared += 1
    assert compared > 150
