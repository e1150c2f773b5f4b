"""`Finder`: follows each inf and NaN from the operator that made it to the loss and the gradients.

A tensor that is not finite has an origin, kept by its storage: the operator that made it of finite numbers, or a tensor that
came from outside. What an operator makes of it has the same origin. A -inf that a script writes is a mask
and has none: what makes NaN of a mask is an origin of its own. The origin of the loss, or of the gradients, is the culprit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from ..registry import live_sessions
from .evidence import DOMAIN, GIVEN, MASK, explain, is_finite, largest, readable
from .repeating import Repetition
from .watching import STATISTICS, Call, Place, Watch, address, arguments_written, tensors_in

# What these write is not computed from what was there before.
_FILLS = {"copy", "fill", "zero", "uniform", "normal", "random", "bernoulli", "exponential", "cauchy", "geometric"}


@dataclass(frozen=True)
class Culprit(Place):
    """The operator that made the first inf or NaN which reached the loss, a gradient or a running statistic.

    ``dtype`` is that of its result, ``cast_from`` a lower precision that an input had before. ``evidence`` has the numbers,
    ``needed`` the largest that the result would have, and ``rows`` says which of the batch are not finite.
    """

    kind: str
    evidence: str
    dtype: torch.dtype
    order: int = 0
    needed: float | None = None
    rows: str = ""
    cast_from: torch.dtype | None = None


class Finder(Watch):
    """Watches one run of an iteration. Then ``culprit`` is known, None where loss and gradients are finite."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.culprit: Culprit | None = None
        self.given: list[str] = []
        self._origins: dict[int, Culprit | None] = {}
        self._widened: dict[int, torch.dtype] = {}  # results of casts, and what was cast
        self._mask: Culprit | None = None  # the first, for a loss that is -inf by nothing else
        self._numbers = itertools.count()
        self._batch = 0  # rows of what a model was called with last
        self.failed: tuple[Call, Exception] | None = None

    def run(self, iteration: Callable[[], Any], factor: float = 1.0) -> Repetition:
        for session in live_sessions:
            for optimizer in session.optimizers:
                self._note_given(_moments(optimizer, session.name_of))
        run = Repetition(self, factor)
        run.run(iteration)
        return run

    # Before

    def on_module(self, module: nn.Module) -> None:
        self._note_given((f"{name!r} of {type(module).__name__}", param) for name, param in module.named_parameters())
        buffers = [(f"buffer {name!r}", buffer) for name, buffer in module.named_buffers()]
        self._note_given(pair for pair in buffers if is_finite(pair[1]) or not _is_mask(pair[1]))

    def _note_given(self, tensors: Any) -> None:
        for name, tensor in tensors:
            if not is_finite(tensor):
                self.given.append(f"{name} has {_what(tensor)}")

    # Each operator

    def forward_begins(self, module: nn.Module, args: Any) -> None:
        if not self.is_inside:
            self._batch = next((one.size(0) for one in tensors_in(args) if one.dim()), self._batch)
        super().forward_begins(module, args)

    def around(self, call: Call) -> Any:
        self.operations += 1
        written = list(arguments_written(call.op, call.args, call.kwargs))
        is_overwritten = call.name in _FILLS or any(name == "out" for name, _ in written)
        before = {} if is_overwritten else {id(one): one.clone() for _, one in written if one.is_floating_point()}
        try:
            out = call()
        except Exception as error:
            self.failed = call, error
            raise
        if not (call.op.is_view or call.name.startswith(("empty", "new_empty"))):
            made = [*tensors_in(out), *call.written()]
            for one in made if self._widened else ():  # its memory may be that of an earlier cast
                self._widened.pop(address(one), None)
            if call.name == "cast" and made[0].element_size() > (read := call.inputs()[0]).element_size():
                self._widened[address(made[0])] = read.dtype
            sizes, origin = {tensor: largest(tensor) for tensor in made}, None
            if bad := [tensor for tensor, size in sizes.items() if not math.isfinite(size)]:
                origin = self._origin(call, before, made, bad)
                self._origins.update((address(tensor), origin) for tensor in bad)
            self.on_results(call, sizes, origin)
        return out

    def on_results(self, call: Call, sizes: dict[torch.Tensor, float], origin: Culprit | None) -> None:
        """An operator has made tensors with these largest values, and those that are not finite come from the origin."""

    def _origin(self, call: Call, before: dict[int, torch.Tensor], made: Any, bad: Any) -> Culprit | None:
        skipped = {id(tensor) for tensor in call.written()} - before.keys()
        read = [tensor for tensor in call.inputs() if id(tensor) not in skipped]
        bad_inputs = [(tensor, was) for tensor in read if not is_finite(was := before.get(id(tensor), tensor))]
        origins = [self._origin_of(call, tensor, was) for tensor, was in bad_inputs]
        if (known := next((origin for origin in origins if origin is not None), None)) is not None:
            return known
        given = call.args, call.kwargs
        constants = [one for one in tree_leaves(given) if isinstance(one, float) and not math.isfinite(one)]
        has_nan = any(bool(readable(one).isnan().any()) for one in bad)
        is_nan_new = has_nan and not any(map(math.isnan, constants))
        if (bad_inputs or constants) and not is_nan_new:
            text = "a constant that is not finite, which this line writes or uses, reaches the loss"
            self._mask = self._mask or self._new(call, MASK, text, None, bad[0])
            return None
        inputs = tree_map(lambda one: before.get(id(one), one) if isinstance(one, torch.Tensor) else one, given)
        return self._new(call, *explain(call, inputs, made), bad[0])

    def _origin_of(self, call: Call, tensor: torch.Tensor, was: torch.Tensor) -> Culprit | None:
        """Of an input that is not finite. One that no operator has made came from outside."""
        key = address(tensor)
        if key not in self._origins:
            text = f"a tensor of shape {tuple(was.shape)}, {was.dtype}, that this line uses, has {_what(was)}"
            self._origins[key] = None if _is_mask(was) else self._new(call, GIVEN, text, None, was)
        return self._origins[key]

    def _new(self, call: Call, kind: str, evidence: str, needed: float | None, bad: torch.Tensor) -> Culprit:
        written = arguments_written(call.op, call.args, call.kwargs)
        is_of_no_row = call.backward or any(one is bad for name, one in written if name in STATISTICS)
        rows = "" if is_of_no_row else _rows(bad, self._batch)
        order = next(self._numbers)
        was = next((found for one in call.inputs() if (found := self._widened.get(address(one)))), None)
        return Culprit(
            kind, evidence, **call.where(), dtype=bad.dtype, order=order, needed=needed, rows=rows, cast_from=was
        )

    def forget(self) -> None:
        """An iteration is over: its graph and its tensors are gone."""
        self._origins.clear()
        self._widened.clear()
        self._mask = None
        self._forward.clear()

    # At the end

    def statistics(self) -> list[torch.Tensor]:
        """Those that were written."""
        return [one for one in super().statistics() if not is_lazy(one) and address(one) in self._origins]

    def on_loss(self, tensors: list[torch.Tensor]) -> None:
        """Loss or gradients: the earliest origin of those that are not finite."""
        bad = [tensor for tensor in tensors if not is_finite(tensor)]
        if not bad or self.culprit is not None:
            return
        origins = [origin for tensor in bad if (origin := self._origins.get(address(tensor))) is not None]
        unknown = Culprit(
            DOMAIN, "no operator that can be watched made it", bad[0].dtype, function="unknown", op="unknown"
        )
        self.culprit = min(origins, key=lambda origin: origin.order, default=self._mask) or unknown


