"""Running statistics stay finite: a batch that overflows would else leave inf or NaN in them for good.

Before a forward, at the end of a block and after a step, elements that are not finite go back to their last finite values. Finite
ones stay as forwards have made them, or scripts. On an accelerator that is chosen on the device; nothing waits.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from ..models.records import walk

# Bound once: asked in every forward.
_tracing = torch._C._get_tracing_state
_transform_level = torch._C._functorch.maybe_current_level


class RunningStatistics:
    """Those of the models of one session: batch and instance norm, and vectors of spectral norm."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[nn.Module, _Statistics] = weakref.WeakKeyDictionary()
        self.changed: list[_Statistics] = []  # by a training forward, since they were last looked at

    def before_forward(self, model: nn.Module) -> None:
        """Look at the model's statistics where the forward that begins may change them, or an earlier one has."""
        found = self._of.get(model)
        if found is None:
            found = self._of[model] = _Statistics(model)
        if not found.places or _tracing() is not None or _transform_level() is not None:
            return
        if self.changed:
            self.keep_finite()
        if found.are_training:
            found.keep_finite()
            self.changed.append(found)

    def keep_finite(self) -> None:
        """Have what is not finite go back, in all models that a training forward ran in since the last time."""
        changed, self.changed = self.changed, []
        for one in changed:
            one.keep_finite()

    def find_again(self) -> None:
        """The models may have other layers now."""
        self._of.clear()


class _Statistics:
    """The statistics of one model, and their last finite values in memory that stays: a captured CUDA graph goes on using it."""

    def __init__(self, model: nn.Module) -> None:
        #: The attributes of modules, which keep no module alive, and the names of their statistics.
        self.places = [(vars(module), names) for module in walk(model) if (names := _names_in(module))]
        self._last: dict[tuple[Any, ...], torch.Tensor] = {}  # by device, dtype and sizes

    @property
    def are_training(self) -> bool:
        """Whether a forward changes some of them."""
        return any([attributes["training"] for attributes, _ in self.places])

    @torch.no_grad()
    def keep_finite(self) -> None:
        """Elements that are not finite go back to their last finite values; what is finite now is kept for the next time."""
        alike: dict[Any, list[torch.Tensor]] = {}
        for attributes, names in self.places:
            for name in names:
                tensor = attributes["_buffers"].get(name)
                if type(tensor) is torch.Tensor and tensor.is_floating_point() and not tensor.is_inference():
                    alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        for kind, tensors in alike.items():
            now = torch.cat([tensor.reshape(-1) for tensor in tensors])
            last = self._last.setdefault((*kind, *[tensor.numel() for tensor in tensors]), now)
            if last is now:
                continue
            is_finite = now.isfinite()
            if now.is_cpu and is_finite.all():
                last.copy_(now)
                continue
            torch.where(is_finite, now, last, out=last)
            values = torch._C._nn.unflatten_dense_tensors(last, tensors)
            # Not counted, as torch's batch norm does not count its own: a graph that is kept may still be run backward.
            with torch.autograd._unsafe_preserve_version_counter(tuple(tensors)):
                torch._foreach_copy_(tensors, values)


def _names_in(module: nn.Module) -> list[str]:
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
    return names
