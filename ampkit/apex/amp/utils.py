"""``apex.amp.utils``: small helpers under Apex's names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...casting.tensors import cast_floating, map_tensors, tensors_in
from ...dtypes import LOWER_PRECISION
from ...plan import default_lower_precision


def is_cuda_enabled() -> bool:
    return torch.version.cuda is not None


def get_cuda_version() -> tuple[int, ...]:
    return tuple(int(part) for part in (torch.version.cuda or "0.0").split("."))


def is_fp_tensor(x: Any) -> bool:
    """Whether ``x`` is a floating-point tensor, or a list or tuple of nothing else."""
    if is_nested(x):
        return all(is_fp_tensor(item) for item in x)
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def is_nested(x: Any) -> bool:
    return isinstance(x, (tuple, list))


def should_cache(x: Any) -> bool:
    return isinstance(x, torch.nn.Parameter) and x.dtype is torch.float32


def collect_fp_tensor_types(args: Any, kwargs: Any) -> list[str]:
    """The names of the floating-point types among the arguments."""
    return sorted({type_string(x) for x in tensors_in(args, kwargs) if x.is_floating_point()})


def type_string(x: torch.Tensor) -> str:
    return x.type().split(".")[-1]


def maybe_half(x: Any, name: str = "", verbose: bool = False) -> Any:
    """Cast the float32, float16 and bfloat16 tensors of ``x`` to the lower precision."""
    return cast_floating(x, default_lower_precision("cuda"))


def maybe_bfloat16(x: Any, name: str = "", verbose: bool = False) -> Any:
    return cast_floating(x, torch.bfloat16)


def maybe_float(x: Any, name: str = "", verbose: bool = False) -> Any:
    """Cast the lower-precision tensors of ``x`` to float32."""
    return map_tensors(x, lambda tensor: tensor.float() if tensor.dtype in LOWER_PRECISION else tensor)


def casted_args(cast_fn: Callable, args: tuple, kwargs: dict) -> list:
    """Return the positional arguments cast by ``cast_fn``; keyword arguments are edited in place, as in Apex."""
    kwargs.update({key: map_tensors(value, cast_fn) for key, value in kwargs.items()})
    return [map_tensors(value, cast_fn) for value in args]


def iter_params(x: Any) -> Iterator[torch.Tensor]:
    for group in getattr(x, "param_groups", ()):
        yield from group["params"]


def verbosify(cast_fn: Callable, fn_name: str, verbose: bool) -> Callable:
    return functools.partial(cast_fn, name=fn_name, verbose=verbose) if verbose else cast_fn


def as_inplace(fns: Any) -> Iterator[str]:
    for name in fns:
        yield name + "_"


def has_func(mod: Any, fn: str) -> bool:
    return fn in mod if isinstance(mod, dict) else hasattr(mod, fn)


def get_func(mod: Any, fn: str) -> Any:
    return mod[fn] if isinstance(mod, dict) else getattr(mod, fn)


def set_func(mod: Any, fn: str, new_fn: Any) -> None:
    if isinstance(mod, dict):
        mod[fn] = new_fn
    else:
        setattr(mod, fn, new_fn)


def set_func_save(handle: Any, mod: Any, fn: str, new_fn: Any) -> None:
    """Call `set_func`, to be undone by ``handle._deactivate()``."""
    handle._save_func(mod, fn, get_func(mod, fn))
    set_func(mod, fn, new_fn)
