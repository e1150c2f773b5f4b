"""No cast outlives its weight's value: loops that write weights between forwards, and loops with several forwards.

Each row computes something in float32, under torch.autocast with a region for each forward, and at O1. O1 may be twice as far from
float32 as torch.autocast is. Loops that write no weight between forwards are scripts of tests/everyday.
"""

import functools
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from everyday import Run, flat
from helpers import backward, initialize_quietly, sgd
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampkit

pytestmark = pytest.mark.switch


def distance(a, b):
    return ((a - b).norm() / b.norm()).item()


def assert_as_close_as_autocast(script):
    def at(level):
        torch.manual_seed(1)
        results = script(Run(level))
        ampkit.close()
        return results

    exact, cast, ours = map(at, ("fp32", "autocast", "O1"))
    assert distance(ours, exact) <= 2 * distance(cast, exact) + 1e-3


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

        @torch.no_grad()
        def write(factor):
            for one in aliases:
                one *= factor

        return write

    return prepare


def numpy_of(param):
    return param.detach().numpy()


def flat_buffer(params):
    buffer, begin = flat(params).float(), 0
    for param in params:
        param.data = buffer[begin : begin + param.numel()].view_as(param)
        begin += param.numel()
    return buffer.mul_


def loading(params):
    holder = nn.ParameterList(params)

    def write(factor):
        holder.load_state_dict({name: param.detach() * factor for name, param in holder.named_parameters()})

    return write


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
    "in place": each(torch.no_grad()(lambda param, factor: param.mul_(factor))),
    "data in place": each(lambda param, factor: param.data.mul_(factor)),
    "data assigned": each(lambda param, factor: setattr(param, "data", param.detach() * factor)),
    "loading": loading,
    "kept data": kept(lambda param: param.data),
    "kept detached": kept(lambda param: param.detach()),
    "numpy": each(lambda param, factor: np.multiply(numpy_of(param), factor, out=numpy_of(param))),
    "fresh dlpack": each(lambda param, factor: torch.from_dlpack(param.detach()).mul_(factor)),
    "kept numpy": kept(numpy_of),
    "memoryview": kept(lambda param: np.frombuffer(memoryview(numpy_of(param)).cast("B"), np.float32)),
    "dlpack": kept(lambda param: torch.from_dlpack(param.detach())),
    "storage": kept(lambda param: torch.tensor([]).set_(param.untyped_storage())),
    "shared memory": kept(lambda param: param.data.share_memory_()),
    "flat buffer": flat_buffer,
    "SGD": stepped(lambda params: torch.optim.SGD(params, lr=1.0)),
    "SGD fused": stepped(lambda params: torch.optim.SGD(params, lr=1.0, fused=True)),
    "AdamW foreach": stepped(lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True)),
    "AdamW fused": stepped(lambda params: torch.optim.AdamW(params, lr=0.1, fused=True)),
    "a library's, kernel": stepped(lambda params: ByNumpy(params, lr=1.0)),
}


def begin(run, model, known="the model"):
    """Initialize what is ``known`` to ampkit; a session ends with what this returns."""
    model = nn.Linear(2, 2) if known == "another model" else model
    run.begin(model, None if known == "the model" else torch.optim.SGD(model.parameters(), lr=0.1), loss_scale=1.0)
    return model


# Casts live longest where every write is known; for less, four ways represent the others.
WAYS_AND_KNOWN = [
    *((way, "model and optimizer") for way in WRITES),
    *(
        (way, known)
        for way in ("in place", "kept numpy", "flat buffer", "a library's, kernel")
        for known in ("the model", "another model")
    ),
]


@pytest.mark.parametrize("way, known", WAYS_AND_KNOWN)
def test_write_between_two_forwards_is_seen(way, known):
    def script(run):
        model = make_model()
        write = WRITES[way](list(model.parameters()))
        session = begin(run, model, known)
        x, losses = torch.randn(16, 10), []
        for factor in (1.5, 0.5, 2.0, 1.25):
            with run.casts():
                losses.append(model(x).float().square().mean())
            write(factor)
        del session
        return flat(losses)

    assert_as_close_as_autocast(script)


