"""The forward of an initialized model: it switches casts of calls on, casts outputs, and notifies the model's session.

Methods of the model's class are wrapped as long as models of the class are initialized: see NOTES.md. The instance holds its
`ForwardCasts`; its session is found through `watchers`, and calls `sync_weights` first of all.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from traceback import walk_tb
from typing import Any

import torch
from torch import nn
from torch.autograd import profiler

from ..casting.engine import active_casting
from ..casting.narrow_gradients import past_the_getter
from ..casting.state import stored
from ..casting.tensors import cast_floating, map_tensors, tensors_in
from ..compiling import compiled_models
from ..dtypes import CASTABLE
from ..errors import ConfigurationError
from ..patching import PatchSet, Reference, SharedPatches, Undo
from ..registry import watchers
from .float32_values import Float32Value, members, stored_weights

CASTS_KEY = "_ampkit_casts"
INNER_FORWARD_KEY = "_ampkit_inner_forward"

_compiling = torch.compiler.is_compiling


@dataclass(frozen=True)
class ForwardCasts:
    """The dtypes of a forward's inputs and outputs; None leaves them alone.

    ``casts_calls``: torch's functions are cast inside. ``narrow_in``: the lower precision in which results are narrow, if they are.
    Outputs of a forward that runs inside of another in the same precision are not cast.
    """

    inputs: torch.dtype | None = None
    outputs: torch.dtype | None = None
    casts_calls: bool = False
    narrow_in: torch.dtype | None = None
    is_kept: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None: a copy of a model is plain, also where a class copies all attributes itself."""


#: For modules that ``keep_fp32=`` names inside a model: casts of calls are off, and outputs stay as they are.
KEPT = ForwardCasts(inputs=torch.float32, is_kept=True)


class _Running(threading.local):
    """The casts of the innermost running forward of this thread."""

    def __init__(self) -> None:  # dynamo guards on the attribute being there
        self.casts: ForwardCasts | None = None


_running = _Running()


def _apply(model: nn.Module, original: Callable, args: tuple, kwargs: dict) -> Any:
    cast = list(stored_weights(model))
    if (session := watchers.get(model)) is not None:
        session.before_apply()
    result = original(model, *args, **kwargs)
    for tensor, master in cast:
        master.move_rest_beside(tensor)
        master.was_made_float32 = tensor.dtype is torch.float32  # the next forward says so
    return result


def _zero_grad(model: nn.Module, original: Callable, args: tuple, kwargs: dict) -> None:
    if (session := watchers.get(model)) is None:
        return original(model, *args, **kwargs)
    with past_the_getter():
        original(model, *args, **kwargs)
    return session.after_zero_grad(model)


def _prepare_scriptable(model: nn.Module, original: Callable | None, args: tuple, kwargs: dict) -> Any:
    # Asked for by torch.jit.script, which compiles from source.
    if model.__dict__.get(CASTS_KEY) is None:
        return model if original is None else original(model)
    raise ConfigurationError(
        f"torch.jit.script was given an initialized model ({type(model).__name__}). A script is compiled from the source of "
        "the model, where no casts are. For a program with the casts use torch.export.export(model, args) or "
        "torch.jit.trace(model, args); for one without, call ampkit.close() first."
    )


def _copy(model: nn.Module, original: Callable | None, args: tuple, kwargs: dict) -> Any:
    if CASTS_KEY not in model.__dict__:
        return copy._reconstruct(model, None, *model.__reduce_ex__(4)) if original is None else original(model)
    twin = object.__new__(type(model))
    twin.__dict__.update(model.__dict__)
    return twin


def _copy_plainly(model: nn.Module, original: Callable, args: tuple, kwargs: dict) -> Any:
    """Copy or pickle a shallow copy of the model without ampkit's attributes and hooks."""
    if CASTS_KEY in model.__dict__:
        plain = object.__new__(type(model))
        plain.__dict__.update(model.__dict__, _forward_pre_hooks=model._forward_pre_hooks.copy())
        remove_attributes(plain)
        for memo in (x for x in (*args, *kwargs.values()) if isinstance(x, dict)):
            copy._keep_alive(plain, memo)
        model = plain
    return original(model, *args, **kwargs)


def prevent_fused_kernel(module: nn.Module, args: tuple) -> None:
    """Do nothing: with a hook on a part, torch's TransformerEncoderLayer calls its parts instead of one fused kernel."""


