"""The multi-tensor operators as the rest of ampkit calls them; the compiled extension or plain torch computes them.

Lists may mix dtypes and sizes, and devices too; an empty list is fine. float32, float16 and bfloat16 are fast, other
dtypes work. A *number* is a Python number or a tensor of one element: a tensor is read on the device, and the host never
waits for it. Flags are written on the device: ``found_inf`` (float32, shape [1]) becomes 1.0 where something is not
finite and is never cleared; ``first_bad`` (int64, shape [1], filled with NO_BAD before) gets the smallest index of such
a tensor.

The optimizers' steps update ``params`` (float32 masters, or the weights themselves) and states in place in one pass,
and write the new values, rounded, into ``lower`` if there is one. ``grads`` are only read, and multiplied by
``inv_scale`` (1 / loss scale) and ``clip``. ``step`` is the number of this step, 1 for the first. Where ``found_inf``
is not 0, nothing is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ampkit.kernels.backend import Route, kernels_of, serve, without_grad
from ampkit.kernels.reference_optimizers import gradient_norms, move_norms

Tensors = Sequence[torch.Tensor]
Number = Any
Tensor = torch.Tensor


@without_grad
def multi_tensor_scale(
    inputs: Tensors,
    outputs: Tensors,
    scale: Number,
    found_inf: Tensor | None = None,
    first_bad: Tensor | None = None,
) -> None:
    """outputs[i] = inputs[i] * scale. Inputs are checked; outputs, which may be the inputs, are written in any case."""

    def call(route):
        flags = route.flags(found_inf, first_bad)
        route.kernels.multi_tensor_scale(*route.lists, route.here(scale), *flags)
        route.report(flags, found_inf, first_bad)

    serve("multi_tensor_scale", {"inputs": inputs, "outputs": outputs}, call, found_inf, first_bad)


@without_grad
def multi_tensor_axpby(
    xs: Tensors,
    ys: Tensors,
    outputs: Tensors,
    a: Number,
    b: Number,
    found_inf: Tensor | None = None,
    arg_to_check: int = -1,
    first_bad: Tensor | None = None,
) -> None:
    """outputs[i] = a * xs[i] + b * ys[i]; ``arg_to_check`` says who is checked: -1 both, 0 ``xs``, 1 ``ys``."""

    def call(route):
        flag, first = flags = route.flags(found_inf, first_bad)
        route.kernels.multi_tensor_axpby(*route.lists, route.here(a), route.here(b), flag, arg_to_check, first)
        route.report(flags, found_inf, first_bad)

    serve("multi_tensor_axpby", {"xs": xs, "ys": ys, "outputs": outputs}, call, found_inf, first_bad)


@without_grad
def multi_tensor_restore(
    grads: Tensors,
    exacts: Tensors,
    outputs: Tensors,
    inv_scale: Number,
    factor: Number = 1.0,
    zeros_count: bool = False,
) -> None:
    """outputs[i] = factor * (exacts[i] * inv_scale where grads[i] still is what that rounds to, else grads[i]).

    Gives back what ``exacts`` had known before ``grads`` were rounded, wherever nobody has written since. With ``zeros_count``
    a zero in ``grads`` was written by somebody, and stays. Outputs may be inputs.
    """

    def call(route):
        route.kernels.multi_tensor_restore(*route.lists, route.here(inv_scale), route.here(factor), zeros_count)

    serve("multi_tensor_restore", {"grads": grads, "exacts": exacts, "outputs": outputs}, call)


@without_grad
def multi_tensor_l2norm(tensors: Tensors, per_tensor: bool = False) -> tuple[Tensor, Tensor]:
    """(Euclidean norm of all tensors together, float32 [1]; the norm of each, float32 [n], or [0] unless asked for).

    Both lie on the device of the first tensor. Huge and tiny values keep their norm.
    """

    def call(route):
        return route.kernels.multi_tensor_l2norm(*route.lists, per_tensor)

    return _joined_norms(tensors, serve("multi_tensor_l2norm", {"tensors": tensors}, call), per_tensor)


@without_grad
def multi_tensor_unscale_l2norm(
    inputs: Tensors,
    outputs: Tensors | None = None,
    inv_scale: Number | None = None,
    found_inf: Tensor | None = None,
    per_tensor: bool = False,
    first_bad: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Norms of ``inputs[i] * inv_scale`` as in multi_tensor_l2norm, with a check of the inputs, in one pass.

    ``outputs``, which may be the inputs, receive the products; without them nothing but the inputs is read, and nothing
    written: the pass before a fused step, which unscales by itself.
    """

    def call(route):
        flag, first = flags = route.flags(found_inf, first_bad)
        norms = route.kernels.multi_tensor_unscale_l2norm(*route.lists, route.here(inv_scale), flag, per_tensor, first)
        route.report(flags, found_inf, first_bad)
        return norms

    lists = {"inputs": inputs, "outputs": outputs}
    parts = serve("multi_tensor_unscale_l2norm", lists, call, found_inf, first_bad)
    return _joined_norms(inputs, parts, per_tensor)


@without_grad
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
) -> None:
    """Stochastic gradient descent; ``momenta`` is not looked at where ``momentum`` is 0.

    On the ``first_run`` a momentum becomes the gradient itself. ``wd_after_momentum`` keeps the weight decay out of the
    momentum. ``trust`` holds a factor of the decayed gradient for each tensor.
    """
    lists = {"grads": grads, "params": params, "momenta": momenta if momentum else None, "lower": lower}
    _step(
        "multi_tensor_sgd",
        lists,
        rows={"trust": trust},
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        first_run=first_run,
        wd_after_momentum=wd_after_momentum,
        inv_scale=inv_scale,
        clip=clip,
        found_inf=found_inf,
    )


