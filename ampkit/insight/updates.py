"""`check_updates`: the weights that do not change, because their precision rounds the updates away.

An update is lost if a weight is the same after a step although its gradient and the learning rate are not 0. A weight with a
float32 value (O2) is the same only if its rest is the same, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..dtypes import LOWER_PRECISION
from ..iteration.found_inf import is_sparse
from ..logs import logger, printable
from ..optimizers.fused import FusedOptimizer
from ..registry import wrapper_of
from ..sharding import local
from .around_step import AroundStep, Named, named_params, to_host
from .words import short

#: The number of sampled elements of a tensor where only shares are needed: their standard error is below 1.2%.
SAMPLE = 2**11
#: The first steps are all measured, so that a warning comes soon.
_FIRST = 5


@dataclass
class _Weight:
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
        self.list: list[_Weight] = []
        for name, param, group in named_params(optimizer) if named is None else named:
            lr = float(group.get("lr", 1.0))
            if lr != 0.0 and not (is_random and param.dtype in LOWER_PRECISION):
                rest = self._rest_of(param)
                rest = None if rest is None else rest.clone()
                self.list.append(_Weight(name, param, lr, self._sample(param.detach()).clone(), rest))

    def _rest_of(self, param: torch.Tensor) -> torch.Tensor | None:
        if param in self._masters:
            return self._sample(self._masters[param].rest)
        if not getattr(self._optimizer, "rests", False) or param.dtype not in LOWER_PRECISION:
            return None
        rest = self._optimizer.state.get(param, {}).get("rest")  # none before the first step
        return self._sample(torch.zeros_like(param, dtype=torch.int16, requires_grad=False) if rest is None else rest)

    def lost(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return the number of lost updates and of all updates of each parameter (int64, on its device), by name.

        Empty if a gradient is not finite, since such a step is skipped. Waits for the device for that check.
        """
        are_finite = {weight.name: gradient.isfinite().all() for weight, gradient in self._trained()}
        return self.counts() if all(to_host(are_finite).values()) else {}

    def counts(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return the numbers of `lost` without a check of gradients, and without waiting for the device."""
        counts = {}
        for trained in self._groups():
            weights, gradients = zip(*trained)
            after = _flat(self._sample(x.param.detach()) for x in weights)
            stays = after == _flat(x.before for x in weights)
            if weights[0].rest is not None:
                stays &= _flat(self._rest_of(x.param) for x in weights) == _flat(x.rest for x in weights)
            is_updated = _flat(gradients) != 0
            sizes = [x.numel() for x in gradients]
            for weight, lost, total in zip(weights, (stays & is_updated).split(sizes), is_updated.split(sizes)):
                counts[weight.name] = lost.sum(), total.sum()
        return counts

    def _trained(self) -> list[tuple[_Weight, torch.Tensor]]:
        gradients = ((weight, weight.param.grad) for weight in self.list)
        return [(weight, self._sample(x)) for weight, x in gradients if x is not None and not is_sparse(x)]

    def _groups(self) -> Iterable[list[tuple[_Weight, torch.Tensor]]]:
        """Group the weights for `counts`: each alone, or samples of the same dtypes and device together."""
        groups: dict[Any, list[tuple[_Weight, torch.Tensor]]] = {}
        for weight, gradient in self._trained():
            alike = weight.param.dtype, gradient.dtype, gradient.device, weight.rest is None
            groups.setdefault(id(weight) if self._most is None else alike, []).append((weight, gradient))
        return groups.values()

    def _sample(self, tensor: torch.Tensor) -> torch.Tensor:
        return local(tensor) if self._most is None else some(local(tensor), self._most)


def _flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    found = list(tensors)
    return found[0].reshape(-1) if len(found) == 1 else torch.cat(found)


def some(tensor: torch.Tensor, most: int) -> torch.Tensor:
    """Flatten a tensor, and sample at most ``most`` elements: runs of 64, evenly spread, so that little memory is read."""
    values = tensor.reshape(-1)
    if values.numel() <= most:
        return values
    runs = most // 64
    return values.as_strided((runs, 64), (values.numel() // runs, 1)).reshape(-1)


class UpdateCheck(AroundStep):
    """The result of `check_updates`: figures so far, and `remove`.

    ``steps`` counts the measured steps. ``shares`` has the share of updates that were lost in them, by name. ``print`` it.
    """

    def __init__(self, optimizer: Any, every: int, share: float, function: str = "check_updates") -> None:
        self._every, self._share = every, share
        self.steps = self._seen = 0
        self._lost: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._has_told = False
        super().__init__(optimizer, function)

    @property
    def shares(self) -> dict[str, float]:
        """The share of lost updates of each parameter, by name. Waits for the device."""
        return to_host({name: lost / total.clamp(min=1) for name, (lost, total) in self._lost.items()})

    @contextmanager
    def around(self) -> Iterator[None]:
        self._seen += 1
        is_measured = self._seen <= _FIRST or self._seen % self._every == 0
        weights = Weights(self.optimizer) if is_measured else None
        yield
        with torch.no_grad():
            if weights is not None and (lost := weights.lost()):
                self._count(lost)
                if self.steps >= _FIRST and not self._has_told:
                    self._tell()

    def _count(self, counts: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.steps += 1
        for name, (lost, total) in counts.items():
            lost_before, total_before = self._lost.get(name, (0, 0))
            self._lost[name] = lost + lost_before, total + total_before

    def _tell(self) -> None:
        shares = {name: share for name, share in self.shares.items() if share > self._share}
        if not shares:
            return
        self._has_told = True
        worst = max(shares, key=lambda name: shares[name])
        weight = next(weight for weight in Weights(self.optimizer, 64).list if weight.name == worst)
        lost = f"{shares[worst]:.0%} of the updates of {worst!r} ({short(weight.param.dtype)}, lr {weight.lr:g})"
        more = f" ({len(shares) - 1} more tensors lose over {self._share:.0%}: print what check_updates returned)"
        more *= len(shares) > 1
        logger.warning("%s were lost in %d steps%s: %s", lost, self.steps, more, _cure(weight))

    def __str__(self) -> str:
        worst_first = sorted(self.shares.items(), key=lambda item: -item[1])
        lines = [f"  {share:7.2%}  {printable(name)}" for name, share in worst_first]
        return "\n".join([f"updates lost in {self.steps} steps", *lines])


def _cure(weight: _Weight) -> str:
    dtype = weight.param.dtype
    if weight.rest is not None or dtype not in LOWER_PRECISION:
        return "weights in float32 lose them where updates are below 6e-8 of a weight: look at the learning rate."
    level = "O5" if dtype is torch.bfloat16 else "O2"
    cost = "+2 bytes per parameter, and moments in float32"
    cure = f'initialize(model, optimizer, opt_level="{level}") trains their float32 values ({cost})'
    if dtype is torch.bfloat16:
        cure += '; without these, rounding="stochastic" of ampkit.optimizers loses none on average'
    return f"weights in {short(dtype)} without masters. {cure}."


def check_updates(optimizer: Any, every: int = 100, *, share: float = 0.5) -> UpdateCheck:
    """Measure at the following steps how many updates rounding loses, and warn of tensors that lose more than a ``share``.

    >>> check = ampkit.check_updates(optimizer)  # and after five steps a warning:
    100% of the updates of 'norm.weight' (bfloat16, lr 1e-05) were lost in 5 steps: weights in bfloat16 without masters.
    initialize(model, optimizer, opt_level="O5") trains their float32 values (+2 bytes per parameter, and moments in float32);
    without these, rounding="stochastic" of ampkit.optimizers loses none on average.
    >>> print(check)
    updates lost in 5 steps
      100.00%  norm.weight
       97.31%  proj.weight

    It takes any optimizer and model, initialized or not; call it after `initialize`. Measured are the first five steps and then
    every ``every``-th one; these take a copy of the weights and a pass over them. The warning comes once. What is returned has
    ``shares``, by name, ``steps``, and ``remove()``.

    Raises TypeError for what is no optimizer, and ValueError for an ``every`` below 1 or a ``share`` outside of 0 to 1.
    """
    if every < 1 or not 0 <= share <= 1:
        raise ValueError(f"check_updates: every={every}, share={share}; expected at least 1, and from 0 to 1.")
    return UpdateCheck(optimizer, every, share)
