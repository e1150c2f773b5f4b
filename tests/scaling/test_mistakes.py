"""Mistakes that would ruin a run in silence: each is reported once, in words that say what to do; correct code is not reported."""

import math
from contextlib import nullcontext, suppress
from functools import partial

import pytest
import torch
from helpers import STORED_BF16, assert_skips, at, backward, in_threads, initialize_quietly, random_batch, sgd
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import cross_entropy  # bound before anything is initialized
from torch.utils.checkpoint import checkpoint

import ampkit

SCALE = 2.0**7


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))


def loss_of(model, seed=1):
    x, y = random_batch(seed)
    return F.mse_loss(model(x).float(), y)


def told(caplog, words):
    return [one.getMessage() for one in caplog.records if words in one.getMessage()]


# A backward pass outside of every block


def delayed(model, optimizer):
    backward(loss_of(model), optimizer, delay_unscale=True)


def of_the_scaled_loss_after_its_block(model, optimizer):
    with ampkit.scale_loss(loss_of(model), optimizer) as scaled:
        pass
    scaled.backward()


def of_the_loss_itself(model, optimizer):
    loss = loss_of(model)
    with ampkit.scale_loss(loss, optimizer):
        loss.backward()


def beside(waiting, model, optimizer):
    waiting(model, optimizer)
    loss_of(model, seed=2).backward()


def clipped_in_the_block(model, optimizer):
    with ampkit.scale_loss(loss_of(model), optimizer) as scaled:
        list(ampkit.master_params(optimizer))  # before the backward pass there is nothing to clip
        scaled.backward()
        with pytest.raises(ampkit.ConfigurationError):
            torch.nn.utils.clip_grad_norm_(ampkit.master_params(optimizer), 1.0)
    torch.nn.utils.clip_grad_norm_(ampkit.master_params(optimizer), 1.0)


def test_parameters_are_asked_for_in_a_block_before_its_backward_pass(caplog):
    model, optimizer = initialize_quietly(net(), sgd, "O1", loss_scale=SCALE)
    with ampkit.scale_loss(loss_of(model), optimizer) as scaled:
        list(ampkit.master_params(optimizer))
        assert caplog.text == ""
        scaled.backward()


def clamped(register, model, optimizer):
    """The gradient at the scale is clamped to 1, and is unscaled then."""
    bias = model[1].bias
    handle = register(bias)
    backward(SCALE * loss_of(model), optimizer)
    assert bias.grad.abs().max() <= 1 / SCALE
    handle.remove()


def clamp_in_place(param):
    param.grad.clamp_(-1, 1)


def by_torchs(has_block, model, optimizer):
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with ampkit.scale_loss(loss_of(model), optimizer) if has_block else nullcontext(loss_of(model)) as loss:
        grad_scaler.scale(loss).backward()
    grad_scaler.step(optimizer)


WAITING = "gradients that wait at a loss scale", "delay_unscale=True", "ampkit.GradScaler().scale"
#: A backward pass of each iteration, and what is said of it once.
MISTAKES = {
    "by habit": (
        *(lambda model, _: loss_of(model).backward(), "outside of every scale_loss block", "SGD.step()"),
        *("as scaled_loss: scaled_loss.backward()", "ampkit.GradScaler"),
    ),
    "after its block": (of_the_scaled_loss_after_its_block, "ended without a backward pass"),
    "of the loss itself": (of_the_loss_itself, "did not go through the scaled loss", "scaled_loss.backward()"),
    "beside delayed ones": (partial(beside, delayed), *WAITING),
    "beside GradScaler's": (
        partial(beside, lambda model, _: ampkit.GradScaler().scale(loss_of(model)).backward()),
        *WAITING,
    ),
    "clipped in the block": (clipped_in_the_block, "inside the scale_loss block", "after the block"),
    "clamped in a hook": (
        partial(clamped, lambda bias: bias.register_hook(lambda gradient: gradient.clamp(-1, 1))),
        "Parameter '1.bias' has a hook",
    ),
    "clamped once added": (
        partial(clamped, lambda bias: bias.register_post_accumulate_grad_hook(clamp_in_place)),
        "Parameter '1.bias' has a hook",
    ),
    "by torch's GradScaler": (partial(by_torchs, False), "torch.amp.GradScaler", "ampkit.GradScaler()"),
    "by torch's in a block": (partial(by_torchs, True), "torch.amp.GradScaler", "ampkit.GradScaler()"),
}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_backward_pass_that_is_a_mistake_is_told_of_once(name, level, caplog):
    mistake, *words = MISTAKES[name]
    model, optimizer = initialize_quietly(net(), sgd, level, loss_scale=SCALE)
    for _ in range(3):
        optimizer.zero_grad()
        mistake(model, optimizer)
        optimizer.step()
    (line,) = told(caplog, words[0])
    assert all(word in line for word in words), line
    # A pass after its block is one outside of every block too.
    assert len(caplog.records) == 1 + (mistake is of_the_scaled_loss_after_its_block)


