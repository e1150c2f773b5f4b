"""torch's clip_grad_norm_ in a block, as scripts of Apex's have it: reported, and never refused."""

import pytest
import torch
from helpers import random_batch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from ampkit.apex import amp


def test_a_script_of_apexs_is_told_once_and_goes_on(capsys):
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=1)
    x, y = random_batch(1)
    capsys.readouterr()
    for _ in range(2):
        optimizer.zero_grad()
        with amp.scale_loss(F.mse_loss(model(x).float(), y), optimizer) as scaled:
            scaled.backward()
            clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
    out = capsys.readouterr()
    assert (out.out + out.err).count("inside the scale_loss block") == 1


@pytest.mark.parametrize(("level", "scale", "told"), [("O1", 128.0, 1), ("O2", 1.0, 0)])
@pytest.mark.parametrize("of", ["parameter", "input", "result"])
def test_a_gradient_without_an_optimizer_stays_scaled_and_is_told_of_once(of, level, scale, told, caplog):
    """Apex left such a gradient alone, and scripts divide it by hand: by 1 there is nothing to tell."""
    model, x = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(1, 2)
    trained = model[1] if of == "parameter" else model
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(trained.parameters(), lr=0.1), opt_level=level, loss_scale=scale, verbosity=0
    )
    leaf = model[0].bias if of == "parameter" else x.requires_grad_()
    if of == "result":
        x = leaf = 1 * x
        x.retain_grad()
    for _ in range(3):
        with amp.scale_loss(model(x).sum(), optimizer) as scaled:
            scaled.backward(retain_graph=True)
    found = leaf.grad / scale / 3
    exact = torch.autograd.grad(model[1](model[0](x)).sum(), [leaf])[0]
    torch.testing.assert_close(found, exact, rtol=2e-2, atol=1e-3, check_dtype=False)
    name = "Parameter '0.weight'" if of == "parameter" else "A tensor of shape (1, 2)"
    assert caplog.text.count(f"{name} has a gradient, but no optimizer given to initialize() updates it") == told
