"""What several test files share."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ampkit
from ampkit.casting import Casting

#: The folder that holds setup.py.
ROOT = Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def o1(
    lower_precision: torch.dtype = torch.bfloat16, device_types: tuple[str, ...] = ("cpu",), **settings
) -> Iterator[Casting]:
    """An O1 engine, on the CPU or on other devices: installed, and taken back whatever happens."""
    casting = Casting(lower_precision, device_types=device_types, **settings)
    casting.install()
    try:
        yield casting
    finally:
        casting.close()


def initialized(model: nn.Module, make_optimizer: Callable, level: str, **settings) -> tuple[nn.Module, Any]:
    """``ampkit.initialize`` of a model and of ``make_optimizer(model.parameters())``, without a word on standard output."""
    optimizer = make_optimizer(model.parameters())
    return ampkit.initialize(model, optimizer, opt_level=level, **{"verbosity": 0, **settings})


def backward(loss: torch.Tensor, optimizers, **flags) -> None:
    """The backward pass of a scaled loss; ``flags`` are those of `ampkit.scale_loss`."""
    with ampkit.scale_loss(loss, optimizers, **flags) as scaled:
        scaled.backward()


def iterate(loss_of: Callable[[], torch.Tensor], optimizer, times: int = 1, **flags) -> float:
    """Iterations as scripts write them: clear, compute the loss, backward, step. Returns the last loss."""
    for _ in range(times):
        optimizer.zero_grad()
        loss = loss_of()
        backward(loss, optimizer, **flags)
        optimizer.step()
    return loss.item()


def net_with_norm(inputs: int = 6, hidden: int = 8, outputs: int = 3, seed: int = 0) -> nn.Sequential:
    """Weights that O2 and O5 cast, around a norm layer that they keep float32; the same numbers each time."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.LayerNorm(hidden), nn.Tanh(), nn.Linear(hidden, outputs))


def random_batch(seed: int = 1, rows: int = 4, inputs: int = 6, outputs: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, inputs, generator=generator), torch.randn(rows, outputs, generator=generator)


# For optimizers on their own: parameters, gradients drawn for each step, and steps with them.


def several_params(dtype: torch.dtype, device="cpu") -> list[nn.Parameter]:
    """Parameters of several shapes, a scalar among them; the same numbers each time."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(3, 4), (7,), (1,), (2, 3, 2, 2), ()]
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes]


def drawn_gradients(step: int, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of one step, the same for the same step whatever the precision of the parameters."""
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(p.shape, generator=generator).to(p.device, p.dtype) for p in params]


def take_steps(optimizer, params: Iterable[torch.Tensor], steps: Iterable[int]) -> None:
    """Steps with the `drawn_gradients` of these numbers."""
    for step in steps:
        for param, gradient in zip(params, drawn_gradients(step, params)):
            param.grad = gradient
        optimizer.step()


def assert_all_close(found: Iterable[torch.Tensor], expected: Iterable[torch.Tensor], tolerance: float) -> None:
    """Each tensor within ``tolerance``, relative or absolute, of the expected one. Dtypes may differ."""
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.allclose(mine.double(), theirs.double(), rtol=tolerance, atol=tolerance), (mine, theirs)


def saved_and_loaded(state: Any) -> Any:
    """What ``torch.load(weights_only=True)`` makes of a checkpoint."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
