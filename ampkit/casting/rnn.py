"""Recurrent layers under O1.

Their functions (``torch._VF.lstm`` and the like) are whitelisted in the tables and take their weights as a list, which
the ordinary wrapper casts. What stands in the way is that the layers compare the dtypes of input and weights first,
before the casts are reached.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .tensors import CASTABLE

if TYPE_CHECKING:
    from .engine import Casting


def checking_a_stand_in(original: Callable, casting: Casting) -> Callable:
    """``RNNBase.check_input`` for layers whose input will be cast: shapes are checked, dtypes meet later."""

    @functools.wraps(original)
    def check_input(self: Any, input: Tensor, batch_sizes: Tensor | None) -> None:
        weight = self._flat_weights[0]
        if (
            casting.is_on()
            and input.dtype is not weight.dtype
            and input.dtype in CASTABLE
            and weight.dtype in CASTABLE
            and input.device.type in casting.device_types
        ):
            input = torch.empty(input.shape, dtype=weight.dtype, device="meta")
        return original(self, input, batch_sizes)

    return check_input
