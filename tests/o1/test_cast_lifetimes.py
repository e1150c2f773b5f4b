"""No cast outlives its weight's value: loops that write weights between forwards, and loops with several forwards.

Each row computes something in float32, under torch.autocast with a region for each forward, and at O1. O1 may be twice as far from
float32 as torch.autocast is. Loops that write no weight between forwards are scripts of tests/everyday.
"""

import contextlib
import functools
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampkit

pytestmark = pytest.mark.switch


@pytest.fixture(autouse=True)
def closed():
    yield
    ampkit.close()


def casts(level):
    return torch.autocast("cpu", torch.bfloat16) if level == "autocast" else contextlib.nullcontext()


def begin(level, models, optimizers=None):
    """Initialize in place, if the level is ampkit's."""
    if level == "O1":
        ampkit.initialize(models, optimizers, opt_level=level, verbosity=0, loss_scale=1.0)


def backward(level, loss, optimizers, **settings):
    block = ampkit.scale_loss(loss, optimizers, **settings) if level == "O1" else contextlib.nullcontext(loss)
    with block as scaled:
        scaled.backward()


def flat(tensors):
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


def gradients(model):
    return flat(param.grad for param in model.parameters())


def distance(a, b):
    return ((a - b).norm() / b.norm()).item()


def assert_as_close_as_autocast(run, slack=1e-3):
    exact, cast, found = run("fp32"), run("autocast"), run("O1")
    assert distance(found, exact) <= 2 * distance(cast, exact) + slack


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 40), nn.Tanh(), nn.Linear(40, 1))


# -- ways to write a weight between two forwards: from the parameters before `initialize` each makes a function that scales them


def each(write):
    """Make a write that needs nothing from before the first forward."""
    return lambda params: lambda factor: [write(param, factor) for param in params]


def kept(alias):
    """Make a write to what was taken from each parameter before the first forward."""

    def prepare(params):
        aliases = [alias(param) for param in params]

        def write(factor):
            with torch.no_grad():
                for one in aliases:
                    one *= factor

        return write

    return prepare


def in_place(param, factor):
    with torch.no_grad():
        param.mul_(factor)


def assigned(param, factor):
    param.data = param.detach() * factor


def numpy_of(param):
    return param.detach().numpy()


def fresh_numpy(param, factor):
    numpy_of(param)[...] *= factor


def fresh_dlpack(param, factor):
    torch.from_dlpack(param.detach()).mul_(factor)


def memory_view(param):
    return np.frombuffer(memoryview(numpy_of(param)).cast("B"), np.float32)


def storage(param):
    return torch.tensor([]).set_(param.untyped_storage())


def shared(param):
    param.data.share_memory_()
    return param.data


def flat_buffer(params):
    buffer, begin = flat(params).float(), 0
    for param in params:
        param.data = buffer[begin : begin + param.numel()].view_as(param)
        begin += param.numel()

    def write(factor):
        buffer.mul_(factor)

    return write


def loading(params):
    holder = nn.ParameterList(params)

    def write(factor):
        holder.load_state_dict({name: param.detach() * factor for name, param in holder.named_parameters()})

    return write


class ForeachOnData(torch.optim.Optimizer):
    """A library's optimizer that keeps aliases of its parameters, and writes to them by torch's foreach functions."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.data = [param.data for group in self.param_groups for param in group["params"]]

    def step(self):
        (group,) = self.param_groups
        torch._foreach_add_(self.data, [param.grad for param in group["params"]], alpha=-group["lr"])


class ByNumpy(torch.optim.Optimizer):
    """A library's optimizer with its own kernel, which torch does not see."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.arrays = [numpy_of(param) for group in self.param_groups for param in group["params"]]

    def step(self):
        (group,) = self.param_groups
        for array, param in zip(self.arrays, group["params"]):
            array -= group["lr"] * param.grad.numpy()


def stepped(make):
    def prepare(params):
        optimizer = make(params)

        def write(factor):
            for param in params:
                param.grad = param.detach() * (1 - factor)
            optimizer.step()
            optimizer.zero_grad()

        return write

    return prepare


