"""Optimizers of torch that know nothing of lower precision, at O2: the steps are those over float32 parameters."""

import pytest
import torch
from helpers import assert_steps_as_over_float32, backward, initialize_quietly, iterate
from torch import nn

import ampkit

OPTIMIZERS = {
    "Muon": lambda p: torch.optim.Muon(p, lr=0.02),
    "Muon, nesterov off": lambda p: torch.optim.Muon(p, lr=0.02, nesterov=False, adjust_lr_fn="match_rms_adamw"),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_over_float32_parameters(name):
    """Parameters are matrices: Muon takes no others. The error left is a float16 weight's rest, which rounds in the 26th bit."""
    model = nn.Sequential(nn.Linear(12, 16, bias=False), nn.Linear(16, 20, bias=False))
    assert_steps_as_over_float32(model, OPTIMIZERS[name], "O2", tolerance=1e-6)


@pytest.mark.parametrize("name", ["Adafactor", "NAdam", "Rprop"])
def test_state_is_in_the_order_of_parameters_as_in_torch(name):
    """Scripts zip it with the parameters. Norms have none of the float32 values beside weights."""
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4), nn.LayerNorm(4))
    model, optimizer = initialize_quietly(model, OPTIMIZERS[name], "O2")
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
