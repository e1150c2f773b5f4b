"""The forward of an initialized model: casts inputs and outputs, and tells its session that it runs.

An initialized model's class is replaced by a subclass made here, so that ``model(x)`` and ``model.forward(x)`` both
cast, and deepcopy, pickle and DataParallel's replicas carry the behaviour with them. The instance holds a `ForwardCasts`
(dtypes only); its session, where it has one, is asked through `watchers`.

A deep copy or an unpickled model belongs to no session. It holds its weights in float32, its own, and casts them at each
forward: an exponential moving average of its parameters is then a float32 average.
"""

from __future__ import annotations

import copy
import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..casting.engine import active_casting
from ..casting.state import number_of_regions
from ..casting.tensors import cast_floating
from ..compiling import compiled_models
from ..errors import ConfigurationError
from .direct_calls import cast_direct_calls, casts_direct_calls, leave_direct_calls, running
from .keep_fp32 import (
    ACTIVATION_KEY,
    bridge,
    have_it_called,
    leave_inputs,
    need_not_be_called,
    take_inputs_down,
    takes_inputs_down,
    unbridge,
)
from .weights import RECORD_KEY, follow_devices, forget_weights, lower_entries, synchronize_weights

CASTS_KEY = "_ampkit_casts"
INNER_FORWARD_KEY = "_ampkit_inner_forward"

watchers: weakref.WeakKeyDictionary[nn.Module, Callable[[nn.Module], None]] = weakref.WeakKeyDictionary()
"""Initialized model -> what its session wants done before each forward."""

clearers: weakref.WeakKeyDictionary[nn.Module, Callable[[nn.Module], None]] = weakref.WeakKeyDictionary()
"""Initialized model -> what its session wants done after ``model.zero_grad()``."""

loaders: weakref.WeakKeyDictionary[nn.Module, Callable[[nn.Module], None]] = weakref.WeakKeyDictionary()
"""Initialized model -> what its session wants done after ``model.load_state_dict()``."""

# Bound once: asked in every forward.
_compiling = torch.compiler.is_compiling

# Who runs the forward of a copy: threads take turns, since each would undo the other's casts of its weights.
_turns: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_turns_are_made = threading.Lock()

_shell_classes: weakref.WeakValueDictionary[type, type] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class ForwardCasts:
    """What a forward does to dtypes; None leaves them alone.

    ``patched`` says that torch's functions cast inside, and ``outermost_only`` that outputs of a forward inside of another
    that is cast are left alone. ``targets_stay`` is for ``model(images, targets)`` that computes its losses itself. ``kept``
    is for what ``keep_fp32=`` names, which may lie inside of one another. ``weights`` is set on copies only: the dtype in which
    to run the float32 weights listed in ``weight_names``.
    """

    inputs: torch.dtype | None = None
    outputs: torch.dtype | None = None
    patched: bool = False
    outermost_only: bool = False
    targets_stay: bool = False
    kept: bool = False
    weights: torch.dtype | None = None
    weight_names: tuple[tuple[str, str], ...] = ()


#: A module in float32 inside a model that is not: casts of calls are off in it, and its outputs stay as they are.
KEPT = ForwardCasts(inputs=torch.float32, kept=True)


class _Shell:
    """Mixed into the class of every initialized model, in front of the model's own class."""

    def __init_subclass__(cls, **kwargs):
        # A base that keeps a register of its subclasses, or wants arguments from them, must not hear of ours.
        if "_ampkit_shell" not in cls.__dict__:
            super().__init_subclass__(**kwargs)

    def _apply(self, fn, *args, **kwargs):
        result = super()._apply(fn, *args, **kwargs)
        follow_devices(self)
        return result

    def zero_grad(self, *args, **kwargs):
        super().zero_grad(*args, **kwargs)
        clearer = clearers.get(self)
        if clearer is not None:
            clearer(self)

    def _load_from_state_dict(self, *args, **kwargs):
        super()._load_from_state_dict(*args, **kwargs)
        loader = loaders.get(self)
        if loader is not None:
            loader(self)

    def __prepare_scriptable__(self):
        # Asked for by torch.jit.script, which compiles from source: it would find the shell's forward.
        raise ConfigurationError(
            f"torch.jit.script was given an initialized model ({type(self).__name__}). A script is compiled from the source of "
            "the model, where no casts are. For a program with the casts use torch.export.export(model, args) or "
            "torch.jit.trace(model, args); for one without, call ampkit.close() first."
        )

    def __copy__(self):
        # copy.copy shares the submodules: unlike a deep copy it must not turn the shared weights into float32.
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def __deepcopy__(self, memo):
        synchronize_weights(self)
        _copy_masters_and_weights_as_one(self, memo)
        if hasattr(super(), "__deepcopy__"):
            return _copy_by_its_own_method(self, memo)
        function, arguments, state, *_ = self.__reduce_ex__(4)
        twin = memo[id(self)] = function(*arguments)
        twin.__setstate__(copy.deepcopy(state, memo))
        return twin

    def __reduce_ex__(self, protocol):
        synchronize_weights(self)
        function, arguments, *rest = super().__reduce_ex__(protocol)
        if arguments and arguments[0] is type(self):
            return (_new_shell, (_own_class(self), *arguments[1:]), *rest)
        return (function, arguments, *rest)

    def __setstate__(self, state):
        super().__setstate__(state)
        _own_float32_weights(self)


