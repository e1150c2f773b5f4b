"""Every multi-tensor operator, by the reference and by the extension, against float64 torch and paper arithmetic."""

import itertools
import os
import subprocess
import sys

import hypothesis
import pytest
import torch
from helpers import ScaleOnPaper, others_slow
from hypothesis import strategies

from ampkit import DynamicLossScale, kernels
from ampkit.apex import multi_tensor_steps
from ampkit.kernels import backend
from ampkit.libraries import cuda_is_emulated

F32, F16, BF16, I16 = torch.float32, torch.float16, torch.bfloat16, torch.int16
KERNEL_DTYPES = (F32, F16, BF16)
# Around the edges of a vector, a tile, a block (CPU) and a chunk (CUDA).
SIZES = (1, 3, 16, 17, 511, 513, 65535, 65536, 65537, 200_003)


def random(size, dtype, device="cpu", spread=3.0):
    """Values over many binades, subnormal float16 among them, none that overflows float16."""
    x = torch.randn(size) * torch.exp2(torch.randn(size) * spread)
    return x.clamp(-30000, 30000).to(device, dtype)


def rounded(x, dtype):
    """A float64 result as the operators return it: rounded to float32, then to the output's dtype."""
    return x.to(F32).to(dtype)


def assert_same(actual, expected):
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.nan_to_num(0.0, 1.0, -1.0), expected.nan_to_num(0.0, 1.0, -1.0))
    assert torch.equal(actual.isinf(), expected.isinf())


def test_assert_same_can_fail():
    with pytest.raises(AssertionError):
        assert_same(torch.tensor([1.0]), torch.tensor([1.0000001]))
    with pytest.raises(AssertionError):
        assert_same(torch.tensor([float("inf")]), torch.tensor([1.0]))


@pytest.mark.parametrize("source, target", list(itertools.product(KERNEL_DTYPES, repeat=2)))
def test_scale_rounds_the_float32_product(ops, device, source, target):
    inputs = [random(size, source, device) for size in SIZES]
    outputs = [torch.full_like(x, 7.0, dtype=target) for x in inputs]
    found_inf = torch.zeros(1, device=device)
    ops.multi_tensor_scale(inputs, outputs, 1 / 3, found_inf)
    factor = torch.tensor(1 / 3, dtype=F32, device=device).double()
    for x, out in zip(inputs, outputs):
        assert_same(out, rounded(x.double() * factor, target))
    assert found_inf.item() == 0.0


@pytest.mark.parametrize("dtypes", list(itertools.product(KERNEL_DTYPES, repeat=3)))
def test_axpby_rounds_each_float32_step(ops, device, dtypes):
    xs, ys = ([random(size, dtype, device) for size in SIZES[:6]] for dtype in dtypes[:2])
    outputs = [torch.empty_like(x, dtype=dtypes[2]) for x in xs]
    ops.multi_tensor_axpby(xs, ys, outputs, 0.3, -1.7)
    a, b = (torch.tensor(value, dtype=F32, device=device).double() for value in (0.3, -1.7))
    for x, y, out in zip(xs, ys, outputs):
        ax, by = (x.double() * a).to(F32), (y.double() * b).to(F32)
        assert_same(out, rounded(ax.double() + by.double(), dtypes[2]))


@pytest.mark.parametrize("dtype", (F16, BF16))
def test_join_takes_any_rest_beside_any_weight(ops, device, dtype):
    """The rests were made for other weights: a script has written to them."""
    bits = torch.arange(-(2**15), 2**15)
    rests = torch.tensor([-(2**15), -(2**14) - 1, -(2**14), -1, 1, 2**14 - 1, 2**14, 2**15 - 1, 12345, -12345])
    bits, rests = (one.flatten() for one in torch.meshgrid(bits, rests, indexing="ij"))
    weights, out = bits.to(I16).view(dtype).to(device), torch.full((len(bits),), 7.0, device=device)
    ops.multi_tensor_join([weights], [rests.to(I16).to(device)], [out])
    magnitude, infinity = bits & 0x7FFF, 0x7C00 if dtype is F16 else 0x7F80
    if dtype is F16:  # as wide as half a unit, but beside the least weight
        rests = torch.where(magnitude > 1, rests.clamp(-(2**14), 2**14 - 1), rests)
    code = magnitude * 2 ** (15 if dtype is F16 else 16) + torch.where(
        (magnitude > 0) & (magnitude < infinity), rests, 0
    )
    # A float with 5 bits of exponent and 25 of fraction, or float32's own 8 and 23; what float32 lacks of the former is cut off.
    fraction, bias = (25, 15) if dtype is F16 else (23, 127)
    exponent, digits = code >> fraction, code & (2**fraction - 1)
    digits = torch.where(exponent > 0, digits + 2**fraction, digits).double()
    expected = digits * torch.exp2(exponent.clamp(min=1).double() - bias - fraction)
    nearest = expected.to(F32)
    expected = torch.where(nearest.double() > expected, torch.nextafter(nearest, torch.zeros(())), nearest)
    expected = torch.where(magnitude < infinity, expected, torch.where(magnitude > infinity, torch.nan, torch.inf))
    assert_same(out, torch.where(bits < 0, -expected, expected).to(device))
    assert torch.equal(torch.signbit(out[~out.isnan()]), torch.signbit(weights[~out.isnan()]))


@pytest.mark.parametrize("per_tensor", [False, True])
def test_l2norm_of_mixed_dtypes(ops, device, per_tensor):
    tensors = [random(size, dtype, device) for size, dtype in zip(SIZES, itertools.cycle(KERNEL_DTYPES))]
    norm, norms = ops.multi_tensor_l2norm(tensors, per_tensor)
    expected = torch.stack([x.double().norm() for x in tensors])
    torch.testing.assert_close(norm, expected.norm().reshape(1).to(F32), rtol=1e-6, atol=0)
    torch.testing.assert_close(norms, expected.to(F32) if per_tensor else expected[:0].to(F32), rtol=1e-6, atol=0)


@pytest.mark.parametrize("magnitude", [1e-30, 1e30])
def test_l2norm_survives_squares_outside_float32(ops, device, magnitude):
    norm, _ = ops.multi_tensor_l2norm([torch.full((4,), magnitude, device=device), torch.zeros(5, device=device)])
    torch.testing.assert_close(norm.cpu(), torch.tensor([2 * magnitude]))


