"""The optimizers' multi-tensor updates in plain torch: one function for each rule, over lists of tensors.

Gradients, parameters and states may differ in dtype. Arithmetic is float32, or wider where a parameter is, and each
result is rounded once on its way back. Gradients are read only. The fused optimizers call these with their state, the
drop-in's ``amp_C`` with the lists of its callers. Numbers such as ``lr`` and ``step`` may be tensors: nothing waits
for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Tensors = Sequence[torch.Tensor]
Number = Any  #: a float, or a tensor of one element


@torch.no_grad()
def sgd(
    grads: Tensors,
    params: Tensors,
    momenta: Tensors,
    *,
    lr: Number,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    first_run: bool = False,
    wd_after_momentum: bool = False,
    scale: float = 1.0,
    trust: Tensors | None = None,
    lower: Tensors | None = None,
) -> None:
    """Stochastic gradient descent on ``grads * scale``; ``momenta`` is not looked at where ``momentum`` is 0.

    On the ``first_run`` a momentum is the gradient itself. ``wd_after_momentum`` keeps the weight decay out of the
    momentum. ``trust`` are factors of the update, one for each tensor. ``lower`` receives copies of the parameters.
    """
    p, d = _wide(params), _wide(grads, params)
    if scale != 1.0:
        d = torch._foreach_mul(d, scale)
    if weight_decay and not wd_after_momentum:
        d = torch._foreach_add(d, p, alpha=weight_decay)
    if trust is not None:
        d = torch._foreach_mul(d, [factor.to(x) for factor, x in zip(trust, d)])
    if momentum:
        m = _wide(momenta, params)
        if first_run:
            torch._foreach_copy_(m, d)
        else:
            torch._foreach_mul_(m, momentum)
            torch._foreach_add_(m, d, alpha=1.0 - dampening)
        _write(momenta, m)
        d = torch._foreach_add(d, m, alpha=momentum) if nesterov else m
    if weight_decay and wd_after_momentum:
        d = torch._foreach_add(d, p, alpha=weight_decay)
    _subtract(p, d, lr)
    _write(params, p)
    if lower is not None:
        torch._foreach_copy_(list(lower), p)


@torch.no_grad()
def adam(
    grads: Tensors,
    params: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    *,
    lr: Number,
    betas: tuple[float, float],
    eps: float,
    step: Number,
    decoupled: bool,
    bias_correction: bool = True,
    weight_decay: float = 0.0,
    inverse_scale: Number | None = None,
) -> None:
    """Adam (Kingma and Ba 2015), with L2 regularisation or, ``decoupled``, the weight decay of AdamW."""
    p, d = _wide(params), _wide(grads, params)
    if inverse_scale is not None:
        d = _times(d, inverse_scale)
    if weight_decay and not decoupled:
        d = torch._foreach_add(d, p, alpha=weight_decay)
    update = _adam_direction(d, params, exp_avgs, exp_avg_sqs, betas, 1.0 - betas[0], eps, step, bias_correction)
    if weight_decay and decoupled:
        torch._foreach_add_(update, p, alpha=weight_decay)
    _subtract(p, update, lr)
    _write(params, p)


@torch.no_grad()
def adagrad(
    grads: Tensors,
    params: Tensors,
    sums: Tensors,
    *,
    lr: Number,
    eps: float,
    decoupled: bool = False,
    weight_decay: float = 0.0,
) -> None:
    """Adagrad (Duchi et al. 2011), with L2 regularisation or ``decoupled`` weight decay."""
    p, d, h = _wide(params), _wide(grads, params), _wide(sums, params)
    if weight_decay and not decoupled:
        d = torch._foreach_add(d, p, alpha=weight_decay)
    torch._foreach_addcmul_(h, d, d)
    _write(sums, h)
    denominator = torch._foreach_sqrt(h)
    torch._foreach_add_(denominator, eps)
    update = torch._foreach_div(d, denominator)
    if weight_decay and decoupled:
        torch._foreach_add_(update, p, alpha=weight_decay)
    _subtract(p, update, lr)
    _write(params, p)


@torch.no_grad()
def novograd(
    grads: Tensors,
    params: Tensors,
    exp_avgs: Tensors,
    norms: torch.Tensor,
    *,
    lr: Number,
    betas: tuple[float, float],
    eps: float,
    step: Number,
    bias_correction: bool = True,
    weight_decay: float = 0.0,
    grad_averaging: bool = True,
    reg_inside_moment: bool = False,
    norm_type: int = 2,
) -> None:
    """NovoGrad (Ginsburg et al. 2019): Adam with one second moment for each tensor.

    ``norms`` holds the running norm of every gradient (not its square), one element a tensor, and is updated:
    for ``norm_type`` 2 in the mean of squares, for 0 (the maximum norm) in the mean.
    """
    beta1, beta2 = betas
    p, d, m = _wide(params), _wide(grads, params), _wide(exp_avgs, params)
    now = gradient_norms(d, norm_type).to(norms)
    if norm_type == 2:
        norms.copy_((norms.square() * beta2 + now.square() * (1.0 - beta2)).sqrt())
    else:
        norms.copy_(norms * beta2 + now * (1.0 - beta2))
    correction1, correction2 = 1.0, 1.0
    if bias_correction:
        correction1, correction2 = 1.0 - beta1**step, (1.0 - beta2**step) ** 0.5
    denominators = [(one / correction2 + eps).to(x) for one, x in zip(norms.unbind(), d)]
    share = 1.0 - beta1 if grad_averaging else 1.0
    if reg_inside_moment:
        d = torch._foreach_div(d, denominators)
        if weight_decay:
            torch._foreach_add_(d, p, alpha=weight_decay)
    torch._foreach_mul_(m, beta1)
    torch._foreach_add_(m, d, alpha=share)
    _write(exp_avgs, m)
    update = _over(m, correction1)
    if not reg_inside_moment:
        torch._foreach_div_(update, denominators)
        if weight_decay:
            torch._foreach_add_(update, p, alpha=weight_decay)
    _subtract(p, update, lr)
    _write(params, p)


@torch.no_grad()
def lamb_direction(
    grads: Tensors,
    params: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    *,
    betas: tuple[float, float],
    eps: float,
    step: Number,
    decays: Sequence[float] | float,
    decoupled: bool = True,
    bias_correction: bool = True,
    grad_averaging: bool = True,
    global_grad_norm: Number | None = None,
    max_grad_norm: Number | None = None,
    inverse_scale: Number | None = None,
) -> list[torch.Tensor]:
    """The first half of LAMB (You et al. 2020, algorithm 2): updates the moments and returns the direction to go.

    Gradients are clipped to ``max_grad_norm`` by their ``global_grad_norm``. ``decays`` is the weight decay, or one for
    each tensor.
    """
    p, d = _wide(params), _wide(grads, params)
    if inverse_scale is not None:
        d = _times(d, inverse_scale)
    if global_grad_norm is not None and max_grad_norm is not None:
        d = _times(d, clip_factor(global_grad_norm, max_grad_norm))
    decayed = _decayed(p, decays)
    if decayed is not None and not decoupled:
        d = torch._foreach_add(d, decayed)
    share = 1.0 - betas[0] if grad_averaging else 1.0
    update = _adam_direction(d, params, exp_avgs, exp_avg_sqs, betas, share, eps, step, bias_correction)
    if decayed is not None and decoupled:
        torch._foreach_add_(update, decayed)
    return list(update)


@torch.no_grad()
def lamb_move(
    params: Tensors,
    directions: Tensors,
    *,
    lr: Number,
    trusts: bool,
    param_norms: torch.Tensor | None = None,
    direction_norms: torch.Tensor | None = None,
    lower: Tensors | None = None,
) -> None:
    """The second half of LAMB: steps of length ``lr``, relative to the weights' norms where ``trusts`` says so.

    Norms, one element a tensor, are computed here unless they are given.
    """
    p, d = _wide(params), _wide(directions, params)
    if trusts and p:
        w = gradient_norms(p, 2) if param_norms is None else param_norms
        u = gradient_norms(d, 2) if direction_norms is None else direction_norms
        ratios = torch.where((w > 0) & (u > 0), w / u, torch.ones_like(w))
        d = torch._foreach_mul(d, [ratio.to(x) for ratio, x in zip(ratios.unbind(), d)])
    _subtract(p, d, lr)
    _write(params, p)
    if lower is not None:
        torch._foreach_copy_(list(lower), p)


@torch.no_grad()
def lars_trust(
    grad_norms: torch.Tensor, param_norms: torch.Tensor, *, trust_coefficient: float, eps: float, weight_decay: float
) -> torch.Tensor:
    """The local rates of LARS (You et al. 2017): ``tc * |w| / (|g| + wd * |w| + eps)``, 1 where a norm is 0."""
    local = trust_coefficient * param_norms / (grad_norms + weight_decay * param_norms + eps)
    return torch.where((grad_norms > 0) & (param_norms > 0), local, torch.ones_like(local))


@torch.no_grad()
def update_scale_(
    scale: torch.Tensor,
    growth_tracker: torch.Tensor,
    hysteresis_tracker: torch.Tensor,
    found_inf: torch.Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> torch.Tensor:
    """Move a loss scale on its device, as `DynamicLossScale` does; returns ``scale``.

    An overflow costs one of ``hysteresis`` chances; without any left, the scale backs off. A clean iteration gives all
    chances back, and the ``growth_interval``-th in a row lets the scale grow, unless it would become infinite.
    """
    bad = found_inf > 0
    left = torch.where(bad, hysteresis_tracker - 1, hysteresis)
    clean = torch.where(bad, 0, growth_tracker + 1)
    grows = clean == growth_interval
    grown = scale * growth_factor
    grown = torch.where(grown.isfinite(), grown, scale)
    moved = torch.where(bad & (left <= 0), scale * backoff_factor, torch.where(~bad & grows, grown, scale))
    scale.copy_(moved)
    growth_tracker.copy_(torch.where(grows, 0, clean))
    hysteresis_tracker.copy_(left)
    return scale


@torch.no_grad()
def gradient_norms(tensors: Tensors, norm_type: int = 2) -> torch.Tensor:
    """The norm of each tensor, at least float32, on the first one's device; ``norm_type`` 2, or 0 for the maximum."""
    if not tensors:
        return torch.zeros(0)
    if norm_type not in (0, 2):
        raise RuntimeError(f"norm_type is {norm_type}; expected 2, or 0 for the maximum norm")
    order = 2 if norm_type == 2 else float("inf")
    norms = [
        torch.linalg.vector_norm(t, order, dtype=_compute_dtype(t))
        if t.numel()
        else t.new_zeros((), dtype=_compute_dtype(t))
        for t in tensors
    ]
    return torch.stack([norm.to(norms[0]) for norm in norms])