def install(model: nn.Module, casts: ForwardCasts) -> None:
    """Make ``model`` cast as ``casts`` says, whichever way its forward is called."""
    if casts.kept:
        have_it_called(model)
    inner = model.__dict__.pop("forward", None)
    if inner is not None:
        model.__dict__[INNER_FORWARD_KEY] = inner
    model.__dict__[CASTS_KEY] = casts
    model.__class__ = _shell_class(_own_class(model))


def uninstall(model: nn.Module) -> None:
    """Undo `install`. A class that somebody derived from ours since then stays, and casts nothing any more."""
    watchers.pop(model, None)
    clearers.pop(model, None)
    loaders.pop(model, None)
    compiled_models.forget(model)
    need_not_be_called(model)
    model.__dict__.pop(CASTS_KEY, None)
    if INNER_FORWARD_KEY in model.__dict__:
        model.__dict__["forward"] = model.__dict__.pop(INNER_FORWARD_KEY)
    if _shell_classes.get(_own_class(model)) is type(model):
        model.__class__ = _own_class(model)


def take_off_copies(model: nn.Module) -> Callable[[nn.Module], None]:
    """Make every copy of an initialized model in ``model``, itself included, a plain module. Returns the undo."""
    worn = {}
    for name, copied in model.named_modules():
        if CASTS_KEY in copied.__dict__ and copied not in watchers:
            bridged = {n: m.__dict__[ACTIVATION_KEY] for n, m in copied.named_modules() if ACTIVATION_KEY in m.__dict__}
            lowering = [n for n, m in copied.named_modules() if takes_inputs_down(m)]
            entered = [n for n, m in copied.named_modules() if casts_direct_calls(m)]
            worn[name] = copied.__dict__[CASTS_KEY], bridged, lowering, entered
    modules = dict(model.named_modules())
    for name in worn:
        for module in modules[name].modules():
            unbridge(module)
            leave_inputs(module)
            leave_direct_calls(module)
        uninstall(modules[name])

    def put_on(model: nn.Module) -> None:
        modules = dict(model.named_modules())
        for name, (casts, bridged, lowering, entered) in worn.items():
            if name in modules:
                install(modules[name], casts)
                inner = dict(modules[name].named_modules())
                for path in bridged.keys() & inner.keys():
                    bridge(inner[path], bridged[path])
                for path in inner.keys() & set(lowering):
                    take_inputs_down(inner[path])
                for path in inner.keys() & set(entered):
                    cast_direct_calls(inner[path])

    return put_on


def cast_inputs(function: Callable) -> Callable:
    """Decorate a method of a model so that it casts as the model's ``forward`` does once it is initialized.

    Without initialize, or at levels that do not cast the model, the method is as it was.

    >>> class Net(torch.nn.Linear):
    ...     @cast_inputs
    ...     def encode(self, x):
    ...         return self(x)
    """

    @functools.wraps(function)
    def method(self, *args, **kwargs):
        return _run(self, functools.partial(function, self), args, kwargs)

    return method


def _own_class(model: nn.Module) -> type:
    """The class that the model had before `install`."""
    cls = type(model)
    return next((c.__mro__[2] for c in cls.__mro__ if c.__dict__.get("_ampkit_shell")), cls)


def _shell_class(base: type) -> type:
    shell = _shell_classes.get(base)
    if shell is None:

        @functools.wraps(base.forward)
        def forward(self, *args, **kwargs):
            inner = self.__dict__.get(INNER_FORWARD_KEY)
            return _run(self, inner or functools.partial(base.forward, self), args, kwargs)

        # dynamo keeps graphs by code object, and no more than a few: every class needs its own.
        forward.__code__ = forward.__code__.replace()
        namespace = {
            "_ampkit_shell": True,
            "forward": forward,
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
        }
        shell = types.new_class(base.__name__, (_Shell, base), exec_body=lambda ns: ns.update(namespace))
        _shell_classes[base] = shell
    return shell


