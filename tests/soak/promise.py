"""A promise of the soak, written above the function that makes an attempt."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

Attempt = Callable[[random.Random], int | tuple[int, dict[str, float]]]


@dataclass(frozen=True)
class Promise:
    """A line of the table: the promise and the attack, in a sentence each.

    ``attempt`` is given the case's random numbers. It raises for a promise that does not hold, and returns how often it has
    attacked; or this number and what it has measured, by name. ``share`` is its part of the time in proportion to others, and
    ``limit`` the seconds after which an attempt counts as hung.
    """

    promise: str
    attack: str
    attempt: Attempt
    share: float = 1.0
    limit: float = 120.0

    @property
    def name(self) -> str:
        """The name by which ``--only`` finds the promise."""
        return self.attempt.__name__


def promise(sentence: str, attack: str, **settings: float) -> Callable[[Attempt], Promise]:
    """Decorate a function as the attempt of a `Promise`."""
    return lambda attempt: Promise(sentence, attack, attempt, **settings)
