"""What scripts expect on an optimizer after ``amp.initialize``: ``_amp_stash``, and the underscored methods.

`dress` puts them there until the session closes. They look at and act on the optimizer's wrapper in the core; masters
exist from ``initialize`` on, so what Apex made lazily is there already.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ...dtypes import LOWER_PRECISION
from ...errors import NotInitializedError
from ...iteration.found_inf import BackwardPass, FoundInf
from ...iteration.gradients import Slot, State
from ...logs import logger
from ...registry import session_of, wrapper_of
from ...session import Session
from ._amp_state import _amp_state
from .scaler import LossScaler


def dress(optimizer: Any, session: Session) -> None:
    """Give ``optimizer`` its stash and methods, until ``session`` closes."""
    vars(optimizer)["_amp_stash"] = AmpOptimizerState(optimizer)
    for method in _METHODS:
        vars(optimizer)[method.__name__] = types.MethodType(method, optimizer)
    # Weakly: what the session held would never be collected.
    session.on_close(_undress, weakref.ref(optimizer))


def _undress(ref: weakref.ref) -> None:
    attributes = getattr(ref(), "__dict__", {})
    for name in ("_amp_stash", *(method.__name__ for method in _METHODS)):
        attributes.pop(name, None)


def warn_of_replaced_methods(optimizer: Any) -> None:
    """Say once that what a script has put in the place of the methods around a backward pass is not called."""
    stash = vars(optimizer).get("_amp_stash")
    if not isinstance(stash, AmpOptimizerState) or stash.has_warned:
        return
    for own in (_prepare_amp_backward, _post_amp_backward):
        if getattr(vars(optimizer).get(own.__name__), "__func__", None) is not own:
            stash.has_warned = True
            logger.warning(
                "optimizer.%s was replaced by the script. scale_loss sets gradients aside and unscales them itself and does not "
                "call it; a loop that calls it is followed.",
                own.__name__,
            )


def _lazy_init_maybe_master_weights(optimizer: Any) -> None:
    """Masters are made by ``initialize``: there is nothing left to do."""


def _amp_lazy_init(optimizer: Any) -> None:
    """As `_lazy_init_maybe_master_weights`, which Apex called from here."""
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_stash.lazy_init_called = True


def _prepare_amp_backward(optimizer: Any) -> None:
    """Before a backward pass: set the gradients aside that are there, so that fresh ones arrive unmixed."""
    wrapper = _wrapper(optimizer)
    wrapper.settle(finishes=False)
    wrapper.gradients.open(wrapper.gradients.scale if wrapper.gradients.state is State.WAITING else 1.0)


def _post_amp_backward(optimizer: Any, scaler: LossScaler) -> None:
    """After it: unscale the fresh gradients by ``scaler``, which notes what is not finite, and add those set aside."""
    wrapper = _wrapper(optimizer)
    slot = next(iter(wrapper.gradients.slots), None)
    scale = scaler.loss_scale()
    needs_check = scaler.dynamic or scale != 1.0
    needs_check = needs_check and slot is not None
    found = FoundInf(scaler.flag_on(slot.param.device)) if needs_check else None
    wrapper.gradients.collect(BackwardPass(scale), found)
    wrapper.hand_gradients()


def _master_params_to_model_params(optimizer: Any) -> None:
    """Take over what was written to masters, by whatever way."""
    _wrapper(optimizer).settle(finishes=False)


_METHODS = (
    _lazy_init_maybe_master_weights,
    _amp_lazy_init,
    _prepare_amp_backward,
    _post_amp_backward,
    _master_params_to_model_params,
)


class AmpOptimizerState:
    """``optimizer._amp_stash``: the optimizer's parameters by kind, as they are at the moment, and Apex's flags.

    With master weights: ``fp16_groups``, ``fp32_from_fp16_groups``, ``fp32_from_fp32_groups`` and the same flat as
    ``all_fp16_params``, ``all_fp32_from_fp16_params``, ``all_fp32_from_fp32_params``; without: ``all_fp16_params`` and
    ``all_fp32_params``. fp16 stands for any lower precision.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.lazy_init_called = True
        self.already_patched = False
        self.has_warned = False
        self.multi_tensor_scale = LossScaler.multi_tensor_scale_cuda
        self.multi_tensor_l2norm = None
        self.dummy_overflow_buf = torch.zeros(1, dtype=torch.int32)

    @property
    def params_have_scaled_gradients(self) -> bool:
        """Whether scaled gradients wait in ``.grad`` (``delay_unscale=True``). May be set by those who write their own loop."""
        return self._gradients.state is State.WAITING

    @params_have_scaled_gradients.setter
    def params_have_scaled_gradients(self, value: bool) -> None:
        gradients = self._gradients
        if value and gradients.state is not State.WAITING:
            gradients.keep_scaled(_amp_state.loss_scalers[0].loss_scale())
        elif not value and gradients.state is State.WAITING:
            gradients.state = State.READY

    def __getattr__(self, name: str) -> Any:
        views = {} if name.startswith("__") or "_optimizer" not in self.__dict__ else _views(self._has_masters)
        if name not in views:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return views[name](self)

    @property
    def _gradients(self) -> Any:
        return _wrapper(self._optimizer()).gradients

    @property
    def _has_masters(self) -> bool:
        return session_of(self._optimizer()).plan.master_weights

    def _flat(self, wanted: Callable[[Slot], bool], what: Callable[[Slot], Any]) -> list[Any]:
        return [what(slot) for slot in self._gradients.slots if slot.param.requires_grad and wanted(slot)]

    def _master(self) -> Callable[[Slot], torch.Tensor]:
        """What gives the master of a slot: a float32 copy that is kept current while the script holds it."""
        masters = dict(zip(self._params_of_groups(), _wrapper(self._optimizer()).master_params()))
        return lambda slot: masters[slot.param]

    def _params_of_groups(self) -> list[torch.Tensor]:
        return [param for group in self._optimizer().param_groups for param in group["params"]]

    def _grouped(self, wanted: Callable[[Slot], bool], what: Callable[[Slot], Any]) -> list[list[Any]]:
        slots = {slot.param: slot for slot in self._gradients.slots if slot.param.requires_grad and wanted(slot)}
        groups = self._optimizer().param_groups
        return [[what(slots[param]) for param in group["params"] if param in slots] for group in groups]


