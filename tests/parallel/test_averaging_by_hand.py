"""Gradients averaged by hand over two gloo processes, as scripts without DistributedDataParallel do."""

import pytest
import torch
import torch.distributed as dist
from helpers import STORED_BF16, as_one_of_two_ranks, at, net_with_norm, results_of_two_ranks
from ranks import assert_equal, whole
from torch.nn import functional as F

import ampkit
from ampkit.optimizers import FusedAdam

STEPS = 6
LEVELS = {
    "O1": {"opt_level": "O1"},
    "O2": {"opt_level": "O2"},
    "O2_float16": {"opt_level": "O2", "cast_model_type": torch.float16},
    "O2_without_a_scale": at(STORED_BF16),
    "O5": {"opt_level": "O5"},
}
# name: (level, optimizer, blocks of scale_loss before each step, whether averages are written through .data)
CASES = {
    f"{level}_{base.__name__}_{blocks}{'_data' if through_data else ''}": (level, base, blocks, through_data)
    for level in LEVELS
    for base in (torch.optim.AdamW, FusedAdam)
    for blocks in (1, 2)
    for through_data in (False, True)
}


def batch(step, rank):
    generator = torch.Generator().manual_seed(2 * step + rank)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)


def run_case(rank, case):
    level, base, blocks, through_data = CASES[case]
    torch.manual_seed(0)
    model = net_with_norm()
    optimizer = base(model.parameters(), lr=0.01)
    ampkit.initialize(model, optimizer, **LEVELS[level], verbosity=0)
    for step in range(STEPS):
        optimizer.zero_grad()
        for block in range(blocks):
            x, y = batch(blocks * step + block, rank)
            with ampkit.scale_loss(F.mse_loss(model(x).float(), y), optimizer) as scaled_loss:
                scaled_loss.backward()
        for p in model.parameters():
            gradient = p.grad.data if through_data else p.grad
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        optimizer.step()
    trained = whole(model.state_dict())
    ampkit.close()
    return trained


def in_float32(case):
    """The same training in plain torch, over both ranks' gradients at once."""
    _, base, blocks, _ = CASES[case]
    torch.manual_seed(0)
    model = net_with_norm()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for group in optimizer.param_groups:
        group["weight_decay"] = base([torch.zeros(1)]).defaults["weight_decay"]
    for step in range(STEPS):
        optimizer.zero_grad()
        for block in range(blocks):
            for rank in range(2):
                x, y = batch(blocks * step + block, rank)
                (F.mse_loss(model(x), y) / 2).backward()
        optimizer.step()
    return model.state_dict()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return results_of_two_ranks(__file__, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES)
def test_ranks_are_equal_bit_for_bit_and_train_as_in_float32(results, case):
    """Six steps of Adam at 0.01 move a weight by up to 0.06; a rank that trained alone would be as far from float32 as it moved."""
    one, two = (found[case] for found in results)
    assert_equal(one, two)
    for name, value in in_float32(case).items():
        assert (one[name] - value).abs().mean() < 0.006, name


if __name__ == "__main__":
    as_one_of_two_ranks(lambda rank: {case: run_case(rank, case) for case in CASES})
