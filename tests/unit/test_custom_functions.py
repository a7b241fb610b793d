"""A user's own baseline, scale and gate: reading, loading, the trial, the door, the identity."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.errors import RecipeError
from surefoot.learner import custom
from surefoot.learner.loss import LossInputs, microbatch_loss
from surefoot.methods import Clip, GroupMean, Method, Ratio, as_mapping, describe, resolve
from surefoot.methods.custom import Bound, Custom, bind, identities
from surefoot.recipe import check_resume, leaves, load, to_yaml

MATHS = """
import torch


def centred(reward_PG, *, valid_PG, length_PG, shift=0.0):
    kept_PG = torch.where(valid_PG, reward_PG, 0.0)
    mean_P1 = kept_PG.sum(1, keepdim=True) / valid_PG.sum(1, keepdim=True).clamp_min(1)
    return reward_PG - mean_P1 - shift


def per_token(reward_PG, *, valid_PG, length_PG):
    return reward_PG / length_PG.clamp_min(1)


def halved(advantage_PG, reward_PG, *, valid_PG, factor):
    return factor * advantage_PG


def bent(log_ratio_BT, *, logp_BT, advantage_BT, mask_BT, tau=1.0):
    return -torch.tanh(log_ratio_BT / tau) * advantage_BT


def anything(reward_PG, **rest):
    return reward_PG


NUMBER = 3


async def later(reward_PG, *, valid_PG, length_PG):
    return reward_PG
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "maths.py").write_text(MATHS, encoding="utf-8")
    return tmp_path


def bound(home: Path, where: str, name: str, **options: Any) -> Bound:
    ratio = Ratio("token") if where == "gate" else Ratio()
    function = Custom(f"maths.py:{name}", tuple(options.items()))
    row = bind(Method(name="own", ratio=ratio, **{where: function}), base_dir=home)
    value = getattr(row, where)
    assert isinstance(value, Bound)
    return value


# -- reading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["baseline", "scale", "gate"])
def test_a_mapping_with_use_is_a_function_and_the_rest_are_its_options(field: str) -> None:
    own = {"use": "maths.py:f", "low": 0.1, "words": ["a", "b"], "off": None}
    row = resolve({"name": "dr_grpo", field: own})
    want = Custom("maths.py:f", (("low", 0.1), ("words", ("a", "b")), ("off", None)))
    assert getattr(row, field) == want
    assert describe(row)[field] == own
    assert as_mapping(row)[field] == {"kind": "use", **own}
    assert resolve(as_mapping(row)) == row
    assert resolve({"name": "dr_grpo", **describe(row)}) == row


