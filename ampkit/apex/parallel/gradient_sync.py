"""The averaging of gradients over processes after every backward pass, however many run and whichever parameters they reach.

torch's DistributedDataParallel reduces once for each forward pass, and waits for every parameter. `GradientSync` hooks
the parameters instead: two losses may go back through one forward pass, and a pass may leave parameters out, even on some
ranks only. Buckets are reduced while the backward pass still runs, or all at its end. DistributedDataParallel
(distributed.py) is a module around it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

from ...models.float32_values import stored_weights


@dataclass(frozen=True)
class SyncSettings:
    """The settings by which gradients are reduced.

    ``bucket_elements``: a bucket is closed when it holds as many; ``triggers`` close buckets instead, where given. Without
    ``overlap`` nothing is reduced before the end of the backward pass. ``predivide`` divides before the sum, and the rest
    of the average after it; without ``average`` nothing comes after it. Buckets take turns on ``groups``.
    """

    bucket_elements: int = 10_000_000
    triggers: tuple[torch.Tensor, ...] = ()
    overlap: bool = True
    always_fp32: bool = False
    average: bool = True
    predivide: float = 1.0
    groups: tuple[Any, ...] = (None,)
    keep_buffers: bool = False
    profile: bool = False


@dataclass(eq=False)
class _Bucket:
    """Parameters of one dtype and device, reduced as one tensor: all gradients, then a flag for each, 1 where it is new."""

    params: list[torch.Tensor] = field(default_factory=list)
    elements: int = 0
    group: Any = None
    waiting_for: int = 0
    flat: torch.Tensor | None = None
    work: Any = None
    again: bool = False


class GradientSync:
    """A reducer of the gradients of ``params``, whenever a backward pass reaches one of them, while ``enabled``.

    Gradients that backward passes left behind while it was not enabled are part of the next reduction. Parameters that no
    rank's backward pass has reached are left alone. Every rank must hold the same parameters in the same order.
    """

    def __init__(self, params: Iterable[torch.Tensor], settings: SyncSettings = SyncSettings()) -> None:
        self.settings = settings
        self.enabled = True
        self.last_pass_was_local: bool | None = None
        self.buffers: list[torch.Tensor] = []
        self._lock = threading.Lock()
        self._running = False
        self._fired: set[torch.Tensor] = set()  # in this backward pass
        self._reached: set[torch.Tensor] = set()  # since the last reduction
        self._next = 0
        self._handles: list[Any] = []
        self.watch(params)

    def watch(self, params: Iterable[torch.Tensor]) -> None:
        """Reduce the gradients of these parameters instead, of those that require one."""
        self.close()
        self._params = [param for param in params if param.requires_grad]
        self._buckets = self._make_buckets()
        self._bucket_of = {param: bucket for bucket in self._buckets for param in bucket.params}
        hook = _call_weakly(weakref.WeakMethod(self._on_gradient))
        self._handles = [param.register_post_accumulate_grad_hook(hook) for param in self._params]

    def prepare(self, params: Iterable[torch.Tensor]) -> None:
        """Prepare for a forward pass: forget a backward pass that failed, and notice parameters that were frozen or unfrozen."""
        trainable = [param for param in params if param.requires_grad]
        unchanged = len(trainable) == len(self._params) and all(a is b for a, b in zip(trainable, self._params))
        if not unchanged or any(bucket.params[0].dtype is not param.dtype for param, bucket in self._bucket_of.items()):
            self.watch(trainable)
        self._running = False
        self.last_pass_was_local = None

    def close(self) -> None:
        """Remove the hooks of the parameters."""
        while self._handles:
            self._handles.pop().remove()

    def _make_buckets(self) -> list[_Bucket]:
        """Return buckets in the order of their reduction, the same on all ranks: backward passes end with the first layers."""
        settings = self.settings
        triggers = set(settings.triggers)
        closed, open_buckets = [], {}
        for param in reversed(self._params):
            key = param.device, param.dtype
            bucket = open_buckets.setdefault(key, _Bucket())
            bucket.params.append(param)
            bucket.elements += param.numel()
            if param in triggers:
                closed += open_buckets.values()
                open_buckets.clear()
            elif settings.overlap and not triggers and bucket.elements >= settings.bucket_elements:
                closed.append(open_buckets.pop(key))
        closed += open_buckets.values()
        for index, bucket in enumerate(closed):
            bucket.group = settings.groups[index % len(settings.groups)]
        return closed

    # During a backward pass

    def _on_gradient(self, param: torch.Tensor) -> None:
        if param.grad.layout is not torch.strided:
            raise RuntimeError(
                f"DistributedDataParallel does not support sparse gradients; a parameter of shape {tuple(param.shape)} has one."
                " Use sparse=False in the embedding."
            )
        with self._lock:
            if not self._running:
                self._start()
            self._reached.add(param)
            if self.last_pass_was_local:
                return
            bucket = self._bucket_of[param]
            if param in self._fired:  # reentrant checkpoints reach shared weights more than once
                bucket.again = bucket.work is not None
                return
            self._fired.add(param)
            bucket.waiting_for -= 1
            while (
                self.settings.overlap and self._next < len(self._buckets) and not self._buckets[self._next].waiting_for
            ):
                self._launch(self._buckets[self._next])
                self._next += 1

    def _start(self) -> None:
        self._running = True
        self.last_pass_was_local = not self.enabled
        self._next = 0
        self._fired.clear()
        for bucket in self._buckets:
            bucket.flat = bucket.work = None
            bucket.again = False
            bucket.waiting_for = len(bucket.params)
        Variable._execution_engine.queue_callback(self._finish)

    @torch.no_grad()
    def _launch(self, bucket: _Bucket) -> None:
        settings = self.settings
        with torch.profiler.record_function("DistributedDataParallel.allreduce") if settings.profile else nullcontext():
            parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket.params]
            flags = torch.ones(len(parts), dtype=parts[0].dtype, device=parts[0].device)
            for i, param in enumerate(bucket.params):
                if param not in self._reached:
                    flags[i] = 0.0
            flat = torch.cat([*(part.reshape(-1) for part in parts), flags])
            if settings.always_fp32:
                flat = flat.float()
            if settings.predivide != 1.0:
                flat[: bucket.elements].div_(settings.predivide)
            bucket.flat = flat
            bucket.work = dist.all_reduce(flat, group=bucket.group, async_op=True)

    def _finish(self) -> None:
        self._running = False
        if self.last_pass_was_local:
            return
        for bucket in self._buckets[self._next :]:
            self._launch(bucket)
        for bucket in self._buckets:
            if bucket.again:
                bucket.work.wait()
                self._launch(bucket)
        self.buffers = []
        for bucket in self._buckets:
            bucket.work.wait()
            self._take_back(bucket)
            bucket.flat = bucket.work = None
        self._reached.clear()

    @torch.no_grad()
    def _take_back(self, bucket: _Bucket) -> None:
        settings = self.settings
        values, flags = bucket.flat[: bucket.elements], bucket.flat[bucket.elements :]
        if settings.average:
            values.mul_(settings.predivide / dist.get_world_size(bucket.group))
        if settings.keep_buffers:
            self.buffers.append(values)
        # The host waits for the flags only if a parameter was left out here.
        reached = None if all(p in self._reached for p in bucket.params) else flags.tolist()
        gradients, views = [], []
        for i, (param, view) in enumerate(zip(bucket.params, values.split([p.numel() for p in bucket.params]))):
            if reached is not None and reached[i] == 0.0:
                continue
            if param.grad is None:
                param.grad = view.view(param.shape).to(param.dtype, copy=True)
            else:
                gradients.append(param.grad)
                views.append(view.view(param.shape))
        if gradients:
            torch._foreach_copy_(gradients, views)


@torch.no_grad()
def broadcast_parameters(module: nn.Module, group: Any = None) -> None:
    """Give every rank the parameters of rank 0: where a module was cast, the float32 values behind them. Buffers stay."""
    masters = dict(stored_weights(module))
    params = list(module.parameters())
    values = [masters[p].current(p) if p in masters else p.detach() for p in params]
    on_flat_lists(values, lambda flat: dist.broadcast(flat, 0, group=group))
    for param, value in zip(params, values):
        if param in masters:
            masters[param].put(param, value)


def average(tensors: Sequence[torch.Tensor], group: Any = None) -> None:
    """Write the mean over the ranks into every rank's tensors."""
    world_size = dist.get_world_size(group)

    def mean(flat: torch.Tensor) -> None:
        dist.all_reduce(flat, group=group)
        flat.div_(world_size)

    on_flat_lists(tensors, mean)


@torch.no_grad()
def on_flat_lists(tensors: Sequence[torch.Tensor], operation: Any) -> None:
    """Run an in-place operation on all tensors of one dtype and device at a time, as one flat tensor."""
    alike: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for part in alike.values():
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in part])
        operation(flat)
        for tensor, view in zip(part, flat.split([t.numel() for t in part])):
            tensor.copy_(view.view(tensor.shape))


def _call_weakly(method: weakref.WeakMethod) -> Any:
    """A hook that does not keep its owner alive: the parameters may outlive it."""

    def hook(param: torch.Tensor) -> None:
        bound = method()
        if bound is not None:
            bound(param)

    return hook
