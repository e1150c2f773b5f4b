"""FSDP2 on two gloo processes, judged by one process that trains without it on the joined batch."""

import math
import sys
from pathlib import Path

import pytest
import torch
from helpers import as_one_of_two_ranks, backward, results_of_two_ranks
from torch import nn
from torch.nn import functional as F

import ampkit
from ampkit.apex.optimizers import FusedLAMB
from ampkit.optimizers import FusedAdam, FusedSGD
from ampkit.parallel import fully_shard

STEPS = 3


class Block(nn.Module):
    """A norm, layers, and a buffer that meets lower precision. The gate has one element: one process holds none of it."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gate = nn.Parameter(torch.ones(1))
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, x):
        return x + self.gate * self.scale * self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width=7, batch_norm=False):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm, self.head = (nn.BatchNorm1d if batch_norm else nn.LayerNorm)(width), nn.Linear(width, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def data(rank=None, steps=STEPS, micro_batches=1):
    """Batches of one rank, or of both joined."""
    everything = torch.randn(steps * micro_batches, 2, 4, 9, generator=torch.Generator().manual_seed(7))
    everything = everything[:, rank] if rank is not None else everything.flatten(1, 2)
    return [(batch[:, :6], batch[:, 6:]) for batch in everything]


def sharded(model, level, shard=fully_shard, **settings):
    settings = {"opt_level": level, **settings} if shard is fully_shard else settings
    for block in model.blocks:
        shard(block, **settings)
    return shard(model, **settings)


def whole(values):
    """Plain copies of tensors, gathered where they are sharded."""
    return {k: (v.full_tensor() if hasattr(v, "full_tensor") else v).detach().clone() for k, v in values.items()}


def trained(level, make_optimizer, rank=None, clip=None, model=None, **settings):
    """Return the values of a model after a few steps: sharded on the data of ``rank``, or plain on both ranks' data."""
    model = Net() if model is None else model
    if rank is not None:
        sharded(model, level, **settings)
    optimizer = make_optimizer(model.parameters())
    ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
    norms = []
    for x, y in data(rank):
        optimizer.zero_grad()
        backward(F.mse_loss(model(x), y), optimizer)
        if clip is not None:
            norms.append(ampkit.clip_grad_norm_(optimizer, clip).item())
        optimizer.step()
    result = {**whole(model.state_dict()), "norms": torch.tensor(norms)}
    ampkit.close()
    return result


OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "FusedAdam": lambda params: FusedAdam(params, lr=1e-2),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.1, momentum=0.9),
    "torch's fused AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
}
# name: (level, optimizer, clipped to this norm, settings of fully_shard)
QUICK = {"O5 clipped": ("O5", "FusedAdam", 0.5, {})}
CASES = QUICK | {
    **{
        f"{level} {name}": (level, name, 0.5 if name == "FusedSGD" else None, {})
        for level in ("O0", "O1", "O2", "O4", "O5")
        for name in OPTIMIZERS
    },
    "O1 gathered once": ("O1", "AdamW", None, {"reshard_after_forward": False}),
    "O5 gathered once": ("O5", "AdamW", None, {"reshard_after_forward": False}),
    "O5 reduced in bfloat16": ("O5", "AdamW", None, {"reduce_dtype": torch.bfloat16}),
}


def run_case(rank, case):
    level, name, clip, settings = CASES[case]
    return trained(level, OPTIMIZERS[name], rank, clip, **settings)


def planted_inf(rank, level, fused):
    """Plant an infinite gradient on rank 1 alone; return who steps, and at which scale."""
    model = sharded(Net(), level)
    optimizer = (FusedAdam if fused else torch.optim.AdamW)(model.parameters(), lr=1e-2)
    ampkit.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    steps = []
    for index, (x, y) in enumerate(data(rank, steps=4)):
        before = whole(model.state_dict())
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        # Added to the gradient of one rank after it was reduced, the inf is in the shard of that rank alone.
        with ampkit.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
            if index == 1 and rank == 1:
                model.head.weight.grad.to_local().fill_(math.inf)
        optimizer.step()
        after = whole(model.state_dict())
        moved = any(not torch.equal(after[name], before[name]) for name in after)
        steps.append((ampkit.step_was_skipped(optimizer), moved, ampkit.state_dict()["loss_scaler0"]["loss_scale"]))
    ampkit.close()
    return steps


