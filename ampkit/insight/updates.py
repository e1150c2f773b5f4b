"""`Weights`: counts the weights that do not change in a step, because their precision rounds the updates away.

An update is lost if a weight is the same after a step although its gradient and the learning rate are not 0. A weight with a
float32 value (O2) is the same only if its rest is the same, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..dtypes import LOWER_PRECISION
from ..iteration.found_inf import is_sparse
from ..optimizers.fused import FusedOptimizer
from ..optimizers.scales import moved_to
from ..registry import session_of, wrapper_of
from ..sharding import local

#: The number of sampled elements of a tensor where only shares are needed: their standard error is below 1.2%.
SAMPLE = 2**11
#: The name of a parameter, the parameter, and its parameter group.
Named = tuple[str, torch.Tensor, dict[str, Any]]


@dataclass
class Weight:
    """A parameter before a step: ``before`` and ``rest``, if it has one, are copies."""

    name: str
    param: torch.Tensor
    lr: float
    before: torch.Tensor
    rest: torch.Tensor | None


class Weights:
    """A copy of an optimizer's weights before a step, for a comparison after it.

    It costs a copy of the weights, and a pass over weights and gradients. ``most`` limits the elements of each parameter, ``named``
    the parameters. Left out are sparse gradients, parameter groups whose learning rate is 0, and parameters with stochastic
    rounding, which lose nothing on average.
    """

    def __init__(self, optimizer: Any, most: int | None = None, named: Iterable[Named] | None = None) -> None:
        wrapper = wrapper_of(optimizer)
        stored = [] if wrapper is None else wrapper.gradients.stored
        self._masters = {slot.param: slot.master for slot in stored if slot.master is not None}
        self._optimizer, self._most = optimizer, most
        is_random = isinstance(optimizer, FusedOptimizer) and optimizer.storage.is_stochastic
        self.list: list[Weight] = []
        for name, param, group in named_params(optimizer) if named is None else named:
            lr = float(group.get("lr", 1.0))
            if lr != 0.0 and not (is_random and param.dtype in LOWER_PRECISION):
                rest = self._rest_of(param)
                rest = None if rest is None else rest.clone()
                self.list.append(Weight(name, param, lr, self._sample(param.detach()).clone(), rest))

    def _rest_of(self, param: torch.Tensor) -> torch.Tensor | None:
        if param in self._masters:
            return self._sample(self._masters[param].rest)
        if not getattr(self._optimizer, "rests", False) or param.dtype not in LOWER_PRECISION:
            return None
        rest = self._optimizer.state.get(param, {}).get("rest")  # none before the first step
        return self._sample(torch.zeros_like(param, dtype=torch.int16, requires_grad=False) if rest is None else rest)

    def counts(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return the number of lost updates and of all updates of each parameter (int64, on its device), by name.

        Call it after a step that was not skipped.
        """
        counts = {}
        for weight in self.list:
            gradient = weight.param.grad
            if gradient is not None and not is_sparse(gradient):
                is_updated = self._sample(gradient) != 0
                stays = self._sample(weight.param.detach()) == weight.before
                if weight.rest is not None:
                    stays &= self._rest_of(weight.param) == weight.rest
                counts[weight.name] = (stays & is_updated).sum(), is_updated.sum()
        return counts

    def _sample(self, tensor: torch.Tensor) -> torch.Tensor:
        return local(tensor) if self._most is None else some(local(tensor), self._most)


def some(tensor: torch.Tensor, most: int) -> torch.Tensor:
    """Flatten a tensor, and sample at most ``most`` elements: runs of 64, evenly spread, so that little memory is read."""
    values = tensor.reshape(-1)
    if values.numel() <= most:
        return values
    runs = most // 64
    return values.as_strided((runs, 64), (values.numel() // runs, 1)).reshape(-1)


def named_params(optimizer: Any) -> Iterator[Named]:
    """Yield an optimizer's parameters, named as in its models if known, else by ``param_names`` of the group or their places."""
    session = session_of(optimizer)
    of_models = [] if session is None else [list(model.named_parameters()) for model in session.models]
    known = {
        param: name if len(of_models) == 1 else f"{index}.{name}"
        for index, named in enumerate(of_models)
        for name, param in named
    }
    for number, group in enumerate(optimizer.param_groups):
        places = (f"param_groups[{number}]['params'][{i}]" for i in range(len(group["params"])))
        for name, param in zip(group.get("param_names") or places, group["params"], strict=True):
            yield known.get(param, name), param, group


def to_host(shares: dict[str, torch.Tensor]) -> dict[str, float]:
    """Convert scalar tensors to numbers, with a single read from the device."""
    values = list(shares.values())
    if not values:
        return {}
    return dict(zip(shares, torch.stack([moved_to(value, values[0].device) for value in values]).tolist()))
