"""Fused optimizers over stored weights: one pass from gradients to masters and weights, judged by torch.optim in float64."""

import functools
import math

import pytest
import test_fused_optimizers
import torch
from helpers import (
    STORED_BF16,
    assert_all_close,
    assert_same,
    backward,
    fused_class,
    initialize_quietly,
    random_batch,
)
from torch import nn
from torch.nn import functional as F

import ampkit
from ampkit import DynamicLossScale
from ampkit.apex import optimizers as apex_optimizers
from ampkit.apex.optimizers import FusedAdagrad, FusedLAMB, FusedNovoGrad
from ampkit.apex.parallel.LARC import LARC
from ampkit.optimizers import FusedAdam, FusedSGD

pytestmark = pytest.mark.switch

SGD, ADAM = test_fused_optimizers.SGD, test_fused_optimizers.ADAM
TWINS = {
    case: (functools.partial(fused_class(name), **settings), functools.partial(twin, **twin_settings))
    for case, (name, settings, twin, twin_settings) in test_fused_optimizers.TWINS.items()
    if case != "adam_capturable"
}
TWINS["apex adamw"] = (functools.partial(apex_optimizers.FusedAdam, **ADAM), TWINS["adamw"][1])
# Steps in float32 against steps in float64, and against each other.
TOLERANCE = 2e-6


