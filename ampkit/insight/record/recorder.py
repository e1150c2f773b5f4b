"""`recording`: a dispatch mode that sums up, for each line of a script, the dtypes and the cost of its functions.

A `Watch` gives the line and function of each operator. Operators of a function at a line, in modules whose paths differ only in
numbers, are a `Group`; each precision in it is a `CallRow`. Casts belong to the function that needs them.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from time import thread_time
from typing import Any

import torch
from torch import nn

from ...casting.state import CastCaches
from ...devices import computes_slowly_in
from ...errors import ConfigurationError
from ...events import Listener, forwards, is_stepping, steps
from ...patching import PatchSet
from ...registry import current_session, live_sessions
from ..watching import COMPLEX, FLOATING, Call, Watch, tensors_in
from ..words import pattern, short
from .advice import advise
from .arithmetic import product_of, tensor_cores
from .data import AMPKIT, BACKWARD, FORWARD, GRAD_SCALER, RECOMPUTED, STEP, CallRow
from .groups import Group, Origin, Origins, rows_of
from .reasons import Argument, Reasons
from .record import Record

_EXPLICIT = frozenset({"to", "float", "half", "bfloat16", "double", "type", "type_as"})
_FLOATING = FLOATING | COMPLEX
_SLOW = "this processor has no instructions for products in {}, which take many times as long as in float32: {}"
_COMPILED = "torch.compile: recorded eagerly; compiled code fuses operators and takes other times"


@functools.cache
def _facts(op: Any) -> tuple[bool, bool, Any]:
    """Return whether an operator makes empty memory, whether it casts, and the formula of its product."""
    name = op._schema.name.partition("::")[2]
    return name.startswith("empty"), name == "_to_copy", product_of(name)


class Iterations(Listener):
    """A counter of iterations: they end with the steps, also skipped ones, of the optimizer that steps first."""

    def __init__(self, on_iteration: Callable[[int], Any]) -> None:
        super().__init__()
        self.begun = 0  # steps of all optimizers
        self.iterations = 0
        self.on_iteration = on_iteration
        self._first: Callable[[], Any] = lambda: None

    def step_begins(self, optimizer: Any) -> None:
        self.begun += 1
        if self._first() is None:
            self._first = weakref.ref(optimizer)
        self.iterations += optimizer is self._first()

    def step_ends(self, optimizer: Any, skipped: bool) -> None:
        if self.begun and optimizer is self._first():  # else the step began before the recording
            self.on_iteration(self.iterations)


class Recorder(Iterations, Watch):
    """A `Watch` that records what runs inside ``with``. Afterwards `finish` returns the `Record`."""

    looks_at_views = False
    sources = (forwards, steps)

    def __init__(self, on_iteration: Callable[[int], Any]) -> None:
        super().__init__(on_iteration)
        self._groups: dict[Any, Group] = {}
        self._origins = Origins()
        self.reasons = Reasons()
        self._roots: list[nn.Module] = []
        self._casts: dict[Origin, tuple[int, int]] = {}  # of weights: number of casts, and bytes of each
        self._promoted: dict[CallRow, str] = {}  # for rows with a promoted dtype: where it was promoted
        self._notes: list[str] = []
        self._last = 0  # number of the newest graph node when the last iteration ended
        self._accelerator: str | None = None
        self._timed: list[tuple[CallRow, Any, Any]] = []

    # The group of a call

    def on_module(self, module: nn.Module) -> None:
        """Set the paths of a model's modules; all models but the first have their class as prefix."""
        if module in self._roots:
            return
        has_params = next(module.parameters(), None) is not None
        prefix = type(module).__name__ if self._roots or not has_params else ""
        if has_params:
            self._roots.append(module)
        for path, part in module.named_modules():
            if self.modules.setdefault(part, path) == path and prefix:
                self.modules[part] = f"{prefix}.{path}".rstrip(".")
            if "_orig_mod" in part._modules and _COMPILED not in self._notes:
                self._notes.append(_COMPILED)
        for name, param in module.named_parameters():
            self._origins.of(param).name = f"{prefix}.{name}" if prefix else name

    def around(self, call: Call) -> Any:
        if call.op.is_view:
            return call()
        is_empty, is_cast, formula = _facts(call.op)
        begin = self._event()
        start = thread_time()  # CPU time of this thread: other jobs do not disturb it
        out = call()
        seconds = thread_time() - start
        read, made = call.inputs(), tensors_in(out)
        if not read and (not made or is_empty):  # marks of the profiler, and empty memory
            return out
        group = self._group_of(call)
        if is_cast and len(read) == len(made) == 1 and len({read[0].dtype, made[0].dtype} & _FLOATING) == 2:
            self._note_cast(group, read[0], made[0])
            row = group.waiting
        else:
            row = self._note_call(group, call, formula, read, made)
        group.paths[row].add(group.module)
        if begin is None:
            row.seconds += seconds
            if made and made[0].device.type not in ("cpu", "meta"):
                self._accelerator = made[0].device.type
        else:
            self._timed.append((row, begin, self._event()))
        return out

    def _event(self) -> Any:
        if self._accelerator is None:
            return None
        event = torch.Event(self._accelerator, enable_timing=True)
        event.record()
        return event

    def _group_of(self, call: Call) -> Group:
        phase = RECOMPUTED if call.recomputed else BACKWARD if call.node is not None else FORWARD
        function, module = call.function, call.module
        if is_stepping():
            phase, function, module = STEP, "step", ""
        elif phase is FORWARD and function.startswith("torch.amp.GradScaler."):
            function = GRAD_SCALER
        elif phase is FORWARD and function == call.name and {"ampkit", "casting"} & set(call.passed):
            function = AMPKIT
        key = call.site, function, pattern(module), phase
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group(call.site, function, phase)
        group.module = module
        return group

    # Casts

    def _note_cast(self, group: Group, read: torch.Tensor, made: torch.Tensor) -> None:
        source, result = self._origins.of(read), self._origins.of(made)
        group.waiting.casts += 1
        group.waiting.bytes_cast += made.nbytes
        if group.function.rpartition(".")[2] not in _EXPLICIT and group.phase is not BACKWARD:
            result.source, result.group = read.dtype, group
            result.weight = source if source.name is not None else None
            if result.weight is not None:
                number, _ = self._casts.get(source, (0, 0))
                self._casts[source] = number + 1, made.nbytes
        elif group.phase is not BACKWARD:
            result.asked = f".{group.function.rpartition('.')[2]}() at {group.site}"
        result.row = source.row

    # Calls

    def _note_call(
        self, group: Group, call: Call, formula: Any, read: list[torch.Tensor], made: list[torch.Tensor]
    ) -> CallRow:
        floating = [tensor for tensor in read if tensor.dtype in _FLOATING]
        dtypes_in = {self._before_cast(self._origins.of(tensor), tensor, group) for tensor in floating}
        out = made[0].dtype if made and made[0].dtype in _FLOATING else None
        product = formula(call.args, made[0]) if formula is not None and made else None
        is_told = product is not None or isinstance(call.kwargs.get("dtype"), torch.dtype)
        dtype = out if is_told else _computes_in(floating) or out
        is_read = group.function.rpartition(".")[2] == "item"  # by the host, of an integer too
        if dtype is None and group.last is None and not is_read:  # indices and counts, before the floating-point work
            return group.waiting
        verdict = tensor_cores(dtype, product.sizes) if product is not None else ""
        precision = frozenset(dtypes_in), out, dtype, verdict
        if group.function in (AMPKIT, GRAD_SCALER):  # a single row per line
            precision = next(iter(group.rows), precision)
        is_lead = (dtype is not None or is_read) and self._is_lead(group, call, product is not None)
        row = group.rows.get(precision) if is_lead or product is not None else group.last
        if row is None:
            row = group.rows[precision] = group.new_row(precision)
            if dtype is not None:
                self._explain(row, group, call, floating)
        group.last = row
        group.hand_over(row)
        row.calls += is_lead
        if product is not None:
            row.flops += product.flops
        for tensor in made:
            origin = self._origins.of(tensor)
            origin.row, origin.source, origin.asked = row, None, None
        return row

    @staticmethod
    def _before_cast(origin: Origin, tensor: torch.Tensor, group: Group) -> torch.dtype:
        """Return the dtype of an argument as it was passed: before a cast that was made for this function."""
        is_cast = origin.source is not None and group.phase is not BACKWARD
        is_for_this = is_cast and (origin.weight is not None or origin.group is group)
        return origin.source if is_for_this else tensor.dtype

    def _is_lead(self, group: Group, call: Call, is_product: bool) -> bool:
        """Whether a call of the function begins here: with its first product, or else its first operator.

        In the backward pass a call begins with an autograd node, in an optimizer with a step.
        """
        if group.phase is STEP:
            name, number = "step", self.begun
        else:
            name, number = (call.node, call.number) if group.phase is BACKWARD else (call.op, -1)
        if group.lead is None or (is_product and not group.has_product and group.phase is not BACKWARD):
            group.lead = name
        group.has_product |= is_product
        if name != group.lead or (number >= 0 and number == group.number):
            return False
        group.number = number
        return True

    def _explain(self, row: CallRow, group: Group, call: Call, read: Sequence[torch.Tensor]) -> None:
        """Set the row's reason. Promotions are stored, for rows that compute with the promoted results."""
        name = short(row.dtype)
        row.reason = self._why(row, group, call, read)
        if "promoted by" in row.reason:
            self._promoted[row] = f"promoted at {row.site} by {row.reason.partition(' by ')[2]}"
        elif row.reason.endswith("as given"):
            rows = (self._origins.of(tensor).row for tensor in read if tensor.dtype is row.dtype)
            if origin := next((promotion for x in rows if (promotion := self._promoted.get(x))), None):
                self._promoted[row] = origin
                row.reason = f"{name}: as given, {origin}"
        if row.tensor_cores == "no: float32":
            row.tensor_cores = f"no: float32, {self._promoted.get(row) or row.reason.partition(': ')[2]}"

    def _why(self, row: CallRow, group: Group, call: Call, read: Sequence[torch.Tensor]) -> str:
        name, rows = short(row.dtype), list(group.rows.values())
        if group.function in (AMPKIT, GRAD_SCALER):
            return f"{group.function}'s own work on gradients and loss scale"
        if group.phase is BACKWARD:
            return f"{name}: as its forward"
        if rows[0] is not row and all(self._origins.of(tensor).row in rows for tensor in read):  # an inner operator
            return rows[0].reason if rows[0].dtype is row.dtype else f"{name}: cast inside of it"
        if group.phase is STEP:
            return f"{name}: the optimizer's own"
        arguments = [self._argument(tensor, group) for tensor in read if tensor.dim() or len(read) == 1]
        running = self._running.get(threading.get_ident(), [])
        return f"{name}: {self.reasons.why(call, row.dtype, arguments, running)}"

    def _argument(self, tensor: torch.Tensor, group: Group) -> Argument:
        origin = self._origins.of(tensor)
        weight = origin.weight.name if origin.weight else origin.name
        name = f"parameter {weight!r}" if weight else f"the result of {origin.row.site}" if origin.row else ""
        return Argument(self._before_cast(origin, tensor, group), origin.asked or name)

    # The end of an iteration and of the recording

    def step_ends(self, optimizer: Any, skipped: bool) -> None:
        if optimizer is self._first():
            # Graphs of the previous iteration are gone; a graph of this one may last into the next, as in GANs.
            last, self._last = self._last, max(self._forward, default=0)
            self._forward = {number: call for number, call in self._forward.items() if number > last}
        super().step_ends(optimizer, skipped)

    def finish(self) -> Record:
        for row, begin, end in self._timed:
            end.synchronize()
            row.seconds += begin.elapsed_time(end) / 1e3
        iterations = max(1, self.iterations)
        record = Record(
            calls=sorted(rows_of(self._groups.values()), key=lambda row: -row.seconds),
            casts=[(str(origin.name), number / iterations, size) for origin, (number, size) in self._casts.items()],
            iterations=iterations,
            about=_about(),
            notes=self._notes,
        )
        record.advice = advise(record)
        if record.lower_precision is not None and computes_slowly_in(record.lower_precision):
            session = current_session()
            casts = session is not None and session.plan.casts_calls
            cure = 'opt_level="O0"' if casts else "leave out its .half(), .bfloat16() or torch.autocast"
            record.notes.append(_SLOW.format(short(record.lower_precision), cure))
        return record


