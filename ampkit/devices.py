"""The device types that models live on."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def device_types(models: Sequence[nn.Module]) -> set[str]:
    """The device types that the models' parameters live on; their buffers, where there are none."""
    found = {param.device.type for model in models for param in model.parameters()}
    found = found or {buffer.device.type for model in models for buffer in model.buffers()}
    return found or {"cpu"}


def device_type_of(models: Sequence[nn.Module]) -> str:
    """The device type that decides the lower precision: an accelerator wherever there is one."""
    return next(iter(sorted(device_types(models) - {"cpu", "meta"})), "cpu")
