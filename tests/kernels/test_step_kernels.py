"""The optimizers' multi-tensor steps, by the reference and by the extension, against float64 arithmetic."""

import itertools
import math
import os
import subprocess
import sys
import zlib
from dataclasses import dataclass, field

import hypothesis
import pytest
import test_moments
import torch
from helpers import ROOT, others_slow
from hypothesis import strategies

from ampkit import kernels
from ampkit.apex import multi_tensor_steps
from ampkit.kernels import backend

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
# Around the edges of a vector and a tile; the long ones also around those of a block (CPU) and a chunk (CUDA).
SIZES = (0, 1, 3, 16, 17, 0, 1023, 1025)
LONG = (0, 65_535, 65_536, 0, 65_537, 131_079)


def sgd64(g, p, states, trust=1.0, *, lr, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, **how):
    d = g + (0.0 if how.get("wd_after_momentum") else weight_decay) * p
    d = update = d * trust
    if momentum:
        (m,) = states
        m.copy_(d if how.get("first_run") else momentum * m + (1 - dampening) * d)
        update = d + momentum * m if nesterov else m
    p -= lr * (update + (weight_decay if how.get("wd_after_momentum") else 0.0) * p)


def adam_direction64(g, p, states, *, betas, eps, step, decoupled, weight_decay=0.0, bias_correction=True, share=None):
    m, v = states
    d = g + (0.0 if decoupled else weight_decay) * p
    m.copy_(betas[0] * m + (1 - betas[0] if share is None else share) * d)
    v.copy_(betas[1] * v + (1 - betas[1]) * d * d)
    c1, c2 = (1 - beta**step if bias_correction else 1.0 for beta in betas)
    return m / c1 / ((v / c2).sqrt() + eps) + (weight_decay if decoupled else 0.0) * p


def adam64(g, p, states, *, lr, **how):
    p -= lr * adam_direction64(g, p, states, **how)


def lamb64(g, p, states, *, lr, grad_averaging=True, trusts=True, **how):
    u = adam_direction64(g, p, states, share=None if grad_averaging else 1.0, **how)
    ratio = p.norm() / u.norm() if trusts and p.norm() > 0 and u.norm() > 0 else 1.0
    p -= lr * ratio * u


def adagrad64(g, p, states, *, lr, eps, decoupled=False, weight_decay=0.0):
    (h,) = states
    d = g + (0.0 if decoupled else weight_decay) * p
    h += d * d
    p -= lr * (d / (h.sqrt() + eps) + (weight_decay if decoupled else 0.0) * p)


def novograd64(g, p, states, norm, *, lr, betas, eps, step, weight_decay=0.0, bias_correction=True, **how):
    (m,) = states
    c1, c2 = (1 - beta**step if bias_correction else 1.0 for beta in betas)
    now = g.norm() if how.get("norm_type", 2) == 2 else (g.abs().max() if g.numel() else torch.zeros((), dtype=F64))
    if how.get("norm_type", 2) == 2:
        norm.copy_((betas[1] * norm**2 + (1 - betas[1]) * now**2).sqrt())
    else:
        norm.copy_(betas[1] * norm + (1 - betas[1]) * now)
    n = norm / math.sqrt(c2) + eps
    share = 1 - betas[0] if how.get("grad_averaging", True) else 1.0
    if how.get("reg_inside_moment"):
        m.copy_(betas[0] * m + share * (g / n + weight_decay * p))
        p -= lr * m / c1
    else:
        m.copy_(betas[0] * m + share * g)
        p -= lr * (m / c1 / n + weight_decay * p)


