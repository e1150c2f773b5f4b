"""Values that a script assigns to ``.data`` of parameters at O1, and ``.data`` in compiled code."""

import pytest
import torch
import torch.nn.functional as F
from helpers import o1
from torch import nn

import ampkit

pytestmark = pytest.mark.switch


def test_lower_precision_values_are_taken_as_float32_values():
    param, values = nn.Parameter(torch.zeros(3)), torch.tensor([1.0, 2.0, 3.0]).bfloat16()
    with o1():
        param.data = values
        assert param.dtype is torch.float32 and param.tolist() == [1.0, 2.0, 3.0]
        tensor = torch.zeros(3)
        tensor.data = values
        assert tensor.dtype is torch.bfloat16  # no parameter
        with ampkit.disable_casts():
            param.data = values
            assert param.dtype is torch.bfloat16


def test_another_model_is_cast_as_it_asks():
    with o1():
        assert nn.Linear(2, 2).half().weight.dtype is torch.float16
    model, other = (ampkit.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0) for level in ("O1", "O2"))
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