@pytest.mark.parametrize("dtype", (F32, BF16))
@pytest.mark.parametrize("magnitude", [1e-30, 1e30])
def test_unscale_l2norm_in_place_of_squares_outside_float32(ops, device, dtype, magnitude):
    x = torch.full((5000,), magnitude, dtype=dtype, device=device)
    expected = 5000**0.5 * x[0].item() / 2
    found_inf = torch.zeros(1, device=device)
    norm, _ = ops.multi_tensor_unscale_l2norm([x], [x], 0.5, found_inf)
    torch.testing.assert_close(norm.cpu(), torch.tensor([expected]), rtol=1e-6, atol=0)
    assert found_inf.item() == 0.0
    assert_same(x, torch.full_like(x, magnitude) * 0.5)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_l2norm_of_non_finite_values_is_not_finite(ops, device, value):
    norm, norms = ops.multi_tensor_l2norm([torch.ones(3, device=device), torch.tensor([1, value], device=device)], True)
    assert not norm.isfinite().any() and norms.isfinite().tolist() == [True, False]


def test_l2norm_of_a_long_tensor_keeps_its_digits(ops, device):
    # A float32 sum stops growing at 2^24 ones.
    norm, _ = ops.multi_tensor_l2norm([torch.ones(1 << 25, dtype=BF16, device=device)])
    torch.testing.assert_close(norm.cpu(), torch.tensor([(1 << 25) ** 0.5]))