ADAM = dict(lr=0.1, betas=(0.8, 0.95), eps=1e-6, step=3)
#: name: (operator, in float64, number of states, whether there is a vector with one element a tensor, settings)
STEPS = {
    "sgd": ("sgd", sgd64, 1, None, dict(lr=0.1)),
    "sgd decay": ("sgd", sgd64, 1, None, dict(lr=0.1, weight_decay=0.3)),
    "sgd first": ("sgd", sgd64, 1, None, dict(lr=0.1, momentum=0.9, first_run=True)),
    "sgd momentum": ("sgd", sgd64, 1, None, dict(lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.1)),
    "sgd nesterov": ("sgd", sgd64, 1, None, dict(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)),
    "sgd decay after": (
        "sgd", sgd64, 1, None, dict(lr=0.1, momentum=0.9, weight_decay=0.1, wd_after_momentum=True),
    ),
    "sgd trust": ("sgd", sgd64, 1, "trust", dict(lr=0.1, momentum=0.9, weight_decay=0.1)),
    "adam": ("adam", adam64, 2, None, dict(ADAM, decoupled=False, weight_decay=0.1)),
    "adamw": ("adam", adam64, 2, None, dict(ADAM, decoupled=True, weight_decay=0.1)),
    "adam with a large eps": ("adam", adam64, 2, None, dict(ADAM, decoupled=True, eps=0.5)),
    "adam uncorrected": ("adam", adam64, 2, None, dict(ADAM, decoupled=True, bias_correction=False)),
    "adagrad": ("adagrad", adagrad64, 1, None, dict(lr=0.1, eps=1e-6, weight_decay=0.1)),
    "adagrad decoupled": ("adagrad", adagrad64, 1, None, dict(lr=0.1, eps=1e-6, weight_decay=0.1, decoupled=True)),
    "lamb": ("lamb", lamb64, 2, None, dict(ADAM, decoupled=True, weight_decay=0.1)),
    "lamb l2": ("lamb", lamb64, 2, None, dict(ADAM, decoupled=False, weight_decay=0.1, grad_averaging=False)),
    "lamb without trust": ("lamb", lamb64, 2, None, dict(ADAM, decoupled=True, weight_decay=0.1, trusts=False)),
    "novograd": ("novograd", novograd64, 1, "norms", dict(ADAM, weight_decay=0.1)),
    "novograd inside": (
        "novograd", novograd64, 1, "norms", dict(ADAM, weight_decay=0.1, reg_inside_moment=True, grad_averaging=False),
    ),
    "novograd maximum": ("novograd", novograd64, 1, "norms", dict(ADAM, norm_type=0, bias_correction=False)),
}  # fmt: skip
ONE_EACH = ("sgd momentum", "sgd trust", "adamw", "adagrad", "lamb", "novograd")

#: gradients, parameters, states, lower
MIXES = {
    "float32": (F32, F32, F32, None),
    "bfloat16 masters": (BF16, F32, F32, BF16),
    "float16 masters": (F16, F32, F32, F16),
    "bfloat16 gradients": (BF16, F32, F32, None),
    "float32 gradients, float16 weights": (F32, F32, F32, F16),
    "float32 weights beside": (F32, F32, F32, F32),
    "bfloat16 weights, float32 states": (BF16, BF16, F32, None),
    "all float16": (F16, F16, F16, None),
    "all bfloat16": (BF16, BF16, BF16, None),
    "crossed": (F16, F32, F32, BF16),
}
EPSILON = {F32: 2**-24, F16: 2**-11, BF16: 2**-8, F64: 2**-53}


@dataclass
class Lists:
    """The arguments of one step, and their float64 copies."""

    grads: list
    params: list
    states: list
    lower: list | None
    vector: torch.Tensor
    wide: list = field(default_factory=list)

    def __post_init__(self):
        columns = zip(self.grads, self.params, *self.states, strict=True)
        self.wide = [[t.detach().to("cpu", F64, copy=True) for t in row] for row in columns]
        self.wide_vector = self.vector.detach().to("cpu", F64, copy=True)

    def written(self):
        return [*self.params, *itertools.chain(*self.states), *(self.lower or ())]


