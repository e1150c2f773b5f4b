"""Optimizers after initialize, and what scripts put around them: groups, schedulers, closures, odd tensors."""

import copy
import warnings

import pytest
import torch
from helpers import (
    assert_same,
    backward,
    initialize_quietly,
    iterate,
    iterate_in_torch,
    net_with_norm,
    sgd,
    take_steps,
    values_of,
)
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import ampkit
from ampkit.optimizers import FusedAdam

pytestmark = pytest.mark.switch

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
X = torch.linspace(-1, 1, 12).reshape(3, 4)


def loss_of(model):
    return model(X).float().square().mean()


def shrink_output(model, optimizer, factor=1.0):
    iterate(lambda: loss_of(model) * factor, optimizer)


# Parameter groups


@pytest.mark.parametrize(
    "level, form",
    [*((level, "list") for level in LEVELS), ("O2", "generator"), ("O5", "tensors one by one"), ("O2", "named")],
)
def test_added_group_trains(level, form):
    model = net_with_norm(4, 6, 1)
    optimizer = sgd(model[:3].named_parameters() if form == "named" else model[:3].parameters())
    ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
    shrink_output(model, optimizer)
    added = {
        "list": [list(model[3].parameters())],
        "generator": [model[3].parameters()],
        "tensors one by one": list(model[3].parameters()),
        "named": [model[3].named_parameters()],
    }[form]
    before = model.state_dict()["3.weight"].clone()
    for params in added:
        optimizer.add_param_group({"params": params, "lr": 0.05})
    assert torch.equal(model.state_dict()["3.weight"], before)
    optimizer.zero_grad()
    backward(loss_of(model), optimizer)
    gradient = optimizer.param_groups[1]["params"][0].grad.float().clone()
    optimizer.step()
    bound = 2.0**-8 if level == "O3" else 1e-6  # O3 rounds the weight
    torch.testing.assert_close(model.state_dict()["3.weight"].float(), before - 0.05 * gradient, rtol=bound, atol=1e-6)
    ampkit.close()
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(x is y for x, y in zip(held, model.parameters()))


@pytest.mark.parametrize("level", LEVELS)
def test_added_group_with_a_parameter_that_is_there_already_is_refused(level):
    model, optimizer = initialize_quietly(net_with_norm(4, 6, 1), sgd, level)
    with pytest.raises(ValueError, match="appear in more than one parameter group"):  # torch's own check
        optimizer.add_param_group({"params": [model[0].weight]})
    with pytest.raises(TypeError):
        optimizer.add_param_group("no group")
    assert len(optimizer.param_groups) == 1
    shrink_output(model, optimizer)


# Schedulers


SCHEDULERS = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
    "Sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ExponentialLR(optimizer, 0.5) for _ in range(2)], [10]
    ),
}


@pytest.mark.parametrize("first_step", ("taken", "skipped"))
@pytest.mark.parametrize("made", ("before", "after"))
@pytest.mark.parametrize("level, scheduler_name", list(zip(("O0", "O2", "O5"), SCHEDULERS)))
def test_scheduler_steps_without_warnings(level, made, first_step, scheduler_name):
    model = net_with_norm(4, 6, 1)
    optimizer = sgd(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if made == "before":
            scheduler = SCHEDULERS[scheduler_name](optimizer)
        ampkit.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
        if made == "after":
            scheduler = SCHEDULERS[scheduler_name](optimizer)
        for factor in (float("inf") if first_step == "skipped" else 1.0, 1.0):
            shrink_output(model, optimizer, factor)
            assert ampkit.step_was_skipped(optimizer) is (factor != 1.0)
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)


@pytest.mark.parametrize("level", ("O1", "O2"))
def test_hooks_of_the_optimizer_run_at_steps_that_are_taken(level):
    model = net_with_norm(4, 6, 1)
    optimizer = sgd(model.parameters())
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    shrink_output(model, optimizer, float("inf"))
    assert calls == []
    shrink_output(model, optimizer)
    assert calls == ["before", "after"]


# Closures


def losses_and_closure(model, optimizer, factors):
    """A closure whose evaluations multiply the loss by these factors in turn, and the list of losses it has returned."""
    losses, factors = [], iter(factors)

    def closure():
        optimizer.zero_grad()
        backward(loss_of(model) * next(factors), optimizer)
        losses.append(loss_of(model))
        return losses[-1]

    return losses, closure


class UsersSGD(torch.optim.SGD):
    """An optimizer of which ampkit cannot know how often it evaluates the closure."""


