"""Recipes that are nearly right, as files and as overrides, and the commands that read them.

Owns where in a recipe something is wrong. Refuses to own the values (`fuzz_values`).
"""

from __future__ import annotations

import copy
import json
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any

import yaml
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from support.fuzz import RECIPE, Case, Odd
from support.fuzz_values import (
    damaged,
    keys,
    parent_of,
    paths_of,
    scalars,
    seldom,
    sizes,
    values,
    words,
)
from support.offline import FORMS
from surefoot.methods import Method, Preference, Row, as_mapping, rows
from surefoot.recipe.aliases import ALIASES
from surefoot.recipe.schema import SECTIONS, DataSource, RewardPart, Section

PROMPTS: list[dict[str, object]] = [{"prompt": f"say {c}", "answer": c, "id": c} for c in "abcdefg"]
REWARDS = (
    *("exact", "numeric", "math", "boxed", "regex", "length", "tags", "repetition", "cosine"),
    *("code", "model", "judge", "reward.py:letters", "reasoning_gym", "stage:first", "json:loads"),
)
DIRECTORIES = ("run", ".", "model", "rows.jsonl", "a/b", "r\0n", "é", "", "model/x", "x" * 300)
SOURCES = ("addition", "reasoning_gym", "rows", "rows.jsonl", "no/such", "rows.csv", "x.pkl")


def form_of(method: str) -> str:
    """The rows that a method reads: prompts, or a form of `support.offline`."""
    row = rows()[method]
    if isinstance(row, Method):
        return "prompts"
    if isinstance(row, Preference):
        return "labels" if row.data == "labels" else "pairs"
    return {"pairs": "pairs", "rankings": "rankings"}.get(row.data, "demonstrations")


def rows_of(form: str) -> bytes:
    rows = PROMPTS if form == "prompts" else FORMS[form]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def plain_recipe(method: str, **changes: Any) -> dict[str, Any]:
    """A right recipe of two steps; `section__key` in `changes` sets one key of a section."""
    recipe: dict[str, Any] = {
        "model": {"path": "model"},
        "data": {"source": "rows.jsonl", "eval_size": 2},
        "method": {"name": method},
        "optim": {"learning_rate": 0.003},
        "run": {
            **{"dir": "run", "steps": 2, "checkpoint_every": 1, "trackers": [], "seed": 3},
            # A case that is asked to stop inside one long operation ends after so many seconds.
            "grace": 5.0,
        },
    }
    if form_of(method) == "prompts":
        recipe["reward"] = [{"use": "reward.py:letters"}]
        recipe["rollout"] = {"prompts_per_step": 2, "max_new_tokens": 6}
        if "group_size" in as_mapping(rows()[method]):
            recipe["method"]["group_size"] = 4
    else:
        recipe["optim"]["batch_size"] = 3
    for key, value in changes.items():
        section, _, name = key.partition("__")
        recipe.setdefault(section, {})[name] = value
    return recipe


def chain_recipe(*methods: str) -> dict[str, Any]:
    recipe = plain_recipe("rloo")
    del recipe["method"]
    recipe["stages"] = [
        {"name": f"s{number}", "method": {"name": name}} for number, name in enumerate(methods)
    ]
    for number in range(1, len(methods)):
        recipe["stages"][number]["model"] = {"path": f"stage:s{number - 1}"}
    return recipe


@cache
def known_keys() -> dict[str, SearchStrategy[Any]]:
    """Every key of the schema, with values that its type may hold."""
    sections = {**SECTIONS, "data": DataSource, "reward": RewardPart}
    return {
        f"{section}.{name}": _fitting(field.annotation)
        for section, model in sections.items()
        for name, field in model.model_fields.items()
        if name != "options"
    }


def _fitting(annotation: Any) -> SearchStrategy[Any]:
    """Values of about the right type; most keys of a case must pass for the rest to be reached."""
    if typing.get_origin(annotation) is typing.Literal:
        return st.sampled_from(typing.get_args(annotation))
    if typing.get_origin(annotation) is tuple:
        return st.lists(_fitting(typing.get_args(annotation)[0]), max_size=3)
    if isinstance(annotation, type) and issubclass(annotation, Section):
        fields = {n: _fitting(f.annotation) for n, f in annotation.model_fields.items()}
        return st.fixed_dictionaries({}, optional=fields)
    if annotation is type(None):
        return st.none()
    if annotation is bool:
        return st.booleans()
    if annotation is int:
        return sizes
    if annotation is float:
        return st.sampled_from((0.0, 1e-3, 0.1, 0.5, 1.0, 2.0, 10.0))
    if annotation is str:
        return words
    parts = typing.get_args(annotation)
    found = [_fitting(part) for part in parts if isinstance(part, type) or typing.get_args(part)]
    return st.one_of(*found) if found else scalars