def accumulated(rank, level, fused, sync, delayed):
    """Three micro-batches whose gradients FSDP2 reduces each time, or at last, with a scale that moves whenever it may."""
    model = Net()
    if rank is not None:
        sharded(model, level)
    optimizer = FusedSGD(model.parameters(), lr=0.1) if fused else torch.optim.SGD(model.parameters(), lr=0.1)
    rule = ampkit.DynamicLossScale(init_scale=8.0, growth_factor=4.0, growth_interval=1)
    ampkit.initialize(model, optimizer, opt_level=level, loss_scale=rule, verbosity=0)
    batches = data(rank, steps=2, micro_batches=3)
    for step in range(2):
        optimizer.zero_grad()
        for index, (x, y) in enumerate(batches[3 * step : 3 * step + 3]):
            last = index == 2
            if rank is not None and not sync:
                model.set_requires_gradient_sync(last)
            backward(F.mse_loss(model(x), y), optimizer, delay_unscale=delayed and not last)
        optimizer.step()
    result = whole(model.state_dict())
    result["scale"] = torch.tensor(ampkit.state_dict()["loss_scaler0"]["loss_scale"])
    ampkit.close()
    return result


def refusal(action):
    try:
        action()
    except ampkit.ConfigurationError as error:
        return str(error)
    finally:
        ampkit.close()
    return None


def refusals(rank):
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp import fully_shard as torchs

    bfloat16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)

    def initialize(model, level, make=torch.optim.AdamW, optimizer=None):
        optimizer = make(model.parameters(), lr=0.1) if optimizer is None else optimizer
        return ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)

    def shard_afterwards(level):
        model, optimizer = initialize(Net(), level)
        sharded(model, level)
        with ampkit.scale_loss(model(torch.ones(2, 6)).sum(), optimizer) as scaled:
            scaled.backward()

    def optimizer_before():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        initialize(sharded(model, "O5"), "O5", optimizer=optimizer)

    def born_and_run():
        model = sharded(Net().bfloat16(), "O1")
        model(torch.ones(2, 6, dtype=torch.bfloat16))
        initialize(model, "O1")

    return {
        "torch's own at O1": refusal(lambda: initialize(sharded(Net(), "", torchs), "O1")),
        "torch's own at O2": refusal(lambda: initialize(sharded(Net(), "", torchs), "O2")),
        "torch's own at O5": refusal(lambda: initialize(sharded(Net(), "", torchs), "O5")),
        "torch's own with a policy at O2": refusal(
            lambda: initialize(sharded(Net(), "", torchs, mp_policy=bfloat16), "O2")
        ),
        "torch's own with a policy at O5": refusal(
            lambda: initialize(sharded(Net(), "", torchs, mp_policy=bfloat16), "O5")
        ),
        "torch's own with a policy at O3": refusal(
            lambda: initialize(sharded(Net(), "", torchs, mp_policy=bfloat16), "O3")
        ),
        "torch's own with a policy at O1": refusal(
            lambda: initialize(sharded(Net(), "", torchs, mp_policy=bfloat16), "O1")
        ),
        "another level": refusal(lambda: initialize(sharded(Net(), "O5"), "O1")),
        "after initialize at O1": refusal(lambda: shard_afterwards("O1")),
        "after initialize at O5": refusal(lambda: shard_afterwards("O5")),
        "optimizer before": refusal(optimizer_before),
        "LAMB": refusal(lambda: initialize(sharded(Net(), "O1"), "O1", FusedLAMB)),
        "bfloat16 that has run": refusal(born_and_run),
        "mp_policy": refusal(lambda: fully_shard(Net(), opt_level="O5", mp_policy=bfloat16)),
        "single parameter": refusal(lambda: fully_shard(Net(), opt_level="O5", keep_fp32="blocks.0.gate")),
    }


def born_in_bfloat16(rank):
    model = Net().bfloat16()
    expected = {name: value.float() for name, value in model.state_dict().items()}
    sharded(model, "O5")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ampkit.initialize(model, optimizer, opt_level="O5", verbosity=0)
    found = whole(model.state_dict())
    assert all(torch.equal(found[name], expected[name]) and found[name].dtype is torch.float32 for name in expected)
    for x, y in data(rank):
        optimizer.zero_grad()
        backward(F.mse_loss(model(x), y), optimizer)
        optimizer.step()
    result = whole(model.state_dict())
    ampkit.close()
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    return result