CLOSURE_OPTIMIZERS = {
    "SGD": sgd,
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "AdamW(fused)": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "FusedAdam": lambda params: FusedAdam(params, lr=0.1),
    "one of the user's": UsersSGD,
}


@pytest.mark.parametrize("name", CLOSURE_OPTIMIZERS)
@pytest.mark.parametrize("level, scale", [("O1", "dynamic"), ("O2", "dynamic"), ("O2", 2.0)])
def test_closure_with_a_scale_steps_as_without(level, scale, name):
    results = []
    for with_closure in (True, False):
        model, optimizer = initialize_quietly(net_with_norm(4, 6, 1), CLOSURE_OPTIMIZERS[name], level, loss_scale=scale)
        losses, closure = losses_and_closure(model, optimizer, [1.0, float("inf"), 1.0])
        for skips in (False, True, False):
            if with_closure:
                with torch.no_grad():  # the closure has its graph all the same
                    assert optimizer.step(closure) is losses[-1]
            else:
                closure()
                optimizer.step()
            assert ampkit.step_was_skipped(optimizer) is skips
        assert len(losses) == 3
        assert ampkit.state_dict()["loss_scaler0"]["loss_scale"] == (2.0**15 if scale == "dynamic" else scale)
        ampkit.close()
        results.append([p.detach().clone() for p in model.parameters()])
    assert_same(*results)


@pytest.mark.parametrize("level", ("O1", "O2"))
def test_a_second_evaluation_with_a_dynamic_scale_raises_and_takes_the_step_back(level):
    class Twice(torch.optim.SGD):
        def step(self, closure):
            closure()
            super().step()
            return closure()

    model, optimizer = initialize_quietly(net_with_norm(4, 6, 1), lambda p: Twice(p, lr=0.1), level)
    before = values_of(model)
    _, closure = losses_and_closure(model, optimizer, [1.0, 1.0])
    with pytest.raises(ampkit.ClosureError, match=r"Twice evaluated its closure a second time.*loss_scale=128\.0"):
        optimizer.step(closure)
    assert_same(model.state_dict(), before)


@pytest.mark.parametrize("level", ("O0", "O1", "O2"))
def test_lbfgs_is_refused_with_a_dynamic_scale_before_anything_is_touched(level):
    model = net_with_norm(4, 6, 1)
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(ampkit.ConfigurationError, match=r"LBFGS.*loss_scale=128\.0"):
        ampkit.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    assert type(model.forward(torch.ones(2, 4))) is torch.Tensor and "step" not in vars(optimizer)


@pytest.mark.parametrize("level, evaluation", [*(("O2", nth) for nth in (1, 2, 3)), ("O0", 2), ("O1", 2), ("O5", 2)])
def test_lbfgs_recovers_from_an_overflow_in_any_evaluation(level, evaluation):
    model = net_with_norm(4, 6, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, tolerance_grad=0, tolerance_change=0)
    ampkit.initialize(model, optimizer, opt_level=level, loss_scale=2.0, verbosity=0)
    before = values_of(model)
    factors = [1.0] * 40
    factors[evaluation - 1] = float("inf")
    losses, closure = losses_and_closure(model, optimizer, factors)
    optimizer.step(closure)
    assert ampkit.step_was_skipped(optimizer)
    assert_same(model.state_dict(), before)
    optimizer.step(closure=closure)
    assert not ampkit.step_was_skipped(optimizer) and loss_of(model) < 0.9 * losses[0]


# Optimizers that are none of torch's


class Bare:
    """Plain gradient descent with the four attributes that initialize asks for."""

    def __init__(self, params, lr=0.1):
        self.param_groups = [{"params": list(params), "lr": lr}]
        self.state = {}

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state.setdefault(p, {"steps": 0})["steps"] += 1
                    p -= group["lr"] * p.grad

    def zero_grad(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None


class Wrapping:
    """A wrapper in the manner of LARC: no Optimizer; all attributes are the inner optimizer's."""

    def __init__(self, params):
        self.inner = sgd(params)

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)

    def step(self):
        self.inner.step()

    def zero_grad(self, *args, **kwargs):
        self.inner.zero_grad(*args, **kwargs)


