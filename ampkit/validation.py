"""Checks on the models and optimizers of ``initialize``, before anything is changed."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from .casting.tensors import params_of
from .devices import device_type_of
from .dtypes import CASTABLE, LOWER_PRECISION
from .errors import ConfigurationError, NotInitializedError
from .logs import logger
from .models.incoming import held_by
from .models.keep_fp32 import Kept
from .plan import Plan
from .registry import live_sessions, unwrapped
from .sharding import fsdp_modules, gathered, has_run, is_sharded, refuse_fsdp1

_OPTIMIZER_ATTRIBUTES = ("param_groups", "state", "step", "zero_grad", "__dict__")
_CALL = (
    "Write initialize(model, optimizer, opt_level=...), or lists of objects of both: initialize(models, optimizers)."
)

_ORDER_OF_SHARDING = (
    "The order is: fully_shard, then the optimizer over the sharded parameters, then initialize(model, optimizer, ...)."
)


def flatten(value: Any) -> list[Any]:
    """Return a list: the items of a list or tuple, none for None, and anything else as its only item."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def uncompiled(model: Any) -> Any:
    """The model that ``torch.compile`` has wrapped; anything else unchanged."""
    compiled = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
    while isinstance(model, compiled):
        model = model._orig_mod
    return model


def models(value: Any) -> list[nn.Module]:
    """Return the models as a list. Raise TypeError or `ConfigurationError` for anything but bare, loaded modules, once each."""
    modules = [uncompiled(model) for model in flatten(value)]
    if not modules:
        raise TypeError(
            "initialize() expects a model or a list or tuple of models, found none. For a part of a script that has no model use "
            "torch.autocast."
        )
    for model in modules:
        if not isinstance(model, nn.Module):
            raise TypeError(f"initialize() expects models (torch.nn.Module), found {_describe(model)}. {_CALL}")
        for name, module in model.named_modules():
            if isinstance(module, (DataParallel, DistributedDataParallel)):
                raise ConfigurationError(
                    f"The {f'module {name!r} of the model' if name else 'model'} is wrapped in {type(module).__name__}. Call "
                    "initialize() on the bare model, before wrapping, and wrap what it returns."
                )
    _refuse_repeats(modules, "model")
    return modules


def optimizers(value: Any) -> list[Any]:
    """Return the optimizers as a list: objects with ``param_groups``, ``state``, ``step`` and ``zero_grad``, once each."""
    optimizer_list = list(map(unwrapped, flatten(value)))
    for optimizer in optimizer_list:
        missing = [name for name in _OPTIMIZER_ATTRIBUTES if not hasattr(optimizer, name)]
        if missing:
            raise TypeError(
                f"initialize() expects optimizers, single or in a list or tuple; {_describe(optimizer)} has no "
                f"{', '.join(missing)}. {_CALL}"
            )
        if getattr(optimizer, "step_in_backward", False):
            raise ConfigurationError(
                f"{_describe(optimizer)} with step_in_backward=True steps before a session could look at the gradients. Leave one "
                "of the two out: it trains a model in lower precision by itself."
            )
    _refuse_repeats(optimizer_list, "optimizer")
    return optimizer_list


def optimizer(thing: Any, function: str) -> Any:
    """Return the optimizer that ``function`` was given, without wrappers of frameworks. Raise TypeError for anything else."""
    inner = unwrapped(thing)
    if not hasattr(inner, "param_groups"):
        raise TypeError(
            f"{function} expects the optimizer that was initialized, found {_describe(thing)}. Write "
            f"{function}(optimizer, ...), once for each optimizer."
        )
    return inner


def not_initialized(optimizer: Any) -> NotInitializedError:
    """The error for an optimizer that no live session owns."""
    if not hasattr(optimizer, "param_groups"):
        fault = f"scale_loss was given a {type(optimizer).__name__} where it expects the optimizer. The loss comes first: with "
        advice = "ampkit.scale_loss(loss, optimizer) as scaled_loss."
    elif not live_sessions:
        fault = "scale_loss was used before initialize, or after close. Call "
        advice = "model, optimizer = ampkit.initialize(model, optimizer, opt_level=...) first."
    else:
        fault = f"This {type(optimizer).__name__} was not passed to initialize(), or its session was closed. Pass every optimizer "
        advice = "that scale_loss will see: ampkit.initialize(model, [optimizer, ...])."
    return NotInitializedError(fault + advice)


