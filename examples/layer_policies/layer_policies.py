"""A precision for each layer: a float32 head, a layer of one's own, and the loss scale by hand, on a small classifier.

$ python layer_policies.py

README.md sets the words beside Keras' and torch.amp's.
"""

import torch
from torch import nn
from torch.nn import functional as F

import ampkit

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
POINTS, CLASSES = 512, 4


class Gate(nn.Module):
    """A layer of one's own: a gate computed in float32, whatever its inputs are, since exponentials overflow early."""

    def __init__(self, width: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.share(x)

    @ampkit.float_function
    def share(self, x: torch.Tensor) -> torch.Tensor:
        return (self.scale.float() * x).softmax(dim=-1)


class Classifier(nn.Module):
    """A classifier whose softmax is a layer of the model, named ``head``, so that a policy can name it."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.gate = Gate(width)
        self.head = nn.Sequential(nn.Linear(width, CLASSES), nn.LogSoftmax(dim=-1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gate(self.body(x)))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return points of the plane, and the quadrant of each."""
    points = torch.randn(POINTS, 2, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    return points, (points[:, 0] > 0).long() + 2 * (points[:, 1] > 0).long()


def dtypes_of(model: nn.Module, points: torch.Tensor) -> dict[str, tuple[torch.dtype, torch.dtype]]:
    """The dtypes of each layer's variables and of what it computes: Keras' ``variable_dtype`` and ``compute_dtype``."""
    seen: dict[str, tuple[torch.dtype, torch.dtype]] = {}
    handles = [
        layer.register_forward_hook(
            lambda layer, _, output, name=name: seen.update({name: (next(layer.parameters()).dtype, output.dtype)})
        )
        for name, layer in model.named_children()
    ]
    with torch.no_grad():
        model(points)
    for handle in handles:
        handle.remove()
    return seen


def train(
    level: str, steps: int
) -> tuple[dict[str, tuple[torch.dtype, torch.dtype]], float, torch.Tensor, torch.Tensor]:
    """(dtypes by layer, share of points that are right, gradient of the scaled loss, the same unscaled)"""
    torch.manual_seed(0)
    points, quadrant = data()
    model = Classifier().to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer = ampkit.initialize(model, optimizer, opt_level=level, keep_fp32="head", verbosity=0)
    dtypes = dtypes_of(model, points)

    # The verbs, one by one: gradients are scaled after backward(), and unscaled after the block.
    weight = model.head[0].weight
    with ampkit.scale_loss(F.nll_loss(model(points), quadrant), optimizer) as scaled_loss:
        scaled_loss.backward()
        scaled = weight.grad.clone()
    unscaled = weight.grad.clone()

    for _ in range(steps):
        optimizer.zero_grad()
        with ampkit.scale_loss(F.nll_loss(model(points), quadrant), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        right = (model(points).argmax(1) == quadrant).float().mean().item()
    ampkit.close()
    return dtypes, right, scaled, unscaled


def main(steps: int = 100) -> None:
    for level in ("O0", "O1", "O2"):
        dtypes, right, scaled, unscaled = train(level, steps)
        layers = ", ".join(f"{name} {short(weights)} -> {short(output)}" for name, (weights, output) in dtypes.items())
        factor = (scaled.norm() / unscaled.norm()).item()
        print(f"{level}: {layers}; gradients were scaled by {factor:.0f}; {right:.0%} right")


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    main()
