"""Whether an optimizer still holds, and updates, the parameters that `initialize` put into its groups.

At O2 and O5 these are masters. A script that assigns ``param_groups[i]["params"]`` puts the model's own weights there again,
which is followed. An optimizer that keeps a second list of its parameters updates the model's weights behind the masters' back,
which nobody can follow: the masters would be rounded over what it wrote. The first steps find that out. An optimizer's state is its
masters' too, and what a script puts under the model's weights is brought to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch

from ..errors import ConfigurationError
from ..logs import logger
from .master_weights import Slot
from .optimizer_traits import is_known


class HeldParameters:
    """What the groups of an optimizer held when somebody last looked."""

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        self._lists = [list(group["params"]) for group in groups]

    def are_in(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Whether the groups hold the same parameters now. Asked in every iteration, and never compares values."""
        if len(groups) != len(self._lists):
            return False
        for group, held in zip(groups, self._lists):
            params = group["params"]
            if not isinstance(params, list) or len(params) != len(held) or not all(map(is_, params, held)):
                return False
        return True


class StateOfWeights:
    """Looks for state under a model's weight, ``optimizer.state[weight]``, where the optimizer has it under the master."""

    def __init__(self) -> None:
        self._size = 0
        self._has_warned = False

    def bring_to_masters(self, optimizer: Any, slots: Sequence[Slot]) -> None:
        """Give masters what a script has put under their weights, and take away what its look has made there. Says so once."""
        state = optimizer.state
        if len(state) == self._size:  # a look at what is not there makes it
            return
        for slot in slots:
            if slot.target is slot.param or slot.param not in state:
                continue
            if put := state.pop(slot.param):
                state.setdefault(slot.target, {}).update(put)
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "optimizer.state was asked for a weight of the model, and this %s has its state under the float32 master of "
                    "each: what was looked for is not there. Ask by what it updates, 'for p in ampkit.master_params(optimizer): "
                    "optimizer.state[p]'.",
                    type(optimizer).__name__,
                )
        self._size = len(state)


class FirstSteps:
    """Looks at steps of an optimizer of a class that nobody knows, until one has changed a weight."""

    def __init__(self, optimizer: Any) -> None:
        self._is_over = is_known(optimizer)
        self._before: list[tuple[Slot, torch.Tensor, torch.Tensor | None]] = []

    def begin(self, slots: Sequence[Slot]) -> None:
        """Before a step: remember what the model computes with, and the masters."""
        if not self._is_over and any(slot.master is not None for slot in slots):
            self._before = [
                (slot, slot.param.detach().clone(), None if slot.master is None else slot.master.detach().clone())
                for slot in slots
            ]

    def end(self, optimizer: Any) -> None:
        """After it: raise where it wrote to the model's weights and left their masters alone. The weights go back."""
        if not self._before:
            return
        before, self._before = self._before, []
        mastered = [(slot, lower, master) for slot, lower, master in before if master is not None]
        stepped = {slot for slot, _, master in mastered if not torch.equal(slot.master, master)}
        past_masters = [
            slot for slot, lower, _ in mastered if slot not in stepped and not torch.equal(slot.param, lower)
        ]
        if not past_masters:
            self._is_over = self._is_over or bool(stepped)
            return
        with torch.no_grad():
            for slot, value, _ in before:
                slot.param.copy_(value)
        name, param = type(optimizer).__name__, past_masters[0].param
        raise ConfigurationError(
            f"{name}.step() wrote to {len(past_masters)} of the model's {param.dtype} weights, one of shape {tuple(param.shape)}, "
            "and not to their float32 masters, which would undo it: it has a list of parameters of its own. Have its step() go "
            "through self.param_groups, where initialize() has put the masters, or use opt_level='O1' or 'O4', which have none. "
            "The weights are as they were before the step."
        )
