"""The ways in which an optimizer takes its step, as rows: `choose` picks one for a step, and says why no better one fits."""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW

from .. import kernels
from ..casting.narrow_gradients import read_narrow, stored_gradient
from ..dtypes import LOWER_PRECISION
from ..optimizers.fused import FusedOptimizer, StepInputs
from ..patching import PatchSet, SharedPatches
from .found_inf import constant, is_set
from .gradients import Gradients

#: torch's classes whose update `OnePassStep` knows.
ONE_PASS = (SGD, Adam, AdamW)
_version_of = operator.attrgetter("_version")


def is_known(optimizer: Any) -> bool:
    """Whether an optimizer's class is torch's or ampkit's."""
    return type(optimizer).__module__.startswith(("torch.optim.", "ampkit."))


class Traits(NamedTuple):
    """Facts about an optimizer's methods, read before `initialize` replaces them."""

    takes_inputs: bool  # it is a fused optimizer of ampkit's whose ``step`` no script has replaced
    takes_rests: bool  # and its ``update`` writes weights and rests together
    has_own_step: bool  # its ``step`` is that of torch's Adam or SGD, though a scheduler may wrap it
    clears_as_torch: bool  # its ``zero_grad`` is torch's or ampkit's

    @classmethod
    def of(cls, optimizer: Any) -> Traits:
        step = inspect.unwrap(getattr(type(optimizer), "step", optimizer.step))  # torch wraps it for its hooks
        now = inspect.unwrap(optimizer.step)  # a scheduler wraps that of the instance
        is_ours = isinstance(optimizer, FusedOptimizer) and getattr(now, "__func__", now) is step
        takes_inputs = is_ours and optimizer.takes_step_inputs and step.__module__.startswith("ampkit.")
        own_zero_grad = (torch.optim.Optimizer.zero_grad, FusedOptimizer.zero_grad)
        return cls(
            takes_inputs,
            takes_inputs and optimizer.takes_rests and type(optimizer).update.__module__.startswith("ampkit."),
            inspect.unwrap(optimizer.step).__module__ in ("torch.optim.adam", "torch.optim.sgd"),
            "zero_grad" not in vars(optimizer) and getattr(type(optimizer), "zero_grad", None) in own_zero_grad,
        )


class Way(NamedTuple):
    """A way in which an optimizer takes its step."""

    skips_on_device: bool  # by the flag; else the host reads it. At loss scale 1 gradients are checked by default
    is_one_kernel: bool  # nothing is called that could be cast
    #: Gets the wrapper and the flag; the optimizer's own step runs inside of the context.
    in_step: Callable[[Any, Tensor | None], AbstractContextManager[None]]


@contextmanager
def _with_inputs(wrapper: Any, found_inf: Tensor | None) -> Iterator[None]:
    """Pass `StepInputs` to a fused optimizer, over float32 copies of stored weights if it takes no rests."""
    optimizer, gradients = wrapper.optimizer(), wrapper.gradients
    optimizer.inputs = StepInputs(
        rests={id(slot.param): slot.master.rest for slot in gradients.stored},
        clip=gradients.clip,
        found_inf=found_inf,
        total_norm=gradients.total_norm,
    )
    before = read_narrow(True)
    try:
        with nullcontext() if wrapper.traits.takes_rests else wrapper.stand_ins.in_step():
            yield
    finally:
        optimizer.inputs = None
        read_narrow(before)


OURS = Way(True, True, _with_inputs)
OURS_OVER_COPIES = Way(True, False, _with_inputs)
IN_ONE_PASS = Way(True, True, lambda wrapper, found_inf: wrapper.one_pass.in_step(wrapper.optimizer(), found_inf))
ITS_OWN = Way(False, False, lambda wrapper, _: wrapper.stand_ins.in_step())  # over float32 weights, or float32 copies


def choose(wrapper: Any) -> tuple[Way, str | None]:
    """Return the way of the step that begins, and the reason that `why_not_in_one_pass` returns, if any."""
    traits, gradients, plan = wrapper.traits, wrapper.gradients, wrapper.owner.plan
    if traits.takes_inputs and traits.takes_rests:
        return OURS, None
    optimizer = wrapper.optimizer()
    reason = why_not_in_one_pass(optimizer, traits, gradients.params, plan.one_pass_step)
    if traits.takes_inputs:
        return OURS_OVER_COPIES, reason
    if reason is None and (gradients.stored or plan.steps_in_one_pass):
        return IN_ONE_PASS, None
    return ITS_OWN, reason


