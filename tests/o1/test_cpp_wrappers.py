"""O1's wrappers in C++, which behave as the wrappers in Python."""

import gc
import sys
import tracemalloc
import weakref

import pytest
import torch
import torch.nn.functional as F
from helpers import Operators, o1
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

pytestmark = pytest.mark.compiled("wrappers")

LOW = torch.bfloat16


@pytest.fixture(params=["C++", "Python"])
def casting(request):
    with o1(in_python=request.param == "Python") as engine:
        yield engine


def a():
    return torch.linspace(-1, 1, 9).reshape(3, 3)


@pytest.fixture
def w():
    return nn.Parameter(torch.linspace(0, 1, 9).reshape(3, 3))


def test_bound_and_unbound_methods_cast(w):
    with o1():
        bound = a().mm
        assert bound(w).dtype is torch.Tensor.mm(a(), w).dtype is LOW
        assert torch.Tensor.__matmul__(a(), w).dtype is LOW
        with pytest.raises(TypeError):
            torch.Tensor.mm(3, w)
        assert torch.Tensor.__matmul__(a(), "text") is NotImplemented


def test_kept_wrapper_is_inert_between_engines_and_serves_the_next():
    with o1():
        mm, method = torch.mm, torch.Tensor.mm
    assert mm(a(), a()).dtype is method(a(), a()).dtype is torch.float32
    with o1(torch.float16):
        assert mm(a(), a()).dtype is method(a(), a()).dtype is torch.float16
    assert mm(a(), a()).dtype is torch.float32


def test_engine_that_closes_in_the_midst_of_a_call_is_survived(w):
    class Closing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            casting.close()
            gc.collect()
            return super().__torch_function__(func, types, args, kwargs or {})

    with o1() as casting:
        mm = torch.mm
        result = mm(a().as_subclass(Closing), w)
    assert result.shape == (3, 3)
    assert mm(a(), a()).dtype is torch.float32


CALLS = {
    "keywords": lambda x, w: F.linear(input=x, weight=w, bias=w[0]),
    "out": lambda x, w: torch.mm(x, w, out=torch.empty(3, 3)),
    "container": lambda x, w: torch.linalg.multi_dot([x, w, x]),
    "sizes": lambda x, w: F.conv1d(x[None], w[None], stride=[1], padding=(1,)),
    "dtype": lambda x, w: torch.softmax(x.bfloat16(), 0, dtype=torch.float64),
    "float32 function": lambda x, w: torch.exp(x.half()),
    "promotion": lambda x, w: torch.dot(x[0], w[0].bfloat16()),
    "no promotion": lambda x, w: torch.dot(x[0].bfloat16(), w[0].bfloat16()),
    "index put": lambda x, w: x.bfloat16().index_put_((torch.tensor([0]),), w[:1].detach()),
    "setitem": lambda x, w: x.__setitem__(slice(0, 1), w[:1].detach().bfloat16()) or x,
    "setitem ...": lambda x, w: x.__setitem__(..., 2) or x,
    "float64": lambda x, w: torch.mm(x.double(), w.double()),
    "mixed with float64 after a cast": lambda x, w: torch.mm(x, w.double()),
    "integers": lambda x, w: torch.mm(x.long(), x.long()),
    "requires_grad": lambda x, w: torch.addmm(w, x, w, beta=2),
    "many arguments": lambda x, w: torch.einsum("ij," * 29 + "ij->ij", *[x] * 30),
    "wrong number": lambda x, w: torch.mm(x),
    "wrong keyword": lambda x, w: torch.mm(x, nothing=w),
    "wrong shape": lambda x, w: x @ w[:2],
    "refused": lambda x, w: x.half().exp_(),
    "banned": lambda x, w: F.binary_cross_entropy(x.bfloat16().abs(), x.abs()),
    "sparse": lambda x, w: torch.mm(x.to_sparse(), w),
    "meta": lambda x, w: torch.mm(x.to("meta"), w.to("meta")),
}


def outcome(call, **settings):
    w = nn.Parameter(torch.linspace(0, 1, 9).reshape(3, 3))
    with o1(torch.float16, **settings) as casting:
        try:
            result = call(a(), w)
        except Exception as error:
            return type(error), str(error)
        if result.grad_fn is not None and not result.is_meta:
            result.float().sum().backward()
        made = casting.caches.of(torch.float16).casts_made, len(casting.caches.pairs())
    value = None if result.is_meta else result.detach().to_dense()
    return result.dtype, value, w.grad, made