def test_the_closure_of_an_optimizer_that_evaluates_it_again_is_told_of_too(caplog):
    model, optimizer = initialize_quietly(net(), lambda p: torch.optim.LBFGS(p, max_iter=2), "O1", loss_scale=SCALE)
    before = [p.detach().clone() for p in model.parameters()]

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model) * math.nan
        loss.backward()
        return loss

    optimizer.step(closure)
    assert len(told(caplog, "LBFGS.step() uses gradients")) == 1
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))


def in_a_block(model, optimizer):
    backward(loss_of(model), optimizer)


def by_grad_scaler(output_of, model, optimizer):
    grad_scaler, (x, y) = ampkit.GradScaler(), random_batch(1)
    for _ in range(2):
        (grad_scaler.scale(F.mse_loss(output_of(model, x).float(), y)) / 2).backward()
    grad_scaler.step(optimizer)
    grad_scaler.update()


def by_a_checkpoint(model, x):
    """Checkpoint a part of the graph that no scaled loss is in: its backward pass runs inside of the scaled one."""
    return checkpoint(model, x.requires_grad_(), use_reentrant=True)


def by_autograd_grad(model, optimizer):
    with ampkit.scale_loss(loss_of(model), optimizer) as scaled:
        gradients = torch.autograd.grad(scaled, list(model.parameters()))
        for param, gradient in zip(model.parameters(), gradients, strict=True):
            param.grad = gradient


def by_hand(model, optimizer):
    for param in model.parameters():
        param.grad = torch.ones_like(param)


def of_the_input(model, optimizer):
    """Make an adversarial example, and throw its gradients on the weights away."""
    x, y = random_batch(1)
    x.requires_grad_()
    F.mse_loss(model(x).float(), y).backward()
    optimizer.zero_grad()
    by_hand(model, optimizer)


def evaluated_in_a_block(model, optimizer):
    with torch.no_grad(), ampkit.scale_loss(loss_of(model), optimizer):
        pass
    by_hand(model, optimizer)


def with_a_hook_of_torchs(model, optimizer):
    handle = model[1].bias.register_hook(torch.clone)
    in_a_block(model, optimizer)
    handle.remove()


def a_term_without_a_scale(model):
    (1e-3 * sum(p.float().square().sum() for p in model.parameters())).backward()


RIGHT = {
    "in a block": in_a_block,
    "after a block": lambda model, optimizer: (in_a_block(model, optimizer), a_term_without_a_scale(model)),
    "delayed": delayed,
    "evaluated in a block": evaluated_in_a_block,
    "with a hook of torch's": with_a_hook_of_torchs,
    "micro-batches by GradScaler": partial(by_grad_scaler, nn.Module.__call__),
    "by GradScaler from a checkpoint": partial(by_grad_scaler, by_a_checkpoint),
    "by autograd.grad": by_autograd_grad,
    "by hand": by_hand,
    "of the input": of_the_input,
    "of the model, cleared": lambda model, optimizer: (
        loss_of(model).backward(),
        model.zero_grad(),
        by_hand(model, optimizer),
    ),
    "of another model": lambda model, optimizer: (
        nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward(),
        by_hand(model, optimizer),
    ),
}


@pytest.mark.parametrize("way", RIGHT)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_is_right_is_not_told_of(way, level, caplog):
    model, optimizer = initialize_quietly(net(), sgd, level, loss_scale=SCALE)
    for _ in range(2):
        optimizer.zero_grad()
        RIGHT[way](model, optimizer)
        optimizer.step()
    assert [one.getMessage() for one in caplog.records if one.levelname == "WARNING"] == []


