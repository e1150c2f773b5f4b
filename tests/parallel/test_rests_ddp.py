"""Weights with rests under DistributedDataParallel, on two gloo processes: updated in one pass, and over stand-ins."""

from contextlib import nullcontext

import pytest
import torch
from helpers import STORED_BF16, as_one_of_two_ranks, at, batch_of_rank, results_of_two_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ampkit
from ampkit.optimizers import FusedAdam

KINDS = {
    "stand-ins": (torch.optim.AdamW, {"one_pass_step": False}),
    "one pass": (FusedAdam, {}),
    "torch's in one pass": (torch.optim.AdamW, {}),
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(batch_of_rank(0).shape[1], 8), nn.ReLU(), nn.Linear(8, 1))


def trained(rank, make, settings):
    """The float32 values once DDP is made, and after three steps of two micro-batches, the first of each without reducing."""
    model = net()
    optimizer = make(model.parameters(), lr=1e-2, weight_decay=0.0)
    model, optimizer = ampkit.initialize(model, optimizer, **at(STORED_BF16, verbosity=0, **settings))
    ddp = DistributedDataParallel(model)
    found = {"at first": {name: value.clone() for name, value in model.state_dict().items()}}
    for step in range(3):
        for index in range(2):
            with ddp.no_sync() if index == 0 else nullcontext():
                loss = ddp(batch_of_rank(rank, 2 * step + index)).square().mean()
                with ampkit.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
        ampkit.clip_grad_norm_(optimizer, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    found["at last"] = {name: value.clone() for name, value in model.state_dict().items()}
    ampkit.close()
    return found


@pytest.mark.slow
def test_ranks_stay_equal_bit_for_bit_and_train_alike(tmp_path):
    first, second = results_of_two_ranks(__file__, tmp_path)
    for when in ("at first", "at last"):
        for name, value in first["one pass"][when].items():
            assert torch.equal(value, second["one pass"][when][name])
            for kind in KINDS:
                torch.testing.assert_close(first[kind][when][name], value, rtol=0, atol=1e-6)
    for name, value in net().state_dict().items():  # what DDP broadcasts is what was there
        assert torch.equal(first["one pass"]["at first"][name], value)
        assert not torch.equal(first["one pass"]["at last"][name], value)


if __name__ == "__main__":
    as_one_of_two_ranks(lambda rank: {name: trained(rank, *kind) for name, kind in KINDS.items()})
