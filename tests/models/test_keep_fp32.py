"""``keep_fp32=``: what it names computes in float32 at every level, and hands on float32.

A kept module's outputs and gradients are compared with the same module in float64, given what it was given. Float32 is
within 1e-5 of that here, bfloat16 off by 1e-3 and more.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import replica, saved_and_loaded
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampkit

BF16, F32 = torch.bfloat16, torch.float32
PATCHED, CAST = ("O1", "O5"), ("O2", "O3")
LEVELS = PATCHED + CAST


@pytest.fixture(params=LEVELS)
def level(request):
    return request.param


class Head(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8))


class Net(nn.Module):
    """A model with a head between layers in lower precision, which notes the head's inputs and outputs."""

    def __init__(self):
        super().__init__()
        self.first, self.head, self.last = nn.Linear(12, 16), Head(), nn.Linear(8, 4)
        self.seen = []

    def run_head(self, x):
        return self.head(x)

    def forward(self, x):
        x = self.first(x)
        y = self.run_head(x)
        self.seen.append((x, y))
        return self.last(y)


class ByForward(Net):
    def run_head(self, x):
        return self.head.forward(x)


class ByLayers(Net):
    def __init__(self):
        super().__init__()
        self.head = nn.ModuleList(self.head)

    def run_head(self, x):
        for layer in self.head:
            x = layer(x)
        return x


class Recomputed(Net):
    def run_head(self, x):
        return checkpoint(self.head, x, use_reentrant=False)


def initialized(model, level="O1", **settings):
    torch.manual_seed(0)
    return ampkit.initialize(model, opt_level=level, verbosity=0, **settings)


def distance(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


def is_float32s(found, exact):
    """Whether numbers were computed in float32; bfloat16 numbers would not be within 1e-5."""
    return found.dtype is F32 and distance(found.detach(), exact.detach()) < 1e-5


WAYS = {
    "name": lambda m: "head",
    "pattern": lambda m: "hea?",
    "pattern of all that is inside": lambda m: "head.*",
    "type": lambda m: Head,
    "module": lambda m: m.head,
    "layers by name": lambda m: ["head.0", "head.2"],
    "nested": lambda m: ["head", m.head[0], "head.2"],
}


@pytest.mark.parametrize("way", WAYS)
def test_named_module_computes_in_float32(way, level):
    model = Net()
    exact = copy.deepcopy(model.head).double()
    initialized(model, level, keep_fp32=WAYS[way](model))
    model(torch.randn(6, 12))
    (given, found), *_ = model.seen
    assert given.dtype is BF16  # in lower precision, as everything around
    assert is_float32s(found, exact(given.double()))
    if level in CAST:
        kept = {name for name, param in model.named_parameters() if param.dtype is F32}
        assert kept == {"head.0.weight", "head.0.bias", "head.2.weight", "head.2.bias"}


def in_float64(head):
    return copy.deepcopy(nn.Sequential(*head)).double()


@pytest.mark.parametrize("kind", [Net, ByForward, ByLayers, Recomputed])
def test_forward_and_backward_of_a_kept_module_are_float32_whichever_way_it_is_called(kind, level):
    model = kind()
    exact = in_float64(model.head)
    initialized(model, level, keep_fp32="head")
    upstream = torch.randn(6, 8)
    model(torch.randn(6, 12))
    inputs, found = model.seen[0]
    assert inputs.dtype is BF16 and is_float32s(found, exact(inputs.double()))
    assert is_float32s(model.run_head(inputs), exact(inputs.double()))  # outside of its model
    gradients = torch.autograd.grad(found, [inputs, *model.head.parameters()], upstream)
    inputs64 = inputs.detach().double().requires_grad_()
    expected = torch.autograd.grad(exact(inputs64), [inputs64, *exact.parameters()], upstream.double())
    assert gradients[0].dtype is BF16 and distance(gradients[0], expected[0]) < 2**-8  # rounded once
    assert all(is_float32s(*pair) for pair in zip(gradients[1:], expected[1:]))


def test_whole_model_may_be_named(level):
    model = Net()
    exact, x = copy.deepcopy(model).double(), torch.randn(6, 12)
    initialized(model, level, keep_fp32=Net)
    assert is_float32s(model(x), exact(x.double())) and is_float32s(model.forward(x), exact(x.double()))


def test_shared_module_is_kept_wherever_it_is_called(level):
    shared = nn.Linear(8, 8)
    models = [nn.Sequential(nn.Linear(8, 8), shared), nn.Sequential(shared, nn.Linear(8, 8), shared)]
    exact = copy.deepcopy(shared).double()
    seen = []
    shared.register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    initialized(models, level, keep_fp32=shared)
    for model in models:
        model(torch.randn(2, 8))
    assert len(seen) == 3 and all(is_float32s(found, exact(given.double())) for given, found in seen)
    ampkit.close()
    assert type(shared) is nn.Linear and len(vars(shared)["_forward_pre_hooks"]) == 0


def test_tied_weight_does_not_keep_the_other_module_at_o1():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    initialized(model, keep_fp32="1")
    assert model[0](torch.ones(1, 4)).dtype is BF16 and model[1](torch.ones(1, 4)).dtype is F32


# Single parameters


def test_single_parameter_is_stored_in_float32_and_calls_cast_it(level):
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.table = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            return self.inner(x) @ self.table

    model = initialized(Table(), level, keep_fp32="table")
    assert model.table.dtype is F32
    lower, x = BF16, torch.randn(2, 8)
    expected = F.linear(x.to(lower), model.inner.weight.to(lower), model.inner.bias.to(lower)) @ model.table.to(lower)
    assert torch.equal(model(x).float(), expected.float())


@pytest.mark.parametrize("names", (["1.weight", "1.bi*"], "1.*", "1.weight"), ids=str)
def test_parameters_of_a_layer_name_the_layer(level, names):
    model = initialized(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), level, keep_fp32=names)
    assert model[1](torch.ones(1, 8).bfloat16()).dtype is F32
    assert model(torch.ones(1, 8)).dtype is F32


