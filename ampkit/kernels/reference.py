"""Every multi-tensor operator in plain torch: the specification of the compiled kernels, and what runs without them.

Lists may mix dtypes and sizes, and devices too; an empty list is fine. float32, float16 and bfloat16 are fast, other dtypes work.
Arithmetic is float32, or wider where a tensor is: each step is rounded once, and the result once more on its way into a narrower
output. The kernels agree bit for bit, except that norms and the optimizers' rules (reference_optimizers.py) may differ in
their last places.

`operator` (routing.py, which says what the annotations mean) hands the lists of a call to the kernels, or to the function that
stands here, parted by device. So the lists that such a function is given lie on one device; they may hold any floating point
dtype and, outside the optimizers' rules, complex ones. The host never waits for a device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampkit.kernels.checks import check_lists, compute_dtype
from ampkit.kernels.routing import NO_BAD, Flag, Number, Tensors, integers_on, operator, operator_without_lists
from ampkit.kernels.split import join, split

# A float32 sum of squares stays accurate over this many elements; longer tensors are summed in pieces.
_PIECE = 1 << 12
# Outside this range the squares of a piece may have left float32.
_SAFE_NORM = (1e-12, 1e18)


@operator
def multi_tensor_scale(
    inputs: Tensors,
    outputs: Tensors,
    scale: Number,
    found_inf: Flag | None = None,
    first_bad: Flag | None = None,
) -> None:
    """outputs[i] = inputs[i] * scale. Inputs are checked; outputs, which may be the inputs, are written in any case."""
    check_lists("multi_tensor_scale", inputs=inputs, outputs=outputs)
    report_non_finite(inputs, found_inf, first_bad)
    _scale(inputs, outputs, scale)


def _scale(inputs, outputs, scale):
    # torch writes no lists of what it has not conjugated yet.
    one_by_one = [out.is_complex() and out.is_conj() for out in outputs]
    if not any(one_by_one) and not isinstance(scale, torch.Tensor) and scale == 1.0:
        torch._foreach_copy_(outputs, inputs)
        return
    one_by_one = [single or out.dtype is not compute_dtype(x) for x, out, single in zip(inputs, outputs, one_by_one)]
    in_place = [(x, out) for x, out, single in zip(inputs, outputs, one_by_one) if not single]
    if in_place:
        # Widened first and multiplied where it lies: no temporary copies.
        targets = [out for _, out in in_place]
        torch._foreach_copy_(targets, [x for x, _ in in_place])
        if isinstance(scale, torch.Tensor):
            torch._foreach_mul_(targets, [scale.reshape(()).to(out) for out in targets])
        else:
            torch._foreach_mul_(targets, scale)
    for x, out, single in zip(inputs, outputs, one_by_one):
        if single:
            out.copy_(x.to(compute_dtype(x)) * _factor(scale))


@operator
def multi_tensor_axpby(
    xs: Tensors,
    ys: Tensors,
    outputs: Tensors,
    a: Number,
    b: Number,
    found_inf: Flag | None = None,
    arg_to_check: int = -1,
    first_bad: Flag | None = None,
) -> None:
    """outputs[i] = a * xs[i] + b * ys[i]; ``arg_to_check`` says who is checked: -1 both, 0 ``xs``, 1 ``ys``."""
    if arg_to_check not in (-1, 0, 1):
        raise RuntimeError(f"multi_tensor_axpby: arg_to_check is {arg_to_check}; expected -1 (both), 0 (xs) or 1 (ys)")
    check_lists("multi_tensor_axpby", xs=xs, ys=ys, outputs=outputs)
    for checked, tensors in ((0, xs), (1, ys)):
        if arg_to_check in (-1, checked):
            report_non_finite(tensors, found_inf, first_bad)
    for x, y, out in zip(xs, ys, outputs):
        dtype = compute_dtype(x, y)
        out.copy_((x.to(dtype) * _factor(a)).add_(y.to(x.device, dtype) * _factor(b)))


@operator
def multi_tensor_join(weights: Tensors, rests: Tensors, outputs: Tensors) -> None:
    """outputs[i] = the float32 value that weights[i] (float16 or bfloat16) and rests[i] (int16) are together."""
    check_lists("multi_tensor_join", weights=weights, rests=rests, outputs=outputs)
    for weight, rest, out in zip(weights, rests, outputs):
        out.copy_(join(weight, rest))


@operator
def multi_tensor_split(values: Tensors, weights: Tensors, rests: Tensors) -> None:
    """weights[i] and rests[i] become what values[i] is together: see split.py."""
    check_lists("multi_tensor_split", values=values, weights=weights, rests=rests)
    for value, weight, rest in zip(values, weights, rests):
        upper, lower = split(value.float(), weight.dtype)
        weight.copy_(upper)
        rest.copy_(lower)


def _joined_norms(given: dict[str, Any], parts: list) -> tuple[Tensor, Tensor]:
    """One pair of norms from those of each group of tensors."""
    if not parts:
        return torch.zeros(1), torch.zeros(0)
    if parts[0][0] is None:
        return parts[0][1]
    device = next(iter(given.values()))[0].device
    joined = torch.cat([norm.to(device, torch.float64) for _, (norm, _) in parts])
    norms = torch.cat([norms.to(device) for _, (_, norms) in parts])
    if given["per_tensor"]:
        order = integers_on(device, [i for indices, _ in parts for i in indices])
        norms = torch.empty_like(norms).index_copy_(0, order, norms)
    return joined.square().sum(dim=0, keepdim=True).sqrt().to(torch.float32), norms


@operator(after=_joined_norms)
def multi_tensor_unscale_l2norm(
    inputs: Tensors,
    outputs: Tensors | None = None,
    inv_scale: Number | None = None,
    found_inf: Flag | None = None,
    per_tensor: bool = False,
    first_bad: Flag | None = None,
) -> tuple[Tensor, Tensor]:
    """The norms of ``inputs[i] * inv_scale``, with a check of the inputs, in one pass.

    Returns (Euclidean norm of all together, float32 [1]; the norm of each, float32 [n], or [0] unless asked for), both on the
    device of the first tensor. Huge and tiny values keep their norm. ``outputs``, which may be the inputs, receive the products;
    without them nothing but the inputs is read, and nothing written: the pass before a fused step, which unscales by itself.
    """
    check_lists("multi_tensor_unscale_l2norm", inputs=inputs, outputs=outputs)
    norms = _l2norm(inputs, per_tensor, inv_scale)  # first: outputs may be the inputs
    report_non_finite(inputs, found_inf, first_bad)
    if outputs is not None:
        _scale(inputs, outputs, 1.0 if inv_scale is None else inv_scale)
    return norms


def multi_tensor_l2norm(tensors: Tensors, per_tensor: bool = False) -> tuple[Tensor, Tensor]:
    """The norms of `multi_tensor_unscale_l2norm`, of the tensors as they are."""
    return multi_tensor_unscale_l2norm(tensors, per_tensor=per_tensor)


@operator_without_lists
def update_scale(
    state: Tensor,
    found_inf: Tensor,
    *,
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

    An overflow costs one of ``hysteresis`` chances; without any left, the scale backs off, to ``min_scale`` at least. A
    clean iteration gives all chances back, and the ``growth_interval``-th in a row lets the scale grow, to ``max_scale``
    at most, and never to infinity.
    """
    if state.dtype is not torch.int32 or state.shape != (7,) or not state.is_contiguous():
        raise RuntimeError(
            f"update_scale: state is {state.dtype} of shape {list(state.shape)}; pass a contiguous int32 tensor of shape [7]"
        )
    scale, (unskipped, overflows_left, skips, in_a_row, at_floor) = state[:1].view(torch.float32), state[1:6].split(1)
    bad = found_inf.to(scale.device) != 0
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
    return state


