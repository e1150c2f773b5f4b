"""Casting a model (O2, O3, and inside of it O5): what stays float32, and what its forward takes and returns.

Values are compared with the same model in plain float32; bfloat16 has 8 bits of significand.
"""

import copy
from abc import ABC
from collections import namedtuple

import pytest
import torch
from helpers import ResNet
from torch import nn
from torch.nn.utils.parametrizations import orthogonal, weight_norm

import ampkit

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
NORMS = {
    "batch1d": (lambda: nn.BatchNorm1d(4), (2, 4, 5)),
    "batch2d": (lambda: nn.BatchNorm2d(4), (2, 4, 5, 5)),
    "batch3d": (lambda: nn.BatchNorm3d(4), (2, 4, 3, 3, 3)),
    "instance": (lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), (2, 4, 5, 5)),
    "group": (lambda: nn.GroupNorm(2, 4), (2, 4, 5)),
    "layer": (lambda: nn.LayerNorm(4), (2, 5, 4)),
    "rms": (lambda: nn.RMSNorm(4), (2, 5, 4)),
    "local response": (lambda: nn.LocalResponseNorm(2), (2, 4, 5)),
}


class Recorder(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.seen = []

    def forward(self, *args, **kwargs):
        self.seen.append((args, kwargs))
        return args[0] if len(args) == 1 and not kwargs else (args, kwargs)


def dtypes(model):
    return {name: p.dtype for name, p in model.named_parameters()}


def cast(model, level="O2", **settings):
    return ampkit.initialize(model, opt_level=level, verbosity=0, **settings)


def first_of(outputs):
    return outputs if isinstance(outputs, torch.Tensor) else outputs[0]


def dtype_under_autocast(model, *inputs):
    with torch.autocast("cpu", BF16):
        return first_of(copy.deepcopy(model)(*inputs)).dtype


def assert_like_float32(model, *inputs, level, tolerance=0.05, **settings):
    """Outputs and gradients of the cast model in both modes against those of the model as it is.

    Outputs are float32, but for O5, which leaves them as torch.autocast does, and for O1.
    """
    twin = copy.deepcopy(model)
    cast(model, level, **settings)
    for training in (True, False):
        model.train(training), twin.train(training)
        with torch.set_grad_enabled(training):
            dtype = dtype_under_autocast(twin, *inputs) if level == "O5" else F32
            with ampkit.disable_casts():  # of all calls at O1, in a model that is none of the session's
                expected = first_of(twin(*inputs))
            actual = first_of(model(*inputs))
        assert actual.dtype is dtype or level == "O1"
        assert not torch.equal(actual.float(), expected), "nothing ran in lower precision"
        torch.testing.assert_close(actual.float(), expected, atol=tolerance, rtol=tolerance)
        if training:
            actual.float().square().mean().backward()
            expected.square().mean().backward()
    gradients = [(p.grad.float(), q.grad) for p, q in zip(model.parameters(), twin.parameters()) if q.grad is not None]
    actual, expected = (torch.cat([pair[i].flatten() for pair in gradients]) for i in (0, 1))
    assert (actual - expected).norm() <= 2 * tolerance * expected.norm()


# Modules that stay float32


@pytest.mark.parametrize("level", ("O1", "O2", "O3", "O5"))
@pytest.mark.parametrize("kind, trivial", (("matrix_exp", True), ("cayley", False), ("householder", True)))
def test_orthogonal_weights_stay_orthogonal_and_train_close_to_float32(kind, trivial, level):
    layer = orthogonal(nn.Linear(12, 8), orthogonal_map=kind, use_trivialization=trivial)
    model, x = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), layer), torch.randn(16, 12)
    original = layer.parametrizations.weight.original
    expected = model(x)
    [gradient] = torch.autograd.grad(expected.square().mean(), original)
    cast(model, level, cast_model_outputs=F32)
    assert original.dtype is (F32 if level in ("O1", "O5") else BF16)
    found = model(x)
    found.square().mean().backward()
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0.05)
    assert (original.grad.float() - gradient).norm() <= 0.05 * gradient.norm()
    product = layer.weight.double() @ layer.weight.double().T
    torch.testing.assert_close(product, torch.eye(8).double(), atol=2**-7, rtol=0)


