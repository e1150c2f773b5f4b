"""The live sessions of this process, and which of them owns a model or an optimizer."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn

from .errors import NotInitializedError
from .plan import Plan


class Session(Protocol):
    """What is asked of a session here; session.py has the whole of it, and enters it."""

    plan: Plan

    @property
    def models(self) -> list[nn.Module]: ...

    def owns(self, thing: Any) -> bool:
        """Whether this model or optimizer was given to it."""


live_sessions: list[Session] = []
"""Every session that is neither closed nor without models and optimizers, oldest first."""


def session_of(thing: Any) -> Session | None:
    """The live session that owns a model or an optimizer."""
    for session in reversed(live_sessions):
        if session.owns(thing):
            return session
    return None


def sessions_sharing_with(models: Sequence[nn.Module]) -> list[Session]:
    """The live sessions that have initialized a module or a parameter of ``models`` as part of another model."""
    parts = {part for model in models for part in (*model.modules(), *model.parameters())}
    return [
        session
        for session in live_sessions
        if any(part in parts for model in session.models for part in (*model.modules(), *model.parameters()))
    ]


def current_session() -> Session | None:
    """The newest live session, or None."""
    return live_sessions[-1] if live_sessions else None


def collect_orphans(closing: Sequence[Session]) -> None:
    """Let sessions of models and optimizers that only reference cycles keep alive close before a new one starts.

    Sessions in ``closing`` are about to be closed and no reason to collect.
    """
    if any(session not in closing for session in live_sessions):
        gc.collect()


def not_initialized(optimizer: Any) -> NotInitializedError:
    """The error for an optimizer that no live session owns."""
    if not live_sessions:
        return NotInitializedError(
            "scale_loss was used before initialize. Call model, optimizer = ampkit.initialize(model, optimizer, opt_level=...) "
            "first."
        )
    return NotInitializedError(
        f"This {type(optimizer).__name__} was not passed to initialize(), or its session was closed. Pass every optimizer "
        "that scale_loss will see: ampkit.initialize(model, [optimizer, ...])."
    )