@pytest.mark.parametrize("level", ["O0", STORED_BF16, "O3", "O4", "O5"])
def test_at_scale_one_backward_needs_no_block_and_hooks_are_right(level, caplog):
    model, optimizer = initialize_quietly(net(), sgd, level)
    model[1].bias.register_hook(lambda gradient: gradient.clamp(-1, 1))
    loss_of(model).backward()
    optimizer.step()
    with ampkit.scale_loss(loss_of(model), optimizer):
        loss_of(model).backward()
    optimizer.step()
    assert caplog.text == ""


def test_blocks_without_a_backward_pass_are_told_of_once(caplog):
    model, optimizer = initialize_quietly(net(), sgd, "O1", loss_scale=SCALE)
    for count in (0, 1, 1):  # a script may leave out a first bad batch
        with ampkit.scale_loss(loss_of(model), optimizer):
            pass
        assert len(told(caplog, "ended without a backward pass")) == count


def test_an_optimizer_over_a_copy_of_the_model_is_refused():
    model, other = net(), net()
    words = r"none of the trainable parameters of the model.* with the same shapes"
    with pytest.raises(ampkit.ConfigurationError, match=words):
        ampkit.initialize(model, sgd(other.parameters()), verbosity=0)
    # A loss with its own weights is taken.
    ampkit.initialize(model, [sgd(model.parameters()), sgd(other.parameters())], verbosity=0)


@pytest.mark.parametrize("of", [lambda: torch.ones(2, requires_grad=True), lambda: nn.Parameter(torch.ones(2))])
def test_an_optimizer_over_leaves_of_no_model_is_taken(of, caplog):
    model, leaf = net(), of()
    ampkit.initialize(model, [sgd(model.parameters()), sgd([leaf])], verbosity=0)
    ampkit.initialize(net(), sgd([torch.ones(1, 6, requires_grad=True)]), opt_level="O1", verbosity=0)  # a picture
    assert caplog.text == ""


def headed(**settings):
    """A model whose first layer no optimizer updates, its optimizer, and its twin in float32."""
    model, twin = net(), net()
    return *initialize_quietly(model, lambda _: sgd(model[1].parameters()), "O1", **settings), twin


def test_an_overflow_in_them_skips_the_step():
    """Without the skip clip_grad_norm_(model.parameters()) would make NaN of all other gradients."""
    model, optimizer, _ = headed()
    with ampkit.scale_loss(loss_of(model), optimizer) as scaled:
        scaled.backward()
        model[0].weight.grad[0, 0] = math.inf
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert_skips(model, optimizer)
    optimizer.zero_grad()  # leaves gradients that belong to no optimizer
    in_a_block(model, optimizer)
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite()
    optimizer.step()
    assert not ampkit.step_was_skipped(optimizer)


@pytest.mark.parametrize("cleared", ["a failed block", "zero_grad"])
def test_gradients_of_later_plain_passes_are_as_they_are(cleared):
    model, optimizer, twin = headed(loss_scale=2.0**10)
    with suppress(ZeroDivisionError), ampkit.scale_loss(loss_of(model), optimizer, delay_unscale=True) as scaled:
        scaled.backward()
        if cleared == "a failed block":
            raise ZeroDivisionError
    optimizer.zero_grad()
    model.zero_grad()
    loss_of(model).backward()
    loss_of(twin).backward()
    for param, exact in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param.grad, exact.grad, rtol=5e-2, atol=5e-3)


@pytest.mark.parametrize("settings", [{"opt_level": "O4"}, {"opt_level": "O1", "loss_scale": 1.0}])
def test_a_grad_scaler_at_scale_one_and_one_that_is_off_are_not_told_of(settings, caplog):
    for enabled in (True, False):
        model = net()
        optimizer = sgd(model.parameters())
        ampkit.initialize(model, optimizer, verbosity=0, **settings)
        grad_scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        grad_scaler.scale(loss_of(model)).backward()
        grad_scaler.step(optimizer)
    assert caplog.text == ""