@torch.no_grad()
def clip_factor(norm: Number, max_norm: Number) -> Number:
    """What to multiply gradients of a norm by so that they do not exceed the maximum; 0 or less means no maximum."""
    norm, max_norm = (x if isinstance(x, torch.Tensor) else torch.tensor(float(x)) for x in (norm, max_norm))
    norm, max_norm = norm.reshape(()), max_norm.reshape(()).to(norm)
    return torch.where((max_norm > 0) & (norm > max_norm), max_norm / norm, torch.ones_like(norm))


def _adam_direction(
    d: list[torch.Tensor],
    params: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    betas: tuple[float, float],
    share: float,
    eps: float,
    step: Number,
    bias_correction: bool,
) -> list[torch.Tensor]:
    """Update both moments with the gradients ``d``; returns first moment / (root of the second + eps), corrected."""
    beta1, beta2 = betas
    m, v = _wide(exp_avgs, params), _wide(exp_avg_sqs, params)
    torch._foreach_mul_(m, beta1)
    torch._foreach_add_(m, d, alpha=share)
    torch._foreach_mul_(v, beta2)
    torch._foreach_addcmul_(v, d, d, value=1.0 - beta2)
    _write(exp_avgs, m)
    _write(exp_avg_sqs, v)
    correction1, correction2 = (1.0 - beta1**step, 1.0 - beta2**step) if bias_correction else (1.0, 1.0)
    denominator = _over(v, correction2)
    torch._foreach_sqrt_(denominator)
    torch._foreach_add_(denominator, eps)
    update = _over(m, correction1)
    torch._foreach_div_(update, denominator)
    return list(update)


