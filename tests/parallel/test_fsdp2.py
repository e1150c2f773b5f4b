"""FSDP2 on two gloo processes, judged by one process that trains without it on the joined batch."""

import contextlib
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import as_one_of_two_ranks, backward, results_of_two_ranks
from ranks import assert_equal, assert_moved_alike, movement, read_checkpoint, whole, write_checkpoint
from torch import nn
from torch.nn import functional as F

import ampkit
from ampkit.apex.optimizers import FusedLAMB
from ampkit.optimizers import FusedAdam, FusedSGD
from ampkit.parallel import fully_shard
from ampkit.sharding import local

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
    def __init__(self, batch_norm=False, width=7):
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


def trained(level, make_optimizer, rank=None, clip=None, model=None, **settings):
    """What a model is after a few steps: sharded on the data of ``rank``, or plain on both ranks' data."""
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
    "O1 with compiled blocks": ("O1", "AdamW", 0.5, {}),
    "O5 with compiled blocks": ("O5", "AdamW", 0.5, {}),
}


def run_case(rank, case):
    level, name, clip, settings = CASES[case]
    model, counters = Net(), torch._dynamo.utils.counters
    counters.clear()
    if "compiled" in case:  # what inductor makes of graphs is the same without FSDP2, and takes minutes
        for block in model.blocks:
            block.compile(backend="aot_eager")
    found = trained(level, OPTIMIZERS[name], rank, clip, model, **settings)
    assert (counters["stats"]["unique_graphs"] > 0) == ("compiled" in case)
    return found


# (level, optimizer, the rank whose shard of a gradient is spoiled, with what, and where: in the `scale_loss` block, behind it, or
# without one). Outside of a block ``check_gradients`` looks for it.
OUTSIDE = [(0, math.nan, "behind the block"), (1, math.nan, "without a block"), (1, -math.inf, "behind the block")]
INFS = [
    *((level, name, 1, math.inf, "in the block") for level in ("O1", "O2", "O5") for name in ("AdamW", "FusedAdam")),
    *(("O4", "AdamW", *spoiled) for spoiled in OUTSIDE),
    *(("O5", name, *spoiled) for name in ("AdamW", "torch's fused AdamW", "FusedAdam") for spoiled in OUTSIDE),
]
QUICK_INFS = [case for case in INFS if case[0] == "O2" or case[-1] != "in the block"]


def shards(model, optimizer):
    """Copies of the weights and of what the optimizer keeps, as far as they lie on this process."""
    states = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    return [local(x).detach().clone() for x in (*model.parameters(), *states)]


def planted_inf(rank, level, name, spoiled_rank, value, where):
    """Of each step: whether it was skipped, whether anything here moved, the scale, and how many collectives agreed on that."""
    model = sharded(Net(), level)
    optimizer = OPTIMIZERS[name](model.parameters())
    settings = {"loss_scale": "dynamic"} if where == "in the block" else {"check_gradients": True}
    ampkit.initialize(model, optimizer, opt_level=level, verbosity=0, **settings)
    calls, all_reduce, found = [], dist.all_reduce, []
    dist.all_reduce = lambda *args, **kwargs: calls.append(None) or all_reduce(*args, **kwargs)
    for index, (x, y) in enumerate(data(rank, steps=4)):
        # Added to the gradient of one rank after it was reduced, it is in the shard of that rank alone.
        spoils = (index, rank) == (1, spoiled_rank)
        optimizer.zero_grad()
        calls.clear()
        loss = F.mse_loss(model(x), y)
        with (
            contextlib.nullcontext(loss) if where == "without a block" else ampkit.scale_loss(loss, optimizer) as scaled
        ):
            scaled.backward()
            if spoils and where == "in the block":
                local(model.head.weight.grad).fill_(value)
        if spoils and where != "in the block":
            local(model.head.weight.grad).view(-1)[-1] = value
        before = shards(model, optimizer)
        optimizer.step()
        collectives = len(calls)
        after = shards(model, optimizer)
        moved = len(before) != len(after) or not all(map(torch.equal, before, after))
        scale = ampkit.state_dict()["loss_scaler0"]["loss_scale"]
        found.append((ampkit.step_was_skipped(optimizer), moved, scale, collectives))
    dist.all_reduce = all_reduce
    assert all(value.isfinite().all() for value in whole(model.state_dict()).values())
    ampkit.close()
    return found


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


