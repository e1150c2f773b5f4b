"""The operators of torch.ops.ampkit, called like their twins in reference.py.

Importing this module loads ampkit/_C, which registers the schemas and the CPU kernels (csrc/registration.cpp), and
raises ImportError where that cannot be done. Lists given to these functions lie on one device and hold float32, float16
and bfloat16 only; ampkit.kernels sees to that.
"""

import importlib

import torch

from ampkit.kernels import reference

# By name: `from ampkit import _C` would call a library that was never built a circular import.
_C = importlib.import_module("ampkit._C")

built_with: str = _C.torch_version
ops = torch.ops.ampkit


def multi_tensor_scale(inputs, outputs, scale, found_inf=None, first_bad=None):
    if isinstance(scale, torch.Tensor) or first_bad is not None:
        return reference.multi_tensor_scale(inputs, outputs, scale, found_inf, first_bad)
    ops.multi_tensor_scale(inputs, outputs, scale, found_inf)
    _mark_written(outputs, found_inf)


def multi_tensor_axpby(xs, ys, outputs, a, b, found_inf=None, arg_to_check=-1, first_bad=None):
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor) or first_bad is not None:
        return reference.multi_tensor_axpby(xs, ys, outputs, a, b, found_inf, arg_to_check, first_bad)
    ops.multi_tensor_axpby(xs, ys, outputs, a, b, found_inf, arg_to_check)
    _mark_written(outputs, found_inf)


def multi_tensor_l2norm(tensors, per_tensor=False):
    return ops.multi_tensor_l2norm(tensors, per_tensor)


multi_tensor_unscale_l2norm = reference.multi_tensor_unscale_l2norm
multi_tensor_sgd = reference.multi_tensor_sgd
multi_tensor_adam = reference.multi_tensor_adam
multi_tensor_adagrad = reference.multi_tensor_adagrad
multi_tensor_lamb = reference.multi_tensor_lamb
multi_tensor_novograd = reference.multi_tensor_novograd
update_scale = reference.update_scale


def load_cuda_kernels() -> str:
    """Loads ampkit/_cuda, and says which torch it was built with; ImportError where that cannot be done."""
    return importlib.import_module("ampkit._cuda").torch_version


def _mark_written(outputs, found_inf):
    # torch counts the writes of its own operators only. Autograd's checks and weight-cast caches read the count.
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(outputs)
        if found_inf is not None:
            torch.autograd.graph.increment_version(found_inf)


# What torch.compile and fake tensors need to know: operators that only write have nothing to say about results.
@torch.library.register_fake("ampkit::multi_tensor_scale")
def _(inputs, outputs, scale, found_inf):
    return None


@torch.library.register_fake("ampkit::multi_tensor_axpby")
def _(xs, ys, outputs, a, b, found_inf, arg_to_check):
    return None


@torch.library.register_fake("ampkit::multi_tensor_l2norm")
def _(tensors, per_tensor):
    norms = tensors[0].new_empty(len(tensors) if per_tensor else 0, dtype=torch.float32)
    return tensors[0].new_empty(1, dtype=torch.float32), norms
