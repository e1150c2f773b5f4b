"""Parameters that stay float32 where weights are stored in lower precision, and modules that compute in float32.

NOTES.md says which. Modules that ``keep_fp32=`` names get a wrapped forward (`KEPT` in forward.py), in which calls are not cast.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from .incoming import held_by

_NORM_TYPES = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm, nn.CrossMapLRN2d, _NormBase)
_LAYERS = (nn.Linear, nn.Bilinear, _ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)

#: The reason why a parameter keeps its dtype.
NOT_TRAINED = "no optimizer trains it"


def _is_matrix(tensor: torch.Tensor) -> bool:
    return sum(size > 1 for size in tensor.shape) >= 2


class Kept:
    """A plan's choice for one model: ``modules`` and ``parameters`` that stay float32.

    ``named`` are the modules that ``keep_fp32=`` names, and ``unmatched`` its items that name nothing. Of the other parameters the
    plan lowers the matrices, or with ``lowers_all`` every one; only ``trained`` ones, unless that is None.
    """

    def __init__(self, model: nn.Module, plan: Any, optimizers: Sequence[Any] = ()) -> None:
        self.model, self.lowers, self.lowers_all = model, plan.casts_weights, plan.lowers_all
        self.trained: set[torch.Tensor] | None = None
        if self.lowers and not self.lowers_all and optimizers:
            self.trained = {param for param in held_by(optimizers) if param.requires_grad}
        norms = _NORM_TYPES if plan.keep_batchnorm_fp32 is not False else ()
        self.modules = {m: name for name, m in model.named_modules() if isinstance(m, norms)}
        self._of_norms = {param for module in self.modules for param in module.parameters()}
        self.named: dict[nn.Module, str] = {}
        self.parameters: set[torch.Tensor] = set()
        self.unmatched: list[Any] = []
        for item in plan.keep_fp32:
            modules, parameters = self._matching(item)
            self.named.update(modules)
            self.parameters.update(parameters)
            if not modules and not parameters:
                self.unmatched.append(item)
        # torch's attention never calls its ``out_proj``: who names that names the attention.
        for name, module in model.named_modules():
            if isinstance(module, nn.MultiheadAttention) and module.out_proj in self.named:
                self.named[module] = name
        self.modules.update(self.named)
        self.parameters.update(param for module in self.modules for param in module.parameters())
        own = [m for m in model.modules() if type(m)._save_to_state_dict is not nn.Module._save_to_state_dict]
        self._saved_by_classes = {param for module in own for param in module.parameters(recurse=False)}

    def why_kept(self, module: nn.Module, param: nn.Parameter) -> str | None:
        """Return why a parameter of the module stays as it is; None if it is stored in lower precision."""
        if self.trained is not None and param not in self.trained:
            return NOT_TRAINED
        if not self.lowers:
            return "as it is"
        if param in self.parameters:
            return "a norm" if param in self._of_norms else "keep_fp32= names it"
        if param in self._saved_by_classes:
            return "its class writes state_dict()"
        if self.lowers_all or isinstance(module, _NORM_TYPES) or _is_matrix(param):
            return None
        beside = [x for x in module._parameters.values() if x is not None]
        return None if isinstance(module, _LAYERS) and any(map(_is_matrix, beside)) else "a vector"

    def in_float32(self) -> list[nn.Module]:
        """Return the modules that ``keep_fp32=`` names and all inside them that have a forward: each may be called by itself.

        Calls reach no forward of a ModuleList, a ScriptModule or a module of torch.compile.
        """
        every = dict.fromkeys(module for root in self.named for module in root.modules())
        own = [m for m in every if type(m).forward is not nn.Module.forward and "_orig_mod" not in m._modules]
        return [module for module in own if not isinstance(module, torch.jit.ScriptModule)]

    def _matching(self, item: Any) -> tuple[dict[nn.Module, str], set[torch.Tensor]]:
        """Return the modules and parameters that an item names. ``"head.weight"``, a parameter of a layer, names the layer."""
        model, named = self.model, list(self.model.named_modules())
        if isinstance(item, type):
            return {module: name for name, module in named if isinstance(module, item)}, set()
        if not isinstance(item, str):
            return {module: name for name, module in named if module is item}, set()
        every = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        modules = {module: name for name, module in named if name and fnmatch.fnmatchcase(name, item)}
        parameters = {tensor for name, tensor in every if fnmatch.fnmatchcase(name, item)}
        for name, module in named:
            if modules.keys() >= set(module.children()) and not parameters.isdisjoint(module.parameters(recurse=False)):
                modules[module] = name
        return modules, parameters
