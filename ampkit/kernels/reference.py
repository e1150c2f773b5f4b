"""Every multi-tensor operator, defined in plain torch, and the choice of who computes a call of it.

A public function has the signature, and hands its arguments to `serve` with the function that computes them in plain torch:
`_scale` for `multi_tensor_scale`. This is the specification of the compiled kernels, and their fallback. It takes any floating
point dtype and, outside the optimizers' rules (reference_optimizers.py), complex ones. Arithmetic is float32, or wider if a tensor
is: each step is rounded once, and the result once more for a narrower output. The kernels agree bit for bit, except that norms and
the optimizers' rules may differ in their last places. Lists may mix dtypes, sizes and devices. The host never waits for a device.

A kernel takes plain tensors of one device, in float32, float16 and bfloat16, whose elements lie in one order. It sees the arguments
first, and refuses all others before it has written anything (csrc/check.h). Python looks only at what a kernel refuses: it words
what is wrong, takes the part of DTensors that lies on this process, and copies tensors that lie in another order. Lists of several
devices, and lists with float64 or complex tensors, are computed in plain torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _set_grad_enabled
from torch.compiler import is_compiling

from ampkit.dtypes import CASTABLE
from ampkit.kernels import backend
from ampkit.kernels.checks import check_lists, compute_dtype, is_written
from ampkit.kernels.split import join, split
from ampkit.sharding import is_sharded, local

Tensors = Sequence[Tensor]
Number = float | Tensor
N = TypeVar("N")

#: The value of ``first_bad`` while all tensors are finite: above every index.
NO_BAD = 2**62

#: Moments may be packed (uint8: moments.py), and rests are int16 (split.py); kernels refuse both in other lists.
_TAKEN = CASTABLE | {torch.uint8, torch.int16}


def serve(
    op: str,
    reference: Callable[..., Any],
    lists: Mapping[str, Tensors | None],
    rest: tuple[Any, ...] = (),
    flags: tuple[Tensor | None, ...] = (),
    rule: str | None = None,
) -> Any:
    """Compute ``reference(*rest, *flags, **lists)``, by a kernel where one takes the arguments; autograd does not see it.

    ``op`` names the compiled operator, which is given the lists (None for one that it does without), then ``rest`` and ``flags``;
    with a ``rule`` it is the step of that rule. A tensor in ``rest`` is read beside the lists. ``flags`` are ``found_inf``, which
    becomes 1.0 where something is not finite and is never cleared, and ``first_bad``, filled with NO_BAD before, which gets the
    smallest index of such a tensor. Returns None if the lists are empty. Raises RuntimeError, with nothing written, if they do
    not fit.
    """
    columns: list[Tensors] = []
    lengths = set()
    for column in lists.values():
        columns.append(() if column is None else column)
        if column is not None:
            lengths.add(len(column))
    if lengths == {0}:
        return None
    # What torch.no_grad() does, without a context object for every call.
    enabled = torch.is_grad_enabled()
    try:
        _set_grad_enabled(False)
        kernel = backend.direct.get(op)
        if kernel is not None and len(lengths) == 1 and backend.kernel_devices and not is_compiling():
            # An error is one of the work itself, as of a launch: the work may be done, and is not tried again.
            if rule is None:
                result = kernel(*columns, *rest, *flags)
            else:
                grads, *written = columns
                result = kernel(rule, grads, written, *rest)
            if result is not NotImplemented:
                return result
        return _serve_refused(op, reference, lists, rest, flags, rule)
    except RuntimeError as error:
        _raise_as_torch_does(error, columns)
        raise
    finally:
        _set_grad_enabled(enabled)


def _raise_as_torch_does(error: RuntimeError, columns: Sequence[Tensors]) -> None:
    """Ask torch for as many bytes as a kernel could not allocate (csrc/check.h): torch's error has a type and says more."""
    if match := re.search(r"ampkit: out of memory: (\d+) bytes", str(error)):
        device = next(tensor.device for column in columns for tensor in column)
        torch.empty(int(match[1]), dtype=torch.uint8, device=device)


def number(value: Number | None) -> tuple[float, Tensor | None]:
    """A number, 1 where it is None, as the compiled operators take it: as a float, or as a tensor that is read instead."""
    if isinstance(value, Tensor):
        return 1.0, value if value.is_floating_point() else value.to(torch.float32)
    return 1.0 if value is None else float(value), None


