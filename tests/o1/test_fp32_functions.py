"""Functions that compute in float32 from a lower-precision input: as accurate as casting first, and half the bytes."""

import io

import pytest
import torch
import torch.nn.functional as F
from helpers import o1
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from ampkit.casting import fp32_functions, wrappers

pytestmark = pytest.mark.switch

LOW = [torch.bfloat16, torch.float16]
TARGET = torch.arange(64) % 96
IGNORING = TARGET.masked_fill(TARGET % 3 == 0, -100)
PIXELS = torch.arange(4 * 10).reshape(4, 2, 5) % 6


def classes(reduction, target=TARGET, **settings):
    return lambda x: F.cross_entropy(x, target, reduction=reduction, **settings)


# A shape of the input, the shapes of weights, and a call with them.
CASES = {
    "layer_norm": ((64, 96), [(96,), (96,)], lambda x, w, b: F.layer_norm(x, (96,), w, b)),
    "layer_norm over two": ((8, 6, 16), [(6, 16), (6, 16)], lambda x, w, b: F.layer_norm(x, (6, 16), w, b, 1e-3)),
    "layer_norm by keywords": ((64, 96), [(96,)], lambda x, w: F.layer_norm(input=x, normalized_shape=[96], weight=w)),
    "layer_norm of a permuted input": (
        (4, 96, 5, 3),
        [(96,), (96,)],
        lambda x, w, b: F.layer_norm(x.permute(0, 2, 3, 1), (96,), w, b),
    ),
    "torch.layer_norm": ((64, 96), [(96,), (96,)], lambda x, w, b: torch.layer_norm(x, (96,), w, b, 1e-5, False)),
    "group_norm": ((4, 12, 5, 3), [(12,), (12,)], lambda x, w, b: F.group_norm(x, 3, w, b)),
    "group_norm of channels_last": (
        (4, 12, 5, 3),
        [(12,), (12,)],
        lambda x, w, b: F.group_norm(x.contiguous(memory_format=torch.channels_last), 3, w, b),
    ),
    "group_norm of a transposed input": ((4, 5, 12), [(12,)], lambda x, w: F.group_norm(x.transpose(1, 2), 4, w)),
    "rms_norm": ((64, 96), [(96,)], lambda x, w: F.rms_norm(x, (96,), w)),
    "rms_norm over two, with eps": ((8, 6, 16), [(6, 16)], lambda x, w: F.rms_norm(x, (6, 16), w, eps=1e-2)),
    "torch.rms_norm without weights": ((64, 96), [], lambda x: torch.rms_norm(x, (96,))),
    "cross_entropy": ((64, 96), [], classes("mean")),
    "cross_entropy, sum": ((64, 96), [], classes("sum", IGNORING)),
    "cross_entropy, none": ((64, 96), [], classes("none", IGNORING)),
    "cross_entropy, mean without ignored": ((64, 96), [], classes("mean", IGNORING)),
    "cross_entropy, ignore_index": ((64, 96), [], classes("mean", ignore_index=5)),
    "cross_entropy of pixels": ((4, 6, 2, 5), [], classes("mean", PIXELS)),
}
# Which are cast first.
OTHER_FORMS = {
    "class weights": ((64, 96), [], lambda x: F.cross_entropy(x, TARGET, (torch.arange(96) % 4 + 0.5).to(x.dtype))),
    "label smoothing": ((64, 96), [], classes("mean", label_smoothing=0.1)),
    "probabilities": ((64, 96), [], lambda x: F.cross_entropy(x, F.one_hot(TARGET, 96).to(x.dtype))),
    "one sample": ((96,), [], classes("mean", TARGET[0])),
}
SAVING = ("layer_norm", "layer_norm by keywords", "torch.layer_norm", "group_norm", "rms_norm", "cross_entropy")


