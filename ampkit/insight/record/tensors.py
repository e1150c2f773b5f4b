"""What the steps of optimizers do to each parameter, and which tensors hold the memory.

`Steps` measures before and after each step, on the device: one pass over weights and gradients for the largest values, and a
sample for shares. The host reads whether a step was skipped, once a step, and everything else when the recording ends. `Memory`
follows storages from the operator that makes them to their end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...api import step_was_skipped
from ...casting.tensors import params_of
from ...iteration.block import Block
from ...iteration.optimizer_wrapper import OptimizerWrapper, wrapper_of
from ...iteration.slots import is_sparse
from ...optimizers.scales import on
from ...patching import PatchSet, Undo
from ...session import session_of
from ...sharding import local
from ..around_step import names_of, to_host
from ..repeating import unwatched
from ..updates import Weights, some
from .data import StepRow, TensorRow

#: Elements of a tensor that shares are taken of, at most: their standard error is below 0.8%.
SAMPLE = 2**12

WEIGHTS, GRADIENTS, MASTERS, MOMENTS, CASTS = (
    "weights and buffers",
    "gradients",
    "masters",
    "moments",
    "casts of weights",
)
ACTIVATIONS, INPUTS = "activations and temporaries", "inputs and others"


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


class Steps:
    """Looks at every step of every optimizer, from `watch` to the undoing; then `rows` and `tensors` have the figures.

    ``name_of`` gives a parameter's path in its model, or None; ``precision`` the lower precision that is in use. ``on_step`` is
    called after each step with the number of the iteration that it ends, or None where it ends none: iterations are counted by
    the optimizer that steps first.
    """

    def __init__(
        self,
        memory: Memory,
        name_of: Callable[[torch.Tensor], str | None],
        precision: Callable[[], torch.dtype | None],
        on_step: Callable[[int | None], None],
    ) -> None:
        self.steps: list[_Step] = []
        self.is_running = False
        self._memory, self._name_of, self._precision, self._on_step = memory, name_of, precision, on_step
        self._scales: list[Any] = []  # of blocks and GradScalers since the last step
        self._gradient_bytes: dict[str, int] = {}
        self._counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._first: Callable[[], Any] = lambda: None
        self._current: _Step | None = None

    @property
    def iterations(self) -> int:
        return (
            self._counts.get(self._first(), 0) if self._first() is not None else max(self._counts.values(), default=0)
        )

    def watch(self, undo: Undo) -> None:
        patches = PatchSet()
        undo.callback(patches.restore)
        undo.callback(register_optimizer_step_pre_hook(lambda optimizer, *_: self._before(optimizer)).remove)
        undo.callback(register_optimizer_step_post_hook(lambda optimizer, *_: self._after(optimizer)).remove)
        patches.set(OptimizerWrapper, "skip", self._on_skip(OptimizerWrapper.skip))
        patches.set(Block, "__exit__", self._on_block_end(Block.__exit__))
        patches.set(GradScaler, "step", self._on_grad_scaler(GradScaler.step))

    # What calls us

    def _on_skip(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def skip(wrapper: OptimizerWrapper) -> Any:
            self._before(wrapper.optimizer)
            original(wrapper)
            self._after(wrapper.optimizer, skipped=True)

        return skip

    def _on_block_end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __exit__(block: Block, *error: Any) -> Any:
            scale = block.scale  # it moves when the block ends
            with unwatched():
                self._scales.append(scale.clone() if isinstance(scale, torch.Tensor) else scale)
            return original(block, *error)

        return __exit__

    def _on_grad_scaler(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            with unwatched():
                if scaler._scale is not None:
                    self._scales.append(scaler._scale.clone())
            count = self._counts.get(optimizer, 0)
            result = original(scaler, optimizer, *args, **kwargs)
            if self._counts.get(optimizer, 0) == count:  # it did not call the optimizer
                self._before(optimizer)
                self._after(optimizer, skipped=True)
            return result

        return step

    # Measuring

    def _before(self, optimizer: Any) -> None:
        if self._current is not None:  # a part of the step of another optimizer
            return
        count = self._counts.get(optimizer, 0) + 1
        self._counts[optimizer] = count
        if self._first() is None:
            self._first = weakref.ref(optimizer)
        found_inf = getattr(optimizer, "found_inf", None)
        step = self._current = _Step(
            optimizer,
            type(optimizer).__name__,
            count,
            self._scales[-1] if self._scales else 1.0,
            dict(self._named(optimizer)),
            False if found_inf is None else found_inf,
        )
        with unwatched(), torch.no_grad():
            step.weights = Weights(optimizer, SAMPLE)
            self._measure_gradients(step)
        self.is_running = True

    def _after(self, optimizer: Any, skipped: bool = False) -> None:
        step = self._current
        if step is None or step.optimizer is not optimizer:
            return
        self.is_running, self._current = False, None
        with unwatched(), torch.no_grad():
            if skipped or session_of(optimizer) is not None:
                step.skipped = skipped or step_was_skipped(optimizer)
            self._measure_weights(step)
            self._note_memory(optimizer)
        step.weights, step.named = None, {}
        step.optimizer = weakref.ref(optimizer)
        self.steps.append(step)
        is_first = optimizer is self._first()
        if is_first:
            self._scales.clear()
        self._on_step(step.iteration if is_first else None)

    def _measure_gradients(self, step: _Step) -> None:
        precision, scale = self._precision(), step.scale
        divisor = getattr(
            step.optimizer, "grad_scale", None
        )  # a fused optimizer of torch's that a GradScaler has unscale
        alike: dict[Any, list[tuple[str, torch.Tensor]]] = {}
        for name, param in step.named.items():
            if param.grad is not None and not is_sparse(param.grad):
                gradient = local(param.grad)
                self._gradient_bytes[name] = gradient.nbytes
                factor = 1.0 if divisor is None else 1.0 / on(divisor, gradient.device)
                step.figures[name, "grad_absmax"] = _absmax(gradient) * factor
                alike.setdefault((gradient.dtype, gradient.device), []).append((name, some(gradient, SAMPLE)))
        for (_, device), named in alike.items() if precision is not None else ():
            samples = [sample for _, sample in named]
            scaled = torch.cat(samples).float().abs()
            scaled *= on(scale, device) if divisor is None else 1.0
            is_some = scaled > 0
            masks = is_some, is_some & (scaled.to(precision) == 0), is_some & (scaled < torch.finfo(precision).tiny)
            sizes = [len(sample) for sample in samples]
            for (name, _), total, zeros, small in zip(named, *(mask.split(sizes) for mask in masks)):
                of_all = total.sum().clamp(min=1)
                step.figures[name, "underflow"] = zeros.sum() / of_all
                step.figures[name, "denormal"] = small.sum() / of_all

    def _measure_weights(self, step: _Step) -> None:
        precision = self._precision()
        for name, param in step.named.items():
            step.figures[name, "absmax"] = _absmax(local(param.detach()))
        names = dict(zip(names_of(step.optimizer), step.named))
        wanted = {"lost_updates": None} | ({"lost_without_masters": precision} if precision is not None else {})
        for figure, dtype in wanted.items():
            for name, (lost, total) in step.weights.counts(dtype).items():
                step.figures[names[name], figure] = lost / total.clamp(min=1)

    def _named(self, optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, param in zip(names_of(optimizer), params_of(optimizer), strict=True):
            yield self._name_of(param) or name, param

    def _note_memory(self, optimizer: Any) -> None:
        memory, wrapper = self._memory, wrapper_of(optimizer)
        for param in params_of(optimizer):
            memory.is_a(WEIGHTS, param)
            if param.grad is not None:
                memory.is_a(GRADIENTS, param.grad)
            for value in optimizer.state.get(param, {}).values():
                if isinstance(value, torch.Tensor):
                    memory.is_a(MOMENTS, value)
        for slot in wrapper.gradients.mastered if wrapper is not None else ():
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
            rows.append(StepRow(step.iteration, step.kind, scale, bool(step.skipped), next(bad, None)))
        optimizers = dict.fromkeys(one for step in self.steps if (one := step.optimizer()) is not None)
        tensors = {name: self._row(name, param, one, casts) for one in optimizers for name, param in self._named(one)}
        return rows, tensors

    def _row(self, name: str, param: torch.Tensor, optimizer: Any, casts: dict[str, tuple[int, int]]) -> TensorRow:
        def of(figure: str, taken_only: bool = True) -> list[float]:
            steps = (step for step in self.steps if not (taken_only and bool(step.skipped)))
            found = [value for step in steps if (value := step.figures.get((name, figure))) is not None]
            return [value for value in found if value - value == 0]

        def share(figure: str) -> float | None:
            found = of(figure)
            return sum(found) / len(found) if found else None

        wrapper = wrapper_of(optimizer)
        entry = next((slot.entry for slot in wrapper.gradients.slots if slot.param is param), None) if wrapper else None
        state = [value for value in optimizer.state.get(param, {}).values() if isinstance(value, torch.Tensor)]
        number, bytes_of_casts = casts.get(name, (0, 0))
        return TensorRow(
            name,
            param.numel(),
            param.dtype,
            max(of("absmax", taken_only=False), default=float("nan")),
            max(of("grad_absmax"), default=float("nan")),
            share("underflow"),
            share("denormal"),
            share("lost_updates"),
            share("lost_without_masters"),
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


# Memory


class Storage:
    """Memory that lives: its ``kind``, and what is known of the tensor that was made in it last.

    ``row`` is the `CallRow` that made it. A cast has the dtype that it was cast from (``source``), the name of the ``weight`` it
    is the cast of, None for an activation, and the ``group`` of the call that it was made for; ``is_fresh`` until it is used.
    """

    __slots__ = ("bytes", "group", "is_fresh", "kind", "ref", "row", "source", "weight")

    def __init__(self, size: int, kind: str) -> None:
        self.bytes, self.kind = size, kind
        self.row = self.source = self.weight = self.group = None
        self.is_fresh = False


class Memory:
    """What lives, from the operator that made it, and the bytes of each kind at the peak of all.

    Kinds are known late (a gradient is one when it is found at its parameter), so the peak is found when it is asked for.
    """

    def __init__(self) -> None:
        self._live: dict[int, Storage] = {}
        self._before: list[Storage] = []  # what was there when the recording began
        self._events: list[Storage] = []  # a storage begins where it is first, and ends where it stands again

    def at(self, tensor: torch.Tensor) -> Storage:
        """The storage of a tensor that an operator reads; one that is not known was there before, or came from another thread."""
        return self._storage(tensor, INPUTS, self._before)

    def made(self, tensor: torch.Tensor) -> Storage:
        """The storage of an operator's result."""
        return self._storage(tensor, ACTIVATIONS, self._events)

    def is_a(self, kind: str, tensor: torch.Tensor) -> None:
        self.at(tensor).kind = kind

    def peak(self) -> dict[str, int]:
        """Bytes by kind, when all of them together were the most."""
        now: dict[str, int] = {}
        for storage in self._before:
            now[storage.kind] = now.get(storage.kind, 0) + storage.bytes
        most, at_peak, total = 0, dict(now), sum(now.values())
        begun = set(map(id, self._before))
        most = total
        for storage in self._events:
            sign = -1 if id(storage) in begun else 1
            begun.add(id(storage)) if sign > 0 else begun.discard(id(storage))
            now[storage.kind] = now.get(storage.kind, 0) + sign * storage.bytes
            total += sign * storage.bytes
            if total > most:
                most, at_peak = total, dict(now)
        return {kind: size for kind, size in sorted(at_peak.items(), key=lambda item: -item[1]) if size}

    def _storage(self, tensor: torch.Tensor, kind: str, noted: list[Storage]) -> Storage:
        try:
            memory = local(tensor).untyped_storage()
        except (NotImplementedError, RuntimeError):  # a sparse tensor, or a wrapper of another one
            return Storage(0, kind)
        address = memory._cdata
        if address in self._live:
            return self._live[address]
        found = self._live[address] = Storage(memory.nbytes(), kind)
        found.ref = weakref.ref(memory, lambda _: self._ended(address, found))
        noted.append(found)
        return found

    def _ended(self, address: int, storage: Storage) -> None:
        self._events.append(storage)
        if self._live.get(address) is storage:
            del self._live[address]
