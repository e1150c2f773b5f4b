"""NumPy has no bfloat16: arrays of lower-precision results are float32."""

import numpy as np
import pytest
import torch
from helpers import o1

import ampkit

pytestmark = pytest.mark.switch


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16], ids=str)
def test_array_of_a_lower_precision_result_is_float32(lower, in_python):
    a, b = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [4.0]])
    with o1(lower, in_python=in_python):
        product = a @ b
        arrays = [
            product.numpy(),
            np.asarray(product),
            np.array(product),
            product.__array__(),
            product.numpy(force=True),
        ]
        asked_for = np.asarray(product, dtype=np.float64)
        # Who logs, writes this.
        logged = product.detach().cpu().numpy()
    assert product.dtype is lower
    assert [array.dtype for array in (*arrays, logged)] == [np.float32] * 6 and asked_for.dtype == np.float64
    assert all(array.tolist() == [[11.0]] for array in (*arrays, asked_for, logged))


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


def test_row_may_be_changed():
    with o1(policy={"torch.Tensor.numpy": "native"}), pytest.raises(TypeError, match="BFloat16"):
        torch.ones(2, dtype=torch.bfloat16).numpy()


def test_arrays_inside_a_float32_region_are_torchs_own():
    with o1(), ampkit.disable_casts(), pytest.raises(TypeError, match="BFloat16"):
        torch.ones(2, dtype=torch.bfloat16).numpy()
