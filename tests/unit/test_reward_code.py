"""The `code` reward: which tests are read, when an output is right, which text is the program."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from test_reward_grader import Entry
from test_reward_resolve import documented, said

from surefoot.errors import RecipeError
from surefoot.records import ScoreStatus, StopReason
from surefoot.reward import resolve
from surefoot.reward.code import CodeOptions, code, extract, settle
from surefoot.reward.code_tests import Test, TestsError, judge, read_tests, same, same_output
from surefoot.reward.contract import PartScore, RewardSample
from surefoot.reward.options import fill
from surefoot.reward.sandbox import Ended, Report, Tier
from surefoot.reward.sandbox_init import decode, encode
from surefoot.reward.sandbox_probe import isolation

ADD = [{"call": "add", "args": [1, 2], "expect": 3}, {"call": "add", "args": [5, 5], "expect": 10}]
ECHO = [{"input": "4\n", "output": "16\n"}, {"input": "5\n", "output": "25\n"}]


def sample(text: str, tests: object, **columns: object) -> RewardSample:
    columns = {"tests": tests, **columns}
    return RewardSample("q", text, (1, 2), None, "code", columns, StopReason.STOP)


def grade(text: str, tests: object, **options: object) -> PartScore:
    filled = fill(CodeOptions, options, reward="code")
    return code(filled, isolation().tier)(sample(text, tests))


def fenced(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\nDone."


@pytest.mark.parametrize(
    ("program", "tests", "expected"),
    [
        ("def add(a, b): return a + b", ADD, 1.0),
        ("def add(a, b): return a - b", ADD, 0.0),
        ("def add(a, b): return 3", ADD, 0.0),
        ("def plus(a, b): return a + b", ADD, 0.0),
        ("print(int(input()) ** 2)", ECHO, 1.0),
        ("import sys\nfor line in sys.stdin: print(int(line) ** 2)", ECHO, 1.0),
        ("print(int(open(0).read()) ** 2)", ECHO, 1.0),
        ("print(16)", ECHO, 0.0),
        ("print(int(input()) ** 2)\nraise ValueError", ECHO, 0.0),
        ("print(int(input()) ** 2)\nexit()", ECHO, 1.0),
        ("print(int(input()) ** 2)\nexit(1)", ECHO, 0.0),
        ("this is no program", ECHO, 0.0),
        (
            "import threading as t\ndef f(): print(int(input()) ** 2)\nt.Thread(target=f).start()",
            ECHO,
            1.0,
        ),
    ],
)
def test_programs_are_scored_by_all_of_their_tests(program, tests, expected):
    verdict = grade(fenced(program), tests)
    assert (verdict.status, verdict.value) == (ScoreStatus.SCORED, expected)


def test_a_fraction_is_the_share_of_passed_tests():
    program = "n = int(input())\nprint(16 if n == 4 else 1 // 0)"
    three = [*ECHO, {"input": "4", "output": "16"}]
    verdict = grade(fenced(program), three, fraction=True)
    assert verdict.value == pytest.approx(2 / 3)
    assert verdict.detail.startswith("2 of 3 tests passed; test 1: ZeroDivisionError")
    verdict = grade(fenced(program), three)
    assert verdict.value == 0.0 and verdict.detail.startswith("1 of 3 tests passed")


def test_a_detail_never_tells_what_was_expected():
    secret = [{"call": "f", "expect": "Xk3-secret"}, {"call": "f", "expect": 1}]
    verdict = grade(fenced("def f(): return 'guess'"), secret)
    assert verdict.value == 0.0 and "secret" not in verdict.detail


def test_a_detail_is_text_whatever_a_class_is_called():
    program = "def f(): return type(chr(0xd800) * 9, (), {})()"
    verdict = grade(fenced(program), [{"call": "f", "expect": 1}])
    assert verdict.value == 0.0 and verdict.detail.encode()


def test_methods_defaults_and_kwargs_are_called():
    program = (
        "class Solution:\n"
        "    def area(self, width, height=2):\n"
        "        return width * height\n"
        "def area(width, height=2): return Solution().area(width, height)\n"
        "if __name__ == '__main__': raise SystemExit(3)"
    )
    tests = [
        {"call": "Solution.area", "args": [3], "expect": 6},
        {"call": "area", "kwargs": {"width": 2, "height": 5}, "expect": 10},
    ]
    assert grade(fenced(program), tests).value == 1.0


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -7,
        pytest.param(10**5000, id="big"),
        1.5,
        float("inf"),
        "é\ud800\x00",
        b"\xff",
        [1, [2]],
        (1, "a"),
    ],
)
def test_a_plain_value_comes_back_as_it_was(value):
    told = json.loads(json.dumps(encode({"k": value, 3: (value,)})))
    assert decode(told) == {"k": value, 3: (value,)}


@pytest.mark.parametrize(
    "told", [{"i": "0x"}, {"i": 3}, {"q": []}, {}, {"t": 4}, {"d": [[1, 2]]}, 7, 1.5, {"x": "A"}]
)
def test_what_no_plain_value_gives_is_no_value(told):
    with pytest.raises((ValueError, TypeError)):
        decode(told)


def test_sets_and_subclasses_are_plain_and_objects_are_not():
    class Many(dict):
        def items(self):
            return [("forged", 1)]

    class Yes:
        def __eq__(self, other):
            return True

    assert decode(encode({1, 2})) == {1, 2}
    assert decode(encode(Many(a=1))) == {"a": 1}
    assert encode(Yes()) == {"x": "Yes"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (ECHO, [Test("16\n", "4\n"), Test("25\n", "5\n")]),
        (json.dumps(ECHO), [Test("16\n", "4\n"), Test("25\n", "5\n")]),
        ({"inputs": ["4"], "outputs": ["16"]}, [Test("16", "4")]),
        ({"inputs": ["4"], "outputs": ["16"], "fn_name": None}, [Test("16", "4")]),
        (
            {
                "language": "python",
                "test_cases": [
                    {"input": "4", "output": "16", "type": "stdin_stdout", "fn_name": None}
                ],
            },
            [Test("16", "4")],
        ),
        ([{"input": "4", "output": "16", "call": None, "expect": None}], [Test("16", "4")]),
        (
            [{"call": "f", "args": [1], "kwargs": {"k": 2}, "expect": [3]}],
            [Test([3], "", "f", (1,), {"k": 2})],
        ),
        (
            [{"call": "f", "expect": 1}, {"call": "f", "args": [1], "expect": None}],
            [Test(1, "", "f"), Test(None, "", "f", (1,))],
        ),
        (
            ["assert f((1, 2), k=[3]) == {4}", "assert 5 == f(-1)"],
            [Test({4}, "", "f", ((1, 2),), {"k": [3]}), Test(5, "", "f", (-1,))],
        ),
        (["assert Solution().f(1) == 2"], None),
        (["assert f(g(1)) == 2"], None),
        (["assert f(1)"], None),
        (["assert f(1) == 2, 3 == 4\nx = 1"], None),
        (["assert f(__import__('os').getpid()) == 2"], None),
        (["f(1) == 2"], None),
        (["assert f(*[1]) == 2"], None),
        ([], None),
        ("not json", None),
        ("[" * 100_000, None),
        (7, None),
        (None, None),
        ({}, None),
        ({"language": "cpp", "test_cases": ECHO}, None),
        ({"inputs": ["4"], "outputs": []}, None),
        ({"inputs": [[4]], "outputs": [[16]], "fn_name": "f"}, None),
        ([{"input": "4", "output": " \n"}], None),
        ([{"input": ["4"], "output": "16"}], None),
        ([{"input": "4"}], None),
        ([{"input": "4", "output": "16", "timeout": 3}], None),
        ([{"input": "4", "output": "16", "type": "function_call"}], None),
        ([{"call": "f"}], None),
        ([{"call": "f", "expect": None}], None),
        ([{"call": "f", "expect": float("nan")}], None),
        ([{"call": "f", "args": "ab", "expect": 1}], None),
        ([{"call": "f", "kwargs": [1], "expect": 1}], None),
        ([{"call": "os.system('x')", "expect": 1}], None),
        ([{"call": "f", "args": [1], "expected": 1}], None),
    ],
)
def test_layouts_of_tests(given, expected):
    if expected is None:
        with pytest.raises(TestsError):
            read_tests(given)
    else:
        assert list(read_tests(given)) == expected


@pytest.mark.parametrize("tests", [None, [], "x", [{"input": "1"}]])
def test_a_row_whose_tests_cannot_be_used_is_unscorable_and_runs_nothing(tests):
    rule = code(CodeOptions(), Tier.NONE)
    verdict = rule(sample(fenced("print(1)"), tests))
    assert verdict.status is ScoreStatus.UNSCORABLE and "test" in verdict.detail


def test_tests_of_several_columns_are_run_together():
    rule = code(fill(CodeOptions, {"tests": ["public", "hidden"]}, reward="code"), isolation().tier)
    row = sample(fenced("def add(a, b): return 3"), None, public=ADD[:1], hidden=ADD[1:])
    assert rule(row).value == 0.0
    assert rule(sample("x", None, public=ADD)).status is ScoreStatus.UNSCORABLE


@pytest.mark.parametrize(
    ("found", "wanted", "compare", "expected"),
    [
        ("1\n2\n", "1\n2", "lines", True),
        ("1 \r\n2\n\n\n", "1\n2", "lines", True),
        ("1", "1\n2", "lines", False),  # the first line alone
        ("1\n2\nanything", "1\n2", "lines", False),  # more than was asked
        ("", "\n1", "lines", False),  # nothing is no blank first line
        (" 1\n2", "1\n2", "lines", False),
        ("1 2", "1  2", "lines", False),
        ("1 2", "1  2", "tokens", True),
        ("1\n2", "1 2", "tokens", True),
        ("12", "1 2", "tokens", False),
        ("1\n", "1\n", "exact", True),
        ("1", "1\n", "exact", False),
    ],
)
def test_white_space_of_outputs(found, wanted, compare, expected):
    assert same_output(found, wanted, compare) is expected


@pytest.mark.parametrize(
    ("found", "wanted", "expected"),
    [
        (3, 3, True),
        (3, 3.0, True),
        (0.1 + 0.2, 0.3, True),
        (0.3001, 0.3, False),
        (10**400, 1.0, False),
        (2**60 + 1, 2**60, False),
        (True, 1, False),
        (1, True, False),
        (True, True, True),
        ("3", 3, False),
        (None, None, True),
        (None, 0, False),
        ([1, 2], (1, 2), True),
        ((1, [2]), [1, [2]], True),
        ([1, 2, 3], [1, 2], False),
        ([[0.1 + 0.2]], [[0.3]], True),
        ({1, 2}, [1, 2], False),
        (frozenset({1, 2}), {2, 1}, True),
        ({1: "a"}, {"1": "a"}, True),
        ({1: "a", "1": "a"}, {"1": "a"}, False),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({(1, 2): 3}, {(1, 2): 3}, True),
        ("abc", ["a", "b", "c"], False),
        (b"a", "a", False),
    ],
)
def test_values_are_compared(found, wanted, expected):
    assert same(found, wanted, tolerance=1e-9) is expected


@pytest.mark.parametrize(
    ("report", "word"),
    [
        (Report(Ended.TAMPER, 0), "tamper"),
        (Report(Ended.GONE), "tamper"),
        (Report(Ended.CPU, -24, b"7", 7, True), "CPU"),
        (Report(Ended.OUTPUT, 0, b"7"), "output"),
        (Report(Ended.BY_ITSELF, 1, b"7"), "exit code 1"),
        (Report(Ended.BY_ITSELF, -11, b"7"), "signal 11"),
    ],
)
def test_a_right_output_of_a_run_that_failed_is_wrong(report, word):
    assert word in judge(Test("7"), report, compare="lines", tolerance=0.0)


def test_a_right_output_is_no_answer_to_a_call():
    report = Report(Ended.BY_ITSELF, 0, b"7")
    assert "no answer" in judge(Test(7, "", "f"), report, compare="lines", tolerance=0.0)


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("```python\na\n```", {}, "a\n"),
        ("```\na\n```", {}, "a\n"),
        ("```py\na\n```\ntext\n```python\nb\n```", {}, "b\n"),
        ("```python\na\n```\nprints\n```\n42\n```", {}, "a\n"),
        ("```python\na\n```\n```text\n42\n```", {}, "a\n"),
        ("```cpp\na\n```", {}, None),
        ("~~~python\na\n~~~", {}, "a\n"),
        ("````python\n```\na\n````", {}, "```\na\n"),
        ("so\n```python\na\nb", {}, "a\nb"),
        ("a = 1", {}, "a = 1"),
        ("a = 1", {"extract": "fence"}, None),
        ("```python\na\n```", {"extract": "whole"}, "```python\na\n```"),
        ("```python\na\n```</think>b", {"after": "</think>"}, "b"),
        ("```python\na\n```", {"after": "</think>"}, None),
        ("```python\n\n```", {}, None),
        ("  \n", {}, None),
        ("", {}, None),
    ],
)
def test_the_program_in_a_text(text, options, expected):
    assert extract(text, CodeOptions(**options)) == expected


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"language": "cpp"}, "python"),
        ({"cpu_limit": 0.0}, "cpu_limit"),
        ({"cpu_limit": 20.0}, "none is above the next"),
        ({"total_limit": 5.0}, "none is above the next"),
        ({"total_limit": 43_201.0}, "none above 43200"),
        ({"cpu_limit": float("nan")}, "cpu_limit"),
        ({"memory_mb": 8}, "memory_mb is 8"),
        ({"processes": 0}, "processes"),
        ({"compare": "loose"}, "lines"),
        ({"after": ""}, "after"),
        ({"tests": []}, "no column"),
        ({"tolerance": 1.0}, "tolerance"),
        ({"timeouts": 1}, "no option"),
    ],
)
def test_options_that_cannot_be(options, word):
    with pytest.raises(RecipeError, match=word):
        fill(CodeOptions, options, reward="code")


@pytest.mark.parametrize("tier", ["guarded", "none"])
def test_less_than_a_boundary_needs_the_recipe_to_allow_it(tier):
    options = CodeOptions(isolation=tier)
    with pytest.raises(RecipeError, match="unisolated_code to run"):
        settle(options, ())
    assert settle(options, ("unisolated_code",)).tier == tier


def test_the_deadline_is_above_every_limit_that_a_program_can_use_up():
    options = CodeOptions(cpu_limit=1.0, wall_limit=5.0, total_limit=60.0)
    assert options.deadline >= 60.0 + 10.0 + 5.0


def test_the_page_names_its_options_and_defaults():
    page = (Path(__file__).resolve().parents[2] / "docs" / "code_rewards.md").read_text("utf-8")
    expected = {field.name: said(field) for field in dataclasses.fields(CodeOptions)}
    assert documented(page, "code") == expected


def test_every_task_of_the_example_can_be_solved():
    """By programs written here, so that a wrong test in the data is noticed."""
    solutions = {
        "add": "def add(a, b): return a + b",
        "double": "def double(n): return 2 * n",
        "even": "def is_even(n): return n % 2 == 0",
        "largest": "largest = max",
        "reverse": "def reverse(text): return text[::-1]",
        "vowels": "def count_vowels(text): return sum(text.count(v) for v in 'aeiou')",
        "total": "total = sum",
        "factorial": "from math import factorial",
        "words": "def words(text): return text.split()",
        "evens": "def evens(numbers): return [n for n in numbers if n % 2 == 0]",
        "square_input": "print(int(input()) ** 2)",
        "sum_input": "print(sum(map(int, input().split())))",
    }
    data = Path(__file__).resolve().parents[2] / "examples" / "data" / "code_tasks.jsonl"
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    assert {row["id"] for row in rows} == solutions.keys()
    for row in rows:
        verdict = grade(fenced(solutions[row["id"]]), row["tests"], fraction=True)
        assert verdict.value == 1.0, (row["id"], verdict.detail)
        assert grade(fenced("pass"), row["tests"], fraction=True).value == 0.0


def entry(**settings):
    return Entry("code", **settings)


def test_the_deadline_follows_the_limits_and_is_not_set_below_them():
    allow = ("unisolated_code",)
    (reward,) = resolve([entry()], allow=allow)
    assert reward.timeout == CodeOptions().deadline and reward.served is not None
    assert reward.note.startswith("isolation of model-written code: ")
    (reward,) = resolve([entry(timeout=500.0)], allow=allow)
    assert reward.timeout == 500.0
    with pytest.raises(RecipeError, match=r"timeout of reward 'code' is 30.*total_limit"):
        resolve([entry(timeout=30.0)], allow=allow)
    with pytest.raises(RecipeError, match="unisolated_code"):
        resolve([entry(options={"isolation": "guarded"})])
