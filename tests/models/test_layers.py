"""Tensors that a model at O2, O3, O5 makes in float32 inside of its forward, and gives to layers with lower-precision weights.

torch's layers refuse such a mixture; here their calls are cast. Results are compared with the same module in float64.
"""

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import ampkit

LOW = torch.bfloat16
LEVELS = ("O2", "O3", "O5")


def cast(model, level="O2"):
    return ampkit.initialize(model, opt_level=level, verbosity=0)


def sine(*shape):
    return torch.arange(float(torch.Size(shape).numel())).sin().view(shape)


class Net(nn.Module):
    """A model that gives a layer a tensor of its own making, in the precision of ``made_in``."""

    def __init__(self, layer, call):
        super().__init__()
        self.block = nn.ModuleList([layer])
        self.call, self.made_in = call, torch.float32

    def forward(self):
        return self.call(self.block[0], lambda *shape: sine(*shape).to(self.made_in))


CALLS = {
    "linear": (lambda: nn.Linear(8, 4), lambda layer, make: layer(make(3, 8))),
    "linear by name": (lambda: nn.Linear(8, 4), lambda layer, make: layer(input=make(3, 8))),
    "bilinear": (lambda: nn.Bilinear(8, 5, 4), lambda layer, make: layer(make(3, 8), make(3, 5))),
    "convolution": (lambda: nn.Conv2d(2, 4, 3), lambda layer, make: layer(make(1, 2, 5, 5))),
    "transposed convolution": (lambda: nn.ConvTranspose1d(2, 4, 3), lambda layer, make: layer(make(1, 2, 5))),
    "LSTM with states": (lambda: nn.LSTM(8, 4), lambda layer, make: layer(make(2, 3, 8), (make(1, 3, 4),) * 2)[0]),
    "GRU cell": (lambda: nn.GRUCell(8, 4), lambda layer, make: layer(make(3, 8), make(3, 4))),
    "LSTM cell": (lambda: nn.LSTMCell(8, 4), lambda layer, make: layer(make(3, 8), (make(3, 4),) * 2)[0]),
    "attention": (lambda: nn.MultiheadAttention(8, 2), lambda layer, make: layer(*[make(3, 2, 8)] * 3)[0]),
    "attention with a mask": (
        lambda: nn.MultiheadAttention(8, 2),
        lambda layer, make: layer(*[make(3, 2, 8)] * 2, value=make(3, 2, 8), attn_mask=make(3, 3))[0],
    ),
    "weight norm": (
        lambda: parametrizations.weight_norm(nn.Linear(8, 4)),
        lambda layer, make: layer(make(3, 8)),
    ),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", CALLS)
def test_layer_takes_what_the_model_made_in_float32(kind, level):
    make_layer, call = CALLS[kind]
    model = Net(make_layer(), call)
    exact = copy.deepcopy(model).double()
    exact.made_in = torch.float64
    wanted = exact()
    wanted.square().sum().backward()
    actual = cast(model, level)()
    actual.square().sum().backward()
    assert (actual - wanted).norm() < 0.02 * wanted.norm()
    actual, wanted = (torch.cat([p.grad.double().flatten() for p in m.parameters()]) for m in (model, exact))
    assert (actual - wanted).norm() < 0.05 * wanted.norm()


@pytest.mark.parametrize("level", ("O2", "O5"))
@pytest.mark.parametrize(
    "off", (lambda: torch.autocast("cpu", enabled=False), ampkit.disable_casts), ids=("torch", "ampkit")
)
def test_layer_in_a_region_without_casts_computes_with_the_float32_value_of_its_weights(off, level):
    class Exact(nn.Linear):
        def forward(self, x):
            with off():
                return super().forward(x)

    model = Net(Exact(8, 4), lambda layer, make: layer(make(3, 8)))
    exact = copy.deepcopy(model).double()
    exact.made_in = torch.float64
    wanted = exact()
    wanted.square().sum().backward()
    found = cast(model, level)()
    assert model.block[0].weight.dtype is (torch.float32 if level == "O5" else LOW) and found.dtype is torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
    found.square().sum().backward()
    for param, other in zip(model.parameters(), exact.parameters()):
        torch.testing.assert_close(param.grad.double(), other.grad, rtol=2**-8, atol=0)  # rounded once


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_bags_take_torchs_arguments_by_name(level):
    table, ids, offsets = nn.EmbeddingBag(5, 4, mode="sum"), torch.tensor([0, 1, 2, 1]), torch.tensor([0, 2])
    cast(table, level)
    settings = dict(scale_grad_by_freq=True, mode=0, sparse=False, include_last_offset=False, padding_idx=1)
    expected = table.state_dict()["weight"][[0, 2]]
    torch.testing.assert_close(
        torch.embedding_bag(table.weight, ids, offsets, per_sample_weights=None, **settings)[0].float(), expected
    )


MADE = {
    "spectral norm": parametrizations.spectral_norm,
    "pruning": lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
    "orthogonal": parametrizations.orthogonal,
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_weight_made_from_a_stored_one_meets_float32_in_a_region_without_casts(make):
    class Off(nn.Sequential):
        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                return super().forward(x)

    def model_in(dtype):
        torch.manual_seed(0)
        model = Net(Off(make(nn.Linear(8, 8))), lambda layer, make: layer(make(3, 8))).to(dtype)
        model.made_in = dtype
        return model

    model = cast(model_in(torch.float32))
    wanted, found = model_in(torch.float64)(), model()
    assert found.dtype is torch.float32
    assert (found - wanted).norm() < 2**-7 * wanted.norm()
    found.sum().backward()
    assert all(param.grad.isfinite().all() for param in model.parameters() if param.requires_grad)


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_gradients_of_rows_that_many_bags_share_add_up_in_float32(is_weighted, level):
    bag, ids = nn.EmbeddingBag(2, 4, mode="sum"), torch.arange(4000).view(-1, 4) % 2
    exact, kept = copy.deepcopy(bag).double(), 1 + sine(1000, 4) / 2
    factors = 1 + sine(1000, 4) / 2 if is_weighted else None
    (exact(ids, per_sample_weights=factors.double() if is_weighted else None) * kept).sum().backward()
    (cast(bag, level)(ids, per_sample_weights=factors) * kept).sum().backward()
    torch.testing.assert_close(bag.weight.grad.double(), exact.weight.grad, rtol=2**-7, atol=0)


def test_functional_call_with_float32_weights_casts_as_the_model_does():
    """``state_dict()`` is float32 at O2; functional_call may take an average of it."""
    model = cast(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)))
    weights = {name: value.detach() for name, value in model.state_dict().items()}
    x = torch.ones(2, 8)
    hidden = (x.double() @ weights["0.weight"].double().T + weights["0.bias"].double()).tanh()
    wanted = hidden @ weights["2.weight"].double().T + weights["2.bias"].double()
    found = torch.func.functional_call(model, weights, (x,))
    assert torch.equal(found, model(x))
    torch.testing.assert_close(found.double(), wanted, rtol=0.02, atol=0.01)


