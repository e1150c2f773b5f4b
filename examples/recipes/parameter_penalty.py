"""A penalty on the gradient of the loss with respect to the parameters: a backward pass within the loss.

As in gradient_penalty.py, the inner gradient is scaled by a constant of the script's and divided by it in float32, parameter by
parameter. Prints how far each level's step is from float32's.
"""

import torch
from torch import nn
from torch.nn import functional as F

import ampkit

SCALE = 2.0**10  # of the inner gradient alone: float16 has nothing between 0 and 2**-24
device = "cuda" if torch.cuda.is_available() else "cpu"
x, y = torch.randn(2, 64, 16, generator=torch.Generator().manual_seed(1)).to(device)


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def loss_of(model):
    loss = F.mse_loss(model(x).float(), y)
    scaled = torch.autograd.grad(loss * SCALE, list(model.parameters()), create_graph=True)
    gradients = [gradient.float() / SCALE for gradient in scaled]
    return loss + 10 * sum(gradient.square().sum() for gradient in gradients)


def changes(model):
    before = build()[0].state_dict()
    return torch.cat([(before[name] - value).flatten() for name, value in model.state_dict().items()])


def step_at(level):
    """The change of the weights by one step."""
    model, optimizer = build()
    low = ampkit.DynamicLossScale(init_scale=2.0**10)  # one step leaves no time for 2**16 to come down in float16
    scale = low if level in ("O1", "O2") else None
    model, optimizer = ampkit.initialize(model, optimizer, opt_level=level, loss_scale=scale, verbosity=0)
    with ampkit.scale_loss(loss_of(model), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    changed = changes(model)
    ampkit.close()
    return changed


if __name__ == "__main__":
    expected = step_at("O0")
    far = {level: (step_at(level) - expected).norm() / expected.norm() for level in ("O1", "O2", "O4", "O5")}
    assert max(far.values()) < 0.02
    print(
        "parameter_penalty: steps", ", ".join(f"{value:.2%} ({level})" for level, value in far.items()), "from float32"
    )
