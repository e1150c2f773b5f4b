"""``amp_C``: Apex's multi-tensor functions, with its argument lists, over ``ampkit.kernels``.

Every function takes a chunk size (which chose the launch, and is ignored), an int32 no-op flag of one element, and lists
of tensors, on any device. A function that checks sets the flag to 1 and never back; those that heed the flag return
at once when it is 1. Lists that do not fit together are a RuntimeError.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import kernels
from . import multi_tensor_steps
from .tensor_lists import Lists, checked_lists, found_inf_for, is_raised, raise_flag


def multi_tensor_scale(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, scale: float) -> None:
    """out = in * scale, for the lists (in, out). A non-finite input sets the flag; everything is written in any case."""
    inputs, outputs = checked_lists("multi_tensor_scale", tensor_lists, 2, noop_flag)
    found_inf = found_inf_for(noop_flag)
    kernels.multi_tensor_scale(inputs, outputs, float(scale), found_inf)
    raise_flag(noop_flag, found_inf)


def multi_tensor_axpby(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, a: float, b: float, arg_to_check: int
) -> None:
    """out = a * x + b * y, for the lists (x, y, out). ``arg_to_check``: -1 both, 0 x, 1 y."""
    xs, ys, outputs = checked_lists("multi_tensor_axpby", tensor_lists, 3, noop_flag)
    found_inf = found_inf_for(noop_flag)
    kernels.multi_tensor_axpby(xs, ys, outputs, float(a), float(b), found_inf, int(arg_to_check))
    raise_flag(noop_flag, found_inf)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, per_tensor: bool | None = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of all [1], norm of each [n], or [0] unless ``per_tensor``), float32. A non-finite norm sets the flag."""
    (tensors,) = checked_lists("multi_tensor_l2norm", tensor_lists, 1, noop_flag)
    norm, norms = kernels.multi_tensor_l2norm(tensors, bool(per_tensor))
    raise_flag(noop_flag, norm.isfinite().logical_not())
    return norm, norms


def multi_tensor_l2norm_mp(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, per_tensor: bool | None = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """As multi_tensor_l2norm; with the flag set, zeros without work."""
    (tensors,) = checked_lists("multi_tensor_l2norm_mp", tensor_lists, 1, noop_flag)
    if is_raised(noop_flag):
        device = tensors[0].device
        return torch.zeros(1, device=device), torch.zeros(len(tensors) if per_tensor else 0, device=device)
    return multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor)


def multi_tensor_l2norm_scale(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, scale: float, per_tensor: bool | None = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """out = in * scale for the lists (in, out), and the norms of the scaled values."""
    inputs, outputs = checked_lists("multi_tensor_l2norm_scale", tensor_lists, 2, noop_flag)
    found_inf = found_inf_for(noop_flag)
    norms = kernels.multi_tensor_unscale_l2norm(inputs, outputs, float(scale), found_inf, bool(per_tensor))
    raise_flag(noop_flag, found_inf)
    return norms


def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    inv_scale: torch.Tensor,
    per_tensor: bool | None = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norms that the tensors would have after unscaling by ``inv_scale``; the tensors stay as they are."""
    (tensors,) = checked_lists("multi_tensor_unscale_l2norm", tensor_lists, 1, noop_flag)
    found_inf = found_inf_for(noop_flag)
    norms = kernels.multi_tensor_unscale_l2norm(tensors, None, inv_scale, found_inf, bool(per_tensor))
    raise_flag(noop_flag, found_inf)
    return norms


def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float = 1.0,
) -> None:
    """SGD on the lists (g, p, momentum[, copy of p in lower precision]), with gradients times ``scale``. Heeds the flag."""
    grads, params, momenta, *lower = checked_lists("multi_tensor_sgd", tensor_lists, (3, 4), noop_flag)
    kernels.multi_tensor_sgd(
        grads,
        params,
        momenta,
        lower[0] if lower else None,
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=wd,
        nesterov=bool(nesterov),
        first_run=bool(first_run),
        wd_after_momentum=bool(wd_after_momentum),
        inv_scale=float(scale),
        found_inf=noop_flag.to(torch.float32),
    )


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Adam on the lists (g, p, m, v); ``mode`` 0 is L2 regularisation, 1 decoupled weight decay. Ignores the flag."""
    grads, params, exp_avgs, exp_avg_sqs = checked_lists("multi_tensor_adam", tensor_lists, 4, noop_flag)
    kernels.multi_tensor_adam(
        grads,
        params,
        exp_avgs,
        exp_avg_sqs,
        lr=lr,
        betas=(beta1, beta2),
        eps=eps,
        step=step,
        decoupled=mode == 1,
        bias_correction=bool(bias_correction),
        weight_decay=weight_decay,
    )


def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    lr: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: torch.Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: torch.Tensor,
) -> None:
    """multi_tensor_adam with rate, step and 1 / scale in tensors; unscales the gradients. Heeds the flag."""
    lists = checked_lists("multi_tensor_adam_capturable", tensor_lists, 4, noop_flag)
    _adam_capturable(noop_flag, lists, lr, (beta1, beta2), eps, step, mode, bias_correction, weight_decay, inv_scale)


