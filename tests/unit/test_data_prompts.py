"""From rows to prompts: templates, system prompts, control tokens, lengths, overlap, the split."""

from __future__ import annotations

from dataclasses import replace

import pytest
from data_stand_ins import Spec, Words, recipe, write_lines

from surefoot.data import build
from surefoot.errors import DataError, RecipeError
from surefoot.models import load_model
from surefoot.recipe import load

USER = {"role": "user", "content": "one two"}


def built(rows, encoder=None, *, system=None, new=16, **spec):
    wanted = recipe(Spec("rows", **spec), system=system, new=new)
    return build(wanted, encoder or Words(), rows=rows)


def only(rows, encoder=None, **spec):
    (prompt,) = built(rows, encoder, **spec).stream.take(1, step=1)
    return prompt


def numbered(n, words=1):
    return [{"prompt": f"p{i} " + "w " * (words - 1)} for i in range(n)]


def test_text_becomes_a_user_message_where_there_is_a_template():
    encoder = Words()
    prompt = only([{"prompt": "one two"}], encoder)
    assert prompt.ids == encoder.encode([USER])
    assert (prompt.text, prompt.messages) == ("one two", None)


def test_text_is_encoded_as_it_is_without_a_template():
    encoder = Words(has_template=False)
    prompt = only([{"prompt": "one two"}], encoder)
    assert prompt.ids == encoder.encode("one two")
    assert len(prompt.ids) == 2


def test_messages_keep_their_form():
    prompt = only([{"prompt": [USER]}])
    assert prompt.messages == (USER,)
    assert prompt.text == "one two"
    talk = [USER, {"role": "assistant", "content": "three"}, {"role": "user", "content": "four"}]
    prompt = only([{"prompt": talk}])
    assert prompt.messages == tuple(talk)
    assert prompt.text == "[user] one two [assistant] three [user] four "


def test_the_system_prompt_goes_in_front_of_rows_that_bring_none():
    system = {"role": "system", "content": "be brief"}
    encoder = Words()
    text = only([{"prompt": "one two"}], encoder, system="be brief")
    assert text.ids == encoder.encode([system, USER])
    messages = only([{"prompt": [USER]}], encoder, system="be brief")
    assert messages.messages == (system, USER)
    own = [{"role": "system", "content": "be long"}, USER]
    assert only([{"prompt": own}], encoder, system="be brief").messages == tuple(own)


def test_a_system_prompt_that_nothing_reads_is_refused():
    with pytest.raises(RecipeError, match=r"model\.system is set, but the model has no chat tem"):
        built([{"prompt": "a"}], Words(has_template=False), system="be brief")
    with pytest.raises(RecipeError, match=r"model\.system contains a control token"):
        built([{"prompt": "a"}], system="be <|end|> brief")


def test_messages_without_a_template_are_refused():
    with pytest.raises(DataError, match=r"data\[0\]: the prompt is a list of messages, but the"):
        built([{"prompt": [USER]}], Words(has_template=False))


@pytest.mark.fault(34)
def test_control_tokens_are_refused_counted_or_allowed():
    rows = [*numbered(3), {"prompt": [USER, {"role": "user", "content": "a <|end|>"}]}]
    with pytest.raises(DataError, match=r"data\[3\]: the prompt contains a control token"):
        built(rows)
    skipped = built(rows, options={"skip_invalid": True, "max_invalid": 0.25})
    assert len(skipped.stream) == 3
    assert skipped.report.counts()["control_tokens"] == 1
    assert skipped.report.quarantine[0].kind == "control_tokens"
    assert len(built(rows, options={"allow_control_tokens": True}).stream) == 4


@pytest.mark.fault(33)
def test_a_prompt_of_exactly_the_limit_stays():
    rows = [{"prompt": "a"}, {"prompt": "a b"}, {"prompt": "a b c"}]  # 4, 5 and 6 ids
    data = built(rows, max_prompt_tokens=5)
    assert {p.text for p in data.stream.take(2, step=1)} == {"a", "a b"}
    report = data.report.sources[0]
    assert (report.too_long, report.train, report.limit) == (1, 2, 5)