def report_non_finite(tensors, found_inf, first_bad=None):
    """Sets found_inf to 1 if any element is not finite, without asking the host; otherwise leaves it as it is.

    ``first_bad`` is lowered to the index of the first such tensor.
    """
    if found_inf is None and first_bad is None:
        return
    groups = {}
    for i, tensor in enumerate(tensors):
        if tensor.numel():
            tensor = _as_real(tensor)
            indices, group = groups.setdefault((tensor.device, tensor.dtype), ([], []))
            indices.append(i)
            group.append(tensor)
    for (device, _), (indices, group) in groups.items():
        # The extremes of a tensor are finite exactly if all of it is: NaN wins every comparison of these two.
        if device.type == "cpu":  # six times faster there than the norm
            extremes = torch.stack([torch.stack(torch.aminmax(tensor)) for tensor in group])
        else:
            extremes = torch.stack(torch._foreach_norm(group, float("inf"))).unsqueeze(1)
        bad = extremes.isfinite().all(dim=1).logical_not()
        if found_inf is not None:
            found_inf.copy_(torch.maximum(found_inf, bad.any().to(found_inf)))
        if first_bad is not None:
            first = torch.where(bad, integers_on(device, indices), NO_BAD).min()
            first_bad.copy_(torch.minimum(first_bad, first.to(first_bad.device)))


def _as_real(tensor):
    """Complex numbers as pairs. torch conjugates lazily, and shows no pairs of what it has not conjugated yet."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _factor(number):
    return number.reshape(()) if isinstance(number, torch.Tensor) else number


def _l2norm(tensors, per_tensor, factor):
    device = tensors[0].device
    flats = [_as_real(t).detach().reshape(-1) for t in tensors]
    wide = torch.float32 if device.type == "mps" else torch.float64
    # A sum in float64 needs no pieces, each of which would be a launch or more on a GPU.
    needs_pieces = device.type == "cpu" or wide is torch.float32
    pieces, owners = [], []
    for owner, flat in enumerate(flats):
        if flat.numel():
            split = flat.split(_PIECE) if needs_pieces else [flat]
            pieces += split
            owners += [owner] * len(split)
    sums = torch.zeros(len(tensors), dtype=wide, device=device)
    if pieces:
        sums.index_add_(0, integers_on(device, owners), _norms(pieces, wide).square())
    norms = torch.cat([sums.sum(dtype=wide).reshape(1), sums if per_tensor else sums[:0]]).sqrt()
    if factor is not None:
        norms = norms * abs(_factor(factor))
    norms = norms.to(torch.float32)
    return norms[:1].clone(), norms[1:].clone()


def _norms(pieces, wide):
    if pieces[0].device.type != "cpu" or torch.compiler.is_compiling():
        return torch.stack(torch._foreach_norm(pieces, 2, dtype=wide))
    # On the CPU float64 takes ten times as long: only for float64 itself, and for pieces whose squares may not fit
    # into float32.
    if any(piece.dtype is wide for piece in pieces):
        return torch.stack([torch.linalg.vector_norm(piece, dtype=wide) for piece in pieces])
    norms = torch.stack(torch._foreach_norm(pieces, 2, dtype=torch.float32)).to(wide)
    low, high = _SAFE_NORM
    for i in ((norms > low) & (norms < high)).logical_not().nonzero().flatten().tolist():
        norms[i] = torch.linalg.vector_norm(pieces[i], dtype=wide)
    return norms