@pytest.mark.parametrize("level, kept", (("O2", {"original0", "bias"}), ("O3", set())))
def test_parametrized_weights_go_by_their_shapes(level, kept):
    """The lengths of the rows are a vector, as gates and scales are."""
    model = cast(nn.Sequential(orthogonal(nn.Linear(4, 4)), weight_norm(nn.Linear(4, 4))), level)
    assert {name.rpartition(".")[2] for name, dtype in dtypes(model).items() if dtype is F32} == kept
    twin = copy.deepcopy(model)
    x = torch.ones(2, 4)
    torch.testing.assert_close(twin(x), model(x), atol=0.02, rtol=0.02)
    assert twin[0].parametrizations.weight.original is not model[0].parametrizations.weight.original


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("level, dtype", (("O2", F16), ("O5", BF16)))
def test_norm_keeps_float32_weights_and_trains_close_to_float32(norm, level, dtype):
    make, shape = NORMS[norm]
    model = nn.Sequential(Scale(dtype), make(), Noting())
    settings = {} if level == "O5" else {"cast_model_type": dtype}
    assert_like_float32(model, torch.randn(shape), level=level, **settings)
    assert {t.dtype for t in (*model[1].parameters(), *model[1].buffers()) if t.is_floating_point()} <= {F32}
    assert model[2].seen is dtype  # the norm returns the precision of its input


class Scale(nn.Module):
    """A module that returns lower precision where calls are cast, as the layers before a norm do."""

    def __init__(self, dtype):
        super().__init__()
        self.factor, self.dtype = nn.Parameter(torch.ones(())), dtype

    def forward(self, x):
        return (x * self.factor).to(self.dtype if torch.is_autocast_enabled("cpu") else x.dtype)


class Noting(nn.Module):
    def forward(self, x):
        self.seen = x.dtype
        return x.float()


SHAPES = {
    "matrix": ((4, 3), BF16),
    "kernel": ((4, 3, 2, 2), BF16),
    "row": ((1, 4), F32),
    "column": ((4, 1), F32),
    "token": ((1, 1, 4), F32),
    "vector": ((4,), F32),
    "number": ((), F32),
}


class Bare(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(sizes))
        self.register_buffer("table", torch.ones(sizes))

    def forward(self, x):
        return x * self.weight.sum()


@pytest.mark.parametrize("shape", SHAPES)
def test_only_matrices_are_stored_in_lower_precision(shape):
    sizes, stored = SHAPES[shape]
    model = cast(nn.Sequential(Bare(*sizes), nn.Linear(4, 4), nn.Linear(4, 1)), "O2")
    assert model[0].weight.dtype is stored and model[0].table.dtype is F32
    assert dtypes(model[1]) == {"weight": BF16, "bias": BF16} and dtypes(model[2]) == {"weight": F32, "bias": F32}
    assert model(torch.ones(2, 4)).dtype is F32
    ampkit.close()
    model = cast(Bare(*sizes), "O2", policy="apex")  # all of them, as Apex does
    assert model.weight.dtype is BF16 and model.table.dtype is F32


@pytest.mark.parametrize("policy", ("default", "apex"))
@pytest.mark.parametrize("shape", ("matrix", "vector"))
def test_nothing_is_stored_in_lower_precision_at_o5(shape, policy):
    sizes, _ = SHAPES[shape]
    model = nn.Sequential(Bare(*sizes), nn.Linear(4, 4), nn.LayerNorm(4))
    before = {name: (tensor, tensor.data_ptr()) for name, tensor in model.state_dict(keep_vars=True).items()}
    cast(model, "O5", policy=policy)
    model(torch.ones(2, 4))
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert tensor.dtype is F32 and (tensor, tensor.data_ptr()) == (before[name][0], before[name][1])


def test_bias_that_two_modules_hold_is_stored_as_the_layer_among_them_has_it():
    """BERT's head holds the bias of its decoder, and comes first."""

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(4))
            self.decoder = nn.Linear(8, 4)
            self.decoder.bias = self.bias

        def forward(self, x):
            return self.decoder(x)

    model = cast(nn.Sequential(nn.Linear(8, 8), Head()), "O2")
    assert model[1].bias is model[1].decoder.bias and model[1].bias.dtype is BF16
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
    assert model.state_dict()["1.bias"].dtype is F32


@pytest.mark.parametrize(
    "level, switch, norm", (("O2", False, BF16), ("O3", True, F32), ("O2", None, F32), ("O3", None, BF16))
)
def test_keep_batchnorm_fp32_is_the_switch_for_all_norms(level, switch, norm):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4))
    cast(model, level, keep_batchnorm_fp32=switch)
    assert {p.dtype for layer in model[1:] for p in layer.parameters()} == {norm}
    assert model[1].running_mean.dtype is F32
    assert model[1].num_batches_tracked.dtype is torch.int64
    assert model(torch.randn(3, 4)).dtype is F32


