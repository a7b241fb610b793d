"""The KL coefficient from step to step, by hand numbers and through the loop."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hand import group, row, stood
from support.loop import make_loop

from surefoot.learner.batch import make_batch
from surefoot.learner.update import Facts, UpdateReport
from surefoot.loops.control import next_coef, with_coef
from surefoot.methods import Method

PROPORTIONAL = {"kind": "proportional", "target": 1.0, "horizon": 10, "unit": "sequence"}


def method(**controller: Any) -> Method:
    chosen = {**PROPORTIONAL, **controller}
    if chosen["kind"] == "doubling":
        del chosen["horizon"]
    kl = {"place": "reward_sequence", "coef": 0.5, "controller": chosen}
    return row("rloo", group_size=2, kl=kl)


def coef_after(kind: Method, *, gap: float = 0.5, known: bool = True, ref: bool = True) -> float:
    """Completions of 2 and 4 tokens, each `gap` nats more likely than under the reference."""
    batch = make_batch([group([1.0, 0.0], lengths=[2, 4])])
    zeros = torch.zeros_like(batch.sampled_logp_BT)
    facts = Facts(ref_logp_BT=zeros - gap, ref_rows=(0, 1)) if ref else Facts()
    report = UpdateReport(
        1, 0, (True,), 0.0, 0.0, {}, 0, (), zeros, batch.mask_BT & torch.tensor(known), {}
    )
    standing = stood(kind, batch)
    return next_coef(kind, batch, standing, facts, report)


def test_a_sequence_is_the_sum_of_its_tokens() -> None:
    # 1.0 and 2.0 nats: mean 1.5, 1.5 times the target, held at +0.2; two completions of ten.
    assert coef_after(method()) == pytest.approx(0.5 * (1 + 0.2 * 2 / 10))
    # Mean 1.2 with a gap of 0.4: +0.2 exactly. Mean 0.9 with 0.3: -0.1.
    assert coef_after(method(), gap=0.3) == pytest.approx(0.5 * (1 - 0.1 * 2 / 10))


def test_a_token_is_a_token() -> None:
    assert coef_after(method(unit="token", target=0.5)) == pytest.approx(0.5)
    assert coef_after(method(unit="token", target=0.4), gap=0.44) == pytest.approx(0.51)


@pytest.mark.parametrize(("gap", "factor"), [(0.1, 0.5), (0.2, 1.0), (0.5, 2.0), (-1.0, 0.5)])
def test_doubling(gap: float, factor: float) -> None:
    kind = method(kind="doubling", target=0.2, unit="token")
    assert coef_after(kind, gap=gap) == pytest.approx(0.5 * factor)


def test_what_was_not_seen_moves_nothing() -> None:
    assert coef_after(method(), known=False) == 0.5
    assert coef_after(method(), ref=False) == 0.5
    assert coef_after(method(), gap=float("inf")) == 0.5
    fixed = row("rloo", group_size=2)
    assert coef_after(fixed) == fixed.kl.coef


def test_only_the_coefficient_changes() -> None:
    changed = with_coef(method(), 0.25)
    assert changed.kl.coef == 0.25
    assert dataclasses.replace(changed, kl=method().kl) == method()
    assert with_coef(method(), None) is not None and with_coef(method(), None).kl.coef == 0.5


@pytest.mark.parametrize("place", ["reward_sequence", "loss"])
def test_the_loop_carries_it_from_step_to_step(
    place: str, tiny_model: Path, tmp_path: Path
) -> None:
    """The coefficient in the metrics is the one that the step was trained with."""
    controller = {"kind": "doubling", "target": 1000.0, "unit": "token"}
    bench = make_loop(
        tiny_model,
        tmp_path / "run",
        method={
            "name": "grpo",
            "group_size": 2,
            "kl": {"place": place, "estimator": "k1", "coef": 0.5, "controller": controller},
        },
        judge=lambda p, s, c: float(s),
        steps=3,
    )
    bench.run()
    rows = bench.metrics()[-3:]
    assert [r["kl/coef"] for r in rows] == [0.5, 0.25, 0.125]
    assert bench.loop.progress.kl_coef == 0.0625
    assert bench.loop.parts.row.kl.coef == 0.5  # type: ignore[union-attr]
