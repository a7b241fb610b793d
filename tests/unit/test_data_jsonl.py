"""Files of JSON lines: columns, places and reasons of bad rows, and what is never read."""

from __future__ import annotations

import datetime
import decimal
import gzip
import json
import re

import numpy as np
import pytest
from data_stand_ins import Spec, Words, recipe, write_lines

from surefoot.data import build
from surefoot.errors import DataError, RecipeError

GOOD = {"prompt": "one two", "answer": "3"}


def prompts_of(path, rows=None, encoder=None, **spec):
    data = build(recipe(Spec(str(path), **spec)), encoder or Words(), rows=rows)
    return sorted(data.stream.take(len(data.stream), step=1), key=lambda p: p.text)


def test_a_row_becomes_a_prompt(tmp_path):
    row = {"prompt": "one two", "answer": "3", "level": 4, "tests": [{"in": 1}]}
    (prompt,) = prompts_of(write_lines(tmp_path / "a.jsonl", row))
    assert (prompt.text, prompt.answer, prompt.task) == ("one two", "3", "default")
    assert prompt.columns == {"answer": "3", "level": 4, "tests": [{"in": 1}]}
    assert len(prompt.ids) == 5
    assert prompt.messages is None


def test_id_is_the_hash_of_the_canonical_row(tmp_path):
    (prompt,) = prompts_of(write_lines(tmp_path / "a.jsonl", '{"prompt": "b",  "answer":"1"}'))
    # printf '{"answer":"1","prompt":"b"}' | sha256sum
    assert prompt.id == "d5fbc90806710b40"
    (other,) = prompts_of(write_lines(tmp_path / "b.jsonl", '{"answer":"1","prompt":"b"}'))
    (changed,) = prompts_of(write_lines(tmp_path / "c.jsonl", '{"answer":"2","prompt":"b"}'))
    assert other.id == prompt.id != changed.id


def test_columns_are_mapped_and_the_originals_travel(tmp_path):
    row = {"question": "q w", "solution": 12, "name": 7, "kind": "sum", "level": "hard"}
    columns = {
        "prompt": "question",
        "answer": "solution",
        "id": "name",
        "task": "kind",
        "difficulty": "level",
    }
    (prompt,) = prompts_of(write_lines(tmp_path / "a.jsonl", row), columns=columns)
    assert (prompt.id, prompt.text, prompt.answer, prompt.task) == ("7", "q w", "12", "sum")
    assert prompt.columns["difficulty"] == prompt.columns["level"] == "hard"
    assert prompt.columns["solution"] == 12


def test_task_of_the_source_wins_over_the_rows_own(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {**GOOD, "task": "own"})
    assert prompts_of(path)[0].task == "own"
    assert prompts_of(path, task="given")[0].task == "given"
    with pytest.raises(RecipeError, match="both label the rows"):
        prompts_of(path, task="given", columns={"task": "task"})


