"""The weight-cast cache: one cast per weight, and never a stale one."""

import gc
import weakref

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from helpers import backward, casts_made, in_threads, initialize_quietly, o1, sgd
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import ampkit
from ampkit.casting import engine as engine_module
from ampkit.optimizers import FusedSGD

pytestmark = pytest.mark.compiled("wrappers")  # without them nothing is kept


@pytest.fixture(params=["C++", "Python"])
def casting(request):
    """An engine inside a call of a model: outside, nothing is cached."""
    with o1(in_python=request.param == "Python") as engine, engine.caches.call():
        yield engine


@pytest.fixture
def casting_in_cpp():
    """The engine whose casts of activations are shared: only the store in C++ remembers them."""
    with o1() as engine, engine.caches.call():
        yield engine


def store_of(casting):
    return casting.caches.of(torch.bfloat16)


def kept(casting):
    return len(casting.caches.pairs())


def product(weight):
    """The weight as a whitelisted function reads it now, in float32."""
    return torch.mm(torch.eye(weight.shape[0]), weight).detach().float()


def by_averaging(p):
    """Swap in an EMA: its storage replaces the weight's, which the caller keeps to swap it back."""
    p.ema, p.data = p.data, p.detach().clone().mul_(2)


# Other writes: tests/o1/test_cast_lifetimes.py.
EDITS = {
    "in place": lambda p: p.mul_(2),
    "by data without reading it": lambda p: setattr(p, "data", p.detach() * 2),
    "by averaging": by_averaging,
    # As cuDNN's flatten_parameters does it, past the property with which O1 replaces Tensor.data.
    "in C++": lambda p: torch._C.TensorBase.data.__set__(p, p.detach() * 2),
    "to another part of its memory": lambda p: torch._C.TensorBase.data.__set__(
        p, p.detach().as_strided((2, 2), (2, 1), 4)
    ),
}


@pytest.mark.parametrize("way", EDITS)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_edited_weight_is_cast_anew(casting, way, mode):
    p = nn.Parameter(torch.tensor([1.0] * 4 + [2.0] * 4)[:4].view(2, 2))
    with casting.forward_scope():
        with mode():
            assert torch.equal(product(p), torch.ones(2, 2))
        with torch.no_grad():
            EDITS[way](p)
        with mode():
            assert torch.equal(product(p), torch.full((2, 2), 2.0))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_weight_that_was_cast_without_a_gradient_trains_afterwards(casting, mode):
    """Gradients are off at first, or the weight is frozen."""
    p = nn.Parameter(torch.ones(2, 2), requires_grad=mode is not torch.enable_grad)
    with casting.forward_scope():
        with mode():
            assert not torch.mm(p, p).requires_grad
        p.requires_grad_(True)
        torch.mm(torch.eye(2), p).sum().backward()
    assert torch.equal(p.grad, torch.ones(2, 2))


def selected():
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


@pytest.mark.parametrize("settings", [{"use_reentrant": False}, {"use_reentrant": False, "context_fn": selected}])
def test_checkpointed_segment_gets_the_gradients_of_a_plain_one(casting, settings):
    q, k, v = layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def segment(x):
        return (q(x) * k(x) + v(x)).float()  # the three share the cast of an activation

    def gradients(run):
        leaf = torch.ones(2, 3, requires_grad=True)
        layers.zero_grad()
        run(leaf * 1.5).square().sum().backward()
        return [leaf.grad, *(p.grad for p in layers.parameters())]

    expected = gradients(segment)
    for _ in range(2):
        found = gradients(lambda x: checkpoint(segment, x, **settings))
        assert all(map(torch.equal, found, expected))


def test_transforms_leave_nothing_in_the_cache(casting):
    w, x = nn.Parameter(torch.ones(2, 2)), torch.rand(3, 2, 2)

    def loss(weight, sample):
        return torch.mm(sample, weight).float().sum()

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(w, x)
    expected = x.bfloat16().float().sum(1)[:, :, None].expand(3, 2, 2)
    torch.testing.assert_close(gradients, expected, rtol=1e-2, atol=1e-2)
    casting.caches.drop()
    torch.func.grad(lambda sample: loss(w, sample))(x[0])
    assert kept(casting) == 0, "a cast that belongs to the transform was kept"
    torch.mm(torch.eye(2), w).sum().backward()
    assert torch.equal(w.grad, torch.ones(2, 2))


def test_threads_share_the_cache(casting):
    model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), torch.rand(2, 4)
    expected = model(x).detach()
    casting.caches.drop()

    def run():
        for _ in range(500):  # a cast that waits for autograd's locks with the GIL has to meet one that holds them
            with casting.forward_scope():
                assert torch.equal(model(x), expected)
                casting.caches.drop()

    in_threads(run, run, run, run)


