"""A judge that is busy, away, wrong or silly: what is lost is exactly what failed.

Rows 25 to 27 of the fault matrix, on a real server that misbehaves, and the end of the budget.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("openai")

from support.loop import make_loop
from support.stub_judge import TOKENS_IN, TOKENS_OUT, Fault, StubJudge, says, status

import surefoot
from surefoot.errors import EXIT_FINDING, EXIT_REFUSED, RewardError, StoppedOnFinding
from surefoot.loops.spending import SpendingFile
from surefoot.recipe.schema import Judge
from surefoot.records import Completion, Group, Prompt, Score, ScoreStatus, StopReason
from surefoot.reward import Grader, judge_http
from surefoot.reward.cache import ScoreCache
from surefoot.reward.judge import JudgeSetup
from surefoot.reward.judge_budget import Spent
from surefoot.run.checkpoint import load_latest
from surefoot.run.directory import RunDirectory
from surefoot.run.read import read_metrics

MISSING = ScoreStatus.INFRA_ERROR


@dataclass(frozen=True)
class Entry:
    use: str = "judge"
    weight: float = 1.0
    name: str | None = None
    timeout: float = 10.0
    retries: int = 1
    price: float | None = None
    options: Mapping[str, Any] = field(default_factory=lambda: {"rubric": "is it good?"})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short pauses between attempts; those that a server asks for stay as they are."""
    monkeypatch.setattr(judge_http, "FIRST_DELAY", 0.01)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret-key")
    yield


def grader(stub: StubJudge, *, cache: ScoreCache | None = None, **settings: Any) -> Grader:
    extra = {name: settings.pop(name) for name in ("spent", "keep") if name in settings}
    judge = Judge(**{"base_url": stub.url, "model": "m", "timeout": 5.0, **settings})
    return Grader([Entry()], judge=JudgeSetup(judge, cache=cache, **extra))


def group(texts: Sequence[str]) -> Group:
    made = tuple(
        Completion((5, 2), (-0.1, -0.2), StopReason.STOP, 0, i, text)
        for i, text in enumerate(texts)
    )
    return Group(Prompt("r", 0, (1,), "q", "7", "sums"), made)


def grade(judged: Grader, texts: Sequence[str]) -> list[Score]:
    (graded,) = judged.score([group(texts)])
    return list(graded.scores or ())


# Row 25: busy, broken, hanging.


@pytest.mark.parametrize(
    "fault",
    [
        status(429),
        status(500),
        status(503),
        status(408),
        Fault("half"),
        Fault("reset"),
        Fault("not_json"),
        Fault("no_choices"),
    ],
    ids=lambda fault: f"{fault.kind}{fault.status}",
)
def test_row_25_a_passing_fault_is_tried_again(fault: Fault) -> None:
    with StubJudge(faults=[fault, fault]) as stub, grader(stub) as judged:
        (score,) = grade(judged, ["a"])
        assert score.value == pytest.approx(0.7)
        assert stub.calls == 3
        assert judged.counts()["rewards/judge/retries"] == 2
        assert judged.counts()["judge/calls"] == 3


def test_row_25_retry_after_in_seconds_is_waited_for() -> None:
    with StubJudge(faults=[status(429, Retry_After="1")]) as stub, grader(stub) as judged:
        (score,) = grade(judged, ["a"])
        assert score.valid
        first, second = stub.requests
        assert second.at - first.at >= 1.0


def test_row_25_retry_after_as_a_date_is_waited_for() -> None:
    # A date has whole seconds: two seconds ahead is at least one.
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)
    with StubJudge(faults=[status(503, Retry_After=date)]) as stub, grader(stub) as judged:
        (score,) = grade(judged, ["a"])
        assert score.valid
        first, second = stub.requests
        assert second.at - first.at >= 0.8


