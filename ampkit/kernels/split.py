"""A float32 tensor in two: the bfloat16 weight that a model computes with, and the rest of its bits.

The weight is the value rounded to nearest, ties away from zero. The rest, int16, is what its rounding has left, so that both
together are the value bit for bit. In int8 it is the upper half of that: the value is rounded to 24 bits first, which moves it
by 2^-16 of itself at most. The kernels do the same on their way through memory: Note [split parameters] in csrc/functors/split.h.
"""

from __future__ import annotations

import torch
from torch import Tensor

_NAN = 0x7FC00000
_SIGN = -0x80000000
#: How many of a float32's bits are left out beside a rest of each dtype.
_LEFT_OUT = {torch.int16: 0, torch.int8: 8}
RESTS = frozenset(_LEFT_OUT)


@torch.no_grad()
def split(values: Tensor, rest_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The bfloat16 weights and the rests of float32 values. A NaN becomes the canonical one."""
    left_out = _LEFT_OUT[rest_dtype]
    bits = values.detach().view(torch.int32) + ((1 << left_out) >> 1)
    bits = torch.where(values.isnan(), _NAN, bits)
    weights = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    return weights, (bits >> left_out).to(rest_dtype)


@torch.no_grad()
def join(weights: Tensor, rests: Tensor) -> Tensor:
    """The float32 values of bfloat16 weights and their rests; each rounds to its weight, whoever wrote that."""
    bits = weights.detach().view(torch.int16).to(torch.int32)
    magnitudes = ((bits & 0x7FFF) << 16) + (rests.to(torch.int32) << _LEFT_OUT[rests.dtype])
    # Below zero only where a zero was written over a weight: its bits would be those of a NaN.
    return (magnitudes.clamp_(min=0) | (bits & _SIGN)).view(torch.float32)
