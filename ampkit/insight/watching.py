"""A dispatch mode that passes every operator to its subclass as a `Call`: with its line, function and module.

An operator of the backward pass has the line and the module of its forward. Autograd numbers its nodes in order: the newest number
while an operator runs forward is that of its own node.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ..dtypes import LOWER_PRECISION
from ..events import Listener, forwards, listening
from ..patching import SharedPatches
from .sites import Site, look

_current_node = torch._C._current_autograd_node
_newest_node = torch._C._autograd._get_sequence_nr

_DTYPES = [dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)]
FLOATING = frozenset(dtype for dtype in _DTYPES if dtype.is_floating_point)
COMPLEX = frozenset(dtype for dtype in _DTYPES if dtype.is_complex)

STATISTICS = ("running_mean", "running_var")

# Operators whose name differs from that of the function that calls them.
_NAMES = {
    "native_layer_norm": "layer_norm",
    "native_group_norm": "group_norm",
    "native_batch_norm": "batch_norm",
    "cudnn_batch_norm": "batch_norm",
    "fused_rms_norm": "rms_norm",
    "convolution": "conv",
    "mm": "matmul",
    "bmm": "matmul",
    "addmm": "linear",
    "nll_loss_forward": "nll_loss",
    "to_copy": "cast",
    "native_dropout": "dropout",
    "local_scalar_dense": "item",
}


class Enough(BaseException):
    """An exception that ends a script when its observer has seen enough."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of an operator: the ``site``, ``function`` and ``module`` of its `Call`; ``op`` is the operator of torch."""

    site: Site | None = None
    function: str = ""
    op: str = ""
    module: str = ""
    backward: bool = False

    @property
    def source(self) -> str:
        return self.site.source if self.site else ""


@dataclass
class Call:
    """A call of an operator that is about to run. ``call()`` runs it.

    ``site`` is the user's line, or None. ``function`` is the public name of the function that the line calls (``"torch.exp"``), or
    the operator's. ``module`` is the path of the innermost module that ran (``"layers.0.norm"``; ``""`` for the model itself, and
    outside of it). In a backward pass all three are the forward's; ``node`` is the name of the autograd node, with its ``number``.
    ``recomputed`` says that torch.utils.checkpoint runs it again during a backward pass. ``passed`` are the owners of the frames
    between the line and the operator.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    site: Site | None = None
    function: str = ""
    module: str = ""
    node: str | None = None
    number: int = -1
    recomputed: bool = False
    passed: Collection[str] = ()

    def __call__(self) -> Any:
        try:
            return self.op(*self.args, **self.kwargs)
        except RuntimeError as error:
            if "Expected a value of type 'Tensor'" not in str(error):
                raise
        # Constants of TorchScript are tensors, but a dispatch mode receives them as numbers.
        places = zip(self.op._schema.arguments, self.args)
        tensor = torch._C.TensorType.get()
        self.args = tuple(
            torch.tensor(value) if isinstance(value, (int, float)) and place.type == tensor else value
            for place, value in places
        )
        return self.op(*self.args, **self.kwargs)

    @property
    def backward(self) -> bool:
        return self.node is not None

    @property
    def name(self) -> str:
        """The operator's name, without namespace, underscores and overload: ``"softmax"``."""
        return operator_name(self.op)

    def where(self) -> dict[str, Any]:
        """Return the fields of a `Place`, for reports."""
        place = {"site": self.site, "function": self.function, "op": str(self.op), "module": self.module}
        return {**place, "backward": self.backward}

    def inputs(self) -> list[torch.Tensor]:
        return tensors_in((self.args, self.kwargs))

    def written(self) -> list[torch.Tensor]:
        """The arguments that the operator writes to."""
        return [tensor for _, tensor in arguments_written(self.op, self.args, self.kwargs)]


