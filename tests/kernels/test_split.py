"""Weights and rests: float32 values as 16-bit weights and an int16 rest, on paper and inside steps."""

import pytest
import torch
from test_step_kernels import LONG, SIZES

from ampkit import kernels
from ampkit.apex import multi_tensor_steps

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
I16 = torch.int16
# The largest value that is kept: 65504, and half a unit below the end of bfloat16's range.
LARGEST = {F16: 65504.0, BF16: float.fromhex("0x1.fefffep127")}
LOWER = pytest.mark.parametrize("dtype", [BF16, F16], ids=["bfloat16", "float16"])


def values_of(bits):
    """Float32 values of unsigned bit patterns."""
    return torch.where(bits < 2**31, bits, bits - 2**32).to(torch.int32).view(F32)


def bits_of(values):
    return values.view(torch.int32).long() & 0xFFFFFFFF


def chosen_patterns():
    """Every upper half with lower halves around each rounding, and every lower half with upper halves of all classes."""
    upper = torch.arange(2**16)[:, None] << 16
    around = 0, 1, 0x7F, 0xFFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xDFFF, 0xF000, 0xFFFF
    lower, classes = torch.tensor(around), torch.tensor([
        *(0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x3FFF, 0x477F, 0x4780, 0x7F7F, 0x7F80, 0x7FFF, 0x8000, 0xBF80, 0xFF7F),
        *(0x2B80, 0x2C00, 0x3280, 0x3300, 0x337F, 0x3380, 0x3780, 0x387F, 0x3880, 0xB380, 0xC77F),
    ])  # fmt: skip
    return torch.cat([(upper | lower).flatten(), (classes[:, None] << 16 | torch.arange(2**16)).flatten()])


def weights_on_paper(x, dtype):
    """Magnitudes (float64, finite) rounded to the nearest number of this dtype, ties away from 0."""
    digits, lowest = (10, -24) if dtype is F16 else (7, -133)
    exponent = torch.frexp(x).exponent.double() - 1 - digits
    unit = torch.where(x == 0, 2.0**lowest, torch.exp2(exponent.clamp(min=lowest)))
    return torch.floor(x / unit + 0.5) * unit


def assert_split(values, dtype):
    """Check the values that a split keeps, by arithmetic in float64."""
    weights, rests = kernels.split(values, dtype)
    together = kernels.join(weights, rests)
    assert weights.dtype is dtype and rests.dtype is I16 and together.dtype is F32
    x, sign = values.double().abs().clamp(max=LARGEST[dtype]), torch.signbit(values)
    finite = values.isfinite()
    expected = weights_on_paper(together.double().abs() if dtype is F16 else x, dtype)
    if dtype is F16:  # a rest beside 0 would not count: a value that is not 0 has the least weight instead
        expected = torch.where((expected == 0) & (x >= 2.0**-40), 2.0**-24, expected)
    assert torch.equal(weights.double().abs()[finite], expected[finite])
    error = (together.double().abs() - x).abs()[finite]
    if dtype is F16:
        is_large = x[finite] >= 2.0**-14
        assert (error[is_large] == 0).all() and (error <= 2.0**-40).all()
    else:
        assert (error[x[finite] >= 2.0**-134] == 0).all() and (error <= 2.0**-134).all()
    for signed in (together, weights):
        assert torch.equal(torch.signbit(signed)[finite], sign[finite])
    is_nan, is_inf = values.isnan(), values.isinf()
    assert together[is_nan].isnan().all() and weights[is_nan].isnan().all()
    assert torch.equal(together[is_inf], values[is_inf]) and torch.equal(weights[is_inf].float(), values[is_inf])
    assert not rests[~finite].any()
    again = kernels.split(together, dtype)
    counts = finite & (weights != 0)  # beside 0 a rest may be anything
    assert torch.equal(again[0].view(I16), weights.view(I16)) and torch.equal(again[1][counts], rests[counts])


@LOWER
def test_a_value_is_its_weight_and_rest(dtype):
    assert_split(values_of(chosen_patterns()), dtype)


