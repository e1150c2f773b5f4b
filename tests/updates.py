"""The updates of optimizers in float64, as published: of a value and its states, in place, for one gradient."""

import math


def sgd64(g, p, states, trust=1.0, *, lr, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, **how):
    d = g + (0.0 if how.get("wd_after_momentum") else weight_decay) * p
    d = update = d * trust
    if momentum:
        (m,) = states
        m.copy_(d if how.get("first_run") else momentum * m + (1 - dampening) * d)
        update = d + momentum * m if nesterov else m
    p -= lr * (update + (weight_decay if how.get("wd_after_momentum") else 0.0) * p)


def adam_direction64(g, p, states, *, betas, eps, step, decoupled, weight_decay=0.0, bias_correction=True, share=None):
    m, v = states
    d = g + (0.0 if decoupled else weight_decay) * p
    m.copy_(betas[0] * m + (1 - betas[0] if share is None else share) * d)
    v.copy_(betas[1] * v + (1 - betas[1]) * d * d)
    c1, c2 = (1 - beta**step if bias_correction else 1.0 for beta in betas)
    return m / c1 / ((v / c2).sqrt() + eps) + (weight_decay if decoupled else 0.0) * p


def adam64(g, p, states, *, lr, **how):
    p -= lr * adam_direction64(g, p, states, **how)


def lamb64(g, p, states, *, lr, grad_averaging=True, trusts=True, **how):
    u = adam_direction64(g, p, states, share=None if grad_averaging else 1.0, **how)
    ratio = p.norm() / u.norm() if trusts and p.norm() > 0 and u.norm() > 0 else 1.0
    p -= lr * ratio * u


def adagrad64(g, p, states, *, lr, eps, decoupled=False, weight_decay=0.0):
    (h,) = states
    d = g + (0.0 if decoupled else weight_decay) * p
    h += d * d
    p -= lr * (d / (h.sqrt() + eps) + (weight_decay if decoupled else 0.0) * p)


def novograd64(g, p, states, norm, *, lr, betas, eps, step, weight_decay=0.0, bias_correction=True, **how):
    (m,) = states
    c1, c2 = (1 - beta**step if bias_correction else 1.0 for beta in betas)
    if how.get("norm_type", 2) == 2:
        norm.copy_((betas[1] * norm**2 + (1 - betas[1]) * g.norm() ** 2).sqrt())
    else:
        norm.copy_(betas[1] * norm + (1 - betas[1]) * (g.abs().max() if g.numel() else 0.0))
    n = norm / math.sqrt(c2) + eps
    share = 1 - betas[0] if how.get("grad_averaging", True) else 1.0
    if how.get("reg_inside_moment"):
        m.copy_(betas[0] * m + share * (g / n + weight_decay * p))
        p -= lr * m / c1
    else:
        m.copy_(betas[0] * m + share * g)
        p -= lr * (m / c1 / n + weight_decay * p)
