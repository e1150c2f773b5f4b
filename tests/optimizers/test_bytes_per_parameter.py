"""Bytes that training with Adam takes for each parameter: weight, perhaps a rest, gradient and two moments, in live tensors."""

import gc

import pytest
import torch
from helpers import STORED_BF16, backward, initialize_quietly
from torch import nn

import ampkit
from ampkit.casting.narrow_gradients import stored_gradient
from ampkit.optimizers import FusedAdam

SHAPE = 512, 256
IN_8_BITS = 2 * (1 + 4 / 256)  # with their share of a float32 scale to 256 of them
MAKERS = {
    "torch's": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "over stand-ins": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "float32": lambda p: FusedAdam(p, lr=1e-3),
    "bfloat16": lambda p: FusedAdam(p, lr=1e-3, state_dtype="bfloat16"),
    "int8": lambda p: FusedAdam(p, lr=1e-3, state_dtype="int8"),
}


def bytes_held(model=None):
    """Bytes of all live tensors with at least as many elements as the weight; each storage counts once."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x).__module__ != "builtins" and isinstance(x, torch.Tensor)]
    tensors += [] if model is None else [stored_gradient(p) for p in model.parameters()]
    large = [x.untyped_storage() for x in tensors if x.numel() >= SHAPE[0] * SHAPE[1]]
    return sum({storage.data_ptr(): storage.nbytes() for storage in large}.values())


AT_A_SCALE = "O2 in bfloat16 at 2^16"
ONE, TWO, DELAYED = (False,), (False, False), (True, True, False)  # blocks of an iteration, and which of them wait


def train(model, optimizer, blocks=ONE, steps=2):
    for _ in range(steps):
        optimizer.zero_grad()
        for waits in blocks:
            backward(model(torch.randn(4, SHAPE[0])).float().square().mean(), optimizer, delay_unscale=waits)
        ampkit.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()


BYTES = {
    # Weight, gradient, moments. A step that reads p.grad, and a sum of backward passes, have it in float32.
    ("O5", ONE): {
        **{"float32": 4 + 2 + 8, "torch's": 4 + 2 + 8, "bfloat16": 4 + 2 + 4, "int8": 4 + 2 + IN_8_BITS},
        "over stand-ins": 4 + 4 + 8,
    },
    ("O5", TWO): {"float32": 4 + 4 + 8, "torch's": 4 + 4 + 8},
    ("O5", DELAYED): {"torch's": 4 + 4 + 8},
    # Weight, rest, gradient, moments.
    (STORED_BF16, ONE): {
        **dict.fromkeys(("float32", "torch's", "over stand-ins"), 2 + 2 + 2 + 8),
        **{"bfloat16": 2 + 2 + 2 + 4, "int8": 2 + 2 + 2 + IN_8_BITS},
    },
    (STORED_BF16, DELAYED): dict.fromkeys(("float32", "torch's"), 2 + 2 + 2 + 8),
    **{(AT_A_SCALE, blocks): dict.fromkeys(("float32", "torch's"), 2 + 2 + 2 + 8) for blocks in (ONE, DELAYED)},
    # A sum of blocks is float32, and a gradient that came in float16 at a loss scale.
    (STORED_BF16, TWO): dict.fromkeys(("float32", "torch's"), 2 + 2 + 4 + 8),
    ("O2", ONE): {
        **dict.fromkeys(("float32", "torch's", "over stand-ins"), 2 + 2 + 4 + 8),
        "int8": 2 + 2 + 4 + IN_8_BITS,
    },
    ("O2", TWO): {"float32": 2 + 2 + 4 + 8},
    # Without rests, and in float32 as torch has it.
    ("O3", ONE): {"bfloat16": 2 + 2 + 4},
    ("O0", ONE): dict.fromkeys(("float32", "torch's"), 4 + 4 + 8),
}
ROWS = [(level, name, blocks, size) for (level, blocks), of in BYTES.items() for name, size in of.items()]


@pytest.mark.parametrize("level, name, blocks, expected", ROWS)
def test_bytes_per_parameter(level, name, blocks, expected):
    before = bytes_held()
    settings = {"cast_model_type": torch.float16, "loss_scale": 128.0} if level == "O2" else {}
    if level == AT_A_SCALE:
        level, settings = STORED_BF16, {"loss_scale": "dynamic"}
    model, optimizer = initialize_quietly(nn.Linear(*SHAPE, bias=False), MAKERS[name], level, **settings)
    train(model, optimizer, blocks)
    saved = [optimizer.state_dict()] + [model.state_dict()] * (level == "O5")  # which copies weights at O2 and O3
    assert bytes_held(model) - before == expected * SHAPE[0] * SHAPE[1]
    assert all(saved)  # alive until here, and no bytes of their own
