"""The optimizers' multi-tensor steps in plain torch: one function for each rule, over lists of tensors.

A step updates ``params`` and states in place, and writes the new values, rounded, into ``lower`` if there is one; the kernels do it
in one pass. A formula (`_adam`, ...) says what becomes of float32 gradients, parameters and states; `_formula` widens them before,
and rounds and writes them after. Where a parameter is wider than float32, its update is.

Every step takes, besides the settings of its rule, `Common` ones: ``lr`` and ``step``, the number of this step, 1 for the first;
``inv_scale`` (1 / loss scale) and ``clip``, by which ``grads`` are multiplied, which are only read; and ``found_inf``, with which
nothing is written where it is not 0. Each may be a tensor of one element, on any device.

Where ``lower`` holds int16 (SGD's and Adam's), it is the rest of a weight in lower precision (split.py), and the two are updated
together, in float32. SGD and Adam also take moments in 8 bits, and round by random numbers: moments.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from ampkit.kernels.checks import check_lists, compute_dtype
from ampkit.kernels.moments import Rounding
from ampkit.kernels.reference import multi_tensor_l2norm
from ampkit.kernels.routing import Number, Tensors, number, on, serve
from ampkit.kernels.split import join, split

if TYPE_CHECKING:
    from typing import NotRequired, Unpack

    class Common(TypedDict):
        """What every step takes."""

        lr: Number
        step: NotRequired[Number]
        inv_scale: NotRequired[Number | None]
        clip: NotRequired[Number | None]
        found_inf: NotRequired[Tensor | None]

    class Drawn(Common):
        """What a step takes that may round by random numbers: `ampkit.kernels.moments.Rounding`."""

        positions: NotRequired[Tensor | None]
        seed: NotRequired[int]
        round_params: NotRequired[bool]


class _Settings:
    """What a formula is given besides the lists. ``own`` are the settings of the rule; ``each`` has a number for each tensor."""

    def __init__(self, settings, lr, step, inv_scale, clip, found_inf, each, positions) -> None:
        rate, count, factor, low, high, round_params, *self.own = settings
        self.lr, self.step = rate if lr is None else lr, count if step is None else step
        self.factor = math.prod([factor, *(one for one in (inv_scale, clip) if one is not None)])
        self.found_inf, self.each = found_inf, each
        self.rounding = Rounding(positions, low | high << 32, self.step, round_params)

    def corrections(self, beta1: float, beta2: float, corrects_bias: bool) -> tuple[Number, Number]:
        """What running means fall short of after so many steps; powers in float64, for they come close to 1."""
        if not corrects_bias:
            return 1.0, 1.0
        step = self.step
        if isinstance(step, Tensor):
            step = step.reshape(()).to(torch.float32 if step.device.type == "mps" else torch.float64)
        return 1.0 - beta1**step, 1.0 - beta2**step


def _formula(formula: Callable[..., None]) -> Callable[..., None]:
    """The reference of a step: called as its operator (csrc/ops.h), with the lists by name.

    ``formula(settings, gradients, params, *states)`` changes wide params and states in place.
    """

    def reference(*given, grads, params, lower=None, **states):
        s = _Settings(*given)
        copies = s.found_inf is not None  # of what is wide enough: the step may turn out to be skipped
        wide = [compute_dtype(p) for p in params]
        d = [g.to(dtype) for g, dtype in zip(grads, wide, strict=True)]
        if isinstance(s.factor, Tensor) or s.factor != 1.0:
            d = torch._foreach_mul(d, _for_each(d, s.factor))
        is_rest = [bool(lower) and lower[i].dtype is torch.int16 for i in range(len(params))]
        values = [join(p, lower[i]) if is_rest[i] else p.to(wide[i], copy=copies) for i, p in enumerate(params)]
        columns = [
            [
                s.rounding.load(t, p, not k).to(dtype, copy=copies)
                for t, p, dtype in zip(column, params, wide, strict=True)
            ]
            for k, column in enumerate(states.values())
        ]
        formula(s, d, values, *columns)
        results = [
            (t, s.rounding.store(i, t, value, is_signed=not k))
            for k, (column, moved) in enumerate(zip(states.values(), columns))
            for i, (t, value) in enumerate(zip(column, moved))
        ]
        for i, value in enumerate(values):
            if is_rest[i]:
                results += zip((params[i], lower[i]), split(value, params[i].dtype))
            else:
                results += [
                    (params[i], s.rounding.store_param(i, params[i], value)),
                    *([(lower[i], value)] if lower else ()),
                ]
        _write(s.found_inf, [pair for pair in results if pair[0] is not pair[1]])

    return reference


def _write(found_inf: Tensor | None, results: list[tuple[Tensor, Tensor]]) -> None:
    """Round values into the tensors that they stand for, unless something was found."""
    if found_inf is not None:
        skips = found_inf.reshape(()) != 0
        results = [(t, torch.where(on(skips, t.device), t, value.to(t.dtype))) for t, value in results]
    if results:
        torch._foreach_copy_(*map(list, zip(*results)))


def _for_each(tensors: Tensors, number: Number) -> list[Tensor] | float:
    return [number.reshape(()).to(t) for t in tensors] if isinstance(number, Tensor) else float(number)


def _subtract(p: list[Tensor], update: list[Tensor], lr: Number) -> None:
    torch._foreach_sub_(p, torch._foreach_mul(update, _for_each(update, lr)))


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
    **common: Unpack[Drawn],
) -> None:
    """Stochastic gradient descent; ``momenta`` is not looked at where ``momentum`` is 0.

    On the ``first_run`` a momentum becomes the gradient itself. ``wd_after_momentum`` keeps the weight decay out of the
    momentum. ``trust`` holds a factor of the decayed gradient for each tensor. ``step`` counts for random numbers alone.
    """
    lists, rule = {"grads": grads, "params": params}, "sgd"
    if momentum:
        lists["momenta"], rule = momenta, "sgd with momentum"  # type: ignore[assignment]
    own = (momentum, dampening, weight_decay, nesterov, first_run, wd_after_momentum)
    _step(rule, _sgd, lists, lower, own, each=trust, **common)


@_formula
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
    _subtract(p, d, s.lr)


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
    **common: Unpack[Drawn],
) -> None:
    """Adam (Kingma and Ba 2015), with L2 regularisation or, ``decoupled``, the weight decay of AdamW."""
    lists = {"grads": grads, "params": params, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    own = (*betas, 1.0 - betas[0], eps, weight_decay, decoupled, bias_correction)
    _step("adam", _adam, lists, lower, own, **common)


@_formula
def _adam(s, d, p, m, v):
    _subtract(p, _adam_direction(s, d, p, m, v), s.lr)


def _adam_direction(s, d, p, m, v):
    """Moves the moments; returns first moment / (root of the second + eps), both corrected, and decayed."""
    beta1, beta2, share, eps, decay, decoupled, corrects_bias = s.own
    if decay and not decoupled:
        d = torch._foreach_add(d, p, alpha=decay)
    torch._foreach_mul_(m, beta1)
    torch._foreach_add_(m, d, alpha=share)
    torch._foreach_mul_(v, beta2)
    torch._foreach_addcmul_(v, d, d, value=1.0 - beta2)
    correction1, correction2 = s.corrections(beta1, beta2, corrects_bias)
    denominator = torch._foreach_div(v, _for_each(v, correction2))
    torch._foreach_sqrt_(denominator)
    torch._foreach_add_(denominator, eps)
    update = torch._foreach_div(m, _for_each(m, correction1))
    torch._foreach_div_(update, denominator)
    if decay and decoupled:
        torch._foreach_add_(update, p, alpha=decay)
    return update


def multi_tensor_adagrad(
    grads: Tensors,
    params: Tensors,
    sums: Tensors,
    lower: Tensors | None = None,
    *,
    eps: float,
    decoupled: bool = False,
    weight_decay: float = 0.0,
    **common: Unpack[Common],
) -> None:
    """Adagrad (Duchi et al. 2011), with L2 regularisation or ``decoupled`` weight decay."""
    lists = {"grads": grads, "params": params, "sums": sums}
    _step("adagrad", _adagrad, lists, lower, (eps, weight_decay, decoupled), **common)


@_formula
def _adagrad(s, d, p, h):
    eps, decay, decoupled = s.own
    if decay and not decoupled:
        d = torch._foreach_add(d, p, alpha=decay)
    torch._foreach_addcmul_(h, d, d)
    denominator = torch._foreach_sqrt(h)
    torch._foreach_add_(denominator, eps)
    update = torch._foreach_div(d, denominator)
    if decay and decoupled:
        torch._foreach_add_(update, p, alpha=decay)
    _subtract(p, update, s.lr)


def multi_tensor_lamb(
    grads: Tensors,
    params: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    lower: Tensors | None = None,
    directions: Tensors | None = None,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool = True,
    bias_correction: bool = True,
    grad_averaging: bool = True,
    trusts: bool = True,
    **common: Unpack[Common],
) -> None:
    """LAMB (You et al. 2020, algorithm 2): Adam's direction; where ``trusts``, a step as long as ``lr`` times the weights' norm.

    ``directions`` (may be the gradients) receives the directions taken, which no kernel does. For LAMB's own clipping,
    ``clip=clip_factor(unscaled norm of all gradients, max_grad_norm)``.
    """
    lists = {"grads": grads, "params": params, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    own = (*betas, 1.0 - betas[0] if grad_averaging else 1.0, eps, weight_decay, decoupled, bias_correction)
    if directions is None:
        rule, reference = ("lamb", _lamb) if trusts else ("adam", _adam)
        return _step(rule, reference, lists, lower, own, **common)
    lists.update({"directions": directions}, **({"lower": lower} if lower else {}))
    check_lists("multi_tensor_lamb", lists)
    with torch.no_grad():
        (_lamb if trusts else _adam_told)(*_arguments(own, **common), **lists)


@_formula
def _lamb(s, d, p, m, v, told=None):
    update = _adam_direction(s, d, p, m, v)
    if told is not None:
        torch._foreach_copy_(told, update)
    w, u = gradient_norms(p), gradient_norms(update)
    ratios = torch.where((w > 0) & (u > 0), w / u, torch.ones_like(w))
    _subtract(p, torch._foreach_mul(update, [ratio.to(x) for ratio, x in zip(ratios.unbind(), update)]), s.lr)


@_formula
def _adam_told(s, d, p, m, v, told):
    torch._foreach_copy_(told, _adam_direction(s, d, p, m, v))
    _subtract(p, told, s.lr)


def multi_tensor_novograd(
    grads: Tensors,
    params: Tensors,
    exp_avgs: Tensors,
    norms: Tensor,
    lower: Tensors | None = None,
    *,
    betas: tuple[float, float],
    eps: float,
    bias_correction: bool = True,
    weight_decay: float = 0.0,
    grad_averaging: bool = True,
    reg_inside_moment: bool = False,
    norm_type: int = 2,
    grad_norms: Tensor | None = None,
    **common: Unpack[Common],
) -> None:
    """NovoGrad (Ginsburg et al. 2019): Adam with one second moment for each tensor.

    ``norms`` holds the running norm of every gradient (not its square), one element a tensor, and is updated first: for
    ``norm_type`` 2 in the mean of squares, for 0 (the maximum norm) in the mean. ``grad_norms``, the norms of these
    gradients (unscaled and clipped), are computed in a pass before unless they are given.
    """
    moved = _moved_norms(norms, grads, grad_norms, norm_type, betas[1], common) if grads else norms
    own = (*betas, 1.0 - betas[0] if grad_averaging else 1.0, eps, weight_decay, reg_inside_moment, bias_correction)
    lists = {"grads": grads, "params": params, "exp_avgs": exp_avgs}
    _step("novograd", _novograd, lists, lower, own, each=moved, **common)
    norms.copy_(moved)


@torch.no_grad()
def _moved_norms(norms: Tensor, grads: Tensors, now: Any, norm_type: int, beta2: float, common: Common) -> Tensor:
    if now is None:
        now = multi_tensor_l2norm(grads, True)[1] if norm_type == 2 else gradient_norms(grads, norm_type)
        for factor in (common.get("inv_scale"), common.get("clip")):
            if factor is not None:
                now = now * (factor.to(now) if isinstance(factor, Tensor) else factor)
    now, found_inf = now.to(norms), common.get("found_inf")
    if norm_type == 2:
        moved = (norms.square() * beta2 + now.square() * (1.0 - beta2)).sqrt()
    else:
        moved = norms * beta2 + now * (1.0 - beta2)
    return moved if found_inf is None else torch.where(found_inf.to(norms.device) != 0, norms, moved)


@_formula
def _novograd(s, d, p, m):
    beta1, beta2, share, eps, decay, inside_moment, corrects_bias = s.own
    correction1, correction2 = s.corrections(beta1, beta2, corrects_bias)
    denominators = [(norm / correction2**0.5 + eps).to(x) for norm, x in zip(s.each.unbind(), d)]
    if inside_moment:
        d = torch._foreach_div(d, denominators)
        torch._foreach_add_(d, p, alpha=decay)
    torch._foreach_mul_(m, beta1)
    torch._foreach_add_(m, d, alpha=share)
    update = torch._foreach_div(m, _for_each(m, correction1))
    if not inside_moment:
        torch._foreach_div_(update, denominators)
        torch._foreach_add_(update, p, alpha=decay)
    _subtract(p, update, s.lr)


def _step(
    rule: str,
    reference: Callable[..., None],
    lists: dict[str, Tensors],
    lower: Tensors | None,
    own: tuple[float, ...],
    **common: Any,
) -> None:
    """The step of a rule, whose own settings are ``own``, over ``lists``; ``common`` is what `_arguments` takes besides."""
    if lower:
        lists["lower"] = lower
    count = len(lists["grads"])
    for column in lists.values():
        if len(column) != count:
            check_lists(f"multi_tensor_{rule.partition(' ')[0]}", lists)
    if count:
        serve("multi_tensor_step", reference, lists, _arguments(own, **common), (), rule)


def _arguments(
    own: tuple[float, ...],
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
    """What the operator of all steps is given besides the lists (csrc/ops.h); `_Settings` is the way back."""
    lr_tensor = step_tensor = inv_scale_tensor = clip_tensor = None
    if isinstance(lr, Tensor):
        lr, lr_tensor = number(lr)
    if isinstance(step, Tensor):
        step, step_tensor = number(step)
    if inv_scale is None or isinstance(inv_scale, Tensor):
        inv_scale, inv_scale_tensor = number(inv_scale)
    if clip is None or isinstance(clip, Tensor):
        clip, clip_tensor = number(clip)
    settings = (lr, step, inv_scale * clip, seed & 0xFFFFFFFF, seed >> 32, round_params, *own)
    return settings, lr_tensor, step_tensor, inv_scale_tensor, clip_tensor, found_inf, each, positions


@torch.no_grad()
def gradient_norms(tensors: Tensors, norm_type: int = 2) -> Tensor:
    """The norm of each tensor, at least float32, on the first one's device; ``norm_type`` 2, or 0 for the maximum."""
    if not tensors:
        return torch.zeros(0)
    if norm_type not in (0, 2):
        raise RuntimeError(f"norm_type is {norm_type}; expected 2, or 0 for the maximum norm")
    order = 2 if norm_type == 2 else float("inf")
    filled = [t if t.numel() else t.new_zeros(1) for t in tensors]
    norms = [torch.linalg.vector_norm(t, order, dtype=compute_dtype(t)) for t in filled]
    return torch.stack([norm.to(norms[0]) for norm in norms])


@torch.no_grad()
def clip_factor(norm: Number, max_norm: Number) -> Tensor:
    """What to multiply gradients of a norm by so that they do not exceed the maximum; 0 or less means no maximum."""
    norm = norm.reshape(()) if isinstance(norm, Tensor) else torch.tensor(float(norm))
    # A number is written where the norm lies: a copy from the host would wait for the device.
    max_norm = max_norm.reshape(()).to(norm) if isinstance(max_norm, Tensor) else norm.new_full((), float(max_norm))
    return torch.where((max_norm > 0) & (norm > max_norm), max_norm / norm, torch.ones_like(norm))


@torch.no_grad()
def clip_coefficient(norm: Tensor, max_norm: float, eps: float = 1e-6) -> Tensor:
    """The factor that ``torch.nn.utils.clip_grad_norm_`` multiplies gradients of this norm by, on the device."""
    return (max_norm / (norm + eps)).clamp(max=1.0)
