"""Float32 parameters that replace weights in lower precision during the step of an optimizer that does not support rests."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .. import kernels
from ..casting.tensors import params_of
from ..errors import ClosureError, ConfigurationError
from ..registry import WRAPPER_KEY
from .found_inf import Slot
from .gradients import Gradients
from .ways import is_known


class StandIns:
    """The stand-ins of one optimizer, and of optimizers inside of it over the same parameters (SAM's, Lookahead's)."""

    def __init__(self, optimizer: Any, gradients: Gradients) -> None:
        self._refs = [weakref.ref(x) for x in (optimizer, *inner_optimizers(optimizer))]
        self._gradients = gradients
        self._of: dict[Slot, nn.Parameter] = {}
        self.in_use = False  # in a step or a load of these optimizers, also where none has a stand-in
        # Whether a step is known to move stand-ins: an optimizer with a list of its own steps past them.
        self._moves = is_known(optimizer)
        self._before: dict[Slot, tuple[Tensor, Tensor]] = {}  # copies of weights and stand-ins

    @property
    def _optimizers(self) -> list[Any]:
        return [optimizer for ref in self._refs if (optimizer := ref()) is not None]

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Let the optimizer step over the stand-ins, then split their values into the model's weights and rests."""
        if self.in_use:
            yield
            return
        with self.in_groups():
            if not self._gradients.stored:
                yield
                return
            self.take_from_model()
            try:
                yield
                self.put_into_model()
            finally:
                self._free()

    @contextmanager
    def in_load(self) -> Iterator[None]:
        """Let the optimizer load state for the stand-ins, which have the shapes of weights and no values."""
        if self.in_use:  # a part of the load of an optimizer around this one
            yield
            return
        with self.in_groups():
            for slot, stand_in in self._of.items():
                stand_in.data = stand_in.new_empty(()).expand(slot.param.shape)
            try:
                yield
            finally:
                self._free()

    def _free(self) -> None:
        for stand_in in self._of.values():
            stand_in.grad, stand_in.data = None, stand_in.new_empty(0)

    @contextmanager
    def in_groups(self) -> Iterator[None]:
        """Put the stand-ins, without values, into the optimizer's groups and state."""
        of_param = {}
        for slot in self._gradients.stored:
            if slot not in self._of:
                device = slot.param.device
                self._of[slot] = nn.Parameter(torch.empty(0, device=device), requires_grad=slot.param.requires_grad)
                vars(self._of[slot]).update(vars(slot.param))
            of_param[slot.param] = self._of[slot]
        wrappers = [getattr(optimizer, "__dict__", {}).get(WRAPPER_KEY) for optimizer in self._optimizers]
        busy = [self, *(wrapper.stand_ins for wrapper in wrappers[1:] if wrapper is not None)]
        self._exchange(of_param)
        try:
            for stand_ins in busy:
                stand_ins.in_use = True
            yield
        finally:
            for stand_ins in busy:
                stand_ins.in_use = False
            self._exchange({stand_in: param for param, stand_in in of_param.items()})

    def _exchange(self, replacements: Mapping[Tensor, Tensor]) -> None:
        done: set[int] = set()  # lists that several optimizers share
        for optimizer in self._optimizers if replacements else ():
            for group in optimizer.param_groups:
                params = group["params"]
                if id(params) not in done:
                    done.add(id(params))
                    params[:] = [replacements.get(param, param) for param in params]
            state = optimizer.state
            for param in list(state):  # all of them, so that their order stays
                state[replacements.get(param, param)] = state.pop(param)

    @torch.no_grad()
    def take_from_model(self) -> None:
        slots = self._gradients.stored
        for slot in slots:
            slot.master.loans.end(slot.master)
            slot.master.move_rest_beside(slot.param)
            self._of[slot].data = torch.empty_like(slot.param, dtype=torch.float32, requires_grad=False)
        params, values = [slot.param for slot in slots], [self._of[slot] for slot in slots]
        kernels.multi_tensor_join(params, [slot.master.rest for slot in slots], values)
        self.take_gradients()

    def take_gradients(self) -> None:
        gradients = self._gradients.in_float32()
        for slot in self._gradients.stored:
            self._of[slot].grad = gradients.get(slot)
        if self._gradients.stored and not self._moves:
            values = ((slot, self._of.get(slot, slot.param)) for slot in self._gradients.slots)
            self._before = {slot: (slot.param.detach().clone(), value.detach().clone()) for slot, value in values}

    @torch.no_grad()
    def put_into_model(self) -> None:
        if not self._moves:
            self._refuse_steps_past()
        slots = self._gradients.stored
        kernels.multi_tensor_split(
            [self._of[slot] for slot in slots], [slot.param for slot in slots], [slot.master.rest for slot in slots]
        )

    def _refuse_steps_past(self) -> None:
        """Restore the weights and raise, where the optimizer wrote to them and not to the stand-ins."""
        before, self._before = self._before, {}
        still = [slot for slot in self._gradients.stored if torch.equal(before[slot][1], self._of[slot])]
        self._moves = len(still) < len(self._gradients.stored)
        past = [slot for slot in still if not torch.equal(before[slot][0], slot.param)]
        if not past:
            return
        for slot, (weight, _) in before.items():
            slot.param.copy_(weight)
        optimizer, param = self._optimizers[0], past[0].param
        raise ConfigurationError(
            f"{type(optimizer).__name__}.step() wrote to {len(past)} of the model's {param.dtype} weights, one of shape "
            f"{tuple(param.shape)}, and not to what stands in its param_groups during a step, which is float32: it has a list of "
            "parameters of its own. Have its step() go through self.param_groups, or use opt_level='O1' or 'O5', whose weights are "
            "float32. The weights are as they were before the step."
        )


