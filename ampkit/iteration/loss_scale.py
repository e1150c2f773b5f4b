"""The loss scale: the number that the loss is multiplied by, the rule by which it moves, and what is said of skipped steps.

The device counts. The words of a `ScaleState` lie on the device of the gradients: `LossScaler.update` has a kernel move them
by the flag of a block, and nothing waits. A `HostCopy` of them arrives later; "skips went from 3 to 5" is what is logged.
"""

from __future__ import annotations

import logging
import math
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .. import kernels
from ..errors import CheckpointError, ConfigurationError, LossScaleError
from ..logs import is_rank_zero, logger
from ..optimizers.scales import on, refuse_to_begin
from .found_inf import FoundInf, arrived, is_capturing, refuse_to_read

DEFAULT_MIN_LOSS_SCALE = 2.0**-14
DEFAULT_MAX_LOSS_SCALE = 2.0**24
SKIPS_BEFORE_DIAGNOSIS = 25
SKIPS_AT_FLOOR_BEFORE_GIVING_UP = 50
DIAGNOSE = (
    "'ampkit diagnose script.py' names the line. print(ampkit.diagnose(iteration)), where iteration() runs forward and backward "
    "on this batch, tries cures too."
)


@dataclass(frozen=True)
class DynamicLossScale:
    """The rule of a dynamic loss scale, for ``initialize(..., loss_scale=DynamicLossScale(...))``::

        scale, unskipped, chances = init_scale, 0, hysteresis
        for each iteration:                            # the end of a scale_loss block, see update_scale
            if a gradient is not finite:               # found_inf; the step is skipped
                unskipped, chances = 0, chances - 1
                if chances <= 0:
                    scale = max(scale * backoff_factor, min_loss_scale)
            else:
                unskipped, chances = unskipped + 1, hysteresis
                if unskipped == growth_interval:
                    scale, unskipped = min(scale * growth_factor, max_loss_scale), 0

    Scales and factors are plain numbers, best powers of two, which change no digit of a gradient; ``growth_interval`` and
    ``hysteresis`` count iterations; the bounds are settings of ``initialize``. Raises `ConfigurationError` for a value outside of
    its range. Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1

    def __post_init__(self) -> None:
        for name, accepted, holds in (
            ("init_scale", "a positive, finite number", is_positive),
            ("growth_factor", "a finite number above 1", lambda value: is_positive(value) and value > 1),
            ("backoff_factor", "a number between 0 and 1", lambda value: is_positive(value) and value < 1),
            ("growth_interval", "an integer of at least 1", _is_count),
            ("hysteresis", "an integer of at least 1", _is_count),
        ):
            if not holds(getattr(self, name)):
                raise ConfigurationError(f"DynamicLossScale: {name} must be {accepted}, found {getattr(self, name)!r}.")


def is_positive(value: object) -> bool:
    """Whether it is a positive, finite number."""
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
    """The words of one scaler on the host: at once on the CPU, later in pinned memory on CUDA, elsewhere when `read` waits."""

    def __init__(self, words: torch.Tensor) -> None:
        self._words = words
        self._pinned = torch.empty_like(words, device="cpu", pin_memory=True) if words.is_cuda else words
        self._event = torch.cuda.Event() if words.is_cuda else None
        self._is_sent = False
        self.iteration = 0  # the last that has moved the words which `read` gives

    def send(self, iteration: int) -> None:
        """Have the words as they are after an iteration copied, unless an earlier copy is on its way."""
        if self._event is None:
            self.iteration = iteration
        elif not is_capturing(self._words) and (not self._is_sent or self._event.query()):
            self._pinned.copy_(self._words, non_blocking=True)
            self._event.record(torch.cuda.current_stream(self._words.device))
            self._is_sent, self.iteration = True, iteration

    def ready(self) -> bool:
        """Whether a copy has arrived that was not read. CUDA allows no question about an event while a graph is captured."""
        if self._event is None:
            return self._words.is_cpu
        return self._is_sent and not is_capturing(self._words) and self._event.query()

    def read(self, wait: bool = False) -> ScaleState:
        """What has arrived; with ``wait`` the words as they are now."""
        self._is_sent = False
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
        self._as_apex = as_apex  # every skip has the same line
        self._has_news = False  # whether a step may have been skipped that was not told of
        self._error: LossScaleError | None = None  # found where raising would have been out of place
        self._state: torch.Tensor | None = None
        self._iterations = 0  # that have ended
        self._recent: deque[FoundInf] = deque(maxlen=8)  # among which skips are that were not told of, for their causes
        #: A copy of the scale, and whether a CUDA graph captured it.
        self._snapshot: tuple[torch.Tensor, bool] | None = None
        self.change_rule()

    @property
    def loss_scale(self) -> float:
        return self.synchronize().scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        if not is_positive(value):
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

    def change_rule(
        self,
        rule: DynamicLossScale | None = None,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = None,
    ) -> None:
        """Have a dynamic scale move by another rule, or between other bounds, from the next iteration on."""
        self.rule = self.rule if rule is None else rule
        self.min_loss_scale = self.min_loss_scale if min_loss_scale is None else float(min_loss_scale)
        self.max_loss_scale = self.max_loss_scale if max_loss_scale is None else float(max_loss_scale)
        rule, scale = self.rule, self.synchronize().scale
        #: Whether this is a static scale of 1.0, which multiplies and checks nothing.
        self.is_one = not self.dynamic and scale == 1.0
        #: What no overflow brings the scale below: ``min_loss_scale``, a lower scale that was set by hand, or a static scale.
        self.floor = min(self.min_loss_scale, self._set_by_hand) if self.dynamic else scale
        # A static scale has itself for both bounds, so that no factor moves it.
        bounds = (self.floor, self.max_loss_scale if self.dynamic else scale)
        factors = (rule.growth_factor, rule.backoff_factor)
        interval = rule.growth_interval if self.dynamic else 2**31 - 1
        self._arguments = (*factors, interval, rule.hysteresis, *bounds)  # of kernels.update_scale

    # The iteration

    def current(self, device: torch.device) -> float | torch.Tensor:
        """The scale of an iteration that begins now: a static one as a number, else a copy of the one on ``device``.

        While no iteration has ended, it is the same object.
        """
        if not self.dynamic:
            return self._known.scale
        if self._state is None or self._state.device != device:
            self._move_to(device)
        is_captured = self._state.is_cuda and is_capturing(self._state)
        # What a CUDA graph replays must come from the state, not from a copy that was made before it.
        if self._snapshot is None or is_captured != self._snapshot[1]:
            self._snapshot = self._scale.clone(), is_captured
        return self._snapshot[0]

    def update(self, found: FoundInf | torch.Tensor, *, moves_scale: bool = True) -> FoundInf:
        """End an iteration: the scale moves, on its device, by what was ``found``, or by a flag of shape [1].

        With ``moves_scale=False`` the iteration counts as clean here whatever was found: used for gradients that other
        ranks have not seen yet, where a scale that moved on one rank alone would part them.
        """
        if isinstance(found, torch.Tensor):
            found = FoundInf(found)
            found.agree()
        found.scaler, found.moves_scale = self, moves_scale
        if self.delayed_check is found:
            self.delayed_check = None
        if self._state is None or self._state.device != found.flag.device:
            self._move_to(found.flag.device)
        flag = found.flag if moves_scale else torch.zeros_like(found.flag)
        kernels.update_scale(self._state, flag, *self._arguments)
        self._snapshot = None
        self._has_news = self._has_news or not found.is_clean
        self._iterations += 1
        found.iteration = None if is_capturing(found.flag) else self._iterations
        self._recent.append(found)
        self._copy.send(self._iterations)
        return found

    def count_apart(self, flag: torch.Tensor) -> None:
        """A step is skipped where this is above 0, and the scale stays."""
        if self._state is None:
            self._move_to(flag.device)
        self._state[-1:].add_(on(flag > 0, self._state.device))
        self._has_news = True
        self._copy.send(self._iterations)

    def _move_to(self, device: torch.device) -> None:
        """Have the state on this device."""
        refuse_to_begin("the loss scale", device)
        known = self.synchronize()
        words = torch.tensor([0, *known[1:]], dtype=torch.int32)
        words.view(torch.float32)[0] = known.scale
        state = words.to(device)
        self._scale, self._copy, self._snapshot = state.view(torch.float32)[0], HostCopy(state), None
        self._state = state  # last: another thread may read the scale meanwhile

    def _write(self, **changes: float) -> None:
        """Change words of the state."""
        self._known, self._snapshot = self.synchronize()._replace(**changes), None
        if self._state is not None:
            self._scale.fill_(self._known.scale)
            for word, count in zip(self._state[1:], self._known[1:]):
                word.fill_(count)
        self.change_rule()

    # What the host learns

    def synchronize(self) -> ScaleState:
        """Learn of everything that has happened; waits for the device."""
        if self._state is not None:
            refuse_to_read(self._state)
            self._learn(wait=True)
        return self._known

    def _learn(self, wait: bool = False) -> bool:
        """Read what has arrived, or wait; a static scale need not be a number that float32 has. False where nothing has arrived."""
        if self._state is None or not (wait or self._copy.ready()):
            return False
        learned = self._copy.read(wait)
        self._known = learned if self.dynamic else learned._replace(scale=self._known.scale)
        return True

    def report(
        self, *, wait: bool = False, raises: bool = True, unnamed: Callable[[], str | None] = lambda: None
    ) -> bool:
        """Log the steps that were skipped since the last report, if that is known, or with ``wait``; returns whether there are any.

        Raises `LossScaleError` after 50 skips in a row at the floor, where nothing will change by itself; with ``raises=False`` the
        next report does. ``unnamed`` names a parameter whose gradient is not finite where no kernel has noted one.
        """
        if wait:
            self.synchronize()
        elif not self._has_news or not self._learn():
            return False
        told, self._told = self._told, self._known
        if self._known.skips_apart != told.skips_apart:
            logger.info(
                "A step was skipped and the loss scale stays: gradients were not finite under no_sync() (the scale moves at the "
                "next sync), in a scale_loss block that did not name the optimizer, or only at step(). Where they are averaged "
                "over processes by hand, pass process_group= to initialize()."
            )
        skips = self._known.skips - told.skips
        reached = self._iterations if wait else self._copy.iteration  # by the device
        if skips:
            newest = self._newest_skip(reached)
            is_said = newest is not None and not self._as_apex and is_rank_zero() and logger.isEnabledFor(logging.INFO)
            cause = newest.cause(unnamed if self._state.is_cpu else lambda: None) if is_said else ""
            details = ", ".join(filter(None, (f"{skips} steps" * (skips > 1), cause)))
            logger.info(self.overflow_line() + (f" ({details})" if details else ""))
            self._diagnose(skips, newest, unnamed)
        # Every replay of a CUDA graph writes to what it has captured.
        self._recent = deque(
            (one for one in self._recent if one.iteration is None or one.iteration > reached), maxlen=8
        )
        if raises and self._error is not None:
            error, self._error = self._error, None
            raise error
        self._has_news = self._error is not None or not (wait or self._state.is_cpu)
        return bool(skips)

    def _newest_skip(self, reached: int) -> FoundInf | None:
        """The last iteration that was skipped, of those that were not told of, up to the one that the device has come to."""
        for one in reversed(self._recent):
            if one.moves_scale and (one.iteration is None or one.iteration <= reached) and arrived(one.flag):
                return one
        return None

    def _diagnose(self, skips: int, newest: FoundInf | None, unnamed: Callable[[], str | None]) -> None:
        """After 25 skips in a row say which gradient is not finite; after 50 at the floor, end the training."""
        row, at_floor = self._known.skips_in_a_row, self._known.skips_at_floor
        if _passes(row, skips, SKIPS_BEFORE_DIAGNOSIS):
            cause = newest.cause(unnamed) if newest is not None else ""
            last = f" ({cause})" if cause else ""
            logger.warning("Loss scaler %d: %d steps in a row were skipped%s. %s", self.loss_id, row, last, DIAGNOSE)
        if _passes(at_floor, skips, SKIPS_AT_FLOOR_BEFORE_GIVING_UP):
            where = "loss scale at its floor of" if self.dynamic else "static loss scale"
            lower = "min_loss_scale= lower" if self.dynamic else "a lower loss_scale="
            is_of_scale = (newest is None or math.isfinite(newest.sum_of_loss())) and not self.is_one
            more = f" or bfloat16 (O4, O5), or set {lower}" if is_of_scale else ""
            self._error = LossScaleError(
                f"Loss scaler {self.loss_id}: {at_floor} steps in a row were skipped with the {where} {self.floor:g}, so the "
                "gradients are not finite at any scale. Look for inf or NaN in the data or the loss, or try a lower learning rate"
                f"{more}; on_floor='warn' goes on regardless. {DIAGNOSE}"
            )
            if self.on_floor != "raise":
                logger.warning(str(self._error))
                self._error = None

    def overflow_line(self) -> str:
        """The line that reports a skipped step."""
        if self.is_one:
            return "Gradients are not finite: this step is skipped. Look for inf or NaN in the batch, the loss or the weights."
        if not self.dynamic:
            return (
                f"Gradient overflow at the static loss scale {self._known.scale:g} (loss scaler {self.loss_id}): this step is "
                f"skipped and the scale stays. If the loss is finite, a lower loss_scale=, or 'dynamic', avoids it."
            )
        # Scripts search their logs for the start of this line, Apex's two spaces included.
        begin = f"Gradient overflow.  Skipping step, loss scaler {self.loss_id}"
        if self._known.skips_at_floor and not self._as_apex:
            return f"{begin} is at its floor, loss scale stays {self._known.scale}"
        return f"{begin} reducing loss scale to {self._known.scale}"

    # Checkpoints

    def state_dict(self) -> dict[str, float | int]:
        """``{"loss_scale": float, "unskipped": int}``, keys of Apex's; with a hysteresis above 1 also ``"overflows_left"``."""
        known = self.synchronize()
        state: dict[str, float | int] = {"loss_scale": known.scale, "unskipped": known.unskipped}
        if self.dynamic and self.rule.hysteresis > 1:
            state["overflows_left"] = known.overflows_left
        return state

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        validate_scaler_state(state)
        saved, scale = float(state["loss_scale"]), self.loss_scale
        if self.dynamic:
            scale, self._set_by_hand = max(saved, self.min_loss_scale), math.inf
        elif saved != scale:
            logger.warning(
                "The checkpoint holds a loss scale of %g, this session's is static: it stays %g.", saved, scale
            )
        left = min(int(state.get("overflows_left", self.rule.hysteresis)), self.rule.hysteresis)
        counts = {"unskipped": int(state["unskipped"]), "overflows_left": left}
        self._write(scale=scale, skips_in_a_row=0, skips_at_floor=0, **counts)


