"""Master weights: float32 parameters that take the places of lower-precision ones inside an optimizer.

A `Slot` stands for one parameter: the model's tensor, its master where it has one, and where its gradient is. Everything
that handles gradients walks slots and never asks for the opt level.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ..models.float32_values import UNCOUNTED, Float32Value
from ..optimizers.scales import Scale
from .found_inf import FoundInf
from .split_masters import SplitMaster

_grad = torch.Tensor.grad  # torch's own, which does not look whether there is anything to convert
_data = torch.Tensor.data


class MasterWeight(nn.Parameter):
    """The float32 parameter that an optimizer updates in place of a model's lower-precision one.

    Its gradient is made when somebody looks at it: the optimizer's step, a script that clips ``optimizer.param_groups``.
    A copy of it, or what is unpickled, is an ordinary parameter.
    """

    _slot: Callable[[], Slot | None] | None = None
    _gradients: Callable[[], Any] | None = None
    #: What stands there, without a conversion.
    raw_grad = _grad

    @property
    def grad(self) -> torch.Tensor | None:
        self._convert()
        return _grad.__get__(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        slot = self._slot and self._slot()
        if value is None and slot is not None and slot.converted is None and slot.param.grad is not None:
            slot.note_gradient()  # what goes need not be made first
        slot = self._convert()
        _grad.__set__(self, value)
        if slot is not None and not (value is None and slot.param.grad is None):
            slot.note_gradient()

    def _convert(self) -> Slot | None:
        slot = self._slot and self._slot()
        if slot is not None and slot.converted is None:
            if slot.param.grad is None:
                _grad.__set__(self, None)
            elif (gradients := self._gradients()) is not None:
                gradients.convert_for_reader()
        return slot

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> torch.Tensor:
        # Of what is written to it torch counts nothing: the weight is rounded anew, whether it was or not.
        self._expect_writes()
        return _data.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        entry = self._expect_writes()
        _data.__set__(self, value)
        if entry is not None:
            entry.note_addresses()

    def _expect_writes(self) -> Float32Value | None:
        slot = self._slot and self._slot()
        if slot is None:
            return None
        slot.entry.synchronize(slot.param)
        slot.entry.value_version = UNCOUNTED
        return slot.entry

    def move_like(self, param: torch.Tensor) -> None:
        """Move it and its gradient to the device of its weight, as no write of a script."""
        if self.device != param.device:
            gradient, self.raw_grad = self.raw_grad, None
            _data.__set__(self, self.detach().to(param.device))
            self.raw_grad = None if gradient is None else gradient.to(param.device)

    def belongs_to(self, slot: Slot, gradients: Any) -> None:
        """Have these `Gradients`, while they live, convert what there is before anybody sees the gradient."""
        self._slot, self._gradients = weakref.ref(slot), weakref.ref(gradients)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(memory_format=torch.preserve_format), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return torch._utils._rebuild_parameter, (self.detach(), self.requires_grad, OrderedDict())


# By default torch's optimizers update in lists only what is in this one.
_in_lists = getattr(sys.modules["torch.optim.optimizer"], "_foreach_supported_types", None)
if _in_lists is not None and MasterWeight not in _in_lists:
    _in_lists.append(MasterWeight)


class Seen(NamedTuple):
    """A gradient, or that there was none, and its version when somebody relied on it."""

    gradient: torch.Tensor | None
    version: int

    @classmethod
    def now(cls, gradient: torch.Tensor | None) -> Seen:
        return cls(gradient, 0 if gradient is None else gradient._version)

    def is_still(self, gradient: torch.Tensor | None) -> bool:
        """Whether it is the same tensor, and nobody has written to it since, as far as torch counts."""
        return gradient is self.gradient and (gradient is None or gradient._version == self.version)


_FEW = 8


class Exact(NamedTuple):
    """A gradient more exactly than ``param.grad`` can hold it: ``values`` / ``scale``, and what it was rounded to.

    ``values`` is the float16 gradient as the backward pass left it, or the float32 sum of several blocks. With ``is_scaled``
    ``param.grad`` has been left at a loss scale, ``left_at``, and may be ``values`` itself: nobody may write to it.
    """

    values: torch.Tensor
    scale: Scale
    rounded: Seen
    is_scaled: bool = False
    left_at: Scale = 1.0

    def as_left(self) -> Exact | None:
        """What is known once ``values`` are used: the scale of ``param.grad``, where it was left at one."""
        return self._replace(values=self.rounded.gradient, scale=self.left_at) if self.is_scaled else None

    def moved(self, gradient: torch.Tensor) -> Exact:
        """The same, where ``gradient`` is a copy that takes the place of ``param.grad``."""
        values = gradient if self.values is self.rounded.gradient else self.values
        return self._replace(values=values, rounded=Seen.now(gradient))

    def serves(self, gradient: torch.Tensor) -> bool:
        """Whether elements of ``gradient`` may still be what this was rounded to.

        Not where the model has moved since, nor where so few were written to that none of them tells (see Note [runs] in csrc).
        """
        same_place = self.values.device == gradient.device
        return same_place and (gradient.numel() >= _FEW or self.rounded.is_still(gradient))


class Slot:
    """One parameter: ``param`` is what the model computes with, ``target`` what optimizers update: the master, if it is a tensor.

    Where its gradient is, between a block and the step:

    - unscaled in ``param.grad``, where nothing else is set;
    - there, and more exactly in ``exact`` (`Exact`), or at its scale with ``exact.is_scaled``;
    - in the master's gradient, where a reader or a step had it ``converted``; then `Seen` is ``param.grad`` as it was.

    In a block the gradient of earlier ones is in ``stash``. ``owners`` counts the optimizers that update the parameter. Where there
    are several, ``found_inf`` is what the block found that the gradient came from.
    """

    __slots__ = (
        "__weakref__",
        "converted",
        "entry",
        "exact",
        "found_inf",
        "is_split",
        "master",
        "owners",
        "param",
        "stash",
    )

    def __init__(
        self, param: torch.Tensor, master: MasterWeight | SplitMaster | None, entry: Float32Value | None
    ) -> None:
        self.param = param
        self.master = master
        self.is_split = isinstance(master, SplitMaster)
        self.entry = entry
        self.owners = 0
        self.stash: torch.Tensor | None = None
        self.exact: Exact | None = None
        self.converted: Seen | None = None
        self.found_inf: FoundInf | None = None

    def clear(self) -> None:
        """Forget everything about the gradient but ``param.grad``."""
        self.stash = self.exact = self.converted = self.found_inf = None
        if self.master is not None:
            self.master.raw_grad = None

    def note_gradient(self) -> None:
        """The step uses what was put into the master's gradient, or nothing."""
        self.converted = Seen.now(self.param.grad)

    @property
    def target(self) -> torch.Tensor:
        return self.param if self.master is None or self.is_split else self.master

    def split(self) -> None:
        """Have the weight and its rest be the master from now on, where it is to be split."""
        if self.is_split and self.entry.rest is None:
            self.entry.split(self.param, self.master.rest_dtype)


