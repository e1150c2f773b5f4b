"""The base of optimizer wrappers, with the attributes that scripts read and write."""

from __future__ import annotations

from typing import Any


class AroundOptimizer:
    """A wrapper of an optimizer, whose ``state`` and ``param_groups`` are those of the optimizer inside."""

    _inside = "optimizer"

    @property
    def state(self) -> Any:
        return getattr(self, self._inside).state

    @state.setter
    def state(self, value: Any) -> None:
        getattr(self, self._inside).state = value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return getattr(self, self._inside).param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        getattr(self, self._inside).param_groups = value
