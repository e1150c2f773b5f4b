"""What happens around a backward pass: a `Block` is one ``with scale_loss(...)``.

On entry gradients of earlier blocks are stashed; on exit the fresh ones are collected (loss_scaling.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import ConfigurationError, NotInitializedError
from ..optimizers.scales import on
from .advice import look_at_backward, look_for_hooks
from .gradients import Gradients
from .loss_scale import LossScaler
from .loss_scaling import LossScaling, collect, home_of
from .optimizer_wrapper import OptimizerWrapper, drop_casts
from .slots import BackwardPass


@dataclass(eq=False)
class Block:
    """One ``with scale_loss(...)``; see `ampkit.scale_loss`.

    ``unnamed`` are the optimizers that the block does not name, ``unowned`` the gradients of parameters that no optimizer updates.
    The backward pass may reach these all the same.
    ``is_unreduced`` tells, after the backward pass, whether FSDP2 has kept its gradients to itself, at the scale of this block:
    nothing is to be judged then, and the following blocks stay at that scale until it has reduced them.
    """

    scaling: LossScaling
    loss: torch.Tensor
    named: list[OptimizerWrapper]
    unnamed: list[OptimizerWrapper]
    unowned: list[Gradients]
    scaler: LossScaler
    delay_unscale: bool
    delay_overflow_check: bool
    is_unreduced: Callable[[], bool]
    around: Block | None = None  # another block, which unscales what this one makes
    _passes_before: int | None = None  # through scaled losses, where this block looks whether its own has one
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
            if scaled.requires_grad and any(gradients.has_fresh for gradients in self._gradients):
                self._probe = Probe()
                scaled = self._probe.put_into(scaled)
        self.scaled = scaled
        self._enter_into_another()
        if not self._is_plain and self.around is None:
            self._open()
        if not self.scaler.is_one:
            advice = self.scaling.advice
            look_for_hooks(advice, self.named)
            is_first = not (self.delay_unscale or advice.scaled_loss_was_used)
            if scaled.requires_grad and (self.delay_unscale or is_first):
                self._passes_before = advice.passes if is_first else None
                scaled.register_hook(advice.count_pass)
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
                for gradients in self._gradients:
                    gradients.put_back(failed)
        if error_type is not None or not self.delay_unscale:
            drop_casts()

    @property
    def _gradients(self) -> list[Gradients]:
        return [*(wrapper.gradients for wrapper in (*self.named, *self.unnamed)), *self.unowned]

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
        for gradients in self.unowned:
            gradients.in_buckets = ddp is not None and ddp.gradient_as_bucket_view
            gradients.open(self.scale, gradients.drop_cleared())

    def _end(self) -> None:
        scaling, scaler, scale = self.scaling, self.scaler, self.scale
        if self._passes_before is not None:
            look_at_backward(scaling.advice, self.named, scaling.advice.passes > self._passes_before)
        local = scaling.backward_was_local()
        unreduced = self.is_unreduced()
        scaling.held_scale = scale if unreduced else None
        if unreduced and not self.delay_unscale:
            for gradients in self._gradients:
                gradients.put_back(BackwardPass(scale))
            return
        if not self.delay_unscale:
            was_reached = Reached(self.scaled, self._probe)
            delays = self.delay_overflow_check
            collect(self.named, self.unnamed, scaler, scale, was_reached, local, delays, self.loss, self.unowned)
            for wrapper in (*self.named, *self.unnamed):
                wrapper.hand_gradients()
            return
        for wrapper in (*self.named, *self.unnamed):
            if wrapper in self.unnamed and not wrapper.gradients.has_fresh:
                wrapper.gradients.put_back(BackwardPass(scale))
            else:
                wrapper.gradients.keep_scaled(scale)
                wrapper.delayed_with = scaler
        for gradients in self.unowned:
            gradients.keep_scaled(scale)


class Probe:
    """Whether backward passes went to all of a graph: ``backward(inputs=...)`` does not come to a leaf that nobody names."""

    def __init__(self) -> None:
        self._begun: list[None] = []
        self._arrived: list[None] = []

    def put_into(self, scaled: torch.Tensor) -> torch.Tensor:
        """``scaled``, with one leaf more in its graph."""
        leaf = torch.zeros((), device=scaled.device, requires_grad=True)
        leaf.register_hook(lambda _: self._arrived.append(None))
        probed = scaled + leaf
        probed.register_hook(lambda _: self._begun.append(None))
        return probed

    def is_missed(self) -> bool:
        """Whether a pass went to some inputs only."""
        return len(self._arrived) < len(self._begun)


class Reached:
    """Whether a backward pass came to a parameter: its graph is walked when somebody asks, which is rare.

    Of a pass that a ``probe`` has missed nobody knows where it went: it came to no parameter, as far as can be told.
    """

    def __init__(self, scaled: torch.Tensor, probe: Probe | None = None) -> None:
        self._scaled = scaled
        self._probe = probe
        self._params: set[torch.Tensor] | None = None

    def __call__(self, param: torch.Tensor) -> bool:
        if self._probe is not None and self._probe.is_missed():
            return False
        if self._params is None:
            self._params = set()
            waiting = [self._scaled.grad_fn]
            seen = set(waiting)
            while waiting:
                node = waiting.pop()
                following = () if node is None else node.next_functions
                if not following and hasattr(node, "variable"):  # what adds to a parameter's gradient leads nowhere
                    self._params.add(node.variable)
                for one, _ in following:
                    if one not in seen:
                        seen.add(one)
                        waiting.append(one)
        return param in self._params
