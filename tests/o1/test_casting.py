"""O1 on single functions and whole models: dtypes, values, and torch restored afterwards."""

import itertools
import logging
import os

import pytest
import torch
import torch.nn.functional as F
from helpers import Operators, casts_made, o1
from torch import nn

import ampkit
from ampkit.errors import RefusedOperation

pytestmark = pytest.mark.switch

LOW = [torch.bfloat16, torch.float16]


def close_to(actual, expected, dtype=torch.bfloat16):
    tolerance = {torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


# Calls on float32 tensors `a` (3 x 3), `v` (3), `b` (2 x 3 x 3), `i` (1 x 2 x 4 x 4) with the expected output dtype.
# Plain calls of what torch lists are in test_policy_samples.py.
LOWER_CALLS = {
    "torch.einsum list": lambda a, v, b, i: torch.einsum("bij,jk->bik", [b, a]),
    "linalg.matmul": lambda a, v, b, i: torch.linalg.matmul(a, a),
    "operator @": lambda a, v, b, i: b @ a,
    "reflected @": lambda a, v, b, i: a.__rmatmul__(b),
    "F.linear keywords": lambda a, v, b, i: F.linear(input=b, weight=a, bias=v),
    "F.conv_transpose2d": lambda a, v, b, i: F.conv_transpose2d(i, i.transpose(0, 1)),
    "F.conv_tbc": lambda a, v, b, i: F.conv_tbc(b, b[:1], v),
    "F.prelu": lambda a, v, b, i: F.prelu(a - 0.5, v[:1]),
    "F.scaled_dot_product_attention": lambda a, v, b, i: F.scaled_dot_product_attention(b, b, b, attn_mask=a),
    # Those that sum over an index.
    "einsum, product": lambda a, v, b, i: torch.einsum("ij,jk->ik", a, a),
    "einsum, product, implicit": lambda a, v, b, i: torch.einsum("ij,jk", a, a),
    "einsum, product by lists of indices": lambda a, v, b, i: torch.einsum(a, [0, 1], a, [1, 2], [0, 2]),
    "einsum, product by lists, implicit": lambda a, v, b, i: torch.einsum(a, [0, 1], a, [1, 2]),
    "einsum, sums of outer products": lambda a, v, b, i: torch.einsum("i,jk->ij", v, a),
    "einsum, three operands": lambda a, v, b, i: torch.einsum("i,jk,l->ijl", v, a, v),
    "einsum, ellipsis": lambda a, v, b, i: torch.einsum("...i,i->...", a, v),
    "einsum, ellipsis that is summed over": lambda a, v, b, i: torch.einsum("...i,i->i", a, v),
    "einsum, ellipsis in lists": lambda a, v, b, i: torch.einsum(a, [..., 0], v, [0], [...]),
    "einsum, trace": lambda a, v, b, i: torch.einsum("ii", a),
}
if hasattr(F, "grouped_mm"):  # an older torch has none
    LOWER_CALLS["F.grouped_mm"] = lambda a, v, b, i: F.grouped_mm(i.reshape(2, 2, 8), i.reshape(2, 2, 8).mT)


def inputs(dtype=torch.float32):
    shapes = [(3, 3), (3,), (2, 3, 3), (1, 2, 4, 4)]
    return [torch.rand(shape, generator=torch.Generator().manual_seed(n)).to(dtype) for n, shape in enumerate(shapes)]


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("name", LOWER_CALLS)
def test_whitelisted_call_runs_in_lower_precision(name, dtype):
    expected = LOWER_CALLS[name](*inputs())
    with o1(dtype):
        result = LOWER_CALLS[name](*inputs())
    assert result.dtype is dtype
    close_to(result, expected, dtype)


FP32_CALLS = {
    "F.layer_norm": lambda a, v, b, i: F.layer_norm(a, (3,)),
    "torch.native_layer_norm": lambda a, v, b, i: torch.native_layer_norm(a, (3,), None, None, 1e-5)[0],
    "F.interpolate": lambda a, v, b, i: F.interpolate(i, scale_factor=2, mode="bilinear"),
    "F.grid_sample": lambda a, v, b, i: F.grid_sample(i, i.movedim(1, -1), align_corners=False),
    "reflected **": lambda a, v, b, i: 2**a,
    "reflected /": lambda a, v, b, i: 1 / a,
    "torch.var_mean": lambda a, v, b, i: torch.var_mean(a)[0],
    "Tensor.var": lambda a, v, b, i: a.var(),
    "torch.bincount": lambda a, v, b, i: torch.bincount(torch.tensor([0, 2, 2]), v),
    "Tensor.bincount": lambda a, v, b, i: torch.tensor([0, 2, 2]).bincount(v),
    "F.upsample": lambda a, v, b, i: F.upsample(i, scale_factor=2),
    "torch.fft.rfft": lambda a, v, b, i: torch.fft.rfft(v).abs(),
    "torch.fake_quantize_per_channel_affine": lambda a, v, b, i: torch.fake_quantize_per_channel_affine(
        a, torch.full((3,), 0.1), torch.zeros(3, dtype=torch.int32), 0, -128, 127
    ),
}


@pytest.mark.parametrize("name, dtype", list(zip(FP32_CALLS, itertools.cycle(LOW))))
def test_blacklisted_call_runs_in_float32(name, dtype):
    call = FP32_CALLS[name]
    low = inputs(dtype)
    expected = call(*(x.float() for x in low))
    with o1(dtype):
        result = call(*low)
    assert result.dtype is torch.float32
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


# Products of a sparse matrix `s` (6 x 6) and a dense one `x` (6 x 4).
SPARSE_PRODUCTS = {
    "@": lambda s, x: s @ x,
    "dense @ sparse": lambda s, x: (x.t() @ s.t()).t(),
    "Tensor.mm": lambda s, x: s.mm(x),
    "torch.matmul": lambda s, x: torch.matmul(s, x),
    "torch.addmm": lambda s, x: torch.addmm(torch.zeros(6, 4), s, x),
    "F.linear": lambda s, x: F.linear(x.t(), s).t(),
    "torch.sparse.mm": lambda s, x: torch.sparse.mm(s, x),
    "torch.sparse.addmm": lambda s, x: torch.sparse.addmm(torch.zeros(6, 4), s, x),
    "torch.spmm": lambda s, x: torch.spmm(s, x),
    "sparse @ sparse": lambda s, x: (s @ s) @ x,
}


@pytest.mark.parametrize(
    "layout, dtype",
    [(torch.sparse_coo, torch.float32), (torch.sparse_csr, LOW[0]), (torch.sparse_csc, LOW[0])],
    ids=str,
)
@pytest.mark.parametrize("name", SPARSE_PRODUCTS)
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_product_with_a_sparse_matrix_is_computed_and_differentiated_in_float32(name, layout, dtype, in_python):
    dense = torch.linspace(-1, 1, 36).reshape(6, 6) * (torch.arange(36).reshape(6, 6) % 3 > 0)
    value = torch.linspace(0, 1, 24).reshape(6, 4).to(dtype)
    exact = value.double().requires_grad_()
    expected = (dense.double() @ dense.double() if name == "sparse @ sparse" else dense.double()) @ exact
    expected.sum().backward()
    with o1(in_python=in_python):
        x = value.requires_grad_()
        result = SPARSE_PRODUCTS[name](dense.to_sparse(layout=layout), x)
    result.sum().backward()
    assert result.dtype is torch.float32
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
    tolerance = 1e-5 if dtype is torch.float32 else 0.01
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["i0", "i0e", "i1", "i1e"])
def test_bessel_functions_have_two_derivatives_of_what_a_layer_returns(name):
    def slope(layer_input):
        value = layer_input.clone().requires_grad_()
        result = getattr(torch.special, name)(torch.mm(value, torch.eye(3)))
        for _ in range(2):
            (result,) = torch.autograd.grad(result.sum(), value, create_graph=True)
        return result

    low = inputs(torch.bfloat16)[0].float()  # which a product in bfloat16 does not round
    expected = slope(low)
    with o1():
        result = slope(low)
    torch.testing.assert_close(result, expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("dtype, copies", [(torch.float32, 0), (torch.bfloat16, 1)], ids=str)
def test_float32_input_of_a_blacklisted_call_is_not_copied(dtype, copies, in_python):
    x = torch.rand(3).to(dtype)
    for call in (lambda: F.softmax(x, -1), lambda: x.softmax(-1), lambda: torch.exp(x), lambda: x.norm()):
        with o1(in_python=in_python), Operators() as seen:
            call()
        assert seen.names.count("_to_copy") + seen.names.count("clone") == copies


PROMOTED = {
    "torch.inner": lambda low, high: torch.inner(low, high),
    "linalg.cross": lambda low, high: torch.linalg.cross(low, high),
    "F.bilinear": lambda low, high: F.bilinear(low, high, high.expand(2, 3, 3)),
    "Tensor.put": lambda low, high: low.put(torch.tensor([0, 1, 2]), high[0]),
    "Tensor.index_reduce": lambda low, high: high.index_reduce(0, torch.tensor([0, 1, 2]), low, "mean"),
    "F.embedding_bag": lambda low, high: F.embedding_bag(
        torch.tensor([[0, 1, 2]]), high, per_sample_weights=low[:1], mode="sum"
    ),
    "torch.lerp": lambda low, high: torch.lerp(low, high, 0.5),
    "Tensor.index_add": lambda low, high: low.index_add(0, torch.tensor([0, 1, 2]), high),
    "Tensor.masked_scatter": lambda low, high: high.masked_scatter(high > 0.5, low),
    "cat": lambda low, high: torch.cat([low, high]),
}


@pytest.mark.parametrize("name", PROMOTED)
def test_mixed_dtypes_meet_in_the_wider_one(name):
    low, high = torch.rand(3, 3).bfloat16(), torch.rand(3, 3)
    expected = PROMOTED[name](low.float(), high)
    with o1():
        result = PROMOTED[name](low, high)
    assert result.dtype is torch.float32
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)


