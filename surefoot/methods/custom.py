"""A user's own function where a row takes a kind: `baseline: {use: my_maths.py:my_baseline}`.

Owns `Custom` (plain values), the contracts, finding and loading a function, and the hash of its
file. Refuses to own calling it: `learner/custom.py` does, and checks what comes back. Nothing here
is ever taken from data.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from surefoot.errors import RecipeError
from surefoot.methods.checks import did_you_mean

if TYPE_CHECKING:
    from surefoot.methods.types import Method

RESERVED = ("kind", "use")
"""Keys beside which everything in a mapping is an option of the function."""


@dataclass(frozen=True)
class Contract:
    """How the function of one field is called: by position, then by keyword."""

    positional: tuple[str, ...]
    keywords: tuple[str, ...]

    def __str__(self) -> str:
        return f"f({', '.join(self.positional)}, *, {', '.join(self.keywords)}, <options>)"


CONTRACTS: Mapping[str, Contract] = MappingProxyType(
    {
        "baseline": Contract(("reward_PG",), ("valid_PG", "length_PG")),
        "scale": Contract(("advantage_PG", "reward_PG"), ("valid_PG",)),
        "gate": Contract(("log_ratio_BT",), ("logp_BT", "advantage_BT", "mask_BT")),
    }
)
"""The fields that take a function, and what it is called with (docs/python.md)."""


@dataclass(frozen=True)
class Custom:
    """A function by name: `use` is file.py:function or package.module:function.

    `options` are handed to it by keyword; its parameters must name them.
    """

    kind: ClassVar[str] = "use"
    use: str
    options: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        place, colon, name = self.use.rpartition(":")
        if not (place and colon and name.isidentifier()):
            raise RecipeError(
                f"method: use {self.use!r} must read file.py:function or package.module:function"
            )
        frozen = tuple((str(key), _frozen(str(key), value)) for key, value in self.options)
        object.__setattr__(self, "options", frozen)

    def plain(self) -> dict[str, Any]:
        """As a recipe writes it, without the kind."""
        return {"use": self.use, **{key: _thawed(value) for key, value in self.options}}


def _frozen(key: str, value: Any) -> Any:
    if key in RESERVED:
        raise RecipeError(f"method: a function's option cannot be called {key}")
    if isinstance(value, list | tuple):
        return tuple(_frozen(key, item) for item in value)
    finite = not isinstance(value, float) or math.isfinite(value)
    if value is None or (isinstance(value, str | bool | int | float) and finite):
        return value
    raise RecipeError(
        f"method: option {key} is {value!r:.60}; a function's option is a finite number, a word, "
        "true, false, null, or a list of them"
    )


def _thawed(value: Any) -> Any:
    return [_thawed(item) for item in value] if isinstance(value, tuple) else value


@dataclass(frozen=True)
class Bound(Custom):
    """A `Custom` whose function is loaded. Only a run that is being assembled makes one."""

    function: Callable[..., Any] = field(compare=False, repr=False, kw_only=True)
    where: str = field(kw_only=True)
    """The row's field, for messages."""
    sha256: str = field(kw_only=True)
    """Of the file that holds the function; the file's own imports are not in it."""

    def __call__(self, *values: Any, **named: Any) -> Any:
        try:
            return self.function(*values, **named, **dict(self.options))
        except Exception as error:
            error.add_note(f"raised inside {self}")
            raise

    def __str__(self) -> str:
        return f"method.{self.where}: {self.use}"


R = TypeVar("R", bound="Method")


def bind(row: R, *, base_dir: Path | None = None) -> R:
    """`row` with every function loaded and its signature checked; a row without any as it is."""
    found = {
        name: _bound(value, name, base_dir)
        for name in CONTRACTS
        if isinstance(value := getattr(row, name), Custom)
    }
    return dataclasses.replace(row, **found) if found else row  # type: ignore[arg-type]


def bound(row: Method) -> dict[str, Bound]:
    """The loaded functions of `row` by field."""
    values = {name: getattr(row, name) for name in CONTRACTS}
    return {name: value for name, value in values.items() if isinstance(value, Bound)}


