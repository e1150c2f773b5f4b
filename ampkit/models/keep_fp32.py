"""Which modules stay float32, and how they live among lower-precision activations.

What ``keep_fp32=`` names runs in float32 at every level and hands on float32: it gets a forward of its own (`KEPT` in
forward.py), and where the weights of a model are cast, those around it are given a hook that casts float32 inputs down.

Norm layers and what torch has no lower precision for keep float32 weights only, and hand lower precision on. Batch and instance
norm take lower-precision activations with float32 weights natively; the others are given hooks that hand them float32 inputs
and cast their outputs back. Copies and close leave out hooks by the module that they are functions of.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _Orthogonal
from torch.nn.utils.parametrize import ParametrizationList

from ..casting.tensors import cast_floating
from ..dtypes import LOWER_PRECISION
from ..errors import ConfigurationError
from ..sharding import fsdp_modules
from .classes import own_class

ACTIVATION_KEY = "_ampkit_activation_dtype"

_NORM_TYPES = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm, nn.CrossMapLRN2d, _NormBase)
_QUANTISERS = ("torch.ao.quantization.fake_quantize.FakeQuantizeBase", "torch.ao.quantization.observer.ObserverBase")
_ROW = 16  # fewer numbers may be in order by chance
_NORM_SUFFIXES = ("Norm", "Norm1d", "Norm2d", "Norm3d")


def is_norm(module: nn.Module) -> bool:
    """Every norm class of torch.nn and its subclasses, and classes named like one (``LlamaRMSNorm``)."""
    return isinstance(module, _NORM_TYPES) or type(module).__name__.endswith(_NORM_SUFFIXES)


def needs_float32(module: nn.Module) -> bool:
    """Whether torch has no lower precision for it.

    Orthogonal parametrizations: in bfloat16 two of the maps have no kernels, and the third gives NaN. Fake quantisation: its
    kernels write to float32 ranges and scales only.
    """
    if any(f"{cls.__module__}.{cls.__name__}" in _QUANTISERS for cls in type(module).__mro__):
        return True
    return isinstance(module, ParametrizationList) and any(isinstance(one, _Orthogonal) for one in module)


def takes_lower_precision_natively(module: nn.Module) -> bool:
    """torch's batch norm kernels compute in float32 from lower-precision input with float32 weights.

    A subclass with a forward of its own may do anything, and is not trusted to.
    """
    home = getattr(type(module).forward, "__module__", "")
    return isinstance(module, _NormBase) and home.startswith(("torch.nn.", "ampkit."))


class AsTheyAre:
    """The choice that keeps every float32 tensor: only weights that came in lower precision get a float32 value behind them."""

    def covers(self, module: nn.Module) -> bool:
        return False

    def keeps(self, module: nn.Module, name: str, tensor: torch.Tensor, lower_precision: torch.dtype) -> bool:
        return True


class Kept:
    """The choice for one model: ``modules`` (with everything inside them) and single parameters and buffers by identity.

    ``named`` are those of the modules that ``keep_fp32=`` names, and ``unmatched`` are its items that name nothing.
    """

    def __init__(self, model: nn.Module, keep_norms: bool, keep_fp32: tuple[Any, ...]) -> None:
        self.modules: dict[nn.Module, str] = {}
        self.named: dict[nn.Module, str] = {}
        self.parameters: set[torch.Tensor] = set()
        self.unmatched: list[Any] = []
        self.model = model
        for name, module in model.named_modules():
            if needs_float32(module) or (keep_norms and is_norm(module)):
                self.modules[module] = name
        for item in keep_fp32:
            if not self._keep(item):
                self.unmatched.append(item)
        self._name_attentions()
        self.modules.update(self.named)
        self._keep_tied()
        self._inside = {inner for module in self.modules for inner in module.modules()}

    def covers(self, module: nn.Module) -> bool:
        return module in self._inside

    def keeps(self, module: nn.Module, name: str, tensor: torch.Tensor, lower_precision: torch.dtype) -> bool:
        """Whether a float32 tensor of the module stays as it is. Frequencies of rotary embeddings do: they meet large positions."""
        if self.covers(module) or tensor in self.parameters or name.endswith("inv_freq"):
            return True
        return name in module._buffers and _loses_its_steps(tensor, lower_precision)

    def bridged(self) -> list[nn.Module]:
        """Kept modules that hand on lower precision: norms and the like, outside of those that run in float32."""
        in_float32 = set(self.in_float32(hand_on_norms=True))
        nested = {inner for module in self.modules for inner in module.modules() if inner is not module}
        return [m for m in self.modules if m not in nested and m not in in_float32 and _has_forward(m)]

    def in_float32(self, hand_on_norms: bool) -> list[nn.Module]:
        """The modules that ``keep_fp32=`` names and all inside them: each may be called by itself, containers never are.

        With ``hand_on_norms`` norms that are named by themselves are left out, as are parametrizations.
        """
        found: dict[nn.Module, None] = {}
        for root in self.named:
            if hand_on_norms and (is_norm(root) or isinstance(root, ParametrizationList)):
                continue
            computed = {m for one in root.modules() if isinstance(one, ParametrizationList) for m in one.modules()}
            for module in root.modules():
                if _has_forward(module) and (module is root or module not in computed):
                    found[module] = None
        return list(found)

    def mixes_precisions(self) -> bool:
        """Whether float32 may reach weights in lower precision, in a model whose weights are cast."""
        norms = {inner for module in self.modules if is_norm(module) for inner in module.modules()}
        in_norms = {param for module in norms for param in module.parameters(recurse=False)}
        return bool(self.in_float32(hand_on_norms=True) or self.parameters - in_norms)

    def alone(self) -> list[str]:
        """Names of parameters that are to be kept although no module around them is."""
        inside = {inner for module in self.in_float32(hand_on_norms=False) for inner in module.modules()}
        return [
            f"{prefix}.{name}" if prefix else name
            for prefix, module in self.model.named_modules()
            if module not in inside
            for name, param in module.named_parameters(recurse=False, remove_duplicate=False)
            if param in self.parameters or module in self.named
        ]

    def scripted(self) -> list[str]:
        """Names of modules that are to be kept and have no forward in Python."""
        return [name for module, name in self.named.items() if isinstance(module, torch.jit.ScriptModule)]

    def _keep_tied(self) -> None:
        """A tensor has one dtype: modules that share a weight with a kept one are kept as well."""
        found = bool(self.modules)
        while found:
            inside = {inner for module in self.modules for inner in module.modules()}
            tensors = {param for module in inside for param in module.parameters(recurse=False)}
            found = {
                module: name
                for name, module in self.model.named_modules()
                if module not in inside and any(param in tensors for param in module.parameters(recurse=False))
            }
            self.modules.update(found)

    def _keep(self, item: Any) -> bool:
        if isinstance(item, str):
            modules, parameters = self._matching(item)
        else:
            matches = (lambda m: isinstance(m, item)) if isinstance(item, type) else (lambda m: m is item)
            modules = {m: name for name, m in self.model.named_modules() if matches(m)}
            parameters = set()
        self.named.update(modules)
        self.parameters.update(parameters)
        return bool(modules or parameters)

    def _matching(self, pattern: str) -> tuple[dict[nn.Module, str], set[torch.Tensor]]:
        """Modules and parameters by name. Who names all that is in a module, ``"head.*"``, names the module."""
        model = self.model
        modules = {m: name for name, m in model.named_modules() if name and fnmatch.fnmatchcase(name, pattern)}
        every = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        parameters = {tensor for name, tensor in every if fnmatch.fnmatchcase(name, pattern)}
        for name, module in model.named_modules():
            own = list(module.parameters(recurse=False))
            children = [child for child in module.children() if child not in modules]
            if own and not children and parameters.issuperset(own):
                modules[module] = name
        return modules, parameters

    def _name_attentions(self) -> None:
        """torch's attention never calls its ``out_proj``: who names that names the attention."""
        for name, module in self.model.named_modules():
            if isinstance(module, nn.MultiheadAttention) and module.out_proj in self.named:
                self.named[module] = name


