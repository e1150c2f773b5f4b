"""Training through ``apex.amp``: gradients and weights against plain float32 torch, over levels, losses and overflows."""

import copy
import gc
import itertools
import weakref

import pytest
import torch
import torch.nn.functional as F
from helpers import saved_and_loaded
from loops import backward, initialized, iterate, scaler
from torch import nn

import ampkit

pytestmark = pytest.mark.switch

HALF, FLOAT = torch.float16, torch.float32
LEVELS = ("O0", "O1", "O2", "O3")
# An overflow is planted in (iteration, loss, weight). A static scale of 1, that of O0 and O3, checks nothing.
OVERFLOWS = ((0, 0, "weight1"), (1, 1, "weight1"), (1, 0, "weight0"))
LEVELS_AND_OVERFLOWS = [*((level, None) for level in LEVELS), *itertools.product(("O1", "O2"), OVERFLOWS)]


class Mixed(nn.Module):
    """A float32 and a float16 parameter, on small integers: all arithmetic is exact in either."""

    def __init__(self, unique):
        super().__init__()
        self.weight0 = nn.Parameter(unique + torch.arange(2, dtype=FLOAT))
        self.weight1 = nn.Parameter(1.0 + unique + torch.arange(2, dtype=HALF))

    def forward(self, x):
        return ((x * self.weight0.float()) * self.weight1.float()).sum()


def initialize_mixed(amp, *args, **settings):
    amp._amp_state.allow_incoming_model_not_fp32 = True
    return amp.initialize(*args, verbosity=0, cast_model_type=False, **settings)


def zero(how, models, optimizers):
    if how == "none":
        for param in itertools.chain(*(model.parameters() for model in models)):
            param.grad = None
    for thing in {"none": (), "model": models, "optimizer": optimizers}[how]:
        thing.zero_grad()


def weights_of(models):
    return [param.detach().float().clone() for model in models for param in model.parameters()]


class Run:
    """Two models, two losses, one or two optimizers, with or without amp."""

    def __init__(self, two_optimizers):
        self.models = [Mixed(1), Mixed(2)]
        groups = [{"params": list(model.parameters()), "lr": lr} for model, lr in zip(self.models, (0.25, 0.5))]
        make = lambda groups: torch.optim.SGD(groups, momentum=0.125)  # noqa: E731
        self.optimizers = [make([group]) for group in groups] if two_optimizers else [make(groups)]
        self.x = torch.ones(2)

    def losses(self):
        return [model(self.x) for model in self.models]


#: How gradients are cleared, how many loss scalers there are, and whether each model has an optimizer of its own.
WAYS = [("none", 1, True), ("model", 2, True), ("optimizer", 2, False), ("optimizer", 1, False)]


@pytest.mark.parametrize("level, overflow", LEVELS_AND_OVERFLOWS)
@pytest.mark.parametrize("how, scalers, two_optimizers", WAYS)
def test_two_models_and_two_losses(amp, level, how, scalers, overflow, two_optimizers):
    plain = Run(two_optimizers)
    expected = []
    for _ in range(2):
        zero("optimizer", plain.models, plain.optimizers)
        for loss in plain.losses():
            loss.backward()
        expected.append([param.grad.float().clone() for model in plain.models for param in model.parameters()])
        for optimizer in plain.optimizers:
            optimizer.step()

    run = Run(two_optimizers)
    run.models, run.optimizers = initialize_mixed(amp, run.models, run.optimizers, opt_level=level, num_losses=scalers)
    for index, scale in zip(range(scalers), (4.0, 16.0)):
        scaler(index)._loss_scale = scale
    for iteration in range(2 if overflow is None else 3):
        zero(how, run.models, run.optimizers)
        for index, loss in enumerate(run.losses()):
            with amp.scale_loss(loss, run.optimizers, loss_id=index % scalers) as scaled:
                scaled.backward()
                if overflow is not None and overflow[:2] == (iteration, index):
                    getattr(run.models[index], overflow[2]).grad[0] = float("inf")
        masters = [param for optimizer in run.optimizers for param in amp.master_params(optimizer)]
        if overflow is None or iteration != overflow[0]:
            assert all(torch.equal(p.grad.float(), exact) for p, exact in zip(masters, expected.pop(0), strict=True))
        for optimizer in run.optimizers:
            optimizer.step()
    assert all(map(torch.equal, weights_of(run.models), weights_of(plain.models)))
    for param, master in zip((p for model in run.models for p in model.parameters()), masters, strict=True):
        assert torch.equal(param, master.to(param.dtype))
        assert master.dtype is (FLOAT if level == "O2" else param.dtype)
    if overflow is not None:
        hit = overflow[1] % scalers
        assert scaler(hit).loss_scale() == (4.0, 16.0)[hit] / 2


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(6)
        self.param = nn.Parameter(torch.randn(1))

    def forward(self, x):
        return F.relu(self.bn1(self.conv1(x * self.param)))


