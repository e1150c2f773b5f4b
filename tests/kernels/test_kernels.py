"""Every multi-tensor operator, by the reference and by the extension, against float64 torch and paper arithmetic."""

import itertools
import os

import pytest
import test_moments
import test_step_kernels
import torch
from helpers import ROOT, Operators, ScaleOnPaper, checksum, others_slow, python

from ampkit import DynamicLossScale, kernels
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


@pytest.mark.parametrize("source, target", list(itertools.product(KERNEL_DTYPES, repeat=2)))
def test_scale_rounds_the_float32_product(ops, device, source, target):
    inputs = [random(size, source, device) for size in SIZES]
    found_inf, factor = torch.zeros(1, device=device), torch.tensor([1 / 3], device=device)
    for scale in (1 / 3, factor):
        outputs = [torch.full_like(x, 7.0, dtype=target) for x in inputs]
        ops.multi_tensor_scale(inputs, outputs, scale, found_inf)
        for x, out in zip(inputs, outputs):
            assert_same(out, rounded(x.double() * factor.double(), target))
    assert found_inf.item() == 0.0


def bit_patterns(dtype):
    return torch.arange(-(2**15), 2**15, dtype=I16).view(dtype)


@pytest.mark.parametrize("source, target", list(itertools.product((F16, BF16), KERNEL_DTYPES)))
def test_every_number_of_16_bits_is_converted_as_torch_does(ops, device, source, target):
    x = bit_patterns(source).to(device)
    for scale in (1.0, 0.3, 2.0**-16):
        out = torch.full_like(x, 7.0, dtype=target)
        ops.multi_tensor_scale([x], [out], scale)
        assert_same(out, (x.float() * torch.tensor(scale, device=device)).to(target))


@pytest.mark.parametrize("dtypes", list(itertools.product(KERNEL_DTYPES, repeat=3)))
def test_axpby_rounds_each_float32_step(ops, device, dtypes):
    xs, ys = ([random(size, dtype, device) for size in SIZES[:6]] for dtype in dtypes[:2])
    on_device = torch.tensor([0.3], device=device), torch.tensor(-1.7, dtype=torch.float64, device=device)
    a, b = (number.float().double() for number in on_device)
    for numbers in ((0.3, -1.7), on_device):
        outputs = [torch.empty_like(x, dtype=dtypes[2]) for x in xs]
        ops.multi_tensor_axpby(xs, ys, outputs, *numbers)
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


@pytest.mark.parametrize("dtype", (F32, BF16))
@pytest.mark.parametrize("magnitude", [1e-30, 1e30])
def test_unscale_l2norm_in_place_of_squares_outside_float32(ops, device, dtype, magnitude):
    x = torch.full((5000,), magnitude, dtype=dtype, device=device)
    expected = torch.tensor([5000**0.5 * x[0].item()])
    norm, _ = ops.multi_tensor_l2norm([x, torch.zeros(5, device=device)])
    torch.testing.assert_close(norm.cpu(), expected, rtol=1e-6, atol=0)
    found_inf = torch.zeros(1, device=device)
    norm, _ = ops.multi_tensor_unscale_l2norm([x], [x], 0.5, found_inf)
    torch.testing.assert_close(norm.cpu(), expected / 2, rtol=1e-6, atol=0)
    assert found_inf.item() == 0.0
    assert_same(x, torch.full_like(x, magnitude) * 0.5)


def test_l2norm_of_a_long_tensor_keeps_its_digits(ops, device):
    # A float32 sum stops growing at 2^24 ones.
    norm, _ = ops.multi_tensor_l2norm([torch.ones(1 << 25, dtype=BF16, device=device)])
    torch.testing.assert_close(norm.cpu(), torch.tensor([(1 << 25) ** 0.5]))


def test_a_norm_in_plain_torch_is_few_launches_on_a_gpu():
    """In pieces, as on the CPU, a weight of 65 M elements would take 16,000 launches. The meta device represents a GPU."""
    with Operators() as operators:
        kernels.multi_tensor_l2norm([torch.empty(2**26, device="meta"), torch.empty(3, device="meta")], True)
    assert len(operators.names) < 50


