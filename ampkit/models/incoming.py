"""Models that are loaded in float16 or bfloat16: trained weights are float32 while a session lives.

`Incoming.widen` is the first thing that a session does to its models; `Incoming.give_back` undoes it, last of all. A session that
takes over the models of an earlier one takes over its record too, without rounding in between.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .. import kernels
from ..casting.tensors import cast_state, params_of, states_to_cast, tensors_in
from ..dtypes import LOWER_PRECISION
from ..errors import ConfigurationError
from ..logs import logger
from ..patching import by_tensor
from ..sharding import fsdp_modules


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

    def widen(self, models: Sequence[nn.Module], optimizers: Sequence[Any], plan: Any) -> None:
        """Make lower-precision tensors float32, in place, with their gradients and optimizer state, and log it.

        Where calls are cast, parameters that no optimizer holds keep their dtype (without an optimizer in the call: frozen ones).
        So do the buffers of their modules, and all buffers of a model with such parameters only.
        """
        held, widened = held_by(optimizers), set[torch.Tensor]()
        tell = logger.info if plan.verbosity >= 1 else logger.debug
        keeps = plan.casts_calls and not (plan.lowers_all if optimizers else plan.casts_weights)
        trains_in = "float32" if plan.master_weights else plan.cast_model_type
        outcome = f"they train in {trains_in}" if plan.casts_weights else "they are float32"
        for model in models:
            every, kind = list(model.parameters()), type(model).__name__
            lower = [param for param in every if param.dtype in LOWER_PRECISION]
            if lower and fsdp_modules(model):
                origin = f"The sharded {kind} came in {lower[0].dtype}"
                tell("%s: its sharded parameters are float32 now, and stay so after close().", origin)
                # FSDP2 keeps its own record of their storage, which follows a change of dtype only through ``_apply`` and before
                # the first forward.
                with _joining_rests(lower, optimizers):
                    model._apply(lambda tensor: tensor.float() if tensor.dtype in LOWER_PRECISION else tensor)
                widened.update(lower)
                continue
            stay = {param for param in every if keeps and not (param in held if optimizers else param.requires_grad)}
            params = [param for param in lower if param not in stay]
            stays = stay.intersection(lower)
            modules = model.modules() if not every or len(stay) < len(every) else ()
            buffers = self.lower_buffers(module for module in modules if stays.isdisjoint(module._parameters.values()))
            if not params and not buffers:
                continue
            dtype = [*params, *buffers][0].dtype
            origin = f"{len(params) + len(buffers)} tensors of the {kind} came in {dtype}"
            tell("%s: %s, until close() gives %s back.", origin, outcome, dtype)
            if any((state := x.state.get(param)) and "rest" not in state for x in optimizers for param in params):
                logger.warning(
                    "The %s came in %s, and its optimizer has state already. If it is a checkpoint's, what was float32 there was "
                    "rounded: call load_state_dict() of model and optimizer after initialize(), and the run goes on bit for bit.",
                    kind,
                    dtype,
                )
            refuse_shared_memory(models, set(params), plan)
            self.widen_tensors(params, buffers, optimizers)
            widened.update(params)
        flatten(self._buffers)
        self._widen_state(optimizers, widened)

    def _widen_state(self, optimizers: Sequence[Any], widened: Container[torch.Tensor]) -> None:
        """Make the optimizers' state of these parameters float32, and record whose state was float32 already."""
        for optimizer in optimizers:
            for param, state in states_to_cast(optimizer):
                if param in widened:
                    if all(tensor.dtype not in LOWER_PRECISION for tensor in tensors_in(state)):
                        self._with_float32_state.add(optimizer)
                    state.update(cast_state(state, torch.float32))

    def lower_buffers(self, modules: Iterable[nn.Module]) -> list[torch.Tensor]:
        """Return the lower-precision buffers of these modules, for `widen_tensors`, and record their dtypes."""
        buffers: dict[torch.Tensor, None] = {}
        for module in modules:
            names = {name: x for name, x in module.named_buffers(recurse=False) if x.dtype in LOWER_PRECISION}
            self._buffers.setdefault(module, {}).update({name: x.dtype for name, x in names.items()})
            buffers.update(dict.fromkeys(names.values()))
        return list(buffers)

    def widen_tensors(
        self, params: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor], optimizers: Sequence[Any]
    ) -> None:
        """Make lower-precision tensors float32, in place, with their gradients. Rests that optimizers keep are joined in."""
        self._dtypes.update({param: param.dtype for param in params})
        with _joining_rests(params, optimizers):
            for tensor in (*params, *buffers):
                _change_dtype(tensor, torch.float32)

    def give_back(self, optimizers: Sequence[Any]) -> None:
        """Give each tensor its original dtype: values are rounded, and an optimizer that keeps rests gets what rounding lost."""
        rests: dict[torch.Tensor, tuple[Any, torch.Tensor, torch.Tensor]] = {}
        for optimizer in optimizers:
            for param in params_of(optimizer) if getattr(optimizer, "rests", False) is True else ():
                if param in self._dtypes and param.dtype is torch.float32 and param not in rests:
                    rests[param] = optimizer, *kernels.parted(param, self._dtypes[param])
            if optimizer not in self._with_float32_state and not getattr(optimizer, "keeps_float32_state", False):
                for param, state in states_to_cast(optimizer):
                    if param in self._dtypes:
                        state.update(cast_state(state, self._dtypes[param]))
        for param, dtype in self._dtypes.items():
            _change_dtype(param, dtype)
        for module, dtypes in self._buffers.items():
            for name, buffer in module.named_buffers(recurse=False):
                if name in dtypes:
                    _change_dtype(buffer, dtypes[name])
        for param, (optimizer, lower, rest) in rests.items():
            param.data = lower
            optimizer.keep_rest(param, rest)
        flatten(self._buffers)
        self._dtypes.clear()
        self._buffers.clear()