def make_lists(shapes, dtypes, states, device="cpu"):
    grad, param, state, low = dtypes
    random = [torch.randn(shape, dtype=F64) for shape in shapes]
    return Lists(
        [(x.sign() * x.abs().clamp(1e-3, 4.0)).to(device, grad) for x in random],
        [torch.randn(shape).to(device, param) for shape in shapes],
        # Second moments and sums are not negative; neither need first moments be.
        [[(torch.rand(shape) + 0.1).to(device, state) for shape in shapes] for _ in range(states)],
        None if low is None else [torch.zeros(shape, dtype=low, device=device) + 7 for shape in shapes],
        torch.rand(len(shapes)).to(device) + 0.5,
    )


def run_step(ops, name, lists, **changes):
    op, _, _, vector, settings = STEPS[name]
    settings = {**settings, **changes}
    function = getattr(ops, f"multi_tensor_{op}", None) or getattr(multi_tensor_steps, f"multi_tensor_{op}")
    if vector == "norms":
        function(lists.grads, lists.params, *lists.states, lists.vector, lists.lower, **settings)
    else:
        more = {vector: lists.vector} if vector else {}
        function(lists.grads, lists.params, *lists.states, lists.lower, **more, **settings)


def run_wide(name, lists, factor=1.0):
    _, wide, _, vector, settings = STEPS[name]
    for i, (g, p, *states) in enumerate(lists.wide):
        wide(g * factor, p, states, *([lists.wide_vector[i]] if vector else []), **settings)


def assert_agrees(lists, slack=24):
    """Check that parameters and states are float64's, up to the rounding of a dozen float32 steps and of their own dtype."""
    for p, *states, (_, wide_p, *wide_states) in zip(lists.params, *lists.states, lists.wide, strict=True):
        for found, wanted in zip((p, *states), (wide_p, *wide_states), strict=True):
            eps = slack * EPSILON[F32] + (EPSILON[found.dtype] if found.dtype is not F32 else 0.0)
            torch.testing.assert_close(found.cpu().double(), wanted, rtol=eps, atol=eps)
    torch.testing.assert_close(lists.vector.cpu().double(), lists.wide_vector, rtol=1e-6, atol=0)


def test_assert_agrees_can_fail():
    lists = make_lists([(3,)], MIXES["float32"], 1)
    assert_agrees(lists)
    lists.params[0][1] *= 1.00001
    with pytest.raises(AssertionError):
        assert_agrees(lists)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_float64s_rounded(ops, device, name, mix):
    lists = make_lists(SIZES, MIXES[mix], STEPS[name][2], device)
    grads = [g.clone() for g in lists.grads]
    run_step(ops, name, lists)
    run_wide(name, lists)
    if "lamb" in name and MIXES[mix][2] is not F32:
        slack = 2**15 if MIXES[mix][2] is F16 else 2**18  # directions are of the moments as they are stored
    else:
        slack = 24
    assert_agrees(lists, slack)
    assert all(torch.equal(g, before) for g, before in zip(lists.grads, grads))
    if lists.lower is not None and MIXES[mix][1] is F32:
        assert all(torch.equal(low, p.to(low.dtype)) for low, p in zip(lists.lower, lists.params))


def test_lamb_moves_tensors_without_a_norm_as_adam_does(ops, device):
    """A weight that starts from zeros would never leave them, one without gradients has no direction to divide by."""
    lists = make_lists([(3,), (3,), (3,)], MIXES["float32"], 2, device)
    lists.params[0].zero_()
    for t in (lists.grads[1], lists.states[0][1], lists.states[1][1]):
        t.zero_()
    lists.__post_init__()
    run_step(ops, "lamb", lists, weight_decay=0.0)
    for g, p, m, v in lists.wide:
        u = adam_direction64(g, p, (m, v), **{k: x for k, x in ADAM.items() if k != "lr"}, decoupled=True)
        p -= 0.1 * (p.norm() / u.norm() if p.norm() > 0 and u.norm() > 0 else 1.0) * u
    assert lists.wide[0][1].norm() > 0.05 and torch.equal(lists.params[1].double(), lists.wide[1][1].to(device))
    assert_agrees(lists)


