"""``apex.amp.handle``: `scale_loss`, `disable_casts`, and the handle on O1's casts that scripts switch and clear."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ... import api, validation
from ...casting.engine import Casting
from ...errors import LossIdError
from ...iteration.found_inf import FoundInf
from ...iteration.loss_scale import LossScaler as CoreScaler
from ...iteration.optimizer_wrapper import drop_casts
from ...logs import logger
from ...registry import live_sessions, session_of, wrapper_of
from ...session import Session
from . import utils
from ._amp_state import _amp_state
from ._process_optimizer import warn_of_replaced_methods
from .opt import OptimWrapper
from .scaler import LossScaler

disable_casts = api.disable_casts


@contextmanager
def scale_loss(
    loss: Any,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Any]:
    """Scale a loss, as Apex's ``amp.scale_loss`` does; see `ampkit.scale_loss`.

    ``optimizers`` may come from several ``initialize`` calls, and may be wrapped (``.optim`` or ``.optimizer``) since.
    ``loss_id`` is a place in ``_amp_state.loss_scalers``, which the newest ``initialize`` made for all of them. Without
    optimizers, ``[]``, the loss is scaled and nothing else is done: attacks on a model's input want its gradient alone.
    """
    if _amp_state.is_switched_off:
        yield loss
        return
    unwrapped = [_initialized(optimizer) for optimizer in validation.flatten(optimizers)]
    sessions = [session_of(optimizer) for optimizer in unwrapped]
    if not unwrapped and _amp_state.is_enabled:
        yield loss.float() * _scaler(loss_id).loss_scale
        return
    all_enabled = bool(sessions) and all(session is not None and session.plan.enabled for session in sessions)
    if not all_enabled or not _amp_state.is_enabled or not isinstance(loss, torch.Tensor):
        # The core says what is wrong, or yields the loss.
        with api.scale_loss(loss, unwrapped, loss_id, model, delay_unscale, delay_overflow_check) as scaled:
            yield scaled
        return
    for loss_scaler in _amp_state.loss_scalers:
        loss_scaler.forget_iteration()
    for optimizer in unwrapped:
        warn_of_replaced_methods(optimizer)
    core, scaler = _scaler(loss_id), _amp_state.loss_scalers[loss_id]
    script_judges = scaler.is_changed_by_the_script and not delay_unscale
    wrappers = [wrapper_of(optimizer) for optimizer in unwrapped]
    if not delay_unscale:
        drop_casts()  # `init` keeps all of them
    with sessions[0].block(loss, wrappers, core, delay_unscale, delay_overflow_check or script_judges) as scaled:
        yield scaled
    if not delay_unscale:
        scaler.end_block()
    if script_judges:
        _judge_as_the_script_does(scaler, loss_id, unwrapped, delay_overflow_check)


class AmpHandle:
    """The casts of O1: whether they are on, their cache, and their end."""

    def __init__(self, loss_scale: float | str = "dynamic", enable_caching: bool = True, verbose: bool = False) -> None:
        self._enable_caching = enable_caching
        self._verbose = verbose
        self._default_scaler: Any = loss_scale
        self._all_wrappers: list[Any] = []
        self._unwrapped: dict[int, OptimWrapper] = {}  # by the id of the optimizer, which its wrapper keeps alive
        self._saved_functions: list[tuple[Any, str, Callable]] = []
        self._casting: Casting | None = None
        self._anchor: Any = None

    @classmethod
    def of(cls, session: Session, **settings: Any) -> AmpHandle:
        """The handle on a session's casts."""
        handle = cls(**settings)
        handle._casting = session.casting
        return handle

    def is_active(self) -> bool:
        return self._is_active

    @property
    def _is_active(self) -> bool:
        return self._casting is not None and self._casting.is_on()

    @_is_active.setter
    def _is_active(self, active: bool) -> None:
        if self._casting is not None:
            self._casting.pause(not active)

    def _disable_casts(self) -> AbstractContextManager[None]:
        return self._casting.disabled() if self._casting is not None else nullcontext()

    def _deactivate(self) -> None:
        """Restore torch's functions. Loss scaling goes on."""
        while self._saved_functions:
            utils.set_func(*self._saved_functions.pop())
        self._unwrapped.clear()
        casting, self._casting = self._casting, None
        if casting is None:
            return
        for session in [live for live in live_sessions if live.casting is casting]:
            session.stop_casting()
        self._anchor = None
        if self in _amp_state._opened_by_init:
            _amp_state._opened_by_init.remove(self)

    def _clear_cache(self) -> None:
        if self._casting is not None:
            self._casting.caches.drop()

    def remove_cache(self, param: torch.Tensor) -> None:
        if self._casting is not None:
            self._casting.caches.forget(param)

    @property
    def has_cache(self) -> bool:
        return self._enable_caching

    @property
    def cache(self) -> dict[torch.Tensor, torch.Tensor]:
        return self._casting.caches.pairs() if self._casting is not None else {}

    @property
    def verbose(self) -> bool:
        return self._verbose

    def _save_func(self, mod: Any, fn: str, func: Callable) -> None:
        """Register ``func``, for ``_deactivate`` to write back to ``mod.fn``."""
        self._saved_functions.append((mod, fn, func))

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> Any:
        """Return an `OptimWrapper`, whose ``scale_loss`` has one loss scaler for each of ``num_loss`` losses."""
        self._default_scaler = None
        wrapper = OptimWrapper(optimizer, self, num_loss)
        self._all_wrappers.append(wrapper)
        return wrapper

    @contextmanager
    def scale_loss(self, loss: torch.Tensor, optimizer: Any) -> Iterator[torch.Tensor]:
        """Scale a loss of an optimizer that was not wrapped: all its losses share one loss scale, and its own ``step()`` skips."""
        wrapper = optimizer if isinstance(optimizer, OptimWrapper) else self._unwrapped.get(id(optimizer))
        if wrapper is None:
            wrapper = OptimWrapper(optimizer, self, 1, self._default_scaler or "dynamic")
            self._unwrapped[id(optimizer)] = wrapper
        if wrapper is not optimizer:
            wrapper.begin_iteration()
        with wrapper.scale_loss(loss) as scaled:
            yield scaled


