"""Ordinary lines of a training script around an optimizer alone: float32 torch.optim on the same gradients says what is right."""

import copy
import functools
import itertools
import logging
import math
import pickle
import random

import pytest
import torch
from helpers import saved_and_loaded
from torch import nn
from torch.optim import lr_scheduler

import ampkit
from ampkit import kernels
from ampkit.optimizers import SGD, Adam, AdamW, FusedAdam, FusedSGD

pytestmark = pytest.mark.switch

BF16, F16 = torch.bfloat16, torch.float16
SHAPES = [(), (1,), (0,), (3,), (7, 5), (300,), (2, 3, 4, 5)]
MIXES = [(BF16,), (BF16,), (F16,), (BF16, torch.float32), (BF16, F16, torch.float32, torch.float64)]
TORCHS = {
    AdamW: torch.optim.AdamW,
    Adam: torch.optim.Adam,
    SGD: torch.optim.SGD,
    FusedAdam: torch.optim.AdamW,
    FusedSGD: torch.optim.SGD,
}


def value(param, optimizer):
    rest = optimizer.state.get(param, {}).get("rest") if param.dtype in (BF16, F16) else None
    return (param.detach() if rest is None else kernels.join(param.detach(), rest)).double()


class Pair:
    """A script run with ampkit's optimizer, and with torch's over float32 copies."""

    def __init__(self, rng, kind):
        self.rng, self.kind = rng, kind
        dtypes = rng.choice(MIXES)
        self.params = [nn.Parameter(torch.randn(rng.choice(SHAPES)).to(rng.choice(dtypes))) for _ in range(5)]
        if rng.random() < 0.3:
            self.params = [nn.Parameter(p.data.mT if p.ndim == 2 else p.data) for p in self.params]
        wide = [torch.promote_types(p.dtype, torch.float32) for p in self.params]
        self.twins = [nn.Parameter(p.detach().to(dtype, copy=True)) for p, dtype in zip(self.params, wide)]
        self.settings = self._settings()
        self.late = rng.random() < 0.3
        self.ours = self._make(kind, self.params[:4] if self.late else self.params)
        self.theirs = self._make(TORCHS[kind], self.twins[:4] if self.late else self.twins)
        self.schedulers = []

    def _settings(self):
        pick = self.rng.choice
        if issubclass(self.kind, SGD):
            momentum, dampening = pick([(0, 0), (0.9, 0), (0.5, 0.3)])
            more = {"momentum": momentum, "dampening": dampening, "nesterov": momentum == 0.9 and pick([True, False])}
        else:
            more = {"betas": pick([(0.9, 0.999), (0.8, 0.95), (0.0, 0.9)]), "eps": pick([1e-8, 1e-4])}
        lr = pick([1e-2, torch.tensor(1e-2)])
        return dict(lr=lr, weight_decay=pick([0, 0.1]), maximize=pick([False, False, True]), **more)

    def _make(self, kind, params):
        split = [{"params": params[:2]}, {"params": params[2:], "lr": 0.02, "weight_decay": 0.3}]
        foreach = {"foreach": False} if kind.__module__.startswith("torch") else {}
        return kind(split, **copy.deepcopy(self.settings), **foreach)

    @property
    def both(self):
        return self.ours, self.theirs

    def schedule(self):
        cycles = self.settings.get("momentum") != 0
        one_cycle = functools.partial(lr_scheduler.OneCycleLR, max_lr=0.05, total_steps=60, cycle_momentum=cycles)
        make = self.rng.choice([one_cycle, functools.partial(lr_scheduler.ExponentialLR, gamma=0.9)])
        self.schedulers = list(map(make, self.both))

    def add_group(self):
        if self.late:
            for one, params in zip(self.both, (self.params, self.twins)):
                one.add_param_group({"params": params[4:], "lr": 0.01})
            self.late, self.schedulers = False, []

    def reload(self):
        made = []
        for kind, optimizer in zip((self.kind, TORCHS[self.kind]), self.both):
            groups = [{"params": list(group["params"])} for group in optimizer.param_groups]
            made.append(kind(groups, lr=0.5, weight_decay=0.0))
            made[-1].load_state_dict(saved_and_loaded(optimizer.state_dict()))
        (self.ours, self.theirs), self.schedulers = made, []

    def copy(self):
        copied = self.rng.choice([copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
        (self.params, self.ours), self.schedulers = copied((self.params, self.ours)), []

    def set_rates(self):
        for one in self.both:
            for group in one.param_groups:
                group["lr"] = group["lr"] * 0.5
                group["weight_decay"] = 0.05

    def clone(self):
        """Exchange state and data for equal tensors, as scripts do that move an optimizer."""
        for one, params in zip(self.both, (self.params, self.twins)):
            params[0].data = params[0].data.clone()
            for state in one.state.values():
                state.update({key: v.clone() for key, v in state.items() if isinstance(v, torch.Tensor)})

    def step(self):
        has_closure = self.rng.random() < 0.2
        without = self.rng.choice([[], [], [1], [0, 3]])
        for i, (param, twin) in enumerate(zip(self.params, self.twins)):
            gradient = (torch.randn(param.shape) * self.rng.choice([1e-3, 1, 10])).to(param.dtype)
            param.grad, twin.grad = (None, None) if i in without else (gradient, gradient.to(twin.dtype))
        for one in self.both:
            one.step(lambda: torch.ones(())) if has_closure else one.step()
        for scheduler in self.schedulers:
            scheduler.step()

    def check(self, steps):
        for param, twin in zip(self.params, self.twins):
            bound = 2.0**-17 * steps * (1 + twin.detach().abs().max().item() if twin.numel() else 0)
            assert ((value(param, self.ours) - twin.detach().double()).abs() <= bound).all(), (param.dtype, param.shape)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", TORCHS, ids=lambda kind: kind.__name__)
def test_scripts_of_drawn_lines(kind, seed, ops):
    """The bound lies 250 times below half of a bfloat16 weight's last place, which a lost rest costs."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    pair = Pair(rng, kind)
    lines = [pair.schedule, pair.add_group, pair.reload, pair.copy, pair.set_rates, pair.clone, lambda: None]
    for steps in range(1, 13):
        rng.choice(lines)()
        pair.step()
        pair.check(steps)


@pytest.mark.parametrize("kinds", [(SGD, SGD), (SGD, AdamW), (AdamW, Adam), (FusedAdam, FusedSGD)], ids=str)
def test_two_optimizers_over_one_parameter_keep_one_rest(kinds):
    param, twin = nn.Parameter(torch.ones(4, dtype=BF16)), nn.Parameter(torch.ones(4))
    alone = [kind([param], lr=1e-4) for kind in kinds]
    references = [
        TORCHS[kind]([twin], lr=1e-4, weight_decay=alone[i].defaults["weight_decay"]) for i, kind in enumerate(kinds)
    ]
    for step in range(60):
        param.grad, twin.grad = torch.ones(4, dtype=BF16), torch.ones(4)
        for optimizer in (*alone, *references):
            optimizer.step()
        if step == 30:
            for optimizer in alone:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for optimizer in alone:
        assert ((value(param, optimizer) - twin.detach()).abs() < 2e-5).all()


# torch's scaler unscales no float16 gradients.
UNDER_SCALER = [*itertools.product((BF16, torch.float32), (False, True)), (F16, True)]


@pytest.mark.parametrize("dtype, fused", UNDER_SCALER, ids=str)
@pytest.mark.parametrize("clip", [{}, {"clip_value": 0.5}, {"max_norm": 0.5}], ids=str)
def test_clipping_under_a_grad_scaler_is_of_unscaled_gradients(clip, dtype, fused):
    param, twin = nn.Parameter(torch.ones(3, dtype=dtype)), nn.Parameter(torch.ones(3))
    optimizer, reference = SGD([param], lr=0.1, fused=fused, **clip), torch.optim.SGD([twin], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    slopes = torch.tensor([3.0, 0.25, -0.125])
    for overflows in (False, False, False, True):
        before = value(param, optimizer).clone()
        optimizer.zero_grad()
        scaler.scale((param * slopes.to(dtype)).sum()).backward()
        if overflows:
            param.grad[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        twin.grad = torch.zeros(3) if overflows else slopes.clone()
        if "max_norm" in clip:
            nn.utils.clip_grad_norm_([twin], 0.5)
        elif clip:
            nn.utils.clip_grad_value_([twin], 0.5)
        reference.step()
        assert ((value(param, optimizer) - twin.detach()).abs() < 1e-6).all()
        assert torch.equal(value(param, optimizer), before) is overflows
    assert scaler.get_scale() == 512.0


@pytest.mark.parametrize("saved", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_how_weights_decay_comes_with_the_group_as_in_torch(kind, saved):
    params = []
    for make in (kind, TORCHS[kind]):
        param = nn.Parameter(torch.ones(2))
        param.grad = torch.ones(2)
        before = saved([param], lr=0.1, weight_decay=0.5)
        before.step()
        optimizer = make([param])
        optimizer.load_state_dict(before.state_dict())
        optimizer.step()
        other = nn.Parameter(torch.ones(2))
        other.grad = torch.ones(2)
        optimizer.add_param_group({"params": [other], "decoupled_weight_decay": True, "weight_decay": 0.5})
        optimizer.step()
        params += [param.detach(), other.detach()]
    torch.testing.assert_close(params[:2], params[2:])


class OwnAdam(Adam):
    """A subclass, as scripts write them."""


@pytest.mark.parametrize("make", [Adam, OwnAdam])
def test_decoupled_decay_goes_with_a_checkpoint(make):
    """Each step of a gradient of 0 leaves 1 - 0.1 * 0.5 of the weight."""
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.zeros(2)
    optimizer = make([param], lr=0.1, weight_decay=0.5, decoupled_weight_decay=True)
    optimizer.step()
    for into in (make, torch.optim.Adam, make):
        state, optimizer = optimizer.state_dict(), into([param])
        optimizer.load_state_dict(state)
        optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full((2,), 0.95**4))


@pytest.mark.parametrize("sessions", [0, 1, 2])
def test_optimizers_of_a_parameter_share_its_rest_after_sessions_too(sessions):
    param = nn.Linear(4, 4, bias=False).to(BF16)
    optimizers = [SGD(param.parameters(), lr=1e-3) for _ in range(2)]
    for _ in range(sessions):
        ampkit.initialize(param, optimizers, opt_level="O1", loss_scale=1.0, verbosity=0)
        ampkit.close()
    for optimizer in optimizers * 2:
        param.weight.grad = torch.ones_like(param.weight)
        optimizer.step()
    first, second = (optimizer.state[param.weight]["rest"] for optimizer in optimizers)
    assert first is second


@pytest.mark.parametrize(
    "dtype, narrow", [(torch.float32, 2.0**-12), (F16, 2.0**-9), (torch.float64, 2.0**-40)], ids=str
)
@pytest.mark.parametrize("in_backward", [False, True])
def test_gradients_follow_a_model_that_changes_its_dtype_after_sums(dtype, narrow, in_backward):
    model = nn.Linear(3, 2, bias=False).to(BF16)
    optimizer = SGD(model.parameters(), lr=1.0, step_in_backward=in_backward)
    with optimizer.accumulating():
        model(torch.ones(1, 3, dtype=BF16)).sum().backward()
    model(torch.ones(1, 3, dtype=BF16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.to(dtype)
    seen = []
    model.weight.register_hook(lambda gradient: seen.append(gradient))
    before = value(model.weight, optimizer).clone()
    (model(torch.ones(1, 3, dtype=dtype)) * (1 + narrow)).sum().backward()
    optimizer.step()
    assert seen[0].dtype is dtype and (seen[0] == 1 + narrow).all()
    assert ((before - value(model.weight, optimizer)) - (1 + narrow)).abs().max() < 2.0**-21


def test_a_gradient_dtype_of_the_script_stays():
    param = nn.Parameter(torch.ones(2, dtype=BF16))
    param.grad_dtype = torch.float32
    optimizer = SGD([param], lr=1.0)
    with optimizer.accumulating():
        (param.float() * 1.001).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert param.grad_dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rests_of_a_model_that_is_made_wider_are_left_out_and_told(dtype, caplog):
    model = nn.Linear(3, 2).to(BF16)
    optimizer = AdamW(model.parameters(), lr=1e-4)
    model(torch.ones(1, 3, dtype=BF16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.to(dtype)
    model(torch.ones(1, 3, dtype=dtype)).sum().backward()
    with caplog.at_level(logging.WARNING, "ampkit"):
        optimizer.step()
        optimizer.step()
    assert len(caplog.records) == 1 and "rests of 2 parameters are left out" in caplog.text
    assert not any("rest" in state for state in optimizer.state.values())


def test_state_that_a_script_casts_is_refused():
    param = nn.Parameter(torch.ones(3, dtype=BF16))
    optimizer = AdamW([param])
    param.grad = torch.ones(3, dtype=BF16)
    optimizer.step()
    for state in optimizer.state.values():
        state.update({name: tensor.float() for name, tensor in state.items()})
    with pytest.raises(RuntimeError, match=r"state\['rest'\] .* was made torch.float32"):
        optimizer.step()


def test_what_a_script_takes_out_keeps_its_gradient():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).to(BF16)
    optimizer = SGD(model.parameters(), lr=0.1, step_in_backward=True)
    optimizer.param_groups[0]["params"] = list(model[1].parameters())
    model(torch.ones(1, 2, dtype=BF16)).sum().backward()
    assert all(param.grad is not None for param in model[0].parameters())
    assert all(param.grad is None for param in model[1].parameters())


def test_a_second_optimizer_in_the_backward_pass_is_refused():
    param = nn.Parameter(torch.ones(3, dtype=BF16))
    first = SGD([param], lr=0.1, step_in_backward=True)
    second = AdamW([param], step_in_backward=True)
    with pytest.raises(RuntimeError, match="another optimizer has stepped"):
        (param * 2).sum().backward()
    assert first is not second


def test_lazy_parameters_wait_for_their_shape():
    for in_backward in (False, True):
        model = nn.Sequential(nn.LazyLinear(4, bias=False), nn.Linear(4, 1)).to(BF16)
        optimizer = SGD(model.parameters(), lr=1.0, step_in_backward=in_backward)
        for _ in range(2):
            gradient = torch.autograd.grad(model(torch.ones(1, 3, dtype=BF16)).sum(), model[0].weight)[0]
            before = value(model[0].weight, optimizer)
            model(torch.ones(1, 3, dtype=BF16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.testing.assert_close(value(model[0].weight, optimizer), before - gradient.double())