def check(
    model_list: list[nn.Module], optimizer_list: list[Any], plan: Plan, recast: set[torch.Tensor], process_group: Any
) -> None:
    """Refuse models and optimizers that do not fit the plan. ``recast`` are tensors whose dtype a live session will restore."""
    if process_group is not None and not isinstance(process_group, torch.distributed.ProcessGroup):
        raise TypeError(
            f"initialize() expects process_group= as a torch.distributed.ProcessGroup, found {_describe(process_group)}. Pass "
            "torch.distributed.group.WORLD for all processes, or what torch.distributed.new_group() returned."
        )
    for optimizer in optimizer_list:
        _refuse_unfit_optimizer(optimizer, plan, device_type_of(model_list))
    only_calls = plan.patch_torch_functions and plan.scope == "process" and not plan.cast_model_outputs
    if not only_calls and any(isinstance(model, torch.jit.ScriptModule) for model in model_list):
        raise ConfigurationError(
            "The model is a TorchScript module, whose forward cannot be wrapped. Call initialize() on the module before scripting, "
            "or use opt_level='O1' or 'O4', which cast the calls inside of it."
        )
    trained = held_by(optimizer_list)
    for model in model_list:
        if not recast.issuperset((*model.parameters(), *model.buffers())):
            _refuse_unfit_tensors(model, recast, plan)
            _refuse_unfit_weights(model, trained, plan)
    known = {param for model in model_list for param in model.parameters()}
    for param in [param for optimizer in optimizer_list for param in params_of(optimizer)]:
        if param.dtype in LOWER_PRECISION and param not in known:
            raise ConfigurationError(
                f"The optimizer holds a {param.dtype} parameter of shape {tuple(param.shape)} that is in none of the models. Build "
                "the optimizer from parameters of the models passed with it."
            )
    kept = [Kept(model, plan) for model in model_list]
    _refuse_kept_modules(kept, plan)
    for choice in kept:
        _refuse_sharded(choice, known, optimizer_list, plan)
    _warn_of_strangers(known, trained, plan)


def _refuse_unfit_optimizer(optimizer: Any, plan: Plan, device_type: str) -> None:
    if isinstance(optimizer, torch.optim.LBFGS) and plan.has_dynamic_loss_scale:
        raise ConfigurationError(
            f"{type(optimizer).__name__} evaluates its closure several times in a step, and a dynamic loss scale may move in "
            "between. Use a static scale (loss_scale=128.0), or bfloat16 without one (opt_level='O4' or 'O5')."
        )
    zero = getattr(sys.modules.get("torch.distributed.optim"), "ZeroRedundancyOptimizer", ())
    if plan.master_weights and isinstance(optimizer, zero):
        raise ConfigurationError(
            "ZeroRedundancyOptimizer sends weights to the other processes after its step, and what they lack of float32 at "
            f"{plan.opt_level} would be lost. Use O1, O4 or O5, whose weights are float32; or shard parameters and "
            "optimizer state with FSDP2: ampkit.parallel.fully_shard(module, opt_level=...)."
        )
    if getattr(optimizer, "needs_whole_tensors", False) and any(map(is_sharded, params_of(optimizer))):
        raise ConfigurationError(
            f"{type(optimizer).__name__} needs the norm of each whole parameter, and these are sharded over processes. Use an "
            "optimizer that goes element by element: torch.optim.AdamW, ampkit.optimizers.FusedAdam, FusedSGD."
        )
    fused = isinstance(optimizer, torch.optim.SGD) and any(group.get("fused") for group in optimizer.param_groups)
    steps_in_lower = plan.casts_weights and not plan.master_weights and device_type == "cpu"
    if fused and steps_in_lower:
        raise ConfigurationError(
            f"SGD(fused=True) of torch 2.11 leaves most {plan.cast_model_type} weights on the CPU as they are. "
            "Use fused=False, ampkit.optimizers.FusedSGD, or O2 or O5, whose weights step in float32."
        )


