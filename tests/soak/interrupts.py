"""Exceptions and signals: at every line of ampkit, at random times, and for want of memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator

import torch
from helpers import backward, torch_left_as_found
from sessions import test_interrupts
from torch import nn
from torch.nn import functional as F

import ampkit
from ampkit.iteration.optimizer_wrapper import _AMID_UPDATE

from .promise import promise
from .runs import OPTIMIZERS, Recipe, Run, assert_same, copied, differences


@promise(
    "An exception at any line is survived: the same batch then continues the run bit for bit, or the error says that weights "
    "were being updated, and a checkpoint does. The thread's state is as before.",
    "an exception raised at numbered lines of ampkit that an iteration runs, some in each attempt",
    share=2.0,
    limit=300.0,
)
def an_exception_at_any_line_is_survived(draw: random.Random) -> int:
    """Run the sweep of tests/sessions over a share of the lines that an iteration runs in ampkit."""
    with torch_left_as_found():
        level, optimizer = draw.choice(["O1", "O2", "O5"]), draw.choice(list(test_interrupts.OPTIMIZERS))
        return test_interrupts.check(draw.randint(17, 97), level, optimizer)


@promise(
    "Control-C and SIGTERM are survived likewise.",
    "a signal whose handler raises, at random times of an iteration; any optimizer and level",
    share=2.0,
)
def a_signal_at_any_time_is_survived(draw: random.Random) -> int:
    rule = ampkit.DynamicLossScale(2.0 ** draw.randint(0, 10), growth_interval=10**6)
    # Batch norm would keep the statistics of a forward that was ended.
    recipe = Recipe.drawn(draw, model="llama", rule=rule)
    run, wanted = Run(recipe), []
    began = time.perf_counter()
    for number in range(30):
        run.iterate(number)
        wanted.append(run.state())
    lasts = (time.perf_counter() - began) / 30
    ampkit.close()
    with torch_left_as_found():
        run, attacks = Run(recipe), 0
        for number, after in enumerate(wanted):
            checkpoint, before = copied(run.checkpoint()), run.state()
            try:
                with signalled(draw.uniform(0, 1.5 * lasts), draw.choice([signal.SIGINT, signal.SIGTERM])):
                    run.turn(number, 0)
            except (KeyboardInterrupt, SystemExit) as error:
                attacks += 1
                case = (number, where(error), recipe)
                if where(error) in UNGUARDED or was_amid_update(error):
                    run = replaced(run, checkpoint)
                if differences(run.state(), after):  # else the step had been taken
                    assert_same(run.state(), before, case)
                    run.turn(number, 0)
                assert_same(run.state(), after, case)
        ampkit.close()
    return attacks


@contextlib.contextmanager
def signalled(seconds: float, number: int) -> Iterator[None]:
    """Send this signal after so many seconds. It raises KeyboardInterrupt, or SystemExit for SIGTERM, in the running code."""

    def exit_now(*_: object) -> None:
        raise SystemExit(143)

    before = signal.signal(signal.SIGTERM, exit_now)
    timer = threading.Timer(seconds, os.kill, (os.getpid(), number))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGTERM, before)


def was_amid_update(error: BaseException) -> bool:
    """Whether the error's note says that a checkpoint has to be loaded."""
    return _AMID_UPDATE in getattr(error, "__notes__", ())


#: Called to clean up: nothing in Python guards their first line.
UNGUARDED = {*test_interrupts.CLEAN_UP, "contextlib"}


def where(error: BaseException) -> str:
    """The function in which a signal came, or contextlib."""
    last = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name != "exit_now"][-1]
    return "contextlib" if last.filename.endswith("contextlib.py") else last.name


def replaced(run: Run, checkpoint: dict) -> Run:
    """Return a new run from a checkpoint; `close` ends the old run in whatever state it is."""
    ampkit.close()
    again = Run(run.recipe)
    again.resume(checkpoint)
    return again