# name: (level, optimizer)
RESUMED = {
    "O1": ("O1", OPTIMIZERS["AdamW"]),
    "O5": ("O5", OPTIMIZERS["AdamW"]),
    "O5, moments in 8 bits": ("O5", lambda params: FusedAdam(params, lr=1e-2, state_dtype="int8")),
}


def resumed(rank, case, folder):
    """Trained for two steps, saved, and trained for two more; and loaded into a new model and trained for the same two."""

    def run(model, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            backward(F.mse_loss(model(x), y), optimizer)
            optimizer.step()

    def fresh():
        model = sharded(Net(), level)
        optimizer = make(model.parameters())
        return ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)

    level, make = RESUMED[case]
    batches = data(rank, steps=4)
    model, optimizer = fresh()
    run(model, optimizer, batches[:2])
    assert {value.dtype for value in write_checkpoint(model, optimizer, folder).values()} == {torch.float32}
    saved = whole(model.state_dict())
    run(model, optimizer, batches[2:])
    straight = whole(model.state_dict())
    ampkit.close()
    model, optimizer = fresh()
    model(batches[0][0])  # what was gathered before is not used after loading
    read_checkpoint(model, optimizer, folder)
    run(model, optimizer, batches[2:])
    again = whole(model.state_dict())
    ampkit.close()
    return {"saved": saved, "straight": straight, "again": again}


def refusal(action):
    try:
        action()
    except ampkit.ConfigurationError as error:
        return str(error)
    finally:
        ampkit.close()
    return None


def torchs(model, policy=None):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    settings = {} if policy is None else {"mp_policy": MixedPrecisionPolicy(param_dtype=policy)}
    return sharded(model, "", fully_shard, **settings)


def initialized(model, level, make=torch.optim.AdamW):
    return ampkit.initialize(model, make(model.parameters(), lr=0.1), opt_level=level, verbosity=0)


def shard_afterwards(level):
    model, optimizer = initialized(Net(), level)
    sharded(model, level)
    with ampkit.scale_loss(model(torch.ones(2, 6)).sum(), optimizer) as scaled:
        scaled.backward()


def optimizer_before():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampkit.initialize(sharded(model, "O5"), optimizer, opt_level="O5", verbosity=0)


def born_and_run():
    model = sharded(Net().bfloat16(), "O1")
    model(torch.ones(2, 6, dtype=torch.bfloat16))
    initialized(model, "O1")


