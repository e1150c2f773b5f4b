"""A ``torch.amp.GradScaler`` over a session, for frameworks that own the training loop; and conversion of its state dict.

The framework's loop (``scale``, ``backward``, ``unscale_``, ``step``, ``update``) then drives the session's loss scale instead
of `ampkit.scale_loss`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler as TorchGradScaler

from ..compiling import uncompiled
from ..errors import CheckpointError, ConfigurationError, NotInitializedError
from ..iteration.found_inf import FoundInf
from ..iteration.loss_scale import LossScaler, validate_scaler_state
from ..iteration.optimizer_wrapper import OptimizerWrapper
from ..registry import current_session, wrapper_of
from ..session import Session
from ..validation import not_initialized

_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


def _of_rule(name: str) -> Any:
    """Return a property: a value of the rule by which the scale moves, which torch's getters and setters read and write."""

    def change(scaler: GradScaler, value: Any) -> None:
        if not scaler._scaler.dynamic:
            raise ConfigurationError(
                "The loss scale of this session is static and does not move. Use loss_scale='dynamic' in initialize()."
            )
        scaler._scaler.change_rule(rule=replace(scaler._scaler.rule, **{name: value}))

    return property(lambda scaler: _state_of(scaler._scaler)[name], change)


def _torchs_if_disabled(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that is torch's in a session that is not enabled, where torch's own GradScaler is disabled."""

    @functools.wraps(method)
    @uncompiled
    def call(self: GradScaler, *args: Any, **kwargs: Any) -> Any:
        used = method if self._owner().plan.enabled else getattr(TorchGradScaler, method.__name__)
        return used(self, *args, **kwargs)

    return call


class GradScaler(TorchGradScaler):
    """The loss scale of the newest session, or of ``session``, with the methods of ``torch.amp.GradScaler``.

    Give it to a framework in the place of its own, after `initialize`. An iteration ends at ``update()``: the scale moves there,
    once, whatever the number of optimizers. ``step(optimizer)`` calls ``optimizer.step()`` only where the gradients of that
    optimizer are finite, which it reads from the device. Gradients of several ``backward()`` add up scaled, as with torch's.

    ``state_dict`` and ``load_state_dict`` are in torch's format. After ``initialize(enabled=False)`` this is a disabled
    GradScaler. Raises `NotInitializedError` where there is no session, or for an optimizer that is not of it; RuntimeError for
    calls out of order (``unscale_`` or ``step`` twice before ``update``), as torch's does; `ConfigurationError` for a change of
    the rule of a static scale; and TypeError for settings of torch's, which are `initialize`'s here, such as ``enabled=False``.
    """

    _growth_factor, _backoff_factor, _growth_interval = map(_of_rule, _KEYS[1:4])

    def __init__(
        self,
        device: str = "cuda",
        *,
        session: Session | None = None,
        loss_id: int = 0,
        enabled: bool = True,
        **of_torch: Any,
    ) -> None:
        if not enabled and ((owner := session or current_session()) is None or owner.plan.enabled):
            of_torch["enabled"] = enabled
        for name in of_torch:
            raise TypeError(
                f"ampkit.GradScaler() does not take {name}=: its loss scale is that of initialize(). Say it there, with "
                "loss_scale=ampkit.DynamicLossScale(init_scale=..., growth_interval=...), or enabled=."
            )
        super().__init__(device, enabled=False)  # torch's own scale is never used, and never allocated
        self._session = None if session is None else weakref.ref(session)
        self._loss_id = loss_id
        self._unscaled: dict[int, tuple[OptimizerWrapper, FoundInf | None]] = {}  # of unscaled optimizers, by id
        self._stepped: set[int] = set()

    @_torchs_if_disabled
    def scale(self, outputs: Any) -> Any:
        """Multiply a tensor, or an iterable of tensors, by the loss scale, for ``backward()``."""
        if not isinstance(outputs, torch.Tensor):
            if not isinstance(outputs, Iterable):
                raise ValueError(f"outputs must be a Tensor or an iterable of Tensors, found {type(outputs).__name__}")
            scaled = [self.scale(output) for output in outputs]
            return tuple(scaled) if isinstance(outputs, tuple) else scaled
        session = self._owner()
        # The backward pass runs after this block: its gradients stay scaled in .grad.
        with session.block(outputs, session.wrappers, self._scaler, delay_unscale=True) as scaled_loss:
            return scaled_loss

    @_torchs_if_disabled
    def unscale_(self, optimizer: Any) -> None:
        """Unscale the gradients of this optimizer, and check whether they are finite. Call it once before each ``step``."""
        if id(optimizer) in self._stepped:
            raise RuntimeError("unscale_() is being called after step().")
        if id(optimizer) in self._unscaled:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        wrapper = wrapper_of(optimizer)
        if wrapper is None:
            raise not_initialized(optimizer)
        if wrapper.owner is not self._owner():
            raise NotInitializedError(
                f"This {type(optimizer).__name__} is of another initialize() call than this GradScaler, whose loss scale its "
                "gradients are not at. Pass all optimizers in one call, or make an ampkit.GradScaler(session=...) for each."
            )
        self._unscaled[id(optimizer)] = (wrapper, wrapper.owner.scaling.unscale(wrapper, self._scaler))

    def is_unscaled(self, optimizer: Any) -> bool:
        """Whether `unscale_` has been called on this optimizer since the last ``update()``."""
        return id(optimizer) in self._unscaled

    @_torchs_if_disabled
    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``optimizer.step(*args, **kwargs)`` if its gradients are finite; else skip the step and return None."""
        if kwargs.get("closure") is not None:
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        if id(optimizer) in self._stepped:
            raise RuntimeError("step() has already been called since the last update().")
        if id(optimizer) not in self._unscaled:
            self.unscale_(optimizer)
        wrapper, found_inf = self._unscaled[id(optimizer)]
        self._stepped.add(id(optimizer))
        if found_inf is not None and found_inf.overflowed:
            wrapper.findings.of_step = found_inf
            wrapper.end_step(skipped=True)
            return None
        if found_inf is not None:
            wrapper.findings.mark_checked(found_inf.flag)
        return optimizer.step(*args, **kwargs)

    @_torchs_if_disabled
    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """End the iteration: the loss scale backs off after an overflow, and grows after enough iterations without one."""
        unscaled, self._unscaled, self._stepped = list(self._unscaled.values()), {}, set()
        if new_scale is not None:
            self._scaler.loss_scale = float(new_scale)
            return
        checked = [(wrapper, found_inf) for wrapper, found_inf in unscaled if found_inf is not None]
        if checked:
            self._scaler.update(FoundInf.any_of([found_inf for _, found_inf in checked]))
        if any(wrapper.findings.skipped for wrapper, _ in checked):
            self._scaler.report(wait=True)

    @_torchs_if_disabled
    def get_scale(self) -> float:
        """The current loss scale. Waits for the device."""
        return self._scaler.loss_scale

    def is_enabled(self) -> bool:
        """Whether there is a session that is enabled."""
        session = current_session() if self._session is None else self._session()
        return session is not None and session.plan.enabled

    @_torchs_if_disabled
    def state_dict(self) -> dict[str, Any]:
        """The state dict in torch's format: scale, factors, interval and counter."""
        return _state_of(self._scaler)

    @_torchs_if_disabled
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of torch's GradScaler."""
        _load(self._scaler, state_dict)

    def _owner(self) -> Session:
        session = current_session() if self._session is None else self._session()
        if session is None or not session.is_live:
            raise NotInitializedError(
                "ampkit.GradScaler was used without a session. Call ampkit.initialize(model, optimizer) first, and close() "
                "after the training."
            )
        return session

    @property
    def _scaler(self) -> LossScaler:
        return self._owner().scaling.scaler(self._loss_id)


def to_grad_scaler(loss_id: int = 0) -> dict[str, float | int]:
    """The newest session's loss scale as the state of a ``torch.amp.GradScaler``: ``scaler.load_state_dict(to_grad_scaler())``.

    Scale, growth and back-off factors, interval and counter are exact. A GradScaler has neither bounds nor a static scale; a
    static scale becomes a dynamic one that does not grow. After ``initialize(enabled=False)`` it is empty, as a disabled one's.

    Raises `NotInitializedError` before `initialize`, and `LossIdError` for a ``loss_id`` that has no scaler.
    """
    scaler = _newest_scaler(loss_id)
    return {} if scaler is None else _state_of(scaler)


def from_grad_scaler(state: Mapping[str, Any], loss_id: int = 0) -> None:
    """Continue with the loss scale of a ``torch.amp.GradScaler``: ``from_grad_scaler(scaler.state_dict())`` after `initialize`.

    The newest session's loss scaler takes over scale, factors, interval and counter exactly. The state of a disabled
    GradScaler is empty and changes nothing; after ``initialize(enabled=False)`` no state changes anything.

    Raises `CheckpointError` for an argument that is no GradScaler's state, and changes nothing then; `NotInitializedError` and
    `LossIdError` as `to_grad_scaler` does.
    """
    scaler = _newest_scaler(loss_id)
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"from_grad_scaler expects the dict of GradScaler.state_dict(), found {type(state).__name__}."
        )
    if state and scaler is not None:
        _load(scaler, state)


