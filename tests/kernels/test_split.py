"""Split parameters: float32 values as bfloat16 weights and the rest of their bits, on paper and inside steps."""

import pytest
import torch

from ampkit import kernels

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SIZES = (0, 1, 3, 16, 17, 0, 1023, 1025)
LONG = (0, 65_535, 65_536, 0, 65_537, 131_079)
NAN_BITS = 0x7FC00000


def values_of(bits):
    """Float32 values of unsigned bit patterns."""
    return torch.where(bits < 2**31, bits, bits - 2**32).to(torch.int32).view(F32)


def bits_of(values):
    return values.view(torch.int32).long() & 0xFFFFFFFF


def chosen_patterns():
    """Every upper half with lower halves around each rounding, and every lower half with upper halves of all classes."""
    upper = torch.arange(2**16)[:, None] << 16
    lower = torch.tensor([0, 1, 0x7F, 0x80, 0x81, 0x7FFF, 0x8000, 0x8001, 0x807F, 0x8080, 0xFF7F, 0xFF80, 0xFFFF])
    classes = torch.tensor(
        [0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x3FFF, 0x7F7F, 0x7F80, 0x7FFF, 0x8000, 0xBF80, 0xFF7F]
    )
    return torch.cat([(upper | lower).flatten(), (classes[:, None] << 16 | torch.arange(2**16)).flatten()])


def nearest(values, kept):
    """Values rounded to so many upper bits, ties away from zero, by distances in float64; 2^128 is beyond the last."""
    bits = values.view(torch.int32)
    unit = 2 ** (32 - kept)
    magnitudes = bits & 0x7FFFFFFF
    below = magnitudes & -unit
    above = below + unit
    low, x, high = below.view(F32).double(), magnitudes.view(F32).double(), above.view(F32).double()
    high = torch.where(above == 0x7F800000, 2.0**128, high)
    rounded = torch.where(x - low >= high - x, above, below) | (bits & -(2**31))
    return torch.where(x.isinf(), bits, rounded).view(F32)


def assert_split(values, rest_dtype):
    weights, rests = kernels.split(values, rest_dtype)
    together = kernels.join(weights, rests)
    assert weights.dtype is BF16 and rests.dtype is rest_dtype and together.dtype is F32
    is_nan = values.isnan()
    kept = values if rest_dtype is torch.int16 else nearest(values, 24)
    assert_same_bits(together, torch.where(is_nan, torch.tensor(NAN_BITS, dtype=torch.int32).view(F32), kept))
    assert_same_bits(torch.where(is_nan, 0, weights.float()), torch.where(is_nan, 0, nearest(kept, 16)))
    assert torch.equal(weights.isnan(), is_nan) and not (is_nan & (rests != 0)).any()


def assert_same_bits(found, expected):
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("rest_dtype", [torch.int16, torch.int8])
def test_a_value_is_its_weight_and_rest_bit_for_bit(rest_dtype):
    assert_split(values_of(chosen_patterns()), rest_dtype)


PARTS = 8


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("rest_dtype", [torch.int16, torch.int8])
def test_every_bit_pattern(rest_dtype, part):
    """All 2^32, in pieces that stay in a cache: that is five times as fast as pieces that do not."""
    size, piece = 2**32 // PARTS, 2**16
    for start in range(part * size, (part + 1) * size, piece):
        assert_split(values_of(torch.arange(start, start + piece)), rest_dtype)


def test_weights_of_24_bits_are_off_by_no_more_than_is_said():
    values = torch.randn(10_000) * torch.logspace(-30, 30, 10_000)
    error = (kernels.join(*kernels.split(values, torch.int8)) - values).abs() / values.abs()
    assert 2**-17 < error.max() <= 2**-16


@pytest.mark.parametrize("rest_dtype", [torch.int16, torch.int8])
def test_what_is_written_over_a_weight_is_what_both_together_round_to(rest_dtype):
    """A write that nobody noticed leaves a rest of another value."""
    rests = torch.arange(
        -(2 ** (15 if rest_dtype is torch.int16 else 7)), 2 ** (15 if rest_dtype is torch.int16 else 7)
    )
    for written in (0.0, -0.0, 1.0, -1.5, 2.0**-126, 2.0**-133, 1e-30, -3e38):
        weights = torch.full(rests.shape, written).to(BF16)
        together = kernels.join(weights, rests.to(rest_dtype))
        again, _ = kernels.split(together, rest_dtype)
        assert torch.equal(again.view(torch.int16), weights.view(torch.int16)), written


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


def beside_masters(ops, name, values, grads, rest_dtype, layout=torch.clone, **more):
    """One step of split parameters, and one of the same in float32 from the same states: bit for bit, also in what they leave."""
    states = [[torch.rand_like(x) + 0.1 for x in values] for _ in range(2)]
    twins = [[x.clone() for x in state] for state in states]
    split = [kernels.split(x, rest_dtype) for x in values]
    masters = [kernels.join(*pair) for pair in split]
    weights, rests = [layout(w) for w, _ in split], [layout(r) for _, r in split]
    take_step(ops, name, grads, weights, states, rests, **more)
    take_step(ops, name, grads, masters, twins, None, **more)
    assert all(torch.equal(a, b) for pair in zip(states, twins) for a, b in zip(*pair))
    expected = [kernels.join(*kernels.split(x, rest_dtype)) for x in masters]
    for w, r, x in zip(weights, rests, expected):
        assert torch.equal(w.view(torch.int16), kernels.split(x, rest_dtype)[0].view(torch.int16))
        assert torch.equal(bits_of(kernels.join(w, r)), bits_of(x))


