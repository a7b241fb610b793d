"""From rows to demonstrations, pairs, labels and rankings, on real tokenizers."""

from __future__ import annotations

import gzip
import json
import runpy
from pathlib import Path

import pytest
from data_stand_ins import Spec, recipe, write_lines
from example_tools import (
    TOKENIZERS,
    encoder,
    examples,
    only,
    shared_encoder,
    shared_tokenizer,
    trained_texts,
    words,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny import CHARACTERS

from surefoot.data import Demonstration, Label, Pair, Ranking, build_examples
from surefoot.errors import DataError, RecipeError

ROOT = Path(__file__).resolve().parents[2]
END = "<|im_end|>"
USER = {"role": "user", "content": "Two and two?"}
FOUR = {"role": "assistant", "content": "Four."}
FIVE = {"role": "assistant", "content": "Five."}
TALK = [USER, FOUR, {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]
PAIR = {"prompt": "Two and two?", "chosen": "Four.", "rejected": "Five."}
HUMAN = "\n\nHuman: Two and two?\n\nAssistant:"


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Two and two?", "completion": "Four."},
        {"prompt": [USER], "completion": [FOUR]},
        {"prompt": [USER], "completion": "Four."},
        {"messages": [USER, FOUR]},
        {"messages": f"{HUMAN} Four."},
    ],
)
def test_every_form_of_a_demonstration_gives_the_same_tokens(name, row):
    coder = shared_encoder(name)
    example = only([row], Demonstration, encoder=coder)
    assert trained_texts(name, example) == [f"Four.{END}"]
    assert example.ids[: example.trained.index(True)] == coder.encode([USER])
    assert example.trained_tokens == len(example.ids) - len(coder.encode([USER]))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_what_is_trained(name):
    def texts(train_on, row=None):
        row = row or {"messages": TALK}
        coder = shared_encoder(name)
        return trained_texts(name, only([row], Demonstration, encoder=coder, train_on=train_on))

    assert texts("completion") == [f"Yes.{END}"]
    assert texts("assistant") == [f"Four.{END}", f"Yes.{END}"]
    (everything,) = texts("all")
    assert everything.endswith(f"Yes.{END}")
    several = {"prompt": [USER], "completion": TALK[1:]}
    assert texts("completion", several) == texts("assistant")


@settings(max_examples=50, deadline=None)
@given(
    st.text(alphabet=CHARACTERS, min_size=1, max_size=30).filter(str.strip),
    st.text(alphabet=CHARACTERS, min_size=1, max_size=30).filter(str.strip),
)
def test_the_trained_tokens_are_the_completion_and_its_end(prompt, completion):
    row = {"prompt": prompt, "completion": completion}
    for plain in (False, True):
        coder = shared_encoder("tiny", plain=plain)
        example = only([row], Demonstration, encoder=coder)
        assert trained_texts("tiny", example) == [completion + END]
        assert example.ids[-1] == 2


def test_all_but_the_first_id_is_trained_in_plain_text():
    example = only([{"text": "one two"}], Demonstration, train_on="all")
    assert words("tiny", example.ids) == f"one two{END}"
    assert example.trained == (False, *[True] * 7)
    open_end = only([{"text": "one two", "continues": True}], Demonstration, train_on="all")
    assert words("tiny", open_end.ids) == "one two"
    whole = only([{"text": "one two", "continues": False}], Demonstration, train_on="all")
    assert whole.ids == example.ids


@pytest.mark.parametrize("train_on", ["completion", "assistant"])
def test_plain_text_has_no_part_to_train(train_on):
    with pytest.raises(RecipeError, match=rf"method\.train_on is {train_on}, but data\[0\] is pl"):
        only([{"text": "one"}], Demonstration, train_on=train_on)


def test_without_a_template_there_are_no_turns():
    plain = shared_encoder("tiny", plain=True)
    row = {"prompt": "a", "completion": "b"}
    with pytest.raises(RecipeError, match=r"no chat template.*train_on: completion"):
        only([row], Demonstration, encoder=plain, train_on="assistant")
    with pytest.raises(DataError, match=r"data\[0\]: the row holds messages, but the model has no"):
        only([{"messages": TALK}], Demonstration, encoder=plain)
    example = only([row], Demonstration, encoder=plain, train_on="all")
    assert words("tiny", example.ids) == f"ab{END}"
    assert example.trained == (False, True, True)


