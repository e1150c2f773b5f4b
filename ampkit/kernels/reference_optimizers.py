"""The multi-tensor steps of SGD and Adam in plain torch, over lists of tensors, and the code that steps of all rules share.

A step updates ``params`` and states in place, and writes the new values, rounded, into ``lower`` if there is one; the kernels do it
in one pass. A formula (`adam`, ...) computes on float32 gradients, parameters and states; `formula` widens them before,
and rounds and writes them after. If a parameter is wider than float32, so is its update.

Every step takes the settings of its rule and the arguments of `step_arguments`: ``lr``; ``step``, the number of this step, 1 for
the first; ``inv_scale`` (1 / loss scale) and ``clip``, by which ``grads`` are multiplied (they are only read); and ``found_inf``:
if it is not 0, nothing is written. Each may be a tensor of one element, on any device.

If ``lower`` holds int16 (SGD's and Adam's), it is the rest of a weight in lower precision (split.py), and the two are updated
together, in float32. SGD and Adam also take moments in 8 bits, and round by random numbers: moments.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampkit.kernels.checks import compute_dtype
from ampkit.kernels.moments import MOMENTS, PARAM, draw, pack, to_bfloat16, unpack
from ampkit.kernels.reference import Number, Tensors, moved_to, serve
from ampkit.kernels.split import join, split


class _Settings:
    """The arguments of a formula besides the lists. ``own`` are the settings of the rule; ``each`` has a number for each tensor.

    ``positions`` (float32, shape [n]) has the index of each parameter among all of the optimizer's; with it moments in lower
    precision are rounded by random numbers, a function of ``seed``, ``step``, position and element, and with ``round_params``
    parameters in bfloat16 too. Without positions everything is rounded to nearest.
    """

    def __init__(self, settings, lr, step, inv_scale, clip, found_inf, each, positions) -> None:
        rate, count, factor, low, high, self.round_params, *self.own = settings
        self.lr, self.step = rate if lr is None else lr, count if step is None else step
        self.factor = math.prod([factor, *(x for x in (inv_scale, clip) if x is not None)])
        self.found_inf, self.each = found_inf, each
        self.positions, self.seed = positions, low | high << 32

    def corrections(self, beta1: float, beta2: float, corrects_bias: bool) -> tuple[Number, Number]:
        """The bias corrections of running means after this number of steps; powers in float64, for they come close to 1."""
        if not corrects_bias:
            return 1.0, 1.0
        step = self.step
        if isinstance(step, Tensor):
            step = step.reshape(()).to(torch.float32 if step.device.type == "mps" else torch.float64)
        return 1.0 - beta1**step, 1.0 - beta2**step

    def rounded(self, i: int, stored: Tensor, value: Tensor, stream: int, is_signed: bool = False) -> Tensor:
        """Return a float32 value as ``stored``, parameter ``i`` or a moment of it, is to hold it: unchanged, rounded or packed."""
        if stored.dtype not in (torch.uint8, torch.bfloat16):
            return value
        drawn = None
        if self.positions is not None:
            where = dict(position=self.positions[i], step=self.step, stream=stream, device=value.device)
            drawn = draw(value.numel(), seed=self.seed, **where)
        if stored.dtype is torch.uint8:
            return pack(value, is_signed, drawn)
        return value if drawn is None else to_bfloat16(value, drawn)


def formula(rule: Callable[..., None]) -> Callable[..., None]:
    """The reference of a step: called as its operator (csrc/ops.h), with the lists by name.

    ``rule(settings, gradients, params, *states)`` changes wide params and states in place.
    """

    def reference(*settings, grads, params, lower=None, **states):
        s = _Settings(*settings)
        copies = s.found_inf is not None  # of what is wide enough: the step may turn out to be skipped
        wide = [compute_dtype(p) for p in params]
        d = [g.to(dtype) for g, dtype in zip(grads, wide, strict=True)]
        if isinstance(s.factor, Tensor) or s.factor != 1.0:
            d = torch._foreach_mul(d, for_each(d, s.factor))
        is_rest = [bool(lower) and lower[i].dtype is torch.int16 for i in range(len(params))]
        values = [join(p, lower[i]) if is_rest[i] else p.to(wide[i], copy=copies) for i, p in enumerate(params)]
        columns = [
            [
                (unpack(t, p.shape, not k) if t.dtype is torch.uint8 else t).to(dtype, copy=copies)
                for t, p, dtype in zip(column, params, wide, strict=True)
            ]
            for k, column in enumerate(states.values())
        ]
        rule(s, d, values, *columns)
        results = [
            (t, s.rounded(i, t, value, MOMENTS, is_signed=not k))
            for k, (column, moved) in enumerate(zip(states.values(), columns))
            for i, (t, value) in enumerate(zip(column, moved))
        ]
        for i, value in enumerate(values):
            if is_rest[i]:
                results += zip((params[i], lower[i]), split(value, params[i].dtype))
            else:
                rounded = s.rounded(i, params[i], value, PARAM) if s.round_params else value
                results += [(params[i], rounded), *([(lower[i], value)] if lower else ())]
        _write(s.found_inf, [pair for pair in results if pair[0] is not pair[1]])

    return reference


def _write(found_inf: Tensor | None, results: list[tuple[Tensor, Tensor]]) -> None:
    """Round values into the tensors that they stand for, unless something was found."""
    if found_inf is not None:
        skips = found_inf.reshape(()) != 0
        results = [(t, torch.where(moved_to(skips, t.device), t, value.to(t.dtype))) for t, value in results]
    if results:
        torch._foreach_copy_(*map(list, zip(*results)))


def for_each(tensors: Tensors, number: Number) -> list[Tensor] | float:
    return [number.reshape(()).to(t) for t in tensors] if isinstance(number, Tensor) else float(number)


def subtract(p: list[Tensor], update: list[Tensor], lr: Number) -> None:
    torch._foreach_sub_(p, torch._foreach_mul(update, for_each(update, lr)))


def multi_tensor_sgd(
    grads: Tensors,
    params: Tensors,
    momenta: Tensors | None,
    lower: Tensors | None = None,
    *,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    first_run: bool = False,
    wd_after_momentum: bool = False,
    trust: Tensor | None = None,
    **common: Any,
) -> None:
    """Stochastic gradient descent; ``momenta`` is not looked at where ``momentum`` is 0.

    On the ``first_run`` a momentum becomes the gradient itself. ``wd_after_momentum`` keeps the weight decay out of the
    momentum. ``trust`` holds a factor of the decayed gradient for each tensor. ``step`` counts for random numbers alone.
    """
    lists, rule = {"grads": grads, "params": params}, "sgd"
    if momentum:
        lists["momenta"], rule = momenta, "sgd with momentum"  # type: ignore[assignment]
    rule_settings = (momentum, dampening, weight_decay, nesterov, first_run, wd_after_momentum)
    take_step(rule, _sgd, lists, lower, rule_settings, each=trust, **common)


@formula
def _sgd(s, d, p, m=None):
    momentum, dampening, decay, nesterov, first_run, decays_after = s.own
    if decay and not decays_after:
        d = torch._foreach_add(d, p, alpha=decay)
    if s.each is not None:
        d = torch._foreach_mul(d, [factor.to(x) for factor, x in zip(s.each.unbind(), d)])
    if m is not None:
        if first_run:
            torch._foreach_copy_(m, list(d))
        else:
            torch._foreach_mul_(m, momentum)
            torch._foreach_add_(m, d, alpha=1.0 - dampening)
        d = torch._foreach_add(d, m, alpha=momentum) if nesterov else m
    if decay and decays_after:
        d = torch._foreach_add(d, p, alpha=decay)
    subtract(p, d, s.lr)


def multi_tensor_adam(
    grads: Tensors,
    params: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    lower: Tensors | None = None,
    *,
    betas: tuple[float, float],
    eps: float,
    decoupled: bool,
    bias_correction: bool = True,
    weight_decay: float = 0.0,
    **common: Any,
) -> None:
    """Adam (Kingma and Ba 2015), with L2 regularisation or, ``decoupled``, the weight decay of AdamW."""
    lists = {"grads": grads, "params": params, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    rule_settings = (*betas, 1.0 - betas[0], eps, weight_decay, decoupled, bias_correction)
    take_step("adam", adam, lists, lower, rule_settings, **common)


@formula
def adam(s, d, p, m, v):
    subtract(p, adam_direction(s, d, p, m, v), s.lr)


def adam_direction(s, d, p, m, v):
    """Move the moments, and return first moment / (root of the second + eps), both corrected, and decayed."""
    beta1, beta2, share, eps, decay, decoupled, corrects_bias = s.own
    if decay and not decoupled:
        d = torch._foreach_add(d, p, alpha=decay)
    torch._foreach_mul_(m, beta1)
    torch._foreach_add_(m, d, alpha=share)
    torch._foreach_mul_(v, beta2)
    torch._foreach_addcmul_(v, d, d, value=1.0 - beta2)
    correction1, correction2 = s.corrections(beta1, beta2, corrects_bias)
    denominator = torch._foreach_div(v, for_each(v, correction2))
    torch._foreach_sqrt_(denominator)
    torch._foreach_add_(denominator, eps)
    update = torch._foreach_div(m, for_each(m, correction1))
    torch._foreach_div_(update, denominator)
    if decay and decoupled:
        torch._foreach_add_(update, p, alpha=decay)
    return update


def take_step(
    rule: str,
    reference: Callable[..., None],
    lists: dict[str, Tensors],
    lower: Tensors | None,
    rule_settings: tuple[float, ...],
    **common: Any,
) -> None:
    """Take a step of a rule with its ``rule_settings`` over ``lists``; ``common`` has the other arguments of `step_arguments`."""
    if lower:
        lists["lower"] = lower
    serve("multi_tensor_step", reference, lists, step_arguments(rule_settings, **common), (), rule)


def step_arguments(
    rule_settings: tuple[float, ...],
    lr: Number,
    step: Number = 1.0,
    inv_scale: Number | None = None,
    clip: Number | None = None,
    found_inf: Tensor | None = None,
    each: Tensor | None = None,
    positions: Tensor | None = None,
    seed: int = 0,
    round_params: bool = False,
) -> tuple[Any, ...]:
    """Return the arguments of the operator of all steps besides the lists (csrc/ops.h). `_Settings` reads them back."""
    numbers, tensors = [], []
    for value in (lr, step, inv_scale, clip):
        is_tensor = isinstance(value, Tensor)
        tensors.append(None if not is_tensor else value if value.is_floating_point() else value.to(torch.float32))
        numbers.append(1.0 if is_tensor or value is None else value)
    rate, count, *factors = numbers
    settings = (rate, count, math.prod(factors), seed & 0xFFFFFFFF, seed >> 32, round_params, *rule_settings)
    return settings, *tensors, found_inf, each, positions


@torch.no_grad()
def clip_coefficient(norm: Tensor, max_norm: float, eps: float = 1e-6) -> Tensor:
    """The factor that ``torch.nn.utils.clip_grad_norm_`` multiplies gradients of this norm by, on the device."""
    return (max_norm / (norm + eps)).clamp(max=1.0)
