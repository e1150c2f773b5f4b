"""What torch itself makes of an initialized model: programs of torch.export, and averages of torch.optim.swa_utils.

A program shares its parameters with the model it came from. `close` turns those of a cast model into float32 in place, which
a program in lower precision could not run with: it gets its own, with the weights of the moment. An ``AveragedModel`` is
float32, and so is what it is made of; its own default refuses tensors of two dtypes, and lower-precision weights are rounded.
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
from ..registry import watchers
from .records import lower_entries


def _exporting(original: Any) -> Any:
    @functools.wraps(original)
    def export(mod: nn.Module, *args: Any, **kwargs: Any) -> Any:
        initialized = [model for model in mod.modules() if model in watchers] if isinstance(mod, nn.Module) else []
        for model in initialized:
            watchers[model].before_forward(model)
        program = original(mod, *args, **kwargs)
        if any(True for model in initialized for _ in lower_entries(model)):
            copies = {tensor: _copy(tensor) for tensor in program.state_dict.values()}
            program.state_dict.update({name: copies[tensor] for name, tensor in program.state_dict.items()})
        return program

    return export


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    copied = tensor.detach().clone()
    return nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied


exports = shared_patch(lambda: torch.export, "export", _exporting)


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
