"""Prepare the models of a session, in order: weights are cast, what is kept and the models get their forwards.

Each step has its undo. Weights are cast in place: a parameter stays the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..casting.narrow_gradients import follow_dtype, keep_hooks_in_dtype
from ..dtypes import CASTABLE, LOWER_PRECISION
from ..logs import logger, printable
from ..patching import Undo, run_all
from ..sharding import fsdp_modules
from . import forward, sharded
from .copies import RECORD_KEY, need_no_plain_copies, remove_hooks
from .float32_values import Float32Value, Loans, put_gradient
from .forward import ForwardCasts
from .keep_fp32 import NOT_TRAINED, Kept
from .records import CastModel, go_by_record, lower_entries, record_of

WhyKept = Callable[[nn.Module, nn.Parameter], str | None]
Plan = Any  # plan.py's, which stands above this room
# What was cast, as it was, and its gradient: until all is prepared, so that what fails is undone exactly.
Originals = dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor | None]]


def prepare_models(
    models: Sequence[nn.Module],
    plan: Plan,
    loans: Loans,
    trained: set[torch.Tensor] | None,
    originals: Originals,
    undo: Undo,
) -> dict[torch.Tensor, Float32Value]:
    """Have these models compute as the plan says; returns the float32 value behind each tensor that was cast.

    ``trained`` are the parameters that may be stored in lower precision, None where all may. ``originals`` receives what was cast.
    """
    values: dict[torch.Tensor, Float32Value] = {}
    keeps = plan.casts_weights or (plan.casts_calls and plan.keep_fp32)
    keeps_norms = bool(plan.keep_batchnorm_fp32)
    kept = [Kept(model, keeps_norms, plan.keep_fp32, plan.lowers_all, trained) for model in models if keeps]

    def restore(model: nn.Module) -> None:
        restore_weights(model, originals)

    for model in models:
        undo.if_alive(forward.uninstall, model)
        if plan.stores_weights:
            undo.if_alive(restore, model)
    for index, model in enumerate(models if plan.stores_weights else ()):
        precision, why_kept = plan.cast_model_type, kept[index].why_kept if plan.casts_weights else _as_they_are
        if not plan.casts_weights:
            precision = next((p.dtype for p in model.parameters() if p.dtype in LOWER_PRECISION), None)
        if precision is not None and not fsdp_modules(model):  # FSDP2 casts what it gathers
            _cast_weights(model, CastModel(precision, loans), why_kept, bool(plan.master_weights), values, originals)
    if any(data.is_cpu and data.is_shared() for data, _ in originals.values()):
        logger.warning(
            "Weights were in shared memory, and those that %s stores are not: call model.share_memory() after initialize(), or use "
            "O5, which leaves weights where they are.",
            plan.opt_level,
        )
    _log_kept(kept, plan)
    _shell_forwards(models, kept, plan, undo)
    return values


def _as_they_are(module: nn.Module, param: nn.Parameter) -> str:
    """Keep float32 weights, beside others that came in lower precision, where the level casts none."""
    return "as it is"


def _cast_weights(
    model: nn.Module,
    whole: CastModel,
    why_kept: WhyKept,
    has_masters: bool,
    values: dict[torch.Tensor, Float32Value],
    originals: Originals,
) -> None:
    """Cast every parameter that is not kept, in place. Tied weights share one value, also between models."""
    too_large: list[str] = []
    for prefix, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):  # has no weights here: see validation.py
            continue
        if (part := record_of(module)) is not None:
            if part is not whole and part not in whole.parts:
                whole.parts.append(part)
            continue
        go_by_record(module, whole)  # first, so that what fails halfway is undone
        for name, param in module._parameters.items():
            if param is None or param.dtype not in CASTABLE:  # float64 and complex are never cast
                continue
            why = why_kept(module, param)
            if why is NOT_TRAINED:
                whole.as_they_came[id(param)] = param
                continue
            if param.dtype is torch.float32 and why is not None:
                whole.kept.append(param)
                continue
            if param not in values:
                originals[param] = (param.data, param.grad)
                values[param] = _cast(param, whole, has_masters)
                if _exceeds(originals[param][0], whole.lower_precision):
                    too_large.append(f"{prefix}.{name}" if prefix else name)
            whole.add(param, values[param])
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    # Not a bias that is in a layer too.
    whole.kept = [param for param in whole.kept if id(param) not in whole.parameters]
    if too_large:
        _warn_of_large(too_large, whole.lower_precision)


def _warn_of_large(names: list[str], precision: torch.dtype) -> None:
    logger.warning(
        "%s holds values above %g, the largest that %s has (%d tensors do): they are that now. Use bfloat16 (O5), or "
        "keep_fp32= for the module.",
        printable(names[0]),
        torch.finfo(precision).max,
        precision,
        len(names),
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
    keep_hooks_in_dtype(tensor)
    return entry


def _exceeds(original: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether there are finite values for which ``dtype`` has none. Of bfloat16 there are next to none."""
    if dtype is not torch.float16 or original.is_meta:
        return False
    return bool((original.isfinite() & (original.abs() > torch.finfo(dtype).max)).any())