def written_while_sharded(rank):
    """Return outputs at O1 before and after writes to the sharded weights, where torch counts no write to gathered weights."""
    model = sharded(Net(), "O1")
    ampkit.initialize(model, opt_level="O1", verbosity=0)
    x = torch.ones(2, 6)
    outputs = [model(x).detach(), model(x).detach()]
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2.0)
    outputs.append(model(x).detach())
    kept = len(ampkit.current_session().casting.caches.pairs())
    ampkit.close()
    twin = Net()
    with torch.no_grad():
        for param in twin.parameters():
            param.mul_(2.0)
    ampkit.initialize(twin, opt_level="O1", verbosity=0)
    outputs.append(twin(x).detach())
    ampkit.close()
    return {"outputs": outputs, "kept": kept}


def others(rank):
    """Run batch norm, what keep_fp32 names, activation checkpoints and a mesh of two dimensions; return dtypes and values."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.utils.checkpoint import checkpoint

    results = {}
    for level in ("O1", "O5"):
        model = sharded(Net(batch_norm=True), level)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
        dtypes = {}
        for name in ("first", "norm", "head"):
            module = model.get_submodule(name)
            module.register_forward_hook(
                lambda m, x, y, name=name, dtypes=dtypes: dtypes.update({name: (str(m.weight.dtype), str(y.dtype))})
            )
        x, y = data(rank)[0]
        backward(F.mse_loss(model(x), y), optimizer)
        optimizer.step()
        results[f"dtypes {level}"] = dtypes
        ampkit.close()

    model = Net()
    fully_shard(model, opt_level="O5", keep_fp32="blocks.0")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ampkit.initialize(model, optimizer, opt_level="O5", keep_fp32="blocks.0", verbosity=0)
    dtypes = {}
    for index in range(2):
        up = model.blocks[index].up
        up.register_forward_hook(lambda m, x, y, index=index: dtypes.update({index: str(y.dtype)}))
    backward(model(data(rank)[0][0]).square().mean(), optimizer)
    optimizer.step()
    results["kept"] = dtypes
    ampkit.close()

    for level in ("O1", "O5"):
        model = Net()
        for block in model.blocks:
            plain = block.forward
            block.forward = lambda x, plain=plain: checkpoint(plain, x, use_reentrant=False)
        results[f"checkpoints {level}"] = trained(level, OPTIMIZERS["AdamW"], rank, model=model)
    for shape in ((2, 1), (1, 2)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
        results[f"mesh {shape}"] = trained("O5", OPTIMIZERS["FusedAdam"], rank, 0.5, mesh=mesh)
    return results


def norms(rank=None):
    """Clip gradients to a norm by ampkit's and by torch's functions; return the norms that they return and leave."""
    results = {}
    for norm_type in (1.0, 2.0, math.inf):
        for by_ampkit in (True, False):
            if norm_type == math.inf and not by_ampkit:  # torch takes none of an empty shard
                continue
            model = Net()
            if rank is not None:
                sharded(model, "O0")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            ampkit.initialize(model, optimizer, opt_level="O0", verbosity=0)
            x, y = data(rank)[0]
            backward(F.mse_loss(model(x), y), optimizer)
            if by_ampkit:
                norm = ampkit.clip_grad_norm_(optimizer, 0.1, norm_type)
            else:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)
            after = whole({name: param.grad for name, param in model.named_parameters()})
            flat = torch.cat([gradient.flatten() for gradient in after.values()])
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            results[f"{norm_type} {by_ampkit}"] = torch.stack([norm.detach(), flat.norm(norm_type)])
            ampkit.close()
    return results


def work(rank):
    folder = Path(sys.argv[1])
    if folder.name.startswith("quick"):
        return {
            "cases": {case: run_case(rank, case) for case in QUICK},
            "inf": {"O2 True": planted_inf(rank, "O2", True)},
            "written": written_while_sharded(rank),
        }
    if folder.name.startswith("cases"):
        return {
            "cases": {case: run_case(rank, case) for case in CASES},
            "inf": {
                f"{level} {fused}": planted_inf(rank, level, fused)
                for level in ("O1", "O2", "O5")
                for fused in (False, True)
            },
        }
    if folder.name.startswith("accumulated"):
        return {str(case): accumulated(rank, *case) for case in ACCUMULATIONS}
    return {
        "refusals": refusals(rank),
        "born": born_in_bfloat16(rank),
        "others": others(rank),
        "norms": norms(rank),
    }


ACCUMULATIONS = [
    (level, fused, sync, delayed)
    for level, fused in (("O1", False), ("O2", False), ("O2", True))
    for sync in (False, True)
    for delayed in (False, True)
]


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return results_of_two_ranks(__file__, tmp_path_factory.mktemp("quick"))


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    return results_of_two_ranks(__file__, tmp_path_factory.mktemp("cases"))


@pytest.fixture(scope="module")
def accumulations(tmp_path_factory):
    return results_of_two_ranks(__file__, tmp_path_factory.mktemp("accumulated"))


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    return results_of_two_ranks(__file__, tmp_path_factory.mktemp("everything"))


def movement(values):
    start = Net().state_dict()
    return torch.cat([(values[name].double() - start[name].double()).flatten() for name in start])


def assert_moved_alike(found, expected, tolerance=0.02):
    one, other = movement(found), movement(expected)
    assert (one - other).norm() <= tolerance * other.norm(), ((one - other).norm(), other.norm())


def assert_equal(one, other):
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def check_case(results, case):
    level, name, clip, _ = CASES[case]
    ranks = [rank["cases"][case] for rank in results]
    assert_equal(*ranks)
    alone = trained(level, OPTIMIZERS[name], clip=clip)
    assert_moved_alike(ranks[0], alone, 1e-4 if level == "O0" else 0.02)
    if clip is not None:
        torch.testing.assert_close(ranks[0]["norms"], alone["norms"], rtol=1e-5 if level == "O0" else 0.02, atol=0)


def check_inf(results, case):
    ranks = [rank["inf"][case] for rank in results]
    assert ranks[0] == ranks[1]
    assert [(skipped, moved) for skipped, moved, _ in ranks[0]] == [(i == 1, i != 1) for i in range(4)]
    scales = [scale for _, _, scale in ranks[0]]
    assert scales == [scales[0]] + [scales[0] / 2] * 3


def test_sharded_training_equals_one_process_and_an_inf_in_one_shard_skips_on_every_rank(quick):
    for case in QUICK:
        check_case(quick, case)
    check_inf(quick, "O2 True")


def test_the_comparison_tells_the_joined_batch_from_one_ranks_own():
    model = Net()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    for x, y in data(0):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    with pytest.raises(AssertionError):
        assert_moved_alike(model.state_dict(), trained("O0", OPTIMIZERS["AdamW"]), 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_sharded_training_equals_one_process(cases, case):
    check_case(cases, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [f"{level} {fused}" for level in ("O1", "O2", "O5") for fused in (False, True)])
def test_inf_in_one_shard_skips_on_every_rank(cases, case):
    check_inf(cases, case)


@pytest.mark.parametrize("case", ACCUMULATIONS)
def test_accumulation_equals_one_process_whether_reduced_each_time_or_at_last(accumulations, case):
    ranks = [rank[str(case)] for rank in accumulations]
    assert_equal(*ranks)
    level, fused, _, delayed = case
    alone = accumulated(None, level, fused, True, delayed)
    assert_moved_alike(ranks[0], alone, 0.03)


REFUSALS = {
    "torch's own at O1": None,
    "torch's own at O2": ("'first.weight'", "its own dtype", "torch.bfloat16", "ampkit.parallel.fully_shard", "'O2'"),
    "torch's own at O5": None,
    "torch's own with a policy at O2": ("norm.weight'", "torch.float32", "groups of their own", "opt_level='O2'"),
    "torch's own with a policy at O5": None,
    "torch's own with a policy at O3": None,
    "torch's own with a policy at O1": ("torch.bfloat16", "no mp_policy"),
    "another level": ("torch.bfloat16", "O1", "no mp_policy"),
    "after initialize at O1": ("after initialize()", "fully_shard, then the optimizer"),
    "after initialize at O5": ("after initialize()", "fully_shard, then the optimizer"),
    "optimizer before": ("SGD", "fully_shard, then the optimizer"),
    "LAMB": ("FusedLAMB", "norm of each whole parameter", "AdamW"),
    "bfloat16 that has run": ("before the first forward",),
    "mp_policy": ("mp_policy", "opt_level"),
    "single parameter": ("blocks.0.gate", "whole modules"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_is_refused_with_what_to_write(everything, case):
    for rank in everything:
        found, words = rank["refusals"][case], REFUSALS[case]
        assert (found is None) if words is None else all(word in found for word in words), found


@pytest.mark.slow
def test_sharded_model_that_came_in_bfloat16_trains_on_float32_shards(everything):
    assert_equal(everything[0]["born"], everything[1]["born"])
    alone = trained("O5", OPTIMIZERS["AdamW"], model=Net().bfloat16())
    born = {name: value.bfloat16().float() for name, value in Net().state_dict().items()}
    moved, expected = (
        torch.cat([(values[name] - born[name]).flatten() for name in born]) for values in (everything[0]["born"], alone)
    )
    assert (moved - expected).norm() <= 0.02 * expected.norm()


def test_no_cast_of_a_gathered_weight_outlives_its_groups_forward(quick):
    for rank in quick:
        first, second, after, expected = rank["written"]["outputs"]
        assert torch.equal(first, second) and torch.equal(after, expected) and not torch.equal(first, after)
        assert rank["written"]["kept"] == 0


@pytest.mark.slow
def test_norms_kept_modules_checkpoints_and_meshes(everything):
    rank0, rank1 = everything[0]["others"], everything[1]["others"]
    assert rank0["dtypes O5"] == {
        "first": ("torch.bfloat16", "torch.bfloat16"),
        "norm": ("torch.float32", "torch.float32"),  # after blocks that have multiplied by a float32 buffer
        "head": ("torch.bfloat16", "torch.bfloat16"),
    }
    assert {weight for weight, _ in rank0["dtypes O1"].values()} == {"torch.float32"}
    assert rank0["dtypes O1"]["first"][1] == rank0["dtypes O1"]["head"][1] == "torch.bfloat16"
    assert rank0["kept"] == {0: "torch.float32", 1: "torch.bfloat16"}
    for level in ("O1", "O5"):
        assert_equal(rank0[f"checkpoints {level}"], rank1[f"checkpoints {level}"])
        assert_moved_alike(rank0[f"checkpoints {level}"], trained(level, OPTIMIZERS["AdamW"]))
    for shape in ((2, 1), (1, 2)):
        assert_equal(rank0[f"mesh {shape}"], rank1[f"mesh {shape}"])
        assert_moved_alike(rank0[f"mesh {shape}"], trained("O5", OPTIMIZERS["FusedAdam"], clip=0.5))


@pytest.mark.slow
def test_gradients_are_clipped_to_any_norm_of_all_shards(everything):
    expected = norms()
    for rank in everything:
        for name, (norm, after) in rank["norms"].items():
            torch.testing.assert_close(norm, expected[name][0], rtol=1e-4, atol=0, msg=name)
            assert after == pytest.approx(0.1, rel=1e-3), name


@pytest.fixture
def shards_of_one(group_of_one):
    """A model in one group of FSDP2, on this process alone; and that group, its state and its first parameter."""
    model = fully_shard(nn.Linear(6, 3), opt_level="O1")
    state = model._get_fsdp_state()
    group = state._fsdp_param_group
    return {"model": model, "state": state, "group": group, "param": group.fsdp_params[0]}


@pytest.mark.parametrize(
    "owner, name",
    [
        ("state", "_fsdp_param_group"),
        ("param", "mp_policy"),
        ("group", "fsdp_params"),
        ("group", "reduce_grads"),
        ("param", "_module_info"),
        ("param", "sharded_param"),
    ],
)
def test_fsdp2_of_another_torch_is_refused_by_its_version(shards_of_one, monkeypatch, owner, name):
    model, state = shards_of_one["model"], shards_of_one["state"]
    if owner == "state" and hasattr(
        state, "_fsdp_param_groups"
    ):  # a list where this torch has several, whose first one it is
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
    from ampkit.sharding import has_run, unsharded_params

    model = shards_of_one["model"]
    assert unsharded_params(model) == [] and not has_run(model)
    monkeypatch.delitem(type(shards_of_one[owner]).__annotations__, name)
    with pytest.raises(ampkit.ConfigurationError, match=f"no attribute '{name}'"):
        unsharded_params(model)
        has_run(model)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_fsdp1_is_refused_in_words(group_of_one, level, when):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = nn.Linear(6, 3)
    if when == "before":
        with pytest.raises(ampkit.ConfigurationError, match=r"FSDP1.*ampkit\.parallel\.fully_shard"):
            ampkit.initialize(
                FullyShardedDataParallel(model, device_id=torch.device("cpu")), opt_level=level, verbosity=0
            )
        return
    model, optimizer = ampkit.initialize(model, FusedAdam(model.parameters()), opt_level=level, verbosity=0)
    wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    with pytest.raises(ampkit.ConfigurationError, match=r"FSDP1.*ampkit\.parallel\.fully_shard"):
        with ampkit.scale_loss(wrapped(torch.ones(2, 6)).float().sum(), optimizer) as scaled:
            scaled.backward()


if __name__ == "__main__":
    as_one_of_two_ranks(work)
