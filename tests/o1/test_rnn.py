"""Recurrent layers under O1, against the same layers in float32."""

import copy
import warnings

import pytest
import torch
from helpers import casts_made, o1
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import ampkit

pytestmark = pytest.mark.switch

LAYERS = {
    "LSTM": lambda **kw: nn.LSTM(4, 6, **kw),
    "GRU": lambda **kw: nn.GRU(4, 6, **kw),
    "RNN tanh": lambda **kw: nn.RNN(4, 6, **kw),
    "RNN relu": lambda **kw: nn.RNN(4, 6, nonlinearity="relu", **kw),
}
LENGTHS = torch.tensor([5, 3, 2])


def padded(output):
    return pad_packed_sequence(output)[0] if isinstance(output, PackedSequence) else output


def hidden(state):
    return torch.cat([h.float().flatten() for h in (state if isinstance(state, tuple) else (state,))])


def compare(layer, x, state=None):
    """Check that outputs, states and gradients under O1 are near float32's, in lower precision, and not equal to float32's."""
    reference = copy.deepcopy(layer)
    arguments = (x,) if state is None else (x, state)
    expected, expected_state = reference(*arguments)
    padded(expected).square().sum().backward()
    with o1() as casting:
        output, final = layer(*arguments)
        assert padded(output).dtype is torch.bfloat16
        padded(output).float().square().sum().backward()
        assert casts_made(casting) is None or casts_made(casting) >= len(list(layer.parameters()))
    assert type(output) is type(expected)
    torch.testing.assert_close(padded(output).float(), padded(expected), rtol=3e-2, atol=3e-2)
    torch.testing.assert_close(hidden(final), hidden(expected_state), rtol=3e-2, atol=3e-2)
    for ours, plain in zip(layer.parameters(), reference.parameters(), strict=True):
        assert ours.grad.dtype is torch.float32
        similarity = torch.nn.functional.cosine_similarity(ours.grad.flatten(), plain.grad.flatten(), dim=0)
        assert similarity > 0.995
    assert not torch.equal(padded(output).float(), padded(expected))


#: A layer, and what it is given.
CASES = {
    **{name: (make(), (5, 3, 4)) for name, make in LAYERS.items()},
    "two layers": (nn.LSTM(4, 6, num_layers=2), (5, 3, 4)),
    "batch first": (nn.GRU(4, 6, batch_first=True), (5, 3, 4)),
    "no bias": (nn.LSTM(4, 6, bias=False), (5, 3, 4)),
    "projected": (nn.LSTM(4, 6, proj_size=3), (5, 3, 4)),
    "unbatched": (nn.LSTM(4, 6), (5, 4)),
    "unbatched RNN": (nn.RNN(4, 6), (5, 4)),
}


@pytest.mark.parametrize("case", CASES)
def test_layer_trains_close_to_float32(case):
    layer, shape = CASES[case]
    compare(copy.deepcopy(layer), torch.rand(shape))


@pytest.mark.parametrize("name", LAYERS)
def test_packed_layer_trains_close_to_float32(name):
    compare(LAYERS[name](bidirectional=True), pack_padded_sequence(torch.rand(5, 3, 4), LENGTHS))


def note_calls(monkeypatch, device_type):
    """Replace `_VF.lstm`: note the dtypes of weights and whether autocast is on, for each call; compute nothing."""
    calls = []

    def lstm(x, state, weights, *rest):
        calls.append(({weight.dtype for weight in weights}, torch.is_autocast_enabled(device_type)))
        return x.new_zeros(*x.shape[:2], 6), *state

    monkeypatch.setattr(torch._VF, "lstm", lstm)
    return calls


@pytest.mark.parametrize("precision", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("for_cudnn", [True, False])
def test_weights_are_autocasts_to_cast_only_in_float16_and_for_cudnn(monkeypatch, precision, for_cudnn):
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda tensor: for_cudnn)
    calls = note_calls(monkeypatch, "cpu")
    with o1(precision):
        nn.LSTM(4, 6)(torch.rand(5, 3, 4))
    assert calls == [({torch.float32}, True) if for_cudnn and precision is torch.float16 else ({precision}, False)]