def test_a_norm_in_plain_torch_is_few_launches_on_a_gpu():
    """In pieces, as on the CPU, a weight of 65 M elements would take 16,000 launches. The meta device represents a GPU."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    with Count() as count:
        kernels.multi_tensor_l2norm([torch.empty(2**26, device="meta"), torch.empty(3, device="meta")], True)
    assert count.calls < 50


SPOTS = [
    ("first", 0), ("last of a vector", 15), ("tile edge", 511), ("next tile", 512),
    ("block edge", 65535), ("next block", 65536), ("tail", 70_000),
]  # fmt: skip


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("spot", [index for _, index in SPOTS], ids=[name for name, _ in SPOTS])
def test_found_inf_wherever_the_value_hides(ops, device, dtype, value, spot):
    clean = random(70_001, dtype, device)
    planted = clean.clone()
    planted[spot] = value
    for where in range(3):
        inputs = [clean, clean, clean]
        inputs[where] = planted
        outputs = [torch.empty_like(x) for x in inputs]
        found_inf = torch.zeros(1, device=device)
        ops.multi_tensor_scale(inputs, outputs, 0.5, found_inf)
        assert found_inf.item() == 1.0
        for x, out in zip(inputs, outputs):  # written all the same
            assert_same(out, x * 0.5)


def test_found_inf_looks_at_inputs_and_sticks(ops, device):
    found_inf = torch.zeros(1, device=device)
    big = torch.tensor([60000.0], dtype=F16, device=device)
    out = torch.empty_like(big)
    ops.multi_tensor_scale([big], [out], 4.0, found_inf)  # the output overflows, the input is finite
    assert found_inf.item() == 0.0 and out.item() == float("inf")
    ops.multi_tensor_scale([out], [big], 1.0, found_inf)
    assert found_inf.item() == 1.0
    ops.multi_tensor_scale([torch.ones(3, device=device)], [torch.ones(3, device=device)], 1.0, found_inf)
    assert found_inf.item() == 1.0


@pytest.mark.parametrize("arg_to_check, sees_x, sees_y", [(-1, 1, 1), (0, 1, 0), (1, 0, 1)])
def test_axpby_checks_the_argument_it_is_told_to(ops, device, arg_to_check, sees_x, sees_y):
    clean, bad = torch.ones(20, device=device), torch.ones(20, device=device)
    bad[19] = float("nan")
    for x, y, expected in [(bad, clean, sees_x), (clean, bad, sees_y), (clean, clean, 0)]:
        found_inf = torch.zeros(1, device=device)
        ops.multi_tensor_axpby([x], [y], [torch.empty_like(x)], 1.0, 1.0, found_inf, arg_to_check)
        assert found_inf.item() == expected


def test_in_place(ops, device):
    x = [random(10_000, dtype, device) for dtype in KERNEL_DTYPES]  # more than a block takes at once
    expected = [rounded(t.double() * 0.75, t.dtype) for t in x]
    ops.multi_tensor_scale(x, x, 0.75)
    for tensor, value in zip(x, expected):
        assert_same(tensor, value)
    doubled = [(t.float() * 2).to(t.dtype) for t in x]
    ops.multi_tensor_axpby(x, x, x, 1.0, 1.0)
    for tensor, value in zip(x, doubled):
        assert_same(tensor, value)


def channels_last(device):
    return torch.randn(2, 3, 5, 7, device=device).to(memory_format=torch.channels_last)


LAYOUTS = {
    "channels last": lambda d: (channels_last(d), channels_last(d)),
    "channels last to contiguous": lambda d: (channels_last(d), torch.empty(2, 3, 5, 7, device=d)),
    "contiguous to channels last": lambda d: (torch.randn(2, 3, 5, 7, device=d), channels_last(d)),
    "transposed": lambda d: (torch.randn(9, 11, device=d).t(), torch.empty(9, 11, device=d).t()),
    "every second": lambda d: (torch.randn(100, device=d)[::2], torch.empty(100, device=d)[1::2]),
    "expanded input": lambda d: (torch.randn(1, 5, device=d).expand(4, 5), torch.empty(4, 5, device=d)),
    "misaligned": lambda d: (torch.randn(1001, device=d)[1:], torch.empty(1003, device=d)[3:]),
    "misaligned halves": lambda d: (torch.randn(1001, device=d).half()[1:], torch.empty(1003, device=d).bfloat16()[3:]),
    "scalar": lambda d: (torch.randn((), device=d), torch.empty((), device=d)),
    "empty": lambda d: (torch.randn(0, 3, device=d), torch.empty(0, 3, device=d)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(ops, device, layout):
    x, out = LAYOUTS[layout](device)
    found_inf = torch.zeros(1, device=device)
    ops.multi_tensor_scale([torch.ones(2, device=device), x], [torch.ones(2, device=device), out], 0.5, found_inf)
    assert_same(out, (x.float() * 0.5).to(out.dtype))
    ops.multi_tensor_axpby([x], [x], [out], 0.5, 2.0)
    assert_same(out, (x.float() * 0.5 + x.float() * 2.0).to(out.dtype))
    norm, _ = ops.multi_tensor_l2norm([x])
    torch.testing.assert_close(norm, x.double().norm().reshape(1).to(F32), rtol=1e-6, atol=0)
    half, _ = ops.multi_tensor_unscale_l2norm([x], [out], 0.5)
    torch.testing.assert_close(half, norm / 2, rtol=1e-6, atol=0)
    assert_same(out, (x.float() * 0.5).to(out.dtype))


def lying_like(tensor, dtype):
    """Zeros with the strides of ``tensor``, but without repeated elements, which cannot be written to."""
    if any(stride == 0 for stride in tensor.stride()):
        return torch.zeros(tensor.shape, dtype=dtype, device=tensor.device)
    place = torch.zeros(tensor.untyped_storage().nbytes() // tensor.itemsize, dtype=dtype, device=tensor.device)
    return place.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@pytest.mark.parametrize("dtype", (F16, BF16))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_weights_and_rests(ops, device, layout, dtype):
    x, out = LAYOUTS[layout](device)
    for like in (x, out):
        weights, rests = lying_like(like, dtype), lying_like(like, I16)
        ops.multi_tensor_split([x], [weights], [rests])
        expected = kernels.split(x.float(), dtype)
        assert torch.equal(weights.view(I16), expected[0].view(I16)) and torch.equal(rests, expected[1])
        ops.multi_tensor_join([weights], [rests], [out.fill_(7.0)])
        assert_same(out, kernels.join(*expected).to(out.dtype))


def test_writing_to_a_view_leaves_the_rest_alone(ops, device):
    whole = torch.zeros(100, device=device)
    ops.multi_tensor_scale([torch.ones(50, device=device)], [whole[::2]], 3.0)
    assert whole.tolist() == [3.0, 0.0] * 50


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_what_lies_beside_a_slice_is_left_alone(ops, device, dtype):
    """Slices that begin and end within the 8 or 16 elements that a kernel takes at once."""
    for start, size in itertools.product((0, 1, 8), (1, 7, 8, 9, 15, 17)):
        whole = torch.full((40,), 7.0, dtype=dtype, device=device)
        ops.multi_tensor_scale([torch.ones(size, device=device)], [whole[start : start + size]], 3.0)
        assert whole.tolist() == [7.0] * start + [3.0] * size + [7.0] * (40 - start - size), (start, size)
        if dtype is F32:
            continue
        # 2^-16 of the last place of 3 in bfloat16, 2^-6; 4 units of 2^-15 of the one in float16, 2^-9.
        rests, value, rest = torch.full((40,), 7, dtype=I16, device=device), 3.0 + 2.0**-22, 1 if dtype is BF16 else 4
        here = slice(start, start + size)
        ops.multi_tensor_split([torch.full((size,), value, device=device)], [whole[here]], [rests[here]])
        assert whole.tolist() == [7.0] * start + [3.0] * size + [7.0] * (40 - start - size), (start, size)
        assert rests.tolist() == [7] * start + [rest] * size + [7] * (40 - start - size), (start, size)
        joined = torch.full((40,), 7.0, device=device)
        ops.multi_tensor_join([whole[here]], [rests[here]], [joined[here]])
        assert joined.tolist() == [7.0] * start + [value] * size + [7.0] * (40 - start - size), (start, size)


def test_empty_lists_and_empty_tensors(ops, device):
    found_inf = torch.zeros(1, device=device)
    ops.multi_tensor_scale([], [], 2.0, found_inf)
    ops.multi_tensor_axpby([], [], [], 1.0, 1.0, found_inf)
    ops.multi_tensor_join([], [], [])
    ops.multi_tensor_split([], [], [])
    norm, norms = ops.multi_tensor_l2norm([], per_tensor=True)
    assert norm.tolist() == [0.0] and norms.shape == (0,)
    empty, one = torch.empty(0, device=device), torch.ones(1, device=device)
    for row in ([empty], [empty, one], [one, empty], [empty, one, empty, empty, one, empty]):
        outputs = [torch.empty_like(x) for x in row]
        ops.multi_tensor_scale(row, outputs, 2.0, found_inf)
        assert [out.tolist() for out in outputs] == [[2.0] * x.numel() for x in row]
        norm, norms = ops.multi_tensor_l2norm(row, per_tensor=True)
        assert norms.tolist() == [float(x.numel()) for x in row]
        weights, rests = ([torch.zeros_like(x, dtype=dtype) for x in row] for dtype in (F16, I16))
        ops.multi_tensor_split([x + 2.0**-23 for x in row], weights, rests)
        ops.multi_tensor_join(weights, rests, outputs)
        assert [out.tolist() for out in outputs] == [[1.0 + 2.0**-23] * x.numel() for x in row]
    assert found_inf.item() == 0.0


def test_five_thousand_tensors(ops, device):
    sizes = [i % 7 for i in range(5000)]
    inputs = [torch.full((size,), float(i % 100), dtype=BF16, device=device) for i, size in enumerate(sizes)]
    outputs = [torch.empty(size, device=device) for size in sizes]
    found_inf = torch.zeros(1, device=device)
    ops.multi_tensor_scale(inputs, outputs, 2.0, found_inf)
    assert all(out.tolist() == [2.0 * (i % 100)] * size for i, (out, size) in enumerate(zip(outputs, sizes)))
    assert found_inf.item() == 0.0
    weights, rests = ([torch.empty(size, dtype=dtype, device=device) for size in sizes] for dtype in (F16, I16))
    values, joined = [out + 2.0**-14 for out in outputs], [torch.empty_like(out) for out in outputs]
    ops.multi_tensor_split(values, weights, rests)
    ops.multi_tensor_join(weights, rests, joined)
    assert all(map(torch.equal, joined, values))
    inputs[4999][0] = float("inf")
    first_bad = torch.full((1,), kernels.NO_BAD, device=device)
    ops.multi_tensor_scale(inputs, outputs, 2.0, found_inf, first_bad=first_bad)
    assert found_inf.item() == 1.0 and first_bad.item() == 4999
    norm, norms = ops.multi_tensor_l2norm(outputs[:4999], per_tensor=True)
    expected = torch.stack([out.double().norm() for out in outputs[:4999]])
    torch.testing.assert_close(norms, expected.to(F32), rtol=1e-6, atol=0)
    torch.testing.assert_close(norm, expected.norm().to(F32)[None], rtol=1e-6, atol=0)


def test_the_norm_of_zeros_is_zero_whatever_memory_held(ops, device):
    for _ in range(3):
        garbage = torch.full(
            (64,), 3.0, dtype=torch.float64, device=device
        )  # where the sums of as many blocks may come to lie
        zeros = [torch.zeros(5, device=device) for _ in range(64)]
        del garbage
        norm, norms = ops.multi_tensor_l2norm(zeros, per_tensor=True)
        assert norm.item() == 0.0 and not norms.any()


def test_float64_and_complex_join_the_list(ops, device):
    inputs = [
        torch.tensor([1 / 3], dtype=torch.float64, device=device),
        torch.ones(2, device=device),
        torch.tensor([1 + 2j], device=device),
        torch.ones(3, dtype=BF16, device=device),
    ]
    outputs = [torch.empty_like(x) for x in inputs]
    found_inf = torch.zeros(1, device=device)
    ops.multi_tensor_scale(inputs, outputs, 0.1, found_inf)
    assert outputs[0].item() == (1 / 3) * 0.1
    assert outputs[1].tolist() == [torch.tensor(0.1).item()] * 2
    assert torch.equal(outputs[2], inputs[2] * 0.1)
    assert found_inf.item() == 0.0
    norm, norms = ops.multi_tensor_l2norm(inputs, per_tensor=True)
    expected = torch.tensor([1 / 3, 2**0.5, 5**0.5, 3**0.5], dtype=torch.float64)
    torch.testing.assert_close(norms.cpu(), expected.to(F32), rtol=1e-6, atol=0)
    torch.testing.assert_close(norm.cpu(), expected.norm().reshape(1).to(F32), rtol=1e-6, atol=0)
    ops.multi_tensor_axpby(inputs, inputs, outputs, 1.0, 1.0, found_inf)
    assert torch.equal(outputs[2], inputs[2] * 2)
    inputs[2][0] = complex(0, float("inf"))
    ops.multi_tensor_scale(inputs, outputs, 0.1, found_inf)
    assert found_inf.item() == 1.0


def test_lists_of_several_dtypes_copy_nothing_from_the_host(ops, device, monkeypatch):
    """Indices are made on the device: a CUDA graph that is being captured cannot hold a copy from the host."""
    float64 = dict(dtype=torch.float64, device=device)
    tensors = [
        torch.ones(2, **float64) if i in (0, 3, 4, 7) else torch.full((2,), i + 1.0, device=device) for i in range(9)
    ]
    outputs = [torch.zeros_like(x) for x in tensors]
    found_inf, first_bad = torch.zeros(1, device=device), torch.full((1,), kernels.NO_BAD, device=device)
    lists = [[x.clone() for x in tensors] for _ in range(3)]
    norms = torch.arange(1.0, 10.0, device=device)
    third = torch.full((1,), 1 / 3, device=device)

    def refuse(*args, **kwargs):
        raise AssertionError("a tensor was made of numbers on the host")

    monkeypatch.setattr(torch, "tensor", refuse)
    monkeypatch.setattr(torch, "as_tensor", refuse)
    ops.multi_tensor_scale(tensors, outputs, third, found_inf, first_bad)
    _, each = ops.multi_tensor_l2norm(tensors, per_tensor=True)
    tensors[5][1] = float("inf")
    ops.multi_tensor_unscale_l2norm(tensors, None, third, found_inf, True, first_bad)
    rule = dict(lr=1.0, betas=(0.0, 0.0), eps=0.0, step=1, bias_correction=False, grad_norms=norms)
    multi_tensor_steps.multi_tensor_novograd(*lists, norms.clone(), **rule)
    monkeypatch.undo()
    assert found_inf.item() == 1.0 and first_bad.item() == 5
    values = [1.0 if x.dtype is torch.float64 else i + 1.0 for i, x in enumerate(tensors)]
    assert each.tolist() == pytest.approx([value * 2**0.5 for value in values])
    assert [out[0].item() for out in outputs] == pytest.approx([value / 3 for value in values])
    # A gradient over its tensor's norm, taken from a parameter that is equal to the gradient.
    assert [p[0].item() for p in lists[1]] == pytest.approx([value - value / (i + 1) for i, value in enumerate(values)])


@pytest.mark.parametrize("scale", [1.0, 0.5, [0.5]], ids=["1", "a half", "a tensor"])
def test_lazily_conjugated_tensors_are_read_and_written(ops, device, scale):
    scale = torch.tensor(scale, device=device) if isinstance(scale, list) else scale
    lazy = torch.tensor([3 + 4j, -1j], device=device).conj()
    outputs = [torch.empty(2, dtype=torch.complex64, device=device), torch.empty_like(lazy).conj()]
    assert lazy.is_conj() and outputs[1].is_conj()
    found_inf = torch.zeros(1, device=device)
    factor = float(scale)
    ops.multi_tensor_scale([lazy, lazy], outputs, scale, found_inf)
    assert [out.tolist() for out in outputs] == [[factor * (3 - 4j), factor * 1j]] * 2
    norm, _ = ops.multi_tensor_l2norm([lazy])
    assert norm.item() == pytest.approx(26**0.5)
    ops.multi_tensor_axpby([lazy], [lazy], outputs[1:], 1.0, 1.0, found_inf)
    assert outputs[1].tolist() == [6 - 8j, 2j] and found_inf.item() == 0.0
    ops.multi_tensor_scale([lazy], [lazy], scale)
    assert lazy.tolist() == [factor * (3 - 4j), factor * 1j]
    lazy[0] = complex(0.0, float("inf"))
    ops.multi_tensor_unscale_l2norm([lazy], None, scale, found_inf)
    assert found_inf.item() == 1.0


def test_a_complex_number_is_written_to_no_real_one(ops, device):
    out = torch.ones(2, device=device)
    with pytest.raises(RuntimeError, match=r"outputs\[0\] is torch.float32 beside torch.complex64 in inputs"):
        ops.multi_tensor_scale([torch.ones(2, device=device) * 1j], [out], 5.0)
    assert out.tolist() == [1.0, 1.0]


def test_wrong_found_inf_and_arg_to_check_are_refused(ops, device):
    x = [torch.ones(2, device=device)]
    with pytest.raises(RuntimeError, match=r"found_inf is .* of shape \[2\]"):
        ops.multi_tensor_scale(x, x, 1.0, torch.zeros(2, device=device))
    with pytest.raises(RuntimeError, match="arg_to_check is 3"):
        ops.multi_tensor_axpby(x, x, x, 1.0, 1.0, None, 3)


def test_parameters_are_written_and_their_versions_move(ops, device):
    parameter = torch.nn.Parameter(torch.ones(3, device=device))
    before = parameter._version
    ops.multi_tensor_scale([torch.ones(3, device=device)], [parameter], 2.0)
    assert parameter.tolist() == [2.0] * 3 and parameter.requires_grad and parameter.is_leaf
    assert parameter._version > before
    rest, values = torch.zeros(3, dtype=I16, device=device), torch.full((3,), 1.0 + 2.0**-20, device=device)
    weight = torch.nn.Parameter(torch.zeros(3, dtype=BF16, device=device))
    versions = [one._version for one in (weight, rest, parameter)]
    ops.multi_tensor_split([values], [weight], [rest])
    assert weight._version > versions[0] and rest._version > versions[1] and weight.requires_grad and weight.is_leaf
    versions = [one._version for one in (weight, rest, parameter)]
    ops.multi_tensor_join([weight], [rest], [parameter])
    assert torch.equal(parameter, values) and parameter._version > versions[2]
    assert [weight._version, rest._version] == versions[:2], "they were only read"


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.cuda)], indirect=True)
def test_devices_may_mix(ops, device):
    inputs = [torch.ones(2), torch.ones(3, device=device), torch.tensor([float("inf")], device=device), torch.ones(4)]
    outputs = [torch.empty_like(x) for x in inputs]
    for home in ("cpu", device):
        found_inf = torch.zeros(1, device=home)
        ops.multi_tensor_scale(inputs, outputs, 2.0, found_inf)
        assert found_inf.item() == 1.0
    _, norms = ops.multi_tensor_l2norm([inputs[0], inputs[1], inputs[3]], per_tensor=True)
    torch.testing.assert_close(norms, torch.tensor([2.0, 3.0, 4.0]).sqrt())
    values = [torch.full((i + 2,), 1.0 + 2.0**-20, device=x.device) for i, x in enumerate(inputs)]
    weights, rests = ([torch.zeros_like(x, dtype=dtype) for x in values] for dtype in (BF16, I16))
    ops.multi_tensor_split(values, weights, rests)
    outputs = [torch.zeros_like(x) for x in values]
    ops.multi_tensor_join(weights, rests, outputs)
    assert all(map(torch.equal, outputs, values))
    assert all(weight.eq(1.0).all() and rest.eq(8).all() for weight, rest in zip(weights, rests))


@pytest.mark.compiled("kernels")
def test_opcheck(device):
    if device.type == "cuda" and not kernels.implementation().cuda:
        pytest.skip("no CUDA kernels")
    x = [torch.randn(5, device=device), torch.randn(3, 4, device=device).half()]
    y = [torch.randn(5, device=device).bfloat16(), torch.randn(3, 4, device=device)]
    out = [torch.empty_like(t) for t in y]
    found_inf = torch.zeros(1, device=device)
    ops = torch.ops.ampkit
    number, first_bad = torch.ones(1, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    for flag, first, tensor in ((found_inf, first_bad, number), (None, None, None)):
        torch.library.opcheck(ops.multi_tensor_scale.default, (x, out, 0.5, tensor, flag, first))
        torch.library.opcheck(ops.multi_tensor_axpby.default, (x, y, out, 0.5, tensor, 2.0, tensor, -1, flag, first))
    weights, rests = ([torch.zeros_like(t, dtype=dtype) for t in x] for dtype in (BF16, I16))
    torch.library.opcheck(ops.multi_tensor_split.default, (x, weights, rests))
    torch.library.opcheck(ops.multi_tensor_join.default, (weights, rests, out))
    for per_tensor in (False, True):
        for outputs in (out, []):
            arguments = (x, outputs, 0.5, number, per_tensor, found_inf, first_bad)
            torch.library.opcheck(ops.multi_tensor_unscale_l2norm.default, arguments)
    rule = (2.0, 0.5, 2000, 1, 0.0, 1e9)
    torch.library.opcheck(ops.update_scale.default, (scale_state(2.0, device=device), found_inf, *rule))


def test_face_traces_without_graph_breaks(ops, device):
    def step(grads, masters, found_inf):
        kernels.multi_tensor_scale(grads, masters, 0.5, found_inf)
        kernels.multi_tensor_axpby(masters, masters, masters, 1.0, 1.0, found_inf)
        rests = [torch.zeros_like(grad, dtype=I16) for grad in grads]
        kernels.multi_tensor_split(masters, grads, rests)
        kernels.multi_tensor_join(grads, rests, masters)
        return kernels.multi_tensor_l2norm(masters, True)

    grads = [torch.ones(4, dtype=BF16, device=device), torch.ones(9, dtype=BF16, device=device)]
    masters = [torch.zeros(4, device=device), torch.zeros(9, device=device)]
    torch.compiler.reset()
    try:
        _, norms = torch.compile(step, fullgraph=True, backend="aot_eager")(
            grads, masters, torch.zeros(1, device=device)
        )
    finally:
        torch.compiler.reset()
    assert norms.tolist() == [2.0, 3.0]
    assert all(master.eq(1.0).all() for master in masters)


@pytest.mark.cpu_kernels
@pytest.mark.compiled("kernels")
@pytest.mark.parametrize("capability", others_slow("avx2", of=["baseline", "avx2", "avx512"]))
def test_every_instruction_set_gives_the_same_bits(capability):
    """Each set runs in a process of its own, on all float16 and bfloat16 values and many float32 ones."""
    script = """
