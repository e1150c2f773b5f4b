"""What every operator asks of its lists and flags, with errors that say what was found."""

import torch

from ampkit.dtypes import LOWER_PRECISION
from ampkit.kernels.moments import packed_size

# Lists that no operator writes to; a join writes to its outputs alone.
_ONLY_READ = frozenset(("inputs", "xs", "ys", "tensors", "grads", "values"))
# Which steps take rests in the place of ``lower``, and packed moments; in which lists the latter are.
_TAKES_RESTS = _TAKES_PACKED = ("multi_tensor_sgd", "multi_tensor_adam")
_MOMENTS = ("exp_avgs", "exp_avg_sqs", "momenta")


def check_lists(op, **lists):
    """Raises unless the lists (or None) have one length, equal shapes at each index, dtypes that an operator takes, and, where
    it writes, one place for each element.
    """
    lists = {name: tensors for name, tensors in lists.items() if tensors is not None}
    (first_name, first), *others = lists.items()
    for name, tensors in others:
        if len(tensors) != len(first):
            raise RuntimeError(
                f"{op}: {first_name} has {len(first)} tensors, {name} has {len(tensors)}; pass lists of one length"
            )
    for name, tensors in lists.items():
        is_written = name == "outputs" if op == "multi_tensor_join" else name not in _ONLY_READ
        for i, (tensor, expected) in enumerate(zip(tensors, first)):
            if tensor.dtype is torch.uint8 and name in _MOMENTS and op in _TAKES_PACKED:
                _check_packed(op, f"{name}[{i}]", tensor, expected.numel())
                continue
            if tensor.shape != expected.shape:
                raise RuntimeError(
                    f"{op}: {name}[{i}] has shape {list(tensor.shape)}, "
                    f"{first_name}[{i}] has shape {list(expected.shape)}; they must be equal"
                )
            if name == "rests" or (name == "lower" and tensor.dtype is torch.int16 and op in _TAKES_RESTS):
                weight = lists["weights" if name == "rests" else "params"][i]
                if tensor.dtype is not torch.int16 or weight.dtype not in LOWER_PRECISION:
                    raise RuntimeError(
                        f"{op}: {name}[{i}] is the rest of a weight, {tensor.dtype} beside {weight.dtype}; expected torch.int16 "
                        "beside torch.float16 or torch.bfloat16"
                    )
            elif not (tensor.is_floating_point() or tensor.is_complex()) or tensor.dtype.itemsize == 1:  # float8
                raise RuntimeError(f"{op}: {name}[{i}] is {tensor.dtype}; expected a floating point or complex dtype")
            if not torch.compiler.is_compiling() and _was_freed(tensor):
                raise RuntimeError(
                    f"{op}: {name}[{i}] of shape {list(tensor.shape)} has no memory: its storage was freed, as FSDP does with what "
                    "it has gathered"
                )
            if is_written and _overlaps_itself(tensor):
                raise RuntimeError(
                    f"{op}: several elements of {name}[{i}] lie in one place in memory (shape {list(tensor.shape)}, "
                    f"strides {list(tensor.stride())}); pass a copy of it"
                )
            if name == "outputs" and not tensor.is_complex():
                for source, sources in lists.items():
                    if sources[i].is_complex():
                        raise RuntimeError(f"{op}: {source}[{i}] is {sources[i].dtype}, outputs[{i}] is {tensor.dtype}")


def _overlaps_itself(tensor):
    """Whether several elements lie in one place for certain, as torch asks before it writes."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return False
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride()))


def _was_freed(tensor):
    return tensor.layout is torch.strided and tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def _check_packed(op, name, tensor, numel):
    if tensor.shape != (packed_size(numel),) or not tensor.is_contiguous():
        raise RuntimeError(
            f"{op}: {name} has shape {list(tensor.shape)}; packed moments of {numel} elements are a contiguous tensor of "
            f"shape [{packed_size(numel)}]"
        )


def check_flag(op, name, flag, dtype):
    if flag is not None and (flag.dtype is not dtype or flag.numel() != 1):
        raise RuntimeError(
            f"{op}: {name} is {flag.dtype} of shape {list(flag.shape)}; pass a {dtype} tensor of shape [1]"
        )
    if flag is not None and flag.device.type != "meta" and flag.untyped_storage().size() == 0:
        raise RuntimeError(f"{op}: {name} has no memory: its storage was freed")


def compute_dtype(*tensors):
    """What arithmetic on these tensors is done in: float32, or wider where one of them is."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype
