"""The state that scripts read and write, ``amp._amp_state``, and functions that read it.

Every attribute exists from the import of ``apex.amp`` on. ``opt_properties``, ``handle`` and ``loss_scalers`` belong to the
newest ``amp.initialize``, as in Apex; they read and write the state of its session.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ... import api
from ...errors import ConfigurationError
from ...logs import is_rank_zero


class AmpState:
    """The state of the drop-in, one per process, filled by `ampkit.apex.amp.frontend.initialize`."""

    def __init__(self) -> None:
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self.verbosity = 1
        self.min_loss_scale: float | None = None
        self.max_loss_scale = 2.0**24
        self.loss_scalers: list[Any] = []
        # frontend.py and handle.py, which import this module, set what these hold before initialize.
        self.opt_properties: Any = None
        self.opt_properties_before_initialize: Any = None
        self.handle: Any = None
        # Held until their _deactivate(): a script need not keep the handle of amp.init().
        self._opened_by_init: list[Any] = []
        self.init_was_called = False

    @property
    def is_enabled(self) -> bool:
        """Whether there was an ``amp.initialize``, and the newest was not one with ``enabled=False``."""
        return self.opt_properties.opt_level is not None

    @property
    def was_used(self) -> bool:
        """Whether ``amp.initialize`` or ``amp.init`` was called."""
        return self.opt_properties is not self.opt_properties_before_initialize or self.init_was_called

    @property
    def is_switched_off(self) -> bool:
        """Whether an ``initialize`` with ``enabled=False``, or the script itself, has put disabled options here."""
        return not self.opt_properties.enabled and self.opt_properties is not self.opt_properties_before_initialize


_amp_state = AmpState()


def warn_or_err(message: str) -> None:
    """Raise `ConfigurationError`, or with ``_amp_state.hard_override`` print a warning."""
    if not _amp_state.hard_override:
        raise ConfigurationError(message)
    print("Warning:  " + message)


def maybe_print(message: str, rank0: bool = False) -> None:
    """Print unless ``_amp_state.verbosity`` is 0; with ``rank0`` on rank 0 only."""
    if _amp_state.verbosity > 0 and (not rank0 or is_rank_zero()):
        print(message)


def master_params(optimizer: Any) -> Iterator[torch.Tensor]:
    """The parameters that ``optimizer`` updates: float32 masters where there are any, with unscaled gradients."""
    return api.master_params(optimizer)