def test_row_25_a_busy_server_is_left_alone_by_all_questions() -> None:
    """Of b and c, which go together, one is sent away; d comes later and waits too."""

    def reply(messages: list[dict[str, str]]) -> str:
        time.sleep(0.3)
        return '{"score": 1}'

    faults = [Fault("ok"), status(429, Retry_After="1")]
    with StubJudge(reply, faults) as stub, grader(stub, concurrency=2) as judged:
        scores = grade(judged, ["a", "b", "c", "d"])
        assert all(score.valid for score in scores)
        assert stub.calls == 5
        assert all(late.at - stub.requests[1].at >= 1.0 for late in stub.requests[3:])


def test_row_25_a_wait_beyond_the_deadline_is_not_waited_for() -> None:
    began = time.monotonic()
    with (
        StubJudge(faults=[status(429, Retry_After="3600")]) as stub,
        grader(stub, deadline=5.0) as judged,
    ):
        (score,) = grade(judged, ["a"])
        assert score.status is MISSING
        assert "judge.deadline" in score.detail
        assert "429" in score.detail
        assert stub.calls == 1
    assert time.monotonic() - began < 4.0


@pytest.mark.parametrize("kind", ["hang", "slow"])
def test_row_25_a_hanging_reply_costs_its_timeout_and_no_more(kind: str) -> None:
    with StubJudge(faults=[Fault(kind, seconds=20.0)]) as stub, grader(stub, timeout=0.6) as judged:
        began = time.monotonic()
        (score,) = grade(judged, ["a"])
        assert score.valid
        assert stub.calls == 2
        assert time.monotonic() - began < 3.0


def test_row_25_attempts_are_capped_and_only_that_item_is_missing() -> None:
    def reply(messages: list[dict[str, str]]) -> str:
        return '{"score": 10}'

    faults = [status(500)] * judge_http.ATTEMPTS
    with StubJudge(reply, faults) as stub, grader(stub, concurrency=1) as judged:
        scores = grade(judged, ["a", "b"])
        assert [score.status for score in scores] == [MISSING, ScoreStatus.SCORED]
        assert scores[0].value is None
        assert stub.calls == judge_http.ATTEMPTS + 1
        counts = judged.counts()
        assert counts["rewards/judge/missing"] == 0.5
        assert counts["reward_failures"] == 1


def test_row_25_a_server_that_is_down_ends_the_call_early() -> None:
    texts = [f"text {i}" for i in range(12)]
    with StubJudge(faults=[status(500)] * 1000) as stub, grader(stub, concurrency=2) as judged:
        scores = grade(judged, texts)
        assert {score.status for score in scores} == {MISSING}
        # Three questions without a reply in a row, and the one that the other thread was at.
        assert stub.calls <= 4 * judge_http.ATTEMPTS
        assert sum("given up" in score.detail for score in scores) >= 8
        stub.faults.clear()
        assert all(score.valid for score in grade(judged, texts))


def test_row_25_nobody_listening_is_missing_too() -> None:
    with StubJudge() as stub:
        url = stub.url
    judge = JudgeSetup(Judge(base_url=url, model="m"))
    with Grader([Entry()], judge=judge) as judged:
        (score,) = grade(judged, ["a"])
        assert score.status is MISSING
        assert "connection failed" in score.detail


def test_row_25_a_server_that_stays_down_stops_the_run_and_says_of_what() -> None:
    with StubJudge() as stub:
        url = stub.url
    judge = JudgeSetup(Judge(base_url=url, model="m"))
    with Grader([Entry()], judge=judge) as judged:
        grade(judged, [f"answer {i}" for i in range(70)])
        with pytest.raises(StoppedOnFinding, match=r"70 calls .* connection failed"):
            judged.stop_if_broken()


# Row 26: asked wrongly.


@pytest.mark.parametrize("code", [400, 401, 403, 404])
def test_row_26_a_wrong_question_stops_at_once(code: int) -> None:
    faults = [status(code, "the server says no to sk-very-secret-key")] * 100
    with StubJudge(faults=faults) as stub, grader(stub) as judged:
        with pytest.raises(RewardError) as refused:
            grade(judged, ["a", "b", "c"])
        assert stub.calls == 1
        said = str(refused.value)
        for told in (stub.url, "judge.model is m", "OPENAI_API_KEY", "the server says no"):
            assert told in said
        assert "very-secret" not in said
        assert refused.value.exit_code == EXIT_REFUSED


