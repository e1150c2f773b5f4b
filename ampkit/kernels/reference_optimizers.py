"""The optimizers' multi-tensor steps in plain torch: one operator for each rule, over lists of tensors.

A step updates ``params`` and states in place, and writes the new values, rounded,
into ``lower`` if there is one; the kernels do it in one pass. ``grads`` are only read, and multiplied by ``inv_scale`` (1 / loss
scale) and ``clip`` first. ``step`` is the number of this step, 1 for the first. Where ``found_inf`` is not 0, nothing is written.

Where ``lower`` holds int16 (SGD's and Adam's), it is the rest of a weight in lower precision (split.py), which is updated in the
float32 that the two are together.

Gradients, parameters and states may differ in dtype. Arithmetic is float32, or wider where a parameter is, and each result is
rounded once on its way back.

SGD and Adam also take moments that are packed in 8 bits (moments.py). With ``positions``, of each parameter among all of an
optimizer's, moments in lower precision are rounded by random numbers, a function of ``seed``, ``step``, position and element; with
``round_params``, so are parameters in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampkit.kernels import moments
from ampkit.kernels.checks import check_lists, compute_dtype
from ampkit.kernels.reference import multi_tensor_l2norm
from ampkit.kernels.routing import Number, Tensors, number, serve
from ampkit.kernels.split import join, split


def _of_rule(function: Callable[..., None]) -> Callable[..., None]:
    """The reference of a rule, which is given what the operator is (csrc/ops.h): the lists by name."""
    return lambda *given, **lists: function(_Given(*given), **lists)


def multi_tensor_sgd(
    grads: Tensors,
    params: Tensors,
    momenta: Tensors | None,
    lower: Tensors | None = None,
    *,
    lr: Number,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    first_run: bool = False,
    wd_after_momentum: bool = False,
    trust: Tensor | None = None,
    inv_scale: Number | None = None,
    clip: Number | None = None,
    found_inf: Tensor | None = None,
    step: Number = 1.0,
    positions: Tensor | None = None,
    seed: int = 0,
    round_params: bool = False,
) -> None:
    """Stochastic gradient descent; ``momenta`` is not looked at where ``momentum`` is 0.

    On the ``first_run`` a momentum becomes the gradient itself. ``wd_after_momentum`` keeps the weight decay out of the
    momentum. ``trust`` holds a factor of the decayed gradient for each tensor. ``step`` counts for random numbers alone.
    """
    lists, rule = {"grads": grads, "params": params}, "sgd"
    if momentum:
        lists["momenta"], rule = momenta, "sgd with momentum"
    own = (momentum, dampening, weight_decay, nesterov, first_run, wd_after_momentum)
    _step(rule, _sgd, lists, lower, own, lr, step, inv_scale, clip, found_inf, trust, positions, seed, round_params)


@_of_rule
def _sgd(given: _Given, grads, params, momenta=None, lower=None):
    momentum, dampening, weight_decay, nesterov, first_run, wd_after_momentum = given.own
    p, d = _joined(params, lower, given.found_inf), given.scaled(grads, params)
    if weight_decay and not wd_after_momentum:
        d = torch._foreach_add(d, p, alpha=weight_decay)
    if given.each is not None:
        d = torch._foreach_mul(d, [factor.to(x) for factor, x in zip(given.each.unbind(), d)])
    written = []
    if momentum:
        m = _moments(momenta, params, True, given.found_inf)
        if first_run:
            torch._foreach_copy_(m, list(d))
        else:
            torch._foreach_mul_(m, momentum)
            torch._foreach_add_(m, d, alpha=1.0 - dampening)
        written.append((momenta, given.rounding.of_moments(momenta, m, is_signed=True)))
        d = torch._foreach_add(d, m, alpha=momentum) if nesterov else m
    if weight_decay and wd_after_momentum:
        d = torch._foreach_add(d, p, alpha=weight_decay)
    _subtract(p, d, given.lr)
    _write(given.found_inf, *written, *_parted(params, lower, p, given.rounding))


def multi_tensor_adam(
    grads: Tensors,
    params: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    lower: Tensors | None = None,
    *,
    lr: Number,
    betas: tuple[float, float],
    eps: float,
    step: Number,
    decoupled: bool,
    bias_correction: bool = True,
    weight_decay: float = 0.0,
    inv_scale: Number | None = None,
    clip: Number | None = None,
    found_inf: Tensor | None = None,
    positions: Tensor | None = None,
    seed: int = 0,
    round_params: bool = False,
) -> None:
    """Adam (Kingma and Ba 2015), with L2 regularisation or, ``decoupled``, the weight decay of AdamW."""
    lists = {"grads": grads, "params": params, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    own = (*betas, 1.0 - betas[0], eps, weight_decay, decoupled, bias_correction)
    _step("adam", _adam, lists, lower, own, lr, step, inv_scale, clip, found_inf, None, positions, seed, round_params)


@_of_rule
def _adam(given: _Given, grads, params, exp_avgs, exp_avg_sqs, lower=None):
    beta1, beta2, share, eps, weight_decay, decoupled, bias_correction = given.own
    p, d = _joined(params, lower, given.found_inf), given.scaled(grads, params)
    m, v = (_moments(exp_avgs, params, True, given.found_inf), _moments(exp_avg_sqs, params, False, given.found_inf))
    if weight_decay and not decoupled:
        d = torch._foreach_add(d, p, alpha=weight_decay)
    _update_moments(m, v, d, beta1, beta2, share)
    update = _adam_direction(m, v, (beta1, beta2), eps, given.step, bias_correction)
    if weight_decay and decoupled:
        torch._foreach_add_(update, p, alpha=weight_decay)
    _subtract(p, update, given.lr)
    m = given.rounding.of_moments(exp_avgs, m, is_signed=True)
    v = given.rounding.of_moments(exp_avg_sqs, v, is_signed=False)
    _write(given.found_inf, (exp_avgs, m), (exp_avg_sqs, v), *_parted(params, lower, p, given.rounding))


def multi_tensor_adagrad(
    grads: Tensors,
    params: Tensors,
    sums: Tensors,
    lower: Tensors | None = None,
    *,
    lr: Number,
    eps: float,
    decoupled: bool = False,
    weight_decay: float = 0.0,
    inv_scale: Number | None = None,
    clip: Number | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Adagrad (Duchi et al. 2011), with L2 regularisation or ``decoupled`` weight decay."""
    own = (eps, weight_decay, decoupled)
    _step(
        "adagrad",
        _adagrad,
        {"grads": grads, "params": params, "sums": sums},
        lower,
        own,
        lr,
        1.0,
        inv_scale,
        clip,
        found_inf,
    )


