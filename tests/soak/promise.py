"""What a group of faults is a list of."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass


class NotHere(Exception):
    """This machine does not allow the attack; the message says why."""


@dataclass(frozen=True)
class Promise:
    """A line of the table: what is promised and how it is attacked, in a sentence each.

    ``attempt`` is given the case's random numbers. It raises for a promise that does not hold, and returns how often it has
    attacked, None for once; or this number and what it has measured, by name. ``share`` is its part of the time in proportion to
    others, and ``limit`` the seconds after which an attempt counts as hung.
    """

    promise: str
    attack: str
    attempt: Callable[[random.Random], int | tuple[int, dict[str, float]] | None]
    share: float = 1.0
    limit: float = 120.0

    @property
    def name(self) -> str:
        """By which ``--only`` finds it."""
        return self.attempt.__name__