BAD_LINES = [
    ('{"prompt": "a",}', r"a\.jsonl:2: malformed JSON at column 16"),
    ("[1, 2]", r"a\.jsonl:2: the row is a list, not an object"),
    ('"text"', r"a\.jsonl:2: the row is text"),
    ({"answer": "1"}, r"a\.jsonl:2: column 'prompt' is missing; columns present: answer\."),
    ({"prompts": "x"}, r"Did you mean 'prompts'\?"),
    ({"question": "x"}, r"Did you mean 'question'\?.*data\.columns: \{prompt: question\}"),
    ({"prompt": 5}, r"a\.jsonl:2: prompt column 'prompt' holds a whole number, not text or a list"),
    ({"prompt": " \n"}, r"a\.jsonl:2: prompt column 'prompt' is empty"),
    ({"prompt": None}, r"a\.jsonl:2: prompt column 'prompt' holds null"),
    ({"prompt": "a\0b"}, r"a\.jsonl:2: prompt column 'prompt' contains a NUL"),
    ({"prompt": "a", "answer": ""}, r"a\.jsonl:2: answer column 'answer' is empty"),
    ({"prompt": "a", "answer": ["1"]}, r"a\.jsonl:2: answer column 'answer' holds a list"),
    ({"prompt": "a", "answer": True}, r"a\.jsonl:2: answer column 'answer' holds true or false"),
    ('{"prompt": "a", "x": NaN}', r"a\.jsonl:2: malformed JSON: NaN is not a JSON number"),
    ('{"prompt": "a", "prompt": "b"}', r"a\.jsonl:2: malformed JSON: key 'prompt' appears twice"),
    ('{"prompt": ' + "[" * 100_000, r"a\.jsonl:2: malformed JSON: nested too deeply"),
    ('{"prompt": "a", "n": ' + "9" * 5000 + "}", r"a\.jsonl:2: malformed JSON: .*digits"),
    ({"prompt": [], "answer": "1"}, r"empty list of messages"),
    ({"prompt": [{"role": "user"}]}, r"message 0 is not an object with 'role' and 'content'"),
    ({"prompt": [{"role": "bot", "content": "x"}]}, r"message 0 has role 'bot'; roles are"),
    ({"prompt": [{"role": "user", "content": ["x"]}]}, r"message 0 has a list as content"),
    ({"prompt": [{"role": "user", "content": "x", "name": "n"}]}, r"message 0 has name"),
    ({"prompt": [{"role": "system", "content": "x"}]}, r"system prompt only"),
    (
        {"prompt": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
        r"last message has role 'assistant'",
    ),
    ({"prompt": "a <|end|> b"}, r"a\.jsonl:2: the prompt contains a control token"),
]


@pytest.mark.fault(31)
@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_bad_line_is_named_with_its_reason(tmp_path, line, message):
    path = write_lines(tmp_path / "a.jsonl", GOOD, line, GOOD)
    with pytest.raises(DataError, match=message) as caught:
        prompts_of(path)
    assert "data.skip_invalid: true" in str(caught.value)


@pytest.mark.fault(31)
@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_bad_line_can_be_skipped_and_is_listed(tmp_path, line, message):
    path = write_lines(tmp_path / "a.jsonl", GOOD, line, GOOD)
    data = build(recipe(Spec(path, options={"skip_invalid": True, "max_invalid": 0.5})), Words())
    assert len(data.stream) == 2
    (listed,) = data.report.quarantine
    assert listed.where == f"{path}:2"
    assert re.search(message.split(":2: ")[-1], listed.reason)
    assert data.report.counts()["quarantined"] == 1


@pytest.mark.fault(31)
def test_a_second_use_of_an_id_names_the_first(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {**GOOD, "id": 1}, GOOD, {**GOOD, "id": "1"})
    with pytest.raises(DataError, match=r"a\.jsonl:3: id '1' was already used by .*a\.jsonl:1"):
        prompts_of(path)


def test_equal_rows_without_ids_are_duplicates_and_stay(tmp_path):
    data = build(recipe(Spec(write_lines(tmp_path / "a.jsonl", GOOD, GOOD))), Words())
    assert len(data.stream) == 2
    assert data.report.counts()["duplicates"] == 1


@pytest.mark.fault(31)
def test_one_percent_may_be_skipped_and_no_more(tmp_path):
    skip = {"skip_invalid": True}
    rows = [{"prompt": f"p {i}"} for i in range(99)]
    data = build(recipe(Spec(write_lines(tmp_path / "a.jsonl", *rows, "{"), options=skip)), Words())
    assert len(data.stream) == 99
    path = write_lines(tmp_path / "b.jsonl", *rows[:98], "{", "[")
    with pytest.raises(DataError, match=r"2 of 100 rows are invalid \(2\.0%\).*1\.0%.*:99: malf"):
        build(recipe(Spec(path, options=skip)), Words())
    build(recipe(Spec(path, options={**skip, "max_invalid": 0.02})), Words())


def test_when_nothing_valid_is_left_it_says_so(tmp_path):
    options = {"skip_invalid": True, "max_invalid": 1}
    with pytest.raises(DataError, match=r"no valid row is left.*:1: malformed"):
        build(recipe(Spec(write_lines(tmp_path / "a.jsonl", "{"), options=options)), Words())


@pytest.mark.fault(34)
def test_lone_surrogates_are_replaced_and_pairs_are_not(tmp_path):
    line = r'{"prompt": "a \ud800 b \ud83d\ude00", "\udfffk": ["\udc00"]}'
    data = build(recipe(Spec(write_lines(tmp_path / "a.jsonl", line))), Words())
    (prompt,) = data.stream.take(1, step=1)
    assert prompt.text == "a \ufffd b \U0001f600"
    assert prompt.columns == {"\ufffdk": ["\ufffd"]}
    assert data.report.counts()["surrogates"] == 3
    json.dumps(prompt.columns).encode("utf-8")


@pytest.mark.fault(34)
def test_a_line_over_the_limit_is_refused_and_the_next_is_read(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", GOOD, {"prompt": "x" * (1 << 20)}, GOOD)
    with pytest.raises(DataError, match=r":2: the line has 1048590 bytes, more than max_line_byt"):
        prompts_of(path)
    options = {"skip_invalid": True, "max_invalid": 0.5}
    assert len(prompts_of(path, options=options)) == 2
    assert len(prompts_of(path, options={"max_line_bytes": 2_000_000})) == 3


def test_the_limit_counts_the_line_without_its_end(tmp_path):
    line = json.dumps(GOOD)
    path = write_lines(tmp_path / "a.jsonl", line)
    assert len(prompts_of(path, options={"max_line_bytes": len(line)})) == 1
    with pytest.raises(DataError, match="max_line_bytes"):
        prompts_of(path, options={"max_line_bytes": len(line) - 1})


def test_not_utf8_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match=r":2: not UTF-8 at byte 13"):
        prompts_of(path)


def test_byte_order_mark_blank_lines_and_windows_ends_are_harmless(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \n{"prompt": "b"}')
    assert [p.text for p in prompts_of(path)] == ["a", "b"]


def test_gzip_and_arrays_give_the_same_prompts(tmp_path):
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    plain = prompts_of(write_lines(tmp_path / "a.jsonl", *rows))
    zipped = tmp_path / "a.jsonl.gz"
    zipped.write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    array = tmp_path / "a.json"
    array.write_text(json.dumps(rows, indent=1))
    assert {p.id for p in prompts_of(zipped)} == {p.id for p in plain}
    assert {p.id for p in prompts_of(array)} == {p.id for p in plain}


def test_a_bad_array_element_is_named_by_its_number(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[{"prompt": "a"}, {"prompt": ""}]')
    with pytest.raises(DataError, match=r"a\.json: element 2: prompt column 'prompt' is empty"):
        prompts_of(path)
    path.write_text('[{"prompt": "a"}')
    with pytest.raises(DataError, match=r"a\.json: malformed JSON"):
        prompts_of(path)


def test_a_broken_gzip_is_an_error_even_where_rows_may_be_skipped(tmp_path):
    whole = gzip.compress("".join(f'{{"prompt": "{i}"}}\n' for i in range(999)).encode())
    path = tmp_path / "a.jsonl.gz"
    options = {"skip_invalid": True, "max_invalid": 1}
    for broken in (whole[:-300], b"plain text", whole[:200] + b"\xff" * 40 + whole[240:]):
        path.write_bytes(broken)
        with pytest.raises(DataError, match="not a whole gzip file"):
            prompts_of(path, options=options)


def test_missing_and_empty_files(tmp_path):
    write_lines(tmp_path / "train.jsonl", GOOD)
    with pytest.raises(DataError, match=r"no file .*tran\.jsonl\. Files there: train\.jsonl"):
        prompts_of(tmp_path / "tran.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(DataError, match=r"empty\.jsonl is empty"):
        prompts_of(tmp_path / "empty.jsonl")
    (tmp_path / "dir.jsonl").mkdir()
    with pytest.raises(DataError, match=r"is a directory"):
        prompts_of(tmp_path / "dir.jsonl")


def test_relative_paths_start_at_the_recipe(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    write_lines(tmp_path / "a.jsonl", GOOD)
    write_lines(tmp_path / "here" / "a.jsonl", GOOD, GOOD)
    monkeypatch.chdir(tmp_path / "here")
    spec = recipe(Spec("a.jsonl"))
    assert len(build(spec, Words(), base_dir=tmp_path).stream) == 1
    assert len(build(spec, Words()).stream) == 2


def test_a_mapped_answer_must_be_there(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "a"}, {"prompt": "b", "answer": None})
    assert [p.answer for p in prompts_of(path)] == [None, None]
    with pytest.raises(DataError, match=r":1: column 'answer' is missing"):
        prompts_of(path, columns={"answer": "answer"})
    nulls = write_lines(tmp_path / "b.jsonl", {"prompt": "b", "gold": None})
    with pytest.raises(DataError, match=r":1: answer column 'gold' holds null"):
        prompts_of(nulls, columns={"answer": "gold"})


GSM8K = {
    "question": "Ann has 16 eggs.",
    "answer": "She sells <<16-3=13>>13 eggs, at $1,000 each.\n#### 13,000",
}


def test_the_gold_of_gsm8k_is_bare(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", GSM8K)
    columns = {"prompt": "question"}
    (prompt,) = prompts_of(path, columns=columns, options={"answer_format": "gsm8k"})
    assert prompt.answer == prompt.columns["answer"] == "13000"
    (whole,) = prompts_of(path, columns=columns)
    assert whole.answer == whole.columns["answer"] == GSM8K["answer"]
    # The text with the reasoning travels under another name where a reward wants it.
    columns["solution"] = "answer"
    (prompt,) = prompts_of(path, columns=columns, options={"answer_format": "gsm8k"})
    assert (prompt.answer, prompt.columns["solution"]) == ("13000", GSM8K["answer"])


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("#### 42", "42"),
        ("a\n####-1,234,567.5 ", "-1234567.5"),
        ("#### 3\n#### 4", "4"),
        ("#### 1,2", "1,2"),
        ("#### 7 apples", "7 apples"),
    ],
)
def test_what_follows_the_last_mark_is_the_gold(tmp_path, text, gold):
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "q", "answer": text})
    (prompt,) = prompts_of(path, options={"answer_format": "gsm8k"})
    assert prompt.answer == gold


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "q", "answer": "42"}, r":2: answer column 'answer' has no answer after ####"),
        ({"prompt": "q", "answer": "so #### "}, r":2: answer column 'answer' has no answer after"),
        ({"prompt": "q", "answer": 42}, r":2: answer column 'answer' has no answer after ####"),
        ({"prompt": "q"}, r":2: column 'answer' is missing"),
    ],
)
def test_a_row_without_a_gold_is_refused(tmp_path, row, message):
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "p", "answer": "#### 1"}, row)
    with pytest.raises(DataError, match=message):
        prompts_of(path, options={"answer_format": "gsm8k"})


