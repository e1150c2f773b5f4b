"""A penalty on the norm of the gradient of the output with respect to the input (WGAN-GP), which needs a backward pass twice.

O1 casts the calls of the inner backward pass as of any other. The inner gradient is computed from the unscaled output, so that
nothing has to be divided; the loss with the penalty in it is scaled as ever.
"""

import torch
from torch import nn

import ampkit

device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1)).to(device)


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def changes(model):
    before = build()[0].state_dict()
    return torch.cat([(before[name] - value).flatten() for name, value in model.state_dict().items()])


def loss_of(model):
    points = x.clone().requires_grad_()
    output = model(points)
    (gradient,) = torch.autograd.grad(output.float().sum(), points, create_graph=True)
    penalty = (gradient.float().norm(dim=1) - 1).square().mean()
    return output.float().mean() + 10 * penalty


plain, optimizer = build()
plain_loss = loss_of(plain)
plain_loss.backward()
optimizer.step()

model, optimizer = build()
low = ampkit.DynamicLossScale(init_scale=2.0**10)  # one step leaves no time for 2**16 to come down in float16
model, optimizer = ampkit.initialize(model, optimizer, opt_level="O1", loss_scale=low, verbosity=0)
loss = loss_of(model)
with ampkit.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
optimizer.step()

found, expected = changes(model), changes(plain)
distance = float((found - expected).norm() / expected.norm())
assert abs(loss / plain_loss - 1) < 0.02 and distance < 0.02
ampkit.close()
print(f"gradient_penalty: loss {loss:.4f} (float32 {plain_loss:.4f}), step {distance:.2%} from float32")