def _warn_of_strangers(known: set[torch.Tensor], updated: set[torch.Tensor], plan: Plan) -> None:
    """Refuse optimizers that, taken together, update a copy of the models, and warn of those that train none of their parameters.

    With Apex's policy both are warnings. A tensor that is no Parameter, such as a picture, may be trained through a model.
    """
    trainable = {param for param in known if param.requires_grad}
    is_right = not updated or not trainable or not trainable.isdisjoint(updated)
    if is_right or not all(isinstance(param, nn.Parameter) for param in updated):
        return
    is_copy = sorted(param.shape for param in updated) == sorted(param.shape for param in known)
    message = (
        "The optimizer given to initialize() updates none of the trainable parameters of the model, which will not learn"
        f"{', but those of another one with the same shapes' if is_copy else ''}. Build it over this very model, after its last "
        "change: torch.optim.Adam(model.parameters())."
    )
    if is_copy and plan.policy.base != "apex":
        raise ConfigurationError(message)
    logger.warning(message)


def _refuse_sharded(choice: Kept, known: set[torch.Tensor], optimizer_list: list[Any], plan: Plan) -> None:
    """Refuse shards that FSDP2 does not gather in the dtype that the level computes in, and optimizers over other parameters."""
    model = choice.model
    refuse_fsdp1(model)
    shards = list(gathered(model))
    by_fsdp = {id(shard.param) for shard in shards}
    for name, param in model.named_parameters() if plan.casts_weights else ():
        if is_sharded(param) and id(param) not in by_fsdp:  # its rest would have to be sharded, too
            raise ConfigurationError(
                f"Parameter {name!r} lies on several processes (a DTensor, as parallelize_module makes it), and "
                f"{plan.opt_level} casts whole weights. Use O1 or O4, which cast calls, or shard with "
                "ampkit.parallel.fully_shard."
            )
    for shard in shards:
        dtype, is_kept = shard.dtype, not plan.casts_weights or shard.param in choice.parameters
        wanted = torch.float32 if is_kept else plan.cast_model_type
        casts_either = plan.has_narrow_results and not plan.casts_weights and dtype is plan.lower_precision
        if shard.param.dtype in CASTABLE and (dtype or torch.float32) is not wanted and not casts_either:
            clash = f"FSDP2 gathers {shard.name!r} in {dtype or 'its own dtype'}, and {plan.opt_level} computes with it in {wanted}"
            advice = " and casts call by call. Shard with no mp_policy: fully_shard(module); or choose O2 or O5."
            if plan.casts_weights:
                advice = (
                    f"{' (norms need groups of their own)' if is_kept else ''}. A policy cannot be changed after sharding. Shard "
                    f"with ampkit.parallel.fully_shard(module, opt_level={plan.opt_level!r}), block by block and then the model."
                )
            raise ConfigurationError(clash + advice)
    if any(param.dtype in LOWER_PRECISION for param in model.parameters()) and has_run(model):
        raise ConfigurationError(
            "The sharded model is in lower precision and has run forward already, which has settled what FSDP2 gathers and "
            "reduces. Call initialize() before the first forward, or shard a float32 model."
        )
    for optimizer in optimizer_list if shards else ():
        params = params_of(optimizer)
        if params and known.isdisjoint(params):
            raise ConfigurationError(
                f"The {type(optimizer).__name__} holds none of the parameters of the models, one of which is sharded: "
                f"fully_shard put others in their places. {_ORDER_OF_SHARDING}"
            )


def sharded_after_initialize(module: nn.Module) -> ConfigurationError:
    """The error for a module of an initialized model that was sharded too late."""
    return ConfigurationError(
        f"fully_shard was called on a {type(module).__name__} after initialize(). It puts other Parameters in the model, and the "
        f"optimizer would go on with those that were there before. {_ORDER_OF_SHARDING}"
    )


def changed_since(model_list: list[nn.Module], sharded_at_first: Collection[nn.Module], plan: Plan) -> None:
    """Refuse, at the first block, models that were sharded since `initialize`, and optimizers that step in the backward pass."""
    for model in model_list:
        refuse_fsdp1(model)
        since = [module for module in fsdp_modules(model) if module not in sharded_at_first]
        if since:
            raise sharded_after_initialize(since[0])
        steps_inside = any(hasattr(param, "_in_backward_optimizers") for param in model.parameters())
        if steps_inside and (plan.loss_scale != 1.0 or plan.master_weights):
            raise ConfigurationError(
                "An optimizer was put into the backward pass of this model (_apply_optimizer_in_backward): it would step with "
                f"gradients at the loss scale, or in the lower precision of {plan.opt_level}'s weights. Use O4, O1 with "
                "loss_scale=1.0, or step after the scale_loss block."
            )


