"""FSDP2 on two gloo processes, beside training (test_joined_batch.py): what is refused, kept, gathered and clipped."""

import math

import pytest
import torch
from helpers import GatedNet, as_one_of_two_ranks, backward, whole
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torchs
from torch.nn import functional as F

import ampkit
from ampkit.apex.optimizers import FusedLAMB
from ampkit.parallel import fully_shard
from ampkit.sharding import has_run, unsharded_params

BF16 = torch.bfloat16


def batch(rank=None):
    """Inputs and targets of one rank, or of both joined."""
    everything = torch.randn(2, 4, 9, generator=torch.Generator().manual_seed(7))
    everything = everything.flatten(0, 1) if rank is None else everything[rank]
    return everything[:, :6], everything[:, 6:]


def sharded(level, shard=fully_shard, model=None, **settings):
    model = GatedNet() if model is None else model
    settings = {"opt_level": level, **settings} if shard is fully_shard else settings
    for block in model.blocks:
        shard(block, **settings)
    return shard(model, **settings)


def initialize(model, level, make=torch.optim.AdamW, optimizer=None, **settings):
    optimizer = make(model.parameters(), lr=0.1) if optimizer is None else optimizer
    return ampkit.initialize(model, optimizer, opt_level=level, verbosity=0, **settings)


def by_torch(level, **settings):
    return lambda: initialize(sharded(level, torchs, **settings), level)


def shard_afterwards(level):
    model, optimizer = initialize(GatedNet(), level)
    backward(sharded(level, model=model)(torch.ones(2, 6)).sum(), optimizer)


def optimizer_before():
    model = GatedNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    initialize(sharded("O5", model=model), "O5", optimizer=optimizer)


def born_and_run():
    model = sharded("O1", model=GatedNet().bfloat16())
    model(torch.ones(2, 6, dtype=BF16))
    initialize(model, "O1")


POLICY = MixedPrecisionPolicy(param_dtype=BF16)
AFTER = ("after initialize()", "fully_shard, then the optimizer")
#: What a script does, and words that refuse it; None if it is taken.
REFUSALS = {
    "torch's own at O1": (by_torch("O1"), None),
    "torch's own at O2": (
        by_torch("O2"),
        ("'first.weight'", "its own dtype", "torch.bfloat16", "ampkit.parallel.fully_shard", "'O2'"),
    ),
    "torch's own at O5": (by_torch("O5"), None),
    "torch's own with a policy at O2": (
        by_torch("O2", mp_policy=POLICY),
        ("norm.weight'", "torch.float32", "groups of their own", "opt_level='O2'"),
    ),
    "torch's own with a policy at O5": (by_torch("O5", mp_policy=POLICY), None),
    "torch's own with a policy at O3": (by_torch("O3", mp_policy=POLICY), None),
    "torch's own with a policy at O1": (by_torch("O1", mp_policy=POLICY), ("torch.bfloat16", "no mp_policy")),
    "another level": (lambda: initialize(sharded("O5"), "O1"), ("torch.bfloat16", "O1", "no mp_policy")),
    "after initialize at O1": (lambda: shard_afterwards("O1"), AFTER),
    "after initialize at O5": (lambda: shard_afterwards("O5"), AFTER),
    "optimizer before": (optimizer_before, ("SGD", "fully_shard, then the optimizer")),
    "LAMB": (
        lambda: initialize(sharded("O1"), "O1", FusedLAMB),
        ("FusedLAMB", "norm of each whole parameter", "AdamW"),
    ),
    "bfloat16 that has run": (born_and_run, ("before the first forward",)),
    "mp_policy": (lambda: fully_shard(GatedNet(), opt_level="O5", mp_policy=POLICY), ("mp_policy", "opt_level")),
    "single parameter": (
        lambda: fully_shard(GatedNet(), opt_level="O5", keep_fp32="blocks.0.gate"),
        ("blocks.0.gate", "whole modules"),
    ),
}


def refusal(action):
    try:
        action()
    except ampkit.ConfigurationError as error:
        return str(error)
    finally:
        ampkit.close()
    return None


def written_while_sharded():
    """Return outputs at O1 before and after writes to the sharded weights, where torch counts no write to gathered weights."""

    def doubled(model):
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(2.0)
        return model

    model, x = ampkit.initialize(sharded("O1"), opt_level="O1", verbosity=0), torch.ones(2, 6)
    outputs = [model(x).detach(), model(x).detach(), doubled(model)(x).detach()]
    kept = len(ampkit.current_session().casting.caches.pairs())
    ampkit.close()
    outputs.append(ampkit.initialize(doubled(GatedNet()), opt_level="O1", verbosity=0)(x).detach())
    ampkit.close()
    return {"outputs": outputs, "kept": kept}


def dtypes(rank, level, keep_fp32=(), **settings):
    """Take a step; return the dtypes of weights and outputs of layers."""
    model, seen = GatedNet(**settings), {}
    sharded(level, model=model) if keep_fp32 == () else fully_shard(model, opt_level=level, keep_fp32=keep_fp32)
    _, optimizer = initialize(model, level, keep_fp32=keep_fp32)
    for name in ("first", "norm", "head", "blocks.0.up", "blocks.1.up"):
        model.get_submodule(name).register_forward_hook(
            lambda m, x, y, name=name: seen.update({name: (str(m.weight.dtype), str(y.dtype))})
        )
    x, y = batch(rank)
    backward(F.mse_loss(model(x), y), optimizer)
    optimizer.step()
    ampkit.close()
    return seen


