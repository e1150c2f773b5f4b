"""``apex.multi_tensor_apply``: the caller of the functions of ``amp_C``."""

from .multi_tensor_apply import MultiTensorApply as MultiTensorApply
from .multi_tensor_apply import multi_tensor_applier as multi_tensor_applier