@_of_rule
def _adagrad(given: _Given, grads, params, sums, lower=None):
    eps, weight_decay, decoupled = given.own
    p, d = _working(params, params, given.found_inf), given.scaled(grads, params)
    h = _working(sums, params, given.found_inf)
    if weight_decay and not decoupled:
        d = torch._foreach_add(d, p, alpha=weight_decay)
    torch._foreach_addcmul_(h, d, d)
    denominator = torch._foreach_sqrt(h)
    torch._foreach_add_(denominator, eps)
    update = torch._foreach_div(d, denominator)
    if weight_decay and decoupled:
        torch._foreach_add_(update, p, alpha=weight_decay)
    _subtract(p, update, given.lr)
    _write(given.found_inf, (sums, h), (params, p), (lower, p))


def multi_tensor_lamb(
    grads: Tensors,
    params: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    lower: Tensors | None = None,
    directions: Tensors | None = None,
    *,
    lr: Number,
    betas: tuple[float, float],
    eps: float,
    step: Number,
    weight_decay: float,
    decoupled: bool = True,
    bias_correction: bool = True,
    grad_averaging: bool = True,
    trusts: bool = True,
    inv_scale: Number | None = None,
    clip: Number | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """LAMB (You et al. 2020, algorithm 2): Adam's direction; where ``trusts``, a step as long as ``lr`` times the weights'
    norm. ``directions`` (may be the gradients) receives the directions taken, if anybody asks, which no kernel does. For LAMB's own
    clipping, ``clip=clip_factor(unscaled norm of all gradients, max_grad_norm)``.
    """
    lists = {"grads": grads, "params": params, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    own = (*betas, 1.0 - betas[0] if grad_averaging else 1.0, eps, weight_decay, decoupled, bias_correction)
    numbers = (lr, step, inv_scale, clip, found_inf)
    if directions is None:
        rule, reference = ("lamb", _lamb) if trusts else ("adam", _adam)
        return _step(rule, reference, lists, lower, own, *numbers)
    check_lists("multi_tensor_lamb", **lists, lower=lower, directions=directions)
    with torch.no_grad():
        _lamb(*_flat(own, *numbers), **lists, lower=lower, directions=directions, trusts=trusts)


@_of_rule
def _lamb(given: _Given, grads, params, exp_avgs, exp_avg_sqs, lower=None, directions=None, trusts=True):
    beta1, beta2, share, eps, weight_decay, decoupled, bias_correction = given.own
    p, d = _working(params, params, given.found_inf), given.scaled(grads, params)
    m, v = (_working(moments, params, given.found_inf) for moments in (exp_avgs, exp_avg_sqs))
    if weight_decay and not decoupled:
        d = torch._foreach_add(d, p, alpha=weight_decay)
    _update_moments(m, v, d, beta1, beta2, share)
    stored = _stored(m, exp_avgs), _stored(v, exp_avg_sqs)
    update = _adam_direction(*stored, (beta1, beta2), eps, given.step, bias_correction)
    if weight_decay and decoupled:
        torch._foreach_add_(update, p, alpha=weight_decay)
    _lamb_move(p, update, given.lr, trusts)
    _write(given.found_inf, (exp_avgs, m), (exp_avg_sqs, v), (directions, update), (params, p), (lower, p))


def multi_tensor_novograd(
    grads: Tensors,
    params: Tensors,
    exp_avgs: Tensors,
    norms: Tensor,
    lower: Tensors | None = None,
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
    grad_norms: Tensor | None = None,
    inv_scale: Number | None = None,
    clip: Number | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """NovoGrad (Ginsburg et al. 2019): Adam with one second moment for each tensor.

    ``norms`` holds the running norm of every gradient (not its square), one element a tensor, and is updated first: for
    ``norm_type`` 2 in the mean of squares, for 0 (the maximum norm) in the mean. ``grad_norms``, the norms of these
    gradients (unscaled and clipped), are computed in a pass before unless they are given.
    """
    factors = inv_scale, clip
    moved = _moved_norms(norms, grads, grad_norms, norm_type, betas[1], factors, found_inf) if grads else norms
    own = (*betas, 1.0 - betas[0] if grad_averaging else 1.0, eps, weight_decay, reg_inside_moment, bias_correction)
    lists = {"grads": grads, "params": params, "exp_avgs": exp_avgs}
    _step("novograd", _novograd, lists, lower, own, lr, step, inv_scale, clip, found_inf, moved)
    norms.copy_(moved)


@torch.no_grad()
def _moved_norms(norms, grads, now, norm_type, beta2, factors, found_inf):
    if now is None:
        now = multi_tensor_l2norm(grads, True)[1] if norm_type == 2 else gradient_norms(grads, norm_type)
        for factor in factors:
            if factor is not None:
                now = now * (factor.to(now) if isinstance(factor, Tensor) else factor)
    now = now.to(norms)
    if norm_type == 2:
        moved = (norms.square() * beta2 + now.square() * (1.0 - beta2)).sqrt()
    else:
        moved = norms * beta2 + now * (1.0 - beta2)
    return moved if found_inf is None else torch.where(found_inf.to(norms.device) != 0, norms, moved)


@_of_rule
def _novograd(given: _Given, grads, params, exp_avgs, lower=None):
    beta1, beta2, share, eps, weight_decay, inside_moment, bias_correction = given.own
    p, d = _working(params, params, given.found_inf), given.scaled(grads, params)
    m = _working(exp_avgs, params, given.found_inf)
    correction1, correction2 = _corrections((beta1, beta2), given.step, bias_correction)
    denominators = [(norm / correction2**0.5 + eps).to(x) for norm, x in zip(given.each.unbind(), d)]
    if inside_moment:
        d = torch._foreach_div(d, denominators)
        if weight_decay:
            torch._foreach_add_(d, p, alpha=weight_decay)
    torch._foreach_mul_(m, beta1)
    torch._foreach_add_(m, d, alpha=share)
    update = _over(m, correction1)
    if not inside_moment:
        torch._foreach_div_(update, denominators)
        if weight_decay:
            torch._foreach_add_(update, p, alpha=weight_decay)
    _subtract(p, update, given.lr)
    _write(given.found_inf, (exp_avgs, m), (params, p), (lower, p))


def _step(
    rule: str,
    reference: Callable[..., None],
    lists: dict[str, Any],
    lower: Tensors | None,
    own: tuple[float, ...],
    *common: Any,
) -> None:
    """The step of a rule, whose own settings are ``own``, over ``lists``; ``common`` is what `_flat` takes besides."""
    if lower:
        lists["lower"] = lower
    count = len(lists["grads"])
    for column in lists.values():
        if len(column) != count:
            check_lists(f"multi_tensor_{rule.partition(' ')[0]}", **lists)
    if count:
        serve("multi_tensor_step", reference, lists, _flat(own, *common), (), rule)


def _flat(
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
    """What the operator of all steps is given besides the lists (csrc/ops.h); `_Given` is the way back."""
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


class _Given:
    """What a step is given besides the lists, as `_flat` made it. ``each`` is a number for each tensor."""

    def __init__(self, settings, lr, step, inv_scale, clip, found_inf, each, positions) -> None:
        rate, count, factor, low, high, round_params, *self.own = settings
        self.lr, self.step = rate if lr is None else lr, count if step is None else step
        self.factors = [factor, *(one for one in (inv_scale, clip) if one is not None)]
        self.found_inf, self.each = found_inf, each
        self.rounding = _Rounding(positions, low | high << 32, self.step, round_params)

    def scaled(self, grads: Tensors, params: Tensors) -> list[Tensor]:
        """The gradients in what each update is computed in, unscaled and clipped."""
        d = [g.to(compute_dtype(p)) for g, p in zip(grads, params, strict=True)]
        product = math.prod(self.factors)
        return d if not isinstance(product, Tensor) and product == 1.0 else _times(d, product)


@torch.no_grad()
def lars_trust(
    grad_norms: Tensor, param_norms: Tensor, *, trust_coefficient: float, eps: float, weight_decay: float
) -> Tensor:
    """The local rates of LARS (You et al. 2017): ``tc * |w| / (|g| + wd * |w| + eps)``, 1 where a norm is 0."""
    local = trust_coefficient * param_norms / (grad_norms + weight_decay * param_norms + eps)
    return torch.where((grad_norms > 0) & (param_norms > 0), local, torch.ones_like(local))


@torch.no_grad()
def gradient_norms(tensors: Tensors, norm_type: int = 2) -> Tensor:
    """The norm of each tensor, at least float32, on the first one's device; ``norm_type`` 2, or 0 for the maximum."""
    if not tensors:
        return torch.zeros(0)
    if norm_type not in (0, 2):
        raise RuntimeError(f"norm_type is {norm_type}; expected 2, or 0 for the maximum norm")
    order = 2 if norm_type == 2 else float("inf")
    norms = [
        torch.linalg.vector_norm(t, order, dtype=compute_dtype(t))
        if t.numel()
        else t.new_zeros((), dtype=compute_dtype(t))
        for t in tensors
    ]
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


def _lamb_move(p, d, lr, trusts):
    if trusts and p:
        w, u = gradient_norms(p, 2), gradient_norms(d, 2)
        ratios = torch.where((w > 0) & (u > 0), w / u, torch.ones_like(w))
        d = torch._foreach_mul(d, [ratio.to(x) for ratio, x in zip(ratios.unbind(), d)])
    _subtract(p, d, lr)


def _update_moments(m, v, d, beta1, beta2, share):
    torch._foreach_mul_(m, beta1)
    torch._foreach_add_(m, d, alpha=share)
    torch._foreach_mul_(v, beta2)
    torch._foreach_addcmul_(v, d, d, value=1.0 - beta2)


def _adam_direction(m, v, betas, eps, step, bias_correction) -> list[Tensor]:
    """First moment / (root of the second + eps), corrected."""
    correction1, correction2 = _corrections(betas, step, bias_correction)
    denominator = _over(v, correction2)
    torch._foreach_sqrt_(denominator)
    torch._foreach_add_(denominator, eps)
    update = _over(m, correction1)
    torch._foreach_div_(update, denominator)
    return update


def _corrections(betas: tuple[float, float], step: Number, bias_correction: bool) -> tuple[Number, Number]:
    """What the moments fall short of after so many steps; powers in float64, for they come close to 1."""
    if not bias_correction:
        return 1.0, 1.0
    if isinstance(step, Tensor):
        step = step.reshape(()).to(torch.float32 if step.device.type == "mps" else torch.float64)
    return 1.0 - betas[0] ** step, 1.0 - betas[1] ** step


def _subtract(p: list[Tensor], update: Tensors, lr: Number) -> None:
    if isinstance(lr, Tensor):
        torch._foreach_sub_(p, _times(update, lr))
    else:
        torch._foreach_add_(p, list(update), alpha=-lr)


def _times(tensors: Tensors, factor: Number) -> list[Tensor]:
    return list(torch._foreach_mul(list(tensors), _for_each(tensors, factor)))


def _over(tensors: Tensors, divisor: Number) -> list[Tensor]:
    return list(torch._foreach_div(list(tensors), _for_each(tensors, divisor)))


def _for_each(tensors: Tensors, number: Number) -> list[Tensor] | float:
    return [number.reshape(()).to(t) for t in tensors] if isinstance(number, Tensor) else float(number)


def _working(tensors: Tensors, params: Tensors, found_inf: Tensor | None = None) -> list[Tensor]:
    """The tensors in the dtype that each parameter's update is computed in: themselves where they have it already,
    unless an update may turn out to be skipped."""
    copy = found_inf is not None
    return [t.to(compute_dtype(p), copy=copy) for t, p in zip(tensors, params, strict=True)]


def _joined(params: Tensors, lower: Tensors | None, found_inf: Tensor | None) -> list[Tensor]:
    """`_working` parameters; of those that have rests, the values that the two are together."""
    p = _working(params, params, found_inf)
    return [join(params[i], lower[i]) if lower and lower[i].dtype is torch.int16 else x for i, x in enumerate(p)]


def _parted(
    params: Tensors, lower: Tensors | None, p: list[Tensor], rounding: _Rounding
) -> list[tuple[Tensors, list[Tensor]]]:
    """What to `_write` of these parameters: themselves and lower, or weights and rests."""
    weights, rests = rounding.of_params(params, p), list(p)
    if not lower:
        return [(params, weights)]
    for i, one in enumerate(lower):
        if one.dtype is torch.int16:
            weights[i], rests[i] = split(p[i], params[i].dtype)
    return [(params, weights), (lower, rests)]


def _moments(tensors: Tensors, params: Tensors, is_signed: bool, found_inf: Tensor | None = None) -> list[Tensor]:
    """As `_working`, of moments that may be packed."""
    tensors = [
        moments.unpack(t, p.shape, is_signed) if t.dtype is torch.uint8 else t
        for t, p in zip(tensors, params, strict=True)
    ]
    return _working(tensors, params, found_inf)


class _Rounding:
    """How a step rounds what it writes to lower precision: to nearest, or with ``positions`` by random numbers."""

    def __init__(self, positions: Tensor | None, seed: int, step: Number, round_params: bool) -> None:
        self.positions = None if positions is None else positions.unbind()
        self.seed, self.step, self.round_params = seed, step, round_params

    def of_moments(self, tensors: Tensors, values: list[Tensor], is_signed: bool) -> list[Tensor]:
        """What to write into ``tensors``; packed, where these are."""
        return [
            moments.pack(value, is_signed, self._drawn(i, value, moments.MOMENTS))
            if t.dtype is torch.uint8
            else self._rounded(i, t, value, moments.MOMENTS)
            for i, (t, value) in enumerate(zip(tensors, values))
        ]

    def of_params(self, tensors: Tensors, values: list[Tensor]) -> list[Tensor]:
        if self.positions is None or not self.round_params:
            return list(values)
        return [self._rounded(i, t, value, moments.PARAM) for i, (t, value) in enumerate(zip(tensors, values))]

    def _rounded(self, i: int, t: Tensor, value: Tensor, stream: int) -> Tensor:
        if t.dtype is not torch.bfloat16 or self.positions is None:
            return value
        return moments.to_bfloat16(value, self._drawn(i, value, stream))

    def _drawn(self, i: int, value: Tensor, stream: int) -> Tensor | None:
        if self.positions is None:
            return None
        where = dict(position=self.positions[i], step=self.step, stream=stream, device=value.device)
        return moments.draw(value.numel(), seed=self.seed, **where)


def _stored(values: list[Tensor], tensors: Tensors) -> list[Tensor]:
    """Values as they will be read back from tensors that may be narrower."""
    return [value.to(t.dtype).to(value.dtype) for value, t in zip(values, tensors)]


def _write(found_inf: Tensor | None, *results: tuple[Tensors | None, list[Tensor]]) -> None:
    """Round computed values into the tensors that they stand for, unless something was found."""
    targets, values = [], []
    for tensors, computed in results:
        for target, value in zip(tensors or (), computed):
            if target is not value:
                targets.append(target)
                values.append(value)
    if found_inf is not None and targets:
        skips = found_inf.reshape(()) != 0
        values = [torch.where(skips, target, value.to(target.dtype)) for target, value in zip(targets, values)]
    if targets:
        torch._foreach_copy_(targets, values)
