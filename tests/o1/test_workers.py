"""Batches are the same as without O1, wherever they are made."""

import pytest
import torch
from helpers import o1, others_slow
from torch.utils.data import DataLoader, Dataset, IterableDataset


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
    class Broken(Images):
        def __getitem__(self, index):
            raise KeyError(index)

    with o1():
        with pytest.raises(KeyError):
            next(iter(DataLoader(Broken())))
        assert blur(0).dtype is torch.bfloat16