def _passes(count: int, newest: int, interval: int) -> bool:
    """Whether a count has come past a multiple of ``interval`` with its ``newest`` ones."""
    return count // interval > max(0, count - newest) // interval


def save_scalers(groups: Sequence[Sequence[LossScaler]], destination: dict[str, Any]) -> None:
    """Add ``{"loss_scaler0": ..., ...}`` to ``destination``, oldest session first; of several each names its ``"session"``."""
    groups = [group for group in groups if group]
    numbered = ((number, scaler) for number, group in enumerate(groups) for scaler in group)
    for index, (number, scaler) in enumerate(numbered):
        entry = scaler.state_dict()
        destination[f"loss_scaler{index}"] = entry if len(groups) == 1 else {**entry, "session": number}


def load_scalers(groups: Sequence[Sequence[LossScaler]] | None, state: Mapping[str, Any]) -> None:
    """Load what `save_scalers` wrote, or with None only check it. Of more sessions than were saved, or fewer, the newest count."""
    _refuse_foreign_keys(state)
    for entry in state.values():
        validate_scaler_state(entry)
    if groups is None:
        return
    groups = [group for group in groups if group]
    saved: dict[Any, list[dict[str, Any]]] = {}
    for entry in state.values():
        saved.setdefault(entry.get("session"), []).append(entry)
    if len(saved) == 1 and len(state) == sum(map(len, groups)):  # entries that do not say of which session they are
        groups, saved = [[scaler for group in groups for scaler in group]], {None: list(state.values())}
    if not groups and saved:
        logger.warning(
            "load_state_dict was called before initialize(), or after close(): no loss scale was loaded. Call it after."
        )
    elif len(saved) != len(groups):
        logger.warning(
            "The state dict holds the loss scalers of %d initialize calls and %d are alive: those of the newest %d are loaded.",
            *(len(saved), len(groups), min(len(saved), len(groups))),
        )
    for group, entries in zip(reversed(groups), reversed(saved.values())):
        if len(entries) != len(group):
            logger.warning(
                "The state dict holds %d loss scalers and %d are in use: the first %d are loaded. Was num_losses changed?",
                *(len(entries), len(group), min(len(entries), len(group))),
            )
        for scaler, entry in zip(group, entries):
            scaler.load_state_dict(entry)


