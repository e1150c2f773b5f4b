"""Gradients of large weights that stay in lower precision until a script reads them: see "Narrow gradients" in NOTES.md.

`getter` widens ``p.grad`` in place, once, when a script reads it. Steps of initialized optimizers, clipping by norm and
``zero_grad`` bypass it. Without the library in C++ gradients are float32: Python cannot see the hooks that DDP puts on an
accumulation. `getter` also takes writes to ``p.grad``, at every level that casts: a gradient of another floating dtype is taken,
and ``p.grad = None`` inside of a block is noticed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..dtypes import LOWER_PRECISION
from ..patching import PatchSet, SharedPatches, Undo
from .cpp_wrappers import library as _library

_embedding_backward = torch.ops.aten.embedding_dense_backward.default

#: The least number of elements of a weight whose gradient is narrow.
LARGE = 4096


def is_large(param: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether narrow gradients pay for a parameter that is or would be in ``dtype``: for large matrices in float32.

    Subclasses (DTensor) have gradients of their own kind.
    """
    sizes = sum(size > 1 for size in param.shape)
    is_plain = _library is not None and type(param) is torch.nn.Parameter and (dtype or param.dtype) is torch.float32
    return is_plain and sizes > 1 and param.numel() >= LARGE


def take_narrow_gradients(params: Iterable[Tensor], undo: Undo) -> None:
    """Let gradients of the large float32 parameters among ``params`` be in lower precision. `getter` has to be in place."""
    for param in params:
        if is_large(param) and param.is_leaf and not _library.takes_narrow_gradients(param):
            undo.if_alive(_library.take_none_any_more, param)
            _library.take_narrow_gradients(param)


def follow_dtype(param: Tensor) -> None:
    """Let gradients of a parameter follow its own dtype again, whatever that becomes."""
    if _library is not None:
        _library.follow_dtype(param)
    elif param.grad_dtype is not param.dtype:
        param.grad_dtype = None  # the nearest that Python can say


stored_gradient = (lambda param: param.grad) if _library is None else _library.stored_gradient
"""Return a parameter's gradient as it is stored."""


note_set_aside: Callable[[Tensor], None] = (lambda param: None) if _library is None else _library.note_set_aside
"""Note that a block has set a parameter's gradient aside."""

is_set_aside: Callable[[Tensor], bool] = (lambda param: True) if _library is None else _library.is_set_aside
"""Whether no script has written None to ``p.grad`` since `note_set_aside`; clears the note. True if writes are not seen."""

takes_narrow_gradients: Callable[[Any], bool] = (
    (lambda tensor: False) if _library is None else _library.takes_narrow_gradients
)
"""Whether a tensor's gradients may be narrow."""

read_narrow: Callable[[bool], bool] = bool if _library is None else _library.read_narrow
"""Set whether this thread reads ``p.grad`` as it is stored; return the previous setting.

For steps whose kernels all take both precisions.
"""


@contextmanager
def past_the_getter() -> Iterator[None]:
    """Read ``p.grad`` as it is stored inside, in this thread."""
    before = read_narrow(True)
    try:
        yield
    finally:
        read_narrow(before)


class RowsOfTable(torch.autograd.Function):
    """Autograd function for float32 rows of a table in any precision, whose gradients it adds up in float32.

    It makes a large table's narrow gradient with no float32 one.
    """

    @staticmethod
    def forward(
        ctx: Any, embedding: Callable[..., Tensor], table: Tensor, indices: Tensor, padding_index: int, by_freq: bool
    ) -> Tensor:
        ctx.table, ctx.padding_index, ctx.by_freq = table, padding_index, by_freq
        ctx.save_for_backward(indices)
        return embedding(table, indices, padding_index, by_freq).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None, None, None]:
        (indices,), table, padding_index = ctx.saved_tensors, ctx.table, ctx.padding_index
        is_narrow = takes_narrow_gradients(table) and not ctx.by_freq
        if is_narrow and _library.hand_on_rows(table, grad, indices, padding_index):
            return None, None, None, None, None
        rows = _embedding_backward(grad, indices, len(table), padding_index, ctx.by_freq)
        return None, rows.to(table.dtype), None, None, None


def _in_its_dtype(hook: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Wrap a hook to return the gradient's dtype: it may multiply by a float32 mask, and torch refuses another dtype."""

    @functools.wraps(hook)
    def run(gradient: Tensor) -> Any:
        result = hook(gradient)
        return result.to(gradient.dtype) if isinstance(result, Tensor) and result.is_floating_point() else result

    return run


def keep_hooks_in_dtype(param: Tensor) -> None:
    """Wrap hooks that a script registered before the parameter was stored in lower precision, to return its dtype."""
    for key, hook in list((param._backward_hooks or {}).items()):
        param._backward_hooks[key] = _in_its_dtype(hook)  # type: ignore[index]


def _patch(patches: PatchSet) -> None:
    if _library is None:
        return
    for name in ("grad", "_grad"):
        patches.set(torch.Tensor, name, getattr(_library, name))
    patches.put_around(torch.Tensor, "register_hook", _register_hook)


def _register_hook(original: Callable, tensor: Tensor, hook: Callable[[Tensor], Any]) -> Any:
    if tensor.is_leaf and tensor.dtype in LOWER_PRECISION:
        return original(tensor, _in_its_dtype(hook))
    if not _library.takes_narrow_gradients(tensor):
        return original(tensor, hook)
    # torch clears the weight's hooks before the script's first, and with them ampkit's, which widens the gradient.
    tensor.grad  # noqa: B018
    handle = original(tensor, hook)
    _library.take_narrow_gradients(tensor)
    return handle


getter = SharedPatches(_patch)
