"""Inference only: no optimizer. O3 holds the weights in lower precision and nothing beside them, at half of float32's bytes."""

import torch
from torch import nn

import ampkit

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 10)).to(device).eval()
x = torch.randn(128, 64, device=device)


def weight_bytes():
    return sum(param.nbytes for param in model.parameters())


with torch.inference_mode():
    expected, float32_bytes = model(x), weight_bytes()

model = ampkit.initialize(model, opt_level="O3", cast_model_outputs=torch.float32, verbosity=0)
with torch.inference_mode():
    outputs = model(x)

distance = float((outputs - expected).norm() / expected.norm())
share = weight_bytes() / float32_bytes
agreement = float((outputs.argmax(1) == expected.argmax(1)).float().mean())
assert outputs.dtype is torch.float32 and share == 0.5 and distance < 0.02 and agreement > 0.95
ampkit.close()
print(
    f"inference: weights at {share:.0%} of float32's bytes, outputs {distance:.2%} away, {agreement:.0%} the same class"
)
