"""Running statistics go back when a step is skipped: a batch that overflowed would else leave inf or NaN in them for good.

Before the first training forward since an optimizer's last step, a `Snapshot` copies the statistics of the norm layers and
the vectors of spectral norm that belong to that optimizer; where its step is skipped, `after_step` writes them back. An optimizer
owns what lies in the module of its parameters. What no optimizer owns goes to the one of the next ``scale_loss``.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from ..models.records import walk
from ..optimizers.scales import on

Place = tuple[dict[str, Any], str]  # a module's dict of buffers, and a name in it
Owner = Any  # an optimizer's wrapper, of which the snapshots and the parameters matter here

# Bound once: asked in every forward.
_tracing = torch._C._get_tracing_state
_transform_level = torch._C._functorch.maybe_current_level


class Snapshot:
    """A copy of some buffers, in memory that stays, since a captured CUDA graph goes on using it."""

    def __init__(self, places: list[Place]) -> None:
        self._places = places
        self._tensors = [buffers[name] for buffers, name in places]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        alike: dict[Any, list[torch.Tensor]] = {}
        for tensor in self._tensors:
            # As bytes, means and counters are chosen by the same operators.
            own = tensor.detach().view(-1).view(torch.uint8) if tensor.is_contiguous() else tensor
            alike.setdefault((own.device, own.dtype), []).append(own)
        self._copies = [_Copies(tensors) for tensors in alike.values()]
        self.is_taken = False

    def is_of_others(self) -> bool:
        """Whether other buffers stand in the places of these by now: some layers replace them, and models are moved."""
        now = [buffers.get(name) for buffers, name in self._places]
        if any(map(operator.is_not, now, self._tensors)):
            return True
        return [tensor.data_ptr() for tensor in self._tensors] != self._addresses

    def take(self) -> None:
        """Copy the buffers as they are now."""
        with torch.no_grad():
            for copies in self._copies:
                torch._foreach_copy_(copies.old, copies.tensors)
        self.is_taken = True

    def put_back(self, skipped: bool | torch.Tensor) -> None:
        """Write the copies into the buffers; where ``skipped`` is a tensor, only if it is not 0 on its device."""
        # Not counted, as torch's batch norm does not count its own: a graph that is kept may still be run backward.
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(self._tensors)):
            for copies in self._copies:
                torch._foreach_copy_(copies.tensors, copies.where(skipped))
        if self.is_of_others():
            self._put_back_into_others(skipped)

    @torch.no_grad()
    def _put_back_into_others(self, skipped: bool | torch.Tensor) -> None:
        for (buffers, name), before in zip(self._places, self._tensors):
            tensor = buffers.get(name)
            if tensor is before or type(tensor) is not torch.Tensor or tensor.shape != before.shape:
                continue
            old = before.to(tensor.device, tensor.dtype)
            if isinstance(skipped, torch.Tensor):
                old = torch.where(on(skipped, tensor.device).reshape(()) != 0, old, tensor)
            with torch.autograd._unsafe_preserve_version_counter(tensor):
                tensor.copy_(old)


class _Copies:
    """Of buffers of one device and dtype: ``old`` is what they were, and ``new`` a place to choose in."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        size = sum(tensor.numel() for tensor in tensors)
        self._old, self._new = (tensors[0].new_empty(size) for _ in range(2))
        self.old, self._parts = (torch._C._nn.unflatten_dense_tensors(flat, tensors) for flat in (self._old, self._new))

    def where(self, skipped: bool | torch.Tensor) -> Sequence[torch.Tensor]:
        """The copies where ``skipped`` is not 0, else the buffers as they are."""
        if not isinstance(skipped, torch.Tensor):
            return self.old
        torch._foreach_copy_(self._parts, self.tensors)
        torch.where(on(skipped, self._new.device) != 0, self._old, self._new, out=self._new)
        return self._parts


class RunningStatistics:
    """Those of one session's models: found, and copied before they change."""

    def __init__(self) -> None:
        self._found: weakref.WeakKeyDictionary[nn.Module, _Found] = weakref.WeakKeyDictionary()
        self._unowned: list[Snapshot] = []

    def before_forward(self, model: nn.Module, owners: Sequence[Owner]) -> None:
        """Take the snapshots that the step after this forward, with gradients, may need, unless an earlier forward took them."""
        if _tracing() is not None or _transform_level() is not None:
            return
        found = self._found.get(model)
        if found is not None and found.snapshots and all(snapshot.is_taken for _, snapshot in found.snapshots):
            return
        modules = [module for module in walk(model) if module._buffers]
        if not any(module.training for module in modules):
            return
        signature = [(id(module), len(module._buffers)) for module in modules]
        signature += [(id(owner), len(owner.gradients.slots)) for owner in owners]
        if found is None or found.signature != signature or any(one.is_of_others() for _, one in found.snapshots):
            found = self._found[model] = _Found(signature, _places_by_owner(model, modules, owners))
        for owner, snapshot in found.snapshots:
            if not snapshot.is_taken:
                snapshot.take()
                (owner.snapshots if (owner := owner and owner()) else self._unowned).append(snapshot)

    def forget(self, model: nn.Module) -> None:
        """The buffers were loaded: what they were before is of no use any more."""
        if model in self._found:
            for _, snapshot in self._found[model].snapshots:
                snapshot.is_taken = False

    def enter_block(self, owners: Sequence[Owner]) -> None:
        """``scale_loss`` is entered with these optimizers: what nobody owns belongs to the first."""
        owners[0].snapshots.extend(self._unowned)
        self._unowned.clear()


def after_step(snapshots: list[Snapshot], skipped: bool | torch.Tensor | None) -> None:
    """A step was taken, or ``skipped``; a tensor says which on its device, and None is a step that nobody judged."""
    while snapshots:
        snapshot = snapshots.pop()  # the latest first: of two copies of one buffer, the earlier counts
        if snapshot.is_taken and (isinstance(skipped, torch.Tensor) or skipped):
            snapshot.put_back(skipped)
        snapshot.is_taken = False


class _Found:
    """The snapshots of one model, by owner; ``signature`` tells the modules and optimizers that they were made for."""

    def __init__(self, signature: list[tuple[int, int]], places: dict[Owner | None, list[Place]]) -> None:
        self.signature = signature
        # Weakly: a session keeps no optimizer alive, and no module.
        self.snapshots = [(owner and weakref.ref(owner), Snapshot(own)) for owner, own in places.items()]


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
    return [name for name in names if _is_plain(buffers.get(name))]


def _is_plain(tensor: Any) -> bool:
    return type(tensor) is torch.Tensor and not tensor.is_inference()
