"""Running statistics stay finite: otherwise a batch that overflows would leave inf or NaN in them for good."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from .. import registry

# Bound once: asked in every forward.
_tracing = torch._C._get_tracing_state
_transform_level = torch._C._functorch.maybe_current_level


class RunningStatistics:
    """The running statistics of one session's models: of batch and instance norm, and the vectors of spectral norm."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[nn.Module, _Statistics] = weakref.WeakKeyDictionary()
        self.additions = -1  # `registry.additions` when the models were last looked through
        self.are_there = False  # whether a model had any then
        self._are_checked = False  # at the end of a block since the last step

    def add(self, models: Iterable[nn.Module]) -> None:
        """Save the statistics of these models: a script may train their parts alone."""
        self._of.update({model: _Statistics() for model in models})
        self._look_through()
        for statistics in self._of.values():
            statistics.keep_finite()

    def before_forward(self, model: nn.Module) -> None:
        """Check what earlier forwards have changed, and what this one may change. Called where `are_there`, or may be."""
        if _tracing() is None and _transform_level() is None:
            self._look_through()
            self._of[model].check()

    def end_block(self) -> None:
        self.keep_finite()
        self._are_checked = True

    def end_step(self) -> None:
        """Check what a script has run outside of blocks."""
        if not self._are_checked:
            self.keep_finite()
        self._are_checked = False

    def keep_finite(self) -> None:
        """Restore finite values in all models that were in training mode at the last call, or are now."""
        self._look_through()
        for statistics in self._of.values():
            statistics.check()

    def _look_through(self) -> None:
        if self.additions != registry.additions:
            self.additions = registry.additions
            for model, statistics in self._of.items():
                statistics.look_in(model)
            self.are_there = any([statistics.places for statistics in self._of.values()])


class _Statistics:
    """The statistics of one model, and their last finite values, in memory that a captured CUDA graph may use."""

    def __init__(self) -> None:
        #: The attributes of modules, which keep no module alive, and the names of their statistics.
        self.places: list[tuple[dict[str, Any], list[str]]] = []
        self._last: dict[tuple[Any, ...], torch.Tensor] = {}  # by device, dtype and sizes
        self._last_of: dict[tuple[int, str], torch.Tensor] = {}  # views of these, by place
        self._was_training = False

    def look_in(self, model: nn.Module) -> None:
        self.places = [(vars(module), names) for module in model.modules() if (names := _names_in(module))]
        here = {(id(attributes), name) for attributes, names in self.places for name in names}
        self._last_of = {place: last for place, last in self._last_of.items() if place in here}

    def check(self) -> None:
        """Call `keep_finite` if a training forward may have run since the last check."""
        is_training = any([attributes["training"] for attributes, _ in self.places])
        if is_training or self._was_training:
            self.keep_finite()
        self._was_training = is_training

    @torch.no_grad()
    def keep_finite(self) -> None:
        """Restore the last finite values of elements that are not finite, and save the finite ones for the next call."""
        alike: dict[Any, dict[tuple[int, str], torch.Tensor]] = {}
        for attributes, names in self.places:
            for name in names:
                tensor = attributes["_buffers"].get(name)
                has_values = type(tensor) is torch.Tensor and not (tensor.is_meta or tensor.is_inference())
                if has_values and tensor.is_floating_point():
                    alike.setdefault((tensor.device, tensor.dtype), {})[id(attributes), name] = tensor
        for kind, by_place in alike.items():
            tensors = list(by_place.values())
            current = torch.cat([tensor.reshape(-1) for tensor in tensors])
            key = (*kind, *[tensor.numel() for tensor in tensors])
            last = self._last.get(key)
            if last is None:
                last = self._last[key] = self._known_of(by_place)
            is_finite = current.isfinite()
            if is_known_finite(is_finite):
                last.copy_(current)
                continue
            torch.where(is_finite, current, last, out=last)
            values = torch._C._nn.unflatten_dense_tensors(last, tensors)
            # Not counted, as torch's batch norm does not count its own: a graph that is kept may still be run backward.
            with torch.autograd._unsafe_preserve_version_counter(tuple(tensors)):
                torch._foreach_copy_(tensors, values)

    def _known_of(self, by_place: dict[tuple[int, str], torch.Tensor]) -> torch.Tensor:
        """Return new memory with the last finite values of these tensors, whose layers may have been replaced or moved."""
        before = [self._last_of.get(place) for place in by_place]
        pieces = [
            tensor.reshape(-1) if last is None or last.numel() != tensor.numel() else last.to(tensor)
            for last, tensor in zip(before, by_place.values(), strict=True)
        ]
        known = torch.cat(pieces)
        self._last_of.update(zip(by_place, known.split([piece.numel() for piece in pieces]), strict=True))
        return known


def is_known_finite(is_finite: torch.Tensor) -> bool:
    """Whether the host can tell without waiting that all elements are finite: on the CPU."""
    return is_finite.is_cpu and bool(is_finite.all())


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
