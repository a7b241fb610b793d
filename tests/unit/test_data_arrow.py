"""Parquet and Arrow files, saved datasets and hub ids: the rows of JSON lines by other doors."""

from __future__ import annotations

import datetime
import decimal
import sys
from types import SimpleNamespace

import pytest
from data_stand_ins import Spec, Words, recipe, write_lines

from surefoot.data import build
from surefoot.errors import DataError, RecipeError

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
datasets = pytest.importorskip("datasets")
hub = pytest.importorskip("huggingface_hub")

ROWS = [
    {"prompt": "one two", "answer": "3", "level": 4, "tests": [{"in": 1, "out": [1.5, None]}]},
    {"prompt": "four", "answer": None, "level": None, "tests": []},
]
QUESTIONS = [{"question": f"q {i}", "answer": f"so #### {i},000"} for i in range(3)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)


def written(path, rows, schema=None):
    parquet.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    return str(path)


def data_of(source, *, base_dir=None, **spec):
    return build(recipe(Spec(str(source), **spec)), Words(), base_dir=base_dir)


def prompts_of(source, **spec):
    data = data_of(source, **spec)
    return sorted(data.stream.take(len(data.stream), step=1), key=lambda p: p.text)


def test_parquet_and_lines_of_the_same_rows_have_one_hash(tmp_path):
    lines = data_of(write_lines(tmp_path / "a.jsonl", *ROWS))
    columns = data_of(written(tmp_path / "a.parquet", ROWS))
    assert columns.hash == lines.hash
    four, one = prompts_of(tmp_path / "a.parquet")
    assert one.columns == {key: ROWS[0][key] for key in ("answer", "level", "tests")}
    assert (four.answer, four.columns["level"], four.columns["tests"]) == (None, None, [])
    assert type(one.columns["level"]) is int and type(one.columns["tests"][0]) is dict


def test_arrow_files_and_streams_give_the_rows_of_parquet(tmp_path):
    table = pa.Table.from_pylist(ROWS)
    wanted = data_of(written(tmp_path / "a.parquet", ROWS)).hash
    with pa.ipc.new_file(tmp_path / "file.arrow", table.schema) as file:
        file.write_table(table)
    with pa.ipc.new_stream(tmp_path / "stream.arrow", table.schema) as stream:
        stream.write_table(table)
    assert data_of(tmp_path / "file.arrow").hash == wanted
    assert data_of(tmp_path / "stream.arrow").hash == wanted


def test_values_that_json_does_not_know_become_text_or_are_refused(tmp_path):
    when = datetime.datetime(2024, 2, 29, 12, 30)
    row = {"prompt": "a", "when": when, "day": when.date(), "price": decimal.Decimal("1.50")}
    (prompt,) = prompts_of(written(tmp_path / "a.parquet", [row]))
    assert prompt.columns == {"when": "2024-02-29T12:30:00", "day": "2024-02-29", "price": "1.50"}
    for name, value, kind in (("x", b"\0", "a bytes"), ("n", float("inf"), "inf")):
        path = written(tmp_path / f"{name}.parquet", [{"prompt": "a", name: value}])
        with pytest.raises(
            DataError, match=rf"{name}\.parquet: row 1: column '{name}' holds {kind}"
        ):
            prompts_of(path)


def test_messages_with_null_keys_and_nested_answers_as_other_libraries_write_them(tmp_path):
    rows = [
        {
            "prompt": [{"role": "user", "content": "x", "name": None}],
            "reward_model": {"style": "rule", "ground_truth": "5"},
        },
        {
            "prompt": [{"role": "user", "content": "x", "name": "n"}],
            "reward_model": {"style": "rule", "ground_truth": "5"},
        },
    ]
    columns = {"answer": "reward_model.ground_truth"}
    (prompt,) = prompts_of(written(tmp_path / "a.parquet", rows[:1]), columns=columns)
    assert (prompt.messages, prompt.answer) == (({"role": "user", "content": "x"},), "5")
    with pytest.raises(DataError, match=r"a\.parquet: row 2: message 0 has name"):
        prompts_of(written(tmp_path / "a.parquet", rows), columns=columns)


@pytest.mark.fault(31)
def test_bad_rows_are_named_skipped_and_counted_as_in_lines(tmp_path):
    rows = [{"prompt": f"p {i}"} for i in range(2000)]
    rows[1500]["prompt"] = " "
    path = written(tmp_path / "a.parquet", rows)
    with pytest.raises(DataError, match=r"a\.parquet: row 1501: prompt column 'prompt' is empty"):
        data_of(path)
    data = data_of(path, options={"skip_invalid": True}, eval_size=9)
    assert (len(data.stream), len(data.eval_prompts)) == (1990, 9)
    assert [row.where for row in data.report.quarantine] == [f"{path}: row 1501"]


