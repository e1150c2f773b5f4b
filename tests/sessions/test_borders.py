"""Borders of a session: other processes, tracers, parameters of other kinds, what is broken, an end inside of a block."""

import contextlib
import weakref

import pytest
import torch
from helpers import LEVELS, backward, in_threads, initialize_quietly, one_weight, others_slow, sgd
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader, Dataset

import ampkit


def gelus():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 2))


class Stubborn(nn.Linear):
    """A model that raises when asked for its parts once it is ``broken``."""

    broken = False

    def modules(self):
        if self.broken:
            raise ValueError("the model is broken")
        return super().modules()


def fail():
    raise RuntimeError("CUDA error")


#: What a script breaks, and what close() raises.
BROKEN = {
    "the optimizer": (lambda model, optimizer: setattr(optimizer, "param_groups", None), TypeError),
    "its state": (lambda model, optimizer: setattr(optimizer, "state", None), AttributeError),
    "the model": (lambda model, optimizer: setattr(model, "broken", True), None),
    "the device": (lambda *_: setattr(ampkit.current_session().scaling, "synchronize", fail), RuntimeError),
}


@pytest.mark.parametrize("part", BROKEN)
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_close_leaves_torch_as_it_was_where_an_object_of_the_script_is_broken(level, part):
    product, torchs_backward, (breaks, raises) = torch.mm, torch.Tensor.backward, BROKEN[part]
    torch.manual_seed(0)
    model, optimizer = initialize_quietly(Stubborn(6, 3), torch.optim.Adam, level)
    other, _ = initialize_quietly(nn.Linear(6, 3), sgd, level)
    backward(model(torch.ones(2, 6)).float().sum(), optimizer)
    optimizer.step()
    breaks(model, optimizer)
    with pytest.raises(raises) if raises else contextlib.nullcontext():
        ampkit.close()
    assert ampkit.current_session() is None
    assert part != "the device" or "_ampkit" not in vars(optimizer)
    assert torch.mm is product and torch.Tensor.backward is torchs_backward and not torch.is_autocast_enabled("cpu")
    assert all(param.dtype is torch.float32 for param in other.parameters())
    assert torch.equal(other(torch.ones(1, 6)), F.linear(torch.ones(1, 6), other.weight, other.bias))
    again, _ = initialize_quietly(nn.Linear(6, 3), sgd, level)  # a later session works
    ampkit.close()
    assert again.weight.dtype is torch.float32


class Encoded(Dataset):
    def __init__(self, model, rows):
        self.model, self.rows = model, rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        with torch.no_grad():
            return self.model(self.rows[index : index + 1]).float().sum()


def total(model, rows):
    with torch.no_grad():
        return model(rows).float().sum().item()


def by_pool(model, rows):
    with torch.multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(total, (model, rows))


def by_spawned_loader(model, rows):
    loader = DataLoader(Encoded(model, rows), 2, num_workers=1, multiprocessing_context="spawn")
    return sum(batch.sum() for batch in loader)


def by_forked_loader(model, rows):
    return sum(batch.sum() for batch in DataLoader(Encoded(model, rows), 2, num_workers=2))


WAYS = [by_pool, by_forked_loader, by_spawned_loader]


@pytest.mark.parametrize(
    "way, level",
    others_slow(
        (by_pool, "O2"),
        (by_forked_loader, "O5"),
        (by_spawned_loader, "O2"),
        of=[(way, level) for way in WAYS for level in LEVELS],
    ),
)
def test_worker_of_any_kind_computes_the_float32_values_of_the_model(way, level):
    plain, rows = gelus(), torch.randn(6, 6)
    want = total(plain, rows)
    model, _ = initialize_quietly(plain, sgd, level)
    slack = 0.02 if level == "O3" else 1e-5
    assert float(way(model, rows)) == pytest.approx(want, rel=slack, abs=slack)
    assert torch.is_autocast_enabled("cpu") is (level in ("O1", "O4"))


class LeavesGelu(torch.fx.Tracer):
    def is_leaf_module(self, module, name):
        return isinstance(module, nn.GELU)


def by_feature_extractor(model, x):
    extraction = pytest.importorskip("torchvision.models.feature_extraction")
    return extraction.create_feature_extractor(model, ["2"])(x)["2"]