def remove_attributes(model: nn.Module) -> None:
    """Remove every attribute and hook that ampkit has set on a model."""
    attributes = model.__dict__
    if INNER_FORWARD_KEY in attributes:
        attributes["forward"] = attributes.pop(INNER_FORWARD_KEY)
    attributes.pop(CASTS_KEY, None)
    hooks = attributes["_forward_pre_hooks"]
    for number in [number for number, hook in hooks.items() if hook is prevent_fused_kernel]:
        del hooks[number]


def install(model: nn.Module, casts: ForwardCasts, undo: Undo) -> None:
    """Make the forward of ``model`` cast as ``casts`` says, whichever way it is called; ``undo`` restores its class."""
    if casts.is_kept:
        model.register_forward_pre_hook(prevent_fused_kernel)
    if "forward" in model.__dict__:
        model.__dict__[INNER_FORWARD_KEY] = model.__dict__.pop("forward")
    model.__dict__[CASTS_KEY] = replace(casts)  # an object of its own, by which `_run` recognises the model
    wrap_methods(type(model), undo)


def uninstall(model: nn.Module) -> None:
    """Undo `install` for the model itself."""
    watchers.pop(model, None)
    compiled_models.not_before_calls(weakref.ref(model))
    remove_attributes(model)


def cast_inputs(function: Callable) -> Callable:
    """Decorate a method of a model so that it casts as the model's ``forward`` does once it is initialized.

    Calls of torch inside of it are cast, and at O3 its inputs; floating outputs get the dtype of the model's outputs. Without
    `initialize` it does nothing. Raises nothing of its own.

    >>> class Net(torch.nn.Linear):
    ...     @cast_inputs
    ...     def encode(self, x):
    ...         return self(x)
    """

    @functools.wraps(function)
    def method(self, *args, **kwargs):
        return _run(self, functools.partial(function, self), args, kwargs, self.__dict__.get(CASTS_KEY))

    return method


def _forward(model: nn.Module, forward: Callable, args: tuple, kwargs: dict) -> Any:
    casts = model.__dict__.get(CASTS_KEY)
    if casts is None and not _compiling():  # a part that is called alone has the casts of its model
        casts = _parts.get(model)
    # The same casts: super().forward(), or a forward on the instance that calls the class's.
    if casts is None or casts is _running.casts:
        return forward(model, *args, **kwargs)
    inner = model.__dict__.get(INNER_FORWARD_KEY)
    return _run(model, inner or functools.partial(forward, model), args, kwargs, casts)


def _in_a_call(model: nn.Module, method: Callable, args: tuple, kwargs: dict) -> Any:
    """Run a method of the model as one call: casts of weights are kept until it returns."""
    casting, casts = active_casting(), model.__dict__.get(CASTS_KEY)
    if casting is None or casts is None or not casts.casts_calls or (casts.narrow_in is None and _compiling()):
        return method(model, *args, **kwargs)
    # Where calls are cast inside of the models alone, a method casts as the forward does.
    with casting.forward_scope(casts.narrow_in) if casts.narrow_in is not None else casting.caches.call():
        return method(model, *args, **kwargs)


#: Submodules of models with float32 weights whose calls are cast inside of the models alone, with their casts.
_parts: weakref.WeakKeyDictionary[nn.Module, ForwardCasts] = weakref.WeakKeyDictionary()


def cast_parts(model: nn.Module, narrow_in: torch.dtype, undo: Undo) -> None:
    """Wrap the submodules of a model, so that they cast as inside of it where they are called alone, until ``undo``."""
    inside = [m for m in model.modules() if m is not model and not isinstance(m, torch.jit.ScriptModule)]
    for cls in {type(m): None for m in inside if type(m).forward is not nn.Module.forward}:
        wrap_methods(cls, undo, "forward")
    for submodule in inside:
        _parts[submodule] = ForwardCasts(casts_calls=True, narrow_in=narrow_in)
        undo.if_alive(lambda module: _parts.pop(module, None), submodule)


#: Each is called with the instance, the class's own method, and the arguments of a call.
_METHODS: dict[str, Callable[..., Any]] = {
    "_apply": _apply,
    "zero_grad": _zero_grad,
    "__prepare_scriptable__": _prepare_scriptable,
    "__copy__": _copy,
    "__deepcopy__": _copy_plainly,
    "__reduce_ex__": _copy_plainly,
    "forward": _forward,
}


