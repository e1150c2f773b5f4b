"""The lower-precision weights of a model and the float32 values behind them.

Every submodule of a cast model carries a `WeightRecord` in its ``__dict__``: which of its own parameters and buffers are
held in lower precision, and the float32 tensor behind each. Where an optimizer owns the parameter that tensor is
the master weight. Because the record sits on the submodule, ``state_dict``, ``load_state_dict``, deepcopy and pickle of
any part of the model find it without knowing of a session.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from .. import kernels
from ..errors import ConfigurationError
from .keep_fp32 import Kept

RECORD_KEY = "_ampkit_weights"
_CASTABLE = (torch.float32, torch.float16, torch.bfloat16)


@dataclass
class Float32Value:
    """The float32 value of one lower-precision tensor, and the state in which the two last agreed.

    ``value`` is None where nothing is kept (O3's trained weights, ``keep_originals=False``): the lower-precision tensor is
    then the value. Writes to parameters are told by their version counter; ``counted`` is False for buffers, because
    torch's batch norm updates running statistics without counting. ``gradient`` is the float32 gradient that stood in the
    tensor when it was cast, until the master takes it.
    """

    value: torch.Tensor | None
    counted: bool = True
    value_version: int = 0
    lower_version: int = 0
    lower_id: int = 0
    lower_ptr: int = 0
    gradient: torch.Tensor | None = None

    def agree(self, lower: torch.Tensor) -> None:
        """Note that both hold the same value now."""
        self.value_version = self.value._version if self.value is not None else 0
        self.lower_version = lower._version
        self.lower_id = id(lower)
        self.lower_ptr = lower.data_ptr()

    def is_unwritten(self, lower: torch.Tensor) -> bool:
        """Whether neither a counted write nor ``p.data = ...`` has changed ``lower`` since they agreed."""
        return self.lower_version == lower._version and self.lower_ptr == lower.data_ptr()

    def synchronize(self, lower: torch.Tensor) -> None:
        """Take over what was written to ``lower``, or the tensor that was put in its place, since they agreed."""
        if self.value is None or self.value._version != self.value_version:
            return  # What was written to the value is newer, and reaches the model before its next forward.
        if not (self.counted and self.lower_id == id(lower) and self.is_unwritten(lower)):
            self._take_over(lower)

    @torch.no_grad()
    def _take_over(self, lower: torch.Tensor) -> None:
        local = self.value.to(lower.device)
        self.value.copy_(torch.where(local.to(lower.dtype) == lower, local, lower.float()))
        self.agree(lower)

    def current(self, lower: torch.Tensor) -> torch.Tensor:
        """The float32 value on the device of ``lower``: live, not a copy, wherever it lies there."""
        self.synchronize(lower)
        return lower.detach().float() if self.value is None else self.value.detach().to(lower.device)


@dataclass
class WeightRecord:
    """What `cast_weights` did to one module's own tensors."""

    lower_precision: torch.dtype
    lower: dict[str, Float32Value] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()
    buffers: tuple[str, ...] = ()


def own_tensor(module: nn.Module, name: str) -> torch.Tensor | None:
    """A parameter or buffer of this very module, whatever stands there now."""
    return module._parameters[name] if name in module._parameters else module._buffers.get(name)


def own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The module's own parameters and buffers."""
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            if tensor is not None:
                yield name, tensor


def lower_entries(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor, Float32Value]]:
    """(module, name, lower-precision tensor, its float32 value) for everything in the model that was cast."""
    for module in model.modules():
        record = module.__dict__.get(RECORD_KEY)
        if record is not None:
            for name, entry in record.lower.items():
                yield module, name, own_tensor(module, name), entry