TRACES = {
    "symbolic_trace": lambda model, x: torch.fx.symbolic_trace(model)(x),
    "make_fx": lambda model, x: make_fx(model)(x)(x),
    "export": lambda model, x: torch.export.export(model, (x,)).module()(x),
    "feature extractor": by_feature_extractor,
    "a tracer of one's own": lambda model, x: torch.fx.GraphModule(model, LeavesGelu().trace(model))(x),
    "jit.trace": lambda model, x: torch.jit.trace(model, x, check_trace=False)(x),
}


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
@pytest.mark.parametrize("way", TRACES)
def test_trace_of_an_initialized_model_computes_as_the_model(way, level):
    plain, x = gelus(), torch.randn(3, 6)
    with torch.no_grad():
        want = plain[:3](x) if way == "feature extractor" else plain(x)
        model, _ = initialize_quietly(plain, sgd, level)
        found = TRACES[way](model, x.bfloat16() if level == "O3" else x)
    assert (found.float() - want).norm() < 0.02 * want.norm()
    assert torch.is_autocast_enabled("cpu") is (level in ("O1", "O4"))


class Functional(nn.Module):
    """A model whose weights go to functions of torch, which generated code calls beneath every wrapper."""

    def __init__(self):
        super().__init__()
        self.weight, self.table = nn.Parameter(torch.randn(4, 6) / 2), nn.Embedding(5, 4)

    def forward(self, x):
        hidden = F.linear(x, self.weight)
        return (hidden + hidden.softmax(-1).pow(2)) @ self.table.weight.t() + self.weight.sum()


@pytest.mark.parametrize("level", LEVELS)
def test_trace_of_weights_that_no_layer_holds_computes_and_learns_as_the_model(level):
    torch.manual_seed(0)
    plain, x = Functional(), torch.randn(3, 6)
    want = plain(x)
    gradients = torch.autograd.grad(want.square().sum(), list(plain.parameters()))
    model, _ = initialize_quietly(plain, sgd, level)
    found = torch.fx.symbolic_trace(model)(x.bfloat16() if level == "O3" else x)
    assert (found.float() - want).norm() < 0.02 * want.norm()
    found.float().square().sum().backward()
    assert all((p.grad.float() - grad).norm() < 0.03 * grad.norm() for p, grad in zip(model.parameters(), gradients))


class Coded(torch.Tensor):
    """A weight that is held as codes, as torchao's are."""

    @staticmethod
    def __new__(cls, codes, step):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, step):
        self.codes, self.step = codes, step

    def __tensor_flatten__(self):
        return ["codes"], self.step

    @classmethod
    def __tensor_unflatten__(cls, inner, step, size, stride):
        return cls(inner["codes"], step)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if function in (aten.detach.default, aten.alias.default, aten.clone.default):
            return cls(args[0].codes, args[0].step)
        if function is aten._to_copy.default and kwargs.get("dtype", torch.float32) is torch.float32:
            return cls(args[0].codes, args[0].step)
        plain = [one.codes.float() * one.step if isinstance(one, cls) else one for one in args]
        return function(*plain, **(kwargs or {}))


def coded(weight):
    step = weight.detach().abs().max().item() / 127
    return nn.Parameter(Coded((weight.detach() / step).round().to(torch.int8), step), requires_grad=False)


#: Changes for which torch swaps parameters.
SWAPS = {
    "to": lambda model: model.to("cpu", memory_format=torch.contiguous_format),
    "load": lambda model: model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}),
    "apply": lambda model: model._apply(torch.clone),
}


