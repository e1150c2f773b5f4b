"""The multi-tensor steps of Apex's rarer optimizers, Adagrad, LAMB and NovoGrad, and their norms.

They are built like SGD's and Adam's in ampkit/kernels/reference_optimizers.py, which explains steps: a definition in plain
torch, and a kernel if there is one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels import multi_tensor_l2norm
from ..kernels.checks import check_lists, compute_dtype
from ..kernels.reference import Number, Tensors
from ..kernels.reference_optimizers import adam, adam_direction, for_each, formula, step_arguments, subtract, take_step


def multi_tensor_adagrad(
    grads: Tensors,
    params: Tensors,
    sums: Tensors,
    lower: Tensors | None = None,
    *,
    eps: float,
    decoupled: bool = False,
    weight_decay: float = 0.0,
    **common: Any,
) -> None:
    """Step by Adagrad (Duchi et al. 2011), with L2 regularisation or ``decoupled`` weight decay."""
    lists = {"grads": grads, "params": params, "sums": sums}
    take_step("adagrad", _adagrad, lists, lower, (eps, weight_decay, decoupled), **common)


@formula
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
    subtract(p, update, s.lr)


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
    **common: Any,
) -> None:
    """Step by LAMB (You et al. 2020, algorithm 2), in Adam's direction; if ``trusts``, as long as ``lr`` times the weights' norm.

    ``directions`` (may be the gradients) receives the directions taken, which no kernel does. For LAMB's own clipping,
    ``clip=clip_factor(unscaled norm of all gradients, max_grad_norm)``.
    """
    lists = {"grads": grads, "params": params, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    settings = (*betas, 1.0 - betas[0] if grad_averaging else 1.0, eps, weight_decay, decoupled, bias_correction)
    if directions is None:
        rule, reference = ("lamb", _lamb) if trusts else ("adam", adam)
        return take_step(rule, reference, lists, lower, settings, **common)
    lists.update({"directions": directions}, **({"lower": lower} if lower else {}))
    check_lists("multi_tensor_lamb", lists)
    with torch.no_grad():
        (_lamb if trusts else _adam_told)(*step_arguments(settings, **common), **lists)


@formula
def _lamb(s, d, p, m, v, told=None):
    update = adam_direction(s, d, p, m, v)
    if told is not None:
        torch._foreach_copy_(told, update)
    w, u = tensor_norms(p), tensor_norms(update)
    ratios = torch.where((w > 0) & (u > 0), w / u, torch.ones_like(w))
    subtract(p, torch._foreach_mul(update, [ratio.to(x) for ratio, x in zip(ratios.unbind(), update)]), s.lr)


@formula
def _adam_told(s, d, p, m, v, told):
    torch._foreach_copy_(told, adam_direction(s, d, p, m, v))
    subtract(p, told, s.lr)


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
    **common: Any,
) -> None:
    """Step by NovoGrad (Ginsburg et al. 2019): Adam with one second moment for each tensor.

    ``norms`` holds the running norm of every gradient (not its square), one element a tensor, and is updated first: for
    ``norm_type`` 2 in the mean of squares, for 0 (the maximum norm) in the mean. ``grad_norms``, the norms of these
    gradients (unscaled and clipped), are computed in a pass before unless they are given.
    """
    moved = _moved_norms(norms, grads, grad_norms, norm_type, betas[1], common) if grads else norms
    own = (*betas, 1.0 - betas[0] if grad_averaging else 1.0, eps, weight_decay, reg_inside_moment, bias_correction)
    lists = {"grads": grads, "params": params, "exp_avgs": exp_avgs}
    take_step("novograd", _novograd, lists, lower, own, each=moved, **common)
    norms.copy_(moved)


@torch.no_grad()
def _moved_norms(
    norms: Tensor, grads: Tensors, grad_norms: Any, norm_type: int, beta2: float, common: dict[str, Any]
) -> Tensor:
    if grad_norms is None:
        grad_norms = multi_tensor_l2norm(grads, True)[1] if norm_type == 2 else tensor_norms(grads, norm_type)
        for factor in (common.get("inv_scale"), common.get("clip")):
            if factor is not None:
                grad_norms = grad_norms * (factor.to(grad_norms) if isinstance(factor, Tensor) else factor)
    grad_norms, found_inf = grad_norms.to(norms), common.get("found_inf")
    if norm_type == 2:
        moved = (norms.square() * beta2 + grad_norms.square() * (1.0 - beta2)).sqrt()
    else:
        moved = norms * beta2 + grad_norms * (1.0 - beta2)
    return moved if found_inf is None else torch.where(found_inf.to(norms.device) != 0, norms, moved)


@formula
def _novograd(s, d, p, m):
    beta1, beta2, share, eps, decay, inside_moment, corrects_bias = s.own
    correction1, correction2 = s.corrections(beta1, beta2, corrects_bias)
    denominators = [(norm / correction2**0.5 + eps).to(x) for norm, x in zip(s.each.unbind(), d)]
    if inside_moment:
        d = torch._foreach_div(d, denominators)
        torch._foreach_add_(d, p, alpha=decay)
    torch._foreach_mul_(m, beta1)
    torch._foreach_add_(m, d, alpha=share)
    update = torch._foreach_div(m, for_each(m, correction1))
    if not inside_moment:
        torch._foreach_div_(update, denominators)
        torch._foreach_add_(update, p, alpha=decay)
    subtract(p, update, s.lr)


@torch.no_grad()
def tensor_norms(tensors: Tensors, norm_type: int = 2) -> Tensor:
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
    """The factor that clips gradients of this norm to ``max_norm``; 0 or less means no maximum."""
    norm = norm.reshape(()) if isinstance(norm, Tensor) else torch.tensor(float(norm))
    # A number is written where the norm lies: a copy from the host would wait for the device.
    max_norm = max_norm.reshape(()).to(norm) if isinstance(max_norm, Tensor) else norm.new_full((), float(max_norm))
    return torch.where((max_norm > 0) & (norm > max_norm), max_norm / norm, torch.ones_like(norm))