# Calls of einsum on float32 tensors `x` (3 x 3) and `v` (3) that sum over no index.
MULTIPLIED = {
    "outer": lambda x, v: torch.einsum("i,j->ij", v, v),
    "outer, implicit": lambda x, v: torch.einsum("i,j", v, v),
    "outer with spaces": lambda x, v: torch.einsum(" i , j -> j i ", v, v),
    "outer in a list": lambda x, v: torch.einsum("i,j->ij", [v, v]),
    "outer of integers": lambda x, v: torch.einsum("i,j->ij", torch.arange(3), v),
    "outer of three": lambda x, v: torch.einsum("i,j,k->ijk", v, v, v),
    "outer by lists of indices": lambda x, v: torch.einsum(v, [0], v, [1], [0, 1]),
    "outer by lists, implicit": lambda x, v: torch.einsum(v, [0], v, [1]),
    "elementwise": lambda x, v: torch.einsum("ij,ij->ij", x, x),
    "rows times a vector": lambda x, v: torch.einsum("bi,i->bi", x, v),
    "ellipsis": lambda x, v: torch.einsum("...i,j->...ij", x, v),
    "ellipsis, implicit": lambda x, v: torch.einsum("...,...", x, v),
    "ellipsis in lists": lambda x, v: torch.einsum(x, [..., 0], v, [1], [..., 0, 1]),
    "ellipsis in lists, implicit": lambda x, v: torch.einsum(x, [...], v, [...]),
    "transposed": lambda x, v: torch.einsum("ij->ji", x),
    "diagonal": lambda x, v: torch.einsum("ii->i", x),
}


