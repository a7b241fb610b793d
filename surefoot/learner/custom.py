"""Calling a user's own baseline, scale or gate, and checking at the door what it gives back.

Owns what such a function may see, what it must return, and the trial before a run begins.
Refuses to own finding the function (`methods/custom.py`) and what it computes.

Absent entries are 0 where a function reads and 0 in what it returned (law 1); the trial changes
them and looks whether anything else moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from surefoot.errors import RecipeError
from surefoot.methods import Method
from surefoot.methods.custom import Bound, bound


def baseline(function: Bound, reward_PG: Tensor, *, valid_PG: Tensor, length_PG: Tensor) -> Tensor:
    """Advantages [P, G] of the user's baseline: rewards with something subtracted."""
    out = function(
        torch.where(valid_PG, reward_PG, 0.0),
        valid_PG=valid_PG,
        length_PG=torch.where(valid_PG, length_PG, 0),
    )
    return _checked(function, out, like=reward_PG, mask=valid_PG, dtypes=(reward_PG.dtype,))


def scale(function: Bound, advantage_PG: Tensor, reward_PG: Tensor, *, valid_PG: Tensor) -> Tensor:
    """Advantages [P, G] after the user's scale."""
    out = function(
        torch.where(valid_PG, advantage_PG, 0.0),
        torch.where(valid_PG, reward_PG, 0.0),
        valid_PG=valid_PG,
    )
    return _checked(function, out, like=advantage_PG, mask=valid_PG, dtypes=(advantage_PG.dtype,))


def gate(
    function: Bound,
    log_ratio_BT: Tensor,
    *,
    logp_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
) -> Tensor:
    """The loss per token [B, T] of the user's gate, to be minimised."""
    given_BT = torch.where(mask_BT, log_ratio_BT, 0.0)
    seen_BT = torch.where(mask_BT, logp_BT, 0.0)
    out = function(
        given_BT,
        logp_BT=seen_BT,
        advantage_BT=torch.where(mask_BT, advantage_BT, 0.0),
        mask_BT=mask_BT,
    )
    dtypes = (log_ratio_BT.dtype, torch.promote_types(log_ratio_BT.dtype, advantage_BT.dtype))
    # A model that has diverged is not the function's fault; law 15 stops its loss.
    sound = bool(torch.isfinite(given_BT).all() and torch.isfinite(seen_BT).all())
    per_token_BT = _checked(
        function, out, like=log_ratio_BT, mask=mask_BT, dtypes=dtypes, finite=sound
    )
    if logp_BT.requires_grad and not per_token_BT.requires_grad:
        raise RecipeError(
            f"{function} returned a loss without a gradient, so nothing would be learned; compute "
            "it from log_ratio_BT or logp_BT, and detach only the factors"
        )
    return per_token_BT


def _checked(
    function: Bound,
    out: object,
    *,
    like: Tensor,
    mask: Tensor,
    dtypes: Sequence[torch.dtype],
    finite: bool = True,
) -> Tensor:
    """`out` with 0 where masked; RecipeError names the function, the fault and the mend."""
    if not isinstance(out, Tensor):
        raise RecipeError(f"{function} returned a {type(out).__name__}; return one tensor")
    if out.shape != like.shape:
        raise RecipeError(
            f"{function} returned shape {tuple(out.shape)}; return {tuple(like.shape)}, the shape "
            "of its first argument"
        )
    if out.dtype not in dtypes:
        raise RecipeError(
            f"{function} returned {out.dtype}; return {dtypes[0]}, the dtype of its first argument"
        )
    if out.device != like.device:
        raise RecipeError(
            f"{function} returned a tensor on {out.device}; make new tensors on {like.device}, "
            "the device of its first argument"
        )
    kept = torch.where(mask, out, 0.0)
    if finite and not bool(torch.isfinite(kept).all()):
        raise RecipeError(
            f"{function} returned NaN or infinity where the mask is True; guard divisions by 0, "
            "as in x / (y + eps)"
        )
    return kept


# -- the trial -------------------------------------------------------------------------------------