def restore_weights(model: nn.Module, originals: Originals) -> None:
    """Undo the casts: the same parameter objects, float32, with the values that are behind them, and no hook of ours."""
    record = record_of(model)
    every = record.every_cast if record is not None else ()  # also of layers that a script has exchanged
    entries = dict([*lower_entries(model), *every])

    def restore(param: torch.Tensor, entry: Float32Value) -> None:
        is_as_cast = record is None or param.dtype is record.lower_precision
        value = entry.current(param) if is_as_cast else param.detach().float()
        value, gradient = originals.get(param) or (value, param.grad)
        param.grad, param.data = None, value
        follow_dtype(param)
        fits = gradient is not None and gradient.shape == param.shape  # not after ``p.data = ...`` of another shape
        param.grad = gradient.to(param.dtype) if fits else None

    def forget(module: nn.Module) -> None:
        module.__dict__.pop(RECORD_KEY, None)
        remove_hooks(module)
        need_no_plain_copies(module)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()

    loans = () if record is None else ((record.loans.end, None, False),)
    run_all([*loans, *((restore, *pair) for pair in entries.items()), *((forget, part) for part in model.modules())])


def _log_kept(kept: Sequence[Kept], plan: Plan) -> None:
    found = [choice.modules if plan.casts_weights else choice.named for choice in kept]
    names = [printable(name) for modules in found for name in modules.values()]
    if names and plan.verbosity >= 1:
        first = ", ".join([name or "the model" for name in names[:3]] + ["..."] * (len(names) > 3))
        logger.info("Kept in float32: %d module%s (%s)", len(names), "s" * (len(names) > 1), first)
        logger.debug("Kept in float32: %s", ", ".join(names))


def _shell_forwards(models: Sequence[nn.Module], kept: Sequence[Kept], plan: Plan, undo: Undo) -> None:
    """Give the models, and what ``keep_fp32=`` names in them, forwards that cast inputs and outputs."""
    in_forward_only = plan.patch_torch_functions and plan.scope == "forward"
    casts = ForwardCasts(
        inputs=plan.cast_model_type if plan.lowers_all else None,
        outputs=plan.cast_model_outputs or (torch.float32 if plan.cast_model_type or in_forward_only else None),
        casts_calls=plan.casts_calls,
        narrow_in=plan.lower_precision if plan.has_narrow_results else None,
    )
    in_float32 = {m: None for choice in kept for m in choice.in_float32()}
    for module in in_float32:
        if module not in models:
            undo.if_alive(forward.uninstall, module)
            forward.install(module, forward.KEPT, undo)
    for model in models:
        if plan.casts_calls:
            sharded.keep_no_casts_of_gathered(model, undo)
        sharded.sum_partial_gradients(model, undo)
        if plan.has_narrow_results and not plan.casts_weights:
            forward.cast_parts(model, plan.lower_precision, undo)
        own = replace(casts, inputs=torch.float32, casts_calls=False) if model in in_float32 else casts
        # Calls of a script are cast by torch.autocast, beneath our patches.
        if not isinstance(model, torch.jit.ScriptModule):
            forward.install(model, own, undo)
