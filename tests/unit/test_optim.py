"""The optimizer: schedules and steps by hand numbers, clipping, and state that survives a restart.

The first AdamW step moves every parameter by the learning rate against the sign of its gradient,
whatever the gradient's size; the moments show what was handed over.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot.errors import CheckpointError, ModelError
from surefoot.learner.optim import Optimizer
from surefoot.recipe import Optim


class Numbers(nn.Module):
    """Two parameters of two numbers each, in the order first, second."""

    def __init__(self, *values: float, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        numbers = torch.tensor(values or (1.0, 2.0, 3.0, 4.0), dtype=dtype)
        self.first = nn.Parameter(numbers[:2].clone())
        self.second = nn.Parameter(numbers[2:].clone())


def make(
    module: nn.Module | None = None, *, steps: int = 10, **settings: Any
) -> tuple[nn.Module, Optimizer]:
    module = Numbers() if module is None else module
    chosen = Optim(**{"learning_rate": 0.1, "max_grad_norm": None, **settings})
    return module, Optimizer(module, chosen, steps=steps)


def put(optimizer: Optimizer, *gradients: list[float]) -> float:
    """Set the gradients; their norm."""
    for parameter, gradient in zip(optimizer.parameters, gradients, strict=True):
        parameter.grad = torch.tensor(gradient, dtype=parameter.dtype)
    return optimizer.gradient_norm()


def rates(steps: int, **settings: Any) -> list[float]:
    _, optimizer = make(steps=steps, learning_rate=8.0, **settings)
    return [optimizer.rate(step) for step in range(1, steps + 1)]


@pytest.mark.parametrize(
    ("steps", "settings", "expected"),
    [
        (3, {"schedule": "constant"}, [8.0, 8.0, 8.0]),
        (5, {"schedule": "constant", "warmup_steps": 4}, [2.0, 4.0, 6.0, 8.0, 8.0]),
        (4, {"schedule": "linear"}, [8.0, 6.0, 4.0, 2.0]),
        (6, {"schedule": "linear", "warmup_steps": 2}, [4.0, 8.0, 8.0, 6.0, 4.0, 2.0]),
        # Half of 1 + cos of 0, 60 and 120 degrees.
        (3, {"schedule": "cosine"}, [8.0, 6.0, 2.0]),
        (4, {"schedule": "cosine", "warmup_steps": 1}, [8.0, 8.0, 6.0, 2.0]),
        # A run that ends inside its warm-up.
        (3, {"schedule": "cosine", "warmup_steps": 8}, [1.0, 2.0, 3.0]),
        (1, {"schedule": "linear"}, [8.0]),
    ],
)
def test_the_rate_of_each_step(steps: int, settings: dict[str, Any], expected: list[float]) -> None:
    assert rates(steps, **settings) == pytest.approx(expected, rel=1e-12)


def test_the_norm_is_over_all_parameters() -> None:
    _, optimizer = make()
    assert put(optimizer, [1.0, 2.0], [2.0, 4.0]) == 5.0
    optimizer.parameters[0].grad = None
    assert optimizer.gradient_norm() == pytest.approx(math.sqrt(20.0), rel=1e-15)
    optimizer.clear()
    assert [parameter.grad for parameter in optimizer.parameters] == [None, None]
    assert optimizer.gradient_norm() == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", range(4))
def test_one_bad_number_shows_in_the_norm(bad: float, place: int) -> None:
    _, optimizer = make()
    numbers = [1.0, 1.0, 1.0, 1.0]
    numbers[place] = bad
    assert not math.isfinite(put(optimizer, numbers[:2], numbers[2:]))


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (1.0, [[0.2, 0.4], [0.4, 0.8]]),
        (2.5, [[0.5, 1.0], [1.0, 2.0]]),
        (5.0, [[1.0, 2.0], [2.0, 4.0]]),
        (50.0, [[1.0, 2.0], [2.0, 4.0]]),
        (None, [[1.0, 2.0], [2.0, 4.0]]),
    ],
)
def test_a_gradient_of_norm_five_is_scaled_to_the_limit(
    limit: float | None, expected: list[list[float]]
) -> None:
    """One factor for all parameters, so the direction stays."""
    _, optimizer = make(max_grad_norm=limit)
    norm = put(optimizer, [1.0, 2.0], [2.0, 4.0])
    optimizer.step(rate=0.1, norm=norm)
    state = optimizer.state()
    for name, gradient in zip(("first", "second"), expected, strict=True):
        # A tenth of the gradient enters the first moment, a thousandth of its square the second.
        assert state[f"exp_avg.{name}"].tolist() == pytest.approx([0.1 * g for g in gradient])
        squares = [0.001 * g * g for g in gradient]
        assert state[f"exp_avg_sq.{name}"].tolist() == pytest.approx(squares)


def test_a_step_uses_the_rate_it_is_given() -> None:
    module, optimizer = make(learning_rate=7.0)
    optimizer.step(rate=0.25, norm=put(optimizer, [3.0, -3.0], [1e-3, -1e3]))
    assert module.first.tolist() == pytest.approx([0.75, 2.25])
    assert module.second.tolist() == pytest.approx([2.75, 4.25], rel=1e-4)
    # The same gradient again: both moments say the same direction, at another rate.
    optimizer.step(rate=0.5, norm=put(optimizer, [3.0, -3.0], [1e-3, -1e3]))
    assert module.first.tolist() == pytest.approx([0.25, 2.75])


def test_weight_decay_is_decoupled_from_the_gradient() -> None:
    """At rate 0.1 and decay 0.5 a twentieth of the weight goes, then the step of 0.1."""
    module, optimizer = make(weight_decay=0.5)
    optimizer.step(rate=0.1, norm=put(optimizer, [5.0, -5.0], [1e-2, 1e2]))
    assert module.first.tolist() == pytest.approx([0.85, 2.0])
    assert module.second.tolist() == pytest.approx([2.75, 3.7], rel=1e-4)
    assert optimizer.state()["exp_avg.first"].tolist() == pytest.approx([0.5, -0.5])


def test_betas_and_eps_reach_adamw() -> None:
    """Gradient 1, betas 0.5 and 0.75: corrected moments 1 and 1; 1 / (1 + eps) with eps 1."""
    module, optimizer = make(betas=[0.5, 0.75], eps=1.0)
    optimizer.step(rate=0.1, norm=put(optimizer, [1.0, 1.0], [1.0, 1.0]))
    assert module.first.tolist() == pytest.approx([0.95, 1.95])
    assert optimizer.state()["exp_avg.first"].tolist() == pytest.approx([0.5, 0.5])
    assert optimizer.state()["exp_avg_sq.first"].tolist() == pytest.approx([0.25, 0.25])


def test_a_parameter_without_gradient_stays() -> None:
    module, optimizer = make(weight_decay=0.5)
    put(optimizer, [1.0, 1.0], [1.0, 1.0])
    module.second.grad = None
    optimizer.step(rate=0.1, norm=optimizer.gradient_norm())
    assert module.second.tolist() == [3.0, 4.0]
    assert sorted(optimizer.state()) == ["exp_avg.first", "exp_avg_sq.first", "step.first"]


def random_steps(optimizer: Optimizer, first: int, last: int) -> None:
    for step in range(first, last + 1):
        generator = torch.Generator().manual_seed(step)
        for parameter in optimizer.parameters:
            shape, dtype = parameter.shape, parameter.dtype
            parameter.grad = torch.randn(shape, generator=generator).to(dtype)
        norm = optimizer.gradient_norm()
        optimizer.step(rate=optimizer.rate(step), norm=norm)
        optimizer.clear()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_state_and_weights_put_back_go_on_bit_for_bit(dtype: torch.dtype) -> None:
    settings = {"schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1, "max_grad_norm": 1.0}
    whole, straight = make(Numbers(dtype=dtype), steps=8, **settings)
    random_steps(straight, 1, 8)
    half, before = make(Numbers(dtype=dtype), steps=8, **settings)
    random_steps(before, 1, 3)
    weights = {name: p.detach().clone() for name, p in half.named_parameters()}
    state = {name: value.clone() for name, value in before.state().items()}

    resumed, after = make(Numbers(9.0, 9.0, 9.0, 9.0, dtype=dtype), steps=8, **settings)
    with torch.no_grad():
        for name, parameter in resumed.named_parameters():
            parameter.copy_(weights[name])
    after.restore(state)
    random_steps(after, 4, 8)
    for name, parameter in resumed.named_parameters():
        assert torch.equal(parameter, dict(whole.named_parameters())[name])
    same(after.state(), straight.state())
    assert after.state()["step.first"].item() == 8.0

    forgetful, fresh = make(Numbers(dtype=dtype), steps=8, **settings)
    with torch.no_grad():
        for name, parameter in forgetful.named_parameters():
            parameter.copy_(weights[name])
    random_steps(fresh, 4, 8)
    assert not torch.equal(forgetful.first, whole.first)


def same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in got.items():
        assert value.dtype == want[name].dtype
        assert torch.equal(value, want[name]), name


def test_what_was_restored_is_the_optimizers_own() -> None:
    """Later steps must not write into the tensors of the loaded checkpoint."""
    _, optimizer = make()
    random_steps(optimizer, 1, 2)
    loaded = {name: value.clone() for name, value in optimizer.state().items()}
    kept = {name: value.clone() for name, value in loaded.items()}
    _, other = make()
    other.restore(loaded)
    random_steps(other, 3, 4)
    same(loaded, kept)


def test_state_goes_to_where_its_parameter_is() -> None:
    """Checkpoints are read into host memory; the device without storage stands for a GPU."""
    _, optimizer = make()
    random_steps(optimizer, 1, 1)
    _, elsewhere = make(Numbers().to("meta"))
    elsewhere.restore(optimizer.state())
    devices = {str(value.device) for value in elsewhere.state().values()}
    assert devices == {"meta"}


def test_before_the_first_step_there_is_no_state() -> None:
    module, optimizer = make()
    assert optimizer.state() == {}
    optimizer.restore({})
    assert optimizer.state() == {}
    optimizer.step(rate=0.1, norm=put(optimizer, [1.0, 1.0], [1.0, 1.0]))
    assert module.first.tolist() == pytest.approx([0.9, 1.9])


def test_state_of_another_model_is_refused_and_named() -> None:
    _, optimizer = make()
    random_steps(optimizer, 1, 1)
    state = optimizer.state()
    state["exp_avg.third"] = torch.zeros(2)
    _, other = make()
    with pytest.raises(CheckpointError, match=r"exp_avg\.third"):
        other.restore(state)
    assert other.state() == {}


def test_only_trainable_parameters_are_taken() -> None:
    module = Numbers()
    module.first.requires_grad_(False)
    _, optimizer = make(module)
    assert optimizer.names == ["second"]
    assert optimizer.parameters[0] is module.second
    optimizer.step(rate=0.1, norm=put(optimizer, [1.0, 1.0]))
    assert module.first.tolist() == [1.0, 2.0]
    assert module.second.tolist() == pytest.approx([2.9, 3.9])


def test_nothing_trainable_is_refused() -> None:
    module = Numbers()
    module.requires_grad_(False)
    with pytest.raises(ModelError, match="no parameter is trainable"):
        make(module)
