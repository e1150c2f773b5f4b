"""Moments of optimizers in 8 bits, and rounding by random numbers that are a function of where they are used.

Codes are block-wise, as in Dettmers et al. 2022 ("8-bit Optimizers via Block-wise Quantization"): large values in one place
of a tensor cost no precision in another. They are companded, as in their dynamic codes and in FlashOptim's, since one block
holds values that are far apart: here a code is a logarithm, so that the error is relative to each value.

A value is rounded to a float of 8 bits of exponent and 3 of mantissa; read as a whole number, these 11 bits are its place on a
grid. Each block of 256 elements stores its highest place (as the float32 that it stands for: the block's scale), and each
element stores its distance below that:

- a first moment in a sign and 7 bits: places down to 2^-15.75 of the highest. Lower places become 0.
- a second moment in 8 bits: places down to 2^-31.75 of the highest. Lower ones are raised to that: a second moment, by whose root
  a step is divided, is stored as 0 only if it is 0.

**How far off.** A factor of 2 has eight places, so neighbours are between 1/15 and 1/8 of a value apart. Rounded to nearest a value
is off by at most 2^-4 of itself (down to 2^-126); by numbers drawn, by less than 2^-3, and not at all in the mean. Rounding to
nearest is not enough: with beta2 = 0.999 a step moves a second moment by a thousandth of itself, which nearest always loses.

Values that come from codes are on the grid, and so is the highest of them: packing them again gives the same bits.

Packed, a moment of n elements is one tensor of bytes: n codes in the order of a contiguous tensor, up to the next multiple of 4,
then the blocks' scales, float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256
_MANTISSA = 3
_DROPPED = 23 - _MANTISSA
_WORD = 0xFFFFFFFF
_INFINITY = 0x7F800000
_INFINITE_PLACE, _NAN_PLACE = _INFINITY >> _DROPPED, 0x7FC00000 >> _DROPPED
#: The random numbers of an element: one for its moments, each of which is right in the mean, and one for itself.
MOMENTS, PARAM = range(2)


def packed_size(numel: int) -> int:
    """The bytes of a packed moment of so many elements."""
    return _code_bytes(numel) + -(-numel // BLOCK) * 4


def pack(values: Tensor, is_signed: bool, drawn: Tensor | None = None) -> Tensor:
    """Pack a moment, rounded to nearest, or by the number ``drawn`` for each element."""
    bits = _blocks(values.detach().to(torch.float32).contiguous().view(torch.int32).reshape(-1).long())
    magnitudes = bits & 0x7FFFFFFF
    dither = 1 << (_DROPPED - 1)
    if drawn is not None:
        dither = _blocks(drawn.reshape(-1)) & (1 << _DROPPED) - 1
    places = ((magnitudes + dither) >> _DROPPED).clamp(max=_INFINITE_PLACE - 1)
    places = torch.where(magnitudes < _INFINITY, places, _INFINITE_PLACE + 0 * places)
    places = torch.where(magnitudes > _INFINITY, _NAN_PLACE + 0 * places, places)
    if not is_signed:
        places = torch.where(magnitudes != 0, places.clamp(min=1), 0)
    places = torch.where(_blocks(torch.ones_like(bits).reshape(-1)[: values.numel()]) != 0, places, 0)
    highest = places.amax(1, keepdim=True)
    base = (highest - (127 if is_signed else 255)).clamp(min=0)
    if is_signed:
        codes = (places - base).clamp(min=0) | (bits >> 24 & 0x80)
    else:
        codes = torch.where(magnitudes != 0, (places - base).clamp(min=1), 0)
    packed = torch.zeros(packed_size(values.numel()), dtype=torch.uint8, device=values.device)
    packed[: values.numel()] = codes.reshape(-1)[: values.numel()].to(torch.uint8)
    packed[_code_bytes(values.numel()) :] = (highest.reshape(-1) << _DROPPED).to(torch.int32).view(torch.uint8)
    return packed


def unpack(packed: Tensor, shape: torch.Size, is_signed: bool) -> Tensor:
    """The float32 values of a packed moment."""
    numel = shape.numel()
    codes = _blocks(packed[:numel].long())
    highest = packed[_code_bytes(numel) :].clone().view(torch.int32).long().unsqueeze(1) >> _DROPPED
    base = (highest - (127 if is_signed else 255)).clamp(min=0)
    low = codes & 0x7F if is_signed else codes
    bits = torch.where(low != 0, (low + base) << _DROPPED, 0)
    values = bits.to(torch.int32).view(torch.float32)
    if is_signed:
        values = torch.where(codes & 0x80 != 0, -values, values)
    return values.reshape(-1)[:numel].reshape(shape)


def to_bfloat16(values: Tensor, drawn: Tensor) -> Tensor:
    """Round float32 to a neighbour in bfloat16, by the number ``drawn`` for each element; finite values stay finite."""
    bits = values.detach().contiguous().view(torch.int32).long()
    magnitudes = bits & 0x7FFFFFFF
    rounded = ((magnitudes + (drawn.reshape(values.shape) & 0xFFFF)) >> 16).clamp(max=0x7F7F)
    result = (torch.where(magnitudes < _INFINITY, rounded, 0x7F80) << 16).to(torch.int32).view(torch.float32)
    result = torch.where(bits < 0, -result, result)
    return torch.where(values.isnan(), float("nan"), result).to(torch.bfloat16)


def draw(numel: int, *, seed: int, position: Tensor | float, step: Tensor | float, stream: int, device) -> Tensor:
    """A random number of 32 bits for each element of a parameter's list, as int64: those of csrc/moments/philox.h.

    One call gives four words, and each word four numbers: the word itself, and turned by 8, 16 and 24 bits. Users take the lowest
    bits, of which the upper 8 are others of the word each time.
    """
    calls = torch.arange(-(-numel // 16), dtype=torch.int64, device=device)
    whole = lambda x: x.reshape(()).to(device, torch.int64) if isinstance(x, Tensor) else int(x)  # noqa: E731
    constant = lambda x: torch.zeros_like(calls) + whole(x)  # noqa: E731
    counter = [calls & _WORD, calls >> 32 | stream << 24, constant(position), constant(step)]
    words = torch.stack(philox(counter, seed & _WORD, seed >> 32 & _WORD), dim=1)
    numbers = torch.stack([words << turn & _WORD | words >> (32 - turn) for turn in (0, 8, 16, 24)], dim=2)
    return numbers.reshape(-1)[:numel]


def philox(x: list[Tensor], low: int, high: int) -> list[Tensor]:
    """Philox4x32-7 (Salmon et al. 2011) of a counter of four words, in int64, and a key of two.

    Seven rounds are the fewest that pass all of BigCrush there.
    """
    for _ in range(7):
        # Products of two words wrap around in int64, with the same bits.
        even, odd = x[0] * 0xD2511F53, x[2] * 0xCD9E8D57
        x = [(odd >> 32 & _WORD) ^ x[1] ^ low, odd & _WORD, (even >> 32 & _WORD) ^ x[3] ^ high, even & _WORD]
        low, high = low + 0x9E3779B9 & _WORD, high + 0xBB67AE85 & _WORD
    return x


def _code_bytes(numel: int) -> int:
    return -(-numel // 4) * 4


def _blocks(values: Tensor) -> Tensor:
    """Return values in rows of one block each, the last row padded with zeros."""
    return torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