@pytest.mark.fault(31)
def test_files_that_are_not_whole_empty_or_ambiguous(tmp_path):
    whole = written(tmp_path / "a.parquet", ROWS)
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    (tmp_path / "cut.arrow").write_bytes(b"ARROW1 and no more")
    written(tmp_path / "none.parquet", [], pa.schema([("prompt", pa.string())]))
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["prompt", "prompt"])
    parquet.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(DataError, match=r"cut\.parquet is not a whole Parquet file"):
        data_of(tmp_path / "cut.parquet")
    with pytest.raises(DataError, match=r"cut\.arrow is not a whole Arrow file"):
        data_of(tmp_path / "cut.arrow")
    with pytest.raises(DataError, match=r"none\.parquet is empty"):
        data_of(tmp_path / "none.parquet")
    with pytest.raises(DataError, match=r"column 'prompt' appears twice"):
        data_of(tmp_path / "twice.parquet")
    with pytest.raises(DataError, match=r"no file .*b\.parquet\. Files there: a\.parquet"):
        data_of(tmp_path / "b.parquet")
    with pytest.raises(RecipeError, match=r"data\.split: source 'arrow' does not read it"):
        data_of(whole, split="train")


def test_a_saved_dataset_is_the_file_of_its_rows(tmp_path):
    wanted = data_of(write_lines(tmp_path / "a.jsonl", *ROWS)).hash
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.with_format("numpy", columns=["prompt"]).save_to_disk(tmp_path / "saved")
    assert data_of(tmp_path / "saved").hash == wanted
    assert data_of("saved", base_dir=tmp_path).hash == wanted
    with pytest.raises(RecipeError, match=r"data\.split: .*saved has no named parts"):
        data_of(tmp_path / "saved", split="train")
    with pytest.raises(RecipeError, match=r"data\.config: .* is a saved dataset"):
        data_of(tmp_path / "saved", options={"config": "main"})


def test_rows_of_a_saved_dataset_keep_a_selection_and_are_named(tmp_path):
    dataset = datasets.Dataset.from_list([{"prompt": text} for text in ("a", "b", "", "d")])
    dataset.select([3, 0]).save_to_disk(tmp_path / "two")
    assert [p.text for p in prompts_of(tmp_path / "two")] == ["a", "d"]
    dataset.select([3, 2]).save_to_disk(tmp_path / "bad")
    with pytest.raises(DataError, match=r"bad: row 2: prompt column 'prompt' is empty"):
        data_of(tmp_path / "bad")


def test_named_parts_are_chosen_by_split(tmp_path):
    parts = {name: datasets.Dataset.from_list([{"prompt": name}]) for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "both")
    datasets.DatasetDict({"only": parts["test"]}).save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"x": parts["test"], "y": parts["test"]}).save_to_disk(tmp_path / "xy")
    assert [p.text for p in prompts_of(tmp_path / "both")] == ["train"]
    assert [p.text for p in prompts_of(tmp_path / "both", split="test")] == ["test"]
    assert [p.text for p in prompts_of(tmp_path / "one")] == ["test"]
    with pytest.raises(RecipeError, match=r"data\.split: .*no part 'tst'\. Did you mean 'test'\?"):
        data_of(tmp_path / "both", split="tst")
    with pytest.raises(RecipeError, match=r"data\.split: say which part of .*xy: x, y"):
        data_of(tmp_path / "xy")


