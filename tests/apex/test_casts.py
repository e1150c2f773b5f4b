"""O1 through ``amp.init``: which dtype comes out of what, in float16 on the CPU."""

import types

import pytest
import torch
import torch.nn.functional as F
from loops import backward, initialized
from torch import nn

pytestmark = pytest.mark.switch

HALF, FLOAT = torch.float16, torch.float32
B, H = 4, 8


@pytest.fixture
def handle(amp):
    handle = amp.init(enabled=True)
    assert handle.is_active()
    yield handle
    handle._deactivate()


SQUARE, KERNEL, ONES = torch.ones(H, H), torch.ones(2, 1, 3, 3), torch.ones(H)
# A call on a batch, and the dtypes that come out for float32 and for float16. What else is cast, and how: tests/o1.
CALLS = {
    "linear": (lambda x: F.linear(x, SQUARE), HALF, HALF),
    "softmax": (lambda x: F.softmax(x, dim=1), FLOAT, FLOAT),
    "power": (lambda x: x**2.0, FLOAT, FLOAT),
    "to the host": (lambda x: x.cpu(), FLOAT, FLOAT),
    "relu": (F.relu, FLOAT, HALF),
    "batch norm": (lambda x: F.batch_norm(x, torch.zeros(H), ONES.clone(), training=True), FLOAT, HALF),
    "mixed": (lambda x: torch.atan2(x, ONES), FLOAT, FLOAT),
    "promoted": (lambda x: torch.atan2(x, x + x), FLOAT, HALF),
    "cells of LSTM": (lambda x: nn.LSTMCell(H, H)(x, nn.LSTMCell(H, H)(x))[0], HALF, HALF),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_cast_by_apexs_lists_in_float16(handle, name):
    call, *expected = CALLS[name]
    for dtype, out in zip((FLOAT, HALF), expected):
        x = torch.randn(B, H, dtype=dtype).requires_grad_()
        y = call(x)
        assert y.dtype is out
        y.float().sum().backward()
        assert x.grad.dtype is dtype


def test_bce_is_refused_unless_allowed(amp, handle):
    target = torch.rand(B, H)
    half = torch.rand(B, H).half()
    for function in (nn.BCELoss(), F.binary_cross_entropy):
        with pytest.raises(NotImplementedError):
            function(half, target)
    handle._deactivate()
    amp.init(allow_banned=True)
    for function in (nn.BCELoss(), F.binary_cross_entropy):
        assert function(half, target).dtype is FLOAT


def test_disabled_casts_leave_torch_alone(amp):
    handle = amp.init(enabled=False)
    linear = nn.Linear(H, H)
    assert not handle.is_active() and linear(torch.randn(B, H)).dtype is FLOAT
    with pytest.raises(RuntimeError):
        linear(torch.randn(B, H).half())


def test_disabled_handle_yields_losses_and_keeps_no_optimizer(amp):
    handle = amp.init(enabled=False)
    linear = nn.Linear(H, H)
    optimizer, loss = torch.optim.SGD(linear.parameters(), lr=0.1), linear(torch.randn(B, H)).sum()
    with handle.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
    assert handle.wrap_optimizer(optimizer).param_groups is optimizer.param_groups
    assert handle._all_wrappers == [] and handle._unwrapped == {}


@pytest.mark.compiled("wrappers")  # without them nothing is kept
def test_the_handle_clears_its_cache(amp, handle):
    linear = nn.Linear(H, H)
    linear(torch.randn(B, H))
    assert handle.has_cache and linear.weight in handle.cache
    handle.remove_cache(linear.weight)
    assert linear.weight not in handle.cache and linear.bias in handle.cache
    handle._clear_cache()
    assert handle.cache == {}


def test_the_handle_switches_and_ends(amp, handle):
    linear, x = nn.Linear(H, H), torch.randn(B, H)
    with handle._disable_casts():
        assert not handle.is_active() and linear(x).dtype is FLOAT
    handle._is_active = False
    assert linear(x).dtype is FLOAT
    handle._is_active = True
    assert handle._is_active and linear(x).dtype is HALF
    handle._deactivate()
    assert not handle.is_active() and linear(x).dtype is FLOAT


def test_without_caching_every_use_is_cast_again(amp):
    handle = amp.init(enable_caching=False)
    linear = nn.Linear(H, H)
    linear(torch.randn(B, H))
    assert not handle.has_cache and handle.cache == {}


def test_functions_of_the_user(amp):
    halved, floated = amp.half_function(lambda x: x), amp.float_function(lambda x: x)
    promoted = amp.promote_function(lambda x, y: (x, y))
    box = types.SimpleNamespace(twice=lambda x: x * 2)
    x = torch.ones(2)
    assert halved(x).dtype is FLOAT  # identity before init
    amp.register_half_function(box, "twice")
    with pytest.raises(ValueError, match="nothing"):
        amp.register_float_function(box, "nothing")
    handle = amp.init()
    assert halved(x).dtype is HALF and floated(x.half()).dtype is FLOAT
    assert [y.dtype for y in promoted(x, x.half())] == [FLOAT, FLOAT]
    assert box.twice(x).dtype is HALF
    handle._deactivate()
    assert box.twice(x).dtype is FLOAT


def test_lists_have_apexs_promoted_functions_without_sequences_and_writes():
    from apex.amp.lists import tensor_overrides as tensor
    from apex.amp.lists import torch_overrides as functions

    assert {"addcdiv", "addcmul", "atan2", "cross", "bilinear", "dot"} <= set(functions.CASTS)
    assert {"__add__", "__iadd__", "__eq__", "atan2"} <= set(tensor.CASTS)
    assert not {"cat", "stack", "add_", "__ipow__"} & {*functions.CASTS, *tensor.CASTS}


def test_lists_edited_by_a_script_are_followed(amp, monkeypatch):
    from apex.amp.lists import functional_overrides as functions

    assert "softmax" in functions.FP32_FUNCS and "linear" in functions.FP16_FUNCS
    for name in ("FP32_FUNCS", "FP16_FUNCS"):
        monkeypatch.setattr(functions, name, list(getattr(functions, name)))
    functions.FP32_FUNCS.remove("softmax")
    functions.FP16_FUNCS.append("softmax")
    functions.FP32_FUNCS.remove("gelu")
    handle = amp.init()
    assert F.softmax(torch.randn(B, H), dim=1).dtype is HALF
    assert F.gelu(torch.randn(B).half()).dtype is HALF
    handle._deactivate()
    assert F.softmax(torch.randn(B, H), dim=1).dtype is FLOAT


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(H, H)
        self.norm = nn.LayerNorm(H)
        self.seen, self.outputs = [], []

    def loss(self, x):
        self.seen.append(x.dtype)
        return x.square().mean()

    def forward(self, x):
        return self.loss(self.fc(torch.softmax(self.norm(self.fc(x)), dim=-1) + F.softmax(x, dim=-1)))


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_init_beside_initialize_casts_in_models_of_every_level(amp, level, when):
    """ESPnet calls init after initialize, whatever the level, to have its loss in float32."""
    torch.manual_seed(0)
    model, x = WithLoss(), torch.randn(B, H)
    exact = model(x)
    handles = [amp.init()] if when == "before" else []
    model, optimizer = initialized(model, opt_level=level)
    amp.register_float_function(WithLoss, "loss")
    handles += [amp.init()] if when == "after" else []
    model.seen.clear()
    model.fc.register_forward_hook(lambda module, args, out: model.outputs.append(out.dtype))
    loss = model(x)
    assert model.seen == [FLOAT] and loss.dtype is FLOAT
    assert model.outputs[-1] is HALF
    torch.testing.assert_close(loss, exact, rtol=1e-2, atol=1e-3)
    backward(loss, optimizer)
    assert all(param.grad.isfinite().all() for param in amp.master_params(optimizer))
    handles[0]._deactivate()
    model(x)
    assert model.seen[-1] is model.outputs[-1] is (HALF if level == "O2" else FLOAT)