@pytest.mark.parametrize("level", LEVELS)
def test_a_batch_of_tasks_adapts_what_functional_call_lends_the_model(level):
    """Take a step of each task's own, as in MAML: vmap and grad put tensors without storage in the place of the weights."""
    model, rate = cast(nn.Linear(3, 2, bias=False), level), 0.1
    x, y = sine(4, 5, 3), sine(4, 5, 2).cos()

    def error(weights, x, y):
        return (torch.func.functional_call(model, weights, (x,)) - y).square().mean()

    def adapted(weights, x, y):
        gradients = torch.func.grad(error)(weights, x, y)
        return error({name: weights[name] - rate * gradients[name] for name in weights}, x, y)

    weights = dict(model.named_parameters())
    w = model.weight.detach().double().T
    for _ in range(4):
        found = torch.func.vmap(adapted, in_dims=(None, 0, 0))(weights, x, y)
        steps = 2 * x.double().mT @ (x.double() @ w - y.double()) / 10
        wanted = (x.double() @ (w - rate * steps) - y.double()).square().mean((1, 2))
        torch.testing.assert_close(found.double(), wanted, rtol=0.02, atol=0)


def test_what_functional_call_lends_is_given_back():
    """The graph of lent weights holds the activations of a whole forward."""
    model = cast(nn.Linear(3, 2))
    lent = model.weight * 2
    gone = weakref.ref(lent)
    for _ in range(4):
        torch.func.functional_call(model, {"weight": lent}, (torch.ones(2, 3),))
    del lent
    assert gone() is None