@pytest.mark.parametrize("size", [1, 5, 7, 9, 17, 1027, 65_539])
def test_lamb_divides_nothing_beyond_the_end(ops, device, size):
    """With eps 0, the elements that a thread takes beyond the end of a tensor would be 0 / 0."""
    lists = make_lists([(size,)], MIXES["float32"], 2, device)
    run_step(ops, "lamb", lists, weight_decay=0.0, eps=0.0)
    settings = {k: x for k, x in ADAM.items() if k != "lr"} | {"eps": 0.0}
    for g, p, m, v in lists.wide:
        u = adam_direction64(g, p, (m, v), **settings, decoupled=True)
        p -= 0.1 * p.norm() / u.norm() * u
    assert_agrees(lists)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_lambs_direction_is_of_the_moments_before_they_are_rounded(ops, device, dtype):
    """If all elements are rounded alike, the error of a rounded moment is that of each element: 2^-9 in bfloat16."""
    g, p = torch.full((1000,), 1.01, device=device), torch.randn(1000, device=device)
    m, v = (torch.full((1000,), value, device=device).to(dtype) for value in (1.0, 2.0**-8))
    expected, *states = (x.cpu().double() for x in (p, m, v))
    lamb64(g.cpu().double(), expected, states, **ADAM, weight_decay=0.0, decoupled=True)
    multi_tensor_steps.multi_tensor_lamb([g], [p], [m], [v], **ADAM, weight_decay=0.0)
    torch.testing.assert_close(p.cpu().double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ONE_EACH)
def test_long_tensors(ops, device, name):
    lists = make_lists(LONG, MIXES["bfloat16 masters"], STEPS[name][2], device)
    run_step(ops, name, lists)
    run_wide(name, lists)
    assert_agrees(lists)
    assert all(torch.equal(low, p.to(BF16)) for low, p in zip(lists.lower, lists.params))


@pytest.mark.parametrize("name", ONE_EACH)
def test_gradients_are_unscaled_and_clipped_by_numbers_of_either_kind(ops, device, name):
    torch.manual_seed(1)
    lists = make_lists(SIZES, MIXES["float16 masters"], STEPS[name][2], device)
    torch.manual_seed(1)
    twin = make_lists(SIZES, MIXES["float16 masters"], STEPS[name][2], device)
    tensor = lambda value, dtype=F32: torch.tensor([value], dtype=dtype, device=device)  # noqa: E731
    settings = STEPS[name][4]
    more = {"step": tensor(settings["step"], torch.int32)} if "step" in settings else {}
    run_step(
        ops, name, lists, inv_scale=tensor(2.0**-3), clip=tensor(0.5), lr=tensor(settings["lr"], F64).squeeze(), **more
    )
    run_wide(name, lists, 2.0**-4)
    assert_agrees(lists)
    run_step(ops, name, twin, inv_scale=2.0**-3, clip=0.5)
    for found, expected in zip(lists.written(), twin.written()):
        torch.testing.assert_close(found, expected, rtol=2e-6 if found.dtype is F32 else 2e-3, atol=1e-7)


@pytest.mark.parametrize("name", ONE_EACH)
@pytest.mark.parametrize("value", [1.0, 2.0, -1.0, 1e-45, math.inf, math.nan])
def test_found_inf_forbids_every_write(ops, device, value, name):
    """Every value but zero forbids it."""
    lists = make_lists(SIZES, MIXES["bfloat16 masters"], STEPS[name][2], device)
    before = [t.clone() for t in (*lists.written(), lists.vector)]
    lists.grads[-1][-1] = float("nan")
    run_step(ops, name, lists, found_inf=torch.tensor([value], device=device), inv_scale=torch.ones(1, device=device))
    assert all(torch.equal(a, b) for a, b in zip((*lists.written(), lists.vector), before))
    lists.grads[-1][-1] = 1.0
    lists.__post_init__()
    run_step(ops, name, lists, found_inf=torch.tensor([-0.0], device=device))
    run_wide(name, lists)
    assert_agrees(lists)


