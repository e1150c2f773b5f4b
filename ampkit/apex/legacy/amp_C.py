"""``amp_C``: Apex's multi-tensor functions, with its argument lists, over ``ampkit.kernels``.

Every function takes a chunk size (which chose the launch, and is ignored), an int32 no-op flag of one element, and lists
of tensors, on any device. A function that checks sets the flag to 1 and never clears it; functions that read the flag
return at once if it is 1. Lists that do not fit together raise a RuntimeError.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .. import kernels
from . import multi_tensor_steps as steps
from .tensor_lists import Lists, checked_lists, raise_flag


def _op(*depths: int) -> Callable[[Callable], Callable]:
    """Decorate a function of the flag, the checked lists and the rest to take Apex's arguments; ``depths`` are numbers of lists."""

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def op(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, *args: Any, **kwargs: Any) -> Any:
            lists = checked_lists(function.__name__, tensor_lists, depths, noop_flag)
            return function(noop_flag, lists, *args, **kwargs)

        return op

    return decorate


@contextmanager
def _raising(flag: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a float32 flag for a kernel inside, and raise Apex's flag by it at the end."""
    found_inf = torch.zeros(1, dtype=torch.float32, device=flag.device)
    yield found_inf
    raise_flag(flag, found_inf)


@_op(2)
def multi_tensor_scale(flag, lists, scale):
    """Write out = in * scale, for the lists (in, out). A non-finite input sets the flag; everything is written in any case."""
    with _raising(flag) as found_inf:
        kernels.multi_tensor_scale(*lists, float(scale), found_inf)


@_op(3)
def multi_tensor_axpby(flag, lists, a, b, arg_to_check):
    """Write out = a * x + b * y, for the lists (x, y, out). ``arg_to_check``: -1 both, 0 x, 1 y."""
    with _raising(flag) as found_inf:
        kernels.multi_tensor_axpby(*lists, float(a), float(b), found_inf, int(arg_to_check))


@_op(1)
def multi_tensor_l2norm(flag, lists, per_tensor=False):
    """Return (norm of all [1], norm of each [n], or [0] unless ``per_tensor``), float32. A non-finite norm sets the flag."""
    norm, norms = kernels.multi_tensor_l2norm(*lists, bool(per_tensor))
    raise_flag(flag, norm.isfinite().logical_not())
    return norm, norms


@_op(1)
def multi_tensor_l2norm_mp(flag, lists, per_tensor=False):
    """Return the norms of multi_tensor_l2norm; with the flag set, zeros without work."""
    if flag.item():
        device = lists[0][0].device
        return torch.zeros(1, device=device), torch.zeros(len(lists[0]) if per_tensor else 0, device=device)
    return multi_tensor_l2norm(0, flag, lists, per_tensor)


@_op(2)
def multi_tensor_l2norm_scale(flag, lists, scale, per_tensor=False):
    """Write out = in * scale for the lists (in, out), and return the norms of the scaled values."""
    with _raising(flag) as found_inf:
        return kernels.multi_tensor_unscale_l2norm(*lists, float(scale), found_inf, bool(per_tensor))


@_op(1)
def multi_tensor_unscale_l2norm(flag, lists, inv_scale, per_tensor=False):
    """Return the norms that the tensors would have after unscaling by ``inv_scale``; the tensors stay unchanged."""
    with _raising(flag) as found_inf:
        return kernels.multi_tensor_unscale_l2norm(*lists, None, inv_scale, found_inf, bool(per_tensor))


@_op(3, 4)
def multi_tensor_sgd(flag, lists, wd, momentum, dampening, lr, nesterov, first_run, wd_after_momentum, scale=1.0):
    """Step by SGD on the lists (g, p, momentum[, copy of p in lower precision]), with gradients times ``scale``. Heeds the flag."""
    _sgd(flag, lists, None, lr, wd, momentum, dampening, nesterov, first_run, wd_after_momentum, scale)


@_op(3, 4)
def multi_tensor_lars(
    flag,
    lists,
    norms_g,
    norms_p,
    lr,
    trust,
    eps,
    wd,
    momentum,
    dampening,
    nesterov,
    first,
    wd_after,
    scale,
    skipped=False,
):
    """Step by LARS on the lists (g, p, momentum[, copy of p in lower precision]); ``skipped`` is plain SGD. Heeds the flag."""
    trust = None if skipped else lars_trust(norms_g, norms_p, trust, eps, wd)
    _sgd(flag, lists, trust, lr, wd, momentum, dampening, nesterov, first, wd_after, scale)


def _sgd(flag, lists, trust, lr, weight_decay, momentum, dampening, nesterov, first_run, wd_after_momentum, scale):
    kernels.multi_tensor_sgd(
        *lists,
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=bool(nesterov),
        first_run=bool(first_run),
        wd_after_momentum=bool(wd_after_momentum),
        inv_scale=float(scale),
        found_inf=flag.to(torch.float32),
        trust=trust,
    )


@torch.no_grad()
def lars_trust(grad_norms, param_norms, trust_coefficient=1.0, eps=0.0, weight_decay=0.0):
    """The local rates of LARS (You et al. 2017): ``tc * |w| / (|g| + wd * |w| + eps)``, 1 where a norm is 0."""
    local = trust_coefficient * param_norms / (grad_norms + weight_decay * param_norms + eps)
    return torch.where((grad_norms > 0) & (param_norms > 0), local, torch.ones_like(local))


@_op(4)
def multi_tensor_adam(flag, lists, lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay):
    """Step by Adam on the lists (g, p, m, v); ``mode`` 0 is L2 regularisation, 1 decoupled weight decay. Ignores the flag."""
    settings = _settings_of_adam(lr, beta1, beta2, eps, step, bias_correction, weight_decay)
    kernels.multi_tensor_adam(*lists, decoupled=mode == 1, **settings)


@_op(4)
def multi_tensor_adam_capturable(
    flag, lists, lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay, inv_scale
):
    """Step as multi_tensor_adam, with rate, step and 1 / scale in tensors; unscale the gradients. Heeds the flag."""
    _adam_capturable(flag, lists, (lr, beta1, beta2, eps, step, bias_correction, weight_decay), mode, inv_scale)


@_op(5)
def multi_tensor_adam_capturable_master(
    flag, lists, lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay, inv_scale
):
    """Step as multi_tensor_adam_capturable, on the lists (g, p, m, v, master of p)."""
    _adam_capturable(flag, lists, (lr, beta1, beta2, eps, step, bias_correction, weight_decay), mode, inv_scale)


def _adam_capturable(flag, lists, settings, mode, inv_scale):
    if flag.item():
        return
    grads, params, exp_avgs, exp_avg_sqs, *masters = lists
    with torch.no_grad():
        torch._foreach_mul_(grads, [torch.as_tensor(inv_scale).reshape(()).to(g.device) for g in grads])
    lists = (grads, masters[0], exp_avgs, exp_avg_sqs, params) if masters else lists
    kernels.multi_tensor_adam(*lists, decoupled=mode == 1, **_settings_of_adam(*settings))


def _settings_of_adam(lr, beta1, beta2, eps, step, bias_correction, weight_decay):
    """The settings that the functions of `multi_tensor_steps` have by the same names."""
    settings = {"lr": lr, "betas": (beta1, beta2), "eps": eps, "step": step, "weight_decay": weight_decay}
    return {**settings, "bias_correction": bool(bias_correction)}


@_op(3)
def multi_tensor_adagrad(flag, lists, lr, eps, mode, weight_decay):
    """Step by Adagrad on the lists (g, p, sum); ``mode`` as in multi_tensor_adam."""
    steps.multi_tensor_adagrad(*lists, lr=lr, eps=eps, decoupled=mode == 1, weight_decay=weight_decay)


@_op(3)
def multi_tensor_novograd(
    flag, lists, grad_norms, lr, beta1, beta2, eps, step, bias_correction, weight_decay, grad_averaging, mode, norm_type
):
    """Step by NovoGrad on the lists (g, p, m); update ``grad_norms``. ``mode`` 0 normalises inside the momentum."""
    steps.multi_tensor_novograd(
        *lists,
        grad_norms,
        grad_averaging=bool(grad_averaging),
        reg_inside_moment=mode == 0,
        norm_type=norm_type,
        **_settings_of_adam(lr, beta1, beta2, eps, step, bias_correction, weight_decay),
    )


@_op(4)
def multi_tensor_lamb(
    flag, lists, lr, beta1, beta2, eps, step, corrects, wd, grad_averaging, mode, norm, max_norm, use_nvlamb=False
):
    """Step by LAMB on the lists (g, p, m, v). The gradients are overwritten by the directions taken."""
    settings = _settings_of_adam(lr, beta1, beta2, eps, step, corrects, wd)
    _lamb(lists, settings, grad_averaging, mode, norm, max_norm, use_nvlamb)


@_op(4, 5)
def multi_tensor_lamb_mp(
    flag, lists, lr, beta1, beta2, eps, step, corrects, wd, averages, mode, norm, max_norm, nvlamb, found_inf, inv_scale
):
    """Step as multi_tensor_lamb, on (g, p, m, v[, copy of p in lower precision]), unscaling; do nothing after ``found_inf``.

    ``norm``, of all gradients, and ``max_norm`` are compared as they are: both scaled, or both not.
    """
    settings = _settings_of_adam(lr, beta1, beta2, eps, step, corrects, wd)
    settings.update(found_inf=found_inf, inv_scale=inv_scale)
    _lamb(lists, settings, averages, mode, norm, max_norm, nvlamb)


def _lamb(lists, settings, grad_averaging, mode, global_grad_norm, max_grad_norm, use_nvlamb):
    steps.multi_tensor_lamb(
        *lists,
        directions=lists[0],
        decoupled=mode == 1,
        grad_averaging=bool(grad_averaging),
        trusts=bool(use_nvlamb) or settings["weight_decay"] != 0,
        clip=steps.clip_factor(global_grad_norm, max_grad_norm),
        **settings,
    )


@_op(5)
def multi_tensor_lamb_stage1_cuda(
    flag, lists, per_tensor_decay, step, beta1, beta2, eps, global_grad_norm, max_global_grad_norm
):
    """Make the first half of a step of LAMB on the lists (g, p, m, v, update), with a weight decay for each tensor."""
    grads, params, *moments, outputs = lists
    columns = (grads, [param.clone() for param in params], *moments)
    clip = steps.clip_factor(global_grad_norm, max_global_grad_norm)
    decays = torch.as_tensor(per_tensor_decay).expand(len(grads)).tolist()
    for decay in dict.fromkeys(decays):
        indices = [i for i, x in enumerate(decays) if x == decay]
        parts = ([column[i] for i in indices] for column in columns)
        settings = _settings_of_adam(0.0, beta1, beta2, eps, step, True, decay)
        steps.multi_tensor_lamb(*parts, directions=[outputs[i] for i in indices], clip=clip, **settings)


@_op(2)
def multi_tensor_lamb_stage2_cuda(
    flag, lists, per_tensor_param_norm, per_tensor_update_norm, lr, weight_decay, use_nvlamb=False
):
    """Make the second half of a step of LAMB on the lists (p, update)."""
    trusts = use_nvlamb or weight_decay != 0
    trust = lars_trust(per_tensor_update_norm, per_tensor_param_norm) if trusts else None
    kernels.multi_tensor_sgd(lists[1], lists[0], None, lr=lr, trust=trust)


def update_scale_hysteresis(
    scale, growth_tracker, hysteresis_tracker, found_inf, growth, backoff, interval, hysteresis
):
    """Move a loss scale and its two counters, in place, and return the scale.

    A scale below float32's smallest normal number counts as zero, before and after, as in Apex.
    """
    _flush_subnormal(scale)
    words = [x.view(1).view(torch.int32) for x in (scale, growth_tracker, hysteresis_tracker)]
    state = torch.cat([*words, words[0].new_zeros(4)])
    rule = {"growth_factor": growth, "backoff_factor": backoff, "growth_interval": interval}
    kernels.update_scale(state, found_inf, hysteresis=hysteresis, **rule)
    torch._foreach_copy_(words, state[:3].split(1))
    return _flush_subnormal(scale)


def _flush_subnormal(scale: torch.Tensor) -> torch.Tensor:
    """Set a subnormal scale to zero, in place, and return it; nothing waits for the device."""
    return scale.masked_fill_(scale.abs() < torch.finfo(scale.dtype).tiny, 0.0)


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"amp_C has no {name!r} here: ampkit provides the functions of optimizers, norms and loss scaling "
        f"({', '.join(sorted(x for x in globals() if x.startswith(('multi_tensor_', 'update_'))))})."
    )
