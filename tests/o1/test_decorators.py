"""A user's own functions: decorated, and registered by name."""

import inspect
import threading
import types

import pytest
import torch
from helpers import casts_made, o1

import ampkit
import ampkit.casting.engine as engine_module
from ampkit.casting.decorators import (
    bfloat16_function,
    float_function,
    half_function,
    promote_function,
    register_bfloat16_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from ampkit.errors import ConfigurationError

pytestmark = pytest.mark.switch


@pytest.fixture(autouse=True)
def forget_registrations():
    before = dict(engine_module._registered)
    yield
    engine_module._registered.clear()
    engine_module._registered.update(before)


def dtypes(*args, **kwargs):
    """Return the dtypes that arrive."""
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
    (half_function, LOW, [torch.float64, torch.int64], [torch.float64, torch.int64]),
]
REGISTER = {
    half_function: register_half_function,
    bfloat16_function: register_bfloat16_function,
    float_function: register_float_function,
    promote_function: register_promote_function,
}


@pytest.mark.parametrize(("decorate", "lower_precision", "passed", "arriving"), CASES)
def test_decorated_function_casts_its_arguments(decorate, lower_precision, passed, arriving):
    function = decorate(dtypes)
    tensors = [torch.ones(2, dtype=dtype) for dtype in passed]
    assert function(*tensors) == passed
    with o1(lower_precision) as casting:
        assert function(*tensors) == arriving
        assert function(tensors[0], other=tensors[1]) == arriving
        with casting.disabled():
            assert function(*tensors) == passed
    assert function(*tensors) == passed


