"""Pairs and demonstrations made from the scored samples of a run, and read back as data."""

from __future__ import annotations

import json

import pytest
from example_tools import examples, shared_encoder, trained_texts, words

from surefoot.data import Demonstration, Pair, demonstrations_from_run, pairs_from_run
from surefoot.errors import DataError

END = "<|im_end|>"


def sample(position, number, text, score, **changes):
    row = {
        "step": 1 + position // 10,
        "position": position,
        "split": "train",
        "id": f"p{position % 10}",
        "task": "sums",
        "sample": number,
        "prompt": f"Question {position % 10}?",
        "completion": text,
        "score": score,
        "stop": "stop",
        "advantage": 0.0,
    }
    return {**row, **changes}


GROUP = [
    sample(0, 0, "so-so", 0.5),
    sample(0, 1, "bad", -1.0),
    sample(0, 2, "good", 2.0),
    sample(0, 3, "also good", 2.0),
    sample(0, 4, "also bad", -1.0),
]


def test_the_best_is_preferred_to_the_worst():
    (row,) = pairs_from_run(GROUP).rows
    assert row == {
        "id": "p0@0",
        "task": "sums",
        "prompt": "Question 0?",
        "chosen": "good",
        "rejected": "bad",
        "margin": 3.0,
    }


def test_groups_without_a_difference_are_counted():
    rows = [
        *GROUP,
        sample(1, 0, "a", 1.0),  # alone
        sample(2, 0, "a", 1.0),  # equal scores
        sample(2, 1, "b", 1.0),
        sample(3, 0, "a", 1.0),  # equal words
        sample(3, 1, "a", 0.0),
        sample(4, 0, " ", 1.0),  # nothing said
        sample(4, 1, "a", 0.0),
    ]
    made = pairs_from_run(rows)
    assert (made.groups, len(made.rows)) == (5, 1)
    assert (made.alone, made.tied, made.empty) == (1, 2, 1)
    assert "1 rows from 12 samples and 5 groups" in made.lines()[0]


def test_two_draws_of_one_prompt_are_two_groups():
    rows = [
        sample(0, 0, "a", 1.0),
        sample(0, 1, "b", 0.0),
        sample(10, 0, "c", 1.0),
        sample(10, 1, "d", 0.0),
    ]
    made = pairs_from_run(rows)
    assert [(row["id"], row["chosen"]) for row in made.rows] == [("p0@0", "a"), ("p0@10", "c")]


def test_what_cannot_be_imitated_is_left_out_and_counted():
    rows = [
        *GROUP,
        sample(0, 5, "held out", 9.0, split="eval"),
        sample(0, 6, "unscored", None),
        sample(0, 7, "cut o", 9.0, stop="length"),
    ]
    made = demonstrations_from_run(rows, at_least=0.5)
    assert [row["completion"] for row in made.rows] == ["so-so", "good", "also good"]
    assert (made.samples, made.evaluation, made.unscored, made.truncated) == (8, 1, 1, 1)
    assert made.below == 2
    assert pairs_from_run(rows).rows == pairs_from_run(GROUP).rows
    assert "  1 samples left out: cut at the length limit, or failed" in made.lines()


def test_the_same_words_to_the_same_prompt_are_one_demonstration():
    rows = [sample(0, 0, "a", 1.0), sample(10, 0, "a", 1.0), sample(1, 0, "a", 1.0)]
    made = demonstrations_from_run(rows, at_least=1.0)
    assert ([row["id"] for row in made.rows], made.repeated) == (["p0@0/0", "p1@1/0"], 1)


def test_an_older_runs_samples_are_refused():
    row = {key: value for key, value in GROUP[1].items() if key != "position"}
    with pytest.raises(DataError, match="sample 2 of the run lacks position"):
        pairs_from_run([GROUP[0], row])


def test_what_is_made_is_read_back(tmp_path):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "Question 1?"}]
    rows = [
        *GROUP,
        sample(1, 0, "one", 1.0, messages=messages, prompt="rendered"),
        sample(1, 1, "two", 0.0, messages=messages, prompt="rendered"),
    ]
    pairs = [json.loads(line) for line in pairs_from_run(rows).text().splitlines()]
    built = examples(pairs, Pair)
    found = {pair.id: pair for pair in built.stream.take(2, step=1)}
    assert words("tiny", found["p0@0"].chosen) == f"good{END}"
    assert (found["p0@0"].margin, found["p0@0"].task) == (3.0, "sums")
    assert found["p1@1"].prompt == shared_encoder("tiny").encode(messages)
    text = demonstrations_from_run(rows, at_least=1.0).text()
    built = examples([json.loads(line) for line in text.splitlines()], Demonstration)
    texts = {text for row in built.stream.take(3, step=1) for text in trained_texts("tiny", row)}
    assert texts == {f"good{END}", f"also good{END}", f"one{END}"}
