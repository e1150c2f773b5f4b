"""torch's own optimizers: of SGD, Adam and AdamW the same update in one pass over gradients, weights, which may have rests, and
moments; of others, steps over float32 parameters.
"""

import copy
import sys

import pytest
import torch
from helpers import STORED_BF16, assert_steps_as_over_float32, backward, initialize_quietly, iterate, net_with_norm
from torch import nn

import ampkit
from ampkit import kernels
from ampkit.iteration import ways
from ampkit.models.float32_values import value_of

OPTIONS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "SGD, momentum and decay": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    "SGD, nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "SGD, dampening": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.5),
    "SGD, maximize": lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9, weight_decay=0.1, maximize=True),
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.5, fused=True),
    "SGD, foreach": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
    "SGD, rate in a tensor": lambda p: torch.optim.SGD(p, lr=torch.tensor(0.05), momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "Adam, decay": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "Adam, decoupled": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True),
    "Adam, maximize": lambda p: torch.optim.Adam(p, lr=1e-4, weight_decay=0.1, maximize=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW, maximize": lambda p: torch.optim.AdamW(p, lr=1e-4, maximize=True),
    "AdamW, settings": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.8, 0.95), eps=1e-4, weight_decay=0.3),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW, rate in a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2)),
    "AdamW, two groups": lambda p: torch.optim.AdamW(
        [{"params": [next(p), next(p)], "lr": 1e-3}, {"params": list(p), "weight_decay": 0.0}], lr=1e-2
    ),
}


def initialized(make, dtype=torch.bfloat16, model=None, **settings):
    model = net_with_norm() if model is None else model
    optimizer = make(model.parameters())
    own = {"opt_level": "O5"} if dtype is torch.float32 else {"opt_level": "O2", "cast_model_type": dtype}
    return ampkit.initialize(model, optimizer, **{"loss_scale": 1.0, "verbosity": 0, **own, **settings})


@pytest.fixture
def only_one_pass(monkeypatch):
    def copies(*_):
        raise AssertionError("a step made float32 copies of the weights")

    monkeypatch.setattr(kernels, "multi_tensor_join", copies)


