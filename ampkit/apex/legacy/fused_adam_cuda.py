"""``fused_adam_cuda``: the extension of Apex's first FusedAdam, which fairseq and OpenNMT-py call from optimizers of their own."""

from __future__ import annotations

import torch


@torch.no_grad()
def adam(
    p: torch.Tensor,
    p_copy: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    scale: float,
    step: int,
    eps_mode: int,
    bias_correction: int,
    decay: float,
) -> None:
    """Make an Adam step of one parameter from ``grad`` / ``scale``. ``p_copy``, unless empty, gets the new values too.

    ``eps_mode`` 0 adds ``eps`` inside of the square root, 1 outside. The decay is decoupled, and multiplied by the step's size.
    """
    grad = grad.to(m.dtype) / scale
    m.lerp_(grad, 1.0 - beta1)
    v.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
    denominator = (v + eps).sqrt_() if eps_mode == 0 else v.sqrt().add_(eps)
    size = lr * (1.0 - beta2**step) ** 0.5 / (1.0 - beta1**step) if bias_correction else lr
    p.sub_((m / denominator).add_(p, alpha=decay), alpha=size)
    if p_copy.numel():
        p_copy.copy_(p)