SPOTS = [
    ("first", 0), ("last of a vector", 15), ("tile edge", 511), ("next tile", 512),
    ("block edge", 65535), ("next block", 65536), ("tail", 70_000),
]  # fmt: skip
#: The operators that tell of what is not finite.
FINDERS = {
    "scale": lambda ops, x, out, *flags: ops.multi_tensor_scale(x, out, 0.5, *flags),
    "axpby": lambda ops, x, out, found_inf, first: ops.multi_tensor_axpby(x, x, out, 0.25, 0.25, found_inf, -1, first),
    "norm": lambda ops, x, out, found_inf, first: ops.multi_tensor_unscale_l2norm(x, out, 0.5, found_inf, True, first),
}


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("spot", [index for _, index in SPOTS], ids=[name for name, _ in SPOTS])
@pytest.mark.parametrize("finder", ["scale", "norm"])
def test_found_inf_wherever_the_value_hides(ops, device, finder, dtype, value, spot):
    clean = random(70_001, dtype, device)
    planted = clean.clone()
    planted[spot] = value
    for where in range(3):
        inputs = [clean, clean, clean]
        inputs[where] = planted
        outputs = [torch.empty_like(x) for x in inputs]
        found_inf, first_bad = torch.zeros(1, device=device), torch.full((1,), kernels.NO_BAD, device=device)
        norms = FINDERS[finder](ops, inputs, outputs, found_inf, first_bad)
        assert found_inf.item() == 1.0 and first_bad.item() == where
        for x, out in zip(inputs, outputs):  # written all the same
            assert_same(out, x * 0.5)
        if finder == "norm":
            assert not norms[0].isfinite() and norms[1].isfinite().tolist() == [i != where for i in range(3)]


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


def test_empty_lists(ops, device):
    found_inf = torch.zeros(1, device=device)
    ops.multi_tensor_scale([], [], 2.0, found_inf)
    ops.multi_tensor_axpby([], [], [], 1.0, 1.0, found_inf)
    ops.multi_tensor_join([], [], [])
    ops.multi_tensor_split([], [], [])
    for norm, norms in (
        ops.multi_tensor_l2norm([], per_tensor=True),
        ops.multi_tensor_unscale_l2norm([], [], 0.5, found_inf, per_tensor=True),
    ):
        assert norm.tolist() == [0.0] and norms.shape == (0,)
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
    zeros = [torch.zeros(5, device=device) for _ in range(64)]
    torch.use_deterministic_algorithms(True)  # torch fills empty memory with NaN then
    try:
        assert torch.empty(1, device=device).isnan()
        norm, norms = ops.multi_tensor_l2norm(zeros, per_tensor=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert norm.item() == 0.0 and not norms.any()


def test_float64_and_complex_join_the_list_and_nothing_is_copied_from_the_host(ops, device, monkeypatch):
    """Indices are made on the device: a CUDA graph that is being captured cannot hold a copy from the host."""

    def refuse(*args, **kwargs):
        raise AssertionError("a tensor was made of numbers on the host")

    inputs = torch.tensor([1 / 3], dtype=torch.float64), torch.ones(2), torch.tensor([1 + 2j]), torch.ones(3).to(BF16)
    inputs = [x.to(device) for x in inputs]
    outputs = [torch.empty_like(x) for x in inputs]
    found_inf, first_bad = torch.zeros(1, device=device), torch.full((1,), kernels.NO_BAD, device=device)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "tensor", refuse)
        patch.setattr(torch, "as_tensor", refuse)
        ops.multi_tensor_scale(inputs, outputs, 0.1, found_inf, first_bad)
        norm, norms = ops.multi_tensor_l2norm(inputs, per_tensor=True)
    assert outputs[0].item() == (1 / 3) * 0.1
    assert outputs[1].tolist() == [torch.tensor(0.1).item()] * 2
    assert torch.equal(outputs[2], inputs[2] * 0.1)
    assert found_inf.item() == 0.0
    expected = torch.tensor([1 / 3, 2**0.5, 5**0.5, 3**0.5], dtype=torch.float64)
    torch.testing.assert_close(norms.cpu(), expected.to(F32), rtol=1e-6, atol=0)
    torch.testing.assert_close(norm.cpu(), expected.norm().reshape(1).to(F32), rtol=1e-6, atol=0)
    ops.multi_tensor_axpby(inputs, inputs, outputs, 1.0, 1.0, found_inf)
    assert torch.equal(outputs[2], inputs[2] * 2)
    inputs[2][0] = complex(0, float("inf"))
    ops.multi_tensor_scale(inputs, outputs, 0.1, found_inf, first_bad)
    assert found_inf.item() == 1.0 and first_bad.item() == 2


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
def test_opcheck_of_update_scale(device):
    if device.type == "cuda" and not kernels.implementation().cuda:
        pytest.skip("no CUDA kernels")
    arguments = (scale_state(2.0, device=device), torch.zeros(1, device=device), 2.0, 0.5, 2000, 1, 0.0, 1e9)
    torch.library.opcheck(torch.ops.ampkit.update_scale.default, arguments)


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
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        _, norms = compiled(grads, masters, torch.zeros(1, device=device))
    finally:
        torch.compiler.reset()
    assert norms.tolist() == [2.0, 3.0]
    assert all(master.eq(1.0).all() for master in masters)