def _refuse_kept_modules(kept: list[Kept], plan: Plan) -> None:
    """Refuse items of ``keep_fp32=`` that match nothing in any model, or match TorchScript modules."""
    unmatched = [item for item in plan.keep_fp32 if all(item in choice.unmatched for choice in kept)]
    if unmatched:
        shown = ", ".join(_describe(item) if isinstance(item, nn.Module) else repr(item) for item in unmatched)
        raise ConfigurationError(
            f"keep_fp32: {shown} matches no module and no parameter. Give modules of the model, module types (without quotes), or "
            "name patterns such as 'head' or 'blocks.*.gate' (see model.named_modules())."
        )
    named = [(module, name) for choice in kept for module, name in choice.named.items()]
    names = [name for module, name in named if isinstance(module, torch.jit.ScriptModule)]
    if names:
        raise ConfigurationError(
            f"keep_fp32 names TorchScript modules ({', '.join(names)}). Name the module that calls them, or give initialize() the "
            "module as it was before scripting."
        )


def _refuse_unfit_tensors(model: nn.Module, recast: set[torch.Tensor], plan: Plan) -> None:
    """Refuse tensors without values and second lower precisions."""
    first: tuple[str, torch.dtype] | None = None
    named = [(f"Parameter {name!r}", param) for name, param in model.named_parameters()]
    for name, tensor in (*named, *((f"Buffer {name!r}", buffer) for name, buffer in model.named_buffers())):
        if tensor.is_meta and plan.casts_weights:
            raise ConfigurationError(
                f"{name} is on the meta device and holds no values, and {plan.opt_level} makes masters of them. Give the "
                "model its weights first: model.to_empty(device=...), then load_state_dict()."
            )
        if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
            raise ConfigurationError(
                f"{name} is not initialized yet (a lazy module). Run one forward pass before initialize()."
            )
        if tensor.dtype not in LOWER_PRECISION or tensor in recast:
            continue
        if plan.lower_precision_weights == "refuse":
            raise ConfigurationError(
                f"{name} is {tensor.dtype}; initialize() expects float32 and makes the lower-precision copies "
                "itself. Remove the .half() or .bfloat16() call (or the dtype= argument) before it."
            )
        first = first or (name, tensor.dtype)
        if tensor.dtype is not first[1] and plan.lower_precision_weights == "float32" and plan.casts_weights:
            raise ConfigurationError(
                f"{first[0]} is {first[1]} and {name} is {tensor.dtype}: initialize() takes models in one lower "
                "precision, float32 parts beside it. Call model.float() first, which loses nothing, or load it with one dtype."
            )


def _refuse_unfit_weights(model: nn.Module, trained: set[torch.Tensor], plan: Plan) -> None:
    """Refuse quantised weights that would be stored or trained. Integers of more bytes, and parts in float64, are left alone."""
    lowers_all = plan.lowers_all or (plan.casts_weights and not trained)
    for name, param in model.named_parameters():
        is_narrow = param.is_quantized or (param.dtype.itemsize == 1 and param.dtype is not torch.bool)
        # A class that keeps its values in other tensors, as torchao's do; not a DTensor, nor a fake tensor.
        is_wrapper = type(param).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        is_wrapper = is_wrapper and not is_sharded(param) and not isinstance(param, FakeTensor)
        if (lowers_all or param in trained) and (is_narrow or (plan.casts_weights and is_wrapper)):
            kind = param.dtype if is_narrow else f"a {type(param).__name__}, which stores its values in its own way"
            raise ConfigurationError(
                f"Parameter {name!r} is {kind}: initialize() expects floating-point weights, and cannot train quantised ones. "
                "Leave it out of the optimizer: every level but O3 then leaves such weights as they are. Or load the model without "
                "quantisation, or make it a buffer (register_buffer) if it is no weight."
            )
    if {param.dtype for param in model.parameters()} == {torch.float64} and plan.opt_level != "O0":
        raise ConfigurationError(
            f"All parameters of the model are float64, which {plan.opt_level} leaves alone: nothing would be cast. Call "
            "model.float() first, or use opt_level='O0'."
        )


def _refuse_repeats(things: list[Any], kind: str) -> None:
    for index, thing in enumerate(things):
        if any(thing is other for other in things[:index]):
            raise ConfigurationError(
                f"The same {kind} ({type(thing).__name__}) was passed twice to initialize(), as number {index} again. Pass it once."
            )


def _describe(thing: Any) -> str:
    return f"{thing!r}" if isinstance(thing, (str, int, float, type(None))) else f"a {type(thing).__name__}"