def probe(row: Method) -> None:
    """Call each function of `row` once on made-up numbers, before any GPU burns.

    RecipeError for a wrong shape, dtype or device, NaN, an exception, or a value that depends on
    absent entries; for a gate also where a token without an advantage gets a gradient.
    """
    for where, function in bound(row).items():
        try:
            _TRIALS[where](function, row.group_size)
        except RecipeError:
            raise
        except (Exception, SystemExit) as error:
            raise RecipeError(
                f"{function} failed on a trial input with {type(error).__name__}: {error}; it must "
                f"work for groups of {row.group_size}, absent entries and equal rewards"
            ) from error


def _grid(rows: int, columns: int, absent: float) -> tuple[Tensor, Tensor]:
    """Numbers and a mask, `absent` where it is False: a row with one absent entry, beyond three
    rows one that is absent whole, and last a row of equal numbers."""
    values = (torch.arange(rows * columns, dtype=torch.float64) * 7 % 5 / 4).reshape(rows, columns)
    values[-1] = 0.5
    mask = torch.ones(rows, columns, dtype=torch.bool)
    if columns > 1:
        mask[0, -1] = False
    if rows > 3:
        mask[1] = False
    return torch.where(mask, values, absent), mask


def _try_baseline(function: Bound, group_size: int) -> None:
    def call(absent: float) -> Tensor:
        reward_PG, valid_PG = _grid(4, group_size, absent)
        length_PG = torch.where(valid_PG, 3, int(absent))
        # Past the zeroing of `baseline`, so that reading what is absent shows.
        baseline(function, reward_PG, valid_PG=valid_PG, length_PG=length_PG)
        out = function(reward_PG, valid_PG=valid_PG, length_PG=length_PG)
        return torch.where(valid_PG, out, 0.0)

    _same(function, call, "valid_PG")


def _try_scale(function: Bound, group_size: int) -> None:
    def call(absent: float) -> Tensor:
        reward_PG, valid_PG = _grid(4, group_size, absent)
        advantage_PG = torch.where(valid_PG, reward_PG - 0.5, absent)
        scale(function, advantage_PG, reward_PG, valid_PG=valid_PG)
        out = function(advantage_PG, reward_PG, valid_PG=valid_PG)
        return torch.where(valid_PG, out, 0.0)

    _same(function, call, "valid_PG")


def _try_gate(function: Bound, group_size: int) -> None:
    def call(absent: float) -> Tensor:
        ratio_BT, mask_BT = _grid(2, 3, absent)
        advantage_BT = torch.where(mask_BT, torch.tensor([[1.0], [-1.0]]).double(), absent)
        ratio_BT.requires_grad_()
        logp_BT = torch.where(mask_BT, ratio_BT - 1.0, absent)
        gate(function, ratio_BT, logp_BT=logp_BT, advantage_BT=advantage_BT, mask_BT=mask_BT)
        out = function(ratio_BT, logp_BT=logp_BT, advantage_BT=advantage_BT, mask_BT=mask_BT)
        return torch.where(mask_BT, out, 0.0).detach()

    _same(function, call, "mask_BT")
    ratio_BT, mask_BT = _grid(2, 3, 0.0)
    ratio_BT.requires_grad_()
    still_BT = torch.zeros_like(ratio_BT)
    logp_BT = ratio_BT - 1.0
    loss_BT = gate(function, ratio_BT, logp_BT=logp_BT, advantage_BT=still_BT, mask_BT=mask_BT)
    (slope_BT,) = torch.autograd.grad(loss_BT.sum(), ratio_BT)
    # Completions without an advantage are not forwarded, so such a gradient would be lost at times.
    if bool((slope_BT != 0).any()):
        raise RecipeError(
            f"{function} has a gradient where advantage_BT is 0; multiply by the advantage, and "
            "say what does not depend on it in method.terms or method.kl"
        )


def _same(function: Bound, call: Callable[[float], Tensor], mask: str) -> None:
    if not torch.equal(call(0.0), call(1000.0)):
        raise RecipeError(
            f"{function} reads entries where {mask} is False; leave them out with "
            f"torch.where({mask}, x, 0.0), in sums and in counts"
        )


_TRIALS: dict[str, Callable[[Bound, int], None]] = {
    "baseline": _try_baseline,
    "scale": _try_scale,
    "gate": _try_gate,
}