def cast_weights(
    model: nn.Module, lower_precision: torch.dtype, kept: Kept, shared: dict[torch.Tensor, Float32Value]
) -> None:
    """Cast everything that is not kept, in place: parameters stay the same objects and their old storage stays theirs.

    ``shared`` carries the float32 values from model to model of one ``initialize``, so that tied weights share one.
    """
    for module in model.modules():
        # Scripted modules have no weights here: see validation.py.
        if RECORD_KEY in module.__dict__ or isinstance(module, torch.jit.ScriptModule):
            continue
        record = module.__dict__[RECORD_KEY] = WeightRecord(lower_precision)
        kept_names = []
        for name, tensor in own_tensors(module):
            if tensor.dtype not in _CASTABLE:  # float64 and complex are never cast
                continue
            if tensor.dtype is torch.float32 and (kept.covers(module) or tensor in kept.parameters):
                kept_names.append(name)
                continue
            if tensor not in shared:
                # .data and not .detach(): the value needs a version counter of its own. float() for weights that came in
                # lower precision.
                entry = Float32Value(tensor.data.float(), counted=name in module._parameters)
                lower = tensor.detach().to(lower_precision)
                entry.gradient = tensor.grad
                lower_gradient = None if entry.gradient is None else entry.gradient.to(lower_precision)
                # All memory is there: what follows does not fail, and is undone as a whole.
                tensor.grad, tensor.data = None, lower
                tensor.grad = lower_gradient
                entry.agree(tensor)
                shared[tensor] = entry
            record.lower[name] = shared[tensor]
        record.kept = frozenset(kept_names)
        record.buffers = tuple(name for name in record.lower if name in module._buffers)
        module.register_state_dict_post_hook(_put_float32_values)
        module.register_load_state_dict_pre_hook(_take_float32_values)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


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
        if not isinstance(entry.value, nn.Parameter)
    }
    for tensor, entry in entries.items():
        entry.gradient = None
        if tensor in settled:
            entry.value = settled[tensor]
            entry.agree(tensor)


def sync_weights(model: nn.Module) -> None:
    """Let edits on either side reach the other before the next forward, and refuse what cannot be right.

    In-place writes to tensors of ``state_dict()`` (they are the float32 values) reach the model; counted in-place writes
    to the model's weights reach the float32 values. Raises `ConfigurationError` for weights whose dtype was changed and
    for parameters that are new since ``initialize``, by name.
    """
    stale: list[tuple[Float32Value, torch.Tensor]] = []
    for module in _walk(model):
        record = module.__dict__.get(RECORD_KEY)
        if record is None:
            _refuse_new_weights(model, module)
            continue
        for name, tensor in module._parameters.items():
            entry = record.lower.get(name)
            if tensor is None:
                continue
            if entry is None:
                if tensor.dtype is not torch.float32 if name in record.kept else tensor.dtype in _CASTABLE:
                    raise _foreign_weight(model, module, name, tensor)
                continue
            is_ours = id(tensor) == entry.lower_id
            if tensor.dtype is not record.lower_precision or not (is_ours or type(tensor) is torch.Tensor):
                raise _foreign_weight(model, module, name, tensor)
            if entry.value is None or not is_ours:  # torch.func.functional_call lends tensors of its own
                continue
            if entry.value._version != entry.value_version:
                stale.append((entry, tensor))
            elif not entry.is_unwritten(tensor):
                entry.synchronize(tensor)
        for name in record.buffers:
            entry, tensor = record.lower[name], module._buffers.get(name)
            if tensor is not None and entry.value is not None and entry.value._version != entry.value_version:
                stale.append((entry, tensor))
    if stale:
        write_lower([entry.value for entry, _ in stale], [tensor for _, tensor in stale])
        for entry, tensor in stale:
            entry.agree(tensor)


