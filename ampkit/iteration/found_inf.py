"""Whether the gradients of a backward pass are finite: written on their device, learned on the host without waiting.

Kernels write into a `FoundInf`. When the iteration is over, what they found sets out for the host with the loss scale's new
state behind it: a `HostCopy`. Fused optimizers take the flag on the device; others wait for the copy at their step, logs
look when it has arrived.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import torch

from .. import kernels
from ..errors import ConfigurationError

# Words of 32 bits: the flag, the three of a dynamic loss scale, then two for the index of each list.
_HEADER = 4


class HostCopy:
    """A few words on a device, and the copy of them on the host, where nobody waits for it unless `read` is called.

    On CUDA they go into pinned memory, with an event behind them. On the CPU they are there already. While a CUDA graph is
    captured nothing is sent: they can then be read from the device only.
    """

    def __init__(self, device: torch.device, lists: int) -> None:
        self._words = words = torch.full((_HEADER // 2 + lists,), kernels.NO_BAD, dtype=torch.int64, device=device)
        words[: _HEADER // 2].zero_()
        narrow = words.view(torch.int32)
        self.flag = narrow[0].view(torch.float32)
        self.state = narrow[1:_HEADER]
        self.indices = words[_HEADER // 2 :].split(1) if lists else ()
        self.is_captured = words.is_cuda and torch.cuda.is_current_stream_capturing()
        self._on_host = words if device.type == "cpu" else None
        self._event = self._array = None
        if words.is_cuda and not self.is_captured:
            self._on_host = torch.empty(words.shape, dtype=words.dtype, pin_memory=True)
            self._event = torch.cuda.Event()

    def send(self) -> None:
        """Have the words as they are now copied to the host."""
        if self._event is not None:
            self._on_host.copy_(self._words, non_blocking=True)
            self._event.record(torch.cuda.current_stream(self._words.device))

    def ready(self) -> bool:
        """Whether `read` would return without waiting."""
        if self._event is None:
            return self._on_host is not None
        # CUDA allows no question about an event while a graph is captured.
        return not torch.cuda.is_current_stream_capturing() and self._event.query()

    def read(self) -> Any:
        """The words that were sent, as a buffer; waits for them where it must."""
        if self._words.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ConfigurationError(
                "While a CUDA graph is captured the host cannot learn whether gradients are finite, and something asks: the step "
                "of an ordinary optimizer, step_was_skipped() or state_dict(). Steps of ampkit.optimizers, and of torch's with "
                "fused=True, are decided on the device; with loss_scale=1.0 nothing is decided."
            )
        if self._on_host is None:
            words = self._words.cpu()  # held until its memory has been copied
            return bytes(_memory_of(words))
        if self._event is not None:
            self._event.synchronize()
        if self._array is None:
            self._array = _memory_of(self._on_host)  # which may be sent to again
        return self._array


def _memory_of(tensor: torch.Tensor) -> Any:
    """The bytes of a tensor on the host, as long as it lives. numpy would do, but torch does not bring it."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())


class FoundInf:
    """What is found out about the gradients that one ``scale_loss`` made.

    ``flag`` (float32, shape []) is what kernels write and fused optimizers take: not 0 where a gradient is not finite.
    `index_for` gives the place for the index of the first such tensor of a list, for up to ``lists`` lists. On the host
    `overflowed` waits for the answer, unless it `is_known`; ``first_nonfinite`` has the tensors then.

    ``scaler`` is the loss scaler whose iteration it ended; None for the gradients of an optimizer that the block did not name,
    which move no scale, and for what was found ``at_step``, after the block. ``spare`` holds memory that is used again, and gets
    it back with the end of this object.
    """

    scaler: Any = None
    moves_scale = False
    at_step = False
    is_sent = False
    reported = False
    first_nonfinite: Sequence[torch.Tensor] = ()
    _overflowed: bool | None = None

    def __init__(self, device: torch.device, lists: int = 0, spare: dict[Any, list[HostCopy]] | None = None) -> None:
        copy = self._spare = None
        is_cuda = device.type == "cuda"
        if spare is not None and not (is_cuda and torch.cuda.is_current_stream_capturing()):
            # Memory that another stream still reads must not be written to.
            stream = torch.cuda.current_stream(device).cuda_stream if is_cuda else None
            self._spare = spare.setdefault((device, stream, lists), [])
            copy = self._spare.pop() if self._spare else None
        self._copy = copy or HostCopy(device, lists)
        self.flag = self._copy.flag
        self._lists: list[Sequence[torch.Tensor]] = []

    def __del__(self) -> None:
        if self._spare is not None and self._overflowed is False:  # nothing was written to it
            self._spare.append(self._copy)

    @classmethod
    def of(cls, flag: torch.Tensor) -> FoundInf:
        """Over a flag that was made elsewhere."""
        found = cls(flag.device)
        found.flag = flag
        return found

    def index_for(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Where to write the index (int64, shape [1]) of the first of these whose gradient is not finite."""
        if not tensors or len(self._lists) == len(self._copy.indices):
            return None
        self._lists.append(tensors)
        return self._copy.indices[len(self._lists) - 1]

    def send(self, state: torch.Tensor | bytes | None = None) -> None:
        """The iteration is over: tell the host. ``state`` is the loss scaler's after it (int32, shape [3]), if it has any.

        As bytes it is on the host already.
        """
        copy = self._copy
        if self.flag is not copy.flag:
            copy.flag.copy_(self.flag.reshape(()))
            self.flag = copy.flag
        self._state = state
        if isinstance(state, torch.Tensor):
            copy.state.copy_(state)
        copy.send()
        self.is_sent = True

    @property
    def is_captured(self) -> bool:
        """Whether it belongs to a CUDA graph, and stands for every iteration that will be replayed."""
        return self._copy.is_captured

    @property
    def is_known(self) -> bool:
        """Whether the host knows, or could without waiting."""
        return self._overflowed is not None or self._copy.ready()

    @property
    def overflowed(self) -> bool:
        """Whether a gradient was not finite."""
        if self._overflowed is None:
            if self.scaler is None:
                self.learn()
            else:
                self.scaler.learn_up_to(self)
        return self._overflowed

    def look(self) -> None:
        """Learn what no loss scaler counts, unless that is to be waited for."""
        if self.is_sent and self._overflowed is None and self._copy.ready():
            self.learn()

    def learn(self) -> FoundInf:
        """Read what was sent; returns itself. For the loss scaler, which counts iterations and so keeps their order."""
        words = self._copy.read()
        flag, *state = struct.unpack_from("ffii", words)
        if isinstance(self._state, bytes):
            state = struct.unpack("fii", self._state)
        self._overflowed = flag != 0.0
        if self._overflowed:
            indices = struct.unpack_from(f"{len(self._lists)}q", words, 4 * _HEADER)
            self.first_nonfinite = [
                tensors[index] for tensors, index in zip(self._lists, indices) if index < len(tensors)
            ]
        self._lists = []
        if self.scaler is not None:
            self.scaler.count(self, *state)
        return self


def places_for(
    found: FoundInf | None, tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Where a kernel writes that one of these is not finite, and the index of the first: nowhere, where nothing is checked."""
    return (None, None) if found is None else (found.flag, found.index_for(tensors))
