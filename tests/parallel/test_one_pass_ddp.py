"""torch's own optimizers under DistributedDataParallel, on two gloo processes, judged by float64 on the joined batch.

Each step has two micro-batches, of which the first is not reduced. The loss is linear in the parameters and the batches are small
integers, so that gradients and their averages over processes are exact in every precision: what is left is the arithmetic of the
step.
"""

import math
from contextlib import nullcontext

import torch
from helpers import STORED_BF16, as_one_of_two_ranks, at, backward, results_of_two_ranks, whole
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ampkit

STEPS, SPOILED = 5, 2
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW over copies": lambda p: torch.optim.AdamW(p, lr=1e-2),
}
LEVELS = {"O2": ampkit.DynamicLossScale(init_scale=128.0), STORED_BF16: 1.0, "O5": 1.0}
CASES = [(level, name) for level in LEVELS for name in OPTIMIZERS]


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
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, *(part.double() for part in batches()[step])).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def trained(rank, level, name):
    """The float32 values after all steps, and whether each was skipped."""
    model = Net()
    optimizer = OPTIMIZERS[name](model.parameters())
    settings = at(level, loss_scale=LEVELS[level], verbosity=0)
    if name == "AdamW over copies":
        settings |= {"one_pass_step": False, "check_gradients": True}
    model, optimizer = ampkit.initialize(model, optimizer, **settings)
    ddp, skipped = DistributedDataParallel(model), []
    for step, (x, factors) in enumerate(batches(rank)):
        optimizer.zero_grad()
        x = x * math.nan if step == SPOILED and rank == 1 else x
        for part, half in enumerate(zip(x.chunk(2), factors.chunk(2))):
            with ddp.no_sync() if part == 0 else nullcontext():
                backward(loss_of(ddp, *half) / 2, optimizer)
        ampkit.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        skipped.append(ampkit.step_was_skipped(optimizer))
    values = whole(model.state_dict())
    ampkit.close()
    return {"values": values, "skipped": skipped}


def test_two_ranks_are_one_process_and_a_nan_on_one_of_them_is_a_step_that_was_not(tmp_path):
    ranks = results_of_two_ranks(__file__, tmp_path)
    for case in CASES:
        first, second = (rank[str(case)] for rank in ranks)
        assert first["skipped"] == second["skipped"] == [step == SPOILED for step in range(STEPS)], case
        expected = in_float64(case[1], [step for step in range(STEPS) if step != SPOILED])
        with_all = in_float64(case[1], range(STEPS))
        for name, value in first["values"].items():
            assert value.dtype is torch.float32 and torch.equal(value, second["values"][name]), (case, name)
            torch.testing.assert_close(value.double(), expected[name], rtol=1e-6, atol=1e-6)
            assert (value.double() - with_all[name]).abs().max() > 1e-3, "the comparison tells a step more"


if __name__ == "__main__":
    as_one_of_two_ranks(lambda rank: {str(case): trained(rank, *case) for case in CASES})