import torch
from ampkit import kernels
assert kernels.implementation().name == "extension", kernels.implementation().why
torch.manual_seed(0)
bits = torch.arange(-32768, 32768, dtype=torch.int16)
wide = torch.randn(65537) * torch.exp2(torch.randn(65537) * 12)
sources = [bits.view(torch.float16), bits.view(torch.bfloat16), wide]
for x in sources:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for scale in (1.0, 0.3, 2.0**-16):
            out = torch.empty_like(x, dtype=dtype)
            kernels.multi_tensor_scale([x], [out], scale)
            expected = (x.float() * torch.tensor(scale)).to(dtype)
            assert torch.equal(out.isnan(), expected.isnan())
            assert torch.equal(out[~out.isnan()], expected[~out.isnan()]), (x.dtype, dtype, scale)
for dtype in (torch.float16, torch.bfloat16):
    for x in sources:
        weights, rests = torch.empty_like(x, dtype=dtype), torch.empty_like(x, dtype=torch.int16)
        kernels.multi_tensor_split([x], [weights], [rests])
        expected = kernels.split(x.float(), dtype)
        assert torch.equal(weights.view(torch.int16), expected[0].view(torch.int16)) and torch.equal(rests, expected[1])
    for rests in (bits.roll(1), bits.roll(100), bits[torch.randperm(65536)]):
        out = torch.empty(65536)
        kernels.multi_tensor_join([bits.view(dtype)], [rests], [out])
        assert torch.equal(out.view(torch.int32), kernels.join(bits.view(dtype), rests).view(torch.int32))
