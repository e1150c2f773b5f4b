"""Functions of torch are pickled while they are wrapped, and workers of a DataLoader make the batches of a script without O1."""

import functools
import io
import multiprocessing
import pickle

import pytest
import torch
from helpers import o1, others_slow
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

import ampkit

pytestmark = pytest.mark.switch


def test_model_is_saved_and_loaded_while_patched():
    model = nn.Linear(3, 3)
    model.act = softplus_before = F.softplus
    unreachable, softmax_before = [functools.partial(F.softmax)], F.softmax
    ampkit.initialize(model, opt_level="O1", verbosity=0)
    file = io.BytesIO()
    torch.save([model, unreachable], file)
    ampkit.close()
    file.seek(0)
    loaded, [partial] = torch.load(file, weights_only=False)
    assert loaded.act is softplus_before and partial.func is softmax_before
    assert torch.equal(loaded.weight, model.weight)


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


def blur(index):
    image = torch.arange(16.0).reshape(1, 1, 4, 4) * 0.1 + index
    return torch.nn.functional.conv2d(image, torch.full((1, 1, 3, 3), 0.1))


class Images(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return blur(index)


class Stream(IterableDataset):
    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        return (blur(index) for index in range(4) if worker is None or index % 2 == worker.id)


def collate(samples):
    return torch.cat(samples) @ torch.eye(2)


@pytest.mark.parametrize("context", others_slow("fork", of=["fork", "spawn"]))
def test_batches_of_0_and_2_workers_are_bit_identical(context):
    expected = list(DataLoader(Images(), batch_size=2, collate_fn=collate))
    with o1():
        here = list(DataLoader(Images(), batch_size=2, collate_fn=collate))
        there = list(DataLoader(Images(), 2, collate_fn=collate, num_workers=2, multiprocessing_context=context))
        assert blur(0).dtype is torch.bfloat16, "casting is off in the main process"
    for plain, zero, two in zip(expected, here, there, strict=True):
        assert zero.dtype is two.dtype is torch.float32
        assert torch.equal(plain, zero)
        assert torch.equal(plain, two)


def test_batches_of_a_stream_are_uncast():
    expected = list(DataLoader(Stream(), batch_size=2))
    with o1():
        batches = []
        for batch in DataLoader(Stream(), batch_size=2):
            batches.append(batch)
            assert blur(0).dtype is torch.bfloat16, "casting stayed off between two batches"
    assert all(torch.equal(plain, batch) for plain, batch in zip(expected, batches, strict=True))


def test_casting_is_on_again_after_a_transform_failed():
    def fail(batch):
        raise KeyError

    with o1():
        with pytest.raises(KeyError):
            next(iter(DataLoader(Images(), collate_fn=fail)))
        assert blur(0).dtype is torch.bfloat16