@pytest.mark.parametrize("way", ["as it is", "autocast", "forward"])
def test_a_thread_that_computes_its_loss_uncast_is_told_of(way, caplog):
    scope = "forward" if way == "forward" else "process"
    model, optimizer = initialize_quietly(net(), sgd, "O1", loss_scale=SCALE, scope=scope)
    dtypes = []

    def train():
        x, _ = random_batch(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=True) if way == "autocast" else nullcontext():
            loss = F.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long))
        dtypes.append(loss.dtype)
        backward(loss, optimizer)

    for _ in range(2):
        in_threads(train)
    is_uncast = way == "as it is"
    assert dtypes == [torch.bfloat16 if is_uncast else torch.float32] * 2
    lines = told(caplog, "in another thread than initialize()")
    assert len(lines) == is_uncast and all("scope='forward'" in line for line in lines)


class ByHand(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=1e-4)


#: Things that a script makes of its model after `initialize`; and whether its steps are lost where weights are stored.
LATER = {
    "the same again": (sgd, True),
    "over one layer": (lambda params: sgd(list(params)[:1]), True),
    "of the script's own": (ByHand, True),
    "over leaves of no model": (lambda params: sgd([nn.Parameter(torch.ones(3))]), False),
    "that draws numbers": (lambda params: ampkit.optimizers.FusedAdam(params, rounding="stochastic"), False),
    "that keeps rests": (lambda params: ampkit.optimizers.SGD(params, lr=1e-4), False),
}


@pytest.mark.parametrize("with_optimizer", [False, True])
@pytest.mark.parametrize(
    "level, name", [*((STORED_BF16, name) for name in LATER), ("O1", "the same again"), ("O5", "of the script's own")]
)
def test_steps_of_an_unknown_optimizer_over_stored_weights_are_told_once(level, name, with_optimizer, caplog):
    make, loses = LATER[name]
    model = net()
    ampkit.initialize(model, sgd(model.parameters()) if with_optimizer else None, **at(level, verbosity=0))
    optimizer = make(model.parameters())
    for _ in range(3):
        loss_of(model).backward()
        optimizer.step()
    lines = told(caplog, "but initialize() was not given this")
    assert len(lines) == (loses and level == STORED_BF16)
    assert all(type(optimizer).__name__ + ".step()" in line and "initialize() again" in line for line in lines)


class Both(torch.optim.Optimizer):
    """An optimizer that steps by two optimizers, one for each layer."""

    def __init__(self, params):
        params = list(params)
        super().__init__(params, {})
        self.parts = [torch.optim.Adam(params[:2]), torch.optim.SGD(params[2:], lr=0.1)]
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self):
        for part in self.parts:
            part.step()


@pytest.mark.parametrize("make", [sgd, Both])
def test_an_optimizer_that_is_given_after_all_or_inside_of_another_is_not_told_of(make, caplog):
    model = net()
    ampkit.initialize(model, **at(STORED_BF16, verbosity=0))
    model, optimizer = initialize_quietly(model, make, STORED_BF16)
    loss_of(model).backward()
    optimizer.step()
    assert caplog.text == ""


#: Losses of outputs, and whether O5 leaves them in lower precision.
LOSSES = {
    "critic": (lambda z: -z.mean(), True),
    "difference": (lambda z: z[:4].mean() - z[4:].mean(), True),
    "bound before": (lambda z: cross_entropy(z, torch.zeros(len(z), dtype=torch.long)), True),
    "by its attribute": (lambda z: F.cross_entropy(z, torch.zeros(len(z), dtype=torch.long)), False),
    "float32": (lambda z: -z.float().mean(), False),
    "sum": (lambda z: z.square().sum(), False),
    "softplus": (lambda z: F.softplus(-z).mean(), False),
}


@pytest.mark.parametrize("name, level", [*((name, "O5") for name in LOSSES), ("critic", "O4")])
def test_a_loss_in_lower_precision_is_told_with_its_cause(name, level, caplog):
    (loss_of_output, is_lower), (x, _) = LOSSES[name], random_batch(1)
    is_lower = is_lower and level == "O5"
    model, optimizer = initialize_quietly(net(), sgd, level)
    for _ in range(2):
        loss = loss_of_output(model(x))
        backward(loss, optimizer)
    lines = told(caplog, "was given a loss in torch.bfloat16")
    assert len(lines) == is_lower
    assert all(word in line for line in lines for word in ("mean()", ".float()", "cast_model_outputs=torch.float32"))
    assert not lines or loss.dtype is torch.bfloat16


