"""Functions bound before `initialize`, or called below torch.nn.functional: torch.autocast casts them, by its own lists."""

import pytest
import torch
from helpers import o1
from torch import cumsum, exp, mm
from torch.nn import functional as F
from torch.nn.functional import conv2d, cross_entropy, gelu, layer_norm, linear, mse_loss, softmax, softplus

pytestmark = pytest.mark.switch

torch.manual_seed(0)
X, W, IMAGE = torch.randn(4, 4), torch.randn(4, 4), torch.randn(1, 2, 4, 4)
CLASSES = torch.arange(4)
NN = torch._C._nn

# name -> a function that was imported by name, and its arguments
CALLS = {
    "linear": (linear, (X, W)),
    "linear, lower precision": (linear, (X.bfloat16(), W)),
    "linear, float64": (linear, (X.double(), W.double())),
    "conv2d": (conv2d, (IMAGE, IMAGE)),
    "mm": (mm, (X, W)),
    "matmul": (torch.Tensor.matmul, (X, W)),
    "gelu": (gelu, (X.bfloat16(),)),
    "softplus": (softplus, (X.bfloat16(),)),
    "exp": (exp, (X.bfloat16(),)),
    "cumsum": (cumsum, (X.bfloat16(), 0)),
    "softmax": (softmax, (X, -1)),
    "cross_entropy": (cross_entropy, (X.bfloat16(), CLASSES)),
    "mse_loss": (mse_loss, (X.bfloat16(), W)),
    "binary_cross_entropy": (NN.binary_cross_entropy, (X.sigmoid().bfloat16(), torch.ones(4, 4).bfloat16())),
}


@pytest.mark.parametrize("name", CALLS)
def test_functions_are_cast_as_by_autocast(name, in_python):
    function, arguments = CALLS[name]
    with torch.autocast("cpu", torch.bfloat16):
        expected = function(*arguments)
    with o1(in_python=in_python):
        found = function(*arguments)
    assert found.dtype is expected.dtype
    assert torch.equal(found, expected)


# Losses by the names under which torch.nn.functional calls them, and generated code.
TWO_CLASSES = torch.tensor([0, 2])
LOSSES = {
    "cross_entropy_loss": lambda x: NN.cross_entropy_loss(x, TWO_CLASSES),
    "huber_loss": lambda x: NN.huber_loss(x, torch.zeros(2, 3, dtype=x.dtype)),
    "l1_loss": lambda x: NN.l1_loss(x, torch.zeros(2, 3, dtype=x.dtype)),
    "mse_loss": lambda x: NN.mse_loss(x, torch.zeros(2, 3, dtype=x.dtype)),
    "multi_margin_loss": lambda x: NN.multi_margin_loss(x, TWO_CLASSES),
    "multilabel_margin_loss": lambda x: NN.multilabel_margin_loss(x, torch.tensor([[0, -1, 1], [2, 1, -1]])),
    "nll_loss": lambda x: NN.nll_loss(x, TWO_CLASSES),
    "nll_loss2d": lambda x: NN.nll_loss2d(x[:, :, None, None], TWO_CLASSES[:, None, None]),
    "nll_loss_nd": lambda x: NN.nll_loss_nd(x, TWO_CLASSES),
    "smooth_l1_loss": lambda x: NN.smooth_l1_loss(x, torch.zeros(2, 3, dtype=x.dtype)),
    "soft_margin_loss": lambda x: NN.soft_margin_loss(x, torch.ones(2, 3, dtype=x.dtype)),
}


def test_every_loss_of_torch_is_here():
    assert {name for name in dir(NN) if name.endswith(("loss", "loss2d", "loss_nd", "cross_entropy"))} == {
        "binary_cross_entropy",
        *LOSSES,
    }


@pytest.mark.parametrize("policy", ["default", "autocast-cpu", "autocast-cuda"])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_called_below_torch_nn_functional_is_float32(name, policy, in_python):
    x = torch.tensor([[0.3, -1.7, 2.2], [1.1, 0.9, -0.4]]).bfloat16()
    exact = LOSSES[name](x.double())  # a loss for each element, or their mean, as it comes
    with o1(policy=policy, in_python=in_python):
        loss = LOSSES[name](x)
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=1e-7)


def test_function_in_python_calls_what_has_rows():
    """F.softmax looks up Tensor.softmax when it is called: float32 also where torch.autocast, on the CPU, leaves it."""
    with o1():
        assert softmax(X.bfloat16(), -1).dtype is layer_norm(X.bfloat16(), (4,)).dtype is torch.float32


def test_changed_row_does_not_reach_them():
    with o1(policy={"torch.nn.functional.linear": "fp32", "torch.nn.functional.mse_loss": "native"}):
        assert F.linear(X, W).dtype is torch.float32 and linear(X, W).dtype is torch.bfloat16
        low = X.bfloat16()
        assert F.mse_loss(low, low).dtype is torch.bfloat16 and mse_loss(low, low).dtype is torch.float32
