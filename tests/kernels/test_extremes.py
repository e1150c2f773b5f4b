"""The kernels at the limits of their inputs: past 2^31 bytes, ends of buffers, odd flags, tiny numbers, NaNs, many steps."""

import math
import mmap

import pytest
import torch

from ampkit import kernels
from ampkit.apex import multi_tensor_steps
from ampkit.kernels import moments

F32, F16, BF16, F64, I16 = torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int16
CHUNK = 64 * 1024
ADAM = dict(lr=0.1, betas=(0.8, 0.95), eps=1e-6, step=3.0, decoupled=True, weight_decay=0.1)


def untouched(numel, dtype):
    """Zeros that take memory only where they are written to."""
    return torch.frombuffer(mmap.mmap(-1, numel * dtype.itemsize), dtype=dtype)


@pytest.mark.compiled("kernels")
def test_what_lies_past_two_to_the_31_bytes_is_read():
    """The largest of these offsets in bytes is no 32-bit number."""
    x = untouched(2**29 + 3 * CHUNK + 5, F32)
    x[-1], x[2**29 + 7] = 3.0, 4.0
    norm, norms = kernels.multi_tensor_unscale_l2norm([torch.ones(4), x], None, 2.0, per_tensor=True)
    assert norms.tolist() == [4.0, 10.0] and norm.item() == pytest.approx(math.sqrt(116), rel=1e-6)


@pytest.mark.emulated
def test_a_launch_has_a_block_for_each_chunk_past_two_to_the_32_elements():
    """A skipped step: its blocks find their chunks, which UBSan looks at, and touch nothing."""
    import ampkit_emulated

    x = untouched(2**32 + 1, BF16)
    launches, blocks = ampkit_emulated.launches(), ampkit_emulated.blocks()
    kernels.multi_tensor_sgd([x], [x], None, lr=0.1, found_inf=torch.ones(1))
    assert ampkit_emulated.launches() - launches == 1
    assert ampkit_emulated.blocks() - blocks == 2**32 // CHUNK + 1


@pytest.mark.parametrize("op", ["adam", "sgd"])
def test_nothing_beside_packed_moments_rests_and_weights_is_touched(ops, device, op):
    """Every size around the number that a thread takes at once, with 64 guards before and after."""
    function, count = getattr(ops, f"multi_tensor_{op}"), 2 if op == "adam" else 1
    settings = ADAM if op == "adam" else dict(lr=0.1, momentum=0.9, step=3.0)
    for size in (1, 2, 3, 4, 5, 7, 8, 9, 15, 17, 255, 256, 257, 263):
        torch.manual_seed(size)
        grad, value = torch.randn(size, device=device), torch.randn(size, device=device)
        packed = [moments.pack(grad.abs() * 0.1, i == 0) for i in range(count)]
        weight, rest = kernels.split(value, BF16)
        sources = [grad, weight, *packed, rest]
        wholes = [torch.full((x.numel() + 128,), 77, dtype=x.dtype, device=device) for x in sources]
        inner = [whole[64 : 64 + x.numel()] for whole, x in zip(wholes, sources)]
        for buffer, source in zip(inner, sources):
            buffer.copy_(source)
        positions = torch.zeros(1, device=device)
        for how in ({}, dict(positions=positions, seed=3)):
            expected = [x.clone() for x in sources]
            for lists in (inner, expected):
                function(*([x] for x in lists), **settings, **how)
            assert not torch.equal(expected[2], sources[2])
            assert all(map(torch.equal, inner, expected)), size
            for buffer, source in zip(inner, sources):
                buffer.copy_(source)
        assert all(bool((whole[:64] == 77).all()) and bool((whole[-64:] == 77).all()) for whole in wholes), size


def test_tiny_numbers_are_not_zero(ops, device):
    """Multiples of 2^-149, the least float32: results computed from them are on the same grid, and exact."""
    unit = 2.0**-149
    counts = torch.tensor([1.0, -2.0, 6.0, 1000.0, -(2.0**22), 2.0**23 + 2, 0.0], device=device).double()
    x, out = (counts * unit).float(), torch.empty(7, device=device)
    assert torch.equal(x.double(), counts * unit)
    ops.multi_tensor_scale([x], [out], 4.0)
    assert torch.equal(out.double(), counts * unit * 4)
    ops.multi_tensor_scale([x * 4], [out], torch.tensor([0.25], device=device))
    assert torch.equal(out.double(), counts * unit)
    ops.multi_tensor_axpby([x], [x.flip(0)], [out], 2.0, 1.0)
    assert torch.equal(out.double(), (counts * 2 + counts.flip(0)) * unit)
    norm, _ = ops.multi_tensor_unscale_l2norm([x], [out], 2.0)
    assert torch.equal(out.double(), counts * unit * 2)
    assert norm.item() == pytest.approx(2 * unit * counts.norm().item(), rel=1e-6)
    params, momenta = [torch.zeros(7, device=device)], [(counts * unit * 2).float()]
    ops.multi_tensor_sgd([x], params, momenta, lr=1.0, momentum=0.5)
    assert torch.equal(momenta[0].double(), counts * unit * 2) and torch.equal(params[0].double(), -counts * unit * 2)


