"""Scripts as people write them: a table, and helpers of its rows. tests/sessions/test_everyday_scripts.py runs them."""

import contextlib
import itertools

import torch
from torch import nn
from torch.nn import functional as F

import ampkit

FLOAT32_WEIGHTS = ("O1", "O4", "O5")
ALL = (*FLOAT32_WEIGHTS, "O2")  # for scripts that do not look at weights or gradients themselves


#: name: (function of a `Run`, its levels).
SCRIPTS = {}


def script(levels=FLOAT32_WEIGHTS):
    """Put a function into the table, by its name."""

    def put(function):
        SCRIPTS[function.__name__.replace("_", " ")] = function, levels
        return function

    return put


class Run:
    """The interface of a script to a level: ``fp32``, ``autocast`` or one of ampkit's."""

    def __init__(self, level):
        self.level, self.is_ours = level, level in ALL

    def begin(self, models, optimizers=None, **settings):
        """Initialize in place."""
        if self.is_ours:
            ampkit.initialize(models, optimizers, opt_level=self.level, verbosity=0, **settings)

    def casts(self):
        return torch.autocast("cpu", torch.bfloat16) if self.level == "autocast" else contextlib.nullcontext()

    def no_casts(self):
        return ampkit.disable_casts() if self.is_ours else contextlib.nullcontext()

    def block(self, loss, optimizers, **flags):
        return ampkit.scale_loss(loss, optimizers, **flags) if self.is_ours else contextlib.nullcontext(loss)

    def backward(self, loss, optimizers, **flags):
        with self.block(loss, optimizers, **flags) as scaled:
            scaled.backward()

    def learn(self, loss, optimizer):
        optimizer.zero_grad()
        self.backward(loss, optimizer)
        optimizer.step()

    def error(self, model, x, y):
        with self.casts():
            output = model(x)
        return F.mse_loss(output.float(), y)


def flat(values):
    return torch.cat([torch.as_tensor(value).detach().double().flatten() for value in values])


def way_of(*models):
    """Return a function without arguments: how far the float32 values of these models' parameters have gone since."""

    def values():
        states = [(model.state_dict(), [name for name, _ in model.named_parameters()]) for model in models]
        return flat(state[name] for state, names in states for name in names)

    start = values()
    return lambda: [values() - start]


def mlp(*sizes, act=nn.Tanh, seed=0):
    torch.manual_seed(seed)
    layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), act())]
    return nn.Sequential(*layers[:-1])


def learn(
    run,
    models,
    optimizer,
    loss_of,
    times=8,
    of=None,
    edit=lambda: (),
    backward=None,
    zero=lambda index: False,
    **settings,
):
    """Run the loop of most scripts: ``loss_of(index)``, which may yield several losses, clear, backward, ``edit()``, step.

    Return losses, the way of the weights, or of ``of``, and what `edit` returns. Gradients become zero instead of None in the
    iterations that ``zero`` says.
    """
    models = models if isinstance(models, list) else [models]
    way, losses, kept = way_of(*models) if of is None else way_of(of), [], []
    run.begin(models, optimizer, **settings)
    for index in range(times):
        made = loss_of(index)
        optimizer.zero_grad(set_to_none=not zero(index))
        for loss in [made] if isinstance(made, torch.Tensor) else made:
            losses.append(loss)
            (backward or run.backward)(loss, optimizer)
        kept += edit() or ()
        optimizer.step()
    return {"losses": losses, "weights": way()} | ({"kept": kept} if kept else {})


def regression(rows=32, seed=1, lr=0.1, make=torch.optim.SGD, **settings):
    """Return a model with a large matrix, its optimizer, inputs and targets."""
    model = mlp(64, 96, 2)
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed))
    y = torch.stack([x[:, 0].sin(), x[:, 1] * x[:, 2]], 1)
    return model, make(model.parameters(), lr=lr, **settings), x, y


def stepped(run, edit, times=8, lr=0.05, momentum=0.9, **settings):
    """Iterate with ``edit(model)`` of the gradients before each step."""
    model, optimizer, x, y = regression(lr=lr, momentum=momentum, **settings)
    found = learn(run, model, optimizer, lambda _: run.error(model, x, y), times, edit=lambda: edit(model))
    return found | {"gradients": [p.grad for p in model.parameters()]}


def noise_of(seed):
    """Return a function of shapes: the same numbers in the same order each time."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator)


def some_tokens(*shape, seed=7, tokens=64):
    return torch.randint(tokens, shape, generator=torch.Generator().manual_seed(seed))


def learned_by(run, make, times=12, **settings):
    model, optimizer, x, y = regression(make=make, **settings)
    return learn(run, model, optimizer, lambda _: run.error(model, x, y), times)
