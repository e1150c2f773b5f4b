"""An exception at any line of ampkit that an iteration runs: KeyboardInterrupt, MemoryError, or one of a script's own.

Afterwards the thread is as it was. What is raised while an optimizer updates says so, and a checkpoint continues the run; after
what is raised anywhere else the same batch does, bit for bit.
"""

import ast
import copy
import functools
import pathlib
import sys

import pytest
import torch
from helpers import backward, initialize_quietly
from torch import nn
from torch.nn import functional as F

import ampkit
from ampkit.iteration.optimizer_wrapper import _AMID_UPDATE

OURS = str(pathlib.Path(ampkit.__file__).parent)
#: Called to clean up. Nothing in Python guards the first line of these, nor a line of a ``finally``.
CLEAN_UP = frozenset({"__exit__", "_leave", "tell_wrappers", "restore"})

OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, 1e-3, foreach=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, 1e-4),
    "FusedAdam": lambda params: ampkit.optimizers.FusedAdam(params, 1e-3),
    "FusedSGD": lambda params: ampkit.optimizers.FusedSGD(params, 1e-2, momentum=0.9),
}


class Interrupted(Exception):
    pass


@functools.cache
def cleaning_lines(path: str) -> frozenset[int]:
    """The lines of a file that undo something: ``except``, ``finally``, and ``with``, which is reached again at its end."""
    nodes = list(ast.walk(ast.parse(pathlib.Path(path).read_text())))
    statements = [one for node in nodes if isinstance(node, ast.Try) for one in (*node.handlers, *node.finalbody)]
    lines = {line for one in statements for line in range(one.lineno, one.end_lineno + 1)}
    return frozenset(lines.union(node.lineno for node in nodes if isinstance(node, ast.With)))


class AtLine:
    """A tracer that raises `Interrupted` at the line with this number, counted from 1, of the lines of ampkit that run inside."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.where = None

    def __enter__(self) -> "AtLine":
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    def _called(self, frame, event, arg):
        code = frame.f_code
        return self._line if code.co_filename.startswith(OURS) and code.co_name not in CLEAN_UP else None

    def _line(self, frame, event, arg):
        if event == "line" and frame.f_lineno not in cleaning_lines(frame.f_code.co_filename):
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                self.where = f"{frame.f_code.co_filename[len(OURS) + 1 :]}:{frame.f_lineno}"
                raise Interrupted(self.where)
        return self._line


def state_of_thread():
    regions = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return {
        "casts": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_autocast_dtype("cpu"),
        "cache": torch.is_autocast_cache_enabled(),
        "regions": regions,
        "grad": torch.is_grad_enabled(),
    }


class Run:
    def __init__(self, opt_level: str, optimizer: str) -> None:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2))
        self.model, self.optimizer = initialize_quietly(model, OPTIMIZERS[optimizer], opt_level, loss_scale=128.0)

    def iterate(self, number: int) -> None:
        batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(number))
        self.optimizer.zero_grad()
        backward(F.mse_loss(self.model(batch).float(), batch[:, :2] ** 2), self.optimizer)
        ampkit.clip_grad_norm_(self.optimizer, 0.5)
        self.optimizer.step()

    def checkpoint(self):
        return [copy.deepcopy(one.state_dict()) for one in (self.model, self.optimizer, ampkit)]

    def resume(self, checkpoint) -> None:
        for one, state in zip((self.model, self.optimizer, ampkit), checkpoint, strict=True):
            one.load_state_dict(state)

    def values(self):
        return torch.cat([value.float().flatten() for value in self.model.state_dict().values()])


def interrupted_at_every(step: int, opt_level: str, optimizer: str):
    """Interrupt iterations at every ``step``-th line until one runs to its end; returns the line and the weights after each."""
    run, iterations = Run(opt_level, optimizer), []
    run.iterate(0)
    while True:
        number, checkpoint, before = len(iterations) + 1, run.checkpoint(), state_of_thread()
        at_line = AtLine(1 + step * len(iterations))
        try:
            with at_line:
                run.iterate(number)
        except Interrupted as error:
            assert state_of_thread() == before, at_line.where
            if _AMID_UPDATE in getattr(error, "__notes__", ()):
                run.resume(checkpoint)
            run.iterate(number)
            assert state_of_thread() == before, at_line.where
        iterations.append((at_line.where, run.values()))
        if at_line.where is None:
            ampkit.close()
            return iterations


def check(step: int, opt_level: str, optimizer: str) -> int:
    """Compare interrupted iterations with undisturbed ones; returns how many lines were tried."""
    torch_before = F.linear, torch.Tensor.__matmul__, torch.Tensor.data, torch.autograd._engine_run_backward
    iterations = interrupted_at_every(step, opt_level, optimizer)
    assert len(iterations) * step > 500  # an iteration runs more lines than that
    assert torch_before == (F.linear, torch.Tensor.__matmul__, torch.Tensor.data, torch.autograd._engine_run_backward)
    undisturbed = Run(opt_level, optimizer)
    undisturbed.iterate(0)
    for number, (where, values) in enumerate(iterations, start=1):
        undisturbed.iterate(number)
        assert torch.equal(undisturbed.values(), values), where
    ampkit.close()
    return len(iterations) - 1


@pytest.mark.parametrize("opt_level, optimizer", [("O1", "AdamW"), ("O2", "AdamW")])
def test_some_lines(opt_level, optimizer):
    check(23, opt_level, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("opt_level", ["O1", "O2", "O5"])
def test_every_line(opt_level, optimizer):
    check(1, opt_level, optimizer)