@pytest.mark.cuda
@pytest.mark.parametrize("precision", [torch.float16, torch.bfloat16])
def test_weights_for_cudnn_are_cast_by_autocast_into_one_chunk_in_float16_alone(monkeypatch, precision):
    layer, x = nn.LSTM(4, 6).cuda(), torch.rand(5, 3, 4, device="cuda")
    calls = note_calls(monkeypatch, "cuda")
    ampkit.initialize(layer, opt_level="O1", patch_torch_functions_type=precision, verbosity=0)
    with torch.backends.cudnn.flags(enabled=True):
        layer(x)
        with torch.backends.cudnn.flags(enabled=False):
            layer(x)
    alone = ({precision}, False)
    assert calls == [({torch.float32}, True) if precision is torch.float16 else alone, alone]


@pytest.mark.cuda
@pytest.mark.parametrize("precision", [torch.float16, torch.bfloat16])
@pytest.mark.skipif(not torch.backends.cudnn.enabled, reason="needs cuDNN")
def test_layer_on_a_gpu_trains_close_to_float32_and_without_a_warning(precision):
    layer, x = nn.LSTM(4, 6, num_layers=2).cuda(), torch.rand(5, 3, 4, device="cuda")
    expected = layer(x)[0]
    expected.square().sum().backward()
    gradients = [param.grad.clone() for param in layer.parameters()]
    layer.zero_grad()
    ampkit.initialize(layer, opt_level="O1", patch_torch_functions_type=precision, verbosity=0)
    with warnings.catch_warnings():
        if precision is torch.float16:
            warnings.simplefilter("error")
        output = layer(x)[0]
    assert output.dtype is precision
    output.float().square().sum().backward()
    torch.testing.assert_close(output.float(), expected, rtol=3e-2, atol=3e-2)
    for param, gradient in zip(layer.parameters(), gradients, strict=True):
        assert nn.functional.cosine_similarity(param.grad.flatten(), gradient.flatten(), dim=0) > 0.995


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_takes_a_state_of_either_dtype(dtype):
    layer, x, zero = nn.LSTM(4, 6), torch.rand(5, 3, 4), torch.zeros(1, 3, 6)
    expected, _ = layer(x, (zero, zero))
    with o1():
        output, _ = layer(x, (zero.to(dtype), zero.to(dtype)))
    torch.testing.assert_close(output.float(), expected, rtol=3e-2, atol=3e-2)


def test_layer_with_dropout_trains():
    layer = nn.LSTM(4, 6, num_layers=2, dropout=0.5)
    with o1():
        layer(torch.rand(5, 3, 4))[0].float().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("name", LAYERS)
def test_layer_takes_the_output_of_a_whitelisted_layer(name):
    model, x = nn.Linear(4, 4), torch.rand(5, 3, 4)
    layer = LAYERS[name]()
    expected, _ = layer(model(x))
    with o1():
        output, _ = layer(model(x))
    assert output.dtype is torch.bfloat16
    torch.testing.assert_close(output.float(), expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell], ids=lambda cell: cell.__name__)
def test_cell_runs_in_lower_precision(cell):
    layer, x = cell(4, 6), torch.rand(3, 4)
    expected = layer(x)
    with o1() as casting, casting.caches.call():
        first = layer(x)
        layer(x, first)
        assert casts_made(casting) in (4, None)
    assert hidden(first).shape == hidden(expected).shape
    torch.testing.assert_close(hidden(first), hidden(expected), rtol=3e-2, atol=3e-2)
    assert (first[0] if isinstance(first, tuple) else first).dtype is torch.bfloat16


def test_layer_still_checks_the_shape_of_its_input():
    with o1(), pytest.raises(RuntimeError, match="Expected 4, got 5"):
        nn.LSTM(4, 6)(torch.rand(5, 3, 5).bfloat16())


def test_layer_still_refuses_a_foreign_dtype():
    with o1(), pytest.raises(RuntimeError, match="must have the same dtype, but got Double and Float"):
        nn.LSTM(4, 6)(torch.rand(5, 3, 4, dtype=torch.float64))


def test_layer_refuses_mixed_dtypes_while_casting_is_disabled():
    said = "does not match weight dtype|must have the type"  # the second by torch 2.10
    with o1() as casting, casting.disabled(), pytest.raises(ValueError, match=said):
        nn.LSTM(4, 6)(torch.rand(5, 3, 4).bfloat16())
