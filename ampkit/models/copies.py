"""State dicts, copies and pickles of initialized models, weights and optimizers: plain float32, without ampkit's attributes.

A weight that is stored in lower precision is saved, copied and pickled in float32, whatever holds it: a module, an optimizer,
a list. Only models and kept modules, on which ampkit sets attributes, need ``__deepcopy__`` and ``__reduce_ex__`` of their own.
"""

from __future__ import annotations

import copy
import functools
import multiprocessing.context
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import reduce_tensor

from ..casting.tensors import cast_state
from ..errors import ConfigurationError
from .float32_values import members, own_stored_weights, value_of

INNER_FORWARD_KEY = "_ampkit_inner_forward"

_METHODS = ("__deepcopy__", "__reduce_ex__")
_PREFIX = "_ampkit_"


def save(original: Callable, self: nn.Module, destination: dict, prefix: str, keep_vars: bool) -> None:
    """Put copies of the float32 values into ``state_dict()``; with ``keep_vars=True`` as parameters."""
    original(self, destination, prefix, keep_vars)
    for name, lower, master in own_stored_weights(self):
        key = prefix + name
        destination[key] = master.in_state_dict(lower, destination, key, keep_vars)


def load(original: Callable, self: nn.Module, state_dict: dict, prefix: str, metadata: dict, *args: Any) -> None:
    """Load a ``state_dict()`` into weights and rests.

    Values in lower precision are left to torch: a write like any other, after which a script may restore the old values.
    """
    if metadata.get("assign_to_params_buffers") and self in members:
        raise ConfigurationError(
            "load_state_dict(assign=True) was called on an initialized model: it would put other tensors in the place of the "
            "weights that the optimizer updates. Leave assign=True out (the values are copied, in float32), or load before "
            "initialize()."
        )
    masters = list(own_stored_weights(self))
    for _, _, master in masters:
        master.loans.end(master)  # what was written to a loan before is older
    original(self, state_dict, prefix, metadata, *args)
    for name, tensor, master in masters:
        loaded = state_dict.get(prefix + name)
        if isinstance(loaded, torch.Tensor) and loaded.shape == tensor.shape and loaded.is_floating_point():
            if loaded.dtype is not tensor.dtype:
                master.put(tensor, loaded)


def float32_copy(param: nn.Parameter) -> nn.Parameter | None:
    """Return the float32 parameter to copy or pickle for a weight that is stored in lower precision, None for any other."""
    if (master := value_of(param)) is None:
        return None
    return nn.Parameter(master.current(param), param.requires_grad)


def copy_parameter(original: Callable, self: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    if id(self) not in memo and (plain := float32_copy(self)) is not None:
        memo[id(self)] = plain
    return original(self, memo)


def pickle_parameter(original: Callable, self: nn.Parameter, protocol: int) -> Any:
    if (plain := float32_copy(self)) is None:
        return original(self, protocol)
    plain.__dict__.update(self.__dict__)  # torch pickles attributes, and does not copy them
    return original(plain, protocol)


def pickle_for_process(param: nn.Parameter) -> Any:
    """Pickle a parameter for another process. While a child is spawned, its shared memory is kept alive until the child has it."""
    plain, popen = float32_copy(param), multiprocessing.context.get_spawning_popen()
    if plain is not None and popen is not None:
        vars(popen).setdefault("_ampkit_shared", []).append(plain)
    return reduce_tensor(param if plain is None else plain)


def prevent_fused_kernel(module: nn.Module, args: tuple) -> None:
    """Do nothing: with a hook on a part, torch's TransformerEncoderLayer calls its parts instead of one fused kernel."""


def make_copies_plain(model: nn.Module) -> None:
    """Make deep copies and pickles of a model plain: without ampkit's attributes and hooks."""
    for name, function in zip(_METHODS, (_deepcopy, _reduce)):
        model.__dict__[name] = functools.partial(function, weakref.ref(model))


def remove_attributes(model: nn.Module) -> None:
    """Remove every attribute and hook that ampkit has set on a model."""
    attributes = model.__dict__
    if INNER_FORWARD_KEY in attributes:
        attributes["forward"] = attributes.pop(INNER_FORWARD_KEY)
    for key in [key for key in attributes if key in _METHODS or key.startswith(_PREFIX)]:
        del attributes[key]
    hooks = attributes["_forward_pre_hooks"]
    for number in [number for number, hook in hooks.items() if hook is prevent_fused_kernel]:
        del hooks[number]


def _plain_twin(model: nn.Module) -> nn.Module:
    """Return a shallow copy of the model without ampkit's attributes, over the same tensors and modules."""
    plain = object.__new__(type(model))
    plain.__dict__.update(model.__dict__, _forward_pre_hooks=model._forward_pre_hooks.copy())
    remove_attributes(plain)
    return plain


def _deepcopy(ref: weakref.ref[nn.Module], memo: dict[int, Any]) -> nn.Module:
    model = ref()
    plain = _plain_twin(model)
    if not hasattr(type(plain), "__deepcopy__"):
        return copy._reconstruct(model, memo, *plain.__reduce_ex__(4))
    twin = memo[id(model)] = type(plain).__deepcopy__(plain, memo)
    copy._keep_alive(plain, memo)
    return twin


def _reduce(ref: weakref.ref[nn.Module], protocol: int) -> Any:
    return _plain_twin(ref()).__reduce_ex__(protocol)


def make_state_plain(optimizer: Any) -> None:
    """Make copies of an optimizer, whose weights are copied in float32, have float32 moments: torch cannot mix dtypes."""
    optimizer.__dict__["__getstate__"] = functools.partial(_plain_state, weakref.ref(optimizer))


def _plain_state(ref: weakref.ref) -> Any:
    optimizer = ref()
    attributes = type(optimizer).__getstate__(optimizer)
    if not isinstance(attributes, dict) or "state" not in attributes:
        return attributes
    state = attributes["state"].copy()
    for param, moments in state.items():
        if isinstance(param, torch.Tensor) and isinstance(moments, dict):
            state[param] = {**moments, **cast_state(moments, torch.float32)}
    return {**attributes, "state": state}
