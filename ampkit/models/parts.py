"""The modules of a model and the tensors of a module, at a fraction of the cost of torch's own iterators: every forward asks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn


def walk(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of ``model``, each once, as ``model.modules()`` gives them."""
    seen, pending = {model}, [model]
    for module in pending:
        yield module
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                pending.append(child)


def own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The module's own parameters and buffers, by name, without what torch.func.functional_call lends it for parameters."""
    for name, tensor in module._parameters.items():
        if isinstance(tensor, nn.Parameter):
            yield name, tensor
    for name, tensor in module._buffers.items():
        if tensor is not None:
            yield name, tensor


def some_parameter(model: nn.Module) -> nn.Parameter | None:
    """One of the model's parameters, if it has any; ``next(model.parameters())`` costs as much as a small layer."""
    for module in walk(model):
        for param in module._parameters.values():
            if param is not None:
                return param
    return None
