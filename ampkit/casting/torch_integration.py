"""Patches of torch around the functions that the tables name, from the engine's `install` to its `close`.

The patched code needs torch's own functions (torch.jit, pickle, tables in a ``__torch_function__``, inductor), or bypasses what
casts rely on (``.data``, data loaders, autograd, checkpoints).
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverloadPacket
from torch.autograd.function import BackwardCFunction
from torch.utils import checkpoint
from torch.utils.data._utils import fetch

from ..dtypes import LOWER_PRECISION
from ..errors import ConfigurationError
from ..logs import logger
from ..patching import PatchSet
from ..registry import wrapper_of
from .state import CastingState, number_of_regions, past_autocast, stored

_AUTOCAST_KEY = "_ampkit_autocast"
_MEAN_THE_DTYPE = frozenset({"torch", "ampkit"})


def patch_torch(patches: PatchSet, engine: Any) -> None:
    """Apply all these patches, for a `Casting` (engine.py)."""
    _patch_writes(patches, engine)
    _patch_steps(patches, engine)
    _patch_autograd(patches, engine)
    _patch_checkpoints(patches)
    _patch_picklers(patches, engine)
    # Transforms run uncast in the main process too: a batch must not depend on the number of workers.
    for fetcher in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
        patches.put_around(fetcher, "fetch", functools.partial(_inside, engine.disabled))
    # torch.fx traces with proxies, which have no dtype. The traced model is cast where it runs.
    patches.put_around(torch.fx.Tracer, "trace", functools.partial(_trace_without_casts, engine))
    # Recurrent layers refuse an input of another dtype than their weights' where torch.autocast is off.
    on = functools.partial(_inside, lambda: engine.region(True) if engine.stores else nullcontext())
    patches.put_around(nn.RNNBase, "check_input", on)
    # torch.jit.script compiles what a function calls from its source, and has to see torch's own.
    for module, name in ((torch.jit._recursive, "try_compile_fn"), (torch.jit._builtins, "_find_builtin")):
        patches.put_around(module, name, functools.partial(_see_through, engine))
    # Tables of functions that were made before, in a ``__torch_function__``, have torch's own too.
    for module in (torch.functional, nn.functional, torch._tensor):
        patches.put_around(module, "handle_torch_function", functools.partial(_see_through, engine))
    # A trace has to contain the casts of weights: the cache would freeze them into it.
    for name in ("_trace_impl", "trace_module"):
        patches.put_around(torch.jit._trace, name, functools.partial(_inside, engine.caches.bypassed))
    patches.put_around(torch._TorchCompileInductorWrapper, "__call__", functools.partial(_compile_apart, engine))


def _patch_picklers(patches: PatchSet, engine: Any) -> None:
    """Make picklers write torch's own functions by the name of their wrappers.

    Pickle writes a function as the name of its place, and refuses if something else stands there. One that a model bound before
    is written as ``copy.copy(torch.nn.functional.softmax)``, which loads anywhere, and leaves functions as they are. The pickler
    in C takes ``reducer_override`` of a subclass alone, so ``pickle.Pickler`` becomes one while torch is patched.
    """

    def reducer_override(self: pickle.Pickler, thing: Any) -> Any:
        if type(thing) is not FunctionType:
            return NotImplemented
        wrapper = engine.wrapper_of(thing)
        return NotImplemented if wrapper is None or wrapper is thing else (copy.copy, (wrapper,))

    plain = pickle.Pickler
    for cls in (*plain.__subclasses__(), pickle._Pickler):
        if "reducer_override" not in vars(cls):
            patches.set(cls, "reducer_override", reducer_override)
    namespace = {"reducer_override": reducer_override, "__module__": "pickle", "__doc__": plain.__doc__}
    pickler = type("Pickler", (plain,), namespace)
    patches.set(pickle, "Pickler", pickler)

    @functools.wraps(pickle.dump)
    def dump(obj: Any, file: Any, protocol: int | None = None, **settings: Any) -> None:
        pickler(file, protocol, **settings).dump(obj)

    @functools.wraps(pickle.dumps)
    def dumps(obj: Any, protocol: int | None = None, **settings: Any) -> bytes:
        file = io.BytesIO()
        pickler(file, protocol, **settings).dump(obj)
        return file.getvalue()

    patches.set(pickle, "dump", dump)
    patches.set(pickle, "dumps", dumps)


def _patch_autograd(patches: PatchSet, state: CastingState) -> None:
    """Patch autograd so that the backward pass is not autocast."""
    run_backward = torch.autograd._engine_run_backward
    without_autocast = past_autocast(run_backward, state)
    apply = BackwardCFunction.apply

    @functools.wraps(run_backward)
    def run_uncast(*args: Any, **kwargs: Any) -> Any:
        if not state.installed:
            return run_backward(*args, **kwargs)
        state.caches.drop_ended()
        try:
            return without_autocast(*args, **kwargs)
        except RuntimeError as error:
            if "expected scalar type" in str(error) and torch._C._functorch.peek_interpreter_stack() is not None:
                raise ConfigurationError(_UNDER_VMAP) from error
            raise

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


_UNDER_VMAP = (
    "A backward pass under torch.vmap came to a function of torch that takes no two dtypes there, such as batch norm's gradient. "
    "Keep that layer in float32, initialize(..., keep_fp32=torch.nn.BatchNorm1d), or compute this forward inside of "
    "'with ampkit.disable_casts():'."
)


def _patch_checkpoints(patches: PatchSet) -> None:
    """Do not count the regions by which a checkpoint restores the state of its forward: the script entered none of them."""
    generator = "_checkpoint_without_reentrant_generator"
    if hasattr(checkpoint, f"{generator}_impl"):  # torch 2.15
        generator += "_impl"
    patches.put_around(
        checkpoint, generator, lambda generate, fn, *args, **kwargs: generate(_in_regions_of_now(fn), *args, **kwargs)
    )
    patches.put_around(
        checkpoint.CheckpointFunction,
        "forward",
        lambda forward, ctx, fn, *args: forward(ctx, _in_regions_of_now(fn), *args),
    )


def _in_regions_of_now(function: Callable) -> Callable:
    """Wrap ``function`` to run as if in as many regions of torch.autocast as there are now."""
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


_aliases = 0


def aliases_taken() -> int | None:
    """The number of aliases of tensors that are no parameters (``.data``, NumPy) that scripts have taken; None if not counted."""
    return _aliases if type(torch.Tensor.data) is _Data else None


class _Data(property):
    """The property for ``Tensor.data``. To dynamo, which asks it for ``__get__``, it is torch's own."""

    def __init__(self, own: Any, get: Callable, put: Callable) -> None:
        super().__init__(get, put, own.__delete__, own.__doc__)
        self.__get__ = own.__get__