def _walk(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of ``model``, as ``model.modules()`` gives them, at a fraction of its cost: this runs in every forward."""
    seen, pending = {model}, [model]
    for module in pending:
        yield module
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                pending.append(child)


def _refuse_new_weights(model: nn.Module, module: nn.Module) -> None:
    for name, tensor in module._parameters.items():
        if tensor is not None and tensor.dtype in _CASTABLE:
            raise _foreign_weight(model, module, name, tensor)


@torch.no_grad()
def write_lower(values: list[torch.Tensor], lowers: list[torch.Tensor]) -> None:
    """Round float32 values into the model's tensors, in one pass, as a counted in-place write."""
    local = [v.detach().to(t.device) for v, t in zip(values, lowers)]
    kernels.multi_tensor_scale(local, [t.detach() for t in lowers], 1.0)
    torch.autograd.graph.increment_version(lowers)


def synchronize_weights(model: nn.Module) -> None:
    """Take over counted writes to the model's tensors, before a copy of the model is made."""
    for _, _, tensor, entry in lower_entries(model):
        if tensor is not None:
            entry.synchronize(tensor)


def follow_devices(model: nn.Module) -> None:
    """After ``model.to(device)``: masters and their gradients go where their weights went."""
    for _, _, tensor, entry in lower_entries(model):
        if isinstance(entry.value, nn.Parameter):
            move_like(entry.value, tensor)


def move_like(master: nn.Parameter, tensor: torch.Tensor) -> None:
    """Move a master and its gradient to the device of its weight."""
    if master.device != tensor.device:
        gradient, master.grad = master.grad, None
        master.data = master.data.to(tensor.device)
        master.grad = None if gradient is None else gradient.to(tensor.device)


def restore_weights(model: nn.Module) -> None:
    """Undo `cast_weights`: the same parameter objects, float32, with the values that were behind them."""
    for module, _, tensor, entry in lower_entries(model):
        if tensor is not None and tensor.dtype is module.__dict__[RECORD_KEY].lower_precision:
            value = entry.current(tensor)
            gradient, tensor.grad = tensor.grad, None
            tensor.data = value
            tensor.grad = entry.gradient if gradient is None or entry.gradient is not None else gradient.float()
    forget_weights(model)
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def forget_weights(model: nn.Module) -> None:
    """Drop the records and hooks of `cast_weights` and leave the tensors as they are."""
    for module in model.modules():
        if module.__dict__.pop(RECORD_KEY, None) is not None:
            _remove_hooks(module)


def _remove_hooks(module: nn.Module) -> None:
    for key in [k for k, hook in module._state_dict_hooks.items() if hook is _put_float32_values]:
        del module._state_dict_hooks[key]
    for key in [
        k
        for k, hook in module._load_state_dict_pre_hooks.items()
        if getattr(hook, "hook", hook) is _take_float32_values
    ]:
        del module._load_state_dict_pre_hooks[key]


def _put_float32_values(module: nn.Module, state_dict: dict, prefix: str, local_metadata: dict) -> None:
    """state_dict() hands out the float32 values themselves, not copies: writing to them is writing to the model."""
    record = module.__dict__.get(RECORD_KEY)
    for name, entry in record.lower.items() if record is not None else ():
        saved = state_dict.get(prefix + name)
        lower = own_tensor(module, name)
        if saved is not None and lower is not None and lower.dtype is record.lower_precision:
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
    record = module.__dict__.get(RECORD_KEY)
    for name, entry in record.lower.items() if record is not None else ():
        loaded = state_dict.get(prefix + name)
        if entry.value is not None and isinstance(loaded, torch.Tensor) and loaded.shape == entry.value.shape:
            with torch.no_grad():
                entry.value.copy_(loaded)


def _foreign_weight(model: nn.Module, module: nn.Module, name: str, tensor: torch.Tensor) -> ConfigurationError:
    prefix = next((prefix for prefix, inner in model.named_modules() if inner is module), "")
    full_name = f"{prefix}.{name}" if prefix else name
    record = module.__dict__.get(RECORD_KEY)
    same = record is not None and (
        name in record.kept or (name in record.lower and record.lower[name].lower_id == id(tensor))
    )
    if same:
        was = record.lower_precision if name in record.lower else torch.float32
        return ConfigurationError(
            f"{full_name!r} is {tensor.dtype}, initialize() left it {was}. Do not change the dtype of an initialized model "
            "(.half(), .float(), .to(dtype)): call ampkit.close() first, or initialize again with another level."
        )
    return ConfigurationError(
        f"Parameter {full_name!r} ({tensor.dtype}) is new since initialize(): it has no lower-precision copy and no master. "
        "Change the model first, then call initialize() again; it may be called as often as you like."
    )