PARTS = 8


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@LOWER
def test_every_bit_pattern(dtype, part):
    """All 2^32 patterns, in pieces that fit into a cache: five times as fast as pieces that do not."""
    size, piece = 2**32 // PARTS, 2**16
    for start in range(part * size, (part + 1) * size, piece):
        assert_split(values_of(torch.arange(start, start + piece)), dtype)


@LOWER
def test_the_operators_do_the_same(ops, device, dtype):
    values = values_of(chosen_patterns()).to(device)
    values = [values[: SIZES[-1]], values[5:5], values.clone(), values[::3]]
    weights, rests = ([x.new_empty(x.shape, dtype=kind) for x in values] for kind in (dtype, I16))
    ops.multi_tensor_split(values, weights, rests)
    outputs = [torch.empty_like(x) for x in values]
    ops.multi_tensor_join(weights, rests, outputs)
    for x, weight, rest, out in zip(values, weights, rests, outputs):
        expected = kernels.split(x, dtype)
        assert torch.equal(weight.view(I16), expected[0].view(I16)) and torch.equal(rest, expected[1])
        assert torch.equal(out.view(torch.int32), kernels.join(*expected).view(torch.int32))


def test_the_operators_convert_values_of_another_dtype(ops, device):
    values = torch.linspace(-2, 2, 33).to(device, F16)
    weights, rests = torch.empty(33, dtype=BF16, device=device), torch.empty(33, dtype=I16, device=device)
    ops.multi_tensor_split([values], [weights], [rests])
    out = torch.empty(33, dtype=F16, device=device)
    ops.multi_tensor_join([weights], [rests], [out])
    assert torch.equal(out, values)


def test_the_operators_refuse_what_is_no_weight_or_rest(ops, device):
    floats, rests = torch.ones(3, device=device), torch.zeros(3, dtype=I16, device=device)
    for weights, beside in ((floats, rests), (floats.to(BF16), floats), (floats.to(BF16), rests.int())):
        with pytest.raises(RuntimeError):
            ops.multi_tensor_join([weights], [beside], [torch.empty_like(floats)])
        with pytest.raises(RuntimeError):
            ops.multi_tensor_split([floats], [weights], [beside])
    assert torch.equal(floats, torch.ones_like(floats))


@LOWER
def test_what_is_written_over_a_weight_is_what_both_together_round_to(dtype):
    """An unnoticed write leaves the rest of another value: the result is within half a unit of the last place."""
    rests = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(I16)
    for written in (0.0, -0.0, 1.0, -1.5, 2.0**-14, 2.0**-15, 3 * 2.0**-24, 1e-30, -6e4):
        weights = torch.full(rests.shape, written).to(dtype)
        together = kernels.join(weights, rests)
        again, _ = kernels.split(together, dtype)
        assert torch.equal(again.view(I16), weights.view(I16)), written
        bits = weights[0].view(I16).int() & 0x7FFF
        unit = ((bits + 1).to(I16).view(dtype).double() - bits.to(I16).view(dtype).double()).item()
        assert ((together - weights.double()).abs() <= unit / 2).all() and (written != 0.0 or not together.any())


STEPS = {
    "sgd": ("sgd", 0, dict(lr=0.1, weight_decay=0.3)),
    "momentum": ("sgd", 1, dict(lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.1)),
    "adam": ("adam", 2, dict(lr=0.01, betas=(0.8, 0.95), eps=1e-6, step=3, decoupled=False, weight_decay=0.1)),
    "adamw": ("adam", 2, dict(lr=0.01, betas=(0.8, 0.95), eps=1e-6, step=3, decoupled=True, weight_decay=0.1)),
}


def take_step(ops, name, grads, params, states, lower, **more):
    op, count, settings = STEPS[name]
    states = [*states[:count], *([None] if name == "sgd" else [])]
    getattr(ops, f"multi_tensor_{op}")(grads, params, *states, lower, **{**settings, **more})