@pytest.mark.parametrize("level, kind", [*((level, Bare) for level in LEVELS), ("O2", Wrapping)])
def test_unusual_optimizer_trains_like_in_float32(kind, level):
    plain, model = net_with_norm(4, 6, 1), net_with_norm(4, 6, 1)
    reference, optimizer = (kind(one.parameters()) for one in (plain, model))
    iterate_in_torch(lambda: loss_of(plain), reference, 4)
    assert ampkit.initialize(model, optimizer, opt_level=level, verbosity=0) == (model, optimizer)
    iterate(lambda: loss_of(model), optimizer, 4)
    before = values_of(model)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(before[name].float(), value, atol=0.02, rtol=0.02)
    if level in ("O1", "O2"):
        shrink_output(model, optimizer, float("inf"))
        assert ampkit.step_was_skipped(optimizer)
        assert_same(model.state_dict(), before)
    keys = set(optimizer.state)
    assert keys <= set(model.parameters())
    ampkit.close()
    assert set(optimizer.state) == keys


def test_base_optimizer_that_was_wrapped_and_passed_too_steps_once():
    model = net_with_norm(4, 6, 1)
    outer = Wrapping(model.parameters())
    ampkit.initialize(model, [outer, outer.inner], opt_level="O5", verbosity=0)
    before = model.state_dict()["3.bias"].clone()
    outer.zero_grad()
    backward(loss_of(model), [outer])
    gradient = outer.param_groups[0]["params"][-1].grad.float()
    outer.step()
    torch.testing.assert_close(model.state_dict()["3.bias"], before - 0.1 * gradient)


# Unusual tensors


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize("together", (False, True), ids=("alone", "with another optimizer"))
@pytest.mark.parametrize("level", ("O0", "O1"))
def test_parameter_named_twice_in_a_group_has_one_gradient(level, together):
    models = nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False)
    weight = models[0].weight
    optimizers = torch.optim.SGD([weight, weight], lr=0.1), torch.optim.SGD(models[1].parameters(), lr=0.1)
    ampkit.initialize(list(models), list(optimizers), opt_level=level, loss_scale=8.0, verbosity=0)
    loss = sum(model(torch.ones(1, 3)).float().sum() for model in models)
    backward(loss, optimizers if together else optimizers[0])
    assert weight.grad.tolist() == [[1.0, 1.0, 1.0]]


@pytest.mark.parametrize(
    "level, optimizer_kind", [*((level, torch.optim.SparseAdam) for level in LEVELS), ("O1", sgd), ("O2", sgd)]
)
def test_sparse_gradients_train_like_in_float32(level, optimizer_kind):
    plain = nn.Embedding(6, 3, sparse=True)
    model, start = copy.deepcopy(plain), plain.weight.detach().clone()
    reference, optimizer = optimizer_kind(plain.parameters()), optimizer_kind(model.parameters())
    rows, factors = torch.tensor([1, 1, 4]), torch.tensor([1.0, 2.0, 3.0])
    iterate_in_torch(lambda: (plain(rows) * factors).sum(), reference, 2)
    ampkit.initialize(model, optimizer, opt_level=level, loss_scale=16.0, verbosity=0)
    iterate(lambda: (model(rows).float() * factors).sum(), optimizer, 2)
    assert model.weight.grad.is_sparse
    found = model.state_dict()["weight"]
    torch.testing.assert_close(found, plain.weight.detach(), atol=0.02, rtol=0.01)
    rounded = start.bfloat16().float() if level == "O3" else start
    assert torch.equal(found[[0, 2, 3, 5]], rounded[[0, 2, 3, 5]])  # rows that were not looked up


def sparse_without_a_block(model, optimizer):
    model(torch.tensor([1, 3, 3])).float().sum().backward()


def sparse_replaced(model, optimizer):
    backward(model(torch.tensor([1, 3, 3])).float().sum(), optimizer)
    model.weight.grad = model.weight.grad.coalesce() * 0.5


def sparse_waiting(model, optimizer):
    for row, waits in ((1, False), (3, True), (3, False)):
        backward(model(torch.tensor([row])).sum(), optimizer, delay_unscale=waits)


def sparse_overflowing(model, optimizer):
    backward(model(torch.tensor([1, 3])).float().sum() * float("inf"), optimizer)


IN_FLOAT16 = dict(cast_model_type=torch.float16, loss_scale=3.0)
SPARSE = [
    *((sparse_without_a_block, [0, 1, 0, 2], level, dict(loss_scale=16.0), 1.3e-6) for level in ("O2", "O5")),
    *((sparse_replaced, [0, 0.5, 0, 1], "O2", how, 0.01) for how in (IN_FLOAT16, dict(loss_scale=3.0))),
    (sparse_waiting, [0, 1, 0, 2], "O0", dict(loss_scale=4.0), 0.0),
    *((sparse_overflowing, [0, 0, 0, 0], level, {}, 0.0) for level in ("O1", "O2")),
]


