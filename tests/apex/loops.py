"""Iterations as scripts of Apex's write them."""

from ampkit.apex import amp


def backward(loss, optimizers, **flags):
    with amp.scale_loss(loss, optimizers, **flags) as scaled:
        scaled.backward()


def scaler(index=0):
    return amp._amp_state.loss_scalers[index]


def iterate(loss, optimizer, **flags):
    optimizer.zero_grad()
    backward(loss, optimizer, **flags)
    optimizer.step()