clean = [x[x.isfinite()] for x in sources]
print(kernels.multi_tensor_l2norm(clean)[0].item().hex())
"""
    environment = {**os.environ, "AMPKIT_CPU_CAPABILITY": capability}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    bits = torch.arange(-32768, 32768, dtype=torch.int16)
    torch.manual_seed(0)
    sources = [bits.view(F16), bits.view(BF16), torch.randn(65537) * torch.exp2(torch.randn(65537) * 12)]
    here, _ = kernels.multi_tensor_l2norm([x[x.isfinite()] for x in sources])
    assert result.stdout.strip() == here.item().hex()


@pytest.mark.cpu_kernels
@pytest.mark.compiled("kernels")
@pytest.mark.parametrize("capability", others_slow("baseline", of=["baseline", "avx2", "avx512"]))
def test_denormals_are_flushed_where_torch_flushes_them(capability):
    """torch keeps float16's subnormals, which are normal in float32, and values that it only copies."""
    script = """
import torch
from ampkit import kernels
assert kernels.implementation().name == "extension", kernels.implementation().why
torch.set_num_threads(1)
bits = torch.arange(-32768, 32768, dtype=torch.int16)
tiny = torch.arange(-(2**22), 2**22, 127, dtype=torch.int32).view(torch.float32)
sources = [bits.view(torch.float16), bits.view(torch.bfloat16), torch.cat((tiny, torch.randn(9) * 1e-30))]
integers = {4: torch.int32, 2: torch.int16}
rests, split, joined = torch.arange(-32768, 32768, dtype=torch.int16).flip(0), {}, {}
for dtype in (torch.float16, torch.bfloat16):
    split[dtype], joined[dtype] = kernels.split(sources[2], dtype), kernels.join(bits.view(dtype), rests)
assert torch.set_flush_denormal(True)
for dtype in split:
    lists = [torch.empty_like(x) for x in split[dtype]]
    kernels.multi_tensor_split([sources[2]], lists[:1], lists[1:])
    assert all(torch.equal(x.view(torch.int16), y.view(torch.int16)) for x, y in zip(lists, split[dtype])), dtype
    out = torch.empty(65536)
    kernels.multi_tensor_join([bits.view(dtype)], [rests], [out])
    assert torch.equal(out.view(torch.int32), joined[dtype].view(torch.int32)), dtype
flushed = torch.tensor([1e-40]) * 1.0
assert flushed.view(torch.int32).item() == 0
for x in sources:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for scale in (1.0, 0.3, 2.0**-16, torch.ones(1)):
            out = torch.empty_like(x, dtype=dtype)
            kernels.multi_tensor_scale([x], [out], scale)
            wide = x.float() if isinstance(scale, float) and scale == 1.0 else x.float() * scale
            found, expected = (one.view(integers[one.itemsize]) for one in (out, wide.to(dtype)))
            assert torch.equal(found[~out.isnan()], expected[~out.isnan()]), (x.dtype, dtype, scale)
            assert torch.equal(out.isnan(), wide.isnan())
        if x.dtype is not torch.float32:
            y = torch.ones_like(x)
            kernels.multi_tensor_axpby([x], [y], [y], 0.5, 0.0)
            expected = (x.float() * 0.5 + 0.0).to(x.dtype)
            assert torch.equal(y.nan_to_num(1.0), expected.nan_to_num(1.0))
assert kernels.multi_tensor_l2norm([bits.view(torch.float16)[:1].abs() * 0 + 2.0**-24])[0].item() == 2.0**-24
"""
    environment = {**os.environ, "AMPKIT_CPU_CAPABILITY": capability}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_unscale_l2norm_is_the_norm_of_the_products(ops, device, dtype, writes):
    inputs = [random(size, dtype, device) for size in (0, *SIZES)]
    before = [x.clone() for x in inputs]
    outputs = [torch.full_like(x, 7.0, dtype=F32) for x in inputs] if writes else None
    found_inf, first_bad = torch.zeros(1, device=device), torch.full((1,), kernels.NO_BAD, device=device)
    for inv_scale in (0.125, torch.tensor([0.125], device=device)):
        norm, norms = ops.multi_tensor_unscale_l2norm(inputs, outputs, inv_scale, found_inf, True, first_bad)
        expected = torch.stack([x.double().norm() / 8 for x in inputs])
        torch.testing.assert_close(norm.double(), expected.norm().reshape(1), rtol=1e-6, atol=0)
        torch.testing.assert_close(norms.double(), expected, rtol=1e-6, atol=0)
        assert norm.dtype is norms.dtype is F32
        for x, out in zip(inputs, outputs or ()):
            assert_same(out, x.float() / 8)
    assert all(torch.equal(x, copy) for x, copy in zip(inputs, before))
    assert found_inf.item() == 0.0 and first_bad.item() == kernels.NO_BAD
    norm, norms = ops.multi_tensor_unscale_l2norm(inputs, inputs, -0.5)
    assert norms.shape == (0,)
    for x, copy in zip(inputs, before):
        assert_same(x, copy * -0.5)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("spot", [index for _, index in SPOTS], ids=[name for name, _ in SPOTS])
