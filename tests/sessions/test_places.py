"""Places where a session begins or ends: afterwards torch is what it was, and a float32 training gives the same bits."""

import gc

import pytest
import torch
from helpers import in_threads, initialize_quietly, iterate, others_slow, python
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ampkit

PLACES = {}


def place(function):
    PLACES[function.__name__] = function
    return function


@place
def inference_mode(action):
    with torch.inference_mode():
        action()


@place
def dispatch_mode(action):
    class Once(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if todo:
                todo.pop()()
            return function(*args, **(kwargs or {}))

    todo = [action]
    with Once():
        torch.arange(3) * 2


@place
def hooks(action):
    hidden = torch.ones(3, requires_grad=True).exp()
    hidden.register_hook(lambda gradient: action())
    hidden.sum().backward()


@place
def recomputation(action):
    def square(x):
        runs.append(1)
        if len(runs) == 2:
            action()
        return x * x

    runs = []
    checkpoint(square, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()


class Double(torch.autograd.Function):
    generate_vmap_rule = True
    todo = ()

    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        if Double.todo:
            Double.todo.pop()()
        return gradient * 2


@place
def functorch(action):
    Double.todo = [action]
    torch.func.grad(lambda x: Double.apply(x).sum())(torch.ones(2))


@place
def autocast_region(action):
    with torch.autocast("cpu", torch.bfloat16):
        action()


@place
def another_thread(action):
    in_threads(action)


@place
def operator_in_python(action):
    """Run in Python that the dispatcher calls, for a custom operator of a script."""
    library = torch.library.Library("ampkit_places", "DEF")
    library.define("act(Tensor x) -> Tensor")
    library.impl("act", lambda x: (action(), x.clone())[1], "CPU")
    torch.ops.ampkit_places.act(torch.ones(2))
    library._destroy()


@place
def garbage_collection(action):
    class Cycle:
        def __del__(self):
            action()

    cycle = Cycle()
    cycle.itself = cycle
    del cycle
    gc.collect()
    gc.collect()  # of what became garbage meanwhile


def state():
    """Losses of a float32 training, torch's functions, dtypes of products, and the state of this thread."""
    torch.manual_seed(9)
    model, x = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1)), torch.randn(32, 6)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        loss = (model(x) - x[:, :1].abs()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    ones = torch.ones(2, 2)
    owners = torch, nn.functional, torch.Tensor, nn.Module, torch.autograd, nn.utils.clip_grad, torch.fx.Tracer
    return {
        "functions": [{name: x for name, x in vars(one).items() if callable(x) or name == "data"} for one in owners],
        "losses": losses,
        "products": (torch.mm(ones, ones).dtype, torch.ops.aten.mm(ones, ones).dtype),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "cache": torch.is_autocast_cache_enabled(),
        "regions": (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()),
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()),
    }


@pytest.mark.parametrize("level", others_slow("O1", "O2", of=["O1", "O2", "O4", "O5"]))
@pytest.mark.parametrize("way", ["begin", "close", "die"])
@pytest.mark.parametrize("name", PLACES)
def test_session_that_begins_or_ends_there_leaves_torch_as_it_was(name, way, level):
    before = state()
    model, x = nn.Linear(6, 4), torch.randn(8, 6)
    exact = [p.detach().clone() for p in model.parameters()]
    held = {"model": model, "optimizer": torch.optim.Adam(model.parameters())}
    del model

    def begin():
        initialize_quietly(held["model"], lambda _: held["optimizer"], level)

    def end():
        if way == "close":
            return ampkit.close()
        held.clear()
        gc.collect()

    (PLACES[name] if way == "begin" else lambda action: action())(begin)
    iterate(lambda: held["model"](x).float().square().mean(), held["optimizer"])
    if way == "begin":
        moved = [(p.detach() - q).abs().max() for p, q in zip(held["model"].state_dict().values(), exact)]
        assert all(0 < step < 2e-3 for step in moved), "Adam's first step"
        ampkit.close()
    else:
        PLACES[name](end)
    assert ampkit.current_session() is None and state() == before
    if way != "die":
        params = list(held["model"].parameters())
        assert all(p.dtype is torch.float32 and not p.is_inference() for p in params)
        held["model"](x).sum().backward()  # as any float32 model


AT_EXIT = """
import atexit, torch
import ampkit

def run():
    for _ in range(2):  # the second is alive when Python ends
        ampkit.initialize(model, opt_level="{}", verbosity=0)

model = torch.nn.Linear(2, 2)
atexit.register(run)
"""


@pytest.mark.parametrize("level", others_slow("O1", of=["O1", "O2", "O4", "O5"]))
def test_sessions_that_begin_and_end_while_python_exits_say_nothing(level):
    done = python("-c", AT_EXIT.format(level))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
