"""Running statistics go back when a step is skipped: a batch that overflowed would else leave inf or NaN in them for good.

Before the first training forward since an optimizer's last step, a `Snapshot` copies the statistics of the norm layers and
the vectors of spectral norm that belong to that optimizer; where its step is skipped, `after_step` writes them back. An optimizer
owns what lies in the module of its parameters. What no optimizer owns goes to the one of the next ``scale_loss``. So a skip of
a GAN's discriminator leaves alone what the same forward did to the generator, unless that is inf or NaN.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from ..models.records import walk
from ..optimizers.scales import on
from .advice import watched

Place = tuple[dict[str, Any], str]  # a module's dict of buffers, and a name in it
Owner = Any  # an optimizer's wrapper, of which the snapshots and the parameters matter here

# Bound once: asked in every forward.
_tracing = torch._C._get_tracing_state
_transform_level = torch._C._functorch.maybe_current_level


class Snapshot:
    """A copy of some buffers, in memory that stays, since a captured CUDA graph goes on using it.

    `RunningStatistics` takes it before a forward; `after_step` of the optimizer that owns the buffers puts it back. Buffers of one
    device and dtype share one flat copy, so that choosing on the device takes four operators, however many there are.
    """

    def __init__(self, places: list[Place]) -> None:
        self._places = places
        self._tensors = [buffers[name] for buffers, name in places]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        alike: dict[Any, list[torch.Tensor]] = {}
        for tensor in self._tensors:
            # As bytes, means and counters are chosen by the same operators.
            values = tensor.detach().view(-1).view(torch.uint8) if tensor.is_contiguous() else tensor
            alike.setdefault((values.device, values.dtype), []).append(values)
        self._copies = [(values, *_flat_like(values), *_flat_like(values)) for values in alike.values()]
        self.is_taken = False

    def is_of_others(self) -> bool:
        """Whether other buffers stand in the places of these by now: some layers replace them, and models are moved."""
        now = [buffers.get(name) for buffers, name in self._places]
        return not all(map(is_, now, self._tensors)) or [one.data_ptr() for one in self._tensors] != self._addresses

    @torch.no_grad()
    def take(self) -> None:
        """Copy the buffers as they are now."""
        for values, _, old, _, _ in self._copies:
            torch._foreach_copy_(old, values)
        self.is_taken = True

    @torch.no_grad()
    def put_back_if_broken(self, skipped: bool | torch.Tensor) -> None:
        """The same, only if one of the buffers is not finite by now."""
        floats = [tensor for tensor in self._tensors if tensor.is_floating_point() and tensor.numel()]
        if self.is_taken and floats:
            largest = [on(norm, floats[0].device) for norm in torch._foreach_norm(floats, math.inf)]
            is_broken = torch.stack(largest).isfinite().all().logical_not()
            self.put_back(
                is_broken & (on(skipped, is_broken.device) != 0 if isinstance(skipped, torch.Tensor) else skipped)
            )

    @torch.no_grad()
    def put_back(self, skipped: bool | torch.Tensor) -> None:
        """Write the copies into the buffers; where ``skipped`` is a tensor, only if it is not 0 on its device."""
        # Not counted, as torch's batch norm does not count its own: a graph that is kept may still be run backward.
        with torch.autograd._unsafe_preserve_version_counter(tuple(self._tensors)):
            for values, flat_old, old, flat_new, new in self._copies:
                if isinstance(skipped, torch.Tensor):
                    torch._foreach_copy_(new, values)
                    torch.where(on(skipped, flat_new.device) != 0, flat_old, flat_new, out=flat_new)
                torch._foreach_copy_(values, new if isinstance(skipped, torch.Tensor) else old)
        for (buffers, name), before in zip(self._places, self._tensors) if self.is_of_others() else ():
            now = buffers.get(name)
            if now is before or type(now) is not torch.Tensor or now.shape != before.shape:
                continue
            value = before.to(now.device, now.dtype)
            if isinstance(skipped, torch.Tensor):
                value = torch.where(on(skipped, now.device).reshape(()) != 0, value, now)
            with torch.autograd._unsafe_preserve_version_counter(now):
                now.copy_(value)


def _flat_like(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """Memory for all of these in one tensor, and its parts in their shapes."""
    flat = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))
    return flat, torch._C._nn.unflatten_dense_tensors(flat, tensors)


class RunningStatistics:
    """Those of one session's models: found, and copied before they change. The session calls it at forwards and blocks."""

    def __init__(self) -> None:
        # By model: the modules and optimizers that its snapshots were made for, and those, each with its owner, held weakly.
        self._of: weakref.WeakKeyDictionary[nn.Module, tuple[Any, list[tuple[Any, Snapshot]]]]
        self._of = weakref.WeakKeyDictionary()
        self._unowned: list[Snapshot] = []
        self._without_buffers: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def has_none(self, model: nn.Module) -> bool:
        """Whether an earlier forward, since the last block, has found no buffers in the model."""
        return model in self._without_buffers

    def before_forward(self, model: nn.Module, owners: Sequence[Owner]) -> None:
        """Take the snapshots that the step after this forward, with gradients, may need, unless an earlier forward took them."""
        if _tracing() is not None or _transform_level() is not None:
            return
        made_for, snapshots = self._of.get(model, (None, []))
        if snapshots and all([snapshot.is_taken for _, snapshot in snapshots]):
            return
        modules = [module for module in walk(model) if module._buffers]
        if not modules:
            self._without_buffers.add(model)
        if not any(module.training for module in modules):
            return
        wanted = [(id(module), len(module._buffers)) for module in modules]
        wanted += [(id(owner), len(owner.gradients.slots)) for owner in owners]
        if made_for != wanted or any(snapshot.is_of_others() for _, snapshot in snapshots):
            places = _places_by_owner(model, modules, owners)
            snapshots = [(owner and weakref.ref(owner), Snapshot(of_owner)) for owner, of_owner in places.items()]
            self._of[model] = wanted, snapshots
        for ref, snapshot in snapshots:
            if not snapshot.is_taken:
                snapshot.take()
                (owner.snapshots if (owner := ref and ref()) else self._unowned).append(snapshot)

    def forget(self, model: nn.Module) -> None:
        """The buffers were loaded: what they were before is of no use any more."""
        for _, snapshot in self._of.get(model, (None, []))[1]:
            snapshot.is_taken = False

    def enter_block(self, owners: Sequence[Owner]) -> None:
        """``scale_loss`` is entered with these optimizers: what no optimizer owns belongs to the first."""
        owners[0].snapshots.extend(self._unowned)
        self._unowned.clear()
        self._without_buffers.clear()


