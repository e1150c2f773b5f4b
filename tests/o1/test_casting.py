"""O1 on single functions and whole models: dtypes, values, and torch given back as it was."""

import copy
import logging
import os
import threading

import pytest
import torch
import torch.nn.functional as F
from helpers import casts_made, o1
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ampkit.casting.engine as engine_module
from ampkit.casting.engine import Casting, active_casting
from ampkit.casting.wrappers import autocast_would_cast
from ampkit.errors import ConfigurationError, RefusedOperation
from ampkit.policy.cast_rules import CastKind, expand
from ampkit.policy.tables import tables_for

pytestmark = pytest.mark.switch

NAMESPACES = {
    "torch": torch,
    "torch.nn.functional": F,
    "torch.Tensor": torch.Tensor,
    "torch.linalg": torch.linalg,
    "torch.special": torch.special,
    "torch.fft": torch.fft,
    "torch._VF": torch._VF,
    "nn.RNNBase": nn.RNNBase,
    "fetch": torch.utils.data._utils.fetch._MapDatasetFetcher,
    "torch.jit._recursive": torch.jit._recursive,
}
LOW = [torch.bfloat16, torch.float16]


def namespaces():
    return {name: dict(vars(owner)) for name, owner in NAMESPACES.items()}


def differences(before):
    after = namespaces()
    return [
        (owner, key)
        for owner in before
        for key in before[owner].keys() | after[owner].keys()
        if before[owner].get(key) is not after[owner].get(key)
    ]