def test_row_26_an_unset_key_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    with (
        StubJudge(faults=[status(401)]) as stub,
        grader(stub) as judged,
        pytest.raises(RewardError, match="OPENAI_API_KEY, which is not set"),
    ):
        grade(judged, ["a"])


def test_row_26_after_a_first_reply_the_stop_is_one_that_saves() -> None:
    with StubJudge(faults=[says('{"score": 1}'), status(401)]) as stub, grader(stub) as judged:
        assert grade(judged, ["a"])[0].value == pytest.approx(0.1)
        with pytest.raises(StoppedOnFinding, match="401") as stopped:
            grade(judged, ["b"])
        assert stopped.value.exit_code == EXIT_FINDING
        assert stub.calls == 2


def test_row_26_spent_credit_is_not_tried_again() -> None:
    faults = [status(429, "no credit", code_word="insufficient_quota")]
    with (
        StubJudge(faults=faults) as stub,
        grader(stub) as judged,
        pytest.raises(RewardError, match="no credit"),
    ):
        grade(judged, ["a"])
    assert stub.calls == 1


def test_row_26_a_question_that_is_too_long_is_missing_alone() -> None:
    too_long = status(400, "This model's maximum context length is 8 tokens")
    with StubJudge(faults=[too_long]) as stub, grader(stub, concurrency=1) as judged:
        scores = grade(judged, ["a", "b"])
        assert [score.status for score in scores] == [MISSING, ScoreStatus.SCORED]
        assert "too long" in scores[0].detail
        assert stub.calls == 2