def moved_to(number: N, device: torch.device) -> N:
    """Move a number to a device. To a GPU, waits only for a copy from pinned memory, which may be written to meanwhile."""
    if not isinstance(number, Tensor) or number.device == device:
        return number
    return number.to(device, non_blocking=device.type == "cuda" and not number.is_pinned())


def _serve_refused(
    op: str, reference: Callable, lists: Mapping[str, Tensors | None], rest: tuple, flags: tuple, rule: str | None
) -> Any:
    """Serve arguments that a kernel has not taken at once."""
    present = {name: column for name, column in lists.items() if column is not None}
    tensors = list(chain.from_iterable(present.values()))
    if any(map(is_sharded, tensors)):
        here = {name: column and [local(tensor) for tensor in column] for name, column in lists.items()}
        return serve(op, reference, here, rest, flags, rule)
    name = op if rule is None else f"multi_tensor_{rule.partition(' ')[0]}"
    check_lists(name, present, dict(zip(("found_inf", "first_bad"), flags)))
    device = tensors[0].device
    rest = tuple([moved_to(x, device) for x in rest])
    one_device = all([tensor.device == device for tensor in (*tensors, *flags) if tensor is not None])
    # LAMB's kernel computes directions twice, from moments that must not be rounded in between.
    moments = (*present["exp_avgs"], *present["exp_avg_sqs"]) if rule == "lamb" else ()
    fits = all([t.dtype in _TAKEN for t in tensors]) and all([m.dtype is torch.float32 for m in moments])
    if not (one_device and device.type in backend.kernel_devices and fits):
        return reference(*rest, *flags, **lists)
    # Tensors with gaps or in another order: the kernel computes contiguous copies, from which what it has written is copied back.
    columns = {key: [tensor.contiguous() for tensor in column or ()] for key, column in lists.items()}
    rest = tuple([x.detach().to(torch.float32) if isinstance(x, Tensor) else x for x in rest])
    first, *further = columns.values()
    arguments = (first, *further) if rule is None else (rule, first, list(chain.from_iterable(further)))
    result = backend.through_dispatcher(op, *arguments, *rest, *flags)
    written = [key for key in present if is_written(name, key)]
    pairs = [pair for key in written for pair in zip(present[key], columns[key]) if pair[0] is not pair[1]]
    if pairs:
        torch._foreach_copy_(*map(list, zip(*pairs)))
    return result


def multi_tensor_scale(
    inputs: Tensors, outputs: Tensors, scale: Number, found_inf: Tensor | None = None, first_bad: Tensor | None = None
) -> None:
    """outputs[i] = inputs[i] * scale. Inputs are checked; outputs, which may be the inputs, are written in any case."""
    # In place each tensor is handed over once.
    to_read = None if not is_compiling() and inputs is outputs else inputs
    lists = {"inputs": to_read, "outputs": outputs}
    serve("multi_tensor_scale", _scale, lists, number(scale), (found_inf, first_bad))


def _scale(scale, scale_tensor, found_inf, first_bad, inputs, outputs):
    inputs = inputs or outputs
    report_non_finite(inputs, found_inf, first_bad)
    factor = scale if scale_tensor is None else scale_tensor
    for x, out in zip(inputs, outputs):
        out.copy_(_product(x, factor, compute_dtype(x)))


def _product(x, factor, dtype):
    """Return ``x * factor`` in this dtype, or ``x`` itself where the factor is the number 1."""
    if isinstance(factor, Tensor):
        return x.to(dtype) * moved_to(factor.reshape(()), x.device)
    return x if factor == 1.0 else x.to(dtype) * factor


def multi_tensor_axpby(
    xs: Tensors,
    ys: Tensors,
    outputs: Tensors,
    a: Number,
    b: Number,
    found_inf: Tensor | None = None,
    arg_to_check: int = -1,
    first_bad: Tensor | None = None,
) -> None:
    """outputs[i] = a * xs[i] + b * ys[i]; ``arg_to_check`` says who is checked: -1 both, 0 ``xs``, 1 ``ys``."""
    if arg_to_check not in (-1, 0, 1):
        raise RuntimeError(f"multi_tensor_axpby: arg_to_check is {arg_to_check}; expected -1 (both), 0 (xs) or 1 (ys)")
    rest = (*number(a), *number(b), arg_to_check)
    lists = {"xs": xs, "ys": ys, "outputs": outputs}
    serve("multi_tensor_axpby", _axpby, lists, rest, (found_inf, first_bad))