PAIRS = [
    PAIR,
    {"prompt": [USER], "chosen": [FOUR], "rejected": [FIVE]},
    {"prompt": [USER], "chosen": "Four.", "rejected": "Five."},
    {"chosen": [USER, FOUR], "rejected": [USER, FIVE]},
    {"prompt": "Two and two?", "chosen": [USER, FOUR], "rejected": [USER, FIVE]},
    {"chosen": f"{HUMAN} Four.", "rejected": f"{HUMAN} Five."},
]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("row", PAIRS)
def test_every_form_of_a_pair_gives_the_same_tokens(name, row):
    coder = shared_encoder(name)
    pair = only([row], Pair, encoder=coder)
    assert pair.prompt == coder.encode([USER])
    assert words(name, pair.chosen) == f"Four.{END}"
    assert words(name, pair.rejected) == f"Five.{END}"
    assert pair.margin is None
    assert pair.length == len(pair.prompt) + len(pair.chosen)


def test_a_transcript_splits_at_the_last_shared_turn():
    shared = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Two and two?\n\nAssistant:"
    row = {"chosen": f"{shared} Four.", "rejected": f"{shared} Five,\n\nor six."}
    pair = only([row], Pair)
    talk = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Two and two?"},
    ]
    assert pair.prompt == shared_encoder("tiny").encode(talk)
    assert words("tiny", pair.rejected) == f"Five,\n\nor six.{END}"
    plain = only([row], Pair, encoder=shared_encoder("tiny", plain=True))
    assert words("tiny", plain.prompt) == shared
    assert words("tiny", plain.chosen) == f" Four.{END}"


def test_a_pair_keeps_its_margin_task_and_id():
    row = {**PAIR, "margin": 2, "task": "sums", "id": 7}
    pair = only([row], Pair)
    assert (pair.margin, pair.task, pair.id) == (2.0, "sums", "7")
    mapped = {"q": "Two?", "good": "a", "bad": "b", "gap": 0.5}
    columns = {"prompt": "q", "chosen": "good", "rejected": "bad", "margin": "gap"}
    assert only([mapped], Pair, columns=columns).margin == 0.5


def test_the_better_answer_says_something_and_the_worse_may_not():
    pair = only([{**PAIR, "rejected": ""}], Pair)
    assert words("tiny", pair.rejected) == END
    with pytest.raises(DataError, match=r"data\[0\]: column 'chosen' is empty"):
        only([{**PAIR, "chosen": " "}], Pair)
    silent = {
        "prompt": [USER],
        "chosen": [FOUR],
        "rejected": [{"role": "assistant", "content": ""}],
    }
    assert words("tiny", only([silent], Pair).rejected) == END


def test_a_label_is_one_answer():
    rows = [
        {"prompt": "a", "completion": "b", "label": True},
        {"prompt": "a", "completion": "c", "label": 0},
        {"prompt": "a", "completion": "", "label": False},
    ]
    built = examples(rows, Label)
    found = {words("tiny", row.completion): row.desirable for row in built.stream.take(3, step=1)}
    assert found == {f"b{END}": True, f"c{END}": False, END: False}
    with pytest.raises(DataError, match=r"column 'label' holds text, not true or false"):
        only([{**rows[0], "label": "yes"}], Label)
    with pytest.raises(DataError, match=r"column 'completion' is empty"):
        only([{**rows[2], "label": True}], Label)


def test_a_pair_is_two_labels():
    built = examples([{**PAIR, "id": "p"}], Label)
    found = {row.id: row for row in built.stream.take(2, step=1)}
    assert {name: row.desirable for name, row in found.items()} == {
        "p/chosen": True,
        "p/rejected": False,
    }
    assert words("tiny", found["p/rejected"].completion) == f"Five.{END}"
    counts = built.report.counts()
    assert (counts["rows"], counts["train"], counts["examples"]) == (1, 1, 2)


@pytest.mark.parametrize("column", ["ranking", "responses"])
def test_a_ranking_holds_all_its_answers_best_first(column):
    ranking = only([{"prompt": "a", column: ["x", [FOUR], ""]}], Ranking)
    assert [words("tiny", ids) for ids in ranking.completions] == [f"x{END}", f"Four.{END}", END]
    two = only([PAIR], Ranking)
    assert [words("tiny", ids) for ids in two.completions] == [f"Four.{END}", f"Five.{END}"]


def test_equal_answers_are_counted_and_left_out():
    rows = [PAIR, {**PAIR, "rejected": "Four."}, {"chosen": [USER, FOUR], "rejected": [USER, FOUR]}]
    counts = examples(rows, Pair).report.counts()
    assert (counts["rows"], counts["tied"], counts["train"]) == (3, 2, 1)
    ranked = [{"prompt": "a", "ranking": ["x", "y", "x"]}, {"prompt": "a", "ranking": ["x", "y"]}]
    report = examples(ranked, Ranking).report
    assert report.counts()["tied"] == 1
    assert any("1 left out: two of their answers" in line for line in report.lines())
    with pytest.raises(DataError, match=r"no valid row is left\. 1 rows have equal answers"):
        examples(rows[1:2], Pair)


