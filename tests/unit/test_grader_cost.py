"""What paid rewards cost, what is not paid twice, and what a resumed run knows of it."""

from __future__ import annotations

import functools
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.loop import make_loop
from test_reward_grader import group, native, values

from surefoot.loops.state import progress_of
from surefoot.records import Score, ScoreStatus
from surefoot.reward import FunctionPart, Grader, reward_function
from surefoot.reward.cache import ScoreCache
from surefoot.reward.paid import identity_of
from surefoot.run.checkpoint import load_latest
from surefoot.run.display import summary_table
from surefoot.run.read import summary


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "cache"))


def counting(log: str, worth: float = 0.5):
    """A reward that writes down each call; texts that begin with "bad" fail."""

    def f(sample):
        with open(log, "a", encoding="utf-8") as file:
            file.write(sample.text + "\n")
        if sample.text.startswith("bad"):
            raise ConnectionError("busy")
        return Score(ScoreStatus.UNSCORABLE) if sample.text == "row" else worth

    return f


def asked(log: Path) -> list[str]:
    return log.read_text().split() if log.exists() else []


def test_every_call_is_paid_and_a_kept_score_is_not(tmp_path):
    log = tmp_path / "log"
    part = native(counting(str(log)), name="f", price=0.25, timeout=30.0)
    with Grader([part]) as grader:
        assert grader.spent == 0.0
        assert values(grader.score([group(["a", "b", "bad"])])) == [0.5, 0.5, None]
        counts = grader.counts()
        # Three calls and one retry of the bad one.
        assert (counts["cost/rewards/f"], grader.spent) == (1.0, 1.0)
        assert counts["rewards/f/cached"] == 0.0
        assert values(grader.score([group(["a", "b", "bad", "c"])])) == [0.5, 0.5, None, 0.5]
        counts = grader.counts()
        assert (counts["cost/rewards/f"], grader.spent) == (0.75, 1.75)
        assert counts["rewards/f/cached"] == 2.0
        assert counts["rewards/f/mean"] == 0.5 and counts["rewards/f/missing"] == 0.25
    assert sorted(asked(log)) == ["a", "b", "bad", "bad", "bad", "bad", "c"]
    with Grader([part]) as grader:  # a later process of the run, or another run
        assert values(grader.score([group(["c", "a"])])) == [0.5, 0.5]
        assert (grader.spent, grader.counts()["rewards/f/cached"]) == (0.0, 2.0)


def test_a_score_is_kept_for_its_content_alone(tmp_path):
    log = tmp_path / "log"
    with Grader([native(counting(str(log)), name="f", price=0.1, timeout=30.0)]) as grader:
        grader.score([group(["a"])])
        grader.score([group(["a"], "8")])
        grader.score([group(["a"], level=2)])
        grader.score([group(["a"], row="another")])
    # Another answer and another column are other contents; another row id is not.
    assert asked(log) == ["a"] * 3


def test_the_same_text_in_one_batch_is_asked_once(tmp_path):
    log = tmp_path / "log"
    with Grader([native(counting(str(log)), name="f", price=0.1, timeout=30.0)]) as grader:
        assert values(grader.score([group(["a", "b", "a", "a"])])) == [0.5] * 4
        assert grader.counts()["rewards/f/cached"] == 2.0
    assert sorted(asked(log)) == ["a", "b"]


def test_a_row_at_fault_is_asked_again_and_without_a_price_nothing_is_kept(tmp_path):
    log = tmp_path / "log"
    with Grader([native(counting(str(log)), name="f", price=0.1, timeout=30.0)]) as grader:
        for _ in range(2):
            (graded,) = grader.score([group(["row"])])
            assert (graded.scores or ())[0].status is ScoreStatus.UNSCORABLE
    assert asked(log) == ["row"] * 2
    with Grader([native(counting(str(log)), name="f", timeout=30.0)]) as grader:
        for _ in range(2):
            grader.score([group(["free"])])
        assert grader.spent is None
        assert not [key for key in grader.counts() if "cost" in key or "cached" in key]
    assert asked(log) == ["row"] * 2 + ["free"] * 2


def test_a_paid_batch_is_kept_as_a_whole(tmp_path):
    log = str(tmp_path / "log")

    def f(completions, **columns):
        with open(log, "a", encoding="utf-8") as file:
            file.write("+".join(completions) + "\n")
        return [len(c) / len(completions) for c in completions]

    with Grader([FunctionPart(f, price=2.0)]) as grader:
        for _ in range(2):
            assert values(grader.score([group(["a", "bbb"])])) == [0.5, 1.5]
        assert (grader.spent, grader.counts()["cost/rewards/f"]) == (2.0, 0.0)
        assert values(grader.score([group(["a"])])) == [1.0]
    assert asked(Path(log)) == ["a+bbb", "a"]


