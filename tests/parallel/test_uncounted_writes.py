"""Writes of torch.distributed to weights and to master_params: ranks are equal bit for bit after them."""

import pytest
import torch
import torch.distributed as dist
from helpers import (
    STORED_BF16,
    as_one_of_two_ranks,
    initialize_quietly,
    iterate,
    net_with_norm,
    random_batch,
    results_of_ranks,
    whole,
)
from torch.distributed.algorithms.join import Join
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import ampkit
from ampkit.optimizers import FusedSGD

# name: (level, optimizer)
CASES = {
    "O1": ("O1", torch.optim.SGD),
    "O2": ("O2", torch.optim.SGD),
    "stored": (STORED_BF16, torch.optim.SGD),
    "stored, fused": (STORED_BF16, FusedSGD),
    "O5": ("O5", torch.optim.SGD),
}


def prepared(case="stored", seed=0):
    level, make = CASES[case]
    return initialize_quietly(net_with_norm(seed=seed), lambda p: make(p, lr=0.5), level)


def through_data(param):
    """Average over processes as scripts do, by a sum and a factor: torch counts neither as a write."""
    dist.all_reduce(param.data)
    param.data.mul_(2.0)


def through_detach(param):
    dist.broadcast(param.detach(), 0)
    param.data.mul_(2.0)


@pytest.mark.parametrize("write", (through_data, through_detach))
@pytest.mark.parametrize("case", CASES)
def test_what_a_collective_writes_to_a_weight_is_its_float32_value(case, write, group_of_one):
    model, optimizer = prepared(case)
    x, y = random_batch()
    iterate(lambda: F.mse_loss(model(x), y), optimizer)  # all agree
    expected = {name: 2 * param.detach().float() for name, param in model.named_parameters()}
    for param in model.parameters():
        write(param)
    optimizer.zero_grad()
    optimizer.step()  # which would write the masters into the weights
    for name, value in whole(model.state_dict()).items():
        assert torch.equal(value, expected[name]), name


def test_a_collective_clears_the_rests_of_weights_it_writes_to_and_no_others(group_of_one):
    model, _ = prepared()
    before = whole(model.state_dict())
    elsewhere = model[3].weight.data.clone()
    dist.broadcast(model[0].weight.data[2:], 0)  # a part of it
    dist.all_reduce(elsewhere)
    dist.all_gather([torch.empty_like(model[3].weight)], model[3].weight.data)  # for a metric: the weight is read
    after = whole(model.state_dict())
    assert torch.equal(after.pop("0.weight"), model[0].weight.float())
    assert not torch.equal(before["0.weight"], model[0].weight.float())
    assert all(torch.equal(value, before[name]) for name, value in after.items())


def test_memory_that_was_a_weights_before_is_none_of_its(group_of_one):
    model, _ = prepared()
    model(random_batch()[0])
    before = whole(model.state_dict())
    old = model[0].weight.data
    model[0].weight.data = old.clone()
    dist.all_reduce(old)
    assert all(torch.equal(value, before[name]) for name, value in whole(model.state_dict()).items())


def doubled_by_a_collective(value):
    alias = value.numpy(force=True)  # which does not ask for .data
    dist.all_reduce(value)
    alias *= 2


def replaced(value):
    value.data = 2 * value.detach()


@pytest.mark.parametrize("write", [doubled_by_a_collective, replaced])
def test_what_is_written_to_master_params_reaches_the_next_forward(write, group_of_one):
    model, optimizer = prepared()
    expected = {name: 2 * value for name, value in whole(model.state_dict()).items()}
    for value in ampkit.master_params(optimizer):
        write(value)
    model(random_batch()[0])
    for name, param in model.named_parameters():
        assert torch.equal(param.float(), expected[name].to(param.dtype).float()), name


def test_a_sparse_tensor_is_reduced_beside_a_cast_model(group_of_one):
    """The memory of a sparse tensor has no address to be known by."""
    held = prepared()
    sparse = torch.tensor([1.0, 0.0, 2.0, 0.0]).to_sparse()
    dist.all_reduce(sparse)
    assert held and sparse.to_dense().tolist() == [1.0, 0.0, 2.0, 0.0]


# On two processes.


def trained(rank, case):
    """Train with DDP, from a start of each rank's own; rank 1 has one more batch, which rank 0 sits out in ``Join``."""
    model, optimizer = prepared(case, seed=rank)
    parallel = DistributedDataParallel(model)
    results = {"wrapped": whole(model.state_dict())}
    with Join([parallel]):
        for step in range(2 + rank):
            x, y = random_batch(seed=2 * step + rank)
            iterate(lambda x=x, y=y: F.mse_loss(parallel(x), y), optimizer)
    results["trained"] = whole(model.state_dict())
    ampkit.close()
    return results


def stepped_after_a_broadcast(rank, case):
    """Take fifty equal steps after weights were broadcast by hand, before any forward."""
    model, optimizer = prepared(case, seed=rank)
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.data, 0)
    for step in range(50):
        x, y = random_batch(seed=step)
        iterate(lambda x=x, y=y: F.mse_loss(model(x), y), optimizer)
    found = whole(model.state_dict())
    ampkit.close()
    return found


def test_ddp_gives_all_ranks_the_float32_values_of_one(tmp_path):
    first, second = results_of_ranks(__file__, tmp_path)
    for case in CASES:
        for name, value in net_with_norm(seed=0).state_dict().items():
            assert torch.equal(first[case]["wrapped"][name], value)
            assert torch.equal(second[case]["wrapped"][name], value)
            assert torch.equal(first[case]["trained"][name], second[case]["trained"][name])
            assert not torch.equal(first[case]["trained"][name], value)
            assert torch.equal(first[case]["by hand"][name], second[case]["by hand"][name])


if __name__ == "__main__":
    as_one_of_two_ranks(
        lambda rank: {case: {**trained(rank, case), "by hand": stepped_after_a_broadcast(rank, case)} for case in CASES}
    )
