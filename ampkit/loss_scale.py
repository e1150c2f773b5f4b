"""The loss scale: the number that the loss is multiplied by, and the rule by which it moves.

`StaticScaler` and `DynamicScaler` have the same verbs, so that nobody asks which one they hold. The arithmetic is on
Python floats and knows no tensors; the one thing that waits for a device is a `Verdict`, whose found_inf flag is
read when its answer is first needed (at ``optimizer.step()`` or at the next ``scale_loss``), not when it is written.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from .errors import CheckpointError, ConfigurationError, LossScaleError
from .logs import logger

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


class Verdict:
    """Whether the gradients of one ``scale_loss`` were finite: asked late, answered once.

    ``found_inf`` is the flag (float32, shape [1]) that the kernels write on the device. Reading `overflowed` is the only
    place where the host waits for it; the scaler moves at that moment.
    """

    def __init__(self, scaler: LossScaler, found_inf: torch.Tensor | None, *, moves_scale: bool = True) -> None:
        self.scaler = scaler
        self.moves_scale = moves_scale
        self.reported = False
        self._found_inf = found_inf
        self._overflowed = False

    @property
    def overflowed(self) -> bool:
        if self._found_inf is not None:
            self._overflowed = bool(self._found_inf.item())
            self._found_inf = None
            self.scaler._update(self._overflowed and self.moves_scale)
        return self._overflowed


class LossScaler(ABC):
    """What static and dynamic loss scales share: the current scale, the counters, their two saved keys.

    ``loss_scale`` may be assigned at any time and is used from the next iteration on. ``unskipped`` counts iterations
    (exits of ``scale_loss``) since the last overflow or growth.
    """

    dynamic: bool

    def __init__(self, loss_scale: float) -> None:
        self.loss_id = 0
        self._loss_scale = float(loss_scale)
        self.unskipped = 0
        self.skips_in_a_row = 0
        self.carried_found_inf: torch.Tensor | None = None
        self._pending: Verdict | None = None

    @property
    def loss_scale(self) -> float:
        self.settle()
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        if not _is_positive(value):
            raise ConfigurationError(f"A loss scale must be a positive, finite number, found {value!r}.")
        self.settle()
        self._loss_scale = float(value)

    def judge(self, found_inf: torch.Tensor | None, *, moves_scale: bool = True) -> Verdict:
        """End an iteration: the verdict on its gradients, which moves the scale when it is read.

        With ``moves_scale=False`` the iteration counts as clean here whatever was found: used for gradients that other
        ranks have not seen yet, where a scale that moved on one rank alone would part them.
        """
        self.settle()
        self._pending = Verdict(self, found_inf, moves_scale=moves_scale)
        return self._pending

    def settle(self) -> None:
        """Read a verdict that nobody has asked for yet."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.overflowed  # noqa: B018  (reading it moves the scale)

    def state_dict(self) -> dict[str, float | int]:
        """``{"loss_scale": float, "unskipped": int}``, the keys of Apex's checkpoints."""
        return {"loss_scale": self.loss_scale, "unskipped": self.unskipped}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        validate_scaler_state(state)
        self.settle()
        self._load_scale(float(state["loss_scale"]))
        self.unskipped = int(state["unskipped"])
        self.skips_in_a_row = 0

    def grad_scaler_state(self) -> dict[str, float | int]:
        """This loss scale as ``torch.amp.GradScaler.load_state_dict`` takes it."""
        scale, rule = self.loss_scale, self._rule_for_grad_scaler()
        return {
            "scale": scale,
            "growth_factor": rule.growth_factor,
            "backoff_factor": rule.backoff_factor,
            "growth_interval": rule.growth_interval,
            "_growth_tracker": self.unskipped,
        }

    def load_grad_scaler_state(self, state: Mapping[str, float | int]) -> None:
        """Take over what ``torch.amp.GradScaler.state_dict`` returned: scale, counter, and the rule by which it moves."""
        missing = [name for name in _GRAD_SCALER_KEYS if name not in state]
        if missing:
            raise CheckpointError(
                f"A GradScaler's state must have {', '.join(map(repr, _GRAD_SCALER_KEYS))}; {', '.join(map(repr, missing))} is "
                "missing. Pass what torch.amp.GradScaler.state_dict() returned."
            )
        entry = {"loss_scale": state["scale"], "unskipped": state["_growth_tracker"]}
        validate_scaler_state(entry)
        self._take_grad_scaler_rule(state)
        self.load_state_dict(entry)

    @abstractmethod
    def _rule_for_grad_scaler(self) -> DynamicLossScale:
        """The rule by which a GradScaler would move as this loss scale does."""

    @abstractmethod
    def _take_grad_scaler_rule(self, state: Mapping[str, float | int]) -> None:
        """Move from now on as that GradScaler did."""

    @abstractmethod
    def overflow_line(self) -> str:
        """The line that reports a skipped step."""

    @abstractmethod
    def raise_if_hopeless(self, on_floor: str) -> None:
        """Raise `LossScaleError` (or warn, with ``on_floor="warn"``) when no scale will ever be small enough."""

    @abstractmethod
    def _load_scale(self, value: float) -> None:
        """Take over a scale from a checkpoint."""

    def _update(self, overflowed: bool) -> None:
        if overflowed:
            self.unskipped = 0
            self.skips_in_a_row += 1
        else:
            self.unskipped += 1
            self.skips_in_a_row = 0


