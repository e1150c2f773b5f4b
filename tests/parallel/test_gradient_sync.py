"""Gradients averaged over two gloo processes after every backward pass, judged by float64 arithmetic over both batches."""

import pytest
import torch
import torch.distributed as dist
from helpers import (
    TwoHeads,
    as_one_of_two_ranks,
    assert_gradients_close,
    batch_of_rank,
    gradients_by_name,
    gradients_over_ranks,
    results_of_two_ranks,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampkit
from ampkit.apex.parallel.gradient_sync import GradientSync, SyncSettings, average, broadcast_parameters

# name: settings, with the parameters that trigger by name
SETTINGS = {
    "default": {},
    "small_buckets": dict(bucket_elements=1),
    "at_the_end": dict(overlap=False),
    "fp32": dict(always_fp32=True),
    "predivided": dict(predivide=4.0),
    "summed": dict(average=False),
    "triggers": dict(triggers=("a.weight", "trunk.bias")),
    "kept_buffers": dict(keep_buffers=True),
}


class Synced:
    """A model, and what averages its gradients, as a wrapper would use it."""

    def __init__(self, model, **settings):
        triggers = tuple(model.get_parameter(name) for name in settings.pop("triggers", ()))
        self.model = model
        self.sync = GradientSync(model.parameters(), SyncSettings(triggers=triggers, **settings))

    def __call__(self, *inputs):
        self.sync.prepare(self.model.parameters())
        return self.model(*inputs)

    @property
    def gradients(self):
        return gradients_by_name(self.model)


def passes_with_every_setting(rank, results):
    for name, settings in SETTINGS.items():
        synced = Synced(TwoHeads(), **settings)
        sum(synced(batch_of_rank(rank))).backward()
        results[f"one_pass/{name}"] = synced.gradients
        results[f"buffers/{name}"] = [buffer.clone() for buffer in synced.sync.buffers]

        synced = Synced(TwoHeads(), **settings)  # two losses of one forward pass, each through parts of the model
        a, b = synced(batch_of_rank(rank))
        a.backward(retain_graph=True)
        b.backward()
        results[f"two_losses/{name}"] = synced.gradients

        synced = Synced(TwoHeads(), **settings)  # another part of the model on each rank
        sum(synced(batch_of_rank(rank), "ab"[rank])).backward()
        results[f"different_heads/{name}"] = synced.gradients

        synced = Synced(TwoHeads(), **settings)
        synced.sync.enabled = False
        sum(synced(batch_of_rank(rank, 0))).backward()
        results[f"local/{name}"] = synced.gradients
        results[f"was_local/{name}"] = synced.sync.last_pass_was_local
        synced.sync.enabled = True
        sum(synced(batch_of_rank(rank, 1))).backward()
        results[f"accumulated/{name}"] = synced.gradients

        synced = Synced(TwoHeads(), **settings)
        synced.sync.enabled = False
        sum(synced(batch_of_rank(rank), "a")).backward()  # head a has only local gradients ...
        synced.sync.enabled = True
        sum(synced(batch_of_rank(rank), "b")).backward()  # ... when another pass is reduced
        results[f"local_head/{name}"] = synced.gradients


def gradients_that_leave_float16_when_summed(rank, results):
    for name, settings in {"half": {}, "fp32": dict(always_fp32=True), "predivided": dict(predivide=2.0)}.items():
        synced = Synced(nn.Linear(1, 1, bias=False).half(), **settings)
        (synced(torch.ones(1, 1).half()) * 60000.0).sum().backward()
        results[f"large/{name}"] = synced.model.weight.grad


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head, self.reentrant = nn.Linear(4, 4), nn.Linear(4, 1), reentrant

    def forward(self, x):
        for _ in range(2):  # the layer's weights are shared
            x = checkpoint(lambda x: torch.tanh(self.layer(x)), x, use_reentrant=self.reentrant)
        return self.head(x).sum()


def passes_with_checkpoints(rank, results):
    for reentrant in (False, True):
        synced = Synced(Checkpointed(reentrant))
        synced(batch_of_rank(rank).requires_grad_()).backward()
        results[f"checkpoint/{reentrant}"] = synced.gradients


def passes_after_a_failure_and_after_freezing(rank, results):
    synced = Synced(TwoHeads())
    sum(synced.model(batch_of_rank(rank))).backward()  # a first one without a wrapper's forward pass
    results["without_a_forward_pass"] = synced.gradients
    fails = synced.model.trunk.weight.register_hook(lambda gradient: 1 / 0)  # when the heads have their gradients
    with pytest.raises(ZeroDivisionError):
        sum(synced(batch_of_rank(rank))).backward()
    fails.remove()
    synced.model.zero_grad()
    sum(synced(batch_of_rank(rank))).backward()
    results["after_a_failure"] = synced.gradients

    synced = Synced(TwoHeads())
    synced.model.trunk.requires_grad_(False)
    sum(synced(batch_of_rank(rank))).backward()
    results["frozen"] = synced.gradients
    synced.model.trunk.requires_grad_(True)
    synced.model.zero_grad()
    sum(synced(batch_of_rank(rank))).backward()
    results["unfrozen"] = synced.gradients


def parameters_of_rank_0(rank, results):
    model = TwoHeads(seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = ampkit.initialize(model, optimizer, opt_level="O2", verbosity=0)
    broadcast_parameters(model)
    model(batch_of_rank(rank))
    results["masters"] = [p.detach().clone() for p in ampkit.master_params(optimizer)]
    results["weights"] = [p.detach().clone() for p in model.parameters()]
    ampkit.close()
    values = [torch.full((2,), float(rank)), torch.full((3,), float(rank)).half()]
    average(values)
    results["average"] = values


def work(rank):
    results = {}
    passes_with_every_setting(rank, results)
    gradients_that_leave_float16_when_summed(rank, results)
    passes_with_checkpoints(rank, results)
    passes_after_a_failure_and_after_freezing(rank, results)
    parameters_of_rank_0(rank, results)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return results_of_two_ranks(__file__, tmp_path_factory.mktemp("gradient_sync"))


@pytest.mark.parametrize("name", SETTINGS)
def test_gradients_are_averaged_with_every_setting(results, name):
    average = name != "summed"
    for found in results:
        assert_gradients_close(found[f"one_pass/{name}"], gradients_over_ranks(1, average=average))
        assert_gradients_close(found[f"different_heads/{name}"], gradients_over_ranks(1, ("a", "b"), average))
        assert_gradients_close(found[f"accumulated/{name}"], gradients_over_ranks(2, average=average))
        assert_gradients_close(found[f"local_head/{name}"], gradients_over_ranks(1, average=average))


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "summed"])
def test_two_losses_go_back_through_one_forward_pass(results, name):
    for found in results:
        assert_gradients_close(found[f"two_losses/{name}"], gradients_over_ranks(1))


