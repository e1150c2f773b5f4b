"""FLOPs of matrix products and convolutions, and whether Tensor Cores can run them; computed from shapes and dtypes, on any device.

A multiplication and an addition count as two operations. Elementwise functions and reductions count as none: memory limits them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..words import short

#: For each dtype the number of elements in 16 bytes: the sizes of a product must be multiples of it.
_OF_A_BYTE = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_MULTIPLES = {torch.float16: 8, torch.bfloat16: 8, **dict.fromkeys(_OF_A_BYTE, 16)}


class Product(NamedTuple):
    """A matrix product: its ``flops``, and the named ``sizes`` along which its matrices are contiguous in memory."""

    flops: int
    sizes: tuple[tuple[str, int], ...]


def product_of(name: str) -> Callable[[Any, Any], Product] | None:
    """Return the function that makes a `Product` of an operator's arguments and result; None if it is no product."""
    if name.startswith(("_scaled_dot_product", "_flash_attention", "_efficient_attention")):
        is_backward = name.endswith("backward")
        # The backward recomputes scores, and has a product for each of scores, query, key and value.
        return lambda args, out: _attention(args[1:4], 3, 2) if is_backward else _attention(args[:3], 1, 1)
    return _FORMULAS.get(name)


@functools.cache
def tensor_cores(dtype: torch.dtype, sizes: tuple[tuple[str, int], ...]) -> str:
    """Return ``"yes"``, or ``"no: "`` and the reason; for a product in float32 or float64 the reason is its dtype."""
    multiple = _MULTIPLES.get(dtype)
    if multiple is None:
        return f"no: {short(dtype)}"
    for name, size in sizes:
        if size % multiple:
            return f"no: {name} = {size} is no multiple of {multiple}; pad it to {-(-size // multiple) * multiple}"
    return "yes"


def _matrix(a: torch.Tensor, b: torch.Tensor) -> Product:
    """Return the product A (M x K) times B (K x N), also batched. Rows in memory must begin at multiples of 16 bytes."""
    if not a.layout is b.layout is torch.strided:  # the work of a sparse product is not known
        return Product(0, ())
    n = b.shape[-1] if b.dim() > 1 else 1
    sizes = dict([_along(a, "MK"), _along(b, "KN") if b.dim() > 1 else ("K", len(b)), ("N", n)])
    in_memory = tuple((name, sizes[name]) for name in "KNM" if name in sizes)
    return Product(2 * a.numel() * n, in_memory)


def _grouped(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Product:
    """Return a product per group: of rows, of columns, or of parts of K. Only groups of K add a dimension."""
    groups = len(out) if out.dim() > a.dim() else 1
    return _matrix(a, b)._replace(flops=2 * out.numel() * a.shape[-1] // groups)


def _along(matrix: torch.Tensor, names: str) -> tuple[str, int]:
    """Return name and size of the contiguous dimension of a matrix."""
    is_transposed = matrix.stride(-2) == 1 and matrix.stride(-1) != 1
    return (names[0], matrix.shape[-2]) if is_transposed else (names[1], matrix.shape[-1])


def _convolution(args: Any, out: torch.Tensor, passes: int = 1) -> Product:
    x, weight, is_transposed, groups = args[0], args[1], args[6], args[8]
    # Each position of the smaller side is multiplied with each weight of its group once.
    places = math.prod((x if is_transposed else out).shape[2:])
    flops = 2 * x.shape[0] * places * weight.numel()
    channels = ("C_in", x.shape[1] // groups), ("C_out", out.shape[1] // groups)
    return Product(flops * passes, channels)


def _attention(args: Any, of_query: int, of_value: int) -> Product:
    query, key, value = args
    queries = math.prod(query.shape[:-1])  # of all heads of the batch
    flops = 2 * queries * key.shape[-2] * (of_query * query.shape[-1] + of_value * value.shape[-1])
    return Product(flops, (("head dimension", query.shape[-1]),))


def _recurrent(args: Any, out: Any, passes: int = 1) -> Product:
    x = args[0]
    weights = [w for w in (args[1] if isinstance(args[1], (list, tuple)) else args[1:3]) if w.dim() == 2]
    steps = math.prod(x.shape[:-1])
    sizes = (("input size", x.shape[-1]), *((("hidden size", weights[-1].shape[-1]),) if weights else ()))
    return Product(2 * steps * sum(w.numel() for w in weights) * passes, sizes)


#: Products that are added to the first argument.
_ADDED_TO = ("addmm", "addmm_", "addmv", "baddbmm", "baddbmm_", "addbmm", "_addmm_activation")
_FORMULAS: dict[str, Callable[[Any, Any], Product]] = {
    **dict.fromkeys(("mm", "bmm", "mv", "_scaled_mm"), lambda args, out: _matrix(args[0], args[1])),
    **dict.fromkeys(_ADDED_TO, lambda args, out: _matrix(args[1], args[2])),
    "_grouped_mm": lambda args, out: _grouped(args[0], args[1], out),
    "convolution": _convolution,
    "convolution_backward": lambda args, out: _convolution(args[1:], args[0], bool(args[10][0]) + bool(args[10][1])),
    "mkldnn_rnn_layer": _recurrent,
    "mkldnn_rnn_layer_backward": lambda args, out: _recurrent(args, out, passes=2),
    "_cudnn_rnn": _recurrent,
    "_cudnn_rnn_backward": lambda args, out: _recurrent(args, out, passes=2),
}
