"""A penalty on the gradient of the output with respect to the input (WGAN-GP): a backward pass within the loss.

The inner gradient passes through lower precision too, so that it is scaled, by a constant of the script's, and divided by it in
float32. The loss with the penalty is scaled by `scale_loss` as any other. Prints how far each level's step is from float32's.
"""

import torch
from torch import nn

import ampkit

SCALE = 2.0**10  # of the inner gradient alone: float16 has nothing between 0 and 2**-24
device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1)).to(device)


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def loss_of(model):
    points = x.clone().requires_grad_()
    output = model(points).float()
    (scaled,) = torch.autograd.grad(output.sum() * SCALE, points, create_graph=True)
    gradient = scaled.float() / SCALE
    return output.mean() + 10 * (gradient.norm(dim=1) - 1).square().mean()


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
        "gradient_penalty: steps", ", ".join(f"{value:.2%} ({level})" for level, value in far.items()), "from float32"
    )