@pytest.fixture
def swapping():
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def trained(level, optimizer, model, change=lambda model: None, keeps_gradients=False):
    """Losses and weights of ten iterations, with changes of the model on the way, in float32 (fp32) or at a level."""
    torch.manual_seed(7)
    x = torch.randn(25, 6)
    optimizer = optimizer([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    if level != "fp32":
        ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
    losses = []
    for number in range(10):
        if not keeps_gradients:
            optimizer.zero_grad()
        if number in (3, 6):
            change(model)
        optimizer.zero_grad()
        loss = (model(x).float() - x[:, :2].abs()).square().mean()
        loss.backward() if level == "fp32" else backward(loss, optimizer)
        optimizer.step()
        losses.append(loss.item())
    found = torch.cat([torch.tensor(losses), *(p.float().flatten() for p in model.state_dict().values())])
    ampkit.close()
    return found


def two_layers(dtype=torch.float32):
    torch.manual_seed(67)
    return nn.Sequential(nn.Linear(6, 700), nn.ReLU(), nn.Linear(700, 2)).to(dtype)


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, ampkit.optimizers.FusedAdam])
@pytest.mark.parametrize("dtype, keeps_gradients", [(torch.float32, True), (torch.bfloat16, False)])
@pytest.mark.parametrize("change", SWAPS)
def test_torch_swaps_parameters_of_a_session(change, optimizer, dtype, keeps_gradients, level, swapping):
    exact = trained("fp32", optimizer, two_layers(dtype).float(), SWAPS[change], keeps_gradients)
    found = trained(level, optimizer, two_layers(dtype), SWAPS[change], keeps_gradients)
    assert (found - exact).norm() < (1e-5 if level == "O0" and dtype is torch.float32 else 0.02) * exact.norm()


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_frozen_weight_of_a_wrapper_class_moves_with_its_model(level):
    """torch swaps such weights without a flag."""

    def model():
        net = two_layers()
        net[0].weight = coded(net[0].weight)
        return net

    exact, found = (trained(at, torch.optim.Adam, net := model(), SWAPS["to"]) for at in ("fp32", level))
    assert type(net[0].weight) is Coded and (found - exact).norm() < 0.02 * exact.norm()


def test_script_that_refers_to_a_parameter_weakly_is_told_by_torch_as_ever(swapping):
    model, _ = initialize_quietly(nn.Linear(2, 2), sgd, "O1")
    own = weakref.ref(model.weight)
    with pytest.raises(RuntimeError, match="swap"):
        model.to("cpu", memory_format=torch.contiguous_format)
    assert own() is model.weight


@pytest.mark.parametrize("level, trains", [("O3", False), ("O2", True), ("O3", True)])
def test_weight_of_a_wrapper_class_that_a_level_would_store_is_refused(level, trains):
    model = two_layers()
    model[0].weight = coded(model[0].weight).requires_grad_(trains)
    with pytest.raises(ampkit.ConfigurationError, match=r"'0.weight' is a Coded.*Leave it out of the optimizer"):
        initialize_quietly(model, lambda params: sgd([p for p in params if p.requires_grad]), level)
    assert type(model[0].weight) is Coded and ampkit.current_session() is None


class LowRank(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.zeros(14, 2)), nn.Parameter(torch.randn(2, 8) / 4)

    def forward(self, weight):
        return weight + self.up @ self.down


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight

    def right_inverse(self, weight):
        return weight.float() / 2


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("make", [LowRank, Doubled])
def test_parametrization_that_makes_float32_of_a_stored_weight_is_refused_with_a_remedy(make, level):
    model, _ = initialize_quietly(nn.Sequential(nn.Linear(8, 14), nn.Linear(14, 2)), sgd, level)
    with pytest.raises(ampkit.ConfigurationError, match="keep_fp32=") as caught:
        parametrize.register_parametrization(model[0], "weight", make())
    assert isinstance(caught.value.__cause__, ValueError)
    model[0](torch.ones(1, 8, dtype=torch.bfloat16))
    ampkit.close()
    with pytest.raises(ValueError, match="dtype"):  # torch's own words again
        parametrize.register_parametrization(nn.Linear(8, 14).bfloat16(), "weight", LowRank())


MASKS = {
    "masked_fill": lambda scores: scores.masked_fill(scores > 0, -1e9),
    "where": lambda scores: torch.where(scores > 0, scores, torch.tensor(-1e9)),
    "fill_": lambda scores: scores.clone().fill_(1e5),
    "clamp": lambda scores: scores.clamp(min=-1e9),
    "pad": lambda scores: F.pad(scores, (1, 1), value=-1e9),
}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", MASKS)
def test_number_that_float16_does_not_have_is_spoken_of_but_in_where_which_knows_none(name, level):
    class Scores(nn.Linear):
        def forward(self, x):
            return MASKS[name](super().forward(x))

    torch.manual_seed(0)
    net, x = Scores(6, 6), torch.randn(6, 6)
    want = net(x)
    key = "patch_torch_functions_type" if level == "O1" else "cast_model_type"
    model, _ = initialize_quietly(net, sgd, level, **{key: torch.float16})
    if name != "where":
        with pytest.raises(RuntimeError) as caught:
            model(x)
        notes = "".join(caught.value.__notes__)
        assert "65504" in notes and "two dtypes" not in notes
        return
    found, usual = model(x).float(), want.abs() < 60000
    assert torch.allclose(found[usual], want[usual], atol=1e-2) and not usual.all()
    assert (found[~usual] < -6e4).all()


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_a_step_in_a_block_at_scale_one_uses_its_gradient(level):
    model, optimizer = one_weight(8.0, opt_level=level)
    with ampkit.scale_loss(2.0 * model(torch.ones(1, 1)).float().sum(), optimizer) as scaled:
        scaled.backward()
        optimizer.step()
    assert model.weight.item() == 6.0