def test_answers_that_the_template_makes_equal_are_a_tie():
    template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    rows = [{**PAIR, "rejected": "Four. "}, PAIR]
    counts = examples(rows, Pair, encoder=encoder(template=template)).report.counts()
    assert (counts["tied"], counts["train"]) == (1, 1)


def test_the_system_prompt_stands_in_front():
    system = {"role": "system", "content": "Be brief."}
    coder = shared_encoder("tiny")
    assert only([PAIR], Pair, system="Be brief.").prompt == coder.encode([system, USER])
    example = only([{"messages": TALK}], Demonstration, system="Be brief.", train_on="assistant")
    assert words("tiny", example.ids).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert len(trained_texts("tiny", example)) == 2
    own = {"messages": [{"role": "system", "content": "Be long."}, *TALK]}
    assert "Be brief." not in words("tiny", only([own], Demonstration, system="Be brief.").ids)


@pytest.mark.fault(34)
@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"prompt": f"a {END}", "completion": "b"}, Demonstration),
        ({"prompt": "a", "completion": f"b {END}"}, Demonstration),
        ({"messages": [USER, {"role": "assistant", "content": f"b{END}"}]}, Demonstration),
        ({**PAIR, "rejected": f"x{END}"}, Pair),
        ({"prompt": "a", "ranking": ["x", f"y{END}"]}, Ranking),
    ],
)
def test_a_control_token_in_a_text_is_refused_counted_or_allowed(row, kind):
    with pytest.raises(DataError, match=r"data\[0\]: a text contains a control token"):
        examples([row], kind)
    good = {key: json.loads(json.dumps(value).replace(END, "z")) for key, value in row.items()}
    skip = {"skip_invalid": True, "max_invalid": 0.5}
    assert examples([row, good], kind, options=skip).report.counts()["control_tokens"] == 1
    allowed = only([row], kind, options={"allow_control_tokens": True})
    assert allowed.trained_tokens > 0


def test_an_end_token_that_a_text_brings_is_not_doubled():
    allow = {"allow_control_tokens": True}
    plain = shared_encoder("tiny", plain=True)
    row = {"prompt": "a", "completion": f"b{END}"}
    assert trained_texts("tiny", only([row], Demonstration, encoder=plain, options=allow)) == [
        f"b{END}"
    ]
    talk = {"messages": [USER, {"role": "assistant", "content": f"b{END}"}]}
    assert trained_texts("tiny", only([talk], Demonstration, options=allow)) == [f"b{END}"]
    text = {"text": f"one{END}"}
    assert words("tiny", only([text], Demonstration, train_on="all", options=allow).ids) == (
        f"one{END}"
    )


@pytest.mark.fault(33)
def test_long_rows_are_left_out_whole_and_counted():
    rows = [{"text": "x" * n} for n in (3, 9, 10, 40)]  # and an end token each
    built = examples(rows, Demonstration, train_on="all", max_tokens=10)
    assert {row.length for row in built.stream.take(2, step=1)} == {4, 10}
    counts = built.report.counts()
    assert (counts["too_long"], counts["train"], counts["tokens"]) == (2, 2, 14)
    assert counts["trained_tokens"] == 12
    assert any(
        "2 left out (50.0%): longer than 10 tokens (data.max_tokens). That is a large" in line
        for line in built.report.lines()
    )
    small = encoder(max_context=30)
    assert (
        examples(rows, Demonstration, encoder=small, train_on="all").report.counts()["too_long"]
        == 1
    )
    with pytest.raises(
        DataError, match=r"all 1 rows are longer than 3 tokens \(data\.max_tokens\)"
    ):
        examples(rows[:1], Demonstration, train_on="all", max_tokens=3)