def train_step(amp, model, optimizer, x, loss_ids):
    optimizer.zero_grad()
    out = model(x)
    loss = out.mean()
    for loss_id in loss_ids:
        with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled:
            scaled.backward(retain_graph=loss_id != loss_ids[-1])
    optimizer.step()
    return out


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("amp_before_load", [False, True])
@pytest.mark.parametrize("losses", [1, 2])
def test_a_checkpoint_goes_on_as_the_original(amp, level, amp_before_load, losses):
    def make():
        model = Convolutional()
        return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def prepare(model, optimizer):
        prepared = amp.initialize(model, optimizer, opt_level=level, num_losses=losses, verbosity=0)
        for each in amp._amp_state.loss_scalers:
            each._loss_scale = 128.0  # 2**16 is infinite in float16, in which the mean is computed at O1
        return prepared

    model, optimizer = prepare(*make())
    data = [torch.randn(4, 3, 6, 6) for _ in range(4)]
    for x in data[:2]:
        train_step(amp, model, optimizer, x, range(losses))
    saved = saved_and_loaded([model.state_dict(), optimizer.state_dict(), amp.state_dict()])
    assert all(value.dtype is not HALF for value in saved[0].values())

    pair = make()
    if amp_before_load:
        pair = prepare(*pair)
    for part, state in zip(pair, saved):
        part.load_state_dict(state)
    if not amp_before_load:
        pair = prepare(*pair)
    for x in data[2:]:
        ours = train_step(amp, model, optimizer, x, range(losses))
        theirs = train_step(amp, *pair, x, range(losses))
        # O3 has no float32 weights to save: the loaded values are the float16 ones.
        assert torch.allclose(ours.float(), theirs.float(), rtol=0 if level != "O3" else 1e-2)


def test_negative_loss_ids_count_from_the_end(amp):
    """Apex indexed a list with loss ids."""
    model, optimizer = initialized(nn.Linear(2, 1), opt_level="O2", num_losses=3)
    iterate(model(torch.ones(1, 2)).sum() / 64, optimizer, loss_id=-1)
    assert [entry["unskipped"] for entry in amp.state_dict().values()] == [0, 0, 1]


def test_optimizers_of_several_initialize_calls_share_a_loss(amp):
    (encoder, first), (decoder, second) = initialized(nn.Linear(4, 4)), initialized(nn.Linear(4, 1), num_losses=2)
    scaler(0)._loss_scale, scaler(1)._loss_scale = 8.0, 16.0

    def moved(x, *loss_ids):
        before = [layer.weight.detach().clone() for layer in (encoder, decoder)]
        for loss_id in loss_ids:
            backward(decoder(encoder(x)).float().mean(), [first, second], loss_id=loss_id)
        first.step()
        second.step()
        return [not torch.equal(layer.weight, then) for layer, then in zip((encoder, decoder), before)]

    assert moved(torch.ones(2, 4), 0, 1) == [True, True]
    assert moved(torch.full((2, 4), float("inf")), 0) == [False, False]


def test_an_optimizer_wrapped_after_initialize_is_found(amp):
    class Wrapper:
        def __init__(self, optimizer):
            self.optim = optimizer

    model, optimizer = initialized(nn.Linear(4, 1))
    scaler()._loss_scale = 8.0
    backward(model(torch.ones(2, 4)).float().sum(), Wrapper(optimizer))
    assert torch.allclose(model.weight.grad, torch.full((1, 4), 2.0))
    optimizer.step()


def first_api(amp, num_loss=None, **settings):
    """A handle of ``amp.init``, and an iteration as scripts wrote it then: it returns how far the weights move."""
    handle, model, x = amp.init(**settings), nn.Linear(4, 1), torch.ones(2, 4)
    optimizer, scale_loss = torch.optim.SGD(model.parameters(), lr=0.5), handle.scale_loss
    if num_loss is not None:
        optimizer = handle.wrap_optimizer(optimizer, num_loss=num_loss)
        scale_loss = lambda loss, optimizer: optimizer.scale_loss(loss)  # noqa: E731
    else:
        with handle.scale_loss(torch.ones(1), optimizer):  # makes the scaler
            pass
    for one in ampkit.current_session().scalers:
        one.loss_scale = 8.0  # 2**16 is infinite in float16

    def moved(*factors):
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        for factor in factors:
            with scale_loss(factor * model(x).float().mean(), optimizer) as scaled:
                scaled.backward()
        optimizer.step()
        return before - model.weight.detach()

    return handle, optimizer, moved