#: Derivatives of the sums of outputs, from a model, its output and its parameters.
BATCHED = {
    "jacobian": lambda model, out, params: torch.autograd.functional.jacobian(
        lambda x: model(x).float().sum(0), torch.ones(4, 6), vectorize=True
    ),
    "is_grads_batched": lambda model, out, params: torch.autograd.grad(
        out.flatten(), params, torch.eye(out.numel()), is_grads_batched=True
    ),
    "jacrev": lambda model, out, params: torch.func.jacrev(lambda x: model(x).float().sum(0))(torch.ones(4, 6)),
}
NORMS = [nn.BatchNorm1d, lambda width: nn.GroupNorm(2, width), nn.LayerNorm]


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("norm", NORMS, ids=["batch", "group", "layer"])
@pytest.mark.parametrize("way", BATCHED)
def test_batched_backward_pass_through_a_norm_is_right_but_batch_norm_under_jacrev_is_told_of_keep_fp32(
    way, norm, level
):
    def derivatives(net):
        found = BATCHED[way](net, net(x).float(), list(net.parameters()))
        return torch.cat([one.float().flatten() for one in (found if isinstance(found, tuple) else [found])])

    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(6, 6), norm(6), nn.Tanh(), nn.Linear(6, 3)).eval(), torch.randn(4, 6)
    want = derivatives(net)
    model, _ = initialize_quietly(net, sgd, level)
    if way == "jacrev" and norm is nn.BatchNorm1d:
        with pytest.raises(ampkit.ConfigurationError, match="keep_fp32"):
            derivatives(model)
        return
    assert (derivatives(model) - want).norm() < 0.03 * want.norm()


ENDS = {
    "close()": lambda model, optimizer: ampkit.close(),
    "session.close()": lambda model, optimizer: ampkit.current_session().close(),
    "initialize() again": lambda model, optimizer: ampkit.initialize(model, optimizer, opt_level="O1", verbosity=0),
}


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("before_backward", [False, True])
@pytest.mark.parametrize("end", ENDS)
def test_session_that_ends_in_a_block_leaves_no_scaled_gradient_untold(end, before_backward, level):
    model, optimizer = initialize_quietly(gelus(), sgd, level)
    block = ampkit.scale_loss(model(torch.ones(3, 6)).float().square().sum(), optimizer)
    scaled = block.__enter__()
    if not before_backward:
        scaled.backward()
    ENDS[end](model, optimizer)
    if before_backward:
        scaled.backward()
    if level in ("O1", "O2"):
        with pytest.raises(ampkit.ConfigurationError, match="closed inside of this scale_loss block"):
            block.__exit__(None, None, None)
    else:
        block.__exit__(None, None, None)
        exact = gelus()
        exact(torch.ones(3, 6)).square().sum().backward()
        for param, expected in zip(model.parameters(), exact.parameters()):
            assert (param.grad.float() - expected.grad).norm() < 0.03 * expected.grad.norm() + 1e-4


def test_a_region_of_another_thread_goes_on_after_a_backward_pass_in_which_the_session_closes():
    _held = initialize_quietly(nn.Linear(4, 4), sgd, "O1")

    def region_around():
        x = torch.ones(2, 4, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = x * 2
            y.register_hook(lambda _: ampkit.close())
            y.sum().backward()
            assert torch.is_autocast_enabled("cpu")

    in_threads(region_around)


def test_the_optimizer_of_lightning_is_known_though_it_has_a_copy_of_the_attributes():
    class LightningOptimizer:  # as in lightning.pytorch.core.optimizer
        def __init__(self, optimizer):
            self.__dict__ = {name: value for name, value in vars(optimizer).items() if name != "step"}
            self._optimizer = optimizer

    LightningOptimizer.__module__ = "lightning.pytorch.core.optimizer"
    model, optimizer = initialize_quietly(nn.Linear(4, 4), sgd, "O1", loss_scale=8.0)
    backward(model(torch.ones(2, 4)).sum(), LightningOptimizer(optimizer))
    assert model.bias.grad.tolist() == [2.0] * 4