class StaticScaler(LossScaler):
    """A loss scale that stays. Any other than 1.0 still checks, and an overflow still skips the step."""

    dynamic = False

    def overflow_line(self) -> str:
        return (
            f"Gradient overflow at the static loss scale {self._loss_scale:g} (loss scaler {self.loss_id}): this step is "
            f"skipped and the scale stays. A lower loss_scale=, or 'dynamic', avoids it."
        )

    def _rule_for_grad_scaler(self) -> DynamicLossScale:
        return DynamicLossScale(
            init_scale=self._loss_scale, growth_interval=2**31 - 1
        )  # GradScaler knows no static scale

    def _take_grad_scaler_rule(self, state: Mapping[str, float | int]) -> None:
        """A static scale has no rule."""

    def _load_scale(self, value: float) -> None:
        if value != self._loss_scale:
            logger.warning(
                "The checkpoint holds a loss scale of %g, this session's is static: it stays %g.",
                value,
                self._loss_scale,
            )

    def raise_if_hopeless(self, on_floor: str) -> None:
        """A static scale has no floor to sit at."""


class DynamicScaler(LossScaler):
    """A loss scale that follows a `DynamicLossScale` between two bounds, neither of which is 0."""

    dynamic = True

    def __init__(
        self,
        rule: DynamicLossScale | None = None,
        min_loss_scale: float = DEFAULT_MIN_LOSS_SCALE,
        max_loss_scale: float = DEFAULT_MAX_LOSS_SCALE,
    ) -> None:
        self.rule = rule or DynamicLossScale()
        self.min_loss_scale = float(min_loss_scale)
        self.max_loss_scale = float(max_loss_scale)
        self._overflows_left = self.rule.hysteresis
        self._skips_at_floor = 0
        super().__init__(max(self.min_loss_scale, min(self.max_loss_scale, self.rule.init_scale)))

    def overflow_line(self) -> str:
        # Scripts search their logs for the start of this line, Apex's two spaces included.
        return (
            f"Gradient overflow.  Skipping step, loss scaler {self.loss_id} reducing loss scale to {self._loss_scale}"
        )

    def raise_if_hopeless(self, on_floor: str) -> None:
        """Stop after 50 skips in a row at the floor: nothing is being learned and nothing will change by itself."""
        if (
            self._skips_at_floor < SKIPS_AT_FLOOR_BEFORE_GIVING_UP
            or self._skips_at_floor % SKIPS_AT_FLOOR_BEFORE_GIVING_UP
        ):
            return
        message = (
            f"Loss scaler {self.loss_id}: {self._skips_at_floor} steps in a row were skipped with the loss scale at its floor "
            f"of {self.min_loss_scale:g}, so the gradients are not finite at any scale. Look for inf or NaN in the data "
            f"or the loss, try a lower learning rate or bfloat16 (O4, O5), or set min_loss_scale= lower; "
            f"on_floor='warn' goes on regardless."
        )
        if on_floor == "raise":
            raise LossScaleError(message)
        logger.warning(message)

    def _rule_for_grad_scaler(self) -> DynamicLossScale:
        return self.rule

    def _take_grad_scaler_rule(self, state: Mapping[str, float | int]) -> None:
        self.rule = replace(
            self.rule,
            growth_factor=float(state["growth_factor"]),
            backoff_factor=float(state["backoff_factor"]),
            growth_interval=int(state["growth_interval"]),
        )
        # A GradScaler has no floor: its scale is taken over exactly, and is the floor then.
        self.min_loss_scale = min(self.min_loss_scale, float(state["scale"]))

    def _load_scale(self, value: float) -> None:
        self._loss_scale = max(value, self.min_loss_scale)

    def _update(self, overflowed: bool) -> None:
        super()._update(overflowed)
        if overflowed:
            self._back_off()
        else:
            self._skips_at_floor = 0
            self._overflows_left = self.rule.hysteresis
            if self.unskipped >= self.rule.growth_interval:
                self._grow()

    def _back_off(self) -> None:
        if self._loss_scale <= self.min_loss_scale:
            self._skips_at_floor += 1
        self._overflows_left -= 1
        if self._overflows_left <= 0:
            self._loss_scale = max(self.min_loss_scale, self._loss_scale * self.rule.backoff_factor)

    def _grow(self) -> None:
        self.unskipped = 0
        # A scale that was set by hand above the maximum stays there: growth never lowers it.
        ceiling = max(self.max_loss_scale, self._loss_scale)
        self._loss_scale = min(ceiling, self._loss_scale * self.rule.growth_factor)


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