def test_a_directory_that_is_a_copy_of_a_repository(tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    written(copy / "train.parquet", QUESTIONS)
    written(copy / "test.parquet", QUESTIONS[:1])
    spec = {"columns": {"prompt": "question"}, "options": {"answer_format": "gsm8k"}}
    assert [p.answer for p in prompts_of(copy, **spec)] == ["0000", "1000", "2000"]
    assert [p.text for p in prompts_of(copy, split="test", **spec)] == ["q 0"]
    with pytest.raises(DataError, match=r"cannot be loaded: .*data\.config"):
        data_of(copy, options={"config": "nope"})
    with pytest.raises(RecipeError, match=r"data\.revision: .* is a directory here"):
        data_of(copy, options={"revision": "main"})


def test_a_directory_of_other_files_is_refused(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(DataError, match=r"other cannot be loaded"):
        data_of(other)
    (other / "a.xml").write_text("<a>b</a>")
    with pytest.raises(DataError, match=r"other holds xml files"):
        data_of(other)


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """A hub with one dataset, org/maths at commit c0ffee, kept in a directory; what was asked."""
    copy = tmp_path / "hub"
    copy.mkdir()
    written(copy / "train.parquet", QUESTIONS)
    asked = []
    real = {name: getattr(datasets, name) for name in ("load_dataset", "load_dataset_builder")}

    def look(self, name, *, revision, timeout):
        assert timeout <= 10
        asked.append(("info", name, revision))
        return SimpleNamespace(sha="c0ffee")

    def opened(function):
        def call(name, config, *, revision):
            asked.append((function, name, config, revision))
            return real[function](str(copy))

        return call

    monkeypatch.setattr(hub.HfApi, "dataset_info", look)
    for name in real:
        monkeypatch.setattr(datasets, name, opened(name))
    return asked


def test_a_hub_id_is_loaded_at_the_commit_that_was_asked_for(stored):
    data = data_of(
        "org/maths",
        columns={"prompt": "question"},
        options={"config": "main", "revision": "v1", "answer_format": "gsm8k"},
    )
    assert stored == [
        ("info", "org/maths", "v1"),
        ("load_dataset_builder", "org/maths", "main", "c0ffee"),
        ("load_dataset", "org/maths", "main", "c0ffee"),
    ]
    assert {p.answer for p in data.stream.take(3, step=1)} == {"0000", "1000", "2000"}
    assert data.report.sources[0].revision == "c0ffee"
    assert "  revision c0ffee" in data.report.lines()


def test_rows_of_a_hub_id_are_named_by_their_split(stored):
    with pytest.raises(DataError, match=r"org/maths\[train\]: row 1: column 'prompt' is missing"):
        data_of("org/maths")


def test_offline_mode_asks_the_cache_alone(stored, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    data_of("org/maths", columns={"prompt": "question"})
    assert [name for name, *_ in stored] == ["load_dataset_builder", "load_dataset"]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (hub.errors.RepositoryNotFoundError, r"no such dataset, or it is private"),
        (hub.errors.RevisionNotFoundError, r"data\.revision: org/maths has no revision 'v9'"),
        (ConnectionError, r"cannot be reached \(ConnectionError\).*HF_HUB_OFFLINE=1"),
    ],
)
def test_an_unknown_or_unreachable_id_is_refused_after_one_question(
    stored, monkeypatch, error, message
):
    def fail(self, name, *, revision, timeout):
        raise error.__new__(error)

    monkeypatch.setattr(hub.HfApi, "dataset_info", fail)
    with pytest.raises(DataError, match=message):
        data_of("org/maths", options={"revision": "v9"})
    assert stored == []


@pytest.mark.parametrize(("name", "source"), [("pyarrow", "a.parquet"), ("datasets", "org/maths")])
def test_an_absent_package_names_the_extra(tmp_path, monkeypatch, name, source):
    written(tmp_path / "a.parquet", ROWS)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DataError, match=rf"package {name}, .*pip install 'surefoot\[data\]'"):
        data_of(source, base_dir=tmp_path)


@pytest.mark.parametrize(("module", "old"), [(pa, "14.0.0"), (datasets, "3.6.0")])
def test_versions_that_may_run_code_are_refused(tmp_path, monkeypatch, module, old):
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    monkeypatch.setattr(module, "__version__", old)
    with pytest.raises(DataError, match=rf"{old} may run"):
        data_of(tmp_path / "saved")


def test_a_dataset_object_is_rows(tmp_path):
    dataset = datasets.Dataset.from_list(ROWS)
    lines = data_of(write_lines(tmp_path / "a.jsonl", *ROWS))
    assert build(recipe(Spec("rows")), Words(), rows=dataset).hash == lines.hash
    arrays = datasets.Dataset.from_list([{"prompt": "a", "n": 7, "v": [1, 2]}]).with_format("numpy")
    (prompt,) = build(recipe(Spec("rows")), Words(), rows=arrays).stream.take(1, step=1)
    assert prompt.columns == {"n": 7, "v": [1, 2]}
    assert [type(value) for value in prompt.columns.values()] == [int, list]
    with pytest.raises(DataError, match=r"data is a DatasetDict.*data\['train'\]"):
        build(recipe(Spec("rows")), Words(), rows=datasets.DatasetDict({"train": dataset}))