def test_unscale_l2norm_finds_the_value_wherever_it_hides(ops, device, dtype, value, spot):
    clean = random(70_001, dtype, device)
    planted = clean.clone()
    planted[spot] = value
    for where in range(3):
        inputs = [clean, clean, clean]
        inputs[where] = planted
        found_inf, first_bad = torch.zeros(1, device=device), torch.full((1,), kernels.NO_BAD, device=device)
        norm, _ = ops.multi_tensor_unscale_l2norm(inputs, None, 0.5, found_inf, first_bad=first_bad)
        assert found_inf.item() == 1.0 and first_bad.item() == where and not norm.isfinite().item()


def test_first_bad_is_the_smallest_index_and_only_falls(ops, device):
    tensors = [torch.ones(3, device=device) for _ in range(6)]
    for i in (2, 4):
        tensors[i][1] = float("nan")
    first_bad = torch.full((1,), kernels.NO_BAD, device=device)
    outputs = [torch.empty_like(t) for t in tensors]
    calls = {
        "scale": lambda: ops.multi_tensor_scale(tensors, outputs, 1.0, None, first_bad),
        "axpby": lambda: ops.multi_tensor_axpby(tensors, tensors, outputs, 1.0, 1.0, None, -1, first_bad),
        "norm": lambda: ops.multi_tensor_unscale_l2norm(tensors, None, None, None, False, first_bad),
    }
    for call in calls.values():
        first_bad.fill_(kernels.NO_BAD)
        call()
        assert first_bad.tolist() == [2]
        first_bad.fill_(1)
        call()
        assert first_bad.tolist() == [1]
    # The reference takes float64, the kernels the rest: the index is still the caller's.
    tensors[0], first_bad[0] = torch.ones(3, dtype=torch.float64, device=device), kernels.NO_BAD
    calls["norm"]()
    assert first_bad.tolist() == [2]
    tensors[0][0], first_bad[0] = float("inf"), kernels.NO_BAD
    calls["norm"]()
    assert first_bad.tolist() == [0]


