"""A block unscales whatever its backward passes reach: scripts get the numbers of the same script in float32."""

import functools
import threading
from contextlib import nullcontext

import pytest
import torch
from helpers import backward, in_threads
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampkit
from ampkit.libraries import cuda_is_emulated
from ampkit.registry import current_session

X = torch.tensor([[1.0, 0.5, -1.0, 2.0], [0.5, -0.25, 1.0, 1.0]])


class InFloat32:
    """A stand-in for ampkit that runs the same script in float32."""

    def initialize(self, models, optimizers):
        pass

    def scale_loss(self, loss, optimizers, **flags):
        return nullcontext(loss)

    def backward(self, loss, optimizers, **flags):
        with self.scale_loss(loss, optimizers, **flags) as scaled:
            scaled.backward()


PRECISION = {"O1": "patch_torch_functions_type", "O2": "cast_model_type"}


class WithAmpkit(InFloat32):
    """The script in float16, which rounds less than what levels take on the CPU by default."""

    def __init__(self, level, loss_scale):
        self.settings = dict(opt_level=level, loss_scale=loss_scale, verbosity=0)
        if level in PRECISION:
            self.settings[PRECISION[level]] = torch.float16

    def initialize(self, models, optimizers):
        ampkit.initialize(models, optimizers, **self.settings)

    def scale_loss(self, loss, optimizers, **flags):
        return ampkit.scale_loss(loss, optimizers, **flags)


AT = [
    pytest.param(level, scale, id=f"{level} {name}")
    for level in ("O1", "O2")
    for name, scale in (("static", 1024.0), ("dynamic", ampkit.DynamicLossScale(init_scale=512.0)))
]


def at_by_turns(names):
    """Rows of each name at both levels and at both scales, which the levels have by turns."""
    return [
        pytest.param(name, *AT[run].values, id=f"{name}, {AT[run].id}")
        for index, name in enumerate(names)
        for run in ((0, 3), (1, 2))[index % 2]
    ]


def net(seed, outputs=4):
    torch.manual_seed(seed)
    return nn.Linear(4, outputs, bias=False)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.125)


def session(amp, seed, outputs=4):
    """Return a model and its optimizer, by a call of initialize of their own."""
    model = net(seed, outputs)
    optimizer = sgd(model)
    amp.initialize(model, optimizer)
    return model, optimizer


