"""TorchScript modules inside a model: cast call by call at O1, refused by name where weights are cast."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

import ampkit


class Scaled(nn.Module):
    def forward(self, x):
        return 2 * x


def model_with(part):
    return nn.Sequential(OrderedDict(body=nn.Linear(4, 4), neck=nn.Sequential(nn.ReLU(), part)))


PARTS = {
    "scripted": lambda: torch.jit.script(nn.Linear(4, 2)),
    "traced": lambda: torch.jit.trace(nn.Linear(4, 2), torch.ones(1, 4)),
    "frozen weights": lambda: torch.jit.script(nn.Linear(4, 2).requires_grad_(False)),
    "buffers only": lambda: torch.jit.script(nn.BatchNorm1d(4, affine=False)),
}


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_scripted_part_is_refused_by_its_name_before_anything_is_touched(part, level):
    model = model_with(part())
    before = {name: tensor for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with pytest.raises(ampkit.ConfigurationError, match=r"'neck\.1'.*TorchScript.*O1") as error:
        ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert level in str(error.value)
    assert all(tensor.dtype is before[name].dtype for name, tensor in model.state_dict().items())
    assert type(model) is nn.Sequential and ampkit.current_session() is None


def test_scripted_part_without_weights_runs_in_lower_precision():
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(Scaled()), nn.Linear(4, 2))
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    expected = model(x)
    ampkit.initialize(model, opt_level="O2", verbosity=0, cast_model_type=torch.bfloat16)
    try:
        assert model[1](model[0](x.bfloat16())).dtype is torch.bfloat16
        torch.testing.assert_close(model(x), expected, rtol=2e-2, atol=2e-2)
        assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}
    finally:
        ampkit.close()
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("level", ["O1", "O4"])
@pytest.mark.parametrize("part", [PARTS["scripted"], PARTS["traced"]], ids=["scripted", "traced"])
def test_scripted_part_is_cast_call_by_call_at_o1(part, level):
    model = nn.Sequential(nn.Linear(4, 4), part())
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    with torch.autocast("cpu"):
        expected = model(x)
    own = {"patch_torch_functions_type": torch.bfloat16} if level == "O1" else {}
    ampkit.initialize(model, opt_level=level, verbosity=0, **own)
    try:
        found = model(x)
        found.float().sum().backward()
    finally:
        ampkit.close()
    assert found.dtype is expected.dtype is torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7)
    assert all(param.grad.isfinite().all() for param in model.parameters())
