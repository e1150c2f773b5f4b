"""Functions that draw, which torch has in float32 only, and arrays of NumPy, which has no bfloat16."""

import contextlib

import numpy as np
import pytest
import torch
from helpers import o1

import ampkit

pytestmark = pytest.mark.switch


CALLS = {
    "_standard_gamma": [[1.5, 2.0]],
    "_standard_gamma_grad": [[1.5, 2.0], [0.25, 0.75]],
    "_sample_dirichlet": [[1.5, 2.0]],
    "_dirichlet_grad": [[0.25, 0.75], [1.5, 2.0], [1.5, 2.0]],
    "binomial": [[10.0, 20.0], [0.25, 0.75]],
}


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_function_that_draws_computes_in_float32(name, lower, in_python):
    arguments = [torch.tensor(values) for values in CALLS[name]]
    torch.manual_seed(0)
    expected = getattr(torch, name)(*arguments)
    torch.manual_seed(0)
    with o1(lower, in_python=in_python):
        sample = getattr(torch, name)(*[t.to(lower) for t in arguments])
    assert sample.dtype is torch.float32 and torch.equal(sample, expected)


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16], ids=str)
def test_array_of_a_lower_precision_result_is_float32(lower, in_python):
    with o1(lower, in_python=in_python):
        product = torch.tensor([[1.0, 2.0]]) @ torch.tensor([[3.0], [4.0]])
        arrays = [product.numpy(), np.asarray(product), np.array(product), product.__array__()]
        arrays += [product.numpy(force=True), product.detach().cpu().numpy(), np.asarray(product, dtype=np.float64)]
    assert product.dtype is lower
    assert [array.dtype for array in arrays] == [np.float32] * 6 + [np.float64]
    assert all(array.tolist() == [[11.0]] for array in arrays)


def test_array_of_other_dtypes_shares_memory_as_ever():
    with o1():
        for dtype in (torch.float32, torch.float64, torch.int64):
            x = torch.zeros(2, dtype=dtype)
            x.numpy()[0] = 5
            assert x.tolist() == [5, 0]


def test_gradient_is_still_asked_to_be_detached():
    with o1(), pytest.raises(RuntimeError, match="detach"):
        torch.ones(2, dtype=torch.bfloat16, requires_grad=True).numpy()


def test_results_brought_to_the_host_have_arrays_too(in_python):
    # The session is on an accelerator, and touches no tensors on the host but those that NumPy does not know.
    with o1(device_types=("cuda",), in_python=in_python):
        assert torch.ones(2, dtype=torch.bfloat16).numpy().dtype == np.float32
        half = torch.zeros(2, dtype=torch.float16)
        half.numpy()[0] = 5
    assert half.tolist() == [5, 0]


@pytest.mark.parametrize("policy, region", [({"torch.Tensor.numpy": "native"}, False), ("default", True)])
def test_arrays_are_torchs_own_where_a_row_or_a_region_says_so(policy, region):
    with o1(policy=policy), ampkit.disable_casts() if region else contextlib.nullcontext():
        with pytest.raises(TypeError, match="BFloat16"):
            torch.ones(2, dtype=torch.bfloat16).numpy()