def channels_last(x):
    return x.clone(memory_format=torch.channels_last)


def every_second(x):
    whole = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1])
    return whole[..., ::2].copy_(x)


def misaligned(x):
    return x.new_zeros(x.numel() + 1)[1:].view(x.shape).copy_(x)


LAYOUTS = {
    "channels last": (channels_last,) * 4,
    "transposed": (lambda x: x.mT.contiguous().mT,) * 4,
    "gradient channels last": (channels_last, torch.clone, torch.clone, torch.clone),
    "lower channels last": (torch.clone, torch.clone, torch.clone, channels_last),
    "parameter with gaps": (torch.clone, every_second, torch.clone, torch.clone),
    "all with gaps": (every_second,) * 4,
    "misaligned": (misaligned,) * 4,
    "gradient misaligned": (misaligned, torch.clone, torch.clone, torch.clone),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ONE_EACH)
def test_layouts(ops, device, name, layout):
    lists = make_lists([(2, 3, 5, 7), (1, 1, 1, 1), (4, 8, 9, 33)], MIXES["bfloat16 masters"], STEPS[name][2], device)
    of_grads, of_params, of_states, of_lower = LAYOUTS[layout]
    lists.grads = [of_grads(t) for t in lists.grads]
    lists.params = [of_params(t) for t in lists.params]
    lists.states = [[of_states(t) for t in state] for state in lists.states]
    lists.lower = [of_lower(t) for t in lists.lower]
    run_step(ops, name, lists)
    run_wide(name, lists)
    assert_agrees(lists)
    assert all(torch.equal(low, p.to(BF16)) for low, p in zip(lists.lower, lists.params))


@pytest.mark.parametrize("name", ONE_EACH)
def test_empty_lists(ops, name):
    lists = make_lists([], MIXES["bfloat16 masters"], STEPS[name][2])
    run_step(ops, name, lists)
    lists.lower = None
    run_step(ops, name, lists)


@pytest.mark.parametrize("name", ["adamw", "novograd", "lamb"])
def test_five_thousand_tensors(ops, device, name):
    lists = make_lists([(i % 5,) for i in range(5000)], MIXES["bfloat16 masters"], STEPS[name][2], device)
    run_step(ops, name, lists)
    run_wide(name, lists)
    joined = Lists(
        *([torch.cat(ts)] for ts in (lists.grads, lists.params)),
        [[torch.cat(s)] for s in lists.states],
        None,
        lists.vector,
    )
    joined.wide = [[torch.cat(column) for column in zip(*lists.wide, strict=True)]]
    joined.wide_vector = lists.wide_vector
    assert_agrees(joined)
    assert torch.equal(torch.cat(lists.lower), torch.cat(lists.params).to(BF16))


@pytest.mark.parametrize("name", ONE_EACH)
def test_float64_parameters_join_the_list(ops, device, name):
    lists = make_lists([(3,), (5,), (4,)], MIXES["bfloat16 masters"], STEPS[name][2], device)
    for column in (lists.grads, lists.params, *lists.states):
        column[1] = column[1].to(F64) + 1e-12
    lists.__post_init__()
    run_step(ops, name, lists)
    run_wide(name, lists)
    assert_agrees(lists)
    assert lists.params[1].dtype is F64


@pytest.mark.parametrize("odd", ["gradient", "parameter"])
@pytest.mark.parametrize("name", ONE_EACH)
def test_one_tensor_of_another_dtype_than_those_before_it(ops, device, name, odd):
    """Kernels are compiled for lists of a single dtype each: every tensor's dtype has to be checked."""
    lists = make_lists([(5,), (300,), (17,)], MIXES["float32"], STEPS[name][2], device)
    column = lists.grads if odd == "gradient" else lists.params
    column[2] = column[2].to(BF16)
    lists.__post_init__()
    run_step(ops, name, lists)
    run_wide(name, lists)
    assert_agrees(lists)