class Watch(TorchDispatchMode, Listener):
    """A dispatch mode over all operators inside ``with``, also in threads that autograd starts. Subclasses override `around`.

    ``looks_at_views`` says whether `around` is called for views in the backward pass, which compute nothing.
    """

    looks_at_views = True
    sources: tuple[SharedPatches, ...] = (forwards,)  # sources of events

    def __init__(self) -> None:
        super().__init__()
        self.modules: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()  # and their paths
        self._running = defaultdict[int, list[nn.Module]](list)  # by thread
        self._forward: dict[int, tuple[Site | None, str, str]] = {}  # site, function and module, by number of the node
        self._newest: dict[int, int] = {}  # number of the newest node, by thread
        self._listening = ExitStack()

    def around(self, call: Call) -> Any:
        return call()

    @property
    def is_inside(self) -> bool:
        return bool(self._running[threading.get_ident()])

    def on_module(self, module: nn.Module) -> None:
        """Handle a module that begins and is no submodule of an earlier one."""

    def on_loss(self, losses: list[torch.Tensor]) -> None:
        """Handle the losses before a backward pass; called by a `Repetition`."""

    def on_gradients(self, gradients: list[torch.Tensor]) -> None:
        """Handle all gradients after a `Repetition`'s backward pass. Running statistics may be bad even if no gradient is."""
        self.on_loss([*gradients, *self.statistics()])

    def statistics(self) -> list[torch.Tensor]:
        """Return the running means and variances of batch norms."""
        buffers = (pair for module in list(self.modules) for pair in module.named_buffers(recurse=False))
        return [buffer for name, buffer in buffers if name in STATISTICS]

    def name_of(self, tensor: torch.Tensor) -> str:
        """Return the name of a parameter or buffer of a model that has run, or of its view (``Linear's 'weight'``); else ``""``."""
        whole = tensor._base if tensor._is_view() else tensor
        for module in list(self.modules):
            for name, x in (*module._parameters.items(), *module._buffers.items()):
                if x is whole:
                    return f"{type(module).__name__}'s {name!r}"
        return ""

    def __enter__(self) -> Any:
        self._listening.enter_context(listening(self, *self.sources))
        if "torch._dynamo" in sys.modules:  # a dispatch mode sees no operators of compiled code
            self._listening.enter_context(torch.compiler.set_stance("force_eager"))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._listening.close()
        super().__exit__(*error)

    def forward_begins(self, module: nn.Module, _args: Any) -> None:
        if module not in self.modules:
            for path, part in module.named_modules():
                self.modules.setdefault(part, path)
            self.on_module(module)
        self._running[threading.get_ident()].append(module)

    def forward_ends(self, module: nn.Module) -> None:
        running = self._running[threading.get_ident()]
        if module in running:
            del running[running.index(module) :]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell torch to add no guard against dynamo around each call: compiled code runs eagerly."""
        return False

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.is_view and not self.looks_at_views and _current_node() is not None and not torch.is_grad_enabled():
            return op(*args, **(kwargs or {}))
        return self.around(self._located(op, args, kwargs or {}))

    def _located(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        node = _current_node()
        site, function, passed = look()
        if node is not None and site is None:
            number = node._sequence_nr()
            if number in self._forward:
                return Call(op, args, kwargs, *self._forward[number], node.name(), number)
            # The node is older than the watch: use the line that calls backward().
            return Call(op, args, kwargs, look(past_engine=True)[0], operator_name(op), "", node.name(), number)
        thread = threading.get_ident()
        running = self._running[thread]
        module = self.modules[running[-1]] if running else ""
        function = function or operator_name(op)
        number = _newest_node() - 1
        if self._newest.get(thread) != number:
            self._newest[thread] = number
            self._forward[number] = site, function, module
        # Autograd runs code of the script: a recomputation, or without a graph the backward of an autograd.Function, or a hook.
        recomputed = node is not None and torch.is_grad_enabled()
        name = None if node is None or recomputed else node.name()
        return Call(op, args, kwargs, site, function, module, name, recomputed=recomputed, passed=passed)


@functools.cache
def operator_name(op: Any) -> str:
    name = op._schema.name.partition("::")[2].strip("_")
    return _NAMES.get(name, name)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in tuples, lists and dicts; faster than `casting.tensors`, which handles more containers."""
    tensors, values = list[torch.Tensor](), [tree]
    for value in values:  # which grow
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (tuple, list)):
            values.extend(value)
        elif isinstance(value, dict):
            values.extend(value.values())
    return tensors


def cast(tree: Any, dtype: torch.dtype, kinds: Collection[torch.dtype] = LOWER_PRECISION) -> Any:
    """Cast the tensors in ``tree`` whose dtype is in ``kinds`` to ``dtype``, and replace such dtypes among the arguments too."""

    def cast_value(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(dtype) if value.dtype in kinds else value
        return dtype if isinstance(value, torch.dtype) and value in kinds else value

    return tree_map(cast_value, tree)


def stored_in(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself, or the values of a sparse or nested one."""
    if tensor.layout is torch.strided and not tensor.is_nested:
        return tensor
    return tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()


def address(tensor: torch.Tensor) -> int:
    """Return a key that is equal for tensors that share memory."""
    return stored_in(tensor).untyped_storage()._cdata


def place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for tensors that are the same part of the same memory."""
    values = stored_in(tensor)
    return address(values), values.storage_offset(), tuple(values.shape), values.stride()


def arguments_written(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the tensor of each argument that an operator writes to."""
    for place, name in _places_written(op):
        value = args[place] if place < len(args) else kwargs.get(name)
        yield from ((name, tensor) for tensor in tensors_in(value))


@functools.cache
def _places_written(op: Any) -> list[tuple[int, str]]:
    """The positions and names of arguments that an operator writes to; torch's schemas omit running statistics."""
    return [
        (place, argument.name)
        for place, argument in enumerate(op._schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write) or argument.name in STATISTICS
    ]
