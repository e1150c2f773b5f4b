"""The lower-precision weights of a model and the float32 values behind them.

Every submodule of a cast model carries a `WeightRecord` in its ``__dict__``, by which the float32 value behind each of its
parameters and buffers is found. Where an optimizer owns the parameter that value is the master weight. Parameters are
found by themselves and not by name, since pruning and parametrizations move them; buffers by name, since modules put other
tensors in their places. Because the record sits on the submodule, ``state_dict``, ``load_state_dict``, deepcopy and
pickle of any part of the model find it without knowing of a session.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from .. import kernels
from ..dtypes import CASTABLE
from ..errors import ConfigurationError
from ..logs import logger
from .copies import RECORD_KEY, hand_out_plain_copies, need_no_plain_copies, remove_hooks
from .keep_fp32 import ACTIVATION_KEY, Kept
from .stalling import WrittenThroughData, is_capturing, warn_of_average, warn_of_loaded_average


@dataclass
class Float32Value:
    """The float32 value of one lower-precision tensor, and the state in which the two last agreed.

    ``value`` is None where nothing is kept (O3's trained weights, ``keep_originals=False``): the lower-precision tensor is
    then the value, or, where its master is split, with the ``rest`` of its bits. ``before`` is that tensor as it was when the
    two last agreed, as long as no step was taken: until then DDP and others write the same values again. Writes to a weight with
    a master are told by its version counter; ``counted`` is False for others, whose values are compared: torch's batch norm
    updates running statistics without counting, a momentum encoder is written to through ``.data``. ``gradient`` is the float32
    gradient that stood in the tensor when it was cast, until the master takes it. ``put_aside`` is the master that other weights
    were written over, until the next step: an evaluation with averaged weights puts its own back, in lower precision.
    ``lender`` has the slot of a split master whose value a script may still hold, and write to.
    """

    value: torch.Tensor | None
    counted: bool = True
    value_version: int = 0
    lower_version: int = 0
    lower: torch.Tensor | None = None
    lower_ptr: int = 0
    lower_size: int = 0
    gradient: torch.Tensor | None = None
    rest: torch.Tensor | None = None
    before: torch.Tensor | None = None
    loaded: torch.Tensor | None = None
    put_aside: torch.Tensor | None = None
    writes: int = 0
    lender: Callable[[], Any] | None = None
    _in_copies: Callable[[], nn.Parameter | None] = lambda: None

    def agree(self, lower: torch.Tensor) -> None:
        """Note that both hold the same value now."""
        self.put_aside = None
        self.value_version = self.value._version if self.value is not None else 0
        self.lower_version = lower._version
        self.lower = lower
        self.lower_size = lower.numel()
        if self.lower_ptr != (address := lower.data_ptr()):
            self.lower_ptr = address
            self.note_addresses()

    def note_addresses(self) -> None:
        """Have `note_uncounted_write` find this by its two tensors."""
        for tensor in (self.lower, self.value):
            if tensor is not None:
                _at_address[tensor.data_ptr()] = self

    def put(self, lower: torch.Tensor, value: torch.Tensor) -> None:
        """Take ``value``, which rounds to what ``lower`` holds."""
        if self.rest is not None:
            weights, rest = kernels.split(value, self.rest.dtype)
            lower.data.copy_(weights)
            self.put_rest(lower, rest)
        else:
            if self.value.data_ptr() != value.data_ptr():  # where it is kept on the host
                self.value.copy_(value)
            self.agree(lower)

    def agrees_with(self, lower: torch.Tensor) -> bool:
        """Whether neither was written to since they agreed, as far as torch counts."""
        return self.value is not None and self.value._version == self.value_version and self.is_unwritten(lower)

    def is_unwritten(self, lower: torch.Tensor) -> bool:
        """Whether neither a counted write nor ``p.data = ...`` has changed ``lower`` since they agreed."""
        return (
            self.lower_version == lower._version
            and self.lower_ptr == lower.data_ptr()
            and self.lower_size == lower.numel()  # ``p.data = p.data[:n]`` stays where it was
        )

    def synchronize(self, lower: torch.Tensor, for_training: bool = False) -> None:
        """Take over what was written to ``lower``, or the tensor that was put in its place, since they agreed.

        What was there before may come back (see ``put_aside``), but not where the model trains on with what was written.
        """
        if self.rest is not None:
            if self.lender is not None and (slot := self.lender()) is not None:
                slot.master.settle(slot)
            self._follow(lower)
            return
        if self.value is not None and self.value.shape != lower.shape:
            self.take_over(lower)
        if self.value is None or self.value._version != self.value_version:
            return  # What was written to the value is newer, and reaches the model before its next forward.
        if not (self.counted and self.lower is lower and self.is_unwritten(lower)):
            self.take_over(lower, for_training)

    @torch.no_grad()
    def take_over(self, lower: torch.Tensor, for_training: bool = False) -> None:
        """Have the value be what ``lower`` holds, where that is not its rounding anyway."""
        aside = None
        if self.value.shape != lower.shape:  # ``p.data = ...``, as where an embedding gets more rows
            self.value.grad = None
            put_in_place(self.value, lower.detach().to(self.value.device, torch.float32))
        else:
            local = self.value.to(lower.device)
            same = local.to(lower.dtype) == lower
            if self.counted or not same.all():
                fits = self.put_aside is not None and self.put_aside.shape == lower.shape
                earlier = self.put_aside.to(lower.device) if fits else local
                is_back = earlier.to(lower.dtype) == lower
                written = torch.where(is_back, earlier, lower.float())
                if self.counted and not for_training and not is_capturing(lower):
                    # It stays aside while one average follows another, until it is back.
                    aside = self.put_aside if same.all() else (None if is_back.all() else earlier.clone())
                # What is back as a whole is back to the last digit, also where something else had rounded to the same.
                self.value.copy_(torch.where(same & ~is_back.all(), local, written))
        self.agree(lower)
        self.put_aside = aside

    @torch.no_grad()
    def take_float32(self, lower: torch.Tensor, precision: torch.dtype, for_training: bool) -> None:
        """After ``p.data = float32 values``: the value is these, and ``lower`` their rounding."""
        given = lower.detach()
        lower.data = given.to(precision)
        if self.rest is not None:
            weights, rest = kernels.split(given, self.rest.dtype)
            lower.data.copy_(weights)
            self.put_rest(lower, rest)
        elif self.value is None or self.value.shape != given.shape:
            self.synchronize(lower, for_training)
        else:
            aside = self.value.clone() if self.put_aside is None else self.put_aside
            self.value.copy_(given)
            self.agree(lower)
            self.put_aside = aside if self.counted and not for_training else None

    def is_float32_of_itself(self, lower: torch.Tensor, precision: torch.dtype) -> bool:
        """Whether a weight that is float32 now holds what it held in lower precision, as after ``model.float()``."""
        rounded = lower.detach().to(precision)
        if not torch.equal(rounded.float(), lower.detach()):
            return False
        if self.value is None or self.value._version != self.value_version:
            return True
        return torch.equal(self.value.detach().to(lower.device, precision), rounded)

    def split(self, lower: torch.Tensor, rest_dtype: torch.dtype) -> None:
        """Keep the value as ``lower`` and the rest of its bits from now on."""
        weights, rest = kernels.split(self.current(lower), rest_dtype)
        lower.data.copy_(weights)
        self.value, self.counted, self.before = None, True, lower
        self.put_rest(lower, rest)

    def put_rest(self, lower: torch.Tensor, rest: torch.Tensor) -> None:
        """Take this as what belongs to ``lower`` as it is now."""
        self.rest = rest
        if self.before is not None:
            self.before = lower.detach().clone()
        self.agree(lower)

    @torch.no_grad()
    def _follow(self, lower: torch.Tensor) -> None:
        """Drop the rest of what was written over, as far as torch counts: nobody knows which elements that was.

        Other storage at the same version is the same weight elsewhere (``model.to(device)``, another memory format), or was put
        there through ``.data``. Its rest stays: the two together round to what is there.
        """
        if self.rest.shape != lower.shape:
            self.rest, self.before = torch.zeros_like(lower, dtype=self.rest.dtype), None
        elif self.rest.device != lower.device:
            self.rest = self.rest.to(lower.device)
            self.before = None if self.before is None else self.before.to(lower.device)
        if lower._version != self.lower_version:
            if self.before is None:
                self.rest.zero_()
                self.writes += 1
            else:
                self.put_rest(lower, torch.where(self.before == lower, self.rest, 0))
        self.agree(lower)

    def current(self, lower: torch.Tensor) -> torch.Tensor:
        """The float32 value on the device of ``lower``: live, not a copy, wherever it lies there."""
        self.synchronize(lower)
        if self.rest is not None and lower.dtype is torch.bfloat16:
            # Not where another optimizer's close(), or ``model.half()``, has put other bits there.
            return kernels.join(lower, self.rest)
        return lower.detach().float() if self.value is None else self.value.detach().to(lower.device)

    def in_copies(self, lower: torch.Tensor) -> torch.Tensor:
        """What is copied and pickled in the place of ``lower``: the master itself, or else one parameter as long as it lives."""
        value = self.current(lower)
        if not isinstance(lower, nn.Parameter):
            return value
        if isinstance(self.value, nn.Parameter):
            return self.value.requires_grad_(lower.requires_grad)
        found = self._in_copies()
        if found is None:
            found = nn.Parameter(value)
            self._in_copies = weakref.ref(found)
        found.data = value
        return found.requires_grad_(lower.requires_grad)


_at_address: weakref.WeakValueDictionary[int, Float32Value] = weakref.WeakValueDictionary()
UNCOUNTED = -1  # the version of what was written to since


def note_uncounted_write(tensor: torch.Tensor) -> None:
    """Have a weight, or a float32 value, that lies where ``tensor`` does be taken as written to. Of others nothing is known."""
    address = tensor.data_ptr() if torch._C._has_storage(tensor) else 0  # sparse ones have none, empty ones lie at 0
    entry = _at_address.get(address)
    if entry is None or not address:
        return
    if entry.lower.data_ptr() == address:
        entry.lower_version = UNCOUNTED
    elif entry.value is not None and entry.value.data_ptr() == address:
        entry.value_version = UNCOUNTED


@dataclass
class WeightRecord:
    """What `cast_weights` did to one module; ``in_float32`` says that it is kept as a whole.

    ``parameters`` (by id), ``kept``, and what was warned of, ``averages`` and weights ``rounded`` again and again, are those of the
    whole model, in one object.
    ``sharded`` says that FSDP2 casts the parameters while it gathers them: only buffers were cast here. ``has_masters`` says that
    what optimizers train has a master.
    """

    lower_precision: torch.dtype
    in_float32: bool = False
    sharded: bool = False
    has_masters: bool = True
    through_data: WrittenThroughData = field(default_factory=WrittenThroughData)
    parameters: dict[int, Float32Value] = field(default_factory=dict)
    averages: set[str] = field(default_factory=set)
    rounded: set[str] = field(default_factory=set)
    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, Float32Value] = field(default_factory=dict)

    @staticmethod
    def all_lower() -> list[torch.Tensor]:
        """The lower-precision tensors of all live sessions."""
        return [entry.lower for entry in _at_address.values() if entry.lower is not None]

    def entry(self, name: str, tensor: torch.Tensor) -> Float32Value:
        """The float32 value of one lower-precision tensor. A new one is its own value: `sync_weights` says which may be new."""
        is_parameter = isinstance(tensor, nn.Parameter)
        found = self.parameters.get(id(tensor)) if is_parameter else self.buffers.get(name)
        if found is None:
            found = Float32Value(None)
            found.agree(tensor)
            if is_parameter:
                self.parameters[id(tensor)] = found
            else:
                self.buffers[name] = found
        return found

    def lower_tensors(self, module: nn.Module) -> Iterator[tuple[str, torch.Tensor, Float32Value]]:
        """(name, lower-precision tensor, its float32 value) for the module's own tensors."""
        for name, tensor in own_tensors(module):
            if tensor.dtype is self.lower_precision and not (self.sharded and name in module._parameters):
                yield name, tensor, self.entry(name, tensor)


def own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The module's own parameters and buffers."""
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            if tensor is not None:
                yield name, tensor


def lower_entries(model: nn.Module) -> Iterator[tuple[torch.Tensor, Float32Value]]:
    """(lower-precision tensor, its float32 value) for everything in the model that was cast."""
    for module in model.modules():
        record = module.__dict__.get(RECORD_KEY)
        for _, tensor, entry in record.lower_tensors(module) if record is not None else ():
            yield tensor, entry


def cast_weights(
    model: nn.Module,
    lower_precision: torch.dtype,
    kept: Kept,
    shared: dict[torch.Tensor, Float32Value],
    sharded: bool = False,
    has_masters: bool = True,
) -> None:
    """Cast everything that is not kept, in place: parameters stay the same objects and their old storage stays theirs.

    ``shared`` carries the float32 values from model to model of one ``initialize``, so that tied weights share one. Of a
    ``sharded`` model only buffers are cast.
    """
    record = WeightRecord(lower_precision, sharded=sharded, has_masters=has_masters)
    for module in model.modules():
        # Scripted modules have no weights here: see validation.py.
        if RECORD_KEY in module.__dict__ or isinstance(module, torch.jit.ScriptModule):
            continue
        # First, so that what fails halfway is undone.
        own = module.__dict__[RECORD_KEY] = replace(record, in_float32=kept.covers(module), buffers={})
        for name, tensor in own_tensors(module):
            if tensor.dtype not in CASTABLE or (
                sharded and name in module._parameters
            ):  # float64 and complex are never cast
                continue
            if tensor.dtype is torch.float32 and kept.keeps(module, name, tensor):
                record.kept[id(tensor)] = tensor
                continue
            if tensor not in shared:
                # .data and not .detach(): the value needs a version counter of its own. float() for weights that came in
                # lower precision.
                entry = Float32Value(tensor.data.float())
                lower = tensor.detach().to(lower_precision)
                entry.gradient = tensor.grad
                lower_gradient = None if entry.gradient is None else entry.gradient.to(lower_precision)
                # All memory is there: what follows does not fail, and is undone as a whole.
                tensor.grad, tensor.data = None, lower
                tensor.grad = lower_gradient
                entry.agree(tensor)
                shared[tensor] = entry
            if name in module._parameters:
                record.parameters[id(tensor)] = shared[tensor]
            else:
                own.buffers[name] = shared[tensor]
        _go_by_record(module)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def _go_by_record(module: nn.Module) -> None:
    """Have the module's ``state_dict``, ``load_state_dict`` and copies go by its record."""
    module.register_state_dict_post_hook(_put_float32_values)
    module.register_load_state_dict_pre_hook(_take_float32_values)
    module.register_load_state_dict_post_hook(_take_rests)
    hand_out_plain_copies(module)


def release_originals(
    entries: dict[torch.Tensor, Float32Value], keep: bool, trains_without_master: set[torch.Tensor]
) -> None:
    """After the masters were made: free the float32 values that nobody needs, and move the rest to the host.

    Weights that an optimizer trains without masters (O3) are their own value. The others (frozen or unowned parameters,
    buffers) keep their originals, on the host where they cost no accelerator memory, unless ``keep`` is False.
    """
    # Copies on the host first: when there is no room for one of them, no value is gone yet.
    settled = {
        tensor: None if tensor in trains_without_master or not keep else entry.value.to("cpu")
        for tensor, entry in entries.items()
        if not isinstance(entry.value, nn.Parameter) and entry.rest is None
    }
    for tensor, entry in entries.items():
        entry.gradient = None
        if tensor in settled:
            entry.value, entry.counted = settled[tensor], False
            entry.agree(tensor)


def sync_weights(model: nn.Module) -> None:
    """Let edits on either side reach the other before the next forward, and refuse what cannot be right.

    In-place writes to tensors of ``state_dict()`` (they are the float32 values) reach the model; counted in-place writes
    to the model's weights, and ``p.data = values`` in either precision, reach the float32 values. Raises
    `ConfigurationError` for weights whose dtype was changed and for parameters that are new since ``initialize``, by name.
    """
    stale: list[tuple[Float32Value, torch.Tensor]] = []
    in_float32: list[tuple[Float32Value, nn.Module, str, torch.Tensor, WeightRecord]] = []
    for_training = torch.is_grad_enabled()
    record_of_model = model.__dict__[RECORD_KEY]
    for module in walk(model):
        record = module.__dict__.get(RECORD_KEY)
        if record is None:
            record = _record_of_new(model, module)
        parameters, lower_precision = record.parameters, record.lower_precision
        for name, tensor in module._parameters.items():
            if tensor is None:
                continue
            entry = parameters.get(id(tensor))
            if entry is None:
                _accept_unknown(model, module, name, tensor, record)
                continue
            if tensor.dtype is torch.float32:
                in_float32.append((entry, module, name, tensor, record))
                continue
            if tensor.dtype is not lower_precision:
                raise _foreign_weight(model, module, name, tensor, record)
            value = entry.value
            if value is None and entry.rest is None:
                continue
            if value is not None and value._version != entry.value_version and value.shape == tensor.shape:
                stale.append((entry, tensor))
            elif (  # not entry.is_unwritten(tensor), without a call for each weight in each forward
                tensor._version != entry.lower_version
                or tensor.data_ptr() != entry.lower_ptr
                or tensor.numel() != entry.lower_size
                or entry.lender is not None
            ):
                if value is not None and not (entry.counted and tensor.requires_grad):
                    warn_of_average(model, record, entry, tensor)
                entry.synchronize(tensor, for_training)
                if value is None:
                    _warn_of_lost_rests(model, record, entry, tensor)
        for name, entry in record.buffers.items():
            tensor = module._buffers.get(name)
            if tensor is None or entry.value is None:
                continue
            if entry.value._version != entry.value_version:
                stale.append((entry, tensor))
            elif entry.lower is tensor and not entry.is_unwritten(tensor):
                if warn_of_average(model, record, entry, tensor):
                    entry.synchronize(tensor)
    if in_float32:
        if all(entry.is_float32_of_itself(tensor, record.lower_precision) for entry, *_, tensor, record in in_float32):
            _, module, name, tensor, record = in_float32[0]
            raise _foreign_weight(model, module, name, tensor, record)
        for entry, *_, tensor, record in in_float32:
            if tensor.dtype is torch.float32:  # of tied weights the first is done
                entry.take_float32(tensor, record.lower_precision, for_training)
    through_data = record_of_model.through_data
    through_data.forwards += 1
    if through_data.forwards == through_data.next_look:
        through_data.look(model, walk(model))
    if stale:
        write_lower([entry.value for entry, _ in stale], [tensor for _, tensor in stale])
        for entry, tensor in stale:
            entry.agree(tensor)


_TOO_OFTEN = 8


def _warn_of_lost_rests(model: nn.Module, record: WeightRecord, entry: Float32Value, lower: torch.Tensor) -> None:
    """Say it once if a weight whose master is split is written to again and again: it trains in lower precision then."""
    if entry.writes >= _TOO_OFTEN and not record.rounded:
        name = next(name for name, one in model.named_parameters(remove_duplicate=False) if one is lower)
        record.rounded.add(name)
        logger.warning(
            "%s was written to in place %d times, and each time the rest of its split master was dropped: its float32 value is "
            "what %s holds. Use initialize(..., master_weights=True), which keeps what a write leaves as it is, or write "
            "through .data.",
            name,
            entry.writes,
            lower.dtype,
        )


def walk(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of ``model``, as ``model.modules()`` gives them, at a fraction of its cost: this runs in every forward."""
    seen, pending = {model}, [model]
    for module in pending:
        yield module
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                pending.append(child)


def _record_of_new(model: nn.Module, module: nn.Module) -> WeightRecord:
    """The record for a module that is new since ``initialize``, such as a parametrization: it knows what came from the model."""
    record = replace(model.__dict__[RECORD_KEY], buffers={})
    for name, tensor in module._parameters.items():
        if tensor is not None and id(tensor) not in record.parameters:
            _accept_unknown(model, module, name, tensor, record)
    if not isinstance(module, torch.jit.ScriptModule):
        module.__dict__[RECORD_KEY] = record
        _go_by_record(module)
    return record


def _accept_unknown(model: nn.Module, module: nn.Module, name: str, tensor: torch.Tensor, record: WeightRecord) -> None:
    """What `cast_weights` has not cast: what is kept, what is never cast, and weights made of cast ones are right."""
    if record.sharded or type(tensor) is torch.Tensor:  # torch.func.functional_call lends tensors of its own
        return
    kept = record.in_float32 or id(tensor) in record.kept
    allowed = tensor.dtype is torch.float32 if kept else tensor.dtype not in CASTABLE
    if not (allowed or (tensor.dtype is record.lower_precision and not kept)):
        raise _foreign_weight(model, module, name, tensor, record)


@torch.no_grad()
def write_lower(values: list[torch.Tensor], lowers: list[torch.Tensor]) -> None:
    """Round float32 values into the model's tensors, in one pass, as a counted in-place write."""
    local = [v.detach().to(t.device) for v, t in zip(values, lowers)]
    kernels.multi_tensor_scale(local, [t.detach() for t in lowers], 1.0)
    torch.autograd.graph.increment_version(lowers)


def follow_devices(model: nn.Module) -> None:
    """After ``model.to(device)``: masters and their gradients go where their weights went."""
    for tensor, entry in lower_entries(model):
        if isinstance(entry.value, nn.Parameter):
            move_like(entry.value, tensor)


def put_in_place(master: torch.Tensor, value: torch.Tensor) -> None:
    """``master.data = value``, as no write of a script."""
    torch.Tensor.data.__set__(master, value)


def move_like(master: nn.Parameter, tensor: torch.Tensor) -> None:
    """Move a master and its gradient to the device of its weight."""
    if master.device != tensor.device:
        gradient, master.raw_grad = master.raw_grad, None
        put_in_place(master, master.detach().to(tensor.device))
        master.raw_grad = None if gradient is None else gradient.to(tensor.device)


def restore_weights(model: nn.Module) -> None:
    """Undo `cast_weights`: the same parameter objects, float32, with the values that were behind them, and no hook of ours."""
    for tensor, entry in lower_entries(model):
        value = entry.current(tensor)
        gradient, tensor.grad = tensor.grad, None
        tensor.data = value
        tensor.grad = entry.gradient if gradient is None or entry.gradient is not None else gradient.float()
    for module in model.modules():
        module.__dict__.pop(RECORD_KEY, None)
        module.__dict__.pop(ACTIVATION_KEY, None)
        remove_hooks(module)
        need_no_plain_copies(module)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def _put_float32_values(module: nn.Module, state_dict: dict, prefix: str, local_metadata: dict) -> None:
    """state_dict() hands out the float32 values themselves, not copies: writing to them is writing to the model."""
    for name, lower, entry in module.__dict__[RECORD_KEY].lower_tensors(module):
        saved = state_dict.get(prefix + name)
        if saved is not None:
            keep_vars = saved is lower and isinstance(entry.value, nn.Parameter)
            state_dict[prefix + name] = entry.value if keep_vars else entry.current(lower)


def _take_float32_values(module: nn.Module, state_dict: dict, prefix: str, metadata: dict, *_: object) -> None:
    """load_state_dict() reaches the float32 values before torch rounds the same numbers into the model."""
    if metadata.get("assign_to_params_buffers"):
        raise ConfigurationError(
            "load_state_dict(assign=True) was called on an initialized model: it would put other tensors in the place of the "
            "weights that masters and optimizer belong to. Leave assign=True out (the values are copied, to the float32 "
            "weights too), or load before initialize()."
        )
    for name, tensor, entry in module.__dict__[RECORD_KEY].lower_tensors(module):
        loaded = state_dict.get(prefix + name)
        if entry.rest is not None:
            entry.synchronize(tensor)  # what was written to a master before is older
            if isinstance(loaded, torch.Tensor) and loaded.shape == tensor.shape and loaded.is_floating_point():
                # A state_dict() of the caller's is not touched: load_state_dict hands on a copy.
                values = loaded.detach().to(tensor.device, torch.float32)
                state_dict[prefix + name], entry.loaded = kernels.split(values, entry.rest.dtype)
        elif entry.value is not None and isinstance(loaded, torch.Tensor) and loaded.shape == entry.value.shape:
            warn_of_loaded_average(module.__dict__[RECORD_KEY], entry, tensor, loaded, prefix + name)
            with torch.no_grad():
                entry.value.copy_(loaded)


def _take_rests(module: nn.Module, *_: object) -> None:
    """After torch has loaded weights whose masters are split: the rests that belong to them."""
    for _, tensor, entry in module.__dict__[RECORD_KEY].lower_tensors(module):
        rest, entry.loaded = entry.loaded, None
        if rest is not None and tensor._version != entry.lower_version:
            entry.before = tensor  # what is loaded may be written again, by DDP
            entry.put_rest(tensor, rest)


def _foreign_weight(
    model: nn.Module, module: nn.Module, name: str, tensor: torch.Tensor, record: WeightRecord
) -> ConfigurationError:
    prefix = next((prefix for prefix, inner in model.named_modules() if inner is module), "")
    full_name = f"{prefix}.{name}" if prefix else name
    if id(tensor) in record.parameters or id(tensor) in record.kept:
        was = record.lower_precision if id(tensor) in record.parameters else torch.float32
        return ConfigurationError(
            f"{full_name!r} is {tensor.dtype}, initialize() left it {was}. Do not change the dtype of an initialized model "
            "(.half(), .float(), .to(dtype)): call ampkit.close() first, or initialize again with another level."
        )
    return ConfigurationError(
        f"Parameter {full_name!r} ({tensor.dtype}) is new since initialize(): it has no lower-precision copy and no master. "
        "Change the model first, then call initialize() again; it may be called as often as you like."
    )
