"""A function by its name: package.module:function, or path/file.py:function.

Owns importing what a recipe names, and saying what is there where it is not found.
Refuses to own what the function may be (`resolve.py`). A name is never taken from data.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from types import ModuleType
from typing import Any

from surefoot.errors import RewardError
from surefoot.reward.options import nearest


def find(use: str, *, base_dir: Path | None, built_in: Collection[str]) -> Callable[..., Any]:
    """The function that `use` names; a file is looked for beside the recipe, then in the cwd.

    `built_in` are the names that a message may propose.
    """
    place, colon, attribute = use.rpartition(":")
    if not colon:
        raise RewardError(
            f"reward.use: there is no built-in reward {use!r}; {nearest(use, built_in)} "
            "(your own function is package.module:function or path/file.py:function)"
        )
    if place.endswith(".py"):
        module = _load_file(_find_file(place, base_dir))
    else:
        module = _load_module(place, base_dir)
    if attribute not in vars(module):
        known = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise RewardError(
            f"reward.use: {place} has no function {attribute!r}; {nearest(attribute, known)}"
        )
    function = vars(module)[attribute]
    if not callable(function):
        raise RewardError(f"{use} is a {type(function).__name__}, not a function")
    return function


def _find_file(place: str, base_dir: Path | None) -> Path:
    tried = [folder / Path(place).expanduser() for folder in (base_dir, Path.cwd()) if folder]
    for path in tried:
        if path.is_file():
            return path.resolve()
    folder = tried[0].parent
    near = [path.name for path in folder.glob("*.py")] if folder.is_dir() else []
    raise RewardError(
        f"reward.use names the file {place}, which is not at {' or at '.join(map(str, tried))}; "
        f"{nearest(Path(place).name, near)}"
    )


def _load_file(path: Path) -> ModuleType:
    """Import a file once under a name of its own; its folder becomes importable, as a script's."""
    name = f"surefoot_reward_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    _importable(path.parent)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _broken(str(path), error) from error
    return module


def _load_module(place: str, base_dir: Path | None) -> ModuleType:
    for folder in (base_dir, Path.cwd()):
        if folder is not None:
            _importable(folder)
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(error.name + ".")):
            raise RewardError(
                f"reward.use names the module {place!r}, and there is no {error.name!r} to import; "
                "install it, run from its folder, or write path/file.py:function"
            ) from error
        raise _broken(place, error) from error
    except Exception as error:
        raise _broken(place, error) from error


def _broken(place: str, error: Exception) -> RewardError:
    return RewardError(
        f"importing the reward's {place} failed with {type(error).__name__}: {error}; "
        "mend it, or try it alone in a Python prompt"
    )


def _importable(folder: Path) -> None:
    """At the end of the path, so that nothing that can be imported already is hidden."""
    if str(folder.resolve()) not in sys.path:
        sys.path.append(str(folder.resolve()))