class Slots:
    """The slots of a session, one for each parameter, however many optimizers update it.

    With a ``rest_dtype`` masters are split (split_masters.py), and the parameters stay where they are.
    """

    def __init__(self, rest_dtype: torch.dtype | None = None) -> None:
        self._rest_dtype = rest_dtype
        self.splits = rest_dtype is not None
        self._slots: MutableMapping[int, Slot] = weakref.WeakValueDictionary()  # by the parameter's id

    def put_into(self, group: dict[str, Any], state: dict, values: dict[torch.Tensor, Float32Value]) -> Iterator[Slot]:
        """Put masters into one parameter group of an optimizer, for every parameter that ``values`` knows a float32 value of.

        The optimizer's state moves to the masters as it is: it was float32 and stays so.
        """
        for index, param in enumerate(group["params"]):
            slot = self._slots.get(id(param))
            if slot is None:
                entry = values.get(param)
                slot = Slot(param, None if entry is None else self._master(entry, param), entry)
                self._slots[id(param)] = slot
                if slot.master is not None and slot.master.raw_grad is not None and param.grad is not None:
                    # From before initialize.
                    slot.exact = Exact(slot.master.raw_grad, 1.0, Seen.now(param.grad))
                    slot.master.raw_grad = None
            if slot.target is not param:
                group["params"][index] = slot.master
                if param in state:
                    state[slot.master] = state.pop(param)
            yield slot

    def _master(self, entry: Float32Value, param: torch.Tensor) -> MasterWeight | SplitMaster:
        if self._rest_dtype is None:
            return make_master(entry, param)
        master = SplitMaster(self._rest_dtype)
        master.raw_grad, entry.gradient = entry.gradient, None
        return master


def make_master(entry: Float32Value, param: torch.Tensor) -> MasterWeight:
    """The master of a parameter: its float32 value itself, on the parameter's device."""
    if not isinstance(entry.value, MasterWeight):
        value = param.detach().float() if entry.value is None else entry.value.detach().to(param.device)
        entry.value = MasterWeight(value, requires_grad=param.requires_grad)
        entry.value.raw_grad, entry.gradient = entry.gradient, None
        entry.agree(param)
    return entry.value