@promise(
    "Too little memory is survived: initialize leaves everything as it was, and iterations continue bit for bit.",
    "a limit on the address space while a model is initialized, in a block and in a step",
)
def memory_that_runs_out_is_survived(draw: random.Random) -> int:
    level, name = draw.choice(["O1", "O2", "O5"]), draw.choice(list(OPTIMIZERS))
    ctypes.CDLL(None).mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: tensors take and give back memory of their own
    undisturbed = Large(level, name)
    undisturbed.initialize()
    wanted = []
    for number in range(6):
        undisturbed.iterate(number)
        wanted.append(undisturbed.values())
    ampkit.close()
    with torch_left_as_found():
        run, attacks = Large(level, name), 0
        plain = copied(run.model.state_dict())
        attacks += in_little_memory(draw, run.initialize)
        if ampkit.current_session() is None:
            assert not hasattr(run.model, "_ampkit_record") and type(run.model) is nn.Sequential
            assert_same(run.model.state_dict(), plain, (level, name))
            run.initialize()
        for number, values in enumerate(wanted):
            before = copied({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()})
            was_too_little = True
            try:
                was_too_little = in_little_memory(draw, lambda: run.iterate(number))  # noqa: B023
            except AmidUpdate:
                run.model.load_state_dict(before["model"])
                run.optimizer.load_state_dict(before["optimizer"])
            if was_too_little:
                attacks += 1
                run.iterate(number)
            assert torch.equal(run.values(), values), (number, level, name)
        ampkit.close()
    return attacks


class AmidUpdate(Exception):
    pass


def in_little_memory(draw: random.Random, work: Callable[[], object]) -> bool:
    """Do it under a limit on memory; whether that was too little."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + int(draw.uniform(0, 0.3) * Large.BYTES), hard))
    try:
        work()
    except (MemoryError, RuntimeError) as error:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        if isinstance(error, RuntimeError) and not any(word in str(error) for word in ("memory", "bad_alloc")):
            raise
        if was_amid_update(error):
            raise AmidUpdate from None
        return True
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    return False


class Large:
    """A model of some megabytes, each of whose tensors is an allocation of its own."""

    WIDTH, LAYERS = 2048, 3
    BYTES = 4 * WIDTH * WIDTH * LAYERS

    def __init__(self, level: str, optimizer: str) -> None:
        torch.manual_seed(0)
        self.level = level
        self.model = nn.Sequential(*(nn.Linear(self.WIDTH, self.WIDTH) for _ in range(self.LAYERS)))
        self.optimizer = OPTIMIZERS[optimizer].make(self.model.parameters())

    def initialize(self) -> None:
        ampkit.initialize(self.model, self.optimizer, opt_level=self.level, loss_scale=128.0, verbosity=0)

    def iterate(self, number: int) -> None:
        x = torch.randn(8, self.WIDTH, generator=torch.Generator().manual_seed(number))
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(x).float(), x)
        backward(loss, self.optimizer)
        self.optimizer.step()

    def values(self) -> torch.Tensor:
        return torch.stack([value.double().sum() for value in self.model.state_dict().values()])


@promise(
    "close() always works, and leaves torch as it was, attribute by attribute.",
    "exceptions in forwards, blocks that are never left, several sessions at all levels",
)
def close_leaves_torch_as_it_was(draw: random.Random) -> int:

    class Stop(Exception):
        pass

    class Stops(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if draw.random() < 0.5:
                raise Stop
            return x

    with torch_left_as_found():
        thread = test_interrupts.state_of_thread()
        for _ in range(10):
            models = [nn.Sequential(nn.Linear(4, 4), Stops(), nn.Linear(4, 1)) for _ in range(draw.randint(1, 3))]
            pairs = [(model, torch.optim.AdamW(model.parameters())) for model in models]
            for model, optimizer in pairs:
                level = draw.choice(["O0", "O1", "O2", "O3", "O4", "O5"])
                with contextlib.suppress(ampkit.ConfigurationError):  # of two precisions at O1
                    ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
            for model, optimizer in pairs:
                block = contextlib.ExitStack()
                try:
                    loss = model(torch.ones(2, 4)).float().sum()
                    scaled = block.enter_context(ampkit.scale_loss(loss, optimizer))
                    if draw.random() < 0.5:
                        scaled.backward()
                    if draw.random() < 0.5:
                        raise Stop
                    block.close()
                    optimizer.step()
                except (Stop, ampkit.NotInitializedError, ampkit.ConfigurationError):  # another's block is still open
                    if draw.random() < 0.5:
                        block.__exit__(*sys.exc_info())
            ampkit.close()
            assert test_interrupts.state_of_thread() == thread
            for model, _ in pairs:
                assert {param.dtype for param in model.parameters()} == {torch.float32}
                assert type(model) is nn.Sequential
    return 10