def two_layers(amp, trained=slice(None), seed=1):
    """Return two layers, and an optimizer of those ``trained``."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    optimizer = sgd(model[trained])
    amp.initialize(model, optimizer)
    return model, optimizer


def loss_of(output):
    return output.float().square().mean()


def copied(tensor):
    assert tensor is not None, "no gradient"
    return tensor.detach().float().clone()


def grads(*models):
    return [copied(p.grad) for model in models for p in model.parameters()]


def weights(*models):
    return [copied(p) for model in models for p in model.parameters()]


def cleared(*optimizers, times=2):
    """Count iterations, each of which begins with cleared gradients."""
    for index in range(times):
        for optimizer in optimizers:
            optimizer.zero_grad()
        yield index


def stepped(models, optimizers):
    """Step; return the gradients before, and the weights."""
    result = grads(*models)
    for optimizer in optimizers:
        optimizer.step()
    return result + weights(*models)


def assert_same(found, expected):
    assert len(found) == len(expected)
    for index, (mine, plain) in enumerate(zip(found, expected)):
        assert plain.abs().max() > 0, f"number {index} would be missed by nobody"
        assert (mine - plain).abs().max() <= 0.02 * plain.abs().max(), (index, mine, plain)


SCRIPTS = {}


def script(function):
    """Register a script: it runs without ampkit and with it, and the tensors that it returns are compared."""
    SCRIPTS[function.__name__] = function
    return function


def script_of_two_sessions(function=None, *, steps=(0, 1), outputs=4):
    """Register two iterations of two sessions: the function goes backward, and returns what is compared besides.

    It gets ``amp``, both models and both optimizers. Those that ``steps`` names step after it.
    """
    if function is None:
        return functools.partial(script_of_two_sessions, steps=steps, outputs=outputs)

    @functools.wraps(function)
    def iterations(amp):
        models, optimizers = zip(session(amp, 1), session(amp, 2, outputs))
        result = []
        for _ in cleared(*optimizers):
            result += function(amp, *models, *optimizers) or []
            result += stepped(models, [optimizers[index] for index in steps])
        return result

    return script(iterations)


# Passes that reach other sessions


class Reversible(torch.autograd.Function):
    """The function x + f(x), which saves no activations: its backward pass computes f(x) again, and goes backward through it."""

    @staticmethod
    def forward(ctx, x, f):
        ctx.f = f
        ctx.save_for_backward(x)
        return x + f(x).float()

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.f(x).float()
        y.backward(gradient)
        return gradient + x.grad, None


class WritesGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):
        ctx.weight = layer.weight
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.weight.grad = gradient.sum(0).diag().to(ctx.weight.dtype)
        return gradient, None


@script
def function_that_writes_the_gradient_of_a_layer_that_no_optimizer_updates(amp):
    model, optimizer = two_layers(amp, trained=slice(1))
    amp.backward(loss_of(WritesGradient.apply(model[0](X).float(), model[1])), optimizer)
    return grads(model)


@script_of_two_sessions
def reversible_function_over_another_sessions_weights(amp, a, b, of_a, of_b):
    amp.backward(loss_of(Reversible.apply(a(X).float(), b)), of_a)


@script_of_two_sessions(steps=[0])
def hook_that_trains_another_sessions_model(amp, a, b, of_a, of_b):
    hidden = a(X).float()

    @torch.enable_grad()  # autograd runs hooks without
    def train_b(_):
        loss_of(b(X)).backward()

    hidden.register_hook(train_b)
    amp.backward(loss_of(hidden), of_a)


@script_of_two_sessions(outputs=1)
def generator_through_the_critic_of_another_session(amp, g, d, of_g, of_d):
    """Leave out a zero_grad: the critic steps by the sum at last."""
    amp.backward(loss_of(d(X) - 1.0), of_d)
    amp.backward(loss_of(d(g(X).detach().float())), of_d)
    of_d.step()
    amp.backward(loss_of(d(g(X).float()) - 1.0), of_g)


@script
def two_passes_in_one_block_of_one_session(amp):
    g, d = net(1), net(2, 1)
    of_g, of_d = sgd(g), sgd(d)
    amp.initialize([g, d], [of_g, of_d])
    for _ in cleared(of_g, of_d):
        with amp.scale_loss(loss_of(d(g(X).float()) - 1.0), of_g) as scaled:
            scaled.backward(retain_graph=True)
            scaled.backward()
        result = stepped([g, d], [of_g, of_d])
    return result


@script_of_two_sessions
def sum_of_the_losses_of_two_blocks(amp, a, b, of_a, of_b):
    x = X.clone().requires_grad_()
    with amp.scale_loss(loss_of(a(x)), of_a) as one, amp.scale_loss(loss_of(b(X)), of_b) as other:
        (one + other).backward()
    return [copied(x.grad)]


# Passes that reach parameters without an optimizer of ampkit


class WeightsOfLosses(nn.Module):
    """The loss weights of Kendall, Gal and Cipolla: a weight for each of two losses, which is trained too."""

    def __init__(self):
        super().__init__()
        self.logarithms = nn.Parameter(torch.tensor([0.5, -0.5]))

    def forward(self, losses):
        return (torch.exp(-self.logarithms) * torch.stack(losses) + self.logarithms).sum()


@script
def weights_of_losses(amp, delays=(False,)):
    """Go backward once an iteration for each of ``delays``."""
    (a, of_a), weighted = session(amp, 1), WeightsOfLosses()
    of_weights = torch.optim.SGD(weighted.parameters(), lr=0.25)
    result = []
    for _ in cleared(of_a, of_weights, times=3):
        for index, delay in enumerate(delays):
            output = a(X + index)
            loss = weighted([loss_of(output), loss_of(output - 1.0)]) / (len(delays) + 1)
            amp.backward(loss, of_a, delay_unscale=delay)
        result += [] if delays[-1] else grads(a, weighted)
        of_a.step()
        of_weights.step()
    return result + weights(a, weighted)


for name, delays in (("over_micro_batches", (True, True, False)), ("that_wait_for_the_step", (True,))):
    SCRIPTS[f"weights_of_losses_{name}"] = functools.partial(weights_of_losses, delays=delays)


@script_of_two_sessions(steps=[])
def gradients_of_another_sessions_weights_alone(amp, a, b, of_a, of_b):
    with amp.scale_loss(loss_of(b(a(X).float())), of_a) as scaled:
        scaled.backward(inputs=[*a.parameters(), *b.parameters()])


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


@script
def loss_weight_reached_by_blocks_of_two_sessions(amp):
    sessions, weight = [session(amp, 1), session(amp, 2)], nn.Parameter(torch.ones(1))
    for _ in range(2):
        for model, optimizer in sessions:
            optimizer.zero_grad()
            amp.backward((weight * loss_of(model(X))).sum(), optimizer)
            optimizer.step()
    return [copied(weight.grad)] + weights(*(model for model, _ in sessions))


# Gradients that wait at a scale, delay_unscale=True


@script
def delta_of_before_beside_micro_batches_without_it(amp):
    (a, of_a), delta = session(amp, 1), torch.zeros_like(X, requires_grad=True)
    for ends in (of_a.step, of_a.zero_grad, lambda: amp.backward(loss_of(a(X)), of_a)):
        amp.backward(loss_of(a(X + delta)), of_a)
        amp.backward(loss_of(a(X)), of_a, delay_unscale=True)
        ends()
    amp.backward(loss_of(a(X + delta)), of_a)
    return [copied(delta.grad), *grads(a)]


@script
def layer_that_joins_the_optimizer_while_its_gradients_wait(amp):
    model, optimizer = two_layers(amp, trained=1)
    amp.backward(loss_of(model(X)), optimizer, delay_unscale=True)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    amp.backward(loss_of(model(X)), optimizer)
    return stepped([model], [optimizer])


# Functions in Python, and what was retained elsewhere


@script
def function_in_python_between_models_with_frozen_parts_of_two_sessions(amp):
    """Train models whose first layers have no optimizer, and yet get gradients."""
    (a, _), (b, of_b) = two_layers(amp, trained=1), two_layers(amp, trained=1, seed=2)
    amp.backward(loss_of(b(Doubled.apply(a(X).float()))), of_b)
    return grads(a, b)


@script
def loss_weight_inside_of_a_checkpoint(amp):
    (a, of_a), weight = session(amp, 1), nn.Parameter(torch.ones(1))
    loss = checkpoint(lambda x: loss_of(x) * weight, a(X), use_reentrant=True)
    amp.backward(loss.sum(), of_a)
    return [*grads(a), copied(weight.grad)]


@script
def features_retained_by_a_loss_of_their_own_in_the_block(amp):
    (a, of_a), y = session(amp, 1), torch.ones(3, requires_grad=True)
    features = 2 * y
    features.retain_grad()
    with amp.scale_loss(loss_of(a(X)), of_a) as scaled:
        scaled.backward()
        features.square().sum().backward()
    return [*grads(a), copied(features.grad), copied(y.grad)]


@script_of_two_sessions(steps=[0])
def checkpoint_around_a_whole_iteration_of_another_session(amp, a, b, of_a, of_b):
    with amp.scale_loss(loss_of(checkpoint(a, X.clone().requires_grad_(), use_reentrant=True)), of_a) as scaled:
        scaled.backward()
        amp.backward(loss_of(b(X)), of_b)
        of_b.step()


# Threads


def script_of_threads(function):
    """Register a script whose threads compute at once, but with emulated kernels, which run one after another."""
    return function if cuda_is_emulated() else script(function)


@script_of_threads
def sessions_trained_in_two_threads(amp):
    """Go backward in two threads, both within their blocks; of the last two, one ends after the other."""
    sessions = [session(amp, 1), session(amp, 2)]
    barrier, first_is_out, gradients = threading.Barrier(2), threading.Event(), [None, None]

    def train(number):
        model, optimizer = sessions[number]
        for index in cleared(optimizer, times=3):
            features = model(X + index)
            features.retain_grad()
            with amp.scale_loss(loss_of(features), optimizer) as scaled:
                barrier.wait(30)
                scaled.backward()
                barrier.wait(30)
                if number and index == 2:
                    first_is_out.wait(30)
            if index == 2:
                first_is_out.set()
            barrier.wait(30)
            gradients[number] = copied(features.grad)
            optimizer.step()

    in_threads(lambda: train(0), lambda: train(1))
    return gradients + weights(*(model for model, _ in sessions))


@script_of_two_sessions
def block_opened_in_one_thread_and_gone_backward_in_another(amp, a, b, of_a, of_b):
    x = X.clone().requires_grad_()
    with amp.scale_loss(loss_of(b(a(x).float())), of_a) as scaled:
        in_threads(scaled.backward)
    return [copied(x.grad)]


@script_of_threads
def checkpoint_in_one_thread_while_another_trains(amp):
    """A function in Python in one thread's block takes nothing from what another thread is about to step with."""
    (a, of_a), (b, of_b) = session(amp, 1), session(amp, 2)
    barrier = threading.Barrier(2, timeout=30)

    def first():
        barrier.wait()
        with amp.scale_loss(loss_of(checkpoint(a, X.clone().requires_grad_(), use_reentrant=True)), of_a) as scaled:
            scaled.backward()
            barrier.wait()
            barrier.wait()
        of_a.step()

    def second():
        amp.backward(loss_of(b(X)), of_b)
        barrier.wait()
        barrier.wait()
        of_b.step()
        barrier.wait()

    in_threads(first, second)
    return weights(a, b)


