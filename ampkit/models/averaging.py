"""``torch.optim.swa_utils.AveragedModel`` of a cast model: the average is float32, and so is what it is made of.

Its own default refuses tensors of two dtypes, and the lower-precision weights would be the rounded ones.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim import swa_utils

from ..patching import shared_patch
from .records import lower_entries


def _averaging(original: Any) -> Any:
    @functools.wraps(original)
    def update_parameters(self: Any, model: nn.Module) -> None:
        entries = dict(lower_entries(model))

        def parameters() -> Iterator[torch.Tensor]:
            return (entries[param].current(param) if param in entries else param for param in model.parameters())

        # As much of a model as an average asks for.
        original(self, SimpleNamespace(parameters=parameters, buffers=model.buffers))

    return update_parameters


averages = shared_patch(lambda: swa_utils.AveragedModel, "update_parameters", _averaging)