def _decayed(p: list[torch.Tensor], decays: Sequence[float] | float) -> list[torch.Tensor] | None:
    if isinstance(decays, (int, float)):
        return list(torch._foreach_mul(p, decays)) if decays else None
    return list(torch._foreach_mul(p, [float(decay) for decay in decays]))


def _subtract(p: list[torch.Tensor], update: Tensors, lr: Number) -> None:
    if isinstance(lr, torch.Tensor):
        torch._foreach_sub_(p, _times(update, lr))
    else:
        torch._foreach_add_(p, list(update), alpha=-lr)


def _times(tensors: Tensors, factor: Number) -> list[torch.Tensor]:
    if isinstance(factor, torch.Tensor):
        return list(torch._foreach_mul(list(tensors), [factor.reshape(()).to(t) for t in tensors]))
    return list(torch._foreach_mul(list(tensors), float(factor)))


def _over(tensors: Tensors, divisor: Number) -> list[torch.Tensor]:
    if isinstance(divisor, torch.Tensor):
        return list(torch._foreach_div(list(tensors), [divisor.reshape(()).to(t) for t in tensors]))
    return list(torch._foreach_div(list(tensors), float(divisor)))


def _compute_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(torch.float32, tensor.dtype)


def _wide(tensors: Tensors, params: Tensors | None = None) -> list[torch.Tensor]:
    """The tensors in the dtype that each parameter's update is computed in: themselves, where they have it already."""
    return [t.to(_compute_dtype(p)) for t, p in zip(tensors, tensors if params is None else params, strict=True)]


def _write(tensors: Tensors, values: list[torch.Tensor]) -> None:
    """Round computed values into the tensors that they stand for."""
    narrow = [(t, value) for t, value in zip(tensors, values) if t is not value]
    if narrow:
        torch._foreach_copy_([t for t, _ in narrow], [value for _, value in narrow])