@pytest.mark.cuda
def test_cast_of_one_stream_is_not_used_on_another(in_python):
    with o1(device_types=("cuda",), in_python=in_python) as casting, casting.caches.call():
        weight, x = nn.Parameter(torch.rand(3, 3, device="cuda")), torch.rand(3, 3, device="cuda")
        torch.mm(x, weight)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.mm(x, weight)
            torch.mm(x, weight)
        assert casts_made(casting) == 2


def test_cache_is_bypassed_while_a_cuda_graph_is_captured(casting, monkeypatch):
    capturing = False
    p, x = nn.Parameter(torch.rand(2, 2)), torch.rand(2, 2, requires_grad=True) * 1
    store_of(casting).capturing = lambda: capturing
    results = [torch.mm(x, p)]
    capturing = True
    results += [torch.mm(x, p), torch.mm(x, p)]
    assert (casts_made(casting), kept(casting)) == (1, 1)
    assert len({id(operand) for result in results for operand in operands(result)}) == 6
    capturing = False
    assert operands(torch.mm(x, p))[1] is operands(results[0])[1]


# -- activations


def operands(result):
    """The activation and weight that mm, or linear without bias, saved for its backward pass."""
    return result.grad_fn._saved_self, result.grad_fn._saved_mat2


def activation():
    """A tensor made by autograd, not a leaf."""
    return torch.ones(3, 2, requires_grad=True) * 1.5


def shares(first, second):
    return operands(first)[0].data_ptr() == operands(second)[0].data_ptr()


def test_activation_that_feeds_three_layers_is_cast_once(casting_in_cpp):
    x, weights = activation(), [nn.Parameter(torch.full((2, 2), float(n))) for n in (1, 2, 3)]
    q, k, v = (F.linear(x, w) for w in weights)
    assert shares(q, k) and shares(k, v)
    leaf = x.grad_fn.next_functions[0][0].variable
    (q + k + v).sum().backward()
    assert torch.equal(leaf.grad, torch.full((3, 2), 1.5 * 2 * (1 + 2 + 3)))
    assert all(torch.equal(w.grad, torch.full((2, 2), 4.5)) for w in weights)


@pytest.mark.parametrize("index", [0, 1], ids=["activation", "weight"])
def test_cast_that_was_written_to_is_made_anew(casting, index):
    x, w = activation(), nn.Parameter(torch.eye(2))
    before = torch.mm(x, w)
    with torch.no_grad():
        operands(before)[index].mul_(2)
    assert torch.equal(torch.mm(x, w).float(), torch.full((3, 2), 1.5))


# Each makes 1.0 of 1.5, and all but the first past torch's count of writes.
EDITS_OF_ACTIVATIONS = {
    "in place": lambda h: h.clamp_(-1.0, 1.0),
    "data in place": lambda h: h.data.clamp_(-1.0, 1.0),
    "data assigned": lambda h: setattr(h, "data", h.data.sign()),
    "data assigned without reading it": lambda h: setattr(h, "data", torch.ones(3, 2)),
    "data of a view": lambda h: h[:].data.fill_(1.0),
    "numpy": lambda h: h.detach().numpy().fill(1.0),
    "asarray": lambda h: np.asarray(h.detach()).fill(1.0),
    "dlpack": lambda h: torch.from_dlpack(h.detach()).data.fill_(1.0),
}


@pytest.mark.parametrize("way", EDITS_OF_ACTIVATIONS)
def test_activation_edited_between_two_layers_is_cast_anew(casting, way):
    h, w = activation(), nn.Parameter(torch.eye(2))
    before = torch.mm(h, w)
    version = h._version
    EDITS_OF_ACTIVATIONS[way](h)
    assert (h._version == version) == (way != "in place")
    after = torch.mm(h, w)
    assert torch.equal(before.float(), torch.full((3, 2), 1.5))
    assert torch.equal(after.float(), torch.ones(3, 2))


@pytest.mark.parametrize(
    "has_gradient, alias_of",
    [(True, lambda leaf: leaf.data), (False, lambda leaf: leaf.data), (False, torch.Tensor.numpy)],
)
def test_leaf_is_cast_anew_since_its_memory_is_others_too(casting, has_gradient, alias_of):
    """A script writes past torch and O1 through an alias of an input that it took before the first use."""
    w, leaf = nn.Parameter(torch.eye(2)), torch.ones(3, 2, requires_grad=has_gradient)
    alias = alias_of(leaf)
    before = torch.mm(leaf, w)
    assert kept(casting) == 1  # the weight's
    alias += 1.0
    after = torch.mm(leaf, w)
    assert torch.equal(before.float(), torch.ones(3, 2)) and torch.equal(after.float(), torch.full((3, 2), 2.0))