def close_to(actual, expected, dtype=torch.bfloat16):
    tolerance = {torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


# Calls on float32 tensors `a` (3 x 3), `v` (3), `b` (2 x 3 x 3), `i` (1 x 2 x 4 x 4) with the expected output dtype.
LOWER_CALLS = {
    "torch.mm": lambda a, v, b, i: torch.mm(a, a),
    "torch.matmul": lambda a, v, b, i: torch.matmul(b, a),
    "torch.bmm": lambda a, v, b, i: torch.bmm(b, b),
    "torch.baddbmm": lambda a, v, b, i: torch.baddbmm(b, b, b),
    "torch.addbmm": lambda a, v, b, i: torch.addbmm(a, b, b),
    "torch.addmm": lambda a, v, b, i: torch.addmm(a, a, a, beta=0.5),
    "torch.einsum": lambda a, v, b, i: torch.einsum("bij,jk->bik", b, a),
    "torch.einsum list": lambda a, v, b, i: torch.einsum("bij,jk->bik", [b, a]),
    "torch.tensordot": lambda a, v, b, i: torch.tensordot(b, a, dims=1),
    "torch.chain_matmul": lambda a, v, b, i: torch.chain_matmul(a, a, a),
    "linalg.multi_dot": lambda a, v, b, i: torch.linalg.multi_dot([a, a, v]),
    "linalg.matmul": lambda a, v, b, i: torch.linalg.matmul(a, a),
    "linalg.vecdot": lambda a, v, b, i: torch.linalg.vecdot(a, a),
    "Tensor.mm": lambda a, v, b, i: a.mm(a),
    "Tensor.bmm": lambda a, v, b, i: b.bmm(b),
    "Tensor.addmm": lambda a, v, b, i: a.addmm(a, a),
    "operator @": lambda a, v, b, i: b @ a,
    "reflected @": lambda a, v, b, i: a.__rmatmul__(b),
    "F.linear": lambda a, v, b, i: F.linear(b, a, v),
    "F.linear keywords": lambda a, v, b, i: F.linear(input=b, weight=a, bias=v),
    "F.conv1d": lambda a, v, b, i: F.conv1d(b, b, padding=1),
    "F.conv2d": lambda a, v, b, i: F.conv2d(i, i, None, (1, 1), (1, 1)),
    "F.conv3d": lambda a, v, b, i: F.conv3d(i[None], i[None]),
    "F.conv_transpose1d": lambda a, v, b, i: F.conv_transpose1d(b, b.transpose(0, 1)),
    "F.conv_transpose2d": lambda a, v, b, i: F.conv_transpose2d(i, i.transpose(0, 1)),
    "F.conv_transpose3d": lambda a, v, b, i: F.conv_transpose3d(i[None], i[None]),
    "F.conv_tbc": lambda a, v, b, i: F.conv_tbc(b, b[:1], v),
    "torch.conv2d": lambda a, v, b, i: torch.conv2d(i, i),
    "F.prelu": lambda a, v, b, i: F.prelu(a - 0.5, v[:1]),
    "F.scaled_dot_product_attention": lambda a, v, b, i: F.scaled_dot_product_attention(b, b, b, attn_mask=a),
}


def inputs(dtype=torch.float32):
    shapes = [(3, 3), (3,), (2, 3, 3), (1, 2, 4, 4)]
    return [torch.rand(shape, generator=torch.Generator().manual_seed(n)).to(dtype) for n, shape in enumerate(shapes)]


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("name", LOWER_CALLS)
def test_whitelisted_call_runs_in_lower_precision(name, dtype):
    call = LOWER_CALLS[name]
    tensors = inputs()
    expected = call(*tensors)
    with o1(dtype):
        result = call(*tensors)
    assert result.dtype is dtype
    close_to(result, expected, dtype)


FP32_CALLS = {
    "F.softmax": lambda a, v, b, i: F.softmax(a, dim=-1),
    "torch.softmax": lambda a, v, b, i: torch.softmax(a, -1),
    "Tensor.softmax": lambda a, v, b, i: a.softmax(-1),
    "special.softmax": lambda a, v, b, i: torch.special.softmax(a, -1),
    "F.log_softmax": lambda a, v, b, i: F.log_softmax(a, dim=-1),
    "Tensor.log_softmax": lambda a, v, b, i: a.log_softmax(-1),
    "F.softmin": lambda a, v, b, i: F.softmin(a, dim=-1),
    "F.softplus": lambda a, v, b, i: F.softplus(a),
    "F.layer_norm": lambda a, v, b, i: F.layer_norm(a, (3,)),
    "F.layer_norm with float32 weights": lambda a, v, b, i: F.layer_norm(a, (3,), v.float(), v.float()),
    "torch.layer_norm": lambda a, v, b, i: torch.layer_norm(a, (3,)),
    "F.group_norm": lambda a, v, b, i: F.group_norm(b, 3),
    "torch.group_norm": lambda a, v, b, i: torch.group_norm(b, 3),
    "F.rms_norm": lambda a, v, b, i: F.rms_norm(a, (3,)),
    "F.instance_norm": lambda a, v, b, i: F.instance_norm(b),
    "torch.native_layer_norm": lambda a, v, b, i: torch.native_layer_norm(a, (3,), None, None, 1e-5)[0],
    "F.local_response_norm": lambda a, v, b, i: F.local_response_norm(i, 2),
    "F.normalize": lambda a, v, b, i: F.normalize(a),
    "F.cosine_similarity": lambda a, v, b, i: F.cosine_similarity(a, a.flip(0)),
    "F.interpolate": lambda a, v, b, i: F.interpolate(i, scale_factor=2, mode="bilinear"),
    "F.grid_sample": lambda a, v, b, i: F.grid_sample(i, i.movedim(1, -1), align_corners=False),
    "F.cross_entropy": lambda a, v, b, i: F.cross_entropy(a, torch.tensor([0, 1, 2])),
    "F.nll_loss": lambda a, v, b, i: F.nll_loss(a, torch.tensor([0, 1, 2])),
    "F.mse_loss": lambda a, v, b, i: F.mse_loss(a, a.flip(0)),
    "F.l1_loss": lambda a, v, b, i: F.l1_loss(a, a.flip(0)),
    "F.smooth_l1_loss": lambda a, v, b, i: F.smooth_l1_loss(a, a.flip(0)),
    "F.huber_loss": lambda a, v, b, i: F.huber_loss(a, a.flip(0)),
    "F.kl_div": lambda a, v, b, i: F.kl_div(a, a.flip(0), reduction="batchmean"),
    "F.poisson_nll_loss": lambda a, v, b, i: F.poisson_nll_loss(a, a),
    "F.cosine_embedding_loss": lambda a, v, b, i: F.cosine_embedding_loss(a, a.flip(0), torch.ones(3)),
    "F.hinge_embedding_loss": lambda a, v, b, i: F.hinge_embedding_loss(a, torch.ones(3, 3)),
    "F.margin_ranking_loss": lambda a, v, b, i: F.margin_ranking_loss(a, a.flip(0), torch.ones(3, 3)),
    "F.multilabel_margin_loss": lambda a, v, b, i: F.multilabel_margin_loss(a, torch.zeros(3, 3, dtype=torch.long)),
    "F.multilabel_soft_margin_loss": lambda a, v, b, i: F.multilabel_soft_margin_loss(a, torch.ones(3, 3)),
    "F.multi_margin_loss": lambda a, v, b, i: F.multi_margin_loss(a, torch.tensor([0, 1, 2])),
    "F.soft_margin_loss": lambda a, v, b, i: F.soft_margin_loss(a, torch.ones(3, 3)),
    "F.triplet_margin_loss": lambda a, v, b, i: F.triplet_margin_loss(a, a.flip(0), a.flip(1)),
    "F.binary_cross_entropy_with_logits": lambda a, v, b, i: F.binary_cross_entropy_with_logits(a, torch.ones(3, 3)),
    "F.ctc_loss": lambda a, v, b, i: F.ctc_loss(
        b.log_softmax(-1), torch.tensor([[1]] * 3), torch.tensor([2] * 3), torch.tensor([1] * 3)
    ),
    "torch.pow": lambda a, v, b, i: torch.pow(a, 2),
    "operator **": lambda a, v, b, i: a**2,
    "reflected **": lambda a, v, b, i: 2**a,
    "reflected /": lambda a, v, b, i: 1 / a,
    "Tensor.sum": lambda a, v, b, i: a.sum(),
    "torch.sum with sizes": lambda a, v, b, i: torch.sum(b, [0, 1]),
    "Tensor.norm": lambda a, v, b, i: a.norm(),
    "torch.norm": lambda a, v, b, i: torch.norm(a, 2, 1),
    "linalg.norm": lambda a, v, b, i: torch.linalg.norm(a),
    "linalg.vector_norm": lambda a, v, b, i: torch.linalg.vector_norm(a),
    "linalg.inv": lambda a, v, b, i: torch.linalg.inv(a + 3 * torch.eye(3)),
    "torch.var_mean": lambda a, v, b, i: torch.var_mean(a)[0],
    "Tensor.std": lambda a, v, b, i: a.std(),
    "Tensor.var": lambda a, v, b, i: a.var(),
    "Tensor.prod": lambda a, v, b, i: a.prod(),
    "Tensor.cumsum": lambda a, v, b, i: a.cumsum(0),
    "Tensor.cumprod": lambda a, v, b, i: a.cumprod(0),
    "Tensor.dist": lambda a, v, b, i: a.dist(a.flip(0)),
    "Tensor.renorm": lambda a, v, b, i: a.renorm(2, 0, 1.0),
    "torch.cdist": lambda a, v, b, i: torch.cdist(a, a.flip(0)),
    "F.pdist": lambda a, v, b, i: F.pdist(a),
    "torch.logsumexp": lambda a, v, b, i: torch.logsumexp(a, 0),
    "torch.log1p": lambda a, v, b, i: torch.log1p(a),
    "torch.square": lambda a, v, b, i: torch.square(a),
    "Tensor.lgamma": lambda a, v, b, i: a.lgamma(),
    "torch.exp2": lambda a, v, b, i: torch.exp2(a),
    "torch.erfc": lambda a, v, b, i: torch.erfc(a),
    "special.erfcx": lambda a, v, b, i: torch.special.erfcx(a),
    "special.zeta": lambda a, v, b, i: torch.special.zeta(2.0, a),
    "special.ndtri": lambda a, v, b, i: torch.special.ndtri(a),
    "torch.igamma": lambda a, v, b, i: torch.igamma(a, a),
    "torch.histc": lambda a, v, b, i: torch.histc(a, 4),
    "torch.trace": lambda a, v, b, i: torch.trace(a),
    "linalg.vander": lambda a, v, b, i: torch.linalg.vander(v),
    "F.avg_pool3d": lambda a, v, b, i: F.avg_pool3d(i, 1),
    "F.adaptive_avg_pool3d": lambda a, v, b, i: F.adaptive_avg_pool3d(i, 1),
    "F.upsample": lambda a, v, b, i: F.upsample(i, scale_factor=2),
    "torch.grid_sampler": lambda a, v, b, i: torch.grid_sampler(i, i.movedim(1, -1), 0, 0, False),
    "torch.fft.rfft": lambda a, v, b, i: torch.fft.rfft(v).abs(),
    "torch.fake_quantize_per_channel_affine": lambda a, v, b, i: torch.fake_quantize_per_channel_affine(
        a, torch.full((3,), 0.1), torch.zeros(3, dtype=torch.int32), 0, -128, 127
    ),
    "torch._fake_quantize_learnable_per_tensor_affine": lambda a, v, b, i: (
        torch._fake_quantize_learnable_per_tensor_affine(a, torch.tensor([0.1]), torch.zeros(1), -128, 127, 1.0)
    ),
}
UNARY = "acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan".split()


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("name", FP32_CALLS)
def test_blacklisted_call_runs_in_float32(name, dtype):
    call = FP32_CALLS[name]
    low = inputs(dtype)
    expected = call(*(x.float() for x in low))
    with o1(dtype):
        result = call(*low)
    assert result.dtype is torch.float32
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", UNARY)
def test_steep_function_runs_in_float32(name):
    low = torch.tensor([0.25, 0.5], dtype=torch.bfloat16)
    expected = getattr(torch, name)(low.float())
    with o1():
        for result in (getattr(torch, name)(low), getattr(low, name)()):
            assert result.dtype is torch.float32
            torch.testing.assert_close(result, expected)


class Copies(TorchDispatchMode):
    """Counts the copies that operators make of tensors, casts among them."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("in_python", [False, True], ids=["C++", "Python"])
@pytest.mark.parametrize("dtype, copies", [(torch.float32, 0), (torch.bfloat16, 1)], ids=str)
def test_float32_input_of_a_blacklisted_call_is_not_copied(dtype, copies, in_python):
    x = torch.rand(3).to(dtype)
    for call in (lambda: F.softmax(x, -1), lambda: x.softmax(-1), lambda: torch.exp(x), lambda: x.norm()):
        with o1(in_python=in_python), Copies() as seen:
            call()
        assert seen.count == copies


PROMOTED = {
    "torch.mv": lambda low, high: torch.mv(low, high[0]),
    "Tensor.mv": lambda low, high: high.mv(low[0]),
    "torch.addmv": lambda low, high: torch.addmv(low[0], high, low[1]),
    "Tensor.addmv": lambda low, high: low[0].addmv(high, low[1]),
    "torch.addr": lambda low, high: torch.addr(high, low[0], low[1]),
    "Tensor.addr": lambda low, high: low.addr(high[0], low[1]),
    "torch.einsum": lambda low, high: torch.einsum("i,jk->ijk", low[0], high),
    "torch.dot": lambda low, high: torch.dot(low[0], high[0]),
    "torch.vdot": lambda low, high: torch.vdot(low[0], high[0]),
    "torch.inner": lambda low, high: torch.inner(low, high),
    "torch.cross": lambda low, high: torch.cross(low, high, dim=-1),
    "linalg.cross": lambda low, high: torch.linalg.cross(low, high),
    "F.bilinear": lambda low, high: F.bilinear(low, high, high.expand(2, 3, 3)),
    "Tensor.put": lambda low, high: low.put(torch.tensor([0, 1, 2]), high[0]),
    "Tensor.index_reduce": lambda low, high: high.index_reduce(0, torch.tensor([0, 1, 2]), low, "mean"),
    "F.embedding_bag": lambda low, high: F.embedding_bag(
        torch.tensor([[0, 1, 2]]), high, per_sample_weights=low[:1], mode="sum"
    ),
    "torch.sparse.mm": lambda low, high: torch.sparse.mm(low.to_sparse(), high),
    "torch.lerp": lambda low, high: torch.lerp(low, high, 0.5),
    "Tensor.scatter_add": lambda low, high: high.scatter_add(0, torch.zeros(3, 3, dtype=torch.long), low),
    "Tensor.index_add": lambda low, high: low.index_add(0, torch.tensor([0, 1, 2]), high),
    "Tensor.index_put": lambda low, high: low.index_put((torch.tensor([0]),), high[:1]),
    "Tensor.masked_scatter": lambda low, high: high.masked_scatter(high > 0.5, low),
    "cat": lambda low, high: torch.cat([low, high]),
    "stack": lambda low, high: torch.stack([low, high]),
    "add": lambda low, high: low + high,
    "mul": lambda low, high: high.mul(low),
    "addcmul": lambda low, high: torch.addcmul(low, high, low),
    "addcdiv": lambda low, high: torch.addcdiv(low, high, low + 1),
    "atan2": lambda low, high: torch.atan2(low, high),
}


@pytest.mark.parametrize("name", PROMOTED)
def test_mixed_dtypes_meet_in_the_wider_one(name):
    low, high = torch.rand(3, 3).bfloat16(), torch.rand(3, 3)
    expected = PROMOTED[name](low.float(), high)
    with o1():
        result = PROMOTED[name](low, high)
    assert result.dtype is torch.float32
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", [name for name in PROMOTED if "." in name])
def test_promotion_leaves_equal_dtypes_alone(name):
    low = torch.rand(3, 3).bfloat16()
    with o1():
        assert PROMOTED[name](low, low).dtype is torch.bfloat16


@pytest.mark.parametrize("in_python", [False, True], ids=["C++", "Python"])
def test_angles_of_positions_are_float32(in_python):
    """GPT-NeoX's rotary embedding: in bfloat16 position 511 is 512, and angles are off by more than 1 rad."""
    positions, frequencies = torch.arange(512).float(), 10000.0 ** -(torch.arange(0, 64, 2) / 64)
    with o1(in_python=in_python):
        angles = torch.einsum("i,j->ij", positions, frequencies)
        of_integers = torch.einsum("i,j->ij", positions.long(), frequencies)
    assert torch.equal(angles, positions[:, None] * frequencies)
    assert torch.equal(of_integers, angles)
    with o1(policy="autocast-cuda", in_python=in_python):  # torch's list, as it is
        assert (torch.einsum("i,j->ij", positions, frequencies) - angles).abs().max() > 1


# Calls of einsum on float32 tensors `x` (3 x 3) and `v` (3), by whether they sum over an index.
MULTIPLIED = {
    "outer": lambda x, v: torch.einsum("i,j->ij", v, v),
    "outer, implicit": lambda x, v: torch.einsum("i,j", v, v),
    "outer with spaces": lambda x, v: torch.einsum(" i , j -> j i ", v, v),
    "outer in a list": lambda x, v: torch.einsum("i,j->ij", [v, v]),
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
SUMMED = {
    "product": lambda x, v: torch.einsum("ij,jk->ik", x, x),
    "product, implicit": lambda x, v: torch.einsum("ij,jk", x, x),
    "product by lists of indices": lambda x, v: torch.einsum(x, [0, 1], x, [1, 2], [0, 2]),
    "product by lists, implicit": lambda x, v: torch.einsum(x, [0, 1], x, [1, 2]),
    "sums of outer products": lambda x, v: torch.einsum("i,jk->ij", v, x),
    "three operands": lambda x, v: torch.einsum("i,jk,l->ijl", v, x, v),
    "ellipsis": lambda x, v: torch.einsum("...i,i->...", x, v),
    "ellipsis that is summed over": lambda x, v: torch.einsum("...i,i->i", x, v),
    "ellipsis in lists": lambda x, v: torch.einsum(x, [..., 0], v, [0], [...]),
    "trace": lambda x, v: torch.einsum("ii", x),
}


@pytest.mark.parametrize("in_python", [False, True], ids=["C++", "Python"])
@pytest.mark.parametrize("name", MULTIPLIED)
def test_einsum_that_only_multiplies_is_left_to_torch(name, in_python):
    x, v = torch.rand(3, 3), torch.rand(3)
    expected = MULTIPLIED[name](x, v)
    with o1(in_python=in_python):
        found, low = MULTIPLIED[name](x, v), MULTIPLIED[name](x.bfloat16(), v.bfloat16())
    assert torch.equal(found, expected)
    assert low.dtype is torch.bfloat16


@pytest.mark.parametrize("name", SUMMED)
def test_einsum_that_sums_over_an_index_is_a_matrix_product(name):
    x, v = torch.rand(3, 3), torch.rand(3)
    expected = SUMMED[name](x, v)
    with o1():
        found = SUMMED[name](x, v)
    assert found.dtype is torch.bfloat16
    close_to(found, expected, torch.bfloat16)


def test_row_of_einsum_may_be_changed():
    v = torch.rand(3)
    with o1(policy={"torch.einsum": "lower"}):
        assert torch.einsum("i,j->ij", v, v).dtype is torch.bfloat16
    with o1(policy={"torch.einsum": "fp32"}):
        assert torch.einsum("i,i->", v, v).dtype is torch.float32


@pytest.mark.parametrize("operation", ["eq", "ge", "gt", "le", "lt", "ne"])
def test_comparison_of_mixed_dtypes_is_torchs_own(operation):
    low, high = torch.tensor([1.0, 2.0]).bfloat16(), torch.tensor([1.0, 1.0])
    expected = getattr(torch, operation)(low.float(), high)
    with o1():
        assert torch.equal(getattr(torch, operation)(low, high), expected)


def test_float16_and_bfloat16_meet_in_float32():
    with o1():
        assert torch.dot(torch.ones(2).half(), torch.ones(2).bfloat16()).dtype is torch.float32


# -- what is never cast


@pytest.mark.parametrize("call", [lambda x: x @ x, lambda x: F.linear(x, x), lambda x: x.exp(), lambda x: F.gelu(x)])
def test_float64_is_left_alone(call):
    x = torch.rand(3, 3, dtype=torch.float64)
    expected = call(x)
    with o1():
        assert torch.equal(call(x), expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_integer_and_complex_matmul_is_left_alone(dtype):
    x = torch.arange(4).reshape(2, 2).to(dtype)
    expected = x @ x
    with o1():
        result = x @ x
    assert result.dtype is dtype
    assert torch.equal(result, expected)


def test_tensors_on_other_devices_are_left_alone():
    x = torch.rand(2, 2)
    casting = Casting(torch.bfloat16, device_types=("cuda",))
    casting.install()
    try:
        assert (x @ x).dtype is torch.float32
        casting.cast_on({"cpu", "cuda"})
        casting.switch_on_here()
        assert (x @ x).dtype is torch.bfloat16
    finally:
        casting.close()


@pytest.mark.parametrize("in_python", [False, True], ids=["C++", "Python"])
def test_tensors_given_by_keyword_are_cast_like_others(in_python):
    low, weight = torch.rand(2, 2).bfloat16(), nn.Parameter(torch.rand(2, 2))
    with o1(in_python=in_python) as casting, casting.caches.call():
        assert torch.exp(input=low).dtype is torch.float32
        assert F.linear(low, weight=weight).dtype is torch.bfloat16
        assert casts_made(casting) in (1, None)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "sum", "cumsum"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_explicit_dtype_is_respected(name, dtype):
    x = torch.rand(3).bfloat16()
    with o1():
        assert getattr(torch, name)(x, 0, dtype=dtype).dtype is dtype
        if "softmax" in name:
            assert getattr(torch, name)(x, 0, dtype).dtype is dtype


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_out_keeps_object_dtype_and_storage(out_dtype):
    a, low = torch.rand(3, 3), torch.rand(3, 3).bfloat16()
    out = torch.zeros(3, 3, dtype=out_dtype)
    pointer = out.data_ptr()
    with o1():
        assert torch.mm(low, a, out=out) is out
        close_to(out, low.float() @ a)
        assert torch.exp(low, out=out) is out
        close_to(out, low.float().exp())
        assert torch.dot(low[0], a[0], out=torch.zeros((), dtype=out_dtype)).dtype is out_dtype
    assert (out.dtype, out.data_ptr()) == (out_dtype, pointer)


def test_float32_function_rounds_into_a_narrower_out_once():
    x = torch.tensor([10.03])
    with o1():
        # In bfloat16 the argument would be 10, and the result 3 % less.
        assert torch.equal(torch.exp(x, out=torch.zeros(1, dtype=torch.bfloat16)), x.double().exp().bfloat16())


POSITIONAL_OUT = {
    "torch.norm": (lambda x, out: torch.norm(x, 2, 1, True, out), (3, 1)),
    "torch.tensordot": (lambda x, out: torch.tensordot(x, x, 1, out), (3, 3)),
    "F.normalize": (lambda x, out: F.normalize(x, 2, 1, 1e-12, out), (3, 3)),
}


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", POSITIONAL_OUT)
def test_out_given_by_position_is_written_to(name, out_dtype):
    call, shape = POSITIONAL_OUT[name]
    low = torch.rand(3, 3).bfloat16()
    expected = call(low.double(), torch.zeros(shape, dtype=torch.float64))
    out = torch.zeros(shape, dtype=out_dtype)
    with o1():
        assert call(low, out) is out
        assert out.dtype is out_dtype
        assert call(low, None).shape == shape
        with pytest.raises(TypeError, match="out"):
            torch.norm(low, 2, 1, True, out, out=out)
    close_to(out, expected)


@pytest.mark.parametrize("low_first", [True, False])
@pytest.mark.parametrize(
    "operation",
    [
        lambda x, y: x.__iadd__(y),
        lambda x, y: x.__imul__(y),
        lambda x, y: x.__ipow__(2),
        lambda x, y: x.__isub__(y),
        lambda x, y: x.__itruediv__(y + 1),
        lambda x, y: x.addmm_(y, y),
        lambda x, y: (torch.addmv_(x[0], y, y[0]), x)[1],
        lambda x, y: x.put_(torch.tensor([0]), y[:1, :1]),
        lambda x, y: x.index_reduce_(0, torch.tensor([0, 1]), y, "mean"),
        lambda x, y: x.square_(),
        lambda x, y: x.log1p_(),
        lambda x, y: x.addcmul_(y, y),
        lambda x, y: x.lerp_(y, 0.5),
        lambda x, y: x.index_add_(0, torch.tensor([0, 1]), y),
        lambda x, y: x.index_copy_(0, torch.tensor([0, 1]), source=y),
        lambda x, y: x.index_put_((torch.tensor([0]),), y[:1]),
        lambda x, y: x.scatter_add_(0, torch.zeros(2, 2, dtype=torch.long), y),
        lambda x, y: x.__setitem__(torch.tensor([0]), y[:1]) or x,
    ],
    ids=(
        "iadd imul ipow isub itruediv addmm_ addmv_ put_ index_reduce_ square_ log1p_ addcmul_ lerp_ index_add_ index_copy_ "
        "index_put_ scatter_add_ setitem"
    ).split(),
)
def test_in_place_operation_keeps_object_dtype_and_storage(operation, low_first):
    x, y = torch.rand(2, 2), torch.rand(2, 2)
    x, y = (x.bfloat16(), y) if low_first else (x, y.bfloat16())
    expected = operation(x.float(), y.float())
    dtype, pointer = x.dtype, x.data_ptr()
    with o1():
        result = operation(x, y)
    assert result is x
    assert (x.dtype, x.data_ptr()) == (dtype, pointer)
    close_to(x, expected)


def test_0_dim_tensors_and_numbers_promote_as_in_torch():
    low, scalar = torch.rand(3).bfloat16(), torch.tensor(0.5)
    with o1():
        assert (low * scalar).dtype is torch.bfloat16
        assert (low + 0.5).dtype is torch.bfloat16
        assert torch.lerp(low, low, scalar).dtype is torch.bfloat16


@pytest.mark.parametrize("shape, dtype", [((2, 3), torch.float32), ((2, 2), torch.float64)])
def test_exceptions_are_torchs_own(shape, dtype):
    one, other = torch.rand(shape), torch.rand(shape, dtype=dtype)
    with pytest.raises(RuntimeError) as plain:
        torch.mm(one, other)
    with o1(), pytest.raises(RuntimeError) as cast:
        torch.mm(one, other)
    assert str(cast.value) == str(plain.value)
    with o1(), pytest.raises(TypeError):
        one @ "text"


# -- refused


def test_in_place_function_on_float16_is_refused():
    x = torch.ones(2, dtype=torch.float16)
    with o1(torch.float16) as casting:
        for call in (lambda: x.exp_(), lambda: x.pow_(2), lambda: torch.exp_(x), lambda: torch.exp_(input=x)):
            with pytest.raises(RefusedOperation, match="returns float32"):
                call()
        with casting.disabled():
            x.exp_()
        torch.ones(2).exp_()
        torch.ones(2, dtype=torch.bfloat16).exp_()
    torch.testing.assert_close(x, torch.full((2,), 2.7183, dtype=torch.float16))


def test_refused_operation_is_the_exception_that_apex_raised():
    assert issubclass(RefusedOperation, NotImplementedError)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_binary_cross_entropy_is_refused_in_lower_precision(dtype):
    p = torch.rand(3)
    with o1(dtype) as casting:
        with pytest.raises(RefusedOperation, match="binary_cross_entropy_with_logits"):
            nn.BCELoss()(p.to(dtype), torch.ones(3))
        torch.testing.assert_close(F.binary_cross_entropy(p, torch.ones(3)), -p.log().mean())
        with casting.disabled():
            F.binary_cross_entropy(p.to(dtype), torch.ones(3).to(dtype))


# -- switches


def is_cast():
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16


def test_disabled_nests_and_survives_exceptions():
    with o1() as casting:
        with casting.disabled():
            with pytest.raises(KeyError), casting.disabled():
                raise KeyError
            assert not is_cast()
            with casting.disabled() as off, off.paused():
                assert not is_cast()
            with casting.state.region(True) as on:
                assert is_cast()
                with on.paused():
                    assert not is_cast()
            assert not is_cast()
        assert is_cast()


def test_disabled_reaches_its_own_thread_only():
    with o1() as casting:
        entered, looked = threading.Event(), threading.Event()

        def other():
            with casting.disabled():
                entered.set()
                looked.wait(60)

        thread = threading.Thread(target=other)
        thread.start()
        assert entered.wait(60)
        here = is_cast()
        looked.set()
        thread.join()
        assert here and is_cast()


# -- install and close


def test_close_gives_torch_back_by_identity():
    before = namespaces()
    casting = Casting(torch.bfloat16, device_types=("cpu",))
    casting.install()
    assert len(differences(before)) > 300
    casting.register(CastKind.FP32, torch, "sigmoid")
    casting.register(CastKind.LOWER_PRECISION_FP, torch, "exp")
    assert active_casting() is casting
    casting.close()
    assert differences(before) == []
    assert active_casting() is None


def test_install_that_fails_midway_gives_torch_back(monkeypatch):
    before = namespaces()
    casting = Casting(torch.bfloat16, device_types=("cpu",))
    monkeypatch.setattr(engine_module, "patch_torch", lambda patches, casting: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        casting.install()
    assert differences(before) == []
    assert active_casting() is None


def test_second_engine_is_refused_while_one_is_installed():
    with o1() as casting, pytest.raises(ConfigurationError, match="close"):
        Casting(torch.bfloat16).install()
    assert not casting.is_on()


def test_kept_wrapper_is_inert_after_close():
    with o1():
        mm, linear = torch.mm, F.linear
    x = torch.rand(2, 2)
    assert mm(x, x).dtype is torch.float32
    assert linear(x, x).dtype is torch.float32


def test_everything_in_the_tables_is_patched_but_native_rows_that_autocast_leaves_alone():
    rules = expand(tables_for("default"))
    originals = {(rule.owner, rule.name): getattr(rule.owner, rule.name) for rule in rules}
    with o1():
        for rule in rules:
            patched = getattr(rule.owner, rule.name) is not originals[rule.owner, rule.name]
            wanted = rule.kind is not CastKind.NATIVE or autocast_would_cast(rule)
            assert patched is wanted, (rule.owner, rule.name)


def test_policy_apex_brings_tensors_to_the_host_as_float32():
    low = torch.rand(2).bfloat16()
    with o1(policy="apex"):
        assert low.cpu().dtype is torch.float32
    with o1():
        assert low.cpu().dtype is torch.bfloat16


def scripted(x):
    return F.softmax(torch.mm(x, x), dim=-1) @ x + F.cross_entropy(x, x) + F.mse_loss(x, x.T)


def test_scripting_other_code_works_while_active():
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
            F.softmax(layer(x), dim=-1)
    assert caplog.messages.count("Float->BFloat16 (conv2d)") == 3
    assert "BFloat16->Float (softmax)" in caplog.messages


# -- models


class Block(nn.Module):
    """A GPT block: separate q, k and v, attention, and a two-layer perceptron."""

    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads = heads
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        h = self.first_norm(x)
        q, k, v = (layer(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.second_norm(x))


def vit():
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.VisionTransformer(
        image_size=8, patch_size=4, num_layers=1, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=4
    )
    nn.init.normal_(model.heads.head.weight)  # zero at first, which would hide everything before it
    return model


class Attention(nn.Module):
    def __init__(self, need_weights):
        super().__init__()
        self.attention, self.need_weights = nn.MultiheadAttention(16, 2, batch_first=True), need_weights

    def forward(self, x):
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.transformer(x, x, tgt_mask=mask)


class Padded(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)

    def forward(self, x):
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[:, -1] = True
        return self.encoder(x, src_key_padding_mask=padding)[:, :-1]


MODELS = {
    "GPT block": (Block, (2, 5, 16)),
    "ViT": (vit, (2, 3, 8, 8)),
    "attention": (lambda: Attention(False), (2, 5, 16)),
    "attention with weights": (lambda: Attention(True), (2, 5, 16)),
    "Transformer": (Seq2Seq, (2, 5, 16)),
    "padded encoder": (Padded, (2, 5, 16)),
    "post-norm encoder layer": (
        lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
        (2, 5, 16),
    ),
    "convolutions with batch norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)),
        (4, 3, 8, 8),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_model_trains_with_gradients_close_to_float32(name):
    build, shape = MODELS[name]
    model, x = build(), torch.rand(shape)
    reference = copy.deepcopy(model)
    reference(x).float().square().mean().backward()
    with o1() as casting:
        model(x).float().square().mean().backward()
        used = casts_made(casting)
    assert used is None or used >= 2, "no weight was cast"
    gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
    expected = torch.cat([p.grad.flatten() for p in reference.parameters()])
    assert gradients.dtype is torch.float32
    assert torch.nn.functional.cosine_similarity(gradients, expected, dim=0) > 0.995
    assert not torch.equal(gradients, expected), "nothing ran in lower precision"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_model_evaluates_close_to_float32(name, mode):
    build, shape = MODELS[name]
    model, x = build().eval(), torch.rand(shape)
    with mode():
        expected = model(x)
        with o1() as casting, casting.forward_scope():
            result = model(x)
    torch.testing.assert_close(result.float(), expected, rtol=5e-2, atol=5e-2)
    assert not torch.equal(result.float(), expected), "nothing ran in lower precision"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_forked_child_does_not_cast():
    with o1():
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            x = torch.ones(2, 2)
            is_off = torch.mm(x, x).dtype is torch.float32 and active_casting() is None
            with torch.autocast("cpu"):  # which leaves softmax as it is, unlike O1
                is_off &= torch.softmax(x.bfloat16(), 0).dtype is torch.bfloat16
            os.write(write, b"1" if is_off else b"0")
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(read, 1) == b"1"
        assert is_cast(), "the parent was switched off"
    assert engine_module._active is None
