"""The loss scale: the number that the loss is multiplied by, the rule by which it moves, and what is said of skipped steps.

The device counts. The state of a scale, with its skips, lives on the device of the gradients: `LossScaler.update` moves it there,
by what a `FoundInf` says, and nothing waits. A copy of it arrives on the host later; "skips went from 3 to 5" is what is logged.
"""

from __future__ import annotations

import logging
import math
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from .. import kernels
from ..errors import CheckpointError, ConfigurationError, LossScaleError
from ..logs import logger
from ..optimizers.capturing import refuse_to_begin
from ..optimizers.scales import on
from .found_inf import FoundInf, is_capturing, refuse_to_read

DEFAULT_MIN_LOSS_SCALE = 2.0**-14
DEFAULT_MAX_LOSS_SCALE = 2.0**24
SKIPS_BEFORE_DIAGNOSIS = 25
SKIPS_AT_FLOOR_BEFORE_GIVING_UP = 50
DIAGNOSE = (
    "print(ampkit.diagnose(iteration)), where iteration() runs forward and backward on this batch, names line and cure."
)

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


class ScaleState(NamedTuple):
    """The words of ``kernels.update_scale``: the scale (float32) and counts (int32).

    ``skips_apart`` counts skips that move no scale: under ``no_sync()``, in a block that did not name the optimizer, or for
    gradients that stopped being finite after the block.
    """

    scale: float
    unskipped: int
    overflows_left: int
    skips: int = 0
    skips_in_a_row: int = 0
    skips_at_floor: int = 0
    skips_apart: int = 0

    @classmethod
    def of(cls, words: Sequence[int]) -> ScaleState:
        return cls(*struct.unpack("f", struct.pack("i", words[0])), *words[1:])


class HostCopy:
    """The words of a tensor on the host: at once on the CPU, on CUDA some time after `send`, elsewhere when somebody waits."""

    def __init__(self, words: torch.Tensor) -> None:
        self._words = words
        self._pinned = torch.empty_like(words, device="cpu", pin_memory=True) if words.is_cuda else words
        self._event = torch.cuda.Event() if words.is_cuda else None
        self._is_on_host = words.device.type == "cpu"
        self._is_on_its_way = False

    def send(self) -> None:
        """Have the words as they are now copied, unless an earlier copy is on its way."""
        if self._event is None or is_capturing(self._words):
            return
        if not self._is_on_its_way or self._event.query():
            self._pinned.copy_(self._words, non_blocking=True)
            self._event.record(torch.cuda.current_stream(self._words.device))
            self._is_on_its_way = True

    def ready(self) -> bool:
        """Whether a copy has arrived that was not read. CUDA allows no question about an event while a graph is captured."""
        if self._event is None:
            return self._is_on_host
        return self._is_on_its_way and not is_capturing(self._words) and self._event.query()

    def read(self, wait: bool = False) -> ScaleState:
        """What has arrived; with ``wait`` the words as they are now."""
        self._is_on_its_way = False
        return ScaleState.of((self._words if wait else self._pinned).tolist())