@pytest.mark.parametrize("name, level, scale", at_by_turns(SCRIPTS))
def test_a_script_gets_the_numbers_of_float32(name, level, scale):
    assert_same(SCRIPTS[name](WithAmpkit(level, scale)), SCRIPTS[name](InFloat32()))


@pytest.mark.parametrize("level, scale", AT)
def test_a_loss_weight_that_waits_at_the_scale_of_another_call_is_refused(level, scale):
    """A number cannot be at two loss scales."""
    amp, weight = WithAmpkit(level, scale), nn.Parameter(torch.ones(1))
    (a, of_a), (b, of_b) = session(amp, 1), session(amp, 2)
    backward((weight * loss_of(a(X))).sum(), of_a, delay_unscale=True)
    with pytest.raises(ampkit.ConfigurationError, match="waits at the loss scale of another initialize"):
        backward((weight * loss_of(b(X))).sum(), of_b)


# Passes beside the scaled loss: right, or refused


#: Backward passes from the scaled loss and from a loss of a third session.
BESIDE = {
    "sum": lambda scaled, other: (scaled + other).backward(),
    "list": lambda scaled, other: torch.autograd.backward([scaled, other]),
    "list that begins with the other": lambda scaled, other: torch.autograd.backward([other, scaled]),
    "through the scaled number": lambda scaled, other: (other * scaled / scaled.detach()).backward(),
    "made from the scaled number": lambda scaled, other: (
        scaled.backward(retain_graph=True),
        (other * scaled.detach() / scaled.detach()).backward(),
    ),
    "of its own": lambda scaled, other: (scaled.backward(), other.backward()),
}
BESIDE_AT = at_by_turns(BESIDE)


