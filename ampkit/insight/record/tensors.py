"""`Steps`: what the steps of optimizers do to each parameter.

It measures on the device: one pass over weights and gradients for the largest values, and a sample for shares. The host reads
whether a step was skipped, once a step, and everything else when the recording ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ...api import step_was_skipped
from ...casting.tensors import params_of
from ...iteration.found_inf import is_sparse
from ...optimizers.scales import on
from ...registry import session_of, wrapper_of
from ...sharding import local
from ..around_step import names_of, to_host
from ..updates import Weights, some
from .data import StepRow, TensorRow
from .iterations import Iterations
from .memory import GRADIENTS, MASTERS, MOMENTS, WEIGHTS, Memory

#: Elements of a tensor that shares are taken of, at most: their standard error is below 1.2%.
SAMPLE = 2**11


@dataclass
class _Step:
    optimizer: Any
    kind: str
    iteration: int
    scale: float | torch.Tensor
    named: dict[str, torch.Tensor]
    skipped: bool | torch.Tensor = False
    weights: Weights | None = None
    figures: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)  # scalars by parameter and name


class Steps(Iterations):
    """Measures what each step does to its parameters; `read` gives the figures.

    ``name_of`` gives the one name of a parameter, from what its optimizer calls it; ``precision`` the lower precision in use.
    Optimizers are held until then: a script may make its own in a function that has returned.
    """

    def __init__(
        self,
        memory: Memory,
        name_of: Callable[[torch.Tensor, str], str],
        precision: Callable[[], torch.dtype | None],
        on_step: Callable[[int | None], None],
    ) -> None:
        super().__init__(on_step)
        self.steps: list[_Step] = []
        self._memory, self._name_of, self._precision = memory, name_of, precision
        self._gradient_bytes: dict[str, int] = {}

    def before(self, optimizer: Any) -> None:
        # Where torch's GradScaler has a fused optimizer skip on the device.
        found_inf = getattr(optimizer, "found_inf", None)
        step = _Step(
            optimizer,
            type(optimizer).__name__,
            self.counts[optimizer],
            self.scales.get(optimizer, self.scale),
            dict(self._named(optimizer)),
            False if found_inf is None else found_inf,
            Weights(optimizer, SAMPLE),
        )
        self.steps.append(step)
        # A fused optimizer of torch's divides by it what a GradScaler has not.
        self._measure_gradients(step, getattr(optimizer, "grad_scale", None))

    def after(self, optimizer: Any, skipped: bool) -> None:
        step = self.steps[-1]
        if skipped or session_of(optimizer) is not None:
            step.skipped = skipped or step_was_skipped(optimizer)
        self._measure_updates(step, names_of(optimizer))
        self._note_memory(optimizer)
        step.weights, step.named = None, {}

    def _measure_gradients(self, step: _Step, divisor: torch.Tensor | None) -> None:
        precision = self._precision()
        alike: dict[Any, list[tuple[str, torch.Tensor]]] = {}
        for name, param in step.named.items():
            if param.grad is not None and not is_sparse(param.grad):
                gradient = local(param.grad)
                self._gradient_bytes[name] = gradient.nbytes
                factor = 1.0 if divisor is None else 1.0 / on(divisor, gradient.device)
                step.figures[name, "grad_absmax"] = _absmax(gradient) * factor
                if not gradient.is_complex():
                    alike.setdefault((gradient.dtype, gradient.device), []).append((name, some(gradient, SAMPLE)))
        for (_, device), named in alike.items() if precision is not None else ():
            samples = [sample for _, sample in named]
            scaled = torch.cat(samples).float().abs()
            scaled *= on(step.scale, device) if divisor is None else 1.0
            is_some = scaled > 0
            masks = is_some, is_some & (scaled.to(precision) == 0)
            sizes = [len(sample) for sample in samples]
            for figure, mask in zip(("nonzero", "underflow"), masks):
                for (name, _), part in zip(named, mask.split(sizes)):
                    step.figures[name, figure] = part.sum()

    def _measure_updates(self, step: _Step, in_optimizer: list[str]) -> None:
        names, precision = dict(zip(in_optimizer, step.named)), self._precision()
        for figure, dtype in (("lost_updates", None), ("lost_without_masters", precision)):
            if figure == "lost_updates" or dtype is not None:
                for name, (lost, total) in step.weights.counts(dtype).items():
                    step.figures[names[name], figure], step.figures[names[name], "updates"] = lost, total

    def _named(self, optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, param in zip(names_of(optimizer), params_of(optimizer), strict=True):
            yield self._name_of(param, name), param

    def _note_memory(self, optimizer: Any) -> None:
        memory, wrapper = self._memory, wrapper_of(optimizer)
        for param in params_of(optimizer):
            memory.is_a(WEIGHTS, param)
            if param.grad is not None:
                memory.is_a(GRADIENTS, param.grad)
            for value in optimizer.state.get(param, {}).values():
                if isinstance(value, torch.Tensor):
                    memory.is_a(MOMENTS, value)
        for slot in wrapper.gradients.stored if wrapper is not None else ():
            memory.is_a(MASTERS, slot.entry.rest)

    # At the end

    def read(self, casts: dict[str, tuple[int, int]]) -> tuple[list[StepRow], dict[str, TensorRow]]:
        """The rows, by one read from each device. ``casts`` has the number of casts of each weight, and the bytes of one."""
        rows = []
        for step in self.steps:
            scale = step.scale
            if isinstance(scale, torch.Tensor):
                step.figures["", "loss_scale"] = scale.float().reshape(())
            figures = step.figures = to_host(step.figures)
            scale = figures.get(("", "loss_scale"), scale)
            bad = (name for (name, figure), value in figures.items() if figure == "grad_absmax" and value - value != 0)
            step.skipped = bool(step.skipped)
            rows.append(StepRow(step.iteration, step.kind, scale, step.skipped, next(bad, None)))
        optimizers = {id(step.optimizer): step.optimizer for step in self.steps}.values()
        params = {name: (param, one) for one in optimizers for name, param in self._named(one)}
        with torch.no_grad():
            largest = to_host({name: _absmax(local(param.detach())) for name, (param, _) in params.items()})
        return rows, {name: self._row(name, largest[name], *params[name], casts) for name in params}

    def _row(
        self, name: str, absmax: float, param: torch.Tensor, optimizer: Any, casts: dict[str, tuple[int, int]]
    ) -> TensorRow:
        taken = [step.figures for step in self.steps if not step.skipped]

        def share(figure: str, of: str) -> float | None:
            counts = [(step[name, figure], step[name, of]) for step in taken if (name, figure) in step]
            lost, total = map(sum, zip(*counts)) if counts else (0, 0)
            return lost / max(1, total) if counts else None

        wrapper = wrapper_of(optimizer)
        entry = next((slot.entry for slot in wrapper.gradients.slots if slot.param is param), None) if wrapper else None
        state = [value for value in optimizer.state.get(param, {}).values() if isinstance(value, torch.Tensor)]
        number, bytes_of_casts = casts.get(name, (0, 0))
        return TensorRow(
            name,
            param.numel(),
            param.dtype,
            absmax,
            max((step[name, "grad_absmax"] for step in taken if (name, "grad_absmax") in step), default=float("nan")),
            share("underflow", of="nonzero"),
            share("lost_updates", of="updates"),
            share("lost_without_masters", of="updates"),
            {
                "weight": param.nbytes,
                "gradient": self._gradient_bytes.get(name, 0),
                "master": 0 if entry is None or entry.rest is None else entry.rest.nbytes,
                "moments": sum(value.nbytes for value in state),
                "casts": bytes_of_casts,
            },
            number / max(1, self.iterations),
        )


def _absmax(tensor: torch.Tensor) -> torch.Tensor:
    """The largest absolute value in float32, in one fast pass; NaN where there is one, 0 for no elements."""
    if not tensor.numel():
        return torch.zeros((), device=tensor.device)
    low, high = torch.aminmax(tensor.abs() if tensor.is_complex() else tensor)
    return torch.maximum(-low, high).float()
