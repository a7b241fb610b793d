"""The `math` reward: what is equal, what is not, whose fault it is, and where an answer stands."""

from __future__ import annotations

import importlib.util
import signal
import threading

import pytest
from test_reward_grader import Entry, group, values
from test_reward_rules import judge

from surefoot.errors import RecipeError, RewardError
from surefoot.reward import Grader, resolve
from surefoot.reward.limits import cpu_limit

needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="needs the extra math"
)


@needs_math_verify
@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("0.5", "1/2"),
        (r"\frac12", "1/2"),
        (r"\frac{1}{2}", "0.5"),
        ("1/2", r"\frac12"),
        (r"so $\frac12$", "1/2"),
        (r"\boxed{0.5}", r"$\frac{1}{2}$"),
        (r"The answer is \boxed{\dfrac{2}{4}}.", "0.5"),
        ("1+x", "x+1"),
        (r"$(x+1)^2$", "x^2+2x+1"),
        (r"\sqrt{8}", r"2\sqrt{2}"),
        ("(1,2)", "(1, 2)"),
        ("[1,2)", "$[1,2)$"),
        (r"\boxed{(-\infty, 3]}", r"(-\infty,3]"),
        (r"[3,4]\cup[1,2]", r"[1,2]\cup[3,4]"),
        (r"\{2,1\}", r"\{1,2\}"),
        ("1, 2", "2,1"),
        ("5 cm", "5"),
        (r"\boxed{5\text{ cm}}", "5 cm"),
        ("5", "5 cm"),
        ("50%", "0.5"),
        ("x = 5", "5"),
        ("5", "x=5"),
        ("it costs $50.", "50"),
        (r"it costs \$1,000", "1000"),
        ("1000", "1e3"),
        ("-3", "\u22123"),
        ("so it is 72", "48+24 = <<48+24=72>>72 clips. #### 72"),
        ("B", "B"),
        (r"\boxed{\text{B}}", "B"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        ("0.333333", "1/3"),
        ("7.0", "7"),
    ],
)
def test_equal(text, answer):
    assert judge("math", text, answer) == 1.0


@needs_math_verify
@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("0.51", "1/2"),
        (r"\frac13", r"\frac12"),
        ("0.33", "1/3"),
        ("7.001", "7"),
        ("[1,2]", "(1,2)"),
        ("(2,1)", "(1,2)"),
        (r"\{1,2,3\}", r"\{1,2\}"),
        ("1, 2, 3", "1,2"),
        ("$7$ and $8$", "7"),
        ("y = 5", "x=5"),
        ("7 then 8", "7"),
        (r"\boxed{7} no, \boxed{8}", "7"),
        ("", "7"),
        ("I do not know", "7"),
        (r"$\frac{$", "7"),
        (r"\boxed{", "7"),
        ("A", "B"),
        ("2x", "2"),
    ],
)
def test_not_equal_and_unreadable_completions_are_zero(text, answer):
    assert judge("math", text, answer) == 0.0


@needs_math_verify
@pytest.mark.parametrize(
    "answer", [None, " ", "seven", "Paris", "nonsense words", r"$\frac{$", "???", "2 sqrt(3)", "pi"]
)
def test_a_gold_answer_that_is_no_mathematics_blames_the_row(answer):
    assert judge("math", "7", answer) is None
    assert judge("math", "nonsense", answer) is None


@needs_math_verify
def test_the_gold_answer_decides_the_form():
    """Reading is one-sided: an interval may answer an inequality, but not the other way round."""
    assert judge("math", "$(1,2)$", "$1<x<2$") == 1.0
    assert judge("math", "$1<x<2$", "$(1,2)$") == 0.0


@needs_math_verify
@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("so 7", {}, 1.0),
        ("so 7", {"extract": "latex"}, 0.0),
        ("so $7$", {"extract": "latex"}, 1.0),
        ("so $7$", {"extract": "boxed"}, 0.0),
        (r"\boxed{8} no, \boxed{7} and $9$", {"extract": "boxed"}, 1.0),
        (r"\boxed{8} no, \boxed{7} and $9$", {}, 1.0),
        ("<answer>7</answer> not 8", {"tag": "answer"}, 1.0),
        (r"<answer>\frac{14}{2}</answer>", {"tag": "answer"}, 1.0),
        ("7", {"tag": "answer"}, 0.0),
        ("$8$</think> 7", {"after": "</think>"}, 1.0),
        ("7</think> it is 8", {"after": "</think>"}, 0.0),
        ("7", {"after": "</think>"}, 0.0),
    ],
)
def test_where_the_answer_stands(text, options, expected):
    assert judge("math", text, "7", **options) == expected


@needs_math_verify
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tag": "answer", "after": "x"}, "one of tag and after"),
        ({"tag": "<answer>"}, "without brackets"),
        ({"after": ""}, "after is empty"),
        ({"cpu_limit": 0.0}, "cpu_limit"),
        ({"extract": "last"}, "'any' or 'latex' or 'boxed'"),
        ({"extrct": "any"}, "did you mean 'extract'"),
    ],
)
def test_options_that_cannot_work(options, message):
    with pytest.raises(RecipeError, match=message):
        judge("math", "7", **options)


def test_without_the_package_the_extra_is_named(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "math_verify" else find(name)
    )
    with pytest.raises(RewardError, match=r"'math' needs .*surefoot\[math\]"):
        resolve([Entry("math")])
    with pytest.raises(RewardError, match=r"'cosine' needs .*surefoot\[math\]"):
        resolve([Entry("cosine", options={"max_len": 8})])
    (reward,) = resolve(
        [Entry("cosine", options={"max_len": 8, "checker": "numeric"})], max_new_tokens=4
    )
    assert reward.served is None


@needs_math_verify
def test_it_runs_in_a_worker_from_any_thread():
    found: list[list[float | None]] = []
    with Grader([Entry("math")]) as grader:
        graded = [group(["0.5", "2/4", "3", r"\frac12"], "1/2")]
        thread = threading.Thread(target=lambda: found.append(values(grader.score(graded))))
        thread.start()
        thread.join()
    assert found == [[1.0, 1.0, 0.0, 1.0]]


def test_the_cpu_limit_ends_with_its_block():
    with cpu_limit(20.0):
        assert 0.0 < signal.getitimer(signal.ITIMER_PROF)[0] < 20.1
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    with pytest.raises(KeyError), cpu_limit(20.0):
        raise KeyError
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