def test_a_large_model_whose_tensors_begin_anywhere(ops, device):
    # More than 8 M elements; the second tensor starts in the midst of a cache line.
    sizes = (8_400_001, 100_003)
    grads = [torch.randn(size, device=device).to(BF16) for size in sizes]
    for gradient in grads:
        gradient[gradient == 0] = 1.0
    params = [torch.randn(size, device=device) for size in sizes]
    lower = [torch.zeros(size + 1, dtype=F16, device=device)[at : at + size] for size, at in zip(sizes, (0, 1))]
    outputs = [torch.zeros(size + 1, device=device)[at : at + size] for size, at in zip(sizes, (0, 1))]
    moments = [[torch.zeros(size, device=device) for size in sizes] for _ in range(2)]
    ops.multi_tensor_scale(grads, outputs, 0.25)
    assert all(torch.equal(out, g.float() * 0.25) for out, g in zip(outputs, grads))
    ops.multi_tensor_scale(params, lower, 1.0)
    assert all(torch.equal(low, p.half()) for low, p in zip(lower, params))
    ops.multi_tensor_axpby(grads, params, outputs, 1.0, 2.0)
    assert all(torch.equal(out, g.float() + p * 2) for out, g, p in zip(outputs, grads, params))
    rests = [torch.zeros(size, dtype=torch.int16, device=device) for size in sizes]
    ops.multi_tensor_split(params, lower, rests)
    ops.multi_tensor_join(lower, rests, outputs)
    for out, p in zip(outputs, params):  # in float16 exact from 2^-14 on, and to 2^-40 below
        assert ((out.double() - p.double()).abs() <= torch.where(p.abs() < 2.0**-14, 2.0**-40, 0.0)).all()
    narrow = [torch.zeros_like(out, dtype=BF16) for out in outputs]
    ops.multi_tensor_join(lower, rests, narrow)
    assert all(torch.equal(low, out.to(BF16)) for low, out in zip(narrow, outputs))
    norm, _ = ops.multi_tensor_unscale_l2norm(grads, outputs, 0.5)
    assert all(torch.equal(out, g.float() * 0.5) for out, g in zip(outputs, grads))
    torch.testing.assert_close(norm.double(), 0.5 * torch.cat(grads).double().norm().reshape(1), rtol=1e-6, atol=0)
    wide = [p.double() - 0.1 * g.double().sign() for p, g in zip(params, grads)]  # the first step of Adam, eps 0
    ops.multi_tensor_adam(grads, params, *moments, lower, lr=0.1, betas=(0.9, 0.99), eps=1e-30, step=1, decoupled=True)
    for p, low, expected, g in zip(params, lower, wide, grads):
        moved = g.abs() > 1e-10
        torch.testing.assert_close(p.double()[moved], expected[moved], rtol=1e-5, atol=1e-5)
        assert torch.equal(low, p.half())


@pytest.mark.parametrize("name", ONE_EACH)
def test_lower_of_another_length_is_refused(ops, name):
    lists = make_lists([(2,), (2,)], MIXES["float32"], STEPS[name][2])
    lists.lower = [torch.ones(2)]
    before = [t.clone() for t in lists.written()]
    with pytest.raises(RuntimeError, match="lower has 1"):
        run_step(ops, name, lists)
    assert all(torch.equal(a, b) for a, b in zip(lists.written(), before))


def test_versions_of_all_that_is_written_move_and_no_others(ops, device):
    lists = make_lists([(3,)], MIXES["bfloat16 masters"], 2, device)
    before, grads = ([t._version for t in tensors] for tensors in (lists.written(), lists.grads))
    run_step(ops, "adamw", lists)
    assert all(t._version > version for t, version in zip(lists.written(), before))
    assert [t._version for t in lists.grads] == grads


