"""Libraries from PyPI, unmodified, with the drop-in: what dtypes did their matrix products run in?"""

import pytest
import torch
from torch.overrides import TorchFunctionMode

import ampkit
import ampkit.apex


@pytest.fixture
def apex():
    ampkit.apex.install()
    yield
    ampkit.close()
    ampkit.apex.uninstall()


class MatmulDtypes(TorchFunctionMode):
    """A mode that collects the dtype of every output of torch's matrix products and convolutions."""

    NAMES = (
        "linear",
        "matmul",
        "mm",
        "bmm",
        "baddbmm",
        "addmm",
        "conv2d",
        "scaled_dot_product_attention",
        "__matmul__",
    )

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in self.NAMES and isinstance(out, torch.Tensor):
            self.seen.setdefault(name, set()).add(out.dtype)
        return out

    @property
    def dtypes(self):
        return set().union(*self.seen.values()) if self.seen else set()


@pytest.fixture
def matmul_dtypes():
    return MatmulDtypes()
