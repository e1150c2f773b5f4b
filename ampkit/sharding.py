"""Parameters that lie on several processes (DTensors), and what is true of all of their processes together.

The kernels see the part that lies here (`local`). What was found out about it is combined over the processes (`highest`, `norm`).
The rest is what must be known of FSDP2: which modules it shards, in what precision it gathers them, and whether the
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
    """Whether it is a DTensor. Asked for every list of tensors: by an attribute, so that nothing has to be imported or traced."""
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
    """``value`` becomes the highest that any process of these groups has. All of them must call it."""
    for group in groups:
        torch.distributed.all_reduce(value, torch.distributed.ReduceOp.MAX, group=group)


def by_placement(tensors: Sequence[Tensor]) -> list[tuple[list[Tensor], list[Any]]]:
    """These tensors' local parts, with the process groups that each list of them is parted over; plain ones over none."""
    found: dict[Any, tuple[list[Tensor], list[Any]]] = {}
    for tensor in tensors:
        key: Any = None
        if is_sharded(tensor):
            key = (tensor.device_mesh, tuple(tensor.placements))
        if key not in found:
            # Not is_shard(): FSDP2 over tensor parallelism parts a tensor in stripes, which torch counts as another placement.
            shards = [dim for dim, placement in enumerate(key[1]) if not placement.is_replicate()] if key else []
            found[key] = ([], [key[0].get_group(dim) for dim in shards])
        found[key][0].append(local(tensor))
    return list(found.values())


def total_over(groups: Iterable[Any], value: Tensor) -> Tensor:
    """The sum of ``value`` over the processes of these groups."""
    for group in groups:
        torch.distributed.all_reduce(value, group=group)
    return value


def norm_over_processes(tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm of this order of all elements of all of these tensors, on all processes that hold a part of one."""
    norms = []
    for parts, groups in by_placement(tensors):
        own = [torch.linalg.vector_norm(part, norm_type, dtype=torch.float64) for part in parts if part.numel()]
        nothing = torch.zeros((), dtype=torch.float64, device=parts[0].device)
        norm = torch.linalg.vector_norm(torch.stack(own or [nothing]), norm_type)
        if norm_type == float("inf"):
            highest(norm, groups)
        else:
            norm = total_over(groups, norm.pow(norm_type)).pow(1.0 / norm_type)
        norms.append(norm.to(tensors[0].device))
    return torch.linalg.vector_norm(torch.stack(norms), norm_type).float()


# FSDP2


class Gathered(NamedTuple):
    """A parameter that FSDP2 shards, and the precision that it is gathered and computed with in; None is its own.

    ``whole`` is what a forward pass computes with; None before the first.
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
    """Every parameter that FSDP2 shards."""
    names = {module: name for name, module in model.named_modules()}
    for group in _param_groups(model):
        for one in _read(group, "fsdp_params"):
            dtype = _read(_read(one, "mp_policy"), "param_dtype")
            info = _read(one, "_module_info")
            name = ".".join(filter(None, (names.get(_read(info, "module")), _read(info, "param_name"))))
            yield Gathered(name, _read(one, "sharded_param"), dtype, _read(one, "_unsharded_param", None))


def unsharded_params(module: nn.Module) -> list[nn.Parameter]:
    """What the forward of an FSDP2 module computes with, in the places of its own group's sharded parameters."""
    groups = _groups_of(_read(module, "_get_fsdp_state")())
    found = [_read(one, "_unsharded_param", None) for group in groups for one in _read(group, "fsdp_params")]
    return [param for param in found if param is not None]


def has_run(model: nn.Module) -> bool:
    """Whether a forward pass has settled the dtypes that FSDP2 gathers and reduces in."""
    nothing = object()
    return any(_read(group, "_reduce_dtype", nothing) is not nothing for group in _param_groups(model))


def is_unreduced(model: nn.Module) -> bool:
    """Whether FSDP2 keeps the gradients of a backward pass to itself (``set_requires_gradient_sync(False)``)."""
    return any(
        not (_read(group, "reduce_grads") and _read(group, "all_reduce_grads")) for group in _param_groups(model)
    )


def _param_groups(model: nn.Module) -> list[Any]:
    states = dict.fromkeys(_read(module, "_get_fsdp_state")() for module in fsdp_modules(model))
    return [group for state in states for group in _groups_of(state)]


def _groups_of(state: Any) -> list[Any]:
    """The groups of one ``fully_shard``: one, or one for each mesh that its parameters lie on, in a torch that allows several."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = _read(state, "_fsdp_param_group")
    return [] if group is None else [group]


def _read(thing: Any, name: str, *unset: Any) -> Any:
    """An attribute that FSDP2 keeps to itself; ``unset``, if given, where it is declared and has no value yet.

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
    """Raise for what FullyShardedDataParallel (FSDP1) has wrapped."""
    if any(getattr(param, "_fsdp_flattened", False) for param in model.parameters()):
        raise ConfigurationError(
            f"The {type(model).__name__} is wrapped in FullyShardedDataParallel (FSDP1), which torch deprecates and ampkit "
            "does not take. Use FSDP2: ampkit.parallel.fully_shard(module, opt_level=...), then the optimizer, then initialize()."
        )