def beside(amp, name):
    """Go backward from the scaled loss, which reaches the first two sessions, and from the other loss, which reaches the third."""
    (a, of_a), (b, _of_b), (c, _of_c) = (session(amp, seed) for seed in (1, 2, 3))
    with amp.scale_loss(loss_of(b(a(X).float())), of_a) as scaled:
        BESIDE[name](scaled, loss_of(c(X)))
    return grads(a, b, c)


@pytest.mark.parametrize("name, level, scale", BESIDE_AT)
def test_a_pass_beside_the_scaled_loss_is_right_or_refused(name, level, scale):
    expected = beside(InFloat32(), name)
    try:
        actual = beside(WithAmpkit(level, scale), name)
    except ampkit.ConfigurationError as error:
        assert "did not come from the scaled loss alone" in str(error)
    else:
        assert_same(actual, expected)


@pytest.mark.parametrize("name, level, scale", BESIDE_AT)
def test_a_refused_pass_leaves_gradients_of_before_and_training_goes_on(name, level, scale):
    sessions = [session(WithAmpkit(level, scale), seed) for seed in (1, 2, 3)]
    (a, of_a), (b, of_b), (c, of_c) = sessions
    twins = [net(seed) for seed in (1, 2, 3)]
    for index, ((model, optimizer), twin) in enumerate(zip(sessions, twins)):
        backward(loss_of(model(X + index)), optimizer)
        loss_of(twin(X + index)).backward()
    try:
        with ampkit.scale_loss(loss_of(b(a(X).float())), of_a) as scaled:
            if name in ("made from the scaled number", "of its own"):
                loss_of(c(X)).backward()
            else:
                BESIDE[name](scaled, loss_of(c(X)))
    except ampkit.ConfigurationError:
        assert_same(grads(a, b, c), grads(*twins))
    for optimizer, twin in zip((of_a, of_b, of_c), twins):
        optimizer.zero_grad()
        twin.weight.grad = None
    backward(loss_of(b(a(X).float())), of_a)
    loss_of(twins[1](twins[0](X))).backward()
    assert_same(grads(a, b), grads(*twins[:2]))


def test_a_skip_at_loss_scale_1_counts_there_after_a_delayed_block_of_another_session_came_by():
    (a, of_a), (b, of_b) = session(WithAmpkit("O2", "dynamic"), 1), session(WithAmpkit("O2", 1.0), 2)
    backward(loss_of(b(a(X))), of_a, delay_unscale=True)
    of_b.step()
    of_b.zero_grad()
    (loss_of(b(X)) * torch.inf).backward()
    of_b.step()
    assert ampkit.step_was_skipped(of_b)
    assert current_session().scaling.scalers[0].synchronize().skips == 1


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_grad_scaler_refuses_the_optimizer_of_another_session(level):
    amp = WithAmpkit(level, 1024.0)
    (a, of_a), (b, of_b) = session(amp, 1), session(amp, 2)
    grad_scaler, before = ampkit.GradScaler(), weights(a)  # of the newest session
    grad_scaler.scale(loss_of(b(a(X).float()))).backward()
    with pytest.raises(ampkit.NotInitializedError):
        grad_scaler.step(of_a)
    grad_scaler.step(of_b)
    assert_same(weights(a), before)
