"""Optimizers of Apex's that keep float32 copies of lower-precision parameters, which `initialize` does for every optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ...optimizers.fused import Batch
from ...optimizers.scales import Scale


class OwnMasters:
    """A mixin before a fused optimizer: updates float32 copies (``master_param`` in the state), and rounds them to parameters."""

    state: dict[torch.Tensor, dict[str, Any]]
    master_weights = True

    def master_of(self, param: torch.Tensor) -> torch.Tensor | None:
        """The float32 copy of a parameter, where it has one."""
        return self.state[param].get("master_param")

    def groups_of_masters(self, default: Callable[[torch.Tensor], Any]) -> list[dict[str, Any]]:
        """The parameter groups with copies in place of parameters, and ``default`` of those without one."""
        return [
            {**group, "params": [self.state.get(p, {}).get("master_param", default(p)) for p in group["params"]]}
            for group in self.param_groups
        ]

    def make_master(self, param: torch.Tensor) -> None:
        self.state[param]["master_param"] = param.detach().clone().float()

    def update(self, group: dict[str, Any], batch: Batch, step: Scale) -> None:
        if not self.master_weights:
            return super().update(group, batch, step)  # type: ignore[misc]
        masters = {i: master for i, param in enumerate(batch.params) if (master := self.master_of(param)) is not None}
        plain = [i for i in range(len(batch.params)) if i not in masters]
        if plain:
            super().update(group, batch.part(plain), step)  # type: ignore[misc]
        if masters:
            part = batch.part(list(masters))
            super().update(group, replace(part, params=list(masters.values()), lower=part.params), step)  # type: ignore[misc]
