"""The character model and the task of the critic's study: whole, repeatable, and scored by hand."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from surefoot.records import ProcessReward, StopReason
from surefoot.reward.contract import RewardSample

BENCH = Path(__file__).resolve().parents[2] / "bench"
TASK = runpy.run_path(str(BENCH / "copy_task.py"))
MODEL = runpy.run_path(str(BENCH / "character_model.py"))


def sample(text: str, answer: str = "0123") -> RewardSample:
    return RewardSample(answer + "=", text, (1,), answer, "default", {}, StopReason.LENGTH)


@pytest.mark.parametrize("answer", ["01", "210", "0123", "33333"])
def test_a_right_answer_scores_exactly_one_either_way(answer: str) -> None:
    assert TASK["at_the_end"](sample(answer, answer)) == 1.0
    found = TASK["by_position"](sample(answer, answer))
    assert sum(found.values) == 1.0
    assert found.ends == tuple(range(1, len(answer) + 1))


def test_each_position_counts_for_itself() -> None:
    assert TASK["at_the_end"](sample("0133")) == 0.75
    assert TASK["by_position"](sample("0133")) == ProcessReward(
        [0.25, 0.25, 0.0, 0.25], [1, 2, 3, 4]
    )
    # Cut short, and too long.
    assert TASK["by_position"](sample("91")) == ProcessReward([0.0, 0.25], [1, 2])
    assert TASK["at_the_end"](sample("01235")) == 1.0
    assert TASK["at_the_end"](sample("")) == TASK["by_position"](sample("")) == 0.0


def test_every_string_is_trained_on_or_held_out() -> None:
    train, held_out = TASK["rows"]("012", 3, held_out=7)
    assert len(train) == 20 and len(held_out) == 7
    assert len({row["prompt"] for row in train + held_out}) == 27
    assert all(row["prompt"] == row["answer"] + "=" for row in train + held_out)
    assert TASK["rows"]("012", 3, held_out=7) == (train, held_out)


def test_the_model_is_a_function_of_its_seed(tmp_path: Path) -> None:
    def made(name: str, seed: int) -> Any:
        shape = MODEL["Shape"](hidden=16)
        folder = MODEL["save"](tmp_path / name, characters="01=", seed=seed, shape=shape)
        return AutoModelForCausalLM.from_pretrained(folder).state_dict()

    one = made("one", 0)
    torch.rand(3)
    same, other = made("same", 0), made("other", 1)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])


def test_the_tokenizer_reads_and_writes_characters(tmp_path: Path) -> None:
    shape = MODEL["Shape"](hidden=16)
    folder = MODEL["save"](tmp_path, characters="01=", seed=0, shape=shape)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("10=")["input_ids"] == [2, 1, 3]
    assert tokenizer.decode([2, 1, 3, 0], skip_special_tokens=True) == "10="
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 0
    assert tokenizer.chat_template is None
