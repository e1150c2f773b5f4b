"""apex.parallel on two gloo processes: gradients judged by float64 arithmetic over both ranks' batches."""

import contextlib
import copy
import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import as_one_of_two_ranks, initialize_quietly, results_of_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampkit
import ampkit.parallel
from ampkit.apex import parallel
from ampkit.apex.parallel import DistributedDataParallel as DDP
from ampkit.apex.parallel import distributed, multiproc


class TwoHeads(nn.Module):
    """A trunk, two heads with a loss each, and a layer that nothing uses."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.trunk, self.a, self.b, self.unused = nn.Linear(4, 5), nn.Linear(5, 2), nn.Linear(5, 3), nn.Linear(2, 2)

    def forward(self, x, heads="ab"):
        hidden = torch.tanh(self.trunk(x))
        outputs = {"a": self.a, "b": self.b}
        return [outputs[head](hidden).square().mean() for head in heads]


def batch_of_rank(rank: int, index: int = 0) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * rank + index))


def gradients_by_name(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}


def gradients_over_ranks(passes: int, heads=("ab", "ab"), average: bool = True) -> dict[str, torch.Tensor | None]:
    """The gradients of `TwoHeads` in float64: sums over passes of the mean (or sum) over ranks; ``heads`` of each rank."""
    model = TwoHeads().double()
    for index in range(passes):
        for rank in range(2):
            (sum(model(batch_of_rank(rank, index).double(), heads[rank])) / (2 if average else 1)).backward()
    return gradients_by_name(model)


def assert_gradients_close(actual: dict, wanted: dict, tolerance: float = 1e-5) -> None:
    """Assert the same names, None where None is wanted, and values within ``tolerance`` of the largest, or of 1."""
    assert actual.keys() == wanted.keys()
    for name, value in wanted.items():
        if value is None:
            assert actual[name] is None, name
        else:
            difference = (actual[name].double() - value).abs().max()
            assert difference <= tolerance * max(1.0, value.abs().max()), (name, actual[name], value)


# name: arguments of DistributedDataParallel, with the parameters that trigger by name
SETTINGS = {
    "default": {},
    "small_buckets": dict(message_size=1),
    "delayed": dict(delay_allreduce=True),
    "delayed, in the words of 2018": dict(shared_param=True),
    "fp32": dict(allreduce_always_fp32=True),
    "predivided": dict(gradient_predivide_factor=4.0),
    "split_factor": dict(gradient_average_split_factor=2.0),
    "summed": dict(gradient_average=False),
    "triggers": dict(allreduce_trigger_params=["a.weight", "trunk.bias"]),
    "kept_buffers": dict(retain_allreduce_buffers=True),
    "streams": dict(num_allreduce_streams=2, prof=True),
}


# Elements of a bucket, and how many buckets those of `TwoHeads` take: from the last, 2 + 4 + 3 + 15 (unused, b), 2 + 10 + 5 (a, the
# bias of the trunk), 20.
BUCKETS = {10_000_000: 1, 15: 3, 1: 8}


def wrapped(model, settings):
    settings = dict(settings)
    if "allreduce_trigger_params" in settings:
        settings["allreduce_trigger_params"] = [model.get_parameter(n) for n in settings["allreduce_trigger_params"]]
    return DDP(model, **settings)


BOTH = ("ab", "ab")
# Passes: whether each is local, the heads that either rank uses, and the number of its batch.
PASSES = {
    "one pass": [(False, BOTH, 0)],
    "another part of the model on each rank": [(False, ("a", "b"), 0)],
    "local": [(True, BOTH, 0)],
    "accumulated": [(True, BOTH, 0), (False, BOTH, 1)],
    "a head has only local gradients when another pass is reduced": [(True, ("a", "a"), 0), (False, ("b", "b"), 0)],
}


def run_settings(rank, results):
    for name, settings in SETTINGS.items():
        for kind, passes in PASSES.items():
            ddp = wrapped(TwoHeads(), settings)
            for local, heads, index in passes:
                ddp.disable_allreduce() if local else ddp.enable_allreduce()
                sum(ddp(batch_of_rank(rank, index), heads[rank])).backward()
                assert not local or ddp.last_backward_was_local
            results[f"{name}/{kind}"] = gradients_by_name(ddp.module)
            results[f"{name}/{kind}, buffers"] = [buffer.clone() for buffer in ddp.allreduce_buffers]

        ddp = wrapped(TwoHeads(), settings)  # each loss through parts of the model
        a, b = ddp(batch_of_rank(rank))
        a.backward(retain_graph=True)
        b.backward()
        results[f"{name}/two losses of a forward pass"] = gradients_by_name(ddp.module)


def run_large_gradients(rank, results):
    for name in ("default", "fp32", "predivided"):
        ddp = wrapped(nn.Linear(1, 1, bias=False).half(), SETTINGS[name])
        (ddp(torch.ones(1, 1).half()) * 60000.0).sum().backward()
        results[f"large/{name}"] = ddp.module.weight.grad


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head, self.reentrant = nn.Linear(4, 4), nn.Linear(4, 1), reentrant

    def forward(self, x):
        for _ in range(2):  # the layer's weights are shared
            x = checkpoint(lambda x: torch.tanh(self.layer(x)), x, use_reentrant=self.reentrant)
        return self.head(x).sum()


def run_other_passes(rank, results):
    def averaged(name, model, forward=None):
        model.zero_grad()
        sum((forward or model)(batch_of_rank(rank))).backward()
        results[name] = gradients_by_name(getattr(model, "module", model))

    for reentrant in (False, True):
        ddp = DDP(Checkpointed(reentrant))
        ddp(batch_of_rank(rank).requires_grad_()).backward()
        results[f"checkpoint/{reentrant}"] = gradients_by_name(ddp.module)

    averaged("a copy", copy.deepcopy(DDP(TwoHeads())))
    ddp = DDP(TwoHeads())
    averaged("a first pass without the wrapper's forward", ddp, ddp.module)
    fails = ddp.module.trunk.weight.register_hook(lambda gradient: 1 / 0)  # when the heads have their gradients
    with pytest.raises(ZeroDivisionError):
        sum(ddp(batch_of_rank(rank))).backward()
    fails.remove()
    averaged("a pass after one that failed", ddp)
    ddp = DDP(TwoHeads())
    ddp.module.trunk.requires_grad_(False)
    averaged("frozen", ddp)
    ddp.module.trunk.requires_grad_(True)
    averaged("a pass after unfreezing", ddp)

    ddp = DDP(TwoHeads())  # forward, forward, backward, backward, as with a discriminator
    for losses in [ddp(batch_of_rank(rank, index)) for index in range(2)]:
        sum(losses).backward()
    results["two forward passes"] = gradients_by_name(ddp.module)

    original = dist.all_reduce
    for size in BUCKETS:
        sums = []
        dist.all_reduce = lambda flat, sums=sums, **kwargs: sums.append(flat) or original(flat, **kwargs)
        ddp = DDP(TwoHeads(), message_size=size)
        sum(ddp(batch_of_rank(rank))).backward()
        results[f"sums/{size}"] = len(sums)
    dist.all_reduce = original

    model = TwoHeads(seed=rank)
    reducer = parallel.Reducer(model)
    sum(model(batch_of_rank(rank))).backward()
    reducer.reduce()
    results["a Reducer"] = gradients_by_name(model)


def run_construction(rank, results):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(rank + 1)
    results["broadcast"] = {name: value.clone() for name, value in DDP(model).state_dict().items()}

    model, optimizer = initialize_quietly(TwoHeads(seed=rank), lambda p: torch.optim.SGD(p, lr=1.0), "O2")
    DDP(model)(batch_of_rank(rank))
    masters = [p.detach().clone() for p in ampkit.master_params(optimizer)]
    results["masters"] = masters
    results["weights_are_masters"] = all(torch.equal(p, m.to(p.dtype)) for p, m in zip(model.parameters(), masters))
    ampkit.close()

    results["errors"] = []
    for refused in (
        lambda: DDP(TwoHeads(), delay_allreduce=True, num_allreduce_streams=2),
        lambda: DDP(TwoHeads(), delay_allreduce=True, allreduce_trigger_params=[]),
        lambda: ampkit.initialize(DDP(TwoHeads()), verbosity=0),
        lambda: parallel.create_syncbn_process_group(4),
    ):
        with pytest.raises((ValueError, ampkit.ConfigurationError, AssertionError)) as error:
            refused()
        results["errors"].append(str(error.value))


def run_lists(rank, results):
    def filled(*sizes):
        return [torch.full((size,), rank + 1.0) for size in sizes]

    values = [*filled(2), filled(3)[0].half()]
    parallel.Reducer(values).reduce()
    results["Reducer of a list"] = values
    distributed.flat_dist_call(values := filled(2, 1), dist.all_reduce)
    results["flat all_reduce"] = values
    distributed.flat_dist_call(values := filled(2), dist.broadcast, (0,))
    results["flat broadcast"] = values


MICRO_BATCHES = ("plain", "no_sync", "disabled", "delay_unscale", "toggled", "two_losses")
AMP = [*itertools.product(("O1", "O2", "O5"), MICRO_BATCHES)]


def run_amp(rank, results):
    """Run two micro-batches and a step of 1.0: the parameters move by the gradients of the joined batch."""
    for level, how in AMP:
        model, optimizer = initialize_quietly(TwoHeads(), lambda p: torch.optim.SGD(p, lr=1.0), level)
        ddp = DDP(model, delay_allreduce=level == "O5")
        before = [p.detach().clone() for p in ampkit.master_params(optimizer)]
        for index, last in enumerate((False, True)):
            toggle = ddp.enable_allreduce if last else ddp.disable_allreduce
            if how == "disabled":
                toggle()
            local = how in ("no_sync", "two_losses") and not last
            with ddp.no_sync() if local else contextlib.nullcontext():
                losses = ddp(batch_of_rank(rank, index))
                if how == "toggled":  # after the forward pass, as Apex allowed
                    toggle()
                for loss in losses if how == "two_losses" and not last else [sum(losses)]:
                    delay = how == "delay_unscale" and not last
                    with ampkit.scale_loss(loss, optimizer, delay_unscale=delay) as scaled:
                        scaled.backward(retain_graph=how == "two_losses")
        optimizer.step()
        names = [name for name, _ in model.named_parameters()]
        moved = [a - b.detach() for a, b in zip(before, ampkit.master_params(optimizer))]
        results[f"amp/{level}/{how}"] = dict(zip(names, moved))
        ampkit.close()


SYNCBN = {
    "plain": {},
    "relu": dict(fuse_relu=True),
    "relu_z": dict(fuse_relu=True),
    "z": {},
    "last": dict(channel_last=True),
}


def run_syncbn(rank, results):
    for case, settings in SYNCBN.items():
        norm = parallel.SyncBatchNorm(3, **settings)
        x, z = (t.chunk(2)[rank].clone().requires_grad_() for t in syncbn_inputs(case))
        output = norm(x, z) if "z" in case else norm(x)
        (output.double() * x.detach().double().cos()).sum().backward()
        results[f"syncbn/{case}"] = [output.detach(), x.grad]
    norm = parallel.SyncBatchNorm(3, process_group=parallel.create_syncbn_process_group(1))
    x = syncbn_inputs("plain")[0].chunk(2)[rank]
    results["syncbn_alone"] = norm(x).detach()
    results["group_of_2"] = dist.get_world_size(parallel.create_syncbn_process_group(2))
    results["group_of_0"] = parallel.create_syncbn_process_group(0)


def syncbn_inputs(case):
    generator = torch.Generator().manual_seed(1)
    shape = (4, 5, 5, 3) if case == "last" else (4, 3, 5, 5)
    return torch.randn(shape, generator=generator) * 2 + 5, torch.randn(shape, generator=generator)


def work(rank):
    results = {}
    runs = run_settings, run_large_gradients, run_other_passes, run_construction, run_lists, run_amp, run_syncbn
    for run in runs:
        run(rank, results)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return results_of_ranks(__file__, tmp_path_factory.mktemp("apex_parallel"))


# Without an average, the second of two losses would sum the sum of the first.
LOSSES = [(name, "two losses of a forward pass") for name in SETTINGS if name != "summed"]


@pytest.mark.parametrize("name, kind", [*itertools.product(SETTINGS, PASSES), *LOSSES])
def test_ddp_averages_gradients_with_every_setting(results, name, kind):
    heads = ("a", "b") if kind.startswith("another part") else BOTH
    wanted = gradients_over_ranks(2 if kind == "accumulated" else 1, heads, average=name != "summed")
    for rank, gradients in enumerate(results):
        if kind == "local":
            model = TwoHeads().double()
            sum(model(batch_of_rank(rank).double())).backward()
            wanted = gradients_by_name(model)
        assert_gradients_close(gradients[f"{name}/{kind}"], wanted)


AVERAGED = [
    *("a copy", "a first pass without the wrapper's forward", "a pass after one that failed", "frozen"),
    *("a pass after unfreezing", "a Reducer", "two forward passes"),
]


@pytest.mark.parametrize("what", AVERAGED)
def test_gradients_are_averaged_by(results, what):
    frozen = {"trunk.weight": None, "trunk.bias": None} if what == "frozen" else {}
    for found in results:
        assert_gradients_close(found[what], gradients_over_ranks(1 + (what == "two forward passes")) | frozen)


def test_ddp_keeps_reduced_buffers_when_asked(results):
    elements = sum(p.numel() for p in TwoHeads().parameters())
    for found in results:
        assert sum(buffer.numel() for buffer in found["kept_buffers/one pass, buffers"]) == elements
        assert found["default/one pass, buffers"] == []
    assert all(torch.equal(a, b) for a, b in zip(*(found["kept_buffers/one pass, buffers"] for found in results)))


def test_ddp_reduces_buckets_that_are_full_at_their_number_of_elements(results):
    assert [{size: found[f"sums/{size}"] for size in BUCKETS} for found in results] == [BUCKETS] * 2


def test_float32_or_predivision_keeps_half_gradients_in_range(results):
    for found in results:
        assert found["large/default"].isinf().all()
        for name in ("fp32", "predivided"):
            gradient = found[f"large/{name}"]
            assert gradient.dtype is torch.float16 and torch.equal(gradient, torch.full_like(gradient, 60000.0))


@pytest.mark.parametrize("reentrant", [False, True])
def test_ddp_takes_checkpoints_and_shared_weights(results, reentrant):
    model = Checkpointed(False).double()
    for rank in range(2):
        (model(batch_of_rank(rank).double().requires_grad_()) / 2).backward()
    for found in results:
        assert_gradients_close(found[f"checkpoint/{reentrant}"], gradients_by_name(model))


def test_ddp_broadcasts_parameters_and_leaves_buffers(results):
    for rank in range(2):
        for name, value in results[rank]["broadcast"].items():
            assert name.startswith("module.")
            local = "running" in name or "batches" in name
            assert torch.equal(value, torch.full_like(value, rank + 1 if local else 1)), name


def test_ddp_broadcasts_masters_of_initialized_models(results):
    for rank in range(2):
        assert results[rank]["weights_are_masters"]
        for found, wanted in zip(results[rank]["masters"], TwoHeads(seed=0).parameters(), strict=True):
            assert torch.equal(found, wanted.detach())  # float32, not rounded on the way


def test_what_apex_refused_is_refused(results):
    words = ("num_allreduce_streams", "allreduce_trigger_params", "before wrapping", "world size 2")
    for found in results:
        assert [word for word, error in zip(words, found["errors"], strict=True) if word not in error] == []


def test_ddp_without_a_process_group_says_what_to_do():
    with pytest.raises(RuntimeError, match="init_process_group"):
        DDP(nn.Linear(1, 1))


# What either rank has at the end: it began with tensors of its rank + 1.
OF_LISTS = {"Reducer of a list": [1.5, 1.5], "flat all_reduce": [1.5, 1.5], "flat broadcast": [1.0]}


@pytest.mark.parametrize("call", OF_LISTS)
def test_lists_of_tensors_are_reduced(results, call):
    for found in results:
        assert [set(tensor.tolist()) for tensor in found[call]] == [{value} for value in OF_LISTS[call]]
        assert call != "Reducer of a list" or [tensor.dtype for tensor in found[call]] == [torch.float32, torch.float16]


@pytest.mark.parametrize("level, how", AMP)
def test_ddp_accumulates_under_initialize_like_one_large_batch(results, level, how):
    wanted = {name: torch.zeros(()) if value is None else value for name, value in gradients_over_ranks(2).items()}
    for rank in range(2):
        assert_gradients_close(results[rank][f"amp/{level}/{how}"], wanted, tolerance=3e-2)
    for name, moved in results[0][f"amp/{level}/{how}"].items():
        assert torch.equal(moved, results[1][f"amp/{level}/{how}"][name])


@pytest.mark.parametrize("case", SYNCBN)
def test_syncbn_equals_float64_batch_norm_over_the_joined_batch(results, case):
    x, z = (t.double() for t in syncbn_inputs(case))
    x.requires_grad_()
    norm = nn.BatchNorm2d(3).double()
    output = norm(x.movedim(-1, 1)).movedim(1, -1) if case == "last" else norm(x)
    output = output + z if "z" in case else output
    output = output.relu() if "relu" in case else output
    (output * x.detach().cos()).sum().backward()
    for i, wanted in enumerate((output.detach(), x.grad)):
        found = torch.cat([results[rank][f"syncbn/{case}"][i] for rank in range(2)])
        assert torch.allclose(found.double(), wanted, atol=1e-4)


def test_syncbn_groups(results):
    for rank in range(2):
        alone = nn.BatchNorm2d(3)(syncbn_inputs("plain")[0].chunk(2)[rank]).detach()
        assert torch.allclose(results[rank]["syncbn_alone"], alone, atol=1e-5)
        assert results[rank]["group_of_2"] == 2 and results[rank]["group_of_0"] is None


# In one process


def test_convert_syncbn_model_gives_apexs_class_and_shares_tensors():
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2, eps=1e-3, momentum=0.2), nn.InstanceNorm2d(2))
    before = model[1]
    converted = parallel.convert_syncbn_model(model)
    assert isinstance(converted[1], parallel.SyncBatchNorm) and type(converted[2]) is nn.InstanceNorm2d
    assert converted[1].weight is before.weight and converted[1].running_mean is before.running_mean
    assert (converted[1].eps, converted[1].momentum) == (1e-3, 0.2)
    root = parallel.convert_syncbn_model(nn.BatchNorm1d(3), channel_last=True)
    assert isinstance(root, parallel.SyncBatchNorm) and root.channel_last
    assert converted(torch.randn(2, 1, 3, 3)).shape == (2, 2, 3, 3)


def test_multiproc_starts_one_process_for_each_rank(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text("import sys\nopen('seen' + sys.argv[-1], 'w').write(' '.join(sys.argv[1:]))\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("PYTHONPATH", str(Path(ampkit.__file__).parents[1]))
    assert multiproc.main([str(script), "--world-size", "2", "-v"]) == 0
    assert [(tmp_path / f"seen{rank}").read_text() for rank in range(2)] == [
        f"--world-size 2 -v --rank {rank}" for rank in range(2)
    ]
    assert (tmp_path / "GPU_1.log").exists()


if __name__ == "__main__":
    as_one_of_two_ranks(work)
