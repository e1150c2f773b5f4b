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

_Lying = tuple[int, str, nn.Parameter, Tensor]  # where it begins, its name, and what lies there


def refuse_coming_apart(
    models: Iterable[nn.Module], leaving: Collection[Tensor], plan: Any, before: Mapping[Tensor, Tensor]
) -> None:
    """Refuse parameters in ``leaving`` that share memory with another one. Scripts of Apex's are warned: it took them apart.

    ``before`` has what parameters held that have left already.
    """
    places: dict[int, list[_Lying]] = {}
    for name, param in (pair for model in models for pair in model.named_parameters()):
        data = before.get(param, param)
        if type(param) is nn.Parameter and torch._C._has_storage(data) and not data.is_meta and data.numel():
            lying = (data.storage_offset(), name, param, data)
            places.setdefault(data.untyped_storage().data_ptr(), []).append(lying)
    places.pop(0, None)
    for same in places.values():
        for one, other in itertools.pairwise(sorted(same, key=lambda lying: lying[0])):
            if (
                one[2] is other[2]
                or (one[2] not in leaving and other[2] not in leaving)
                or not _overlap(one[3], other[3])
            ):
                continue
            found = (
                f"{one[1]!r} and {other[1]!r} are two parameters over the same memory, and would come apart where {plan.opt_level} "
                "changes their dtype. Let both places use one parameter, as in F.linear(x, encoder.weight.t()); or use O1, O4 or "
                "O5 with a model in float32, which leave weights where they are."
            )
            if plan.policy.base != "apex":
                raise ConfigurationError(found)
            logger.warning(found)


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether an element is in both of these views, of which ``one`` begins first."""
    if one.dtype is not other.dtype or _end(one) <= other.storage_offset():
        return False
    marks = torch.zeros(max(_end(one), _end(other)), dtype=torch.bool)
    _in(marks, one).fill_(True)
    return bool(_in(marks, other).any())


def _end(view: Tensor) -> int:
    return view.storage_offset() + 1 + sum((size - 1) * step for size, step in zip(view.shape, view.stride()))


def _in(marks: Tensor, view: Tensor) -> Tensor:
    shape = [size if step else 1 for size, step in zip(view.shape, view.stride())]
    return marks.as_strided(shape, view.stride(), view.storage_offset())
