"""The tests that a row brings for a program, and when a program passes one.

Owns the layouts that are read, the comparison of outputs and of values, and telling a row whose
tests cannot be used.
Refuses to own running anything (`sandbox.py`). Tests are data: nothing of them is evaluated here.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from surefoot.reward.sandbox import Ended, Report

Compare = Literal["lines", "tokens", "exact"]
_FORMS = (
    "a test is {input, output} for standard input and output, {call, args, kwargs, expect} for a "
    "function, or a text such as 'assert f(1, 2) == 3'"
)
_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_SHOWN = 60


class TestsError(ValueError):
    """A row's tests cannot be used; the message says which one, and why."""

    __test__ = False


@dataclass(frozen=True, slots=True)
class Test:
    """One test: what a program is given, and what is expected of it.

    With `call` a function is called with `args` and `kwargs`, and `expect` is its value; else
    `stdin` is the input and `expect` the output.
    """

    __test__ = False

    expect: Any
    stdin: str = ""
    call: str | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def read_tests(given: Any) -> tuple[Test, ...]:
    """The tests in a column: a list of them, {test_cases: ...}, {inputs, outputs}, or JSON of one.

    TestsError where there is none, or one that cannot be used or that every program would pass.
    """
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise TestsError(f"the tests are text that is no JSON ({error})") from None
    if isinstance(given, Mapping):
        given = _unfold(given)
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise TestsError(f"the tests are a {type(given).__name__}; they are a list, and {_FORMS}")
    if not given:
        raise TestsError("the list of tests is empty")
    tests = tuple(_read_one(test, k) for k, test in enumerate(given))
    if all(test.call is not None and test.expect is None for test in tests):
        raise TestsError("every test expects None, which a function that does nothing gives")
    return tests


def _unfold(given: Mapping[str, Any]) -> Any:
    language = given.get("language", "python")
    if language != "python":
        raise TestsError(f"the tests are for {language!r}; only python is run")
    if "test_cases" in given:
        return given["test_cases"]
    if not {"inputs", "outputs"} <= given.keys():
        raise TestsError(f"the tests are a mapping of {sorted(map(str, given))}; {_FORMS}")
    if given.get("fn_name") is not None:
        raise TestsError(
            "inputs and outputs with fn_name are written in more than one way; write each test as "
            "{call, args, expect}"
        )
    inputs, outputs = given["inputs"], given["outputs"]
    if not isinstance(inputs, list | tuple) or not isinstance(outputs, list | tuple):
        raise TestsError("inputs and outputs are not both lists")
    if len(inputs) != len(outputs):
        raise TestsError(f"there are {len(inputs)} inputs and {len(outputs)} outputs")
    pairs = zip(inputs, outputs, strict=True)
    return [{"input": given_in, "output": wanted} for given_in, wanted in pairs]


def _read_one(test: Any, k: int) -> Test:
    if isinstance(test, str):
        return _read_assert(test, k)
    if not isinstance(test, Mapping):
        raise TestsError(f"test {k} is a {type(test).__name__}; {_FORMS}")
    # A table fills the fields of other forms with None.
    keys = {key for key, value in test.items() if value is not None}
    if "call" in keys:
        keys |= {"expect"} & test.keys()
        return _read_call(test, keys, k)
    if keys - {"input", "output", "type", "language"}:
        raise TestsError(f"test {k} has the keys {sorted(map(str, keys))}; {_FORMS}")
    if test.get("type") not in (None, "stdin_stdout"):
        raise TestsError(f"test {k} is of type {test['type']!r}; {_FORMS}")
    if not isinstance(test.get("input"), str) or not isinstance(test.get("output"), str):
        raise TestsError(f"the input and the output of test {k} are not both text")
    if not test["output"].strip():
        raise TestsError(f"test {k} expects no output, which a program that does nothing gives")
    return Test(expect=test["output"], stdin=test["input"])


def _read_call(test: Mapping[str, Any], keys: set[str], k: int) -> Test:
    if keys - {"call", "args", "kwargs", "expect"} or "expect" not in keys:
        raise TestsError(f"test {k} has the keys {sorted(map(str, keys))}; {_FORMS}")
    call, args, kwargs = test["call"], test.get("args"), test.get("kwargs")
    if not isinstance(call, str) or not _PATH.fullmatch(call):
        raise TestsError(f"the call of test {k} is {str(call)[:_SHOWN]!r}, not a function's name")
    if args is not None and (not isinstance(args, Sequence) or isinstance(args, str)):
        raise TestsError(f"the args of test {k} are no list")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TestsError(f"the kwargs of test {k} are no mapping")
    return _checked(Test(test["expect"], "", call, tuple(args or ()), dict(kwargs or {})), k)


