"""Parts and weights of a model at O2 and O3 that are used on their own, as ``generate`` of encoder-decoder models does."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ampkit

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
    """A model as in transformers: its parts lie one level down, and a method calls them one after the other."""

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


SOUND = torch.randn(2, 6, 10, generator=torch.Generator().manual_seed(1))


def cast(level="O2"):
    return ampkit.initialize(translator(), opt_level=level, verbosity=0)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_part_called_directly_computes_as_inside_the_model(level):
    exact = translator()
    inside = []
    model = cast(level)
    handle = model.model.encoder.register_forward_hook(lambda module, args, output: inside.append(output))
    with torch.no_grad():
        whole = model(SOUND)
        handle.remove()
        direct = model.model.encoder(SOUND)
        assert direct.dtype is LOW and torch.equal(direct, inside[0])
        assert not any(module._forward_pre_hooks for module in model.modules())
        assert torch.equal(model.generate(SOUND), whole)
        torch.testing.assert_close(direct.float(), exact.model.encoder(SOUND), rtol=0, atol=0.05)
        scale = torch.full((8,), 2.0)
        scaled, wanted = model.model.encoder(SOUND, scale=scale), exact.model.encoder(SOUND, scale=scale)
        torch.testing.assert_close(scaled.float(), wanted, rtol=0, atol=0.05)
        # Layers that lie beside one another, with states in a tuple.
        assert model.head(torch.ones(3, 8)).dtype is LOW
        hidden = torch.zeros(1, 2, 8)
        assert model.model.decoder(direct.float(), hidden)[0].dtype is LOW


def test_gradients_flow_through_a_part_called_directly():
    exact, x = translator(), SOUND.clone().requires_grad_()
    exact.model.encoder(x)[..., 0].sum().backward()
    wanted, x.grad = x.grad, None
    model = cast()
    model.model.encoder(x)[..., 0].sum().backward()
    assert x.grad.dtype is torch.float32
    assert (x.grad - wanted).norm() < 0.02 * wanted.norm()
    assert model.model.encoder.conv.weight.grad.dtype is LOW


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_weight_used_outside_of_its_model_has_the_row_of_the_tables(level):
    exact, x = translator(), torch.linspace(-1, 1, 24).view(3, 8)
    wanted = F.linear(x, exact.head.weight)
    wanted.square().sum().backward()
    model = cast(level)
    output = F.linear(x, model.head.weight)
    assert output.dtype is LOW
    torch.testing.assert_close(output.float(), wanted, rtol=0, atol=0.02)
    output.float().square().sum().backward()
    gradient = model.head.weight.grad.float()
    assert (gradient - exact.head.weight.grad).norm() < 0.02 * exact.head.weight.grad.norm()
    assert F.linear(x, exact.head.weight).dtype is torch.float32  # calls with nothing in lower precision are torch's
    assert F.log_softmax(output, -1).dtype is torch.float32 and F.softmax(output, -1).dtype is LOW


def test_weight_used_without_casts_has_its_float32_value():
    exact, x = translator(), torch.linspace(-1, 1, 24).view(3, 8)
    model = cast()
    with torch.autocast("cpu", enabled=False):
        output = F.linear(x, model.head.weight)
        assert F.softmax(output.to(LOW), -1).dtype is LOW  # a tensor that is no weight is handled as in torch
    assert output.dtype is torch.float32
    torch.testing.assert_close(output, F.linear(x, exact.head.weight))
    [gradient] = torch.autograd.grad(output.sum(), model.head.weight)
    assert gradient.dtype is LOW and torch.allclose(gradient.float(), x.sum(0).expand(5, 8), rtol=2**-8, atol=1e-6)


def test_at_o5_a_part_computes_as_inside_of_its_model_and_a_weight_used_outside_is_float32():
    exact, model, x = translator(), ampkit.initialize(translator(), opt_level="O5", verbosity=0), SOUND
    inside = []
    model.model.encoder.register_forward_hook(lambda module, args, output: inside.append(output))
    assert model(x).dtype is LOW  # with casts before and after
    alone = model.model.encoder(x)
    assert torch.equal(alone, inside[0]) and not torch.equal(alone.float(), exact.model.encoder(x))
    copied = copy.deepcopy(model).model.encoder
    assert torch.equal(copied(x), exact.model.encoder(x)), "a part of a copy is plain"
    weight, hidden = model.head.weight, torch.linspace(-1, 1, 24).view(3, 8)
    assert torch.equal(F.linear(hidden, weight), F.linear(hidden, exact.head.weight))
    assert model(encoded=model.model.encoder(x)).dtype is LOW


HANDED_ON = {
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "named dtype": lambda x: F.softmax(x, -1, dtype=torch.float32),
    "dtype of a method": lambda x: x.softmax(-1, torch.float32),
    "power": lambda x: x**2,
    "norm": lambda x: F.layer_norm(x, (8,)),
    "sum": lambda x: x.sum(-1),
    "loss": lambda x: F.mse_loss(x, torch.ones_like(x)),
}


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_what_the_functions_inside_a_model_hand_on(level):
    """Softmax, norms and powers compute in float32 and return their inputs' precision, or the dtype that the call names; sums
    and losses return float32.
    """

    class Whole(nn.Linear):
        def forward(self, x):
            self.hidden = super().forward(x)
            return {name: function(self.hidden) for name, function in HANDED_ON.items()}

    model, seen = ampkit.initialize(nn.Sequential(Whole(8, 8)), opt_level=level, verbosity=0), []
    model[0].register_forward_hook(lambda module, args, outputs: seen.append(outputs))
    model(torch.linspace(-1, 1, 16).view(2, 8))
    results = seen[0]
    assert {name for name, result in results.items() if result.dtype is LOW} == {"softmax", "power", "norm"}
    for name, result in results.items():
        places = 2**-8 if result.dtype is LOW else 1e-5  # rounded once
        exact = HANDED_ON[name](model[0].hidden.double()).double()
        torch.testing.assert_close(result.double(), exact, rtol=places, atol=1e-6)