def _run(model: nn.Module, function: Callable, args: tuple, kwargs: dict, casts: ForwardCasts | None) -> Any:
    outer = _running.casts
    if casts is None or (casts.is_kept and outer is not None and outer.is_kept):
        return function(*args, **kwargs)
    traced = _compiling()
    if torch.compiler.is_dynamo_compiling():  # else `_export` does what is to be done before
        from torch._dynamo.comptime import comptime

        comptime(_on_trace)
    elif not traced and (session := watchers.get(model)) is not None:
        recording = torch._C._get_tracing_state()
        torch._C._set_tracing_state(None)  # out of sight of torch.jit.trace
        try:
            session.before_forward(model)
        finally:
            torch._C._set_tracing_state(recording)
    if (casting := active_casting()) is None:
        scope = nullcontext()
    elif casts.is_kept or not (casts.casts_calls or casting.covers_every_model):
        scope = casting.disabled()
    else:
        scope = casting.forward_scope(casts.narrow_in)
    # The flag last: dynamo guards what it reads.
    labelled = (
        profiler.record_function("ampkit: forward") if not traced and profiler._is_profiler_enabled else nullcontext()
    )
    try:
        _running.casts = casts
        with labelled, scope:
            if casts.inputs is not None:
                args, kwargs = cast_floating(args, casts.inputs), cast_floating(kwargs, casts.inputs)
            outputs = function(*args, **kwargs)
    except RuntimeError as error:
        if outer is None and not traced:
            _explain(error, model)
        raise
    finally:
        _running.casts = outer
    inside = outer is not None and outer.casts_calls and casts.casts_calls and outer.narrow_in is casts.narrow_in
    return outputs if casts.outputs is None or inside else _cast_outputs(outputs, casts.outputs, traced)


#: A parameter, the dtype that `initialize` left it in, and its float32 value if it is stored in lower precision.
ParameterRecord = tuple[Reference, torch.dtype, Float32Value | None]


def parameters_now(model: nn.Module) -> list[ParameterRecord]:
    """Record the model's present parameters, but for the ones that no optimizer trains where weights are stored."""
    every = [param for param in model.parameters() if param not in stored or stored[param] is not None]
    return [(Reference(param), param.dtype, stored.get(param)) for param in every]


def sync_weights(model: nn.Module, records: Sequence[ParameterRecord]) -> bool:
    """Write a script's changes of loans, and float32 values that it assigned (``p.data = values``), to the weights.

    Returns whether values were assigned. Raises `ConfigurationError` for parameters whose dtype was changed, by name.
    """
    if loans := members.get(model):
        loans.end()
        loans.lend_again()
    has_assigned = False
    for ref, dtype, master in records:
        if (param := ref()) is None:
            continue
        if param.dtype is dtype:
            if master is not None and (rest := master.rest) is not None:
                # Not master.move_rest_beside(param), which every weight would be asked for in every forward.
                if rest.numel() != param.numel() or rest.device != param.device:
                    master.move_rest_beside(param)
        elif master is not None and param.dtype is torch.float32 and not master.was_made_float32:
            master.take_float32(param)
            has_assigned = True
        else:
            name = next((name for name, other in model.named_parameters() if other is param), None)
            if name is not None:  # else the model has dropped it
                raise ConfigurationError(
                    f"{name!r} is {param.dtype}, initialize() left it {dtype}. Do not change the dtype of an initialized model "
                    "(.half(), .float(), .to(dtype)): call ampkit.close() first, or initialize again with another level."
                )
    return has_assigned


def _cast_outputs(outputs: Any, dtype: torch.dtype, traced: bool) -> Any:
    """Cast floating-point outputs to ``dtype``, but for leaves and inputs of other outputs: scripts differentiate by these."""
    if isinstance(outputs, torch.Tensor) and (traced or not (outputs.requires_grad and outputs.is_leaf)):
        return outputs.to(dtype) if outputs.dtype in CASTABLE else outputs
    tensors = [] if traced else [x for x in tensors_in(outputs) if x.requires_grad]
    if all(x.dtype is dtype for x in tensors):
        return cast_floating(outputs, dtype)
    stay = {id(x) for x in tensors if x.is_leaf}
    made_by: dict[Any, list[int]] = {}
    for x in tensors:
        made_by.setdefault(x.grad_fn, []).append(id(x))
    narrow = {id(x) for x in tensors if x.dtype is not dtype}
    waiting = list(made_by) if len(made_by) > 1 else []
    seen = set(waiting)
    for node in waiting:  # breadth first: a loss is near the logits, so that most of a large graph is never visited
        if narrow <= stay:
            break
        for before, _ in () if node is None else node.next_functions:
            stay.update(made_by.get(before, ()))
            if before not in seen:
                seen.add(before)
                waiting.append(before)
    return map_tensors(outputs, lambda x: x if id(x) in stay else cast_floating(x, dtype))