def test_scale_and_axpby_take_numbers_from_the_device(ops, device):
    x = [random(size, BF16, device) for size in SIZES]
    out = [torch.empty_like(t, dtype=F32) for t in x]
    third = torch.tensor([1 / 3], device=device)
    ops.multi_tensor_scale(x, out, third)
    for t, o in zip(x, out):
        assert_same(o, rounded(t.double() * third.double(), F32))
    ops.multi_tensor_axpby(x, out, out, third, torch.tensor(2.0, dtype=torch.float64, device=device))
    for t, o in zip(x, out):
        product = rounded(t.double() * third.double(), F32)
        assert_same(o, product + product * 2)


def test_unscale_l2norm_of_nothing(ops):
    found_inf = torch.zeros(1)
    norm, norms = ops.multi_tensor_unscale_l2norm([], [], 0.5, found_inf, per_tensor=True)
    assert norm.tolist() == [0.0] and norms.shape == (0,) and found_inf.item() == 0.0


RULES = [
    (DynamicLossScale(init_scale=8.0, growth_interval=2), 0.25, 64.0),
    (DynamicLossScale(init_scale=8.0, growth_interval=3, hysteresis=2), 2.0**-14, 2.0**24),
    (
        DynamicLossScale(init_scale=1.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=1, hysteresis=3),
        0.5,
        32.0,
    ),
]


@pytest.mark.parametrize("rule, low, high", RULES)
def test_update_scale_is_the_rule_in_plain_numbers(ops, device, rule, low, high):
    paper = ScaleOnPaper(rule, low, high)
    state = scale_state(paper.scale, rule.hysteresis, device)
    bad = (torch.rand(400) < torch.linspace(0.05, 0.9, 400)).tolist()
    skips = in_a_row = at_floor = 0
    for overflow in [*bad, *[False] * 150]:
        skips += overflow
        in_a_row = in_a_row + 1 if overflow else 0
        at_floor = at_floor + 1 if overflow and paper.scale <= low else 0
        paper.after(overflow)
        returned = ops.update_scale(
            state,
            torch.tensor([float(overflow)], device=device),
            growth_factor=rule.growth_factor,
            backoff_factor=rule.backoff_factor,
            growth_interval=rule.growth_interval,
            hysteresis=rule.hysteresis,
            min_scale=low,
            max_scale=high,
        )
        assert returned is state
        assert (scale_in(state), state[1].item()) == (paper.scale, paper.clean)
        assert state[3:].tolist() == [skips, in_a_row, at_floor, 7]
    assert scale_in(state) == high


def test_update_scale_keeps_a_scale_set_above_the_maximum_and_never_reaches_infinity(ops, device):
    for start, high, expected in [(128.0, 64.0, 128.0), (3e38, float("inf"), 3e38), (48.0, 64.0, 64.0)]:
        state = scale_state(start, device=device)
        ops.update_scale(state, torch.zeros(1, device=device), growth_interval=1, max_scale=high)
        torch.testing.assert_close(torch.tensor(scale_in(state)), torch.tensor(expected), rtol=0, atol=0)
    for wrong in (state.float(), state[:6], state.repeat(2)[::2]):
        with pytest.raises(
            RuntimeError, match=r"update_scale: state is .*; pass a contiguous int32 tensor of shape \[7\]"
        ):
            ops.update_scale(wrong, torch.zeros(1, device=device))


def scale_state(scale, hysteresis=1, device="cpu"):
    """The words of update_scale; the last is not its own."""
    bits = torch.tensor(scale).view(torch.int32).item()
    return torch.tensor([bits, 0, hysteresis, 0, 0, 0, 7], dtype=torch.int32, device=device)


def scale_in(state):
    return state[:1].view(torch.float32).item()


