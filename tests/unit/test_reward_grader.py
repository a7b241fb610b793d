"""The grader on functions that behave: order, combination, metrics."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from surefoot.errors import RewardError
from surefoot.records import Completion, Group, Prompt, Score, ScoreStatus, StopReason
from surefoot.reward import FunctionPart, Grader, reward_function


@dataclass(frozen=True)
class Entry:
    use: str
    weight: float = 1.0
    name: str | None = None
    timeout: float = 10.0
    price: float | None = None
    retries: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)


def group(
    texts: Sequence[str], answer: str | None = "7", *, row: str = "r", **columns: Any
) -> Group:
    prompt = Prompt(row, 0, (1,), "How many?", answer, "sums", None, columns)
    return Group(
        prompt,
        tuple(
            Completion((5, 2), (-0.1, -0.2), StopReason.STOP, 3, i, text)
            for i, text in enumerate(texts)
        ),
    )


def scores(groups: Sequence[Group]) -> list[Score]:
    return [score for group in groups for score in group.scores or ()]


def values(groups: Sequence[Group]) -> list[float | None]:
    return [score.value for score in scores(groups)]


def native(function, **settings):
    return FunctionPart(reward_function(function), **settings)


def test_what_is_not_counted_is_scored_and_in_no_metric():
    with Grader([Entry("numeric")]) as grader:
        grader.score([group(["7", "8"])])
        before = grader.counts()
        assert values(grader.score([group(["7"])], counted=False)) == [1.0]
        assert grader.counts() == before and before["rewards/numeric/mean"] == 0.5


def test_rules_alone_start_no_process():
    with Grader([Entry("numeric"), Entry("exact", weight=0.5)]) as grader:
        assert grader._workers is None
        (graded,) = grader.score([group(["7", "so 7", "17"])])
    assert values([graded]) == [1.5, 1.0, 0.0]
    assert [score.parts for score in graded.scores or ()] == [
        {"numeric": 1.0, "exact": 1.0},
        {"numeric": 1.0, "exact": 0.0},
        {"numeric": 0.0, "exact": 0.0},
    ]


def test_metrics_of_the_last_call():
    with Grader([Entry("numeric", weight=10.0)]) as grader:
        assert grader.counts() == {}
        grader.score([group(["7", "8"]), group(["1", "7"], None)])
        counts = grader.counts()
        assert counts.pop("time/reward") >= counts.pop("time/rewards/numeric") >= 0.0
        assert counts == {
            "rewards/numeric/mean": 0.5,
            "rewards/numeric/std": pytest.approx(math.sqrt(0.5)),
            "rewards/numeric/missing": 0.5,
            "rewards/numeric/not_applicable": 0.0,
            "reward_failures": 0.0,
            "reward_unscorable": 2.0,
            "reward_breaker": 0.0,
            "reward_limits": 0.0,
        }
        grader.score([group(["7"])])
        assert grader.counts()["rewards/numeric/mean"] == 1.0
        assert "rewards/numeric/std" not in grader.counts()
        grader.score([group(["7"], None)])
        assert "rewards/numeric/mean" not in grader.counts()
        assert grader.score([]) == []


def test_one_result_per_completion_in_order():
    lengths = FunctionPart(lambda completions: [len(c) for c in completions], name="batched")
    one = native(lambda sample: len(sample.text), name="native")
    groups = [group(["x" * n for n in range(start, start + 4)]) for start in range(0, 40, 4)]
    with Grader([lengths, one]) as grader:
        graded = grader.score(groups)
    assert values(graded) == [2.0 * n for n in range(40)]
    assert [g.prompt for g in graded] == [g.prompt for g in groups]
    assert [g.completions for g in graded] == [g.completions for g in groups]


def test_a_part_that_does_not_apply_leaves_the_sum():
    def sometimes(completions, **columns):
        return [None if c == "skip" else 0.5 for c in completions]

    with Grader([FunctionPart(sometimes, weight=4.0), Entry("exact")]) as grader:
        (graded,) = grader.score([group(["skip", "7"])])
        assert values([graded]) == [0.0, 3.0]
        assert (graded.scores or ())[0].parts == {"sometimes": None, "exact": 0.0}
        assert grader.counts()["rewards/sometimes/not_applicable"] == 1.0
        assert grader.counts()["rewards/sometimes/mean"] == 0.5


def test_no_applicable_part_is_missing():
    with Grader([native(lambda sample: None, name="n")]) as grader:
        (score,) = scores(grader.score([group(["a"])]))
        assert score.status is ScoreStatus.INFRA_ERROR
        assert score.detail == "no part applies"
        assert grader.counts()["reward_failures"] == 1.0


def test_a_failed_part_outweighs_all_others_and_names_itself():
    def picky(sample):
        return Score(ScoreStatus.INFRA_ERROR, detail="busy") if sample.text == "b" else 1.0

    with Grader([native(picky), Entry("numeric")]) as grader:
        first, second = scores(grader.score([group(["7", "b"])]))
        assert first.value == 2.0
        assert second.status is ScoreStatus.INFRA_ERROR
        assert second.detail == "picky, sample 1: busy"
        assert second.parts == {"picky": None, "numeric": 0.0}
        (both,) = scores(grader.score([group(["b"], None)]))
        assert both.status is ScoreStatus.INFRA_ERROR


def test_the_rows_fault_is_unscorable():
    with Grader([Entry("numeric"), native(lambda sample: 1.0, name="n")]) as grader:
        (score,) = scores(grader.score([group(["7"], "seven")]))
    assert score.status is ScoreStatus.UNSCORABLE
    assert "seven" in score.detail and score.parts == {"numeric": None, "n": 1.0}


def test_a_sum_that_overflows_is_missing():
    with Grader([native(lambda s: 1e308, name="a", weight=10.0)]) as grader:
        (score,) = scores(grader.score([group(["a"])]))
    assert score.status is ScoreStatus.INFRA_ERROR


def test_a_completion_that_the_engine_failed_is_not_graded():
    seen = FunctionPart(lambda completions: [len(completions)] * len(completions), name="seen")
    given = group(["a", "b"])
    broken = Completion((), (), StopReason.ERROR, 0, 2, "", "out of memory")
    with Grader([seen]) as grader:
        (graded,) = grader.score([Group(given.prompt, (broken, *given.completions))])
        assert values([graded]) == [None, 2.0, 2.0]
        assert "out of memory" in (graded.scores or ())[0].detail
        assert grader.counts()["reward_failures"] == 0.0


def test_closures_lambdas_and_async_functions_work():
    bonus = {"7": 0.25}

    async def asynchronous(sample):
        return bonus.get(sample.text, 0.0)

    async def listed(prompts, completions, **columns):
        return [bonus.get(c, 0.0) for c in completions]

    part = native(lambda sample: bonus.get(sample.text, 0.0), name="closure")
    with Grader([part], functions=[reward_function(asynchronous), listed]) as grader:
        (graded,) = grader.score([group(["7", "8"])])
    assert values([graded]) == [0.75, 0.0]


def test_a_file_function_is_found_and_run(tmp_path):
    (tmp_path / "rewards_of_a_test.py").write_text(
        "def length(completions, scale=1.0, **columns):\n"
        "    return [scale * len(c) for c in completions]\n"
    )
    entry = Entry("rewards_of_a_test.py:length", options={"scale": 0.5})
    with Grader([entry], base_dir=tmp_path) as grader:
        assert values(grader.score([group(["ab", "abcd"])])) == [1.0, 2.0]


def test_a_native_function_sees_the_sample():
    def see(sample):
        assert sample.prompt == "How many?" and sample.messages is None
        assert sample.ids == (5, 2) and sample.answer == "7" and sample.task == "sums"
        assert sample.columns == {"level": 2} and sample.stop is StopReason.STOP
        return sample.columns["level"]

    with Grader([native(see)]) as grader:
        assert values(grader.score([group(["a"], level=2)])) == [2.0]


def test_metrics_that_a_batch_function_logs():
    def f(completions, log_metric, **columns):
        log_metric("accuracy", 0.5)
        log_metric("broken", math.nan)
        return [1.0] * len(completions)

    with Grader([f]) as grader:
        grader.score([group(["a"])])
        assert grader.counts()["accuracy"] == 0.5
        assert "broken" not in grader.counts()


def test_functions_run_in_another_process_and_keep_their_state_there():
    calls: list[int] = []

    def f(sample):
        calls.append(1)
        return float(len(calls)) if os.getpid() != parent else -1.0

    parent = os.getpid()
    with Grader([native(f)]) as grader:
        assert values(grader.score([group(["a"] * 3)])) == [1.0, 2.0, 3.0]
        assert values(grader.score([group(["a"])])) == [4.0]
    assert calls == []


def test_what_a_function_prints_goes_to_stderr(capfd):
    print("before", end="")

    def f(sample):
        print("from a reward")
        return 1.0

    with Grader([native(f)]) as grader:
        grader.score([group(["a"])])
    captured = capfd.readouterr()
    assert captured.out == "before"
    assert "from a reward" in captured.err


def test_large_batches_pass():
    texts = ["x" * 20_000] * 64
    with Grader([FunctionPart(lambda completions: [len(c) for c in completions], name="n")]) as g:
        assert values(g.score([group(texts)] * 4)) == [20_000.0] * 256


def test_regex_and_reasoning_gym_run_in_workers():
    pytest.importorskip("reasoning_gym")
    entry = {"dataset": "leg_counting", "entry": {"answer": "7", "metadata": {}}}
    parts = [Entry("regex", options={"pattern": r"\d+", "match": "full"}), Entry("reasoning_gym")]
    with Grader(parts) as grader:
        (graded,) = grader.score([group(["7", "17", "a"], reasoning_gym=entry)])
    assert values([graded]) == [2.0, 1.0, 0.0]


def test_a_closed_grader_says_so():
    grader = Grader([native(lambda s: 1.0, name="n")])
    grader.close()
    grader.close()
    with pytest.raises(RewardError, match="closed"):
        grader.score([group(["a"])])