@pytest.mark.parametrize("name", MULTIPLIED)
def test_einsum_that_only_multiplies_is_left_to_torch(name, in_python):
    x, v = torch.rand(3, 3), torch.rand(3)
    expected = MULTIPLIED[name](x, v)
    with o1(in_python=in_python):
        found, low = MULTIPLIED[name](x, v), MULTIPLIED[name](x.bfloat16(), v.bfloat16())
    assert torch.equal(found, expected)
    assert low.dtype is torch.bfloat16


@pytest.mark.parametrize("row, equation", [("lower", "i,j->ij"), ("fp32", "i,i->")])
def test_row_of_einsum_may_be_changed(row, equation):
    v = torch.rand(3)
    with o1(policy={"torch.einsum": row}):
        assert torch.einsum(equation, v, v).dtype is {"lower": torch.bfloat16, "fp32": torch.float32}[row]


SQUARE, LOW_SQUARE = torch.rand(3, 3), torch.rand(3, 3).bfloat16()
# Calls in which torch decides, and the dtype of the result.
TORCHS_OWN = {
    "float64 @": (lambda: SQUARE.double() @ SQUARE.double(), torch.float64),
    "float64 linear": (lambda: F.linear(SQUARE.double(), SQUARE.double()), torch.float64),
    "float64 exp": (lambda: SQUARE.double().exp(), torch.float64),
    "float64 gelu": (lambda: F.gelu(SQUARE.double()), torch.float64),
    "integers": (lambda: SQUARE.long() @ SQUARE.long(), torch.int64),
    "complex numbers": (lambda: SQUARE.to(torch.complex64) @ SQUARE.to(torch.complex64), torch.complex64),
    "equal dtypes that would meet": (lambda: torch.inner(LOW_SQUARE, LOW_SQUARE), torch.bfloat16),
    "equal dtypes of a method that would meet": (
        lambda: LOW_SQUARE.put(torch.tensor([0]), LOW_SQUARE[0, :1]),
        torch.bfloat16,
    ),
    "comparison of mixed dtypes": (lambda: torch.eq(LOW_SQUARE, LOW_SQUARE.float()), torch.bool),
    "order of mixed dtypes": (lambda: LOW_SQUARE <= SQUARE, torch.bool),
}


