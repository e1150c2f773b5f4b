"""The forward of an initialized model: casts inputs and outputs, and tells its session that it runs.

An initialized model's class is replaced by a subclass, so that ``model(x)`` and ``model.forward(x)`` both cast, and
DataParallel's replicas carry the behaviour with them. The instance holds a `ForwardCasts` (dtypes only); its session, where it
has one, is asked through `watchers`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ..casting.engine import active_casting
from ..casting.state import number_of_regions
from ..casting.tensors import cast_floating
from ..compiling import compiled_models
from ..errors import ConfigurationError
from .classes import InFront, is_made_here, own_class, put_in_front
from .copies import INNER_FORWARD_KEY, hand_out_plain_copies, need_no_plain_copies, remove_hooks
from .direct_calls import running
from .keep_fp32 import have_it_called
from .records import lower_entries, record_of

CASTS_KEY = "_ampkit_casts"


class Watcher(NamedTuple):
    """What a session wants done around the methods of an initialized model, which each of these is given."""

    before_forward: Callable[[nn.Module], None]
    before_compiled_forward: Callable[[nn.Module], None]
    after_zero_grad: Callable[[nn.Module], None]
    after_load: Callable[[nn.Module], None]  #: after ``load_state_dict``


watchers: weakref.WeakKeyDictionary[nn.Module, Watcher] = weakref.WeakKeyDictionary()

# Bound once: asked in every forward.
_compiling = torch.compiler.is_compiling


@dataclass(frozen=True)
class ForwardCasts:
    """What a forward does to dtypes; None leaves them alone.

    ``patched`` says that torch's functions cast inside, and ``outermost_only`` that outputs of a forward inside of another
    that is cast are left alone. ``targets_stay`` is for ``model(images, targets)`` that computes its losses itself. ``kept``
    is for what ``keep_fp32=`` names, which may lie inside of one another.
    """

    inputs: torch.dtype | None = None
    outputs: torch.dtype | None = None
    patched: bool = False
    outermost_only: bool = False
    targets_stay: bool = False
    kept: bool = False


#: A module in float32 inside a model that is not: casts of calls are off in it, and its outputs stay as they are.
KEPT = ForwardCasts(inputs=torch.float32, kept=True)


class _Shell(InFront):
    """Mixed into the class of every initialized model, in front of the model's own class."""

    def _apply(self, fn, *args, **kwargs):
        cast = list(lower_entries(self))
        result = super()._apply(fn, *args, **kwargs)
        for tensor, entry in cast:
            entry.follow(tensor)
            if tensor.dtype is torch.float32:  # the next forward says so
                record_of(self).whole.was_made_float32 = True
        return result

    def zero_grad(self, *args, **kwargs):
        super().zero_grad(*args, **kwargs)
        watcher = watchers.get(self)
        if watcher is not None:
            watcher.after_zero_grad(self)

    def _load_from_state_dict(self, *args, **kwargs):
        super()._load_from_state_dict(*args, **kwargs)
        watcher = watchers.get(self)
        if watcher is not None:
            watcher.after_load(self)

    def __prepare_scriptable__(self):
        # Asked for by torch.jit.script, which compiles from source: it would find the shell's forward.
        raise ConfigurationError(
            f"torch.jit.script was given an initialized model ({type(self).__name__}). A script is compiled from the source of "
            "the model, where no casts are. For a program with the casts use torch.export.export(model, args) or "
            "torch.jit.trace(model, args); for one without, call ampkit.close() first."
        )

    def __copy__(self):
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        hand_out_plain_copies(twin)
        return twin


def install(model: nn.Module, casts: ForwardCasts) -> None:
    """Make ``model`` cast as ``casts`` says, whichever way its forward is called."""
    if casts.kept:
        have_it_called(model)
    inner = model.__dict__.pop("forward", None)
    if inner is not None:
        model.__dict__[INNER_FORWARD_KEY] = inner
    model.__dict__[CASTS_KEY] = casts
    model.__class__ = put_in_front(own_class(type(model)), _Shell, _around)
    hand_out_plain_copies(model)


