"""``apex.parallel.distributed``: DistributedDataParallel and Reducer with Apex's arguments.

gradient_sync.py reduces gradients: Apex's wrapper reduced after every backward pass, and torch's does so
once for each forward pass. The class derives from torch's, for code that checks the type, such as `ampkit.initialize`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors as flatten  # noqa: F401
from torch._utils import _unflatten_dense_tensors as unflatten  # noqa: F401

from .gradient_sync import GradientSync, SyncSettings, average, broadcast_parameters, on_flat_lists


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """A wrapper that averages gradients over all processes during each backward pass; ``module`` is neither copied nor moved.

    Parameters, and only they, are broadcast from rank 0 at the start. Gradients are reduced in buckets of ``message_size``
    elements while the backward pass runs, or with ``delay_allreduce`` all at its end. Between ``disable_allreduce()`` and
    ``enable_allreduce()`` they stay local, and add up to the next reduction; ``no_sync()`` does both.

    - ``allreduce_trigger_params``: parameters after whose gradients a bucket is complete, in place of ``message_size``.
    - ``shared_param``: what ``delay_allreduce`` was called in the first versions.
    - ``allreduce_always_fp32``: sum lower-precision gradients in float32.
    - ``gradient_average``, ``gradient_predivide_factor``: divide by the factor before the sum, and by the rest of the number
      of processes after it; without averaging, not after it.
    - ``retain_allreduce_buffers``: keep the reduced flat gradients in ``allreduce_buffers``.
    - ``allreduce_communicators``: (process groups, streams) for buckets to take turns on; ``num_allreduce_streams`` is left
      to the backend. ``prof`` marks reductions for torch.profiler.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: Any = None,
        allreduce_trigger_params: Iterable[torch.Tensor] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Sequence[Any] | None = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
    ) -> None:
        # Not torch's own: its reducer, and the copy of all gradients that it keeps, are not used.
        nn.Module.__init__(self)
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "apex.parallel.DistributedDataParallel needs a process group. Call torch.distributed.init_process_group() "
                "before, and start the script with torchrun; a single process needs no wrapper."
            )
        delay_allreduce = delay_allreduce or bool(shared_param)
        if delay_allreduce and (num_allreduce_streams > 1 or allreduce_communicators is not None):
            raise ValueError(
                "num_allreduce_streams and allreduce_communicators have no effect with delay_allreduce=True."
            )
        if delay_allreduce and allreduce_trigger_params is not None:
            raise ValueError("allreduce_trigger_params has no effect with delay_allreduce=True.")
        if gradient_average_split_factor is not None:
            gradient_predivide_factor = gradient_average_split_factor  # its name in early versions
        groups = tuple(allreduce_communicators[0]) if allreduce_communicators is not None else (None,)
        if dist.get_backend(groups[0]) == "nccl" and any(not param.is_cuda for param in module.parameters()):
            raise AssertionError(
                "The nccl backend reduces CUDA tensors only. Move the model to its device before wrapping it."
            )

        self.module = module
        self.delay_allreduce = delay_allreduce
        self.message_size = message_size
        self.retain_allreduce_buffers = retain_allreduce_buffers
        self.allreduce_always_fp32 = allreduce_always_fp32
        self.gradient_average = gradient_average
        self.gradient_predivide_factor = gradient_predivide_factor
        # Attributes of torch's wrapper that other code reads.
        self.device_ids = self.output_device = None
        self.process_group = groups[0] or dist.group.WORLD
        self.gradient_as_bucket_view = False
        self.find_unused_parameters = True
        self.broadcast_buffers = False
        self.settings = SyncSettings(
            bucket_elements=message_size,
            triggers=tuple(allreduce_trigger_params or ()),
            overlap=not delay_allreduce,
            always_fp32=allreduce_always_fp32,
            average=gradient_average,
            predivide=gradient_predivide_factor,
            groups=groups,
            keep_buffers=retain_allreduce_buffers,
            profile=prof,
        )
        broadcast_parameters(module, groups[0])
        self.sync = GradientSync(module.parameters(), self.settings)

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward passes reduce gradients; ``no_sync()`` sets it."""
        return self.sync.enabled

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.sync.enabled = value

    @property
    def last_backward_was_local(self) -> bool | None:
        """Whether the last backward pass reduced nothing; None before the first one after a forward pass."""
        return self.sync.last_pass_was_local

    @property
    def allreduce_buffers(self) -> list[torch.Tensor]:
        return self.sync.buffers

    def enable_allreduce(self) -> None:
        """Reduce gradients in the backward passes from here on."""
        self.sync.enabled = True

    def disable_allreduce(self) -> None:
        """Leave gradients local in the backward passes from here on."""
        self.sync.enabled = False

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self.sync.prepare(self.module.parameters())
        with self._inside_ddp_forward():
            return self.module(*inputs, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in ("sync", "process_group")}
        # Process groups and parameters of this process mean nothing to a copy.
        state["settings"] = SyncSettings(**(vars(self.settings) | {"groups": (None,), "triggers": ()}))
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)
        self.process_group = dist.group.WORLD if dist.is_initialized() else None
        self.sync = GradientSync(self.module.parameters(), self.settings)


class Reducer:
    """An averager of gradients on request: ``reduce()`` after the backward pass, in a loop of one's own.

    A module's parameters are broadcast from rank 0 at once. A list is of the gradients themselves.
    """

    def __init__(self, module_or_grads_list: nn.Module | Iterable[torch.Tensor]) -> None:
        self.module = module_or_grads_list if isinstance(module_or_grads_list, nn.Module) else None
        self.grads = [] if self.module is not None else list(module_or_grads_list)
        if self.module is not None:
            broadcast_parameters(self.module)

    def reduce(self) -> None:
        """Write the mean over the processes into every gradient."""
        grads = self.grads
        if self.module is not None:
            grads = [param.grad for param in self.module.parameters() if param.grad is not None]
        average(grads)


def split_by_type(tensors: Iterable[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    """Lists of tensors by their ``type()``, in order of appearance."""
    buckets: dict[str, list[torch.Tensor]] = {}
    for tensor in tensors:
        buckets.setdefault(tensor.type(), []).append(tensor)
    return buckets


def split_half_float_double(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Lists of the float16, float32, float64 and bfloat16 tensors, without the empty ones."""
    tensors = list(tensors)
    dtypes = (torch.float16, torch.float32, torch.float64, torch.bfloat16)
    lists = [[tensor for tensor in tensors if tensor.dtype is dtype] for dtype in dtypes]
    return [part for part in lists if part]


def apply_flat_dist_call(
    bucket: Iterable[torch.Tensor], call: Callable, extra_args: Sequence[Any] | None = None
) -> None:
    """Call a collective on all tensors of one type as one flat tensor, and turn sums into means."""

    def operation(flat: torch.Tensor) -> None:
        call(flat, *(extra_args or ()))
        if call is dist.all_reduce:
            flat /= dist.get_world_size()

    on_flat_lists(list(bucket), operation)


flat_dist_call = apply_flat_dist_call