def _patch_writes(patches: PatchSet, state: CastingState) -> None:
    """Forget casts where torch does not count writes: through ``.data``, NumPy and DLPack."""
    data, forget = torch._C.TensorBase.data, state.caches.forget

    def take_alias(tensor: torch.Tensor) -> None:
        global _aliases
        forget(tensor)
        _aliases += type(tensor) is not nn.Parameter

    def get(tensor: torch.Tensor) -> torch.Tensor:
        take_alias(tensor)
        return data.__get__(tensor)

    def put(tensor: torch.Tensor, values: torch.Tensor) -> None:
        forget(tensor)
        is_weight = type(tensor) is nn.Parameter and tensor.dtype is torch.float32
        if is_weight and getattr(values, "dtype", None) in LOWER_PRECISION and state.is_on():
            # A script assigns what a cast call returned. torch and ampkit mean the dtype: ``.half()`` of a module assigns too.
            if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] not in _MEAN_THE_DTYPE:
                values = values.float()
        data.__set__(tensor, values)

    def forgetting(function: Callable, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        take_alias(tensor)
        return function(tensor, *args, **kwargs)

    patches.set(torch.Tensor, "data", _Data(data, get, put))
    for name in ("numpy", "__dlpack__"):
        patches.put_around(torch.Tensor, name, forgetting)


def _patch_steps(patches: PatchSet, state: CastingState) -> None:
    """Drop casts after each step, whose fused writes torch does not count; warn of a step that loses updates."""
    seen, warned = weakref.WeakSet[torch.optim.Optimizer](), set[str]()

    def after_step(optimizer: torch.optim.Optimizer) -> None:
        if torch.compiler.is_compiling():
            return
        state.caches.drop()
        if not stored or optimizer in seen or wrapper_of(optimizer) is not None:
            return
        updated = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
        if updated:
            seen.add(optimizer)
        name = type(optimizer).__name__
        if name not in warned and any(_loses_updates(optimizer, param) for param in updated):
            warned.add(name)
            logger.warning(
                "%s.step() updated weights that initialize() stores in lower precision, but initialize() was not given this %s: "
                "what is smaller than half of a weight's last bit is lost. Call initialize() again, with the model and the new "
                "optimizer; or use opt_level='O5', whose weights are float32.",
                name,
                name,
            )

    # torch calls it after the step of every optimizer, for profilers. A hook of all optimizers cannot be taken away inside of one.
    patches.set(torch.optim.Optimizer, "_optimizer_step_code", after_step)


def _loses_updates(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> bool:
    """Whether the weight has a rest that the optimizer does not update, while it rounds to nearest."""
    value, state = stored.get(param), optimizer.state[param] if param in optimizer.state else ()
    draws = getattr(getattr(optimizer, "storage", None), "is_stochastic", False)
    return value is not None and value.rest is not None and "rest" not in state and not draws


def _inside(scope: Callable[[], AbstractContextManager[None]], function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call a function inside a scope of the engine's."""
    with scope():
        return function(*args, **kwargs)


def _trace_without_casts(engine: Any, trace: Callable, tracer: Any, *args: Any, **kwargs: Any) -> Any:
    on_tensors = getattr(sys.modules.get("torch.fx.experimental.proxy_tensor"), "PythonKeyTracer", ())  # make_fx
    if isinstance(tracer, on_tensors):
        return trace(tracer, *args, **kwargs)
    with engine.disabled():
        graph = trace(tracer, *args, **kwargs)
    # Weights that have rests are read in float32: generated code calls torch's functions without casts.
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        stored_value = stored.get(functools.reduce(getattr, node.target.split("."), tracer.root))
        if stored_value is not None and stored_value.rest is not None:
            with graph.inserting_after(node):
                value = graph.call_method("float", (node,))
            node.replace_all_uses_with(value, delete_user_cb=lambda user, value=value: user is not value)
    return graph


def _see_through(engine: Any, function: Callable, fn: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``function``, with torch's own function in place of a wrapper ``fn``."""
    original = engine.original_of(fn)
    return function(original.op if isinstance(original, OpOverloadPacket) else original, *args, **kwargs)


def _compile_apart(engine: Any, function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Compile graphs with and without casts so that their code is not taken for each other on disk."""
    engine.tag_compiled_code()
    try:
        return function(*args, **kwargs)
    finally:
        # Inductor holds the wrappers where it is loaded while torch is patched; the casts are in the graphs already.
        if (module := sys.modules.get("torch._inductor.select_algorithm")) is not None:
            kernels = vars(module.extern_kernels)
            kernels.update({name: engine.original_of(kernel) for name, kernel in kernels.items()})