@pytest.mark.parametrize("rest_dtype", [torch.int16, torch.int8])
@pytest.mark.parametrize("sizes", [SIZES, LONG], ids=["short", "long"])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_split_parameters_is_that_of_their_float32_values(ops, device, name, sizes, rest_dtype):
    values = [torch.randn(size).to(device) for size in sizes]
    for grad_dtype in (BF16, F32, F16)[: 1 if sizes is LONG else 3]:
        grads = [torch.randn(size).to(device, grad_dtype) for size in sizes]
        beside_masters(ops, name, values, grads, rest_dtype)


@pytest.mark.parametrize("rest_dtype", [torch.int16, torch.int8])
def test_every_class_of_values_goes_through_a_step(ops, device, rest_dtype):
    """Ties, carries into the exponent, subnormals, infinities and NaNs, and what a step of nothing leaves of them."""
    patterns = chosen_patterns()
    values = values_of(patterns[torch.randperm(len(patterns))[:200_003]]).to(device)
    beside_masters(ops, "sgd", [values], [torch.zeros_like(values)], rest_dtype, lr=0.0)
    values = values.nan_to_num(0.5).clamp(-1e30, 1e30)
    beside_masters(ops, "adamw", [values], [torch.randn_like(values)], rest_dtype)


def every_second(x):
    whole = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1])
    return whole[..., ::2].copy_(x)


def misaligned(x):
    return x.new_zeros(x.numel() + 1)[1:].view(x.shape).copy_(x)


@pytest.mark.parametrize("rest_dtype", [torch.int16, torch.int8])
@pytest.mark.parametrize("layout", [every_second, misaligned, lambda x: x.clone(memory_format=torch.channels_last)])
def test_split_parameters_lie_as_they_like(ops, device, layout, rest_dtype):
    values = [torch.randn(2, 3, 5, 7).to(device), torch.randn(4, 8, 9, 33).to(device)]
    beside_masters(ops, "adamw", values, [torch.randn_like(x) for x in values], rest_dtype, layout)


@pytest.mark.parametrize("rest_dtype", [torch.int16, torch.int8])
@pytest.mark.parametrize("name", STEPS)
def test_found_inf_leaves_split_parameters_alone(ops, device, name, rest_dtype):
    weights, rests = kernels.split(torch.randn(1025).to(device), rest_dtype)
    states = [[torch.rand(1025, device=device)] for _ in range(2)]
    before = [x.clone() for x in (weights, rests, *states[0], *states[1])]
    gradient = torch.full((1025,), float("nan"), device=device)
    take_step(ops, name, [gradient], [weights], states, [rests], found_inf=torch.ones(1, device=device))
    assert all(torch.equal(a, b) for a, b in zip((weights, rests, *states[0], *states[1]), before))
    beside_masters(
        ops,
        name,
        [torch.randn(9).to(device)],
        [torch.randn(9).to(device)],
        rest_dtype,
        found_inf=torch.zeros(1).to(device),
    )


def test_split_parameters_and_others_in_one_call(ops, device):
    values = [torch.randn(33).to(device) for _ in range(3)]
    grads = [torch.randn(33).to(device, BF16) for _ in range(3)]
    states = [[torch.rand(33, device=device) for _ in range(3)] for _ in range(2)]
    twins = [[x.clone() for x in state] for state in states]
    weights, rests = kernels.split(values[1], torch.int16)
    masters = [x.clone() for x in values]
    lower = [torch.empty(33, dtype=BF16, device=device) for _ in range(3)]
    params, low = [values[0], weights, values[2]], [lower[0], rests, lower[2]]
    take_step(ops, "adamw", grads, params, states, low)
    take_step(ops, "adamw", grads, masters, twins, None)
    assert torch.equal(params[0], masters[0]) and torch.equal(params[2], masters[2])
    assert torch.equal(kernels.join(weights, rests), masters[1])
    assert torch.equal(lower[0], masters[0].to(BF16)) and torch.equal(lower[2], masters[2].to(BF16))


@pytest.mark.parametrize("name", STEPS)
def test_the_rest_of_what_is_no_bfloat16_is_refused(ops, device, name):
    for dtype in (F32, F16):
        params, rests = [torch.ones(3, dtype=dtype, device=device)], [torch.zeros(3, dtype=torch.int16, device=device)]
        states = [[torch.ones(3, device=device)] for _ in range(2)]
        with pytest.raises(RuntimeError, match=r"lower\[0\] is the rest of a split parameter"):
            take_step(ops, name, [torch.ones(3, device=device)], params, states, rests)
        assert torch.equal(params[0], torch.ones_like(params[0]))


def test_other_steps_take_no_split_parameters(ops, device):
    one = lambda: [torch.ones(3, device=device)]  # noqa: E731
    weights, rests = kernels.split(one()[0], torch.int16)
    with pytest.raises(RuntimeError, match=r"lower\[0\]"):
        ops.multi_tensor_adagrad(one(), [weights], one(), [rests], lr=0.1, eps=1e-6)
