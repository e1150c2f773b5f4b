"""Reads of ``p.data`` in a cast model: what is written through it (``p.data.clamp_(-c, c)``) torch does not count.

So whoever asks for the ``.data`` of a weight has it compared with its master, element by element, before the next forward or step.
A ``.data`` that was kept from before is not seen. O1 drops casts in the same way (casting/torch_integration.py).
"""

from __future__ import annotations

from typing import Any

import torch

from ..patching import shared_patch
from .float32_values import note_data_read


def _noting_reads(data: Any) -> property:
    def get(tensor: torch.Tensor) -> torch.Tensor:
        note_data_read(tensor)
        return data.__get__(tensor)

    return property(get, data.__set__, doc=data.__doc__)


#: On torch.Tensor, since O1 has its own on nn.Parameter, and either may go first.
data_reads = shared_patch(lambda: torch.Tensor, "data", _noting_reads)