def beside_masters(ops, name, values, grads, dtype, **more):
    """Compare a step of weights with rests with the same step in float32, from the same states: bit for bit, states too."""
    states = [[torch.rand_like(x) + 0.1 for x in values] for _ in range(2)]
    twins = [[x.clone() for x in state] for state in states]
    split = [kernels.split(x, dtype) for x in values]
    masters = [kernels.join(*pair) for pair in split]
    weights, rests = zip(*split)
    take_step(ops, name, grads, list(weights), states, list(rests), **more)
    take_step(ops, name, grads, masters, twins, None, **more)
    assert all(torch.equal(a, b) for pair in zip(states, twins) for a, b in zip(*pair))
    expected = [kernels.join(*kernels.split(x, dtype)) for x in masters]
    for w, r, x in zip(weights, rests, expected):
        assert torch.equal(w.view(I16), kernels.split(x, dtype)[0].view(I16))
        assert torch.equal(bits_of(kernels.join(w, r)), bits_of(x))


@LOWER
@pytest.mark.parametrize("sizes", [SIZES, LONG], ids=["short", "long"])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_weights_with_rests_is_that_of_their_float32_values(ops, device, name, sizes, dtype):
    values = [torch.randn(size).to(device) for size in sizes]
    for grad_dtype in (BF16, F32, F16)[: 1 if sizes is LONG else 3]:
        grads = [torch.randn(size).to(device, grad_dtype) for size in sizes]
        beside_masters(ops, name, values, grads, dtype)


@LOWER
def test_every_class_of_values_goes_through_a_step(ops, device, dtype):
    """Ties, carries into the exponent, subnormals, infinities and NaNs, and their values after a step that changes nothing."""
    patterns = chosen_patterns()
    values = values_of(patterns[torch.randperm(len(patterns))[:200_003]]).to(device)
    beside_masters(ops, "sgd", [values], [torch.zeros_like(values)], dtype, lr=0.0)
    values = values.nan_to_num(0.5).clamp(-6e4, 6e4)
    beside_masters(ops, "adamw", [values], [torch.randn_like(values)], dtype)


@LOWER
@pytest.mark.parametrize("name", ["sgd", "momentum"])
def test_a_step_beyond_the_largest_weight_ends_there(ops, device, name, dtype):
    values = torch.randn(2050)
    values[::3], values[1::3] = LARGEST[dtype], -LARGEST[dtype]
    inwards = values * -0.002  # the step is outwards, to what is finite in float32
    beside_masters(ops, name, [values.to(device)], [inwards.to(device)], dtype, lr=1.0, weight_decay=0.0)


def test_weights_with_rests_and_others_in_one_call(ops, device):
    values = [torch.randn(33).to(device) for _ in range(3)]
    grads = [torch.randn(33).to(device, BF16) for _ in range(3)]
    states = [[torch.rand(33, device=device) for _ in range(3)] for _ in range(2)]
    twins = [[x.clone() for x in state] for state in states]
    weights, rests = kernels.split(values[1], BF16)
    masters = [x.clone() for x in values]
    lower = [torch.empty(33, dtype=BF16, device=device) for _ in range(3)]
    params, low = [values[0], weights, values[2]], [lower[0], rests, lower[2]]
    take_step(ops, "adamw", grads, params, states, low)
    take_step(ops, "adamw", grads, masters, twins, None)
    assert torch.equal(params[0], masters[0]) and torch.equal(params[2], masters[2])
    assert torch.equal(kernels.join(weights, rests), masters[1])
    assert torch.equal(lower[0], masters[0].to(BF16)) and torch.equal(lower[2], masters[2].to(BF16))


@pytest.mark.parametrize("name", STEPS)
def test_a_rest_beside_float32_is_refused(ops, device, name):
    params, rests = [torch.ones(3, device=device)], [torch.zeros(3, dtype=I16, device=device)]
    states = [[torch.ones(3, device=device)] for _ in range(2)]
    with pytest.raises(RuntimeError, match=r"lower\[0\] is the rest of a weight"):
        take_step(ops, name, [torch.ones(3, device=device)], params, states, rests)
    assert torch.equal(params[0], torch.ones_like(params[0]))


def test_other_steps_take_no_weights_with_rests(ops, device):
    one = lambda: [torch.ones(3, device=device)]  # noqa: E731
    weights, rests = kernels.split(one()[0], BF16)
    with pytest.raises(RuntimeError, match=r"lower\[0\]"):
        multi_tensor_steps.multi_tensor_adagrad(one(), [weights], one(), [rests], lr=0.1, eps=1e-6)
