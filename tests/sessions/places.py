"""Places where a session begins or ends, each in its own process: ``python places.py PLACE ...`` prints the cells that went wrong.

A cell is a way (begin, close, die) at a level. What torch is, and what a float32 training gives, is noted before ampkit is
imported, and must be the same, bit for bit, after each cell. `PLACES` are functions that call ``action()`` where they say;
`CANNOT_OCCUR` says which cells there are not, and why.
"""

import asyncio
import atexit
import gc
import os
import sys
import threading

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

LEVELS = "O1", "O2", "O4", "O5"
WAYS = "begin", "close", "die"

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
def recomputation(action, use_reentrant=False):
    def square(x):
        runs.append(1)
        if len(runs) == 2:
            action()
        return x * x

    runs = []
    checkpoint(square, torch.ones(2, requires_grad=True), use_reentrant=use_reentrant).sum().backward()


@place
def reentrant_recomputation(action):
    recomputation(action, use_reentrant=True)


class _Double(torch.autograd.Function):
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
        if _Double.todo:
            _Double.todo.pop()()
        return gradient * 2


@place
def functorch(action):
    _Double.todo = [action]
    torch.func.grad(lambda x: _Double.apply(x).sum())(torch.ones(2))


@place
def autocast_region(action):
    with torch.autocast("cpu", torch.bfloat16):
        action()


@place
def another_thread(action):
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


@place
def forked_child(action):
    child = os.fork()
    if child == 0:
        action()
        import ampkit

        # Wrappers stay in a child, and call torch's functions.
        computes = {"losses", "mm", "torch.ops", "autocast", "regions"}
        os._exit(ampkit.current_session() is None and bool(computes.intersection(differences())))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "in the child torch is not as it was"
    action()


@place
def spawned_child(action):
    """Begin a session in a child, which imports this module anew; it ends there as anywhere."""
    child = torch.multiprocessing.get_context("spawn").Process(target=_all_levels_in_a_child)
    child.start()
    child.join()
    assert child.exitcode == 0, "in the child torch is not as it was"
    action()


def _all_levels_in_a_child():
    training()
    right.update(state())
    failed = [problems for level in LEVELS if (problems := cell(lambda action: action(), "begin", level))]
    sys.exit(repr(failed) if failed else 0)


@place
def unpacking(action):
    """Run in hooks on saved tensors, amid a backward pass, as offloading does."""

    def unpack(saved):
        if todo:
            todo.pop()()
        return saved

    todo = [action]
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpack):
        result = torch.ones(3, requires_grad=True).exp()
    result.sum().backward()


@place
def operator_in_python(action):
    """Run in Python that the dispatcher calls, for a custom operator of a script."""
    if not _todo_of_operator:
        library = torch.library.Library("ampkit_places", "DEF")
        library.define("act(Tensor x) -> Tensor")
        library.impl("act", lambda x: (_todo_of_operator.pop()(), x.clone())[1], "CPU")
        _todo_of_operator.append(library)
    _todo_of_operator.append(action)
    torch.ops.ampkit_places.act(torch.ones(2))


_todo_of_operator = []  # first the library


@place
def generator(action):
    """Run in code that is left and entered again, inside of a region of its own."""

    def steps():
        with torch.autocast("cpu", torch.bfloat16):
            yield
            action()
            yield

    running = steps()
    next(running)
    next(running)
    running.close()


@place
def event_loop(action):
    async def act():
        with torch.inference_mode():
            action()

    asyncio.run(act())


@place
def raised_error(action):
    class Fails(nn.Module):
        def forward(self, x):
            raise ValueError("as its user meant it")

    try:
        Fails()(torch.ones(1))
    except ValueError:
        action()


@place
def interpreter_exit(action):
    action()  # `main` has all cells run in a handler of atexit, and leaves the last session alive


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


_STAYS = "what is pickled for a spawned child is a plain model, so no session of the parent's is there to end"
CANNOT_OCCUR = {("spawned_child", way): _STAYS for way in ("close", "die")}


def training():
    """Losses of a float32 training."""
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
    return losses


def state():
    """The state of torch: a training, dtypes of products, the thread's state and torch's functions."""
    snapshot = {"losses": training(), "mm": torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype}
    snapshot["torch.ops"] = torch.ops.aten.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype
    cache = torch.is_autocast_cache_enabled()
    snapshot["autocast"] = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), cache
    snapshot["regions"] = torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()
    snapshot["modes"] = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()
    for owner in torch, nn.functional, torch.Tensor, nn.Module, torch.autograd, nn.utils.clip_grad, torch.fx.Tracer:
        own = {name: value for name, value in vars(owner).items() if callable(value) or name == "data"}
        snapshot[owner.__name__] = own
    return snapshot


def differences():
    now = state()
    return [key for key in right if now[key] != right[key]]


right = {}


def cell(place, way, level):
    """Return the problems of one cell."""
    import ampkit

    torch.manual_seed(3)
    model = nn.Linear(6, 4)
    held = {"model": model, "optimizer": torch.optim.Adam(model.parameters())}
    exact, x = [p.detach().clone() for p in model.parameters()], torch.randn(8, 6)
    del model

    def begin():
        ampkit.initialize(held["model"], held["optimizer"], opt_level=level, verbosity=0)

    def train():
        held["optimizer"].zero_grad()
        with ampkit.scale_loss(held["model"](x).float().square().mean(), held["optimizer"]) as scaled:
            scaled.backward()
        held["optimizer"].step()

    def die():
        held.clear()
        gc.collect()

    if way == "begin":
        place(begin)
        train()
        moved = [(p.detach() - q).abs().max() for p, q in zip(held["model"].state_dict().values(), exact)]
        problems = [] if all(0 < step < 2e-3 for step in moved) else [f"Adam's first step is {moved}"]
        ampkit.close()
    else:
        begin()
        train()
        place(ampkit.close if way == "close" else die)
        problems = []
    if way != "die":
        wrong = [p for p in held["model"].parameters() if p.dtype is not torch.float32 or p.is_inference()]
        problems += [str(p.dtype) for p in wrong]
        held["model"](x).sum().backward()  # as any float32 model
    return problems + differences() + (["a session lives"] if ampkit.current_session() is not None else [])


def main(names):
    training()  # what torch loads when it is first used
    right.update(state())
    gc.collect()
    gc.freeze()  # or each cell would have torch itself walked for garbage
    for name in names[1:]:  # torch is loaded once for all
        child = os.fork()
        if child == 0:
            return all_cells(name)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{name} failed")
    return all_cells(names[0])


def all_cells(name):
    import ampkit

    def run():
        failed = 0
        for way in WAYS:
            for level in LEVELS if (name, way) not in CANNOT_OCCUR else ():
                if problems := cell(PLACES[name], way, level):
                    failed += 1
                    print(f"{name}, {way}, {level}: {problems}", flush=True)
        if name == "interpreter_exit" and not failed:
            kept.append(nn.Linear(2, 2))
            ampkit.initialize(kept[0], opt_level="O1", verbosity=0)
        elif failed:
            os._exit(1)

    kept = []
    if name == "interpreter_exit":
        atexit.register(run)
    else:
        run()


if __name__ == "__main__":
    main(sys.argv[1:])
