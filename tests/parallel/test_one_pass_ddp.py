"""Steps in one pass and over stand-ins under DistributedDataParallel, on two gloo processes, judged by float64 on the joined batch.

The loss is linear in the parameters and the batches are small integers, so that gradients and their averages over processes are
exact in every precision: what is left is the arithmetic of the step.
"""

import math
from contextlib import nullcontext

import torch
from helpers import STORED_BF16, as_one_of_two_ranks, at, backward, results_of_two_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ampkit
from ampkit import kernels
from ampkit.optimizers import FusedAdam

STEPS, SPOILED = 5, 2
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "FusedAdam": lambda p: FusedAdam(p, lr=1e-2, weight_decay=1e-2),
}
STAND_INS = (STORED_BF16, "AdamW", {"one_pass_step": False, "check_gradients": True})
LEVELS = {"O2": ampkit.DynamicLossScale(init_scale=128.0), STORED_BF16: 1.0, "O5": 1.0}
CASES = [*((level, name, {}) for level in LEVELS for name in OPTIMIZERS), STAND_INS]


class Net(nn.Module):
    """A matrix and its bias, which O2 stores in lower precision, and a vector that stays float32."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.offset = nn.Linear(7, 5), nn.Parameter(torch.randn(5))

    def forward(self, x):
        return self.layer(x) + self.offset


def batches(rank=None):
    """Inputs and the factors of outputs, of one rank or of both joined; from -3 to 3."""
    generator = torch.Generator().manual_seed(1)
    everything = torch.randint(-3, 4, (STEPS, 2, 4, 12), generator=generator).float()
    everything = everything.flatten(1, 2) if rank is None else everything[:, rank]
    return [(batch[:, :7], batch[:, 7:]) for batch in everything]


def loss_of(model, x, factors):
    return (model(x) * factors).sum() / len(x)


def in_float64(name, steps):
    model = Net().double()
    optimizer = OPTIMIZERS[name.replace("FusedAdam", "AdamW")](model.parameters())
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, *(part.double() for part in batches()[step])).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def trained(rank, level, name, settings):
    """The float32 values after steps of two micro-batches, whether each was skipped, and whether copies of weights were made."""
    made = []
    join = kernels.multi_tensor_join
    kernels.multi_tensor_join = lambda *lists: made.append(None) or join(*lists)
    try:
        model = Net()
        optimizer = OPTIMIZERS[name](model.parameters())
        settings = at(level, loss_scale=LEVELS[level], verbosity=0, **settings)
        model, optimizer = ampkit.initialize(model, optimizer, **settings)
        ddp, skipped = DistributedDataParallel(model), []
        for step, (x, factors) in enumerate(batches(rank)):
            optimizer.zero_grad()
            x = x * math.nan if (step, rank) == (SPOILED, 1) else x
            for index, part in enumerate(zip(x.chunk(2), factors.chunk(2))):
                with ddp.no_sync() if index == 0 else nullcontext():
                    backward(loss_of(ddp, *part) / 2, optimizer)
            ampkit.clip_grad_norm_(optimizer, 1.0)
            optimizer.step()
            skipped.append(ampkit.step_was_skipped(optimizer))
        copies = len(made)
    finally:
        kernels.multi_tensor_join = join
    values = {name: value.clone() for name, value in model.state_dict().items()}
    ampkit.close()
    return {"values": values, "skipped": skipped, "copies": copies}


def test_two_ranks_are_one_process_and_a_nan_on_one_of_them_is_a_step_that_was_not(tmp_path):
    ranks = results_of_two_ranks(__file__, tmp_path)
    for case in CASES:
        first, second = (rank[str(case)] for rank in ranks)
        assert first["skipped"] == second["skipped"] == [step == SPOILED for step in range(STEPS)], case
        assert bool(first["copies"]) == bool(second["copies"]) == (case == STAND_INS), case
        expected = in_float64(case[1], [step for step in range(STEPS) if step != SPOILED])
        with_all = in_float64(case[1], range(STEPS))
        for name, value in first["values"].items():
            assert value.dtype is torch.float32 and torch.equal(value, second["values"][name]), (case, name)
            torch.testing.assert_close(value.double(), expected[name], rtol=1e-6, atol=1e-6)
            assert (value.double() - with_all[name]).abs().max() > 1e-3, "the comparison tells a step more"


if __name__ == "__main__":
    as_one_of_two_ranks(lambda rank: {str(case): trained(rank, *case) for case in CASES})
