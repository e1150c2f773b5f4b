"""The places of torch around the functions that O1 patches: they look through wrappers, or past what casting relies on.

Parameters are written through ``.data``, data loaders run transforms, autograd runs formulas and functions, checkpoints run
functions again, torch.jit compiles sources and records traces, inductor collects kernels. Each is patched, from the engine's
`install` to its `close`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverloadPacket
from torch.autograd.function import BackwardCFunction
from torch.utils import checkpoint
from torch.utils.data._utils import fetch

from ..patching import PatchSet
from .state import IN_BACKWARD, CastingState, number_of_regions

_AUTOCAST_KEY = "_ampkit_autocast"


def patch_torch(patches: PatchSet, engine: Any) -> None:
    """Patch them all, for a `Casting` (engine.py)."""
    state = engine.state
    _patch_data(patches, state)
    _patch_autograd(patches, state)
    _patch_checkpoints(patches)
    # Transforms run uncast in the main process too: a batch must not depend on the number of workers.
    for fetcher in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
        patches.set(fetcher, "fetch", _inside(engine.disabled, fetcher.fetch))
    # torch.jit.script compiles what a function calls from its source, and has to see torch's own.
    for module, name in ((torch.jit._recursive, "try_compile_fn"), (torch.jit._builtins, "_find_builtin")):
        patches.set(module, name, _seeing_through(getattr(module, name), engine))
    # A trace has to contain the casts of weights: the cache would freeze them into it.
    for name in ("_trace_impl", "trace_module"):
        patches.set(torch.jit._trace, name, _inside(state.caches.bypassed, getattr(torch.jit._trace, name)))
    compiler = torch._TorchCompileInductorWrapper
    patches.set(compiler, "__call__", _compiled_apart(compiler.__call__, engine))


def _patch_autograd(patches: PatchSet, state: CastingState) -> None:
    """See Note [the backward pass] in state.py. A function in Python computes backward in the state of its forward."""
    run_backward = torch.autograd._engine_run_backward
    apply = BackwardCFunction.apply

    @functools.wraps(run_backward)
    def run_uncast(*args: Any, **kwargs: Any) -> Any:
        if not state.installed:
            return run_backward(*args, **kwargs)
        on = [one for one in state.device_types if torch.is_autocast_enabled(one)]
        hooks_are_cast, in_backward = bool(on) or state.is_on(), torch.is_autocast_enabled(IN_BACKWARD)
        regions = number_of_regions() if hooks_are_cast else 0
        for _ in range(regions):  # those that were entered before do not speak for the hooks
            torch.autocast_decrement_nesting()
        for one in on:
            torch.set_autocast_enabled(one, False)
        torch.set_autocast_enabled(IN_BACKWARD, hooks_are_cast)
        try:
            return run_backward(*args, **kwargs)
        finally:
            for _ in range(regions):
                torch.autocast_increment_nesting()
            torch.set_autocast_enabled(IN_BACKWARD, in_backward)
            state.switch_back_on(on)

    def note_state(function: Any) -> None:
        setattr(function, _AUTOCAST_KEY, (state.is_on(), state.other_precision()))

    @functools.wraps(apply)
    def apply_as_forward(function: Any, *args: Any) -> Any:
        noted = getattr(function, _AUTOCAST_KEY, None)
        if noted is None or not state.installed:
            return apply(function, *args)
        with state.region(*noted):
            return apply(function, *args)

    patches.set(torch.autograd, "_engine_run_backward", run_uncast)
    patches.set(BackwardCFunction, "__init__", note_state)
    patches.set(BackwardCFunction, "apply", apply_as_forward)


def _patch_checkpoints(patches: PatchSet) -> None:
    """What runs again is inside regions of torch's that bring back the state of its forward; the script entered none of them."""
    generator = "_checkpoint_without_reentrant_generator"
    if hasattr(checkpoint, f"{generator}_impl"):  # torch 2.15
        generator += "_impl"
    generate, forward = getattr(checkpoint, generator), checkpoint.CheckpointFunction.forward

    @functools.wraps(generate)
    def generate_by_regions(fn: Callable, *args: Any, **kwargs: Any) -> Any:
        return generate(_in_regions_of_now(fn), *args, **kwargs)

    @functools.wraps(forward)
    def forward_by_regions(ctx: Any, run_function: Callable, *args: Any) -> Any:
        return forward(ctx, _in_regions_of_now(run_function), *args)

    patches.set(checkpoint, generator, generate_by_regions)
    patches.set(checkpoint.CheckpointFunction, "forward", staticmethod(forward_by_regions))


def _in_regions_of_now(function: Callable) -> Callable:
    """``function``, called as if it were in as many regions of torch.autocast as it would be now."""
    regions = number_of_regions()

    def call(*args: Any, **kwargs: Any) -> Any:
        more = number_of_regions() - regions
        for _ in range(more):
            torch.autocast_decrement_nesting()
        try:
            return function(*args, **kwargs)
        finally:
            for _ in range(more):
                torch.autocast_increment_nesting()

    return call


def _patch_data(patches: PatchSet, state: CastingState) -> None:
    """Writes through ``.data`` are not counted: whoever asks for it may be about to write."""
    data = torch._C.TensorBase.data

    def get(parameter: nn.Parameter) -> torch.Tensor:
        # torch.Tensor's is looked up now: a session of O2 may have patched it since (models/data_reads.py).
        state.caches.forget(parameter)
        return torch.Tensor.data.__get__(parameter)

    patches.set(nn.Parameter, "data", property(get, data.__set__, doc=data.__doc__))


def _inside(scope: Callable[[], AbstractContextManager[None]], function: Callable) -> Callable:
    """``function``, called inside a scope of the engine's."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with scope():
            return function(*args, **kwargs)

    return call


def _seeing_through(function: Callable, engine: Any) -> Callable:
    """``function`` of a callable, applied to the original where it is given one of our wrappers."""

    @functools.wraps(function)
    def see_through(fn: Any, *args: Any, **kwargs: Any) -> Any:
        original = engine.original_of(fn)
        return function(original.op if isinstance(original, OpOverloadPacket) else original, *args, **kwargs)

    return see_through


def _compiled_apart(function: Callable, engine: Any) -> Callable:
    """The compiler of graphs with and without casts, whose code must not be taken for each other on disk.

    The casts are in inductor's graphs already; but loaded while torch is patched, it takes wrappers for torch's kernels.
    """

    @functools.wraps(function)
    def compile_graph(*args: Any, **kwargs: Any) -> Any:
        engine.tag_compiled_code()
        try:
            return function(*args, **kwargs)
        finally:
            engine.give_back_kernels()

    return compile_graph