_active = threading.Lock()  # only one recording at a time in a process


def recording() -> AbstractContextManager[Record]:
    """Record the dtypes in which the block computes, why, and the cost: one or more iterations of any script.

    >>> with ampkit.recording() as record:
    ...     for batch, target in batches[:3]:
    ...         train_step(batch, target)
    >>> print(record)  # a table; record.to_html("record.html") writes a page

    It works at every level, and for a plain torch or torch.autocast script without `initialize`. The `Record` is filled when the
    block ends, also by an exception, which goes on. Iterations end with the steps of the optimizer that steps first; leave the
    first iteration out, in which torch allocates. Recorded is what this thread runs, with its backward passes; compiled code runs
    eagerly.

    Costs up to a quarter of an iteration's time. Raises `ConfigurationError` inside of another recording, of any thread.
    """
    return recorded(lambda iteration: None)


@contextmanager
def recorded(on_iteration: Callable[[int], Any]) -> Iterator[Record]:
    """Record as `recording` does, and call ``on_iteration`` with the number of each iteration when it ends."""
    if not _active.acquire(blocking=False):
        raise ConfigurationError(
            "recording() was called while another recording runs, in this thread or another. One sees every operator of its block: "
            "end it first, or use its record."
        )
    record = Record()
    with PatchSet() as patches:
        patches.callback(_active.release)
        recorder = Recorder(on_iteration)
        patches.callback(lambda: vars(record).update(vars(recorder.finish())))
        patches.set(CastCaches, "watchers", CastCaches.watchers + 1)
        recorder.reasons.watch(patches)
        for session in live_sessions:
            for model in session.models:
                recorder.on_module(model)
        patches.enter_context(recorder)
        yield record


def _computes_in(tensors: list[torch.Tensor]) -> torch.dtype | None:
    """Return the dtype that torch promotes these tensors to; 0-dim tensors count only if there are no others."""
    dtypes = {tensor.dtype for tensor in tensors if tensor.dim()} or {tensor.dtype for tensor in tensors}
    return functools.reduce(torch.promote_types, dtypes) if dtypes else None


def _about() -> str:
    session = current_session()
    level = "no session of ampkit"
    if session is not None and session.plan.enabled:
        level = f"{session.plan.opt_level}: {session.plan.in_words()}"
    return f"{level}; torch {torch.__version__}"
