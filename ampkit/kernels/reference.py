"""Every multi-tensor operator in plain torch: the specification of the compiled kernels, and what runs without them.

Arithmetic is float32, or wider where a tensor is: each step is rounded once, and the result once more on its way into a
narrower output. The kernels agree bit for bit, except that a norm may differ in its last places. Lists given to these
functions lie on one device; they may hold any floating point or complex dtype.
"""

import torch

# A float32 sum of squares stays accurate over this many elements; longer tensors are summed in pieces.
_PIECE = 1 << 12
# Outside this range the squares of a piece may have left float32.
_SAFE_NORM = (1e-12, 1e18)


def multi_tensor_scale(inputs, outputs, scale, found_inf=None):
    """outputs[i] = inputs[i] * scale; found_inf becomes 1 if an input is not finite. Outputs are always written."""
    check_lists("multi_tensor_scale", inputs=inputs, outputs=outputs)
    report_non_finite(inputs, found_inf)
    if scale == 1.0:
        torch._foreach_copy_(outputs, inputs)
        return
    in_place = [(x, out) for x, out in zip(inputs, outputs) if out.dtype is _compute_dtype(x)]
    if in_place:
        # Widened first and multiplied where it lies: no temporary copies.
        targets = [out for _, out in in_place]
        torch._foreach_copy_(targets, [x for x, _ in in_place])
        torch._foreach_mul_(targets, scale)
    for x, out in zip(inputs, outputs):
        if out.dtype is not _compute_dtype(x):
            out.copy_(x.to(_compute_dtype(x)) * scale)


def multi_tensor_axpby(xs, ys, outputs, a, b, found_inf=None, arg_to_check=-1):
    """outputs[i] = a * xs[i] + b * ys[i]; arg_to_check says who is checked: -1 both, 0 xs, 1 ys."""
    if arg_to_check not in (-1, 0, 1):
        raise RuntimeError(f"multi_tensor_axpby: arg_to_check is {arg_to_check}; expected -1 (both), 0 (xs) or 1 (ys)")
    check_lists("multi_tensor_axpby", xs=xs, ys=ys, outputs=outputs)
    report_non_finite([*(xs if arg_to_check != 1 else ()), *(ys if arg_to_check != 0 else ())], found_inf)
    for x, y, out in zip(xs, ys, outputs):
        dtype = _compute_dtype(x, y)
        out.copy_((x.to(dtype) * a).add_(y.to(x.device, dtype) * b))


def multi_tensor_l2norm(tensors, per_tensor=False):
    """(norm of all tensors together, float32 [1]; norm of each, float32 [n], or [0] unless per_tensor)."""
    check_lists("multi_tensor_l2norm", tensors=tensors)
    device = tensors[0].device
    flats = [(torch.view_as_real(t) if t.is_complex() else t).detach().reshape(-1) for t in tensors]
    pieces, owners = [], []
    for owner, flat in enumerate(flats):
        if flat.numel():
            split = flat.split(_PIECE)
            pieces += split
            owners += [owner] * len(split)
    wide = torch.float32 if device.type == "mps" else torch.float64
    sums = torch.zeros(len(tensors), dtype=wide, device=device)
    if pieces:
        sums.index_add_(0, torch.tensor(owners, device=device), _norms(pieces, wide).square())
    norm = sums.sum(dtype=wide).sqrt().reshape(1).to(torch.float32)
    return norm, (sums.sqrt() if per_tensor else sums[:0]).to(torch.float32)


def check_lists(op, **lists):
    """Raises unless the lists have one length, equal shapes at each index, and dtypes that an operator can take."""
    (first_name, first), *others = lists.items()
    for name, tensors in others:
        if len(tensors) != len(first):
            raise RuntimeError(
                f"{op}: {first_name} has {len(first)} tensors, {name} has {len(tensors)}; pass lists of one length"
            )
    for name, tensors in lists.items():
        for i, (tensor, expected) in enumerate(zip(tensors, first)):
            if tensor.shape != expected.shape:
                raise RuntimeError(
                    f"{op}: {name}[{i}] has shape {list(tensor.shape)}, "
                    f"{first_name}[{i}] has shape {list(expected.shape)}; they must be equal"
                )
            if not (tensor.is_floating_point() or tensor.is_complex()):
                raise RuntimeError(f"{op}: {name}[{i}] is {tensor.dtype}; expected a floating point or complex dtype")
            if name == "outputs" and not tensor.is_complex():
                for source, sources in lists.items():
                    if sources[i].is_complex():
                        raise RuntimeError(f"{op}: {source}[{i}] is {sources[i].dtype}, outputs[{i}] is {tensor.dtype}")


def report_non_finite(tensors, found_inf):
    """Sets found_inf to 1 if any element is not finite, without asking the host; otherwise leaves it as it is."""
    if found_inf is None:
        return
    if found_inf.dtype is not torch.float32 or found_inf.numel() != 1:
        raise RuntimeError(
            f"found_inf is {found_inf.dtype} of shape {list(found_inf.shape)}; pass a float32 tensor of shape [1]"
        )
    by_dtype = {}
    for tensor in tensors:
        if tensor.numel():
            tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            by_dtype.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for group in by_dtype.values():
        # The extremes of a tensor are finite exactly if all of it is: NaN wins every comparison of these two.
        if group[0].device.type == "cpu":  # six times faster there than the norm
            extremes = torch.stack([extreme for tensor in group for extreme in torch.aminmax(tensor)])
        else:
            extremes = torch.stack(torch._foreach_norm(group, float("inf")))
        found = extremes.isfinite().logical_not().any().to(found_inf.device, torch.float32)
        found_inf.copy_(torch.maximum(found_inf, found))


def _compute_dtype(*tensors):
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


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
