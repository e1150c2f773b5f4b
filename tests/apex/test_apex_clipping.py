"""torch's clip_grad_norm_ in a block, as scripts of Apex's have it: told, and never refused."""

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
