"""Recurrent layers under O1, against the same layers in float32."""

import copy
import functools
import warnings

import pytest
import torch
from helpers import casts_made, o1
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import ampkit

pytestmark = pytest.mark.switch


LAYERS = {
    "LSTM": functools.partial(nn.LSTM, 4, 6),
    "GRU": functools.partial(nn.GRU, 4, 6),
    "RNN tanh": functools.partial(nn.RNN, 4, 6),
    "RNN relu": functools.partial(nn.RNN, 4, 6, nonlinearity="relu"),
}


def padded(output):
    return pad_packed_sequence(output)[0] if isinstance(output, PackedSequence) else output


def hidden(state):
    return torch.cat([h.float().flatten() for h in (state if isinstance(state, tuple) else (state,))])


def state(dtype):
    return torch.zeros(1, 3, 6, dtype=dtype), torch.zeros(1, 3, 6, dtype=dtype)


def inputs(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


BATCH = inputs(5, 3, 4)
PACKED = pack_padded_sequence(BATCH, torch.tensor([5, 3, 2]))
#: A layer, and what it is given.
CASES = {
    **{name: (make, BATCH) for name, make in LAYERS.items()},
    **{
        f"{name} of packed input": (lambda make=make: make(bidirectional=True), PACKED) for name, make in LAYERS.items()
    },
    **{
        f"{name} after a linear layer": (lambda make=make: nn.Sequential(nn.Linear(4, 4), make()), BATCH)
        for name, make in LAYERS.items()
    },
    "no bias": (lambda: nn.LSTM(4, 6, bias=False), BATCH),
    "projected": (lambda: nn.LSTM(4, 6, proj_size=3), BATCH),
    "unbatched": (lambda: nn.LSTM(4, 6), inputs(5, 4)),
    "unbatched RNN": (lambda: nn.RNN(4, 6), inputs(5, 4)),
    "float32 state": (lambda: nn.LSTM(4, 6), BATCH, state(torch.float32)),
    "bfloat16 state": (lambda: nn.LSTM(4, 6), BATCH, state(torch.bfloat16)),
}


@pytest.mark.parametrize("case", CASES)
def test_layer_trains_in_lower_precision_and_close_to_float32(case):
    make, *arguments = CASES[case]
    layer = make()
    reference = copy.deepcopy(layer)
    expected, expected_state = reference(arguments[0], *([state(torch.float32)] if len(arguments) > 1 else []))
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
        assert nn.functional.cosine_similarity(ours.grad.flatten(), plain.grad.flatten(), dim=0) > 0.995
    assert not torch.equal(padded(output).float(), padded(expected))


@pytest.mark.parametrize("precision", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("for_cudnn", [True, False])
def test_weights_are_autocasts_to_cast_only_in_float16_and_for_cudnn(monkeypatch, precision, for_cudnn):
    calls = []

    def lstm(x, state, weights, *rest):
        calls.append(({weight.dtype for weight in weights}, torch.is_autocast_enabled("cpu")))
        return x.new_zeros(*x.shape[:2], 6), *state

    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda tensor: for_cudnn)
    monkeypatch.setattr(torch._VF, "lstm", lstm)
    with o1(precision):
        nn.LSTM(4, 6)(BATCH)
    assert calls == [({torch.float32}, True) if for_cudnn and precision is torch.float16 else ({precision}, False)]


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


@pytest.mark.parametrize(
    "x, said",
    [
        (torch.rand(5, 3, 5).bfloat16(), "Expected 4, got 5"),
        (torch.rand(5, 3, 4).double(), "must have the same dtype, but got Double and Float"),
    ],
)
def test_layer_still_refuses_what_torch_refuses(x, said):
    with o1(), pytest.raises(RuntimeError, match=said):
        nn.LSTM(4, 6)(x)


def test_layer_refuses_mixed_dtypes_while_casting_is_disabled():
    said = "does not match weight dtype|must have the type"  # the second by torch 2.10
    with o1() as casting, casting.disabled(), pytest.raises(ValueError, match=said):
        nn.LSTM(4, 6)(torch.rand(5, 3, 4).bfloat16())