def test_the_first_api_of_apex(amp, capsys):
    _, optimizer, moved = first_api(amp, num_loss=2, loss_scale="dynamic")
    for _ in range(2):
        assert torch.allclose(moved(1.0, 2.0), torch.full((1, 4), 1.5), rtol=1e-3)
    assert optimizer.param_groups[0]["lr"] == 0.5 and "state" in optimizer.state_dict()
    assert torch.equal(moved(float("inf"), 1.0), torch.zeros(1, 4)) and "Gradient overflow" in capsys.readouterr().out
    for _ in range(2):
        with optimizer.scale_loss(torch.ones((), requires_grad=True)) as scaled:
            scaled.backward()
    with pytest.raises(AssertionError), optimizer.scale_loss(torch.ones(())):
        pass
    with pytest.raises(NotImplementedError):
        optimizer.step(lambda: None)


def test_the_first_api_without_a_wrapped_optimizer(amp, capsys):
    handle, optimizer, moved = first_api(amp)
    assert torch.allclose(moved(1.0, 2.0), torch.full((1, 4), 1.5), rtol=1e-3)
    assert torch.equal(moved(float("inf"), 1.0), torch.zeros(1, 4)) and "Gradient overflow" in capsys.readouterr().out
    assert torch.allclose(moved(1.0), torch.full((1, 4), 0.5), rtol=1e-3)
    handle._deactivate()
    with handle.scale_loss(torch.ones(1), optimizer) as scaled:
        assert torch.equal(scaled, torch.ones(1))


def test_a_handle_that_has_ended_keeps_no_optimizer(amp):
    handle = amp.init()
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    with handle.scale_loss(torch.ones(1), optimizer):
        pass
    handle._deactivate()
    alive = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert alive() is None


# Scripts of strangers, whose gradients are those of float64


def perceptron(**settings):
    """A model with its optimizer, and a twin in float64, which O1 does not cast."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    twin = copy.deepcopy(model).double()
    return *initialized(model, max_loss_scale=2.0**10, **settings), twin


def loss_of(model, x):
    return F.cross_entropy(model(x), torch.arange(6) % 3)


def assert_gradients_of(amp, optimizer, twin):
    for master, exact in zip(amp.master_params(optimizer), twin.parameters(), strict=True):
        assert (master.grad.double() - exact.grad).norm() <= 0.02 * exact.grad.norm()


@pytest.mark.parametrize("level", LEVELS)
def test_an_attack_scales_its_loss_without_optimizers(amp, level):
    """Train adversarially: the input's gradient from a loss of no optimizer, then a step with cleared gradients."""
    model, optimizer, twin = perceptron(opt_level=level)
    x = torch.randn(6, 4, requires_grad=True)
    wanted = x.detach().double().requires_grad_()
    backward(loss_of(model, x), [])
    loss_of(twin, wanted).backward()
    assert (x.grad.double() / scaler().loss_scale() - wanted.grad).norm() <= 0.02 * wanted.grad.norm()
    twin.zero_grad()
    attacked = x.detach() + 0.1 * x.grad.sign()
    loss_of(twin, attacked.double()).backward()
    optimizer.zero_grad()
    backward(loss_of(model, attacked), optimizer)
    assert_gradients_of(amp, optimizer, twin)
    assert model[0].weight.dtype is (HALF if level in ("O2", "O3") else FLOAT)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_loss_of_gradients_of_a_scaled_loss(amp, level):
    """tml-epfl/understanding-fast-adv-training divides gradients of inputs by the scale, and differentiates through them."""
    model, optimizer, twin = perceptron(opt_level=level)
    x = torch.randn(6, 4, requires_grad=True)
    wanted = x.detach().double().requires_grad_()
    loss = loss_of(model, x)
    with amp.scale_loss(loss, optimizer) as scaled:
        gradient = torch.autograd.grad(scaled, x, create_graph=True)[0] / (scaled / loss)
    backward(loss + 10 * gradient.square().sum(), optimizer)
    exact = loss_of(twin, wanted)
    exact = exact + 10 * torch.autograd.grad(exact, wanted, create_graph=True)[0].square().sum()
    exact.backward()
    assert_gradients_of(amp, optimizer, twin)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_that_wait_are_rewritten_in_the_block_that_ends_them(amp, level):
    """ChenRocks/UNITER sums the gradients of all processes there, still scaled; and it steps once before there are any."""
    model, optimizer, twin = perceptron(opt_level=level, num_losses=2)
    optimizer.step()
    for index in range(2):
        x = torch.randn(6, 4)
        (loss_of(twin, x.double()) / 2).backward()
        with amp.scale_loss(loss_of(model, x), optimizer, delay_unscale=index == 0, loss_id=1) as scaled:
            scaled.backward()
            for param in model.parameters() if index else ():
                param.grad.data.copy_(param.grad.data / 2)
    assert_gradients_of(amp, optimizer, twin)
    assert [entry["unskipped"] for entry in amp.state_dict().values()] == [0, 1]