def test_what_was_scored_before_an_interruption_is_not_paid_again(tmp_path):
    log = str(tmp_path / "log")

    def f(sample):
        if sample.text == "slow":
            time.sleep(30)
        with open(log, "a", encoding="utf-8") as file:
            file.write(sample.text + "\n")
        return 1.0

    part = FunctionPart(reward_function(f), price=0.5, timeout=60.0)
    with Grader([part]) as grader:
        grader.submit([group(["a", "slow"])])
        with ScoreCache() as cache:
            until = time.monotonic() + 20.0
            while not kept(cache):
                assert time.monotonic() < until
                time.sleep(0.01)
    assert grader.spent == 1.0
    with Grader([part]) as grader:
        assert values(grader.score([group(["a"])])) == [1.0]
        assert grader.spent == 0.0
    assert asked(Path(log)) == ["a"]


def kept(cache: ScoreCache) -> int:
    cache.get("")  # opens the file
    assert cache._connection is not None
    return cache._connection.execute("SELECT COUNT(*) FROM scores").fetchone()[0]


def test_another_function_another_option_another_closure_is_another_identity():
    def plain(sample):
        return 1.0

    def other(sample):
        return 1.0

    one = identity_of(plain, {})
    assert one is not None and one == identity_of(plain, {})
    made = [counting("x", 0.5), counting("x", 0.6), counting("y", 0.5)]
    hashes = [one, identity_of(other, {}), identity_of(plain, {"scale": 2})]
    hashes += [identity_of(f, {}) for f in made]
    hashes.append(identity_of(functools.partial(plain, scale=3), {}))
    assert None not in hashes and len(set(hashes)) == 7
    assert identity_of(counting("x", 0.5), {}) == identity_of(made[0], {})


def test_what_cannot_be_told_apart_is_not_kept_and_says_so(tmp_path):
    held = object()

    def closes_over(sample):
        return float(held is not None)

    class Callable:
        def __call__(self, sample):
            return 1.0

    source: dict[str, object] = {}
    exec("def typed(sample):\n    return 1.0\n", source)
    assert identity_of(closes_over, {}) is None
    assert identity_of(Callable(), {}) is None
    assert identity_of(source["typed"], {}) is None
    part = FunctionPart(reward_function(closes_over), price=1.0)
    with Grader([part]) as grader:
        assert "not kept" in grader.rewards[0].note
        for _ in range(2):
            assert values(grader.score([group(["a"])])) == [1.0]
        assert grader.spent == 2.0


def test_what_is_not_counted_is_paid_all_the_same(tmp_path):
    part = native(counting(str(tmp_path / "log")), name="f", price=0.5, timeout=30.0)
    with Grader([part]) as grader:
        grader.score([group(["a"])])
        grader.score([group(["b"])], counted=False)
        assert (grader.counts()["cost/rewards/f"], grader.spent) == (1.0, 1.0)


METHOD = {"name": "rloo", "group_size": 4, "kl": {"coef": 0.0, "measure_every": 0}}


def test_the_total_is_in_every_row_in_the_checkpoint_and_in_the_closing_table(
    tiny_model: Path, tmp_path: Path
) -> None:
    bench = make_loop(
        tiny_model, tmp_path / "run", method=METHOD, judge=lambda p, s, c: float(s % 2), steps=3
    )
    bench.loop._paid_before = 2.0  # of an earlier process

    def pays(groups, **rest):
        bench.grader.spent = (bench.grader.spent or 0.0) + 0.5
        return type(bench.grader).score(bench.grader, groups, **rest)

    bench.grader.score = pays  # type: ignore[method-assign]
    bench.run()
    assert [row["cost/total"] for row in bench.metrics()] == [2.5, 3.0, 3.5]
    assert progress_of(load_latest(bench.desk.directory)).cost == 3.5
    assert "$3.5" in summary_table(summary(bench.path)).splitlines()[-1]


def test_without_a_price_there_is_no_cost(tiny_model: Path, tmp_path: Path) -> None:
    bench = make_loop(
        tiny_model, tmp_path / "run", method=METHOD, judge=lambda p, s, c: float(s % 2), steps=1
    )
    bench.run()
    assert "cost/total" not in bench.metrics()[0]
    assert "paid" not in summary_table(summary(bench.path))


def test_a_checkpoint_from_before_costs_were_counted_is_read(
    tiny_model: Path, tmp_path: Path
) -> None:
    bench = make_loop(
        tiny_model, tmp_path / "run", method=METHOD, judge=lambda p, s, c: float(s % 2), steps=1
    )
    bench.run()
    loaded = load_latest(bench.desk.directory)
    state = json.loads(json.dumps(dict(loaded.state)))
    assert state.pop("cost") == 0.0
    old = replace(loaded, state=state)
    assert progress_of(old).cost == 0.0 and progress_of(old).step == 1
