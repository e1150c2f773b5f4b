"""torch.amp's functions at O1 in compiled code: the same dtypes as uncompiled, whatever backend, without a graph break."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from helpers import outputs_after_close
from torch import nn

import ampkit

pytestmark = pytest.mark.switch

LOW = torch.bfloat16
BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


class Rotary(nn.Module):
    """A model with angles outside of autocast, as libraries write it; around them is lower precision."""

    def __init__(self):
        super().__init__()
        self.project, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x, positions):
        with torch.autocast("cpu", enabled=False):
            angles = positions[:, None].float() @ torch.logspace(0, -4, 8)[None]
        hidden = self.project(x)
        return self.norm(hidden), hidden, angles, F.softmax(hidden, -1), hidden @ x.t()


def initialized(model, **settings):
    return ampkit.initialize(model, opt_level="O1", verbosity=0, **settings)


def dtypes_of(tensors):
    return [t.dtype for t in tensors]


@pytest.mark.parametrize("backend", BACKENDS)
def test_regions_inside_the_model(backend):
    model = initialized(Rotary())
    x, positions = torch.randn(4, 8), torch.arange(1000.0, 1004.0)
    expected = model(x, positions)
    found = torch.compile(model, backend=backend, fullgraph=True)(x, positions)
    assert dtypes_of(found) == dtypes_of(expected) == [torch.float32, LOW, torch.float32, torch.float32, LOW]
    exact = positions.double()[:, None] @ torch.logspace(0, -4, 8).double()[None]
    assert (found[2] - exact).abs().max() < 1e-3  # bfloat16 is off by up to 4


class Operators(nn.Linear):
    """A model with casts that dynamo leaves to methods and operators of Tensor."""

    def forward(self, x):
        return (x @ self.weight).mm(self.weight)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", [nn.Linear, Operators])
def test_regions_around_the_call(make, backend):
    model = initialized(make(8, 8))

    def compile_it():
        return torch.compile(model, backend=backend, fullgraph=True)

    compiled, x = compile_it(), torch.randn(4, 8)
    seen = [compiled(x).dtype]
    with torch.autocast("cpu", enabled=False):
        seen.append(compiled(x).dtype)
        with torch.autocast("cpu"):
            seen.append(compiled(x).dtype)
    with torch.autocast("cpu", torch.float16):
        seen.append(compiled(x).dtype)
    with ampkit.disable_casts():
        seen.append(compiled(x).dtype)
    seen.append(compiled(x).dtype)
    ampkit.close()
    seen.append(outputs_after_close(compiled, compile_it, x).dtype)
    assert seen == [LOW, torch.float32, LOW, torch.float16, torch.float32, LOW, torch.float32]


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_a_float32_region_are_float32s(backend):
    class Net(nn.Linear):
        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                return super().forward(x)

    model = initialized(Net(64, 64))
    x = torch.randn(32, 64)
    torch.compile(model, backend=backend, fullgraph=True)(x).sum().backward()
    exact = torch.ones(64, 32).double() @ x.double()
    assert (model.weight.grad - exact).abs().max() < 1e-4  # a product in bfloat16 is off by 0.05 and more


def test_switching_makes_a_graph_for_each_state_and_no_more():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = initialized(nn.Linear(8, 8))
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(3):
        compiled(torch.randn(4, 8))
        with torch.autocast("cpu", enabled=False):
            compiled(torch.randn(4, 8))
    assert len(graphs) == 2


def test_a_compiled_call_leaves_regions_of_the_script_their_cache():
    model = initialized(nn.Linear(8, 8), scope="forward")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    compiled(torch.randn(4, 8))
    with torch.autocast("cpu"):
        assert torch.is_autocast_cache_enabled()


def test_compiled_model_in_another_thread_is_cast_and_a_region_there_is_kept():
    model = initialized(nn.Linear(8, 8))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    seen = [compiled(torch.randn(4, 8)).dtype]

    def other():
        seen.append(compiled(torch.randn(4, 8)).dtype)
        with torch.autocast("cpu", enabled=False):
            seen.append(compiled(torch.randn(4, 8)).dtype)
        seen.append(compiled(torch.randn(4, 8)).dtype)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(other).result()
    assert seen == [LOW, LOW, torch.float32, LOW]


def test_tables_win_in_a_trace_too():
    model = initialized(nn.Linear(8, 8), policy={"torch.mm": "fp32", "torch.inner": "promote"})

    @torch.compile(backend="aot_eager", fullgraph=True)
    def products(x, low):
        return torch.mm(x, x.t()), torch.inner(x, low), torch.cat([low.half(), low.half()]), model(x)

    x = torch.randn(4, 8)
    assert dtypes_of(products(x, x.bfloat16())) == [torch.float32, torch.float32, torch.float16, LOW]


def test_model_of_another_level_is_compiled_without_casts():
    class Net(nn.Linear):
        def forward(self, x):
            return super().forward(x).softmax(-1) @ self.weight

    model = ampkit.initialize(Net(8, 8), opt_level="O3", cast_model_outputs=LOW, verbosity=0)
    x = torch.randn(4, 8)
    alone = model(x)
    initialized(nn.Linear(2, 2))  # whose tables have softmax in float32
    dtypes = []
    model.register_forward_hook(lambda module, args, out: dtypes.append(out.dtype))
    found = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(found, alone) and torch.equal(model(x), alone)
