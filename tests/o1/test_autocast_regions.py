"""torch.amp's functions at O1: each works as under torch.autocast, whose state switches ampkit's casts."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from helpers import backward, in_threads, initialize_quietly, o1
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampkit
import ampkit.casting.engine as engine_module
from ampkit.casting.engine import active_casting

pytestmark = pytest.mark.switch

LOW = torch.bfloat16


def initialized(models, optimizers=None, **settings):
    return ampkit.initialize(models, optimizers, opt_level="O1", verbosity=0, **settings)


def product():
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


REGIONS = {
    "torch.autocast": lambda enabled: torch.autocast("cpu", enabled=enabled),
    "torch.amp.autocast": lambda enabled: torch.amp.autocast("cpu", enabled=enabled),
    "torch.cpu.amp.autocast": lambda enabled: torch.cpu.amp.autocast(enabled=enabled),
}


@pytest.mark.filterwarnings("ignore:.*torch.cpu.amp.autocast.*:FutureWarning")
@pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS)
def test_region_switches_casts_off_and_on_again(region, in_python):
    with o1(in_python=in_python):
        seen = [product()]
        with region(False):
            seen.append(product())
            with region(True):
                seen.append(product())
            seen.append(product())

        @region(False)
        def decorated():
            return product()

        seen.append(decorated())
    assert seen == [LOW, torch.float32, LOW, torch.float32, torch.float32]


def test_region_with_another_dtype_is_followed(in_python):
    weight = nn.Parameter(torch.ones(2, 2))
    with o1(in_python=in_python):
        with torch.autocast("cpu", torch.float16):
            seen = [product(), F.linear(torch.ones(2, 2), weight).dtype]
            finer = torch.mm(torch.full((1, 1), 1.001), torch.ones(1, 1))
        seen.append(F.linear(torch.ones(2, 2), weight).dtype)
        assert torch.cat([torch.ones(2).half(), torch.ones(2).half()]).dtype is torch.float16
    assert seen == [torch.float16, torch.float16, LOW]
    assert finer.item() == 1 + 2**-10  # bfloat16 on the way would have made it 1


@pytest.mark.parametrize("session, region, inside", [(("cpu", "xpu"), "cpu", torch.float32), (("cpu",), "xpu", LOW)])
def test_region_is_for_its_own_device(session, region, inside, in_python):
    with o1(device_types=session, in_python=in_python):
        with torch.autocast(region, enabled=False):
            seen = [product()]
        assert [*seen, product()] == [inside, LOW]


def test_region_reaches_its_own_thread_only():
    model = initialized(nn.Linear(2, 2))
    with torch.autocast("cpu", enabled=False), ThreadPoolExecutor(1) as pool:
        assert pool.submit(model, torch.ones(1, 2)).result().dtype is LOW
        assert model(torch.ones(1, 2)).dtype is torch.float32


def test_state_answers_truly():
    with o1():
        assert torch.is_autocast_enabled("cpu") and torch.is_autocast_cpu_enabled()
        assert torch.get_autocast_dtype("cpu") is LOW
        with torch.autocast("cpu", enabled=False):
            assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled()


def test_autocast_around_the_model_changes_nothing():
    model = initialized(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)))
    x = torch.randn(4, 8)
    alone = model(x)
    with torch.autocast("cpu", LOW):
        around = model(x)
    assert alone.dtype is around.dtype and torch.equal(alone, around)


class Watched(torch.autograd.Function):
    """A function without custom_fwd that notes in what state its backward runs."""

    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.append(product())
        return grad, None


@pytest.mark.parametrize("forward_on", [True, False])
@pytest.mark.parametrize("backward_on", [True, False])
def test_plain_function_computes_backward_in_the_state_of_its_forward(forward_on, backward_on):
    x, seen = torch.ones(2, requires_grad=True), []
    with o1():
        with torch.autocast("cpu", enabled=forward_on):
            y = Watched.apply(x, seen).sum()
        with torch.autocast("cpu", enabled=backward_on):
            y.backward()
    assert seen == [LOW if forward_on else torch.float32]


@pytest.mark.parametrize("backward_on", [True, False])
def test_hooks_of_a_backward_pass_are_not_cast(backward_on):
    x, seen = torch.ones(2, 2, requires_grad=True), []

    def hook(grad):
        seen.append(product())
        with torch.autocast("cpu", LOW):
            seen.append(product())

    with o1():
        y = x * 2
        y.register_hook(hook)
        with torch.autocast("cpu", enabled=backward_on):
            y.sum().backward()
        assert product() is LOW
    assert seen == [torch.float32, LOW]


@pytest.mark.parametrize("settings", [{}, {"cast_inputs": torch.float32}, {"cast_inputs": torch.float16}], ids=str)
def test_custom_fwd_and_custom_bwd_as_under_autocast(settings):
    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", **settings)
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            seen.append((x.dtype, (x.float() @ w.float()).dtype))
            return grad @ w.t(), x.t() @ grad

    x, w = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    results, seen = [], []
    for surrounding in (torch.autocast("cpu", LOW), o1()):
        with surrounding:
            y = Product.apply(x, w)
        results.append((y, *torch.autograd.grad(y.float().sum(), w)))
    assert seen[0] == seen[1]
    for theirs, ours in zip(*results):
        assert ours.dtype is theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_has_the_states_of_the_first_pass(use_reentrant):
    seen = []

    def block(x):
        seen.append(product())
        with torch.autocast("cpu", enabled=False):
            seen.append(product())
        return x * x

    x = torch.ones(2, requires_grad=True)
    with o1():
        checkpoint(block, x, use_reentrant=use_reentrant).sum().backward()
        with torch.autocast("cpu", enabled=False):
            y = checkpoint(block, x, use_reentrant=use_reentrant).sum()
        y.backward()
    assert seen == [LOW, torch.float32] * 2 + [torch.float32] * 4


@pytest.mark.parametrize(("level", "dtype", "cast"), [("O1", torch.float32, LOW), ("O2", LOW, torch.float32)])
def test_one_disable_casts_is_entered_again_inside_of_itself_and_by_calls(level, dtype, cast):
    @ampkit.float_function
    def in_float32(x, y):
        return torch.mm(x, y)

    x = torch.ones(2, 2, dtype=dtype)
    off = ampkit.disable_casts()
    with ampkit.session(nn.Linear(2, 2), opt_level=level, verbosity=0):
        product = torch.mm if level == "O1" else in_float32
        for _ in range(2):
            with off:
                with off:
                    assert product(x, x).dtype is dtype
                assert product(x, x).dtype is dtype
            assert product(x, x).dtype is cast
        by_calls = off(lambda: product(x, x).dtype)
        assert [by_calls(), by_calls(), product(x, x).dtype] == [dtype, dtype, cast]


def test_disable_casts_and_regions_nest():
    with o1():
        with ampkit.disable_casts():
            with torch.autocast("cpu"):
                inside = product()
            outside = product()
        with torch.autocast("cpu", enabled=False), ampkit.disable_casts():
            both = product()
        assert (inside, outside, both, product()) == (LOW, torch.float32, torch.float32, LOW)


def test_tables_win_over_the_lists_of_autocast():
    x = torch.rand(4, 4)
    with o1(policy={"torch.mm": "fp32", "torch.prod": "native"}):
        assert torch.mm(x, x).dtype is torch.float32
        assert torch.prod(x.bfloat16()).dtype is LOW  # on the CPU torch.autocast has it in float32


def test_initialized_in_one_thread_closed_in_another():
    model = initialized(nn.Linear(2, 2))
    assert torch.is_autocast_enabled("cpu")
    in_threads(ampkit.close)
    for _ in range(3):  # Python runs what waits for its main thread between two instructions
        pass
    assert not torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled()
    assert model(torch.ones(1, 2)).dtype is torch.float32


def test_thread_that_is_not_the_main_one_is_switched_off_at_its_next_call_of_ours():
    with ThreadPoolExecutor(1) as thread:
        model = thread.submit(initialized, nn.Linear(2, 2)).result(60)
        ampkit.close()
        thread.submit(ampkit.close).result(60)
        assert not thread.submit(torch.is_autocast_enabled, "cpu").result(60)
    del model


def as_torch_is():
    return not torch._C._is_any_autocast_enabled() and torch.is_autocast_cache_enabled() and product() is torch.float32


def test_session_closed_inside_a_region_is_switched_off_soon_after_its_end():
    initialized(nn.Linear(2, 2))
    with torch.autocast("cpu"):
        ampkit.close()
    deadline = time.monotonic() + 60
    while torch.is_autocast_enabled("cpu") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert as_torch_is()


def in_a_hook():
    y = torch.ones(1, 2, requires_grad=True) * 2
    y.register_hook(lambda grad: ampkit.close())
    y.sum().backward()


ENDS = {
    "in a hook": in_a_hook,
    "while data is fetched": lambda: list(torch.utils.data.DataLoader([1], collate_fn=lambda _: ampkit.close())),
    "in a function of torch's": lambda: F.triplet_margin_with_distance_loss(
        *torch.randn(3, 2, 2), distance_function=lambda a, b: (ampkit.close(), (a - b).sum(1))[1]
    ),
    "in casts that are disabled": ampkit.disable_casts()(lambda: ampkit.close()),
}


@pytest.mark.parametrize("where", [*ENDS, "in the forward"])
def test_session_that_ends_in_the_midst_of_something_leaves_torch_as_it_was(where, in_python, monkeypatch):
    """The garbage collector may end a session anywhere."""
    if in_python:
        monkeypatch.setattr(engine_module, "library", None)
    model = initialized(nn.Linear(2, 2))
    model.register_forward_hook(lambda *_: ampkit.close())
    ENDS.get(where, lambda: model(torch.ones(1, 2)))()
    assert as_torch_is()


def test_device_types_that_change_inside_a_region_are_cast_after_it():
    model = initialized(nn.Linear(2, 2))
    with ampkit.disable_casts():
        active_casting().cast_on({"cpu", "xpu"})
    model(torch.ones(1, 2))
    assert torch.is_autocast_enabled("xpu") and torch.is_autocast_enabled("cpu")
    ampkit.close()
    assert as_torch_is() and not torch.is_autocast_enabled("xpu")


def test_closure_is_cast_and_the_step_around_it_is_not():
    class Watching(torch.optim.SGD):
        def step(self, closure=None):
            seen.append(product())
            super().step(closure)
            seen.append(product())

    seen = []
    model, optimizer = initialize_quietly(nn.Linear(4, 4), Watching, "O1", loss_scale=128.0)

    def closure():
        optimizer.zero_grad()
        out = model(torch.randn(2, 4))
        seen.append(out.dtype)
        backward(out.float().sum(), optimizer)
        return out.sum()

    optimizer.step(closure)
    assert seen == [torch.float32, LOW, torch.float32]
