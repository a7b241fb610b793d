"""The door of every public function here: do the sizes fit, and are the masks masks.

Owns the two checks and their messages.
Refuses to own checks of values: they need the meaning that only the function itself knows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.errors import SurefootError


def check_shapes(**tensors: tuple[Tensor, ...]) -> None:
    """Refuse tensors whose axes disagree.

    A keyword is the list of axes of the tensors given to it, one letter an axis:
    `check_shapes(BT=(logp_BT, mask_BT), B=(score_B,))`. One letter has one size over all tensors.
    Errors: SurefootError that lists every shape and names the axis that does not fit.
    """
    size: dict[str, int] = {}
    for axes, given in tensors.items():
        for tensor in given:
            if tensor.dim() != len(axes):
                raise SurefootError(
                    f"The shapes do not fit: {_listing(tensors)}. An argument with axes {axes} "
                    f"has {tensor.dim()} dimensions; give it {len(axes)}."
                )
            for axis, length in zip(axes, tensor.shape, strict=True):
                if size.setdefault(axis, length) != length:
                    raise SurefootError(
                        f"The shapes do not fit: {_listing(tensors)}. Axis {axis} is "
                        f"{size[axis]} in one argument and {length} in another; they must be equal."
                    )


def check_mask(*masks: Tensor) -> None:
    """Refuse a mask that is not bool: 0.5 is no mask, and multiplying by one lets NaN through."""
    for mask in masks:
        if mask.dtype != torch.bool:
            raise SurefootError(
                f"A mask has dtype {mask.dtype}, but it must be torch.bool (true = counts); "
                "convert it with .bool()."
            )


def _listing(tensors: dict[str, tuple[Tensor, ...]]) -> str:
    return "; ".join(
        f"{axes} = {', '.join(str(tuple(tensor.shape)) for tensor in given)}"
        for axes, given in tensors.items()
    )
