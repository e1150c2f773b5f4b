"""Functions of one's own at O1: which precision their tensors are cast to, for yours by a decorator, for others' by name."""

import math
import types

import torch

import ampkit

device = "cuda" if torch.cuda.is_available() else "cpu"
somebody_elses = types.SimpleNamespace(__name__="somebody_elses", attention=lambda q, k: (q @ k.T).softmax(dim=-1))
ampkit.register_half_function(somebody_elses, "attention")  # as a fast kernel would want it


@ampkit.float_function
def entropy(p):  # logarithms of small numbers: float32
    return -(p * (p + 1e-20).log()).sum(dim=-1).mean()


@ampkit.promote_function
def blend(a, b):  # the wider dtype of the two
    return a + 0.5 * (b - a)


q, k = (torch.randn(32, 16, device=device, generator=torch.Generator(device).manual_seed(seed)) for seed in (1, 2))
p = (q @ k.T / math.sqrt(16)).softmax(dim=-1)
expected = entropy(p), blend(p, p), somebody_elses.attention(q, k)

with ampkit.session(torch.nn.Linear(16, 16, device=device), opt_level="O1", verbosity=0):  # O1 casts calls everywhere
    product = q @ k.T / math.sqrt(16)
    weights = product.softmax(dim=-1)
    outputs = entropy(weights), blend(product.softmax(dim=-1), product), somebody_elses.attention(q, k)
    lower = product.dtype

assert lower in (torch.float16, torch.bfloat16)
assert outputs[0].dtype is torch.float32 and outputs[1].dtype is torch.float32
distances = [float((outputs[i] - expected[i]).norm() / expected[i].norm()) for i in (0, 2)]
assert distances[0] < 0.02 and distances[1] < 0.05
print(
    f"own_functions: entropy {distances[0]:.2%} and attention {distances[1]:.2%} from float32; lower precision is {lower}"
)
