"""What training with FusedAdam takes for each parameter: weight, gradient, master or the rest of its bits, and two moments."""

import gc

import pytest
import torch
from helpers import backward, initialize_quietly
from torch import nn

import ampkit
from ampkit.optimizers import FusedAdam

SHAPE = 512, 256
IN_8_BITS = 2 * (1 + 4 / 256)  # with their share of a float32 scale to 256 of them


def bytes_held(model=None):
    """Of all tensors that live and have as many elements as the weight, or more; each memory once."""
    gc.collect()
    found = [x for x in gc.get_objects() if type(x).__module__ != "builtins" and isinstance(x, torch.Tensor)]
    found += [] if model is None else [p.grad for p in model.parameters()]
    large = [x.untyped_storage() for x in found if x.numel() >= SHAPE[0] * SHAPE[1]]
    return sum({storage.data_ptr(): storage.nbytes() for storage in large}.values())


@pytest.mark.parametrize(
    ("level", "settings", "state_dtype", "expected"),
    [
        ("O5", {}, "float32", 2 + 2 + 4 + 4 + 4),
        ("O5", {}, "bfloat16", 2 + 2 + 4 + 2 + 2),
        ("O5", {}, "int8", 2 + 2 + 4 + IN_8_BITS),
        ("O5", {"master_weights": "split"}, "float32", 2 + 2 + 2 + 4 + 4),
        ("O5", {"master_weights": "split24"}, "float32", 2 + 2 + 1 + 4 + 4),
        ("O5", {"master_weights": "split"}, "int8", 2 + 2 + 2 + IN_8_BITS),
        ("O5", {"master_weights": "split24"}, "int8", 2 + 2 + 1 + IN_8_BITS),
        # What float16 cannot hold unscaled stays beside the gradient, at its scale.
        ("O2", {"cast_model_type": torch.float16, "model_grads": "unscaled"}, "float32", 2 + 2 + 2 + 4 + 4 + 4),
        ("O2", {"cast_model_type": torch.float16, "model_grads": "scaled"}, "float32", 2 + 2 + 4 + 4 + 4),
    ],
)
def test_bytes_per_parameter(level, settings, state_dtype, expected):
    before = bytes_held()
    model = nn.Linear(*SHAPE, bias=False)
    model, optimizer = initialize_quietly(model, lambda p: FusedAdam(p, state_dtype=state_dtype), level, **settings)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model(torch.randn(4, SHAPE[0])).square().mean(), optimizer)
        ampkit.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
    assert bytes_held(model) - before == expected * SHAPE[0] * SHAPE[1]