def multi_tensor_adam_capturable_master(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    lr: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: torch.Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: torch.Tensor,
) -> None:
    """multi_tensor_adam_capturable on the lists (g, p, m, v, master of p)."""
    lists = checked_lists("multi_tensor_adam_capturable_master", tensor_lists, 5, noop_flag)
    _adam_capturable(noop_flag, lists, lr, (beta1, beta2), eps, step, mode, bias_correction, weight_decay, inv_scale)


def multi_tensor_adagrad(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    lr: float,
    eps: float,
    mode: int,
    weight_decay: float,
) -> None:
    """Adagrad on the lists (g, p, sum); ``mode`` as in multi_tensor_adam."""
    grads, params, sums = checked_lists("multi_tensor_adagrad", tensor_lists, 3, noop_flag)
    multi_tensor_steps.multi_tensor_adagrad(
        grads, params, sums, lr=lr, eps=eps, decoupled=mode == 1, weight_decay=weight_decay
    )


def multi_tensor_novograd(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    grad_norms: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    norm_type: int,
) -> None:
    """NovoGrad on the lists (g, p, m); updates ``grad_norms``. ``mode`` 0 normalises inside the momentum."""
    grads, params, exp_avgs = checked_lists("multi_tensor_novograd", tensor_lists, 3, noop_flag)
    multi_tensor_steps.multi_tensor_novograd(
        grads,
        params,
        exp_avgs,
        grad_norms,
        lr=lr,
        betas=(beta1, beta2),
        eps=eps,
        step=step,
        bias_correction=bool(bias_correction),
        weight_decay=weight_decay,
        grad_averaging=bool(grad_averaging),
        reg_inside_moment=mode == 0,
        norm_type=norm_type,
    )


def multi_tensor_lamb(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: torch.Tensor,
    max_grad_norm: float,
    use_nvlamb: bool | None = False,
) -> None:
    """LAMB on the lists (g, p, m, v). The gradients are overwritten by the directions taken."""
    grads, params, exp_avgs, exp_avg_sqs = checked_lists("multi_tensor_lamb", tensor_lists, 4, noop_flag)
    multi_tensor_steps.multi_tensor_lamb(
        grads,
        params,
        exp_avgs,
        exp_avg_sqs,
        directions=grads,
        lr=lr,
        betas=(beta1, beta2),
        eps=eps,
        step=step,
        weight_decay=weight_decay,
        decoupled=mode == 1,
        bias_correction=bool(bias_correction),
        grad_averaging=bool(grad_averaging),
        trusts=bool(use_nvlamb) or weight_decay != 0,
        clip=multi_tensor_steps.clip_factor(global_grad_norm, max_grad_norm),
    )


def multi_tensor_lamb_mp(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    lr: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: torch.Tensor,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: torch.Tensor,
    max_grad_norm: torch.Tensor,
    use_nvlamb: bool | None,
    found_inf: torch.Tensor,
    inv_scale: torch.Tensor,
) -> None:
    """multi_tensor_lamb on (g, p, m, v[, copy of p in lower precision]), unscaling; does nothing after ``found_inf``.

    ``global_grad_norm`` and ``max_grad_norm`` are compared as they are: both scaled, or both not.
    """
    grads, params, exp_avgs, exp_avg_sqs, *lower = checked_lists(
        "multi_tensor_lamb_mp", tensor_lists, (4, 5), noop_flag
    )
    multi_tensor_steps.multi_tensor_lamb(
        grads,
        params,
        exp_avgs,
        exp_avg_sqs,
        lower[0] if lower else None,
        grads,
        lr=lr,
        betas=(beta1, beta2),
        eps=eps,
        step=step,
        weight_decay=weight_decay,
        decoupled=mode == 1,
        bias_correction=bool(bias_correction),
        grad_averaging=bool(grad_averaging),
        trusts=bool(use_nvlamb) or weight_decay != 0,
        inv_scale=inv_scale,
        clip=multi_tensor_steps.clip_factor(global_grad_norm, max_grad_norm),
        found_inf=found_inf,
    )


def multi_tensor_lamb_stage1_cuda(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    per_tensor_decay: torch.Tensor,
    step: int,
    beta1: float,
    beta2: float,
    eps: float,
    global_grad_norm: torch.Tensor,
    max_global_grad_norm: float,
) -> None:
    """The first half of LAMB on the lists (g, p, m, v, update), with a weight decay for each tensor."""
    grads, params, exp_avgs, exp_avg_sqs, outputs = checked_lists(
        "multi_tensor_lamb_stage1_cuda", tensor_lists, 5, noop_flag
    )
    columns = (grads, [param.clone() for param in params], exp_avgs, exp_avg_sqs)
    decays = torch.as_tensor(per_tensor_decay).expand(len(grads)).tolist()
    for decay in dict.fromkeys(decays):
        own = [i for i, one in enumerate(decays) if one == decay]
        multi_tensor_steps.multi_tensor_lamb(
            *([column[i] for i in own] for column in columns),
            directions=[outputs[i] for i in own],
            lr=0.0,
            betas=(beta1, beta2),
            eps=eps,
            step=step,
            weight_decay=decay,
            clip=multi_tensor_steps.clip_factor(global_grad_norm, max_global_grad_norm),
        )


