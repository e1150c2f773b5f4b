"""Optimizers whose groups a script changes, that have lists of parameters of their own, or other optimizers inside."""

import copy
import functools

import pytest
import torch
from helpers import (
    STORED_BF16,
    assert_same,
    backward,
    backward_of_one_weight,
    initialize_quietly,
    iterate,
    net_with_norm,
    one_weight,
    values_of,
)
from torch import nn

import ampkit
from ampkit.optimizers import FusedAdam, FusedSGD

pytestmark = pytest.mark.switch

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def loss_of(model):
    return model(X).float().square().mean()


OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW(fused)": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.1, momentum=0.9),
    "FusedAdam": lambda params: FusedAdam(params, lr=0.01),
}


WAYS = {
    "all of them": lambda model, group: group.update(params=list(model.parameters())),
    "by a generator": lambda model, group: group.update(params=(param for param in model.parameters())),
    "one by one": lambda model, group: [group["params"].__setitem__(i, p) for i, p in enumerate(model.parameters())],
}


def trained(way, moment, make_optimizer, level):
    model, optimizer = initialize_quietly(net_with_norm(4, 6, 2), make_optimizer, level)
    for _ in range(3):
        if moment == "before the block":
            way(model, optimizer.param_groups[0])
        backward(loss_of(model), optimizer)
        if moment == "before the step":
            way(model, optimizer.param_groups[0])
        optimizer.step()
        optimizer.zero_grad()
    weights = values_of(model)
    ampkit.close()
    assert all(param.dtype is torch.float32 for param in model.parameters())
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in model.parameters()}
    return weights


