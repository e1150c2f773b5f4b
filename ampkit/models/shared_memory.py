"""Two parameters that lie in the same memory, as ``decoder.weight.data = encoder.weight.data.t()`` leaves them.

Another dtype takes memory of its own, so they would come apart, as in torch's own ``model.half()``.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigurationError
from ..logs import logger


def refuse_coming_apart(
    models: Iterable[nn.Module], leaving: Collection[Tensor], plan: Any, before: Mapping[Tensor, Tensor]
) -> None:
    """Refuse parameters in ``leaving`` that share memory with another one. Scripts of Apex's are warned: it took them apart.

    ``before`` has what parameters held that have left already.
    """
    lying = []
    for name, param in (pair for model in models for pair in model.named_parameters()):
        data = before.get(param, param)
        if type(param) is nn.Parameter and torch._C._has_storage(data) and data.data_ptr():
            lying.append((data.data_ptr(), name, param, data))
    for (begin, name, param, data), (next_begin, next_name, other, next_data) in itertools.pairwise(
        sorted(lying, key=lambda one: one[0])
    ):
        overlap = begin == next_begin or (_is_dense(data, next_data) and begin + data.nbytes > next_begin)
        if param is other or not overlap or (param not in leaving and other not in leaving):
            continue
        found = (
            f"{name!r} and {next_name!r} are two parameters over the same memory, and would come apart where {plan.opt_level} "
            "changes their dtype. Let both places use one parameter, as in F.linear(x, encoder.weight.t()); or use O1, O4 or "
            "O5 with a model in float32, which leave weights where they are."
        )
        if plan.policy.base != "apex":
            raise ConfigurationError(found)
        logger.warning(found)


def _is_dense(*views: Tensor) -> bool:
    """Whether each view takes its memory without gaps: others may lie in them."""
    return all(sum((n - 1) * step for n, step in zip(x.shape, x.stride())) + 1 == x.numel() for x in views)