def frozen_twins(models: Sequence[nn.Module], trained: set[torch.Tensor]) -> dict[nn.Module, tuple[str, str]]:
    """Modules that may be averages of trained ones, each with its name and its twin's.

    Nothing in them is trained, and a trained module of the same class and shapes stands beside them: in the same module, or in the
    list of models. Blocks of a list are no twins: that some of them are frozen means no more than that.
    """
    found: dict[nn.Module, tuple[str, str]] = {}
    families = [{f"model {i}": model for i, model in enumerate(models)}]
    for model in models:
        for module in model.modules():
            if not isinstance(module, (nn.ModuleList, nn.Sequential)):
                families.append({name: child for name, child in module._modules.items() if child is not None})
    for family in families:
        twins: dict[Any, str] = {}
        frozen: list[tuple[Any, str]] = []
        for name, module in family.items():
            params = list(module.named_parameters())
            if not params or not _has_forward(module) or fsdp_modules(module):
                continue
            key = (own_class(type(module)), tuple((inner, param.shape) for inner, param in params))
            if any(param in trained for _, param in params):
                twins[key] = name
            elif not any(param.requires_grad for _, param in params):
                frozen.append((key, name))
        found.update({family[name]: (name, twins[key]) for key, name in frozen if key in twins})
    return found


def _loses_its_steps(buffer: torch.Tensor, lower_precision: torch.dtype) -> bool:
    """Whether this is a row of numbers that rise, or fall, or turn once, whose distances lower precision does not hold.

    The noise levels of a diffusion, times, positions, the edges of bins: 0.9999 becomes 1, and what divides by the rest is NaN.
    """
    if buffer.is_meta or buffer.dim() != 1 or len(buffer) < _ROW:
        return False
    steps, rounded = buffer.diff(), buffer.to(lower_precision).float().diff()
    directions = steps.sign()[steps != 0]
    in_order = (directions[1:] != directions[:-1]).sum() <= 1
    return bool(in_order & ((rounded - steps).abs() > steps.abs() / 16).any())