def _state_of(scaler: LossScaler) -> dict[str, float | int]:
    """The state of a loss scaler as ``torch.amp.GradScaler.load_state_dict`` accepts it."""
    return {
        "scale": scaler.loss_scale,
        "growth_factor": scaler.rule.growth_factor,
        "backoff_factor": scaler.rule.backoff_factor,
        # GradScaler has no static scale.
        "growth_interval": scaler.rule.growth_interval if scaler.dynamic else 2**31 - 1,
        "_growth_tracker": scaler.unskipped,
    }


def _load(scaler: LossScaler, state: Mapping[str, Any]) -> None:
    """Load what ``torch.amp.GradScaler.state_dict`` returned: scale, counter, and the rule by which the scale changes."""
    missing = [name for name in _KEYS if name not in state]
    if missing:
        raise CheckpointError(
            f"A GradScaler's state must have {', '.join(map(repr, _KEYS))}; found {', '.join(map(repr, state))}. Pass what "
            "torch.amp.GradScaler.state_dict() returned."
        )
    scaler_state = {"loss_scale": state["scale"], "unskipped": state["_growth_tracker"]}
    validate_scaler_state(scaler_state)
    if scaler.dynamic:
        rule = replace(
            scaler.rule,
            growth_factor=float(state["growth_factor"]),
            backoff_factor=float(state["backoff_factor"]),
            growth_interval=int(state["growth_interval"]),
        )
        # A GradScaler has no minimum: its scale is taken over exactly, and lowers the minimum if it is below it.
        scaler.change_rule(rule=rule, min_loss_scale=min(scaler.min_loss_scale, float(state["scale"])))
    scaler.load_state_dict(scaler_state)


def _newest_scaler(loss_id: int) -> LossScaler | None:
    """Return a loss scaler of the newest session, or None if that is not enabled."""
    newest: Session | None = current_session()
    if newest is None:
        raise NotInitializedError(
            "There is no loss scale before initialize(). Call ampkit.initialize(model, optimizer) first."
        )
    return newest.scaling.scaler(loss_id) if newest.plan.enabled else None