@pytest.mark.fault(33)
def test_the_context_leaves_room_for_the_completion():
    rows = [{"prompt": "a"}, {"prompt": "a b"}, {"prompt": "a b c"}]
    data = built(rows, Words(max_context=12), new=7)
    assert len(data.stream) == 2
    assert data.report.sources[0].limit_reason == "context 12 minus rollout.max_new_tokens 7"
    tighter = built(rows, Words(max_context=12), new=7, max_prompt_tokens=9)
    assert tighter.report.sources[0].limit == 5
    with pytest.raises(RecipeError, match=r"rollout\.max_new_tokens is 12, but.*12 tokens"):
        built(rows, Words(max_context=12), new=12)


@pytest.mark.fault(33)
def test_losing_every_prompt_names_the_limit_and_the_shortest():
    rows = [{"prompt": "a b c"}, {"prompt": "a b"}]
    with pytest.raises(
        DataError,
        match=r"all 2 prompts.*4 tokens \(data\.max_prompt_tokens\).*"
        r"data\[1\], has 5",
    ):
        built(rows, max_prompt_tokens=4)


def test_losing_more_than_a_tenth_is_said():
    longer = [{"prompt": f"a b{i}"} for i in range(2)]
    nine = built([*numbered(18), *longer], max_prompt_tokens=4)
    assert not any("large share" in line for line in nine.report.lines())
    assert any("2 left out (10.0%)" in line for line in nine.report.lines())
    more = built([*numbered(17), *longer], max_prompt_tokens=4)
    assert any("large share" in line for line in more.report.lines())


def test_duplicates_ignore_case_space_and_system():
    rows = [
        {"prompt": "One  two"},
        {"prompt": "one two "},
        {"prompt": [{"role": "system", "content": "s"}, USER]},
        {"prompt": "one, two"},
    ]
    data = built(rows)
    assert data.report.counts()["duplicates"] == 2
    assert len(data.stream) == 4


def test_training_rows_that_are_in_the_eval_set_are_removed(tmp_path):
    train = write_lines(tmp_path / "t.jsonl", {"prompt": "ONE"}, {"prompt": "two"}, {"prompt": "3"})
    tested = write_lines(tmp_path / "e.jsonl", {"prompt": " one "}, {"prompt": "four"})
    data = build(recipe(Spec(train), Spec(tested, role="eval")), Words())
    assert {p.text for p in data.stream.take(2, step=1)} == {"two", "3"}
    assert [p.text for p in data.eval_prompts] == [" one ", "four"]
    assert data.report.counts()["overlap"] == 1
    assert any("same prompt is in the eval set" in line for line in data.report.lines())
    with pytest.raises(DataError, match=r"t\.jsonl: every training prompt is also an eval prompt"):
        build(recipe(Spec(train), Spec(train, role="eval")), Words())


def test_held_out_rows_are_different_prompts_and_not_trained():
    rows = [{"prompt": f"p{i % 10}", "n": i} for i in range(30)]
    data = built(rows, eval_size=4)
    tested = {p.text for p in data.eval_prompts}
    assert len(tested) == len(data.eval_prompts) == 4
    trained = {p.text for p in data.stream.take(len(data.stream), step=1)}
    assert trained == {f"p{i}" for i in range(10)} - tested
    counts = data.report.counts()
    assert (counts["train"], counts["eval"], counts["overlap"], counts["rows"]) == (18, 4, 8, 30)


def test_the_split_is_the_same_for_every_run_seed():
    def split(seed):
        return build(recipe(Spec("rows", eval_size=5), seed=seed), Words(), rows=numbered(40))

    first, second = split(1), split(2)
    assert [p.id for p in first.eval_prompts] == [p.id for p in second.eval_prompts]
    assert first.hash == second.hash
    assert [p.id for p in first.stream.take(9, step=1)] != [
        p.id for p in second.stream.take(9, step=1)
    ]
    assert [p.text for p in first.eval_prompts] != [f"p{i} " for i in range(5)]


def test_an_eval_size_that_leaves_nothing_to_train_on_is_refused():
    with pytest.raises(RecipeError, match=r"data\.eval_size is 3, but.*only 3 different prompts"):
        built(numbered(3), eval_size=3)
    assert len(built(numbered(3), eval_size=2).stream) == 1