class NoOpHandle(AmpHandle):
    """The handle where nothing is cast."""

    def __init__(self) -> None:
        super().__init__(enable_caching=False)

    @contextmanager
    def scale_loss(self, loss: Any, optimizer: Any) -> Iterator[Any]:
        yield loss

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> OptimWrapper:
        return OptimWrapper(optimizer, self, num_loss)


_amp_state.handle = NoOpHandle()


def _initialized(optimizer: Any) -> Any:
    """The optimizer, or the initialized optimizer inside of it: schedulers, LARC and trainers wrap them."""
    inner, depth = optimizer, 0
    while inner is not None and session_of(inner) is None and depth < 5:
        attributes = getattr(inner, "__dict__", {})
        inner = next((attributes[name] for name in ("optim", "optimizer", "_optimizer") if name in attributes), None)
        depth += 1
    return optimizer if inner is None or session_of(inner) is None else inner


def _judge_as_the_script_does(
    scaler: LossScaler, loss_id: int, optimizers: list[Any], delay_overflow_check: bool
) -> None:
    """End an iteration by a script's replacements of LossScaler's methods, which may ask other processes."""
    overflowed = scaler._has_overflow
    if scaler.unscales_as_the_script_does:
        # They are unscaled already: the script's method gets the scale 1.0, to check them and do its other work.
        gradients = [p.grad for optimizer in optimizers for p in api.master_params(optimizer) if p.grad is not None]
        scaler.clear_overflow_state()
        scaler.unscale(gradients, gradients, scaler.loss_scale(), models_are_masters=False, scale_override=1.0)
        if overflowed and not scaler._has_overflow:
            scaler._has_overflow = True
    if delay_overflow_check:
        return
    skips = scaler.update_scale()
    scaler.end_iteration()
    if not skips:
        return
    if not scaler.core.report(wait=True):  # the scale has not moved: the script has a rule of its own
        logger.info(
            "Gradient overflow.  Skipping step, loss scaler %d reducing loss scale to %s", loss_id, scaler.loss_scale()
        )
    for optimizer in optimizers:
        wrapper = wrapper_of(optimizer)
        verdict = FoundInf(torch.ones((), device=wrapper.gradients.device))
        verdict.moves_scale = True  # by the script's own rule
        wrapper.findings.add(verdict)


def _scaler(loss_id: int) -> CoreScaler:
    """The core's scaler of ``_amp_state.loss_scalers[loss_id]``."""
    scalers = _amp_state.loss_scalers
    try:
        return scalers[loss_id].core
    except IndexError:
        raise LossIdError(
            f"loss_id={loss_id} is out of range: the newest amp.initialize made {len(scalers)} loss scalers. Pass num_losses= "
            "to it for more."
        ) from None
