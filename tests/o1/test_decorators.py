"""A user's own functions under O1: decorated, and registered by name."""

import inspect
import types

import pytest
import torch
from helpers import o1

import ampkit.casting.engine as engine_module
from ampkit.casting import (
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
    """The dtypes that arrive."""
    return [x.dtype for x in (*args, *kwargs.values())]


LOW, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
CASES = [
    # decorator, session's lower precision, dtypes given, dtypes that arrive
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


@pytest.mark.parametrize(("decorate", "lower_precision", "given", "arriving"), CASES)
def test_decorated_function_casts_its_arguments(decorate, lower_precision, given, arriving):
    function = decorate(dtypes)
    tensors = [torch.ones(2, dtype=dtype) for dtype in given]
    assert function(*tensors) == given
    with o1(lower_precision) as casting:
        assert function(*tensors) == arriving
        assert function(tensors[0], other=tensors[1]) == arriving
        with casting.disabled():
            assert function(*tensors) == given
    assert function(*tensors) == given


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
        """What it does."""
        return x

    assert (named.__name__, named.__doc__) == ("named", "What it does.")
    assert list(inspect.signature(named).parameters) == ["x", "scale"]


def test_decorated_weight_gets_its_gradient():
    weight = torch.nn.Parameter(torch.ones(2))
    function = half_function(lambda w: (w * 2).sum())
    with o1() as casting:
        function(weight).backward()
        function(weight).backward()
        assert casting.cache(torch.bfloat16).casts_made == 1
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
