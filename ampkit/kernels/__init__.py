"""The multi-tensor operators: defined in plain torch (reference.py, reference_optimizers.py), routed to the compiled kernels where
there are some (routing.py)."""

from ampkit.kernels.backend import Implementation, implementation
from ampkit.kernels.reference import (
    multi_tensor_accumulate,
    multi_tensor_axpby,
    multi_tensor_l2norm,
    multi_tensor_restore,
    multi_tensor_restore_l2norm,
    multi_tensor_scale,
    multi_tensor_unscale_l2norm,
    update_scale,
)
from ampkit.kernels.reference_optimizers import (
    clip_coefficient,
    clip_factor,
    gradient_norms,
    lars_trust,
    multi_tensor_adagrad,
    multi_tensor_adam,
    multi_tensor_lamb,
    multi_tensor_novograd,
    multi_tensor_sgd,
)
from ampkit.kernels.routing import NO_BAD
from ampkit.kernels.split import join, split

__all__ = [
    "NO_BAD",
    "Implementation",
    "clip_coefficient",
    "clip_factor",
    "gradient_norms",
    "implementation",
    "join",
    "lars_trust",
    "multi_tensor_accumulate",
    "multi_tensor_adagrad",
    "multi_tensor_adam",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_lamb",
    "multi_tensor_novograd",
    "multi_tensor_restore",
    "multi_tensor_restore_l2norm",
    "multi_tensor_scale",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
    "split",
    "update_scale",
]
