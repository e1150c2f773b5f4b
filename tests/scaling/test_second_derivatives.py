"""``backward(create_graph=True)`` inside of a block: second derivatives are unscaled too."""

import pytest
import torch
from helpers import assert_skips, initialize_quietly, random_batch, sgd
from torch import nn

import ampkit

pytestmark = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")

BFLOAT16 = {"patch_torch_functions_type": torch.bfloat16, "loss_scale": "dynamic"}
FLOAT16 = {"patch_torch_functions_type": torch.float16}
LEVELS = {
    "O1": ("O1", BFLOAT16),
    "O1 in float16": ("O1", FLOAT16),
    "O2": ("O2", {"cast_model_type": torch.bfloat16, "loss_scale": "dynamic"}),
    "O2 in float16": ("O2", {"cast_model_type": torch.float16}),
    "O2 without a scale": ("O2", {"cast_model_type": torch.bfloat16, "loss_scale": 1.0}),
    "O4": ("O4", {}),
    "O5": ("O5", {}),
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def initialized(level):
    opt_level, settings = LEVELS[level]
    return initialize_quietly(net(), sgd, opt_level, **settings)


def backward_with_graph(model, optimizer, seed=1):
    x, y = random_batch(seed, rows=16)
    with ampkit.scale_loss((model(x).float() - y).square().mean(), optimizer) as scaled:
        scaled.backward(create_graph=True)


def signs(params):
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 2, p.shape, generator=generator) * 2.0 - 1 for p in params]


def hessian_times_signs(params):
    """AdaHessian's estimate: the diagonal of the Hessian is the mean of ``z * (H z)`` over signs ``z``."""
    grads = [p.grad for p in params]
    z = [sign.to(grad.dtype) for sign, grad in zip(signs(params), grads)]
    return [product.float() for product in torch.autograd.grad(grads, params, grad_outputs=z)]


def in_float32(blocks):
    model = net()
    for seed in range(1, blocks + 1):
        x, y = random_batch(seed, rows=16)
        (model(x) - y).square().mean().backward(create_graph=True)
    params = list(model.parameters())
    return [p.grad for p in params], hessian_times_signs(params)


def close(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.float() - theirs).norm() < 0.03 * theirs.norm()


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("level", LEVELS)
def test_second_derivative_is_unscaled(level, blocks):
    grads, expected = in_float32(blocks)
    model, optimizer = initialized(level)
    for seed in range(1, blocks + 1):
        backward_with_graph(model, optimizer, seed)
    params = list(model.parameters())
    close([p.grad for p in params], grads)
    # The dtypes after a plain backward pass: float32 where weights have float32 values and a loss scale.
    is_narrow = level == "O2 without a scale" and blocks == 1
    assert {p.grad.dtype for p in params} == {torch.bfloat16 if is_narrow else torch.float32}
    close(hessian_times_signs(params), expected)
    optimizer.step()
    assert not ampkit.step_was_skipped(optimizer)


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_overflow_is_found_in_gradients_with_a_graph(level, blocks):
    model, optimizer = initialized(level)
    for block in range(blocks):
        x, _ = random_batch()
        with ampkit.scale_loss(model(x).float().sum() * (1.0 if block + 1 < blocks else 1e38), optimizer) as scaled:
            scaled.backward(create_graph=True)
    assert_skips(model, optimizer)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_zero_grad_in_place_cuts_gradients_from_their_graph(level):
    model, optimizer = initialized(level)
    backward_with_graph(model, optimizer)
    assert all(param.grad.grad_fn is not None for param in model.parameters())
    optimizer.zero_grad(set_to_none=False)
    assert all(param.grad.eq(0.0).all() and not param.grad.requires_grad for param in model.parameters())
