"""``torch.distributed.checkpoint.state_dict`` of an optimizer with masters: its state by the names of the model's weights.

`get_state_dict`, `set_state_dict` and their like look up what stands in the optimizer's groups among the model's parameters.
Masters are not there. While these functions run, the model names each master in the place of its weight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..patching import ModulePatches, PatchSet
from .optimizer_wrapper import wrapper_of


def _patch(patches: PatchSet, module: Any) -> None:
    for name in ("_get_optim_state_dict", "_load_optim_state_dict"):
        if hasattr(module, name):
            patches.set(module, name, _naming_masters(getattr(module, name)))


# Imported by scripts that use it: the import takes a second.
named_state = ModulePatches("torch.distributed.checkpoint.state_dict", _patch)


def _naming_masters(original: Callable) -> Callable:
    @functools.wraps(original)
    def with_masters(model: nn.Module, optimizers: Any, *args: Any, **kwargs: Any) -> Any:
        masters = _masters(optimizers)
        for given in (*args, *kwargs.values()):
            for names in (getattr(given, "fqn_param_mapping", {}), getattr(given, "shared_params_mapping", {})):
                names.update({master: names[param] for param, master in masters.items() if param in names})
        patches = PatchSet()
        try:
            if masters:  # into the dict, since a compiled module hands attributes on to the one inside
                patches.set(vars(model), "named_parameters", _naming(model.named_parameters, masters))
            return original(model, optimizers, *args, **kwargs)
        finally:
            patches.restore()

    return with_masters


def _masters(optimizers: Any) -> dict[torch.Tensor, torch.Tensor]:
    """The masters in the groups of these optimizers, by the model's weights."""
    wrappers = [wrapper for optimizer in optimizers if (wrapper := wrapper_of(optimizer)) is not None]
    for wrapper in wrappers:
        wrapper.follow_groups()
    slots = (slot for wrapper in wrappers for slot in wrapper.gradients.mastered)
    return {slot.param: slot.target for slot in slots if slot.target is not slot.param}


def _naming(named_parameters: Callable, masters: dict[torch.Tensor, torch.Tensor]) -> Callable:
    def with_masters(*args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, masters.get(param, param)) for name, param in named_parameters(*args, **kwargs))

    return with_masters
