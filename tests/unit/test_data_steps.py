"""Sources that come and go by step: intervals, renormalised weights, and what is refused."""

from __future__ import annotations

import json

import pytest
from data_stand_ins import Spec, Words, recipe, write_lines
from test_data_stream import ids, stream

from surefoot.data import build
from surefoot.data.options import KEYS, read_options
from surefoot.errors import RecipeError
from surefoot.recipe import load
from surefoot.recipe.schema import DataSource


def numbered(tmp_path, name, n):
    return write_lines(tmp_path / name, *({"prompt": f"{name[0]} {i}"} for i in range(n)))


def refused(*specs, steps=100):
    with pytest.raises(RecipeError) as caught:
        build(recipe(*specs, steps=steps), Words())
    return str(caught.value)


def walk(s, steps, each):
    return [s.take(each, step=step) for step in steps]


def test_the_first_step_is_in_and_the_last_is_not():
    s = stream(5, 5, spans=[(1, 3), (3, None)])
    taken = walk(s, range(1, 6), 4)
    assert [{p.id[0] for p in step} for step in taken] == [{"a"}, {"a"}, {"b"}, {"b"}, {"b"}]


def test_a_lone_source_is_walked_as_if_it_had_no_interval():
    switch = stream(7, 5, spans=[(1, 4), (4, None)], seed=2)
    before = [p for step in walk(switch, (1, 2, 3), 5) for p in step]
    assert before == stream(7, seed=2).take(15, step=1)
    after = ids(p for step in walk(switch, (4, 5), 5) for p in step)
    assert sorted(after[:5]) == sorted(after[5:]) == [f"b{i}" for i in range(5)]


def test_positions_run_on_over_a_switch():
    switch = stream(7, 5, spans=[(1, 2), (2, None)])
    taken = [p for step in walk(switch, (1, 2), 6) for p in step]
    assert [p.position for p in taken] == list(range(12))


def test_weights_are_shared_among_the_active_sources():
    s = stream(9, 9, 9, weights=[1, 3, 6], spans=[(1, None), (1, 2), (2, None)])
    first, second = (ids(step) for step in walk(s, (1, 2), 4000))
    share = [sum(name[0] == "a" for name in step) / 4000 for step in (first, second)]
    assert abs(share[0] - 1 / 4) < 0.03  # 4.4 standard errors of 0.0068
    assert abs(share[1] - 1 / 7) < 0.025  # 4.5 standard errors of 0.0055
    assert {name[0] for name in first} == {"a", "b"}
    assert {name[0] for name in second} == {"a", "c"}


def test_all_sources_at_every_step_are_the_plain_mixture():
    bounded = stream(5, 3, weights=[2, 1], spans=[(1, 50), (1, 50)])
    assert bounded.take(40, step=7) == stream(5, 3, weights=[2, 1]).take(40, step=1)


def test_a_switch_resumes_exactly_at_every_step():
    def fresh():
        return stream(5, 4, 3, spans=[(1, 4), (3, None), (6, 9)], seed=5)

    walker, cursors, taken = fresh(), [], []
    for step in range(1, 12):
        cursors.append(json.loads(json.dumps(walker.cursor())))
        taken.append(walker.take(3, step=step))
    for cut, cursor in enumerate(cursors):
        resumed = fresh()
        resumed.restore(cursor)
        assert walk(resumed, range(cut + 1, 12), 3) == taken[cut:]
        assert resumed.cursor() == walker.cursor()


def test_the_epoch_is_that_of_the_sources_of_the_step():
    s = stream(4, 4, spans=[(1, 3), (3, None)])
    s.take(9, step=1)
    assert s.epoch == 2
    s.take(5, step=3)
    assert s.epoch == 1
    resumed = stream(4, 4, spans=[(1, 3), (3, None)])
    resumed.restore(s.cursor())
    assert resumed.epoch == 1


def test_a_recipe_switches_its_task(tmp_path):
    specs = (
        Spec(numbered(tmp_path, "a.jsonl", 3), task="easy", until_step=3),
        Spec(numbered(tmp_path, "b.jsonl", 3), task="hard", from_step=3, eval_size=1),
    )
    data = build(recipe(*specs, steps=4), Words())
    tasks = [{p.task for p in data.stream.take(2, step=step)} for step in (1, 2, 3, 4)]
    assert tasks == [{"easy"}, {"easy"}, {"hard"}, {"hard"}]
    assert [p.task for p in data.eval_prompts] == ["hard"]
    assert "  drawn from at steps 1 to 2" in data.report.lines()
    assert "  drawn from at steps from 3 on" in data.report.lines()


