"""`recording`: a dispatch mode that sums up, for each line of a script, the dtypes and the cost of its functions.

A `Watch` gives the line and function of each operator. Operators of a function at a line, in modules whose paths differ only in
numbers, are a `_Group`; each precision in it is a `CallRow`. Casts belong to the function that needs them.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import thread_time
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ...casting.state import CastCaches
from ...devices import computes_slowly_in
from ...errors import ConfigurationError
from ...events import Listener, forwards, is_stepping, steps
from ...patching import PatchSet
from ...registry import current_session, live_sessions
from ...sharding import local
from ..sites import Site
from ..watching import COMPLEX, FLOATING, Call, Watch, tensors_in
from ..words import collapsed, pattern, short
from .advice import advise
from .arithmetic import product_of, tensor_cores
from .reasons import Argument, Regions, reason_of
from .record import AMPKIT, BACKWARD, FORWARD, GRAD_SCALER, RECOMPUTED, STEP, SUMS, CallRow, Record, add

_EXPLICIT = frozenset({"to", "float", "half", "bfloat16", "double", "type", "type_as"})
_FLOATING = FLOATING | COMPLEX
_SLOW = "this processor has no instructions for products in {}, which take many times as long as in float32: {}"
_COMPILED = "torch.compile: recorded eagerly; compiled code fuses operators and takes other times"


#: The key of a row in a group: dtypes of arguments, of the result and of the computation, and the verdict on Tensor Cores.
_Precision = tuple[frozenset[torch.dtype], torch.dtype | None, torch.dtype | None, str]


@dataclass(eq=False)
class _Group:
    """A function at a line, in one phase, in modules of one kind. ``waiting`` has the casts, and their time, for the next call."""

    site: Site | None
    function: str
    phase: str
    module: str = ""  # of the latest call
    #: Paths of modules, by row.
    paths: defaultdict[Any, set[str]] = field(default_factory=lambda: defaultdict(set))
    rows: dict[_Precision, CallRow] = field(default_factory=dict)
    last: CallRow | None = None
    lead: Any = None  # the operator (in backward the autograd node) that counts calls
    number: int = -1  # of the last such node
    has_product: bool = False

    def __post_init__(self) -> None:
        self.waiting = self.new_row((frozenset(), None, None, ""))

    def hand_over(self, row: CallRow) -> None:
        if self.waiting.seconds or self.waiting.casts:
            self.waiting.cast_seconds = self.waiting.seconds
            add(row, self.waiting)
            vars(self.waiting).update(dict.fromkeys(SUMS, 0))

    def new_row(self, precision: _Precision) -> CallRow:
        site, (dtypes_in, out, dtype, tensor_cores) = self.site, precision
        return CallRow(
            function=self.function.rpartition(".")[2].strip("_") or self.function,
            site=str(site or "(no line)"),
            source=site.source if site else "",
            file=site.file if site else "",
            line=site.line if site else 0,
            module="",
            phase=self.phase,
            dtypes_in=tuple(sorted(dtypes_in, key=lambda dtype_in: (-dtype_in.itemsize, str(dtype_in)))),
            dtypes_out=(out,) if out is not None else (),
            dtype=dtype,
            reason="no floating-point numbers",
            tensor_cores=tensor_cores,
        )


class _Origin:
    """The origin of the tensor that was made last in a piece of memory.

    ``name`` is that of a parameter. ``row`` is the `CallRow` that made it. A cast has the dtype before the cast (``source``), the
    origin of the cast ``weight`` (None for an activation), and the ``group`` of the call that needed it. ``asked`` describes a cast
    that the script itself makes.
    """

    __slots__ = ("asked", "group", "name", "row", "source", "weight")

    def __init__(self) -> None:
        self.name = self.row = self.source = self.weight = self.group = self.asked = None


@functools.cache
def _facts(op: Any) -> tuple[bool, bool, Any]:
    """Return whether an operator makes empty memory, whether it casts, and the formula of its product."""
    name = op._schema.name.partition("::")[2]
    return name.startswith("empty"), name == "_to_copy", product_of(name)


class Iterations(Listener):
    """A counter of iterations: they end with the steps, also skipped ones, of the optimizer that steps first."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = 0  # steps of all optimizers
        self.iterations = 0
        self._first: Callable[[], Any] = lambda: None

    def iteration_ends(self) -> None: ...

    def step_begins(self, optimizer: Any) -> None:
        self.begun += 1
        if self._first() is None:
            self._first = weakref.ref(optimizer)
        self.iterations += optimizer is self._first()

    def step_ends(self, optimizer: Any, skipped: bool) -> None:
        if optimizer is self._first():
            self.iteration_ends()


