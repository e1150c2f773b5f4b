"""``LossScaler``: Apex's class, constructor and methods, over a loss scaler of the core, ``core``.

The scalers in ``_amp_state.loss_scalers`` are those that the newest ``amp.initialize`` made: `amp.scale_loss` uses that list
for every optimizer. A value written to ``_loss_scale`` is used from the next iteration on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ... import kernels
from ...iteration.loss_scale import DEFAULT_MAX_LOSS_SCALE, DEFAULT_MIN_LOSS_SCALE, DynamicLossScale
from ...iteration.loss_scale import LossScaler as CoreScaler


class LossScaler:
    """A loss scale, static or ``"dynamic"``, with the gradients' flag of overflow.

    Reading ``_loss_scale``, ``_unskipped`` or ``_has_overflow`` waits for the device where the check of gradients is still running.
    """

    warned_no_fused_kernel = True
    warned_unscaling_non_fp32_grad = False
    has_fused_kernel = True
    multi_tensor_scale_cuda = staticmethod(kernels.multi_tensor_scale)
    multi_tensor_axpby_cuda = staticmethod(kernels.multi_tensor_axpby)

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        if loss_scale == "dynamic":
            rule = DynamicLossScale(
                init_scale=min(max_loss_scale, init_scale),
                growth_factor=float(scale_factor),
                backoff_factor=1.0 / scale_factor,
                growth_interval=scale_window,
            )
            self._reset(CoreScaler(rule, min_loss_scale or DEFAULT_MIN_LOSS_SCALE, max_loss_scale))
        else:
            self._reset(CoreScaler(float(loss_scale)))

    @classmethod
    def of(cls, scaler: CoreScaler) -> LossScaler:
        """Wrap a session's loss scaler."""
        face = cls.__new__(cls)
        face._reset(scaler)
        return face

    def _reset(self, scaler: CoreScaler) -> None:
        self.core = scaler
        self._noop_buffer: torch.Tensor | None = None  # made when a script reads it
        self._has_buffer_of_the_script = False
        self._end_by_hand()

    def forget_iteration(self) -> None:
        """Forget an iteration that the script ran by hand, since ``amp.scale_loss`` runs the iterations again."""
        self._end_by_hand()
        if self._noop_buffer is not None:
            self._noop_buffer.zero_()

    def end_block(self) -> None:
        """Copy the overflow flag of ``amp.scale_loss`` to the script's buffer at once, and not at its next read.

        Scripts write to the buffer in between, and ask ``update_scale`` to judge by what they wrote.
        """
        if self._has_buffer_of_the_script:
            self._noop_buffer.fill_(self._has_overflow)
            self._runs_by_hand = self.core.delayed_check is not None

    def end_iteration(self) -> None:
        """End an iteration whose overflow was judged here: no later block, and no step, judges it again."""
        self._end_by_hand()
        if self.core.delayed_check is not None:
            self.core.delayed_check.flag.zero_()
            self.core.delayed_check = None

    def _end_by_hand(self) -> None:
        self._runs_by_hand = False
        self._flag: torch.Tensor | None = None

    @property
    def is_changed_by_the_script(self) -> bool:
        """Whether a script's subclass or methods judge or unscale gradients in another way."""
        return self.unscales_as_the_script_does or self._has_changed("update_scale")

    @property
    def unscales_as_the_script_does(self) -> bool:
        return self._has_changed("unscale")

    def _has_changed(self, method: str) -> bool:
        return method in vars(self) or getattr(type(self), method) is not _OWN_METHODS[method]

    # Attributes that scripts read and write

    def loss_scale(self) -> float:
        return self.core.loss_scale

    @property
    def _loss_scale(self) -> float:
        return self.core.loss_scale

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        self.core.loss_scale = float(value)

    @property
    def _unskipped(self) -> int:
        self.core.synchronize()
        return self.core.unskipped

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        self.core.synchronize()
        self.core.unskipped = int(value)

    @property
    def dynamic(self) -> bool:
        return self.core.dynamic

    @dynamic.setter
    def dynamic(self, value: bool) -> None:
        if bool(value) != self.core.dynamic:
            self.core.synchronize()
            self.core.dynamic = bool(value)
            self._loss_scale = self._loss_scale  # as if the script had set it

    @property
    def _has_overflow(self) -> bool:
        if self._runs_by_hand:
            return any(bool(flag.any()) for flag in (self._flag, self._noop_buffer) if flag is not None)
        if self.core.delayed_check is not None:  # delay_overflow_check=True left it to be judged
            return bool(self.core.delayed_check.flag.any())
        return self.core.synchronize().skips_in_a_row > 0

    @_has_overflow.setter
    def _has_overflow(self, value: bool) -> None:
        self.clear_overflow_state()
        self._flag = torch.tensor([float(value)])

    @property
    def _overflow_buf(self) -> torch.Tensor:
        """The flag as an int tensor, for use with ``multi_tensor_applier``: 1 after an overflow in this iteration.

        A script may assign another tensor, which then alone holds the flag.
        """
        if self._noop_buffer is None:
            default = "cuda" if torch.cuda.is_initialized() else "cpu"
            device = default if self._flag is None else self._flag.device
            self._noop_buffer = torch.zeros(1, dtype=torch.int32, device=device)
        if not self._runs_by_hand:
            if not self._has_buffer_of_the_script:
                self._noop_buffer.fill_(self._has_overflow)
            self._runs_by_hand = True
        elif self._flag is not None:
            self._noop_buffer.masked_fill_(self._flag.to(self._noop_buffer.device) != 0, 1)
        return self._noop_buffer

    @_overflow_buf.setter
    def _overflow_buf(self, value: torch.Tensor) -> None:
        self._runs_by_hand = True
        self._flag = None
        self._noop_buffer = value
        self._has_buffer_of_the_script = True

    @property
    def _max_loss_scale(self) -> float:
        return self.core.max_loss_scale

    @_max_loss_scale.setter
    def _max_loss_scale(self, value: float) -> None:
        self.core.change_rule(max_loss_scale=float(value))

    @property
    def _min_loss_scale(self) -> float:
        return self.core.min_loss_scale

    @_min_loss_scale.setter
    def _min_loss_scale(self, value: float | None) -> None:
        self.core.change_rule(min_loss_scale=float(value or DEFAULT_MIN_LOSS_SCALE))

    @property
    def _scale_seq_len(self) -> int:
        return self.core.rule.growth_interval

    @_scale_seq_len.setter
    def _scale_seq_len(self, value: int) -> None:
        self.core.change_rule(rule=replace(self.core.rule, growth_interval=int(value)))

    # For scripts that write their own scale_loss

    def clear_overflow_state(self) -> None:
        """Begin an iteration without overflow, before gradients are unscaled."""
        self.core.synchronize()
        self._runs_by_hand = True
        self._flag = None
        if self._noop_buffer is not None:
            self._noop_buffer.zero_()

    def unscale(
        self,
        model_grads: Sequence[torch.Tensor],
        master_grads: Sequence[torch.Tensor],
        unused_scale: float | None = None,
        models_are_masters: bool = False,
        scale_override: float | None = None,
    ) -> None:
        """Write ``master_grads = model_grads / scale``, and note gradients that are not finite."""
        scale = self.loss_scale() if scale_override is None else scale_override
        if scale == 1.0 and models_are_masters and not self.dynamic:
            return
        if model_grads:
            flag = self.flag_on(model_grads[0].device)
            kernels.multi_tensor_scale(list(model_grads), list(master_grads), 1.0 / scale, flag)

    def unscale_with_stashed(
        self,
        model_grads: Sequence[torch.Tensor],
        stashed_master_grads: Sequence[torch.Tensor],
        master_grads: Sequence[torch.Tensor],
        scale_override: tuple[float, float, float] | None = None,
    ) -> None:
        """Write ``master_grads = model_grads / scale + stashed_master_grads``, and note ``model_grads`` that are not finite."""
        have, stashed_have, wanted = scale_override or (self.loss_scale(), 1.0, 1.0)
        if model_grads:
            lists = list(model_grads), list(stashed_master_grads), list(master_grads)
            flag = self.flag_on(model_grads[0].device)
            kernels.multi_tensor_axpby(*lists, wanted / have, wanted / stashed_have, flag, arg_to_check=0)

    unscale_python = unscale
    unscale_with_stashed_python = unscale_with_stashed

    def update_scale(self) -> bool:
        """End an iteration: move the scale, and return whether the step has to be skipped.

        After ``amp.scale_loss``, which has ended the iteration itself, it only returns the flag; not so after
        ``delay_overflow_check=True``, which leaves it to the caller here to judge and to skip.
        """
        overflowed, has_ended = self._has_overflow, not self._runs_by_hand and self.core.delayed_check is None
        self.end_iteration()
        return overflowed if has_ended else self.core.update(torch.tensor([float(overflowed)])).overflowed

    def flag_on(self, device: torch.device) -> torch.Tensor:
        """The flag that kernels write, made on ``device`` if there is none yet in this iteration."""
        self._runs_by_hand = True
        if self._flag is None:
            self._flag = torch.zeros(1, dtype=torch.float32, device=device)
        return self._flag

    # Checkpoints that hold the object itself, as those of FP16_Optimizer do

    def __getstate__(self) -> dict[str, Any]:
        names = "dynamic _loss_scale _max_loss_scale _min_loss_scale _scale_seq_len _unskipped _has_overflow"
        return {name: getattr(self, name) for name in names.split()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(
            "dynamic" if state.get("dynamic") else state["_loss_scale"],
            scale_window=state.get("_scale_seq_len", 2000),
            min_loss_scale=state.get("_min_loss_scale"),
            max_loss_scale=state.get("_max_loss_scale", DEFAULT_MAX_LOSS_SCALE),
        )
        self._loss_scale = state["_loss_scale"]
        self._unskipped = state.get("_unskipped", 0)


_OWN_METHODS = {name: vars(LossScaler)[name] for name in ("unscale", "update_scale")}