WRITES = {
    "in place": each(in_place),
    "data in place": each(lambda param, factor: param.data.mul_(factor)),
    "data assigned": each(assigned),
    "loading": loading,
    "kept data": kept(lambda param: param.data),
    "kept detached": kept(lambda param: param.detach()),
    "numpy": each(fresh_numpy),
    "fresh dlpack": each(fresh_dlpack),
    "kept numpy": kept(numpy_of),
    "memoryview": kept(memory_view),
    "dlpack": kept(lambda param: torch.from_dlpack(param.detach())),
    "storage": kept(storage),
    "shared memory": kept(shared),
    "flat buffer": flat_buffer,
    "SGD": stepped(lambda params: torch.optim.SGD(params, lr=1.0)),
    "SGD foreach": stepped(lambda params: torch.optim.SGD(params, lr=1.0, foreach=True)),
    "SGD fused": stepped(lambda params: torch.optim.SGD(params, lr=1.0, fused=True)),
    "Adam": stepped(lambda params: torch.optim.Adam(params, lr=0.1)),
    "Adam fused": stepped(lambda params: torch.optim.Adam(params, lr=0.1, fused=True)),
    "AdamW foreach": stepped(lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True)),
    "AdamW fused": stepped(lambda params: torch.optim.AdamW(params, lr=0.1, fused=True)),
    "a library's, foreach": stepped(lambda params: ForeachOnData(params, lr=1.0)),
    "a library's, kernel": stepped(lambda params: ByNumpy(params, lr=1.0)),
}


def know_all(level, model):
    begin(level, model, torch.optim.SGD(model.parameters(), lr=0.1))


def know_the_model(level, model):
    begin(level, model)


def know_another(level, model):
    other = nn.Linear(2, 2)
    begin(level, other, torch.optim.SGD(other.parameters(), lr=0.1))
    return other  # a session ends with its models


KNOWN = {"model and optimizer": know_all, "the model": know_the_model, "another model": know_another}


# Casts live longest where every write is known; for less, four ways represent the others.
WAYS_AND_KNOWN = [
    *((way, "model and optimizer") for way in WRITES),
    *(
        (way, known)
        for way in ("in place", "kept numpy", "flat buffer", "a library's, kernel")
        for known in list(KNOWN)[1:]
    ),
]


@pytest.mark.parametrize("way, known", WAYS_AND_KNOWN)
def test_write_between_two_forwards_is_seen(way, known):
    def run(level):
        model = make_model()
        write = WRITES[way](list(model.parameters()))
        session = KNOWN[known](level, model)
        x, losses = torch.randn(16, 10), []
        for factor in (1.5, 0.5, 2.0, 1.25):
            with casts(level):
                losses.append(model(x).float().square().mean())
            write(factor)
        del session
        return flat(losses)

    assert_as_close_as_autocast(run)


# -- several forwards and one backward, and one forward that runs twice


def siamese(model, forward):
    pairs = 1 + 0.3 * torch.randn(200, 2, 2, 10)
    return sum((forward(left) * forward(right)).mean() for left, right in pairs)


def recomputed(use_reentrant):
    def loss(model, forward):
        parts = (1 + 0.3 * torch.randn(300, 10)).requires_grad_()
        return sum(checkpoint(forward, part, use_reentrant=use_reentrant).square().sum() for part in parts.split(1))

    return loss