def test_a_source_that_starts_after_the_run_is_named_in_the_report(tmp_path):
    paths = numbered(tmp_path, "a.jsonl", 3), numbered(tmp_path, "b.jsonl", 3)
    lines = build(recipe(Spec(paths[0]), Spec(paths[1], from_step=9), steps=5), Words()).report
    assert "  never drawn from: it starts at step 9 and the run has 5" in lines.lines()


def test_a_step_without_data_is_refused_and_its_neighbours_are_named(tmp_path):
    a, b = numbered(tmp_path, "a.jsonl", 3), numbered(tmp_path, "b.jsonl", 3)
    message = refused(Spec(a, until_step=10), Spec(b, from_step=20))
    assert "no source is drawn from at steps 10 to 19" in message
    assert "data[0] has until_step 10, data[1] has from_step 20" in message
    message = refused(Spec(a, from_step=5))
    assert "at steps 1 to 4: data has from_step 5" in message
    assert "at steps 30 to 100" in refused(Spec(a, until_step=30))
    assert "from step 30 on" in refused(Spec(a, until_step=30), steps=None)


def test_data_for_every_step_of_the_run_is_enough(tmp_path):
    a, b = numbered(tmp_path, "a.jsonl", 3), numbered(tmp_path, "b.jsonl", 3)
    build(recipe(Spec(a, until_step=10), steps=9), Words())
    build(recipe(Spec(a, until_step=10), Spec(b, from_step=20), steps=9), Words())
    build(recipe(Spec(a, until_step=10), Spec(b, from_step=5), steps=99), Words())


def test_an_empty_interval_is_refused_by_its_keys(tmp_path):
    a = numbered(tmp_path, "a.jsonl", 3)
    message = refused(Spec(a), Spec(a, from_step=7, until_step=7))
    assert "data[1].until_step is 7 and data[1].from_step is 7: no step" in message
    # Steps count from 1, so none lies before it.
    assert "no step" in refused(Spec(a), Spec(a, until_step=1))


def test_equal_rows_may_change_their_weight_but_not_overlap(tmp_path):
    a = numbered(tmp_path, "a.jsonl", 3)
    message = refused(Spec(a, until_step=10), Spec(a, from_step=9))
    assert "data[0] and data[1] name the same rows, and both are drawn from at step 9" in message
    assert "data[0].until_step" in message and "data[1].from_step" in message
    other = Spec(a, from_step=9, columns={"prompt": "prompt"})
    build(recipe(Spec(a, until_step=10), other, steps=20), Words())
    build(recipe(Spec(a, until_step=10), Spec(a, from_step=10), steps=20), Words())
    build(recipe(Spec(a), Spec(a, weight=2.0), steps=20), Words())


@pytest.mark.parametrize(
    ("key", "value"), [("from_step", 2), ("until_step", 9), ("keep_solve_rate", (0.1, 0.9))]
)
def test_a_source_for_evaluation_has_no_steps_and_no_window(tmp_path, key, value):
    train, tested = numbered(tmp_path, "a.jsonl", 3), numbered(tmp_path, "b.jsonl", 3)
    message = refused(Spec(train), Spec(tested, role="eval", **{key: value}))
    assert f"data[1].{key}: nothing reads it on a source with role eval" in message


def test_the_keys_load_from_a_recipe():
    wanted = {
        "data": [
            {"source": "addition", "until_step": 4, "keep_solve_rate": [0.1, 0.9]},
            {"source": "addition", "max_operand": 99, "from_step": 4},
        ],
        "reward": "numeric",
        "method": "grpo",
        "run": {"steps": 8},
    }
    first, second = load(wanted).data
    assert (first.until_step, first.keep_solve_rate, second.from_step) == (4, (0.1, 0.9), 4)
    with pytest.raises(RecipeError, match=r"data\.1\.max_tokens"):
        load(wanted, ["data.1.max_tokens=9"])
    for bad, message in (("[0.9, 0.1]", "low rate is above"), ("[0, 1]", "passes over nothing")):
        with pytest.raises(RecipeError, match=rf"data\.0\.keep_solve_rate: .*{message}"):
            load(wanted, [f"data.0.keep_solve_rate={bad}"])


def test_a_key_nearly_written_is_named() -> None:
    with pytest.raises(RecipeError, match=r"form_step.*Did you mean 'from_step'"):
        read_options({"form_step": 2}, {}, key="data", source="x", keys=KEYS)
    assert {*KEYS, "options"} == set(DataSource.model_fields)
