"""Prepare the models of a session: cast their weights, then wrap the forwards of models and of modules kept in float32.

Each step has its undo. Weights are cast in place: a parameter stays the same object.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .. import kernels
from ..casting.engine import active_casting
from ..casting.narrow_gradients import follow_dtype, keep_hooks_in_dtype
from ..casting.state import stored
from ..dtypes import CASTABLE
from ..logs import logger, printable
from ..patching import Undo, run_all
from ..sharding import fsdp_modules, gathered, is_sharded, unsharded_params
from . import forward
from .float32_values import Float32Value, Loans, members, put_gradient
from .forward import ForwardCasts
from .incoming import flatten, refuse_shared_memory
from .keep_fp32 import NOT_TRAINED, Kept

# The values and gradients from before the casts, until all is prepared: a failure is then undone exactly.
Originals = dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor | None]]


def prepare_models(models: Sequence[nn.Module], optimizers: Sequence[Any], plan: Any, undo: Undo) -> Originals:
    """Prepare the models as the plan says. Until the returned originals are cleared, the undo is exact."""
    loans, originals = Loans(), Originals()
    kept = [Kept(model, plan, optimizers) for model in models]
    for model in models:
        undo.if_alive(forward.uninstall, model)
    if plan.stores_weights:
        undo.callback(restore_weights, loans, originals)
        _store_weights(models, kept, plan, loans, originals)
    found = [choice.modules if plan.casts_weights else choice.named for choice in kept]
    names = [printable(name) for modules in found for name in modules.values()]
    if names and plan.verbosity >= 1:
        first = ", ".join([name or "the model" for name in names[:3]] + ["..."] * (len(names) > 3))
        logger.info("Kept in float32: %d module%s (%s)", len(names), "s" * (len(names) > 1), first)
        logger.debug("Kept in float32: %s", ", ".join(names))
    _wrap_forwards(models, kept, plan, undo)
    return originals


def _store_weights(
    models: Sequence[nn.Module], kept: Sequence[Kept], plan: Any, loans: Loans, originals: Originals
) -> None:
    """Cast the chosen parameters in place. With master weights a rest keeps the float32 value, and the gradient stays float32."""
    chosen = _chosen_weights(kept, loans)
    refuse_shared_memory(models, chosen, plan)
    _warn_of(chosen, plan)
    for param in chosen:
        gradient = param.grad
        originals[param] = (param.data, gradient)
        master = Float32Value(loans, plan.cast_model_type if plan.casts_weights else param.dtype)
        if plan.master_weights:
            lower, master.rest = kernels.parted(param.detach().float(), master.dtype)
        else:
            lower = param.detach().to(master.dtype)
            gradient = None if gradient is None else gradient.to(master.dtype)
        # All memory is allocated: nothing below fails. First what restores the weight, where Ctrl-C interrupts.
        stored[param] = master
        param.grad, param.data = None, lower
        put_gradient(param, gradient)
        keep_hooks_in_dtype(param)
    flatten(module for model in models for module in model.modules())


def _chosen_weights(kept: Sequence[Kept], loans: Loans) -> dict[torch.Tensor, str]:
    """Return the parameters to cast, with their names, and record which modules and parameters the session has."""
    chosen: dict[torch.Tensor, str] = {}  # tied weights share one value, also between models
    for choice in [choice for choice in kept if not fsdp_modules(choice.model)]:  # FSDP2 casts what it gathers
        for prefix, module in choice.model.named_modules():
            # A ScriptModule has no weights here (see validation.py), and another one may be part of a model before.
            if isinstance(module, torch.jit.ScriptModule) or module in members:
                continue
            members[module] = loans
            for name, param in module._parameters.items():
                if param is None or param.dtype not in CASTABLE:  # float64 and complex are never cast
                    continue
                why = choice.why_kept(module, param)
                if why is NOT_TRAINED:
                    stored[param] = None
                elif param not in stored and (why is None or param.dtype is not torch.float32):
                    chosen[param] = f"{prefix}.{name}" if prefix else name
    return chosen


def _warn_of(chosen: dict[torch.Tensor, str], plan: Any) -> None:
    """Warn of weights that leave shared memory, and of values that float16 cannot hold."""
    if any(param.is_cpu and param.is_shared() for param in chosen):
        logger.warning(
            "Weights were in shared memory, and those that %s stores are not: call model.share_memory() after initialize(), or use "
            "O5, which leaves weights where they are.",
            plan.opt_level,
        )
    values = [] if plan.cast_model_type is not torch.float16 else [param for param in chosen if not param.is_meta]
    largest = torch.finfo(torch.float16).max
    if too_large := [param for param in values if bool((param.isfinite() & (param.abs() > largest)).any())]:
        logger.warning(
            "%s holds values above 65504, the largest that float16 has (%d tensors do): they are that now. Use bfloat16 (O5), or "
            "keep_fp32= for the module.",
            printable(chosen[too_large[0]]),
            len(too_large),
        )


def restore_weights(loans: Loans, originals: Originals) -> None:
    """Undo the casts: the same parameter objects become float32 again, with their present float32 values.

    Parameters that outlive their model, or their layer, which a script has taken out, are restored too.
    """
    masters = {param: master for param, master in stored.items() if master is not None and master.loans is loans}
    parts = [module for module, own in members.items() if own is loans]

    def restore(param: torch.Tensor, master: Float32Value) -> None:
        value = master.current(param) if param.dtype is master.dtype else param.detach().float()
        value, gradient = originals.get(param) or (value, param.grad)
        del stored[param]
        param.grad, param.data = None, value
        follow_dtype(param)
        fits = gradient is not None and gradient.shape == param.shape  # not after ``p.data = ...`` of another shape
        param.grad = gradient.to(param.dtype) if fits else None

    def forget(module: nn.Module) -> None:
        del members[module]
        for param in module.parameters(recurse=False):
            stored.pop(param, None)

    restored = ((restore, *pair) for pair in masters.items())
    run_all(
        [(loans.end, None, False), *restored, *((forget, part) for part in parts), (flatten, parts), (loans.clear,)]
    )


def _wrap_forwards(models: Sequence[nn.Module], kept: Sequence[Kept], plan: Any, undo: Undo) -> None:
    """Wrap the forwards of the models, and of the modules that ``keep_fp32=`` names in them."""
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
        for module in fsdp_modules(model) if plan.casts_calls else ():
            undo.callback(module.register_forward_pre_hook(_forget_casts).remove)
            undo.callback(module.register_forward_hook(_forget_casts, prepend=True).remove)
        by_fsdp = {id(shard.param) for shard in gathered(model)}  # which redistributes gradients by itself
        param: Any
        for param in model.parameters():
            if is_sharded(param) and param.requires_grad and id(param) not in by_fsdp:
                undo.callback(param.register_hook(functools.partial(_laid_out, param.placements)).remove)
        if plan.has_narrow_results and not plan.casts_weights:
            forward.cast_parts(model, plan.lower_precision, undo)
        own = replace(casts, inputs=torch.float32, casts_calls=False) if model in in_float32 else casts
        # Calls of a script are cast by torch.autocast, beneath our patches.
        if not isinstance(model, torch.jit.ScriptModule):
            forward.install(model, own, undo)


def _forget_casts(module: nn.Module, *_: Any) -> None:
    """Drop the casts of weights that FSDP2 gathers: each is the same tensor at the same version after every gathering."""
    if (casting := active_casting()) is not None:
        for param in unsharded_params(module):
            casting.caches.forget(param)


def _laid_out(placements: Any, gradient: Any) -> Any:
    """Redistribute a gradient of tensor parallelism to the placements of its parameter, as torch's optimizers do in their step.

    With ``SequenceParallel`` each process gets a part of the sum for a norm's weight; judging or unscaling part of a sum tells
    nothing. A sharded weight may get a whole gradient, and kernels update the part of a weight that lies here.
    """
    if not is_sharded(gradient) or gradient.placements == placements:
        return gradient
    return gradient.redistribute(placements=placements)
