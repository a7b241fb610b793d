"""The addition source: what it asks, and that its test set is never trained on."""

from __future__ import annotations

import pytest
from data_stand_ins import Spec, Words, recipe

from surefoot.data import build
from surefoot.errors import RecipeError
from surefoot.recipe import load


def pair(prompt):
    return tuple(sorted((prompt.columns["a"], prompt.columns["b"])))


def data_of(eval_size=0, seed=0, **options):
    return build(recipe(Spec("addition", eval_size=eval_size, options=options), seed=seed), Words())


def test_a_row_asks_for_the_sum():
    data = data_of(min_operand=7, max_operand=7)
    (prompt,) = data.stream.take(1, step=1)
    assert prompt.text == "What is 7 + 7?"
    assert (prompt.answer, prompt.task, prompt.id) == ("14", "addition", "7+7")
    assert prompt.messages is None


def test_defaults_ask_all_pairs_of_0_to_50():
    data = data_of()
    assert len(data.stream) == 51 * 51
    answers = {int(p.answer) for p in data.stream.take(len(data.stream), step=1)}
    assert answers == set(range(101))


@pytest.mark.parametrize("eval_size", [1, 10, 30])
def test_held_out_pairs_are_trained_in_neither_order(eval_size):
    data = data_of(eval_size, max_operand=10)
    tested = [pair(p) for p in data.eval_prompts]
    trained = {pair(p) for p in data.stream.take(len(data.stream), step=1)}
    assert len(tested) == len(set(tested)) == eval_size
    assert not trained & set(tested)
    assert len(trained) + eval_size == 66


def test_row_count_loses_two_orders_for_each_unequal_held_out_pair():
    data = data_of(20, max_operand=10)
    equal = sum(a == b for a, b in map(pair, data.eval_prompts))
    assert len(data.stream) == 121 - 2 * (20 - equal) - equal


def test_test_set_holds_both_orders_and_does_not_depend_on_the_seed():
    first, second = data_of(30, seed=0, max_operand=10), data_of(30, seed=1, max_operand=10)
    assert [p.id for p in first.eval_prompts] == [p.id for p in second.eval_prompts]
    pairs = [(p.columns["a"], p.columns["b"]) for p in first.eval_prompts]
    assert any(a < b for a, b in pairs)
    assert any(a > b for a, b in pairs)


def test_a_larger_test_set_contains_the_smaller():
    small = [p.id for p in data_of(5, max_operand=10).eval_prompts]
    assert [p.id for p in data_of(9, max_operand=10).eval_prompts][:5] == small


def test_eval_positions_count_from_zero():
    assert [p.position for p in data_of(4, max_operand=10).eval_prompts] == [0, 1, 2, 3]


def test_half_the_pairs_stay_for_training():
    assert len(data_of(3, max_operand=2).eval_prompts) == 3  # 6 pairs
    with pytest.raises(RecipeError, match=r"data\.eval_size is 4.*only 6 different pairs.*to 3 or"):
        data_of(4, max_operand=2)


def test_role_eval_with_a_size_gives_the_held_out_pairs_only():
    both = build(
        recipe(
            Spec("addition", options={"max_operand": 3}),
            Spec("addition", role="eval", eval_size=4, options={"max_operand": 10}),
        ),
        Words(),
    )
    held_out = {pair(p) for p in data_of(4, max_operand=10).eval_prompts}
    assert {pair(p) for p in both.eval_prompts} == held_out


def test_question_template():
    data = data_of(max_operand=0, question="{b} plus {a} =")
    assert data.stream.take(1, step=1)[0].text == "0 plus 0 ="


@pytest.mark.parametrize("question", ["What is {a}?", "{a} {b} {c}", "{a + {b}", "{} + {}"])
def test_a_template_without_both_operands_is_refused(question):
    with pytest.raises(RecipeError, match=r"data\.question"):
        data_of(question=question)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_operands": 5}, r"data\.max_operands.*Did you mean 'max_operand'\?"),
        ({"max_operand": "5"}, r"data\.max_operand is '5', but it must be a whole number"),
        ({"max_operand": True}, r"must be a whole number"),
        ({"max_operand": 5.5}, r"must be a whole number"),
        ({"max_operand": -1}, r"at least 0"),
        ({"max_operand": 2, "min_operand": 3}, r"below min_operand 3"),
        ({"max_operand": 5000}, r"more than a million"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(RecipeError, match=message):
        data_of(**options)


def test_a_float_that_is_whole_is_a_whole_number():
    assert len(data_of(max_operand=1e1).stream) == 121


def test_a_loaded_recipe_is_read():
    loaded = load(
        {
            "data": {"source": "addition", "max_operand": 4, "eval_size": 3},
            "reward": [{"use": "numeric"}],
            "method": "rloo",
            "run": {"steps": 1},
        }
    )
    data = build(loaded, Words())
    assert len(data.eval_prompts) == 3
    assert {pair(p) for p in data.eval_prompts} == {
        pair(p) for p in data_of(3, max_operand=4).eval_prompts
    }


def test_columns_that_nothing_reads_are_refused():
    with pytest.raises(RecipeError, match=r"data\.columns: source 'addition' does not read it"):
        build(recipe(Spec("addition", columns={"prompt": "q"})), Words())
    with pytest.raises(RecipeError, match=r"data\.split"):
        build(recipe(Spec("addition", split="train")), Words())