def _explain(error: RuntimeError, model: nn.Module) -> None:
    """Add a note to torch's error about dtypes: at which level, in which module, and what to do."""
    session, message = watchers.get(model), str(error)
    if session is None or "type" not in message or not ("Half" in message or "float16" in message.lower()):
        return
    advice = _TOO_LARGE if "without overflow" in message else _TWO_DTYPES
    names = {module: name for name, module in model.named_modules()}
    modules = (frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__))
    where = [names[module] for module in modules if isinstance(module, nn.Module) and module in names]
    module = f"module {where[-1]!r}" if where and where[-1] else "in its own forward"
    error.add_note(
        f"ampkit: this is a {type(model).__name__} at opt_level {session.plan.opt_level}, {module}, {advice}"
    )


_TWO_DTYPES = (
    "where casts have left two dtypes to one call. Convert one tensor beside the call, x.to(y.dtype), or keep in float32 what "
    "computes it: initialize(..., keep_fp32=...)."
)
_TOO_LARGE = (
    "where a number is written to a float16 tensor that has none so large: float16 ends at 65504. Take float('-inf') or "
    "torch.finfo(x.dtype).min for a mask, or train in bfloat16."
)


def _on_trace(context: Any) -> None:
    """Register the model of `_run`, which dynamo traces, with `compiled_models`."""
    model = context.get_local("model")._ComptimeVar__variable.realize().value
    if (session := watchers.get(model)) is not None:
        compiled_models.note(model, session.before_compiled_forward)


_patched: dict[tuple[type, str], SharedPatches] = {}


def wrap_methods(cls: type, undo: Undo, *names: str) -> None:
    """Wrap these methods of a class until ``undo``: by default those of `_METHODS`, and the class's own public ones as calls."""
    # torch makes a class for one parametrized module, and takes it back with the last parametrization.
    while len(cls.__bases__) == 1 and cls.__name__ == f"Parametrized{cls.__base__.__name__}":
        cls = cls.__base__
    own = [
        name for name in _METHODS if name != "__deepcopy__" or hasattr(cls, name)
    ]  # others are copied by ``__reduce_ex__``
    for name in names or (*own, *_public_methods_of(cls)):
        if (cls, name) not in _patched:
            _patched[cls, name] = SharedPatches(functools.partial(_wrap_method, cls, name))
        _patched[cls, name].acquire(undo)


def _public_methods_of(cls: type) -> Iterator[str]:
    """Yield the names of the class's own public methods, such as ``generate``: not torch's, and no generators or coroutines."""
    for name in dir(cls):
        method = inspect.getattr_static(cls, name)
        if name.startswith("_") or hasattr(nn.Module, name) or not isinstance(method, types.FunctionType):
            continue
        begins_later = inspect.isgeneratorfunction(method) or inspect.iscoroutinefunction(method)
        if not begins_later and method.__module__.partition(".")[0] != "torch":
            yield name


def _wrap_method(cls: type, name: str, patches: PatchSet) -> None:
    patches.callback(_patched.pop, (cls, name), None)
    around, is_forward = _METHODS.get(name, _in_a_call), name == "forward"
    running, key = _running, CASTS_KEY  # the globals of the method are another module's
    original, stored = getattr(cls, name, None), inspect.getattr_static(cls, name, None)
    if stored is not None and not isinstance(stored, types.FunctionType):  # a static method, a property

        def original(self, *args, **kwargs):
            return stored.__get__(self, type(self))(*args, **kwargs)

    def method(self, *args, **kwargs):
        if is_forward and running.casts is not None and key not in self.__dict__:  # a part, inside of a model's forward
            return original(self, *args, **kwargs)
        return around(self, original, args, kwargs)

    # dynamo keeps graphs by code object, and no more than a few: every class needs its own. torch.jit.script compiles the source of
    # the original, with the globals of this one.
    code, names = method.__code__.replace(), getattr(original, "__globals__", globals())
    method = types.FunctionType(code, names, name, None, method.__closure__)
    patches.set(cls, name, method if original is None else functools.wraps(original)(method))