class Recorder(Iterations, Watch):
    """A `Watch` that records what runs inside ``with``. `finish` fills the ``record``."""

    looks_at_views = False
    sources = (forwards, steps)

    def __init__(self) -> None:
        super().__init__()
        self.record = Record()
        self._groups: dict[Any, _Group] = {}
        self._origins = WeakIdKeyDictionary()  # of the tensors that were made last, by their memory
        self.regions = Regions()
        self._roots: list[nn.Module] = []
        self._casts: dict[_Origin, tuple[int, int]] = {}  # of weights: number of casts, and bytes of each
        self._promoted: dict[CallRow, str] = {}  # for rows with a promoted dtype: where it was promoted
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
            if "_orig_mod" in part._modules and _COMPILED not in self.record.notes:
                self.record.notes.append(_COMPILED)
        for name, param in module.named_parameters():
            self._origin(param).name = f"{prefix}.{name}" if prefix else name

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

    def _group_of(self, call: Call) -> _Group:
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
            group = self._groups[key] = _Group(call.site, function, phase)
        group.module = module
        return group

    # Casts

    def _origin(self, tensor: torch.Tensor) -> _Origin:
        try:
            memory = local(tensor).untyped_storage()
        except (NotImplementedError, RuntimeError, ValueError):  # a sparse, wrapping or lazy tensor
            return _Origin()
        origin: _Origin | None = self._origins.get(memory)
        if origin is None:
            origin = self._origins[memory] = _Origin()
        return origin

    def _note_cast(self, group: _Group, read: torch.Tensor, made: torch.Tensor) -> None:
        source, result = self._origin(read), self._origin(made)
        group.waiting.casts += 1
        group.waiting.bytes_cast += made.nbytes
        function = group.function.rpartition(".")[2]
        if function in _EXPLICIT and group.phase is not BACKWARD:
            result.asked = f".{function}() at {group.site}"
        elif group.phase is not BACKWARD:
            result.source, result.group = read.dtype, group
            result.weight = source if source.name is not None else None
            if result.weight is not None:
                self._casts[source] = self._casts.get(source, (0, 0))[0] + 1, made.nbytes
        result.row = source.row

    # Calls

    def _note_call(
        self, group: _Group, call: Call, formula: Any, read: list[torch.Tensor], made: list[torch.Tensor]
    ) -> CallRow:
        floating = [tensor for tensor in read if tensor.dtype in _FLOATING]
        dtypes_in = {self._before_cast(self._origin(tensor), tensor, group) for tensor in floating}
        out = made[0].dtype if made and made[0].dtype in _FLOATING else None
        product = formula(call.args, made[0]) if formula is not None and made else None
        is_told = product is not None or isinstance(call.kwargs.get("dtype"), torch.dtype)
        # 0-dim tensors count only if there are no others.
        promoted = {x.dtype for x in floating if x.dim()} or {x.dtype for x in floating}
        dtype = out if is_told or not promoted else functools.reduce(torch.promote_types, promoted)
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
            origin = self._origin(tensor)
            origin.row, origin.source, origin.asked = row, None, None
        return row

    @staticmethod
    def _before_cast(origin: _Origin, tensor: torch.Tensor, group: _Group) -> torch.dtype:
        """Return the dtype of an argument as it was passed: before a cast that was made for this function."""
        is_cast = origin.source is not None and group.phase is not BACKWARD
        is_for_this = is_cast and (origin.weight is not None or origin.group is group)
        return origin.source if is_for_this else tensor.dtype

    def _is_lead(self, group: _Group, call: Call, is_product: bool) -> bool:
        """Whether a call begins: with the first product, or else operator; in backward with a node, in an optimizer with a step."""
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

    def _explain(self, row: CallRow, group: _Group, call: Call, read: Sequence[torch.Tensor]) -> None:
        """Set the row's reason. Promotions are stored, for rows that compute with the promoted results."""
        name = short(row.dtype)
        row.reason = self._why(row, group, call, read)
        if "promoted by" in row.reason:
            self._promoted[row] = f"promoted at {row.site} by {row.reason.partition(' by ')[2]}"
        elif row.reason.endswith("as given"):
            rows = (self._origin(tensor).row for tensor in read if tensor.dtype is row.dtype)
            if origin := next((promotion for x in rows if (promotion := self._promoted.get(x))), None):
                self._promoted[row] = origin
                row.reason = f"{name}: as given, {origin}"
        if row.tensor_cores == "no: float32":
            row.tensor_cores = f"no: float32, {self._promoted.get(row) or row.reason.partition(': ')[2]}"

    def _why(self, row: CallRow, group: _Group, call: Call, read: Sequence[torch.Tensor]) -> str:
        name, rows = short(row.dtype), list(group.rows.values())
        if group.function in (AMPKIT, GRAD_SCALER):
            return f"{group.function}'s own work on gradients and loss scale"
        if group.phase is BACKWARD:
            return f"{name}: as its forward"
        if rows[0] is not row and all(self._origin(tensor).row in rows for tensor in read):  # an inner operator
            return rows[0].reason if rows[0].dtype is row.dtype else f"{name}: cast inside of it"
        if group.phase is STEP:
            return f"{name}: the optimizer's own"
        arguments = [self._argument(tensor, group) for tensor in read if tensor.dim() or len(read) == 1]
        running = self._running[threading.get_ident()]
        return f"{name}: {reason_of(call, row.dtype, arguments, running, self.regions.innermost)}"

    def _argument(self, tensor: torch.Tensor, group: _Group) -> Argument:
        origin = self._origin(tensor)
        weight = origin.weight.name if origin.weight else origin.name
        name = f"parameter {weight!r}" if weight else f"the result of {origin.row.site}" if origin.row else ""
        return Argument(self._before_cast(origin, tensor, group), origin.asked or name)

    # The end of an iteration and of the recording

    def iteration_ends(self) -> None:
        # Graphs of the previous iteration are gone; a graph of this one may last into the next, as in GANs.
        last, self._last = self._last, max(self._forward, default=0)
        self._forward = {number: call for number, call in self._forward.items() if number > last}

    def finish(self) -> None:
        for row, begin, end in self._timed:
            end.synchronize()
            row.seconds += begin.elapsed_time(end) / 1e3
        record, session = self.record, current_session()
        is_enabled = session is not None and session.plan.enabled
        level = f"{session.plan.opt_level}: {session.plan.in_words()}" if is_enabled else "no session of ampkit"
        record.about = f"{level}; torch {torch.__version__}"
        record.iterations = n = max(1, self.iterations)
        record.calls = sorted(_rows_of(self._groups.values()), key=lambda row: -row.seconds)
        record.casts = [(str(origin.name), number / n, size) for origin, (number, size) in self._casts.items()]
        record.advice = advise(record)
        if record.lower_precision is not None and computes_slowly_in(record.lower_precision):
            casts = session is not None and session.plan.casts_calls
            cure = 'opt_level="O0"' if casts else "leave out its .half(), .bfloat16() or torch.autocast"
            record.notes.append(_SLOW.format(short(record.lower_precision), cure))


