"""Two models, two optimizers and three losses: lists to `initialize`, a loss scaler for each loss.

The third loss belongs to both optimizers. Gradients of several blocks add up, whatever the scales of their losses.
"""

import torch
from torch import nn
from torch.nn import functional as F

import ampkit

device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1)).to(device)


def build():
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(device) for _ in range(2)]
    return models, [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]


def changes(models):
    return torch.cat(
        [
            (old.state_dict()[name] - value).flatten()
            for old, model in zip(build()[0], models)
            for name, value in model.state_dict().items()
        ]
    )


def losses_of(first, second):
    a, b = first(x).float(), second(x).float()
    return F.mse_loss(a, x[:, :4]), F.mse_loss(b, x[:, 4:]), F.mse_loss(a, b)


plain, optimizers = build()
sum(losses_of(*plain)).backward()
for optimizer in optimizers:
    optimizer.step()

models, optimizers = build()
models, optimizers = ampkit.initialize(models, optimizers, opt_level="O2", num_losses=3, verbosity=0)
owners = optimizers[0], optimizers[1], optimizers
for loss_id, loss in enumerate(losses_of(*models)):
    with ampkit.scale_loss(loss, owners[loss_id], loss_id=loss_id) as scaled_loss:
        scaled_loss.backward(retain_graph=True)
for optimizer in optimizers:
    optimizer.step()

changed, expected = changes(models), changes(plain)
distance = float((changed - expected).norm() / expected.norm())
assert distance < 0.02 and len(ampkit.state_dict()) == 3
ampkit.close()
print(f"several: 2 models, 2 optimizers, 3 losses: steps {distance:.2%} from float32")
