"""Models that come in float16 or bfloat16, as checkpoints are loaded today: float32 while a session lives.

`Incoming.widen` comes before everything else that a session does to its models, so that all of it sees a float32 model:
casts, kept norms, copies, ``state_dict()``. `Incoming.give_back` is its undo, and comes last of all. A session that takes
over the models of an earlier one takes over its record too, without rounding in between.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..casting.tensors import cast_state, states_to_cast, tensors_in
from ..dtypes import LOWER_PRECISION


class Incoming:
    """The dtypes that parameters and buffers came in, where that was a lower precision."""

    def __init__(self) -> None:
        self._parameters: dict[int, tuple[weakref.ref[torch.Tensor], torch.dtype]] = {}  # by id
        # By name: modules put other tensors in the places of their buffers.
        self._buffers: weakref.WeakKeyDictionary[nn.Module, dict[str, torch.dtype]] = weakref.WeakKeyDictionary()
        self._with_float32_state: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers

    def take_over(self, earlier: Incoming, models: Sequence[nn.Module]) -> None:
        """What an earlier session has noted of ``models``, before it closes: it then leaves these in float32."""
        modules = {module for model in models for module in model.modules()}
        params = {id(param) for model in models for param in model.parameters()}
        self._with_float32_state |= earlier._with_float32_state
        for key in list(earlier._parameters):
            if key in params:
                self._parameters[key] = earlier._parameters.pop(key)
        for module in list(earlier._buffers):
            if module in modules:
                self._buffers[module] = earlier._buffers.pop(module)

    def dtypes_of(self, model: nn.Module) -> set[torch.dtype]:
        """The dtypes that the model's parameters came in, as far as they are noted here."""
        noted = (self._parameters.get(id(param), (None, None)) for param in model.parameters())
        return {dtype for ref, dtype in noted if ref is not None and ref() is not None}

    def widen(self, models: Sequence[nn.Module], optimizers: Sequence[Any]) -> list[tuple[nn.Module, torch.dtype, int]]:
        """Make lower-precision tensors float32, in place, with their gradients and optimizer state.

        Returns (model, its dtype, how many tensors) for each model that has come in lower precision.
        """
        found = []
        taken_over = set(self._parameters)
        for model in models:
            widened = []
            for module, name, tensor in _lower_tensors(model):
                widened.append(tensor.dtype)
                if name in module._parameters:
                    self._parameters[id(tensor)] = (weakref.ref(tensor), tensor.dtype)
                else:
                    self._buffers.setdefault(module, {})[name] = tensor.dtype
                _change_dtype(tensor, torch.float32)
            if widened:
                found.append((model, widened[0], len(widened)))
                _flatten_again(model)
        for optimizer in optimizers:
            for param, state in self._states(optimizer):
                if id(param) in taken_over:
                    continue
                if all(tensor.dtype not in LOWER_PRECISION for tensor in tensors_in(state)):
                    self._with_float32_state.add(optimizer)
                state.update(cast_state(state, torch.float32))
        return found

    def give_back(self, optimizers: Sequence[Any]) -> None:
        """The dtype that each tensor came in, the values rounded."""
        for optimizer in optimizers:
            if optimizer in self._with_float32_state or getattr(optimizer, "keeps_float32_state", False):
                continue
            for param, state in self._states(optimizer):
                state.update(cast_state(state, self._parameters[id(param)][1]))
        for ref, dtype in self._parameters.values():
            if (param := ref()) is not None:
                _change_dtype(param, dtype)
        for module, names in self._buffers.items():
            for name, dtype in names.items():
                if (buffer := module._buffers.get(name)) is not None:
                    _change_dtype(buffer, dtype)
            _flatten_again(module)
        self._parameters.clear()
        self._buffers.clear()

    def _states(self, optimizer: Any) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        """Each parameter that came in lower precision and has state in the optimizer, and that state."""
        for param, state in states_to_cast(optimizer):
            ref, _ = self._parameters.get(id(param), (None, None))
            if ref is not None and ref() is param:
                yield param, state


def _lower_tensors(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.dtype in LOWER_PRECISION:
                    yield module, name, tensor


def _change_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    gradient, tensor.grad = tensor.grad, None
    tensor.data = tensor.detach().to(dtype)
    tensor.grad = None if gradient is None else gradient.to(dtype)


def _flatten_again(model: nn.Module) -> None:
    """Recurrent layers want their weights in one piece."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
