"""Which modules keep float32 weights in a lower-precision model, and how they live among lower-precision activations.

Norm layers, what torch has no lower precision for, and whatever ``keep_fp32=`` names stay float32. Batch and instance norm
take lower-precision activations with float32 weights natively; every other kept module is given hooks that hand it float32
inputs and cast its outputs back. The hooks are plain functions of this module, so that models pickle and deep-copy.
"""

from __future__ import annotations

import fnmatch
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _Orthogonal
from torch.nn.utils.parametrize import ParametrizationList

from ..casting.tensors import cast_floating
from ..errors import ConfigurationError

ACTIVATION_KEY = "_ampkit_activation_dtype"

_NORM_TYPES = tuple(
    getattr(nn, name)
    for name in ("LayerNorm", "GroupNorm", "RMSNorm", "LocalResponseNorm", "CrossMapLRN2d")
    if hasattr(nn, name)
) + (_NormBase,)
_NORM_SUFFIXES = ("Norm", "Norm1d", "Norm2d", "Norm3d")


def is_norm(module: nn.Module) -> bool:
    """Every norm class of torch.nn and its subclasses, and classes named like one (``LlamaRMSNorm``)."""
    return isinstance(module, _NORM_TYPES) or type(module).__name__.endswith(_NORM_SUFFIXES)


def needs_float32(module: nn.Module) -> bool:
    """Orthogonal parametrizations: in bfloat16 two of the maps have no kernels, and the third gives NaN."""
    return isinstance(module, ParametrizationList) and any(isinstance(one, _Orthogonal) for one in module)


def takes_lower_precision_natively(module: nn.Module) -> bool:
    """torch's batch norm kernels compute in float32 from lower-precision input with float32 weights.

    A subclass with a forward of its own may do anything, and is not trusted to.
    """
    home = getattr(type(module).forward, "__module__", "")
    return isinstance(module, _NormBase) and home.startswith(("torch.nn.", "ampkit."))


class AsTheyAre:
    """The choice that keeps every float32 tensor: only weights that came in lower precision get a float32 value behind them."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = {
            tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.dtype is torch.float32
        }

    def covers(self, module: nn.Module) -> bool:
        return False


class Kept:
    """The choice for one model: ``modules`` (with everything inside them) and single ``parameters`` by identity."""

    def __init__(self, model: nn.Module, keep_norms: bool, keep_fp32: tuple[Any, ...]) -> None:
        self.modules: dict[nn.Module, str] = {}
        self.parameters: set[torch.Tensor] = set()
        self.unmatched: list[Any] = []
        for name, module in model.named_modules():
            if needs_float32(module) or (keep_norms and is_norm(module)):
                self.modules[module] = name
        for item in keep_fp32:
            if not self._keep(model, item):
                self.unmatched.append(item)
        self._keep_tied(model)
        self._inside = {inner for module in self.modules for inner in module.modules()}

    def covers(self, module: nn.Module) -> bool:
        return module in self._inside

    def outermost(self) -> list[nn.Module]:
        """Kept modules that are not inside another kept one: these get the hooks."""
        nested = {inner for module in self.modules for inner in module.modules() if inner is not module}
        return [module for module in self.modules if module not in nested]

    def _keep_tied(self, model: nn.Module) -> None:
        """A tensor has one dtype: modules that share a weight with a kept one are kept as well."""
        found = bool(self.modules)
        while found:
            inside = {inner for module in self.modules for inner in module.modules()}
            tensors = {param for module in inside for param in module.parameters(recurse=False)}
            found = {
                module: name
                for name, module in model.named_modules()
                if module not in inside and any(param in tensors for param in module.parameters(recurse=False))
            }
            self.modules.update(found)

    def _keep(self, model: nn.Module, item: Any) -> bool:
        if isinstance(item, str):
            modules = {m: name for name, m in model.named_modules() if name and fnmatch.fnmatchcase(name, item)}
            parameters = {p for name, p in model.named_parameters() if fnmatch.fnmatchcase(name, item)}
        else:
            matches = (lambda m: isinstance(m, item)) if isinstance(item, type) else (lambda m: m is item)
            modules = {m: name for name, m in model.named_modules() if matches(m)}
            parameters = set()
        self.modules.update(modules)
        self.parameters.update(parameters)
        return bool(modules or parameters)


def refuse_unmatched(kept: list[Kept]) -> None:
    """An item of ``keep_fp32=`` that matches nothing in any of the models is a mistake worth an error."""
    unmatched = [item for item in kept[0].unmatched if all(item in one.unmatched for one in kept)] if kept else []
    if unmatched:
        shown = [type(item).__name__ if isinstance(item, nn.Module) else item for item in unmatched]
        raise ConfigurationError(
            f"keep_fp32 items {shown} match no module and no parameter. Give modules of the model, module types, or name "
            "patterns such as 'head' or 'blocks.*.gate' (see model.named_modules())."
        )


def bridge(module: nn.Module, lower_precision: torch.dtype) -> None:
    """Let a float32 module live among lower-precision ones: float32 in, ``lower_precision`` out."""
    if not takes_lower_precision_natively(module):
        module.__dict__[ACTIVATION_KEY] = lower_precision
        module.register_forward_pre_hook(_inputs_to_float32, with_kwargs=True)
        module.register_forward_hook(_outputs_to_activation_dtype)


def unbridge(module: nn.Module) -> None:
    """Undo `bridge`."""
    if module.__dict__.pop(ACTIVATION_KEY, None) is not None:
        for key in [k for k, hook in module._forward_pre_hooks.items() if hook is _inputs_to_float32]:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
        for key in [k for k, hook in module._forward_hooks.items() if hook is _outputs_to_activation_dtype]:
            del module._forward_hooks[key]


def _inputs_to_float32(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    return cast_floating(args, torch.float32), cast_floating(kwargs, torch.float32)


def _outputs_to_activation_dtype(module: nn.Module, args: tuple, output: Any) -> Any:
    return cast_floating(output, module.__dict__[ACTIVATION_KEY])
