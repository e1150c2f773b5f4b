"""ampkit.events: the events of an iteration, in order, at a level, under torch's GradScaler, and in a script without either."""

import contextlib
import os
import sys

import pytest
import torch
from helpers import backward
from torch import nn

import ampkit
from ampkit import events
from ampkit.iteration.block import calls_of_torch

INF = float("inf")


def telling(event):
    return lambda log, *_: log.told.append(event)


class Log(events.Listener):
    """A listener that keeps the names of events, with the loss scale of blocks and whether a step was skipped."""

    forward_begins, forward_ends = telling("forward"), telling("/forward")
    backward_begins, backward_ends = telling("backward"), telling("/backward")

    def __init__(self):
        self.told = []

    def block_begins(self, loss, scaler):
        scale = scaler.get_scale() if isinstance(scaler, torch.amp.GradScaler) else scaler.loss_scale
        self.told.append(f"block at {scale:g}")

    def step_begins(self, optimizer):
        self.told.append(f"step of {type(optimizer).__name__}")

    def step_ends(self, optimizer, skipped):
        self.told.append("skipped" if skipped else "stepped")


@contextlib.contextmanager
def logged():
    log = Log()
    with events.listening(log, events.forwards, events.steps, calls_of_torch):
        yield log.told


def plain(model, optimizer, factors):
    for factor in factors:
        optimizer.zero_grad()
        (model(torch.ones(2, 4)).float() * factor).sum().backward()
        optimizer.step()


def grad_scaler(model, optimizer, factors):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for factor in factors:
        optimizer.zero_grad()
        scaler.scale((model(torch.ones(2, 4)).float() * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()


def at_level(level, **settings):
    def train(model, optimizer, factors):
        settings.setdefault("loss_scale", 1024.0 if level in ("O1", "O2") else 1.0)
        ampkit.initialize(model, optimizer, opt_level=level, verbosity=0, **settings)
        for factor in factors:
            optimizer.zero_grad()
            backward((model(torch.ones(2, 4)).float() * factor).sum(), optimizer)
            optimizer.step()
        ampkit.close()

    return train


FORWARD, BACKWARD = ["forward", "/forward"], ["backward", "/backward"]
WAYS = {
    "plain": (plain, [], [False]),
    "GradScaler": (grad_scaler, ["block at 1024"], [False, True]),
    "O1": (at_level("O1"), ["block at 1024"], [False, True]),
    "O2": (at_level("O2"), ["block at 1024"], [False, True]),
    "O2 over copies": (at_level("O2", one_pass_step=False), ["block at 1024"], [False, True]),
    "O5": (at_level("O5", check_gradients=True), ["block at 1"], [False, True]),
}


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "RMSprop"])
@pytest.mark.parametrize("way", WAYS)
def test_an_iteration_is_told_in_its_order(way, kind):
    train, block, skips = WAYS[way]
    model = nn.Linear(4, 1)
    optimizer = getattr(torch.optim, kind)(model.parameters(), 0.1)
    with logged() as told:
        train(model, optimizer, [INF if skip else 1.0 for skip in skips])
    wanted = [[*FORWARD, *block, *BACKWARD, f"step of {kind}", "skipped" if skip else "stepped"] for skip in skips]
    assert told == [one for iteration in wanted for one in iteration]


class Wrapped(torch.optim.SGD):
    """A class that extends torch's, whose step has torch's inside."""

    def step(self, closure=None):
        return super().step(closure)


class Around(torch.optim.Optimizer):
    """An optimizer made of another optimizer."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})

    def step(self, closure=None):
        return self.inner.step(closure)


@pytest.mark.parametrize("train", [plain, at_level("O1"), at_level("O2")], ids=["plain", "O1", "O2"])
@pytest.mark.parametrize(
    "make, name",
    [(lambda p: Wrapped(p, 0.1), "Wrapped"), (lambda p: Around(torch.optim.SGD(p, 0.1)), "Around")],
    ids=["extended", "made of another"],
)
def test_a_step_inside_of_a_step_is_a_part_of_it(make, name, train):
    model = nn.Linear(4, 1)
    with logged() as told:
        train(model, make(list(model.parameters())), [1.0])
    assert [one for one in told if "step" in one] == [f"step of {name}", "stepped"]


@pytest.mark.parametrize("kind", ["SGD", "LBFGS"])
def test_a_closure_is_evaluated_before_the_step(kind):
    model = nn.Linear(4, 1)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    with logged() as told:
        optimizer.step(closure)
    assert told[:5] == [*FORWARD, *BACKWARD, f"step of {kind}"] and told[-1] == "stepped"
    assert [one for one in told[5:-1] if "step" in one] == []


@pytest.mark.parametrize("level", [None, "O1", "O2"])
def test_after_a_step_that_raised_the_next_is_told_of(level):
    class Failing(torch.optim.SGD):
        fails = True

        def step(self, closure=None):
            if self.fails:
                raise ZeroDivisionError
            return super().step(closure)

    model = nn.Linear(4, 1)
    optimizer = Failing(model.parameters(), 0.1)
    if level is not None:
        ampkit.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)
    with logged() as told:
        for _ in range(2):
            model(torch.ones(2, 4)).float().sum().backward()
            with contextlib.suppress(ZeroDivisionError):
                optimizer.step()
            optimizer.fails = False
    ampkit.close()
    assert [one for one in told if "step" in one] == ["step of Failing", "step of Failing", "stepped"]


@pytest.mark.parametrize("first", ["session", "listener"])
def test_torch_is_as_it_was_whoever_ends_first(first):
    before = torch.autograd.backward, torch.amp.GradScaler.step
    model = nn.Linear(4, 1)
    log = logged()
    log.__enter__()
    ampkit.initialize(model, opt_level="O1", verbosity=0)
    for end in (ampkit.close, lambda: log.__exit__(None, None, None))[:: 1 if first == "session" else -1]:
        end()
    assert (torch.autograd.backward, torch.amp.GradScaler.step) == before
    of_steps, of_forwards = sys.modules["torch.optim.optimizer"], sys.modules["torch.nn.modules.module"]
    assert not (of_steps._global_optimizer_pre_hooks or of_forwards._global_forward_pre_hooks or events.listeners)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_in_a_forked_child_nobody_listens():
    with logged():
        child = os.fork()
        if not child:
            os._exit(len(events.listeners))
        assert os.waitpid(child, 0)[1] == 0 and len(events.listeners) == 1