def why_not_in_one_pass(optimizer: Any, traits: Traits, params: list[Tensor], one_pass_step: bool = True) -> str | None:
    """The reason why a step needs float32 copies of weights with rests; None where one pass updates both."""
    name = type(optimizer).__name__
    if isinstance(optimizer, FusedOptimizer):
        if optimizer.takes_step_inputs and not traits.takes_inputs:
            return "its step() was replaced before initialize()"
        return None if traits.takes_rests else f"the update of {name} needs float32 parameters"
    if type(optimizer) not in ONE_PASS:
        owner = type(optimizer).__module__
        return f"ampkit has no one-pass update of {name if owner.startswith('torch.') else f'{owner}.{name}'}"
    if not one_pass_step:
        return "one_pass_step=False"
    if not traits.has_own_step:
        return "its step() is not torch's own"
    if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
        return "a torch.amp.GradScaler unscales in it"
    for group in optimizer.param_groups:
        for setting in ("amsgrad", "differentiable"):  # another arithmetic
            if group.get(setting):
                return f"{setting}=True"
    for param in params:
        gradient = stored_gradient(param)
        if gradient is not None and gradient.layout is not torch.strided:
            return "a sparse gradient"
        if param.is_complex():
            return "a complex parameter"
    return None


# torch's SGD, Adam and AdamW in one pass


class OnePassStep:
    """The one-pass step of an optimizer of torch's, which may hold weights with rests."""

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients
        #: Step counts that move together, by the id of the first: tensors, versions, and numbers, equal where the counts are.
        self.known_counts: dict[int, tuple[list[Tensor], list[int], list[int]]] = {}
        self.found_inf: Tensor | None = None
        self.state: Any = None  # the optimizer's

    @contextmanager
    def in_step(self, optimizer: Any, found_inf: Tensor | None) -> Iterator[None]:
        """Let torch's step update weights and rests together, or nothing where ``found_inf`` is not 0."""
        self.state, self.found_inf = optimizer.state, found_inf
        _running.step, before = self, read_narrow(True)
        try:
            yield
        finally:
            _running.step = None
            read_narrow(before)

    def batches(self, params: Sequence[Tensor], apart: Sequence[Any]) -> list[tuple[list[int], dict[str, Any]]]:
        """Return the indices of parameters that one kernel call can update, equal in ``apart``, and its keywords."""
        rests = {id(slot.param): slot.master.rest for slot in self._gradients.stored} if self._gradients.stored else {}
        by_kind: dict[Any, list[int]] = {}
        for i, param in enumerate(params):
            by_kind.setdefault((id(param) in rests, param.device, apart[i]), []).append(i)
        batches: list[tuple[list[int], dict[str, Any]]] = []
        for (has_rests, *_), indices in by_kind.items():
            lower = [rests[id(params[i])] for i in indices] if has_rests else None
            clip = self._gradients.clip if has_rests else None
            batches.append((indices, dict(lower=lower, clip=clip, found_inf=self.found_inf)))
        return batches

    def count(self, params: Sequence[Tensor], steps: list[Tensor]) -> list[int]:
        """Count a step, on the device if that decides on it; returns a number for each parameter, equal where their counts are.

        They are read once: counts that always move together stay equal.
        """
        if not steps:
            return []
        if self.found_inf is not None and not self.found_inf.is_cpu and any([step.is_cpu for step in steps]):
            numbers = [int(step) for step in steps]
            for i, step in enumerate(steps):
                steps[i] = self.state[params[i]]["step"] = step.to(params[i].device)
        else:
            known, versions, numbers = self.known_counts.get(id(steps[0]), ([], [], []))
            are_same = len(steps) == len(known) and all(map(operator.is_, steps, known))
            if not are_same or list(map(_version_of, steps)) != versions:  # a script may set some of them back
                numbers, here = [int(step) for step in steps], set(map(id, steps))
                rows = self.known_counts.items()
                self.known_counts = {key: row for key, row in rows if here.isdisjoint(map(id, row[0]))}
        first, taken = steps[0], self.found_inf
        taken = constant(1.0, first.dtype, first.device) if taken is None else (taken == 0).reshape(()).to(first)
        # torch._foreach_add_ takes several microseconds for each count on the host, a kernel a fraction of one.
        kernels.multi_tensor_axpby(steps, [taken] * len(steps), steps, 1.0, 1.0)
        self.known_counts[id(first)] = list(steps), list(map(_version_of, steps)), numbers
        return numbers

    def give_counts_back(self, optimizer: Any) -> None:
        """Move step counts back to the host, where torch keeps them."""
        if not any(group.get("capturable") or group.get("fused") for group in optimizer.param_groups):
            for state in optimizer.state.values():
                if isinstance(count := state.get("step"), Tensor):
                    state["step"] = count.cpu()