def test_second_moments_below_the_least_normal_number_are_kept(ops, device):
    """Gradients of 2^-70: their squares are 2^-140, of which 1 - beta2 = 1/4 is 2^-142."""
    grads = [torch.full((9,), 2.0**-70, device=device)]
    params, firsts, seconds = ([torch.zeros(9, device=device)] for _ in range(3))
    rule = dict(lr=1.0, betas=(0.5, 0.75), eps=0.0, step=1.0)
    ops.multi_tensor_adam(grads, params, firsts, seconds, decoupled=True, **rule)
    assert seconds[0].tolist() == [2.0**-142] * 9
    torch.testing.assert_close(params[0], torch.full((9,), -1.0, device=device), rtol=1e-6, atol=0)
    sums, params = [torch.zeros(9, device=device)], [torch.zeros(9, device=device)]
    multi_tensor_steps.multi_tensor_adagrad(grads, params, sums, lr=1.0, eps=0.0)
    assert sums[0].tolist() == [2.0**-140] * 9
    torch.testing.assert_close(params[0], torch.full((9,), -1.0, device=device), rtol=1e-6, atol=0)


@pytest.mark.parametrize("op", ["adam", "sgd"])
def test_under_numbers_drawn_nan_and_infinity_stay_what_they_are(ops, device, op):
    """The values are weights and moments in bfloat16."""
    grads, params = torch.zeros(300, device=device), torch.ones(300, device=device, dtype=BF16)
    grads[::7], grads[1::7] = math.nan, math.inf
    states = [torch.full((300,), 0.5, device=device, dtype=BF16) for _ in range(2 if op == "adam" else 1)]
    rule = dict(betas=(0.9, 0.9), eps=1.0, decoupled=True) if op == "adam" else dict(momentum=0.9)
    drawn = dict(positions=torch.zeros(1, device=device), seed=1, round_params=True, lr=0.0, step=1.0)
    getattr(ops, f"multi_tensor_{op}")([grads], [params], *([x] for x in states), **rule, **drawn)
    for state in states:
        assert torch.equal(state.isnan(), grads.isnan()) and torch.equal(state.isinf(), grads.isinf())
        assert bool((state[grads.isinf()] > 0).all())
    assert torch.equal(params.isnan(), ~grads.isfinite())  # 0 * NaN, and 0 * infinity
    assert bool((params[grads.isfinite()] == 1.0).all())


def test_numbers_drawn_make_no_weight_infinite(ops, device):
    """Half way between bfloat16's largest number and what float32 would round to infinity."""
    largest = torch.finfo(BF16).max
    params, grads = torch.full((300,), largest, device=device, dtype=BF16), torch.full((300,), -1.0, device=device)
    params[150:] *= -1
    grads[150:] *= -1
    positions = torch.zeros(1, device=device)
    rule = dict(positions=positions, seed=1, step=1.0, round_params=True)
    ops.multi_tensor_sgd([grads], [params], None, lr=2.0**119, **rule)
    assert params.tolist() == [largest] * 150 + [-largest] * 150


@pytest.mark.parametrize("beta2", [0.999, 0.99999])
@pytest.mark.parametrize("step", [1, 10, 100_000])
@pytest.mark.parametrize("where", ["host", "device"])
def test_bias_correction_is_float64s(ops, device, where, step, beta2):
    """In float32 0.99999 is off by 2e-8, and its hundred-thousandth power by two in a thousand."""
    betas, size = (0.9, beta2), 3
    grad, param, first, second = (torch.full((size,), x, device=device) for x in (0.5, 0.0, 0.25, 0.125))
    m, v = betas[0] * 0.25 + 0.1 * 0.5, beta2 * 0.125 + (1 - beta2) * 0.25
    c1, c2 = (-math.expm1(step * math.log(beta)) for beta in betas)
    u = (m / c1) / math.sqrt(v / c2)
    count = torch.tensor([float(step)], device=device) if where == "device" else step
    settings = dict(lr=1.0, betas=betas, eps=0.0, step=count)
    ops.multi_tensor_adam([grad], [param], [first], [second], decoupled=True, **settings)
    assert (-param).tolist() == pytest.approx([u] * size, rel=1e-6)
    # NovoGrad's norm: the root of the mean of 2^2 and |g|^2 = 3/4.
    param, first = torch.zeros(size, device=device), torch.full((size,), 0.25, device=device)
    norms = torch.full((1,), 2.0, device=device)
    multi_tensor_steps.multi_tensor_novograd([grad], [param], [first], norms, **settings)
    norm = math.sqrt(beta2 * 4.0 + (1 - beta2) * 0.75) / math.sqrt(c2)
    assert (-param).tolist() == pytest.approx([(0.9 * 0.25 + 0.1 * 0.5) / c1 / norm] * size, rel=1e-6)
