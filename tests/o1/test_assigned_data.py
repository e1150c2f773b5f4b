"""Values that a script assigns to ``.data`` of parameters at O1, and ``.data`` in compiled code."""

import pytest
import torch
import torch.nn.functional as F
from helpers import initialize_quietly, iterate, o1
from torch import nn

import ampkit

pytestmark = pytest.mark.switch


def l2normalize(v, eps=1e-12):
    return v / (v.norm() + eps)


class SpectralNorm(nn.Module):
    """Spectral norm as in GANs of 2018: the vectors are parameters, and each forward assigns to their ``.data``."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        weight = module.weight
        height, width = weight.shape[0], weight.view(weight.shape[0], -1).shape[1]
        u = nn.Parameter(weight.data.new(height).normal_(0, 1), requires_grad=False)
        v = nn.Parameter(weight.data.new(width).normal_(0, 1), requires_grad=False)
        u.data, v.data = l2normalize(u.data), l2normalize(v.data)
        bar = nn.Parameter(weight.data)
        del module._parameters["weight"]
        for name, param in (("u", u), ("v", v), ("bar", bar)):
            module.register_parameter(f"weight_{name}", param)

    def forward(self, x):
        u, v, w = self.module.weight_u, self.module.weight_v, self.module.weight_bar
        height = w.data.shape[0]
        v.data = l2normalize(torch.mv(torch.t(w.view(height, -1).data), u.data))
        u.data = l2normalize(torch.mv(w.view(height, -1).data, v.data))
        sigma = u.dot(w.view(height, -1).mv(v))
        self.module.weight = w / sigma.expand_as(w)
        return self.module.forward(x)


def critic():
    torch.manual_seed(0)
    return nn.Sequential(SpectralNorm(nn.Linear(6, 16)), nn.LeakyReLU(0.1), SpectralNorm(nn.Linear(16, 1)))


def sgd(params):
    return torch.optim.SGD([param for param in params if param.requires_grad], lr=0.05)


def batch(step):
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(step))
    return x, x[:, :1].sign() * (x[:, 1:2].abs() > 0.5)


def hinge_loss(model, step):
    x, y = batch(step)
    return F.relu(1 - y * model(x).float()).mean()


@pytest.mark.parametrize("policy", ["default", "apex"])  # whose products with a vector are in lower precision
def test_spectral_norm_by_hand_trains_as_in_float32(policy):
    plain = critic()
    optimizer, expected = sgd(plain.parameters()), []
    for step in range(20):
        optimizer.zero_grad()
        loss = hinge_loss(plain, step)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    model = critic()
    settings = {"patch_torch_functions_type": torch.bfloat16, "policy": policy}
    model, optimizer = initialize_quietly(model, sgd, "O1", **settings)
    found = [iterate(lambda step=step: hinge_loss(model, step), optimizer) for step in range(20)]
    assert found == pytest.approx(expected, abs=0.02)
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    ampkit.close()
    for mine, theirs in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.02)


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


def test_data_is_read_in_compiled_code():
    def read(x, w):
        h = x * 2
        return F.linear(h.data + 1, w), h

    x, w = torch.rand(3, 4, requires_grad=True), nn.Parameter(torch.rand(5, 4))
    with o1():
        expected = read(x, w)
        found = torch.compile(read, fullgraph=True, backend="aot_eager")(x, w)
    assert found[0].dtype is torch.bfloat16
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected))


class Plain(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def test_data_of_a_subclass_is_read_in_compiled_code():
    x = torch.ones(3).as_subclass(Plain)
    with o1():
        found = torch.compile(lambda x: x.data + 1, fullgraph=True, backend="eager")(x)
        assert torch.equal(found, torch.full((3,), 2.0))
        assert torch.equal(x.data, torch.ones(3))
