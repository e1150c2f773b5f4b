"""The operators of torch.ops.ampkit, called like their twins in reference.py.

Importing this module loads ampkit/_C, which registers the schemas and the CPU kernels (csrc/registration.cpp), and
raises ImportError where that cannot be done. Lists given to these functions lie on one device and hold float32, float16
and bfloat16 only; ampkit.kernels sees to that. A list that is absent is an empty one for the operators, and a number
comes twice: as a float, and as a float32 tensor that is read on the device instead.
"""

import importlib
from types import SimpleNamespace

import torch

# By name: `from ampkit import _C` would call a library that was never built a circular import.
_C = importlib.import_module("ampkit._C")

built_with: str = _C.torch_version
_STEPS = ("sgd", "adam", "adagrad", "lamb", "novograd")
_OPERATORS = (
    *(f"multi_tensor_{name}" for name in ("scale", "axpby", "restore", "l2norm", "unscale_l2norm", *_STEPS)),
    "update_scale",
    "cpu_capability",
)
try:
    # Each has one overload, which the operator would look for at every call.
    ops = SimpleNamespace(**{name: getattr(torch.ops.ampkit, name).default for name in _OPERATORS})
except AttributeError as error:
    raise ImportError("ampkit/_C was built from older sources; build it again") from error


def multi_tensor_scale(inputs, outputs, scale, found_inf=None, first_bad=None):
    if not torch.compiler.is_compiling() and inputs is outputs:
        inputs = []  # in place; the dispatcher would hand over every tensor twice
    ops.multi_tensor_scale(inputs, outputs, *_number(scale), found_inf, first_bad)
    _mark_written(outputs, found_inf, first_bad)


def multi_tensor_axpby(xs, ys, outputs, a, b, found_inf=None, arg_to_check=-1, first_bad=None):
    ops.multi_tensor_axpby(xs, ys, outputs, *_number(a), *_number(b), found_inf, arg_to_check, first_bad)
    _mark_written(outputs, found_inf, first_bad)


def multi_tensor_restore(grads, exacts, outputs, inv_scale, factor=1.0, zeros_count=False):
    ops.multi_tensor_restore(grads, exacts, outputs, *_number(inv_scale), *_number(factor), zeros_count)
    _mark_written(outputs)


def multi_tensor_l2norm(tensors, per_tensor=False):
    return ops.multi_tensor_l2norm(tensors, per_tensor)


def multi_tensor_unscale_l2norm(inputs, outputs=None, inv_scale=None, found_inf=None, per_tensor=False, first_bad=None):
    factor = _number(1.0 if inv_scale is None else inv_scale)
    norms = ops.multi_tensor_unscale_l2norm(inputs, outputs or [], *factor, found_inf, per_tensor, first_bad)
    _mark_written(outputs, found_inf, first_bad)
    return norms


def multi_tensor_sgd(
    grads,
    params,
    momenta,
    lower=None,
    *,
    lr,
    momentum=0.0,
    dampening=0.0,
    weight_decay=0.0,
    nesterov=False,
    first_run=False,
    wd_after_momentum=False,
    trust=None,
    inv_scale=None,
    clip=None,
    found_inf=None,
):
    ops.multi_tensor_sgd(
        grads,
        params,
        momenta if momentum else [],
        lower or [],
        *_number(lr),
        momentum,
        dampening,
        weight_decay,
        nesterov,
        first_run,
        wd_after_momentum,
        None if trust is None else trust.to(torch.float32).contiguous(),
        *_gradient_arguments(inv_scale, clip, found_inf),
    )
    _mark_written(params, momenta if momentum else None, lower)


def multi_tensor_adam(
    grads,
    params,
    exp_avgs,
    exp_avg_sqs,
    lower=None,
    *,
    lr,
    betas,
    eps,
    step,
    decoupled,
    bias_correction=True,
    weight_decay=0.0,
    inv_scale=None,
    clip=None,
    found_inf=None,
):
    ops.multi_tensor_adam(
        grads,
        params,
        exp_avgs,
        exp_avg_sqs,
        lower or [],
        *_number(lr),
        *betas,
        eps,
        *_number(step),
        decoupled,
        bias_correction,
        weight_decay,
        *_gradient_arguments(inv_scale, clip, found_inf),
    )
    _mark_written(params, exp_avgs, exp_avg_sqs, lower)


