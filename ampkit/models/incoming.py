"""Models that are loaded in float16 or bfloat16: trained weights are float32 while a session lives.

`widen_models` is the first thing that a session does to its models; `Incoming.give_back` undoes it, last of all. A session that
takes over the models of an earlier one takes over its record too, without rounding in between.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .. import kernels
from ..casting.tensors import cast_state, params_of, states_to_cast, tensors_in
from ..dtypes import LOWER_PRECISION
from ..logs import logger
from ..patching import by_tensor
from ..sharding import fsdp_modules
from .shared_memory import refuse_shared_memory

Plan = Any  # plan.py's, which stands above this room


class Incoming:
    """The original dtypes of parameters and buffers that were loaded in lower precision."""

    def __init__(self) -> None:
        self._dtypes = by_tensor()  # of parameters
        # Of each module of these models, by name: modules put other tensors in the places of their buffers.
        self._buffers: weakref.WeakKeyDictionary[nn.Module, dict[str, torch.dtype]] = weakref.WeakKeyDictionary()
        self._with_float32_state: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers

    def inherit(self, earlier: Incoming, models: Sequence[nn.Module]) -> None:
        """Move an earlier session's record of ``models`` here, before it closes: it then leaves these in float32."""
        self._with_float32_state |= earlier._with_float32_state
        for model in models:
            for record in ("_dtypes", "_buffers"):
                dtypes, keys = getattr(earlier, record), (*model.parameters(), *model.modules())
                getattr(self, record).update({key: dtypes.pop(key) for key in keys if key in dtypes})

    def dtypes_of(self, model: nn.Module) -> set[torch.dtype]:
        """Return the recorded original dtypes of the model's parameters."""
        return {self._dtypes[param] for param in model.parameters() if param in self._dtypes}

    def widen(
        self, models: Sequence[nn.Module], optimizers: Sequence[Any], keeps: Callable[[torch.Tensor], bool], plan: Plan
    ) -> list[tuple[nn.Module, torch.dtype, int]]:
        """Make lower-precision tensors float32, in place, with their gradients and optimizer state.

        Parameters for which ``keeps`` is True keep their dtype, and so do the buffers of their modules, and all buffers of a model
        with such parameters only. Returns (model, its dtype, number of tensors) for each model that was changed.
        """
        widened = []
        taken_over = set(map(id, self._dtypes))
        for model in models:
            every = list(model.parameters())
            params = [param for param in every if param.dtype in LOWER_PRECISION and not keeps(param)]
            buffers: list[torch.Tensor] = []
            for module in model.modules() if not every or not all(map(keeps, every)) else ():
                if any(x is not None and x.dtype in LOWER_PRECISION and keeps(x) for x in module._parameters.values()):
                    continue
                names = {name: x for name, x in module.named_buffers(recurse=False) if x.dtype in LOWER_PRECISION}
                self._buffers.setdefault(module, {}).update({name: x.dtype for name, x in names.items()})
                buffers += names.values()
            if not params and not buffers:
                continue
            widened.append((model, [*params, *buffers][0].dtype, len(params) + len(buffers)))
            refuse_shared_memory(models, set(params), plan)
            self.widen_params(params, optimizers)
            for tensor in dict.fromkeys(buffers):
                _change_dtype(tensor, torch.float32)
        flatten(self._buffers)
        for optimizer in optimizers:
            for param, state in self._states(optimizer):
                if id(param) in taken_over:
                    continue
                if all(tensor.dtype not in LOWER_PRECISION for tensor in tensors_in(state)):
                    self._with_float32_state.add(optimizer)
                state.update(cast_state(state, torch.float32))
        return widened

    def widen_params(self, params: Sequence[torch.Tensor], optimizers: Sequence[Any] = ()) -> None:
        """Make lower-precision parameters float32, in place, with their gradients. Rests that optimizers keep are joined in."""
        self._dtypes.update({param: param.dtype for param in params})
        with _joining_rests(params, optimizers):
            for param in params:
                _change_dtype(param, torch.float32)

    def give_back(self, optimizers: Sequence[Any]) -> None:
        """Give each tensor its original dtype: values are rounded, and an optimizer that keeps rests gets what rounding lost."""
        rests = self._rests(optimizers)
        for optimizer in optimizers:
            if optimizer in self._with_float32_state or getattr(optimizer, "keeps_float32_state", False):
                continue
            for param, state in self._states(optimizer):
                state.update(cast_state(state, self._dtypes[param]))
        buffers = [
            (buffer, dtypes[name])
            for module, dtypes in self._buffers.items()
            for name, buffer in module.named_buffers(recurse=False)
            if name in dtypes
        ]
        for tensor, dtype in (*self._dtypes.items(), *buffers):
            _change_dtype(tensor, dtype)
        for param, (rest, lower, optimizer) in rests.items():
            param.data = lower
            optimizer.keep_rest(param, rest)
        flatten(self._buffers)
        self._dtypes.clear()
        self._buffers.clear()

    def _rests(self, optimizers: Sequence[Any]) -> dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor, Any]]:
        """Split each float32 parameter whose optimizer keeps rests: (rest, weight, optimizer) by parameter."""
        rests = {}
        for optimizer in optimizers:
            for param in params_of(optimizer) if getattr(optimizer, "rests", False) is True else ():
                if param in self._dtypes and param.dtype is torch.float32 and param not in rests:
                    lower, rest = kernels.parted(param, self._dtypes[param])
                    rests[param] = rest, lower, optimizer
        return rests

    def _states(self, optimizer: Any) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        """Yield (parameter, its state) for parameters with a recorded dtype that have state in the optimizer."""
        return ((param, state) for param, state in states_to_cast(optimizer) if param in self._dtypes)


