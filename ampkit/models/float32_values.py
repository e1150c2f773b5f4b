"""The float32 value behind one lower-precision tensor of a model, and which of the two was written to last."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from .. import kernels
from ..errors import ConfigurationError
from .rests import Rest

UNCOUNTED = -1  # the version of what was written to since


@dataclass
class Float32Value:
    """The float32 value of one lower-precision tensor, and the state in which the two last agreed.

    ``value`` is None where nothing is kept (O3's trained weights, ``keep_originals=False``): the lower-precision tensor is
    then the value, or, where its master is split, with the ``rest`` of its bits. Writes to a weight with
    a master are told by its version counter; ``counted`` is False for others, whose values are compared: torch's batch norm
    updates running statistics without counting, a momentum encoder is written to through ``.data``. ``gradient`` is the float32
    gradient that stood in the tensor when it was cast, until the master takes it. ``put_aside`` is the master that other weights
    were written over, until the next step: an evaluation with averaged weights puts its own back, in lower precision.
    ``writes`` counts those that stalling.py was told of. ``loaded_over`` is the version of ``lower`` that ``load_state_dict`` is
    about to write over, once the value is loaded.
    """

    value: torch.Tensor | None
    counted: bool = True
    value_version: int = 0
    lower_version: int = 0
    lower: torch.Tensor | None = None
    lower_ptr: int = 0
    lower_size: int = 0
    gradient: torch.Tensor | None = None
    rest: Rest | None = None
    put_aside: torch.Tensor | None = None
    writes: int = 0
    loaded_over: int | None = None
    _in_copies: Callable[[], nn.Parameter | None] = lambda: None

    def agree(self, lower: torch.Tensor) -> None:
        """Note that both hold the same value now."""
        self.put_aside = None
        self.value_version = self.value._version if self.value is not None else 0
        self.lower_version = lower._version
        if self.lower is not lower:
            self.lower = lower
            _of_weight[id(lower)] = self
        self.lower_size = lower.numel()
        if self.lower_ptr != (address := lower.data_ptr()):
            self.lower_ptr = address
            self.note_addresses()

    def note_addresses(self) -> None:
        """Have `note_uncounted_write` find this by its two tensors."""
        for tensor in (self.lower, self.value):
            if tensor is not None:
                _at_address[tensor.data_ptr()] = self

    def put(self, lower: torch.Tensor, value: torch.Tensor, counted: bool = False) -> None:
        """Take ``value``, which rounds to what ``lower`` holds, or is split into it: by a ``counted`` write."""
        if self.rest is not None:
            self.rest.put_value(lower, value, counted)
        elif self.value.data_ptr() != value.data_ptr():  # where it is kept on the host
            self.value.copy_(value)
        self.agree(lower)

    def split(self, lower: torch.Tensor, dtype: torch.dtype) -> None:
        """Keep the value as ``lower`` and the rest of its bits from now on."""
        weights, bits = kernels.split(self.current(lower), dtype)
        lower.data.copy_(weights)
        self.value, self.counted, self.rest = None, True, Rest(lower, bits)
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
            self.rest.settle()
            self.rest.follow(lower, lower._version != self.lower_version)
            self.agree(lower)
            return
        if self.value is not None and self.value.shape != lower.shape:
            self.take_over(lower)
        if self.value is None or self.value._version != self.value_version:
            return  # What was written to the value is newer, and reaches the model before its next forward.
        if not (self.counted and self.lower is lower and self.is_unwritten(lower)):
            self.take_over(lower, for_training)

    def refuse_two_writers(self, lower: torch.Tensor) -> None:
        """Raise where both were written to since they agreed, and differ: nobody knows which write was the later one."""
        if self.value is None or self.value_version in (UNCOUNTED, self.value._version) or not self.counted:
            return
        if self.lower_version in (UNCOUNTED, lower._version) or self.value.shape != lower.shape:
            return
        if not torch.equal(self.value.detach().to(lower.device, lower.dtype), lower):
            raise ConfigurationError(
                f"A weight of shape {tuple(lower.shape)} and its float32 value (in state_dict() or ampkit.master_params) were both "
                "written to since the last forward or step, and now differ: one of the two writes would be lost. Write to one of "
                "them only, or call state_dict() or master_params again after writing to the weight, and the model's forward after "
                "writing to those."
            )

    @torch.no_grad()
    def take_over(self, lower: torch.Tensor, for_training: bool = False) -> None:
        """Have the value be what ``lower`` holds, where that is not its rounding anyway."""
        aside = None
        if self.value.shape != lower.shape:  # ``p.data = ...``, as where an embedding gets more rows
            self.value.grad = None
            _put_in_place(self.value, lower.detach().to(self.value.device, torch.float32))
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

    @torch.inference_mode(False)  # an evaluation may meet it first, and the weight is to train on
    @torch.no_grad()
    def take_float32(self, lower: torch.Tensor, precision: torch.dtype, for_training: bool) -> None:
        """After ``p.data = float32 values``: the value is these, and ``lower`` their rounding."""
        given = lower.detach()
        lower.data = given.to(precision)
        if self.rest is not None:
            self.put(lower, given)
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

    def current(self, lower: torch.Tensor) -> torch.Tensor:
        """The float32 value on the device of ``lower``: live, not a copy, wherever it lies there."""
        self.synchronize(lower)
        if self.rest is not None and lower.dtype is torch.bfloat16:
            # Not where another optimizer's close(), or ``model.half()``, has put other bits there.
            return self.rest.value(lower)
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
# By the id of the lower-precision tensor.
_of_weight: weakref.WeakValueDictionary[int, Float32Value] = weakref.WeakValueDictionary()


def all_lower() -> list[torch.Tensor]:
    """The lower-precision tensors of all live sessions."""
    return [entry.lower for entry in _at_address.values() if entry.lower is not None]


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


def note_data_read(tensor: torch.Tensor) -> None:
    """Have a weight be compared with its master at their next agreement: whoever asks for its ``.data`` may write to it."""
    entry = _of_weight.get(id(tensor))
    # Of a split master nothing is there to compare with, and what no optimizer trains is compared anyway.
    if entry is not None and entry.lower is tensor and isinstance(entry.value, nn.Parameter):
        value = entry.value
        if (
            value._version != entry.value_version != UNCOUNTED
            and value.shape == tensor.shape
            and entry.is_unwritten(tensor)
        ):
            write_lower([value], [tensor])  # else what is read would be old, and what is written lost
            entry.agree(tensor)
        entry.lower_version = UNCOUNTED


@torch.no_grad()
def write_lower(values: list[torch.Tensor], lowers: list[torch.Tensor]) -> None:
    """Round float32 values into the model's tensors, in one pass, as a counted in-place write."""
    # As they are: a view of each, to go without autograd, would take as long as rounding small ones.
    local = [v if v.device == t.device else v.to(t.device) for v, t in zip(values, lowers)]
    kernels.multi_tensor_scale(local, lowers, 1.0)
    torch.autograd.graph.increment_version(lowers)


def is_capturing(tensor: torch.Tensor) -> bool:
    """Whether the device cannot be asked anything now."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _put_in_place(master: torch.Tensor, value: torch.Tensor) -> None:
    """``master.data = value``, as no write of a script: masters note those."""
    torch.Tensor.data.__set__(master, value)
