"""What is done to the models of a session, in order: weights are cast, what is kept gets its hooks, forwards get their shells.

Each step has its undo. The rooms beside this one do the steps; here stands which of them a plan asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..logs import logger
from ..patching import Undo
from ..sharding import fsdp_modules
from . import direct_calls, forward, keep_fp32, layers, operators, sharded, weights
from .float32_values import Float32Value
from .forward import ForwardCasts
from .forward_scope import cast_submodules
from .keep_fp32 import Kept

Plan = Any  # plan.py's, which stands above this room


def prepare_models(models: Sequence[nn.Module], plan: Plan, undo: Undo) -> dict[torch.Tensor, Float32Value]:
    """Have these models compute as the plan says; returns the float32 value behind each tensor that was cast."""
    values: dict[torch.Tensor, Float32Value] = {}
    keeps = plan.casts_weights or (plan.patch_torch_functions and plan.keep_fp32)
    kept = [Kept(model, bool(plan.keep_batchnorm_fp32), plan.keep_fp32) for model in models] if keeps else []
    for model in models:
        undo.if_alive(forward.uninstall, model)
        if plan.casts_weights:
            undo.if_alive(weights.restore_weights, model)
    if plan.casts_weights:
        for model, choice in zip(models, kept):
            _cast_weights(model, choice, values, plan)
    elif plan.master_weights:
        for model in models:
            if (dtype := direct_calls.precision_in(model)) is not None:
                undo.if_alive(weights.restore_weights, model)
                weights.cast_weights(model, dtype, keep_fp32.AsTheyAre(), values)
    _log_kept(kept, plan)
    _shell_forwards(models, kept, plan, undo)
    return values


def _cast_weights(model: nn.Module, kept: Kept, values: dict[torch.Tensor, Float32Value], plan: Plan) -> None:
    """Cast all but what is kept, and have inputs cast where kept and other modules meet."""
    is_sharded = bool(fsdp_modules(model))
    weights.cast_weights(model, plan.cast_model_type, kept, values, is_sharded, bool(plan.master_weights))
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