def test_casts_of_activations_keep_nothing_alive(casting):
    x, w = activation(), nn.Parameter(torch.eye(2))
    result = torch.mm(x, w)
    low, source = weakref.ref(operands(result)[0]), weakref.ref(x)
    result.sum().backward()
    gc.collect()
    assert low() is None, "the cast outlived the backward pass"
    del x, result
    gc.collect()
    assert source() is None, "the activation outlived its graph"


def test_gradients_of_a_shared_activation_add_up_in_float32(casting_in_cpp):
    """In bfloat16 a sum of equal terms stops at 256 of them."""
    leaf, w = torch.ones(3, 2, requires_grad=True), nn.Parameter(torch.eye(2))
    x = leaf * 1
    results = [torch.mm(x, w) for _ in range(512)]
    assert shares(results[0], results[-1])
    sum(result.float().sum() for result in results).backward()
    assert torch.equal(leaf.grad, torch.full((3, 2), 512.0))


def test_shared_cast_that_is_written_to_is_refused_by_every_use(casting_in_cpp):
    x, w = activation(), nn.Parameter(torch.eye(2))
    first, second = torch.mm(x, w), torch.mm(x, w)
    assert shares(first, second)
    with torch.no_grad():
        operands(second)[0].mul_(2)
    for result in (first, second):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()


def test_forward_mode_gradient_goes_through_every_use(casting):
    w = nn.Parameter(torch.eye(2))
    with fwAD.dual_level():
        leaf = torch.full((2, 2), 3.0, requires_grad=True)
        x = fwAD.make_dual(leaf * 1, torch.ones(2, 2))
        results = [torch.mm(x, w) for _ in range(2)]  # both alive: the first keeps the cast
        tangents = [fwAD.unpack_dual(result).tangent for result in results]
    assert all(torch.equal(tangent.float(), torch.ones(2, 2)) for tangent in tangents)


def test_function_of_the_users_gets_a_cast_of_its_own(casting):
    x, w = activation(), nn.Parameter(torch.eye(2))
    result = torch.mm(x, w)

    @ampkit.half_function
    def edit(x):
        with torch.no_grad():
            return x.zero_()

    edit(x)
    result.sum().backward()
    assert torch.equal(w.grad, torch.full((2, 2), 4.5))


def test_second_derivative_goes_through_a_shared_activation(casting):
    leaf = torch.full((1, 1), 3.0, requires_grad=True)
    x = leaf * 1
    y = torch.mm(x, x) * torch.mm(x, x)
    (first,) = torch.autograd.grad(y.sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), leaf)
    assert (first.item(), second.item()) == (4 * 27.0, 12 * 9.0)


# -- how long a cast lives


class Twice(nn.Sequential):
    """A model whose call uses a weight and a bias twice, with a method that makes two calls."""

    def forward(self, x):
        return self[0](self[0](x))

    def both(self, x):
        return self(x) + self(x)