@contextmanager
def _joining_rests(params: Sequence[torch.Tensor], optimizers: Sequence[Any]) -> Iterator[None]:
    """Add the rests that optimizers keep to the parameters, which become float32 inside of the context."""
    states = [(param, optimizer.state.get(param) or {}) for param in params for optimizer in optimizers]
    rests = [(param, param.detach(), state.pop("rest")) for param, state in states if "rest" in state]
    yield
    for param, lower, rest in rests:
        kernels.multi_tensor_join([lower], [rest], [param.detach()])


def held_by(optimizers: Sequence[Any]) -> set[torch.Tensor]:
    """Return the parameters of these optimizers."""
    return {param for optimizer in optimizers for param in params_of(optimizer)}


def refuse_shared_memory(models: Sequence[nn.Module], leaving: Container[torch.Tensor], plan: Any) -> None:
    """Raise `ConfigurationError` where a parameter in ``leaving`` shares memory with another one, as in ``a.data = b.data.t()``.

    A change of dtype allocates new memory, which ends the sharing, as torch's own ``model.half()`` does. Apex ended it without a
    word; its scripts get a warning.
    """
    places: list[tuple[int, int, str, torch.Tensor]] = []
    for number, model in enumerate(models):
        for name, param in model.named_parameters():
            if type(param) is nn.Parameter and torch._C._has_storage(param) and param.data_ptr():
                steps = sum((size - 1) * step for size, step in zip(param.shape, param.stride()))
                # Behind the last element; of a view with gaps, where other tensors may lie, behind the first.
                length = param.nbytes if steps + 1 == param.numel() else param.element_size()
                name = f"model {number}: {name}" if len(models) > 1 else name
                places.append((param.data_ptr(), param.data_ptr() + length, name, param))
    furthest: tuple[int, str, Any] = (0, "", None)  # where the memory seen so far ends
    for begin, end, name, param in sorted(places, key=lambda place: place[0]):
        until, name_there, other = furthest
        if begin < until and param is not other and (param in leaving or other in leaving):
            message = (
                f"'{name_there}' and '{name}' are two parameters over the same memory, and would come apart where "
                f"{plan.opt_level} changes their dtype. Let both places use one parameter, as in F.linear(x, "
                "encoder.weight.t()); or use O1, O4 or O5 with a model in float32, which leave weights where they are."
            )
            if plan.policy.base != "apex":
                raise ConfigurationError(message)
            logger.warning(message)
        if end > until:
            furthest = end, name, param


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