@pytest.mark.parametrize("name", CALLS)
def test_call_has_the_same_outcome_in_both_languages(name):
    fast, slow = outcome(CALLS[name]), outcome(CALLS[name], in_python=True)
    assert len(fast) == len(slow)
    for ours, theirs in zip(fast, slow):
        assert torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs


def test_dispatch_mode_sees_every_cast(casting, w):
    with casting.caches.call():
        torch.mm(a(), w)
        with Operators() as seen, FlopCounterMode(display=False) as flops:
            torch.mm(a(), w)
    # A cast of before would be missing from what is recorded.
    assert seen.names.count("_to_copy") == 2 and flops.get_total_flops() == 2 * 27


def test_make_fx_with_real_tensors_contains_the_cast_of_a_cached_weight(casting, w):
    from torch.fx.experimental.proxy_tensor import make_fx

    with casting.caches.call():
        torch.mm(a(), w)
        graph = make_fx(lambda x, weight: torch.mm(x, weight))(a(), w)
    constants = [node for node in graph.graph.nodes if node.op == "get_attr"]
    assert not constants
    assert graph(a(), 2 * w.detach()).equal(torch.mm(a(), 2 * w.detach()))


def test_device_type_added_later_counts(casting):
    casting.cast_on({"cuda"})
    assert torch.mm(a(), a()).dtype is torch.float32
    casting.cast_on({"cpu", "cuda"})
    assert torch.mm(a(), a()).dtype is LOW


# -- references


def failing_product(x, w, i, k):
    with pytest.raises(RuntimeError):
        torch.mm(x, w[:2])


LOOPS = {
    "cached weight": lambda x, w, i, k: torch.mm(x, w),
    "method": lambda x, w, i, k: x @ w,
    "keywords": lambda x, w, i, k: F.linear(x, weight=w, bias=None),
    "convolution": lambda x, w, i, k: F.conv2d(i, k),
    "nothing to cast": lambda x, w, i, k: torch.exp(x),
    "to float32": lambda x, w, i, k: torch.exp(x.bfloat16()),
    "python function": lambda x, w, i, k: F.softmax(x.bfloat16(), -1),
    "slow path": lambda x, w, i, k: torch.mm(x, w, out=torch.empty(3, 3, dtype=LOW)) if not w.requires_grad else None,
    "error": failing_product,
    "shared activation": lambda x, w, i, k: (lambda h: (F.linear(h, w), F.linear(h, w)))(x * w),
}


@pytest.mark.parametrize("name", LOOPS)
def test_calls_leave_no_references_behind(name):
    call, args = LOOPS[name], (a(), nn.Parameter(a()), torch.rand(1, 2, 3, 3), nn.Parameter(torch.rand(2, 2, 1, 1)))
    with o1():
        for _ in range(3):
            call(*args)
        wrappers = torch.mm, F.linear, torch.Tensor.mm, torch.exp, F.conv2d
        gc.collect()
        counted = [*args, *wrappers, LOW, None, True]
        before = [sys.getrefcount(thing) for thing in counted]
        tracemalloc.start()
        try:
            start, _ = tracemalloc.get_traced_memory()
            for _ in range(500):
                call(*args)
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - start
        finally:
            tracemalloc.stop()
        after = [sys.getrefcount(thing) for thing in counted]
    # The interpreter's own caches change a few counts; a leak would be 500.
    assert all(abs(x - y) < 25 for x, y in zip(before, after)), list(zip(before, after))
    assert grown < 16 * 1024


def test_closed_engine_is_freed():
    with o1() as casting, casting.caches.call():
        nn.Linear(2, 2)(torch.rand(1, 2))
        x = torch.rand(2, 2, requires_grad=True) * 2
        kept = torch.mm(x, x)
    died = weakref.ref(casting)
    del casting
    gc.collect()
    assert died() is None
    kept.sum().backward()


@pytest.mark.skipif(
    not hasattr(torch.autograd.graph, "node_creation_hook"), reason="this torch has no node_creation_hook"
)
def test_hook_on_nodes_sees_each_cast_and_each_further_use_of_one(casting, w):
    # Two linear layers at one activation: two weights are cast, and the activation once for each.
    b, seen = nn.Parameter(w.detach().clone()), []
    x = a().requires_grad_() * 1
    with torch.autograd.graph.node_creation_hook(lambda node: seen.append(node.name())):
        F.linear(x, w), F.linear(x, b)
    assert seen.count("ToCopyBackward0") + seen.count("_AnotherUseBackward") == 4
