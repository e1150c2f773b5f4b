"""What stands in the groups of an optimizer, masters in the places of weights, and whether the optimizer updates it.

A script that assigns ``param_groups[i]["params"]`` puts the model's own weights there again,
which is followed. An optimizer that keeps a second list of its parameters updates the model's weights behind the masters' back,
which nobody can follow: the masters would be rounded over what it wrote. The first steps find that out. An optimizer's state is its
masters' too, and what a script puts under the model's weights is brought to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from ..casting.tensors import cast_state
from ..dtypes import LOWER_PRECISION
from ..errors import ConfigurationError
from ..logs import logger
from ..models.float32_values import Float32Value
from .gradients import Gradients
from .master_weights import Slot, Slots
from .optimizer_traits import is_known

StateCasts = list[tuple[dict[str, Any], dict[str, Any]]]


class HeldParameters:
    """The parameters in the groups of one optimizer, and the state that it has for them: masters', where there are masters."""

    def __init__(self, slots: Slots, gradients: Gradients, values: Callable[[], Mapping[Tensor, Float32Value]]) -> None:
        self._slots, self._gradients, self._values = slots, gradients, values
        self._lists: list[list[Tensor]] = []  # what the groups held when somebody last looked
        self._states = 0  # how many there were then
        self._has_warned = False

    def put_masters(self, optimizer: Any) -> None:
        """Put masters into the groups, in the place of every weight that a float32 value is known of."""
        groups, values = optimizer.param_groups, self._values()
        for group in groups:
            if not isinstance(group["params"], list):
                group["params"] = list(group["params"])
        self.put_params_back(optimizer)
        for group in groups:
            self._gradients.add(self._slots.put_into(group, optimizer.state, values))
        self._lists = [list(group["params"]) for group in groups]

    def put_params_back(self, optimizer: Any) -> None:
        """Put weights in the places of their masters."""
        state = optimizer.state
        param_of = {slot.master: slot.param for slot in self._gradients.mastered if not slot.is_split}
        for group in optimizer.param_groups:
            for index, master in enumerate(group["params"]):
                if (param := param_of.get(master)) is not None:
                    group["params"][index] = param
                    if master in state:
                        state[param] = state.pop(master)

    def are_in(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Whether the groups hold the same parameters now. Asked in every iteration, and never compares values."""
        if len(groups) != len(self._lists):
            return False
        for group, held in zip(groups, self._lists):
            params = group["params"]
            if not isinstance(params, list) or len(params) != len(held) or not all(map(is_, params, held)):
                return False
        return True

    def bring_state_to_masters(self, optimizer: Any) -> None:
        """Give masters what a script has put under their weights, and take away what its look has made there. Says so once."""
        state = optimizer.state
        if len(state) == self._states:  # a look at what is not there makes it
            return
        for slot in self._gradients.mastered:
            if slot.is_split or slot.param not in state:
                continue
            if put := state.pop(slot.param):
                state.setdefault(slot.master, {}).update(put)
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "optimizer.state was asked for a weight of the model, and this %s has its state under the float32 master of "
                    "each: what was looked for is not there. Ask by what it updates, 'for p in ampkit.master_params(optimizer): "
                    "optimizer.state[p]'.",
                    type(optimizer).__name__,
                )
        self._states = len(state)

    def state_cast(self, optimizer: Any, dtype: torch.dtype | None = None) -> StateCasts:
        """The state of lower-precision parameters that have no master, in this dtype, or in theirs.

        Pairs of a state and what to update it with: nothing is written before all memory is there.
        """
        state = {} if getattr(optimizer, "keeps_narrow_state", False) else optimizer.state
        return [
            (state[slot.param], cast_state(state[slot.param], dtype or slot.param.dtype))
            for slot in self._gradients.slots
            if slot.master is None and slot.param.dtype in LOWER_PRECISION and slot.param in state
        ]


class FirstSteps:
    """Looks at steps of an optimizer of a class that nobody knows, until one has changed a weight."""

    def __init__(self, optimizer: Any) -> None:
        self._is_over = is_known(optimizer)
        self._before: list[tuple[Slot, Tensor, Tensor | None]] = []

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
