"""Properties of torch's functions that users rely on, while the functions are wrapped."""

import copy
import inspect
import pickle
import traceback
import typing

import pytest
import torch
from helpers import o1
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import ampkit

pytestmark = pytest.mark.switch

X = torch.linspace(-2.0, 2.0, 4).reshape(2, 2)
LOW = X.bfloat16()

HANDLED: typing.Final = {}


def handles(function):
    def put(implementation):
        HANDLED[function] = implementation
        return implementation

    return put


class Labelled(torch.Tensor):
    """A subclass as torch's documentation has it, with a table of its own functions."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in HANDLED:
            return HANDLED[func](*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})


@handles(F.softmax)
@handles(F.linear)
@handles(torch.mm)
@handles(torch.Tensor.matmul)
@handles(torch.Tensor.norm)
def labelled(*args, **kwargs):
    return "labelled"


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


FAILURES = {
    "shapes": lambda: torch.mm(torch.ones(2, 3), torch.ones(2, 3)),
    "a missing argument": lambda: F.softmax(),
    "an unknown keyword": lambda: F.gelu(X, nonsense=1),
    "float64 beside float32": lambda: torch.mm(X, X.double()),
    "an operator": lambda: torch.ones(2, 3) @ torch.ones(2, 3),
    "an operator and text": lambda: X @ "text",
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
    (torch, "mm"),
    (torch, "einsum"),
    (F, "linear"),
    (F, "softmax"),
    (F, "cross_entropy"),
    (F, "layer_norm"),
    (torch._VF, "lstm"),
    (torch.Tensor, "matmul"),
    (torch.Tensor, "__matmul__"),
    (torch.Tensor, "__rmatmul__"),
    (torch.Tensor, "norm"),
    (torch.linalg, "norm"),
]


@pytest.mark.parametrize("owner, name", NAMED, ids=lambda x: getattr(x, "__name__", x))
def test_wrappers_keep_name_doc_signature_and_pickle_by_reference(owner, name):
    def signature(function):
        try:
            return str(inspect.signature(function))
        except ValueError:  # built-in functions mostly have none
            return None

    original = getattr(owner, name)
    expected = original.__name__, original.__doc__, signature(original)
    with o1():
        wrapper = getattr(owner, name)
        assert wrapper is not original
        assert (wrapper.__name__, wrapper.__doc__, signature(wrapper)) == expected
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            written = pickle.dumps(wrapper, protocol)
            assert pickle.loads(written) is wrapper
        assert copy.deepcopy(wrapper) is copy.copy(wrapper) is wrapper
    assert pickle.loads(written) is original