@cache
def method_parts(family: type[Row] = Row) -> tuple[tuple[tuple[str, ...], Any], ...]:
    """Every field of every row of a type, with its value there."""
    found = []
    for row in filter(lambda row: isinstance(row, family), rows().values()):
        fields = as_mapping(row)
        for path in paths_of(fields):
            if all(isinstance(key, str) for key in path):
                found.append((path, parent_of(fields, path)[path[-1]]))
    return tuple(found)


@st.composite
def base_recipes(draw: DrawFn) -> tuple[dict[str, Any], str]:
    """A right recipe, and the form of its rows."""
    if seldom(draw, 8):
        return chain_recipe("rloo", draw(st.sampled_from(("grpo", "ppo")))), "prompts"
    method = draw(st.sampled_from(sorted(rows())))
    return plain_recipe(method), form_of(method)


@st.composite
def changed(draw: DrawFn, recipe: Mapping[str, Any], *, careful: bool) -> dict[str, Any]:
    """`recipe` with one to three things changed; a `careful` change is of the right type."""
    tree = copy.deepcopy(dict(recipe))
    changes = (
        (_fit, _fit, _cross) if careful else (_set, _fit, _spoil, _cross, _drop, _rename, _add)
    )
    for _ in range(draw(st.sampled_from((1, 1, 2, 3)))):
        draw(st.sampled_from(changes))(draw, tree)
    return tree


def _path(draw: DrawFn, tree: dict[str, Any]) -> tuple[str | int, ...] | None:
    there = paths_of(tree)
    return draw(st.sampled_from(there)) if there else None


def _set(draw: DrawFn, tree: dict[str, Any]) -> None:
    path = _path(draw, tree)
    if path is not None:
        parent_of(tree, path)[path[-1]] = draw(values)


def _fit(draw: DrawFn, tree: dict[str, Any]) -> None:
    """A key of the schema gets a value that its type may hold."""
    name = _known(draw)
    special = {"reward.use": REWARDS, "data.source": SOURCES, "run.dir": DIRECTORIES}
    place = special.get(name)
    value = draw(known_keys()[name] if place is None else st.sampled_from(place))
    _put(tree, name, value)


def _spoil(draw: DrawFn, tree: dict[str, Any]) -> None:
    _put(tree, _known(draw), draw(scalars))


def _known(draw: DrawFn) -> str:
    """A key of the schema; of the sections that most recipes have more often."""
    section = draw(st.sampled_from(_SECTIONS))
    return draw(st.sampled_from([k for k in known_keys() if k.partition(".")[0] == section]))


_SECTIONS = (
    *("model", "data", "reward", "rollout", "optim", "run") * 3,
    *("critic", "doctor", "judge"),
)


def _put(tree: dict[str, Any], name: str, value: Any) -> None:
    section, _, key = name.partition(".")
    if section not in ("data", "reward"):
        _mapping(tree, section)[key] = value
        return
    held = tree.get(section)
    entry = held[0] if isinstance(held, list) and held else held
    if not isinstance(entry, dict):
        entry = tree[section] = {}
    entry[key] = value


def _cross(draw: DrawFn, tree: dict[str, Any]) -> None:
    """A field of one row in another."""
    name = tree["method"].get("name") if isinstance(tree.get("method"), dict) else None
    own = rows().get(name) if isinstance(name, str) else None
    path, value = draw(st.sampled_from(method_parts(Row if own is None else type(own))))
    node = _mapping(tree, "method")
    for key in path[:-1]:
        node = _mapping(node, key)
    node[path[-1]] = value


def _mapping(tree: dict[str, Any], key: str) -> dict[str, Any]:
    if not isinstance(tree.get(key), dict):
        tree[key] = {}
    made: dict[str, Any] = tree[key]
    return made


def _drop(draw: DrawFn, tree: dict[str, Any]) -> None:
    path = _path(draw, tree)
    if path is not None:
        del parent_of(tree, path)[path[-1]]


def _rename(draw: DrawFn, tree: dict[str, Any]) -> None:
    path = _path(draw, tree)
    if path is not None and isinstance(path[-1], str):
        node = parent_of(tree, path)
        name = draw(st.one_of(keys, st.sampled_from(("modle", "lr", "learning_rat", "steps"))))
        node[name] = node.pop(path[-1])


def _add(draw: DrawFn, tree: dict[str, Any]) -> None:
    name = draw(st.one_of(keys, st.sampled_from(sorted(ALIASES))))
    tree[name] = draw(values)


