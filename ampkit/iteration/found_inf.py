"""What is found out about the gradients of an iteration: written on the device, heard of on the host, without waiting.

Kernels write into a `Check`. When the iteration is over its words, the loss scale's behind them, are sent to the host. A
`Verdict` gives the answer to both: to fused optimizers as a tensor, to everybody else as an `Outcome`, read when
somebody asks for it, or when it has arrived.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .. import kernels

_HEADER = 4  # 32-bit words: found_inf, and the three of a dynamic loss scale


@dataclass(frozen=True)
class Outcome:
    """What the host has learned of one iteration: the finding, and the scaler's numbers after it."""

    overflowed: bool
    loss_scale: float
    skips_in_a_row: int
    skips_at_floor: int
    culprits: tuple[Any, ...] = ()


class Counter(Protocol):
    """What a verdict asks of its loss scaler."""

    unmoved_line: str  #: what is said of an overflow that moves no scale

    def learn_up_to(self, verdict: Verdict) -> None:
        """Have every verdict up to this one `Verdict.learn`, in order."""

    def count(self, state: bytes, overflowed: bool, moves_scale: bool, culprits: tuple[Any, ...]) -> Outcome:
        """Count an iteration on the host, from the words of the state after it."""


class Bystander:
    """The `Counter` of gradients that a block made for an optimizer which it did not name: there is nothing to count."""

    unmoved_line = "Gradient overflow in a scale_loss block that did not name this optimizer: its step is skipped, the scale stays."

    def learn_up_to(self, verdict: Verdict) -> None:
        verdict.learn()

    def count(self, state: bytes, overflowed: bool, moves_scale: bool, culprits: tuple[Any, ...]) -> Outcome:
        return Outcome(overflowed, 0.0, 0, 0, culprits)


class Check:
    """What is found out about the gradients of one ``scale_loss``, in one small tensor on their device.

    ``found_inf`` (float32, shape [1]) is the flag that kernels write. `watch` gives the place where they write the index of
    the first tensor of a list that is not finite, for up to ``lists`` lists. Between them stand the scaler's words as they
    are after the iteration, so that one copy tells the host everything.
    """

    def __init__(self, device: torch.device, lists: int = 0) -> None:
        self._words = torch.zeros(_HEADER + 2 * lists, dtype=torch.int32, device=device)
        self._flag = self.found_inf = self._words[:1].view(torch.float32)
        self._lists = lists
        self._watched: list[Sequence[Any]] = []
        self.verdict: Verdict | None = None  #: once the iteration has ended

    @classmethod
    def of(cls, found_inf: torch.Tensor) -> Check:
        """The check whose flag is somebody else's."""
        check = cls(found_inf.device)
        check.found_inf = found_inf
        return check

    def watch(self, things: Sequence[Any]) -> torch.Tensor | None:
        """Where to write the index (int64, shape [1]) of the first of ``things`` whose gradient is not finite."""
        if not things or len(self._watched) == self._lists:
            return None
        start = _HEADER + 2 * len(self._watched)
        self._watched.append(things)
        return self._words[start : start + 2].view(torch.int64).fill_(kernels.NO_BAD)

    def end(self, state: torch.Tensor | None) -> None:
        """The iteration is over, and ``state`` are the scaler's words after it (int32, shape [3]), if it has any."""
        if self.found_inf is not self._flag:
            self._flag.copy_(self.found_inf)
            self.found_inf = self._flag
        if state is not None:
            self._words[1:_HEADER].copy_(state)

    def send(self) -> HostCopy:
        """Everything, on its way to the host."""
        return HostCopy(self._words)

    def read(self, words: bytes) -> tuple[bool, bytes, tuple[Any, ...]]:
        """Of what was sent: whether anything was not finite, the scaler's words, and of each list the first culprit."""
        overflowed = struct.unpack_from("f", words)[0] != 0.0
        culprits: tuple[Any, ...] = ()
        if overflowed:
            indices = struct.unpack_from(f"{len(self._watched)}q", words, 4 * _HEADER)
            culprits = tuple(things[index] for things, index in zip(self._watched, indices) if index < len(things))
        return overflowed, words[4 : 4 * _HEADER], culprits


class HostCopy:
    """A few words on their way from a device to the host, where nobody waits for them unless `read` is called.

    On CUDA they go into pinned memory, with an event behind them. On the CPU they are there already. While a CUDA graph is
    captured nothing is sent: they can then be read from the device only.
    """

    def __init__(self, words: torch.Tensor) -> None:
        self._words = words
        self._event: torch.cuda.Event | None = None
        self.is_captured = words.is_cuda and torch.cuda.is_current_stream_capturing()
        if words.is_cuda and not self.is_captured:
            self._words = torch.empty(words.shape, dtype=words.dtype, pin_memory=True)
            self._words.copy_(words, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(words.device))

    def ready(self) -> bool:
        """Whether `read` would return without waiting."""
        if self._event is None:
            return self._words.device.type == "cpu"
        # CUDA allows no question about an event while a graph is captured.
        return not torch.cuda.is_current_stream_capturing() and self._event.query()

    def read(self) -> bytes:
        """The words; waits for them where it must."""
        if self._event is not None:
            self._event.synchronize()
        return self._words.cpu().numpy().tobytes()


class Verdict:
    """Whether the gradients of one ``scale_loss`` were finite: decided on the device, asked late.

    ``found_inf`` (float32, shape [1]) is the answer there; fused optimizers take it as it is. `outcome` and `overflowed`
    are the answer on the host, and wait for it, unless it `is_known`.
    """

    def __init__(self, scaler: Counter, check: Check, *, moves_scale: bool = True) -> None:
        self.scaler = scaler
        self.found_inf = check.found_inf
        self.moves_scale = moves_scale
        self.reported = False
        self._check: Check | None = check
        self._copy: HostCopy | None = check.send()
        self._outcome: Outcome | None = None

    @property
    def is_learned(self) -> bool:
        """Whether the host knows."""
        return self._outcome is not None

    @property
    def is_known(self) -> bool:
        """Whether the host knows, or could without waiting."""
        return self._outcome is not None or self._copy.ready()

    @property
    def is_captured(self) -> bool:
        """Whether it belongs to a CUDA graph, and stands for every iteration that will be replayed."""
        return self._copy is not None and self._copy.is_captured

    @property
    def outcome(self) -> Outcome:
        if self._outcome is None:
            self.scaler.learn_up_to(self)
        return self._outcome

    @property
    def overflowed(self) -> bool:
        return self.outcome.overflowed

    def learn(self) -> None:
        """Read what was sent, and count it; for the scaler, which keeps the order."""
        overflowed, state, culprits = self._check.read(self._copy.read())
        self._outcome = self.scaler.count(state, overflowed, self.moves_scale, culprits)
        self._check = self._copy = None
