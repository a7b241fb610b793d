"""Finding reward functions, and refusing what cannot work before anything runs."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from surefoot.errors import RecipeError, RewardError
from surefoot.recipe.schema import RewardPart
from surefoot.records import Completion, Group, Prompt, StopReason
from surefoot.reward import BUILT_INS, FunctionPart, Grader, resolve, reward_function

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Entry:
    """Stands in for a recipe's reward entry."""

    use: str
    weight: float = 1.0
    name: str | None = None
    timeout: float = 10.0
    price: float | None = None
    retries: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)


FILE = """
import surefoot_test_sibling
from surefoot.reward import reward_function

@reward_function(price=0.5)
def native(sample, scale=1.0):
    return scale * surefoot_test_sibling.ONE

def listed(completions, **kwargs):
    return [1.0] * len(completions)

number = 7
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "my_rewards.py").write_text(FILE)
    (tmp_path / "surefoot_test_sibling.py").write_text("ONE = 1.0\n")
    before = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = before[0]
    for name in set(sys.modules) - before[1]:
        del sys.modules[name]


def test_built_ins_keep_their_settings():
    (reward,) = resolve([Entry("numeric", weight=2, timeout=3, options={"which": "only"})])
    assert (reward.name, reward.weight, reward.timeout) == ("numeric", 2.0, 3.0)
    assert reward.rule is not None and reward.served is None
    (reward,) = resolve([Entry("regex", name="shape", options={"pattern": "a"})])
    assert reward.name == "shape"
    assert reward.rule is None and reward.served is not None and not reward.batched


def test_a_file_beside_the_recipe(folder):
    native, listed = resolve(
        [Entry("my_rewards.py:native"), Entry("my_rewards.py:listed")], base_dir=folder
    )
    assert (native.name, native.price, native.batched) == ("native", 0.5, False)
    assert (listed.name, listed.price, listed.batched) == ("listed", None, True)


def test_a_file_in_the_cwd_and_a_module(folder, monkeypatch):
    monkeypatch.chdir(folder)
    other = folder / "recipes"
    other.mkdir()
    rewards = resolve([Entry("my_rewards.py:native"), Entry("my_rewards:listed")], base_dir=other)
    assert [reward.name for reward in rewards] == ["native", "listed"]


def test_a_recipes_price_and_name_win(folder):
    (reward,) = resolve([Entry("my_rewards.py:native", name="n", price=2.0)], base_dir=folder)
    assert (reward.name, reward.price) == ("n", 2.0)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ("numerik", "no built-in reward 'numerik'; did you mean 'numeric'"),
        ("my_reward.py:native", "my_reward.py.*did you mean 'my_rewards.py'"),
        ("my_rewards.py:nativ", "no function 'nativ'; did you mean 'native'"),
        ("my_rewards.py:number", "int, not a function"),
        ("no_such_module_anywhere:f", "no 'no_such_module_anywhere' to import"),
        ("broken.py:f", "failed with SyntaxError"),
        ("raising.py:f", "failed with ZeroDivisionError"),
        ("needing.py:f", "failed with ModuleNotFoundError.*not_there"),
    ],
)
def test_what_cannot_be_found_is_named_with_the_nearest(folder, use, message):
    (folder / "broken.py").write_text("def f(:\n")
    (folder / "raising.py").write_text("1 / 0\n")
    (folder / "needing.py").write_text("import not_there\n")
    with pytest.raises(RewardError, match=message):
        resolve([Entry(use)], base_dir=folder)


def test_no_reward_and_two_of_one_name_are_refused():
    with pytest.raises(RewardError, match="no reward"):
        resolve([])
    with pytest.raises(RewardError, match="two rewards are named 'numeric'"):
        resolve([Entry("numeric"), Entry("numeric", weight=2.0)])
    assert len(resolve([Entry("numeric"), Entry("numeric", name="again")])) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": float("nan")}, "weight"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": float("inf")}, "timeout"),
        ({"timeout": 86_401.0}, "at most a day"),
        ({"price": -1.0}, "price"),
        ({"name": "a b"}, "name"),
        ({"name": "a/b"}, "name"),
        ({"options": {"wich": "only"}}, "'wich'.*'which'"),
    ],
)
def test_settings_that_cannot_work(change, message):
    with pytest.raises(RecipeError, match=message):
        resolve([Entry("numeric", **change)])


def test_options_of_a_function_are_its_own_parameters(folder):
    resolve([Entry("my_rewards.py:native", options={"scale": 2.0})], base_dir=folder)
    with pytest.raises(RecipeError, match=r"'scal'; did you mean 'scale'"):
        resolve([Entry("my_rewards.py:native", options={"scal": 2.0})], base_dir=folder)
    with pytest.raises(RecipeError, match="no option 'prompts'"):
        resolve([FunctionPart(lambda prompts: [], options={"prompts": 1})])
    with pytest.raises(RecipeError, match="no option 'scale'"):
        resolve([Entry("my_rewards.py:listed", options={"scale": 2.0})], base_dir=folder)


def test_contracts_are_told_apart_by_signature():
    @reward_function
    def native(sample):
        return 1.0

    def one(completions):
        return [1.0]

    def other(**kwargs):
        return [1.0]

    class Judge:
        def __call__(self, prompts, completions, **kwargs):
            return [1.0]

    rewards = resolve([native, one, other, Judge()])
    assert [reward.batched for reward in rewards] == [False, True, True, True]
    assert [reward.name for reward in rewards] == ["native", "one", "other", "Judge"]
    (partial,) = resolve([functools.partial(lambda completions, k: [k], k=1)])
    assert (partial.name, partial.batched) == ("lambda", True)


def test_functions_of_neither_contract_are_refused_with_the_mend():
    with pytest.raises(RewardError, match=r"@surefoot\.reward_function"):
        resolve([lambda sample: 1.0])
    with pytest.raises(RewardError, match="positional-only"):
        resolve([lambda completions, /: [1.0]])
    with pytest.raises(RewardError, match="takes no sample"):
        resolve([reward_function(lambda: 1.0)])
    with pytest.raises(RewardError, match="also needs level"):
        resolve([reward_function(lambda sample, level: 1.0)])
    with pytest.raises(RewardError, match="not 7"):
        resolve([7])


def test_a_recipes_own_entries_are_taken():
    entry = RewardPart(use="numeric", weight=0.5, options={"which": "first"})
    (reward,) = resolve([entry])
    assert (reward.name, reward.weight, reward.timeout) == ("numeric", 0.5, 10.0)
    with pytest.raises(RecipeError, match="which"):
        resolve([RewardPart(use="numeric", options={"which": "middle"})])


def documented(page: str, use: str) -> dict[str, str]:
    """The options of a built-in and their defaults, as its section of the page has them."""
    section = page.split(f"\n### {use}\n")[1].split("\n### ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|", section, re.MULTILINE)
    return {name: default.strip("`") for name, default in rows}


def said(field: dataclasses.Field[Any]) -> str:
    """A default as a recipe would write it."""
    if field.default_factory is not dataclasses.MISSING:
        return "{}"
    value = field.default
    if value is dataclasses.MISSING:
        return "required"
    if isinstance(value, tuple):
        return f"[{', '.join(value)}]"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


@pytest.mark.parametrize("use", sorted(BUILT_INS))
def test_the_page_names_every_built_in_with_its_options_and_defaults(use):
    page = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    schema = BUILT_INS[use].schema
    assert documented(page, use) == {f.name: said(f) for f in dataclasses.fields(schema)}


def test_the_examples_functions_are_rewards():
    names = ("names_it", "ends_well", "polite")
    entries = [Entry(f"examples/rewards.py:{name}") for name in names]
    prompt = Prompt("r", 0, (1,), "Where?", "Rome")
    texts = (("Rome, please.", StopReason.STOP), ("Paris", StopReason.LENGTH))
    completions = tuple(
        Completion((5,), (-0.1,), stop, 0, i, text) for i, (text, stop) in enumerate(texts)
    )
    with Grader(entries, base_dir=ROOT) as grader:
        (graded,) = grader.score([Group(prompt, completions)])
    assert [score.parts for score in graded.scores or ()] == [
        {"names_it": 1.0, "ends_well": 1.0, "polite": 1.0},
        {"names_it": 0.0, "ends_well": None, "polite": 0.0},
    ]