@pytest.mark.parametrize(
    "level, place, dtype, is_told",
    [
        ("O4", "around", torch.float16, True),
        ("O4", "around", torch.bfloat16, False),
        ("O4", "inside", torch.float16, True),
        ("O5", "around", torch.float16, False),  # the model's own precision holds in its forward
        ("O5", "inside", torch.float16, True),
        ("O5", "inside", torch.bfloat16, False),
        ("O1", "inside", torch.float16, False),
    ],
)
def test_a_float16_region_without_a_loss_scale_is_told_of(level, place, dtype, is_told, caplog):
    """A gradient of 2 ** -27 is 0 in float16, where the region's precision holds."""
    linear = nn.Linear(1, 1, bias=False)
    region = torch.autocast("cpu", dtype)
    model = nn.Sequential(linear)
    if place == "inside":
        linear.forward = region(linear.forward)
    model, optimizer = initialize_quietly(model, sgd, level)
    around = region if place == "around" else nullcontext()
    with around, torch.no_grad():
        model(torch.ones(1, 1))  # an evaluation has no gradients to lose, nor has a frozen model
    linear.weight.requires_grad_(False)
    with around:
        model(torch.ones(1, 1))
    linear.weight.requires_grad_(True)
    assert caplog.text == ""
    for _ in range(2):
        with around:
            loss = model(torch.ones(1, 1)).float().sum() * 2.0**-27
        optimizer.zero_grad()
        backward(loss, optimizer)
    assert linear.weight.grad.item() == (0.0 if is_told else 2.0**-27)
    assert len(told(caplog, "in a torch.autocast region in float16")) == is_told


def skip(model, optimizer, times, loss_is_nan=False):
    for _ in range(times):
        optimizer.zero_grad()
        with ampkit.scale_loss(loss_of(model) * (math.nan if loss_is_nan else 1.0), optimizer) as scaled:
            (scaled * (1.0 if loss_is_nan else math.inf)).backward()
        optimizer.step()


STAYS, FALLS = "loss scale stays", "reducing loss scale to"
OVERFLOWS = {
    "at the floor": ((4.0, 1), [f"{FALLS} 2.0", *[f"is at its floor, {STAYS} 2.0"] * 2]),
    "hysteresis": ((8.0, 2), [f"waits for more overflows (hysteresis), {STAYS} 8.0", f"{FALLS} 4.0", f"{FALLS} 2.0"]),
}


@pytest.mark.parametrize("case", OVERFLOWS)
def test_an_overflow_that_lowers_no_scale_says_so(case, caplog):
    (init_scale, hysteresis), lines = OVERFLOWS[case]
    caplog.set_level("INFO", "ampkit")
    rule = ampkit.DynamicLossScale(init_scale=init_scale, hysteresis=hysteresis)
    model, optimizer = initialize_quietly(net(), sgd, "O1", loss_scale=rule, min_loss_scale=2.0)
    skip(model, optimizer, 3)
    assert [line.rpartition("scaler 0 ")[2] for line in told(caplog, "Skipping step")] == [
        f"{line} (iteration {number}: the gradient of '0.weight')" for number, line in enumerate(lines, start=1)
    ]


@pytest.mark.parametrize("of_the_loss", [False, True])
def test_no_scale_is_advised_against_a_loss_that_is_not_finite(of_the_loss):
    model, optimizer = initialize_quietly(net(), sgd, "O1", loss_scale=SCALE)
    with pytest.raises(ampkit.LossScaleError) as raised:
        skip(model, optimizer, 52, of_the_loss)
    assert ("a lower loss_scale=" in str(raised.value)) is not of_the_loss
    assert ("bfloat16" in str(raised.value)) is not of_the_loss


class Mixed(nn.Module):
    """A product of two dtypes, in a region without casts."""

    def forward(self, x):
        with ampkit.disable_casts():
            return torch.mm(x, torch.ones(8, 3).to(torch.float64))


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_dtype_error_of_torch_says_where_and_what_to_do(level):
    model, _ = initialize_quietly(nn.Sequential(net()[0], Mixed()), sgd, level)
    with pytest.raises(RuntimeError) as raised:
        model(torch.ones(2, 6))
    (note,) = raised.value.__notes__
    assert f"opt_level {level}, module '1'" in note and "keep_fp32=" in note


def test_other_errors_stay_as_they_are():
    model, _ = initialize_quietly(net(), sgd, "O1")
    with pytest.raises(RuntimeError, match="shapes") as raised:
        model(torch.ones(2, 5))
    assert not hasattr(raised.value, "__notes__")