_active = threading.Lock()  # only one recording at a time in a process


@contextmanager
def recording() -> Iterator[Record]:
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
    if not _active.acquire(blocking=False):
        raise ConfigurationError(
            "recording() was called while another recording runs, in this thread or another. One sees every operator of its block: "
            "end it first, or use its record."
        )
    with PatchSet() as patches:
        patches.callback(_active.release)
        recorder = Recorder()
        patches.callback(recorder.finish)
        patches.set(CastCaches, "watchers", CastCaches.watchers + 1)
        recorder.regions.watch(patches)
        for session in live_sessions:
            for model in session.models:
                recorder.on_module(model)
        patches.enter_context(recorder)
        yield recorder.record


def _rows_of(groups: Iterable[_Group]) -> Iterator[CallRow]:
    """Yield the rows of all groups; casts that still wait join a row of the same line, or get a row of their own."""
    by_line: defaultdict[Any, list[CallRow]] = defaultdict(list)
    for group in sorted(groups, key=lambda x: x.last is None):
        line_rows = by_line[group.site, group.phase]
        if (row := group.last or next(iter(line_rows), None)) is not None:
            group.hand_over(row)
        else:  # a line that only casts, or computes with integers
            row = group.waiting
            row.calls, row.cast_seconds = row.casts, row.seconds
            row.reason = "a cast of the script's" if row.casts else row.reason
        for merged in _folded(group.rows.values() or [group.waiting]):
            merged.module = collapsed(group.paths[merged])
            line_rows.append(merged)
            yield merged


def _folded(rows: Iterable[CallRow]) -> Iterator[CallRow]:
    """Merge rows without matrix products, such as the copy before a batched product, into the row with the product."""
    rows = list(rows)
    products = [row for row in rows if row.flops]
    for row in products:  # further products of the same calls: a backward has two
        row.calls = row.calls or max(x.calls for x in rows)
    for row in rows:
        same = (x for x in products if x is not row and (x.dtype, x.reason) == (row.dtype, row.reason))
        product = None if row.flops else next(same, None)
        if product is None:
            yield row
        else:
            calls = product.calls
            add(product, row)
            product.calls = calls
