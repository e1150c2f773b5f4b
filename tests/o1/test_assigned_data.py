"""Values that a script assigns to ``.data`` of parameters at O1, and ``.data`` in compiled code."""

import pytest
import torch
import torch.nn.functional as F
from helpers import initialize_quietly, iterate, o1
from torch import nn

import ampkit

pytestmark = pytest.mark.switch


class SpectralNorm(nn.Module):
    """Spectral norm as in GANs of 2018: the vectors are parameters, and each forward assigns to their ``.data``."""

    def __init__(self, width, height):
        super().__init__()
        self.weight, self.bias = nn.Linear(width, height).parameters()
        self.u, self.v = (nn.Parameter(torch.randn(size), requires_grad=False) for size in (height, width))

    def forward(self, x):
        self.v.data = (v := torch.mv(self.weight.t().data, self.u.data)) / v.norm()
        self.u.data = (u := torch.mv(self.weight.data, self.v.data)) / u.norm()
        sigma = self.u.dot(self.weight.mv(self.v))
        return F.linear(x, self.weight / sigma.expand_as(self.weight), self.bias)


def sgd(params):
    return torch.optim.SGD([param for param in params if param.requires_grad], lr=0.05)


@pytest.mark.parametrize("policy", ["default", "apex"])  # whose products with a vector are in lower precision
def test_spectral_norm_by_hand_trains_as_in_float32(policy):
    def trained(enabled):
        torch.manual_seed(0)
        model = nn.Sequential(SpectralNorm(6, 16), nn.LeakyReLU(0.1), SpectralNorm(16, 1))
        model, optimizer = initialize_quietly(model, sgd, "O1", policy=policy, enabled=enabled)
        x = torch.randn(20, 32, 6)
        y = x[..., :1].sign() * (x[..., 1:2].abs() > 0.5)
        steps = [lambda pair=pair: F.relu(1 - pair[1] * model(pair[0]).float()).mean() for pair in zip(x, y)]  # hinge
        losses = [iterate(loss_of, optimizer) for loss_of in steps]
        assert {param.dtype for param in model.parameters()} == {torch.float32}
        ampkit.close()
        return losses, torch.cat([param.detach().flatten() for param in model.parameters()])

    (losses, params), (expected_losses, expected_params) = trained(True), trained(False)
    assert losses == pytest.approx(expected_losses, abs=0.02)
    torch.testing.assert_close(params, expected_params, rtol=0.02, atol=0.02)


def test_lower_precision_values_are_taken_as_float32_values():
    param, values = nn.Parameter(torch.zeros(3)), torch.tensor([1.0, 2.0, 3.0]).bfloat16()
    with o1():
        param.data = values
        assert torch.equal(param.data, torch.tensor([1.0, 2.0, 3.0]))
        tensor = torch.zeros(3)
        tensor.data = values
        assert tensor.dtype is torch.bfloat16  # no parameter
        with ampkit.disable_casts():
            param.data = values
            assert param.dtype is torch.bfloat16


def test_another_model_is_cast_as_it_asks():
    with o1():
        assert nn.Linear(2, 2).half().weight.dtype is torch.float16
    model, _ = initialize_quietly(nn.Linear(2, 2), sgd, "O1")
    other, _ = initialize_quietly(nn.Linear(2, 2), sgd, "O2")
    assert other.weight.dtype is not torch.float32 and model.weight.dtype is torch.float32


class Plain(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl


def test_data_is_read_in_compiled_code():
    def read(x, w):
        h = x * 2
        return F.linear(h.data + 1, w), h

    x, w = torch.rand(3, 4, requires_grad=True), nn.Parameter(torch.rand(5, 4))
    with o1():
        expected = read(x, w)
        found = torch.compile(read, fullgraph=True, backend="aot_eager")(x, w)
        of_a_subclass = torch.compile(lambda x: x.data + 1, fullgraph=True, backend="eager")(x.as_subclass(Plain))
    assert found[0].dtype is torch.bfloat16
    assert all(map(torch.equal, found, expected)) and torch.equal(of_a_subclass, x + 1)
