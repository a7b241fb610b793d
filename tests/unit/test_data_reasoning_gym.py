"""The reasoning_gym source: entries reach rewards as JSON, test questions stay apart."""

from __future__ import annotations

import json
import sys

import pytest
from data_stand_ins import Spec, Words, recipe

from surefoot.data import build
from surefoot.errors import DataError, RecipeError


def data_of(eval_size=0, run_seed=0, **options):
    spec = Spec("reasoning_gym", eval_size=eval_size, options=options)
    return build(recipe(spec, seed=run_seed), Words())


def test_without_the_package_the_mend_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(DataError, match=r"pip install 'surefoot\[tasks\]'"):
        data_of(name="chain_sum")


class TestWithPackage:
    @pytest.fixture(autouse=True)
    def package(self):
        return pytest.importorskip("reasoning_gym")

    def test_an_entry_reaches_the_reward_as_json(self, package):
        data = data_of(name="chain_sum", size=5)
        for prompt in data.stream.take(5, step=1):
            held = prompt.columns["reasoning_gym"]
            assert held == json.loads(json.dumps(held))
            assert held["dataset"] == "chain_sum" == prompt.task
            assert held["entry"]["question"] == prompt.text
            score = package.get_score_answer_fn("chain_sum")
            assert score(prompt.answer, held["entry"]) == 1.0
            assert score("not a number", held["entry"]) < 1.0

    def test_entries_and_ids_follow_the_seed(self):
        first = {p.id: p.text for p in data_of(name="chain_sum", size=5).stream.take(5, step=1)}
        again = {p.id: p.text for p in data_of(name="chain_sum", size=5).stream.take(5, step=1)}
        other = {
            p.id: p.text for p in data_of(name="chain_sum", size=5, seed=100).stream.take(5, step=1)
        }
        assert first == again
        assert set(first) == {f"chain_sum-0-{i}" for i in range(5)}
        assert not set(first.values()) & set(other.values())

    def test_test_questions_are_different_and_not_trained(self):
        # two one-digit terms: a small space, so that the seeds do collide
        config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
        data = data_of(20, name="chain_sum", size=100, config=config)
        tested = [p.text for p in data.eval_prompts]
        trained = {p.text for p in data.stream.take(len(data.stream), step=1)}
        assert len(set(tested)) == 20
        assert not trained & set(tested)
        assert data.report.counts()["overlap"] > 0

    def test_close_seeds_share_no_entry_with_the_test_set(self):
        # entry i of seed s is entry i - 1 of seed s + 1 in the package
        first = {p.text for p in data_of(name="needle_haystack", size=30).stream.take(30, step=1)}
        second = data_of(name="needle_haystack", size=30, seed=1).stream.take(30, step=1)
        assert len(first & {p.text for p in second}) == 29
        counted = data_of(20, name="needle_haystack", size=30).report.counts()
        assert (counted["train"], counted["eval"], counted["overlap"]) == (30, 20, 0)

    def test_the_run_seed_changes_neither_set(self):
        one = data_of(5, run_seed=1, name="gcd", size=9)
        two = data_of(5, run_seed=2, name="gcd", size=9)
        assert one.hash == two.hash
        assert one.hash != data_of(5, run_seed=1, name="gcd", size=9, seed=3).hash

    def test_entries_whose_own_answer_fails_are_left_out(self, package, monkeypatch):
        scorer = package.factory.DATASETS["gcd"][0]
        whole = data_of(name="gcd", size=40)
        ones = sum(p.answer == "1" for p in whole.stream.take(40, step=1))
        assert 0 < ones < 40
        monkeypatch.setattr(scorer, "score_answer", lambda self, answer, entry: answer != "1")
        data = data_of(name="gcd", size=40)
        assert len(data.stream) == 40 - ones
        assert data.report.counts()["gold_rejected"] == ones
        assert data.report.counts()["rows"] == 40
        monkeypatch.setattr(scorer, "score_answer", lambda self, answer, entry: 0.05)
        with pytest.raises(DataError, match=r"all 40 entries of 'gcd' have an answer that its own"):
            data_of(name="gcd", size=40)

    def test_an_entry_without_an_answer_has_none_to_check(self):
        (prompt,) = data_of(name="rush_hour", size=1).stream.take(1, step=1)
        assert prompt.answer is None

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({}, r"data\.name is missing"),
            ({"name": "chain_sums"}, r"no dataset 'chain_sums'\. Did you mean 'chain_sum'\?"),
            ({"name": "gcd", "config": {"min_number": 1}}, r"config\.min_number.*'min_numbers'\?"),
            ({"name": "gcd", "config": {"seed": 1}}, r"config\.seed: set data\.seed instead"),
            ({"name": "gcd", "config": {"min_numbers": 0}}, r"data\.config: 'gcd' refuses it"),
            ({"name": "gcd", "config": 3}, r"data\.config is 3, but it must be a mapping"),
            ({"name": "gcd", "size": 0}, r"data\.size is 0, but it must be at least 1"),
        ],
    )
    def test_wrong_options_are_named(self, options, message):
        with pytest.raises(RecipeError, match=message):
            data_of(**options)

    def test_too_few_different_questions_for_the_test_set(self):
        config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
        with pytest.raises(DataError, match=r"eval_size is 500.*hold only \d+ different"):
            data_of(500, name="chain_sum", size=5, config=config)
