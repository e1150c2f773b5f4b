"""torch.compile around each block of a model that FSDP2 shards, on two gloo processes.

With the backend that runs graphs as they are: what inductor makes of them is the same without FSDP2, and takes minutes.
"""

import pytest
import torch
from helpers import as_one_of_two_ranks, backward, results_of_two_ranks
from torch import nn
from torch.nn import functional as F

import ampkit
from ampkit.parallel import fully_shard

pytestmark = pytest.mark.slow

LEVELS = ("O1", "O5")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def data(step):
    """Both ranks' batches."""
    drawn = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(step))
    return drawn[..., :8], drawn[..., 8:]


def trained(level, rank=None, compiles=False):
    """Take three steps on the data of a rank, or, without a rank, of both in a single process."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(8, 8))
    for block in model[:2]:
        if compiles:
            block.compile(backend="aot_eager")
        if rank is not None:
            fully_shard(block, opt_level=level)
    if rank is not None:
        fully_shard(model, opt_level=level)
    start = whole(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
    torch._dynamo.utils.counters.clear()
    for step in range(3):
        x, y = (part.flatten(0, 1) if rank is None else part[rank] for part in data(step))
        optimizer.zero_grad()
        backward(F.mse_loss(model(x), y), optimizer)
        ampkit.clip_grad_norm_(optimizer, 0.5)
        optimizer.step()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    moved = whole(model) - start
    ampkit.close()
    return {"moved": moved, "graphs": graphs}


def whole(model):
    values = [getattr(value, "full_tensor", lambda value=value: value)() for value in model.state_dict().values()]
    return torch.cat([value.detach().flatten() for value in values])


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return results_of_two_ranks(__file__, tmp_path_factory.mktemp("compiled"))


@pytest.mark.parametrize("level", LEVELS)
def test_compiled_blocks_train_as_one_process_without_compilation(results, level):
    one, other = (rank[level] for rank in results)
    assert one["graphs"] >= 1 and torch.equal(one["moved"], other["moved"])
    expected = trained(level)["moved"]
    assert (one["moved"] - expected).norm() <= 0.04 * expected.norm()


if __name__ == "__main__":
    as_one_of_two_ranks(lambda rank: {level: trained(level, rank, compiles=True) for level in LEVELS})