def test_keep_fp32_of_a_tied_weight_keeps_both_ends():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False))
    model[2].weight = model[0].weight
    twin = copy.deepcopy(model)
    cast(model, "O2", keep_fp32="2")
    assert model[0].weight is model[2].weight and model[0].weight.dtype is F32 and model[1].weight.dtype is BF16
    torch.testing.assert_close(model(torch.arange(3)), twin(torch.arange(3)), atol=0.03, rtol=0.03)


class Affine(nn.BatchNorm1d):
    """A batch norm with a forward of its own, which cannot mix precisions as torch's kernels can."""

    def forward(self, x):
        return x * self.weight + self.bias


# Inputs and outputs of forward

Pair = namedtuple("Pair", "x label")


X, LABEL = torch.ones(2, 3), torch.arange(2)


def nested(x):
    """Containers in containers; other kinds of them are in o1/test_tensors.py."""
    return [{"a": (x, [Pair(x, "text")])}, LABEL, None]


def leaves(value):
    """(type of the container, its items) all the way down."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    if isinstance(value, dict):
        return type(value), {key: leaves(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [leaves(item) for item in value]
    return value


@pytest.mark.parametrize("level, policy", (("O5", "default"), ("O2", "default"), ("O3", "default"), ("O2", "apex")))
@pytest.mark.parametrize("call", ["model(x)", "model.forward(x)", "keyword"])
def test_containers_keep_their_types_in_and_out(call, level, policy):
    """O2 and O5 leave the casts to the calls inside; where all weights are lower precision, inputs are."""
    inside = BF16 if level == "O3" or policy == "apex" else F32
    model, value = cast(Recorder(), level, policy=policy), nested(X)
    before = leaves(value)
    if call == "keyword":
        _, returned = model(value=value)
        returned = returned["value"]
        received = model.seen[0][1]["value"]
    else:
        returned = model(value) if call == "model(x)" else model.forward(value)
        received = model.seen[0][0][0]
    assert leaves(received) == leaves(nested(X.to(inside)))
    assert leaves(returned) == before  # float32 again
    assert leaves(value) == before  # and not edited in place


@pytest.mark.parametrize("level", ("O2", "O3", "O5"))
def test_float64_integers_and_complex_inputs_are_left_alone(level):
    model = cast(Recorder(), level)
    kinds = torch.float64, torch.int64, torch.complex64, torch.bool
    given = (*(torch.ones(1, dtype=dtype) for dtype in kinds), "text", None, 3.0)
    model(*given)
    assert all(received is value for received, value in zip(model.seen[0][0], given))


# (outputs that a script gets, of them the one that it differentiates, the one by which)
BEHIND_OUTPUTS = {
    "both narrow": lambda first, second, w: ((second(w), w), 0, 1),
    "a picture in float32 already": lambda first, second, w: ((second(w).float(), w), 0, 1),
    "a loss beside its features": lambda first, second, w: (
        {"loss": second(w).float().square().mean(), "features": w},
        "loss",
        "features",
    ),
    "a narrow picture of a float32 latent": lambda first, second, w: ((second(v := w.float()), v), 0, 1),
    "a list inside": lambda first, second, w: (([second(w).exp()], w), 0, 1),
    "a parameter": lambda first, second, w: ((second(w).float().square().mean(), first.weight), 0, 1),
    "a narrow one of no gradient": lambda first, second, w: ((second(w).float(), w, w.detach()), 0, 1),
}


@pytest.mark.parametrize("level", ("O1", "O2", "O3", "O5"))
@pytest.mark.parametrize("case", BEHIND_OUTPUTS)
def test_an_output_that_another_one_is_made_of_can_be_differentiated_by(case, level):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return BEHIND_OUTPUTS[case](self.first, self.second, self.first(x))

    def gradient(net):
        outputs, made, by = net(torch.ones(2, 4, requires_grad=True))
        made = outputs[made][0] if isinstance(outputs[made], list) else outputs[made]
        return torch.autograd.grad(made.float().sum(), outputs[by])[0].float()

    net = Net()
    expected = gradient(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found = gradient(ampkit.initialize(net, optimizer, opt_level=level, verbosity=0)[0])
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("outputs", (F16, BF16, F32))
@pytest.mark.parametrize("level", ("O0", "O1", "O2", "O3", "O5"))
def test_cast_model_outputs_decides_the_dtype_of_outputs(level, outputs):
    model = ampkit.initialize(nn.Linear(2, 2), opt_level=level, cast_model_outputs=outputs, verbosity=0)
    assert model(torch.ones(1, 2)).dtype is outputs and model.forward(torch.ones(1, 2)).dtype is outputs


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)

    @ampkit.cast_inputs
    def encode(self, x):
        """Apply the first layer."""
        return self.first(x)

    def bare(self, x):
        return x @ self.first.weight.t()

    def forward(self, x):
        return self.second(self.encode(x))


@pytest.mark.parametrize("level, outputs", (("O0", F32), ("O1", BF16), ("O2", F32), ("O3", F32), ("O5", BF16)))
def test_cast_inputs_makes_a_method_cast_like_forward(level, outputs):
    model = Encoder()
    plain, bare = model.encode(X), model.bare(X)
    cast(model, level)
    assert model.encode(X).dtype is outputs and torch.allclose(model.encode(X).float(), plain, atol=0.03)
    assert model(X).dtype is outputs  # forward calls encode, and goes on in lower precision
    assert Encoder.encode.__doc__ == "Apply the first layer." and Encoder.encode.__name__ == "encode"
    found = model.bare(X)  # without it calls are cast, and nothing brings the output back
    assert found.dtype is (F32 if level == "O0" else BF16) and torch.allclose(found.float(), bare, atol=0.03)


def test_model_inside_another_of_the_same_session_hands_on_lower_precision():
    """The inner model returns lower precision also where it is called a second time."""
    inner = nn.Linear(2, 2)
    outer = nn.Sequential(inner, inner, nn.Linear(2, 2))
    outer[2].register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    seen = []
    ampkit.initialize([inner, outer], opt_level="O2", verbosity=0)
    assert outer(torch.ones(1, 2)).dtype is inner(torch.ones(1, 2)).dtype is F32
    assert seen == [BF16]


# Whole models

#: A model, its inputs, and how far from float32 it may be.
WHOLE = {
    "ResNet": (ResNet, lambda: [torch.randn(8, 3, 8, 8)], 0.05),
    "attention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), lambda: [torch.randn(2, 3, 8)] * 3, 0.05),
    "encoder and decoder": (
        lambda: nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True),
        lambda: [*[torch.rand(2, 5, 16)] * 2, None, nn.Transformer.generate_square_subsequent_mask(5)],
        0.08,
    ),
    "own batch norm": (
        lambda: nn.Sequential(nn.Linear(2, 2), Affine(2), nn.Linear(2, 2)),
        lambda: [torch.tensor([[1.0, -2.0]])],
        0.05,
    ),
    **{
        kind.__name__: (
            lambda kind=kind: kind(3, 4, num_layers=2, batch_first=True, bidirectional=True),
            lambda: [torch.randn(2, 5, 3)],
            0.05,
        )
        for kind in (nn.LSTM, nn.GRU, nn.RNN)
    },
}


@pytest.mark.parametrize(
    "kind, level, dtype",
    [*((kind, level, BF16) for kind in WHOLE for level in ("O1", "O2", "O3", "O5")), ("ResNet", "O2", F16)],
)
def test_whole_model_trains_and_evaluates_close_to_float32(kind, level, dtype):
    make, inputs, tolerance = WHOLE[kind]
    settings = {} if level in ("O1", "O5") else {"cast_model_type": dtype}
    assert_like_float32(make(), *inputs(), level=level, tolerance=tolerance, **settings)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("norm_first", (False, True))
@pytest.mark.parametrize("level", ("O1", "O2", "O3", "O5"))
def test_transformer_encoder_with_a_padding_mask_evaluates_close_to_float32(level, norm_first):
    """Without gradients torch takes a fast path of its own, which wants one dtype throughout."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8), enable_nested_tensor=not norm_first).eval()
    x, mask = torch.randn(2, 3, 8), torch.tensor([[False, False, False], [False, False, True]])
    with torch.no_grad():
        plain = model(x, src_key_padding_mask=mask)[~mask]
        found = cast(model, level)(x, src_key_padding_mask=mask)[~mask]
    assert not torch.equal(found.float(), plain)
    torch.testing.assert_close(found.float(), plain, atol=0.08, rtol=0.08)


class Registry(nn.Linear):
    """A base class that wants arguments of its subclasses."""

    def __init_subclass__(cls, *, tag, **kwargs):
        super().__init_subclass__(**kwargs)
        registered.append((cls, tag))


registered = []


class Tagged(Registry, tag="tagged"):
    pass


class Abstract(ABC, nn.Linear):
    """A model whose first base has no dict."""


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("cls", [Abstract, Tagged])
def test_model_with_unusual_bases_keeps_its_class(cls, level):
    model, x = cls(2, 1), torch.ones(3, 2)
    expected = model(x)
    cast(model, level)
    assert type(model) is type(copy.deepcopy(model)) is cls
    assert model(x).dtype is (BF16 if level == "O1" else F32)
    torch.testing.assert_close(model(x).float(), expected, rtol=2e-2, atol=2e-2)
    ampkit.close()
    assert type(model) is cls and torch.equal(model(x), expected)
    assert registered == [(Tagged, "tagged")]