def test_an_unknown_answer_format_is_refused(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", GOOD)
    with pytest.raises(RecipeError, match=r"data\.answer_format is 'gsm', .* one of: gsm8k"):
        prompts_of(path, options={"answer_format": "gsm"})
    with pytest.raises(RecipeError, match=r"'addition' has no such option"):
        build(recipe(Spec("addition", options={"answer_format": "gsm8k"})), Words())


def test_nested_columns_are_reached_by_a_path(tmp_path):
    row = {"prompt": "q", "reward_model": {"ground_truth": "5"}, "extra.info": 1, "extra": {"k": 2}}
    path = write_lines(tmp_path / "a.jsonl", row)
    columns = {"answer": "reward_model.ground_truth", "dotted": "extra.info", "deep": "extra.k"}
    (prompt,) = prompts_of(path, columns=columns)
    assert (prompt.answer, prompt.columns["dotted"], prompt.columns["deep"]) == ("5", 1, 2)
    with pytest.raises(DataError, match=r":1: column 'extra\.none' is missing"):
        prompts_of(path, columns={"answer": "extra.none"})


def test_python_values_of_numpy_and_of_the_calendar_become_plain():
    row = {
        "prompt": "a",
        "n": np.int64(3),
        "x": np.float32(0.5),
        "v": np.array([[1, 2], [3, 4]]),
        "day": datetime.date(2024, 2, 29),
        "price": decimal.Decimal("1.50"),
    }
    (prompt,) = build(recipe(Spec("rows")), Words(), rows=[row]).stream.take(1, step=1)
    assert prompt.columns == {
        "n": 3,
        "x": 0.5,
        "v": [[1, 2], [3, 4]],
        "day": "2024-02-29",
        "price": "1.50",
    }
    assert [type(prompt.columns[name]) for name in ("n", "x", "v")] == [int, float, list]
    with pytest.raises(DataError, match=r"data\[0\]: column 'v' holds nan"):
        build(recipe(Spec("rows")), Words(), rows=[{"prompt": "a", "v": np.array([np.nan])}])


def test_a_null_key_of_a_message_is_no_key(tmp_path):
    message = {"role": "user", "content": "x", "name": None}
    (prompt,) = prompts_of(write_lines(tmp_path / "a.jsonl", {"prompt": [message]}))
    assert prompt.messages == ({"role": "user", "content": "x"},)


def test_a_rename_onto_an_existing_column_is_refused(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "a", "level": 1, "rank": 2})
    with pytest.raises(DataError, match="'level' cannot be renamed 'rank'"):
        prompts_of(path, columns={"rank": "level"})


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("d.parquet", DataError, r"there is no file d\.parquet"),
        ("d.arrow", DataError, r"there is no file d\.arrow"),
        ("/no/such/directory", RecipeError, r"unknown source '/no/such/directory'"),
        ("d.pkl", DataError, r"can carry code and are never read"),
        ("d.csv", DataError, r"this format is not read"),
        ("additon", RecipeError, r"unknown source 'additon'\. Did you mean 'addition'\?"),
    ],
)
def test_sources_that_cannot_be_read(source, error, message):
    with pytest.raises(error, match=message):
        build(recipe(Spec(source)), Words())


