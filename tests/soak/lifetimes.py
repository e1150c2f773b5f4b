"""Random lifetimes: models that are initialized, trained, copied, saved, frozen, grown, closed and initialized again, for long."""

from __future__ import annotations

import copy
import gc
import math
import os
import pickle
import random
import statistics
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from helpers import NAMESPACES, saved_and_loaded, torch_left_as_found
from sessions import test_random_scripts
from torch import nn

import ampkit
from ampkit.registry import live_sessions

from .promise import promise
from .runs import Fault, Recipe, Run

# What happens to a run, in a random order


def trains(run: Run, draw: random.Random) -> None:
    for _ in range(draw.randint(1, 3)):
        run.iterate(draw.randrange(10**6))


def is_copied(run: Run, draw: random.Random) -> None:
    for one in run.players:
        twin = copy.deepcopy(one.model)
        assert {param.dtype for param in twin.parameters()} == {torch.float32}


def is_pickled(run: Run, draw: random.Random) -> None:
    for one in run.players:
        twin = pickle.loads(pickle.dumps(one.model))
        for (name, value), other in zip(one.model.state_dict().items(), twin.state_dict().values(), strict=True):
            assert torch.equal(value.float(), other.float()), name


def is_saved_and_loaded(run: Run, draw: random.Random) -> None:
    run.resume(saved_and_loaded(run.checkpoint()))


def is_frozen(run: Run, draw: random.Random) -> None:
    if run.recipe.optimizer == "SGD fused":  # which raises for one that thaws later
        return
    params = list(run.players[0].model.parameters())
    for param in draw.sample(params, 2):
        param.requires_grad_(not param.requires_grad)
    params[-1].requires_grad_(True)


def grows(run: Run, draw: random.Random) -> None:
    one = run.players[0]
    if not hasattr(one.model, "grown"):
        one.model.grown = nn.Parameter(torch.ones(3, 3))
        one.optimizer.add_param_group({"params": [one.model.grown]})


def evaluates(run: Run, draw: random.Random) -> None:
    for index, player in enumerate(run.players):
        player.model.eval()
        with draw.choice([torch.no_grad, torch.inference_mode])():
            player.model(run.batch(draw.randrange(10**6), index, 0))
        player.model.train()


def is_looked_at(run: Run, draw: random.Random) -> None:
    assert str(ampkit.explain(run.players[0].model))
    for one in run.players:
        assert all(param.dtype is torch.float32 for param in ampkit.master_params(one.optimizer))
    with ampkit.disable_casts():
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32


def overflows(run: Run, draw: random.Random) -> None:
    run.turn(1, 0, Fault("loss", math.inf))


def is_closed_and_initialized_again(run: Run, draw: random.Random) -> None:
    if draw.random() < 0.5:
        run.session.close()
    run.initialize()


EVENTS: list[Callable[[Run, random.Random], None]] = [
    *(trains, trains, trains, is_copied, is_pickled, is_saved_and_loaded, is_frozen, grows, evaluates),
    *(is_looked_at, overflows, is_closed_and_initialized_again),
]


def lifetime(draw: random.Random) -> int:
    """Take a run from birth to death; return how many events it went through."""
    level = draw.choice(["O0", "O1", "O2", "O4", "O5"])
    recipe = Recipe.drawn(draw, level=level, dtype=torch.bfloat16, parts=1)
    run, count = Run(recipe), draw.randint(3, 9)
    names = []
    for _ in range(count):
        event = draw.choice(EVENTS)
        names.append(event.__name__)
        try:
            event(run, draw)
        except Exception as error:
            error.add_note(f"after {names} of {recipe}")
            raise
    if draw.random() < 0.5:
        ampkit.close()
    return count


# What must not grow

WARM_UP, ROUNDS, PER_ROUND = 8, 40, 4


def measures() -> dict[str, float]:
    gc.collect()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    wrapped = sum(hasattr(value, "__wrapped__") for space in NAMESPACES for value in vars(space).values())
    hooks = [value for name, value in vars(torch.nn.modules.module).items() if name.startswith("_global_") and value]
    return {
        "KiB of memory": pages * os.sysconf("SC_PAGE_SIZE") / 1024,
        "objects": len(gc.get_objects()),
        "file descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "patches": wrapped,
        "hooks": sum(map(len, hooks)),
        "sessions": len(live_sessions),
    }


#: Per round of four lifetimes. Caches of Python and torch, such as those of isinstance, fill in steps; a session that stayed would
#: be hundreds of objects.
ALLOWED = {"KiB of memory": 48.0, "objects": 4.0}


def growth(values: list[float]) -> float:
    """The growth per round in the typical block of five rounds: what is loaded once lies in one block, a leak in all."""
    return statistics.median(after - before for before, after in zip(values, values[5:])) / 5


@promise(
    "Lifetimes leave nothing: memory, objects, file descriptors, threads, patches, hooks and sessions do not grow.",
    "models that are initialized, trained, copied, pickled, saved, frozen, grown, evaluated and closed in random order",
    share=2.0,
    limit=400.0,
)
def lifetimes_leave_nothing(draw: random.Random) -> tuple[int, dict[str, float]]:
    events, series = 0, []
    gc.freeze()
    with torch_left_as_found():
        for number in range(WARM_UP + ROUNDS):
            events += sum(lifetime(draw) for _ in range(PER_ROUND))
            ampkit.close()
            if number >= WARM_UP:
                series.append(measures())
    measured = {}
    for name in series[0]:
        values = [one[name] for one in series]
        measured[f"{name} per round"] = grown = growth(values)
        if name in ALLOWED:
            assert grown <= ALLOWED[name], (name, grown, values)
        else:
            assert values[-1] <= values[0], (name, values)
    return events, measured


@promise(
    "Random scripts train as in float32 bit for bit.",
    "scripts drawn from some twenty events, over numbers that bfloat16 holds, at O1, O2 and O5; counted in iterations",
    share=2.0,
)
def random_scripts_train_as_in_float32(draw: random.Random) -> int:
    """Play the scripts of tests/sessions, over numbers that bfloat16 holds exactly, against plain float32."""
    return sum(test_random_scripts.compared(draw.randrange(10**6)) for _ in range(10))