def test_a_server_that_wants_the_newer_name_of_the_cap_gets_it() -> None:
    wants = status(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.")
    with StubJudge(faults=[wants]) as stub, grader(stub, max_tokens=33) as judged:
        assert grade(judged, ["a"])[0].valid
        assert stub.requests[0].body["max_tokens"] == 33
        assert stub.requests[1].body["max_completion_tokens"] == 33
        assert "max_tokens" not in stub.requests[1].body


# Row 27: no verdict.


@pytest.mark.parametrize(
    "fault",
    [
        says("It is quite good, I would say 8 out of 10."),
        says(""),
        says('{"score": 11}'),
        says("I'm sorry, but I can't help with that."),
        Fault("refusal"),
        Fault("filtered"),
        Fault("cut"),
    ],
    ids=["prose", "empty", "outside", "sorry", "refusal", "filtered", "cut"],
)
def test_row_27_one_second_question_then_missing_never_zero(fault: Fault) -> None:
    with StubJudge(faults=[fault, fault]) as stub, grader(stub, concurrency=1) as judged:
        scores = grade(judged, ["a", "b"])
        assert [score.status for score in scores] == [MISSING, ScoreStatus.SCORED]
        assert scores[0].value is None and scores[0].parts["judge"] is None
        assert stub.calls == 3
        second = stub.requests[1].messages
        assert second[:2] == stub.requests[0].messages
        assert "one line" in second[-1]["content"]


def test_row_27_the_second_reply_counts_and_the_rates_are_told() -> None:
    faults = [says("hm"), says('{"score": 4}'), Fault("refusal"), says("score: 6")]
    with StubJudge(faults=faults) as stub, grader(stub, concurrency=1) as judged:
        scores = grade(judged, ["a", "b", "c", "d"])
        assert [score.value for score in scores] == pytest.approx([0.4, 0.6, 0.7, 0.7])
        counts = judged.counts()
        # Of four questions one had an unreadable first reply, and one was refused.
        assert counts["rewards/judge/unparsable"] == 0.25
        assert counts["rewards/judge/refused"] == 0.25
        assert counts["rewards/judge/questions"] == 4
        assert counts["rewards/judge/retries"] == 0
        assert stub.calls == 6


def test_row_27_a_filter_with_an_error_status_is_a_refusal() -> None:
    filtered = status(400, "filtered", code_word="content_filter")
    with StubJudge(faults=[filtered]) as stub, grader(stub) as judged:
        (score,) = grade(judged, ["a"])
        assert score.status is MISSING
        assert judged.counts()["rewards/judge/refused"] == 1.0
        assert stub.calls == 1


# The budget, the cache, the key.


def test_the_budget_of_calls_is_never_exceeded(tmp_path: Path) -> None:
    cache = ScoreCache(tmp_path / "cache")
    texts = [f"text {i}" for i in range(10)]
    with StubJudge() as stub:
        with (
            grader(stub, cache=cache, budget_calls=4) as judged,
            pytest.raises(StoppedOnFinding, match=r"judge.budget_calls is 4") as stopped,
        ):
            grade(judged, texts)
        assert stopped.value.exit_code == EXIT_FINDING
        assert stub.calls == 4
        spent = Spent(calls=4)
        # With a larger budget the four verdicts are there already.
        with grader(stub, cache=cache, budget_calls=10, spent=spent) as judged:
            assert all(score.valid for score in grade(judged, texts))
            assert judged.counts()["rewards/judge/cached"] == 4
            assert judged.counts()["judge/calls"] == 10
        assert stub.calls == 10


def test_retries_and_second_questions_count_as_calls() -> None:
    faults = [status(500), says("hm"), says("hm again")]
    with StubJudge(faults=faults) as stub, grader(stub, budget_calls=3) as judged:
        assert grade(judged, ["a"])[0].status is MISSING
        with pytest.raises(StoppedOnFinding):
            grade(judged, ["b"])
        assert stub.calls == 3


PRICES = {"price_per_million_input": 2.0, "price_per_million_output": 50.0}
# 1000 tokens at $2 and 10 at $50 a million.
EACH = 0.0025


def test_money_is_what_the_server_counted() -> None:
    assert (TOKENS_IN, TOKENS_OUT) == (1000, 10)
    with StubJudge(faults=[status(500)]) as stub, grader(stub, **PRICES) as judged:
        grade(judged, ["a", "b", "c"])
        assert judged.counts()["judge/usd"] == pytest.approx(3 * EACH)
        assert judged.counts()["judge/calls"] == 4
        assert stub.calls == 4


def test_the_budget_of_money_is_never_exceeded() -> None:
    kept: list[Spent] = []
    with (
        StubJudge() as stub,
        grader(stub, **PRICES, budget_usd=0.04, max_tokens=100, keep=kept.append) as judged,
    ):
        with pytest.raises(StoppedOnFinding, match=r"judge.budget_usd is 0.04"):
            grade(judged, [f"text {i}" for i in range(100)])
        assert judged.judges is not None
        assert judged.judges.spent.usd == pytest.approx(EACH * stub.calls)
    assert max(spent.usd for spent in kept) <= 0.04
    assert 0.04 - 2 * 0.01 < kept[-1].usd <= 0.04


def test_a_lost_reply_counts_as_if_it_was_billed_whole() -> None:
    with (
        StubJudge(faults=[Fault("hang")]) as stub,
        grader(stub, **PRICES, timeout=0.5, max_tokens=100) as judged,
    ):
        grade(judged, ["a"])
        # All of the 100 tokens that it might have written, beside what it read.
        assert judged.counts()["judge/usd"] > EACH + 100 * 50e-6


def test_a_kept_verdict_costs_nothing_and_equal_answers_are_asked_once(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    with StubJudge() as stub:
        for _ in range(2):
            with ScoreCache(path) as cache, grader(stub, cache=cache) as judged:
                scores = grade(judged, ["same", "same", "other"])
                assert [score.value for score in scores] == pytest.approx([0.7, 0.7, 0.7])
        assert stub.calls == 2


def test_the_key_is_sent_and_written_nowhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    faults = [status(500, "key sk-very-secret-key is odd")] * judge_http.ATTEMPTS
    with (
        caplog.at_level(logging.DEBUG, logger="surefoot"),
        StubJudge(faults=faults) as stub,
        ScoreCache(tmp_path / "cache") as cache,
        grader(stub, cache=cache, concurrency=1) as judged,
    ):
        scores = grade(judged, ["a", "b"])
        assert scores[1].valid
        assert stub.requests[0].authorization == "Bearer sk-very-secret-key"
        assert "very-secret" not in caplog.text
        assert "very-secret" not in " ".join(score.detail for score in scores)
    for file in tmp_path.iterdir():
        assert b"very-secret" not in file.read_bytes()


def test_requests_under_way_are_bounded_and_order_is_kept() -> None:
    def reply(messages: list[dict[str, str]]) -> str:
        time.sleep(0.05)
        number = messages[1]["content"].partition("text ")[2].split()[0]
        return json.dumps({"score": int(number)})

    with StubJudge(reply) as stub, grader(stub, concurrency=3) as judged:
        scores = grade(judged, [f"text {i}" for i in range(9)])
        assert [score.value for score in scores] == pytest.approx([i / 10 for i in range(9)])
        assert 2 <= stub.most_at_once <= 3


# The whole loop.


def test_the_loop_stops_before_the_weights_change_and_goes_on(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Step 1 has 8 questions; the ninth, in step 2, is beyond the budget."""
    run = tmp_path / "run"
    book = SpendingFile(tmp_path / "judge.json")
    method = {"name": "rloo", "group_size": 4, "kl": {"place": "none"}}

    def reply(messages: list[dict[str, str]]) -> str:
        return json.dumps({"score": len(messages[1]["content"]) % 11})

    def judge(stub: StubJudge, budget: int) -> Grader:
        settings = Judge(base_url=stub.url, model="m", budget_calls=budget)
        setup = JudgeSetup(settings, spent=book.read(), keep=book.write)
        return Grader([Entry()], judge=setup)

    with StubJudge(reply) as stub:
        bench = make_loop(tiny_model, run, method=method, judge=lambda p, s, c: 0.0, steps=3)
        with judge(stub, 9) as judged:
            bench.parts.grader = judged
            with pytest.raises(StoppedOnFinding, match=r"judge.budget_calls"):
                bench.run()
        assert stub.calls == 9
        assert book.read().calls == 9
        assert bench.loop.progress.step == 1
        assert [row["step"] for row in bench.metrics()] == [1]
        assert bench.desk.directory.checkpoint_steps() == [1]
        assert bench.events("stopped")
        # The same command stops again, without a further call.
        with judge(stub, 9) as judged, pytest.raises(StoppedOnFinding):
            judged.score([group(["new"])])
        assert stub.calls == 9


def capitals(messages: list[dict[str, str]]) -> str:
    """Pays for the share of capital letters, as a judge whose taste can be learned."""
    inside = messages[1]["content"].split("<ANSWER ", 1)[1].split("\n", 1)[1]
    text = inside.split("\n</ANSWER ", 1)[0]
    return json.dumps({"score": round(10 * sum(c.isupper() for c in text) / max(1, len(text)), 3)})


def train(run: Path, model: Path, stub: StubJudge, *overrides: str) -> surefoot.Run:
    recipe = {
        "model": {"path": str(model)},
        "data": {"source": "rows", "eval_size": 2},
        "reward": [{"use": "judge", "rubric": "capital letters are good"}],
        "judge": {"base_url": stub.url, "model": "m"},
        "method": {"name": "rloo", "group_size": 4, "kl": "none"},
        "rollout": {"prompts_per_step": 2, "max_new_tokens": 6},
        "optim": {"learning_rate": 0.05, "tokens_per_microbatch": 4096},
        "run": {"dir": str(run), "steps": 3, "trackers": []},
    }
    rows = [{"prompt": f"say {c}", "answer": c} for c in "abcdefgh"]
    return surefoot.train(recipe, overrides, data=rows)


def saved(run: Path) -> dict[str, torch.Tensor]:
    loaded = load_latest(RunDirectory(run), rename_damaged=False)
    assert loaded is not None
    return loaded.tensors("policy")


def test_a_run_beyond_its_budget_goes_on_to_the_same_weights_and_pays_for_nothing_twice(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StubJudge(capitals) as stub:
        monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "one"))
        whole = train(tmp_path / "whole", tiny_model, stub)
        needed = stub.calls
        assert whole.metrics[-1]["judge/calls"] == needed
    assert needed > 12
    with StubJudge(capitals) as stub:
        monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "two"))
        again = f"judge.base_url={stub.url}"
        with pytest.raises(StoppedOnFinding, match=r"judge.budget_calls is 12"):
            train(tmp_path / "run", tiny_model, stub, again, "judge.budget_calls=12")
        assert SpendingFile(tmp_path / "run" / "judge.json").read().calls == stub.calls == 12
        with pytest.raises(StoppedOnFinding, match=r"judge.budget_calls is 12"):
            train(tmp_path / "run", tiny_model, stub, again, "judge.budget_calls=12")
        assert stub.calls == 12
        run = train(tmp_path / "run", tiny_model, stub, again, "judge.budget_calls=100")
        assert stub.calls == needed
        assert run.metrics[-1]["judge/calls"] == needed
    one, other = saved(tmp_path / "whole"), saved(tmp_path / "run")
    assert all(torch.equal(one[name], other[name]) for name in one)
    for file in (tmp_path / "run").rglob("*"):
        assert not file.is_file() or b"very-secret" not in file.read_bytes()


def test_a_budget_that_ends_in_an_evaluation_leaves_the_step_written_down(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StubJudge(capitals) as stub:
        monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "one"))
        whole = train(tmp_path / "whole", tiny_model, stub, "run.eval_every=1", "run.steps=2")
        trained = [row for row in whole.metrics if "reward" in row]
        budget = int(trained[0]["judge/calls"])
        # The evaluation after step 1 asks too, or there would be nothing to stop.
        assert trained[1]["judge/calls"] > budget + 8
    with StubJudge(capitals) as stub:
        monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "two"))
        with pytest.raises(StoppedOnFinding):
            train(
                tmp_path / "run",
                tiny_model,
                stub,
                "run.eval_every=1",
                "run.steps=2",
                f"judge.budget_calls={budget}",
            )
        assert stub.calls == budget
    directory = RunDirectory(tmp_path / "run")
    assert directory.checkpoint_steps() == [1]
    (row,) = [row for row in read_metrics(directory.path) if "reward" in row]
    assert row["step"] == 1 and "eval/accuracy" not in row


def test_a_disk_that_refuses_the_book_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    book = SpendingFile(tmp_path / "gone" / "judge.json")
    for calls in (1, 2):
        book.write(Spent(calls, 0.0))
    assert caplog.text.count("cannot be written") == 1


def test_several_rewards_share_one_budget() -> None:
    parts = [Entry(name="first"), Entry(name="second", options={"rubric": "is it short?"})]
    with StubJudge() as stub:
        settings = Judge(base_url=stub.url, model="m", budget_calls=6)
        with Grader(parts, judge=JudgeSetup(settings)) as judged:
            (score, *_) = grade(judged, ["a", "b", "c"])
            assert score.value == pytest.approx(1.4)
            counts = judged.counts()
            assert counts["rewards/first/questions"] == counts["rewards/second/questions"] == 3
            assert counts["judge/calls"] == 6
            with pytest.raises(StoppedOnFinding):
                grade(judged, ["d"])
        assert stub.calls == 6


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RewardError, match=r"pip install 'surefoot\[judge\]'"):
        Grader([Entry()], judge=JudgeSetup(Judge(base_url="http://127.0.0.1:9/v1", model="m")))


def test_the_book_of_a_run_survives_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    book = SpendingFile(tmp_path / "judge.json")
    assert book.read() == Spent()
    book.write(Spent(3, 0.25))
    assert SpendingFile(book.path).read() == Spent(3, 0.25)
    book.path.write_text("{")
    with pytest.raises(ValueError, match="not known what the judge has cost"):
        book.read()