def test_python_rows_are_checked_like_lines():
    data = build(recipe(Spec("rows", eval_size=1)), Words(), rows=[GOOD, {"prompt": "x"}])
    assert (len(data.stream), len(data.eval_prompts)) == (1, 1)
    with pytest.raises(DataError, match=r"data\[1\]: prompt column 'prompt' is empty"):
        build(recipe(Spec("rows")), Words(), rows=[GOOD, {"prompt": ""}])
    with pytest.raises(DataError, match=r"data\[0\]: column 'x' holds a set"):
        build(recipe(Spec("rows")), Words(), rows=[{"prompt": "a", "x": {1}}])
    with pytest.raises(DataError, match=r"data\[0\]: column 'x' holds nan"):
        build(recipe(Spec("rows")), Words(), rows=[{"prompt": "a", "x": float("nan")}])
    with pytest.raises(DataError, match="data is empty"):
        build(recipe(Spec("rows")), Words(), rows=[])
    with pytest.raises(DataError, match="must be a list of rows"):
        build(recipe(Spec("rows")), Words(), rows=GOOD)


def test_python_rows_need_the_source_and_the_source_needs_rows():
    with pytest.raises(RecipeError, match="no rows were passed"):
        build(recipe(Spec("rows")), Words())
    with pytest.raises(RecipeError, match="source 'rows' exactly once"):
        build(recipe(Spec("addition")), Words(), rows=[GOOD])


