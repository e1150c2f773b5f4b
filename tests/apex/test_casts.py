"""O1 through ``amp.init``: which dtype comes out of what, in float16 on the CPU."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytestmark = pytest.mark.switch

HALF, FLOAT = torch.float16, torch.float32
B, C, H, T = 4, 3, 8, 5

ALWAYS_HALF = {FLOAT: HALF, HALF: HALF}
ALWAYS_FLOAT = {FLOAT: FLOAT, HALF: FLOAT}
MATCHES_INPUT = {FLOAT: FLOAT, HALF: HALF}


@pytest.fixture
def handle(amp):
    handle = amp.init(enabled=True)
    assert handle.is_active()
    yield handle
    handle._deactivate()


def check(functions, expected, shape, backward=True):
    for function in functions:
        for dtype, out in expected.items():
            x = torch.randn(shape, dtype=dtype).requires_grad_()
            y = function(x)
            assert y.dtype is out
            if backward:
                y.float().sum().backward()
                assert x.grad.dtype is dtype


def test_linear_and_conv_run_in_half(handle):
    linear = nn.Linear(H, H)
    check([linear, partial(F.linear, weight=linear.weight, bias=linear.bias)], ALWAYS_HALF, (B, H))
    conv = nn.Conv2d(C, 4, 3)
    check([conv, partial(F.conv2d, weight=conv.weight, bias=conv.bias)], ALWAYS_HALF, (B, C, H, H))


def test_softmax_norms_and_losses_run_in_float(handle):
    target = torch.randn(B, H)
    check([nn.Softmax(dim=1), partial(F.softmax, dim=1)], ALWAYS_FLOAT, (B, H))
    check([nn.GroupNorm(2, 4), nn.LayerNorm([4, H])], ALWAYS_FLOAT, (B, 4, H))
    check([lambda x: nn.MSELoss()(x, target), lambda x: F.mse_loss(x, target)], ALWAYS_FLOAT, (B, H))


def test_relu_and_batch_norm_match_their_input(handle):
    check([nn.ReLU(), F.relu], MATCHES_INPUT, (B, H))
    norm = nn.BatchNorm2d(C)
    check([norm], MATCHES_INPUT, (B, C, H, H))
    norm.eval()
    inference = partial(
        F.batch_norm, running_mean=norm.running_mean, running_var=norm.running_var, weight=norm.weight, bias=norm.bias
    )
    check([norm, inference], MATCHES_INPUT, (B, C, H, H), backward=False)


def test_tensor_methods_and_operators(handle):
    other = torch.randn(H, H)
    check(
        [lambda x: x.matmul(other), lambda x: other.matmul(x), lambda x: x @ other, lambda x: other @ x],
        ALWAYS_HALF,
        (H, H),
    )
    check([lambda x: x.pow(2.0), lambda x: x**2.0, lambda x: x.sum(), lambda x: x.cpu()], ALWAYS_FLOAT, (B, H))


def test_bce_is_refused_unless_allowed(amp, handle):
    target = torch.rand(B, H)
    half = torch.rand(B, H).half()
    for function in (nn.BCELoss(), F.binary_cross_entropy):
        with pytest.raises(NotImplementedError):
            function(half, target)
    handle._deactivate()
    allowed = amp.init(allow_banned=True)
    for function in (nn.BCELoss(), F.binary_cross_entropy):
        assert function(half, target).dtype is FLOAT
    allowed._deactivate()


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


@pytest.mark.parametrize("name", ["atan2", "mul", "add", "div"])
@pytest.mark.parametrize("ours", [FLOAT, HALF])
@pytest.mark.parametrize("theirs", [FLOAT, HALF])
def test_elementwise_functions_take_the_widest(handle, name, ours, theirs):
    widest = FLOAT if FLOAT in (ours, theirs) else HALF
    for function in (getattr(torch, name), lambda x, y: getattr(x, name)(y)):
        x = torch.rand(B, dtype=ours).requires_grad_()
        y = torch.rand(B, dtype=theirs) + 0.5
        out = function(x, y)
        assert out.dtype is widest
        out.float().sum().backward()
        assert x.grad.dtype is ours


def test_cat_and_stack_take_the_widest(handle):
    halves = [torch.randn(B).half() for _ in range(3)]
    assert torch.cat([*halves, torch.randn(B)]).dtype is FLOAT
    assert torch.stack(halves).dtype is HALF


def test_in_place_functions_keep_their_tensor(handle):
    for ours in (FLOAT, HALF):
        for theirs in (FLOAT, HALF):
            leaf = torch.randn(B, dtype=ours).requires_grad_()
            x = leaf.clone()
            out = x.add_(torch.randn(B, dtype=theirs))
            assert out is x and x.dtype is ours
            out.float().sum().backward()
            assert leaf.grad.dtype is ours
    x = storage = torch.zeros(B).half()
    x += torch.ones(B)
    assert x is storage and x.dtype is HALF and x.eq(1).all()  # Apex left the storage as it was
    with pytest.raises(NotImplementedError):
        torch.randn(B).half().exp_()
    torch.randn(B).exp_()


CELLS = {"rnn": nn.RNNCell, "gru": nn.GRUCell, "lstm": nn.LSTMCell}
LAYERS = {"rnn": partial(nn.RNN, nonlinearity="relu"), "tanh": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_recurrent_cells_run_in_half(handle, kind, dtype):
    cell = CELLS[kind](H, H)
    xs = [torch.randn(B, H, dtype=dtype).requires_grad_() for _ in range(T)]
    state = torch.zeros(B, H, dtype=dtype)
    hidden = (state, state) if kind == "lstm" else state
    for x in xs:
        hidden = cell(x, hidden)
        out = hidden[0] if kind == "lstm" else hidden
        assert out.dtype is HALF
    out.float().sum().backward()
    assert all(x.grad.dtype is dtype for x in xs)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("layers, both_ways, dtype", [(1, False, HALF), (2, True, FLOAT)])
def test_recurrent_layers_run_in_half(handle, kind, layers, both_ways, dtype):
    layer = LAYERS[kind](H, H, num_layers=layers, bidirectional=both_ways)
    x = torch.randn(T, B, H, dtype=dtype).requires_grad_()
    state = torch.zeros(layers * (1 + both_ways), B, H, dtype=dtype)
    out, _ = layer(x, (state, state) if kind == "lstm" else state)
    assert out.dtype is HALF
    out[-1].float().sum().backward()
    assert x.grad.dtype is dtype


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
    handle._deactivate()


def test_functions_of_the_user(amp):
    @amp.half_function
    def halved(x):
        return x

    @amp.float_function
    def floated(x):
        return x

    @amp.promote_function
    def promoted(x, y):
        return x, y

    class Box:
        @staticmethod
        def twice(x):
            return x * 2

    x = torch.ones(2)
    assert halved(x).dtype is FLOAT  # identity before init
    amp.register_half_function(Box, "twice")
    with pytest.raises(ValueError, match="nothing"):
        amp.register_float_function(Box, "nothing")
    handle = amp.init()
    try:
        assert halved(x).dtype is HALF and floated(x.half()).dtype is FLOAT
        assert [y.dtype for y in promoted(x, x.half())] == [FLOAT, FLOAT]
        assert Box.twice(x).dtype is HALF
    finally:
        handle._deactivate()
    assert Box.twice(x).dtype is FLOAT


def test_lists_have_apexs_promoted_functions_without_sequences_and_writes():
    from apex.amp.lists import tensor_overrides as tensor
    from apex.amp.lists import torch_overrides as functions

    assert {"addcdiv", "addcmul", "atan2", "cross", "bilinear", "dot"} <= set(functions.CASTS)
    assert {"__add__", "__iadd__", "__eq__", "atan2"} <= set(tensor.CASTS)
    assert not {"cat", "stack", "add_", "__ipow__"} & {*functions.CASTS, *tensor.CASTS}


def test_lists_edited_by_a_script_are_followed(amp):
    from apex.amp.lists import functional_overrides as functions

    assert "softmax" in functions.FP32_FUNCS and "linear" in functions.FP16_FUNCS
    before = list(functions.FP32_FUNCS), list(functions.FP16_FUNCS)
    functions.FP32_FUNCS.remove("softmax")
    functions.FP16_FUNCS.append("softmax")
    functions.FP32_FUNCS.remove("gelu")
    handle = amp.init()
    try:
        assert F.softmax(torch.randn(B, H), dim=1).dtype is HALF
        assert F.gelu(torch.randn(B).half()).dtype is HALF
    finally:
        handle._deactivate()
        functions.FP32_FUNCS[:], functions.FP16_FUNCS[:] = before
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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handles = [amp.init()] if when == "before" else []
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    amp.register_float_function(WithLoss, "loss")
    handles += [amp.init()] if when == "after" else []
    model.seen.clear()
    model.fc.register_forward_hook(lambda module, args, out: model.outputs.append(out.dtype))
    loss = model(x)
    assert model.seen == [FLOAT] and loss.dtype is FLOAT
    assert model.outputs[-1] is HALF
    torch.testing.assert_close(loss, exact, rtol=1e-2, atol=1e-3)
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    assert all(param.grad.isfinite().all() for param in amp.master_params(optimizer))
    handles[0]._deactivate()
    model(x)
    assert model.seen[-1] is model.outputs[-1] is (HALF if level == "O2" else FLOAT)
