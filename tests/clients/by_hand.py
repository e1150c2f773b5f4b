"""The judges of adapters: a loop written by hand with `scale_loss`, and one step in float32."""

import math

import torch
from helpers import backward, net_with_norm, random_batch
from torch.nn import functional as F

import ampkit

STEPS, RULE = 6, ampkit.DynamicLossScale(init_scale=256.0, growth_interval=3)
OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "FusedAdam": lambda params: ampkit.optimizers.FusedAdam(params, lr=0.01),
}


def settings_of(level):
    """Return settings with float16 at O2, which the CPU's default is not."""
    settings = {"O1": {"loss_scale": RULE}, "O2": {"loss_scale": RULE, "cast_model_type": torch.float16}}
    return {"opt_level": level, "verbosity": 0, **settings.get(level, {})}


def spoiled_at(level, step):
    """Return the number of the step whose loss is infinite; None at O5, which checks nothing."""
    return step if level != "O5" else None


def loss_of(model, step, spoiled=None):
    x, y = random_batch(seed=step)
    return F.mse_loss(model(x).float(), y) * (math.inf if step == spoiled else 1.0)


def values(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def assert_same_steps(found, expected):
    """Assert that two results of `trained_by_hand` are equal, bit for bit."""
    for (weights, *state), (wanted, *wanted_state) in zip(found, expected, strict=True):
        assert_equal(weights, wanted)
        assert state == wanted_state


def trained_by_hand(
    level,
    optimizer="AdamW",
    spoiled=None,
    accumulate=1,
    clip=None,
    delays=False,
    model=None,
    loss_of=loss_of,
    clip_by=ampkit.clip_grad_norm_,
):
    """(weights, whether the step was skipped, state of the loss scale) after each micro-batch.

    ``optimizer`` is one, or a name among `OPTIMIZERS`; with ``delays``, gradients are unscaled with the last micro-batch.
    """
    model = net_with_norm() if model is None else model
    optimizer = OPTIMIZERS[optimizer](model.parameters()) if isinstance(optimizer, str) else optimizer
    model, optimizer = ampkit.initialize(model, optimizer, **settings_of(level))
    steps = []
    for step in range(STEPS):
        is_last = step % accumulate == accumulate - 1
        backward(loss_of(model, step, spoiled) / accumulate, optimizer, delay_unscale=delays and not is_last)
        if is_last:
            if clip is not None:
                clip_by(optimizer, clip)
            optimizer.step()
            optimizer.zero_grad()
        steps.append((values(model), ampkit.step_was_skipped(optimizer), ampkit.state_dict()))
    ampkit.close()
    return steps


def assert_clipped_as_in_float32(level, gradients, by, bound):
    """Assert gradients of the first batch as clipped in float32 by "norm" or by "value"; returns their norm in float32."""
    twin = net_with_norm()
    loss_of(twin, 0).backward()
    norm = torch.nn.utils.get_total_norm([param.grad for param in twin.parameters()])
    clip = {"norm": torch.nn.utils.clip_grad_norm_, "value": torch.nn.utils.clip_grad_value_}[by]
    clip(twin.parameters(), bound)
    tolerance = 1e-6 if level == "O0" else 0.05 * bound
    for gradient, param in zip(gradients, twin.parameters(), strict=True):
        assert gradient.dtype is torch.float32 and (gradient - param.grad).abs().max() <= tolerance
    return norm.item()
