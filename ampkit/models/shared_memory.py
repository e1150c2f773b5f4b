"""Two parameters that lie in the same memory, as ``decoder.weight.data = encoder.weight.data.t()`` leaves them.

Another dtype takes memory of its own, so they would come apart, as in torch's own ``model.half()``.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigurationError
from ..logs import logger


def refuse_coming_apart(
    models: Sequence[nn.Module], leaving: Collection[Tensor], plan: Any, before: Mapping[Tensor, Tensor]
) -> None:
    """Refuse parameters in ``leaving`` that share memory with another one. Scripts of Apex's are warned: it took them apart.

    ``before`` has what parameters held that have left already.
    """
    lying: list[tuple[int, int, str, Tensor, Tensor]] = []
    for number, model in enumerate(models):
        for name, param in model.named_parameters():
            data = before.get(param, param)
            if type(param) is nn.Parameter and torch._C._has_storage(data) and data.data_ptr():
                lying.append((data.data_ptr(), number, name, param, data))
    lying.sort(key=lambda one: one[0])
    furthest = lying[:1]
    for first, second in itertools.pairwise(lying):
        for begin, number, name, param, data in (first, *furthest):
            next_begin, next_number, next_name, other, next_data = second
            overlap = begin == next_begin or (_is_dense(data, next_data) and begin + data.nbytes > next_begin)
            if param is other or not overlap or (param not in leaving and other not in leaving):
                continue
            of = ("", "") if number == next_number else (f"model {number}: ", f"model {next_number}: ")
            found = (
                f"'{of[0]}{name}' and '{of[1]}{next_name}' are two parameters over the same memory, and would come apart where "
                f"{plan.opt_level} changes their dtype. Let both places use one parameter, as in F.linear(x, encoder.weight.t()); "
                "or use O1, O4 or O5 with a model in float32, which leave weights where they are."
            )
            if plan.policy.base != "apex":
                raise ConfigurationError(found)
            logger.warning(found)
            break
        if _is_dense(second[-1]) and second[0] + second[-1].nbytes > furthest[0][0] + furthest[0][-1].nbytes:
            furthest = [second]


def _is_dense(*views: Tensor) -> bool:
    """Whether each view takes its memory without gaps: others may lie in them."""
    return all(sum((n - 1) * step for n, step in zip(x.shape, x.stride())) + 1 == x.numel() for x in views)