def test_single_options_change_and_another_function_starts_anew() -> None:
    own = {"use": "maths.py:f", "low": 0.1, "high": 0.2}
    row = resolve({"name": "grpo", "gate": own})
    from surefoot.methods import with_fields

    changed = with_fields(row, {"gate": {"low": 0.3}})
    assert isinstance(changed, Method)
    assert changed.gate == Custom("maths.py:f", (("low", 0.3), ("high", 0.2)))
    other = with_fields(row, {"gate": {"use": "maths.py:g", "low": 0.3}})
    assert isinstance(other, Method)
    assert other.gate == Custom("maths.py:g", (("low", 0.3),))
    back = with_fields(row, {"gate": "clip"})
    assert isinstance(back, Method)
    assert back.gate == Clip()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("use", r"method\.baseline: a function of your own is written \{use: my_maths\.py"),
        ("maths.py:f", r"written \{use: maths\.py:f\}"),
        ({"kind": "use"}, r"method\.baseline: say which function"),
        ({"use": "maths.py"}, r"method\.baseline: use 'maths\.py' must read file\.py:function"),
        ({"use": "maths.py:f", "x": float("nan")}, r"option x is nan"),
        ({"use": "maths.py:f", "x": {"a": 1}}, r"option x is \{'a': 1\}"),
        ({"kind": "group", "use": "maths.py:f"}, r"method\.baseline\.use: no such option"),
    ],
)
def test_what_cannot_be_read_says_how_it_is_written(given: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        resolve({"name": "grpo", "baseline": given})


@pytest.mark.parametrize("field", ["keep", "credit", "whiten", "reduce", "correction"])
def test_other_fields_take_no_function(field: str) -> None:
    with pytest.raises(RecipeError, match=rf"method\.{field}"):
        resolve({"name": "grpo", field: {"use": "maths.py:f"}})


def test_a_function_needs_a_ratio_for_its_gate() -> None:
    with pytest.raises(RecipeError, match=r"method\.gate: use acts on the probability ratio"):
        resolve({"name": "rloo", "gate": {"use": "maths.py:bent"}})


def test_reading_a_row_with_a_function_loads_no_torch() -> None:
    check = (
        "import sys\nfrom surefoot.methods import resolve\n"
        "resolve({'name': 'grpo', 'gate': {'use': 'nowhere.py:f'}})\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -- recipe and identity ---------------------------------------------------------------------------


def recipe(home: Path, *overrides: str, **method: Any) -> Any:
    given = {
        "data": "addition",
        "reward": "numeric",
        "method": {"name": "grpo", "scale": "none", **method},
        "run": {"steps": 2},
    }
    return load(given, overrides, base_dir=home)


def test_the_resolved_recipe_and_resume_carry_the_function_and_its_options(
    home: Path, tmp_path: Path
) -> None:
    first = recipe(home, baseline={"use": "maths.py:centred", "shift": 0.5})
    path = tmp_path / "recipe.yaml"
    path.write_text(to_yaml(first), encoding="utf-8")
    assert load(path, base_dir=home) == first
    assert leaves(first)["method.baseline.use"] == "maths.py:centred"
    assert check_resume(first, load(path, base_dir=home)) == []
    other = recipe(home, "method.baseline.shift=0.25", baseline={"use": "maths.py:centred"})
    with pytest.raises(RecipeError, match=r"method\.baseline\.shift: 0\.5 -> 0\.25"):
        check_resume(first, other)
    with pytest.raises(RecipeError, match=r"method\.baseline\.use: maths\.py:centred -> null"):
        check_resume(first, recipe(home))


def test_the_identity_names_the_function_and_changes_with_its_file(home: Path) -> None:
    row = Method(name="own", baseline=Custom("maths.py:centred"))
    assert identities(row) == {}, "a function that is not loaded has no identity yet"
    before = identities(bind(row, base_dir=home))
    assert list(before) == ["method.baseline: maths.py:centred"]
    assert identities(bind(row, base_dir=home)) == before
    (home / "maths.py").write_text(MATHS.replace("- shift", "+ shift"), encoding="utf-8")
    after = bind(row, base_dir=home)
    assert identities(after) != before
    function = after.baseline
    assert isinstance(function, Bound)
    # The new text is what runs, in the same process too.
    out = function(
        torch.tensor([[1.0, 0.0]]).double(),
        valid_PG=torch.ones(1, 2, dtype=torch.bool),
        length_PG=torch.ones(1, 2, dtype=torch.int64),
    )
    assert out.tolist() == [[0.5, -0.5]]


# -- loading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("use", "options", "message"),
    [
        ("nowhere.py:f", {}, r"method\.baseline\.use: nowhere\.py does not exist \(looked in"),
        ("no_such_module_x:f", {}, r"method\.baseline\.use: cannot import no_such_module_x"),
        ("maths.py:centered", {}, r"has no centered; did you mean 'centred'"),
        ("maths.py:NUMBER", {}, r"maths\.py:NUMBER is of type int, no function"),
        ("maths.py:later", {}, r"maths\.py:later must be a plain function"),
        ("maths.py:centred", {"shif": 1.0}, r"has no parameter 'shif'; did you mean 'shift'"),
        ("maths.py:anything", {"shift": 1.0}, r"has no parameter 'shift'"),
        ("maths.py:bent", {}, r"maths\.py:bent takes .* called as f\(reward_PG, \*, valid_PG"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_by_name(
    home: Path, use: str, options: dict[str, Any], message: str
) -> None:
    row = Method(name="own", baseline=Custom(use, tuple(options.items())))
    with pytest.raises(RecipeError, match=message):
        bind(row, base_dir=home)


def test_an_option_without_a_default_must_be_given(home: Path) -> None:
    row = Method(name="own", baseline=GroupMean(), scale=Custom("maths.py:halved"))
    with pytest.raises(RecipeError, match=r"method\.scale\.use.*'factor'.*beside use"):
        bind(row, base_dir=home)
    assert bound(home, "scale", "halved", factor=0.5)


def test_a_file_that_breaks_says_so(home: Path) -> None:
    (home / "broken.py").write_text("1 / 0", encoding="utf-8")
    with pytest.raises(RecipeError, match=r"broken\.py failed with ZeroDivisionError"):
        bind(Method(name="own", baseline=Custom("broken.py:f")), base_dir=home)


def test_a_module_is_found_beside_the_recipe(home: Path) -> None:
    (home / "own_maths_module.py").write_text(MATHS, encoding="utf-8")
    row = bind(Method(name="own", baseline=Custom("own_maths_module:centred")), base_dir=home)
    assert isinstance(row.baseline, Bound)


# -- calling ---------------------------------------------------------------------------------------

REWARD = torch.tensor([[1.0, 0.0, 9.0], [0.5, 0.25, 0.75]], dtype=torch.float64)
VALID = torch.tensor([[True, True, False], [True, True, True]])
LENGTH = torch.tensor([[2, 4, 7], [1, 1, 3]])


def test_a_baseline_by_hand(home: Path) -> None:
    out = custom.baseline(
        bound(home, "baseline", "centred", shift=0.25), REWARD, valid_PG=VALID, length_PG=LENGTH
    )
    # Means 0.5 and 0.5 over the present ones, then a quarter less.
    want = [[0.25, -0.75, 0.0], [-0.25, -0.5, 0.0]]
    torch.testing.assert_close(out, torch.tensor(want, dtype=torch.float64), rtol=0, atol=1e-15)
    out = custom.baseline(
        bound(home, "baseline", "per_token"), REWARD, valid_PG=VALID, length_PG=LENGTH
    )
    want = [[0.5, 0.0, 0.0], [0.5, 0.25, 0.25]]
    torch.testing.assert_close(out, torch.tensor(want, dtype=torch.float64), rtol=0, atol=1e-15)


def test_a_scale_by_hand(home: Path) -> None:
    advantage = torch.tensor([[0.5, -0.5, 8.0], [0.0, -0.25, 0.25]], dtype=torch.float64)
    out = custom.scale(
        bound(home, "scale", "halved", factor=0.5), advantage, REWARD, valid_PG=VALID
    )
    assert out.tolist() == [[0.25, -0.25, 0.0], [0.0, -0.125, 0.125]]


def inputs(logp: list[list[float]], mask: list[list[bool]]) -> LossInputs:
    logp_BT = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
    zero = torch.zeros_like(logp_BT).detach()
    return LossInputs(
        logp_BT,
        zero,
        zero - 1.0,
        zero - 1.0,
        None,
        zero + torch.tensor([[2.0], [-4.0]]).double(),
        torch.tensor(mask),
        zero + 0.25,
    )


def test_a_gate_by_hand_through_the_loss_of_a_row(home: Path) -> None:
    row = Method(name="own", ratio=Ratio("token"), gate=bound(home, "gate", "bent", tau=2.0))
    given = inputs([[-0.5, 5.0], [-1.0, -2.0]], [[True, False], [True, True]])
    out = microbatch_loss(given, row)
    # log r = 0.5 (A 2), 0 and -1 (A -4), a quarter each; tanh(0.25) and tanh(0.5) from a table.
    want = 0.25 * (-0.24491866240370913 * 2 + 0.0 - 0.46211715726000976 * 4)
    assert float(out.loss.detach()) == pytest.approx(want, rel=1e-14)
    out.loss.backward()
    # d/dx tanh(x / 2) = (1 - tanh^2) / 2; the masked token has none.
    slope = given.logp_BT.grad
    assert slope is not None
    assert float(slope[0, 0]) == pytest.approx(-0.25 * 2 * (1 - 0.24491866240370913**2) / 2)
    assert float(slope[0, 1]) == 0.0
    assert float(slope[1, 0]) == pytest.approx(0.25 * 4 / 2)


def function(home: Path, where: str, body: str) -> Bound:
    heads = {
        "baseline": "def f(reward_PG, *, valid_PG, length_PG):",
        "scale": "def f(advantage_PG, reward_PG, *, valid_PG):",
        "gate": "def f(log_ratio_BT, *, logp_BT, advantage_BT, mask_BT):",
    }
    (home / "own.py").write_text(f"import torch\n{heads[where]}\n    {body}\n", encoding="utf-8")
    ratio = Ratio("token") if where == "gate" else Ratio()
    row = bind(Method(name="own", ratio=ratio, **{where: Custom("own.py:f")}), base_dir=home)
    value = getattr(row, where)
    assert isinstance(value, Bound)
    return value


WRONG = [
    ("return reward_PG.tolist()", r"returned a list; return one tensor"),
    ("return reward_PG.mean(1)", r"returned shape \(2,\); return \(2, 3\)"),
    ("return reward_PG.float()", r"returned torch\.float32; return torch\.float64"),
    ("return reward_PG.to('meta')", r"returned a tensor on meta; make new tensors on cpu"),
    ("return reward_PG / 0", r"returned NaN or infinity.*guard divisions"),
]


@pytest.mark.parametrize(("body", "message"), WRONG)
def test_the_door_names_function_fault_and_mend(home: Path, body: str, message: str) -> None:
    own = function(home, "baseline", body)
    with pytest.raises(RecipeError, match=rf"method\.baseline: own\.py:f {message}"):
        custom.baseline(own, REWARD, valid_PG=VALID, length_PG=LENGTH)


def test_nan_where_nothing_is_present_stays_there(home: Path) -> None:
    body = "return torch.where(valid_PG, reward_PG, float('nan'))"
    out = custom.baseline(
        function(home, "baseline", body), REWARD, valid_PG=VALID, length_PG=LENGTH
    )
    assert out.tolist() == [[1.0, 0.0, 0.0], [0.5, 0.25, 0.75]]


def test_an_exception_says_which_function_raised_it(home: Path) -> None:
    own = function(home, "baseline", "raise KeyError('oops')")
    with pytest.raises(KeyError) as caught:
        custom.baseline(own, REWARD, valid_PG=VALID, length_PG=LENGTH)
    assert caught.value.__notes__ == ["raised inside method.baseline: own.py:f"]


def test_a_gate_without_a_gradient_is_refused(home: Path) -> None:
    own = function(home, "gate", "return -(log_ratio_BT.detach()) * advantage_BT")
    row = Method(name="own", ratio=Ratio("token"), gate=own)
    with pytest.raises(RecipeError, match=r"method\.gate: own\.py:f returned a loss without a g"):
        microbatch_loss(inputs([[-0.5, 0.0], [-1.0, -2.0]], [[True, True], [True, True]]), row)


def test_a_diverged_model_is_not_the_gates_fault(home: Path) -> None:
    own = function(home, "gate", "return -log_ratio_BT * advantage_BT")
    row = Method(name="own", ratio=Ratio("token"), gate=own)
    given = inputs([[float("nan"), 0.0], [-1.0, -2.0]], [[True, True], [True, True]])
    assert bool(torch.isnan(microbatch_loss(given, row).loss))


# -- the trial -------------------------------------------------------------------------------------


def probe(own: Bound, group_size: int = 4) -> None:
    ratio = Ratio("token") if own.where == "gate" else Ratio()
    custom.probe(Method(name="own", group_size=group_size, ratio=ratio, **{own.where: own}))


@pytest.mark.parametrize("group_size", [1, 2, 8])
def test_sound_functions_pass_at_every_group_size(home: Path, group_size: int) -> None:
    probe(bound(home, "baseline", "centred"), group_size)
    probe(bound(home, "baseline", "per_token"), group_size)
    probe(bound(home, "scale", "halved", factor=2.0), group_size)
    probe(bound(home, "gate", "bent"), group_size)


@pytest.mark.parametrize(
    ("where", "body", "message"),
    [
        ("baseline", "return reward_PG - reward_PG.mean(1, keepdim=True)", "where valid_PG is F"),
        ("baseline", "return reward_PG / length_PG.sum()", "where valid_PG is False"),
        ("scale", "return advantage_PG / (reward_PG.std(1, keepdim=True) + 1)", "valid_PG is F"),
        ("gate", "return -log_ratio_BT * advantage_BT.mean(1, keepdim=True)", "mask_BT is False"),
        ("gate", "return -log_ratio_BT * advantage_BT - logp_BT", "where advantage_BT is 0"),
        ("baseline", "return reward_PG / reward_PG.std(1, keepdim=True)", "NaN or infinity"),
        ("baseline", "return reward_PG[:, 5:6] * reward_PG[9]", "failed on a trial input with In"),
    ],
)
def test_the_trial_refuses_before_the_run(home: Path, where: str, body: str, message: str) -> None:
    with pytest.raises(RecipeError, match=rf"method\.{where}: own\.py:f .*{message}"):
        probe(function(home, where, body))
