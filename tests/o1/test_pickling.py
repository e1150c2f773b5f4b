"""Functions of torch are pickled while they are wrapped: the originals that scripts hold, and the wrappers."""

import functools
import io
import multiprocessing
import pickle

import pytest
import torch
from helpers import o1
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import ampkit

pytestmark = pytest.mark.switch

X = torch.linspace(-2.0, 2.0, 6).reshape(2, 3)
W = torch.linspace(-1.0, 1.0, 9).reshape(3, 3)
FUNCTIONS = [(F, "linear"), (F, "softmax"), (torch, "mm"), (torch.Tensor, "matmul"), (torch.Tensor, "norm")]


class Holder:
    def __init__(self, function):
        self.function = function


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("owner, name", FUNCTIONS, ids=lambda x: getattr(x, "__name__", x))
def test_originals_and_wrappers_are_pickled(owner, name, protocol):
    original = getattr(owner, name)
    held = [[[Holder(original)]]]
    with o1():
        wrapper = getattr(owner, name)
        written = pickle.dumps([held, wrapper, Holder(wrapper)], protocol)
        file = io.BytesIO()
        pickle.Pickler(file, protocol).dump([held, wrapper, Holder(wrapper)])
        pure = pickle._dumps([held, wrapper, Holder(wrapper)], protocol)
        inside = pickle.loads(written)
        assert inside[1] is inside[2].function is wrapper
    for stream in (written, file.getvalue(), pure):
        assert b"ampkit" not in stream  # so that it loads where there is none
        [[[outer]]], bare, last = pickle.loads(stream)
        x = X[:, :2] if name == "mm" else X
        arguments = {"linear": (X, W), "mm": (x, x), "matmul": (X, W), "softmax": (X, -1), "norm": (X,)}[name]
        for function in (outer.function, bare, last.function):
            assert torch.equal(function(*arguments), original(*arguments))
        assert bare is last.function is original


def test_model_is_saved_and_loaded_while_patched():
    model = nn.Linear(3, 3)
    model.act, unreachable = F.softplus, Holder([Holder(F.softmax)])
    softplus_before, softmax_before = F.softplus, F.softmax
    ampkit.initialize(model, opt_level="O1", verbosity=0)
    file = io.BytesIO()
    torch.save([model, unreachable], file)
    ampkit.close()
    file.seek(0)
    loaded, holder = torch.load(file, weights_only=False)
    assert loaded.act is softplus_before and holder.function[0].function is softmax_before
    assert torch.equal(loaded.weight, model.weight)


class Transformed(Dataset):
    def __init__(self, transform):
        self.transform = transform

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.transform(X + index)


@pytest.mark.slow
def test_spawned_workers_take_originals_and_wrappers():
    functions = [functools.partial(F.softmax, dim=-1)]
    expected = torch.stack([functions[0](X + index) for index in range(4)])
    hidden = Transformed(Holder(functools.partial(F.softmax, dim=-1)).function)
    with o1():
        shown = Transformed(functools.partial(F.softmax, dim=-1))
        for dataset in (hidden, shown):
            loader = DataLoader(dataset, 4, num_workers=1, multiprocessing_context=multiprocessing.get_context("spawn"))
            [batch] = list(loader)
            assert torch.equal(batch, expected)


def test_picklers_are_given_back():
    before = pickle.Pickler, pickle.dump, pickle.dumps
    with o1():
        assert pickle.Pickler is not before[0]

        class Custom(pickle.Pickler):
            pass

    assert (pickle.Pickler, pickle.dump, pickle.dumps) == before
    assert not hasattr(pickle._Pickler, "reducer_override")
    assert "reducer_override" not in vars(multiprocessing.reduction.ForkingPickler)
    file = io.BytesIO()
    Custom(file).dump([F.softmax])
    assert pickle.loads(file.getvalue()) == [F.softmax]


def test_function_that_cannot_be_pickled_is_refused_as_ever():
    with o1():
        with pytest.raises((pickle.PicklingError, AttributeError), match=r"local object|Can't pickle"):
            pickle.dumps(lambda: None)


@pytest.mark.compiled("wrappers")
def test_wrapper_of_a_built_in_that_a_script_kept_is_pickled_after_close():
    with o1():
        kept = [F.gelu, torch.mm, torch.Tensor.matmul]
    assert pickle.loads(pickle.dumps(kept)) == [F.gelu, torch.mm, torch.Tensor.matmul]
