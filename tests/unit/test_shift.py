"""The test for a shift: Bennett's bound against exact tails, and one detector by hand."""

from __future__ import annotations

import json
import math

import pytest
from scipy.stats import binom

from surefoot.loops.shift import Detector, Jump, Value, bennett

PHI_1 = 2 * math.log(2) - 1


def batch(rewards: list[float], label: str | None = None) -> list[Value]:
    return [Value([reward], label) for reward in rewards]


def seen(*batches: list[Value], detector: Detector | None = None) -> list[Jump | None]:
    detector = Detector() if detector is None else detector
    return [detector.see(values, step=step) for step, values in enumerate(batches, 1)]


def test_the_exponent_by_hand() -> None:
    assert bennett(1.0, 1.0, 1.0) == pytest.approx(PHI_1)
    # u = 2: 3 ln 3 - 2, times v / M^2 = 3.
    assert bennett(2.0, 3.0, 3.0) == pytest.approx((3 * math.log(3) - 2) / 3)


@pytest.mark.parametrize("part", [1e-3, 1e-5, 1e-9, 1e-15])
def test_small_parts_leave_the_usual_z(part: float) -> None:
    assert bennett(0.5, 0.01, part) == pytest.approx(12.5, rel=20 * part)


@pytest.mark.parametrize("rate", [0.02, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("size", [4, 32, 300])
def test_it_bounds_the_exact_tail(rate: float, size: int) -> None:
    """The share of successes of `size` draws, of which one can move it by (1 - rate) / size."""
    bounded = 0
    for successes in range(int(rate * size) + 1, size + 1):
        t = successes / size - rate
        h = bennett(t, rate * (1 - rate) / size, (1 - rate) / size)
        tail = float(binom.sf(successes - 1, size, rate))
        assert tail <= math.exp(-h) * (1 + 1e-9)
        bounded += h > 0.1
    assert bounded > 0


def test_ten_zeros_against_ten_ones_are_just_enough() -> None:
    """n of each: v = 1/4 * 2/n, M = 1/2n, u = 1, so h = 2n phi(1); at one cut ln 2000 = 7.6."""
    assert 2 * 9 * PHI_1 < math.log(2000) < 2 * 10 * PHI_1
    assert seen(batch([0.0] * 9), batch([1.0] * 9)) == [None, None]
    first, jump = seen(batch([0.0] * 10), batch([1.0] * 10))
    assert first is None
    assert jump == Jump(2, 1.0, 0.0, pytest.approx(math.sqrt(40 * PHI_1)), None)
    _, fall = seen(batch([1.0] * 10), batch([0.0] * 10))
    assert fall is not None and jump is not None
    assert fall.z == pytest.approx(-jump.z)


def test_later_batches_say_what_the_first_could_not() -> None:
    """Twelve zeros, then ones four at a time: h 4.5, 7.0 and, with twelve each, 24 phi(1) = 9.3."""
    found = seen(*[batch([0.0] * 4)] * 3, *[batch([1.0] * 4)] * 3)
    assert found[:5] == [None] * 5
    assert found[5] == Jump(4, 1.0, 0.0, pytest.approx(math.sqrt(48 * PHI_1)), None)


def test_it_is_said_once() -> None:
    found = seen(*[batch([0.0, 1.0] * 16)] * 10, *[batch([5.0, 6.0] * 16)] * 30)
    assert [jump is not None for jump in found] == [step == 10 for step in range(40)]


def test_half_a_standard_deviation_is_the_least() -> None:
    """Any number of values: a change this small is no shift, however sure."""
    level = [batch([-1.0, 1.0] * 500)] * 12
    assert seen(*level, *[batch([-0.6, 1.4] * 500)] * 8) == [None] * 20
    assert seen(*level, batch([-0.4, 1.6] * 500))[-1] is not None


def test_one_odd_value_after_equal_ones_is_no_shift_and_a_batch_of_them_is() -> None:
    level = [batch([0.7] * 32)] * 10
    for odd in (0.0, 0.7 + 1e-7, 1e6):
        assert seen(*level, batch([0.7] * 31 + [odd]))[-1] is None
        assert seen(*level, batch([odd] * 32))[-1] is not None


@pytest.mark.parametrize("rewards", [[0.7], [0.1] * 7, [1e-200, 0.0], [1e12, 1e12 + 1e-3]])
def test_no_rewards_are_too_small_or_too_large_to_judge(rewards: list[float]) -> None:
    assert seen(*[batch(rewards)] * 30, []) == [None] * 31


def test_completions_of_one_prompt_are_one_value() -> None:
    """Ten prompts with 1 and ten with 64 completions say the same; two prompts say little."""
    many = [[Value([reward] * 64, None)] * 10 for reward in (0.0, 1.0)]
    assert seen(*many) == seen(batch([0.0] * 10), batch([1.0] * 10)) != [None, None]
    assert seen(*[[Value([reward] * 64, None)] * 2 for reward in (0.0, 1.0)]) == [None, None]


def test_the_deviation_is_that_of_the_rewards_not_of_the_prompts() -> None:
    """Prompt means without spread, 0.2 apart, inside a reward's deviation of 1: no shift."""
    before, after = [Value([-1.0, 1.0], None)] * 32, [Value([-0.8, 1.2], None)] * 32
    assert seen(*[before] * 10, after)[-1] is None
    assert seen(*[batch([0.0] * 32)] * 10, batch([0.2] * 32))[-1] is not None


@pytest.mark.parametrize(
    ("before", "after", "label"),
    [
        ("a" * 32, "b" * 32, "b"),
        ("a" * 32, "a" * 16 + "b" * 16, "b"),
        ("a" * 16 + "b" * 16, "a" * 8 + "b" * 8 + "c" * 16, "c"),
        ("a" * 16 + "b" * 16, "b" * 32, "b"),
        ("a" * 16 + "b" * 16, "a" * 18 + "b" * 14, None),
        ("a" * 32, "a" * 32, None),
    ],
)
def test_the_label_with_more_of_the_batch_is_named(
    before: str, after: str, label: str | None
) -> None:
    def labelled(labels: str, reward: float) -> list[Value]:
        return [Value([reward], each) for each in labels]

    jump = seen(*[labelled(before, 0.0)] * 5, labelled(after, 1.0))[-1]
    assert jump is not None and jump.label == label


def test_state_is_json_and_goes_on_alike() -> None:
    whole, broken = Detector(), Detector()
    for step in range(40):
        values = batch([math.sin(step * i) / 3 + (step > 30) for i in range(20)], "ab"[step > 30])
        broken = Detector.from_state(json.loads(json.dumps(broken.to_state())))
        assert whole.see(values, step=step) == broken.see(values, step=step)
        assert whole.past == broken.past and len(whole.past) <= 12
    assert whole.past[0].step == 31
