"""A user's own functions: decorated, and registered by name."""

import inspect
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from helpers import casts_made, o1

import ampkit
import ampkit.casting.engine as engine_module
from ampkit import bfloat16_function, float_function, half_function, promote_function, register_half_function
from ampkit.errors import ConfigurationError

pytestmark = pytest.mark.switch


@pytest.fixture(autouse=True)
def forget_registrations(monkeypatch):
    monkeypatch.setattr(engine_module, "_registered", {})


def dtypes(*args, **kwargs):
    return [x.dtype for x in (*args, *kwargs.values())]


LOW, HALF, FULL = torch.bfloat16, torch.float16, torch.float32


CASES = [
    # decorator, session's lower precision, dtypes passed, dtypes that arrive
    (half_function, LOW, [FULL, LOW], [LOW, LOW]),
    (half_function, HALF, [FULL, LOW], [HALF, HALF]),
    (bfloat16_function, HALF, [FULL, HALF], [LOW, LOW]),
    (float_function, LOW, [LOW, FULL], [FULL, FULL]),
    (promote_function, LOW, [LOW, FULL], [FULL, FULL]),
    (promote_function, LOW, [LOW, LOW], [LOW, LOW]),
    (promote_function, LOW, [LOW, LOW, FULL], [FULL, FULL, FULL]),
    (half_function, LOW, [torch.float64, torch.int64], [torch.float64, torch.int64]),
]


@pytest.mark.parametrize(("decorate", "lower_precision", "passed", "arriving"), CASES)
def test_decorated_and_registered_functions_cast_their_arguments(decorate, lower_precision, passed, arriving):
    register = getattr(ampkit, f"register_{decorate.__name__}")
    module = types.SimpleNamespace(before=dtypes, after=dtypes, decorated=decorate(dtypes))
    tensors = [torch.ones(2, dtype=dtype) for dtype in passed]
    register(module, "before")
    for _ in range(2):  # a registration holds for sessions to come
        assert module.decorated(*tensors) == passed and module.before is module.after is dtypes
        with o1(lower_precision) as casting:
            register(module, "after")
            for function in (module.decorated, module.before, module.after):
                assert function(*tensors) == function(tensors[0], **dict(zip("bc", tensors[1:]))) == arriving
            with casting.disabled():
                assert module.decorated(*tensors) == passed


def test_decorated_function_keeps_its_metadata_and_casts_inside_containers():
    @float_function
    def named(batch, scale: float = 2.0):
        """Return a dtype."""
        return batch["x"][0].dtype

    assert (named.__name__, named.__doc__) == ("named", "Return a dtype.")
    assert list(inspect.signature(named).parameters) == ["batch", "scale"]
    with o1():
        assert named({"x": [torch.ones(1).bfloat16()]}) is torch.float32


def test_decorated_weight_gets_its_gradient():
    weight = torch.nn.Parameter(torch.ones(2))
    function = half_function(lambda w: (w * 2).sum())
    with o1() as casting, casting.caches.call():
        function(weight).backward()
        function(weight).backward()
        assert casts_made(casting) in (1, None)
    assert torch.equal(weight.grad, torch.full((2,), 4.0))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Model:
    def plain(self, x):
        return x.dtype

    @staticmethod
    def static(x):
        return x.dtype

    method = half_function(plain)
    outer = half_function(staticmethod(dtypes))
    inner = staticmethod(half_function(dtypes))
    of_class = half_function(classmethod(plain))


def test_decorator_works_on_methods_and_on_autograd_functions():
    x = torch.ones(1, requires_grad=True)
    with o1():
        assert [Model().method(x), Model().of_class(x), *Model().outer(x), *Model.inner(x)] == [torch.bfloat16] * 4
        y = half_function(Double.apply)(x)
        y.sum().backward()
    assert y.dtype is torch.bfloat16 and x.grad.item() == 2.0


def test_registration_works_on_classes_and_dicts():
    functions, x = {"gelu": F.gelu, "own": dtypes}, torch.ones(1)
    before = dict(vars(Model)), dict(vars(Double)), dict(functions)
    for owner, name in ((Model, "plain"), (Model, "static"), (Double, "apply"), (functions, "own")):
        register_half_function(owner, name)
    with o1():
        assert Model().plain(x) is Model.static(x) is Model().static(x) is torch.bfloat16
        assert Double.apply(x).dtype is torch.bfloat16 and functions["own"](x) == [torch.bfloat16]
    assert (dict(vars(Model)), dict(vars(Double)), functions) == before


@pytest.mark.parametrize("when", ["before", "after"])
def test_registration_wins_over_the_tables(when):
    low, original = torch.ones(2).bfloat16(), torch.exp
    if when == "before":
        register_half_function(torch, "exp")
    with o1():
        if when == "after":
            assert torch.exp(low).dtype is torch.float32
            register_half_function(torch, "exp")
        assert torch.exp(low).dtype is torch.bfloat16
    assert torch.exp is original