def _refuse_foreign_keys(state: object) -> None:
    if not isinstance(state, Mapping):
        raise CheckpointError(f"load_state_dict expects the dict of ampkit.state_dict(), found {type(state).__name__}.")
    unexpected = [key for key in state if "loss_scaler" not in str(key)]
    if unexpected:
        raise CheckpointError(
            f"Unexpected keys in the state dict: {', '.join(map(repr, unexpected))}; expected 'loss_scaler0', 'loss_scaler1', ... "
            "Pass the part of the checkpoint that ampkit.state_dict() wrote."
        )


def validate_scaler_state(state: object) -> None:
    """Refuse anything that is not ``{"loss_scale": positive float, "unskipped": int}``, before anything is loaded."""
    if not isinstance(state, dict) or not {"loss_scale", "unskipped"} <= state.keys():
        raise CheckpointError(
            f"A loss scaler's state must be a dict with the keys 'loss_scale' and 'unskipped', found {state!r}."
        )
    if not is_positive(state["loss_scale"]) or state["loss_scale"] > torch.finfo(torch.float32).max:
        raise CheckpointError(
            f"The saved loss scale must be a positive, finite float32, found {state['loss_scale']!r}."
        )
    for name in ("unskipped", "overflows_left"):
        if not isinstance(state.get(name, 0), int) or not 0 <= state.get(name, 0) < 2**31:
            raise CheckpointError(f"The saved {name!r} must be an integer of 0 to 2**31 - 1, found {state[name]!r}.")
