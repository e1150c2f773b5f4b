"""The device types that models live on, and what the processor can do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def device_types(models: Sequence[nn.Module]) -> set[str]:
    """The device types that the models' parameters live on; their buffers, where there are none."""
    types = {param.device.type for model in models for param in model.parameters()}
    types = types or {buffer.device.type for model in models for buffer in model.buffers()}
    return types or {"cpu"}


def device_type_of(models: Sequence[nn.Module]) -> str:
    """The device type that decides the lower precision: an accelerator wherever there is one."""
    return next(iter(sorted(device_types(models) - {"cpu", "meta"})), "cpu")


def has_instructions_for(dtype: torch.dtype) -> bool:
    """Whether oneDNN finds instructions of the processor for products in float16 or bfloat16.

    Without them torch takes ten to a hundred times as long as in float32.
    """
    name = "_is_mkldnn_bf16_supported" if dtype is torch.bfloat16 else "_is_mkldnn_fp16_supported"
    return not torch.backends.mkldnn.is_available() or getattr(torch.ops.mkldnn, name)()


def computes_slowly_in(dtype: torch.dtype) -> bool:
    """Whether there is no accelerator, and the processor has no instructions for products in float16 or bfloat16."""
    return not torch.accelerator.is_available() and not has_instructions_for(dtype)