#: Uses of the model, and the number of casts of its two parameters that each takes.
CALLS = {
    "a call": (lambda model, x: model(x), 2),
    "two calls": (lambda model, x: model(x) + model(x), 4),
    "a method with two calls": (lambda model, x: model.both(x), 2),
    "a part, outside of a call": (lambda model, x: model[0](x) + model[0](x), 4),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("use", CALLS)
def test_weight_is_cast_once_in_the_outermost_call(use, mode):
    (model, _), x = initialize_quietly(Twice(nn.Linear(3, 3)), sgd, "O1"), torch.rand(2, 3)
    cache, (run, casts) = store_of(ampkit.current_session().casting), CALLS[use]
    for times in (1, 2):
        with mode():
            run(model, x)
        assert (cache.casts_made, len(cache.pairs())) == (casts * times, 0)


def test_delayed_micro_batches_cast_a_weight_once_per_step():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.rand(2, 3)
    model, optimizer = initialize_quietly(model, sgd, "O1")
    for steps in (1, 2):
        for micro_batch in range(4):
            backward(model(x).sum(), optimizer, delay_unscale=micro_batch < 3)
        optimizer.step()
        optimizer.zero_grad()
        assert casts_made(ampkit.current_session().casting) == 4 * steps


class OfAScript:
    """A class with the methods of an optimizer, after whose step torch calls no hook."""

    def __init__(self, params):
        self.param_groups, self.state = [{"params": list(params)}], {}

    step = zero_grad = lambda self, set_to_none=True: None


STEPS = {
    "ordinary": (lambda p: torch.optim.SGD(p, 0.0), 1.0),
    "a script's": (OfAScript, 1.0),
    "fused": (lambda p: FusedSGD(p, 0.0), 1.0),
    "torch's fused": (lambda p: torch.optim.SGD(p, 0.0, fused=True), 1.0),
    "skipped": (lambda p: torch.optim.SGD(p, 0.0), float("inf")),
}


@pytest.mark.parametrize("kind", STEPS)
def test_step_drops_casts_that_a_later_micro_batch_made(kind):
    """After the step, writes are seen that torch does not count, to a ``.data`` that was kept."""
    make, factor = STEPS[kind]
    (model, optimizer), x = initialize_quietly(nn.Linear(2, 1, bias=False), make, "O1"), torch.ones(1, 2)
    data = model.weight.data
    backward(model(x).sum() * factor, optimizer, delay_unscale=True)
    model(x)  # for a metric, say
    assert kept(ampkit.current_session().casting) == 1
    optimizer.step()
    assert kept(ampkit.current_session().casting) == 0
    data.fill_(2.0)
    assert model(x).item() == 4.0


# -- while something else happens: other threads, the garbage collector, tensors on their way out


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
    weight, cache = nn.Parameter(torch.zeros(2, 2), requires_grad), store_of(casting)

    def convert(tensor):
        cast = tensor.to(torch.bfloat16)
        MEANWHILE[happens](weight, casting)
        return cast

    cache.cast(weight, convert)
    assert len(cache.pairs()) == 0
    cache.cast(weight, lambda tensor: tensor.to(torch.bfloat16))
    assert len(cache.pairs()) == 1


def test_cast_that_is_dropped_may_run_code_that_comes_back(casting):
    weight = nn.Parameter(torch.zeros(2), requires_grad=False)

    class Again:
        def __del__(self):
            store_of(casting).cast(weight, lambda _: torch.full((2,), 3.0, dtype=torch.bfloat16))

    def convert(_):
        cast = torch.ones(2, dtype=torch.bfloat16)
        cast.again = Again()
        return cast

    store_of(casting).cast(weight, convert)
    if not hasattr(store_of(casting).pairs()[0][1], "again"):
        store_of(casting).pairs()[0][1].again = Again()
    store_of(casting).drop()
    assert store_of(casting).cast(weight, convert).tolist() == [3.0, 3.0]


def test_pairs_may_collect_garbage(casting):
    def cast(count):
        weights = [nn.Parameter(torch.zeros(2), requires_grad=False) for _ in range(count)]
        for weight in weights:
            store_of(casting).cast(weight, lambda _: torch.ones(2, dtype=torch.bfloat16))
        return weights

    thresholds = gc.get_threshold()
    gc.disable()
    try:
        for weight in cast(300):
            weight.itself = weight  # only the collector frees it
        del weight
        kept = cast(300)
        pairs_of_ints = [(i, i) for i in range(3000)]  # no tuples left in CPython's store of free ones
        assert len(store_of(casting).pairs()) == 600
        gc.set_threshold(1)
        gc.enable()
        pairs = store_of(casting).pairs()
    finally:
        gc.enable()
        gc.set_threshold(*thresholds)
    del pairs_of_ints
    assert set(map(id, kept)) <= {id(weight) for weight, _ in pairs}
    assert all(cast.tolist() == [1.0, 1.0] for _, cast in pairs)


@pytest.mark.parametrize("use", ["mm", "pairs"])
def test_weight_on_its_way_out_is_not_brought_back(casting, use):
    """CPython puts off the freeing of deeply nested objects, some fifty levels down: a weight without references waits, weak
    ones still intact.
    """
    other, x, calls = nn.Parameter(torch.rand(4, 4)), torch.rand(2, 4), []

    def meanwhile(_):
        calls.append(torch.mm(x, other) if use == "mm" else store_of(casting).pairs())

    for depth in range(40, 60):
        weight = nn.Parameter(torch.rand(4, 4))
        torch.mm(x, weight)
        torch.mm(x, other)
        casting.caches.drop()
        if use == "pairs":
            store_of(casting).cast(weight, lambda _: torch.ones(4, 4, dtype=torch.bfloat16))
        watched = set()
        watch, nest = weakref.ref(watched, meanwhile), [watched, weight]
        for _ in range(depth):
            nest = [nest]
        del watched, weight
        del nest
        assert watch() is None
    assert len(calls) == 20


def test_traces_that_overlap_leave_the_cache_as_it_was(casting):
    caches = store_of(casting), casting.caches.of(torch.float16)
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
            seen.append(torch.softmax(torch.ones(2, dtype=torch.bfloat16), 0).dtype)  # torch has no row for it, O1 has

    monkeypatch.setattr(engine_module, "patch_torch", patch)
    with o1(in_python=in_python):
        seen.append(torch.softmax(torch.ones(2, dtype=torch.bfloat16), 0).dtype)
    assert seen == [torch.bfloat16, torch.float32]