@st.composite
def recipe_bytes(draw: DrawFn) -> tuple[bytes, str]:
    """A recipe's file, and the form of its rows."""
    recipe, form = draw(base_recipes())
    how = draw(st.sampled_from((*("careful",) * 5, *("values",) * 3, "text", "both", "other")))
    if how in ("careful", "values", "both"):
        recipe = draw(changed(recipe, careful=how == "careful"))
    text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=draw(st.booleans()))
    data = text.encode("utf-8", "surrogatepass")
    if how in ("text", "both"):
        data = draw(damaged(data))
    elif how == "other":
        data = draw(st.one_of(st.binary(max_size=60), st.sampled_from(_OTHER)))
    return data, form


_OTHER = (
    b"",
    b"\n",
    b"null",
    b"[]",
    b"- a\n- b\n",
    b"model: &m {path: model, system: *m}\nmethod: rloo\n",
    b"a: &a [x,x,x,x,x,x,x,x,x]\n"
    + b"".join(
        b"%c: &%c [%s]\n" % (c, c, b",".join([b"*%c" % (c - 1)] * 9)) for c in range(98, 108)
    )
    + b"method: {name: rloo, kl: *k}\ndata: *k\n",
    b"method: rloo\nmethod: grpo\n",
    b"method: {name: rloo}\n? [a, b]\n: c\n",
    b"? {a: b}\n: c\n",
    b"1: 2\ntrue: false\nnull: 1\n1.5: x\n",
    b"<<: {method: rloo}\ndata: addition\n",
    b"<<: 7\n",
    b"--- a\n--- b\n",
    b"method: " + b"[" * 5000,
    b"method: " + b"{a: " * 2000,
    b"\xff\xfem\0e\0t\0h\0",
    b"\x80abc",
    b"PK\x03\x04 not a recipe",
    b"run: {steps: " + b"9" * 5000 + b"}\nmethod: rloo\n",
)


@st.composite
def overrides(draw: DrawFn) -> list[str]:
    """Overrides of a recipe, most of them of keys that exist."""
    found = []
    for _ in range(draw(st.integers(0, 3))):
        how = draw(st.sampled_from(range(6)))
        name = _known(draw)
        if how <= 2:
            value = draw(known_keys()[name] if how else scalars)
            found.append(f"{name}={_word(value)}")
        elif how == 3:
            path, value = draw(st.sampled_from(method_parts()))
            found.append(f"method.{'.'.join(path)}={_word(value)}")
        else:
            key = draw(st.one_of(st.sampled_from(_KEYS), st.text(max_size=8)))
            found.append(f"{key}={_word(draw(scalars))}" if draw(st.booleans()) else key)
    # The system has no arguments with NUL in them.
    return [text.replace("\0", "0") for text in found]


_KEYS = (
    *("=", "a..b", ".a", "--run.steps", "run.steps.x", "data.9.source", "data.-1.x", "reward.x"),
    *("stages", "stages.s0.run.steps", "stages.9.x", "num_generations", "beta", "model.lora.rank"),
    *("data.columns.prompt", "method", "run", "data", "reward.0", "optim.betas.0", "run.allow.0"),
    *("--json", "-x", "--help", "--checkpoint", "--", "method.kl", "method.gate.kind", "model."),
)


def _word(value: Any) -> str:
    return (
        yaml.safe_dump(value, default_flow_style=True, width=10**9).removesuffix("\n...\n").strip()
    )


@st.composite
def recipe_cases(draw: DrawFn) -> Case:
    """A recipe with something wrong, and a command that reads recipes."""
    data, form = draw(recipe_bytes())
    files: dict[str, bytes | Odd] = {RECIPE: data, "rows.jsonl": rows_of(form)}
    if seldom(draw, 31):
        files[RECIPE] = draw(st.sampled_from(list(Odd)))
    verb = draw(st.sampled_from(_VERBS))
    more = draw(overrides()) if seldom(draw, 3) else []
    return Case("recipe", (*verb, *more), files)


_VERBS = (
    *(("train", RECIPE),) * 16,
    *(("eval", RECIPE),) * 4,
    ("eval", RECIPE, "--json"),
    *(("audit", "reward", RECIPE, "--no-pilot"),) * 3,
    ("audit", "reward", RECIPE, "--pilot", "1"),
    ("audit", "data", RECIPE),
    ("export", RECIPE, "out"),
    ("train", "."),
    ("train", "no\udcffsuch.yaml"),
    ("eval", "rows.jsonl"),
    ("methods",),
    ("methods", "--json"),
    ("env", "--json"),
    (),
    ("trian", RECIPE),
    ("train",),
    ("--version",),
)