def identities(row: Method) -> dict[str, str]:
    """What a resumed run must find again: field and function -> sha256 of its file."""
    return {str(value): value.sha256 for value in bound(row).values()}


def _bound(custom: Custom, where: str, base_dir: Path | None) -> Bound:
    key = f"method.{where}.use"
    place, _, name = custom.use.rpartition(":")
    module = load_module(place, base_dir=base_dir, key=key)
    function = attribute(module, name, key=key, place=place)
    if not callable(function):
        raise RecipeError(f"{key}: {custom.use} is of type {type(function).__name__}, no function")
    _check_signature(function, custom, CONTRACTS[where], key)
    sha256 = hashlib.sha256(_source(module)).hexdigest()
    return Bound(custom.use, custom.options, function=function, where=where, sha256=sha256)


def _check_signature(
    function: Callable[..., Any], custom: Custom, contract: Contract, key: str
) -> None:
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise RecipeError(f"{key}: {custom.use} must be a plain function that returns a tensor")
    signature = inspect.signature(function)
    keywords = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [p.name for p in signature.parameters.values() if p.kind in keywords]
    known = [name for name in names if name not in (*contract.positional, *contract.keywords)]
    for option, _ in custom.options:
        # Also where the function takes **anything: a misspelled option must not pass.
        if option not in known:
            raise RecipeError(
                f"{key}: {custom.use} has no parameter {option!r}{did_you_mean(option, known)}"
            )
    given = dict.fromkeys((*contract.keywords, *(option for option, _ in custom.options)))
    try:
        signature.bind(*contract.positional, **given)
    except TypeError as error:
        raise RecipeError(
            f"{key}: {custom.use} takes {signature}, but is called as {contract} ({error}); mend "
            "its parameters, or give a missing option beside use"
        ) from error


def load_module(place: str, *, base_dir: Path | None, key: str) -> ModuleType:
    """A Python file (relative to `base_dir`, then to the working directory), or a module by name.

    RecipeError names `key` where there is none, or where it fails.
    """
    folders = [folder for folder in (base_dir, Path.cwd()) if folder is not None]
    try:
        if place.endswith(".py"):
            return _file(_find(place, folders, key))
        for folder in folders:
            _importable(folder)
        return importlib.import_module(place)
    except RecipeError:
        raise
    except ModuleNotFoundError as error:
        raise RecipeError(
            f"{key}: cannot import {place}: {error}; install it, run from its folder, or write "
            "path/file.py:NAME"
        ) from error
    except Exception as error:
        raise RecipeError(
            f"{key}: {place} failed with {type(error).__name__}: {error}; run it alone with python"
        ) from error


def attribute(module: ModuleType, name: str, *, key: str, place: str) -> Any:
    """What `module` calls `name`; RecipeError with the nearest name otherwise."""
    if name not in vars(module):
        own = [known for known in vars(module) if not known.startswith("_")]
        raise RecipeError(f"{key}: {place} has no {name}{did_you_mean(name, own)}")
    return vars(module)[name]


def _find(place: str, folders: list[Path], key: str) -> Path:
    tried = [folder / Path(place).expanduser() for folder in folders]
    for path in tried:
        if path.is_file():
            return path.resolve()
    looked = " and ".join(dict.fromkeys(str(path.parent) for path in tried))
    raise RecipeError(f"{key}: {place} does not exist (looked in {looked})")


def _file(path: Path) -> ModuleType:
    """Import a file under a name of its own, again when what it says has changed."""
    content = path.read_bytes()
    digest = hashlib.sha256(str(path).encode() + b"\0" + content).hexdigest()[:16]
    name = f"surefoot_use_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    _importable(path.parent)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        # Not by the loader, whose bytecode cache may be of an older text with the same time.
        exec(compile(content, str(path), "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _source(module: ModuleType) -> bytes:
    file = inspect.getsourcefile(module) or module.__file__
    return Path(file).read_bytes() if file else module.__name__.encode()


def _importable(folder: Path) -> None:
    """At the end of the path, so that nothing that can be imported already is hidden."""
    if str(folder.resolve()) not in sys.path:
        sys.path.append(str(folder.resolve()))
