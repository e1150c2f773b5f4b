"""`Finder`: follows each inf and NaN from the operator that made it to the loss and the gradients.

A tensor that is not finite has an origin, stored by its memory: the operator that made it of finite numbers, or an input from
outside. Results that are computed from it have the same origin. A -inf that a script writes is a mask, without an origin; an
operator that makes NaN of a mask is a new origin. The origin of the loss, or of the gradients, is the culprit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from .evidence import DOMAIN, GIVEN, MASK, explain, is_finite, largest, readable
from .watching import STATISTICS, Call, Place, Watch, address, arguments_written, tensors_in

# Operators that overwrite a tensor without reading it.
_FILLS = {"copy", "fill", "zero", "uniform", "normal", "random", "bernoulli", "exponential", "cauchy", "geometric"}


@dataclass(frozen=True)
class Culprit(Place):
    """The operator that made the first inf or NaN which reached the loss, a gradient or a running statistic.

    ``dtype`` is that of its result, ``cast_from`` the lower precision that an input was cast from. ``evidence`` has the numbers,
    ``needed`` the largest number that the result needs. ``rows`` says which rows of the batch are not finite.
    """

    kind: str
    evidence: str
    dtype: torch.dtype
    order: int = 0
    needed: float | None = None
    rows: str = ""
    cast_from: torch.dtype | None = None


class Finder(Watch):
    """A `Watch` of one run of an iteration that finds the ``culprit``; None if loss and gradients are finite."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.culprit: Culprit | None = None
        self._origins: dict[int, Culprit | None] = {}
        self._widened: dict[int, torch.dtype] = {}  # results of casts to a wider dtype, and the dtype before
        self._mask: Culprit | None = None  # the first mask, for a loss that is -inf for no other reason
        self._batch = 0  # batch size of the latest call of a model
        self.failed: tuple[Call, Exception] | None = None

    # Each operator

    def forward_begins(self, module: nn.Module, args: Any) -> None:
        if not self.is_inside:
            self._batch = next((x.size(0) for x in tensors_in(args) if x.dim()), self._batch)
        super().forward_begins(module, args)

    def around(self, call: Call) -> Any:
        self.operations += 1
        written = list(arguments_written(call.op, call.args, call.kwargs))
        is_overwritten = call.name in _FILLS or any(name == "out" for name, _ in written)
        copies = {} if is_overwritten else {id(x): x.clone() for _, x in written if x.is_floating_point()}
        try:
            out = call()
        except Exception as error:
            self.failed = call, error
            raise
        if not (call.op.is_view or call.name.startswith(("empty", "new_empty"))):
            made = [*tensors_in(out), *call.written()]
            for x in made if self._widened else ():  # an earlier cast may have had the same memory
                self._widened.pop(address(x), None)
            if call.name == "cast" and made[0].element_size() > (read := call.inputs()[0]).element_size():
                self._widened[address(made[0])] = read.dtype
            sizes, origin = {tensor: largest(tensor) for tensor in made}, None
            if bad := [tensor for tensor, size in sizes.items() if not math.isfinite(size)]:
                origin = self._origin(call, copies, made, bad)
                self._origins.update((address(tensor), origin) for tensor in bad)
            self.on_results(call, sizes, origin)
        return out

    def on_results(self, call: Call, sizes: dict[torch.Tensor, float], origin: Culprit | None) -> None:
        """Look at the results of an operator: their largest values, and the origin of those that are not finite."""

    def _origin(self, call: Call, copies: dict[int, torch.Tensor], made: Any, bad: Any) -> Culprit | None:
        skipped = {id(tensor) for tensor in call.written()} - copies.keys()
        read = [tensor for tensor in call.inputs() if id(tensor) not in skipped]
        bad_inputs = [(tensor, value) for tensor in read if not is_finite(value := copies.get(id(tensor), tensor))]
        origins = [self._origin_of(call, tensor, value) for tensor, value in bad_inputs]
        if (known := next((origin for origin in origins if origin is not None), None)) is not None:
            return known
        arguments = call.args, call.kwargs
        constants = [x for x in tree_leaves(arguments) if isinstance(x, float) and not math.isfinite(x)]
        has_nan = any(bool(readable(x).isnan().any()) for x in bad)
        is_nan_new = has_nan and not any(map(math.isnan, constants))
        if (bad_inputs or constants) and not is_nan_new:
            text = "a constant that is not finite, which this line writes or uses, reaches the loss"
            self._mask = self._mask or self._new(call, MASK, text, None, bad[0])
            return None
        inputs = tree_map(lambda x: copies.get(id(x), x) if isinstance(x, torch.Tensor) else x, arguments)
        return self._new(call, *explain(call, inputs, made), bad[0])

    def _origin_of(self, call: Call, tensor: torch.Tensor, value: torch.Tensor) -> Culprit | None:
        """Return the origin of an input that is not finite. If no operator made it, the input is the origin; a mask has none."""
        key = address(tensor)
        if key not in self._origins:
            name = self.name_of(tensor)
            words = f"{name or 'a tensor'} of shape {tuple(value.shape)}, {value.dtype}"
            text = f"{words}, that this line uses, has {_count_non_finite(value)}"
            origin = self._new(call, GIVEN, text, None, value)
            if name:  # of a model, which has no rows of the batch
                origin = replace(origin, rows="")
            self._origins[key] = None if _is_mask(value) else origin
        return self._origins[key]

    def _new(self, call: Call, kind: str, evidence: str, needed: float | None, bad: torch.Tensor) -> Culprit:
        written = arguments_written(call.op, call.args, call.kwargs)
        is_of_no_row = call.backward or any(x is bad for name, x in written if name in STATISTICS)
        rows = "" if is_of_no_row else _rows(bad, self._batch)
        cast_from = next((dtype for x in call.inputs() if (dtype := self._widened.get(address(x)))), None)
        about = {"dtype": bad.dtype, "order": self.operations, "needed": needed, "rows": rows, "cast_from": cast_from}
        return Culprit(kind, evidence, **call.where(), **about)

    def forget(self) -> None:
        """Clear all origins at the end of an iteration, when its graph and its tensors are gone."""
        self._origins.clear()
        self._widened.clear()
        self._mask = None
        self._forward.clear()

    # At the end

    def statistics(self) -> list[torch.Tensor]:
        """Return the running statistics that have an origin: an operator wrote or read them when they were not finite."""
        return [x for x in super().statistics() if not is_lazy(x) and address(x) in self._origins]

    def on_loss(self, tensors: list[torch.Tensor]) -> None:
        """Set the culprit to the earliest origin of these losses or gradients, if some are not finite."""
        bad = [tensor for tensor in tensors if not is_finite(tensor)]
        if not bad or self.culprit is not None:
            return
        origins = [origin for tensor in bad if (origin := self._origins.get(address(tensor))) is not None]
        unknown = Culprit(
            DOMAIN, "no operator that can be watched made it", bad[0].dtype, function="unknown", op="unknown"
        )
        self.culprit = min(origins, key=lambda origin: origin.order, default=self._mask) or unknown


def _rows(bad: torch.Tensor, batch: int) -> str:
    """Return in words which rows of the batch are not finite; empty if none or all are."""
    values = readable(bad)
    if batch < 2 or not values.dim() or len(values) % batch or bad.layout is not torch.strided or bad.is_nested:
        return ""
    rows = (~values.isfinite()).reshape(batch, -1).any(1).nonzero().flatten().tolist()
    if len(rows) in (0, batch):
        return ""
    return f"row{'s' * (len(rows) > 1)} {', '.join(map(str, rows[:4]))}{', ...' * (len(rows) > 4)} of {batch} (the first is 0)"


def _is_mask(tensor: torch.Tensor) -> bool:
    """Whether all elements are finite or -inf."""
    values = readable(tensor)
    return bool((values.isfinite() | values.isneginf()).all())


def _count_non_finite(tensor: torch.Tensor) -> str:
    values = readable(tensor)
    nan, inf = int(values.isnan().sum()), int(values.isinf().sum())
    counts = [f"{count} {name}" for count, name in ((nan, "NaN"), (inf, "inf")) if count]
    return f"{' and '.join(counts)} among {values.numel()} elements"
