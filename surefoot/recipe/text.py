"""YAML and overrides to plain values.

Owns the YAML dialect: YAML 1.2 numbers and booleans (`1e-5` is a number, `no` is a word), no
duplicate keys, no tags; and the override notation `key.sub=value`.
Refuses to own meaning: `load.py` and `schema.py` judge the values.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from surefoot.errors import RecipeError
from surefoot.methods import FAMILIES

_RESOLVERS = (
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", "~nN\0"),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9]+", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?",
        "-+.0123456789",
    ),
    ("tag:yaml.org,2002:merge", r"<<", "<"),
)


_UNWRITABLE = re.compile("[\0\ud800-\udfff]")
_LONGEST_NAME, _LONGEST_PATH = 255, 4000
"""In bytes: what Linux allows in a path, less what may stand before and behind it."""
_DEEPEST = 50
_LARGEST = 100_000
"""Values that a document may hold, an alias counted as all that its anchor stands for."""


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, pattern, first in _RESOLVERS:
        for character in first:
            key = "" if character == "\0" else character
            table.setdefault(key, []).append((tag, re.compile(f"(?:{pattern})$")))
    return table


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _resolvers()
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        if self._depth > _DEEPEST:
            line = self.peek_event().start_mark.line + 1
            raise RecipeError(
                f"line {line}: lists and mappings are nested more than {_DEEPEST} deep"
            )
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None and _size(node, {}) > _LARGEST:
            raise RecipeError(
                f"it holds more than {_LARGEST:,} values, an alias counted as all that its anchor "
                "stands for; write less in one document"
            )
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                line = key.start_mark.line + 1
                raise RecipeError(f"line {line}: the key {key.value!r} is given twice")
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def _size(node: yaml.Node, known: dict[yaml.Node, int | None]) -> int:
    """How many values `node` stands for; a node within itself is refused."""
    if node in known:
        size = known[node]
        if size is None:
            line = node.start_mark.line + 1
            raise RecipeError(f"line {line}: the anchor here has an alias to itself inside it")
        return size
    known[node] = None
    inner: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        inner = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        inner = node.value
    size = known[node] = 1 + sum(_size(part, known) for part in inner)
    return size


def _decimal(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    try:
        return int(text, 10)
    except ValueError as error:
        line = node.start_mark.line + 1
        raise RecipeError(f"line {line}: a number of {len(text)} digits cannot be read") from error


_Loader.add_constructor("tag:yaml.org,2002:int", _decimal)


class Dumper(yaml.SafeDumper):
    """Writes what the loader above reads back as the same value."""

    yaml_implicit_resolvers = _resolvers()

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _float(dumper: Dumper, value: float) -> yaml.ScalarNode:
    text = repr(value)
    # Readers of YAML 1.1 take 1e-06 for a word; with a point it is a number for all of them.
    if "e" in text and "." not in text:
        text = text.replace("e", ".0e")
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


Dumper.add_representer(float, _float)


def dump(value: Any) -> str:
    """One value on one line of YAML."""
    text = _dumped(value, readable=True)
    # PyYAML folds an unescaped NEL to a space when it reads it back.
    return _dumped(value, readable=False) if any(mark in text for mark in _BREAKS) else text


_BREAKS = ("\x85", "\u2028", "\u2029")


def _dumped(value: Any, *, readable: bool) -> str:
    """`readable` leaves letters outside ASCII as they are; else they are escaped."""
    text = yaml.dump(
        value,
        Dumper=Dumper,
        default_flow_style=True,
        allow_unicode=readable,
        width=float("inf"),
        sort_keys=False,
    )
    return text.removesuffix("\n").removesuffix("\n...")


def parse(text: str, *, where: str) -> Any:
    """YAML text to plain values; RecipeError names `where` and the line."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise RecipeError(f"{where}: not readable as YAML: {_one_line(error)}") from error
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from error


def _one_line(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())


def check_texts(value: Any, key: str) -> None:
    """Refuse texts, however deep in `value`, that neither a file nor a tokenizer can hold."""
    if isinstance(value, str):
        found = _UNWRITABLE.search(value)
        if found is not None:
            what = "NUL" if found[0] == "\0" else "half of a surrogate pair"
            raise RecipeError(
                f"{key}: has {what} in it, at character {found.start() + 1}, which cannot be "
                "written to a file; remove it"
            )
    elif isinstance(value, Mapping):
        for name, item in value.items():
            check_texts(name, key)
            check_texts(item, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_texts(item, f"{key}.{index}")


def check_path(text: str | None, key: str) -> None:
    """Refuse what is too long to be a path; to ask the system for it would be an error."""
    parts = [] if text is None else os.fsencode(text).split(b"/")
    if any(len(part) > _LONGEST_NAME for part in parts) or len(text or "") > _LONGEST_PATH:
        raise RecipeError(f"{key}: {text!r:.60} is too long for a path; name another")


def read(path: Path) -> dict[str, Any]:
    """A recipe file as plain values."""
    check_path(str(path), "the recipe")
    if (path / "recipe.yaml").is_file():
        raise RecipeError(
            f"{path}: is a run directory; send the recipe that it began with, or "
            f"{path / 'recipe.yaml'}"
        )
    if path.is_dir():
        raise RecipeError(f"{path}: is a directory; name a recipe, which is a YAML file")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise RecipeError(f"{path}: there is no such recipe") from error
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read: {error}") from error
    value = parse(text, where=str(path))
    if value is None:
        raise RecipeError(f"{path}: is empty; a recipe needs at least data, reward and method")
    if not isinstance(value, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of sections, not {value!r:.40}")
    return value


def split_override(text: str) -> tuple[str, Any]:
    """`key.sub=value` to (`key.sub`, value); the value is YAML."""
    key, equals, value = text.partition("=")
    key = key.strip().removeprefix("--")
    if not equals or not key or any(not part for part in key.split(".")):
        raise RecipeError(f"override {text!r}: write key.sub=value, as in optim.learning_rate=1e-5")
    return key, parse(value, where=f"override {text!r}")


def put(raw: dict[str, Any], key: str, value: Any) -> None:
    """Set the dotted `key` in the plain recipe `raw`, making the mappings on the way.

    A number indexes a list. A word on the way becomes the mapping that it stands for.
    """
    parts = key.split(".")
    node: Any = raw
    for depth, part in enumerate(parts):
        here = ".".join(parts[: depth + 1])
        if isinstance(node, list):
            index = _index(node, part, here)
            if depth == len(parts) - 1:
                node[index] = value
                return
            node[index] = _opened(node[index], parts[depth - 1])
            node = node[index]
        elif depth == len(parts) - 1:
            node[part] = value
        else:
            node[part] = _opened(node.get(part), part)
            node = node[part]


def _opened(node: Any, name: str) -> Any:
    if node is None:
        return {}
    if isinstance(node, dict | list):
        return node
    family = FAMILIES.get(name)
    if isinstance(node, str) and family is not None:
        return {family.key: node}
    return {}


def _index(node: list[Any], part: str, here: str) -> int:
    if part.isdigit() and int(part) < len(node):
        return int(part)
    if not part.isdigit() and len(node) == 1:
        raise RecipeError(f"{here}: this key holds a list; write an index, as in 0.{part}")
    raise RecipeError(f"{here}: the list has {len(node)} entries; write 0 to {len(node) - 1}")