@pytest.mark.parametrize("level", PATCHED)
def test_scripted_module_is_refused_by_name(level):
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = torch.jit.script(nn.Linear(4, 4))

        def forward(self, x):
            return self.part(x)

    with pytest.raises(ampkit.ConfigurationError, match=r"TorchScript modules \(part\)"):
        initialized(Around(), level, keep_fp32="part")


# Between kept modules and others, where weights are cast


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_named_norm_hands_on_float32_as_all_that_is_named(norm, level):
    model = nn.Sequential(nn.Linear(4, 4), norm(4), nn.Linear(4, 4))
    initialized(model, level, keep_fp32=norm)
    assert model[1].weight.dtype is F32 and model[1](torch.randn(2, 4).bfloat16()).dtype is F32
    assert model[0].weight.dtype is (F32 if level in PATCHED else BF16)
    assert model(torch.randn(3, 4)).dtype is (BF16 if level in PATCHED else F32)


def test_naming_the_out_projection_names_the_attention(level):
    model = nn.Sequential(nn.Linear(8, 8), Attention())
    exact = copy.deepcopy(model[1].attention).double()
    initialized(model, level, keep_fp32="*.out_proj")
    seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output))
    found = model(torch.randn(2, 4, 8))
    [x], expected = seen, seen[0].double()
    assert x.dtype is BF16 and is_float32s(found, exact(expected, expected, expected)[0])


class Noting(nn.Linear):
    def forward(self, x):
        self.seen = x.dtype
        return super().forward(x)


def test_part_of_an_encoder_layer_is_kept_in_evaluation_too(level):
    """torch has one kernel for the whole layer, which would not call the layer's parts."""
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)).eval()
    model[0].linear1 = Noting(8, 16)
    initialized(model, level, keep_fp32="0.linear1")
    copy.deepcopy(model)  # which has no hook, and takes none of the model's
    with torch.no_grad():
        model(torch.randn(2, 4, 8))
    assert model[0].linear1.seen is F32


# Copies, pickles, replicas, close


def plain_state(model):
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_forward_pre_hooks_with_kwargs")
    return {n: (type(m), set(vars(m)), [list(vars(m)[h]) for h in hooks]) for n, m in model.named_modules()}


def test_close_leaves_nothing_on_the_model(level):
    model = Net()
    before = plain_state(model)
    initialized(model, level, keep_fp32="head")
    assert plain_state(model) != before
    model(torch.randn(2, 12))
    ampkit.close()
    assert plain_state(model) == before and {p.dtype for p in model.parameters()} == {F32}


@pytest.mark.parametrize("copied", [copy.copy, replica])
def test_copy_that_shares_weights_computes_as_the_model_does(copied, level):
    model = initialized(Net(), level, keep_fp32="head")
    x = torch.randn(6, 12)
    expected = model(x)
    model.seen.clear()
    twin = copied(model)
    twin.seen = []
    assert torch.equal(twin(x), expected)
    given, found = twin.seen[0]
    assert given.dtype is BF16 and found.dtype is F32


