"""Two parameters over the same memory, as ``decoder.weight.data = encoder.weight.data.t()`` makes them.

A change of dtype allocates new memory, which ends the sharing, as torch's own ``model.half()`` does.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigurationError
from ..logs import logger


def refuse_shared_memory(models: Sequence[nn.Module], leaving: Container[Tensor], plan: Any) -> None:
    """Raise `ConfigurationError` where a parameter in ``leaving`` shares memory with another one.

    Apex ended the sharing without a word; its scripts get a warning.
    """
    places: list[tuple[int, int, str, Tensor]] = []
    for number, model in enumerate(models):
        for name, param in model.named_parameters():
            if type(param) is nn.Parameter and torch._C._has_storage(param) and param.data_ptr():
                name = f"model {number}: {name}" if len(models) > 1 else name
                places.append((param.data_ptr(), _end(param), name, param))
    places.sort(key=lambda place: place[0])
    furthest = None
    for begin, end, name, param in places:
        if furthest is not None and begin < furthest[1] and param is not furthest[3]:
            if param in leaving or furthest[3] in leaving:
                message = (
                    f"'{furthest[2]}' and '{name}' are two parameters over the same memory, and would come apart where "
                    f"{plan.opt_level} changes their dtype. Let both places use one parameter, as in F.linear(x, "
                    "encoder.weight.t()); or use O1, O4 or O5 with a model in float32, which leave weights where they are."
                )
                if plan.policy.base != "apex":
                    raise ConfigurationError(message)
                logger.warning(message)
        if furthest is None or end > furthest[1]:
            furthest = begin, end, name, param


def _end(param: Tensor) -> int:
    """Return the address behind the last element; for a view with gaps, where other tensors may lie, behind the first."""
    steps = sum((size - 1) * step for size, step in zip(param.shape, param.stride()))
    return param.data_ptr() + (param.nbytes if steps + 1 == param.numel() else param.element_size())