@pytest.mark.parametrize(
    "level, name",
    [("O1", "SGD"), ("O2", "FusedSGD"), (STORED_BF16, "AdamW(fused)"), ("O5", "FusedAdam"), ("O2", "SGD")],
)
@pytest.mark.parametrize("moment", ["before the block", "before the step"])
@pytest.mark.parametrize("way", WAYS)
def test_the_models_weights_put_into_a_group_again_train_on_their_masters(way, moment, name, level):
    """Bit for bit, momentum included."""
    expected = trained(lambda model, group: None, moment, OPTIMIZERS[name], level)
    found = trained(WAYS[way], moment, OPTIMIZERS[name], level)
    assert_same(found, expected)


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

    def forward(self):
        x = torch.full((1, 1), 0.25)
        return (self.first(x) + self.second(x)).float().sum()


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("make", [torch.optim.SGD, FusedSGD])
def test_weights_that_a_script_takes_out_are_the_optimizers_no_more(make, level):
    """Their gradients are unscaled, and left alone by its zero_grad(), norm, clipping and check."""
    model, other = Sum(), nn.Parameter(torch.zeros(1))
    first, second = make(model.parameters(), lr=0.0), make([other], lr=1.0)
    ampkit.initialize(model, [first, second], opt_level=level, loss_scale="dynamic", verbosity=0)
    weights = [model.first.weight, model.second.weight]
    first.param_groups[0]["params"], second.param_groups[0]["params"] = weights[:1], weights[1:]
    before = model.state_dict()["second.weight"].item()
    for passes in range(1, 5):  # the first steps at each, the second after four
        backward(model(), [first, second])
        assert ampkit.clip_grad_norm_(first, 1.0) == 0.25
        first.step()
        first.zero_grad()
        assert not weights[0].grad and weights[1].grad == passes / 4
    second.step()
    assert model.state_dict()["second.weight"].item() == pytest.approx(before - 1.0, abs=1e-6)
    weights[1].grad = torch.full_like(weights[1], float("inf"))
    backward(model(), first)
    first.step()
    assert not ampkit.step_was_skipped(first)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_zero_grad_clears_a_group_that_is_back(level):
    model = Sum()
    optimizer = torch.optim.SGD([{"params": part.parameters()} for part in (model.first, model.second)], lr=0.1)
    ampkit.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    group = optimizer.param_groups.pop()
    for passes in range(1, 3):
        optimizer.zero_grad()
        backward(model(), optimizer)
        assert (model.first.weight.grad, model.second.weight.grad) == (0.25, passes / 4)
    optimizer.param_groups.append(group)
    optimizer.zero_grad()
    assert model.second.weight.grad is None


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("make", [torch.optim.SGD, FusedSGD])
def test_as_many_other_weights_put_into_a_group_train_in_their_place(make, level):
    """Two layers that are trained in turns. A gradient of 1/4 that nobody unscales is 16,384."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for layer in model:
        nn.init.ones_(layer.weight)
    optimizer = make(model[0].parameters(), lr=2.0**-10)
    ampkit.initialize(model, optimizer, opt_level=level, loss_scale=2.0**16, policy="apex", verbosity=0)
    optimizer.param_groups[0]["params"] = [model[1].weight]
    backward(model(torch.ones(1, 1)).float().sum() / 4, optimizer)
    optimizer.step()
    assert [value.item() for value in model.state_dict().values()] == [1.0, 1 - 2.0**-12]


class WithItsOwnList(torch.optim.Optimizer):
    """SGD over a list of its own, kept beside its groups."""

    def __init__(self, params, lr=0.1, through_data=False):
        self.own, self.through_data = list(params), through_data
        super().__init__(list(self.own), {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        for param in self.own:
            if param.grad is not None:
                (param.data if self.through_data else param).add_(param.grad, alpha=-self.param_groups[0]["lr"])


@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.parametrize("has_closure", [False, True])
@pytest.mark.parametrize("level", ["O2", STORED_BF16])
def test_a_list_of_the_optimizers_own_is_an_error_at_the_first_step_that_changes_a_weight(
    level, has_closure, through_data
):
    """The masters of the list stay where they were, and would undo each step."""
    own = functools.partial(WithItsOwnList, lr=0.0, through_data=through_data)
    model, optimizer = initialize_quietly(net_with_norm(4, 6, 2), own, level)
    before = [param.detach().clone() for param in model.parameters()]

    def step():
        optimizer.zero_grad()
        if has_closure:
            optimizer.step(lambda: backward(loss_of(model), optimizer))
        else:
            backward(loss_of(model), optimizer)
            optimizer.step()

    step()  # a warm-up
    optimizer.param_groups[0]["lr"] = 0.1
    said = r"WithItsOwnList.*4 of the model's.*self\.param_groups.*'O1'"
    for _ in range(2):
        with pytest.raises(ampkit.ConfigurationError, match=said):
            step()
        assert_same(list(model.parameters()), before)


@pytest.mark.parametrize("level", ["O0", "O1", "O3", "O4", "O5"])
def test_a_list_of_the_optimizers_own_trains_where_there_are_no_masters(level):
    model, optimizer = one_weight(make_optimizer=WithItsOwnList, opt_level=level, policy="apex")
    backward_of_one_weight(model, optimizer, 0.25)
    optimizer.step()
    assert model.weight.item() == 0.75


@pytest.mark.parametrize("level", ("O1", "O2", STORED_BF16, "O5"))
@pytest.mark.parametrize("make", ("SGD", "FusedSGD"))
def test_state_lies_under_the_models_weights_in_float32(make, level):
    model, optimizer = initialize_quietly(net_with_norm(4, 6, 2), OPTIMIZERS[make], level)
    iterate(lambda: loss_of(model), optimizer)
    for param in model.parameters():
        assert optimizer.state[param]["momentum_buffer"].dtype is torch.float32
        optimizer.state[param]["momentum_buffer"] = torch.full(param.shape, 0.5)
    before = {name: value.double() for name, value in model.state_dict().items()}
    iterate(lambda: loss_of(model) * 0.0, optimizer)
    for name, value in model.state_dict().items():
        assert torch.allclose(value.double(), before[name] - 0.1 * 0.9 * 0.5, atol=1e-6), name
    assert optimizer.state_dict()["state"].keys() == set(range(len(before)))


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization as scripts have it (Foret et al. 2021): the inner optimizer shares its groups."""

    def __init__(self, params, base, rho=0.05, **settings):
        super().__init__(params, {"rho": rho, **settings})
        self.base_optimizer = base(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        norm = torch.stack([p.grad.norm() for p in self.param_groups[0]["params"]]).norm()
        for p in self.param_groups[0]["params"]:
            self.state[p]["old_p"] = p.data.clone()
            p.add_((p.grad * (self.param_groups[0]["rho"] / norm)).to(p.dtype))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for p in self.param_groups[0]["params"]:
            p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()


@pytest.mark.parametrize("level", ("O2", "O5"))
@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.AdamW], ids=["SGD", "AdamW"])
def test_an_optimizer_inside_of_another_trains_float32_values(base, level):
    """Steps of 1e-4 are lost in bfloat16: after fifty the way is that of float32 within a tenth."""

    def moved(level):
        torch.manual_seed(0)
        model, optimizer = initialize_quietly(
            net_with_norm(4, 6, 2), lambda p: SAM(p, base, lr=1e-4), level, loss_scale=1.0
        )
        before = values_of(model)
        for _ in range(50):
            backward(loss_of(model), optimizer)
            optimizer.first_step()
            backward(loss_of(model), optimizer)
            optimizer.second_step()
        way = torch.cat([(value - before[name]).flatten() for name, value in model.state_dict().items()])
        ampkit.close()
        return way

    expected, found = moved("O0"), moved(level)
    assert (found - expected).norm() <= 0.1 * expected.norm()


@pytest.mark.parametrize("level", ("O1", "O2", "O5"))
def test_an_overflow_skips_the_step_of_an_optimizer_inside_of_another(level):
    model, optimizer = initialize_quietly(
        net_with_norm(4, 6, 2), lambda p: SAM(p, torch.optim.SGD, lr=0.1), level, loss_scale=4.0
    )
    for factor, is_skipped in ((1.0, False), (float("inf"), True), (1.0, False)):
        before = values_of(model)
        backward(loss_of(model), optimizer)
        optimizer.first_step()
        backward(loss_of(model) * factor, optimizer)
        optimizer.second_step()
        assert ampkit.step_was_skipped(optimizer) is is_skipped
        for name, value in model.state_dict().items():
            assert value.isfinite().all() and torch.equal(value, before[name]) is is_skipped, name