def _has_forward(module: nn.Module) -> bool:
    """Whether calls reach the module: not a ModuleList, not what torch.compile or torch.jit put around one."""
    if isinstance(module, torch.jit.ScriptModule) or "_orig_mod" in module._modules:
        return False
    return type(module).forward is not nn.Module.forward


def refuse_unmatched(kept: list[Kept]) -> None:
    """An item of ``keep_fp32=`` that matches nothing in any of the models is a mistake worth an error."""
    unmatched = [item for item in kept[0].unmatched if all(item in one.unmatched for one in kept)] if kept else []
    if unmatched:
        shown = ", ".join(
            f"a {type(item).__name__}" if isinstance(item, nn.Module) else repr(item) for item in unmatched
        )
        raise ConfigurationError(
            f"keep_fp32: {shown} matches no module and no parameter.{_near(unmatched[0], kept)} Give modules of the model, module "
            "types, or name patterns such as 'head' or 'blocks.*.gate' (see model.named_modules())."
        )


def _near(item: Any, kept: list[Kept]) -> str:
    """What was probably meant by an item that matches nothing."""
    modules = {name: module for one in kept for name, module in one.model.named_modules() if name}
    if not isinstance(item, str):
        return " That one belongs to another model." if isinstance(item, nn.Module) else ""
    if any(type(module).__name__ == item for module in modules.values()):
        return f" {item} is a type: give the class itself, without quotes."
    near = difflib.get_close_matches(item, modules, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def refuse_what_no_call_keeps(kept: list[Kept], level: str) -> None:
    """Where calls are cast and not weights, only modules can be kept, by what happens around their forward."""
    for one in kept:
        alone = one.alone()
        if alone:
            around = list(dict.fromkeys(name.rpartition(".")[0] for name in alone))
            if all(around):
                advice = f"Name the modules whose operations use them instead: keep_fp32={around}."
            else:
                advice = (
                    "Compute with them inside 'with torch.autocast(device_type, enabled=False):', or in a function under "
                    "@ampkit.float_function."
                )
            raise ConfigurationError(
                f"keep_fp32 names single parameters ({', '.join(alone)}). {level} casts the arguments of calls and leaves all "
                f"weights float32, so there is nothing to keep about a parameter alone. {advice}"
            )


def refuse_scripted(kept: list[Kept]) -> None:
    """The forward of a scripted module is not called from Python, and nothing can be put around it."""
    names = [name for one in kept for name in one.scripted()]
    if names:
        raise ConfigurationError(
            f"keep_fp32 names TorchScript modules ({', '.join(names)}). Name the module that calls them, or give initialize() the "
            "module as it was before scripting."
        )


def bridge(module: nn.Module, lower_precision: torch.dtype) -> None:
    """Let float32 weights live among lower-precision activations: float32 in, ``lower_precision`` out."""
    if not takes_lower_precision_natively(module):
        module.__dict__[ACTIVATION_KEY] = lower_precision
        module.register_forward_pre_hook(_inputs_to_float32, with_kwargs=True)
        module.register_forward_hook(_outputs_to_activation_dtype)


def take_inputs_down(module: nn.Module) -> None:
    """Have the module's inputs cast to the precision of its own weights, where that is lower."""
    if _inputs_to_own_precision not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_inputs_to_own_precision, with_kwargs=True)


def have_it_called(module: nn.Module) -> None:
    """torch's TransformerEncoderLayer calls its parts, instead of one kernel in their place, where one of them has a hook."""
    module.register_forward_pre_hook(_no_kernel_in_its_place)


def own_precision(module: nn.Module) -> torch.dtype | None:
    """The lower precision of the module's own weights, if they have one: parameters, parametrized ones, running statistics."""
    # DataParallel's replicas hold their parameters apart.
    for param in (module.__dict__.get("_former_parameters") or module._parameters).values():
        if param is not None and param.dtype in LOWER_PRECISION:
            return param.dtype
    parametrizations = module._modules.get("parametrizations")
    if parametrizations is not None:
        for one in parametrizations._modules.values():
            if ACTIVATION_KEY in one.__dict__:
                return one.__dict__[ACTIVATION_KEY]
            dtype = own_precision(one)
            if dtype is not None:
                return dtype
    if isinstance(module, _NormBase) and module.running_mean is not None and module.weight is None:
        return module.running_mean.dtype if module.running_mean.dtype in LOWER_PRECISION else None
    return None


def _inputs_to_float32(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    return cast_floating(args, torch.float32), cast_floating(kwargs, torch.float32)


def _outputs_to_activation_dtype(module: nn.Module, args: tuple, output: Any) -> Any:
    return cast_floating(output, module.__dict__[ACTIVATION_KEY])


def _inputs_to_own_precision(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    dtype = own_precision(module)
    return (args, kwargs) if dtype is None else (cast_floating(args, dtype), cast_floating(kwargs, dtype))


def _no_kernel_in_its_place(module: nn.Module, args: tuple) -> None:
    """Its being there is all that it does."""