def _axpby(a, a_tensor, b, b_tensor, arg_to_check, found_inf, first_bad, xs, ys, outputs):
    for checked, tensors in ((0, xs), (1, ys)):
        if arg_to_check in (-1, checked):
            report_non_finite(tensors, found_inf, first_bad)
    a, b = (a if a_tensor is None else a_tensor), (b if b_tensor is None else b_tensor)
    for x, y, out in zip(xs, ys, outputs):
        dtype = compute_dtype(x, y)
        out.copy_(_product(x, a, dtype) + _product(y.to(x.device), b, dtype).to(dtype))


def multi_tensor_join(weights: Tensors, rests: Tensors, outputs: Tensors) -> None:
    """outputs[i] = the float32 value that weights[i] (float16 or bfloat16) and rests[i] (int16) are together."""
    serve("multi_tensor_join", _join, {"weights": weights, "rests": rests, "outputs": outputs})


def _join(weights, rests, outputs):
    for weight, rest, out in zip(weights, rests, outputs):
        out.copy_(join(weight, rest))


def multi_tensor_split(values: Tensors, weights: Tensors, rests: Tensors) -> None:
    """Split values[i] into weights[i] and rests[i]: see split.py."""
    serve("multi_tensor_split", _split, {"values": values, "weights": weights, "rests": rests})


def _split(values, weights, rests):
    for value, weight, rest in zip(values, weights, rests):
        upper, lower = split(value.float(), weight.dtype)
        weight.copy_(upper)
        rest.copy_(lower)


def joined(weight: Tensor, rest: Tensor | None) -> Tensor:
    """The float32 value that a weight and its rest are together, or the weight alone: a copy."""
    if rest is None or weight.dtype is torch.float32:
        return weight.detach().to(torch.float32, copy=True)
    value = torch.empty_like(weight, dtype=torch.float32, requires_grad=False)
    multi_tensor_join([weight.detach()], [rest.to(weight.device)], [value])
    return value


