"""What ``initialize`` accepts: the checks on models and optimizers, before anything is touched."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from .dtypes import CASTABLE, LOWER_PRECISION
from .errors import ConfigurationError
from .models import Kept, refuse_scripted, refuse_unmatched, refuse_what_no_call_keeps
from .plan import Plan

_OPTIMIZER_ATTRIBUTES = ("param_groups", "state", "step", "zero_grad")


def flatten(value: Any) -> list[Any]:
    """One thing, a list, a tuple or None, as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def can_be_tracked(thing: Any) -> bool:
    """Whether a session can hold ``thing`` weakly; with ``enabled=False`` anything may be passed."""
    try:
        weakref.ref(thing)
    except TypeError:
        return False
    return True


def uncompiled(model: Any) -> Any:
    """The model inside what ``torch.compile`` returned; anything else as it is."""
    compiled = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
    while isinstance(model, compiled):
        model = model._orig_mod
    return model


def models(value: Any) -> list[nn.Module]:
    """The models as a list. TypeError or `ConfigurationError` for anything that is not a bare, loaded module, once each."""
    found = [uncompiled(model) for model in flatten(value)]
    if not found:
        raise TypeError(
            "initialize() expects a model or a list or tuple of models, found none. For a part of a script that has no model use "
            "'with ampkit.session([], opt_level=\"O1\"):'."
        )
    for model in found:
        if not isinstance(model, nn.Module):
            raise TypeError(f"initialize() expects models (torch.nn.Module), found {_describe(model)}.")
        for name, module in model.named_modules():
            if isinstance(module, (DataParallel, DistributedDataParallel)):
                raise ConfigurationError(
                    f"The {f'module {name!r} of the model' if name else 'model'} is wrapped in {type(module).__name__}. Call "
                    "initialize() on the bare model, before wrapping, and wrap what it returns."
                )
        if isinstance(model, torch.jit.ScriptModule):
            raise ConfigurationError(
                "The model is a TorchScript module, whose operations are fixed. Call initialize() on the module before scripting."
            )
        if type(model).forward is nn.Module.forward and "forward" not in vars(model):
            raise ConfigurationError(
                f"The model is a {type(model).__name__}, which has no forward: nothing would be cast when its modules are called. "
                "Pass a list of the modules that are called instead: initialize(list(modules), optimizers, ...)."
            )
    _refuse_repeats(found, "model")
    return found


def optimizers(value: Any) -> list[Any]:
    """The optimizers as a list: anything with ``param_groups``, ``state``, ``step`` and ``zero_grad``, once each."""
    found = flatten(value)
    for optimizer in found:
        missing = [name for name in _OPTIMIZER_ATTRIBUTES if not hasattr(optimizer, name)]
        if missing:
            raise TypeError(
                f"initialize() expects optimizers, single or in a list or tuple; {_describe(optimizer)} has no "
                f"{', '.join(missing)}. Pass the optimizer as the second argument."
            )
    _refuse_repeats(found, "optimizer")
    return found


def closures(optimizer_list: list[Any], plan: Plan) -> None:
    """Refuse optimizers that evaluate their closure several times in a step, during which a dynamic loss scale may move."""
    for optimizer in optimizer_list:
        if isinstance(optimizer, torch.optim.LBFGS) and plan.has_dynamic_loss_scale:
            raise ConfigurationError(
                f"{type(optimizer).__name__} evaluates its closure several times in a step, and a dynamic loss scale may move in "
                "between. Use a static scale (loss_scale=128.0), or bfloat16 without one (opt_level='O4' or 'O5')."
            )


def weights(model_list: list[nn.Module], recast: set[torch.Tensor], optimizer_list: list[Any], plan: Plan) -> None:
    """Refuse weights that are not float32 where initialize makes the lower-precision copies itself.

    ``recast`` are those that a live session has cast and will give back. float64 parts are left alone at every level, but a
    model that has nothing else has nothing to cast.
    """
    for model in model_list:
        if not recast.issuperset((*model.parameters(), *model.buffers())):
            _refuse_lower_precision(model, recast)
            if {param.dtype for param in model.parameters()} == {torch.float64} and plan.opt_level != "O0":
                raise ConfigurationError(
                    f"All parameters of the model are float64, which {plan.opt_level} leaves alone: nothing would be cast. "
                    "Call model.float() first, or use opt_level='O0'."
                )
    known = {param for model in model_list for param in model.parameters()}
    for optimizer in optimizer_list:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.dtype in LOWER_PRECISION and param not in known:
                    raise ConfigurationError(
                        f"The optimizer holds a {param.dtype} parameter of shape {tuple(param.shape)} that is in none of the "
                        "models. Build the optimizer from float32 parameters of the models passed with it."
                    )


def scripted_parts(model_list: list[nn.Module], plan: Plan) -> None:
    """Refuse TorchScript submodules with weights where weights are cast.

    A script may hold a weight's dtype in its code, takes no hooks for what stays float32 in it, and none for ``state_dict``.
    """
    for model in model_list if plan.casts_weights else ():
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule) and _has_castable_tensors(module):
                raise ConfigurationError(
                    f"Module {name!r} of the model is a TorchScript module, whose operations are fixed: {plan.opt_level} cannot "
                    "cast its weights. Put the module that it was made from in its place, or use opt_level='O1' or 'O4', "
                    "which cast its calls and leave its weights float32."
                )


def _has_castable_tensors(module: nn.Module) -> bool:
    return any(tensor.dtype in CASTABLE for tensor in (*module.parameters(), *module.buffers()))


def kept_modules(model_list: list[nn.Module], plan: Plan) -> None:
    """Refuse items of ``keep_fp32=`` that name nothing in any of the models, or what the level cannot keep."""
    kept = [Kept(model, False, plan.keep_fp32) for model in model_list]
    refuse_unmatched(kept)
    refuse_scripted(kept)
    if plan.patch_torch_functions:
        refuse_what_no_call_keeps(kept, plan.opt_level)


def _refuse_lower_precision(model: nn.Module, recast: set[torch.Tensor]) -> None:
    for kind, named in (("Parameter", model.named_parameters()), ("Buffer", model.named_buffers())):
        for name, tensor in named:
            if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
                raise ConfigurationError(
                    f"{kind} {name!r} is not initialized yet (a lazy module). Run one forward pass before initialize()."
                )
            if tensor.dtype in LOWER_PRECISION and tensor not in recast:
                raise ConfigurationError(
                    f"{kind} {name!r} is {tensor.dtype}; initialize() expects float32 and makes the lower-precision copies "
                    "itself. Remove the .half() or .bfloat16() call (or the dtype= argument) before it."
                )


def _refuse_repeats(found: list[Any], kind: str) -> None:
    for index, thing in enumerate(found):
        if any(thing is other for other in found[:index]):
            raise ConfigurationError(
                f"The same {kind} ({type(thing).__name__}) was passed twice to initialize(), as number {index} again. Pass it once."
            )


def _describe(thing: Any) -> str:
    return f"{thing!r}" if isinstance(thing, (str, int, float, type(None))) else f"a {type(thing).__name__}"