def test_rows_for_evaluation_have_a_source_of_their_own():
    specs = recipe(Spec("rows"), Spec("rows", role="eval"))
    data = build(specs, Words(), rows=[GOOD], eval_rows=[{"prompt": "x"}, {"prompt": "y"}])
    assert [p.text for p in data.stream.take(1, step=1)] == ["one two"]
    assert [p.text for p in data.eval_prompts] == ["x", "y"]
    with pytest.raises(DataError, match=r"eval_data\[0\]: prompt column 'prompt' is empty"):
        build(specs, Words(), rows=[GOOD], eval_rows=[{"prompt": ""}])
    with pytest.raises(RecipeError, match=r"passed as eval_data.*role: eval"):
        build(recipe(Spec("rows")), Words(), rows=[GOOD], eval_rows=[GOOD])
    with pytest.raises(RecipeError, match=r"passed as data.*exactly once"):
        build(specs, Words(), rows=[GOOD])
    with pytest.raises(RecipeError, match="no rows were passed"):
        build(specs, Words(), eval_rows=[GOOD])


def test_python_rows_and_the_file_of_them_have_one_hash(tmp_path):
    rows = [{"prompt": f"p {i}", "answer": i} for i in range(4)]
    from_file = build(recipe(Spec(write_lines(tmp_path / "a.jsonl", *rows))), Words())
    from_python = build(recipe(Spec("rows")), Words(), rows=iter(rows))
    assert from_file.hash == from_python.hash