def test_a_pair_is_as_long_as_its_longer_answer():
    length = only([PAIR], Pair).length
    longer = {**PAIR, "rejected": "Five, or six."}
    counts = examples([PAIR, longer], Pair, max_tokens=length).report.counts()
    assert (counts["too_long"], counts["train"]) == (1, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_prompt_tokens": 5}, r"data\.max_prompt_tokens: nothing reads it.*data\.max_tokens"),
        ({"keep_solve_rate": (0.1, 0.9)}, r"data\.keep_solve_rate: nothing reads it"),
        ({"options": {"answer_format": "gsm8k"}}, r"data\.answer_format: nothing reads it"),
        (
            {"columns": {"answer": "x"}},
            r"data\.columns\.answer: nothing reads it here.*Read are: cho",
        ),
        (
            {"columns": {"chosn": "x"}},
            r"columns\.chosn: nothing reads it here\. Did you mean 'chos",
        ),
        ({"task": "a", "columns": {"task": "t"}}, "both label the rows"),
        ({"role": "eval", "eval_size": 1}, "role eval gives all its rows"),
        ({"role": "eval"}, "no source with rows to train on"),
        ({"eval_size": 1}, r"data\.eval_size is 1, but the source has only 1 different prompts"),
    ],
)
def test_keys_that_nothing_reads_are_refused(changes, message):
    with pytest.raises(RecipeError, match=message):
        examples([PAIR], Pair, **changes)


def test_all_rows_of_a_held_out_prompt_are_held_out():
    rows = [
        {"prompt": f"p{prompt}", "chosen": f"good {n}", "rejected": "bad"}
        for prompt in range(6)
        for n in range(3)
    ]
    built = examples(rows, Pair, eval_size=2)
    tested = {row.prompt for row in built.eval_rows}
    trained = {row.prompt for row in built.stream.take(len(built.stream), step=1)}
    assert (len(tested), len(built.eval_rows), len(trained), len(built.stream)) == (2, 6, 4, 12)
    assert not tested & trained
    assert [row.position for row in built.eval_rows] == list(range(6))
    other = examples(rows, Pair, eval_size=2, seed=5)
    assert other.eval_rows == built.eval_rows
    assert other.hash == built.hash
    counts = built.report.counts()
    assert (counts["train"], counts["eval"], counts["overlap"]) == (12, 6, 0)


def test_training_rows_of_an_eval_sources_prompts_are_removed():
    specs = recipe(Spec("rows"), Spec("rows", role="eval"))
    train = [PAIR, {**PAIR, "prompt": "TWO  and two? "}, {**PAIR, "prompt": "Other"}]
    built = build_examples(
        specs, shared_encoder("tiny"), Pair, rows=train, eval_rows=[{**PAIR, "rejected": "Six."}]
    )
    assert (len(built.stream), len(built.eval_rows)) == (1, 1)
    assert built.report.counts()["overlap"] == 2


def test_the_hash_names_every_token_and_no_place():
    rows = [PAIR, {**PAIR, "prompt": "Other"}]
    assert examples(rows, Pair).hash == examples(rows, Pair, seed=3).hash
    changed = [rows[0], {**rows[1], "rejected": "Six."}]
    hashes = {
        examples(each, Pair, **how).hash
        for each, how in (
            (rows, {}),
            (changed, {}),
            (rows, {"system": "Be brief."}),
            ([rows[0], {**rows[1], "margin": 1.0}], {}),
        )
    }
    assert len(hashes) == 4


def test_the_stream_walks_keyed_epochs_and_resumes_exactly():
    rows = [{"prompt": f"p{n}", "completion": "x"} for n in range(7)]
    stream = examples(rows, Demonstration, seed=4).stream
    whole = stream.take(20, step=1)
    assert len({row.id for row in whole[:7]}) == len({row.id for row in whole[7:14]}) == 7
    assert [row.id for row in whole[:7]] != [row.id for row in whole[7:14]]
    assert [row.position for row in whole] == list(range(20))
    assert (stream.epoch, stream.position, len(stream)) == (2, 20, 7)
    for cut in range(21):
        walker = examples(rows, Demonstration, seed=4).stream
        walker.take(cut, step=1)
        resumed = examples(rows, Demonstration, seed=4).stream
        resumed.restore(json.loads(json.dumps(walker.cursor())))
        assert resumed.take(20 - cut, step=1) == whole[cut:]


def test_files_arrays_and_gzip_give_the_same_examples(tmp_path):
    rows = [PAIR, {**PAIR, "prompt": "Other", "margin": None}]
    plain = write_lines(tmp_path / "a.jsonl", *rows)
    zipped = tmp_path / "a.jsonl.gz"
    zipped.write_bytes(gzip.compress(Path(plain).read_bytes()))
    array = tmp_path / "a.json"
    array.write_text(json.dumps(rows))
    hashes = {
        build_examples(recipe(Spec(str(path))), shared_encoder("tiny"), Pair).hash
        for path in (plain, zipped, array)
    }
    assert len(hashes) == 1
    empty = write_lines(tmp_path / "empty.jsonl")
    with pytest.raises(DataError, match=r"empty\.jsonl is empty"):
        build_examples(recipe(Spec(empty)), shared_encoder("tiny"), Pair)


