"""Copies and pickles of initialized modules and optimizers: plain float32, of their own class, with nothing of ours.

``copy.copy`` and DataParallel's replicas share weights with their original and stay as it is.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import multiprocessing.context
import weakref
from collections import defaultdict
from typing import Any

import torch
from torch import nn

from ..casting.state import stored
from ..dtypes import LOWER_PRECISION
from .float32_values import lower_in

INNER_FORWARD_KEY = "_ampkit_inner_forward"

_METHODS = ("__deepcopy__", "__reduce_ex__")
_PREFIX = "_ampkit_"


def hand_out_plain_copies(module: nn.Module) -> None:
    """Have deep copies and pickles of the module itself be plain; its submodules see to their own."""
    ref = weakref.ref(module)
    for name, function in zip(_METHODS, (_deepcopy, _reduce)):
        module.__dict__[name] = functools.partial(function, ref)


def take_off(module: nn.Module) -> None:
    """Take everything away that this package has put on a module."""
    attributes = module.__dict__
    if INNER_FORWARD_KEY in attributes:
        attributes["forward"] = attributes.pop(INNER_FORWARD_KEY)
    for key, value in list(attributes.items()):
        if key in _METHODS or key.startswith(_PREFIX):
            del attributes[key]
        elif key.endswith("_hooks") and isinstance(value, dict):
            for number, hook in list(value.items()):
                # torch wraps hooks of load_state_dict.
                if getattr(getattr(hook, "hook", hook), "__module__", "").startswith(f"{__package__}."):
                    del value[number]
                    module._forward_pre_hooks_with_kwargs.pop(number, None)


def stand_in(module: nn.Module) -> nn.Module:
    """A plain module that shares all but lower-precision weights with ``module``."""
    plain = object.__new__(type(module))
    attributes = plain.__dict__
    for key, value in module.__dict__.items():
        is_of_hooks = key.endswith(("_hooks", "_hooks_with_kwargs")) and isinstance(value, dict)
        attributes[key] = value.copy() if is_of_hooks else value
    take_off(plain)
    float32 = {id(tensor): value for tensor, value in _float32_values(module)}
    parameters = attributes["_parameters"]
    attributes["_parameters"] = type(parameters)((name, float32.get(id(p), p)) for name, p in parameters.items())
    attributes["_buffers"] = attributes["_buffers"].copy()
    if isinstance(module, nn.RNNBase):
        weights = [float32.get(id(weight), weight) for weight in module._flat_weights]
        attributes["_flat_weights"] = weights
        attributes["_flat_weight_refs"] = [None if weight is None else weakref.ref(weight) for weight in weights]
    return plain


def _float32_values(module: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """(lower-precision parameter, what is copied in its place) for the module's own."""
    return [(param, entry.in_copies(param)) for _, param, entry in lower_in(module)]


def _deepcopy(ref: weakref.ref[nn.Module], memo: dict[int, Any]) -> nn.Module:
    module = ref()
    plain = stand_in(module)
    for param, value in _float32_values(module):
        _copy_as_one(param, value, memo)
    if hasattr(type(plain), "__deepcopy__"):
        twin = memo[id(module)] = type(plain).__deepcopy__(plain, memo)
        copy._keep_alive(plain, memo)
        return twin
    return copy._reconstruct(module, memo, *plain.__reduce_ex__(4))


def _copy_as_one(lower: nn.Parameter, value: nn.Parameter, memo: dict[int, Any]) -> None:
    """One parameter for a weight and what stands for it, whichever of them the copy met first."""
    if id(lower) not in memo:
        memo[id(lower)] = copy.deepcopy(value, memo)
    elif id(value) not in memo:  # the optimizer held the weight itself, and was copied before
        twin = memo[id(value)] = memo[id(lower)]
        twin.data = value.detach().clone()
        copy._keep_alive(value, memo)


def hand_out_plain_state(optimizer: Any) -> None:
    """Have copies and pickles of an optimizer over lower-precision weights hold the parameters that copies of the modules hold.

    Moments become float32 as well: torch's optimizers cannot mix dtypes.
    """
    optimizer.__dict__["__getstate__"] = functools.partial(_plain_state, weakref.ref(optimizer))


def _plain_state(ref: weakref.ref) -> Any:
    optimizer = ref()
    own = type(optimizer).__getstate__(optimizer)
    if not isinstance(own, dict) or not {"state", "param_groups"} <= own.keys():
        return own

    def plain(thing: Any) -> Any:
        if not isinstance(thing, torch.Tensor):
            return thing
        if (entry := stored.get(thing)) is not None:
            return entry.in_copies(thing)
        return thing.float() if thing.dtype in LOWER_PRECISION else thing

    groups = [{**group, "params": [plain(param) for param in group["params"]]} for group in own["param_groups"]]
    state = defaultdict(dict)
    for key, moments in own["state"].items():
        is_of_param = isinstance(key, torch.Tensor) and isinstance(moments, dict)
        state[plain(key)] = {name: plain(moment) for name, moment in moments.items()} if is_of_param else moments
    return {**own, "state": state, "param_groups": groups}


def _reduce(ref: weakref.ref[nn.Module], protocol: int) -> Any:
    module = ref()
    plain = stand_in(module)
    # A process that is being spawned gets shared memory, which has to live until the child has opened it.
    if (popen := multiprocessing.context.get_spawning_popen()) is not None:
        vars(popen).setdefault("_ampkit_shared", []).append(plain._parameters)
    function, arguments, *rest = plain.__reduce_ex__(protocol)
    if function is copyreg.__newobj__ and arguments[0] is not type(module):
        # pickle checks that __newobj__ gives an instance of the class it sees.
        return (arguments[0].__new__, arguments, *rest)
    return (function, arguments, *rest)