def after_step(owner: Owner, skipped: bool | torch.Tensor | None) -> None:
    """A step of this optimizer was taken, or ``skipped``; a tensor says which on its device, and None is a step without a check.

    With a skip, statistics of other optimizers go back too where they are no longer finite: a generator's batch goes through its
    critic.
    """
    may_be_skipped = isinstance(skipped, torch.Tensor) or bool(skipped)
    for other in watched() if may_be_skipped else ():
        if other is not owner and other.owner.thread == owner.owner.thread:
            for snapshot in reversed(other.snapshots):
                snapshot.put_back_if_broken(skipped)
    while owner.snapshots:
        snapshot = owner.snapshots.pop()  # the latest first: of two copies of one buffer, the earlier counts
        if snapshot.is_taken and may_be_skipped:
            snapshot.put_back(skipped)
        snapshot.is_taken = False


def _places_by_owner(
    model: nn.Module, modules: list[nn.Module], owners: Sequence[Owner]
) -> dict[Owner | None, list[Place]]:
    """Running statistics by the optimizer of their module's parameters, or of those of the nearest module around it."""
    owner_of = {slot.param: owner for owner in reversed(owners) for slot in owner.gradients.slots}
    parents = {child: module for module in reversed(list(walk(model))) for child in module._modules.values()}
    places: dict[Owner | None, list[Place]] = {}
    for module in modules:
        if names := _statistics_of(module):
            around, owner = module, None
            while around is not None and owner is None:
                owner = next((owner_of[param] for param in around.parameters() if param in owner_of), None)
                around = None if around is model else parents[around]
            places.setdefault(owner, []).extend((module._buffers, name) for name in names)
    return places


def _statistics_of(module: nn.Module) -> list[str]:
    """The names of the module's own buffers that a training forward changes, as far as torch's kinds of layers go."""
    buffers = module._buffers
    if isinstance(module, torch.jit.ScriptModule):
        return []
    names: list[str] = []
    if "running_mean" in buffers and "running_var" in buffers:
        names.extend(buffers)
    elif isinstance(module, _SpectralNorm):
        names.extend(("_u", "_v"))
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, SpectralNorm):
            names.extend((f"{hook.name}_u", f"{hook.name}_v"))
    plain = [name for name in names if type(buffers.get(name)) is torch.Tensor]
    return [name for name in plain if not buffers[name].is_inference()]