@pytest.mark.parametrize(("decorate", "lower_precision", "given", "arriving"), CASES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_registered_function_casts_its_arguments(decorate, lower_precision, given, arriving, when):
    module = types.ModuleType("user_module")
    module.function = dtypes
    tensors = [torch.ones(2, dtype=dtype) for dtype in given]
    if when == "before":
        REGISTER[decorate](module, "function")
    with o1(lower_precision):
        if when == "after":
            REGISTER[decorate](module, "function")
        assert module.function(*tensors) == arriving
    assert module.function is dtypes
    with o1(lower_precision):
        assert module.function(*tensors) == arriving
    assert module.function is dtypes


def test_promotion_asks_every_argument():
    given = [torch.ones(2, dtype=dtype) for dtype in (LOW, LOW, FULL)]
    with o1():
        assert promote_function(dtypes)(*given) == [FULL, FULL, FULL]
        assert promote_function(dtypes)(given[0], b=given[1], c=given[2]) == [FULL, FULL, FULL]


def test_decorated_function_casts_inside_containers():
    function = float_function(lambda batch: batch["x"][0].dtype)
    with o1():
        assert function({"x": [torch.ones(1).bfloat16()]}) is torch.float32


def test_decorated_function_keeps_its_metadata():
    @half_function
    def named(x, scale: float = 2.0):
        """Return the input."""
        return x

    assert (named.__name__, named.__doc__) == ("named", "Return the input.")
    assert list(inspect.signature(named).parameters) == ["x", "scale"]


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
    @half_function
    def method(self, x):
        return x.dtype

    @half_function
    @staticmethod
    def outer(x):
        return x.dtype

    @staticmethod
    @half_function
    def inner(x):
        return x.dtype

    @half_function
    @classmethod
    def of_class(cls, x):
        return x.dtype

    def plain(self, x):
        return x.dtype

    @staticmethod
    def static(x):
        return x.dtype


def test_decorator_works_on_methods_of_every_kind():
    x = torch.ones(1)
    with o1():
        assert [f(x) for f in (Model().method, Model().outer, Model.inner, Model.of_class)] == [torch.bfloat16] * 4


def test_decorator_works_on_autograd_functions():
    x = torch.ones(2, requires_grad=True)
    double = half_function(Double.apply)
    with o1():
        y = double(x)
        y.sum().backward()
    assert y.dtype is torch.bfloat16
    assert torch.equal(x.grad, torch.full((2,), 2.0))


def test_registration_works_on_classes():
    before = dict(vars(Model)), dict(vars(Double))
    for owner, name in ((Model, "plain"), (Model, "static"), (Double, "apply")):
        register_half_function(owner, name)
    x = torch.ones(1)
    with o1():
        assert Model().plain(x) is torch.bfloat16
        assert Model.static(x) is Model().static(x) is torch.bfloat16
        assert Double.apply(x).dtype is torch.bfloat16
    assert (dict(vars(Model)), dict(vars(Double))) == before


def test_registration_works_on_dicts():
    activations = {"gelu": torch.nn.functional.gelu, "own": dtypes}
    before = dict(activations)
    register_half_function(activations, "own")
    with o1():
        assert activations["own"](torch.ones(1)) == [torch.bfloat16]
    assert activations == before


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


def test_registration_makes_binary_cross_entropy_work():
    register_float_function(torch, "sigmoid")
    logits = torch.zeros(2).bfloat16()
    with o1():
        loss = torch.nn.functional.binary_cross_entropy(torch.sigmoid(logits), torch.ones(2))
    torch.testing.assert_close(loss, torch.tensor(0.693147))


@pytest.mark.parametrize("owner", [torch, Model, {}], ids=["module", "class", "dict"])
def test_registration_of_a_missing_function_is_an_error(owner):
    with pytest.raises(ConfigurationError, match="no function 'no_such_name'"):
        register_half_function(owner, "no_such_name")
    assert issubclass(ConfigurationError, ValueError)


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


@pytest.mark.parametrize("level", CAST_LEVELS)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_float_function_computes_in_float32_in_a_cast_model(level, compiled):
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = ampkit.initialize(Distance(), opt_level=level, verbosity=0)
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
    torch.manual_seed(0)
    model = ampkit.initialize(Distance(), opt_level=level, verbosity=0)
    x, low = torch.randn(8, 4), torch.ones(2).bfloat16()
    function, seen = float_function(dtypes), []
    outside = model(x)
    with ampkit.disable_casts():
        inside = model(x)
        seen += function(low)
        with ampkit.disable_casts():
            seen += function(low)
        seen += function(low)
        thread = threading.Thread(target=lambda: seen.extend(function(low)))
        thread.start()
        thread.join()
        assert {p.dtype for p in model.parameters()} == {FULL if level == "O5" else LOW}
    assert seen == [LOW, LOW, LOW, FULL] and function(low) == [FULL]
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
    thread = threading.Thread(target=ampkit.initialize, args=(model,), kwargs={"opt_level": "O1", "verbosity": 0})
    thread.start()
    thread.join()
    ampkit.close()

    @torch.compile(fullgraph=True, backend="eager")
    def twice(x):
        with ampkit.disable_casts():
            return x * 2

    assert twice(low).dtype is LOW


def test_sessions_of_both_kinds_count_together():
    function, low = float_function(dtypes), torch.ones(2).bfloat16()
    patched, cast = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    ampkit.initialize(patched, opt_level="O1", verbosity=0)
    ampkit.initialize(cast, opt_level="O2", verbosity=0)
    with ampkit.disable_casts():
        assert function(low) == [LOW]
    assert function(low) == [FULL]
    ampkit.initialize(patched, enabled=False)
    assert function(low) == [FULL]
    ampkit.initialize(cast, enabled=False)
    assert function(low) == [LOW]


def test_float_function_inside_a_cast_model_beside_a_session_at_o1():
    torch.manual_seed(0)
    model = ampkit.initialize(Distance(), opt_level="O2", cast_model_type=LOW, verbosity=0)
    ampkit.initialize(torch.nn.Linear(2, 2), opt_level="O1", patch_torch_functions_type=LOW, verbosity=0)
    x, ours, _ = model(torch.randn(8, 4))
    assert (ours - plain_variance(x.double())).abs().max() < 1e-5


def test_a_decorator_of_no_function_and_a_name_that_is_none_say_what_was_expected():
    for decorator in (half_function, bfloat16_function, float_function):
        with pytest.raises(TypeError, match="Expected a function to cast the arguments of, found 'linear'"):
            decorator("linear")
    with pytest.raises(TypeError, match=r"second argument, found <module.*register_half_function\(module, 'name'\)"):
        register_half_function("linear", torch.nn.functional)
    with pytest.raises(ampkit.ConfigurationError, match="There is no function 'float32' in torch"):
        register_half_function(torch, "float32")