def burned_in_chunks(model, forward):
    """Each chunk begins at a state that a forward in no-grad mode computed with the same weights."""
    loss, before, state = 0.0, None, None
    # torch.autocast asks oneDNN for an LSTM in bfloat16 also where it has none, and raises.
    with torch.backends.mkldnn.flags(enabled=torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        for chunk in 1 + 0.1 * torch.randn(200, 2, 1, 4):
            with torch.no_grad():
                before = forward(chunk, before)[1]
            state = forward(chunk, before if state is None else state)[1]
            loss = loss + (state[0] - before[0]).add(1).square().mean()
    return loss


# A model, and the loss that several forwards of it make.
SEVERAL_FORWARDS = {
    "siamese": (make_model, siamese),
    "recomputed": (make_model, recomputed(use_reentrant=False)),
    "recomputed, reentrant": (make_model, recomputed(use_reentrant=True)),
    "chunks, burned in": (lambda: nn.LSTM(4, 8), burned_in_chunks),
}


def floats(outputs):
    return torch.utils._pytree.tree_map(torch.Tensor.float, outputs)


@pytest.mark.parametrize(
    "loop, known",
    [
        *((loop, "model and optimizer") for loop in SEVERAL_FORWARDS),
        ("siamese", "the model"),
        ("siamese", "another model"),
    ],
)
def test_gradients_of_several_forwards_add_up_in_float32(loop, known):
    def run(level):
        torch.manual_seed(2)
        make, loss_of = SEVERAL_FORWARDS[loop]
        model = make()
        session = KNOWN[known](level, model)

        def forward(*args):
            with casts(level):
                return floats(model(*args))

        torch.manual_seed(3)
        loss_of(model, forward).backward()
        del session
        return gradients(model)

    assert_as_close_as_autocast(run)


class Trainer(nn.Module):
    """A model with a method that trains it: one call, in which the weights change."""

    def __init__(self, level):
        super().__init__()
        self.body, self.level = make_model(), level

    def forward(self, x):
        return self.body(x)

    def fit(self, optimizer, x):
        for _ in range(20):
            with casts(self.level):
                loss = (self(x) + self(x.flip(0))).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def trained_by_a_method(make):
    def run(level):
        model = Trainer(level)
        optimizer = make(model.parameters())
        begin(level, model)
        model.fit(optimizer, torch.randn(32, 10))
        return flat(model.parameters())

    return run


def averages_swapped_in(level):
    """Evaluation runs on averaged weights, whose memory replaces the weights' memory for that time."""
    model = make_model()
    optimizer, x, seen = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True), torch.randn(32, 10), []
    begin(level, model, optimizer)
    averages = [param.detach().clone() for param in model.parameters()]
    for _ in range(6):
        with casts(level):
            loss = (model(x).float() - x[:, :1]).square().mean()
        backward(level, loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        trained = [param.data for param in model.parameters()]
        for average, param in zip(averages, model.parameters()):
            average.lerp_(param.detach(), 0.3)
            param.data = average
        with casts(level):
            seen.append(model(x).float())
        for param, values in zip(model.parameters(), trained):
            param.data = values
    return flat(seen)


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = make_model()

    def forward(self, x, fails):
        output = self.body(x)
        if fails:
            raise KeyError
        return output


def calls_that_raise(level):
    model, x, seen = Failing(), torch.randn(8, 10), []
    aliases = [param.data for param in model.parameters()]
    begin(level, model)
    for index in range(6):
        with casts(level), contextlib.suppress(KeyError):
            seen.append(model(x, fails=index % 2 == 0).float())
        for alias in aliases:
            alias.mul_(1.5)
    return flat(seen)


def written_before_backward(level, write_of):
    """As in float32, a recomputation uses the weights of its own time, and a graph that waits uses the weights of its forward."""
    torch.manual_seed(4)
    model, x, waiting, values = nn.Linear(10, 3), torch.randn(8, 10), [], []  # whose weight is not saved for backward
    write, parameters = WRITES[write_of](list(model.parameters())), list(model.parameters())
    know_the_model(level, model)

    def loss():
        return model(x).float().square().mean()

    with casts(level):
        kept = loss()
    for factor in (1.5, 0.5, 2.0):
        with casts(level):
            waiting.append(loss())
            recomputed = checkpoint(lambda x: model(x).float().tanh(), x, use_reentrant=False).square().mean()
        write(factor)
        with casts(level), torch.inference_mode():
            values.append(loss().clone())
        with casts(level):
            both = kept + loss()
        for result, retains in ((recomputed, False), (waiting.pop(0), False), (both, True)):
            values += [result, *torch.autograd.grad(result, parameters, retain_graph=retains)]
    return flat(values)


LOOPS = {
    **{
        f"{way}, before backward": functools.partial(written_before_backward, write_of=way)
        for way in ("in place", "kept numpy", "AdamW fused")
    },
    "averages swapped in": averages_swapped_in,
    "calls that raise": calls_that_raise,
    "a method, SGD fused": trained_by_a_method(lambda params: torch.optim.SGD(params, lr=0.1, fused=True)),
    "a method, AdamW fused": trained_by_a_method(lambda params: torch.optim.AdamW(params, lr=0.02, fused=True)),
    "a method, a library's": trained_by_a_method(lambda params: ByNumpy(list(params), lr=0.1)),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_loop_with_several_forwards_is_as_close_as_under_autocast(loop):
    assert_as_close_as_autocast(LOOPS[loop])


# Writes that are seen where casts outlive a forward: inside of a method of the model, and between delayed micro-batches.
SEEN_INSIDE = [way for way in WRITES if not way.startswith(("kept", "memory", "dlpack", "storage", "shared", "flat"))]


def search(model, write, x, after=lambda loss: None):
    losses = []
    for factor in (1.5, 0.5, 2.0):
        with casts(model.level):
            losses.append(model(x).float().square().mean())
        after(losses[-1])
        write(factor)
    return flat(losses)


class Writer(nn.Module):
    def __init__(self, level):
        super().__init__()
        self.body, self.level = make_model(), level

    def forward(self, x):
        return self.body(x)

    def search(self, write, x):
        return search(self, write, x)


def inside_of_a_method(model, write, x):
    begin(model.level, model)
    return model.search(write, x)


def between_delayed_micro_batches(model, write, x):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    begin(model.level, model, optimizer)
    flags = {"delay_unscale": True} if model.level == "O1" else {}
    return search(model, write, x, lambda loss: backward(model.level, loss, optimizer, **flags))


def inside_of_keep_casts(model, write, x):
    begin(model.level, model)
    with ampkit.keep_casts(model):
        return search(model, write, x)


@pytest.mark.parametrize("place", [inside_of_a_method, between_delayed_micro_batches, inside_of_keep_casts])
@pytest.mark.parametrize("way", SEEN_INSIDE)
def test_write_where_casts_outlive_a_forward_is_seen(way, place):
    def run(level):
        model = Writer(level)
        write = WRITES[way](list(model.parameters()))
        return place(model, write, torch.randn(16, 10))

    assert_as_close_as_autocast(run)


def test_512_uses_of_a_weight_in_one_forward_add_up_in_float32():
    """In bfloat16 a sum of equal terms stops at 256 of them: 512 would be half."""

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 4))

        def forward(self, x):
            return sum(x @ self.weight for _ in range(512))

    model = Residual()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    begin("O1", model, optimizer)
    backward("O1", model(torch.ones(1, 4)).float().sum(), optimizer)
    assert torch.equal(model.weight.grad, torch.full((4, 4), 512.0))