def uninstall(model: nn.Module) -> None:
    """Undo `install`. A class that somebody derived from ours since then stays, and casts nothing any more."""
    watchers.pop(model, None)
    compiled_models.forget(model)
    remove_hooks(model)
    model.__dict__.pop(CASTS_KEY, None)
    if INNER_FORWARD_KEY in model.__dict__:
        model.__dict__["forward"] = model.__dict__.pop(INNER_FORWARD_KEY)
    if is_made_here(type(model)):
        model.__class__ = own_class(type(model))
    need_no_plain_copies(model)


def cast_inputs(function: Callable) -> Callable:
    """Decorate a method of a model so that it casts as the model's ``forward`` does once it is initialized.

    At O2, O3 and O5 floating tensors among the arguments, those in containers too, are cast to the precision of the weights, and
    floating outputs as the model's are. Without initialize, or at levels that do not cast the model, the method is as it was.
    Raises nothing of its own.

    >>> class Net(torch.nn.Linear):
    ...     @cast_inputs
    ...     def encode(self, x):
    ...         return self(x)
    """

    @functools.wraps(function)
    def method(self, *args, **kwargs):
        return _run(self, functools.partial(function, self), args, kwargs)

    return method


def _around(model: nn.Module, forward: Callable, args: tuple, kwargs: dict) -> Any:
    inner = model.__dict__.get(INNER_FORWARD_KEY)
    return _run(model, inner or functools.partial(forward, model), args, kwargs)


def _run(model: nn.Module, function: Callable, args: tuple, kwargs: dict) -> Any:
    casts: ForwardCasts | None = model.__dict__.get(CASTS_KEY)
    if casts is None or (casts.kept and running.inputs is casts.inputs):  # in a kept module that is inside another
        return function(*args, **kwargs)
    traced = _compiling()
    if traced:
        _note_trace(model)
    else:
        watcher = watchers.get(model)
        if watcher is not None:
            watcher.before_forward(model)
    inside = casts.outermost_only and _is_cast_already()
    outer = running.inputs
    running.inputs = casts.inputs
    try:
        with _o1_casts(casts, traced):
            if casts.inputs is not None:
                args, kwargs = _cast_inputs(casts, args, kwargs)
            outputs = function(*args, **kwargs)
    finally:
        running.inputs = outer
    # Called from inside a forward that runs in the same dtype, the outputs go on to its next layer.
    inside = inside or (casts.inputs is not None and outer is casts.inputs)
    return outputs if casts.outputs is None or inside else cast_floating(outputs, casts.outputs)


def _cast_inputs(casts: ForwardCasts, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    if not casts.targets_stay:
        return cast_floating(args, casts.inputs), cast_floating(kwargs, casts.inputs)
    targets = {"targets": kwargs["targets"]} if "targets" in kwargs else {}
    return (*cast_floating(args[:1], casts.inputs), *args[1:]), {**cast_floating(kwargs, casts.inputs), **targets}


def _o1_casts(casts: ForwardCasts, traced: bool) -> AbstractContextManager[None]:
    """O1's casts are on in the forward of a model at O1, and off in those of others. A trace does without the cache."""
    casting = active_casting()
    if casting is None:
        return nullcontext()
    if casts.kept or not (casts.patched or casting.covers_every_model):
        return casting.disabled()
    return casting.scope_of_forward()


def _is_cast_already() -> bool:
    casting = active_casting()
    return casting is not None and (casting.is_on() or number_of_regions() > 0)


def _note_trace(model: nn.Module) -> None:
    """What precedes a forward stays outside of a graph: see `compiled_models`.

    torch.export without dynamo runs the forward with fake weights in their places: see `exporting`.
    """
    if torch.compiler.is_dynamo_compiling():
        from torch._dynamo.comptime import comptime

        comptime(_on_trace)


def _on_trace(context: Any) -> None:
    variable = context.get_local("model")._ComptimeVar__variable.realize()
    watcher = watchers.get(variable.value)
    if watcher is not None:
        compiled_models.note(variable.value, watcher.before_compiled_forward)