class _Running(threading.local):
    def __init__(self) -> None:  # dynamo guards on the attribute being there
        self.step: OnePassStep | None = None


_running = _Running()


def _adam(original: Callable, *lists: Any, **settings: Any) -> None:
    one_pass = _running.step
    if one_pass is None:
        return original(*lists, **settings)
    params, grads, exp_avgs, exp_avg_sqs, _, steps = lists
    for moments, name in ((exp_avgs, "exp_avg"), (exp_avg_sqs, "exp_avg_sq")):
        for i, moment in enumerate(moments):  # which torch has made in the precision of lower-precision weights
            if moment.dtype in LOWER_PRECISION:
                moments[i] = one_pass.state[params[i]][name] = moment.float()
    for indices, keywords in one_pass.batches(params, one_pass.count(params, steps)):
        count, device = steps[indices[0]], params[indices[0]].device
        columns = [grads, params, exp_avgs, exp_avg_sqs]
        if len(indices) < len(params):
            columns = [list(map(column.__getitem__, indices)) for column in columns]
        kernels.multi_tensor_adam(
            *columns,
            lr=settings["lr"],
            betas=(float(settings["beta1"]), float(settings["beta2"])),
            eps=settings["eps"],
            # torch keeps counts on the host, but for ``capturable`` and ``fused``.
            step=count if count.device == device else count.item(),
            decoupled=settings.get("decoupled_weight_decay", False),
            weight_decay=settings["weight_decay"],
            inv_scale=-1.0 if settings["maximize"] else None,
            **keywords,
        )
    return None


def _sgd(original: Callable, params: Any, grads: Any, momenta: Any, **settings: Any) -> None:
    one_pass = _running.step
    if one_pass is None:
        return original(params, grads, momenta, **settings)
    momentum, dampening = settings["momentum"], settings["dampening"]
    is_first = [bool(momenta) and momenta[i] is None for i in range(len(params))]
    for indices, keywords in one_pass.batches(params, is_first):
        first = is_first[indices[0]]
        if first and dampening and one_pass.found_inf is not None and is_set(one_pass.found_inf):
            continue  # the first momentum is the first gradient that is taken
        for i in indices if momentum else ():
            if first:
                momenta[i] = torch.zeros_like(params[i], dtype=torch.promote_types(params[i].dtype, torch.float32))
            elif momenta[i].dtype in LOWER_PRECISION:
                momenta[i] = momenta[i].float()
        kernels.multi_tensor_sgd(
            [grads[i] for i in indices],
            [params[i] for i in indices],
            [momenta[i] for i in indices] if momentum else None,
            lr=settings["lr"],
            momentum=momentum,
            dampening=dampening,
            weight_decay=settings["weight_decay"],
            nesterov=settings["nesterov"],
            first_run=first,
            inv_scale=-1.0 if settings["maximize"] else None,
            **keywords,
        )
    return None


def _patch_updates(patches: PatchSet) -> None:
    for name, update in (("adam", _adam), ("sgd", _sgd)):
        module = sys.modules[f"torch.optim.{name}"]
        patches.set(module, name, functools.partial(update, getattr(module, name)))


one_pass_steps = SharedPatches(_patch_updates)
