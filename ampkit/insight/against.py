"""`diagnose(iteration, against="fp32")`: each operator of an iteration in its precision and in float32, side by side.

A tensor that depends on lower precision has a shadow: the value that float32 computes from the same inputs. A result may be
further from its shadow than the error of its inputs and one rounding explain. Then its operator has made the error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ..dtypes import LOWER_PRECISION
from .evidence import readable
from .repeating import Repetition
from .watching import Call, Place, Watch, address, cast, place, tensors_in
from .words import short

#: An error makes a row if it is this many times the error of the inputs plus one rounding.
_EXCESS = 4.0


@dataclass(frozen=True)
class Difference(Place):
    """A line whose results differ from float32's by more than its inputs explain. Errors are relative norms."""

    dtype: torch.dtype
    error: float
    error_of_inputs: float
    excess: float

    def __str__(self) -> str:
        where = "in the backward pass of " if self.backward else ""
        module = f", in {self.module}" if self.module else ""
        return (
            f"  {self.error:8.2%}  {self.error_of_inputs:8.2%}  {self.site or 'unknown'}  {self.source}\n"
            f"  {'':18}  {where}{self.function} ({self.op}), {short(self.dtype)}{module}"
        )


@dataclass(frozen=True)
class Comparison:
    """The relative errors of ``loss`` and ``gradient`` against float32; ``rows`` are the lines that made them, the worst first.

    ``print`` it.
    """

    operations: int
    loss: float
    gradient: float
    rows: tuple[Difference, ...]

    def __bool__(self) -> bool:
        return bool(self.rows)

    def __str__(self) -> str:
        off = f"loss {self.loss:.2%}, gradients {self.gradient:.2%} off"
        table = ["  error     inputs'   line", *map(str, self.rows)] if self.rows else []
        return "\n".join([f"against float32, in {self.operations} operations: {off}", *table])


def compare(iteration: Callable[[], Any]) -> Comparison:
    """Run the iteration once, and each operator that depends on lower precision twice."""
    shadows = _Shadows()
    Repetition(shadows).run(iteration)
    off = sum(float((grad - exact).square().sum()) for grad, exact in shadows.gradients) ** 0.5
    size = sum(float(exact.square().sum()) for _, exact in shadows.gradients) ** 0.5
    rows = tuple(sorted(shadows.rows.values(), key=lambda row: (row.excess == row.excess, -row.excess)))  # NaN first
    return Comparison(shadows.operations, max(shadows.losses, default=0.0), off / size if size else 0.0, rows)


class _Shadows(Watch):
    """A `Watch` that runs operators on tensors and on their shadows, and notes where the results differ."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.losses: list[float] = []  # of each loss, its distance from float32
        self.rows: dict[Any, Difference] = {}
        self.gradients: list[tuple[torch.Tensor, torch.Tensor]] = []  # each with its shadow
        self._shadows: dict[Any, torch.Tensor] = {}  # by place in memory; tensors without one are their own shadow

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the shadow of a tensor, or the tensor itself if it has none."""
        return self._shadows.get(_key(tensor), tensor)

    def on_loss(self, losses: list[torch.Tensor]) -> None:
        self.losses += [distance(loss, self.of(loss)) for loss in losses]

    def on_gradients(self, gradients: list[torch.Tensor]) -> None:
        self.gradients = [(gradient.float(), self.of(gradient).float()) for gradient in gradients]

    def around(self, call: Call) -> Any:
        self.operations += 1
        written = {id(tensor) for tensor in call.written()}

        def widen(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return cast(value, torch.float32)
            shadow = self.of(value)
            shadow = shadow.float() if shadow.dtype in LOWER_PRECISION else shadow
            return shadow.clone() if id(value) in written and address(shadow) == address(value) else shadow

        inputs = call.inputs()
        errors = [distance(tensor, self.of(tensor)) for tensor in inputs if id(tensor) not in written]
        arguments = call.args, call.kwargs
        widened = tree_map(widen, arguments)
        differs = any(x is not y for x, y in zip(tree_leaves(widened), tree_leaves(arguments)))
        is_random = torch.Tag.nondeterministic_seeded in call.op.tags or call.name.startswith(("empty", "new_empty"))
        exact = call.op(*widened[0], **widened[1]) if differs and not is_random else None
        out = call()
        if exact is None:
            for tensor in (*tensors_in(out), *call.written()):
                self._shadows.pop(_key(tensor), None)
            return out
        pairs = [*zip(tensors_in(out), tensors_in(exact), strict=True)]
        pairs += [(x, shadow) for x, shadow in zip(inputs, tensors_in(widened)) if id(x) in written]
        for tensor, shadow in pairs:
            self._shadows[_key(tensor)] = shadow
            if not call.op.is_view:
                self._note(call, tensor, shadow, max(errors, default=0.0))
        return out

    def _note(self, call: Call, out: torch.Tensor, shadow: torch.Tensor, of_inputs: float) -> None:
        if call.backward and out.squeeze().dim() < 2:  # that of a bias before a norm is nothing but rounding
            return
        error, inputs = distance(out, shadow), call.inputs()
        eps = max((torch.finfo(x.dtype).eps for x in (out, *inputs) if x.is_floating_point()), default=0.0)
        excess = error / (of_inputs + eps) if eps else 0.0
        if excess < _EXCESS:
            return
        key = call.site, call.function, call.backward
        if key not in self.rows or excess > self.rows[key].excess:
            errors = {"error": error, "error_of_inputs": of_inputs, "excess": excess}
            self.rows[key] = Difference(**call.where(), dtype=out.dtype, **errors)


def distance(tensor: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the norm of the difference divided by the norm of ``exact``; 0 for tensors that are not floating-point."""
    if tensor is exact or not tensor.is_floating_point():
        return 0.0
    tensor, exact = readable(tensor).double(), readable(exact).double()
    off, size = float(torch.linalg.vector_norm(tensor - exact)), float(torch.linalg.vector_norm(exact))
    return off / (size or off or 1.0)


def _key(tensor: torch.Tensor) -> Any:
    return *place(tensor), tensor.dtype