def test_a_file_of_role_eval_gives_all_its_rows():
    with pytest.raises(RecipeError, match=r"role eval gives all its rows"):
        built(numbered(3), role="eval", eval_size=1)
    with pytest.raises(RecipeError, match=r"no source with rows to train on"):
        built(numbered(3), role="eval")


def test_ids_of_several_sources_carry_their_source(tmp_path):
    first = write_lines(tmp_path / "a.jsonl", {"prompt": "x", "id": "1"})
    second = write_lines(tmp_path / "b.jsonl", {"prompt": "y", "id": "1"})
    data = build(recipe(Spec(first), Spec(second), Spec(first, role="train")), Words())
    assert {p.id for p in data.stream.take(60, step=1)} == {"a.jsonl/1", "b.jsonl/1", "a.jsonl#2/1"}


def test_weights_of_the_recipe_reach_the_stream(tmp_path):
    first = write_lines(tmp_path / "a.jsonl", *numbered(3))
    second = write_lines(tmp_path / "b.jsonl", *numbered(3))
    data = build(recipe(Spec(first, weight=9.0), Spec(second, weight=1.0)), Words())
    share = sum(p.id.startswith("a.jsonl") for p in data.stream.take(1000, step=1)) / 1000
    assert abs(share - 0.9) < 0.04  # 4.2 standard errors


def test_the_report_accounts_for_every_row():
    rows = [*numbered(6), {"prompt": ""}, {"prompt": "a b c d"}, {"prompt": "p0"}]
    options = {"skip_invalid": True, "max_invalid": 0.2}
    data = built(rows, eval_size=2, max_prompt_tokens=4, options=options)
    c = data.report.counts()
    fates = ("quarantined", "too_long", "overlap", "train", "eval")
    assert c["rows"] == 9 == sum(c[fate] for fate in fates)
    assert (c["quarantined"], c["too_long"], c["eval"]) == (1, 1, 2)
    assert len(data.stream) == c["train"]
    assert data.report.to_json()["quarantine"] == [
        {"where": "data[6]", "reason": "prompt column 'prompt' is empty", "kind": "invalid"}
    ]


def test_a_limit_on_whole_rows_is_not_for_prompts():
    with pytest.raises(RecipeError, match=r"data\.max_tokens: nothing reads it for prompts"):
        built(numbered(3), max_tokens=99)


def test_the_hash_changes_with_a_row_an_id_the_tokens_or_the_split():
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    base = built(rows).hash
    assert built(rows).hash == base
    changed = [
        built([rows[0], {"prompt": "b", "answer": "3"}]).hash,
        built(rows[::-1]).hash,
        built(rows, Words(has_template=False)).hash,
        built(rows, system="s").hash,
        built(rows, eval_size=1).hash,
        built([{**rows[0], "extra": 1}, rows[1]]).hash,
    ]
    assert len({base, *changed}) == 7


def test_a_recipe_without_a_template_asks_the_bare_text(tiny_model, tmp_path):
    text = "Q: 1+1\nA:"
    wanted = {
        "model": {"path": str(tiny_model), "template": "none"},
        "data": write_lines(tmp_path / "a.jsonl", {"prompt": text, "answer": "2"}),
        "reward": "numeric",
        "method": "grpo",
        "rollout": {"stop": ["\n"], "max_new_tokens": 8},
        "run": {"steps": 1},
    }
    written = load(wanted)
    (prompt,) = build(written, load_model(written).template).stream.take(1, step=1)
    # One id per character (see support/tiny.py): code point - 32 + 4; the newline comes last.
    assert prompt.ids == tuple(99 if c == "\n" else ord(c) - 28 for c in text)
    assert (prompt.text, prompt.messages) == (text, None)
    chat = load({**wanted, "model": {"path": str(tiny_model)}})
    (asked,) = build(chat, load_model(chat).template).stream.take(1, step=1)
    assert asked.ids[0] == 1 and len(asked.ids) > len(prompt.ids)


def test_keys_of_one_of_several_sources_carry_its_number():
    spec = Spec("addition", options={"max_operand": -1})
    with pytest.raises(RecipeError, match=r"data\[1\]\.max_operand"):
        build(recipe(Spec("addition"), spec), Words())
    with pytest.raises(RecipeError, match=r"data\[0\]\.nope"):
        build(recipe(replace(spec, options={"nope": 1}), spec), Words())
