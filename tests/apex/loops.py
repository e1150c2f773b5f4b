"""Iterations as scripts of Apex's write them."""

import torch

from ampkit.apex import amp


def initialized(model, lr=0.1, **settings):
    """The model and an SGD for it, as ``amp.initialize`` returns them."""
    return amp.initialize(model, torch.optim.SGD(model.parameters(), lr=lr), verbosity=0, **settings)


def backward(loss, optimizers, **flags):
    with amp.scale_loss(loss, optimizers, **flags) as scaled:
        scaled.backward()


def scaler(index=0):
    return amp._amp_state.loss_scalers[index]


def iterate(loss, optimizer, **flags):
    optimizer.zero_grad()
    backward(loss, optimizer, **flags)
    optimizer.step()