def _read_assert(text: str, k: int) -> Test:
    """`assert f(...) == value`, of literals alone; read, never run."""
    wrong = TestsError(
        f"test {k} is {text.strip()[:_SHOWN]!r}; as text only `assert f(...) == value` is read, "
        "with plain values, because a checker that runs beside the program can be patched by it"
    )
    try:
        (line,) = ast.parse(text.strip()).body
        if not isinstance(line, ast.Assert) or not isinstance(line.test, ast.Compare):
            raise wrong
        compared = line.test
        if len(compared.ops) != 1 or not isinstance(compared.ops[0], ast.Eq):
            raise wrong
        call, value = compared.left, compared.comparators[0]
        if not isinstance(call, ast.Call):
            call, value = value, call
        if not isinstance(call, ast.Call) or not _PATH.fullmatch(ast.unparse(call.func)):
            raise wrong
        args = tuple(ast.literal_eval(arg) for arg in call.args)
        kwargs = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords if word.arg}
        if len(kwargs) != len(call.keywords):
            raise wrong
        test = Test(ast.literal_eval(value), "", ast.unparse(call.func), args, kwargs)
    except TestsError:
        raise
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise wrong from error
    return _checked(test, k)


def _checked(test: Test, k: int) -> Test:
    try:
        if not same(test.expect, test.expect, tolerance=0.0):
            raise TestsError(f"test {k} expects {str(test.expect)[:_SHOWN]}, which equals nothing")
    except RecursionError:
        raise TestsError(f"test {k} expects a value that is nested too deeply") from None
    return test


def judge(test: Test, report: Report, *, compare: Compare, tolerance: float) -> str | None:
    """None where the program passes; else why not, without naming what was expected."""
    if report.ended in (Ended.TAMPER, Ended.GONE):
        return f"tamper: the program ended {report.ended.value}"
    if report.ended is not Ended.BY_ITSELF:
        return f"ended {report.ended.value}"
    if test.call is None:
        if report.status != 0:
            return _crash(report)
        text = report.stdout.decode("utf-8", "replace")
        return None if same_output(text, test.expect, compare) else "wrong output"
    if not report.answered:
        return f"no answer: {report.error or _crash(report)}"
    try:
        equal = same(report.value, test.expect, tolerance=tolerance)
    except RecursionError:
        equal = False
    return None if equal else "wrong value"


def _crash(report: Report) -> str:
    if report.status is not None and report.status < 0:
        return f"ended by signal {-report.status}"
    return report.error or f"exit code {report.status}"


def same_output(found: str, wanted: str, compare: Compare) -> bool:
    """Whether an output is the expected one.

    exact: every character. tokens: the words between white space. lines: every line, without white
    space at its end, and without empty lines at the end of the text.
    """
    if compare == "exact":
        return found == wanted
    if compare == "tokens":
        return found.split() == wanted.split()
    return _lines(found) == _lines(wanted)


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def same(found: Any, wanted: Any, *, tolerance: float) -> bool:
    """Whether two plain values are equal: as in Python, but for four rules.

    True and 1 differ. Lists and tuples are alike. Floats may differ by `tolerance`, relative or
    absolute. Keys of mappings count as JSON writes them.
    """
    if isinstance(found, bool) or isinstance(wanted, bool):
        return found is wanted
    if isinstance(found, int | float) and isinstance(wanted, int | float):
        return _same_number(found, wanted, tolerance)
    if isinstance(wanted, list | tuple):
        return (
            isinstance(found, list | tuple)
            and len(found) == len(wanted)
            and all(same(a, b, tolerance=tolerance) for a, b in zip(found, wanted, strict=True))
        )
    if isinstance(wanted, Mapping):
        if not isinstance(found, Mapping) or len(found) != len(wanted):
            return False
        left = {_key(key): value for key, value in found.items()}
        right = {_key(key): value for key, value in wanted.items()}
        return left.keys() == right.keys() and all(
            same(left[key], value, tolerance=tolerance) for key, value in right.items()
        )
    if isinstance(wanted, set | frozenset):
        return isinstance(found, set | frozenset) and set(found) == set(wanted)
    return type(found) is type(wanted) and bool(found == wanted)


def _same_number(found: float, wanted: float, tolerance: float) -> bool:
    if found == wanted:
        return True
    if isinstance(found, int) and isinstance(wanted, int):
        return False
    try:
        return math.isclose(found, wanted, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # an int beyond every float
        return False


def _key(key: Any) -> Any:
    return json.dumps(key) if key is None or isinstance(key, bool | int | float) else key