@pytest.mark.parametrize(
    ("owner", "name", "error", "said"),
    [
        (torch, "no_such_name", ConfigurationError, "no function 'no_such_name' in torch"),
        (Model, "no_such_name", ConfigurationError, "no function 'no_such_name'"),
        ({}, "no_such_name", ConfigurationError, "no function 'no_such_name'"),
        (torch, "float32", ConfigurationError, "no function 'float32' in torch"),
        ("linear", F, TypeError, r"second argument, found <module.*register_half_function\(module, 'name'\)"),
    ],
)
def test_registration_of_what_is_no_function_is_refused(owner, name, error, said):
    with pytest.raises(error, match=said):
        register_half_function(owner, name)
    assert issubclass(ConfigurationError, ValueError)


@pytest.mark.parametrize("decorate", [half_function, bfloat16_function, float_function])
def test_decorator_of_no_function_says_what_was_expected(decorate):
    with pytest.raises(TypeError, match="Expected a function to cast the arguments of, found 'linear'"):
        decorate("linear")


# Where models are cast and torch is not patched

CAST_LEVELS = ("O2", "O3", "O5")


class Distance(torch.nn.Module):
    """A module that ends in a function that has to compute in float32."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 256)

    def forward(self, x):
        x = self.layer(x)
        return x, variance(x), plain_variance(x)


def plain_variance(x):
    return (x.square().mean(-1) - x.mean(-1).square()).clone()


variance = float_function(plain_variance)


@pytest.mark.parametrize(
    "level, compiled", [("O2", False), ("O2", True), ("O3", False), ("O5", True), ("O2 beside O1", False)]
)
def test_float_function_computes_in_float32_in_a_cast_model(level, compiled):
    torch._dynamo.reset()
    model, beside = ampkit.initialize(Distance(), opt_level=level[:2], verbosity=0), torch.nn.Linear(2, 2)
    if "beside" in level:
        ampkit.initialize(beside, opt_level="O1", verbosity=0)
    forward = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    x, ours, _ = forward(torch.randn(8, 4))
    assert (ours - plain_variance(x.double())).abs().max() < 1e-5


@pytest.mark.parametrize("level", ("O0", *CAST_LEVELS))
def test_decorators_hold_outside_of_models_where_an_argument_is_in_lower_precision(level):
    full, low = (torch.ones(2, dtype=dtype) for dtype in (FULL, LOW))
    with ampkit.session(torch.nn.Linear(2, 2), opt_level=level, verbosity=0):
        for decorate, both in (
            (half_function, LOW),
            (bfloat16_function, LOW),
            (promote_function, FULL),
            (float_function, FULL),
        ):
            assert decorate(dtypes)(full, low) == ([FULL, LOW] if level == "O0" else [both, both])
            assert decorate(dtypes)(full, full) == [FULL, FULL]


@pytest.mark.parametrize("level", CAST_LEVELS)
def test_disable_casts_suspends_float_function_and_nothing_else(level):
    model = ampkit.initialize(Distance(), opt_level=level, verbosity=0)
    x, low = torch.randn(8, 4), torch.ones(2).bfloat16()
    function, seen = float_function(dtypes), []
    outside = model(x)
    with ampkit.disable_casts():
        inside = model(x)
        seen += function(low)
        with ThreadPoolExecutor(1) as pool:
            seen += pool.submit(function, low).result()
        assert {p.dtype for p in model.parameters()} == {FULL if level == "O5" else LOW}
    assert seen == [LOW, FULL] and function(low) == [FULL]
    assert torch.equal(inside[1], inside[2])
    torch.testing.assert_close(inside[0].float(), outside[0].float(), rtol=0.02, atol=0.02)
    with pytest.raises(ZeroDivisionError), ampkit.disable_casts():
        raise ZeroDivisionError
    assert function(low) == [FULL]


def test_disable_casts_inside_and_around_compiled_code():
    torch._dynamo.reset()
    function, low = float_function(lambda x: x * 2), torch.ones(2).bfloat16()

    @torch.compile(fullgraph=True, backend="eager")
    def both(x):
        first = function(x)
        with ampkit.disable_casts():
            second = function(x)
        return first.dtype, second.dtype, second

    with ampkit.session(torch.nn.Linear(2, 2), opt_level="O2", verbosity=0):
        assert both(low)[:2] == (FULL, LOW)
        with ampkit.disable_casts():
            assert both(low)[:2] == (LOW, LOW)
        assert both(low)[:2] == (FULL, LOW)
    assert both(low)[:2] == (LOW, LOW)


def test_compiled_code_disables_casts_after_a_session_of_another_thread():
    """This thread is still to be switched off, which must not be part of a trace."""
    torch._dynamo.reset()
    model, low = torch.nn.Linear(2, 2), torch.ones(2).bfloat16()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(ampkit.initialize, model, opt_level="O1", verbosity=0).result()
    ampkit.close()

    @torch.compile(fullgraph=True, backend="eager")
    def twice(x):
        with ampkit.disable_casts():
            return x * 2

    assert twice(low).dtype is LOW