AFTERWARDS = ("after initialize()", "fully_shard, then the optimizer")
# name: (what is done, words of the error; None where there is none)
REFUSALS = {
    "torch's own at O1": (lambda: initialized(torchs(Net()), "O1"), None),
    "torch's own at O2": (
        lambda: initialized(torchs(Net()), "O2"),
        ("'first.weight'", "its own dtype", "torch.bfloat16", "ampkit.parallel.fully_shard", "'O2'"),
    ),
    "torch's own at O5": (lambda: initialized(torchs(Net()), "O5"), None),
    "torch's own with a policy at O2": (
        lambda: initialized(torchs(Net(), torch.bfloat16), "O2"),
        ("norm.weight'", "torch.float32", "groups of their own", "opt_level='O2'"),
    ),
    "torch's own with a policy at O5": (lambda: initialized(torchs(Net(), torch.bfloat16), "O5"), None),
    "torch's own with a policy at O3": (lambda: initialized(torchs(Net(), torch.bfloat16), "O3"), None),
    "torch's own with a policy at O1": (
        lambda: initialized(torchs(Net(), torch.bfloat16), "O1"),
        ("torch.bfloat16", "no mp_policy"),
    ),
    "another level": (lambda: initialized(sharded(Net(), "O5"), "O1"), ("torch.bfloat16", "O1", "no mp_policy")),
    "after initialize at O1": (lambda: shard_afterwards("O1"), AFTERWARDS),
    "after initialize at O5": (lambda: shard_afterwards("O5"), AFTERWARDS),
    "optimizer before": (optimizer_before, ("SGD", "fully_shard, then the optimizer")),
    "LAMB": (
        lambda: initialized(sharded(Net(), "O1"), "O1", FusedLAMB),
        ("FusedLAMB", "norm of each whole parameter", "AdamW"),
    ),
    "bfloat16 that has run": (born_and_run, ("before the first forward",)),
    "mp_policy": (
        lambda: fully_shard(Net(), opt_level="O5", mp_policy=torch.distributed.fsdp.MixedPrecisionPolicy()),
        ("mp_policy", "opt_level"),
    ),
    "single parameter": (
        lambda: fully_shard(Net(), opt_level="O5", keep_fp32="blocks.0.gate"),
        ("blocks.0.gate", "whole modules"),
    ),
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
    """At O1: the outputs before and after the sharded weights are written to, where torch counts no write to what is gathered."""
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
    """Batch norm, what keep_fp32 names, activation checkpoints and a mesh of two dimensions: do they run, in which dtypes?"""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.utils.checkpoint import checkpoint

    found = {}
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
        found[f"dtypes {level}"] = dtypes
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
    found["kept"] = dtypes
    ampkit.close()

    for level in ("O1", "O5"):
        model = Net()
        for block in model.blocks:
            plain = block.forward
            block.forward = lambda x, plain=plain: checkpoint(plain, x, use_reentrant=False)
        found[f"checkpoints {level}"] = trained(level, OPTIMIZERS["AdamW"], rank, model=model)
    for shape in ((2, 1), (1, 2)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
        found[f"mesh {shape}"] = trained("O5", OPTIMIZERS["FusedAdam"], rank, 0.5, mesh=mesh)
    return found


def norms(rank=None):
    """Gradients are clipped to a norm by ours and by torch's functions: what they return, and what they leave."""
    found = {}
    for norm_type in (1.0, 2.0, math.inf):
        for ours in (True, False):
            if norm_type == math.inf and not ours:  # torch takes none of an empty shard
                continue
            model = Net()
            if rank is not None:
                sharded(model, "O0")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            ampkit.initialize(model, optimizer, opt_level="O0", verbosity=0)
            x, y = data(rank)[0]
            backward(F.mse_loss(model(x), y), optimizer)
            if ours:
                norm = ampkit.clip_grad_norm_(optimizer, 0.1, norm_type)
            else:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)
            after = whole({name: param.grad for name, param in model.named_parameters()})
            flat = torch.cat([gradient.flatten() for gradient in after.values()])
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            found[f"{norm_type} {ours}"] = torch.stack([norm.detach(), flat.norm(norm_type)])
            ampkit.close()
    return found


def work(rank):
    folder = Path(sys.argv[1])
    if folder.name.startswith("quick"):
        return {
            "cases": {case: run_case(rank, case) for case in QUICK},
            "inf": {str(case): planted_inf(rank, *case) for case in QUICK_INFS},
            "written": written_while_sharded(rank),
        }
    if folder.name.startswith("cases"):
        return {
            "cases": {case: run_case(rank, case) for case in CASES},
            "inf": {str(case): planted_inf(rank, *case) for case in INFS if case not in QUICK_INFS},
        }
    if folder.name.startswith("accumulated"):
        return {str(case): accumulated(rank, *case) for case in ACCUMULATIONS}
    return {
        "resumed": {case: resumed(rank, case, folder / case) for case in RESUMED},
        "refusals": {case: refusal(action) for case, (action, _) in REFUSALS.items()},
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
    folder = tmp_path_factory.mktemp("everything")
    return (*results_of_two_ranks(__file__, folder), folder)


START = Net().state_dict()


def check_case(results, case):
    level, name, clip, _ = CASES[case]
    ranks = [rank["cases"][case] for rank in results]
    assert_equal(*ranks)
    alone = trained(level, OPTIMIZERS[name], clip=clip)
    assert_moved_alike(ranks[0], alone, 1e-4 if level == "O0" else 0.04 if "compiled" in case else 0.02, START)
    if clip is not None:
        torch.testing.assert_close(ranks[0]["norms"], alone["norms"], rtol=1e-5 if level == "O0" else 0.02, atol=0)


def check_inf(results, case):
    for rank in results:
        found = rank["inf"][str(case)]
        assert [(skipped, moved) for skipped, moved, _, _ in found] == [(i == 1, i != 1) for i in range(4)], case
        scales, first = [scale for _, _, scale, _ in found], found[0][2]
        assert scales == ([first] + 3 * [first / 2] if case[-1] == "in the block" else 4 * [first]), case
        assert case[-1] == "in the block" or [collectives for *_, collectives in found] == 4 * [1], case


def test_sharded_training_equals_one_process_and_an_inf_in_one_shard_skips_on_every_rank(quick):
    for case in QUICK:
        check_case(quick, case)
    for case in QUICK_INFS:
        check_inf(quick, case)


def test_the_comparison_tells_the_joined_batch_from_one_ranks_own():
    model = Net()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    for x, y in data(0):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    with pytest.raises(AssertionError):
        assert_moved_alike(model.state_dict(), trained("O0", OPTIMIZERS["AdamW"]), 0.1, START)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_sharded_training_equals_one_process(cases, case):
    check_case(cases, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in INFS if case not in QUICK_INFS], ids=str)
def test_inf_in_one_shard_skips_on_every_rank(cases, case):
    check_inf(cases, case)


@pytest.mark.parametrize("case", ACCUMULATIONS)
def test_accumulation_equals_one_process_whether_reduced_each_time_or_at_last(accumulations, case):
    ranks = [rank[str(case)] for rank in accumulations]
    assert_equal(*ranks)
    level, fused, _, delayed = case
    alone = accumulated(None, level, fused, True, delayed)
    assert_moved_alike(ranks[0], alone, 0.03, START)


@pytest.mark.slow
@pytest.mark.parametrize("case", RESUMED)
def test_checkpoint_resumes_exactly_and_loads_into_one_process(everything, case):
    from torch.distributed import checkpoint

    level = RESUMED[case][0]
    ranks = [rank["resumed"][case] for rank in everything[:2]]
    for rank in ranks:
        assert_equal(rank["straight"], rank["again"])
    assert_equal(ranks[0]["straight"], ranks[1]["straight"])
    assert movement(ranks[0]["saved"], START).norm() > 0
    model = Net()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    ampkit.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), opt_level=level, verbosity=0)
    weights = model.state_dict()
    checkpoint.load({"model": weights}, checkpoint_id=everything[2] / case, no_dist=True)
    model.load_state_dict(weights)
    assert_equal(dict(model.state_dict()), ranks[0]["saved"])


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_is_refused_with_what_to_write(everything, case):
    for rank in everything[:2]:
        found, (_, words) = rank["refusals"][case], REFUSALS[case]
        assert (found is None) if words is None else all(word in found for word in words), found