@pytest.mark.parametrize("name", TORCHS_OWN)
def test_call_that_torch_decides_is_torchs_own(name):
    call, dtype = TORCHS_OWN[name]
    expected = call()
    with o1():
        result = call()
    assert result.dtype is expected.dtype is dtype
    assert torch.equal(result, expected)


def test_float16_and_bfloat16_meet_in_float32():
    with o1():
        assert torch.dot(torch.ones(2).half(), torch.ones(2).bfloat16()).dtype is torch.float32


def test_tensors_given_by_keyword_are_cast_like_others(in_python):
    low, weight = torch.rand(2, 2).bfloat16(), nn.Parameter(torch.rand(2, 2))
    with o1(in_python=in_python) as casting, casting.caches.call():
        assert torch.exp(input=low).dtype is torch.float32
        assert F.linear(low, weight=weight).dtype is torch.bfloat16
        assert casts_made(casting) in (1, None)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "sum", "cumsum"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_explicit_dtype_is_respected(name, dtype):
    with o1():
        assert getattr(torch, name)(LOW_SQUARE, 0, dtype=dtype).dtype is dtype
        if "softmax" in name:
            assert getattr(torch, name)(LOW_SQUARE, 0, dtype).dtype is dtype


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no grouped_mm")
def test_explicit_dtype_of_a_product_is_respected():
    x = inputs()[3].reshape(2, 2, 8)
    expected = F.grouped_mm(x, x.mT, out_dtype=torch.float32)
    with o1():
        assert torch.equal(F.grouped_mm(x, x.mT, out_dtype=torch.float32), expected)


INTO = {
    "torch.mm": (lambda x, out: torch.mm(x, x.float(), out=out), (3, 3)),
    "torch.exp": (lambda x, out: torch.exp(x, out=out), (3, 3)),
    "torch.dot": (lambda x, out: torch.dot(x[0], x[1].float(), out=out), ()),
    "torch.norm, by position": (lambda x, out: torch.norm(x, 2, 1, True, out), (3, 1)),
    "torch.tensordot, by position": (lambda x, out: torch.tensordot(x, x, 1, out), (3, 3)),
    "F.normalize, by position": (lambda x, out: F.normalize(x, 2, 1, 1e-12, out), (3, 3)),
}


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", INTO)
def test_out_is_written_to_and_keeps_its_dtype_and_storage(name, out_dtype):
    call, shape = INTO[name]
    expected = call(LOW_SQUARE.float(), None)
    out = torch.zeros(shape, dtype=out_dtype)
    pointer = out.data_ptr()
    with o1():
        assert call(LOW_SQUARE, out) is out
        assert call(LOW_SQUARE, None).shape == shape
        with pytest.raises(TypeError, match="out"):
            torch.norm(LOW_SQUARE, 2, 1, True, out, out=out)
    assert (out.dtype, out.data_ptr()) == (out_dtype, pointer)
    close_to(out, expected)


def test_float32_function_rounds_into_a_narrower_out_once():
    x = torch.tensor([10.03])
    with o1():
        # In bfloat16 the argument would be 10, and the result 3 % less.
        assert torch.equal(torch.exp(x, out=torch.zeros(1, dtype=torch.bfloat16)), x.double().exp().bfloat16())