#: Norms, and by whom gradients are clipped to them; torch takes no largest one of an empty shard.
CLIPPED = [(1.0, "ampkit"), (1.0, "torch"), (2.0, "ampkit"), (2.0, "torch"), (math.inf, "ampkit")]


def clipped(rank, norm_type, by):
    """Return the norm before clipping to 0.1, and the one after."""
    model = GatedNet() if rank is None else sharded("O0")
    _, optimizer = initialize(model, "O0")
    x, y = batch(rank)
    backward(F.mse_loss(model(x), y), optimizer)
    if by == "ampkit":
        norm = ampkit.clip_grad_norm_(optimizer, 0.1, norm_type)
    else:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)
    found = whole({"norm": norm, **{name: param.grad for name, param in model.named_parameters()}})
    ampkit.close()
    return [found.pop("norm"), torch.cat([gradient.flatten() for gradient in found.values()]).norm(norm_type)]


def work(rank):
    return {
        "refusals": {name: refusal(action) for name, (action, _) in REFUSALS.items()},
        "written": written_while_sharded(),
        "dtypes": {level: dtypes(rank, level, batch_norm=True) for level in ("O1", "O5")},
        "kept": dtypes(rank, "O5", keep_fp32="blocks.0"),
        "clipped": {str(case): clipped(rank, *case) for case in CLIPPED},
    }


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_is_refused_with_what_to_write(ranks, case):
    for rank in ranks:
        found, words = rank["refusals"][case], REFUSALS[case][1]
        assert (found is None) if words is None else all(word in found for word in words), found


def test_no_cast_of_a_gathered_weight_outlives_its_groups_forward(ranks):
    for rank in ranks:
        first, second, after, expected = rank["written"]["outputs"]
        assert torch.equal(first, second) and torch.equal(after, expected) and not torch.equal(first, after)
        assert rank["written"]["kept"] == 0


def test_weights_are_gathered_in_the_precision_that_layers_compute_in(ranks):
    at_o1, at_o5, kept = (ranks[0]["dtypes"]["O1"], ranks[0]["dtypes"]["O5"], ranks[0]["kept"])
    assert at_o5["first"] == at_o5["head"] == ("torch.bfloat16", "torch.bfloat16")
    assert at_o5["norm"] == ("torch.float32", "torch.float32")  # after blocks that have multiplied by a float32 buffer
    assert {weight for weight, _ in at_o1.values()} == {"torch.float32"}
    assert at_o1["first"][1] == at_o1["head"][1] == "torch.bfloat16"
    assert (kept["blocks.0.up"][1], kept["blocks.1.up"][1]) == ("torch.float32", "torch.bfloat16")


@pytest.mark.parametrize("case", CLIPPED, ids=str)
def test_gradients_are_clipped_to_any_norm_of_all_shards(ranks, case):
    expected, _ = clipped(None, *case)
    for rank in ranks:
        norm, after = rank["clipped"][str(case)]
        torch.testing.assert_close(norm, expected, rtol=1e-4, atol=0)
        assert after == pytest.approx(0.1, rel=1e-3)


@pytest.fixture
def shards_of_one(group_of_one):
    """A model in one group of FSDP2, on this process alone; and that group, its state and its first parameter."""
    model = fully_shard(nn.Linear(6, 3), opt_level="O1")
    state = model._get_fsdp_state()
    group = state._fsdp_param_group
    return {"model": model, "state": state, "group": group, "param": group.fsdp_params[0]}


@pytest.mark.parametrize(
    "owner, name",
    [("state", "_fsdp_param_group"), ("group", "fsdp_params"), ("group", "reduce_grads"), ("param", "mp_policy")],
)
def test_fsdp2_of_another_torch_is_refused_by_its_version(shards_of_one, monkeypatch, owner, name):
    model, state = shards_of_one["model"], shards_of_one["state"]
    if owner == "state" and hasattr(state, "_fsdp_param_groups"):  # a list where this torch has several
        monkeypatch.delattr(type(state), name)
        del state._fsdp_param_groups
    else:
        delattr(shards_of_one[owner], name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ampkit.ConfigurationError) as refused:
        ampkit.initialize(model, optimizer, opt_level="O1", verbosity=0)
        backward(torch.ones((), requires_grad=True) * 2, optimizer)
    assert f"torch {torch.__version__} keeps" in str(refused.value) and f"no attribute '{name}'" in str(refused.value)


@pytest.mark.parametrize("owner, name", [("param", "_unsharded_param"), ("group", "_reduce_dtype")])
def test_what_fsdp2_sets_late_is_refused_where_it_is_not_even_declared(shards_of_one, monkeypatch, owner, name):
    model = shards_of_one["model"]
    assert unsharded_params(model) == [] and not has_run(model)
    monkeypatch.delitem(type(shards_of_one[owner]).__annotations__, name)
    with pytest.raises(ampkit.ConfigurationError, match=f"no attribute '{name}'"):
        unsharded_params(model)
        has_run(model)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_fsdp1_is_refused_in_words(group_of_one, level, when):
    def wrapped(model):
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)

    model = nn.Linear(6, 3)
    if when == "after":
        model, optimizer = initialize(model, level)
    with pytest.raises(ampkit.ConfigurationError, match=r"FSDP1.*ampkit\.parallel\.fully_shard"):
        if when == "before":
            ampkit.initialize(wrapped(model), opt_level=level, verbosity=0)
        else:
            backward(wrapped(model)(torch.ones(2, 6)).float().sum(), optimizer)


if __name__ == "__main__":
    as_one_of_two_ranks(work)