@pytest.mark.compiled("kernels")
def test_kernels_on_the_cpu_wait_for_what_they_read():
    """A copy from a GPU that is not waited for has not arrived when the kernel reads it. Tensors on meta represent a GPU's."""
    waited_for = []

    class Copies(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.Tensor.to and args[0].device.type == "meta":
                waited_for.append(not (kwargs or {}).get("non_blocking", False))
                return torch.ones(1)
            return func(*args, **(kwargs or {}))

    far = torch.ones(1, device="meta")
    with Copies():
        state = kernels.update_scale(scale_state(8.0), far)
        kernels.multi_tensor_scale([torch.ones(2)], [torch.ones(2)], far)
        lists = [[torch.ones(2)] for _ in range(4)]
        rule = dict(betas=(0.9, 0.99), eps=1e-8, decoupled=True)
        kernels.multi_tensor_adam(*lists, lr=far, step=far, inv_scale=far, found_inf=far, **rule)
    assert scale_in(state) == 4.0 and waited_for == [True] * 6


def test_clip_coefficient_is_torchs():
    for max_norm in (0.5, 100.0):
        parameter = torch.nn.Parameter(torch.ones(4))
        parameter.grad = torch.tensor([3.0, 4.0, 0.0, 0.0])
        norm, _ = kernels.multi_tensor_l2norm([parameter.grad])
        clipped = parameter.grad * kernels.clip_coefficient(norm, max_norm)
        torch.nn.utils.clip_grad_norm_([parameter], max_norm)
        torch.testing.assert_close(clipped, parameter.grad, rtol=1e-6, atol=0)
    assert multi_tensor_steps.clip_factor(torch.tensor([2.0]), 0.0).item() == 1.0
    assert multi_tensor_steps.clip_factor(torch.tensor([2.0]), 0.5).item() == 0.25
    assert multi_tensor_steps.clip_factor(torch.tensor([0.5]), 2.0).item() == 1.0


@pytest.mark.compiled("kernels")
@hypothesis.settings(max_examples=100, deadline=None, derandomize=True, database=None)
@hypothesis.given(data=strategies.data())
def test_extension_agrees_with_the_reference_on_anything(data):
    dtypes = strategies.sampled_from(KERNEL_DTYPES)
    sizes = data.draw(strategies.lists(strategies.integers(0, 3000), min_size=1, max_size=6), label="sizes")
    source, other, target = (data.draw(dtypes) for _ in range(3))
    offset = data.draw(strategies.integers(0, 9), label="offset")
    numbers = strategies.sampled_from((1.0, 0.5, 1 / 3, -2.0, 2.0**-16))
    a, b = data.draw(numbers), data.draw(numbers)
    torch.manual_seed(data.draw(strategies.integers(0, 1000)))
    magnitude = data.draw(strategies.sampled_from((1.0, 1e-25, 1e25)), label="magnitude")
    xs = [(random(size + offset, F32)[offset:] * magnitude).to(source) for size in sizes]
    ys = [random(size + offset, other)[offset:] for size in sizes]
    bad = data.draw(strategies.integers(-1, len(sizes) - 1), label="bad tensor")
    if bad >= 0 and sizes[bad]:
        xs[bad][data.draw(strategies.integers(0, sizes[bad] - 1))] = data.draw(
            strategies.sampled_from((1, -1))
        ) * float("inf")
    results = []
    for devices in (frozenset(), backend.kernel_devices):
        outputs = [torch.zeros(size + offset, dtype=target)[offset:] for size in sizes]
        found_inf, first_bad = torch.zeros(1), torch.full((1,), kernels.NO_BAD)
        flags = torch.zeros(1), torch.full((1,), kernels.NO_BAD)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backend, "kernel_devices", devices)
            kernels.multi_tensor_scale(xs, outputs, a, found_inf, first_bad)
            scaled = [out.clone() for out in outputs]
            kernels.multi_tensor_axpby(xs, ys, outputs, a, b)
            norms = kernels.multi_tensor_unscale_l2norm(xs, None, a, flags[0], True, flags[1])
        assert (found_inf, first_bad) == flags
        results.append((*scaled, *outputs, found_inf, first_bad, *norms))
    lower = data.draw(strategies.sampled_from((F16, BF16)), label="dtype of weights")
    for x in xs:
        kept = kernels.split(x.float(), lower)
        weight, rest = (torch.zeros(x.numel() + offset, dtype=dtype)[offset:] for dtype in (lower, I16))
        kernels.multi_tensor_split([x], [weight], [rest])
        assert torch.equal(weight.view(I16), kept[0].view(I16)) and torch.equal(rest, kept[1])
        joined = torch.zeros(x.numel() + offset, dtype=target)[offset:]
        kernels.multi_tensor_join([weight], [rest], [joined])
        assert_same(joined, kernels.join(*kept).to(target))
    for expected, found in zip(results[0][:-2], results[1][:-2], strict=True):
        assert_same(found, expected)
    for expected, found in zip(results[0][-2:], results[1][-2:]):
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=0, equal_nan=True)


def plan(sizes, chunk=10, tensors=3):
    return torch.ops.ampkit.plan_launches(sizes, chunk, tensors).tolist()


PLANS = {
    "nothing": ([], []),
    "only empty tensors": ([0, 0], []),
    "an empty tensor last": ([10, 0], [[0, 0, 0, 0]]),
    "empty tensors take no slot": ([5, 0, 0, 0, 0, 7], [[0, 0, 0, 0], [0, 5, 1, 0]]),
    "slots run out": ([1, 1, 1, 1], [[0, 0, 0, 0], [0, 1, 1, 0], [0, 2, 2, 0], [1, 3, 0, 0]]),
    "a long tensor between short ones": (
        [5, 45, 1],
        [[0, 0, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1], [0, 1, 1, 2], [0, 1, 1, 3], [0, 1, 1, 4], [0, 2, 2, 0]],
    ),
    "a tensor ends where its chunk does": ([40, 1], [[0, 0, 0, c] for c in range(4)] + [[0, 1, 1, 0]]),
}


@pytest.mark.compiled("kernels")
@pytest.mark.parametrize("case", PLANS)
def test_launch_plan(case):
    sizes, rows = PLANS[case]
    assert plan(sizes) == rows


@pytest.mark.compiled("kernels")
def test_launch_plan_covers_every_chunk_once():
    sizes = [(i * 7919) % 2000 for i in range(5000)] + [1 << 33]
    chunk, tensors = 1 << 16, 72
    rows = plan(sizes, chunk, tensors)
    assert [(t, c) for _, t, _, c in rows] == [(t, c) for t, size in enumerate(sizes) for c in range(-(-size // chunk))]
    for _, launch in itertools.groupby(rows, key=lambda row: row[0]):
        launch = list(launch)
        assert max(slot for _, _, slot, _ in launch) < tensors
        assert len({(t, slot) for _, t, slot, _ in launch}) == len({slot for _, _, slot, _ in launch})


@pytest.mark.skipif(not cuda_is_emulated(), reason="counts launches of the emulated CUDA kernels")
def test_lists_take_few_launches():
    """A launch has room for 32,252 bytes of tensors: 944 with 34 bytes each (two lists), 528 with 61 (the five of Adam)."""
    import ampkit_emulated

    def launches(call):
        before = ampkit_emulated.launches()
        call()
        return ampkit_emulated.launches() - before

    tiny = [torch.ones(2) for _ in range(5000)]
    outputs = [torch.zeros(2) for _ in tiny]
    assert launches(lambda: kernels.multi_tensor_scale(tiny, outputs, 0.5)) == 6
    assert all(out.tolist() == [0.5, 0.5] for out in outputs)
    lists = [[torch.ones(2) for _ in range(1100)] for _ in range(4)]
    rule = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, step=1.0, decoupled=True)
    assert launches(lambda: kernels.multi_tensor_adam(*lists, **rule)) == 3
    # 944 of two lists, of which the second is not written; the norms of all tensors, and the norm of all of them.
    assert launches(lambda: kernels.multi_tensor_l2norm(tiny[:1300], per_tensor=True)) == 2 + 1 + 1


@pytest.mark.compiled("kernels")
def test_a_model_of_7_billion_parameters_is_one_launch():
    """The 291 tensors of Llama 2 7B: one launch of 102,827 blocks, where a table with an entry for each took 105."""
    layer = [4096 * 4096] * 4 + [11008 * 4096] * 3 + [4096] * 2
    sizes = [32000 * 4096, *layer * 32, 4096, 32000 * 4096]
    rows = plan(sizes, 1 << 16, 528)
    assert len(sizes) == 291 and sum(sizes) == 6_738_415_616
    assert {launch for launch, *_ in rows} == {0} and len(rows) == sum(-(-size // 65536) for size in sizes)
