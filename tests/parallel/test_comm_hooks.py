"""What DDP sends: bytes counted by a communication hook, on two gloo processes."""

import math

import pytest
import torch
import torch.distributed as dist
from helpers import as_one_of_two_ranks, backward, net_with_norm, results_of_two_ranks
from ranks import assert_equal, assert_moved_alike, batches_of_step, in_float32
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import ampkit

pytestmark = pytest.mark.slow

HOOKS = {"none": allreduce_hook, "fp16": fp16_compress_hook, "bf16": bf16_compress_hook}
CASES = [("O0", "none"), ("O1", "none"), ("O1", "fp16"), ("O1", "bf16"), ("O2", "none"), ("O5", "none")]
STEPS, SPOILED = 4, 2


def train(rank, case):
    """Steps of which rank 1 spoils one: weights, who skipped, and the bytes that each all-reduce sent."""
    level, hook = case
    model = net_with_norm()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rule = ampkit.DynamicLossScale(init_scale=2.0**8)  # gradients times 2^16 would not fit into a hook's float16
    ampkit.initialize(model, optimizer, opt_level=level, loss_scale=rule, verbosity=0)
    parallel = DistributedDataParallel(model)
    parallel.register_comm_hook(None, HOOKS[hook])
    sent, original = [], dist.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        sent.append(tensor.nbytes)
        return original(tensor, *args, **kwargs)

    skipped, per_step = [], []
    dist.all_reduce = all_reduce  # which the hooks call
    for step in range(STEPS):
        x, y = (part[rank] for part in batches_of_step(step))
        optimizer.zero_grad()
        loss = F.mse_loss(parallel(x), y)
        backward(loss * math.inf if (step, rank) == (SPOILED, 1) else loss, optimizer)
        optimizer.step()
        skipped.append(ampkit.step_was_skipped(optimizer))
        per_step.append(sum(sent))
        sent.clear()
    dist.all_reduce = original
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    ampkit.close()
    return {"weights": weights, "skipped": skipped, "bytes": per_step}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return results_of_two_ranks(__file__, tmp_path_factory.mktemp("hooks"))


@pytest.mark.parametrize("case", CASES)
def test_gradients_travel_in_the_precision_of_weights_or_of_the_hook(results, case):
    """Two layers of 6 * 8 + 8 and 8 * 3 + 3 values; a norm of 16, which is float32 at O2."""
    level, hook = case
    layers, norm = 6 * 8 + 8 + 8 * 3 + 3, 16
    expected = 2 * layers + 4 * norm if level == "O2" else (4 if hook == "none" else 2) * (layers + norm)
    for rank in results:
        assert rank[str(case)]["bytes"] == [expected] * STEPS


@pytest.mark.parametrize("case", CASES)
def test_ranks_step_alike_under_every_hook_and_as_float32_on_the_joined_batch(results, case):
    one, other = (rank[str(case)] for rank in results)
    assert one["skipped"] == other["skipped"]
    assert one["skipped"] == [step == SPOILED for step in range(STEPS)]
    assert_equal(one["weights"], other["weights"])
    expected = in_float32(lambda params: torch.optim.AdamW(params, lr=1e-2), (0, 1, 3))
    tolerance = 1e-4 if case[0] == "O0" else 0.05
    assert_moved_alike(one["weights"], expected, tolerance, net_with_norm().state_dict())


if __name__ == "__main__":
    as_one_of_two_ranks(lambda rank: {str(case): train(rank, case) for case in CASES})
