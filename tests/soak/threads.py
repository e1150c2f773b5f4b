"""Threads, forks, workers of a DataLoader, and a garbage collector that runs at every allocation."""

from __future__ import annotations

import gc
import itertools
import os
import random
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from helpers import torch_left_as_found
from o1.test_pickling import Images, collate
from torch import nn
from torch.utils.data import DataLoader

import ampkit

from .promise import promise
from .runs import Recipe, Run, assert_same

ITERATIONS = 12


def drawn(draw: random.Random, **fixed: Any) -> Recipe:
    """Draw a recipe in bfloat16, as sessions at O1 share a precision, without models that use the generator that threads share."""
    return Recipe.drawn(draw, model=draw.choice(["cnn", "llama"]), dtype=torch.bfloat16, **fixed)


def made(recipe: Recipe, initializes: bool = True) -> Run:
    run = Run(recipe, initializes=False)
    for module in run.players[0].model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if initializes:
        run.initialize()
    return run


def finished(run: Run, iterations: int = ITERATIONS) -> dict[str, Any]:
    """Run the iterations, and close; return the state at the end."""
    for number in range(iterations):
        run.iterate(number)
    state = run.state()
    ampkit.close()
    return state


def in_threads(works: list[Callable[[], None]]) -> None:
    """Run all of these at once, with very frequent thread switches; raise the first error."""
    sys.setswitchinterval(1e-5)
    with ThreadPoolExecutor(len(works)) as pool:
        for future in [pool.submit(work) for work in works]:
            future.result()


@promise(
    "Four threads train four models at different levels, each bit for bit as alone.",
    "threads that are switched 100,000 times a second, initialized before or inside",
    share=0.25,
)
def four_threads_train_as_alone(draw: random.Random) -> int:
    recipes = [drawn(draw) for _ in range(4)]
    wanted, starts_inside = [finished(made(recipe)) for recipe in recipes], draw.random() < 0.5
    with torch_left_as_found():
        runs = [made(recipe, initializes=not starts_inside) for recipe in recipes]
        start = threading.Barrier(4)

        def train(run: Run) -> None:
            start.wait()
            if starts_inside:
                run.initialize()
            for number in range(ITERATIONS):
                run.iterate(number)

        in_threads([lambda run=run: train(run) for run in runs])
        for run, state in zip(runs, wanted):
            assert_same(run.state(), state, (run.recipe, recipes, starts_inside))
        ampkit.close()
    return 4


@promise(
    "Evaluation in other threads changes nothing in a training, bit for bit.",
    "threads that evaluate the trained model and another one without pause",
)
def evaluation_beside_training_changes_nothing(draw: random.Random) -> int:
    recipe, other = drawn(draw), drawn(draw)
    wanted = finished(made(recipe))
    run, beside, is_done, passes = made(recipe), made(other), threading.Event(), [0]
    is_safe = recipe.model == "llama"  # batch norm in a training forward writes to its statistics
    models = [beside, *([run] if is_safe else [])]

    def evaluate(evaluated: Run) -> None:
        batch = evaluated.batch(99, 0, 0)
        inputs = batch[:, :-1] if evaluated.recipe.model == "llama" else batch
        while not is_done.is_set():
            with torch.no_grad():
                assert evaluated.players[0].model(inputs).isfinite().all()
            passes[0] += 1

    def train() -> None:
        try:
            for number in range(ITERATIONS):
                run.iterate(number)
        finally:
            is_done.set()

    in_threads([train, *(lambda one=one: evaluate(one) for one in models)])
    assert_same(run.state(), wanted, (recipe, other))
    ampkit.close()
    return passes[0]


@promise(
    "Workers of a DataLoader cast nothing, and change nothing in a training.",
    "workers by fork, spawn and forkserver, while a model trains",
)
def workers_see_no_casts(draw: random.Random) -> int:
    wanted = list(DataLoader(Images(), batch_size=1, collate_fn=collate))
    recipe = drawn(draw, level=draw.choice(["O1", "O2", "O4", "O5"]))
    state = finished(made(recipe))
    run = made(recipe)
    context = draw.choice(["fork", "fork", "fork", "spawn", "forkserver"])
    loader = DataLoader(Images(), 1, collate_fn=collate, num_workers=2, multiprocessing_context=context)
    number = 0
    for batch, plain in zip(loader, wanted, strict=True):
        assert torch.equal(batch, plain), (context, recipe)
        for _ in range(ITERATIONS // len(wanted)):
            run.iterate(number)
            number += 1
    assert number == ITERATIONS
    assert_same(run.state(), state, (context, recipe))
    ampkit.close()
    return len(wanted)


@promise(
    "A fork in the midst of an iteration casts nothing, trains float32 models of its own, and changes nothing in its parent.",
    "os.fork between forward and backward",
)
def a_fork_in_the_midst_of_a_block_changes_nothing(draw: random.Random) -> int:
    recipe = drawn(draw)
    wanted = finished(made(recipe))
    run = made(recipe)
    at = {draw.randrange(ITERATIONS) for _ in range(4)}
    plain, numbers = run.players[0].loss, itertools.count()

    def forking(batch: torch.Tensor) -> torch.Tensor:
        loss = plain(batch)
        if next(numbers) in at:
            child = os.fork()
            if child == 0:
                os._exit(of_child())
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, recipe
        return loss

    run.players[0].loss = forking
    assert_same(finished(run), wanted, recipe)
    return len(at)


def of_child() -> int:
    """Return 0 if, in a fork, calls are not cast, and a model trains in float32 before and after `close`."""
    try:
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32
        for closes in (False, True):
            if closes:
                ampkit.close()
            model = nn.Linear(3, 3)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            before = model.weight.detach().clone()
            out = model(torch.ones(2, 3))
            out.sum().backward()
            optimizer.step()
            assert out.dtype is torch.float32
            torch.testing.assert_close(model.weight.detach(), before - 0.2, rtol=0, atol=1e-6)
        return 0
    except BaseException as error:
        print(error, flush=True)
        return 1


@promise(
    "Garbage collection may come at any time.",
    "gc.set_threshold(1), which collects at every allocation, with faulthandler on",
)
def a_collector_at_every_allocation_changes_nothing(draw: random.Random) -> int:
    recipe = Recipe.drawn(draw)
    wanted = finished(Run(recipe), 3)
    gc.freeze()
    gc.set_threshold(1)
    assert_same(finished(Run(recipe), 3), wanted, recipe)
    return 1
