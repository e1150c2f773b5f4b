"""Functions that compute in float32 from a lower-precision tensor without keeping a float32 copy of it.

See "Float32 inside" in NOTES.md. `wrappers.wrap` takes these in place of its wrapper, for the names in question.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from ..dtypes import LOWER_PRECISION
from .narrow_gradients import RowsOfTable, takes_narrow_gradients
from .state import CastingState, stored

WORTHWHILE = 1 << 16  # elements; below, the copy costs less time than Python's part in an autograd function
_IN_CACHES = 1 << 18  # elements, for each thread

# Bound before anything is patched.
_grad_enabled = torch.is_grad_enabled
_compiling = torch.compiler.is_compiling
_tracing = torch._C._get_tracing_state
_transform_level = torch._C._functorch.maybe_current_level
_softmax, _log_softmax = torch.softmax, torch.log_softmax
_native_layer_norm = torch.native_layer_norm
_native_group_norm = torch.native_group_norm
_layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default
_group_norm_backward = torch.ops.aten.native_group_norm_backward.default


def saving_the_input(
    wrapper: Callable, original: Callable, state: CastingState, owner: Any, name: str
) -> Callable | None:
    """A function for large inputs in lower precision in place of ``wrapper``, which casts ``original``'s to float32; or None."""
    if not any(owner is module for module in (F, torch)) or name not in _COMPUTATIONS:
        return None
    computation = _COMPUTATIONS[name]

    def save_the_input(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs["input"]
        if not _is_cast(x, state) or not _records_plainly(x):
            return wrapper(*args, **kwargs)
        try:
            arguments = computation.arguments(*args, **kwargs)
            if arguments is not None and any(isinstance(t, Tensor) and t.requires_grad for t in arguments):
                return _Float32Inside.apply(computation, original, *arguments)
        except (TypeError, IndexError, RuntimeError):
            pass  # torch's own error says more, and must not have this one as its context
        return wrapper(*args, **kwargs)

    return save_the_input


def _is_cast(x: Any, state: CastingState) -> bool:
    return type(x) in (Tensor, Parameter) and x.dtype in LOWER_PRECISION and state.casts_on(x.device.type)


def _records_plainly(x: Tensor) -> bool:
    """Whether autograd alone records what is computed now: else the copy is fused, or gone as soon as the function returns."""
    return (
        not _compiling()
        and _grad_enabled()
        and _transform_level() is None
        and forward_ad._current_level < 0
        and _tracing() is None
        and not x.is_inference()
    )


def with_dtype(wrapper: Callable, original: Callable, state: CastingState, owner: Any, name: str) -> Callable:
    """Wrap a function with ``dtype=``, whose kernels convert element by element, except on the CPU; others stay as they are."""
    takes_dtype = any(owner is place for place in (F, torch, Tensor, torch.special)) and name in _WITH_DTYPE
    if not takes_dtype or not torch.accelerator.is_available():
        return wrapper

    def pass_dtype(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs.get("input")
        has_dtype = kwargs.get("dtype") is not None or any(type(value) is torch.dtype for value in args)
        if not _is_cast(x, state) or x.is_cpu or has_dtype or kwargs.get("out") is not None:
            return wrapper(*args, **kwargs)
        return original(*args, **{**kwargs, "dtype": torch.float32})

    return pass_dtype


_WITH_DTYPE = frozenset({"softmax", "log_softmax", "softmin", "sum", "prod", "cumsum", "cumprod"})


class _Float32Inside(torch.autograd.Function):
    """An autograd function for ``original(x.float(), *rest)`` that saves ``x`` in its own dtype."""

    @staticmethod
    def forward(ctx: Any, computation: _Computation, original: Callable, x: Tensor, *rest: Any) -> Tensor:
        result, statistics = computation.forward(original, x, *rest)
        ctx.computation, ctx.original = computation, original
        # Tensors go where the hooks on saved tensors see them.
        ctx.rest = [None if isinstance(value, Tensor) else value for value in rest]
        ctx.save_for_backward(x, *(value if isinstance(value, Tensor) else None for value in rest), *statistics)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        x, *saved = ctx.saved_tensors
        rest = [value if tensor is None else tensor for value, tensor in zip(ctx.rest, saved, strict=False)]
        statistics = saved[len(rest) :]
        needed = ctx.needs_input_grad[2:]
        if _grad_enabled() or not statistics:
            gradients = _recomputed_gradients(ctx.original, grad, needed, x, rest)
        else:
            gradients = ctx.computation.backward(grad, needed, statistics, x, *rest)
        return None, None, *gradients


def _recomputed_gradients(
    original: Callable, grad: Tensor, needed: tuple[bool, ...], x: Tensor, rest: list[Any]
) -> list[Tensor | None]:
    """The gradients of ``original(x.float(), *rest)``, themselves differentiable where grad mode is on."""
    create_graph = _grad_enabled()
    with torch.enable_grad():
        # Views: hooks on the tensors themselves belong to the backward pass outside.
        views = [t.view_as(t) if wanted else t for t, wanted in zip((x, *rest), needed, strict=True)]
        result = original(views[0].float(), *views[1:])
    sources = [view for view, wanted in zip(views, needed, strict=True) if wanted]
    gradients = iter(torch.autograd.grad(result, sources, grad, create_graph=create_graph))
    return [next(gradients) if wanted else None for wanted in needed]


class _Computation(NamedTuple):
    """A function of torch, and its computation here.

    ``arguments`` returns the function's arguments in order, or None where it is left to torch. ``forward`` returns the result and
    the tensors that ``backward`` needs beside the arguments; without any, the forward pass is done again instead.
    """

    arguments: Callable[..., tuple | None]
    forward: Callable[..., tuple[Tensor, Sequence[Tensor]]]
    backward: Callable[..., tuple[Tensor | None, ...]] | None = None


def _are_float32(*weights: Tensor | None) -> bool:
    return all(x is None or (type(x) in (Tensor, Parameter) and x.dtype is torch.float32) for x in weights)


def _arguments_of_layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True):
    return (input, normalized_shape, weight, bias, eps) if _are_float32(weight, bias) else None


def _layer_norm(original, x, shape, weight, bias, eps):
    result, *statistics = _native_layer_norm(x.float(), shape, weight, bias, eps)
    return result, statistics


def _gradients_of_layer_norm(grad, needed, statistics, x, shape, weight, bias, eps):
    mask = [needed[0], needed[2], needed[3]]
    dx, dweight, dbias = _layer_norm_backward(grad, x.float(), shape, *statistics, weight, bias, mask)
    return None if dx is None else dx.to(x.dtype), None, dweight, dbias, None


def _arguments_of_group_norm(input, num_groups, weight=None, bias=None, eps=1e-5, cudnn_enabled=True):
    fits = _are_float32(weight, bias) and all(x is None or x.shape == input.shape[1:2] for x in (weight, bias))
    fits = fits and input.dim() >= 2 and type(num_groups) is int and num_groups > 0 and input.shape[1] % num_groups == 0
    return (input, num_groups, weight, bias, eps) if fits else None


def _in_memory_format_of(x, tensor):
    """Return ``tensor`` in the memory format of ``x``, as group_norm's kernels need; they know channels_last on the CPU."""
    channels_last = x.is_cpu and x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return tensor.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def _group_norm_sizes(x, groups):
    return x.shape[0], x.shape[1], x.numel() // (x.shape[0] * x.shape[1]), groups


def _group_norm(original, x, groups, weight, bias, eps):
    x32 = _in_memory_format_of(x, x.float())
    result, *statistics = _native_group_norm(x32, weight, bias, *_group_norm_sizes(x, groups), eps)
    return result, statistics


def _gradients_of_group_norm(grad, needed, statistics, x, groups, weight, bias, eps):
    mask = [needed[0], needed[2], needed[3]]
    grad, x32 = _in_memory_format_of(x, grad), _in_memory_format_of(x, x.float())
    dx, dweight, dbias = _group_norm_backward(grad, x32, *statistics, weight, *_group_norm_sizes(x, groups), mask)
    return None if dx is None else dx.to(x.dtype), None, dweight, dbias, None


def _arguments_of_rms_norm(input, normalized_shape, weight=None, eps=None):
    shape = torch.Size(normalized_shape)
    fits = _are_float32(weight) and len(shape) > 0 and input.shape[-len(shape) :] == shape
    return (input, shape, weight, eps) if fits else None


def _rms_norm(original, x, shape, weight, eps):
    return original(x.float(), shape, weight, eps), ()  # done again in the backward pass: torch has no kernel for that


def _arguments_of_cross_entropy(
    input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean", label_smoothing=0.0
):
    has_classes = type(target) is Tensor and target.dtype is torch.long
    has_classes = has_classes and input.dim() >= 2 and target.shape == input.shape[:1] + input.shape[2:]
    is_plain = weight is size_average is reduce is None and label_smoothing == 0
    fits = has_classes and is_plain and reduction in ("none", "mean", "sum")
    # In the order of torch's own: a second derivative is that of the original, called with these.
    return (input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing) if fits else None


def _parts(*tensors):
    """Split tensors on the CPU into a few samples at a time, whose float32 values stay in the caches; on a GPU not at all."""
    x = tensors[0]
    samples = max(1, len(x) * _IN_CACHES * torch.get_num_threads() // x.numel()) if x.is_cpu else len(x)
    return zip(*(tensor.split(samples) for tensor in tensors), strict=True)


def _cross_entropy(original, x, target, _, __, ignore_index, ___, reduction, ____):
    ignored = target == ignore_index
    # The weight of each sample in the result.
    share = (~ignored).float()
    losses = torch.empty_like(share)
    for part, labels, loss in _parts(x, target.masked_fill(ignored, 0), losses):
        torch.neg(_log_softmax(part, 1, torch.float32).gather(1, labels.unsqueeze(1)).squeeze(1), out=loss)
    losses.masked_fill_(ignored, 0)
    if reduction == "mean":
        count = share.sum()
        result, share = losses.sum() / count, share.div_(count.clamp_(min=1))
    else:
        result = losses.sum() if reduction == "sum" else losses
    return result, (share,)


def _gradients_of_cross_entropy(grad, needed, statistics, x, target, _, __, ignore_index, *rest):
    share = statistics[0].mul(grad)
    target = target.masked_fill(target == ignore_index, 0)
    dx = torch.empty_like(x)
    for result, part, labels, counts in _parts(dx, x, target.unsqueeze(1), share.unsqueeze(1)):
        dpart = _softmax(part, 1, torch.float32).mul_(counts)
        result.copy_(dpart.scatter_add_(1, labels, counts.neg()))
    return dx, *(None,) * 7


def with_gradients_of_tables(wrapper: Callable, original: Callable, state: CastingState) -> Callable:
    """Wrap ``embedding``: large tables that would be cast, or may have narrow gradients, get gradients by rows (`RowsOfTable`).

    The gradients of smaller ones stay float32: they take few bytes, and less time. Sparse gradients are in the table's precision:
    autograd casts none.
    """

    def call(weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False):
        if sparse:
            rows = original(weight, indices, padding_idx, scale_grad_by_freq, True)
            return rows.float() if rows.dtype in LOWER_PRECISION else rows
        by_rows = takes_narrow_gradients(weight) and not scale_grad_by_freq
        if state.verbosity < 2 and _is_cast(weight, state) and weight.requires_grad:
            by_rows = True
        if by_rows and weight.numel() >= WORTHWHILE and _records_plainly(weight):
            return RowsOfTable.apply(original, weight, indices, padding_idx, scale_grad_by_freq)
        return wrapper(weight, indices, padding_idx, scale_grad_by_freq)

    return call


def with_rows_of_bags(wrapper: Callable, state: CastingState) -> Callable:
    """Wrap ``embedding_bag``: rows are float32 and add up in it. No cast takes sparse gradients: factors follow the table there."""

    def call(
        weight,
        indices,
        offsets,
        scale_grad_by_freq=False,
        mode=0,
        sparse=False,
        per_sample_weights=None,
        *more,
        **named,
    ):
        if not sparse or weight in stored:
            weight = state.in_float32(weight)
        elif per_sample_weights is not None:
            per_sample_weights = per_sample_weights.to(weight.dtype)
        return wrapper(weight, indices, offsets, scale_grad_by_freq, mode, sparse, per_sample_weights, *more, **named)

    return call


_COMPUTATIONS = {
    "layer_norm": _Computation(_arguments_of_layer_norm, _layer_norm, _gradients_of_layer_norm),
    "group_norm": _Computation(_arguments_of_group_norm, _group_norm, _gradients_of_group_norm),
    "rms_norm": _Computation(_arguments_of_rms_norm, _rms_norm),
    "cross_entropy": _Computation(_arguments_of_cross_entropy, _cross_entropy, _gradients_of_cross_entropy),
}