@contextmanager
def _joining_rests(params: Sequence[torch.Tensor], optimizers: Sequence[Any]) -> Iterator[None]:
    """Add the rests that optimizers keep to the parameters, which become float32 inside of the context."""
    states = [(param, optimizer.state.get(param) or {}) for param in params for optimizer in optimizers]
    rests = [(param, param.detach(), state.pop("rest")) for param, state in states if "rest" in state]
    yield
    for param, lower, rest in rests:
        kernels.multi_tensor_join([lower], [rest], [param.detach()])


def widen_sharded(model: nn.Module, optimizers: Sequence[Any]) -> torch.dtype | None:
    """Make sharded lower-precision parameters float32, with their state; returns the dtype that they had, or None.

    The change is permanent: FSDP2 keeps its own record of their storage, which follows a change of dtype only through ``_apply``
    and before the first forward.
    """
    lower = {param: param.dtype for param in model.parameters() if param.dtype in LOWER_PRECISION}
    if not lower:
        return None
    with _joining_rests(list(lower), optimizers):
        model._apply(lambda tensor: tensor.float() if tensor.dtype in LOWER_PRECISION else tensor)
    for optimizer in optimizers:
        for param, state in states_to_cast(optimizer):
            if param in lower:
                state.update(cast_state(state, torch.float32))
    return next(iter(lower.values()))


def held_by(optimizers: Sequence[Any]) -> set[torch.Tensor]:
    """Return the parameters of these optimizers."""
    return {param for optimizer in optimizers for param in params_of(optimizer)}


def widen_models(incoming: Incoming, models: Sequence[nn.Module], optimizers: Sequence[Any], plan: Plan) -> None:
    """Make lower-precision models float32, and log it."""
    lines: list[str] = []
    trains_in = "float32" if plan.master_weights else plan.cast_model_type
    outcome = f"they train in {trains_in}" if plan.casts_weights else "they are float32"
    for model in models:
        if fsdp_modules(model) and (dtype := widen_sharded(model, optimizers)) is not None:
            origin = f"The sharded {type(model).__name__} came in {dtype}"
            lines.append(f"{origin}: its sharded parameters are float32 now, and stay so after close().")
    held = held_by(optimizers)

    def stays(param: torch.Tensor) -> bool:
        """Whether calls cast the parameter and no optimizer holds it; without an optimizer in the call, whether it is frozen."""
        if optimizers:
            return plan.casts_calls and not plan.lowers_all and param not in held
        return plan.casts_calls and not plan.casts_weights and not param.requires_grad

    rounded = {
        param
        for optimizer in optimizers
        for param, state in optimizer.state.items()
        if isinstance(param, torch.Tensor) and param.dtype in LOWER_PRECISION and state and "rest" not in state
    }
    for model, dtype, count in incoming.widen(models, optimizers, stays, plan):
        origin = f"{count} tensors of the {type(model).__name__} came in {dtype}"
        lines.append(f"{origin}: {outcome}, until close() gives {dtype} back.")
        if not rounded.isdisjoint(model.parameters()):
            logger.warning(
                "The %s came in %s, and its optimizer has state already. If it is a checkpoint's, what was float32 there was "
                "rounded: call load_state_dict() of model and optimizer after initialize(), and the run goes on bit for bit.",
                type(model).__name__,
                dtype,
            )
    for line in lines if plan.verbosity >= 1 else ():
        logger.info(line)


def flatten(modules: Iterable[nn.Module]) -> None:
    """Lay the weights of each recurrent layer among the modules out in one piece of memory."""
    for module in modules:
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def _change_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    gradient, tensor.grad = tensor.grad, None
    tensor.data = tensor.detach().to(dtype)
    # A script may have asked for gradients of another dtype than the weight's.
    tensor.grad = None if gradient is None else gradient.to(tensor.grad_dtype or dtype)
