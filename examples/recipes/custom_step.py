"""A training step in Keras' verbs: the scaled loss, its gradients, the same unscaled, a change of one's own, and the step.

Keras: ``get_scaled_loss``, ``tape.gradient``, ``get_unscaled_gradients``, ``apply_gradients``. Here gradients that
``torch.autograd.grad`` returns are put into ``.grad`` within the block, and unscaled when it ends. The change is that of sign
descent. Prints by how much the gradients were scaled, and how many of the signs are those of float32.
"""

import torch
from torch import nn
from torch.nn import functional as F

import ampkit

device = "cuda" if torch.cuda.is_available() else "cpu"
x, y = torch.randn(2, 64, 16, generator=torch.Generator().manual_seed(1)).to(device)


def step_at(level):
    """(first scaled gradient, the same unscaled, the change of the weights)"""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)).to(device)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    low = ampkit.DynamicLossScale(init_scale=2.0**10) if level in ("O1", "O2") else None
    model, optimizer = ampkit.initialize(model, optimizer, opt_level=level, loss_scale=low, verbosity=0)
    weights = list(model.parameters())

    loss = F.mse_loss(model(x).float(), y)
    with ampkit.scale_loss(loss, optimizer) as scaled_loss:  # optimizer.get_scaled_loss(loss)
        gradients = torch.autograd.grad(scaled_loss, weights)  # tape.gradient(scaled_loss, weights)
        for weight, gradient in zip(weights, gradients):
            weight.grad = gradient
        scaled = gradients[0].float().clone()
    unscaled = weights[0].grad.float().clone()  # optimizer.get_unscaled_gradients(gradients)
    for weight in weights:
        weight.grad.copy_(weight.grad.sign() / 256)
    optimizer.step()  # optimizer.apply_gradients(zip(gradients, weights))
    assert not ampkit.step_was_skipped(optimizer)
    moved = torch.cat([(before[name] - value).flatten() for name, value in model.state_dict().items()])
    ampkit.close()
    return scaled, unscaled, moved


if __name__ == "__main__":
    expected = step_at("O0")[2]
    results = {}
    for level in ("O1", "O2"):
        scaled, unscaled, moved = step_at(level)
        torch.testing.assert_close(unscaled * 1024, scaled)
        results[level] = (moved.sign() == expected.sign()).float().mean().item()
    assert min(results.values()) > 0.98
    print(
        "custom_step: gradients times 1024;",
        ", ".join(f"{part:.1%} of {level}'s signs" for level, part in results.items()),
        "as in float32",
    )