# -- several forwards and one backward


def written_before_backward(run, write_of):
    """As in float32, a recomputation uses the weights of its own time, and a graph that waits uses the weights of its forward."""
    torch.manual_seed(4)
    model, x, waiting, values = nn.Linear(10, 3), torch.randn(8, 10), [], []  # whose weight is not saved for backward
    write, parameters = WRITES[write_of](list(model.parameters())), list(model.parameters())
    begin(run, model)

    def loss():
        return model(x).float().square().mean()

    with run.casts():
        kept = loss()
    for factor in (1.5, 0.5, 2.0):
        with run.casts():
            waiting.append(loss())
            recomputed = checkpoint(lambda x: model(x).float().tanh(), x, use_reentrant=False).square().mean()
        write(factor)
        with run.casts(), torch.inference_mode():
            values.append(loss().clone())
        with run.casts():
            both = kept + loss()
        for result, retains in ((recomputed, False), (waiting.pop(0), False), (both, True)):
            values += [result, *torch.autograd.grad(result, parameters, retain_graph=retains)]
    return flat(values)


@pytest.mark.parametrize("way", ["in place", "kept numpy", "AdamW fused"])
def test_weights_written_before_backward_are_as_close_as_under_autocast(way):
    assert_as_close_as_autocast(functools.partial(written_before_backward, write_of=way))


@pytest.mark.compiled("wrappers")
def test_a_call_that_raises_ends_and_keeps_no_cast():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(3, 3))
    initialized(model)
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 2))
    assert casts_made() >= 2 and ampkit.current_session().casting.caches.pairs() == {}


# Writes that are seen where casts outlive a forward: inside of a method of the model, and between delayed micro-batches.
SEEN_INSIDE = [way for way in WRITES if not way.startswith(("kept", "memory", "dlpack", "storage", "shared", "flat"))]


def search(model, run, write, after=lambda loss: None):
    x, losses = torch.randn(16, 10), []
    for factor in (1.5, 0.5, 2.0):
        with run.casts():
            losses.append(model(x).float().square().mean())
        after(losses[-1])
        write(factor)
    return flat(losses)


class Writer(nn.Sequential):
    """A model with a method that runs it: one call, in which the weights change."""

    def search(self, run, write):
        return search(self, run, write)


def inside_of_a_method(run, model, write):
    begin(run, model)
    return model.search(run, write)


def between_delayed_micro_batches(run, model, write):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.begin(model, optimizer, loss_scale=1.0)
    return search(model, run, write, lambda loss: run.backward(loss, optimizer, delay_unscale=True))


def inside_of_keep_casts(run, model, write):
    begin(run, model)
    with ampkit.keep_casts(model):
        return search(model, run, write)


@pytest.mark.parametrize("place", [inside_of_a_method, between_delayed_micro_batches, inside_of_keep_casts])
@pytest.mark.parametrize("way", SEEN_INSIDE)
def test_write_where_casts_outlive_a_forward_is_seen(way, place):
    def script(run):
        model = Writer(make_model())
        return place(run, model, WRITES[way](list(model.parameters())))

    assert_as_close_as_autocast(script)


# -- keep_casts: a loop by hand that writes no weight


def initialized(models):
    ampkit.initialize(models, opt_level="O1", verbosity=0)


def casts_made():
    return ampkit.current_session().casting.caches.of(torch.bfloat16).casts_made


@pytest.mark.compiled("wrappers")
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_keep_casts_casts_each_weight_once(mode):
    model, x = make_model(), torch.randn(2, 10)
    initialized(model)
    with mode(), ampkit.keep_casts(model):
        for _ in range(5):
            model(x)
            model[0](x)  # a part
    assert casts_made() == 4
    with mode():
        model(x)
    assert casts_made() == 8


