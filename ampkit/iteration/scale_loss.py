"""What happens around a backward pass: a `Block` is one ``with scale_loss(...)``.

On entry gradients of earlier blocks are stashed; on exit the fresh ones are collected (loss_scaling.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import ConfigurationError, NotInitializedError
from ..logs import logger
from ..optimizers.scales import on
from .backward_passes import BackwardPass, Probe, Reached
from .loss_scale import LossScaler
from .loss_scaling import LossScaling, collect, home_of
from .optimizer_wrapper import OptimizerWrapper, drop_casts


@dataclass(eq=False)
class Block:
    """One ``with scale_loss(...)``; see `ampkit.scale_loss`.

    ``unnamed`` are the optimizers that the block does not name. The backward pass may reach their parameters all the same.
    ``is_unreduced`` tells, after the backward pass, whether FSDP2 has kept its gradients to itself, at the scale of this block:
    nothing is to be judged then, and the following blocks stay at that scale until it has reduced them.
    """

    scaling: LossScaling
    loss: torch.Tensor
    named: list[OptimizerWrapper]
    unnamed: list[OptimizerWrapper]
    scaler: LossScaler
    delay_unscale: bool
    delay_overflow_check: bool
    is_unreduced: Callable[[], bool]
    around: Block | None = None  # another block, which unscales what this one makes
    _arrivals: list[torch.Tensor] | None = None
    _probe: Probe | None = None

    def backward(self, *_: object, **__: object) -> None:
        """Nothing to call: what a script has that writes ``scale_loss(loss, optimizer).backward()``, as with GradScaler.scale."""
        raise TypeError(
            "scale_loss is entered by 'with', since something is to be done after the backward pass: "
            "'with ampkit.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()'."
        )

    def __enter__(self) -> torch.Tensor:
        for wrapper in self.named:
            if not wrapper.active:  # closed since scale_loss was called
                raise NotInitializedError(
                    f"The session of this {type(wrapper.optimizer).__name__} was closed. Call initialize() again, or leave out "
                    "scale_loss."
                )
            if wrapper.gradients.is_open and wrapper.blocks:
                raise ConfigurationError(
                    "scale_loss was entered twice for the same optimizer, one inside the other. Leave the first block before "
                    "entering the second: gradients of several losses add up across blocks."
                )
        self.scaling.catch_up()
        if not self.delay_unscale:
            # From here on autograd keeps the casts of weights that the backward pass needs, and frees each when it is done with it.
            drop_casts(before_backward=True)
        scaled = self.loss.float()
        self.scale: float | torch.Tensor = 1.0
        self._is_plain = self.scaler.is_one and not self.scaling.plan.master_weights
        if not self._is_plain:
            held_scale = self.scaling.held_scale
            self.scale = self.scaler.current(home_of(self.named)) if held_scale is None else held_scale
            scaled = scaled * on(self.scale, scaled.device)
            if scaled.requires_grad and any(one.gradients.has_fresh for one in (*self.named, *self.unnamed)):
                self._probe = Probe()
                scaled = self._probe.put_into(scaled)
            if scaled.requires_grad and not self.scaling.scaled_loss_was_used:
                self._arrivals = []
                scaled.register_hook(self._arrivals.append)
            if not self.scaling.has_looked_for_hooks:
                self.scaling.has_looked_for_hooks = True
                self._warn_of_hooks()
        self.scaled = scaled
        self._enter_into_another()
        if not self._is_plain and self.around is None:
            self._open()
        for wrapper in self.named:
            wrapper.blocks.append(self)
            wrapper.findings.scaler = self.scaler
        return scaled

    def __exit__(self, error_type: object, error: object, traceback: object) -> None:
        for wrapper in self.named:
            if self in wrapper.blocks:  # not where it was taken over from an inner block
                wrapper.blocks.remove(self)
        if not self._is_plain and self.around is None:
            if error_type is None:
                self._end()
            else:
                failed = BackwardPass(self.scale, done=set())
                for wrapper in (*self.named, *self.unnamed):
                    wrapper.gradients.put_back(failed)
        if error_type is not None or not self.delay_unscale:
            drop_casts()

    def _enter_into_another(self) -> None:
        """Leave gradients to a block around this one, which has the same scale; refuse any other scale."""
        blocks = [block for wrapper in (*self.named, *self.unnamed) for block in wrapper.blocks]
        outer = next((block for block in blocks if not block._is_plain), None) or next(iter(blocks), None)
        if outer is None:
            return
        is_static = not (self.scaler.dynamic or outer.scaler.dynamic)
        if self.scaler is not outer.scaler and not (is_static and self.scale == outer.scale):
            raise ConfigurationError(
                "scale_loss was entered inside of another scale_loss block, with another loss scale: no one scale would unscale "
                "the gradients of both. Leave the first block before entering the second, which adds up gradients across "
                "blocks; or give both losses one loss_id."
            )
        if not outer._is_plain:
            self.around = outer.around or outer
            taken = [wrapper for wrapper in self.named if wrapper in self.around.unnamed]
            self.around.unnamed = [wrapper for wrapper in self.around.unnamed if wrapper not in taken]
            self.around.named = [*self.around.named, *taken]

    def _open(self) -> None:
        """Stash the gradients that are there. Nothing is touched where an optimizer has to be refused."""
        wrappers = [*self.named, *self.unnamed]
        for wrapper in wrappers:
            wrapper.gradients.bring_back()
            wrapper.gradients.clipping.refuse_unseen_writes()
            wrapper.end_loans()
        ddp, empty = self.scaling.ddp(), []
        for wrapper in wrappers:
            gradients = wrapper.gradients
            gradients.in_buckets = ddp is not None and ddp.gradient_as_bucket_view
            empty.append(wrapper.findings.drop_cleared())
            wrapper.findings.drop_skipped()
        for wrapper, is_empty in zip(wrappers, empty):  # those before may hold the same parameters
            wrapper.gradients.open(self.scale, is_empty)

    def _end(self) -> None:
        scaling, scaler, scale = self.scaling, self.scaler, self.scale
        if self._arrivals is not None:
            scaling.scaled_loss_was_used = bool(self._arrivals) or self._warn_of_unscaled()
        if not scaling.has_looked_for_strangers:
            scaling.has_looked_for_strangers = True
            self._warn_of_strangers()
        local = scaling.backward_was_local()
        unreduced = self.is_unreduced()
        scaling.held_scale = scale if unreduced else None
        if unreduced and not self.delay_unscale:
            for wrapper in (*self.named, *self.unnamed):
                wrapper.gradients.put_back(BackwardPass(scale))
            return
        if not self.delay_unscale:
            was_reached = Reached(self.scaled, self._probe)
            collect(self.named, self.unnamed, scaler, scale, was_reached, local, self.delay_overflow_check, self.loss)
            for wrapper in (*self.named, *self.unnamed):
                wrapper.hand_gradients()
            return
        for wrapper in (*self.named, *self.unnamed):
            if wrapper in self.unnamed and not wrapper.gradients.has_fresh:
                wrapper.gradients.put_back(BackwardPass(scale))
            else:
                wrapper.gradients.keep_scaled(scale)
                wrapper.delayed_with = scaler

    def _warn_of_hooks(self) -> None:
        """Say it if a script's hook on a parameter will see gradients at the loss scale, where a clamp clamps nearly all."""
        if self.scaler.is_one:
            return
        for wrapper in self.named:
            for slot in wrapper.gradients.slots:
                if _has_hook_of_script(slot.param):
                    logger.warning(
                        "Parameter %s has a hook on its gradient, which runs in the backward pass and sees the gradient multiplied "
                        "by the loss scale. Multiplying by a mask is right there, a clamp, a threshold or a statistic is not: do "
                        "these to p.grad after the scale_loss block, where it is unscaled, or train in bfloat16 at loss_scale=1.",
                        wrapper.owner.name_of(slot.param),
                    )
                    return

    def _warn_of_strangers(self) -> None:
        """Say it if the backward pass came to a parameter of the models that no optimizer updates: nobody unscales its gradient."""
        if self.scaler.is_one:
            return
        owned = {slot.param for wrapper in (*self.named, *self.unnamed) for slot in wrapper.gradients.slots}
        for owner in dict.fromkeys(wrapper.owner for wrapper in self.named):
            params = (param for model in getattr(owner, "models", ()) for param in model.parameters())
            stranger = next((param for param in params if param.grad is not None and param not in owned), None)
            if stranger is not None:
                logger.warning(
                    "Parameter %s has a gradient, but no optimizer given to initialize() updates it: the gradient stays multiplied "
                    "by the loss scale, and clip_grad_norm_(model.parameters(), ...) would clip the others by it. Freeze the "
                    "parameter (requires_grad_(False)), or clip with ampkit.clip_grad_norm_(optimizer, ...).",
                    owner.name_of(stranger),
                )

    def _warn_of_unscaled(self) -> bool:
        """Whether gradients came from something else than the scaled loss: they will be divided by the scale. Says so."""
        arrived = any(
            slot.param.grad is not None
            for wrapper in self.named
            if not wrapper.gradients.stays
            for slot in wrapper.gradients.slots
        )
        if arrived:
            logger.warning(
                "The backward pass inside this scale_loss block did not go through the scaled loss, so that its gradients are "
                "divided by a loss scale that they were never multiplied by. Call backward() on what the block yields: "
                "'with ampkit.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()'."
            )
        return arrived


def _has_hook_of_script(param: torch.Tensor) -> bool:
    """Whether hooks other than torch's and ours are on a parameter: what averages gradients is right at any scale."""
    for hooks in (param._backward_hooks, param._post_accumulate_grad_hooks):
        for hook in (hooks or {}).values():
            while isinstance(hook, functools.partial):
                hook = hook.func
            if (getattr(hook, "__module__", None) or "").partition(".")[0] not in ("torch", "ampkit", "horovod"):
                return True
    return False