@without_grad
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
) -> None:
    """Adam (Kingma and Ba 2015), with L2 regularisation or, ``decoupled``, the weight decay of AdamW."""
    lists = {"grads": grads, "params": params, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs, "lower": lower}
    _step(
        "multi_tensor_adam",
        lists,
        lr=lr,
        betas=betas,
        eps=eps,
        step=step,
        decoupled=decoupled,
        bias_correction=bias_correction,
        weight_decay=weight_decay,
        inv_scale=inv_scale,
        clip=clip,
        found_inf=found_inf,
    )


@without_grad
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
    lists = {"grads": grads, "params": params, "sums": sums, "lower": lower}
    _step(
        "multi_tensor_adagrad",
        lists,
        lr=lr,
        eps=eps,
        decoupled=decoupled,
        weight_decay=weight_decay,
        inv_scale=inv_scale,
        clip=clip,
        found_inf=found_inf,
    )


@without_grad
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
    norm. ``directions`` (may be the gradients) receives the directions taken, if anybody asks. For LAMB's own clipping,
    ``clip=clip_factor(unscaled norm of all gradients, max_grad_norm)``.
    """
    lists = {"grads": grads, "params": params, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    lists |= {"lower": lower, "directions": directions}
    _step(
        "multi_tensor_lamb",
        lists,
        lr=lr,
        betas=betas,
        eps=eps,
        step=step,
        weight_decay=weight_decay,
        decoupled=decoupled,
        bias_correction=bias_correction,
        grad_averaging=grad_averaging,
        trusts=trusts,
        inv_scale=inv_scale,
        clip=clip,
        found_inf=found_inf,
    )


@without_grad
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

    ``norms`` holds the running norm of every gradient (not its square), one element a tensor, and is updated: for
    ``norm_type`` 2 in the mean of squares, for 0 (the maximum norm) in the mean. ``grad_norms``, the norms of these
    gradients (unscaled and clipped), are computed in a pass before unless they are given.
    """
    if not grads:
        return
    if grad_norms is None:
        grad_norms = multi_tensor_l2norm(grads, True)[1] if norm_type == 2 else gradient_norms(grads, norm_type)
        for factor in (inv_scale, clip):
            if factor is not None:
                grad_norms = grad_norms * (factor.to(grad_norms) if isinstance(factor, Tensor) else factor)
    move_norms(norms, grad_norms, betas[1], norm_type, found_inf)
    lists = {"grads": grads, "params": params, "exp_avgs": exp_avgs, "lower": lower}
    _step(
        "multi_tensor_novograd",
        lists,
        rows={"norms": norms},
        lr=lr,
        betas=betas,
        eps=eps,
        step=step,
        bias_correction=bias_correction,
        weight_decay=weight_decay,
        grad_averaging=grad_averaging,
        reg_inside_moment=reg_inside_moment,
        inv_scale=inv_scale,
        clip=clip,
        found_inf=found_inf,
    )


def update_scale(
    scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    hysteresis: int = 1,
    min_scale: float = 0.0,
    max_scale: float = float("inf"),
) -> Tensor:
    """Move a loss scale (float32 [1]) and its two counters (int32 [1]) in place, by the rule of DynamicScaler, without the
    host; returns ``scale``.

    An overflow costs one of ``hysteresis`` chances; without any left, the scale backs off, to ``min_scale`` at least. A
    clean iteration gives all chances back, and the ``growth_interval``-th in a row lets the scale grow, to ``max_scale``
    at most, and never to infinity. ``growth_tracker`` counts clean iterations since the last overflow or growth.
    """
    device = scale.device
    kernels = kernels_of(device)
    if found_inf.device != device or found_inf.dtype is not torch.float32:
        found_inf = found_inf.to(device, torch.float32, non_blocking=True)
    rule = (growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale)
    kernels.update_scale(scale, growth_tracker, hysteresis_tracker, found_inf, *rule)
    return scale


def _step(op: str, lists: dict, rows: dict[str, Tensor | None] | None = None, **settings: Any) -> None:
    """One of the steps, over its lists; ``rows`` are vectors with one element a tensor."""

    def call(route):
        here = {name: route.here(value) for name, value in settings.items()}
        here |= {name: route.rows(vector) for name, vector in (rows or {}).items()}
        getattr(route.kernels, op)(**dict(zip(lists, route.lists)), **here)

    serve(op, lists, call)


def _joined_norms(tensors: Tensors, parts: list[tuple[Route, tuple]], per_tensor: bool) -> tuple[Tensor, Tensor]:
    if len(parts) == 1 and parts[0][0].indices is None:
        return parts[0][1]
    if not parts:
        return torch.zeros(1), torch.zeros(0)
    device = tensors[0].device
    norm = (
        torch.cat([norm.to(device, torch.float64) for _, (norm, _) in parts]).square().sum(dim=0, keepdim=True).sqrt()
    )
    norms = torch.cat([norms.to(device) for _, (_, norms) in parts])
    if per_tensor:
        order = torch.tensor([i for route, _ in parts for i in route.indices], device=device)
        norms = torch.empty_like(norms).index_copy_(0, order, norms)
    return norm.to(torch.float32), norms