def test_kept_module_copied_alone_is_a_float32_module(level):
    model = initialized(Net(), level, keep_fp32="head")
    twin, exact, x = copy.deepcopy(model.head), in_float64(copy.deepcopy(model.head)), torch.randn(3, 16)
    ampkit.close()
    assert is_float32s(twin(x), exact(x.double()))
    assert saved_and_loaded(twin, weights_only=False)(x).dtype is F32


def test_initialized_again_without_keep_fp32_keeps_nothing(level):
    model = Net()
    initialized(model, level, keep_fp32="head")
    initialized(model, level)
    model(torch.randn(2, 12))
    assert model.seen[0][1].dtype is BF16


# Casts inside


@pytest.mark.parametrize("level", PATCHED)
def test_region_inside_a_kept_module_switches_casts_on(level):
    class Mixed(nn.Linear):
        def forward(self, x):
            with torch.autocast("cpu", BF16):
                low = super().forward(x)
            return low.dtype, super().forward(x).dtype

    model = initialized(nn.Sequential(Mixed(4, 4)), level, keep_fp32=Mixed)
    assert model(torch.ones(1, 4)) == (BF16, F32)


@pytest.mark.parametrize("level", PATCHED)
def test_after_an_error_in_a_kept_module_casts_are_on_again(level):
    model = initialized(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), level, keep_fp32="1")
    seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    with pytest.raises(RuntimeError):
        model[1](torch.ones(1, 5))
    assert model(torch.ones(1, 4)).dtype is F32 and seen == [BF16]


# Compiled


@pytest.mark.parametrize("kind", [Net, ByLayers])
def test_compiled_model_keeps_as_eager_does(kind, level):
    class Returning(kind):
        def forward(self, x):
            x = self.first(x)
            y = self.run_head(x)
            return x, y, self.last(y)

    torch._dynamo.reset()
    model = Returning()
    exact = in_float64(model.head)
    initialized(model, level, keep_fp32="head")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(6, 12)
    eager, outputs = model(x), compiled(x)
    # Inputs of other outputs stay as they are; a trace cannot tell, and casts them.
    assert [y.dtype for y in outputs][1:] == [y.dtype for y in eager][1:]
    assert torch.equal(outputs[0].float(), eager[0].float())
    given, kept, _ = outputs
    assert is_float32s(kept, exact(given.double()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # torch's own
def test_quantisation_aware_training_keeps_its_ranges_in_float32(level):
    """torch's kernel writes to the ranges, and takes no lower precision."""
    quantization = pytest.importorskip("torch.ao.quantization")
    model = nn.Sequential(quantization.QuantStub(), nn.Linear(4, 3), nn.ReLU(), quantization.DeQuantStub()).train()
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    quantization.prepare_qat(model, inplace=True)
    twin = copy.deepcopy(model)
    ampkit.initialize(model, opt_level=level, verbosity=0, loss_scale=1.0)
    x = torch.linspace(-1, 2, 32).view(8, 4)
    output, wanted = model(x), twin(x)
    output.float().sum().backward()
    wanted.sum().backward()
    # Seven bits from -1 to 2. O3 stores buffers in lower precision.
    scale, places = model[0].activation_post_process.scale.float(), 2**-8 if level == "O3" else 1e-6
    torch.testing.assert_close(scale, torch.tensor([3 / 127]), rtol=places, atol=0)
    step = model[1].activation_post_process.scale.item()
    torch.testing.assert_close(output.float(), wanted, rtol=0.01, atol=1.01 * step)
    torch.testing.assert_close(model[1].weight.grad.float(), twin[1].weight.grad, rtol=0.02, atol=0.05)


class Spectral(nn.Module):
    """A layer of a Fourier neural operator: torch has no transform of lower precision, and the weight is complex."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 9).exp().mul(0.1).to(torch.complex64) * (1 + 0.5j))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=16)


def test_kept_module_with_a_complex_weight_computes_in_float32(level):
    model = initialized(nn.Sequential(nn.Linear(16, 16), Spectral(), nn.Linear(16, 2)), level, keep_fp32=Spectral)
    seen = []
    model[1].register_forward_hook(lambda module, args, output: seen.extend((args[0], output)))
    model(torch.linspace(-1, 1, 32).view(2, 16)).float().square().sum().backward()
    weight = model[1].weight.detach().to(torch.complex128)
    assert is_float32s(seen[1], torch.fft.irfft(torch.fft.rfft(seen[0].double()) * weight, n=16))
    assert model[1].weight.grad.dtype is torch.complex64 and model[1].weight.grad.abs().min() > 0
