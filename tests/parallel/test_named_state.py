"""torch.distributed.checkpoint's `get_state_dict` and `set_state_dict` where the optimizer holds masters: state by names."""

import sys

import pytest
import torch
import torch.distributed as dist
from helpers import (
    STORED_BF16,
    as_one_of_two_ranks,
    at,
    backward,
    iterate,
    net_with_norm,
    random_batch,
    results_of_ranks,
)
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

import ampkit
from ampkit.optimizers import FusedAdam

NAMES = [name for name, _ in net_with_norm().named_parameters()]
OPTIMIZERS = {"AdamW": torch.optim.AdamW, "FusedAdam": FusedAdam}
OPTIONS = {
    "as it is": StateDictOptions(),
    "full": StateDictOptions(full_state_dict=True),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
}


def cloned(tree):
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), tree)


def prepared(level, name):
    """(model, optimizer); no level is plain float32."""
    model = net_with_norm()
    optimizer = OPTIMIZERS[name](model.parameters(), lr=1e-2)
    if level is not None:
        ampkit.initialize(model, optimizer, **at(level, verbosity=0))
    return model, optimizer


def train(model, optimizer, steps, rank=0):
    for step in steps:
        x, y = random_batch(10 * step + rank)
        iterate(lambda: F.mse_loss(model(x), y), optimizer)  # noqa: B023


def loaded(level, name, saved, options=None):
    """Return a new model and optimizer, with the saved state."""
    model, optimizer = prepared(level, name)
    weights, state = cloned(saved)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=options)
    return model, optimizer


def assert_equal_trees(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, dict):
            assert_equal_trees(actual[name], value)
        elif isinstance(value, torch.Tensor):
            assert actual[name].dtype == value.dtype and torch.equal(actual[name], value), name
        elif name == "param_groups":  # torch makes lists of tuples that it gathers
            found, wanted = (str(groups).replace("(", "[").replace(")", "]") for groups in (actual[name], value))
            assert found == wanted
        else:
            assert actual[name] == value, name


@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("level", ("O2", STORED_BF16, "O5"))
def test_run_goes_on_bit_for_bit_and_by_way_of_float32(level, name, how):
    """Load float32 state by name into a new run, and into plain float32 and back: the run goes on as if nothing had been."""
    options = OPTIONS[how]
    model, optimizer = prepared(level, name)
    train(model, optimizer, range(3))
    saved = cloned(get_state_dict(model, optimizer, options=options))
    if how != "flat":
        assert sorted(saved[1]["state"]) == sorted(NAMES) and saved[1]["param_groups"][0]["params"] == NAMES
        moments = {state[key].dtype for state in saved[1]["state"].values() for key in ("exp_avg", "exp_avg_sq")}
        assert moments == {torch.float32} == {value.dtype for value in saved[0].values()}
    train(model, optimizer, range(3, 5))
    straight = cloned(model.state_dict())
    ampkit.close()

    float32 = loaded(None, name, saved, options)
    again = cloned(get_state_dict(*float32, options=options))
    assert_equal_trees(again[0], saved[0])
    assert_equal_trees(again[1], saved[1])
    for checkpoint_ in (saved, again):
        model, optimizer = loaded(level, name, checkpoint_, options)
        train(model, optimizer, range(3, 5))
        assert_equal_trees(model.state_dict(), straight)
        ampkit.close()


class TwoNets(torch.nn.Module):
    """Two nets that share their first layer."""

    def __init__(self):
        super().__init__()
        self.a = net_with_norm()
        self.b = torch.nn.Sequential(self.a[0], torch.nn.Linear(8, 2))

    def forward(self, x):
        return self.a(x).square().mean() + self.b(x).square().mean()


def test_state_of_a_compiled_model_two_optimizers_and_tied_weights():
    tied = TwoNets()
    first = torch.optim.AdamW(tied.a.parameters(), lr=1e-2)
    second = torch.optim.SGD(tied.b[1].parameters(), lr=1e-2, momentum=0.9)
    ampkit.initialize(tied, [first, second], opt_level="O2", verbosity=0)
    backward(tied(random_batch()[0]), [first, second])
    first.step()
    second.step()
    state = get_optimizer_state_dict(torch.compile(tied, backend="eager"), [first, second])["state"]
    ampkit.close()
    assert sorted(state) == sorted([*(f"a.{name}" for name in NAMES), "b.1.weight", "b.1.bias"])
    assert state["b.1.weight"]["momentum_buffer"].shape == (2, 8) and state["a.0.weight"]["exp_avg"].shape == (8, 6)


def test_state_of_an_initialized_optimizer_before_its_first_step_is_zeros_and_its_weights_stay():
    model, optimizer = prepared("O2", "FusedAdam")
    before = cloned(model.state_dict())
    state = get_optimizer_state_dict(model, optimizer)["state"]
    after = cloned(model.state_dict())
    ampkit.close()
    assert sorted(state) == sorted(NAMES) and not any(one["exp_avg"].any() for one in state.values())
    assert_equal_trees(after, before)


def test_masters_written_in_place_by_checkpoint_load_reach_the_weights(tmp_path):
    """`torch.distributed.checkpoint.load` writes into the tensors that `get_state_dict` gave it."""
    model, optimizer = prepared("O2", "AdamW")
    train(model, optimizer, range(3))
    weights, state = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "one", no_dist=True)
    expected = cloned(model.state_dict())
    train(model, optimizer, range(3, 5))
    straight = cloned(model.state_dict())
    ampkit.close()

    model, optimizer = prepared("O2", "AdamW")
    weights, state = get_state_dict(model, optimizer)
    read = {"model": weights, "optimizer": state}
    checkpoint.load(read, checkpoint_id=tmp_path / "one", no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=read["model"], optim_state_dict=read["optimizer"])
    assert_equal_trees(cloned(model.state_dict()), expected)
    train(model, optimizer, range(3, 5))
    assert_equal_trees(model.state_dict(), straight)
    ampkit.close()


def work(rank):
    """Save a checkpoint under DDP while the training goes on; return the weights at its end, and those of a run from there."""
    of_their_own, results = dist.new_group(), {}  # otherwise tensors saved meanwhile would meet DDP's messages
    for level in ("O1", "O2"):
        where = f"{sys.argv[1]}/{level}"
        for run in ("straight", "again"):
            model, optimizer = prepared(level, "AdamW")
            ddp = DistributedDataParallel(model)
            if run == "straight":
                train(ddp, optimizer, range(3), rank)
            weights, state = get_state_dict(ddp, optimizer)
            both = {"model": weights, "optimizer": state}
            if run == "straight":
                pending = checkpoint.async_save(both, checkpoint_id=where, process_group=of_their_own)
            else:
                pending.result()
                checkpoint.load(both, checkpoint_id=where)
                set_state_dict(ddp, optimizer, model_state_dict=both["model"], optim_state_dict=both["optimizer"])
            train(ddp, optimizer, range(3, 5), rank)
            results[f"{level} {run}"] = cloned(model.state_dict())
            ampkit.close()
    return results


@pytest.mark.slow
def test_two_ranks_go_on_from_a_checkpoint_that_was_saved_during_training(tmp_path):
    ranks = results_of_ranks(__file__, tmp_path)
    for level in ("O1", "O2"):
        for rank in ranks:
            for run in ("straight", "again"):
                assert_equal_trees(rank[f"{level} {run}"], ranks[0][f"{level} straight"])


if __name__ == "__main__":
    as_one_of_two_ranks(work)