@pytest.mark.parametrize("script, moved, level, settings, tolerance", SPARSE)
def test_rows_that_a_sparse_gradient_moves(script, moved, level, settings, tolerance):
    model = nn.Embedding(4, 2, sparse=True)
    model, optimizer = initialize_quietly(model, lambda p: sgd(p, lr=1.0), level, **settings)
    before = model.state_dict()["weight"].clone()
    script(model, optimizer)
    optimizer.step()
    found, expected = before - model.state_dict()["weight"], torch.tensor(moved).float()[:, None].expand(4, 2)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=1e-6 if any(moved) else 0.0)
    assert ampkit.step_was_skipped(optimizer) is not any(moved)


class Mixed(nn.Module):
    """A model with parameters that no level casts, and one parameter that is cast."""

    def __init__(self):
        super().__init__()
        self.turning = nn.Parameter(torch.tensor([1.0 + 2.0j, -0.5j]))
        self.wide = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
        self.narrow = nn.Parameter(torch.tensor([0.5, 0.25]))
        self.unused = nn.Parameter(torch.ones(2))
        self.empty = nn.Parameter(torch.zeros(0))

    def forward(self):
        return (self.turning.abs().square() + self.wide + self.narrow).sum() + self.empty.sum()


@pytest.mark.parametrize("level, scale", [*((level, 64.0) for level in LEVELS), ("O2", "dynamic"), ("O5", 1.0)])
def test_complex_double_unused_and_empty_parameters(level, scale):
    model, optimizer = initialize_quietly(Mixed(), lambda p: sgd(p, lr=0.25), level, loss_scale=scale)
    iterate(model, optimizer)
    state = model.state_dict()
    # d|z|^2/dz is 2z in torch's convention; a quarter of it is half of z.
    assert torch.equal(state["turning"], torch.tensor([0.5 + 1.0j, -0.25j]))
    assert torch.equal(state["wide"], torch.tensor([0.75, 1.75], dtype=torch.float64))
    assert torch.equal(state["narrow"], torch.tensor([0.25, 0.0]))
    assert torch.equal(state["unused"], torch.ones(2)) and state["empty"].shape == (0,)
    assert model.turning.dtype is torch.complex64 and model.wide.dtype is torch.float64
    assert next(p for p in ampkit.master_params(optimizer) if p.dtype is torch.float64) is model.wide


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_of_none_are_no_gradients(level):
    model, optimizer = initialize_quietly(net_with_norm(4, 6, 1), sgd, level)
    before = values_of(model)
    optimizer.step()  # nothing was computed
    backward(F.relu(torch.ones(2, requires_grad=True)).sum(), optimizer)
    optimizer.step()
    assert_same(model.state_dict(), before)
    assert all(p.grad is None for p in ampkit.master_params(optimizer))


STEPS_UNDER_CHANGED_ROWS = {
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1, weight_decay=0.1, foreach=False),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=False),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "FusedAdam": lambda params: FusedAdam(params, lr=0.1),
}


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("name", STEPS_UNDER_CHANGED_ROWS)
def test_a_step_is_float32_where_rows_of_arithmetic_are_lower(name, hooked):
    """A script's own rows are for its model: an optimizer calls ``add``, ``mul`` and ``lerp`` too."""
    results = []
    for casts in (True, False):
        model, seen = net_with_norm(), []
        optimizer = STEPS_UNDER_CHANGED_ROWS[name](model.parameters())
        if casts:
            rows = {f"torch.Tensor.{one}": "lower" for one in ("add", "mul", "lerp")}
            settings = dict(opt_level="O1", policy=rows, loss_scale=1.0, one_pass_step=False, verbosity=0)
            ampkit.initialize(model, optimizer, check_gradients=False, **settings)
            assert (torch.ones(2) + 0).dtype is torch.float32 and torch.ones(2).add(1.0).dtype is torch.bfloat16
        if hooked:
            optimizer.register_step_pre_hook(lambda *_, seen=seen: seen.append(torch.ones(2).add(1.0).dtype))
        take_steps(optimizer, list(model.parameters()), range(3))
        ampkit.close()
        assert seen == [torch.float32] * 3 * hooked
        results.append([param.detach() for param in model.parameters()])
    assert_same(*results)
