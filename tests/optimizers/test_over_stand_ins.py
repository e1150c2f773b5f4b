"""Optimizers of torch that know nothing of lower precision, at O2: the steps are those over float32 parameters."""

import pytest
import torch
from helpers import assert_steps_as_over_float32
from torch import nn

OPTIMIZERS = {
    "Muon": lambda p: torch.optim.Muon(p, lr=0.02),
    "Muon, nesterov off": lambda p: torch.optim.Muon(p, lr=0.02, nesterov=False, adjust_lr_fn="match_rms_adamw"),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_over_float32_parameters(name):
    """Of matrices: Muon takes no others. What remains is the rest of a float16 weight, which rounds in the 26th bit."""
    model = nn.Sequential(nn.Linear(12, 16, bias=False), nn.Linear(16, 20, bias=False))
    assert_steps_as_over_float32(model, OPTIMIZERS[name], "O2", tolerance=1e-6)
