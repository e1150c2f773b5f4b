"""Attributes that scripts expect on an optimizer after ``amp.initialize``: ``_amp_stash``, and the underscored methods.

`dress` puts them there until the session closes. They read and change the optimizer's wrapper in the core; masters
exist from ``initialize`` on, where Apex made them lazily.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

from ...dtypes import LOWER_PRECISION
from ...errors import NotInitializedError
from ...iteration.found_inf import FoundInf, Slot, inverse
from ...iteration.gradients import State
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
    # Weakly: an optimizer that the session held would never be collected.
    session.on_close(_undress, weakref.ref(optimizer))


def _undress(ref: weakref.ref) -> None:
    attributes = getattr(ref(), "__dict__", {})
    for name in ("_amp_stash", *(method.__name__ for method in _METHODS)):
        attributes.pop(name, None)


def warn_of_replaced_methods(optimizer: Any) -> None:
    """Warn once that a script's replacements of the methods around a backward pass are not called."""
    stash = vars(optimizer).get("_amp_stash")
    if not isinstance(stash, AmpOptimizerState) or stash.has_warned:
        return
    for method in (_prepare_amp_backward, _post_amp_backward):
        if getattr(vars(optimizer).get(method.__name__), "__func__", None) is not method:
            stash.has_warned = True
            logger.warning(
                "optimizer.%s was replaced by the script. scale_loss sets gradients aside and unscales them itself and does not "
                "call it; a loop that calls it is followed.",
                method.__name__,
            )


def _lazy_init_maybe_master_weights(optimizer: Any) -> None:
    """Do nothing: ``initialize`` has made the masters."""


def _amp_lazy_init(optimizer: Any) -> None:
    """Call `_lazy_init_maybe_master_weights`, as Apex did."""
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_stash.lazy_init_called = True


def _prepare_amp_backward(optimizer: Any) -> None:
    """Set present gradients aside before a backward pass, so that fresh ones arrive unmixed."""
    wrapper = _wrapper(optimizer)
    wrapper.settle(finishes=False)
    wrapper.gradients.open(wrapper.gradients.scale if wrapper.gradients.state is State.WAITING else 1.0)


def _post_amp_backward(optimizer: Any, scaler: LossScaler) -> None:
    """Unscale the fresh gradients by ``scaler``, which notes an overflow, and add those set aside before the backward pass."""
    wrapper = _wrapper(optimizer)
    slot = next(iter(wrapper.gradients.slots), None)
    scale = scaler.loss_scale()
    needs_check = scaler.dynamic or scale != 1.0
    needs_check = needs_check and slot is not None
    finding = FoundInf(scaler.flag_on(slot.param.device)) if needs_check else None
    wrapper.gradients.collect(inverse(scale), finding)
    wrapper.hand_gradients()


def _master_params_to_model_params(optimizer: Any) -> None:
    """Copy values that were written to masters, in any way, into the model."""
    _wrapper(optimizer).settle(finishes=False)


_METHODS = (
    _lazy_init_maybe_master_weights,
    _amp_lazy_init,
    _prepare_amp_backward,
    _post_amp_backward,
    _master_params_to_model_params,
)


class AmpOptimizerState:
    """The stash ``optimizer._amp_stash``: the optimizer's current parameters by kind, and Apex's flags.

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
        """Whether scaled gradients wait in ``.grad`` (``delay_unscale=True``). A script with its own loop may set it."""
        return self._gradients.state is State.WAITING

    @params_have_scaled_gradients.setter
    def params_have_scaled_gradients(self, value: bool) -> None:
        gradients = self._gradients
        if value and gradients.state is not State.WAITING:
            gradients.keep_scaled(_amp_state.loss_scalers[0].loss_scale())
        elif not value and gradients.state is State.WAITING:
            gradients.state = State.READY

    def __getattr__(self, name: str) -> Any:
        views = {} if name.startswith("__") or "_optimizer" not in self.__dict__ else self._views()
        if name not in views:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        wanted, value_of, by_groups = views[name]
        value_of = value_of or self._master()
        slots = {slot.param: slot for slot in self._gradients.slots if slot.param.requires_grad and wanted(slot)}
        if not by_groups:
            return [value_of(slot) for slot in slots.values()]
        groups = self._optimizer().param_groups
        return [[value_of(slots[param]) for param in group["params"] if param in slots] for group in groups]

    def _views(self) -> dict[str, Any]:
        return _WITH_MASTERS if session_of(self._optimizer()).plan.master_weights else _WITHOUT_MASTERS

    @property
    def _gradients(self) -> Any:
        return _wrapper(self._optimizer()).gradients

    def _master(self) -> Callable[[Slot], torch.Tensor]:
        """Return a function from a slot to its master, a float32 copy that stays current while the script holds it."""
        params = (param for group in self._optimizer().param_groups for param in group["params"])
        masters = dict(zip(params, _wrapper(self._optimizer()).master_params()))
        return lambda slot: masters[slot.param]


def _has_master(slot: Slot) -> bool:
    return slot.master is not None


def _is_lower(slot: Slot) -> bool:
    return slot.param.dtype in LOWER_PRECISION


def _not(wanted: Callable[[Slot], bool]) -> Callable[[Slot], bool]:
    return lambda slot: not wanted(slot)


_PARAM, _STASH = attrgetter("param"), attrgetter("stash")
#: The lists of a stash by name: a test of slots, the value of each slot (None: the master), and whether by groups.
_WITH_MASTERS = {
    "fp16_groups": (_has_master, _PARAM, True),
    "fp32_from_fp16_groups": (_has_master, None, True),
    "fp32_from_fp32_groups": (_not(_has_master), _PARAM, True),
    "all_fp16_params": (_has_master, _PARAM, False),
    "all_fp32_from_fp16_params": (_has_master, None, False),
    "all_fp32_from_fp32_params": (_not(_has_master), _PARAM, False),
    "all_fp16_grad_stash": (_has_master, _STASH, False),
    "all_fp32_from_fp32_grad_stash": (_not(_has_master), _STASH, False),
}
_WITHOUT_MASTERS = {
    "all_fp16_params": (_is_lower, _PARAM, False),
    "all_fp32_params": (_not(_is_lower), _PARAM, False),
    "all_fp16_grad_stash": (_is_lower, _STASH, False),
    "all_fp32_grad_stash": (_not(_is_lower), _STASH, False),
}


def _wrapper(optimizer: Any) -> Any:
    wrapper = wrapper_of(optimizer)
    if wrapper is None:
        raise NotInitializedError(
            f"This {type(optimizer).__name__} was not passed to amp.initialize, or its session was closed. Pass it there."
        )
    return wrapper
