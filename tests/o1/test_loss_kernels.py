"""Losses by the names under which torch.nn.functional calls them, and generated code: torch.autocast casts these."""

import pytest
import torch
from helpers import o1

pytestmark = pytest.mark.switch

NN = torch._C._nn
CLASSES = torch.tensor([0, 2])
LOSSES = {
    "binary_cross_entropy": lambda p: NN.binary_cross_entropy(p.sigmoid(), torch.ones(2, 3, dtype=p.dtype)),
    "cross_entropy_loss": lambda x: NN.cross_entropy_loss(x, CLASSES),
    "huber_loss": lambda x: NN.huber_loss(x, torch.zeros(2, 3, dtype=x.dtype)),
    "l1_loss": lambda x: NN.l1_loss(x, torch.zeros(2, 3, dtype=x.dtype)),
    "mse_loss": lambda x: NN.mse_loss(x, torch.zeros(2, 3, dtype=x.dtype)),
    "multi_margin_loss": lambda x: NN.multi_margin_loss(x, CLASSES),
    "multilabel_margin_loss": lambda x: NN.multilabel_margin_loss(x, torch.tensor([[0, -1, 1], [2, 1, -1]])),
    "nll_loss": lambda x: NN.nll_loss(x, CLASSES),
    "nll_loss2d": lambda x: NN.nll_loss2d(x[:, :, None, None], CLASSES[:, None, None]),
    "nll_loss_nd": lambda x: NN.nll_loss_nd(x, CLASSES),
    "smooth_l1_loss": lambda x: NN.smooth_l1_loss(x, torch.zeros(2, 3, dtype=x.dtype)),
    "soft_margin_loss": lambda x: NN.soft_margin_loss(x, torch.ones(2, 3, dtype=x.dtype)),
}


def test_every_loss_of_torch_is_here():
    assert {name for name in dir(NN) if name.endswith(("loss", "loss2d", "loss_nd", "cross_entropy"))} == set(LOSSES)


@pytest.mark.parametrize("policy", ["default", "autocast-cpu", "autocast-cuda"])
@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"binary_cross_entropy"}))
def test_loss_called_below_torch_nn_functional_is_float32(name, policy, in_python):
    x = torch.tensor([[0.3, -1.7, 2.2], [1.1, 0.9, -0.4]]).bfloat16()
    exact = LOSSES[name](x.double())  # a loss for each element, or their mean, as it comes
    with o1(policy=policy, in_python=in_python):
        loss = LOSSES[name](x)
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("policy", ["default", "autocast-cpu", "autocast-cuda"])
def test_binary_cross_entropy_below_torch_nn_functional_is_as_under_autocast(policy):
    p = torch.tensor([[0.25, 0.5, 0.75]]).bfloat16()
    with o1(policy=policy):
        loss = NN.binary_cross_entropy(p, torch.ones_like(p), reduction=0)
    with torch.autocast("cpu"):
        torchs = NN.binary_cross_entropy(p, torch.ones_like(p), reduction=0)
    assert loss.dtype is torchs.dtype is torch.float32
    assert torch.equal(loss, torchs)