@pytest.mark.compiled("kernels")
@pytest.mark.parametrize("tensors", [False, True], ids=["floats", "tensors"])
@pytest.mark.parametrize("name", ["sgd", *ONE_EACH])
def test_opcheck(device, name, tensors):
    """Record the arguments of the operator, and check them."""
    if device.type == "cuda" and not kernels.implementation().cuda:
        pytest.skip("no CUDA kernels")
    op, _, states, _, settings = STEPS[name]
    lists = make_lists([(5,), (3, 4)], MIXES["bfloat16 masters"], states, device)
    changes = {}
    if tensors:
        numbers = {"inv_scale": 0.5, "clip": 0.5, "found_inf": 0.0, "lr": 0.1}
        numbers.update({"step": 2.0} if "step" in settings else {})
        changes = {key: torch.tensor([value], device=device) for key, value in numbers.items()}
    else:
        lists.lower = None
    seen = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.namespace == "ampkit":
                seen.append((function, args))
            return function(*args, **(kwargs or {}))

    norms = {"grad_norms": torch.ones(2, device=device)} if op == "novograd" else {}
    with Recorder():
        run_step(kernels, name, lists, **changes, **norms)
    ((operator, arguments),) = seen
    torch.library.opcheck(operator, arguments)


dtypes = strategies.sampled_from((F32, F16, BF16))
numbers = strategies.floats(0.0, 1.0).map(lambda x: round(x, 3))


@pytest.mark.compiled("kernels")
@hypothesis.settings(max_examples=150, deadline=None, derandomize=True, database=None)
@hypothesis.given(data=strategies.data())
def test_extension_agrees_with_the_reference_on_anything(data):
    name = data.draw(strategies.sampled_from(sorted(STEPS)), label="step")
    sizes = data.draw(strategies.lists(strategies.integers(0, 3000), min_size=1, max_size=6), label="sizes")
    mix = (data.draw(dtypes), data.draw(strategies.sampled_from((F32, F32, BF16, F16))), F32, data.draw(dtypes))
    seed = data.draw(strategies.integers(0, 1000))
    offset = data.draw(strategies.integers(0, 3), label="offset")
    changes = {
        "weight_decay": data.draw(numbers, label="weight decay"),
        "lr": data.draw(numbers, label="lr"),
        "inv_scale": data.draw(numbers, label="inv_scale"),
        "clip": torch.tensor([data.draw(numbers, label="clip")]),
    }
    results = []
    for devices in (frozenset(), backend.kernel_devices):
        torch.manual_seed(seed)
        lists = make_lists(sizes, mix, STEPS[name][2])
        lists.grads, lists.params = (
            [t.new_zeros(t.numel() + offset)[offset:].copy_(t) for t in column]
            for column in (lists.grads, lists.params)
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backend, "kernel_devices", devices)
            run_step(kernels, name, lists, **changes)
        results.append([*lists.written(), lists.vector])
    for expected, found in zip(*results, strict=True):
        eps = 2e-6 + (2 * EPSILON[found.dtype] if found.dtype is not F32 else 0)
        torch.testing.assert_close(found.float(), expected.float(), rtol=eps, atol=eps)


@pytest.mark.cpu_kernels
@pytest.mark.compiled("kernels")
@pytest.mark.parametrize("capability", others_slow("baseline", of=["baseline", "avx2"]))
def test_every_instruction_set_gives_the_same_bits(capability):
    script = "import test_step_kernels; print(test_step_kernels.fingerprint())"
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "kernels")))
    environment = {**os.environ, "AMPKIT_CPU_CAPABILITY": capability, "PYTHONPATH": path}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == fingerprint()


def fingerprint():
    """A number that depends on every bit that the steps write."""
    torch.manual_seed(0)
    total = 0
    for name, mix in itertools.product(STEPS, ("float16 masters", "all bfloat16")):
        lists = make_lists(SIZES, MIXES[mix], STEPS[name][2])
        run_step(kernels, name, lists)
        for written in lists.written():
            total = total * 31 + zlib.crc32(written.view(-1).view(torch.uint8).numpy().tobytes())
            total %= 2**61 - 1
    return f"{total} {test_moments.fingerprint()}"