@pytest.mark.parametrize("name", SETTINGS)
def test_gradients_stay_local_where_nothing_is_reduced(results, name):
    for rank, found in enumerate(results):
        model = TwoHeads().double()
        sum(model(batch_of_rank(rank).double())).backward()
        assert_gradients_close(found[f"local/{name}"], gradients_by_name(model))
        assert found[f"was_local/{name}"] is True


def test_reduced_buffers_are_kept_when_asked(results):
    for found in results:
        assert sum(buffer.numel() for buffer in found["buffers/kept_buffers"]) == sum(
            p.numel() for p in TwoHeads().parameters()
        )
        assert found["buffers/default"] == []
    assert all(torch.equal(a, b) for a, b in zip(*(found["buffers/kept_buffers"] for found in results)))


def test_float32_or_predivision_keeps_half_gradients_in_range(results):
    for found in results:
        assert found["large/half"].isinf().all()
        for name in ("fp32", "predivided"):
            gradient = found[f"large/{name}"]
            assert gradient.dtype is torch.float16 and torch.equal(gradient, torch.full_like(gradient, 60000.0))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_and_shared_weights(results, reentrant):
    model = Checkpointed(False).double()
    for rank in range(2):
        (model(batch_of_rank(rank).double().requires_grad_()) / 2).backward()
    for found in results:
        assert_gradients_close(found[f"checkpoint/{reentrant}"], gradients_by_name(model))


def test_a_backward_pass_that_failed_is_forgotten(results):
    for found in results:
        assert_gradients_close(found["without_a_forward_pass"], gradients_over_ranks(1))
        assert_gradients_close(found["after_a_failure"], gradients_over_ranks(1))


def test_freezing_and_unfreezing_are_noticed(results):
    wanted = gradients_over_ranks(1)
    for found in results:
        assert_gradients_close(found["frozen"], wanted | {"trunk.weight": None, "trunk.bias": None})
        assert_gradients_close(found["unfrozen"], wanted)


def test_every_rank_gets_rank_0s_masters_unrounded(results):
    for found in results:
        for master, weight, wanted in zip(
            found["masters"], found["weights"], TwoHeads(seed=0).parameters(), strict=True
        ):
            assert torch.equal(master, wanted.detach()) and torch.equal(weight, wanted.detach().to(weight.dtype))


def test_average_of_tensors_of_two_dtypes(results):
    for found in results:
        one, two = found["average"]
        assert torch.equal(one, torch.full((2,), 0.5)) and torch.equal(two, torch.full((3,), 0.5).half())


@pytest.mark.parametrize(("settings", "sums"), [({}, 1), ({"bucket_elements": 15}, 3), ({"bucket_elements": 1}, 8)])
def test_buckets_are_full_at_their_number_of_elements(group_of_one, monkeypatch, settings, sums):
    taken, original = [], dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda flat, **kwargs: taken.append(flat) or original(flat, **kwargs))
    synced = Synced(TwoHeads(), **settings)
    sum(synced(batch_of_rank(0))).backward()
    # From the last: 2 + 4 + 3 + 15 (unused, b), 2 + 10 + 5 (a, the bias of the trunk), 20.
    assert len(taken) == sums


if __name__ == "__main__":
    as_one_of_two_ranks(work)
