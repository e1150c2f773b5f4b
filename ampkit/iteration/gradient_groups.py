"""Gradients of which equally much is known, handled by one kernel each: written out, measured, added to.

A gradient is ``param.grad`` and, where that is not all there is to know, `Slot.exact` beside it. `grouped` sorts the gradients of
an optimizer by what they need; gradients.py says when.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from .. import kernels
from ..optimizers.scales import Scale, inverse, is_one, on_device_of
from ..sharding import by_placement, is_sharded, total_over
from .found_inf import FoundInf, places_for
from .master_weights import Slot


@dataclass
class Group:
    """Gradients of which equally much is known, so that one kernel can handle them.

    ``values`` are the gradients themselves where nothing more is known, else what stands in `Slot.exact`, at the scale ``scale``.
    ``chooses`` says that what was written to the gradients since counts, and ``zeros_count`` that zeros in them were written.
    """

    scale: Scale
    chooses: bool
    zeros_count: bool
    slots: list[Slot] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    def write(self, outputs: list[torch.Tensor], factor: Scale = 1.0) -> None:
        """outputs = factor * the gradients, unscaled."""
        inv = inverse(self.scale)
        if self.chooses:
            kernels.multi_tensor_restore(
                self.gradients, self.values, outputs, inv, factor=factor, zeros_count=self.zeros_count
            )
        elif not (is_one(inv) and is_one(factor) and self.values[0] is outputs[0]):
            kernels.multi_tensor_scale(self.values, outputs, factor * on_device_of(inv, factor))

    def in_float32(self) -> list[torch.Tensor]:
        """Float32 tensors to write them to: ``values`` where they are that already."""
        return [
            values if values.dtype is torch.float32 else torch.empty_like(values, dtype=torch.float32)
            for values in self.values
        ]

    def norm(self) -> torch.Tensor:
        """Their Euclidean norm."""
        inv = inverse(self.scale)
        if self.chooses:
            return kernels.multi_tensor_restore_l2norm(self.gradients, self.values, inv, self.zeros_count)[0]
        return kernels.multi_tensor_unscale_l2norm(self.values, None, inv)[0]

    def accumulate(
        self, fresh: list[torch.Tensor], totals: list[torch.Tensor], inv: Scale, found: FoundInf | None
    ) -> None:
        """totals = fresh * inv + the gradients, unscaled; the gradients too, unless they are kept at a scale."""
        places = places_for(found, [slot.param for slot in self.slots])
        if self.chooses or (is_one(self.scale) and self.values[0] is self.gradients[0]):
            kernels.multi_tensor_accumulate(
                fresh, self.gradients, self.values, totals, inv, inverse(self.scale), self.zeros_count, *places
            )
        else:
            kernels.multi_tensor_axpby(fresh, self.values, totals, inv, inverse(self.scale), places[0], 0, places[1])


def grouped(gradients: Iterable[tuple[Slot, torch.Tensor]]) -> list[Group]:
    """These gradients of slots, in as many groups as it takes."""
    groups: dict[tuple, Group] = {}
    for slot, gradient in gradients:
        exact = slot.exact
        if exact is None or not (exact.is_scaled or exact.serves(gradient)):
            key, values, scale = None, gradient, 1.0
        else:
            values, scale = exact.values.to(gradient.device), exact.scale
            name = id(scale) if isinstance(scale, torch.Tensor) else scale
            key = (name, exact.is_scaled, exact.rounded.is_still(gradient))
        group = groups.get(key)
        if group is None:
            chooses = key is not None and not exact.is_scaled
            group = groups[key] = Group(scale, chooses, chooses and not key[2])
        group.slots.append(slot)
        group.gradients.append(gradient)
        group.values.append(values)
    return list(groups.values())


def norm_of(gradients: list[torch.Tensor]) -> torch.Tensor | None:
    """The Euclidean norm of all of these together, on all processes: float32, shape [1]; None of none."""
    if not gradients:
        return None
    if not any(map(is_sharded, gradients)):
        return kernels.multi_tensor_l2norm(gradients)[0]
    squares = 0.0
    for parts, groups in by_placement(gradients):
        squares = squares + total_over(groups, kernels.multi_tensor_l2norm(parts)[0].double().square())
    return squares.sqrt().float()
