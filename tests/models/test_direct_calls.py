"""Submodules of a model at O2, O3, O5 that are called on their own, as ``generate`` of encoder-decoder models does."""

import copy

import pytest
import torch
from helpers import saved_and_loaded
from torch import nn

import ampkit
from ampkit.models.direct_calls import _cast_if_outside

LOW = torch.bfloat16


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(6, 8, 3, padding=1)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.norm = nn.LayerNorm(8)

    def forward(self, x, scale=None):
        hidden = self.conv(x).transpose(1, 2)
        if scale is not None:
            hidden = hidden * scale
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        return self.norm(hidden)


class Translator(nn.Module):
    """As in transformers: the parts lie one level down, and a method calls them one after the other."""

    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.encoder = Encoder()
        self.model.decoder = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x=None, encoded=None):
        encoded = self.model.encoder(x) if encoded is None else encoded
        return self.head(self.model.decoder(encoded)[0])

    def generate(self, x):
        return self(encoded=self.model.encoder(x))


def translator():
    torch.manual_seed(0)
    return Translator()


def sound():
    return torch.randn(2, 6, 10, generator=torch.Generator().manual_seed(1))


def cast(level="O2", lower=LOW, **settings):
    settings = settings if level == "O5" else {"cast_model_type": lower, **settings}
    return ampkit.initialize(translator(), opt_level=level, verbosity=0, **settings)


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_part_called_directly_computes_as_inside_the_model(level):
    exact = translator()
    inside = []
    model = cast(level)
    handle = model.model.encoder.register_forward_hook(lambda module, args, output: inside.append(output))
    with torch.no_grad():
        whole = model(sound())
        handle.remove()
        direct = model.model.encoder(sound())
        assert direct.dtype is LOW and torch.equal(direct, inside[0])
        assert torch.equal(model.generate(sound()), whole)
        torch.testing.assert_close(direct.float(), exact.model.encoder(sound()), rtol=0, atol=0.05)
        scaled = model.model.encoder(sound(), scale=torch.full((8,), 2.0))  # by name as well
        assert scaled.dtype is LOW
        # Layers that lie beside one another, with states in a tuple.
        assert model.head(torch.ones(3, 8)).dtype is LOW
        hidden = torch.zeros(1, 2, 8)
        assert model.model.decoder(direct.float(), hidden)[0].dtype is LOW


def test_gradients_flow_through_a_part_called_directly():
    exact, x = translator(), sound().requires_grad_()
    exact.model.encoder(x)[..., 0].sum().backward()
    wanted, x.grad = x.grad, None
    model = cast()
    model.model.encoder(x)[..., 0].sum().backward()
    assert x.grad.dtype is torch.float32
    assert (x.grad - wanted).norm() < 0.02 * wanted.norm()
    assert model.model.encoder.conv.weight.grad.dtype is LOW


def test_float64_integers_and_kept_parts_are_left():
    model = cast(keep_fp32=["head"])
    assert model.head(torch.ones(3, 8)).dtype is torch.float32
    with pytest.raises(RuntimeError, match=r"(?i)dtype|type"):
        model.model.encoder(sound().double())


def test_inside_a_forward_nothing_is_cast_twice():
    """What a model computes in float32 for one of its parts stays float32."""
    seen = []

    class Part(nn.Linear):
        def forward(self, x, angle):
            seen.append(angle.dtype)
            return super().forward(x) * angle.to(x.dtype)

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Part(4, 4)

        def forward(self, x):
            return self.part(x, torch.ones(4, dtype=torch.float32))

    model = ampkit.initialize(Whole(), opt_level="O2", verbosity=0, cast_model_type=LOW)
    model(torch.ones(2, 4))
    model.part(torch.ones(2, 4), torch.ones(4))
    assert seen == [torch.float32, LOW]


def test_layers_and_modules_in_float32_do_not_ask_who_called_them():
    model = cast()
    hooked = {name for name, module in model.named_modules() if _cast_if_outside in module._forward_pre_hooks.values()}
    assert hooked == {"model.encoder"}
    ampkit.close()
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("how", ["copied", "pickled"])
def test_part_of_a_copy_computes_in_float32(how):
    model = cast()
    twin = copy.deepcopy(model) if how == "copied" else saved_and_loaded(model, weights_only=False)
    assert torch.equal(twin.model.encoder(sound()), translator().model.encoder(sound()))
    assert torch.equal(twin(sound()), translator()(sound()))


@pytest.mark.parametrize("part", ["whole", "encoder"])
def test_compiled_parts_cast_too(part):
    model = translator()
    model.model.decoder = nn.RNNCell(8, 8)  # dynamo traces no layers of them
    model.forward = lambda x: model.head(model.model.decoder(model.model.encoder(x)[:, 0]))
    ampkit.initialize(model, opt_level="O2", verbosity=0, cast_model_type=LOW)
    called = model if part == "whole" else model.model.encoder
    with torch.no_grad():
        expected = called(sound())
        found = torch.compile(called, backend="aot_eager", fullgraph=True)(sound())
    assert found.dtype is expected.dtype
    torch.testing.assert_close(found, expected)
