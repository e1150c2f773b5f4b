"""What is done to the models of a session, in order: weights are cast, what is kept gets its hooks, forwards get their shells.

Each step has its undo. Weights are cast in place: a parameter stays the same object, and what it lacks of its float32 value
lies beside it (`Float32Value`). Which of the rooms beside this one are asked, a plan says here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..dtypes import CASTABLE
from ..logs import logger
from ..patching import Undo
from ..sharding import fsdp_modules
from . import direct_calls, forward, keep_fp32, layers, operators, sharded
from .copies import RECORD_KEY, need_no_plain_copies, remove_hooks
from .float32_values import Float32Value, Loans, put_gradient
from .forward import ForwardCasts
from .forward_scope import cast_submodules
from .keep_fp32 import ACTIVATION_KEY, Kept
from .records import CastModel, WeightRecord, lower_entries, own_tensors, record_of
from .state_dicts import go_by_record

Plan = Any  # plan.py's, which stands above this room
# What was cast, as it was, and its gradient: until all is prepared, so that what fails is undone exactly.
Originals = dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor | None]]


def prepare_models(
    models: Sequence[nn.Module], plan: Plan, loans: Loans, trained: set[torch.Tensor], originals: Originals, undo: Undo
) -> dict[torch.Tensor, Float32Value]:
    """Have these models compute as the plan says; returns the float32 value behind each tensor that was cast.

    ``trained`` are the parameters of the optimizers. ``originals`` receives what was cast.
    """
    values: dict[torch.Tensor, Float32Value] = {}
    keeps = plan.casts_weights or (plan.patch_torch_functions and plan.keep_fp32)
    twins = keep_fp32.frozen_twins(models, trained) if plan.casts_weights and plan.master_weights else {}
    keep = (*plan.keep_fp32, *twins)
    kept = [Kept(model, bool(plan.keep_batchnorm_fp32), keep) for model in models] if keeps else []

    def restore(model: nn.Module) -> None:
        restore_weights(model, originals)

    def cast(model: nn.Module, precision: torch.dtype, choice: Any, is_sharded: bool = False) -> None:
        whole = CastModel(precision, loans, is_sharded)
        _cast_weights(model, whole, choice, bool(plan.master_weights), values, originals)

    for model in models:
        undo.if_alive(forward.uninstall, model)
        if plan.casts_weights:
            undo.if_alive(restore, model)
    if plan.casts_weights:
        for model, choice in zip(models, kept):
            cast(model, plan.cast_model_type, choice, bool(fsdp_modules(model)))
            _have_inputs_cast(model, choice, plan)
    elif plan.master_weights:
        for model in models:
            if (dtype := direct_calls.precision_in(model)) is not None:
                undo.if_alive(restore, model)
                cast(model, dtype, keep_fp32.AsTheyAre())
    _log_kept(kept, plan)
    if twins and plan.verbosity >= 1:
        pairs = ", ".join(f"{own} (of {twin})" for own, twin in twins.values())
        logger.info("Kept in float32, as averages that no optimizer trains: %s", pairs)
    _shell_forwards(models, kept, plan, undo)
    return values


def _cast_weights(
    model: nn.Module,
    whole: CastModel,
    kept: Any,
    has_masters: bool,
    values: dict[torch.Tensor, Float32Value],
    originals: Originals,
) -> None:
    """Cast everything that is not kept, in place. Tied weights share one value, also between models.

    Of a model that FSDP2 shards only buffers are cast.
    """
    too_large: list[str] = []
    for prefix, module in model.named_modules():
        # Scripted modules have no weights here: see validation.py.
        if RECORD_KEY in module.__dict__ or isinstance(module, torch.jit.ScriptModule):
            continue
        record = WeightRecord(whole, in_float32=kept.covers(module))
        go_by_record(module, record)  # first, so that what fails halfway is undone
        for name, tensor in own_tensors(module):
            is_parameter = name in module._parameters
            if tensor.dtype not in CASTABLE or (whole.sharded and is_parameter):  # float64 and complex are never cast
                continue
            if tensor.dtype is torch.float32 and kept.keeps(module, name, tensor, whole.lower_precision):
                whole.kept[id(tensor)] = tensor
                continue
            if tensor not in values:
                originals[tensor] = (tensor.data, tensor.grad)
                values[tensor] = _cast(tensor, whole, has_masters)
                if _exceeds(originals[tensor][0], whole.lower_precision):
                    too_large.append(f"{prefix}.{name}" if prefix else name)
            if is_parameter:
                whole.add(tensor, values[tensor])
            else:
                record.buffers[name] = values[tensor]
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    if too_large:
        logger.warning(
            "%s holds values above %g, the largest that %s has (%d tensors do): they are that now. Use bfloat16 (O5), or "
            "keep_fp32= for the module.",
            too_large[0],
            torch.finfo(whole.lower_precision).max,
            whole.lower_precision,
            len(too_large),
        )


def _cast(tensor: torch.Tensor, whole: CastModel, has_master: bool) -> Float32Value:
    """Cast a tensor in place. Where it ``has_master``, a rest keeps its float32 value, and its gradient stays float32."""
    entry, gradient = Float32Value(whole.loans), tensor.grad
    if has_master:
        lower = entry.split(tensor.detach().float(), whole.lower_precision)
    else:
        lower = tensor.detach().to(whole.lower_precision)
        gradient = None if gradient is None else gradient.to(whole.lower_precision)
    # All memory is there: what follows does not fail.
    tensor.grad, tensor.data = None, lower
    put_gradient(tensor, gradient)
    return entry


def _exceeds(original: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether there are finite values for which ``dtype`` has none. Of bfloat16 there are next to none."""
    if dtype is not torch.float16 or original.is_meta:
        return False
    return bool((original.isfinite() & (original.abs() > torch.finfo(dtype).max)).any())


