"""The ways of training that `tune` compares: a level, its lower precision, and an optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...optimizers import FusedAdam, FusedSGD
from ...plan import default_lower_precision

FLOAT32, AUTOCAST = "float32", "autocast"
LEVELS = ("O1", "O2", "O3", "O4", "O5")
#: The setting for the lower precision of a level; other levels always use bfloat16.
_DTYPE_SETTINGS = {"O1": "patch_torch_functions_type", "O2": "cast_model_type", "O3": "cast_model_type"}


@dataclass(frozen=True)
class Way:
    """A way of training. ``level`` may also be `FLOAT32` or `AUTOCAST`; ``optimizer`` is "given", "fused" or "int8"."""

    level: str
    dtype: str = FLOAT32
    optimizer: str = "given"

    def __str__(self) -> str:
        words = [self.level, *[self.dtype] * (self.level != FLOAT32), *[self.optimizer] * (self.optimizer != "given")]
        return " ".join(words)

    @property
    def settings(self) -> dict[str, Any]:
        if self.level in (FLOAT32, AUTOCAST):
            return {}
        setting = _DTYPE_SETTINGS.get(self.level)
        return {"opt_level": self.level, **({setting: getattr(torch, self.dtype)} if setting else {})}

    def lines(self, device: str, fused: str | None) -> list[str]:
        """Return the lines of a script that trains so; ``fused`` is the code that makes ampkit's optimizer."""
        if self.level == FLOAT32:
            return []
        if self.level == AUTOCAST:
            scaler = ", and torch.amp.GradScaler" if self.dtype == "float16" else ""
            return [f'with torch.autocast("{device}", torch.{self.dtype}):  # around the forward pass{scaler}']
        words = [f'opt_level="{self.level}"']
        for setting, dtype in list(self.settings.items())[1:]:
            words += [f"{setting}={dtype}"] * (dtype is not default_lower_precision(device))
        narrow = ', state_dtype="int8"' * (self.optimizer == "int8")
        made = [] if fused is None or self.optimizer == "given" else [f"optimizer = {fused[:-1]}{narrow})"]
        return [*made, f"model, optimizer = ampkit.initialize(model, optimizer, {', '.join(words)})"]


def ways_of(levels: Iterable[str], dtypes: Sequence[str], optimizers: Sequence[str]) -> list[Way]:
    """Return the ways: float32, torch.autocast, and each level in the precisions that it supports."""
    ways = [Way(FLOAT32), *(Way(AUTOCAST, dtype) for dtype in dtypes)]
    for level in levels:
        supported = [dtype for dtype in dtypes if level in _DTYPE_SETTINGS or dtype == "bfloat16"]
        ways += [Way(level, dtype, optimizer) for dtype in supported for optimizer in optimizers]
    return ways


# Optimizers

_ADAM = ("lr", "betas", "eps", "weight_decay")
_FUSED: dict[type, tuple[Callable[..., Any], tuple[str, ...], dict[str, Any]]] = {
    torch.optim.SGD: (FusedSGD, ("lr", "momentum", "dampening", "weight_decay", "nesterov"), {"set_grad_none": True}),
    torch.optim.Adam: (FusedAdam, _ADAM, {"adam_w_mode": False}),
    torch.optim.AdamW: (FusedAdam, _ADAM, {}),
}


def optimizers_for(optimizer: Any) -> list[str]:
    """Return the optimizers of ways: the factory's, and those of ampkit's that compute the same."""
    refused = ["amsgrad", "maximize", *["decoupled_weight_decay"] * (type(optimizer) is torch.optim.Adam)]
    if type(optimizer) not in _FUSED or any(group.get(name) for group in optimizer.param_groups for name in refused):
        return ["given"]
    return ["given", "fused", *["int8"] * (optimizer.defaults.get("momentum") != 0)]  # plain SGD has no moments


def fused(optimizer: Any, **besides: Any) -> Any:
    kind, names, fixed = _FUSED[type(optimizer)]
    groups = [{name: group[name] for name in ("params", *names)} for group in optimizer.param_groups]
    return kind(groups, lr=groups[0]["lr"], **fixed, **besides)


def fused_in_words(optimizer: Any, model: torch.nn.Module) -> str:
    """Return the code that makes the fused optimizer, with the settings that differ from its defaults."""
    kind, names, fixed = _FUSED[type(optimizer)]
    defaults = inspect.signature(kind).parameters
    groups = optimizer.param_groups
    settings = {name: groups[0][name] for name in names} | {"lr": groups[0].get("initial_lr", groups[0]["lr"])} | fixed
    words = [f"{name}={value!r}" for name, value in settings.items() if value != defaults[name].default]
    is_whole = len(groups) == 1 and set(groups[0]["params"]) == set(model.parameters())
    params = "model.parameters()" if is_whole else "optimizer.param_groups"
    return f"ampkit.optimizers.{kind.__name__}({', '.join([params, *words])})"