class WithSide(nn.Module):
    """A model with cast weights, a kept norm, a frozen layer, and a weight that some batches leave out."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.side = nn.Linear(8, 3)
        self.last = nn.Linear(8, 3)

    def forward(self, x, with_side=True):
        hidden = self.frozen(torch.tanh(self.norm(self.first(x))))
        return self.last(hidden) + self.side(hidden) if with_side else self.last(hidden)


def with_fused(make, level="O2", **settings):
    torch.manual_seed(0)
    return initialize_quietly(WithSide(), make, level, **settings)


def backward_on_batch(model, optimizer, seed=1, with_side=True, factor=1.0, **flags):
    x, y = random_batch(seed)
    backward(factor * F.mse_loss(model(x, with_side).float(), y), optimizer, **flags)


def masters(optimizer):
    return list(ampkit.master_params(optimizer))


def float64_twin(make_twin, optimizer):
    params = [nn.Parameter(p.detach().double()) for p in masters(optimizer)]
    return params, make_twin(params)


def give_gradients(params, model):
    for param, p in zip(params, model.parameters(), strict=True):
        param.grad = None if p.grad is None else p.grad.double()


def assert_model_is_the_rounded_masters(model, optimizer):
    weights = list(model.parameters())
    assert_same(weights, [master.to(p.dtype) for p, master in zip(weights, masters(optimizer), strict=True)])


@pytest.mark.parametrize("level", ["O2", STORED_BF16, "O5"])
@pytest.mark.parametrize("name", TWINS)
def test_step_agrees_with_float64_torch_optim(name, level):
    make, make_twin = TWINS[name]
    model, optimizer = with_fused(make, level)
    params, twin = float64_twin(make_twin, optimizer)
    for step in range(5):
        optimizer.zero_grad()
        model.zero_grad()
        # Apex counts steps for all of a group, not for each parameter.
        backward_on_batch(model, optimizer, step, with_side=step != 2 or name == "apex adamw")
        give_gradients(params, model)
        optimizer.step()
        twin.step()
        assert_model_is_the_rounded_masters(model, optimizer)
    assert_all_close(masters(optimizer), params, TOLERANCE)


clip = ampkit.clip_grad_norm_
CLIPS = {
    "clip_grad_norm_": clip,
    "twice": lambda optimizer, bound: (clip(optimizer, 2 * bound), clip(optimizer, bound))[0],
    "then looked at": lambda optimizer, bound: (clip(optimizer, bound), masters(optimizer))[0],
    "by hand": lambda optimizer, bound: nn.utils.clip_grad_norm_(ampkit.master_params(optimizer), bound),
    "of a list": lambda optimizer, bound: nn.utils.clip_grad_norm_(masters(optimizer), bound),
}


CLIPPED = {
    "FusedAdam": TWINS["adamw"],
    "torch": (TWINS["sgd_momentum"][1],) * 2,
    "over stand-ins": (lambda p: torch.optim.NAdam(p, lr=0.02),) * 2,
}


@pytest.mark.parametrize(
    "name, level",
    [
        *(("torch", level) for level in ("O0", "O1", "O2", STORED_BF16, "O5")),
        *(("FusedAdam", "O1"), ("FusedAdam", "O2"), ("over stand-ins", "O2"), ("over stand-ins", STORED_BF16)),
    ],
)
@pytest.mark.parametrize("way", CLIPS)
def test_clipping_is_torchs_in_float64(name, way, level):
    make, make_twin = CLIPPED[name]
    model, optimizer = with_fused(make, level, **({} if level in (STORED_BF16, "O5") else {"loss_scale": 64.0}))
    params, twin = float64_twin(make_twin, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        backward_on_batch(model, optimizer, step)
        give_gradients(params, model)
        found = CLIPS[way](optimizer, 0.1)
        expected = torch.nn.utils.clip_grad_norm_(params, 0.1)
        assert found.shape == () and math.isclose(found.item(), expected.item(), rel_tol=1e-5)
        optimizer.step()
        twin.step()
    assert_all_close(masters(optimizer), params, 1e-5)


def test_clipping_with_larc_and_with_other_norms():
    model, optimizer = with_fused(lambda p: LARC(FusedSGD(p, **SGD)), loss_scale=64.0)
    backward_on_batch(model, optimizer)
    for norm_type in (2.0, math.inf):
        expected = torch.nn.utils.get_total_norm(
            [p.grad.clone() for p in ampkit.master_params(optimizer) if p.grad is not None], norm_type
        )
        assert torch.allclose(ampkit.clip_grad_norm_(optimizer, 1e-3, norm_type), expected)
        left = torch.nn.utils.get_total_norm([p.grad for p in masters(optimizer) if p.grad is not None], norm_type)
        assert left <= 1.001e-3
    optimizer.step()
    assert_model_is_the_rounded_masters(model, optimizer)


def test_clipping_without_a_session_is_torchs():
    param, twin = (nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer = torch.optim.SGD([param], lr=0.1)
    param.grad, twin.grad = torch.full((4,), 3.0), torch.full((4,), 3.0)
    assert ampkit.clip_grad_norm_(optimizer, 1.0).item() == torch.nn.utils.clip_grad_norm_([twin], 1.0).item() == 6.0
    assert torch.equal(param.grad, twin.grad)


@pytest.mark.parametrize("make", [lambda p: FusedSGD(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_clipping_an_overflow_leaves_it_to_the_loss_scale(level, make):
    model, optimizer = with_fused(make, level)
    before = [p.detach().clone() for p in masters(optimizer)]
    backward_on_batch(model, optimizer, factor=math.inf)
    assert not ampkit.clip_grad_norm_(optimizer, 1.0).isfinite()
    with pytest.raises(RuntimeError, match="non-finite"):
        ampkit.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)
    optimizer.step()
    assert ampkit.step_was_skipped(optimizer)
    assert_same(masters(optimizer), before)


# Accumulation


@pytest.mark.parametrize(
    "growth_interval, clipped_between, level",
    [(1, False, "O1"), (1, False, "O2"), (2000, True, "O2"), (2000, True, STORED_BF16), (2000, True, "O5")],
)
@pytest.mark.parametrize("delays", [(0, 0, 0), (1, 1, 0), (0, 1, 0), (1, 0, 0), (1, 1, 1)], ids=str)
def test_micro_batches_add_up(level, growth_interval, delays, clipped_between):
    """Against float64 sums of the very gradients that each backward pass computed."""
    rule = DynamicLossScale(init_scale=16.0, growth_factor=4.0, growth_interval=growth_interval)
    settings = {} if level in (STORED_BF16, "O5") else {"loss_scale": rule}
    model, optimizer = with_fused(lambda p: FusedSGD(p, lr=1.0), level, **settings)
    before = [p.detach().double().clone() for p in masters(optimizer)]
    total = [torch.zeros_like(p) for p in before]
    for index, delayed in enumerate(delays):
        x, y = random_batch(index)
        trained = [(p, sums) for p, sums in zip(model.parameters(), total) if p.requires_grad]
        loss = F.mse_loss(model(x, index != 1).float(), y)
        gradients = torch.autograd.grad(loss, [p for p, _ in trained], allow_unused=True)
        for (_, sums), gradient in zip(trained, gradients):
            sums += 0 if gradient is None else gradient.double()
        backward_on_batch(model, optimizer, index, with_side=index != 1, delay_unscale=bool(delayed))
        if clipped_between and index == 0 and not delayed:
            norm = ampkit.clip_grad_norm_(optimizer, 1e-2).double()
            total = [gradient * (1e-2 / (norm + 1e-6)) for gradient in total]
    optimizer.step()
    largest = max(gradient.abs().max() for gradient in total)
    for master, start, gradient in zip(masters(optimizer), before, total):
        assert (start - master.double() - gradient).abs().max() <= (3e-2 if any(delays) else 1e-2) * largest


# What scripts do in between


def test_an_edit_survives_a_step_that_is_skipped():
    model, optimizer = with_fused(TWINS["adamw"][0])
    backward_on_batch(model, optimizer, factor=math.inf)
    with torch.no_grad():
        masters(optimizer)[-2].fill_(3.0)
    optimizer.step()
    assert ampkit.step_was_skipped(optimizer)
    assert torch.equal(model.last.weight.float(), torch.full((3, 8), 3.0))
    assert torch.equal(model.state_dict()["last.weight"], torch.full((3, 8), 3.0))


# -- complex parameters


def complex_gradient(seed=0):
    torch.manual_seed(seed)
    param = torch.randn(5, dtype=torch.complex64, requires_grad=True)
    (param * param.conj()).real.square().sum().backward()
    return param


def test_complex_parameters_take_sgd_as_in_torch():
    param, twin = complex_gradient(), complex_gradient()
    for optimizer in (FusedSGD([param], **SGD), torch.optim.SGD([twin], **SGD)):
        for _ in range(3):
            optimizer.step()
    torch.testing.assert_close(param, twin)


@pytest.mark.parametrize("times", [0, 1, 2])
@pytest.mark.parametrize("level", ["O1", "O2", STORED_BF16])
def test_lamb_clips_by_the_norm_that_an_earlier_clipping_has_left(level, times):
    """A gradient of norm 8, clipped to 4 and perhaps to 2, which LAMB clips to 1; eps has the length count. By hand, in float64."""
    model = nn.Linear(4, 4, bias=False)
    nn.init.constant_(model.weight, 2.0)
    settings = dict(lr=0.5, eps=1.0, weight_decay=0.0, bias_correction=False, grad_averaging=False, max_grad_norm=1.0)
    model, optimizer = initialize_quietly(model, lambda p: FusedLAMB(p, **settings), level)
    backward((model(torch.ones(1, 4)) * 2.0).float().sum(), optimizer)
    for bound in (4.0, 2.0)[:times]:
        ampkit.clip_grad_norm_(optimizer, bound)
    optimizer.step()
    # All 16 elements are 2, of norm 8: 0.25 where the norm is 1. Without decay LAMB has no trust ratio.
    expected = 2.0 - 0.5 * 0.25 / ((1 - 0.999) ** 0.5 * 0.25 + 1.0)
    assert torch.allclose(model.state_dict()["weight"].double(), torch.full((4, 4), expected).double(), atol=1e-4)


@pytest.mark.parametrize("kind", [FusedAdam, FusedAdagrad, FusedLAMB, FusedNovoGrad])
def test_complex_parameters_are_refused_where_gradients_are_squared(kind):
    said = r"complex parameters; one of shape \(5,\) is torch.complex64.*view_as_real"
    with pytest.raises(RuntimeError, match=said):
        kind([complex_gradient()])
    optimizer = kind([torch.ones(2, requires_grad=True)])
    with pytest.raises(RuntimeError, match=said):
        optimizer.add_param_group({"params": [complex_gradient()]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("state_dtype", ["float32", "int8"])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_scheduler_of_before_initialize_leaves_the_step_in_one_pass(level, state_dtype, caplog):
    """Its wrapper of ``step`` hands everything on. A step that a script replaces is one of its own, and its reason is said."""
    model = nn.Linear(64, 64)
    optimizer = FusedAdam(model.parameters(), lr=1.0, state_dtype=state_dtype)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert ampkit.explain(model, optimizer).optimizers[0].step == "one pass" and not caplog.records
    for x, skipped, rate in ((torch.ones(2, 64), False, 0.5), (torch.full((2, 64), math.nan), True, 0.25)):
        before = model.weight.detach().clone()
        backward(model(x).float().sum(), optimizer)
        optimizer.step()
        scheduler.step()
        assert ampkit.step_was_skipped(optimizer) is skipped is torch.equal(model.weight, before)
        assert optimizer.param_groups[0]["lr"] == rate
        optimizer.zero_grad()
    ampkit.close()
    optimizer.step = lambda: None
    ampkit.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert ampkit.explain(model, optimizer).optimizers[0].reason == "its step() was replaced before initialize()"
