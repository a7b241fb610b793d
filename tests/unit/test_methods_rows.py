"""The rows: the values that the papers fix, reading, describing, and what is built."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from surefoot.errors import NotBuiltError, RecipeError
from surefoot.methods import (
    BUILT,
    FAMILIES,
    KL,
    Clip,
    Entropy,
    GroupMean,
    GroupStd,
    Informative,
    KeepAll,
    LeaveOneOut,
    Method,
    NoBaseline,
    NoGate,
    NoScale,
    Overlong,
    Preference,
    Ratio,
    SequenceMean,
    SequenceSum,
    Supervised,
    TokenMean,
    as_mapping,
    built,
    check_built,
    describe,
    get,
    is_group_relative,
    min_group,
    online_rows,
    resolve,
    rows,
    with_fields,
)
from surefoot.methods.registry import spec


def method(**fields: Any) -> Method:
    return Method(name="test", **fields)


def test_the_rows_of_this_build() -> None:
    assert list(rows()) == [
        "reinforce",
        "reinforce_ma",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "rloo",
        "rloo_median",
        "opo",
        "remax",
        "grpo",
        "gdpo",
        "dr_grpo",
        "lite_ppo",
        "maxrl",
        "dapo",
        "gspo",
        "gspo_token",
        "cispo",
        "sapo",
        "gmpo",
        "dppo",
        "ppo",
        "ppo_warm",
        "grpo_critic",
        "vapo",
        "dpo",
        "cdpo",
        "robust_dpo",
        "ipo",
        "ipo_avg",
        "hinge",
        "dpo_norm",
        "bco_pair",
        "apo_zero",
        "nca_pair",
        "simpo",
        "orpo",
        "kto",
        "sft",
        "reward_model",
    ]
    assert list(online_rows()) == list(rows())[:24]


def test_reinforce_has_no_baseline_ratio_or_gate() -> None:
    row = get("reinforce")
    assert isinstance(row, Method)
    assert (row.baseline, row.scale, row.ratio, row.gate) == (
        NoBaseline(),
        NoScale(),
        Ratio("none"),
        NoGate(),
    )
    assert row.reduce == SequenceSum()
    assert (row.kl.place, row.kl.estimator) == ("reward_sequence", "k1")


def test_rloo_is_reinforce_with_the_leave_one_out_baseline() -> None:
    rloo, reinforce = describe(get("rloo")), describe(get("reinforce"))
    assert rloo.pop("baseline") == {"kind": "leave_one_out", "center": "mean"}
    assert rloo == reinforce
    assert get("rloo").kl.coef == 0.03


def test_grpo_is_the_paper_with_its_open_values_named() -> None:
    row = get("grpo")
    assert isinstance(row, Method)
    assert (row.kl.place, row.kl.estimator, row.kl.coef) == ("loss", "k3", 0.04)
    assert row.baseline == GroupMean()
    assert row.scale == GroupStd(ddof=1, eps=1e-4)
    assert row.ratio == Ratio("token", to="old")
    assert row.gate == Clip(low=0.2, high=0.2, dual=None, cap=None)
    assert row.reduce == SequenceMean()
    assert (row.epochs, row.minibatches, row.keep) == (1, 1, KeepAll())


def test_dapo_is_the_paper() -> None:
    row = get("dapo")
    assert isinstance(row, Method)
    assert row.kl.place == "none"
    assert isinstance(row.keep, Informative)
    assert row.keep.by == "score"
    assert row.shaping == (Overlong(cache=None, weight=1.0),)
    assert row.gate == Clip(low=0.2, high=0.28)
    assert row.reduce == TokenMean()
    assert row.scale == GroupStd(ddof=1, eps=1e-4)


@pytest.mark.parametrize("name", list(rows()))
def test_every_row_is_built_and_survives_its_plain_form(name: str) -> None:
    row = get(name)
    check_built(row)
    assert resolve(as_mapping(row)) == row
    assert resolve({"name": name, **describe(row)}) == row
    assert resolve({**as_mapping(row), "type": type(row).__name__.lower()}) == row


def test_an_unknown_row_names_the_nearest() -> None:
    with pytest.raises(RecipeError, match="did you mean 'grpo'"):
        get("grpp")


def test_a_bare_word_is_that_kind_with_its_defaults() -> None:
    row = resolve(
        {"name": "grpo", "baseline": "leave_one_out", "gate": "none", "reduce": "constant"}
    )
    assert isinstance(row, Method)
    assert row.baseline == LeaveOneOut(center="mean")
    assert row.gate == NoGate()
    assert row.reduce.kind == "constant"


def test_a_mapping_without_kind_changes_single_values() -> None:
    row = resolve({"name": "dapo", "gate": {"low": 0.1}, "shaping": {"0": {"cache": 7}}})
    assert isinstance(row, Method)
    assert row.gate == Clip(low=0.1, high=0.28)
    assert row.shaping == (Overlong(cache=7, weight=1.0),)


def test_the_same_kind_written_out_keeps_what_the_row_says() -> None:
    row = resolve({"name": "dapo", "gate": {"kind": "clip", "low": 0.1}})
    assert row.gate == Clip(low=0.1, high=0.28)
    other = resolve({"name": "grpo", "kl": {"place": "reward_sequence", "coef": 0.5}})
    assert other.kl == KL("reward_sequence", estimator="k1", coef=0.5, measure_every=10)


def test_lists_replace_the_rows_own() -> None:
    row = resolve({"name": "dapo", "shaping": [], "terms": ["entropy"]})
    assert isinstance(row, Method)
    assert row.shaping == ()
    assert row.terms == (Entropy(weight=0.01),)
    assert resolve({"name": "dapo", "terms": {"kind": "entropy", "weight": 0.5}}).terms == (
        Entropy(0.5),
    )


def test_the_controller_is_a_choice_inside_a_choice() -> None:
    row = resolve({"name": "grpo", "kl": {"controller": {"kind": "proportional", "target": 3}}})
    assert row.kl.controller.kind == "proportional"
    assert row.kl.controller.target == 3.0
    assert row.kl.controller.horizon == 10_000
    assert row.kl.coef == 0.04


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"gruop_size": 4}, ["method.gruop_size", "'group_size'"]),
        ({"gate": {"hihg": 0.3}}, ["method.gate.hihg", "clip reads low, high", "'high'"]),
        ({"gate": {"kind": "none", "low": 0.1}}, ["method.gate.low", "none reads no options"]),
        ({"gate": "clipp"}, ["method.gate", "'clip'"]),
        ({"kl": {"place": "none", "estimator": "k3"}}, ["method.kl.estimator", "none reads"]),
        ({"kl": {"coef": "strong"}}, ["method.kl.coef", "not a number"]),
        ({"kl": {"coef": float("nan")}}, ["method.kl.coef"]),
        ({"kl": {"coef": 1e31}}, ["method.kl.coef", "too large", "1e+30"]),
        ({"gate": {"high": 10**400}}, ["method.gate.high", "too large"]),
        ({"group_size": 2**31}, ["method.group_size", "too large; it is at most 2,147,483,647"]),
        ({"group_size": 2.5}, ["method.group_size", "not a whole number"]),
        ({"group_size": True}, ["method.group_size"]),
        ({"greedy_sample": 1}, ["method.greedy_sample", "true or false"]),
        ({"terms": [{"weight": 0.1}]}, ["method.terms.0", "say which with kind"]),
        ({"terms": {"3": {"weight": 0.1}}}, ["method.terms.3", "0 of them"]),
        ({"baseline": 3}, ["method.baseline"]),
        ({"baseline": {"kind": "leave_one_out", "center": "mode"}}, ["baseline.center"]),
        ({"kl": {"controller": {"kind": "fixed", "target": 1}}}, ["method.kl.controller.target"]),
    ],
)
def test_a_bad_value_is_refused_by_its_key(spec: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        resolve({"name": "grpo", **spec})
    for word in words:
        assert word in str(caught.value)


def test_whole_floats_are_whole_numbers() -> None:
    assert resolve({"name": "grpo", "group_size": 16.0}).group_size == 16


@pytest.mark.parametrize("spec", [{}, {"name": "grpo", "use": "a.py:R"}, {"group_size": 3}])
def test_name_or_use_exactly_one(spec: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="exactly one of name"):
        resolve(spec)


def test_a_users_row_is_loaded_relative_to_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from surefoot.methods import Method, GroupMean\n"
        "ROW = Method(name='mine', baseline=GroupMean(), group_size=3)\nOTHER = 3\n"
    )
    row = resolve({"use": "mine.py:ROW", "group_size": 5}, base_dir=tmp_path)
    assert row == Method(name="mine", baseline=GroupMean(), group_size=5)
    with pytest.raises(RecipeError, match="did you mean 'ROW'"):
        resolve({"use": "mine.py:ROWW"}, base_dir=tmp_path)
    with pytest.raises(RecipeError, match="is of type int, not a Method"):
        resolve({"use": "mine.py:OTHER"}, base_dir=tmp_path)
    with pytest.raises(RecipeError, match="does not exist"):
        resolve({"use": "yours.py:ROW"}, base_dir=tmp_path)
    with pytest.raises(RecipeError, match="must read"):
        resolve({"use": "mine.py"}, base_dir=tmp_path)
    with pytest.raises(RecipeError, match="cannot import no_such_package"):
        resolve({"use": "no_such_package.rows:ROW"})
    assert resolve({"use": "surefoot.methods.table:RLOO"}) == get("rloo")


def test_a_users_row_may_lie_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "here.py").write_text(
        "from surefoot.methods import Method\nROW = Method(name='here')\n"
    )
    monkeypatch.chdir(tmp_path)
    assert resolve({"use": "here.py:ROW"}, base_dir=tmp_path / "recipes").name == "here"


@pytest.mark.parametrize("name", list(online_rows()))
def test_a_row_is_its_own_spec(name: str) -> None:
    row = get(name)
    assert resolve(spec(row)) == row
    own = dataclasses.replace(row, name="own", group_size=row.group_size + 1)
    assert resolve(spec(own)) == own
    assert spec(own)["type"] == "method"


def test_a_preference_row_is_its_own_spec() -> None:
    row = Preference(name="dpo_mine", beta=0.3)
    assert spec(row)["type"] == "preference"
    assert resolve(spec(row)) == row


def test_group_of_one_is_refused_with_the_mend() -> None:
    for name in ("rloo", "grpo", "dapo"):
        with pytest.raises(RecipeError, match="set group_size to 2 or more"):
            with_fields(get(name), {"group_size": 1})
    assert with_fields(get("reinforce"), {"group_size": 1}).group_size == 1


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"gate": "clip"}, "method.gate"),
        ({"kl": "reward_token"}, "method.kl.place"),
        ({"kl": {"place": "loss", "estimator": "k3_ratio"}}, "method.kl.estimator"),
        ({"kl": {"place": "reward_sequence", "estimator": "k3_ratio"}}, "method.kl.estimator"),
        ({"kl": {"coef": 0.1}}, "method.kl.coef"),
        ({"scale": "group_std"}, "method.scale"),
        ({"credit": "gae"}, "method.critic"),
        ({"critic": "critic"}, "method.critic"),
        ({"ratio": "geometric"}, "method.gate"),
        ({"ratio": "geometric", "gate": {"kind": "clip", "cap": 4.0}}, "method.gate"),
        ({"ratio": "sequence", "gate": "divergence"}, "method.ratio.level"),
        ({"credit": "reward_to_go", "whiten": "sequence"}, "method.whiten"),
        ({"credit": "gae", "critic": "critic", "baseline": "group"}, "method.baseline"),
        (
            {"credit": {"kind": "gae", "group_weight": 0.5}, "critic": "critic"},
            "method.credit.group_weight",
        ),
        ({"warmup": "value"}, "method.warmup"),
        ({"baseline": "greedy"}, "method.greedy_sample"),
        ({"greedy_sample": True}, "method.greedy_sample"),
        ({"keep": "informative", "group_size": 1}, "method.keep"),
        ({"ratio": "sequence", "credit": "reward_to_go"}, "method.ratio.level"),
        ({"ratio": {"level": "token", "to": "sampler"}, "correction": "truncate"}, "correction"),
        ({"terms": ["entropy", "entropy"]}, "method.terms"),
        ({"minibatches": 0}, "method.minibatches"),
        ({"epochs": 0}, "method.epochs"),
        ({"min_group": 9}, "method.min_group"),
        ({"baseline": "group", "min_group": 1}, "method.min_group"),
        ({"ratio": "token", "gate": {"kind": "clip", "low": 0.0}}, "method.gate.low"),
        ({"ratio": "token", "gate": {"kind": "clip", "dual": 0.5}}, "method.gate.dual"),
        ({"ratio": "token", "gate": {"kind": "clip", "cap": 1.1}}, "method.gate.cap"),
    ],
)
def test_combinations_that_cannot_work(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(RecipeError, match=word):
        with_fields(method(), fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"kl": "reward_token", "credit": "reward_to_go"},
        {"kl": {"place": "loss", "estimator": "k3_ratio"}, "ratio": "token"},
        {"baseline": "group", "scale": "group_std"},
        {"credit": "gae", "critic": "critic", "warmup": "value", "whiten": "token"},
        {
            "credit": {"kind": "gae", "group_weight": 0.5},
            "critic": "critic",
            "baseline": "group",
        },
        {"baseline": "greedy", "greedy_sample": True},
        {"ratio": "sequence", "gate": {"kind": "clip", "low": 3e-4, "high": 4e-4}},
        {"ratio": "token", "gate": {"kind": "clip", "dual": 3.0, "cap": 4.0}},
    ],
)
def test_combinations_that_work(fields: dict[str, Any]) -> None:
    with_fields(method(), fields)


@pytest.mark.parametrize(("size", "expected"), [(2, 2), (3, 3), (4, 3), (8, 6), (10, 8), (64, 48)])
def test_min_group_is_three_quarters_rounded_up(size: int, expected: int) -> None:
    assert min_group(method(group_size=size, baseline=GroupMean())) == expected


def test_min_group_of_rows_without_a_group_baseline() -> None:
    assert min_group(method(group_size=1)) == 1
    assert min_group(method(group_size=4)) == 3
    assert min_group(method(group_size=8, min_group=5)) == 5


def test_group_relative_follows_the_baseline() -> None:
    kinds = {"group", "leave_one_out", "length_weighted"}
    for kind, baseline in FAMILIES["baseline"].kinds.items():
        row = method(baseline=baseline, greedy_sample=kind == "greedy")
        assert is_group_relative(row) == (kind in kinds)
    assert not is_group_relative(Preference(name="dpo"))


def test_what_is_not_built_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    check_built(online_rows()["grpo"])
    monkeypatch.setattr(built, "BUILT", {**BUILT, "gate": frozenset({"none"})})
    with pytest.raises(NotBuiltError, match=r"method\.gate: clip is not built yet.*built: none"):
        check_built(online_rows()["grpo"])


def test_every_kind_of_an_online_row_is_built() -> None:
    for key, family in FAMILIES.items():
        if key in BUILT:
            assert set(family.kinds) <= BUILT[key], key


def test_the_built_table_names_real_fields_and_kinds() -> None:
    for key, words in BUILT.items():
        name, _, option = key.partition(".")
        if name in FAMILIES and not option:
            assert words <= set(FAMILIES[name].kinds), key
        if option in FAMILIES:
            assert words <= set(FAMILIES[option].kinds), key
    # The order of the table must not matter: every choice of a row is judged.
    assert set(FAMILIES) - {"controller"} <= set(BUILT)


def test_preference_and_supervised_rows_check_themselves() -> None:
    dpo = resolve({"name": "dpo", "type": "preference", "beta": 0.5})
    assert dpo == Preference(name="dpo", beta=0.5)
    with pytest.raises(RecipeError, match=r"method\.link"):
        resolve({"name": "dpo", "type": "preference", "link": "sigmod"})
    with pytest.raises(RecipeError, match=r"method\.data"):
        Preference(name="x", data="labels")
    with pytest.raises(RecipeError, match=r"method\.unbias"):
        Preference(name="x", unbias=True)
    with pytest.raises(RecipeError, match=r"method\.loss"):
        Supervised(name="x", data="pairs")
    with pytest.raises(RecipeError, match=r"method\.center"):
        Supervised(name="x", center=0.1)
    assert Supervised(name="rm", data="pairs", loss="bradley_terry", center=0.01).center == 0.01


def test_describe_shows_only_differences_and_a_said_zero() -> None:
    assert describe(Method(name="x")) == {}
    shown = describe(method(baseline=GroupMean(), scale=GroupStd(ddof=0, eps=0.0)))
    assert shown == {"baseline": "group", "scale": {"kind": "group_std", "ddof": 0, "eps": 0.0}}
    assert describe(method(kl=KL("loss", coef=0.0)))["kl"] == "loss"


def test_rows_are_frozen() -> None:
    with pytest.raises(AttributeError):
        get("grpo").group_size = 4  # type: ignore[misc]
    with pytest.raises(TypeError):
        rows()["mine"] = get("grpo")  # type: ignore[index]