def set_gradients(params, seed):
    """Set the same gradients for each optimizer, all of them exact in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        values = torch.randint(-64, 64, p.shape, generator=generator) / 32.0
        p.grad = values.to(p.dtype)


def beside_float64(make, steps, edit=lambda step, optimizer, model: None, dtype=torch.bfloat16):
    """Step over random gradients, which ``edit`` may write to, and in float64 by torch; return both models and optimizers."""
    model, optimizer = initialized(make, dtype)
    assert model[0].weight.dtype is dtype
    twin = net_with_norm().double()
    reference = make(twin.parameters())
    for step in range(steps):
        for active, trained in ((optimizer, model), (reference, twin)):
            set_gradients(trained.parameters(), step)
            edit(step, active, trained)
            active.step()
    return model, optimizer, twin, reference


def values_of(model):
    pairs = [(p.detach(), value_of(p)) for p in model.parameters()]
    return [p.clone() if entry is None else kernels.join(p, entry.rest) for p, entry in pairs]


def assert_equal_layout(actual, expected):
    """Compare groups, names of states and counts, and moments: ampkit's in float32, torch's in float64."""
    assert [sorted(group) for group in actual["param_groups"]] == [sorted(group) for group in expected["param_groups"]]
    assert list(actual["state"]) == list(expected["state"])
    for index, state in actual["state"].items():
        assert list(state) == list(expected["state"][index])
        for name, value in state.items():
            wanted = expected["state"][index][name]
            if name == "step":
                assert float(value) == float(wanted) and value.shape == wanted.shape
            elif value is not None:
                assert value.dtype is torch.float32
                torch.testing.assert_close(value.double(), wanted, rtol=1e-5, atol=1e-6)


def assert_trained_alike(model, optimizer, twin, reference):
    assert_equal_layout(optimizer.state_dict(), reference.state_dict())
    for found, expected in zip(values_of(model), twin.parameters(), strict=True):
        torch.testing.assert_close(found.double(), expected.detach(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    "name, dtype",
    [*((name, torch.bfloat16) for name in OPTIONS)]
    + [(name, dtype) for name in ("SGD, dampening", "AdamW") for dtype in (torch.float16, torch.float32)],
)
def test_the_update_is_torchs_in_float64(name, dtype, only_one_pass):
    assert_trained_alike(*beside_float64(OPTIONS[name], 20, dtype=dtype))


def without_the_first(step, optimizer, model):
    for p in list(model.parameters())[: step % 3]:
        p.grad = None


def sets_a_count_back(step, optimizer, model):
    if step == 5:
        for moment in optimizer.state[model[0].weight].values():
            moment.zero_()


@pytest.mark.parametrize("edit", [without_the_first, sets_a_count_back])
def test_parameters_have_their_own_counts(edit):
    """Parameters that have stepped at different times, and a parameter whose count a script sets back."""
    assert_trained_alike(*beside_float64(lambda p: torch.optim.AdamW(p, lr=1e-2), 9, edit))


# Where one pass does not do


def test_an_option_that_is_switched_on_in_mid_run_is_torchs_own_step_and_said_once(caplog):
    def switch(step, optimizer, model):
        optimizer.param_groups[0]["amsgrad"] = step in (2, 3)
        if step == 2:
            for state in optimizer.state.values():
                state["max_exp_avg_sq"] = torch.zeros_like(state["exp_avg_sq"])

    with caplog.at_level("INFO", logger="ampkit"):
        model, _, twin, _ = beside_float64(lambda p: torch.optim.AdamW(p, lr=1e-2), 6, switch)
    assert caplog.text.count("amsgrad=True") == 1 and "AdamW.step() runs over float32 copies" in caplog.text
    for found, expected in zip(values_of(model), twin.parameters(), strict=True):
        torch.testing.assert_close(found.double(), expected.detach(), rtol=2e-6, atol=2e-6)


def test_a_step_that_a_script_has_replaced_runs_over_float32_and_is_said_once(caplog):
    def adamw(params):
        optimizer = torch.optim.AdamW(params, lr=1e-2)
        original, optimizer.updates = optimizer.step, 0

        def step(closure=None):
            optimizer.updates += 1
            return original(closure)

        optimizer.step = step
        return optimizer

    with caplog.at_level("INFO", logger="ampkit"):
        model, optimizer, *reference = beside_float64(adamw, 4)
    assert optimizer.updates == 4 and caplog.text.count("its step() is not torch's own") == 1
    assert_trained_alike(model, optimizer, *reference)


def test_a_sparse_gradient_is_torchs_own_step_and_said(caplog):
    model = nn.Embedding(10, 4, sparse=True)
    model, optimizer = initialize_quietly(model, lambda p: torch.optim.SGD(p, lr=0.5), STORED_BF16)
    before = values_of(model)
    with caplog.at_level("INFO", logger="ampkit"):
        iterate(lambda: model(torch.tensor([1, 3, 3])).sum(), optimizer)
    assert "a sparse gradient" in caplog.text
    rows = (values_of(model)[0] - before[0]).abs().sum(-1) > 0
    assert rows.nonzero().flatten().tolist() == [1, 3]


def test_off_the_step_torchs_functions_are_torchs():
    """A plain optimizer beside an initialized one, in and between steps of the latter."""
    model, optimizer = initialized(lambda p: torch.optim.AdamW(p, lr=1e-2))
    plain = nn.Linear(3, 2)
    twin = copy.deepcopy(plain)
    beside, reference = torch.optim.AdamW(plain.parameters(), lr=0.1), torch.optim.AdamW(twin.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: beside.step())
    for seed in range(3):
        set_gradients(model.parameters(), seed)
        set_gradients(plain.parameters(), seed)
        set_gradients(twin.parameters(), seed)
        optimizer.step()
        reference.step()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), twin.parameters()))
    ampkit.close()
    assert ways._running.step is None
    assert sys.modules["torch.optim.adam"].adam.__module__ == "torch.optim.adam"


# Optimizers of torch that know nothing of lower precision


STAND_INS = {
    "Muon": lambda p: torch.optim.Muon(p, lr=0.02),
    "Muon, nesterov off": lambda p: torch.optim.Muon(p, lr=0.02, nesterov=False, adjust_lr_fn="match_rms_adamw"),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


@pytest.mark.parametrize("name", [*STAND_INS, "AdamW", "AdamW, fused", "SGD, momentum and decay"])
def test_steps_are_those_over_float32_parameters_and_state_goes_to_torch_and_back(name):
    """Parameters are matrices: Muon takes no others. The error left is a float16 weight's rest, which rounds in the 26th bit."""
    model = nn.Sequential(nn.Linear(12, 16, bias=False), nn.Linear(16, 20, bias=False))
    assert_steps_as_over_float32(model, {**STAND_INS, **OPTIONS}[name], "O2", tolerance=1e-6)


@pytest.mark.parametrize("name", ["Adafactor", "NAdam", "Rprop"])
def test_state_is_in_the_order_of_parameters_as_in_torch(name):
    """Scripts zip it with the parameters. Norms have none of the float32 values beside weights."""
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4), nn.LayerNorm(4))
    model, optimizer = initialize_quietly(model, STAND_INS[name], "O2")
    for _ in range(2):
        backward(model(torch.ones(2, 4)).square().sum(), optimizer)
        optimizer.step()
        assert [id(param) for param in optimizer.state] == [id(param) for param in model.parameters()]


class CallsItsClass(torch.optim.SGD):
    """An optimizer whose step has torch's hooks around it, as has its class's step, which it calls."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_step_that_calls_its_classs_step_is_one_step_to_hooks(level):
    """Two steps of 2^-12 from 1, on paper; bfloat16 holds every 16th of them."""
    model = nn.Linear(2, 2, bias=False)
    nn.init.ones_(model.weight)
    torch.optim.SGD([torch.ones(1)], lr=1.0)  # torch puts hooks around a class's step when it makes the first
    optimizer = CallsItsClass(model.parameters(), lr=2.0**-12)
    optimizer.register_step_post_hook(lambda *_: None)
    ampkit.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=1.0)
    iterate(lambda: model(torch.ones(1, 2)).float().sum(), optimizer, 2)
    assert torch.equal(model.state_dict()["weight"], torch.full((2, 2), 1 - 2.0**-11))
