"""``torch.optim.swa_utils.AveragedModel`` of a cast model: the average is float32, and so is what it is made of.

Its own default refuses tensors of two dtypes, and the lower-precision weights would be the rounded ones.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import swa_utils

from ..patching import SharedPatch
from .weights import lower_entries


class _Float32Values:
    """A model's parameters and buffers, as far as an average asks for them, with the float32 values behind them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._entries = dict(lower_entries(model))

    def parameters(self) -> Iterator[torch.Tensor]:
        return map(self._value, self._model.parameters())

    def buffers(self) -> Iterator[torch.Tensor]:
        return map(self._value, self._model.buffers())

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        entry = self._entries.get(tensor)
        return tensor if entry is None else entry.current(tensor)


def _averaging(original: Any) -> Any:
    @functools.wraps(original)
    def update_parameters(self: Any, model: nn.Module) -> None:
        original(self, _Float32Values(model))

    return update_parameters


averages = SharedPatch(lambda: swa_utils.AveragedModel, "update_parameters", _averaging)