# -- keep_casts: a loop by hand that writes no weight


def casts_made():
    return ampkit.current_session().casting.caches.of(torch.bfloat16).casts_made


@pytest.mark.compiled("wrappers")
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_keep_casts_casts_each_weight_once(mode):
    model, x = make_model(), torch.randn(2, 10)
    begin("O1", model)
    with mode(), ampkit.keep_casts(model):
        for _ in range(5):
            model(x)
            model[0](x)  # a part
    assert casts_made() == 4
    with mode():
        model(x)
    assert casts_made() == 8


def test_gradients_of_calls_in_keep_casts_add_up_in_float32():
    model = nn.Linear(4, 4, bias=False)
    begin("O1", model)
    with ampkit.keep_casts(model):
        loss = sum(model(torch.ones(1, 4)).float().sum() for _ in range(512))
    loss.backward()
    assert torch.equal(model.weight.grad, torch.full((4, 4), 512.0))


@pytest.mark.compiled("wrappers")
def test_keep_casts_keeps_those_of_its_models_alone():
    model, beside, x = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), torch.eye(2)
    begin("O1", model)
    data = beside.weight.data
    with ampkit.keep_casts([model]):
        for value in (1.0, 2.0):
            data.fill_(value)
            model(x)
            assert torch.equal(beside(x).float(), torch.full((2, 2), value))
    assert casts_made() == 3


@pytest.mark.compiled("wrappers")
def test_keep_casts_nests_and_ends_with_an_exception():
    first, second, x = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), torch.eye(2)
    begin("O1", [first, second])
    with pytest.raises(KeyError), ampkit.keep_casts(first):
        with ampkit.keep_casts((second,)):
            first(x), second(x), first(x), second(x)
        first(x), second(x), second(x)
        raise KeyError
    assert casts_made() == 5  # the inner block's have ended with it
    assert ampkit.current_session().casting.caches.pairs() == {}


def test_another_thread_keeps_no_casts():
    model, x = nn.Linear(2, 2, bias=False), torch.eye(2)
    begin("O1", model)
    data, results = model.weight.data, []

    def evaluate():
        for value in (1.0, 2.0):
            data.fill_(value)
            results.append(model(x).float().sum().item())

    with ampkit.keep_casts(model):
        thread = threading.Thread(target=evaluate)
        thread.start()
        thread.join()
    assert results == [4.0, 8.0]


def test_keep_casts_does_nothing_without_a_session():
    model = make_model()
    with ampkit.keep_casts(model):
        assert model(torch.ones(1, 10)).dtype is torch.float32


@pytest.mark.parametrize("argument", [None, "model", torch.ones(1), [1]])
def test_keep_casts_of_anything_but_modules_is_refused(argument):
    if argument is None:
        argument = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(AttributeError, match="has no attribute 'parameters'"):
        ampkit.keep_casts(argument)