def parted(value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split a float32 value into a new weight in ``dtype`` and its rest."""
    weight = torch.empty_like(value, dtype=dtype, requires_grad=False)
    rest = torch.empty_like(value, dtype=torch.int16, requires_grad=False)
    multi_tensor_split([value.detach()], [weight], [rest])
    return weight, rest


def multi_tensor_unscale_l2norm(
    inputs: Tensors,
    outputs: Tensors | None = None,
    inv_scale: Number | None = None,
    found_inf: Tensor | None = None,
    per_tensor: bool = False,
    first_bad: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The norms of ``inputs[i] * inv_scale``, with a check of the inputs, in one pass.

    Returns (Euclidean norm of all together, float32 [1]; the norm of each, float32 [n], or [0] unless ``per_tensor``), both on the
    device of the first tensor. Huge and tiny values keep their norm. ``outputs``, which may be the inputs, receive the products;
    without them nothing but the inputs is read, and nothing written: the pass before a fused step, which unscales by itself.
    """
    lists = {"inputs": inputs, "outputs": outputs}
    rest = (*number(inv_scale), per_tensor)
    norms = serve("multi_tensor_unscale_l2norm", _unscale_l2norm, lists, rest, (found_inf, first_bad))
    return norms or (torch.zeros(1), torch.zeros(0))


def _unscale_l2norm(inv_scale, inv_scale_tensor, per_tensor, found_inf, first_bad, inputs, outputs):
    device = inputs[0].device
    each = torch.stack([moved_to(norm, device) for norm in _norms(inputs)])  # first: outputs may be the inputs
    _scale(inv_scale, inv_scale_tensor, found_inf, first_bad, inputs, outputs or ())
    factor = inv_scale if inv_scale_tensor is None else moved_to(inv_scale_tensor.reshape(()), device)
    norms = torch.cat([each.square().sum().sqrt().reshape(1), each if per_tensor else each[:0]])
    norms = (norms * abs(factor)).to(torch.float32)
    return norms[:1].clone(), norms[1:].clone()


def _norms(tensors):
    """The Euclidean norm of each, in float64 where the device has it."""
    flats = [_as_real(x).detach().reshape(-1) if x.numel() else torch.zeros(1, device=x.device) for x in tensors]
    return torch._foreach_norm(flats, 2, dtype=torch.float32 if flats[0].device.type == "mps" else torch.float64)


def multi_tensor_l2norm(tensors: Tensors, per_tensor: bool = False) -> tuple[Tensor, Tensor]:
    """The norms of `multi_tensor_unscale_l2norm`, of the tensors as they are."""
    return multi_tensor_unscale_l2norm(tensors, per_tensor=per_tensor)


def update_scale(
    state: Tensor,
    found_inf: Tensor,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    hysteresis: int = 1,
    min_scale: float = 0.0,
    max_scale: float = float("inf"),
) -> Tensor:
    """Move a loss scale in place, by the rule of DynamicLossScale, and count skips, without the host; returns ``state``.

    ``state`` (int32, shape [7]) has the bits of the scale (float32), the clean iterations since the last overflow or growth, how
    many overflows are left before it backs off, and the iterations that overflowed: all, those in a row, and of these those
    with the scale at ``min_scale``. The last word is left alone.
    """
    rule = (growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale)
    kernel = backend.direct.get("update_scale")
    if kernel is not None and backend.kernel_devices and not is_compiling():
        if kernel(state, found_inf, *rule) is not NotImplemented:
            return state
    if state.dtype is not torch.int32 or state.shape != (7,) or not state.is_contiguous():
        raise RuntimeError(
            f"update_scale: state is {state.dtype} of shape {list(state.shape)}; pass a contiguous int32 tensor of shape [7]"
        )
    found_inf = moved_to(found_inf, state.device)
    if state.device.type in backend.kernel_devices:
        backend.through_dispatcher("update_scale", state, found_inf.to(torch.float32), *rule)
    else:
        _update_scale(state, found_inf, *rule)
    return state


@torch.no_grad()
def _update_scale(state, found_inf, growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale):
    scale, (unskipped, overflows_left, skips, in_a_row, at_floor) = state[:1].view(torch.float32), state[1:6].split(1)
    bad = found_inf != 0
    skips.add_(bad)
    in_a_row.copy_(torch.where(bad, in_a_row + 1, 0))
    at_floor.copy_(torch.where(bad & (scale <= min_scale), at_floor + 1, 0))
    left = torch.where(bad, overflows_left - 1, hysteresis)
    clean = torch.where(bad, 0, unskipped + 1)
    grows = clean >= growth_interval
    # Products in float64 and rounded once, as the kernel's; a scale above the maximum was set by hand and stays.
    wide = scale.dtype if scale.device.type == "mps" else torch.float64
    grown = (scale.to(wide) * growth_factor).to(torch.float32)
    grown = torch.minimum(grown, scale.clamp(min=max_scale))
    grown = torch.where(grown.isfinite(), grown, scale)
    backed_off = (scale.to(wide) * backoff_factor).to(torch.float32).clamp(min=min_scale)
    scale.copy_(torch.where(bad & (left <= 0), backed_off, torch.where(grows, grown, scale)))
    unskipped.copy_(torch.where(grows, 0, clean))
    overflows_left.copy_(left)


def report_non_finite(tensors, found_inf, first_bad=None):
    """Set found_inf to 1 if any element is not finite, without asking the host; otherwise leave it as it is.

    ``first_bad`` is lowered to the index of the first such tensor.
    """
    if found_inf is None and first_bad is None:
        return
    # The extremes of a tensor are finite exactly if all of it is: NaN wins every comparison of these two.
    values = [_as_real(x) if x.numel() else torch.zeros(1, device=x.device) for x in tensors]
    if values[0].device.type == "cpu":  # six times faster there than the norm
        extremes = [torch.stack(torch.aminmax(x)) for x in values]
    else:
        extremes = torch._foreach_norm(values, float("inf"))
    home = (first_bad if found_inf is None else found_inf).device
    finite = torch.stack([moved_to(x, home) for x in extremes]).isfinite()
    bad = finite.reshape(len(values), -1).all(dim=1).logical_not()
    if found_inf is not None:
        found_inf.copy_(torch.maximum(found_inf, bad.any().to(found_inf)))
    if first_bad is not None:
        first = torch.where(bad, torch.arange(len(values), device=home), NO_BAD).min()
        first_bad.copy_(torch.minimum(first_bad, first.to(first_bad.device)))


def _as_real(tensor):
    """Complex numbers as pairs. torch conjugates lazily, and shows no pairs of what it has not conjugated yet."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
