"""Properties of torch's functions that users rely on, while the functions are wrapped."""

import copy
import functools
import inspect
import io
import pickle
import traceback
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from helpers import o1
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import ampkit
from ampkit.casting.cpp_wrappers import library

pytestmark = pytest.mark.switch

X = torch.linspace(-2.0, 2.0, 4).reshape(2, 2)
LOW = X.bfloat16()

HANDLED = dict.fromkeys(
    (F.softmax, F.linear, torch.mm, torch.Tensor.matmul, torch.Tensor.norm), lambda *args, **kwargs: "labelled"
)


class Labelled(torch.Tensor):
    """A subclass as torch's documentation has it, with a table of its own functions."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in HANDLED:
            return HANDLED[func](*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})


CALLS = {
    "a Python function": lambda x: F.softmax(x, dim=-1),
    "a built-in function": lambda x: torch.mm(x, x),
    "linear": lambda x: F.linear(x, x),
    "a method": lambda x: x.matmul(x),
    "a Python method": lambda x: x.norm(),
}


@pytest.mark.parametrize("call", CALLS)
def test_table_of_a_subclass_is_asked(call):
    x = X.as_subclass(Labelled)
    keys = list(HANDLED)
    assert CALLS[call](x) == "labelled"
    with o1():
        assert CALLS[call](x) == "labelled"
        with ampkit.disable_casts():
            assert CALLS[call](x) == "labelled"
    assert CALLS[call](x) == "labelled"
    assert list(HANDLED) == keys


def test_results_of_a_subclass_are_of_it_and_cast():
    class Plain(torch.Tensor):
        pass

    x = X.as_subclass(Plain)
    with o1():
        for result, dtype in (
            (torch.bmm(x[None], x[None]), torch.bfloat16),
            (F.softplus(x.bfloat16()), torch.float32),
            (x @ X, torch.bfloat16),
        ):
            assert type(result) is Plain and result.dtype is dtype


def test_function_mode_sees_calls_and_casts_hold():
    names = []

    class Recording(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            names.append(getattr(func, "__name__", None))
            return func(*args, **(kwargs or {}))

    with o1(), Recording():
        product = torch.mm(X, X)
        result = F.softmax(product, dim=-1)
    assert product.dtype is torch.bfloat16 and result.dtype is torch.float32
    assert torch.equal(product, torch.mm(LOW, LOW))
    assert {"mm", "softmax"} <= set(names)


PRODUCT = {"input": X, "mat2": torch.nn.Parameter(X.clone(), requires_grad=False)}  # a cast of a weight is kept


@pytest.mark.parametrize("name, given", (("mm", PRODUCT), ("cumsum", {"input": LOW, "dim": 0})))
@pytest.mark.parametrize("with_out", (False, True), ids=("without out", "out"))
def test_kwargs_are_never_edited(name, given, with_out):
    kwargs = given | ({"out": torch.empty(2, 2)} if with_out else {})
    before = dict(kwargs)
    with o1():
        result = getattr(torch, name)(**kwargs)
    assert kwargs.keys() == before.keys() and all(kwargs[key] is before[key] for key in kwargs)
    assert not with_out or result is kwargs["out"]


BIG = torch.zeros(1024, 64).bfloat16().requires_grad_()  # of which float32 functions save no float32 copy
FAILURES = {
    "shapes": lambda: torch.mm(torch.ones(2, 3), torch.ones(2, 3)),
    "a missing argument": lambda: F.softmax(),
    "an unknown keyword": lambda: F.gelu(X, nonsense=1),
    "float64 beside float32": lambda: torch.mm(X, X.double()),
    "an operator": lambda: torch.ones(2, 3) @ torch.ones(2, 3),
    "an operator and text": lambda: X @ "text",
    "data that cannot be deleted": lambda: delattr(torch.ones(1), "data"),
    "a shape of layer_norm": lambda: F.layer_norm(BIG, (7,)),
    "a keyword of layer_norm": lambda: F.layer_norm(BIG, (64,), weigth=None),
    "groups": lambda: F.group_norm(BIG, 3),
    "a shape of rms_norm": lambda: F.rms_norm(BIG, (7,)),
    "a number of targets": lambda: F.cross_entropy(BIG, torch.arange(3)),
    "a target": lambda: F.cross_entropy(BIG, torch.arange(1024)),
    "a reduction": lambda: F.cross_entropy(BIG, torch.arange(1024) % 64, reduction="max"),
    "a bad value": lambda: F.cross_entropy(X, torch.tensor([0, 1]), reduction="nonsense"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_exceptions_pass_through(failure):
    with pytest.raises(Exception) as plain:
        FAILURES[failure]()
    with o1(), pytest.raises(Exception) as patched:
        FAILURES[failure]()
    assert type(patched.value) is type(plain.value)
    assert str(patched.value) == str(plain.value)
    assert patched.value.__cause__ is patched.value.__context__ is None
    assert traceback.format_exception_only(patched.value) == traceback.format_exception_only(plain.value)


NAMED = [
    *[(torch, "mm"), (torch, "einsum"), (F, "linear"), (F, "softmax"), (F, "cross_entropy"), (F, "layer_norm")],
    *[(torch._VF, "lstm"), (torch.Tensor, "matmul"), (torch.Tensor, "__matmul__"), (torch.Tensor, "__rmatmul__")],
    *[(torch.Tensor, "norm"), (torch.linalg, "norm"), (torch.linalg, "inv")],  # which is called linalg_inv
]
KINDS = (inspect.isbuiltin, inspect.ismethoddescriptor, inspect.isfunction)


def identity(function):
    try:
        signature = str(inspect.signature(function))
    except ValueError:  # built-in functions mostly have none
        signature = None
    return function.__name__, function.__doc__, signature


@pytest.mark.parametrize("owner, name", NAMED, ids=lambda x: getattr(x, "__name__", x))
def test_wrapper_keeps_what_a_user_sees_and_is_pickled_by_reference(owner, name):
    original = getattr(owner, name)
    expected, held = identity(original), [[functools.partial(original)]]
    with o1():
        wrapper = getattr(owner, name)
        assert wrapper is not original and identity(wrapper) == expected
        if library is not None and owner is not torch.linalg:  # wrappers in C++ are of the kind that torch has there
            assert [is_kind(wrapper) for is_kind in KINDS] == [is_kind(original) for is_kind in KINDS]
        assert copy.deepcopy(wrapper) is copy.copy(wrapper) is wrapper
        streams = []
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            file = io.BytesIO()
            pickle.Pickler(file, protocol).dump([held, wrapper])
            streams += [
                file.getvalue(),
                pickle.dumps([held, wrapper], protocol),
                pickle._dumps([held, wrapper], protocol),
            ]
        streams.append(bytes(ForkingPickler.dumps([held, wrapper])))  # to a worker that is spawned
        assert all(pickle.loads(stream)[1] is wrapper for stream in streams)
    for stream in streams:
        assert b"ampkit" not in stream  # so that it loads where there is none
        [[part]], bare = pickle.loads(stream)
        assert part.func is bare is original