class LossScaler:
    """The loss scale of one loss: a number that stays, or one that moves by a `DynamicLossScale` between two bounds.

    ``loss_scale`` may be assigned at any time and is used from the next iteration on. ``unskipped`` counts iterations
    (exits of ``scale_loss``) since the last overflow or growth. Reading either waits for the device. A static scale other than 1.0
    checks too, and an overflow skips the step.
    """

    def __init__(
        self,
        loss_scale: float | DynamicLossScale | None = None,
        min_loss_scale: float = DEFAULT_MIN_LOSS_SCALE,
        max_loss_scale: float = DEFAULT_MAX_LOSS_SCALE,
        loss_id: int = 0,
        on_floor: str = "raise",
        as_apex: bool = False,
    ) -> None:
        rule = DynamicLossScale() if loss_scale is None else loss_scale
        self.dynamic = isinstance(rule, DynamicLossScale)
        self.rule = rule if isinstance(rule, DynamicLossScale) else DynamicLossScale()
        self.min_loss_scale, self.max_loss_scale = float(min_loss_scale), float(max_loss_scale)
        self.loss_id, self.on_floor = loss_id, on_floor
        #: What blocks with ``delay_overflow_check=True`` found: part of the iteration that the next block ends.
        self.delayed_check: FoundInf | None = None
        first = float(rule.init_scale if self.dynamic else rule)
        if self.dynamic:
            first = max(self.min_loss_scale, min(self.max_loss_scale, first))
        #: What the host has learned so far, and what it has told of that; the device may be ahead.
        self._known = self._told = ScaleState(first, 0, self.rule.hysteresis)
        self._set_by_hand = math.inf
        self._as_apex = as_apex  # every skip has a line, and the same one
        self._line, self._repeats = "", 0  # the last such line, and how often it would have stood there again
        self._error: LossScaleError | None = None  # found where raising would have been out of place
        self._state: torch.Tensor | None = None
        self._recent: deque[FoundInf] = deque(maxlen=8)  # among which the newest skip is, for its parameter's name
        self._snapshot: torch.Tensor | None = None
        self._snapshot_captured = False

    @property
    def loss_scale(self) -> float:
        return self.synchronize().scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        if not _is_positive(value):
            raise ConfigurationError(f"A loss scale must be a positive, finite number, found {value!r}.")
        self._set_by_hand = float(value)
        self._write(scale=float(value))

    @property
    def unskipped(self) -> int:
        return self.synchronize().unskipped

    @unskipped.setter
    def unskipped(self, value: int) -> None:
        self._write(unskipped=int(value))

    @property
    def skips_in_a_row(self) -> int:
        return self.synchronize().skips_in_a_row

    @property
    def is_one(self) -> bool:
        """Whether this is a static scale of 1.0, which multiplies and checks nothing."""
        return not self.dynamic and self._known.scale == 1.0

    @property
    def floor(self) -> float:
        """What no overflow brings the scale below: ``min_loss_scale``, a lower scale that was set by hand, or a static scale."""
        return min(self.min_loss_scale, self._set_by_hand) if self.dynamic else self._known.scale

    @property
    def is_power_of_two(self) -> bool:
        """Whether the scale, wherever it moves, is one: bfloat16 can then be divided by it without rounding."""
        if not self.dynamic:
            return _are_powers_of_two(self._known.scale)
        rule = self.rule
        return _are_powers_of_two(
            self._known.scale, self.floor, self.max_loss_scale, rule.growth_factor, rule.backoff_factor
        )

    # The iteration

    def current(self, device: torch.device) -> float | torch.Tensor:
        """The scale of an iteration that begins now: a static one as a number, else a copy of the one on ``device``.

        While no iteration has ended, it is the same object.
        """
        if not self.dynamic:
            return self._known.scale
        self._live_on(device)
        captured = is_capturing(self._state)
        # What a CUDA graph replays must come from the state, not from a copy that was made before it.
        if self._snapshot is None or captured != self._snapshot_captured:
            self._snapshot, self._snapshot_captured = self._scale.clone(), captured
        return self._snapshot

    def update(self, found: FoundInf | torch.Tensor, *, moves_scale: bool = True) -> FoundInf:
        """End an iteration: the scale moves, on its device, by what was ``found``, or by a flag of shape [1].

        With ``moves_scale=False`` the iteration counts as clean here whatever was found: used for gradients that other
        ranks have not seen yet, where a scale that moved on one rank alone would part them.
        """
        if isinstance(found, torch.Tensor):
            found = FoundInf(found)
        found.scaler, found.moves_scale = self, moves_scale
        if self.delayed_check is found:
            self.delayed_check = None
        self._live_on(found.flag.device)
        is_dynamic, rule, scale = self.dynamic, self.rule, self._known.scale
        kernels.update_scale(
            self._state,
            found.flag if moves_scale else torch.zeros_like(found.flag),
            growth_factor=rule.growth_factor if is_dynamic else 1.0,
            backoff_factor=rule.backoff_factor if is_dynamic else 1.0,
            growth_interval=rule.growth_interval if is_dynamic else 2**31 - 1,
            hysteresis=rule.hysteresis,
            min_scale=self.floor,
            max_scale=self.max_loss_scale if is_dynamic else scale,
        )
        self._snapshot = None
        self._recent.append(found)
        self._copy.send()
        return found

    def count_apart(self, flag: torch.Tensor) -> None:
        """A step is skipped where this is above 0, and the scale stays."""
        if self._state is None:
            self._live_on(flag.device)
        self._state[-1:].add_(on(flag > 0, self._state.device))
        self._copy.send()

    def _live_on(self, device: torch.device) -> None:
        """Have the state on this device."""
        if self._state is None or self._state.device != device:
            refuse_to_begin("the loss scale", device)
            known = self.synchronize()
            self._state = torch.zeros(len(known), dtype=torch.int32, device=device)
            self._scale = self._state.view(torch.float32)[0]
            self._copy = HostCopy(self._state)
            self._put(known)

    def _write(self, **changes: float) -> None:
        """Change words of the state."""
        self._put(self.synchronize()._replace(**changes))

    def _put(self, known: ScaleState) -> None:
        self._known, self._snapshot = known, None
        if self._state is not None:
            self._scale.fill_(self._known.scale)
            for word, count in zip(self._state[1:], self._known[1:]):
                word.fill_(count)

    # What the host learns

    def synchronize(self) -> ScaleState:
        """Learn of everything that has happened; waits for the device."""
        if self._state is not None:
            refuse_to_read(self._state)
            self._learn(wait=True)
        return self._known

    def _learn(self, wait: bool) -> None:
        """Read what has arrived, or wait; a static scale need not be a number that float32 has."""
        learned = self._copy.read(wait)
        self._known = learned if self.dynamic else learned._replace(scale=self._known.scale)

    def report(
        self, *, wait: bool = False, raises: bool = True, unnamed: Callable[[], str | None] = lambda: None
    ) -> bool:
        """Log the steps that were skipped since the last report, if that is known, or with ``wait``; returns whether there are any.

        Raises `LossScaleError` after 50 skips in a row at the floor, where nothing will change by itself; with ``raises=False`` the
        next report does. ``unnamed`` names a parameter whose gradient is not finite where no kernel has noted one.
        """
        if wait:
            self.synchronize()
        elif self._state is not None and self._copy.ready():
            self._learn(wait=False)
        told, self._told = self._told, self._known
        if self._known.skips_apart != told.skips_apart:
            logger.info(
                "A step was skipped and the loss scale stays: gradients were not finite under no_sync() (the scale moves at the "
                "next sync), in a scale_loss block that did not name the optimizer, or only at step(). Where they are averaged "
                "over processes by hand, pass process_group= to initialize()."
            )
        skips = self._known.skips - told.skips
        if skips:
            self._tell(skips, unnamed)
        if wait:
            self._recent.clear()
        if raises and self._error is not None:
            error, self._error = self._error, None
            raise error
        return bool(skips)

    def _tell(self, skips: int, unnamed: Callable[[], str | None]) -> None:
        row, at_floor = self._known.skips_in_a_row, self._known.skips_at_floor
        diagnoses = _passes(row, skips, SKIPS_BEFORE_DIAGNOSIS)
        gives_up = _passes(at_floor, skips, SKIPS_AT_FLOOR_BEFORE_GIVING_UP)
        self._tell_skips(self.overflow_line(), skips, is_new=row <= skips or self._as_apex)
        if not (diagnoses or gives_up or logger.isEnabledFor(logging.DEBUG)):
            return
        newest = next((found for found in reversed(self._recent) if found.overflowed), None)
        loss = 0.0 if newest is None or newest.loss is None else newest.loss.sum().item()
        if diagnoses or logger.isEnabledFor(logging.DEBUG):
            if math.isfinite(loss):
                name = newest.first_nonfinite() if newest else None
                name = name or unnamed() or "not found (the gradients were cleared or changed since)"
                cause = f"the first parameter whose gradient is not finite is {name}."
            else:
                cause = f"the loss itself is {loss}, which no loss scale cures: look at the data and the weights."
            logger.log(
                logging.WARNING if diagnoses else logging.DEBUG,
                "Loss scaler %d: %d steps in a row were skipped; %s %s",
                self.loss_id,
                row,
                cause,
                DIAGNOSE,
            )
        if gives_up:
            where = "loss scale at its floor of" if self.dynamic else "static loss scale"
            lower = "min_loss_scale= lower" if self.dynamic else "a lower loss_scale="
            if math.isfinite(loss) and not self.is_one:
                cures = f"try a lower learning rate or bfloat16 (O4, O5), or set {lower}"
            else:
                cures = "try a lower learning rate"
            message = (
                f"Loss scaler {self.loss_id}: {at_floor} steps in a row were skipped with the {where} {self.floor:g}, so the "
                f"gradients are not finite at any scale. Look for inf or NaN in the data or the loss, or {cures}; on_floor='warn' "
                f"goes on regardless. {DIAGNOSE}"
            )
            if self.on_floor == "raise":
                self._error = LossScaleError(message)
            else:
                logger.warning(message)

    def _tell_skips(self, line: str, skips: int, is_new: bool) -> None:
        """A line for skips. Equal ones of a row of them are counted, and told after some."""
        is_equal, repeats = line == self._line and not is_new, self._repeats
        if is_equal and repeats + skips < SKIPS_BEFORE_DIAGNOSIS:
            self._repeats += skips
            return
        told = [(line, repeats + skips)] if is_equal else [(self._line, repeats), (line, skips)]
        for said, number in told:
            if number:
                logger.info(said + (f" ({number} steps)" if number > 1 else ""))
        self._line, self._repeats = line, 0

    def overflow_line(self) -> str:
        """The line that reports a skipped step."""
        if self.is_one:
            return "Gradients are not finite: this step is skipped. Look for inf or NaN in the batch, the loss or the weights."
        if not self.dynamic:
            return (
                f"Gradient overflow at the static loss scale {self._known.scale:g} (loss scaler {self.loss_id}): this step is "
                f"skipped and the scale stays. A lower loss_scale=, or 'dynamic', avoids it."
            )
        # Scripts search their logs for the start of this line, Apex's two spaces included.
        begin = f"Gradient overflow.  Skipping step, loss scaler {self.loss_id}"
        if self._known.skips_at_floor and not self._as_apex:
            return f"{begin} is at its floor, loss scale stays {self._known.scale}"
        return f"{begin} reducing loss scale to {self._known.scale}"

    # Checkpoints

    def state_dict(self) -> dict[str, float | int]:
        """``{"loss_scale": float, "unskipped": int}``, the keys of Apex's checkpoints."""
        return {"loss_scale": self.loss_scale, "unskipped": self.unskipped}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        validate_scaler_state(state)
        saved, scale = float(state["loss_scale"]), self.loss_scale
        if self.dynamic:
            scale, self._set_by_hand = max(saved, self.min_loss_scale), math.inf
        elif saved != scale:
            logger.warning(
                "The checkpoint holds a loss scale of %g, this session's is static: it stays %g.", saved, scale
            )
        self._write(scale=scale, unskipped=int(state["unskipped"]), skips_in_a_row=0, skips_at_floor=0)

    def grad_scaler_state(self) -> dict[str, float | int]:
        """This loss scale as ``torch.amp.GradScaler.load_state_dict`` takes it."""
        return {
            "scale": self.loss_scale,
            "growth_factor": self.rule.growth_factor,
            "backoff_factor": self.rule.backoff_factor,
            # It knows no static scale.
            "growth_interval": self.rule.growth_interval if self.dynamic else 2**31 - 1,
            "_growth_tracker": self.unskipped,
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


def _passes(count: int, newest: int, interval: int) -> bool:
    """Whether a count has come past a multiple of ``interval`` with its ``newest`` ones."""
    return count // interval > max(0, count - newest) // interval


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