SHIPPED_THRESHOLD = fp32_functions.WORTHWHILE


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    """Remove the threshold, since the cases are small; tests of the shipped threshold restore it. Caches hold ten of 64 samples."""
    for module in (fp32_functions, wrappers):
        monkeypatch.setattr(module, "WORTHWHILE", 0)
    monkeypatch.setattr(fp32_functions, "_IN_CACHES", 10 * 96 // torch.get_num_threads())


def made(name, dtype):
    shape, weights, call = (CASES | OTHER_FORMS)[name]
    # An offset, as activations have one: it makes sums of squares inaccurate.
    x = (torch.randn(shape) + 0.5).to(dtype).requires_grad_()
    return x, [(torch.rand(size) + 0.5).requires_grad_() for size in weights], call


def gradients(call, tensors, factor):
    """[result, gradients...] for a gradient of ``factor`` flowing into the result."""
    result = call(*tensors)
    return [result.detach(), *torch.autograd.grad(result, tensors, factor.to(result.dtype))]


def error(found, reference):
    return ((found.double() - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("name", [*CASES, *OTHER_FORMS])
def test_as_accurate_as_casting_first(name, dtype):
    x, weights, call = made(name, dtype)
    doubles = [t.detach().double().requires_grad_() for t in (x, *weights)]
    factor = torch.randn_like(call(*doubles), dtype=torch.float32)
    exact = gradients(call, doubles, factor.double())
    cast_first = gradients(lambda x, *weights: call(x.float(), *weights), [x, *weights], factor)
    with o1(dtype):
        results = gradients(call, [x, *weights], factor)
    assert [t.dtype for t in results] == [torch.float32, dtype] + [torch.float32] * len(weights)
    for result, cast_result, reference in zip(results, cast_first, exact, strict=True):
        assert error(result, reference) <= 1.5 * error(cast_result, reference) + 1e-7
    for result, reference in zip([results[0], *results[2:]], [exact[0], *exact[2:]], strict=True):
        assert error(result, reference) < 1e-6
    assert error(results[1], exact[1]) < torch.finfo(dtype).eps


def saved_by(call):
    """The tensors that autograd saves."""
    saved = []
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        call()
    return saved


@pytest.mark.parametrize("name", CASES)
def test_autograd_saves_no_float32_copy(name, in_python):
    x, weights, call = made(name, torch.bfloat16)
    with o1(in_python=in_python):
        saved = saved_by(lambda: call(x, *weights))
    assert [t.dtype for t in saved if t.numel() == x.numel()] == [torch.bfloat16]
    assert name != "layer_norm" or {t.data_ptr() for t in (x, *weights)} <= {t.data_ptr() for t in saved}


class LargestFloat32(TorchDispatchMode):
    """The most elements of a float32 tensor that is computed."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.dtype is torch.float32:
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("in_cache, samples", [(10 * 96, 10), (50, 1)])
def test_cross_entropy_goes_through_float32_a_few_samples_at_a_time(in_cache, samples, monkeypatch):
    monkeypatch.setattr(fp32_functions, "_IN_CACHES", in_cache)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    x = torch.randn(64, 96).bfloat16().requires_grad_()
    with o1():
        with LargestFloat32() as forward:
            loss = F.cross_entropy(x, TARGET)
        with LargestFloat32() as backward:
            loss.backward()
    assert forward.elements == backward.elements == max(samples * 96, 64)


@pytest.mark.parametrize("name", CASES)
def test_second_derivatives(name):
    x, weights, call = made(name, torch.bfloat16)

    factor = torch.randn_like(call(x.detach().float(), *weights))

    def penalty(call, tensors):
        first = torch.autograd.grad((call(*tensors) * factor).sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(g.double().square().sum() for g in first), tensors, allow_unused=True)

    exact = penalty(call, [t.detach().double().requires_grad_() for t in (x, *weights)])
    with o1():
        results = penalty(call, [x, *weights])
    assert exact[0] is not None
    for result, reference in zip(results, exact, strict=True):
        if reference is None or reference.count_nonzero() == 0:  # for a bias, on which no gradient depends
            assert result is None or result.count_nonzero() == 0
        else:
            assert error(result, reference) < 2e-2  # the first gradient of x is rounded to bfloat16


@pytest.mark.parametrize("name", ["layer_norm", "group_norm", "rms_norm"])
@pytest.mark.parametrize("wanted", [(True, False), (False, True)], ids=["input only", "weights only"])
def test_only_the_gradients_that_are_asked_for(name, wanted):
    x, weights, call = made(name, torch.bfloat16)
    x.requires_grad_(wanted[0])
    for weight in weights:
        weight.requires_grad_(wanted[1])
    expected = torch.autograd.grad(
        call(x.float(), *weights).square().sum(), tensors := [t for t in (x, *weights) if t.requires_grad]
    )
    with o1():
        found = torch.autograd.grad(call(x, *weights).square().sum(), tensors)
    for ours, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=8e-3, atol=1e-5)


def test_hooks_on_weights_run_once():
    x, weights, call = made("layer_norm", torch.bfloat16)
    calls = []
    weights[0].register_hook(lambda grad: calls.append(grad))
    with o1():
        torch.autograd.grad(call(x, *weights).sum(), [x, *weights], create_graph=True)
    assert len(calls) == 1


@pytest.mark.parametrize("name", SAVING)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_under_activation_checkpointing(name, use_reentrant):
    x, weights, call = made(name, torch.bfloat16)
    with o1():
        expected = torch.autograd.grad(call(x, *weights).square().sum(), [x, *weights])
        result = checkpoint(call, x, *weights, use_reentrant=use_reentrant).square().sum()
        result.backward()
    for ours, reference in zip([x.grad, *(w.grad for w in weights)], expected, strict=True):
        assert torch.equal(ours, reference)


@pytest.mark.parametrize("name", SAVING)
def test_under_the_transforms_of_torch_func_and_in_forward_mode(name):
    x, weights, call = made(name, torch.bfloat16)
    x, direction = x.detach(), torch.randn_like(x)
    doubles = [t.detach().double() for t in (x, *weights)]
    exact = torch.func.jvp(lambda x: call(x, *doubles[1:]), (doubles[0],), (direction.double(),))[1]
    with o1():
        slope = torch.func.grad(lambda x: call(x, *weights).sum())(x)
        expected = torch.autograd.grad(call(y := x.clone().requires_grad_(), *weights).sum(), y)[0]
        tangent = torch.func.jvp(lambda x: call(x, *weights), (x,), (direction,))[1]
        with forward_ad.dual_level():
            result = call(forward_ad.make_dual(x, direction), *weights)
            of_dual = forward_ad.unpack_dual(result).tangent
    torch.testing.assert_close(slope, expected, rtol=8e-3, atol=1e-4)
    assert error(tangent.detach(), exact) < 1e-5 and error(of_dual.detach(), exact) < 1e-5


@pytest.mark.parametrize("name", SAVING)
def test_without_grad_mode_and_in_inference_mode(name):
    x, weights, call = made(name, torch.bfloat16)
    with o1():
        expected = call(x.float(), *weights).detach()
        with torch.no_grad():
            torch.testing.assert_close(call(x, *weights), expected)
        with torch.inference_mode():
            made_here = x.clone()
            torch.testing.assert_close(call(made_here, *weights), expected)
        torch.testing.assert_close(call(made_here, *weights).detach(), expected)


def test_traced_and_saved():
    model = nn.Sequential(nn.Linear(96, 96), nn.LayerNorm(96), nn.RMSNorm(96))
    x = torch.randn(64, 96)
    with o1():
        expected = model(x)
        traced = torch.jit.trace(model, x, check_trace=False)
    buffer = io.BytesIO()
    torch.jit.save(traced, buffer)
    buffer.seek(0)
    torch.testing.assert_close(torch.jit.load(buffer)(x), expected)


def test_losses_over_ignored_targets_only_are_torchs():
    x, ignored = torch.randn(4, 8).bfloat16().requires_grad_(), torch.full((4,), -100)
    with o1():
        assert F.cross_entropy(x, ignored).isnan() and F.cross_entropy(x, ignored, reduction="sum") == 0.0


@pytest.mark.parametrize("lowest", [-float("inf"), torch.finfo(torch.bfloat16).min])
def test_classes_that_a_script_rules_out_get_no_gradient(lowest):
    x = torch.randn(64, 96).bfloat16()
    x[:, :3] = lowest
    x.requires_grad_()
    exact = F.cross_entropy(y := x.detach().double().requires_grad_(), TARGET.clamp(min=3))
    exact.backward()
    with o1():
        loss = F.cross_entropy(x, TARGET.clamp(min=3))
        loss.backward()
    assert error(loss.detach(), exact.detach()) < 1e-6
    assert error(x.grad, y.grad) < 4e-3
    assert x.grad[:, :3].count_nonzero() == 0


def test_confident_predictions_keep_their_small_losses():
    x = torch.zeros(64, 96).scatter_(1, TARGET[:, None], 16.0).bfloat16().requires_grad_()
    exact = F.cross_entropy(x.double(), TARGET)  # log(1 + 95 * exp(-16)) = 1.07e-5
    with o1():
        torch.testing.assert_close(F.cross_entropy(x, TARGET).double(), exact, rtol=2e-2, atol=0)


# Calls on an input of any number of rows, 64 wide.
OF_ROWS = {
    "layer_norm": (2, lambda x, w, b: F.layer_norm(x, (64,), w, b)),
    "group_norm": (2, lambda x, w, b: F.group_norm(x, 4, w, b)),
    "rms_norm": (1, lambda x, w: F.rms_norm(x, (64,), w)),
    "cross_entropy": (0, lambda x: F.cross_entropy(x, torch.arange(len(x)) % 64)),
}


@pytest.mark.parametrize("rows, kept", [(1023, torch.float32), (1024, torch.bfloat16)])
@pytest.mark.parametrize("name", OF_ROWS)
def test_inputs_of_65536_elements_and_more_are_kept_in_lower_precision(name, rows, kept, in_python, monkeypatch):
    for module in (fp32_functions, wrappers):
        monkeypatch.setattr(module, "WORTHWHILE", SHIPPED_THRESHOLD)
    number, call = OF_ROWS[name]
    x = (torch.randn(rows, 64) + 0.5).bfloat16().requires_grad_()
    weights = [(torch.rand(64) + 0.5).requires_grad_() for _ in range(number)]
    with o1(in_python=in_python):
        saved = saved_by(lambda: call(x, *weights))
    assert {t.dtype for t in saved if t.numel() == x.numel()} == {kept}


@pytest.mark.parametrize("call", ["softmax", "log_softmax", "sum", "prod", "cumsum", "cumprod"])
def test_dtype_is_passed_where_the_kernels_convert(call, monkeypatch):
    """The kernels of other devices than the CPU convert; the meta device shows the dtypes."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    x = torch.randn(4, 8, device="meta", dtype=torch.float16)
    with o1() as casting:
        casting.cast_on({"cpu", "meta"})
        for function in (getattr(torch, call), getattr(torch.Tensor, call)):
            assert function(x, -1).dtype is torch.float32
            assert function(x, -1, dtype=torch.float64).dtype is torch.float64
            assert function(x, -1, dtype=torch.float16).dtype is torch.float16
        if "softmax" in call:
            assert getattr(F, call)(x, dim=-1).dtype is torch.float32
