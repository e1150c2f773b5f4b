"""The loss scale: the number that the loss is multiplied by, and the rule by which it moves.

The state of a dynamic scale lives on the device of the gradients: `LossScaler.update` moves it there, by what a `FoundInf` says,
and nothing waits. The host learns of it from the same `FoundInf`, later.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from .. import kernels
from ..errors import CheckpointError, ConfigurationError, LossScaleError
from ..logs import logger
from ..optimizers.capturing import refuse_to_begin
from .found_inf import FoundInf, HostCopy

DEFAULT_MIN_LOSS_SCALE = 2.0**-14
DEFAULT_MAX_LOSS_SCALE = 2.0**24
SKIPS_AT_FLOOR_BEFORE_GIVING_UP = 50

_GRAD_SCALER_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


@dataclass(frozen=True)
class DynamicLossScale:
    """The rule of a dynamic loss scale, for ``initialize(..., loss_scale=DynamicLossScale(...))``.

    The scale starts at ``init_scale``. After ``growth_interval`` iterations in a row without overflow it is multiplied
    by ``growth_factor``; an overflow multiplies it by ``backoff_factor``, but only the ``hysteresis``-th one since the
    last clean iteration. It stays between ``min_loss_scale`` and ``max_loss_scale`` of ``initialize``.

    Scales and factors are plain numbers, best powers of two, which change no digit of a gradient; ``growth_interval`` and
    ``hysteresis`` count iterations. Raises `ConfigurationError` for a value outside of its range.

    Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1

    def __post_init__(self) -> None:
        for name, accepted, holds in (
            ("init_scale", "a positive, finite number", _is_positive(self.init_scale)),
            ("growth_factor", "a finite number above 1", _is_positive(self.growth_factor) and self.growth_factor > 1),
            (
                "backoff_factor",
                "a number between 0 and 1",
                _is_positive(self.backoff_factor) and self.backoff_factor < 1,
            ),
            ("growth_interval", "an integer of at least 1", _is_count(self.growth_interval)),
            ("hysteresis", "an integer of at least 1", _is_count(self.hysteresis)),
        ):
            if not holds:
                raise ConfigurationError(f"DynamicLossScale: {name} must be {accepted}, found {getattr(self, name)!r}.")


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 and math.isfinite(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


class LossScaler:
    """The loss scale of one loss: a number that stays, or one that moves by a `DynamicLossScale` between two bounds.

    ``loss_scale`` may be assigned at any time and is used from the next iteration on. ``unskipped`` counts iterations
    (exits of ``scale_loss``) since the last overflow or growth. Reading either waits for the device. A static scale other than 1.0
    checks too, and an overflow skips the step.

    From the first iteration on the state of a dynamic scale is three words on the device of the gradients: the scale (float32),
    ``unskipped``, and how many overflows are left before it backs off.
    """

    def __init__(
        self,
        loss_scale: float | DynamicLossScale | None = None,
        min_loss_scale: float = DEFAULT_MIN_LOSS_SCALE,
        max_loss_scale: float = DEFAULT_MAX_LOSS_SCALE,
        loss_id: int = 0,
    ) -> None:
        rule = DynamicLossScale() if loss_scale is None else loss_scale
        self.dynamic = isinstance(rule, DynamicLossScale)
        self.rule = rule if isinstance(rule, DynamicLossScale) else DynamicLossScale()
        self.min_loss_scale, self.max_loss_scale = float(min_loss_scale), float(max_loss_scale)
        self.loss_id = loss_id
        #: What blocks with ``delay_overflow_check=True`` found: part of the iteration that the next block ends.
        self.delayed_check: FoundInf | None = None
        # What the host has learned so far; the device may be ahead by the iterations that are pending.
        self._loss_scale = float(rule.init_scale if self.dynamic else rule)
        if self.dynamic:
            self._loss_scale = max(self.min_loss_scale, min(self.max_loss_scale, self._loss_scale))
        self._unskipped = 0
        self._overflows_left = self.rule.hysteresis
        self._skips_in_a_row = 0
        self._skips_at_floor = 0
        self._set_by_hand = math.inf
        self._pending: deque[FoundInf] = deque()
        self._was_captured = False  # so that replays of a CUDA graph move the scale, and the host does not know
        self._spare: dict[Any, list[HostCopy]] = {}
        self._state: torch.Tensor | None = None
        self._snapshot: torch.Tensor | None = None
        self._snapshot_captured = False

    @property
    def loss_scale(self) -> float:
        self.synchronize()
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        if not _is_positive(value):
            raise ConfigurationError(f"A loss scale must be a positive, finite number, found {value!r}.")
        self.synchronize()
        self._loss_scale = self._set_by_hand = float(value)
        self._write_state()

    @property
    def unskipped(self) -> int:
        self.synchronize()
        return self._unskipped

    @unskipped.setter
    def unskipped(self, value: int) -> None:
        self.synchronize()
        self._unskipped = int(value)
        self._write_state()

    @property
    def skips_in_a_row(self) -> int:
        self.synchronize()
        return self._skips_in_a_row

    @property
    def is_one(self) -> bool:
        """Whether this is a static scale of 1.0, which multiplies and checks nothing."""
        return not self.dynamic and self._loss_scale == 1.0

    @property
    def floor(self) -> float:
        """What no overflow brings the scale below: ``min_loss_scale``, or a lower scale that was set by hand."""
        return min(self.min_loss_scale, self._set_by_hand) if self.dynamic else 0.0

    @property
    def is_power_of_two(self) -> bool:
        """Whether the scale, wherever it moves, is one: bfloat16 can then be divided by it without rounding."""
        if not self.dynamic:
            return _are_powers_of_two(self._loss_scale)
        rule = self.rule
        return _are_powers_of_two(
            self._loss_scale, self.floor, self.max_loss_scale, rule.growth_factor, rule.backoff_factor
        )

    # The iteration

    def current(self, device: torch.device) -> float | torch.Tensor:
        """The scale of an iteration that begins now: a number, where the host knows it, or a copy of the one on ``device``.

        While no iteration has ended, it is the same object.
        """
        if not self.dynamic:
            return self._loss_scale
        self._live_on(device)
        captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        # What a CUDA graph replays must come from the state, not from a copy that was made before it.
        if self._snapshot is None or self._snapshot.device != device or captured != self._snapshot_captured:
            if not (self._pending or self._was_captured or captured):
                return self._loss_scale
            self._snapshot, self._snapshot_captured = self._scalar.clone(), captured
        return self._snapshot

    def found_inf(self, device: torch.device, lists: int) -> FoundInf:
        """For the gradients of one block: nothing found yet."""
        return FoundInf(device, lists, self._spare)

    def update(self, found: FoundInf | torch.Tensor, *, moves_scale: bool = True) -> FoundInf:
        """End an iteration: the scale moves, on its device, by what was ``found``, or by a flag of shape [1].

        With ``moves_scale=False`` the iteration counts as clean here whatever was found: used for gradients that other
        ranks have not seen yet, where a scale that moved on one rank alone would part them.
        """
        if isinstance(found, torch.Tensor):
            found = FoundInf.of(found)
        found.scaler, found.moves_scale = self, moves_scale
        if self.delayed_check is found:
            self.delayed_check = None
        found.send(self._advance(found.flag, moves_scale) if self.dynamic else None)
        if found.is_captured:  # it stands for as many iterations as the graph is replayed
            self._was_captured = True
        else:
            self._pending.append(found)
        return found

    def _advance(self, flag: torch.Tensor, moves_scale: bool) -> torch.Tensor | bytes:
        """Move the state on the device; returns its words, on the CPU a copy of them."""
        self._live_on(flag.device)
        kernels.update_scale(
            self._scale,
            self._growth_tracker,
            self._hysteresis_tracker,
            flag if moves_scale else torch.zeros_like(flag),
            growth_factor=self.rule.growth_factor,
            backoff_factor=self.rule.backoff_factor,
            growth_interval=self.rule.growth_interval,
            hysteresis=self.rule.hysteresis,
            min_scale=self.floor,
            max_scale=self.max_loss_scale,
        )
        self._snapshot = None
        return self._state if self._words is None else bytes(self._words)

    def _live_on(self, device: torch.device) -> None:
        """Have the state on this device."""
        if self._state is not None and self._state.device == device:
            return
        # Dynamo has no tensors that share memory with the host.
        move = torch._dynamo.disable(self._move_to) if torch.compiler.is_dynamo_compiling() else self._move_to
        move(device)

    def _move_to(self, device: torch.device) -> None:
        refuse_to_begin("the loss scale", device)
        self._read_state()
        self._words = None
        if device.type == "cpu":
            self._words = bytearray(12)  # so that the host can copy it without a call of torch
            self._state = state = torch.frombuffer(self._words, dtype=torch.int32)
        else:
            self._state = state = torch.zeros(3, dtype=torch.int32, device=device)
        self._scale = state[:1].view(torch.float32)
        self._scalar = self._scale[0]  # the same, 0-dim
        self._growth_tracker, self._hysteresis_tracker = state[1:2], state[2:3]
        self._write_state()

    def _write_state(self) -> None:
        """Bring the state on the device to what the host knows."""
        self._snapshot = None
        if self._state is not None:
            self._scale.fill_(self._loss_scale)
            self._growth_tracker.fill_(self._unskipped)
            self._hysteresis_tracker.fill_(self._overflows_left)

    def _read_state(self) -> None:
        """Bring what the host knows to the state on the device."""
        if self._state is not None:
            words = struct.pack("3i", *self._state.tolist())
            self._loss_scale, self._unskipped, self._overflows_left = struct.unpack("fii", words)

    # What the host learns

    def synchronize(self) -> None:
        """Learn of everything that has happened; waits for the device."""
        while self._pending:
            self._pending.popleft().learn()
        self._read_state()

    def learn_known(self) -> None:
        """Learn of what can be learned without waiting."""
        while self._pending and self._pending[0].is_known:
            self._pending.popleft().learn()

    def learn_up_to(self, found: FoundInf) -> None:
        """Learn of what happened up to this iteration, in order: the numbers of skips in a row build on each other."""
        if found in self._pending:
            while self._pending.popleft().learn() is not found:
                pass
        else:
            found.learn()

    def count(self, found: FoundInf, *state: float) -> None:
        """Count an iteration on the host; ``state`` is that on the device after it, if there is one.

        ``found`` gets the numbers that logs tell of it: ``loss_scale``, ``skips_in_a_row`` and ``skips_at_floor``.
        """
        counts = found.overflowed and found.moves_scale
        at_floor = self._loss_scale <= self.floor
        self._skips_in_a_row = self._skips_in_a_row + 1 if counts else 0
        self._skips_at_floor = self._skips_at_floor + at_floor if counts else 0
        self._unskipped = 0 if counts else self._unskipped + 1
        if self.dynamic:
            self._loss_scale, self._unskipped, self._overflows_left = state
        found.loss_scale = self._loss_scale
        found.skips_in_a_row, found.skips_at_floor = self._skips_in_a_row, self._skips_at_floor

    def overflow_line(self, found: FoundInf | None = None) -> str:
        """The line that reports a skipped step: that of an iteration, or the newest."""
        if not self.dynamic:
            return (
                f"Gradient overflow at the static loss scale {self._loss_scale:g} (loss scaler {self.loss_id}): this step is "
                f"skipped and the scale stays. A lower loss_scale=, or 'dynamic', avoids it."
            )
        # Scripts search their logs for the start of this line, Apex's two spaces included.
        scale = self.loss_scale if found is None else found.loss_scale
        return f"Gradient overflow.  Skipping step, loss scaler {self.loss_id} reducing loss scale to {scale}"

    def give_up_at_floor(self, on_floor: str, found: FoundInf | None = None) -> None:
        """After 50 skips in a row at the floor nothing is being learned, and nothing will change by itself.

        Raises `LossScaleError`, or warns with ``on_floor="warn"``.
        """
        if found is None:
            self.synchronize()
        skips = self._skips_at_floor if found is None else found.skips_at_floor
        if skips < SKIPS_AT_FLOOR_BEFORE_GIVING_UP or skips % SKIPS_AT_FLOOR_BEFORE_GIVING_UP:
            return
        message = (
            f"Loss scaler {self.loss_id}: {skips} steps in a row were skipped with the loss scale at its floor "
            f"of {self.floor:g}, so the gradients are not finite at any scale. Look for inf or NaN in the data "
            f"or the loss, try a lower learning rate or bfloat16 (O4, O5), or set min_loss_scale= lower; "
            f"on_floor='warn' goes on regardless."
        )
        if on_floor == "raise":
            raise LossScaleError(message)
        logger.warning(message)

    # Checkpoints

    def state_dict(self) -> dict[str, float | int]:
        """``{"loss_scale": float, "unskipped": int}``, the keys of Apex's checkpoints."""
        return {"loss_scale": self.loss_scale, "unskipped": self._unskipped}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        validate_scaler_state(state)
        self.synchronize()
        saved = float(state["loss_scale"])
        if self.dynamic:
            self._loss_scale = max(saved, self.min_loss_scale)
            self._set_by_hand = math.inf
        elif saved != self._loss_scale:
            logger.warning(
                "The checkpoint holds a loss scale of %g, this session's is static: it stays %g.",
                saved,
                self._loss_scale,
            )
        self._unskipped = int(state["unskipped"])
        self._skips_in_a_row = 0
        self._write_state()

    def grad_scaler_state(self) -> dict[str, float | int]:
        """This loss scale as ``torch.amp.GradScaler.load_state_dict`` takes it."""
        return {
            "scale": self.loss_scale,
            "growth_factor": self.rule.growth_factor,
            "backoff_factor": self.rule.backoff_factor,
            # It knows no static scale.
            "growth_interval": self.rule.growth_interval if self.dynamic else 2**31 - 1,
            "_growth_tracker": self._unskipped,
        }

    def load_grad_scaler_state(self, state: Mapping[str, float | int]) -> None:
        """Take over what ``torch.amp.GradScaler.state_dict`` returned: scale, counter, and the rule by which it moves."""
        missing = [name for name in _GRAD_SCALER_KEYS if name not in state]
        if missing:
            raise CheckpointError(
                f"A GradScaler's state must have {', '.join(map(repr, _GRAD_SCALER_KEYS))}; found "
                f"{', '.join(map(repr, state))}. Pass what torch.amp.GradScaler.state_dict() returned."
            )
        entry = {"loss_scale": state["scale"], "unskipped": state["_growth_tracker"]}
        validate_scaler_state(entry)
        if self.dynamic:
            self.rule = replace(
                self.rule,
                growth_factor=float(state["growth_factor"]),
                backoff_factor=float(state["backoff_factor"]),
                growth_interval=int(state["growth_interval"]),
            )
            # A GradScaler has no floor: its scale is taken over exactly, and is the floor then.
            self.min_loss_scale = min(self.min_loss_scale, float(state["scale"]))
        self.load_state_dict(entry)


@lru_cache
def _are_powers_of_two(*numbers: float) -> bool:
    return all(math.frexp(number)[0] == 0.5 for number in numbers)


def save_scalers(groups: Sequence[Sequence[LossScaler]], destination: dict[str, Any]) -> None:
    """Add ``{"loss_scaler0": ..., "loss_scaler1": ...}`` to ``destination``, for the scalers of sessions, oldest first.

    With more than one session each entry says under ``"session"`` of which it is.
    """
    groups = [group for group in groups if group]
    numbered = ((number, scaler) for number, group in enumerate(groups) for scaler in group)
    for index, (number, scaler) in enumerate(numbered):
        entry = scaler.state_dict()
        destination[f"loss_scaler{index}"] = entry if len(groups) == 1 else {**entry, "session": number}


def load_scalers(groups: Sequence[Sequence[LossScaler]] | None, state: Mapping[str, Any]) -> None:
    """Load what `save_scalers` wrote, entry by entry in the order of the mapping; without sessions it is only checked.

    Where the numbers of sessions differ, the newest are what counts: models of earlier folds may have been alive then, or
    be alive now.
    """
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"load_state_dict expects the dict that ampkit.state_dict() returned, found {type(state).__name__}."
        )
    unexpected = [key for key in state if "loss_scaler" not in str(key)]
    if unexpected:
        raise CheckpointError(
            f"Unexpected keys in the state dict: {', '.join(map(repr, unexpected))}; expected 'loss_scaler0', 'loss_scaler1', ... "
            "Pass the part of the checkpoint that ampkit.state_dict() wrote."
        )
    for entry in state.values():
        validate_scaler_state(entry)
    if groups is None:
        return
    groups = [group for group in groups if group]
    saved: dict[Any, list[dict[str, Any]]] = {}
    for entry in state.values():
        saved.setdefault(entry.get("session"), []).append(entry)
    in_use = sum(len(group) for group in groups)
    if len(saved) == 1 and len(state) == in_use:  # entries that do not say of which session they are
        groups, saved = [[scaler for group in groups for scaler in group]], {None: list(state.values())}
    if not groups and saved:
        logger.warning(
            "load_state_dict was called before initialize(), or after close(): no loss scale was loaded. Call it after."
        )
    elif len(saved) != len(groups):
        logger.warning(
            "The state dict holds the loss scalers of %d initialize calls and %d are alive: those of the newest %d are loaded.",
            len(saved),
            len(groups),
            min(len(saved), len(groups)),
        )
    for group, entries in zip(reversed(groups), reversed(saved.values())):
        if len(entries) != len(group):
            logger.warning(
                "The state dict holds %d loss scalers and %d are in use: the first %d are loaded. Was num_losses changed?",
                len(entries),
                len(group),
                min(len(entries), len(group)),
            )
        for scaler, entry in zip(group, entries):
            scaler.load_state_dict(entry)


def validate_scaler_state(state: object) -> None:
    """Refuse anything that is not ``{"loss_scale": positive float, "unskipped": int}``, before anything is loaded."""
    if not isinstance(state, dict) or not {"loss_scale", "unskipped"} <= state.keys():
        raise CheckpointError(
            f"A loss scaler's state must be a dict with the keys 'loss_scale' and 'unskipped', found {state!r}."
        )
    if not _is_positive(state["loss_scale"]):
        raise CheckpointError(f"The saved loss scale must be a positive, finite number, found {state['loss_scale']!r}.")
    if not isinstance(state["unskipped"], int) or state["unskipped"] < 0:
        raise CheckpointError(f"The saved 'unskipped' must be an integer of at least 0, found {state['unskipped']!r}.")
