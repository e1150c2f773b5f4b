"""A float32 tensor in two: the 16-bit weight that a model computes with, and an int16 rest.

Note [weights and rests] in csrc/functors/split.h says how; the kernels do the same on their way through memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SIGN = -0x80000000
_REBIAS = 0x38000000  # between the exponents of float32 and float16
_FIRST_NORMAL = 0x400 << 15  # the code of 2^-14
_UNITS_OF_ONE = 2.0**39
_ALMOST_HALF = 0.5 - 2.0**-25  # added before a sum is cut off, which rounds it to nearest; 0.5 would round odd sums up


def split(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split float32 values into weights in ``dtype`` (float16 or bfloat16) and rests (int16). A NaN becomes the canonical one."""
    is_half = dtype is torch.float16
    shift, infinity, nan, largest = (15, 0x7C00, 0x7E00, 0x477FE000) if is_half else (16, 0x7F80, 0x7FC0, 0x7F7F7FFF)
    bits = values.detach().view(torch.int32)
    magnitude, sign = bits & 0x7FFFFFFF, (bits >> 16) & 0x8000
    code = magnitude.clamp(max=largest)
    if is_half:
        small = (code.clamp(max=0x38800000).view(torch.float32) * _UNITS_OF_ONE + _ALMOST_HALF).to(torch.int32)
        code = torch.where(code < 0x38800000, small, (code - _REBIAS) << 2)
    rounded = (code + (1 << shift >> 1)) >> shift
    if is_half:
        rounded = torch.where((rounded == 0) & (code != 0), 1, rounded)
    rest = code - (rounded << shift)
    is_finite = magnitude < 0x7F800000
    special = torch.where(magnitude > 0x7F800000, nan, infinity | sign)
    weight = torch.where(is_finite, rounded | sign, special)
    return weight.to(torch.int16).view(dtype), torch.where(is_finite, rest, 0).to(torch.int16)


def join(weights: Tensor, rests: Tensor) -> Tensor:
    """Join weights and rests into float32 values. Each value rounds to its weight, also where a script wrote the weight."""
    is_half = weights.dtype is torch.float16
    shift, infinity = (15, 0x7C00) if is_half else (16, 0x7F80)
    bits = weights.detach().view(torch.int16).to(torch.int32)
    magnitude, sign, rest = bits & 0x7FFF, bits & _SIGN, rests.to(torch.int32)
    if is_half:  # beside 2^-24 alone a rest may be longer
        rest = torch.where(magnitude > 1, rest.clamp(-(1 << 14), (1 << 14) - 1), rest)
    code = (magnitude << shift) + torch.where((magnitude != 0) & (magnitude < infinity), rest, 0)
    if not is_half:
        return (code | sign).view(torch.float32)
    # Of codes from 2^24 on float32 holds the even ones.
    subnormal = ((code & ~(code >> 24)).to(torch.float32) / _UNITS_OF_ONE).view(torch.int32)
    finite = torch.where(code < _FIRST_NORMAL, subnormal, (code >> 2) + _REBIAS)
    return (torch.where(magnitude < infinity, finite, (magnitude << 13) | 0x7F800000) | sign).view(torch.float32)