@pytest.mark.slow
def test_sharded_model_that_came_in_bfloat16_trains_on_float32_shards(everything):
    assert_equal(everything[0]["born"], everything[1]["born"])
    alone = trained("O5", OPTIMIZERS["AdamW"], model=Net().bfloat16())
    born = {name: value.bfloat16().float() for name, value in Net().state_dict().items()}
    assert_moved_alike(everything[0]["born"], alone, 0.02, born)


def test_no_cast_of_a_gathered_weight_outlives_its_groups_forward(quick):
    for rank in quick:
        first, second, after, expected = rank["written"]["outputs"]
        assert torch.equal(first, second) and torch.equal(after, expected) and not torch.equal(first, after)
        assert rank["written"]["kept"] == 0


@pytest.mark.slow
def test_norms_kept_modules_checkpoints_and_meshes(everything):
    one, other = everything[0]["others"], everything[1]["others"]
    assert one["dtypes O5"] == {
        "first": ("torch.bfloat16", "torch.bfloat16"),
        "norm": ("torch.float32", "torch.float32"),  # after blocks that have multiplied by a float32 buffer
        "head": ("torch.bfloat16", "torch.bfloat16"),
    }
    assert {weight for weight, _ in one["dtypes O1"].values()} == {"torch.float32"}
    assert one["dtypes O1"]["first"][1] == one["dtypes O1"]["head"][1] == "torch.bfloat16"
    assert one["kept"] == {0: "torch.float32", 1: "torch.bfloat16"}
    for level in ("O1", "O5"):
        assert_equal(one[f"checkpoints {level}"], other[f"checkpoints {level}"])
        assert_moved_alike(one[f"checkpoints {level}"], trained(level, OPTIMIZERS["AdamW"]), 0.02, START)
    for shape in ((2, 1), (1, 2)):
        assert_equal(one[f"mesh {shape}"], other[f"mesh {shape}"])
        assert_moved_alike(one[f"mesh {shape}"], trained("O5", OPTIMIZERS["FusedAdam"], clip=0.5), 0.02, START)


@pytest.mark.slow
def test_gradients_are_clipped_to_any_norm_of_all_shards(everything):
    expected = norms()
    for rank in everything[:2]:
        for name, (norm, after) in rank["norms"].items():
            torch.testing.assert_close(norm, expected[name][0], rtol=1e-4, atol=0, msg=name)
            assert after == pytest.approx(0.1, rel=1e-3), name


@pytest.fixture
def shards_of_one(group_of_one):
    """A model in one group of FSDP2, on a process of its own; and that group, its state and its first parameter."""
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