def restore_weights(model: nn.Module, originals: Originals) -> None:
    """Undo the casts: the same parameter objects, float32, with the values that are behind them, and no hook of ours."""
    record = record_of(model)
    if record is not None:
        record.whole.loans.end(refuses=False)
    every = record.whole.cast_parameters() if record is not None else ()  # also of layers that a script has exchanged
    for tensor, entry in dict([*lower_entries(model), *every]).items():
        is_as_cast = record is None or tensor.dtype is record.whole.lower_precision
        value = entry.current(tensor) if is_as_cast else tensor.detach().float()
        value, gradient = originals.get(tensor) or (value, tensor.grad)
        tensor.grad, tensor.data = None, value
        if isinstance(tensor, nn.Parameter) and tensor.grad_dtype is not tensor.dtype:
            tensor.grad_dtype = None  # nothing else follows what the parameter is cast to from here on
        fits = gradient is not None and gradient.shape == tensor.shape  # not after ``p.data = ...`` of another shape
        tensor.grad = gradient.to(tensor.dtype) if fits else None
    for module in model.modules():
        module.__dict__.pop(RECORD_KEY, None)
        module.__dict__.pop(ACTIVATION_KEY, None)
        remove_hooks(module)
        need_no_plain_copies(module)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def _have_inputs_cast(model: nn.Module, kept: Kept, plan: Plan) -> None:
    """Have inputs cast where kept and other modules meet."""
    is_sharded = bool(fsdp_modules(model))
    for module in kept.bridged():
        keep_fp32.bridge(module, plan.cast_model_type)
    of_torch = set(layers.layers(model))
    for module in of_torch:
        layers.take_the_weights_dtype(module)
    if kept.mixes_precisions():
        for module in model.modules():
            # What FSDP2 shards is in lower precision only while it is gathered.
            lower = is_sharded or keep_fp32.own_precision(module) is not None
            if lower and module is not model and module not in of_torch:
                keep_fp32.take_inputs_down(module)
    for module in direct_calls.entrances(model) if not is_sharded else ():
        if module not in of_torch:
            direct_calls.cast_direct_calls(module)
    operators.widen_targets(model)


def _log_kept(kept: Sequence[Kept], plan: Plan) -> None:
    names = [name for choice in kept for name in (choice.modules if plan.casts_weights else choice.named).values()]
    if names and plan.verbosity >= 1:
        first = ", ".join([name or "the model" for name in names[:3]] + ["..."] * (len(names) > 3))
        logger.info("Kept in float32: %d module%s (%s)", len(names), "s" * (len(names) > 1), first)
        logger.debug("Kept in float32: %s", ", ".join(names))


def _shell_forwards(models: Sequence[nn.Module], kept: Sequence[Kept], plan: Plan, undo: Undo) -> None:
    """Give the models, and what ``keep_fp32=`` names in them, forwards that cast inputs and outputs."""
    in_forward_only = plan.patch_torch_functions and plan.scope == "forward"
    casts = ForwardCasts(
        inputs=plan.cast_model_type,
        outputs=plan.cast_model_outputs or (torch.float32 if plan.cast_model_type or in_forward_only else None),
        patched=plan.patch_torch_functions,
        outermost_only=in_forward_only,
    )
    in_float32 = {m: None for choice in kept for m in choice.in_float32(hand_on_norms=plan.casts_weights)}
    for module in in_float32:
        if module not in models:
            undo.if_alive(forward.uninstall, module)
            forward.install(module, forward.KEPT)
    for model in models:
        if plan.patch_torch_functions:
            for module in fsdp_modules(model):
                undo.callback(sharded.keep_no_casts_of_gathered(module))
        undo.callback(sharded.sum_partial_gradients(model))
        own = replace(casts, targets_stay=operators.is_detector(model))
        if model in in_float32:  # keep_fp32 names the model itself
            own = replace(own, inputs=torch.float32, patched=False)
        forward.install(model, own)
        if in_forward_only:
            undo.callback(cast_submodules(model, casts.outputs))
