"""Law 10 through the whole loop: answers that were cut off, and rewards of single steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.loop import Bench, make_loop

from surefoot.records import Prompt, Score, ScoreStatus, StopReason
from surefoot.rollout.scripted import Line


def cut_off(asked: Prompt, sample: int) -> Line:
    """Three letters, of which every second answer was cut off."""
    stop = StopReason.LENGTH if sample % 2 else StopReason.STOP
    return Line((69, 70, 71), "abc", stop)


def nothing(prompt: Prompt, sample: int, call: int) -> float:
    return 0.0


def bench_of(model: Path, run: Path, *, judge: Any, method: dict[str, Any]) -> Bench:
    return make_loop(
        model,
        run,
        method={"group_size": 2, "kl": {"coef": 0.0}, "whiten": "none", **method},
        judge=judge,
        script=cut_off,
        steps=1,
        settings={"stop_without_signal": "never"},
    )


@pytest.mark.parametrize("bootstrap", [False, True])
def test_an_answer_that_was_cut_off_goes_on_iff_the_row_says_so(
    bootstrap: bool, tiny_model: Path, tmp_path: Path
) -> None:
    """No reward, and a critic that says 0.5 everywhere; lambda 1: A is what comes last less 0.5."""
    credit = {"lam": 1.0, "bootstrap_truncated": bootstrap}
    bench = bench_of(
        tiny_model, tmp_path / "run", judge=nothing, method={"name": "ppo", "credit": credit}
    )
    critic = bench.learner.critic
    assert critic is not None
    torch.nn.init.constant_(critic.model.head.bias, 0.5)
    taken = bench.loop.stepper.take(1, bench.loop.progress)
    assert taken.credit is not None
    cut = 0.0 if bootstrap else -0.5
    want = torch.tensor([[-0.5, cut], [-0.5, cut]], dtype=torch.float64)
    assert torch.allclose(taken.credit.advantage_PG, want, atol=1e-9)


def test_rewards_of_steps_are_paid_at_the_tokens_of_their_text(
    tiny_model: Path, tmp_path: Path
) -> None:
    """0.25 for the first letter and 0.5 for the whole: of the three tokens 0.75, 0.5 and 0.5."""

    def by_step(prompt: Prompt, sample: int, call: int) -> Score:
        return Score(ScoreStatus.SCORED, 0.75, {"r": 0.75}, steps=((1, 0.25),))

    bench = bench_of(tiny_model, tmp_path / "run", judge=by_step, method={"name": "reinforce_pp"})
    tokenizer = bench.parts.loaded.template.tokenizer
    assert tokenizer.decode([69, 70, 71]) == "abc"
    taken = bench.loop.stepper.take(1, bench.loop.progress)
    assert taken.credit is not None
    want = torch.tensor([0.75, 0.5, 0.5], dtype=torch.float64).expand(4, 3)
    assert torch.equal(taken.credit.signal.advantage_BT, want)
