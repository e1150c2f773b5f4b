"""Parameters that lie on several processes (DTensors), and values that are combined over these processes.

The kernels work on the local part (`local`). Results are combined over the processes (`highest`, `norm_over_processes`).
The other functions read the state of FSDP2: which modules it shards, in which precision it gathers them, and whether the
gradients of the last backward pass were reduced. Nothing of torch.distributed is imported before a script does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .errors import ConfigurationError


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a DTensor. It checks an attribute, so that nothing has to be imported or traced."""
    return hasattr(type(tensor), "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this process, in the same memory; of a plain tensor, all of it.

    Raises `ConfigurationError` for sums that are still to be taken over the processes (``Partial``).
    """
    if not is_sharded(tensor):
        return tensor
    if any(placement.is_partial() for placement in tensor.placements):
        raise ConfigurationError(
            f"A tensor of shape {tuple(tensor.shape)} with placements {tensor.placements} is a sum that is still to be taken "
            "over the processes, of which one part tells nothing. Call tensor.redistribute() with Shard or Replicate placements."
        )
    return tensor.to_local()


def are_several_processes() -> bool:
    """Whether this process is one of several of a job."""
    is_there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return is_there and torch.distributed.get_world_size() > 1


def process_groups(tensors: Iterable[Tensor]) -> list[Any]:
    """The process groups over which these tensors lie, each once: one for each dimension of each mesh."""
    meshes = dict.fromkeys(tensor.device_mesh for tensor in tensors if is_sharded(tensor))
    return list(dict.fromkeys(group for mesh in meshes for group in mesh.get_all_groups()))


def highest(value: Tensor, groups: Iterable[Any]) -> None:
    """Set ``value``, in place, to its maximum over the processes of these groups. All of them must call it."""
    for group in groups:
        torch.distributed.all_reduce(value, torch.distributed.ReduceOp.MAX, group=group)


def by_placement(tensors: Sequence[Tensor]) -> list[tuple[list[Tensor], list[Any]]]:
    """The local parts of tensors in lists, each with the process groups that it is sharded over; none for plain tensors."""
    by_layout: dict[Any, tuple[list[Tensor], list[Any]]] = {}
    for tensor in tensors:
        key: Any = None
        if is_sharded(tensor):
            key = (tensor.device_mesh, tuple(tensor.placements))
        if key not in by_layout:
            # Not is_shard(): FSDP2 over tensor parallelism parts a tensor in stripes, which torch counts as another placement.
            shards = [dim for dim, placement in enumerate(key[1]) if not placement.is_replicate()] if key else []
            by_layout[key] = ([], [key[0].get_group(dim) for dim in shards])
        by_layout[key][0].append(local(tensor))
    return list(by_layout.values())


def total_over(groups: Iterable[Any], value: Tensor) -> Tensor:
    """Sum ``value`` over the processes of these groups, in place, and return it."""
    for group in groups:
        torch.distributed.all_reduce(value, group=group)
    return value


def norm_over_processes(tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm of order ``norm_type`` of all elements of all these tensors, on all processes that hold a part of them."""
    norms = []
    for parts, groups in by_placement(tensors):
        local_norms = [torch.linalg.vector_norm(part, norm_type, dtype=torch.float64) for part in parts if part.numel()]
        zero = torch.zeros((), dtype=torch.float64, device=parts[0].device)
        norm = torch.linalg.vector_norm(torch.stack(local_norms or [zero]), norm_type)
        if norm_type == float("inf"):
            highest(norm, groups)
        else:
            norm = total_over(groups, norm.pow(norm_type)).pow(1.0 / norm_type)
        norms.append(norm.to(tensors[0].device))
    return torch.linalg.vector_norm(torch.stack(norms), norm_type).float()


# FSDP2


class Gathered(NamedTuple):
    """A parameter that FSDP2 shards, and the precision that it is gathered and computed with in; None for its own dtype.

    ``whole`` is the parameter that a forward pass computes with; None before the first.
    """

    name: str
    param: Tensor
    dtype: torch.dtype | None
    whole: Tensor | None


def is_fsdp(module: nn.Module) -> bool:
    """Whether torch's ``fully_shard`` was called on the module itself."""
    return isinstance(module, getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ()))


def fsdp_modules(model: nn.Module) -> list[nn.Module]:
    """The modules in ``model`` that ``fully_shard`` was called on."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    return [module for module in model.modules() if is_fsdp(module)]


def gathered(model: nn.Module) -> Iterator[Gathered]:
    """Yield every parameter that FSDP2 shards."""
    names = {module: name for name, module in model.named_modules()}
    for group in _param_groups(model):
        for fsdp_param in _read(group, "fsdp_params"):
            dtype = _read(_read(fsdp_param, "mp_policy"), "param_dtype")
            info = _read(fsdp_param, "_module_info")
            name = ".".join(filter(None, (names.get(_read(info, "module")), _read(info, "param_name"))))
            yield Gathered(name, _read(fsdp_param, "sharded_param"), dtype, _read(fsdp_param, "_unsharded_param", None))


def unsharded_params(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that the forward of an FSDP2 module computes with, in place of its own group's sharded ones."""
    groups = _groups_of(_read(module, "_get_fsdp_state")())
    params = [_read(p, "_unsharded_param", None) for group in groups for p in _read(group, "fsdp_params")]
    return [param for param in params if param is not None]


def has_run(model: nn.Module) -> bool:
    """Whether a forward pass has settled the dtypes that FSDP2 gathers and reduces in."""
    unset = object()
    return any(_read(group, "_reduce_dtype", unset) is not unset for group in _param_groups(model))


def is_unreduced(model: nn.Module) -> bool:
    """Whether FSDP2 does not reduce the gradients of a backward pass (``set_requires_gradient_sync(False)``)."""
    return any(
        not (_read(group, "reduce_grads") and _read(group, "all_reduce_grads")) for group in _param_groups(model)
    )


def _param_groups(model: nn.Module) -> list[Any]:
    states = dict.fromkeys(_read(module, "_get_fsdp_state")() for module in fsdp_modules(model))
    return [group for state in states for group in _groups_of(state)]


def _groups_of(state: Any) -> list[Any]:
    """The parameter groups of one ``fully_shard``: a single group, or one for each mesh, in a torch that allows several."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = _read(state, "_fsdp_param_group")
    return [] if group is None else [group]


def _read(thing: Any, name: str, *unset: Any) -> Any:
    """Read a private attribute of FSDP2; return ``unset``, if given, where it is declared and has no value yet.

    Raises `ConfigurationError` where this torch has no such attribute: going on would be guessing.
    """
    try:
        return getattr(thing, name)
    except AttributeError:
        if unset and name in getattr(type(thing), "__annotations__", {}):
            return unset[0]
    raise ConfigurationError(
        f"torch {torch.__version__} keeps what FSDP2 knows in other places than torch 2.11 and 2.15, where ampkit reads it: "
        f"{type(thing).__name__} has no attribute {name!r}. Use one of them, or DistributedDataParallel in the place of FSDP2."
    )


def refuse_fsdp1(model: nn.Module) -> None:
    """Raise `ConfigurationError` for a model that FullyShardedDataParallel (FSDP1) has wrapped."""
    if any(getattr(param, "_fsdp_flattened", False) for param in model.parameters()):
        raise ConfigurationError(
            f"The {type(model).__name__} is wrapped in FullyShardedDataParallel (FSDP1), which torch deprecates and ampkit "
            "does not take. Use FSDP2: ampkit.parallel.fully_shard(module, opt_level=...), then the optimizer, then initialize()."
        )
