"""The optimizers' multi-tensor steps, by the reference and by the extension, against float64 arithmetic."""

import copy
import itertools
import math
from dataclasses import dataclass, field

import hypothesis
import pytest
import torch
from helpers import assert_all_close, checksum
from hypothesis import strategies
from updates import adagrad64, adam64, lamb64, novograd64, sgd64

from ampkit import kernels
from ampkit.apex import multi_tensor_steps
from ampkit.kernels import backend

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
# Around the edges of a vector and a tile; the long ones also around those of a block (CPU) and a chunk (CUDA).
SIZES = (0, 1, 3, 16, 17, 0, 1023, 1025)
LONG = (0, 65_535, 65_536, 0, 65_537, 131_079)

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


def run_wide(name, lists, factor=1.0, **changes):
    _, wide, _, vector, settings = STEPS[name]
    for i, (g, p, *states) in enumerate(lists.wide):
        wide(g * factor, p, states, *([lists.wide_vector[i]] if vector else []), **settings | changes)


def assert_agrees(lists, slack=24):
    """Check that parameters and states are float64's, up to the rounding of a dozen float32 steps and of their own dtype."""
    for p, *states, (_, wide_p, *wide_states) in zip(lists.params, *lists.states, lists.wide, strict=True):
        for found, wanted in zip((p, *states), (wide_p, *wide_states), strict=True):
            eps = slack * EPSILON[F32] + (EPSILON[found.dtype] if found.dtype is not F32 else 0.0)
            torch.testing.assert_close(found.cpu().double(), wanted, rtol=eps, atol=eps)
    torch.testing.assert_close(lists.vector.cpu().double(), lists.wide_vector, rtol=1e-6, atol=0)


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
    for t in (lists.params[0], lists.grads[1], lists.states[0][1], lists.states[1][1]):
        t.zero_()
    lists.__post_init__()
    run_step(ops, "lamb", lists, weight_decay=0.0)
    run_wide("lamb", lists, weight_decay=0.0)
    assert lists.wide[0][1].norm() > 0.05 and torch.equal(lists.params[1].double(), lists.wide[1][1].to(device))
    assert_agrees(lists)


@pytest.mark.parametrize("size", [1, 5, 7, 9, 17, 1027, 65_539])
def test_lamb_divides_nothing_beyond_the_end(ops, device, size):
    """With eps 0, the elements that a thread takes beyond the end of a tensor would be 0 / 0."""
    lists, changes = make_lists([(size,)], MIXES["float32"], 2, device), dict(weight_decay=0.0, eps=0.0)
    run_step(ops, "lamb", lists, **changes)
    run_wide("lamb", lists, **changes)
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
    lists = make_lists(SIZES, MIXES["float16 masters"], STEPS[name][2], device)
    twin = copy.deepcopy(lists)
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


@pytest.mark.parametrize("name", ["adamw", "novograd", "lamb"])
def test_five_thousand_tensors(ops, device, name):
    lists = make_lists([(i % 5,) for i in range(5000)], MIXES["bfloat16 masters"], STEPS[name][2], device)
    run_step(ops, name, lists)
    run_wide(name, lists)
    found = [torch.cat(column) for column in (lists.params, *lists.states)]
    wanted = [torch.cat(column) for column in list(zip(*lists.wide))[1:]]
    assert_all_close([*found, lists.vector], [*wanted, lists.wide_vector], 24 * EPSILON[F32])
    assert torch.equal(torch.cat(lists.lower), torch.cat(lists.params).to(BF16))


@pytest.mark.parametrize("odd, dtype", [("gradient", BF16), ("parameter", BF16), ("all", F64)], ids=str)
@pytest.mark.parametrize("name", ONE_EACH)
def test_one_tensor_of_another_dtype_than_those_before_it(ops, device, name, odd, dtype):
    """Kernels are compiled for lists of a single dtype each: each tensor's has to be checked. The reference takes float64."""
    lists = make_lists([(5,), (300,), (17,)], MIXES["float32"], STEPS[name][2], device)
    columns = {"gradient": [lists.grads], "parameter": [lists.params]}
    for column in columns.get(odd, [lists.grads, lists.params, *lists.states]):
        column[2] = column[2].to(dtype) + (1e-12 if dtype is F64 else 0.0)
    lists.__post_init__()
    run_step(ops, name, lists)
    run_wide(name, lists)
    assert_agrees(lists)


def test_a_large_model_whose_tensors_begin_anywhere(ops, device):
    # More than 8 M elements; the second tensor starts in the midst of a cache line.
    sizes = (8_400_001, 100_003)

    def zeros(dtype):
        return [torch.zeros(size + 1, dtype=dtype, device=device)[at : at + size] for at, size in enumerate(sizes)]

    grads = [torch.randn(size, device=device).to(BF16) for size in sizes]
    params = [torch.randn(size, device=device) for size in sizes]
    lower, outputs, rests, narrow = map(zeros, (F16, F32, torch.int16, BF16))
    ops.multi_tensor_scale(params, lower, 1.0)
    assert all(torch.equal(low, p.half()) for low, p in zip(lower, params))
    ops.multi_tensor_axpby(grads, params, outputs, 1.0, 2.0)
    assert all(torch.equal(out, g.float() + p * 2) for out, g, p in zip(outputs, grads, params))
    ops.multi_tensor_split(params, lower, rests)
    ops.multi_tensor_join(lower, rests, outputs)
    for out, p in zip(outputs, params):  # in float16 exact from 2^-14 on, and to 2^-40 below
        assert ((out.double() - p.double()).abs() <= torch.where(p.abs() < 2.0**-14, 2.0**-40, 0.0)).all()
    ops.multi_tensor_join(lower, rests, narrow)
    assert all(torch.equal(low, out.to(BF16)) for low, out in zip(narrow, outputs))
    norm, _ = ops.multi_tensor_unscale_l2norm(grads, outputs, 0.5)
    assert all(torch.equal(out, g.float() * 0.5) for out, g in zip(outputs, grads))
    torch.testing.assert_close(norm.double(), 0.5 * torch.cat(grads).double().norm().reshape(1), rtol=1e-6, atol=0)
    wide = [p.double() - 0.1 * g.double().sign() for p, g in zip(params, grads)]  # the first step of Adam, eps 0
    rule = dict(lr=0.1, betas=(0.9, 0.99), eps=1e-30, step=1, decoupled=True)
    ops.multi_tensor_adam(grads, params, zeros(F32), zeros(F32), lower, **rule)
    for p, low, expected, g in zip(params, lower, wide, grads):
        moved = g.abs() > 1e-10
        torch.testing.assert_close(p.double()[moved], expected[moved], rtol=1e-5, atol=1e-5)
        assert torch.equal(low, p.half())


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


def fingerprint():
    """A number that depends on every bit that the steps write."""
    torch.manual_seed(0)
    written = []
    for name, mix in itertools.product(STEPS, ("float16 masters", "all bfloat16")):
        lists = make_lists(SIZES, MIXES[mix], STEPS[name][2])
        run_step(kernels, name, lists)
        written += lists.written()
    return checksum(written)