class Residual(nn.Linear):
    def forward(self, x, uses=1):
        return sum(super(Residual, self).forward(x) for _ in range(uses))


def in_calls(model, x):
    return sum(model(x).float() for _ in range(512))


def in_keep_casts(model, x):
    with ampkit.keep_casts(model):
        return in_calls(model, x)


USES = {
    "one forward": lambda model, x: model(x, uses=512),
    "calls": in_calls,
    "calls in keep_casts": in_keep_casts,
    "recomputed": lambda model, x: in_calls(functools.partial(checkpoint, model, use_reentrant=False), x),
    "recomputed, reentrant": lambda model, x: in_calls(functools.partial(checkpoint, model, use_reentrant=True), x),
}


@pytest.mark.parametrize("how", USES)
def test_512_uses_of_a_weight_add_up_in_float32(how):
    """In bfloat16 a sum of equal terms stops at 256 of them: 512 would be half. Uses in one call may share a node, which rounds."""
    term = 1.0 if how == "one forward" else 1 + 2**-7  # of which bfloat16 has no sum of three
    model = Residual(4, 4, bias=False)
    initialized(model)
    USES[how](model, torch.full((1, 4), term, requires_grad=True)).float().sum().backward()
    assert torch.equal(model.weight.grad, torch.full((4, 4), 512 * term))


@pytest.mark.compiled("wrappers")
@pytest.mark.parametrize("lives", ["in keep_casts", "to the step"])
def test_two_calls_with_one_cast_add_up_in_float32(lives):
    """In bfloat16 256 + 1 is 256: what the gradient would be if both calls of a loss used the cast's node in the graph."""
    model, optimizer = initialize_quietly(nn.Linear(1, 1, bias=False), sgd, "O1")
    with ampkit.keep_casts(model) if lives == "in keep_casts" else nullcontext():
        if lives == "to the step":
            backward(model(torch.zeros(1, 1)).sum(), optimizer, delay_unscale=True)
        loss = sum(model(torch.full((1, 1), x)).float().sum() for x in (256.0, 1.0))
    backward(loss, optimizer)
    assert casts_made() == 1 and model.weight.grad.item() == 257.0


@pytest.mark.compiled("wrappers")
def test_keep_casts_keeps_those_of_its_models_in_its_thread():
    model, beside, x = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), torch.eye(2)
    initialized(model)
    data, of_beside = model.weight.data, beside.weight.data
    with ampkit.keep_casts([model]), ThreadPoolExecutor(1) as pool:
        for value in (1.0, 2.0):
            of_beside.fill_(value)
            model(x)
            assert torch.equal(beside(x).float(), torch.full((2, 2), value))
        assert casts_made() == 3
        for value in (1.0, 2.0):
            data.fill_(value)
            assert pool.submit(model, x).result().float().sum().item() == 4 * value


@pytest.mark.compiled("wrappers")
def test_keep_casts_nests_and_ends_with_an_exception():
    first, second, x = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), torch.eye(2)
    initialized([first, second])
    with pytest.raises(KeyError), ampkit.keep_casts(first):
        with ampkit.keep_casts((second,)):
            first(x), second(x), first(x), second(x)
        first(x), second(x), second(x)
        raise KeyError
    assert casts_made() == 5  # the inner block's have ended with it
    assert ampkit.current_session().casting.caches.pairs() == {}


def test_keep_casts_does_nothing_without_a_session_and_refuses_anything_but_modules():
    model = make_model()
    with ampkit.keep_casts(model):
        assert model(torch.ones(1, 10)).dtype is torch.float32
    for argument in (torch.optim.SGD(model.parameters()), "model", torch.ones(1), [1]):
        with pytest.raises(AttributeError, match="has no attribute 'parameters'"):
            ampkit.keep_casts(argument)
