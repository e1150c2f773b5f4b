"""The loss scale: the factor of the loss, the rule that moves it, and the reports of skipped steps."""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .. import kernels
from ..errors import CheckpointError, ConfigurationError, LossScaleError
from ..logs import logger
from ..optimizers.scales import moved_to, refuse_to_begin
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
        for each iteration:                            # the end of a scale_loss block outside of DDP's no_sync()
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
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 and math.isfinite(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


class ScaleState(NamedTuple):
    """The words of ``kernels.update_scale``: the scale (float32) and counts (int32)."""

    scale: float
    unskipped: int
    overflows_left: int
    skips: int = 0
    skips_in_a_row: int = 0
    skips_at_floor: int = 0
    skips_apart: int = 0  # of those that move no scale, see `LossScaler.report`


class HostCopy:
    """The words of one scaler on the host: at once on the CPU, later in pinned memory on CUDA, elsewhere when `read` waits."""

    def __init__(self, words: torch.Tensor) -> None:
        self._words = words
        self._pinned = torch.empty_like(words, device="cpu", pin_memory=True) if words.is_cuda else words
        self._event = torch.cuda.Event() if words.is_cuda else None
        self._is_sent = False
        self.iteration = 0  # the last that has moved the words that `read` returns

    def send(self, iteration: int) -> None:
        """Copy the words as they are after an iteration, unless an earlier copy is on its way."""
        if self._event is None:
            self.iteration = iteration
        elif not is_capturing(self._words) and (not self._is_sent or self._event.query()):
            self._pinned.copy_(self._words, non_blocking=True)
            self._event.record(torch.cuda.current_stream(self._words.device))
            self._is_sent, self.iteration = True, iteration

    def ready(self) -> bool:
        """Whether an unread copy has arrived; False while a graph is captured, when CUDA allows no query of an event."""
        if self._event is None:
            return self._words.is_cpu
        return self._is_sent and not is_capturing(self._words) and self._event.query()

    def read(self, wait: bool = False) -> ScaleState:
        """Return the words that have arrived, or with ``wait`` the present ones."""
        self._is_sent = False
        words = (self._words if wait else self._pinned).tolist()
        return ScaleState(*struct.unpack("f6i", struct.pack("7i", *words)))


class LossScaler:
    """The loss scale of one loss: a number that stays, or one that moves by a `DynamicLossScale` between two bounds.

    ``loss_scale`` may be assigned at any time and is used from the next iteration on. ``unskipped`` counts iterations
    (exits of ``scale_loss``, but for those under DDP's ``no_sync()``) since the last overflow or growth. Reading either waits for
    the device.
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
        self.rule = loss_scale if isinstance(loss_scale, DynamicLossScale) else DynamicLossScale()
        self.dynamic = not isinstance(loss_scale, (int, float))
        self.min_loss_scale, self.max_loss_scale = float(min_loss_scale), float(max_loss_scale)
        self.loss_id, self.on_floor = loss_id, on_floor
        #: The flag of blocks with ``delay_overflow_check=True``: part of the iteration that the next block ends.
        self.delayed_check: FoundInf | None = None
        first = max(self.min_loss_scale, min(self.max_loss_scale, float(self.rule.init_scale)))
        if isinstance(loss_scale, (int, float)):
            first = float(loss_scale)
        #: The last state that the host has read, and the last that it has reported; the device may be ahead.
        self._known = self._told = ScaleState(first, 0, self.rule.hysteresis)
        self._set_by_hand = math.inf
        self._as_apex = as_apex  # log the same line for every skip
        self.has_news = False  # whether there may be a skip that was not reported
        self._error: LossScaleError | None = None  # to be raised by a report with ``raises``
        self._state: torch.Tensor | None = None
        self._iterations = 0  # the number of ended ones
        self._recent: deque[FoundInf] = deque(maxlen=8)  # the last flags, for causes of unreported skips
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

    def change_rule(
        self,
        rule: DynamicLossScale | None = None,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = None,
    ) -> None:
        """Move a dynamic scale by another rule, or between other bounds, from the next iteration on."""
        self.rule = self.rule if rule is None else rule
        self.min_loss_scale = self.min_loss_scale if min_loss_scale is None else min_loss_scale
        self.max_loss_scale = self.max_loss_scale if max_loss_scale is None else max_loss_scale
        rule, scale = self.rule, self.synchronize().scale
        #: Whether this is a static scale of 1.0, which multiplies and checks nothing.
        self.is_one = not self.dynamic and scale == 1.0
        #: The lowest scale that an overflow leads to: ``min_loss_scale``, a lower scale that was set by hand, or a static scale.
        self.floor = min(self.min_loss_scale, self._set_by_hand) if self.dynamic else scale
        # A static scale has itself for both bounds, so that no factor moves it.
        bounds = (self.floor, self.max_loss_scale if self.dynamic else scale)
        factors = (rule.growth_factor, rule.backoff_factor)
        interval = rule.growth_interval if self.dynamic else 2**31 - 1
        self._arguments = (*factors, interval, rule.hysteresis, *bounds)  # of kernels.update_scale

    # The iteration

    def current(self, device: torch.device) -> float | torch.Tensor:
        """The scale of an iteration that begins now: a number if it is static, else one copy of the scale on ``device``."""
        if not self.dynamic:
            return self._known.scale
        if self._state is None or self._state.device != device:
            self._move_to(device)
        is_captured = self._state.is_cuda and is_capturing(self._state)
        # What a CUDA graph replays must come from the state, not from a copy that was made before it.
        if self._snapshot is None or is_captured != self._snapshot[1]:
            self._snapshot = self._scale.clone(), is_captured
        return self._snapshot[0]

    def update(self, finding: FoundInf | torch.Tensor, *, moves_scale: bool = True) -> FoundInf:
        """End an iteration: move the scale, on its device, by a `FoundInf`, or by a flag of shape [1].

        ``moves_scale=False`` leaves scale and counts: other ranks have not seen these gradients yet, and have the same scale.
        """
        if isinstance(finding, torch.Tensor):
            finding = FoundInf(finding)
            finding.agree()
        finding.moves_scale = moves_scale
        if self.delayed_check is finding:
            self.delayed_check = None
        if self._state is None or self._state.device != finding.flag.device:
            self._move_to(finding.flag.device)
        if moves_scale:
            kernels.update_scale(self._state, finding.flag, *self._arguments)
            self._snapshot = None
        self.has_news = self.has_news or not finding.is_clean
        self._iterations += 1
        finding.iteration = None if finding.flag.is_cuda and is_capturing(finding.flag) else self._iterations
        self._recent.append(finding)
        self._copy.send(self._iterations)
        return finding

    def count_apart(self, flag: torch.Tensor) -> None:
        """Count a skipped step where ``flag`` is above 0, and leave the scale."""
        if self._state is None:
            self._move_to(flag.device)
        self._state[-1:].add_(moved_to(flag > 0, self._state.device))
        self.has_news = True
        self._copy.send(self._iterations)

    def _move_to(self, device: torch.device) -> None:
        refuse_to_begin("the loss scale", device)
        words = struct.unpack("7i", struct.pack("f6i", *self.synchronize()))
        state = torch.tensor(words, dtype=torch.int32, device=device)
        self._scale, self._copy, self._snapshot = state.view(torch.float32)[0], HostCopy(state), None
        self._state = state  # last: another thread may read the scale meanwhile

    def _write(self, **changes: float) -> None:
        self._known, self._snapshot = self.synchronize()._replace(**changes), None
        if self._state is not None:
            self._scale.fill_(self._known.scale)
            for word, count in zip(self._state[1:], self._known[1:]):
                word.fill_(count)
        self.change_rule()

    # What the host learns

    def synchronize(self) -> ScaleState:
        """Read the present state; waits for the device."""
        if self._state is not None:
            refuse_to_read(self._state)
            self._learn(wait=True)
        return self._known

    def _learn(self, wait: bool = False) -> bool:
        """Read the copy, or wait; return False where none has arrived. A static scale, which float32 may not hold, stays."""
        if self._state is None or not (wait or self._copy.ready()):
            return False
        learned = self._copy.read(wait)
        self._known = learned if self.dynamic else learned._replace(scale=self._known.scale)
        return True

    def report(self, *, wait: bool = False, raises: bool = True) -> bool:
        """Log the steps that were skipped since the last report, if that is known, or with ``wait``; returns whether there are any.

        Raises `LossScaleError` after 50 skips in a row at the floor; with ``raises=False`` the next report does.
        """
        if wait:
            self.synchronize()
        elif not self.has_news or not self._learn():
            return False
        told, self._told = self._told, self._known
        if self._known.skips_apart != told.skips_apart:
            logger.info(
                "A step was skipped and the loss scale stays: gradients were not finite under no_sync() (the scale moves at the "
                "next sync), in a scale_loss block that did not name the optimizer, or only at step(). Where they are averaged "
                "over processes by hand, pass process_group= to initialize()."
            )
        skips = self._known.skips - told.skips
        reached = self._iterations if wait else self._copy.iteration  # the last iteration whose skips are known
        if skips:
            known = [x for x in self._recent if x.moves_scale and (x.iteration is None or x.iteration <= reached)]
            newest = next((finding for finding in reversed(known) if arrived(finding.flag)), None)
            cause = "" if newest is None or self._as_apex else newest.cause()
            details = ", ".join(filter(None, (f"{skips} steps" * (skips > 1), cause)))
            logger.info(self.overflow_line(told.scale) + (f" ({details})" if details else ""))
            self._diagnose(skips, newest)
        # Every replay of a CUDA graph writes to what it has captured.
        self._recent = deque(
            (finding for finding in self._recent if finding.iteration is None or finding.iteration > reached), maxlen=8
        )
        if raises and self._error is not None:
            error, self._error = self._error, None
            raise error
        self.has_news = self._error is not None or not (wait or self._state.is_cpu)
        return bool(skips)

    def _diagnose(self, skips: int, newest: FoundInf | None) -> None:
        """Warn after 25 skips in a row, with their cause. After 50 at the floor prepare the error that ends the training."""
        row, at_floor = self._known.skips_in_a_row, self._known.skips_at_floor
        if _passes(row, skips, SKIPS_BEFORE_DIAGNOSIS):
            cause = newest.cause() if newest is not None else ""
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

    def overflow_line(self, last_scale: float = math.inf) -> str:
        """The line for a skipped step; ``last_scale`` is the scale of the last such line."""
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
        if self.rule.hysteresis > 1 and self._known.overflows_left > 0 and self._known.scale >= last_scale:
            return f"{begin} waits for more overflows (hysteresis), loss scale stays {self._known.scale}"
        return f"{begin} reducing loss scale to {self._known.scale}"

    # Checkpoints

    def state_dict(self) -> dict[str, float | int]:
        """``{"loss_scale": float, "unskipped": int}``, keys of Apex's; with a hysteresis above 1 also ``"overflows_left"``."""
        known = self.synchronize()
        state: dict[str, float | int] = {"loss_scale": known.scale, "unskipped": known.unskipped}
        if self.dynamic and self.rule.hysteresis > 1:
            state["overflows_left"] = max(0, known.overflows_left)  # fewer after further overflows in a row
        return state

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        validate_scaler_state(state)
        saved, scale = float(state["loss_scale"]), self.loss_scale
        if self.dynamic:
            scale, self._set_by_hand = max(saved, self.min_loss_scale), math.inf
        elif saved != scale:
            logger.warning(
                "The checkpoint's loss scale of %g is not loaded: this session's is static and stays %g. bfloat16 needs none; to "
                "continue with the saved one, use loss_scale='dynamic'.",
                *(saved, scale),
            )
        left = max(0, min(int(state.get("overflows_left", self.rule.hysteresis)), self.rule.hysteresis))
        counts = {"unskipped": int(state["unskipped"]), "overflows_left": left}
        self._write(scale=scale, skips_in_a_row=0, skips_at_floor=0, **counts)


def _passes(count: int, newest: int, interval: int) -> bool:
    """Whether the last ``newest`` increments took a count past a multiple of ``interval``."""
    return count // interval > max(0, count - newest) // interval


def save_scalers(groups: Sequence[Sequence[LossScaler]], destination: dict[str, Any]) -> None:
    """Add ``{"loss_scaler0": ..., ...}`` to ``destination``, oldest session first; of several, entries have a ``"session"``."""
    groups = [group for group in groups if group]
    numbered = ((number, scaler) for number, group in enumerate(groups) for scaler in group)
    for index, (number, scaler) in enumerate(numbered):
        session = {} if len(groups) == 1 else {"session": number}
        destination[f"loss_scaler{index}"] = scaler.state_dict() | session


def load_scalers(groups: Sequence[Sequence[LossScaler]] | None, state: Mapping[str, Any]) -> None:
    """Load what `save_scalers` wrote, or with None only check it. If session counts differ, the newest match."""
    if not isinstance(state, Mapping):
        raise CheckpointError(f"load_state_dict expects the dict of ampkit.state_dict(), found {type(state).__name__}.")
    unexpected = [key for key in state if "loss_scaler" not in str(key)]
    if "_growth_tracker" in unexpected:
        raise CheckpointError(
            "This is the state dict of a torch.amp.GradScaler. Load it with ampkit.from_grad_scaler(state), after initialize()."
        )
    if unexpected:
        raise CheckpointError(
            f"Unexpected keys in the state dict: {', '.join(map(repr, unexpected))}; expected 'loss_scaler0', 'loss_scaler1', ... "
            "Pass the part of the checkpoint that ampkit.state_dict() wrote."
        )
    for scaler_state in state.values():
        validate_scaler_state(scaler_state)
    if groups is None:
        return
    groups = [group for group in groups if group]
    saved: dict[Any, list[dict[str, Any]]] = {}
    for scaler_state in state.values():
        saved.setdefault(scaler_state.get("session"), []).append(scaler_state)
    if len(saved) == 1 and len(state) == sum(map(len, groups)):  # entries that name no session, or all the same
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
        for scaler, scaler_state in zip(group, entries):
            scaler.load_state_dict(scaler_state)


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
    for name, least in (("unskipped", 0), ("overflows_left", -(2**31))):
        if not isinstance(state.get(name, 0), int) or not least <= state.get(name, 0) < 2**31:
            raise CheckpointError(
                f"The saved {name!r} must be an integer of {least} to 2**31 - 1, found {state[name]!r}."
            )