def _views(has_masters: bool) -> dict[str, Callable[[AmpOptimizerState], list]]:
    """The lists of a stash by name."""
    if has_masters:
        return {
            "fp16_groups": lambda stash: stash._grouped(_has_master, _param),
            "fp32_from_fp16_groups": lambda stash: stash._grouped(_has_master, stash._master()),
            "fp32_from_fp32_groups": lambda stash: stash._grouped(_has_no_master, _param),
            "all_fp16_params": lambda stash: stash._flat(_has_master, _param),
            "all_fp32_from_fp16_params": lambda stash: stash._flat(_has_master, stash._master()),
            "all_fp32_from_fp32_params": lambda stash: stash._flat(_has_no_master, _param),
            "all_fp16_grad_stash": lambda stash: stash._flat(_has_master, _stash),
            "all_fp32_from_fp32_grad_stash": lambda stash: stash._flat(_has_no_master, _stash),
        }
    return {
        "all_fp16_params": lambda stash: stash._flat(_is_lower, _param),
        "all_fp32_params": lambda stash: stash._flat(_is_not_lower, _param),
        "all_fp16_grad_stash": lambda stash: stash._flat(_is_lower, _stash),
        "all_fp32_grad_stash": lambda stash: stash._flat(_is_not_lower, _stash),
    }


def _has_master(slot: Slot) -> bool:
    return slot.entry is not None


def _has_no_master(slot: Slot) -> bool:
    return slot.entry is None


def _is_lower(slot: Slot) -> bool:
    return slot.param.dtype in LOWER_PRECISION


def _is_not_lower(slot: Slot) -> bool:
    return not _is_lower(slot)


def _param(slot: Slot) -> torch.Tensor:
    return slot.param


def _stash(slot: Slot) -> torch.Tensor | None:
    return slot.stash


def _wrapper(optimizer: Any) -> Any:
    wrapper = wrapper_of(optimizer)
    if wrapper is None:
        raise NotInitializedError(
            f"This {type(optimizer).__name__} was not passed to amp.initialize, or its session was closed. Pass it there."
        )
    return wrapper