def _new_shell(base: type, *arguments: object) -> nn.Module:
    """Unpickling starts here: an instance of the shell around the model's own class."""
    shell = _shell_class(base)
    return shell.__new__(shell, *arguments)


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
            watcher(model)
    inside = casts.outermost_only and _is_cast_already()
    outer = running.inputs
    running.inputs = casts.inputs
    try:
        with _o1_casts(casts, traced), _lower_weights(model, casts, traced):
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
    if not casts.patched:
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
        compiled_models.note(variable.value, watcher)


def _copy_masters_and_weights_as_one(model: nn.Module, memo: dict[int, Any]) -> None:
    """A copy has one float32 parameter for a weight and its master: an optimizer copied along then trains the copy."""
    for _, _, tensor, entry in lower_entries(model):
        if isinstance(entry.value, nn.Parameter) and tensor is not None and id(tensor) not in memo:
            twin = memo.get(id(entry.value))
            if twin is None:
                twin = nn.Parameter(entry.value.detach().to(tensor.device, copy=True))
            memo[id(tensor)] = memo[id(entry.value)] = twin.requires_grad_(tensor.requires_grad)


def _copy_by_its_own_method(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A class with a ``__deepcopy__`` (torch.fx's) may count on being the first of its bases, and drop what it does not know."""
    shell, own = type(model), _own_class(model)
    model.__class__ = own
    try:
        twin = own.__deepcopy__(model, memo)
    finally:
        model.__class__ = shell
    for key in (CASTS_KEY, RECORD_KEY):
        if key in model.__dict__:
            twin.__dict__.setdefault(key, copy.deepcopy(model.__dict__[key], memo))
    _own_float32_weights(twin)
    twin.__class__ = _shell_class(_own_class(twin))
    return twin


def _own_float32_weights(model: nn.Module) -> None:
    """Turn a fresh copy of a cast model into one that owns float32 weights and casts them at each forward."""
    casts: ForwardCasts | None = model.__dict__.get(CASTS_KEY)
    names = [(prefix, name) for prefix, module in model.named_modules() for name in _record_names(module)]
    if casts is None or not names:
        return
    lower = None
    for module, _, tensor, entry in lower_entries(model):
        lower = module.__dict__[RECORD_KEY].lower_precision
        if tensor.dtype is lower:
            # Not entry.current(): version counters start anew in a copy, and synchronize_weights came before it.
            tensor.data = tensor.float() if entry.value is None else entry.value.detach().to(tensor.device)
    forget_weights(model)
    model.__dict__[CASTS_KEY] = replace(casts, weights=lower, weight_names=tuple(names))


def _record_names(module: nn.Module) -> list[str]:
    record = module.__dict__.get(RECORD_KEY)
    return list(record.lower) if record is not None else []


def _lower_weights(model: nn.Module, casts: ForwardCasts, traced: bool) -> AbstractContextManager[None]:
    """A copy's weights in lower precision for the time of one forward, in one thread; those of others are so already."""
    if casts.weights is None:
        return nullcontext()
    return _weights_lowered(model, casts) if traced else _weights_lowered_in_turn(model, casts)


@contextmanager
def _weights_lowered_in_turn(model: nn.Module, casts: ForwardCasts) -> Iterator[None]:
    with _turns_are_made:
        turn = _turns.setdefault(model, threading.RLock())
    with turn, _weights_lowered(model, casts):
        yield


@contextmanager
def _weights_lowered(model: nn.Module, casts: ForwardCasts) -> Iterator[None]:
    """Put casts of a copy's float32 weights in their places for the time of one forward.

    The casts are part of the autograd graph, so a copy can be trained. Buffers that the forward writes to are copied back.
    """
    casted: dict[torch.Tensor, torch.Tensor] = {}
    places = []
    for prefix, name in casts.weight_names:
        module = model.get_submodule(prefix)
        tensors = module._parameters if name in module._parameters else module._buffers
        tensor = tensors.get(name)
        if tensor is not None and tensor.dtype is torch.float32:
            if tensor not in casted:
                casted[tensor] = tensor.to(casts.weights)
            places.append((module, tensors, name, tensor, casted[tensor]))
    versions = {tensor: lower._version for tensor, lower in casted.items()}
    try:
        for _, tensors, name, _, lower in places:
            tensors[name] = lower
        _refresh_flat_weights(places)
        yield
    finally:
        for module, tensors, name, tensor, lower in places:
            written = tensors[name]
            tensors[name] = tensor
            if tensors is module._buffers and (written is not lower or lower._version != versions[tensor]):
                with torch.no_grad():
                    tensor.copy_(written)
        _refresh_flat_weights(places)


def _refresh_flat_weights(places: list[tuple]) -> None:
    """Recurrent modules keep a list of their weights beside their parameters."""
    for module in {place[0] for place in places if isinstance(place[0], nn.RNNBase)}:
        module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]