ROW = torch.tensor([0])
IN_PLACE = {
    "iadd": lambda x, y: x.__iadd__(y),
    "imul": lambda x, y: x.__imul__(y),
    "ipow": lambda x, y: x.__ipow__(2),
    "itruediv": lambda x, y: x.__itruediv__(y + 1),
    "addmm_": lambda x, y: x.addmm_(y, y),
    "addmv_": lambda x, y: (torch.addmv_(x[0], y, y[0]), x)[1],
    "put_": lambda x, y: x.put_(ROW, y[:1, :1]),
    "index_reduce_": lambda x, y: x.index_reduce_(0, torch.tensor([0, 1]), y, "mean"),
    "square_": lambda x, y: x.square_(),
    "log1p_": lambda x, y: x.log1p_(),
    "addcmul_": lambda x, y: x.addcmul_(y, y),
    "lerp_": lambda x, y: x.lerp_(y, 0.5),
    "index_add_": lambda x, y: x.index_add_(0, torch.tensor([0, 1]), y),
    "index_copy_": lambda x, y: x.index_copy_(0, torch.tensor([0, 1]), source=y),
    "index_put_": lambda x, y: x.index_put_((ROW,), y[:1]),
    "scatter_add_": lambda x, y: x.scatter_add_(0, torch.zeros(2, 2, dtype=torch.long), y),
    "setitem": lambda x, y: x.__setitem__(ROW, y[:1]) or x,
}


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_operation_keeps_object_dtype_and_storage(name, dtypes):
    x, y = (torch.rand(2, 2).to(dtype) for dtype in dtypes)
    expected = IN_PLACE[name](x.float(), y.float())
    pointer = x.data_ptr()
    with o1():
        assert IN_PLACE[name](x, y) is x
    assert (x.dtype, x.data_ptr()) == (dtypes[0], pointer)
    close_to(x, expected)


def test_0_dim_tensors_and_numbers_promote_as_in_torch():
    low, scalar = torch.rand(3).bfloat16(), torch.tensor(0.5)
    with o1():
        for result in (low * scalar, low + 0.5, torch.lerp(low, low, scalar)):
            assert result.dtype is torch.bfloat16


# -- refused


def test_in_place_function_on_float16_is_refused(in_python):
    x = torch.ones(2, dtype=torch.float16)
    with o1(torch.float16, in_python=in_python) as casting:
        for call in (lambda: x.exp_(), lambda: x.pow_(2), lambda: torch.exp_(x), lambda: torch.exp_(input=x)):
            with pytest.raises(RefusedOperation, match="returns float32"):
                call()
        with casting.disabled():
            x.exp_()
        torch.ones(2).exp_()
        torch.ones(2, dtype=torch.bfloat16).exp_()
    torch.testing.assert_close(x, torch.full((2,), 2.7183, dtype=torch.float16))


# -- scripts, traces, logs, forks


def test_scripting_other_code_works_while_active():
    def scripted(x):
        return F.softmax(torch.mm(x, x), dim=-1) @ x + F.cross_entropy(x, x) + F.mse_loss(x, x.T)

    x = torch.rand(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        expected = torch.jit.script(scripted)(x)
    with o1():
        result = torch.jit.script(scripted)(x)  # compiled from torch's own functions, and cast by torch.autocast
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_traced_model_contains_the_casts_of_its_weights():
    model, x = nn.Linear(3, 3), torch.rand(2, 3)
    with o1():
        model(x)
        traced = torch.jit.trace(model, x, check_trace=False)
        with torch.no_grad():
            model.weight.mul_(2)
            model.bias.mul_(2)
        expected = model(x)
    assert torch.equal(traced(x), expected)


def test_casts_are_logged_at_verbosity_2(caplog):
    layer, x = nn.Conv2d(1, 1, 1), torch.rand(1, 1, 2, 2)
    with caplog.at_level(logging.INFO, logger="ampkit"):
        with o1(verbosity=1):
            layer(x)
        assert caplog.messages == []
        with o1(verbosity=2):
            F.softmax(F.layer_norm(layer(x), (2,)).bfloat16(), dim=-1)
    assert caplog.messages == ["Float->BFloat16 (conv2d)"] * 3 + [
        "BFloat16->Float (layer_norm)",
        "BFloat16->Float (softmax)",
    ]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize("level", ("O1", "O2", "O5"))
def test_forked_child_does_not_cast_and_may_initialize_anew_and_close(level):
    x, torchs_own = torch.ones(2, 2), torch.mm
    models = [ampkit.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0) for _ in range(2)]
    child = os.fork()
    if child == 0:
        try:
            dtypes = [torch.mm(x, x).dtype]
            with torch.autocast("cpu"):  # which leaves softmax as it is, unlike O1
                dtypes.append(torch.softmax(x.bfloat16(), 0).dtype)
            model = ampkit.initialize(nn.Sequential(nn.Linear(2, 2)), opt_level=level, verbosity=0)
            model[0].register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
            model(x)
            ampkit.close()
            as_expected = dtypes == [torch.float32, torch.bfloat16, torch.bfloat16] and torch.mm is torchs_own
            os._exit(0 if as_expected else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert level != "O1" or torch.mm(x, x).dtype is torch.bfloat16, "the parent was switched off"
    del models
