"""Apex's layout of an optimizer's state, where it is not torch's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


class StepsInGroups:
    """Apex's layout: ``group["step"]`` counts for all parameters of the group."""

    def advance(self, group: dict[str, Any], params: list[torch.Tensor]) -> Iterator[tuple[int, list[torch.Tensor]]]:
        group["step"] = group.get("step", 0) + 1
        yield group["step"], params

    def translated(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Step counts of the core's layout, which is torch's, go to the group."""
        state_dict = super().translated(state_dict)
        for group in state_dict["param_groups"]:
            states = [state_dict["state"][key] for key in group["params"] if key in state_dict["state"]]
            steps = [state.pop("step") for state in states if "step" in state]
            if steps:
                group["step"] = max(int(step) for step in steps)
        return state_dict