def test_columnar_files_give_the_same_examples(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"messages": [USER, FOUR]}, {"messages": TALK}]
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    built = build_examples(
        recipe(Spec(str(path))), shared_encoder("tiny"), Demonstration, train_on="assistant"
    )
    lines = examples(rows, Demonstration, train_on="assistant")
    assert built.stream.take(2, step=1) == lines.stream.take(2, step=1)


def test_several_sources_carry_their_names_and_weights(tmp_path):
    first = write_lines(tmp_path / "a.jsonl", {**PAIR, "id": "1"})
    second = write_lines(tmp_path / "b.jsonl", {**PAIR, "id": "1", "prompt": "Other"})
    built = build_examples(
        recipe(Spec(first, weight=9.0), Spec(second)), shared_encoder("tiny"), Pair
    )
    taken = [row.id for row in built.stream.take(1000, step=1)]
    assert set(taken) == {"a.jsonl/1", "b.jsonl/1"}
    assert abs(taken.count("a.jsonl/1") / 1000 - 0.9) < 0.05  # 5 standard errors


def test_made_questions_are_demonstrations_of_their_answers():
    specs = recipe(Spec("addition", options={"max_operand": 9}, eval_size=5))
    built = build_examples(specs, shared_encoder("tiny"), Demonstration, train_on="completion")
    for row in built.stream.take(5, step=1):
        a, b = row.id.split("+")
        assert trained_texts("tiny", row) == [f"{int(a) + int(b)}{END}"]
        assert row.task == "addition"
    assert len(built.eval_rows) == 5
    with pytest.raises(RecipeError, match=r"data\.source: 'addition' gives questions with one rig"):
        build_examples(specs, shared_encoder("tiny"), Pair)


def test_rows_whose_parts_were_tokenised_apart_are_counted():
    rows = [PAIR, {**PAIR, "chosen": "\n\nFour."}]
    report = examples(rows, Pair, encoder=shared_encoder("smollm2")).report
    assert report.counts()["apart"] == 1
    assert any("1 had a token across prompt and answer" in line for line in report.lines())


def test_the_same_tokens_again_are_duplicates_and_stay():
    rows = [PAIR, {**PAIR, "id": "again"}, {**PAIR, "rejected": "Six."}]
    counts = examples(rows, Pair).report.counts()
    assert (counts["duplicates"], counts["train"]) == (1, 3)


def test_graded_solutions_become_pairs_and_demonstrations():
    made = runpy.run_path(str(ROOT / "examples" / "data" / "gsm8k_solutions.py"))["MADE"]
    pairs, demonstrations = made["pairs"], made["demonstrations"]
    row = {
        "question": "Two and two?",
        "ground_truth": "A: 4",
        "small": {"is_correct": True, "solution": "A: 4"},
        "large": {"is_correct": False, "solution": "A: 5"},
        "huge": {"is_correct": True, "solution": "It is 4\nA: 4"},
        "wide": {"is_correct": False, "solution": "A: 22"},
    }
    found = list(pairs(row))
    assert [(pair["chosen"], pair["rejected"]) for pair in found] == [
        ("A: 4", "A: 5"),
        ("A: 4", "A: 22"),
        ("It is 4\nA: 4", "A: 5"),
        ("It is 4\nA: 4", "A: 22"),
    ]
    assert len(examples(found, Pair).stream) == 4
    assert list(pairs({**row, "large": row["small"], "wide": row["small"]})) == []
    assert list(demonstrations(row)) == [{"prompt": "Two and two?", "completion": "A: 4"}]
    assert list(demonstrations({"question": "?", "one": row["large"]})) == []


@pytest.mark.fault(34)
def test_lone_surrogates_are_counted_and_bad_rows_listed():
    odd = json.loads('{"prompt": "a \\ud800", "completion": "b"}')
    rows = [odd, {"prompt": "c", "completion": "d"}, {"prompt": "e", "completion": None}]
    built = examples(rows, Demonstration, options={"skip_invalid": True, "max_invalid": 0.5})
    counts = built.report.counts()
    assert (counts["surrogates"], counts["quarantined"], counts["train"]) == (1, 1, 2)
    (listed,) = built.report.quarantine
    assert (listed.where, listed.reason) == ("data[2]", "column 'completion' holds null")
    assert built.report.to_json()["sources"][0]["kind"] == "demonstrations"


def test_the_tiny_tokenizer_is_the_one_in_use():
    assert shared_tokenizer("tiny").convert_tokens_to_ids(END) == 2