@torch.no_grad()
def lars_trust(
    grad_norms: torch.Tensor, param_norms: torch.Tensor, *, trust_coefficient: float, eps: float, weight_decay: float
) -> torch.Tensor:
    """The local rates of LARS (You et al. 2017): ``tc * |w| / (|g| + wd * |w| + eps)``, 1 where a norm is 0."""
    local = trust_coefficient * param_norms / (grad_norms + weight_decay * param_norms + eps)
    return torch.where((grad_norms > 0) & (param_norms > 0), local, torch.ones_like(local))


def multi_tensor_lamb_stage2_cuda(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    per_tensor_param_norm: torch.Tensor,
    per_tensor_update_norm: torch.Tensor,
    lr: float,
    weight_decay: float,
    use_nvlamb: bool | None = False,
) -> None:
    """The second half of LAMB on the lists (p, update)."""
    params, directions = checked_lists("multi_tensor_lamb_stage2_cuda", tensor_lists, 2, noop_flag)
    trust = None
    if use_nvlamb or weight_decay != 0:
        trust = lars_trust(
            per_tensor_update_norm, per_tensor_param_norm, trust_coefficient=1.0, eps=0.0, weight_decay=0.0
        )
    kernels.multi_tensor_sgd(directions, params, None, lr=lr, trust=trust)


def multi_tensor_lars(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    grad_norms: torch.Tensor,
    param_norms: torch.Tensor,
    lr: float,
    trust_coefficient: float,
    eps: float,
    weight_decay: float,
    momentum: float,
    dampening: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
    is_skipped: bool = False,
) -> None:
    """LARS on the lists (g, p, momentum[, copy of p in lower precision]); ``is_skipped`` is plain SGD. Heeds the flag."""
    grads, params, momenta, *lower = checked_lists("multi_tensor_lars", tensor_lists, (3, 4), noop_flag)
    trust = None
    if not is_skipped:
        trust = lars_trust(
            grad_norms, param_norms, trust_coefficient=trust_coefficient, eps=eps, weight_decay=weight_decay
        )
    kernels.multi_tensor_sgd(
        grads,
        params,
        momenta,
        lower[0] if lower else None,
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=bool(nesterov),
        first_run=bool(first_run),
        wd_after_momentum=bool(wd_after_momentum),
        inv_scale=float(scale),
        found_inf=noop_flag.to(torch.float32),
        trust=trust,
    )


def update_scale_hysteresis(
    current_scale: torch.Tensor,
    growth_tracker: torch.Tensor,
    hysteresis_tracker: torch.Tensor,
    found_inf: torch.Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> torch.Tensor:
    """Move a loss scale and its two counters, in place; returns the scale.

    A scale below float32's smallest normal number counts as zero, before and after, as in Apex.
    """
    _flush_subnormal(current_scale)
    words = [one.view(1).view(torch.int32) for one in (current_scale, growth_tracker, hysteresis_tracker)]
    state = torch.cat([*words, words[0].new_zeros(4)])
    kernels.update_scale(
        state,
        found_inf,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        hysteresis=hysteresis,
    )
    torch._foreach_copy_(words, state[:3].split(1))
    return _flush_subnormal(current_scale)


def _flush_subnormal(scale: torch.Tensor) -> torch.Tensor:
    """Zero in place of a number so small that it is stored with fewer digits; nothing waits for the device."""
    return scale.masked_fill_(scale.abs() < torch.finfo(scale.dtype).tiny, 0.0)


def _adam_capturable(
    noop_flag: torch.Tensor,
    lists: list[list[torch.Tensor]],
    lr: torch.Tensor,
    betas: tuple[float, float],
    eps: float,
    step: torch.Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: torch.Tensor,
) -> None:
    if is_raised(noop_flag):
        return
    grads, params, exp_avgs, exp_avg_sqs, *masters = lists
    with torch.no_grad():
        torch._foreach_mul_(grads, [torch.as_tensor(inv_scale).reshape(()).to(g.device) for g in grads])
    kernels.multi_tensor_adam(
        grads,
        masters[0] if masters else params,
        exp_avgs,
        exp_avg_sqs,
        params if masters else None,
        lr=lr,
        betas=betas,
        eps=eps,
        step=step,
        decoupled=mode == 1,
        bias_correction=bool(bias_correction),
        weight_decay=weight_decay,
    )


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"amp_C has no {name!r} here: ampkit provides the functions of optimizers, norms and loss scaling "
        f"({', '.join(sorted(one for one in globals() if one.startswith(('multi_tensor', 'update_'))))})."
    )