def test_state_that_is_loaded_into_an_optimizer_inside_of_another_stays_float32():
    model, optimizer = initialize_quietly(net_with_norm(4, 6, 2), lambda p: SAM(p, torch.optim.AdamW, lr=0.1), "O2")
    base = optimizer.base_optimizer
    backward(loss_of(model), optimizer)
    optimizer.first_step()
    backward(loss_of(model), optimizer)
    optimizer.second_step()
    saved = copy.deepcopy(base.state_dict()["state"])
    base.load_state_dict(base.state_dict())
    assert_same(base.state_dict()["state"], saved)
    assert saved[0]["exp_avg"].dtype is torch.float32


def test_state_of_an_optimizer_that_loads_that_inside_of_it_first_stays_float32():
    class InnerFirst(SAM):
        def load_state_dict(self, saved):
            self.base_optimizer.load_state_dict(saved["inner"])
            super().load_state_dict(saved["outer"])

    model, optimizer = initialize_quietly(
        net_with_norm(4, 6, 2), lambda p: InnerFirst(p, torch.optim.SGD, lr=0.1), "O2"
    )
    values = {param: torch.rand(param.shape) for param in model.parameters()}
    optimizer.state.update({param: {"old_p": value} for param, value in values.items()})
    saved = {"inner": optimizer.base_optimizer.state_dict(), "outer": optimizer.state_dict()}
    optimizer.load_state_dict(saved)
    assert_same({param: optimizer.state[param]["old_p"] for param in values}, values)


class Scheduled:
    """An optimizer around another (Vaswani et al. 2017): it sets the rate, and hands on what it does not define."""

    def __init__(self, inner):
        self.inner, self.count = inner, 0

    def __getattr__(self, name):
        return getattr(self.__dict__["inner"], name)

    def step(self):
        self.count += 1
        self.inner.param_groups[0]["lr"] = 1.0 / self.count
        self.inner.step()


@pytest.mark.parametrize("level", ("O0", "O1", "O2", "O5"))
def test_an_optimizer_may_hand_on_the_methods_of_another(level):
    """Slopes 1 and 2 at rates 1 and 1/2 lead from 8 to 6. The overflow between them changes neither weight nor rate."""

    def make(params, lr):
        return Scheduled(torch.optim.SGD(params, lr=lr))

    model, optimizer = one_weight(8.0, make, opt_level=level, check_gradients=True)
    for slope in 1.0, float("inf"), 2.0:
        optimizer.zero_grad()
        backward_of_one_weight(model, optimizer, slope)
        optimizer.step()
    assert model.state_dict()["weight"].item() == 6.0
    ampkit.close()
    assert list(vars(optimizer)) == ["inner", "count"]


@pytest.mark.parametrize("to", ["float32", "int8"])
def test_moments_in_8_bits_load_through_an_optimizer_around_theirs(to):
    def make(state_dtype):
        return lambda params: Scheduled(FusedAdam(params, state_dtype=state_dtype))

    model, optimizer = initialize_quietly(net_with_norm(4, 6, 2), make("int8"), "O2")
    iterate(lambda: loss_of(model), optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    _, optimizer = initialize_quietly(net_with_norm(4, 6, 2), make(to), "O2")
    optimizer.load_state_dict(saved)
    plain = FusedAdam(net_with_norm(4, 6, 2).parameters(), state_dtype=to)
    plain.load_state_dict(saved)
    assert_same(optimizer.state_dict()["state"], plain.state_dict()["state"])


class Chained:
    """Several optimizers as one, each over some of the parameters, as scripts combine Muon with AdamW."""

    def __init__(self, *optimizers):
        self.optimizers = list(optimizers)

    @property
    def param_groups(self):
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self):
        return {param: state for optimizer in self.optimizers for param, state in optimizer.state.items()}

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none=True):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)


@pytest.mark.parametrize("level", ("O0", "O1", "O2", "O5"))
def test_state_of_optimizers_in_a_list_lies_under_the_models_weights(level):
    """The square of the slope 2 in Adam's second moment is 4 of 1000 parts."""

    def make(params, lr):
        return Chained(torch.optim.Adam(params, lr=lr, betas=(0.9, 0.999)))

    model, optimizer = one_weight(8.0, make, opt_level=level, check_gradients=True)
    backward_of_one_weight(model, optimizer, 2.0)
    optimizer.step()
    assert optimizer.state.keys() == {model.weight}
    (state,) = optimizer.optimizers[0].state_dict()["state"].values()
    assert state["exp_avg_sq"].dtype is torch.float32 and state["exp_avg_sq"].item() == pytest.approx(0.004)
    assert model.state_dict()["weight"].item() == pytest.approx(7.0)