def inner_optimizers(optimizer: Any) -> Sequence[Any]:
    """Optimizers that an optimizer holds, in attributes or in lists there, over parameters of its own groups."""
    params, held = set(params_of(optimizer)), list[Any]()
    for value in getattr(optimizer, "__dict__", {}).values():
        held += value if isinstance(value, (list, tuple)) else [value]
    inner = [x for x in held if all(hasattr(x, name) for name in ("param_groups", "state", "step"))]
    return [x for x in inner if not params.isdisjoint(params_of(x))]


# A step that evaluates its closure several times, as LBFGS does, or may


class _SkippedInClosure(Exception):
    """The exception that unwinds an optimizer whose closure met an overflow."""


_SECOND_EVALUATION = (
    "{} evaluated its closure a second time in one step, which a dynamic loss scale does not allow: the scale may move between "
    "two evaluations. Use a static scale (loss_scale=128.0), or bfloat16 without one (opt_level='O4' or 'O5'). The parameters "
    "are as they were before the step."
)


def step_evaluating_again(
    wrapper: Any, step: Callable[[Callable], Any], closure: Callable[[], Any], casting_off: Any
) -> Any:
    """Take a step that may evaluate its closure again, with its present values in the model. An overflow undoes the step."""
    wrapper.findings.of_step = None
    loss, evaluations, stand_ins = None, 0, wrapper.stand_ins

    def evaluate() -> Any:
        nonlocal loss, evaluations
        evaluations += 1
        if evaluations > 1 and wrapper.owner.plan.has_dynamic_loss_scale:
            raise ClosureError(_SECOND_EVALUATION.format(type(wrapper.optimizer()).__name__))
        if stand_ins.in_use:
            stand_ins.put_into_model()
        with getattr(casting_off, "paused", nullcontext)():  # as where step() was called
            loss = closure()
        wrapper.settle()
        wrapper.findings.judge(wrapper.checks_step())
        if wrapper.findings.skipped:
            wrapper.findings.report()
            raise _SkippedInClosure
        if stand_ins.in_use:
            stand_ins.take_gradients()
        return loss

    try:
        with _undone(wrapper), casting_off, stand_ins.in_step():
            result = step(evaluate)
    except ClosureError:
        wrapper.gradients.clip_is_used = True
        raise
    except _SkippedInClosure:
        wrapper.end_step(skipped=True)
        return loss
    wrapper.end_step()
    return result


@contextmanager
def _undone(wrapper: Any) -> Iterator[None]:
    """Put weights and rests back where an evaluation ends the step."""
    values = [slot.param.detach() for slot in wrapper.gradients.slots]
    values += [slot.master.rest for slot in wrapper.gradients.stored]
    before = [value.clone() for value in values]
    try:
        yield
    except (_SkippedInClosure, ClosureError):
        with torch.no_grad():
            for value, copy in zip(values, before):
                value.copy_(copy)
        if isinstance(wrapper.optimizer(), torch.optim.LBFGS):
            wrapper.optimizer().state.clear()  # it would look for what the rest of the step leaves there
        raise