def printed_at(capability, script):
    """The output of a process whose kernels use the instructions of ``capability``."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "kernels")))
    result = python("-c", script, AMPKIT_CPU_CAPABILITY=capability, PYTHONPATH=path)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.cpu_kernels
@pytest.mark.compiled("kernels")
@pytest.mark.parametrize("capability", others_slow("avx2", of=["baseline", "avx2", "avx512"]))
def test_every_instruction_set_gives_the_same_bits(capability):
    script = "import test_kernels; print(test_kernels.fingerprint())"
    assert printed_at(capability, script) == fingerprint()


def fingerprint():
    """A number that depends on every bit that conversions, splits, joins, norms and steps write."""
    assert kernels.implementation().name == "extension", kernels.implementation().why
    torch.manual_seed(0)
    wide = torch.randn(65537) * torch.exp2(torch.randn(65537) * 12)
    sources, written = [bit_patterns(F16), bit_patterns(BF16), wide], []
    for x, dtype, scale in itertools.product(sources, KERNEL_DTYPES, (1.0, 0.3, 2.0**-16)):
        written.append(torch.empty_like(x, dtype=dtype))
        kernels.multi_tensor_scale([x], written[-1:], scale)
        written[-1] = written[-1].nan_to_num(7.0)  # any NaN will do
    for x, dtype in itertools.product(sources, (F16, BF16)):
        rests, joined = torch.empty_like(x, dtype=I16), torch.empty_like(x, dtype=F32)
        written += [torch.empty_like(x, dtype=dtype), rests, joined]
        kernels.multi_tensor_split([x], written[-3:-2], [rests])
        kernels.multi_tensor_join(written[-3:-2], [rests.roll(1)], [joined])
    written += kernels.multi_tensor_l2norm([x[x.isfinite()] for x in sources], True)
    return f"{checksum(written)} {test_step_kernels.fingerprint()} {test_moments.fingerprint()}"


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
    printed_at(capability, script)


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


@pytest.mark.parametrize("finder", FINDERS)
def test_first_bad_is_the_smallest_index_and_only_falls(ops, device, finder):
    tensors = [torch.ones(3, device=device) for _ in range(6)]
    tensors[2][1] = tensors[4][1] = float("nan")

    def index_found(before=kernels.NO_BAD):
        first_bad = torch.full((1,), before, device=device)
        FINDERS[finder](ops, tensors, [torch.empty_like(t) for t in tensors], None, first_bad)
        return first_bad.item()

    assert index_found() == 2 and index_found(before=1) == 1
    # The reference takes float64, the kernels the rest: the index is still the caller's.
    tensors[0] = torch.ones(3, dtype=torch.float64, device=device)
    assert index_found() == 2
    tensors[0][0] = float("inf")
    assert index_found() == 0


RULES = [
    (DynamicLossScale(init_scale=8.0, growth_interval=2), 0.25, 64.0),
    (DynamicLossScale(init_scale=8.0, growth_interval=3, hysteresis=2), 2.0**-14, 2.0**24),
    (DynamicLossScale(1.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=1, hysteresis=3), 0.5, 32.0),
]


@pytest.mark.parametrize("rule, low, high", RULES)
def test_update_scale_is_the_rule_in_plain_numbers(ops, device, rule, low, high):
    paper = ScaleOnPaper(rule, low, high)
    state = scale_state(paper.scale, rule.hysteresis, device)
    bad = (torch.rand(400) < torch.linspace(0.05, 0.9, 400)).tolist()
    settings = {name: value for name, value in vars(rule).items() if name != "init_scale"}
    skips = in_a_row = at_floor = 0
    for overflow in [*bad, *[False] * 150]:
        skips += overflow
        in_a_row = in_a_row + 1 if overflow else 0
        at_floor = at_floor + 1 if overflow and paper.scale <= low else 0
        paper.after(overflow)
        flag = torch.tensor([float(overflow)], device=device)
        assert ops.update_scale(state, flag, **settings, min_scale=low, max_scale=high) is state
        assert (scale_in(state), state[1].item()) == (paper.scale, paper.clean)
        assert state[3:].tolist() == [skips, in_a_row, at_floor, 7]
    assert scale_in(state) == high


@pytest.mark.parametrize("value", [2.0, -1.0, 1e-45, float("inf"), float("nan")])
def test_whatever_is_not_zero_is_an_overflow(ops, device, value):
    state = scale_state(8.0, device=device)
    ops.update_scale(state, torch.tensor([value], device=device))
    assert scale_in(state) == 4.0 and state[1:].tolist() == [0, 0, 1, 1, 0, 7]


def test_update_scale_keeps_a_scale_set_above_the_maximum_and_never_reaches_infinity(ops, device):
    for start, high, expected in [(128.0, 64.0, 128.0), (3e38, float("inf"), 3e38), (48.0, 64.0, 64.0)]:
        state = scale_state(start, device=device)
        ops.update_scale(state, torch.zeros(1, device=device), growth_interval=1, max_scale=high)
        torch.testing.assert_close(torch.tensor(scale_in(state)), torch.tensor(expected), rtol=0, atol=0)
    for wrong in (state.float(), state[:6], state.repeat(2)[::2]):
        with pytest.raises(RuntimeError, match=r"state is .*; pass a contiguous int32 tensor of shape \[7\]"):
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


@pytest.mark.skipif(not cuda_is_emulated(), reason="counts launches of the emulated CUDA kernels")
def test_lists_take_few_launches():
    """A launch has room for 32,252 bytes of tensors: 944 with 34 bytes each (two lists), 528 with 61 (the five of Adam)."""
    import ampkit_emulated

    def launches(call):
        before = ampkit_emulated.launches()
        call()
        return ampkit_emulated.launches() - before

    sizes = [i * 7919 % 2000 // 50 for i in range(5000)]  # of which 125 are 0
    sizes[944:944] = [65536, 3 * 65536 + 1]  # five chunks: the end of one launch, and the beginning of the next
    mixed, blocks = [torch.ones(size) for size in sizes], ampkit_emulated.blocks()
    outputs = list(map(torch.zeros_like, mixed))
    assert launches(lambda: kernels.multi_tensor_scale(mixed, outputs, 0.5)) == 6
    assert ampkit_emulated.blocks() - blocks == 4875 + 5
    assert all(bool((out == 0.5).all()) for out in outputs)
    tiny = [torch.ones(2) for _ in range(1300)]
    lists = [[torch.ones(2) for _ in range(1100)] for _ in range(4)]
    rule = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, step=1.0, decoupled=True)
    assert launches(lambda: kernels.multi_tensor_adam(*lists, **rule)) == 3
    # 944 of two lists, of which the second is not written; the norms of all tensors, and the norm of all of them.
    assert launches(lambda: kernels.multi_tensor_l2norm(tiny, per_tensor=True)) == 2 + 1 + 1