def _rows(bad: torch.Tensor, batch: int) -> str:
    """Rows of the batch that are not finite; nothing where all are."""
    values = readable(bad)
    if batch < 2 or not values.dim() or len(values) % batch or bad.layout is not torch.strided or bad.is_nested:
        return ""
    rows = (~values.isfinite()).reshape(batch, -1).any(1).nonzero().flatten().tolist()
    if len(rows) in (0, batch):
        return ""
    return f"row{'s' * (len(rows) > 1)} {', '.join(map(str, rows[:4]))}{', ...' * (len(rows) > 4)} of {batch} (the first is 0)"


def _is_mask(tensor: torch.Tensor) -> bool:
    """Whether all that is not finite is -inf."""
    values = readable(tensor)
    return bool((values.isfinite() | values.isneginf()).all())


def _what(tensor: torch.Tensor) -> str:
    values = readable(tensor)
    nan, inf = int(values.isnan().sum()), int(values.isinf().sum())
    found = [f"{count} {name}" for count, name in ((nan, "NaN"), (inf, "inf")) if count]
    return f"{' and '.join(found)} among {values.numel()} elements"


def _moments(optimizer: Any, name_of: Callable[[torch.Tensor], str]) -> Iterator[tuple[str, torch.Tensor]]:
    for param, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                yield f"{name!r} of the optimizer for {name_of(param)}", value
