"""``apex_C``: flattening lists of tensors, and back."""

from torch._utils import _flatten_dense_tensors as _flatten
from torch._utils import _unflatten_dense_tensors as _unflatten


def flatten(tensors):
    """Return one contiguous tensor with the elements of all."""
    return _flatten(list(tensors))


def unflatten(flat, tensors):
    """Return views of ``flat`` in the shapes of ``tensors``."""
    return list(_unflatten(flat, list(tensors)))