def multi_tensor_adagrad(
    grads,
    params,
    sums,
    lower=None,
    *,
    lr,
    eps,
    decoupled=False,
    weight_decay=0.0,
    inv_scale=None,
    clip=None,
    found_inf=None,
):
    numbers = (*_number(lr), eps, decoupled, weight_decay, *_gradient_arguments(inv_scale, clip, found_inf))
    ops.multi_tensor_adagrad(grads, params, sums, lower or [], *numbers)
    _mark_written(params, sums, lower)


def multi_tensor_lamb(
    grads,
    params,
    exp_avgs,
    exp_avg_sqs,
    lower=None,
    directions=None,
    *,
    lr,
    betas,
    eps,
    step,
    weight_decay,
    decoupled=True,
    bias_correction=True,
    grad_averaging=True,
    trusts=True,
    inv_scale=None,
    clip=None,
    found_inf=None,
):
    ops.multi_tensor_lamb(
        grads,
        params,
        exp_avgs,
        exp_avg_sqs,
        lower or [],
        directions or [],
        *_number(lr),
        *betas,
        eps,
        *_number(step),
        weight_decay,
        decoupled,
        bias_correction,
        grad_averaging,
        trusts,
        *_gradient_arguments(inv_scale, clip, found_inf),
    )
    _mark_written(params, exp_avgs, exp_avg_sqs, lower, directions)


def multi_tensor_novograd(
    grads,
    params,
    exp_avgs,
    norms,
    lower=None,
    *,
    lr,
    betas,
    eps,
    step,
    bias_correction=True,
    weight_decay=0.0,
    grad_averaging=True,
    reg_inside_moment=False,
    inv_scale=None,
    clip=None,
    found_inf=None,
):
    ops.multi_tensor_novograd(
        grads,
        params,
        exp_avgs,
        norms.to(torch.float32).contiguous(),
        lower or [],
        *_number(lr),
        *betas,
        eps,
        *_number(step),
        bias_correction,
        weight_decay,
        grad_averaging,
        reg_inside_moment,
        *_gradient_arguments(inv_scale, clip, found_inf),
    )
    _mark_written(params, exp_avgs, lower)


def update_scale(scale, growth_tracker, hysteresis_tracker, found_inf, *rule):
    ops.update_scale(scale, growth_tracker, hysteresis_tracker, found_inf, *rule)
    _mark_written((scale, growth_tracker, hysteresis_tracker))


def load_cuda_kernels() -> str:
    """Loads ampkit/_cuda, and says which torch it was built with; ImportError where that cannot be done."""
    return importlib.import_module("ampkit._cuda").torch_version


def _number(number):
    if isinstance(number, torch.Tensor):
        fits = number.dtype is torch.float32 and not number.requires_grad
        return 0.0, number if fits else number.detach().to(torch.float32)
    return float(number), None


def _gradient_arguments(inv_scale, clip, found_inf):
    factor, tensors = 1.0, []
    for number in (inv_scale, clip):
        value, tensor = _number(1.0 if number is None else number)
        factor *= value if tensor is None else 1.0
        tensors.append(tensor)
    return factor, *tensors, found_inf


def _mark_written(*written):
    # torch counts the writes of its own operators only. Autograd's checks and weight-cast caches read the count.
    if not torch.compiler.is_compiling():
        tensors = []
        for one in written:
            if isinstance(one, torch.Tensor):
                tensors.append(one)
            elif one is not None:
                tensors += one
        torch.autograd.graph.increment_version(tensors)


# What torch.compile and fake tensors need to know: operators that only write have nothing to say about results.
def _writes_only(*args):
    return None


for _name in ("scale", "axpby", "restore", *_STEPS):
    torch.library.register_fake(f"ampkit::multi_tensor_{_name}", _writes_only)
torch.library.register_fake("ampkit::update_scale", _writes_only)


@torch.library.register_fake("ampkit::multi_tensor_l2norm")
def _(tensors, per_tensor):
    norms = tensors[0].new_empty(len(tensors) if per_tensor else 0, dtype=torch.float32)
    return tensors[0].new_empty(1, dtype=torch.float32), norms


@torch.library.register_fake("ampkit::multi_tensor_unscale_l2norm")
def _(inputs, outputs, inv_scale, inv_scale_tensor, found_inf, per_tensor, first_bad):
    norms = inputs[0].new_empty(len(inputs) if per_tensor else 0, dtype=torch.float32)
    return inputs[0].new_empty(1, dtype=torch.float32), norms
