"""Casts while something else happens: other threads, the garbage collector, tensors on their way out."""

import gc
import weakref

import pytest
import torch
from helpers import o1
from torch import nn

from ampkit.casting import engine as engine_module

pytestmark = pytest.mark.compiled("wrappers")

LOW = torch.bfloat16


@pytest.fixture(params=["C++", "Python"])
def casting(request):
    with o1(in_python=request.param == "Python") as engine, engine.caches.call():
        yield engine


@pytest.fixture
def store(casting):
    return casting.caches.of(LOW)


def low(*shape, value=1.0):
    return torch.full(shape, value, dtype=LOW)


MEANWHILE = {
    "another storage": lambda weight, casting: setattr(weight, "data", torch.ones_like(weight)),
    "a write through data": lambda weight, casting: weight.data.fill_(1),
    "a write in place": lambda weight, casting: weight.detach().add_(1),
    "requires_grad": lambda weight, casting: weight.requires_grad_(not weight.requires_grad),
    "a drop": lambda weight, casting: casting.caches.drop(),
}


@pytest.mark.parametrize("happens", MEANWHILE)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_cast_of_what_the_weight_was_is_not_kept(casting, happens, requires_grad):
    weight, cache = nn.Parameter(torch.zeros(2, 2), requires_grad), casting.caches.of(LOW)

    def convert(tensor):
        cast = tensor.to(LOW)
        MEANWHILE[happens](weight, casting)
        return cast

    cache.cast(weight, convert)
    assert len(cache.pairs()) == 0
    cache.cast(weight, lambda tensor: tensor.to(LOW))
    assert len(cache.pairs()) == 1


def test_cast_that_is_dropped_may_run_code_that_comes_back(casting, store):
    weight = nn.Parameter(torch.zeros(2), requires_grad=False)

    class Again:
        def __del__(self):
            store.cast(weight, lambda _: low(2, value=3.0))

    def convert(_):
        cast = low(2)
        cast.again = Again()
        return cast

    store.cast(weight, convert)
    if not hasattr(store.pairs()[0][1], "again"):
        store.pairs()[0][1].again = Again()
    store.drop()
    assert store.cast(weight, convert).tolist() == [3.0, 3.0]


def test_pairs_may_collect_garbage(store):
    gc.disable()
    thresholds = gc.get_threshold()
    try:
        for _ in range(300):
            weight = nn.Parameter(torch.zeros(2), requires_grad=False)
            store.cast(weight, lambda _: low(2))
            weight.itself = weight  # only the collector frees it
        del weight
        kept = [nn.Parameter(torch.zeros(2)) for _ in range(300)]
        for weight in kept:
            store.cast(weight, lambda _: low(2))
        pairs_of_ints = [(i, i) for i in range(3000)]  # no tuples left in CPython's store of free ones
        assert len(store.pairs()) == 600
        gc.set_threshold(1)
        gc.enable()
        pairs = store.pairs()
    finally:
        gc.enable()
        gc.set_threshold(*thresholds)
    assert len(pairs_of_ints) == 3000
    assert {id(weight) for weight in kept} <= {id(weight) for weight, _ in pairs}
    assert all(cast.tolist() == [1.0, 1.0] for _, cast in pairs)


@pytest.mark.parametrize("use", ["mm", "pairs"])
def test_weight_on_its_way_out_is_not_brought_back(casting, store, use):
    """CPython puts off the freeing of deeply nested objects, some fifty levels down: a weight without references waits, weak
    ones still intact.
    """
    other, x, calls = nn.Parameter(torch.rand(4, 4)), torch.rand(2, 4), []

    def meanwhile(_):
        calls.append(torch.mm(x, other) if use == "mm" else store.pairs())

    for depth in range(40, 60):
        weight = nn.Parameter(torch.rand(4, 4))
        torch.mm(x, weight)
        torch.mm(x, other)
        casting.caches.drop()
        if use == "pairs":
            store.cast(weight, lambda _: low(4, 4))

        def function():
            pass

        watch, nest = weakref.ref(function, meanwhile), [function, weight]
        for _ in range(depth):
            nest = [nest]
        del function, weight
        del nest
        assert watch() is None
    assert len(calls) == 20


def test_traces_that_overlap_leave_the_cache_as_it_was(casting):
    caches = casting.caches.of(LOW), casting.caches.of(torch.float16)
    with casting.caches.bypassed():
        second = casting.caches.bypassed()
        second.__enter__()
    assert all(cache.bypassed for cache in caches), "the second trace still runs"
    second.__exit__(None, None, None)
    assert not any(cache.bypassed for cache in caches)


def test_what_another_thread_calls_while_torch_is_patched_is_not_cast(monkeypatch, in_python):
    seen = []

    def patch(patches, engine):
        with torch.autocast("cpu"):
            seen.append(torch.softmax(torch.ones(2, dtype=LOW), 0).dtype)  # torch has no row for it, O1 has

    monkeypatch.setattr(engine_module, "patch_torch", patch)
    with o1(in_python=in_python):
        seen.append(torch.softmax(torch.ones(2, dtype=LOW), 0).dtype)
    assert seen == [LOW, torch.float32]


def test_store_survives_the_loss_of_its_capture_check():
    with o1() as casting:
        del casting.caches.of(LOW).capturing
        assert torch.mm(torch.eye(2), nn.Parameter(torch.eye(2))).dtype is LOW
